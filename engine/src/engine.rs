//! What a trainer holds: saves states into the arena, and gets them back.

use std::collections::BTreeMap;
use std::process::Child;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorcask::wire::Id;
use tensorcask::{Blob, Error, ErrorKind, Metadata, Result, TensorView};
use tokio::runtime::Runtime;
use tracing::field::Empty;

use crate::agreement::agree;
use crate::arena::{Arena, Filled};
use crate::connection::{Connection, Starter};
use crate::image::{Deferred, Plan};
use crate::now_ms;
use crate::options::{BackPressure, Encode, EngineOptions, OnAgentLoss, RunSpec};
use crate::place::{Lock, Place, RankPlace, RunPlace, remove_file};
use crate::protocol::{Attach, Failure, Mode, Progress, Reply, Request, SaveNote};
use crate::restore::{Known, Unasked, look};
use crate::seen::Seen;
use crate::slot::State;
use crate::tier::{MemoryTier, Sent, clear, is_full};
use crate::{MAX_BLOCKING, inline};

/// Between looks at the arena, while all slots are taken.
const POLL: Duration = Duration::from_millis(1);
/// Between looks at the agent, meanwhile.
const ASK: Duration = Duration::from_secs(1);
/// How long a trainer waits for an agent that is about to end.
const DRAIN: Duration = Duration::from_secs(60);

/// The trainer's side: one per process and rank. It has a runtime of its own: within another's (`async fn`), it belongs into
/// `spawn_blocking`, or a thread.
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
/// engine.finish()?; // everything is in the store
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug)]
pub struct Engine {
    pub(crate) options: EngineOptions,
    pub(crate) spec: RunSpec,
    place: Place,
    pub(crate) run: RunPlace,
    rank: RankPlace,
    pub(crate) arena: Option<Arc<Arena>>,
    /// What was in memory when this engine began is older than the store.
    pub(crate) stale: bool,
    /// Tiers that could not be asked whether it is.
    pub(crate) unasked: Vec<Unasked>,
    /// The newest snapshot of each tier then, if it was.
    latest: BTreeMap<String, Option<Id>>,
    /// The last of any save of this rank: an arena that takes the place of another counts on from it.
    generation: u64,
    /// The save that waiting is about: the last one, or what a predecessor left. 0 if there is none.
    awaited: u64,
    starter: Starter,
    connection: Option<Connection>,
    child: Option<Child>,
    pub(crate) pool: rayon::ThreadPool,
    pub(crate) runtime: Runtime,
    inline: Option<MemoryTier>,
    /// What the agent last said.
    progress: Progress,
    /// Failures up to this generation have been told.
    told: u64,
    interruption: Interruption,
    /// A save that has begun and is not finished.
    outstanding: Weak<()>,
    attempts: Attempts,
    /// Last: a successor may begin when all else is gone.
    _lock: Lock,
}

/// What a save did. The state is safe from the end of this process on; it is in the store when the agent has committed it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// The step.
    pub step: u64,
    /// The save's number in the arena; none if it was skipped because no slot was free.
    pub generation: Option<u64>,
    /// How long the trainer stood still.
    pub stall: Duration,
    /// Of that, the copy (inline: encoding).
    pub copy: Duration,
    /// The step that was given up for this one, by [`BackPressure::DropOldestUncommitted`].
    pub dropped: Option<u64>,
    /// Earlier saves that failed for good since the last call.
    pub failures: Vec<Failure>,
    /// What keeps snapshots from the store at the moment; it is tried again.
    pub problem: Option<String>,
    /// States and snapshots that wait.
    pub queue_depth: u64,
}

/// What to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Encoded, in memory.
    Encoded,
    /// Committed in the first tier.
    Durable,
}

/// What came of waiting.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Waited {
    /// Whether it was reached in time.
    pub reached: bool,
    /// Whether it never will be: the last save failed for good.
    pub failed: bool,
    /// Saves of this trainer that failed for good, that one or others.
    pub failures: Vec<Failure>,
    /// What stands in the way at the moment.
    pub problem: Option<String>,
}

impl Engine {
    /// Begins: takes the lock of this run and rank, maps the arena that a predecessor left, asks the store whether that is up to date, and
    /// connects to the agent, which is started if there is none. `Conflict` while another process has the run and rank.
    ///
    /// From here on this run writes to the store: a job elsewhere that was writing to it finds out at its next save.
    pub fn start(options: EngineOptions) -> Result<Self> {
        let spec = options.spec()?;
        let place = Place::open(options.folder.as_deref())?;
        let run = place.run(&spec.key);
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
        let threads = rayon::ThreadPoolBuilder::new().num_threads(options.copy_threads).thread_name(|n| format!("tensorcask-copy-{n}"));
        let pool = threads.build().map_err(|e| Error::new(ErrorKind::Storage, format!("no threads: {e}")))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(MAX_BLOCKING)
            .thread_name("tensorcask-engine")
            .enable_all()
            .build();
        let runtime = runtime.map_err(|e| Error::new(ErrorKind::Storage, format!("no runtime: {e}")).source(e))?;
        let starter = Starter::new(&options.agent, options.agent_idle_exit);
        let mut engine = Self {
            options,
            spec,
            place,
            run,
            rank,
            arena: None,
            stale: false,
            unasked: Vec::new(),
            latest: BTreeMap::new(),
            generation: 0,
            awaited: 0,
            starter,
            connection: None,
            child: None,
            pool,
            runtime,
            inline: None,
            progress: Progress::default(),
            told: 0,
            interruption: Interruption(None),
            outstanding: Weak::new(),
            attempts: Attempts::default(),
            _lock: lock,
        };
        engine.take_stock()?;
        Ok(engine)
    }

    /// Has this asked now and then while a save waits for a slot: an error of it ends the save, and nothing is saved. For interpreters, whose
    /// signal handlers run only when they are asked to.
    pub fn interrupt_with(&mut self, ask: impl FnMut() -> Result<()> + Send + Sync + 'static) {
        self.interruption = Interruption(Some(Box::new(ask)));
    }

    /// Looks at what a predecessor left, decides whether it counts, and attaches.
    fn take_stock(&mut self) -> Result<()> {
        // Before the arena: an agent that throws all arenas away does so before it notes what it has seen of the store.
        let seen = Seen::read(&self.run);
        self.arena = self.open_arena()?;
        let (has_arena, timeout) = (self.arena.is_some(), self.options.store_timeout);
        let known = self.runtime.block_on(look(&self.spec, &self.run, &seen, has_arena, timeout, &mut self.unasked))?;
        if let Known::Stale(latest) = known {
            (self.stale, self.latest) = (true, latest);
            let words = self.arena.take().map(|arena| arena.words()).transpose()?.unwrap_or_default();
            self.generation = words.iter().map(|word| word.generation).max().unwrap_or(0);
            remove_file(&self.rank.arena())?;
        }
        let inline = self.options.encode == Encode::Inline;
        if self.stale && inline {
            // Before the agent looks: it would be uploaded.
            clear(&self.run)?;
        }
        let progress = self.attach(if self.stale { Mode::TakeOverAfresh } else { Mode::TakeOver })?;
        // From here on the agent frees no memory of this run: what it freed just now, because the run was over, was in the store.
        if self.arena.as_ref().is_some_and(|arena| !arena.is_in_place()) {
            self.arena = None;
        }
        if inline {
            let stores = self.spec.stores()?;
            let tier = MemoryTier::open(&self.run, &stores, self.spec.writer_options()?, 1);
            let tier = self.runtime.block_on(tier)?;
            let last = self.runtime.block_on(tier.last())?;
            self.awaited = if last > 0 { inline::generation(tier.epoch(), last) } else { 0 };
            self.inline = Some(tier);
        }
        // A new arena goes on counting where an older one ended.
        self.generation = self.generation.max(progress.encoded).max(progress.durable);
        if !self.stale {
            self.awaited = self.newest_left()?.max(progress.encoded).max(self.awaited);
        }
        self.told = progress.failures.iter().map(|failure| failure.generation).max().unwrap_or(0);
        // The agent has cleared memory before it answered. To other ranks it may have answered before that.
        self.stale &= self.options.rank > 0;
        Ok(())
    }

    /// The newest state in the arena that is whole.
    fn newest_left(&mut self) -> Result<u64> {
        let words = self.arena.as_ref().map(|arena| arena.words()).transpose()?.unwrap_or_default();
        self.generation = words.iter().map(|word| word.generation).max().unwrap_or(0).max(self.generation);
        Ok(words.iter().filter(|word| word.state.is_whole()).map(|word| word.generation).max().unwrap_or(0))
    }

    fn open_arena(&self) -> Result<Option<Arc<Arena>>> {
        // Of a trainer that died while it made one.
        remove_file(&self.rank.new_arena())?;
        let path = self.rank.arena();
        if !path.exists() {
            return Ok(None);
        }
        let opened = Arena::open(&path).and_then(|arena| {
            let torn = arena.abandon_torn()?;
            if torn > 0 {
                tracing::warn!(run = self.spec.run, torn, "the trainer before this one died while it saved; that copy is not used");
            }
            Ok(arena)
        });
        match opened {
            Ok(arena) => Ok(Some(Arc::new(arena))),
            Err(error) => {
                tracing::warn!(%error, "the arena that was left cannot be used; a new one takes its place");
                remove_file(&path)?;
                Ok(None)
            }
        }
    }

    /// Saves a state: all its tensors, or this rank's shards of them. Returns once it is copied into shared memory.
    ///
    /// `Fenced` once another job has taken the store over; `Storage` if there is no shared memory for the arena, with the number that it
    /// needs, or, with [`OnAgentLoss::Fail`], if the agent is gone.
    pub fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<Outcome> {
        let span = self.save_span(step);
        let _entered = span.enter();
        match self.options.encode {
            Encode::Agent => {
                let saving = self.begin_save(step, tensors, &[], blobs, metadata)?;
                self.publish(saving, &span)
            }
            Encode::Inline => {
                let begun = Begun::new(step);
                self.prepare(metadata)?;
                let copied = self.encode_inline(step, tensors, blobs, metadata)?;
                self.tell_saved(begun, copied, &span)
            }
        }
    }

    /// Begins a save of which some tensors come later, out of a device's memory: it copies the others into shared memory, and says where these
    /// go ([`Saving::buffers`]). [`finish_save`](Self::finish_save) makes a state of it. One at a time; not with [`Encode::Inline`].
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
    ///     copy_from_device(buffer); // on a stream of its own
    /// }
    /// // forward and backward go on; before the optimizer changes anything:
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
        let begun = Begun::new(step);
        if self.options.encode == Encode::Inline {
            return Err(Error::unsupported("inline encoding needs all tensors in the trainer's memory: use `save`"));
        }
        self.prepare(metadata)?;
        let filled = self.copy(step, tensors, deferred, blobs, metadata);
        // Also of one that is skipped, or fails: other ranks may have it.
        let session = self.arena.as_ref().map_or(Ok(self.progress.session), |arena| arena.session())?;
        self.attempts.note(session, step);
        let filled = filled?;
        let token = Arc::new(());
        self.outstanding = Arc::downgrade(&token);
        Ok(Saving { begun: Begun { at: Instant::now(), stall: begun.stall(), ..begun }, filled, token })
    }

    /// Makes a state of a save that was begun, once all its buffers are written.
    pub fn finish_save(&mut self, saving: Saving) -> Result<Outcome> {
        let span = self.save_span(saving.begun.step);
        let _entered = span.enter();
        if !self.outstanding.upgrade().is_some_and(|token| Arc::ptr_eq(&token, &saving.token)) {
            return Err(Error::invalid("this save was begun by another engine"));
        }
        let begun = Begun { at: Instant::now(), ..saving.begun };
        self.publish(Saving { begun, ..saving }, &span)
    }

    fn publish(&mut self, saving: Saving, span: &tracing::Span) -> Result<Outcome> {
        let Saving { begun, filled, token } = saving;
        let publish = |filled: Filling| -> Result<Copied> {
            let (published, dropped) = (Instant::now(), filled.filled.dropped());
            let generation = self.pool.install(|| filled.filled.publish(begun.step, self.options.world))?;
            Ok(Copied { generation, time: filled.time + published.elapsed(), bytes: filled.bytes, dropped })
        };
        let copied = filled.map(publish).transpose()?;
        drop(token);
        self.tell_saved(begun, copied, span)
    }

    fn save_span(&self, step: u64) -> tracing::Span {
        tracing::info_span!(
            "save",
            run = self.spec.run,
            step,
            generation = Empty,
            stall_ms = Empty,
            copy_ms = Empty,
            bytes_in = Empty,
            queue_depth = Empty
        )
    }

    /// Before a save: that it may be, and what the agent has said meanwhile.
    fn prepare(&mut self, metadata: &Metadata) -> Result<()> {
        self.check_finished()?;
        if let Some(key) = metadata.user.keys().find(|key| key.starts_with("tc.")) {
            return Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug())));
        }
        self.hear()
    }

    fn check_finished(&self) -> Result<()> {
        match self.outstanding.upgrade() {
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::Conflict, "a save has begun and is not finished: finish it, or drop it, first")),
        }
    }

    /// Tells the agent of a state in shared memory; none if it was skipped.
    fn tell_saved(&mut self, begun: Begun, copied: Option<Copied>, span: &tracing::Span) -> Result<Outcome> {
        let step = begun.step;
        let Some(copied) = copied else {
            return Ok(self.outcome(Outcome { step, stall: begun.stall(), ..Outcome::default() }));
        };
        (self.generation, self.awaited) = (copied.generation, copied.generation);
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let note = SaveNote {
            step,
            generation: copied.generation,
            stall_ms: millis(begun.stall()),
            copy_ms: millis(copied.time),
            bytes: copied.bytes,
            time_ms: begun.time_ms,
        };
        let told = self.tell(Request::Saved { key: self.spec.key.clone(), rank: self.options.rank, save: note });
        told.map_err(|e| match e.kind() {
            ErrorKind::Fenced => e,
            _ => Error::new(e.kind(), format!("step {step} is in shared memory, but the agent cannot be told: {}", e.message())).source(e),
        })?;
        let stall = begun.stall();
        span.record("generation", copied.generation).record("bytes_in", copied.bytes).record("copy_ms", millis(copied.time));
        span.record("stall_ms", millis(stall)).record("queue_depth", self.progress.queue_depth);
        let Copied { generation, time: copy, dropped, .. } = copied;
        Ok(self.outcome(Outcome { step, generation: Some(generation), stall, copy, dropped, ..Outcome::default() }))
    }

    fn outcome(&mut self, outcome: Outcome) -> Outcome {
        let failures: Vec<Failure> = self.progress.failures.iter().filter(|failure| failure.generation > self.told).cloned().collect();
        self.told = failures.iter().map(|failure| failure.generation).max().unwrap_or(self.told);
        for failure in &failures {
            tracing::error!(run = self.spec.run, step = failure.step, error = failure.message, "an earlier save failed");
        }
        Outcome { failures, problem: self.progress.problem.clone(), queue_depth: self.progress.queue_depth, ..outcome }
    }

    /// Copies into a slot; none if it is to be skipped.
    fn copy(
        &mut self,
        step: u64,
        tensors: &[TensorView<'_>],
        deferred: &[Deferred],
        blobs: &[Blob<'_>],
        metadata: &Metadata,
    ) -> Result<Option<Filling>> {
        let mut grown = false;
        loop {
            let plan = Plan::new(step, tensors, deferred, blobs, metadata)?;
            let holds = self.arena.as_ref().is_some_and(|arena| arena.holds(plan.data_bytes));
            if !holds && !self.make_arena(plan.slot_bytes())? {
                return Ok(None);
            }
            if !self.wait_for_slot()? {
                return Ok(None);
            }
            let Some(arena) = &self.arena else { return Err(Error::invalid("no arena")) };
            let drop = self.options.back_pressure == BackPressure::DropOldestUncommitted;
            // Nobody but this process takes free slots, but the agent may have taken the one that would have been dropped.
            let Some(claimed) = arena.claim(drop)? else { continue };
            let (bytes, needed, begun) = (plan.copied_bytes, plan.slot_bytes(), Instant::now());
            let session = arena.session()?;
            let attempt = self.attempts.of(session, step);
            match self.pool.install(|| claimed.fill(plan, session, attempt)) {
                Ok(filled) => return Ok(Some(Filling { filled, time: begun.elapsed(), bytes })),
                // The description has grown.
                Err(e) if e.kind() == ErrorKind::LimitExceeded && !grown => {
                    grown = true;
                    if !self.make_arena(needed.saturating_mul(2))? {
                        return Ok(None);
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether a slot is free, or can be made so; waits if that is the policy.
    fn wait_for_slot(&mut self) -> Result<bool> {
        let drop = self.options.back_pressure == BackPressure::DropOldestUncommitted;
        let mut pause = Pause::new();
        loop {
            let words = self.arena.as_ref().map(|arena| arena.words()).transpose()?.unwrap_or_default();
            if crate::slot::choose(&words, drop).is_some() {
                return Ok(true);
            }
            if self.options.back_pressure == BackPressure::Skip {
                self.keep_going()?;
                return Ok(false);
            }
            self.pause(&mut pause)?;
        }
    }

    /// The agent learns that this trainer saves, though it skips this one: old snapshots may go for new ones. One that stands still is not
    /// waited for.
    fn keep_going(&mut self) -> Result<()> {
        match self.connection.as_ref().is_none_or(Connection::has_answered) {
            true => self.tell(self.wait_request(0, false, 0)),
            false => Ok(()),
        }
    }

    /// A moment of a wait for the agent. Now and then it is asked, which is returned: it may be gone, the run may be another's by now, or it may
    /// have a problem, which is told.
    fn pause(&mut self, pause: &mut Pause) -> Result<bool> {
        let asks = pause.asked.elapsed() >= ASK;
        if asks {
            let progress = self.ask_about_run(self.wait_request(0, false, 0))?;
            if progress.problem.is_some() && progress.problem != pause.told {
                tracing::warn!(run = self.spec.run, problem = progress.problem, "a save waits for shared memory");
                pause.told = progress.problem;
            }
            pause.asked = Instant::now();
        }
        self.interruption.ask()?;
        std::thread::sleep(POLL);
        Ok(asks)
    }

    fn wait_request(&self, generation: u64, durable: bool, timeout_ms: u64) -> Request {
        Request::Wait { key: self.spec.key.clone(), rank: self.options.rank, generation, durable, timeout_ms }
    }

    /// Makes an arena with slots of this size, once the agent has encoded what lies in the one before; whether it is there: where saves are
    /// skipped, nothing is waited for.
    fn make_arena(&mut self, slot_bytes: usize) -> Result<bool> {
        let mut pause = Pause::new();
        while let Some(arena) = &self.arena {
            let words = arena.words()?;
            if !words.iter().any(|word| matches!(word.state, State::Full | State::Encoding)) {
                self.newest_left()?;
                self.arena = None;
                break;
            }
            if self.options.back_pressure == BackPressure::Skip {
                self.keep_going()?;
                return Ok(false);
            }
            self.pause(&mut pause)?;
        }
        // Its memory is needed for the new one.
        remove_file(&self.rank.arena())?;
        self.attach(Mode::GoOn)?;
        let arena = Arena::create(&self.rank.arena(), self.options.slots, slot_bytes, self.generation)?;
        arena.set_session(self.progress.session)?;
        self.arena = Some(Arc::new(arena));
        self.attach(Mode::GoOn)?;
        Ok(true)
    }

    /// Encodes in this process, straight into the memory tier.
    fn encode_inline(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<Option<Copied>> {
        let cap = self.spec.cap(&self.place)?;
        let (keep, mut pause, mut has_room) = (self.spec.keep, Pause::new(), true);
        let (saved, epoch, time) = loop {
            let Some(tier) = self.inline.as_mut() else { return Err(Error::invalid("no memory tier")) };
            has_room = has_room && self.runtime.block_on(make_room_inline(tier, keep, cap, &self.progress))?;
            if has_room {
                let begun = Instant::now();
                match self.runtime.block_on(tier.save(step, tensors, blobs, metadata)) {
                    Ok(saved) => break (saved, tier.epoch(), begun.elapsed()),
                    Err(e) if is_full(&e) => {
                        // Whether there was anything to give up for it.
                        let was_empty = self.runtime.block_on(tier.last())? == 0;
                        let sent = sent_inline(tier, &self.progress);
                        match self.runtime.block_on(tier.start_over(&sent))? {
                            true if was_empty => return Err(e),
                            true => continue,
                            false => {}
                        }
                    }
                    Err(e) => return Err(e),
                }
            }
            // There is nothing that could be dropped: what is encoded, deltas need.
            if self.options.back_pressure != BackPressure::Wait {
                return Ok(None);
            }
            has_room = self.pause(&mut pause)?;
        };
        if self.arena.take().is_some() {
            // Of a time when the agent encoded: older than this.
            remove_file(&self.rank.arena())?;
        }
        let bytes = tensors.iter().map(|tensor| tensor.data().len() as u64).sum();
        Ok(Some(Copied { generation: inline::generation(epoch, saved.sequence), time, bytes, dropped: None }))
    }

    /// Waits until the last save is encoded or durable, or failed, or until the time is over.
    pub fn wait(&mut self, until: Until, timeout: Duration) -> Result<Waited> {
        let (generation, durable) = (self.awaited, until == Until::Durable);
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).min(MAX_WAIT_MS);
        let progress = self.ask_about_run(self.wait_request(generation, durable, timeout_ms))?;
        let (reached, failed) = (progress.has_reached(generation, durable), progress.has_failed(generation));
        Ok(Waited { reached, failed, failures: progress.failures, problem: progress.problem })
    }

    /// Ends a run that is over: waits until everything is in the first tier, and frees the memory of this run on this host. An error, and
    /// nothing is freed, if the last save has failed for good: its raw state may be all that there is.
    pub fn finish(mut self) -> Result<()> {
        self.check_finished()?;
        loop {
            let waited = self.wait(Until::Durable, ASK * 10)?;
            if waited.failed {
                let failure = waited.failures.iter().rfind(|failure| failure.generation == self.awaited);
                let why = failure.map_or_else(String::new, |failure| format!("step {}: {}; ", failure.step, failure.message));
                let message = format!("the last save is not in the store: {why}what is in shared memory stays, as after a crash");
                return Err(Error::new(ErrorKind::Storage, message).object(&self.spec.run));
            }
            if waited.reached {
                break;
            }
            if let Some(problem) = waited.problem {
                tracing::warn!(run = self.spec.run, problem, "the last save is not in the store yet");
            }
        }
        self.arena = None;
        self.inline = None;
        self.ask_about_run(Request::Detach { key: self.spec.key.clone(), rank: self.options.rank, clear: true }).map(|_| ())
    }

    /// Agrees with the other ranks on the newest step that all can load, through the first tier: each leaves a list of its steps there and
    /// waits for those of the others. `round` names this start of the job alone (an attempt's number, a scheduler's job id): lists of another
    /// start must not be mixed with these. Newer raw states, which some rank lacks, are given up.
    ///
    /// None if there is no step that all can load. Ranks that have a collective of their own exchange the steps of
    /// [`loadable`](Self::loadable) by that, and call [`agree`] and [`discard_after`](Self::discard_after) themselves.
    pub fn agree_by_store(&mut self, round: &str, timeout: Duration) -> Result<Option<u64>> {
        let steps: Vec<u64> = self.loadable()?.into_iter().map(|found| found.step).collect();
        let (rank, world, begun) = (self.options.rank, self.options.world, Instant::now());
        let stores = self.spec.stores()?;
        let first = stores.first().ok_or_else(|| Error::invalid("no tier"))?;
        self.runtime.block_on(first.put_offer(round, rank, &steps))?;
        let ranks = loop {
            let offers = self.runtime.block_on(first.offers(round, world))?;
            let missing: Vec<String> =
                (0..world).zip(&offers).filter(|(_, offer)| offer.is_none()).map(|(rank, _)| rank.to_string()).collect();
            if missing.is_empty() {
                break offers.into_iter().flatten().collect::<Vec<_>>();
            }
            if begun.elapsed() > timeout {
                return Err(Error::not_found(format!("rank {} has not said what it can load", missing.join(", "))).object(first.url()));
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let agreed = agree(&ranks);
        if let Some(step) = agreed.step {
            self.discard_after(step)?;
        }
        Ok(agreed.step)
    }

    /// Gives up raw states of steps after this one, which other ranks do not have: they are neither restored nor encoded.
    pub fn discard_after(&mut self, step: u64) -> Result<u64> {
        let Some(arena) = &self.arena else { return Ok(0) };
        let discarded = arena.discard(|found| found > step)?;
        if discarded > 0 {
            self.awaited = self.newest_left()?.max(self.progress.encoded);
        }
        Ok(discarded)
    }

    fn attach(&mut self, mode: Mode) -> Result<Progress> {
        let request = Request::Attach(Box::new(Attach {
            spec: self.spec.clone(),
            rank: self.options.rank,
            pid: std::process::id(),
            mode,
            session: self.progress.session,
            latest: self.latest.clone(),
        }));
        let (begun, mut attempts) = (Instant::now(), 0);
        loop {
            let error = match self.ask(&request, Duration::ZERO) {
                Ok(progress) => {
                    self.progress.session = progress.session;
                    return Ok(progress);
                }
                Err(e) => e,
            };
            self.connection = None;
            attempts += 1;
            let again = match error.kind() {
                // It is about to end, once what waits is in the store; another follows.
                ErrorKind::Conflict => begun.elapsed() < DRAIN,
                ErrorKind::Storage => attempts < 3,
                _ => false,
            };
            if !again {
                return Err(error);
            }
            if attempts == 1 {
                tracing::warn!(run = self.spec.run, %error, "trying again");
            }
            self.interruption.ask()?;
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Asks the agent about the run it has attached; another agent, if that one is gone and the policy says so.
    fn ask_about_run(&mut self, request: Request) -> Result<Progress> {
        let wait = match &request {
            Request::Wait { timeout_ms, .. } => Duration::from_millis(*timeout_ms),
            _ => Duration::ZERO,
        };
        match self.ask_connected(&request, wait) {
            Some(Err(e)) if e.kind() == ErrorKind::NotFound => self.go_on(&request, wait, e),
            Some(answer) => self.heard(answer?),
            None => self.go_on(&request, wait, gone()),
        }
    }

    /// Tells the agent something, and does not wait for what it says to it.
    fn tell(&mut self, request: Request) -> Result<()> {
        match self.connection.as_mut().map(|connection| connection.tell(&request)) {
            Some(Ok(())) => self.hear(),
            _ => {
                self.connection = None;
                self.go_on(&request, Duration::ZERO, gone()).map(|_| ())
            }
        }
    }

    /// Takes in what the agent has said meanwhile. That it is gone shows when it is told something.
    fn hear(&mut self) -> Result<()> {
        match self.connection.as_mut().map(Connection::news) {
            None | Some(Ok(None)) => Ok(()),
            Some(Ok(Some(reply))) => match reply.and_then(Reply::progress) {
                Ok(progress) => self.heard(progress).map(|_| ()),
                // An agent that does not know the run.
                Err(error) => {
                    tracing::debug!(%error, "the agent's answer");
                    self.connection = None;
                    Ok(())
                }
            },
            Some(Err(error)) => {
                tracing::debug!(%error, "the agent's connection is broken");
                self.connection = None;
                Ok(())
            }
        }
    }

    /// Goes on with another agent, if the policy allows it.
    fn go_on(&mut self, request: &Request, wait: Duration, lost: Error) -> Result<Progress> {
        if self.options.on_agent_loss == OnAgentLoss::Fail {
            return Err(lost);
        }
        tracing::warn!(run = self.spec.run, "the agent is gone; starting another");
        self.attach(Mode::GoOn)?;
        let progress = self.ask(request, wait)?;
        self.heard(progress)
    }

    fn heard(&mut self, progress: Progress) -> Result<Progress> {
        self.progress = progress.clone();
        // What it encodes comes into memory that is up to date.
        self.stale &= self.awaited == 0 || progress.encoded < self.awaited;
        match &progress.stopped {
            None => Ok(progress),
            Some(why) => Err(Error::new(ErrorKind::Fenced, format!("this run was given up: {why}"))),
        }
    }

    /// Asks over the connection there is; none if it is broken.
    fn ask_connected(&mut self, request: &Request, wait: Duration) -> Option<Result<Progress>> {
        match self.connection.as_mut()?.ask(request, wait) {
            Ok(reply) => Some(reply.and_then(Reply::progress)),
            Err(error) => {
                tracing::debug!(%error, "the agent's connection is broken");
                self.connection = None;
                None
            }
        }
    }

    fn ask(&mut self, request: &Request, wait: Duration) -> Result<Progress> {
        if self.connection.is_none() {
            self.reap();
            let (connection, child) = self.starter.connect(&self.place)?;
            self.connection = Some(connection);
            self.child = child.or(self.child.take());
        }
        self.ask_connected(request, wait).unwrap_or_else(|| Err(gone()))
    }

    /// An agent that this process started and that has ended is not left a zombie.
    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && !matches!(child.try_wait(), Ok(None))
        {
            self.child = None;
        }
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Storage, "the agent is gone")
}

/// What may end a wait.
struct Interruption(Option<Box<dyn FnMut() -> Result<()> + Send + Sync>>);

impl Interruption {
    fn ask(&mut self) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |ask| ask())
    }
}

impl std::fmt::Debug for Interruption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Interruption({})", self.0.is_some())
    }
}

/// How often this rank has returned to an older step in a session. All ranks count alike, because all save the same steps.
#[derive(Debug, Default)]
struct Attempts {
    session: u64,
    attempt: u64,
    last: Option<u64>,
}

impl Attempts {
    /// The attempt that a save belongs to.
    fn of(&self, session: u64, step: u64) -> u64 {
        match session == self.session {
            true => self.attempt + u64::from(self.last.is_some_and(|last| step <= last)),
            false => 0,
        }
    }

    /// A step was saved.
    fn note(&mut self, session: u64, step: u64) {
        *self = Self { session, attempt: self.of(session, step), last: Some(step) };
    }
}

/// The call of a save.
#[derive(Debug, Clone, Copy)]
struct Begun {
    step: u64,
    at: Instant,
    time_ms: u64,
    /// How long the trainer stood still before `at`.
    stall: Duration,
}

impl Begun {
    fn new(step: u64) -> Self {
        Self { step, at: Instant::now(), time_ms: now_ms(), stall: Duration::ZERO }
    }

    /// How long it has stood still so far.
    fn stall(&self) -> Duration {
        self.stall + self.at.elapsed()
    }
}

/// A save that has begun, of which a device copies a part. Dropped, it is given up: nobody may be writing into its buffers then.
#[derive(Debug)]
pub struct Saving {
    begun: Begun,
    filled: Option<Filling>,
    token: Arc<()>,
}

impl Saving {
    /// Whether it is skipped because no slot was free: it has no buffers, and finishing it saves nothing.
    pub fn is_skipped(&self) -> bool {
        self.filled.is_none()
    }

    /// Memory in the arena for each tensor that comes later, in their order, those left out that are tied to others.
    pub fn buffers(&mut self) -> Result<Vec<&mut [u8]>> {
        self.filled.as_mut().map_or_else(|| Ok(Vec::new()), |filling| filling.filled.deferred())
    }

    /// The arena that they are in.
    pub fn mapping(&self) -> Option<Mapping> {
        self.filled.as_ref().map(|filling| Mapping(filling.filled.arena().clone()))
    }
}

/// The memory of an arena, for a device that has to be told of it (`cudaHostRegister`). It stays mapped for as long as this lives.
#[derive(Debug, Clone)]
pub struct Mapping(Arc<Arena>);

impl Mapping {
    /// Where it begins.
    pub fn address(&self) -> *const u8 {
        self.0.span().0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.0.span().1
    }
}

/// A slot that has been filled, but for what comes later.
#[derive(Debug)]
struct Filling {
    filled: Filled,
    /// How long that took.
    time: Duration,
    bytes: u64,
}

/// A state that was copied.
struct Copied {
    generation: u64,
    time: Duration,
    bytes: u64,
    dropped: Option<u64>,
}

/// Room in memory for a snapshot that this process encodes; whether there is.
async fn make_room_inline(tier: &mut MemoryTier, keep: u32, cap: u64, progress: &Progress) -> Result<bool> {
    if progress.damaged_epoch == Some(tier.epoch()) {
        tier.begin_epoch().await?;
    }
    let sent = sent_inline(tier, progress);
    tier.make_room(keep, cap, &sent, progress.problem.is_none()).await
}

fn sent_inline(tier: &MemoryTier, progress: &Progress) -> Sent {
    Sent { uploaded: inline::entry_of(progress.durable, tier.epoch()), damaged: progress.damaged_epoch.into_iter().collect() }
}

/// A wait for the agent.
struct Pause {
    asked: Instant,
    told: Option<String>,
}

impl Pause {
    fn new() -> Self {
        Self { asked: Instant::now(), told: None }
    }
}

/// What one question may wait for.
const MAX_WAIT_MS: u64 = 24 * 3600 * 1000;

impl Drop for Engine {
    fn drop(&mut self) {
        let request = Request::Detach { key: self.spec.key.clone(), rank: self.options.rank, clear: false };
        let _ = self.ask_connected(&request, Duration::ZERO);
        self.reap();
    }
}
