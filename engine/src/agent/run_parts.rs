//! The parts of a run's state: its ranks, its encoded memory and its tiers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;

use super::run_event::{RankGeneration, TierOrders};
use super::save_log::UploadTimes;
use crate::ipc::messages::Failure;
use crate::memory::tier::UploadState;

/// A rank. Ranks number their saves independently, because one may be killed or skip a save while others are not.
#[derive(Debug, Clone, Default)]
pub(super) struct RankState {
    /// Process id of the trainer while it is connected.
    pub trainer: Option<u32>,
    /// Number of attachments, so that the end of an old connection does not detach a new one.
    pub attachment: u64,
    /// Last session of the trainer.
    pub session: u64,
    /// Whether the trainer has finished the run.
    pub is_finished: bool,
    /// Whether the trainer has announced that it saves no more.
    pub saves_no_more: bool,
    /// Whether the last trainer does not come back.
    pub has_left: bool,
    /// Newest generation that is encoded in memory.
    pub encoded: u64,
    /// Newest generation of which other hosts have copies.
    pub replicated: u64,
    /// Earlier generations of which they have none.
    pub not_replicated: Vec<u64>,
    /// Newest generation whose copies are not watched. Older ones are not watched, either.
    pub replicated_after: u64,
    /// Newest generation that is committed in the first tier.
    pub durable: u64,
    /// Recent failures.
    pub failures: VecDeque<Failure>,
}

impl RankState {
    pub(super) fn add_failure(&mut self, failure: Failure) {
        self.failures.push_back(failure);
        while self.failures.len() > MAX_FAILURES {
            self.failures.pop_front();
        }
    }
}

/// Encoded memory.
#[derive(Debug, Clone, Default)]
pub(super) struct MemoryState {
    /// Newest snapshot of each tier, by URL, if memory is out of date and must be removed before anything is encoded.
    pub outdated: Option<BTreeMap<String, Option<Id>>>,
    pub epoch: u64,
    pub steps: Vec<u64>,
    pub bytes: u64,
    pub chain_depth: u64,
    /// Snapshots that the first tier may lack, in commit order.
    pub committed: VecDeque<CommittedSnapshot>,
    /// The last upload to the first tier.
    pub last_upload: Option<MemoryUpload>,
    /// Epochs whose snapshots can never be stored in the first tier.
    pub unusable: BTreeSet<u64>,
}

impl MemoryState {
    /// Parts of memory that may be removed while this epoch is in use.
    pub(super) fn upload_state(&self, epoch: u64) -> UploadState {
        // Only an upload that has read this store has copied all of the older ones.
        let upload = self.last_upload.as_ref().filter(|upload| upload.sources.last() == Some(&epoch));
        let uploaded = upload.map_or(0, |upload| upload.sequence);
        let has_older = upload.is_some();
        UploadState { uploaded, has_older, unusable: self.unusable.clone() }
    }

    /// Times of the upload that brought a snapshot to the first tier; `None` if the tier may lack it.
    pub(super) fn stored_at(&self, snapshot: &CommittedSnapshot) -> Option<UploadTimes> {
        let MemoryUpload { sources, sequence, times } = self.last_upload.as_ref()?;
        let is_newest = sources.last() == Some(&snapshot.epoch);
        (sources.contains(&snapshot.epoch) && (!is_newest || snapshot.sequence <= *sequence)).then_some(*times)
    }

    /// Adds a snapshot that the first tier may lack, once.
    pub(super) fn add(&mut self, snapshot: CommittedSnapshot) {
        let is_same = |known: &CommittedSnapshot| (known.epoch, known.sequence) == (snapshot.epoch, snapshot.sequence);
        if !self.committed.iter().any(is_same) {
            self.committed.push_back(snapshot);
        }
    }

    /// Takes out the snapshots whose store is gone. `sources`: the stores in memory.
    pub(super) fn take_removed(&mut self, sources: &BTreeSet<u64>) -> VecDeque<CommittedSnapshot> {
        // Newer stores may have been begun since.
        let newest = sources.last().copied().unwrap_or(0);
        let is_kept = |known: &CommittedSnapshot| known.epoch >= newest || sources.contains(&known.epoch);
        let (kept, removed) = std::mem::take(&mut self.committed).into_iter().partition(is_kept);
        self.committed = kept;
        removed
    }
}

/// An upload from memory to the first tier.
#[derive(Debug, Clone)]
pub(super) struct MemoryUpload {
    /// Epochs of its sources. It has copied everything from all but the newest.
    pub sources: BTreeSet<u64>,
    /// Last log entry of the newest source that was copied.
    pub sequence: u64,
    pub times: UploadTimes,
}

/// A snapshot in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CommittedSnapshot {
    pub step: u64,
    pub epoch: u64,
    /// Generation of each rank of this host, in rank order.
    pub generations: Vec<u64>,
    pub sequence: u64,
}

impl CommittedSnapshot {
    /// Generations from the first rank of this host on.
    pub(super) fn by_rank(&self, first: u32) -> Vec<RankGeneration> {
        (first..).zip(&self.generations).map(|(rank, generation)| RankGeneration { rank, generation: *generation }).collect()
    }

    /// Generation of the first rank, which status reports follow.
    pub(super) fn first_generation(&self) -> u64 {
        self.generations.first().copied().unwrap_or(0)
    }
}

/// A tier.
#[derive(Debug, Clone, Default)]
pub(super) struct TierState {
    /// Whether `pending` is known: the tier once had everything, and no upload of its source has failed since.
    pub is_known: bool,
    pub orders: TierOrders,
    pub last_step: Option<u64>,
    /// Number of snapshots that the tier lacks.
    pub pending: u64,
    pub problem: Option<String>,
    /// Problem that the storage does not answer.
    pub silence: Option<String>,
}

impl TierState {
    /// Reason why the tier has not everything.
    pub(super) fn obstacle(&self) -> Option<&String> {
        self.problem.as_ref().or(self.silence.as_ref())
    }

    /// Whether the tier has everything and accepts uploads.
    pub(super) fn is_up_to_date(&self) -> bool {
        self.is_known && !self.orders.take_over && self.pending == 0 && self.obstacle().is_none()
    }
}

/// Number of failures to report to a trainer: as many as the saves that a trainer can wait for.
const MAX_FAILURES: usize = 1024;
