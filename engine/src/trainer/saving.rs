//! A save in the trainer: its timing, its result, and a save with deferred tensors.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorcask::{Error, ErrorKind, Result};

use crate::arena::Arena;
use crate::arena::slot_access::{DroppedState, FilledSlot};
use crate::ipc::messages::{Failure, Until};
use crate::os::clock::now_ms;
use crate::restore::agreement::AgreedStep;
use crate::run::options::EngineOptions;

/// Result of a save. The state survives the end of this process; it is in the store once the agent has committed it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Training step.
    pub step: u64,
    /// Number of the save in the arena; `None` if the save was skipped because no slot was free.
    pub generation: Option<u64>,
    /// Time for which the save stopped the trainer.
    pub stall: Duration,
    /// Time of the copy, part of the stall. With inline encoding: time of the encoding.
    pub copy: Duration,
    /// Step that was dropped for this one, with
    /// [`BackPressure::DropOldestUncommitted`](crate::BackPressure::DropOldestUncommitted).
    pub dropped: Option<u64>,
    /// Earlier saves of this process that have failed for good since the last call.
    pub failures: Vec<Failure>,
    /// Current problem that delays snapshots; the agent retries.
    pub problem: Option<String>,
    /// Number of states that wait to be encoded plus snapshots that wait for the first tier.
    pub queue_depth: u64,
}

/// Result of a wait.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Waited {
    /// Whether the save reached the level in time.
    pub reached: bool,
    /// Whether the save failed for good.
    pub failed: bool,
    /// All recent saves of this trainer that failed for good.
    pub failures: Vec<Failure>,
    /// Current problem that delays snapshots; the agent retries.
    pub problem: Option<String>,
}

/// A save that has begun and whose deferred tensors are still to be written. Dropping it gives the save up; no device
/// may be writing into its buffers then.
#[derive(Debug)]
pub struct Saving {
    pub(crate) timer: SaveTimer,
    /// `None` if the save is skipped.
    pub(crate) copy: Option<PendingCopy>,
    pub(crate) token: SaveToken,
}

impl Saving {
    /// Whether the save is skipped because no slot was free. It then has no buffers, and finishing it saves nothing.
    pub fn is_skipped(&self) -> bool {
        self.copy.is_none()
    }

    /// Buffers in the arena for the deferred tensors, in their order. Tensors tied to others have none.
    pub fn buffers(&mut self) -> Result<Vec<&mut [u8]>> {
        self.copy.as_mut().map_or_else(|| Ok(Vec::new()), |copy| copy.slot.deferred())
    }

    /// The memory that contains the buffers.
    pub fn mapping(&self) -> Option<Mapping> {
        self.copy.as_ref().map(|copy| Mapping(copy.slot.arena().clone()))
    }
}

/// The memory of an arena, to register it with a device (`cudaHostRegister`). The memory stays mapped as long as this
/// value lives.
#[derive(Debug, Clone)]
pub struct Mapping(Arc<Arena>);

impl Mapping {
    /// Address of the first byte.
    pub fn address(&self) -> *const u8 {
        self.0.file().memory().span().0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.file().memory().span().1
    }
}

/// A filled slot that is not published yet.
#[derive(Debug)]
pub(crate) struct PendingCopy {
    pub slot: FilledSlot,
    /// Time of the copy.
    pub time: Duration,
    /// Copied bytes.
    pub bytes: u64,
}

/// A state that was copied or encoded, and is in shared memory.
pub(crate) struct SavedState {
    pub generation: u64,
    /// Time of the copy, or of the encoding.
    pub time: Duration,
    /// Size of the state.
    pub bytes: u64,
    /// State that was dropped for this one.
    pub dropped: Option<DroppedState>,
}

/// Measures for how long a save stops the trainer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SaveTimer {
    pub step: u64,
    /// Start of the call, in milliseconds since 1970.
    pub time_ms: u64,
    resumed: Instant,
    /// Stall before `resumed`.
    earlier: Duration,
}

impl SaveTimer {
    pub(crate) fn start(step: u64) -> Self {
        Self { step, time_ms: now_ms(), resumed: Instant::now(), earlier: Duration::ZERO }
    }

    /// The trainer continues until [`resume`](Self::resume).
    pub(crate) fn pause(self) -> Self {
        Self { earlier: self.stall(), ..self }
    }

    /// The trainer waits for the save again.
    pub(crate) fn resume(self) -> Self {
        Self { resumed: Instant::now(), ..self }
    }

    /// Total time for which the trainer has waited.
    pub(crate) fn stall(&self) -> Duration {
        self.earlier + self.resumed.elapsed()
    }
}

/// Proof that a save belongs to an engine.
#[derive(Debug)]
pub(crate) struct SaveToken(Arc<()>);

/// Ensures that one save at a time is under way.
#[derive(Debug, Default)]
pub(crate) struct OutstandingSave(Weak<()>);

impl OutstandingSave {
    /// Registers a save that begins.
    pub(crate) fn begin(&mut self) -> SaveToken {
        let token = Arc::new(());
        self.0 = Arc::downgrade(&token);
        SaveToken(token)
    }

    /// Fails if a save has begun and not ended.
    pub(crate) fn check_none(&self) -> Result<()> {
        match self.0.upgrade() {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::Conflict, "another save is not finished: finish or drop it first")),
        }
    }

    /// Fails unless the token is the one of the save under way.
    pub(crate) fn check(&self, token: &SaveToken) -> Result<()> {
        match self.0.upgrade() {
            Some(ours) if Arc::ptr_eq(&ours, &token.0) => Ok(()),
            _ => Err(Error::invalid("this save belongs to another engine")),
        }
    }
}

/// The last saves of this process.
#[derive(Debug, Default)]
pub(crate) struct RecentSaves {
    saves: VecDeque<RecentSave>,
}

/// A save of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecentSave {
    pub step: u64,
    /// Number of the save in the arena.
    pub generation: u64,
    /// Why the trainer removed the state before the agent took it; `None` if it did not.
    removed: Option<&'static str>,
}

impl RecentSave {
    /// The failure of a save whose state the trainer has removed.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let Self { step, generation, removed } = *self;
        removed.map(|why| Failure { step, generation, message: why.to_owned() })
    }
}

impl RecentSaves {
    /// Notes a save.
    pub(crate) fn note(&mut self, step: u64, generation: u64) {
        self.saves.push_back(RecentSave { step, generation, removed: None });
        if self.saves.len() > MAX_RECENT {
            self.saves.pop_front();
        }
    }

    /// Notes that these states were dropped for newer ones.
    pub(crate) fn note_dropped(&mut self, dropped: &mut Vec<DroppedState>) {
        for state in dropped.drain(..) {
            self.note_removed(state.generation, "its state was dropped for a newer one, because no slot was free");
        }
    }

    /// Notes that the trainer removed the state of a save before the agent took it: the save will never be encoded.
    pub(crate) fn note_removed(&mut self, generation: u64, why: &'static str) {
        if let Some(save) = self.saves.iter_mut().rfind(|save| save.generation == generation) {
            save.removed = Some(why);
        }
    }

    /// The last save of a step.
    pub(crate) fn of(&self, step: u64) -> Result<RecentSave> {
        let message = || format!("step {step} is not among the last {MAX_RECENT} saves of this process");
        self.saves.iter().rfind(|save| save.step == step).copied().ok_or_else(|| Error::not_found(message()))
    }
}

/// Number of saves to remember.
const MAX_RECENT: usize = 1024;

/// Fails if nothing can reach a level.
pub(crate) fn check_level(options: &EngineOptions, until: Until) -> Result<()> {
    let copies = options.peers.as_ref().map_or(0, |peers| peers.replicas);
    match until == Until::Replicated && copies == 0 {
        true => Err(Error::invalid("no save reaches the level `replicated`: the engine has no `peers`, or these have no replicas")),
        false => Ok(()),
    }
}

/// Counts how often this rank has returned to an older step in a session. All ranks count alike, because all save the
/// same steps.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    now: Attempt,
    /// Before the last save.
    before: Attempt,
    /// The step that all ranks have returned to, until the next save.
    agreed: Option<AgreedStep>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Attempt {
    session: u64,
    attempt: u64,
    last_step: Option<u64>,
}

impl Attempts {
    /// The attempt of a save.
    pub(crate) fn of(&self, session: u64, step: u64) -> u64 {
        match session == self.now.session {
            true => self.now.attempt + u64::from(self.now.last_step.is_some_and(|last| step <= last)),
            false => 0,
        }
    }

    /// Notes that a step was saved, skipped or failed. Other ranks may have saved it.
    pub(crate) fn note(&mut self, session: u64, step: u64) {
        let now = Attempt { session, attempt: self.of(session, step), last_step: Some(step) };
        self.before = std::mem::replace(&mut self.now, now);
        self.agreed = None;
    }

    /// Notes that the last save succeeded or was skipped.
    pub(crate) fn keep_last(&mut self) {
        self.before = self.now;
    }

    /// The attempt of this session, if this rank has saved in it.
    pub(crate) fn current(&self, session: u64) -> Option<u64> {
        (self.now.session == session && self.now.last_step.is_some()).then_some(self.now.attempt)
    }

    /// All ranks return to `step`, or to the start without one, and save in this attempt next.
    pub(crate) fn begin(&mut self, session: u64, attempt: u64, step: Option<u64>) {
        self.now = Attempt { session, attempt, last_step: step };
        self.before = self.now;
    }

    pub(crate) fn set_agreed(&mut self, agreed: Option<AgreedStep>) {
        self.agreed = agreed;
    }

    pub(crate) fn agreed(&self) -> Option<AgreedStep> {
        self.agreed
    }

    /// Forgets the last save if it failed: this rank alone repeats it.
    pub(crate) fn forget_last(&mut self) {
        self.now = self.before;
    }
}

#[cfg(test)]
mod tests {
    use super::{Attempts, MAX_RECENT, RecentSaves, SaveTimer};

    #[test]
    fn recent_saves_are_found_by_step() {
        let mut recent = RecentSaves::default();
        for generation in 1..=MAX_RECENT as u64 + 1 {
            recent.note(generation * 10, generation);
        }
        recent.note(50, 5000);
        assert_eq!(recent.of(50).unwrap().generation, 5000, "the last save of the step");
        assert_eq!(recent.of(40).unwrap().generation, 4);
        assert!(recent.of(10).is_err() && recent.of(7).is_err());
        recent.note_removed(4, "removed");
        assert!(recent.of(40).unwrap().failure().is_some() && recent.of(50).unwrap().failure().is_none());
    }

    /// Rank 0 has saved steps 10 and 20, and rank 1 only step 10.
    #[test]
    fn ranks_that_agree_begin_the_same_attempt() {
        let mut first = Attempts::default();
        let mut second = Attempts::default();
        assert_eq!(first.current(1), None);
        first.note(1, 10);
        second.note(1, 10);
        first.note(1, 20);
        assert_eq!((first.current(1), second.current(1), first.current(2)), (Some(0), Some(0), None));
        for attempts in [&mut first, &mut second] {
            attempts.begin(1, 1, Some(10));
        }
        assert_eq!((first.of(1, 20), second.of(1, 20), first.of(2, 20)), (1, 1, 0));
        first.note(1, 20);
        assert_eq!((first.of(1, 21), first.of(1, 20)), (1, 2));
    }

    #[test]
    fn a_save_that_one_rank_repeats_begins_no_attempt() {
        let mut attempts = Attempts::default();
        attempts.note(1, 10);
        attempts.note(1, 20);
        attempts.forget_last();
        assert_eq!(attempts.of(1, 20), 0);
        attempts.note(1, 20);
        attempts.keep_last();
        attempts.forget_last();
        assert_eq!((attempts.of(1, 20), attempts.of(1, 21)), (1, 0));
    }

    #[test]
    fn only_a_return_to_an_older_step_begins_an_attempt() {
        let mut attempts = Attempts::default();
        let counted: Vec<u64> = [(1, 10), (1, 11), (1, 11), (1, 12), (1, 5), (1, 6), (2, 3), (2, 4)]
            .into_iter()
            .map(|(session, step)| {
                let attempt = attempts.of(session, step);
                attempts.note(session, step);
                attempt
            })
            .collect();
        assert_eq!(counted, [0, 0, 1, 1, 2, 2, 0, 0]);
    }

    #[test]
    fn a_stall_leaves_out_the_time_between_begin_and_finish() {
        let paused = SaveTimer::start(1).pause();
        let earlier = paused.earlier;
        let resumed = paused.resume();
        assert!(resumed.resumed >= paused.resumed);
        assert_eq!(resumed.earlier, earlier);
    }
}
