//! Events that change what a host knows, and the actions that follow from them.

use std::collections::BTreeSet;

use tensorcask::SnapshotRecord;
use tensorcask::session::{LeaderState, Leadership};
use tensorcask::wire::{Id, Leader, SessionStep};

/// The log of the store, as a host has read it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LogView {
    /// Number of the last entry; 0 for an empty log.
    pub sequence: u64,
    pub leadership: Leadership,
    /// Committed steps of the session.
    pub committed: BTreeSet<SessionStep>,
}

impl LogView {
    /// The view of a session, from the snapshots in the log.
    pub(crate) fn new<'a>(
        sequence: u64,
        leadership: &Leadership,
        session: Id,
        records: impl IntoIterator<Item = &'a SnapshotRecord>,
    ) -> Self {
        let steps = records.into_iter().map(|record| (record.sequence, record.step));
        Self::from_steps(sequence, leadership, session, steps)
    }

    /// The same from sequence and step of each snapshot.
    pub(crate) fn from_steps(sequence: u64, leadership: &Leadership, session: Id, steps: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let key = |(sequence, step)| Some(SessionStep { attempt: leadership.attempt_of(session, sequence)?, step });
        let committed = steps.into_iter().filter_map(key).collect();
        Self { sequence, leadership: leadership.clone(), committed }
    }

    /// Whether the log has a step, or can no longer admit it.
    pub(crate) fn has_passed(&self, session: Id, key: SessionStep) -> bool {
        self.leadership.of(session).is_some_and(|leading| is_passed(leading, key))
    }
}

/// Whether the log has a step, or can no longer admit it.
pub(super) fn is_passed(leading: &LeaderState, key: SessionStep) -> bool {
    let now = leading.leader.attempt;
    key.attempt < now || (key.attempt == now && leading.newest.is_some_and(|newest| key.step <= newest))
}

/// A step of which receipts are in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SurveyedStep {
    pub key: SessionStep,
    /// Whether the receipts of all ranks are there.
    pub is_complete: bool,
    /// Whether the receipts of all ranks of this host are there.
    pub has_ours: bool,
    /// Whether a rank without a receipt saves no more, so that the step never becomes complete.
    pub is_hopeless: bool,
}

/// A request to the store that a host has at most once under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Request {
    ReadLog,
    Survey,
    /// An entry of the log: `Open` or `Commit`.
    Append,
}

/// An event of a trainer, a clock or a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// The job has started. `known`: the last log entry when its first host started, the same on all hosts.
    Begin { known: u64 },
    /// An agent has replaced one that died. Its session may be under way.
    Rejoin,
    /// All ranks of this host have copied a state into memory.
    Copied(SessionStep),
    /// The parent of a step is fixed for all ranks; `None` for a base.
    ParentFixed { key: SessionStep, parent: Option<Id> },
    /// Casks and receipts of all ranks of this host are durable in the store.
    Uploaded(SessionStep),
    /// The state of a step cannot be uploaded, ever.
    Dropped(SessionStep),
    /// The log was read.
    LogRead(LogView),
    /// The receipts of the session were listed.
    Surveyed(Vec<SurveyedStep>),
    /// This host has opened the log as leader.
    Opened { leader: Leader, view: LogView },
    /// This host has committed a step.
    Committed(LogView),
    /// The log does not admit the entry any more.
    Refused(LogView),
    /// The receipts of a complete step make no snapshot, now and later. The leader gives the step up in the log.
    Impossible(SessionStep),
    /// This host can no longer add to the log under the writer id that it leads with. It takes over from itself.
    Unseated,
    /// A request failed *without effect*; the next tick may send it again. The driver resolves a lost answer of an
    /// append first (log 5.3), or reports [`Unseated`](Self::Unseated): the next opening has a writer id of its own.
    Failed(Request),
    /// The store does not accept the session: another job has written to it since the session began without it.
    NotAccepted,
    /// A monotonic clock of the host, which may run fast, slow or apart from those of others.
    Tick { now_ms: u64 },
}

/// An action that follows from an event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Fix the parent of a step in the store, by put if absent. The driver repeats this and `Upload` until they succeed, or
    /// reports the step as dropped.
    FixParent(SessionStep),
    /// Encode a step against this parent, and upload casks and receipts. Write whole chunks if the parent cannot be used.
    Upload { key: SessionStep, parent: Option<Id> },
    /// Read the new entries of the log.
    ReadLog,
    /// List the receipts of the session for steps that are not committed.
    Survey,
    /// Open the log as this leader, unless it refuses that.
    Open { leader: Leader },
    /// Commit a step of which all receipts are there, unless the log refuses that.
    Commit { leader: Leader, key: SessionStep },
    /// Report a step of this host as durable.
    Durable(SessionStep),
    /// Report that a step will never be committed.
    GiveUp(SessionStep),
    /// Stop: the session has ended. A step that waits may have been committed before.
    Stop,
}
