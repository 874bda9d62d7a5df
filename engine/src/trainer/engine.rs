//! [`Engine`]: the trainer's interface to save and restore states.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tensorcask::session::RankOffer;
use tensorcask::{Blob, Error, ErrorKind, Metadata, Result, StepSelector, TensorView};
use tracing::field::Empty;

use super::arena_writer::{ArenaWriter, StateView, current_session};
use super::attachment::Attachment;
use super::beginning::{join_session, join_timeout};
use super::continuation::Continuation;
use super::inline_encoder::InlineEncoder;
use super::meeting::{Round, exchange_by_store, exchange_offers};
use super::saving::{Outcome, OutstandingSave, RecentSaves, SaveTimer, SavedState, Saving, Waited, check_level};
use crate::arena::copy_plan::Deferred;
use crate::arena::slot::SlotState;
use crate::ipc::messages::{AttachMode, Failure, SaveNote, Until};
use crate::memory::stores::remove_all_epochs;
use crate::os::folders::{EngineFolder, RunFolder};
use crate::os::interruption::Interruption;
use crate::os::lock::Lock;
use crate::os::runtime::{self, QuickRuntime};
use crate::peers::other_hosts::OtherHosts;
use crate::restore::agreement::{agree_on, check_beginnings};
use crate::restore::freshness::{Freshness, LocalMemory, UnreachableTier, check_freshness};
use crate::restore::loadable::loadable;
use crate::restore::request::{RestoreRequest, Wanted};
use crate::restore::restored::{Destination, Loadable, Part, Restored};
use crate::restore::search::{RestorePlaces, find};
use crate::run::host_notes::HostNotes;
use crate::run::known_tiers::KnownTiers;
use crate::run::options::{Encode, EngineOptions};

/// The trainer's side of the engine: one per process and rank. It has its own runtime. Call it from async code only
/// within `spawn_blocking` or on another thread.
///
/// ```no_run
/// use tensorcask::{Dtype, Latest, Metadata, TensorView};
/// use tensorcask_engine::{Engine, EngineOptions};
///
/// let mut engine = Engine::start(EngineOptions::new("s3://bucket/run42"))?;
/// let mut weights = vec![0u8; 4 << 20];
/// let mut step = 0;
/// match engine.restore(Latest) {
///     Ok(found) => {
///         weights.copy_from_slice(&found.tensors[0].data);
///         step = found.step;
///         println!("step {step} from {} in {:.3} s", found.source, found.seconds);
///     }
///     Err(e) if e.kind() == tensorcask::ErrorKind::NotFound => {}
///     Err(e) => return Err(e),
/// }
/// loop {
///     step += 1; // train
///     let state = [TensorView::new("model.w", Dtype::F32, &[1024, 1024], &weights)?];
///     engine.save(step, &state, &[], &Metadata::default())?; // returns after one copy
/// #   break;
/// }
/// engine.finish()?; // all steps are in the store
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug)]
pub struct Engine {
    /// First, because fields are dropped in order: the agent hears first that this trainer ends.
    attachment: Attachment,
    options: EngineOptions,
    run: RunFolder,
    arena: ArenaWriter,
    inline: Option<InlineEncoder>,
    /// Tiers that did not answer at the start.
    unreachable: Vec<UnreachableTier>,
    continuation: Continuation,
    /// Whether the ranks have agreed on a step.
    has_agreed: bool,
    /// Failures up to this generation have been reported to the caller, or belong to an earlier process.
    reported: u64,
    outstanding: OutstandingSave,
    recent: RecentSaves,
    runtime: QuickRuntime,
    /// Last, so that a successor starts only after everything else is dropped.
    _lock: Lock,
}

impl Engine {
    /// Starts: locks this run and rank, opens the arena of a predecessor, checks against the store whether memory is up
    /// to date, and connects to the agent. Starts an agent if none is running. Fails with `Conflict` while another
    /// process trains the run and rank.
    ///
    /// From now on this run writes to the store. A job on another host that was writing to the store fails at its next
    /// save.
    pub fn start(options: EngineOptions) -> Result<Self> {
        Self::begin(options, Interruption::default())
    }

    /// The same with a check that is called regularly while the start and later calls wait: see
    /// [`interrupt_with`](Self::interrupt_with).
    pub fn start_interruptible(options: EngineOptions, check: impl FnMut() -> Result<()> + Send + Sync + 'static) -> Result<Self> {
        Self::begin(options, Interruption::new(check))
    }

    fn begin(options: EngineOptions, interruption: Interruption) -> Result<Self> {
        let spec = options.spec()?;
        let folder = EngineFolder::open(options.folder.as_deref())?;
        let run = folder.run(&spec.key);
        run.create()?;
        let rank = run.rank(options.rank);
        rank.create()?;
        let lock = Lock::acquire(&rank.lock()).map_err(|e| match e.kind() {
            ErrorKind::Conflict => {
                let message = format!("run `{}`, rank {}, is being trained by another process: {}", spec.run, options.rank, e.message());
                Error::new(ErrorKind::Conflict, message).object(rank.lock().display().to_string())
            }
            _ => e,
        })?;
        let mut engine = Self {
            arena: ArenaWriter::new(rank, &options)?,
            runtime: QuickRuntime::new(runtime::build("tensorcask-engine", 2)?),
            attachment: Attachment::new(spec, folder.clone(), &options, interruption),
            options,
            run,
            inline: None,
            unreachable: Vec::new(),
            continuation: Continuation::default(),
            has_agreed: false,
            reported: 0,
            outstanding: OutstandingSave::default(),
            recent: RecentSaves::default(),
            _lock: lock,
        };
        engine.reconcile(&folder)?;
        Ok(engine)
    }

    /// Sets a check that is called regularly while a call waits: a save for a slot, a restore for a store, the others for the agent.
    /// If the check fails, the call fails with its error, and a save saves nothing. Interpreters use it to run signal handlers.
    pub fn interrupt_with(&mut self, check: impl FnMut() -> Result<()> + Send + Sync + 'static) {
        self.attachment.set_interruption(check);
    }

    /// Sets a flag. While it is set, no save waits for a slot: a save that finds none is skipped, whatever the back pressure says. Set
    /// it once this process is about to end: see [`Preemption::flag`](crate::Preemption::flag).
    pub fn skip_waits_while(&mut self, is_ending: Arc<AtomicBool>) {
        self.attachment.set_ending(is_ending);
    }

    /// Runs work until it is done or the caller is interrupted.
    fn block_on<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.attachment.interruption().block_on(self.runtime.get()?, work)
    }

    /// Opens the memory of a predecessor, discards it if it is out of date, and attaches to the agent.
    fn reconcile(&mut self, folder: &EngineFolder) -> Result<()> {
        // Read before the arena is opened: an agent that removes all arenas does so before it changes these notes.
        let known_tiers = KnownTiers::read(&self.run)?;
        self.arena.open(&self.attachment.spec.run)?;
        let local = LocalMemory { known_tiers, has_states: self.arena.newest_complete()? > 0 };
        let check = check_freshness(&self.attachment.spec, &self.run, &local, self.options.store_timeout);
        let report = self.block_on(check)?;
        self.unreachable = report.unreachable;
        let raw = match (&report.freshness, self.arena.arena()) {
            (Freshness::Current, Some(arena)) => arena.headers()?.into_iter().max_by_key(|header| header.word.generation),
            _ => None,
        };
        self.continuation = Continuation::found(report.newest_steps.into_iter().chain(raw.map(|header| header.step)));
        if self.options.overwrite {
            self.continuation.note();
        }
        match report.freshness {
            Freshness::Stale(latest) => {
                self.attachment.mark_stale(latest);
                self.arena.discard_all()?;
            }
            Freshness::Current => self.attachment.trusts_memory = !report.is_empty,
        }
        let is_inline = self.options.encode == Encode::Inline;
        if self.attachment.is_stale() && is_inline {
            // Before the agent attaches, because it would upload these snapshots.
            remove_all_epochs(&self.run)?;
        }
        let mode = if self.attachment.is_stale() { AttachMode::TakeOverAfresh } else { AttachMode::TakeOver };
        let progress = self.attachment.attach(mode)?;
        // The agents must run: without the store, the hosts read from each other where the session begins.
        let limit = join_timeout(self.options.store_timeout, self.unreachable.iter().any(UnreachableTier::is_silent_first));
        self.block_on(join_session(&self.attachment.spec, &self.run, self.options.rank, limit))?;
        // The agent no longer frees memory of this run. If it freed the arena just before, because the run had
        // finished, the store has the states.
        self.arena.close_if_removed();
        let failed = progress.failures.iter().map(|failure| failure.generation).max().unwrap_or(0);
        if is_inline {
            let tiers = self.attachment.spec.stores()?;
            let cap = self.attachment.spec.cap(folder)?;
            let open = InlineEncoder::open(&self.run, &tiers, &self.attachment.spec, cap, self.options.back_pressure);
            let mut encoder = self.block_on(open)?;
            let newest = self.arena.newest_complete()?.max(progress.encoded).max(progress.durable).max(failed);
            self.block_on(encoder.begin_after(newest))?;
            self.attachment.set_last_save(self.block_on(encoder.last_generation())?);
            self.inline = Some(encoder);
        }
        self.arena.raise_generation(progress.encoded.max(progress.durable).max(failed));
        let newest = self.arena.newest_complete()?.max(progress.encoded);
        if !self.attachment.is_stale() {
            self.attachment.set_last_save(newest.max(self.attachment.last_save()));
        }
        // Failures of saves by an earlier process are not reported to this process.
        self.reported = failed.max(newest);
        self.attachment.memory_was_cleared();
        Ok(())
    }

    /// Tells the agent renewed credentials of the stores: those in the environment of this process as it is now, and these settings,
    /// named as in [`EngineOptions::config`]. A job that starts again does this by itself. Fails with `InvalidArgument` if another
    /// setting has changed, such as the endpoint.
    pub fn renew_credentials(&mut self, config: &BTreeMap<String, String>) -> Result<()> {
        self.attachment.renew(config)
    }

    /// Makes room for states of about this many bytes before the first save. Returns at once; a thread takes the memory
    /// in the background. Without this, the first save takes memory as it copies, and is several times slower than
    /// later ones. An arena that the run has from before is kept. If a state turns out larger, its save makes a larger
    /// arena. Does nothing with [`Encode::Inline`].
    ///
    /// Fails with `Storage` if there is too little shared memory.
    ///
    /// ```no_run
    /// # use tensorcask::{Latest, Result};
    /// # use tensorcask_engine::{Engine, EngineOptions};
    /// let mut engine = Engine::start(EngineOptions::new("s3://bucket/run42"))?;
    /// let parameters = 1_000_000_000;
    /// engine.prepare(parameters * 14)?; // bf16 weights, f32 master weights and two moments
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn prepare(&mut self, state_bytes: u64) -> Result<()> {
        match self.options.encode {
            Encode::Agent => self.arena.prepare(&mut self.attachment, state_bytes),
            Encode::Inline => Ok(()),
        }
    }

    /// Saves a state: all tensors, or the shards of this rank. Returns after copying the state into shared memory.
    ///
    /// Fails with `Conflict` if this training has restored nothing, and the step is not newer than those that were stored when the
    /// engine started. Fails with `Fenced` once another job has taken the store over. Fails with `Storage` if there is too little
    /// shared memory for the arena, and, with [`OnAgentLoss::Fail`](crate::OnAgentLoss::Fail), if the agent is gone.
    ///
    /// Tensors may name [changed rows](TensorView::with_changed_rows): those that changed since the call of `save` or
    /// `begin_save` before, even if that save was skipped or failed while it copied. A row that is left out fails no save: the agent compares
    /// all rows of this rank until the job starts again.
    ///
    /// ```no_run
    /// # use tensorcask::{Dtype, Metadata, TensorView};
    /// # use tensorcask_engine::{Engine, EngineOptions};
    /// let mut engine = Engine::start(EngineOptions { keep_base_decoded: false, ..EngineOptions::new("s3://bucket/run42") })?;
    /// let table = vec![0u8; 1000 * 64 * 4];
    /// for (step, rows) in [(1, vec![]), (2, vec![7, 700])] {
    ///     let view = TensorView::new("model.table", Dtype::F32, &[1000, 64], &table)?;
    ///     engine.save(step, &[view.with_changed_rows(&rows)?], &[], &Metadata::default())?;
    /// }
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<Outcome> {
        let span = save_span(&self.attachment.spec.run, step);
        let _entered = span.enter();
        let Some(inline) = &mut self.inline else {
            let saving = self.begin_save(step, tensors, &[], blobs, metadata)?;
            return publish(self, saving, &span);
        };
        let timer = SaveTimer::start(step);
        self.outstanding.check_none()?;
        self.continuation.check_save(step, &self.options.store)?;
        inline.note_rows(tensors);
        check_metadata(metadata)?;
        self.attachment.poll_replies()?;
        let state = StateView { step, tensors, deferred: &[], blobs, metadata };
        let saved = inline.save(self.runtime.get()?, &mut self.attachment, &state)?;
        if saved.is_some() && self.arena.arena().is_some() {
            // Left by an earlier process that did not encode inline; its states are older than this one.
            self.arena.remove()?;
        }
        report_saved(self, timer, saved, &span)
    }

    /// Begins a save with deferred tensors, which a device copies later. Copies the other tensors into shared memory
    /// and provides buffers for the deferred ones ([`Saving::buffers`]). [`finish_save`](Self::finish_save) completes
    /// the save. Only one save at a time may be under way. Not supported with [`Encode::Inline`].
    ///
    /// ```no_run
    /// # use tensorcask::{Dtype, Metadata, Rect};
    /// # use tensorcask_engine::{Deferred, Engine, EngineOptions};
    /// # fn copy_from_device(to: &mut [u8]) {}
    /// # fn wait_for_device() {}
    /// # let mut engine = Engine::start(EngineOptions::new("s3://bucket/run42"))?;
    /// let weights = Deferred::new("model.w", Dtype::F32, &[1024, 1024], Rect::whole(&[1024, 1024]))?;
    /// let mut saving = engine.begin_save(100, &[], &[weights], &[], &Metadata::default())?;
    /// for buffer in saving.buffers()? {
    ///     copy_from_device(buffer); // on a separate stream
    /// }
    /// // forward and backward continue; before the optimizer changes any tensor:
    /// wait_for_device();
    /// engine.finish_save(saving)?;
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn begin_save(
        &mut self,
        step: u64,
        tensors: &[TensorView<'_>],
        deferred: &[Deferred],
        blobs: &[Blob<'_>],
        metadata: &Metadata,
    ) -> Result<Saving> {
        let timer = SaveTimer::start(step);
        if self.attachment.saves_no_more {
            return Err(Error::invalid("this rank has announced that it saves no more"));
        }
        if self.options.encode == Encode::Inline {
            return Err(Error::unsupported("inline encoding needs all tensors in the trainer's memory: use `save`"));
        }
        self.outstanding.check_none()?;
        self.continuation.check_save(step, &self.options.store)?;
        self.arena.note_rows(tensors, deferred);
        check_metadata(metadata)?;
        self.attachment.poll_replies()?;
        let copy = self.arena.copy(&mut self.attachment, &StateView { step, tensors, deferred, blobs, metadata })?;
        let token = self.outstanding.begin();
        Ok(Saving { timer: timer.pause(), copy, token })
    }

    /// Call this before this rank alone repeats a save that failed. Otherwise, a repeated step counts as a return of all
    /// ranks to an older step, and states of this rank no longer match those of the others. Does nothing if the last save
    /// did not fail.
    pub fn forget_failed_save(&mut self) {
        self.arena.attempts.forget_last();
    }

    /// Completes a save after all its buffers have been written.
    pub fn finish_save(&mut self, saving: Saving) -> Result<Outcome> {
        let span = save_span(&self.attachment.spec.run, saving.timer.step);
        let _entered = span.enter();
        self.outstanding.check(&saving.token)?;
        publish(self, saving, &span)
    }

    /// Waits until the last save has reached a level or failed, or the timeout has passed.
    pub fn wait(&mut self, until: Until, timeout: Duration) -> Result<Waited> {
        check_level(&self.options, until)?;
        let last = self.attachment.last_save();
        wait_on(&mut self.attachment, last, until, timeout)
    }

    /// Waits until the save of a step has reached a level or failed, or the timeout has passed. A save whose state was
    /// dropped for a newer one, or discarded, has failed. Fails with `NotFound` if the step is not among the last saves of
    /// this process.
    pub fn wait_for(&mut self, step: u64, until: Until, timeout: Duration) -> Result<Waited> {
        check_level(&self.options, until)?;
        self.recent.note_dropped(&mut self.arena.dropped);
        let save = self.recent.of(step)?;
        match save.failure() {
            Some(failure) => {
                let failures = self.attachment.progress().failures.iter().cloned().chain([failure]).collect();
                Ok(Waited { failed: true, failures, ..Waited::default() })
            }
            None => wait_on(&mut self.attachment, save.generation, until, timeout),
        }
    }

    /// Announces that this rank saves no more. Steps that wait for a save of this rank are given up, on this host and on
    /// others. A later save fails with `InvalidArgument`.
    pub fn end_saves(&mut self) {
        self.attachment.saves_no_more = true;
    }

    /// Ends a finished run: waits until all saves are in the first tier, and frees the memory of the run on this host.
    /// Fails, and frees nothing, if the last save has failed for good: its raw state may be the only copy. The last step of
    /// some ranks fails if other ranks have ended without it.
    pub fn finish(mut self) -> Result<()> {
        self.outstanding.check_none()?;
        self.end_saves();
        loop {
            let waited = self.wait(Until::Durable, FINISH_POLL)?;
            if waited.failed {
                let last = self.attachment.last_save();
                let failure = waited.failures.iter().rfind(|failure| failure.generation == last);
                let why = failure.map_or_else(String::new, |failure| format!("step {}: {}; ", failure.step, failure.message));
                let message = format!("the last save is not in the store: {why}shared memory is kept, as after a crash");
                return Err(Error::new(ErrorKind::Storage, message).object(&self.attachment.spec.run));
            }
            if waited.reached {
                break;
            }
            if let Some(problem) = waited.problem {
                tracing::warn!(run = self.attachment.spec.run, problem, "the last save is not in the store yet");
            }
        }
        self.arena.close();
        self.inline = None;
        self.attachment.finish()
    }

    /// Agrees with the other ranks on the newest step that all can load. Each rank writes a list of its steps to the
    /// first tier, or with [`peers`](EngineOptions::peers) to its agent, and waits for the other lists. `round` must identify
    /// this start of the job (such as a scheduler's job id), so that lists of different starts are not mixed. Discards newer raw
    /// states, which some rank lacks.
    ///
    /// Returns `None` if no step can be loaded by all ranks. Ranks with their own collective can exchange the values of
    /// [`offer`](Self::offer), and call [`agree`](Self::agree) instead.
    pub fn agree_by_store(&mut self, round: &str, timeout: Duration) -> Result<Option<u64>> {
        let offer = self.offer()?;
        let offers = match exchange_by_agents(self, round, &offer, timeout)? {
            Some(offers) => offers,
            None => self.block_on(exchange_by_store(&self.attachment.spec, self.options.rank, round, &offer, timeout))?,
        };
        self.agree(&offers)
    }

    /// Returns the steps that this rank can load, and its attempt, for [`agree`](Self::agree).
    pub fn offer(&mut self) -> Result<RankOffer> {
        if self.arena.arena().is_none() {
            // Another rank that started again may have begun another session.
            self.attachment.refresh()?;
        }
        let found: Vec<Loadable> = self.loadable()?.into_iter().take(MOST_OFFERED).collect();
        let snapshots = found.iter().filter_map(|found| Some((found.step, found.snapshot?))).collect();
        Ok(RankOffer {
            steps: found.into_iter().map(|found| found.step).collect(),
            snapshots,
            after: notes_of(self).and_then(|notes| notes.after),
            attempt: self.arena.attempts.current(current_session(self.arena.arena().map(Arc::as_ref), &self.attachment)?),
        })
    }

    /// Agrees with the other ranks on the newest step that all can load, from the [offers](Self::offer) of all ranks, in
    /// rank order. All ranks call this with the same offers. Returns `None` if no step can be loaded by all ranks.
    ///
    /// Discards newer raw states, which some rank lacks. States that ranks save from now on are never joined with states
    /// from before, even if some rank missed a save before. Until the next save, a restore of the step fails if it finds
    /// only another snapshot of it. Fails with `Conflict` if the ranks of many hosts begin after different entries of the log.
    pub fn agree(&mut self, offers: &[RankOffer]) -> Result<Option<u64>> {
        check_beginnings(offers)?;
        let agreed = agree_on(offers);
        let step = agreed.map(|agreed| agreed.step);
        if let Some(step) = step {
            self.discard_after(step)?;
        }
        self.has_agreed |= offers.len() > 1;
        if let Some(newest) = offers.iter().filter_map(|offer| offer.attempt).max() {
            let session = current_session(self.arena.arena().map(Arc::as_ref), &self.attachment)?;
            self.arena.attempts.begin(session, newest.saturating_add(1), step);
        }
        self.arena.attempts.set_agreed(agreed.filter(|_| offers.len() > 1));
        Ok(step)
    }

    /// Discards raw states of later steps, which other ranks do not have. They are neither restored nor encoded.
    /// Returns their number. Says also that the training continues from this step, for a job that has loaded the step by itself.
    pub fn discard_after(&mut self, step: u64) -> Result<u64> {
        self.continuation.note();
        let Some(arena) = self.arena.arena() else { return Ok(0) };
        let discarded = arena.discard(|found| found > step)?;
        if !discarded.is_empty() {
            let newest = self.arena.newest_complete()?.max(self.attachment.progress().encoded);
            self.attachment.set_last_save(newest);
        }
        for word in discarded.iter().filter(|word| word.state == SlotState::Full) {
            self.recent.note_removed(word.generation, "its state was discarded, because the job returned to an older step");
        }
        Ok(discarded.len() as u64)
    }

    /// Restores a step, or the newest, from the nearest complete copy: the arena, encoded memory, then the tiers in
    /// order. Passes over damaged copies and reports them; for the newest step, an older step may be restored instead.
    /// Fails with `NotFound` if there is no copy.
    ///
    /// Tensors from the arena are borrowed until the next save and contain the part of this rank. Several ranks first
    /// agree on a step ([`agree`](crate::agree)).
    pub fn restore(&self, at: impl Into<StepSelector>) -> Result<Restored<'_>> {
        search(self, RestoreRequest::new(at.into(), Wanted::Everything))
    }

    /// Restores parts of the named tensors, for a job with another number of ranks. Passes over a raw state that does
    /// not have exactly these parts; reads only the needed bytes of a snapshot. Fails with `Template` if a
    /// step is there and has another shape of a tensor, or none of its name.
    pub fn restore_parts(&self, at: impl Into<StepSelector>, parts: &BTreeMap<String, Part>) -> Result<Restored<'_>> {
        search(self, RestoreRequest::new(at.into(), Wanted::Parts(parts)))
    }

    /// Restores all tensors, or the given parts, directly into the caller's memory. The destination provides the
    /// buffers after it has seen the tensors. After an error, the contents of the buffers are invalid.
    ///
    /// ```no_run
    /// # use tensorcask::{Latest, Result};
    /// # use tensorcask_engine::{Destination, Engine, EngineOptions, Restored};
    /// struct Model {
    ///     weights: Vec<u8>,
    ///     wanted: Vec<bool>,
    /// }
    ///
    /// impl Destination for Model {
    ///     fn prepare(&mut self, found: &Restored<'_>) -> Result<()> {
    ///         self.wanted = found.tensors.iter().map(|tensor| tensor.name == "model.w").collect();
    ///         Ok(())
    ///     }
    ///
    ///     fn buffers(&mut self) -> Result<Vec<Option<&mut [u8]>>> {
    ///         let mut weights = Some(self.weights.as_mut_slice());
    ///         Ok(self.wanted.iter().map(|wanted| if *wanted { weights.take() } else { None }).collect())
    ///     }
    /// }
    ///
    /// # let engine = Engine::start(EngineOptions::new("s3://bucket/run42"))?;
    /// let mut model = Model { weights: vec![0; 4 << 20], wanted: Vec::new() };
    /// let found = engine.restore_into(Latest, None, &mut model)?;
    /// println!("step {} from {}", found.step, found.source);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn restore_into(
        &self,
        at: impl Into<StepSelector>,
        parts: Option<&BTreeMap<String, Part>>,
        destination: &mut dyn Destination,
    ) -> Result<Restored<'_>> {
        let wanted = parts.map_or(Wanted::Everything, Wanted::Parts);
        search(self, RestoreRequest::new(at.into(), wanted).into(destination))
    }

    /// Lists the steps that this rank can restore, newest first, each with its nearest place. Reads no tensor.
    pub fn loadable(&self) -> Result<Vec<Loadable>> {
        let found = self.block_on(loadable(&restore_places(self)))?;
        let known = notes_of(self).and_then(|notes| notes.known);
        // An empty list would mean that nothing was ever saved, and the job would train from the start.
        if found.is_empty() && known.is_some_and(|known| known.continued.iter().any(|session| session.newest.is_some())) {
            let message = "the session began while the store did not answer, and hosts that had a whole step in memory do not answer now; \
                           start the job again when the store answers";
            return Err(Error::new(ErrorKind::Storage, message).object(&self.options.store));
        }
        Ok(found)
    }
}

/// Publishes a state whose buffers are all written.
fn publish(engine: &mut Engine, saving: Saving, span: &tracing::Span) -> Result<Outcome> {
    let Saving { timer, copy, token } = saving;
    let timer = timer.resume();
    let saved = copy.map(|copy| engine.arena.publish(timer.step, copy)).transpose()?;
    drop(token);
    report_saved(engine, timer, saved, span)
}

/// Reports a state in shared memory to the agent. `None`: the save was skipped.
fn report_saved(engine: &mut Engine, timer: SaveTimer, saved: Option<SavedState>, span: &tracing::Span) -> Result<Outcome> {
    let step = timer.step;
    let Some(SavedState { generation, time, bytes, dropped }) = saved else {
        return Ok(with_news(&engine.attachment, &mut engine.reported, Outcome { step, stall: timer.stall(), ..Outcome::default() }));
    };
    engine.continuation.note();
    engine.arena.raise_generation(generation);
    engine.attachment.set_last_save(generation);
    engine.recent.note(step, generation);
    engine.recent.note_dropped(&mut engine.arena.dropped);
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let stall_ms = millis(timer.stall());
    let copy_ms = millis(time);
    let time_ms = timer.time_ms;
    let reported = engine.attachment.notify_saved(SaveNote { step, generation, stall_ms, copy_ms, bytes, time_ms });
    reported.map_err(|e| match e.kind() {
        ErrorKind::Fenced => e,
        _ => {
            let message = format!("step {step} is in shared memory, but the agent cannot be notified: {}", e.message());
            Error::new(e.kind(), message).source(e)
        }
    })?;
    let stall = timer.stall();
    let dropped = dropped.map(|dropped| dropped.step);
    span.record("generation", generation).record("bytes_in", bytes).record("copy_ms", copy_ms);
    span.record("stall_ms", millis(stall)).record("queue_depth", engine.attachment.progress().queue_depth);
    let outcome = Outcome { step, generation: Some(generation), stall, copy: time, dropped, ..Outcome::default() };
    Ok(with_news(&engine.attachment, &mut engine.reported, outcome))
}

/// Finds and reads the nearest copy of a state.
fn search<'e>(engine: &'e Engine, request: RestoreRequest<'_>) -> Result<Restored<'e>> {
    let begun = Instant::now();
    let mut request = request.of_agreed(engine.arena.attempts.agreed());
    let places = restore_places(engine);
    if engine.attachment.spec.world > 1 && request.at == StepSelector::Latest && !engine.has_agreed {
        let run = &engine.attachment.spec.run;
        tracing::warn!(
            run,
            "the newest step may be another one on other ranks; call agree on all ranks first, and restore the step that it returns"
        );
    }
    let found = engine.arena.pool().install(|| engine.block_on(find(&places, &mut request)));
    let run = &engine.attachment.spec.run;
    for passed in &request.passed_over {
        tracing::warn!(run, from = %passed.source, step = passed.step, error = %passed.error, "a copy could not be restored");
    }
    let mut restored = found?;
    engine.continuation.note();
    (restored.passed_over, restored.seconds) = (request.passed_over, begun.elapsed().as_secs_f64());
    tracing::info!(run, step = restored.step, from = %restored.source, seconds = restored.seconds, "restored");
    Ok(restored)
}

/// Exchanges the offers through the agents; `None` without peers.
fn exchange_by_agents(engine: &Engine, name: &str, offer: &RankOffer, timeout: Duration) -> Result<Option<Vec<RankOffer>>> {
    let spec = &engine.attachment.spec;
    let (Some(hosts), Some(others)) = (&spec.hosts, OtherHosts::open(spec)?) else { return Ok(None) };
    let run = &engine.run;
    let round = Round { name, rank: engine.options.rank, world: spec.world };
    engine.block_on(exchange_offers(run, hosts, &others, &round, offer, timeout)).map(Some)
}

/// Notes of this host about its session, if the run is on many hosts.
fn notes_of(engine: &Engine) -> Option<HostNotes> {
    engine.attachment.spec.hosts.as_ref().map(|hosts| HostNotes::read(&engine.run, hosts.session))
}

fn restore_places(engine: &Engine) -> RestorePlaces<'_> {
    RestorePlaces {
        spec: &engine.attachment.spec,
        run: &engine.run,
        rank: engine.options.rank,
        arena: engine.arena.arena().map(Arc::as_ref),
        is_stale: engine.attachment.is_stale(),
        is_without_store: notes_of(engine).is_some_and(|notes| notes.is_without_store()),
        unreachable: &engine.unreachable,
        store_timeout: engine.options.store_timeout,
    }
}

/// Adds failures that were not reported before, and the current problem. `reported`: newest generation whose failure was.
fn with_news(attachment: &Attachment, reported: &mut u64, outcome: Outcome) -> Outcome {
    let progress = attachment.progress();
    let failures: Vec<Failure> = progress.failures.iter().filter(|failure| failure.generation > *reported).cloned().collect();
    *reported = failures.iter().map(|failure| failure.generation).max().unwrap_or(*reported);
    for failure in &failures {
        tracing::error!(run = attachment.spec.run, step = failure.step, error = failure.message, "an earlier save failed");
    }
    Outcome { failures, problem: progress.problem.clone(), queue_depth: progress.queue_depth, ..outcome }
}

fn wait_on(attachment: &mut Attachment, generation: u64, until: Until, timeout: Duration) -> Result<Waited> {
    let progress = attachment.wait(generation, until, timeout)?;
    let reached = progress.has_reached(generation, until);
    let failed = progress.has_failed(generation);
    Ok(Waited { reached, failed, failures: progress.failures, problem: progress.problem })
}

fn save_span(run: &str, step: u64) -> tracing::Span {
    tracing::info_span!("save", run, step, generation = Empty, stall_ms = Empty, copy_ms = Empty, bytes_in = Empty, queue_depth = Empty)
}

fn check_metadata(metadata: &Metadata) -> Result<()> {
    match metadata.user.keys().find(|key| key.starts_with("tc.")) {
        Some(key) => Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug()))),
        None => Ok(()),
    }
}

/// Number of steps to offer to other ranks.
const MOST_OFFERED: usize = 10_000;
/// Interval of warnings while a run finishes.
const FINISH_POLL: Duration = Duration::from_secs(10);
