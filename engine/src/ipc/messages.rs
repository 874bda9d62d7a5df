//! Messages between trainers and the agent. Each request has one reply.
//!
//! The messages name runs, ranks and generations, never memory addresses, so that a later version can carry them
//! between hosts. See `framing` for the byte format.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result};

use crate::run::spec::RunSpec;
use crate::run::status::AgentStatus;

/// A request of a trainer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Request {
    /// A trainer, which holds the lock of its rank, starts, or continues with a new arena or agent.
    Attach(Box<Attach>),
    /// The trainer has published a state in the arena, or in memory if it encodes inline.
    SavedSnapshot { key: String, rank: u32, save: SaveNote },
    /// Wait until a save of a rank is encoded (or durable), or has failed.
    Wait {
        key: String,
        rank: u32,
        generation: u64,
        durable: bool,
        /// Whether copies on other hosts are waited for, if not `durable`.
        #[serde(default)]
        replicated: bool,
        timeout_ms: u64,
        /// Whether the trainer saves no more.
        #[serde(default)]
        is_last: bool,
    },
    /// The trainer ends normally. With `clear`, the run has finished: its memory is freed once the store has
    /// everything.
    Detach { key: String, rank: u32, clear: bool },
    /// Remove the memory of a run that no process trains.
    Remove { key: String },
    /// Report the status.
    Status {},
    /// Report the metrics.
    Metrics {},
    /// Encode and upload everything, then end.
    Stop {},
}

/// Request of a trainer that attaches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attach {
    pub spec: RunSpec,
    pub rank: u32,
    pub mode: AttachMode,
    /// Whether the trainer uses the memory that it found.
    #[serde(default)]
    pub trusts_memory: bool,
    /// Whether the trainer has renewed its credentials since it attached before.
    #[serde(default)]
    pub has_new_credentials: bool,
    /// Newest session that the trainer knows.
    pub session: u64,
    /// Newest snapshot of each tier when the trainer looked, by URL.
    pub latest: BTreeMap<String, Option<Id>>,
}

/// Mode of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AttachMode {
    /// Take the store over; memory is up to date.
    TakeOver,
    /// Take the store over; memory is out of date and must be removed.
    TakeOverAfresh,
    /// Continue; this trainer has taken the store over before.
    #[serde(rename = "go_on")]
    Continue,
}

/// A save, as measured by the trainer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct SaveNote {
    pub step: u64,
    pub generation: u64,
    pub stall_ms: f64,
    pub copy_ms: f64,
    pub bytes: u64,
    /// Start of the call, in milliseconds since 1970.
    pub time_ms: u64,
}

/// A reply of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Reply {
    /// To all requests about a rank of a run.
    Progress(Progress),
    /// To `status`, `stop` and `remove`.
    Status(Box<AgentStatus>),
    /// To `metrics`: their text.
    Metrics { text: String },
    /// The request failed.
    Failed { kind: String, message: String },
}

/// Progress of the saves of a rank.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Newest generation that is encoded in memory.
    pub encoded: u64,
    /// Newest generation of which other hosts have copies.
    #[serde(default)]
    pub replicated: u64,
    /// Earlier generations of which other hosts have no copies.
    #[serde(default)]
    pub not_replicated: Vec<u64>,
    /// Newest generation whose copies are not watched. Older ones are not watched, either.
    #[serde(default)]
    pub replicated_after: u64,
    /// Newest generation that is committed in the first tier.
    pub durable: u64,
    /// Recent saves that failed for good. Such a generation is neither encoded nor durable, even if a newer one is.
    pub failures: Vec<Failure>,
    /// Current session: number of starts of the job. Saves of several ranks in one session belong together.
    pub session: u64,
    /// Epoch of the memory tier whose snapshots cannot be stored. A trainer that encodes inline must begin a new epoch.
    pub unusable_epoch: Option<u64>,
    /// Reason why the agent stopped the run.
    pub stopped: Option<String>,
    /// Current problem, which the agent retries.
    pub problem: Option<String>,
    /// Number of states that wait to be encoded plus snapshots that wait for the first tier.
    pub queue_depth: u64,
}

/// A save that failed for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Training step.
    pub step: u64,
    /// Number of the save in the arena.
    pub generation: u64,
    /// Reason of the failure.
    pub message: String,
}

/// Level that a save must reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Copied into this host's memory. A save has reached this level when it returns.
    Copied,
    /// Encoded in this host's memory.
    Encoded,
    /// As many hosts as [`replicas`](crate::Peers::replicas) tells have a checked copy of this host's part, or it is durable.
    /// The loss of this host loses nothing then. Only with [`peers`](crate::EngineOptions::peers).
    Replicated,
    /// Committed in the first tier.
    Durable,
}

impl Until {
    /// Parses `copied`, `encoded`, `replicated` or `durable`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "copied" => Ok(Self::Copied),
            "encoded" => Ok(Self::Encoded),
            "replicated" => Ok(Self::Replicated),
            "durable" => Ok(Self::Durable),
            _ => Err(Error::invalid(format!("unknown level `{}`: use copied, encoded, replicated or durable", name.escape_debug()))),
        }
    }
}

impl Progress {
    /// Whether a save failed for good.
    pub(crate) fn has_failed(&self, generation: u64) -> bool {
        self.failures.iter().any(|failure| failure.generation == generation)
    }

    /// Whether a save has reached a stage.
    pub(crate) fn has_reached(&self, generation: u64, until: Until) -> bool {
        let has_copies = || {
            let is_known = generation > self.replicated_after && generation <= self.replicated;
            is_known && !self.not_replicated.contains(&generation)
        };
        let is_reached = match until {
            Until::Copied => true,
            Until::Encoded => self.encoded >= generation,
            Until::Replicated => self.durable >= generation || has_copies(),
            Until::Durable => self.durable >= generation,
        };
        is_reached && !self.has_failed(generation)
    }
}

impl Reply {
    /// Builds the reply for an error.
    pub(crate) fn failed(error: &Error) -> Self {
        Self::Failed { kind: error.kind().name().to_owned(), message: error.to_string() }
    }

    /// Extracts the progress, or the error.
    pub(crate) fn progress(self) -> Result<Progress> {
        match self {
            Self::Progress(progress) => Ok(progress),
            Self::Failed { kind, message } => Err(Error::new(kind_of(&kind), format!("the agent says: {message}"))),
            Self::Status(_) | Self::Metrics { .. } => Err(Error::corrupt("the agent sent a reply to another request")),
        }
    }
}

fn kind_of(name: &str) -> ErrorKind {
    use ErrorKind::*;
    let kinds =
        [Corrupt, NotFound, Conflict, Fenced, OutcomeUnknown, InvalidArgument, Template, Unsupported, LimitExceeded, UnsafeStore, Storage];
    kinds.into_iter().find(|kind| kind.name() == name).unwrap_or(Storage)
}

#[cfg(test)]
mod tests {
    use super::{Failure, Progress, Until};

    #[test]
    fn a_save_without_copies_is_not_replicated_although_a_newer_one_is() {
        let mut progress =
            Progress { encoded: 9, replicated: 8, not_replicated: vec![6], replicated_after: 4, durable: 2, ..Progress::default() };
        let reached = |progress: &Progress| (1..=9).filter(|save| progress.has_reached(*save, Until::Replicated)).collect::<Vec<_>>();
        assert_eq!(reached(&progress), [1, 2, 5, 7, 8]);
        progress.durable = 6;
        assert_eq!(reached(&progress), [1, 2, 3, 4, 5, 6, 7, 8]);
        progress.failures = vec![Failure { step: 1, generation: 5, message: String::new() }];
        assert_eq!(reached(&progress), [1, 2, 3, 4, 6, 7, 8]);
    }
}
