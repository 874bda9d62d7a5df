//! The trainer's use of its arena: opening it, making a larger one, waiting for a slot, and copying a state.

use std::sync::Arc;
use std::time::Instant;

use tensorcask::{Blob, Error, ErrorKind, Metadata, Result, TensorView};

use super::attachment::{Attachment, Pause};
use super::saving::{Attempts, PendingCopy, SavedState};
use crate::arena::Arena;
use crate::arena::copy_plan::{CopyPlan, Deferred, shards_of};
use crate::arena::population::Population;
use crate::arena::slot::{Claimable, choose_slot};
use crate::arena::slot_access::{ClaimedSlot, DroppedState};
use crate::ipc::messages::AttachMode;
use crate::os::files::remove_file;
use crate::os::folders::RankFolder;
use crate::rows::journal::RowJournal;
use crate::run::options::{BackPressure, EngineOptions};

/// A state to save.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateView<'a> {
    pub step: u64,
    pub tensors: &'a [TensorView<'a>],
    pub deferred: &'a [Deferred],
    pub blobs: &'a [Blob<'a>],
    pub metadata: &'a Metadata,
}

/// The arena of a rank, and the threads that copy into it.
#[derive(Debug)]
pub(crate) struct ArenaWriter {
    folder: RankFolder,
    /// Dropped before the arena that it works on.
    population: Option<Population>,
    arena: Option<Arc<Arena>>,
    /// Newest generation of this rank. A new arena continues the count.
    generation: u64,
    pub attempts: Attempts,
    /// States that were dropped, also for saves that failed, and that the engine has not noted yet.
    pub dropped: Vec<DroppedState>,
    /// Changed rows of the saves that the agent has not encoded.
    rows: RowJournal,
    slots: u32,
    world: u32,
    back_pressure: BackPressure,
    pool: rayon::ThreadPool,
}

impl ArenaWriter {
    pub(crate) fn new(folder: RankFolder, options: &EngineOptions) -> Result<Self> {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(options.copy_threads).thread_name(|n| format!("tensorcask-copy-{n}"));
        let pool = threads.build().map_err(|e| Error::new(ErrorKind::Storage, format!("cannot start the copy threads: {e}")))?;
        let slots = options.slots;
        let world = options.world;
        let back_pressure = options.back_pressure;
        let attempts = Attempts::default();
        let dropped = Vec::new();
        let rows = RowJournal::default();
        Ok(Self { folder, population: None, arena: None, generation: 0, attempts, dropped, rows, slots, world, back_pressure, pool })
    }

    /// Opens the arena of a predecessor, if there is one. Abandons its incomplete copy. Removes an arena only if it is proven to be
    /// damaged. Fails, and removes nothing, if it cannot be opened for another reason: it may hold the only copy of a save.
    pub(crate) fn open(&mut self, run: &str) -> Result<()> {
        remove_file(&self.folder.new_arena())?;
        let path = self.folder.arena();
        let opened = Arena::open(&path).and_then(|arena| {
            let damaged = arena.drop_damaged_slots()?;
            if damaged > 0 {
                tracing::warn!(run, damaged, "slots of the existing arena are damaged; their states are not used");
            }
            let incomplete = arena.abandon_incomplete()?;
            if incomplete > 0 {
                tracing::warn!(run, incomplete, "the previous trainer died during a save; its incomplete copy is not used");
            }
            Ok(arena)
        });
        match opened {
            Ok(arena) => self.arena = Some(Arc::new(arena)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(run, %error, "the existing arena is damaged; creating another");
                remove_file(&path)?;
            }
            Err(error) => {
                let message = format!(
                    "the shared memory of an earlier process may hold the newest save, and cannot be opened: {}. Nothing was removed. Start \
                     again once this is solved, or remove the file to do without that save",
                    error.message()
                );
                return Err(Error::new(error.kind(), message).object(path.display().to_string()).source(error));
            }
        }
        Ok(())
    }

    pub(crate) fn arena(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref()
    }

    /// Threads that copy.
    pub(crate) fn pool(&self) -> &rayon::ThreadPool {
        &self.pool
    }

    /// Closes the arena without removing it.
    pub(crate) fn close(&mut self) {
        (self.population, self.arena) = (None, None);
    }

    /// Closes the arena if its file has been removed.
    pub(crate) fn close_if_removed(&mut self) {
        if self.arena.as_ref().is_some_and(|arena| !arena.file().is_in_place()) {
            self.close();
        }
    }

    /// Removes the arena.
    pub(crate) fn remove(&mut self) -> Result<()> {
        self.newest_complete()?;
        self.close();
        remove_file(&self.folder.arena())
    }

    /// Discards all states, which are out of date. Keeps the arena for the next save, because its memory is present
    /// already, unless the agent is still reading it.
    pub(crate) fn discard_all(&mut self) -> Result<()> {
        self.newest_complete()?;
        match self.arena.as_ref().map(|arena| arena.reset()) {
            Some(Ok(true)) => Ok(()),
            _ => self.remove(),
        }
    }

    /// Makes an arena for states of about this size, if there is none, and takes its memory in the background.
    pub(crate) fn prepare(&mut self, attachment: &mut Attachment, state_bytes: u64) -> Result<()> {
        if self.arena.is_none() {
            let bytes = usize::try_from(state_bytes).map_err(|_| Error::limit("the state has more bytes than this machine can address"))?;
            // Some room for the description. A state that does not fit gets another arena.
            self.create(attachment, bytes.saturating_add(bytes / 64).saturating_add(1 << 20))?;
        }
        self.populate();
        Ok(())
    }

    /// Takes the memory of the arena in the background.
    pub(crate) fn populate(&mut self) {
        if let (Some(arena), None) = (&self.arena, &self.population) {
            match Population::start(arena) {
                Ok(population) => self.population = Some(population),
                Err(error) => tracing::warn!(%error, "saves take the memory of the arena themselves"),
            }
        }
    }

    pub(crate) fn raise_generation(&mut self, generation: u64) {
        self.generation = self.generation.max(generation);
    }

    /// Generation of the newest complete state; 0 if there is none.
    pub(crate) fn newest_complete(&mut self) -> Result<u64> {
        let words = self.arena.as_ref().map(|arena| arena.words()).transpose()?.unwrap_or_default();
        self.raise_generation(words.iter().map(|word| word.generation).max().unwrap_or(0));
        Ok(words.iter().filter(|word| word.state.is_complete()).map(|word| word.generation).max().unwrap_or(0))
    }

    /// Notes the changed rows of a save that begins.
    pub(crate) fn note_rows(&mut self, tensors: &[TensorView<'_>], deferred: &[Deferred]) {
        self.rows.note(shards_of(tensors, deferred));
    }

    /// Copies a state into a slot; `None` if the save is skipped.
    pub(crate) fn copy(&mut self, attachment: &mut Attachment, state: &StateView<'_>) -> Result<Option<PendingCopy>> {
        let copied = self.copy_once(attachment, state);
        // A skipped or failed save counts, too: other ranks may have saved the step.
        let current = current_session(self.arena.as_deref(), attachment)?;
        self.attempts.note(current, state.step);
        if copied.is_ok() {
            self.attempts.keep_last();
        }
        copied
    }

    fn copy_once(&mut self, attachment: &mut Attachment, state: &StateView<'_>) -> Result<Option<PendingCopy>> {
        let mut has_grown = false;
        loop {
            // Rows count from the newest encoded save, so they are named once there is a slot.
            let has_slot = self.arena.is_none() || self.wait_for_slot(attachment)?;
            let encoded = newest_encoded(self.arena.as_deref(), attachment)?;
            let claims = self.rows.claims(shards_of(state.tensors, state.deferred), encoded);
            if !has_slot {
                return Ok(None);
            }
            let plan = CopyPlan::new(state.step, state.tensors, state.deferred, state.blobs, state.metadata)?.name_rows(&claims)?;
            let fits = self.arena.as_ref().is_some_and(|arena| arena.file().fits(plan.data_bytes));
            if !fits && !self.replace_arena(attachment, plan.slot_bytes())? {
                return Ok(None);
            }
            let Some(arena) = &self.arena else { return Err(Error::invalid("no arena")) };
            // The agent may have taken the full slot that would have been dropped.
            let Some(claimed) = ClaimedSlot::claim(arena, self.claimable())? else { continue };
            self.dropped.extend(claimed.dropped);
            let bytes = plan.copied_bytes;
            let needed = plan.slot_bytes();
            let begun = Instant::now();
            let current = arena.session()?;
            let attempt = self.attempts.of(current, state.step);
            match self.pool.install(|| claimed.fill(plan, current, attempt)) {
                Ok(slot) => {
                    let time = begun.elapsed();
                    // Not before the copy, which needs the processors and the memory for itself.
                    self.populate();
                    return Ok(Some(PendingCopy { slot, time, bytes }));
                }
                // The description has grown.
                Err(e) if e.kind() == ErrorKind::LimitExceeded && !has_grown => {
                    has_grown = true;
                    if !self.replace_arena(attachment, needed.saturating_mul(2))? {
                        return Ok(None);
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Publishes a copied state.
    pub(crate) fn publish(&mut self, step: u64, copy: PendingCopy) -> Result<SavedState> {
        let begun = Instant::now();
        let dropped = copy.slot.dropped();
        let slot = copy.slot;
        let world = self.world;
        let generation = self.pool.install(|| slot.publish(step, world))?;
        self.rows.on_saved(generation);
        Ok(SavedState { generation, time: copy.time + begun.elapsed(), bytes: copy.bytes, dropped })
    }

    fn claimable(&self) -> Claimable {
        match self.back_pressure {
            BackPressure::DropOldestUncommitted => Claimable::FreeOrFull,
            BackPressure::Wait | BackPressure::Skip => Claimable::Free,
        }
    }

    /// Waits for a slot, unless the policy is to skip; returns whether one can be claimed.
    fn wait_for_slot(&mut self, attachment: &mut Attachment) -> Result<bool> {
        let mut pause = Pause::new();
        loop {
            let words = self.arena.as_ref().map(|arena| arena.words()).transpose()?.unwrap_or_default();
            if choose_slot(&words, self.claimable()).is_some() {
                return Ok(true);
            }
            if self.back_pressure == BackPressure::Skip || attachment.is_ending() {
                attachment.notify_waiting()?;
                return Ok(false);
            }
            attachment.pause(&mut pause)?;
        }
    }

    /// Replaces the arena by one with slots of this size, once the agent has encoded its states. Returns `false` if the
    /// policy is to skip instead of waiting.
    fn replace_arena(&mut self, attachment: &mut Attachment, slot_bytes: usize) -> Result<bool> {
        let mut pause = Pause::new();
        while let Some(arena) = &self.arena {
            if !arena.words()?.iter().any(|word| word.state.is_pending()) {
                self.newest_complete()?;
                self.close();
                break;
            }
            if self.back_pressure == BackPressure::Skip || attachment.is_ending() {
                attachment.notify_waiting()?;
                return Ok(false);
            }
            attachment.pause(&mut pause)?;
        }
        // The new arena needs the memory of the old one, so the agent must unmap it first.
        remove_file(&self.folder.arena())?;
        attachment.attach(AttachMode::Continue)?;
        self.create(attachment, slot_bytes)?;
        Ok(true)
    }

    /// Creates an arena, where there is none, and tells the agent.
    fn create(&mut self, attachment: &mut Attachment, slot_bytes: usize) -> Result<()> {
        let arena = Arena::create(&self.folder.arena(), self.slots, slot_bytes, self.generation)?;
        arena.raise_session(attachment.progress().session)?;
        self.arena = Some(Arc::new(arena));
        attachment.attach(AttachMode::Continue)?;
        Ok(())
    }
}

/// The session in which a rank saves next.
pub(crate) fn current_session(arena: Option<&Arena>, attachment: &Attachment) -> Result<u64> {
    arena.map_or(Ok(attachment.progress().session), Arena::session)
}

/// Newest generation of a rank that the agent is known to have encoded.
fn newest_encoded(arena: Option<&Arena>, attachment: &Attachment) -> Result<u64> {
    let in_arena = arena.map_or(Ok(0), Arena::encoded)?;
    Ok(in_arena.max(attachment.progress().encoded))
}
