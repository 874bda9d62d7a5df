//! Events that change the state of a run, and the actions that follow from them.

use std::collections::{BTreeMap, BTreeSet};

use tensorcask::wire::Id;

use super::save_log::{Commit, Encoding, UploadTimes};
use crate::ipc::messages::{AttachMode, SaveNote};
use crate::run::status::{LeaderStatus, SaveStatus};

/// An event of a trainer, the encoder or an uploader.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Event {
    /// The agent has found the arena of a rank whose trainer is not connected.
    Adopted { rank: u32, arena: Option<ArenaSummary> },
    /// A trainer has attached.
    Attached(Attachment),
    /// The connection of an attachment has ended.
    Detached { rank: u32, attachment: u64 },
    /// A detached trainer does not come back: it has left by itself, or its process has ended.
    Left { rank: u32, attachment: u64 },
    /// A trainer has published a state.
    SavedSnapshot { rank: u32, note: SaveNote, queue_depth: u64 },
    /// A trainer waits for saves: it no longer restores, so old snapshots may be removed.
    TrainerWaits,
    /// A trainer waits for its last save.
    SavesEnded { rank: u32 },
    /// Many hosts: the log was read.
    LeaderRead(Option<LeaderStatus>),
    /// Many hosts: other hosts have copies of a step of this host.
    Replicated(ReplicatedSaves),
    /// Many hosts: the other hosts have been told that the ranks of this host save no more.
    EndNoted,
    /// A trainer has finished the run. `None`: it did so in an earlier agent.
    Finished { rank: Option<u32> },
    /// The encoder has removed out-of-date memory.
    MemoryCleared,
    /// The contents of memory have changed.
    MemoryChanged(MemoryContents),
    /// The encoder has committed a snapshot in memory.
    Encoded(EncodedSave),
    /// A save failed for good.
    Failed { generations: Vec<RankGeneration>, step: u64, message: String },
    /// The encoder has a problem, or none any more.
    EncoderProblem(Option<String>),
    /// The snapshots of a store in memory cannot be stored. `lost`: those that did not reach the first tier; `None` if that is unknown.
    MemoryUnusable { epoch: u64, lost: Option<LostSnapshots>, why: String },
    /// An uploader has taken a tier over, following these orders.
    TierTakenOver { tier: usize, orders: TierOrders, latest: Option<Commit> },
    /// A tier has all snapshots of its source.
    Uploaded(Upload),
    /// Many hosts: a step that this host has uploaded will never be committed.
    GivenUp { generations: Vec<RankGeneration>, sequence: u64, step: u64, message: String },
    /// The sources of a tier have no snapshots. `sources`: their epochs.
    NothingToUpload { tier: usize, sources: BTreeSet<u64> },
    /// An upload failed; the uploader will try again.
    UploadFailed { tier: usize, message: String },
    /// The storage of a tier has not answered for some time (`message`), or answers again.
    TierSilent { tier: usize, message: Option<String> },
    /// A task of the agent has failed by a fault of its own, and was started again.
    TaskFailed { message: String },
    /// Another job has taken the first tier over since the uploader read these orders.
    Fenced { orders: TierOrders, why: String },
}

impl Event {
    /// Whether the run gets further.
    pub(super) fn is_progress(&self) -> bool {
        match self {
            Self::Attached(_) | Self::SavedSnapshot { .. } | Self::Encoded(_) => true,
            Self::Uploaded(upload) => upload.copied > 0,
            _ => false,
        }
    }
}

/// An action that follows from an event.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    WakeEncoder,
    WakeUploader(usize),
    /// Raise the session in the arena of a rank.
    RaiseSession {
        rank: u32,
        session: u64,
    },
    /// Remove the out-of-date arena of a rank.
    RemoveArena {
        rank: u32,
    },
    /// Note for later agents that the run continues.
    MarkActive,
    /// Note for later agents that the run has finished.
    MarkFinished,
    /// Many hosts: note for later agents whether a rank saves no more.
    NoteEnd {
        rank: u32,
        has_ended: bool,
    },
    /// Note the saves for later agents.
    NoteSaves,
    /// Drop the part of the last snapshot that was sent ahead to the first tier.
    DropAhead,
    /// Log a committed save.
    LogCommit(SaveStatus),
    /// Log a failed save, and note the saves for later agents.
    LogFailure {
        step: u64,
        message: String,
    },
    /// Log a problem of the encoder (`None`) or of an uploader.
    LogProblem {
        tier: Option<usize>,
        message: String,
    },
    /// Log that another job has taken the store over.
    LogStopped {
        why: String,
    },
}

/// A trainer that attaches.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Attachment {
    pub rank: u32,
    pub pid: u32,
    pub mode: AttachMode,
    /// Newest session that the trainer knows.
    pub session: u64,
    pub arena: Option<ArenaSummary>,
    /// Newest snapshot of each tier, by URL.
    pub latest: BTreeMap<String, Option<Id>>,
}

/// The parts of an arena that matter when its rank attaches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ArenaSummary {
    pub session: u64,
    /// Newest generation that is encoded.
    pub encoded: u64,
    /// Saves that failed for good.
    pub failed: Vec<FailedState>,
}

/// A save that failed for good, as found in an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FailedState {
    pub generation: u64,
    pub step: u64,
}

/// Contents of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MemoryContents {
    pub epoch: u64,
    pub steps: Vec<u64>,
    pub bytes: u64,
    pub chain_depth: u64,
}

/// A snapshot that the encoder has committed in memory.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EncodedSave {
    pub step: u64,
    /// Generation of each rank of this host, in rank order.
    pub generations: Vec<u64>,
    pub epoch: u64,
    pub sequence: u64,
    pub encoding: Encoding,
}

/// Saves of this host of which other hosts have copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReplicatedSaves {
    /// Newest such step.
    pub step: u64,
    /// Its saves.
    pub newest: Vec<RankGeneration>,
    /// Older saves without copies.
    pub missing: Vec<RankGeneration>,
    /// Newest save of each rank whose copies are not watched. Older ones are not watched, either.
    pub unwatched: Vec<RankGeneration>,
}

/// A save of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankGeneration {
    pub rank: u32,
    pub generation: u64,
}

/// Snapshots that did not reach the first tier, and never will.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LostSnapshots {
    pub snapshots: Vec<LostSnapshot>,
    /// Last log entry in memory that was read for this. Later snapshots are lost, too.
    pub read: u64,
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LostSnapshot {
    pub id: Id,
    pub sequence: u64,
    pub step: u64,
}

/// Orders of trainers for an uploader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct TierOrders {
    /// Whether to take the tier over from any other writer.
    pub take_over: bool,
    /// Number of takeovers that trainers have ordered.
    pub count: u64,
}

/// Result of an upload.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Upload {
    pub tier: usize,
    /// Newest encoded generation of each rank before the upload read its source.
    pub encoded: BTreeMap<u32, u64>,
    /// Epoch of the source, if it is a store in memory.
    pub epoch: u64,
    /// Epochs of all sources.
    pub sources: BTreeSet<u64>,
    /// Last log entry of the source that was copied.
    pub sequence: u64,
    /// Step of that entry.
    pub step: Option<u64>,
    /// Number of pending snapshots before the upload.
    pub pending_before: u64,
    /// Number of snapshots that were copied.
    pub copied: u64,
    pub times: UploadTimes,
}
