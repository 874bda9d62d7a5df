//! `Engine`: the trainer's side of the asynchronous engine, and the agent process.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;
use tensorcask::codec::{CodecRules, ObjectiveSetting};
use tensorcask::session::RankOffer;
use tensorcask::{Dtype, Error, ErrorKind, FiniteCheck, Policy, Precision, Rect, RoleRules, StepSelector, TensorView};
use tensorcask_engine::{
    AgentOptions, BackPressure, Deferred, Encode, Ended, EngineOptions, Hosts, Mapping, OnAgentLoss, Outcome, Part, PeerTls, Peers, Source,
    Until, agent_status, run_agent, stop_agent,
};

use crate::errors::raise;
use crate::logging;
use crate::room::{Memory, Room, rooms_of};
use crate::upkeep::{RetentionArguments, retention_of};
use crate::writer::{ChangedRows, Lent, NamedBytes, Shard, metadata_of, name_changed_rows, poisoned};

/// Interval between checks for signals.
const INTERVAL: Duration = Duration::from_millis(100);
/// Pauses between questions of a wait.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Pauses between attempts to use an engine that another thread uses: short, because most uses are.
const FIRST_LOCK_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_LOCK_PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_class::<Saving>()?;
    module.add_class::<ArenaMapping>()?;
    module.add_function(wrap_pyfunction!(hosts_from_variables, module)?)?;
    module.add_function(wrap_pyfunction!(peer_addresses, module)?)?;
    module.add_function(wrap_pyfunction!(serve, module)?)?;
    module.add_function(wrap_pyfunction!(status, module)?)?;
    module.add_function(wrap_pyfunction!(stop, module)?)
}

/// Engine of a trainer, wrapped by the Python package.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Engine {
    inner: Mutex<Option<tensorcask_engine::Engine>>,
    /// Process that the engine belongs to.
    pid: u32,
    signals: Signals,
    /// Whether the end of this process is announced, so that no save waits for a slot.
    is_ending: Arc<AtomicBool>,
}

/// Runs signal handlers while an operation waits.
#[derive(Clone, Default)]
struct Signals {
    /// Exception that a signal handler has raised.
    raised: Arc<Mutex<Option<PyErr>>>,
    /// Threads that run signal handlers now.
    asking: Arc<Mutex<HashSet<ThreadId>>>,
    /// Whether a thread closes the engine, so that the operations of others end.
    is_closing: Arc<AtomicBool>,
}

impl Signals {
    /// Runs the handlers of signals that have arrived, if this is the main thread. Fails if one has raised an exception.
    fn check(&self) -> tensorcask::Result<()> {
        if self.is_closing.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Conflict, "the engine was closed meanwhile"));
        }
        let own = std::thread::current().id();
        lock(&self.asking).insert(own);
        let checked = Python::attach(|py| py.check_signals());
        lock(&self.asking).remove(&own);
        if let Err(error) = checked {
            *lock(&self.raised) = Some(error);
        }
        match lock(&self.raised).is_some() {
            true => Err(Error::new(ErrorKind::Conflict, "interrupted; nothing was saved")),
            false => Ok(()),
        }
    }

    /// Takes the exception that a signal handler has raised.
    fn take_raised(&self) -> Option<PyErr> {
        lock(&self.raised).take().or_else(logging::take_raised)
    }

    /// Whether this thread runs a signal handler in the middle of an operation.
    fn are_running_here(&self) -> bool {
        logging::is_logging_here() || lock(&self.asking).contains(&std::thread::current().id())
    }
}

/// The exception that a signal handler has raised, or otherwise the exception for `error`.
fn told(signals: &Signals, error: &Error) -> PyErr {
    signals.take_raised().unwrap_or_else(|| raise(error))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Location of a state: `slot`, `memory` or `tier`, and the URL of a tier.
type Place = (&'static str, Option<String>);
/// Whether the wait succeeded, step and reason of each failed save, the cause of the delay, and whether this save has failed.
type Waited = (bool, Vec<(u64, String)>, Option<String>, bool);
/// Name, dtype, global shape, first index and extent per dimension, and the position of another row with the same
/// bytes.
type DeferredRow = (String, String, Vec<u64>, Vec<u64>, Vec<u64>, Option<usize>);
/// Name, global shape, first index and extent per dimension.
type NamedPart = (String, Vec<u64>, Vec<u64>, Vec<u64>);

#[pymethods]
impl Engine {
    /// Starts the engine. `options` are named as in the Rust library.
    #[new]
    fn new(py: Python<'_>, store: &str, options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let options = options_of(store, options)?;
        let signals = Signals::default();
        let asked_by_engine = signals.clone();
        let mut asked = Instant::now();
        let ask = move || {
            let is_over = asked_by_engine.is_closing.load(Ordering::Relaxed) || lock(&asked_by_engine.raised).is_some();
            if !is_over && asked.elapsed() < INTERVAL {
                return Ok(());
            }
            asked = Instant::now();
            asked_by_engine.check()
        };
        let is_ending = Arc::new(AtomicBool::new(false));
        let started = py.detach(|| tensorcask_engine::Engine::start_interruptible(options, ask));
        let mut engine = started.map_err(|error| told(&signals, &error))?;
        engine.skip_waits_while(is_ending.clone());
        Ok(Self { inner: Mutex::new(Some(engine)), pid: std::process::id(), signals, is_ending })
    }

    /// Says whether this process is about to end: no save waits for a slot then. Signal handlers may call it at any time.
    fn set_ending(&self, is_ending: bool) {
        self.is_ending.store(is_ending, Ordering::Relaxed);
    }

    /// Tells the agent the credentials in the environment of this process, and these settings.
    fn renew_credentials(&self, py: Python<'_>, config: BTreeMap<String, String>) -> PyResult<()> {
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let renewed = py.detach(|| engine.renew_credentials(&config));
        self.done(renewed)
    }

    /// Copies a state into shared memory. Returns a summary of the save. `changed_rows` lists, for some tensors, the rows that
    /// may have changed since the save before; None if only later saves will name them.
    #[pyo3(signature = (step, rank, tensors, blobs, user, metadata, changed_rows=BTreeMap::new()))]
    #[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
    fn save<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        rank: u32,
        tensors: Vec<Shard<'_>>,
        blobs: Vec<NamedBytes<'_>>,
        user: &str,
        metadata: BTreeMap<String, String>,
        changed_rows: ChangedRows,
    ) -> PyResult<Bound<'py, PyDict>> {
        let lent = Lent::new(py, tensors, blobs)?;
        let metadata = metadata_of(user, metadata)?;
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let saved = py.detach(|| {
            let (mut views, blobs) = lent.views(rank)?;
            name_changed_rows(&mut views, &changed_rows)?;
            engine.save(step, &views, &blobs, &metadata)
        });
        facts_of(py, &self.done(saved)?)
    }

    /// Begins a save whose tensors `deferred` are written later. Each row has name, dtype, global shape, first index,
    /// extent, and the position in this list of another row with the same bytes. `changed_rows` as in `save`.
    #[pyo3(signature = (step, rank, tensors, blobs, user, metadata, deferred, changed_rows=BTreeMap::new()))]
    #[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
    fn begin_save(
        &self,
        py: Python<'_>,
        step: u64,
        rank: u32,
        tensors: Vec<Shard<'_>>,
        blobs: Vec<NamedBytes<'_>>,
        user: &str,
        metadata: BTreeMap<String, String>,
        deferred: Vec<DeferredRow>,
        changed_rows: ChangedRows,
    ) -> PyResult<Saving> {
        let lent = Lent::new(py, tensors, blobs)?;
        let metadata = metadata_of(user, metadata)?;
        let row = |(name, dtype, shape, offset, extent, tied): DeferredRow| {
            let dtype = Dtype::from_name(&dtype).map_err(|e| e.tensor(name.as_str()))?;
            let deferred = Deferred::new(name, dtype, &shape, Rect { offset, shape: extent })?;
            Ok(match tied {
                None => deferred,
                Some(other) => deferred.tied_to(other),
            })
        };
        let mut deferred: Vec<Deferred> = deferred.into_iter().map(row).collect::<tensorcask::Result<_>>().map_err(|e| raise(&e))?;
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let begun = py.detach(|| {
            let (mut views, blobs) = lent.views(rank)?;
            name_all_changed_rows(&mut views, &mut deferred, changed_rows)?;
            engine.begin_save(step, &views, &deferred, &blobs, &metadata)
        });
        Ok(Saving { inner: Mutex::new(Some(self.done(begun)?)) })
    }

    /// Ends a save whose buffers have all been written. Returns a summary of the save.
    fn finish_save<'py>(&self, py: Python<'py>, saving: &Saving) -> PyResult<Bound<'py, PyDict>> {
        let saving = saving.inner.lock_py_attached(py).map_err(|_| poisoned())?.take();
        let saving = saving.ok_or_else(|| PyValueError::new_err("this save has ended"))?;
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let saved = py.detach(|| engine.finish_save(saving));
        facts_of(py, &self.done(saved)?)
    }

    /// Restores a step, or the newest step. `parts` restricts some tensors to a part.
    ///
    /// Calls `places` with the state that was found. Each tensor has a row (name, dtype, global shape, first index,
    /// extent, the name of an earlier tensor that it is tied to), and so has each blob (rank, name, bytes). `places`
    /// returns a buffer or None for each tensor. If the state turns out to be damaged, calls `places` again for another
    /// one. A function instead of a buffer is called with address and size of the data once all of it was read; the memory is
    /// valid during the call. Returns a summary of the restored state.
    fn restore<'py>(
        &self,
        py: Python<'py>,
        step: Option<u64>,
        parts: Option<Vec<NamedPart>>,
        places: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let at = step.map_or(StepSelector::Latest, StepSelector::Step);
        let part = |(name, shape, offset, extent): NamedPart| (name, Part { shape, rect: Rect { offset, shape: extent } });
        let parts: Option<BTreeMap<String, Part>> = parts.map(|parts| parts.into_iter().map(part).collect());
        let mut engine = self.lock(py)?;
        let engine = &*opened(&mut engine)?;
        let (ask, asked) = channel();
        let (answer, answers) = channel();
        let mut memory = Memory { ask, answers, rooms: Vec::new() };
        let places = places.clone().unbind();
        let (found, refused) = py.detach(|| {
            // Moved here: only one thread may receive.
            let asked = asked;
            std::thread::scope(|scope| {
                let restoring = scope.spawn(move || Ok((engine.restore_into(at, parts.as_ref(), &mut memory)?, memory.rooms)));
                let mut refused = None;
                // Calls Python on this thread, because its objects may depend on the thread.
                loop {
                    let question = match asked.recv_timeout(INTERVAL) {
                        Ok(question) => question,
                        Err(RecvTimeoutError::Timeout) => {
                            // The restore asks whether a handler has raised.
                            let _ = self.signals.check();
                            continue;
                        }
                        Err(RecvTimeoutError::Disconnected) => break,
                    };
                    let rooms = Python::attach(|py| rooms_of(py, question, &places)).map_err(|error| refused = Some(error));
                    // Fails only if the restore no longer waits for the answer.
                    let _ = answer.send(rooms.ok());
                }
                (restoring.join(), refused)
            })
        });
        if let Some(error) = refused {
            return Err(error);
        }
        let found = found.map_err(|_| raise(&Error::new(ErrorKind::Storage, "the restore ended in a crash")))?;
        let (found, rooms) = self.done(found)?;
        for (tensor, room) in found.tensors.iter().zip(&rooms) {
            if let Room::Reader(reader) = room {
                reader.call1(py, (tensor.data.as_ptr() as usize, tensor.data.len()))?;
            }
        }
        let facts = PyDict::new(py);
        facts.set_item("step", found.step)?;
        facts.set_item("source", place_of(&found.source))?;
        facts.set_item("seconds", found.seconds)?;
        facts.set_item("user", serde_json::Value::Object(found.metadata.user.clone()).to_string())?;
        facts.set_item("metadata", found.metadata.file.clone())?;
        let passed = found.passed_over.iter().map(|passed| (place_of(&passed.source), passed.step, passed.error.to_string()));
        facts.set_item("passed_over", passed.collect::<Vec<_>>())?;
        Ok(facts)
    }

    /// Takes memory for states of about this size, in the background.
    fn prepare(&self, py: Python<'_>, state_bytes: u64) -> PyResult<()> {
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let prepared = py.detach(|| engine.prepare(state_bytes));
        self.done(prepared)
    }

    /// Returns the steps that can be restored here, newest first, with their locations.
    fn loadable(&self, py: Python<'_>) -> PyResult<Vec<(u64, Place)>> {
        let mut engine = self.lock(py)?;
        let engine = &*opened(&mut engine)?;
        let found = py.detach(|| engine.loadable());
        let found = self.done(found)?;
        Ok(found.iter().map(|found| (found.step, place_of(&found.source))).collect())
    }

    /// Waits until the last save, or that of a step, has reached a level. Returns whether it has, the failed saves, and the
    /// cause of a delay.
    fn wait(&self, py: Python<'_>, level: &str, timeout: Option<f64>, step: Option<u64>) -> PyResult<Waited> {
        let until = Until::from_name(level).map_err(|e| raise(&e))?;
        let timeout = timeout.map(|seconds| duration("timeout", seconds)).transpose()?;
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let waited = {
                // Held for a moment only: another thread may want to save.
                let mut engine = self.lock(py)?;
                let engine = opened(&mut engine)?;
                let wait = || match step {
                    Some(step) => engine.wait_for(step, until, Duration::ZERO),
                    None => engine.wait(until, Duration::ZERO),
                };
                let waited = py.detach(wait);
                self.done(waited)?
            };
            let left = timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
            if waited.reached || waited.failed || left.is_some_and(|left| left.is_zero()) {
                let failures = waited.failures.into_iter().map(|failure| (failure.step, failure.message)).collect();
                return Ok((waited.reached, failures, waited.problem, waited.failed));
            }
            py.check_signals()?;
            py.detach(|| std::thread::sleep(left.map_or(pause, |left| left.min(pause))));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Forgets a save that failed and that this rank alone repeats.
    fn forget_failed_save(&self, py: Python<'_>) -> PyResult<()> {
        opened(&mut *self.lock(py)?)?.forget_failed_save();
        Ok(())
    }

    /// Announces that this rank saves no more.
    fn end_saves(&self, py: Python<'_>) -> PyResult<()> {
        opened(&mut *self.lock(py)?)?.end_saves();
        Ok(())
    }

    /// Returns the steps that this rank can load, and its attempt, as JSON for `agree`.
    fn offer(&self, py: Python<'_>) -> PyResult<String> {
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let offer = py.detach(|| engine.offer());
        let offer = self.done(offer)?;
        serde_json::to_string(&offer).map_err(|e| raise(&Error::invalid(format!("an offer: {e}"))))
    }

    /// Agrees with all ranks, whose offers these are, on the newest step that all of them can load.
    fn agree(&self, py: Python<'_>, offers: Vec<String>) -> PyResult<Option<u64>> {
        let decode = |json: &String| serde_json::from_str(json).map_err(|e| raise(&Error::invalid(format!("not an offer: {e}"))));
        let offers: Vec<RankOffer> = offers.iter().map(decode).collect::<PyResult<_>>()?;
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let agreed = py.detach(|| engine.agree(&offers));
        self.done(agreed)
    }

    /// Agrees with all ranks, through the store, on the newest step that all of them can load. Returns that step.
    fn agree_by_store(&self, py: Python<'_>, round: &str, timeout: f64) -> PyResult<Option<u64>> {
        let timeout = duration("timeout", timeout)?;
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        let agreed = py.detach(|| engine.agree_by_store(round, timeout));
        self.done(agreed)
    }

    /// Discards the raw states of later steps. Returns their number.
    fn discard_after(&self, py: Python<'_>, step: u64) -> PyResult<u64> {
        let mut engine = self.lock(py)?;
        let engine = opened(&mut engine)?;
        py.detach(|| engine.discard_after(step)).map_err(|e| raise(&e))
    }

    /// Ends a finished run: waits until everything is in the first tier, then frees the memory.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let Some(engine) = self.lock(py)?.take() else { return Ok(()) };
        let finished = py.detach(|| engine.finish());
        self.done(finished)
    }

    /// Closes the engine. States in shared memory stay there. An operation of another thread ends with an error: a storage that hangs
    /// would keep it for ever.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.pid == std::process::id() && !self.signals.are_running_here() {
            self.signals.is_closing.store(true, Ordering::Relaxed);
        }
        let taken = self.lock(py).map(|mut engine| engine.take());
        self.signals.is_closing.store(false, Ordering::Relaxed);
        let engine = taken?;
        py.detach(|| drop(engine));
        Ok(())
    }
}

impl Engine {
    /// The result of an operation, unless a signal handler has raised an exception meanwhile.
    fn done<T>(&self, result: tensorcask::Result<T>) -> PyResult<T> {
        match result {
            Ok(value) => self.signals.take_raised().map_or(Ok(value), Err),
            Err(error) => Err(told(&self.signals, &error)),
        }
    }

    fn lock<'s>(&'s self, py: Python<'_>) -> PyResult<MutexGuard<'s, Option<tensorcask_engine::Engine>>> {
        if self.pid != std::process::id() {
            return Err(raise(&Error::invalid("this engine belongs to the parent process of this fork; create another engine here")));
        }
        if self.signals.are_running_here() {
            let message = "this engine is in use: a signal handler cannot use the engine while a save waits; raise an exception instead";
            return Err(raise(&Error::new(ErrorKind::Conflict, message)));
        }
        // Another thread may hold the engine for long, in a restore. Signals end this wait, too.
        let mut pause = FIRST_LOCK_PAUSE;
        let mut checked = Instant::now();
        loop {
            match self.inner.try_lock() {
                Ok(locked) => return Ok(locked),
                Err(TryLockError::Poisoned(_)) => return Err(poisoned()),
                Err(TryLockError::WouldBlock) => {}
            }
            if checked.elapsed() >= INTERVAL {
                checked = Instant::now();
                py.check_signals()?;
            }
            py.detach(|| std::thread::sleep(pause));
            pause = (pause * 2).min(LONGEST_LOCK_PAUSE);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Ok(inner) = self.inner.get_mut() else { return };
        let Some(engine) = inner.take() else { return };
        if self.pid == std::process::id() {
            Python::attach(|py| py.detach(|| drop(engine)));
        } else {
            // A forked child owns neither the threads nor the run.
            std::mem::forget(engine);
        }
    }
}

/// Names the changed rows of tensors that are there, and of tensors that are written later.
fn name_all_changed_rows(views: &mut [TensorView<'_>], deferred: &mut [Deferred], changed_rows: ChangedRows) -> tensorcask::Result<()> {
    let is_deferred = |name: &str| deferred.iter().any(|tensor| tensor.name() == name);
    let (later, present): (ChangedRows, ChangedRows) = changed_rows.into_iter().partition(|(name, _)| is_deferred(name));
    for tensor in deferred {
        if let Some(rows) = later.get(tensor.name()) {
            let named = tensor.clone().with_row_hashes();
            *tensor = rows.as_ref().map_or(Ok(named.clone()), |rows| named.with_changed_rows(rows))?;
        }
    }
    name_changed_rows(views, &present)
}

/// Returns the summary of a save as a dict.
fn facts_of<'py>(py: Python<'py>, saved: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("step", saved.step)?;
    facts.set_item("saved", saved.generation.is_some())?;
    facts.set_item("stall", saved.stall.as_secs_f64())?;
    facts.set_item("copy", saved.copy.as_secs_f64())?;
    facts.set_item("dropped", saved.dropped)?;
    facts.set_item("failures", saved.failures.iter().map(|failure| (failure.step, failure.message.as_str())).collect::<Vec<_>>())?;
    facts.set_item("problem", &saved.problem)?;
    facts.set_item("queue_depth", saved.queue_depth)?;
    Ok(facts)
}

/// A save that has begun. Nobody may write into its buffers when it is dropped.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Saving {
    inner: Mutex<Option<tensorcask_engine::Saving>>,
}

#[pymethods]
impl Saving {
    /// Returns whether the save was skipped because no slot was free.
    #[getter]
    fn is_skipped(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |saving| Ok(saving.is_skipped()))
    }

    /// Returns address and size of the memory for each tensor that comes later. Leaves out tensors that are tied to
    /// others.
    fn buffers(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize)>> {
        self.with(py, |saving| Ok(saving.buffers()?.into_iter().map(|buffer| (buffer.as_mut_ptr() as usize, buffer.len())).collect()))
    }

    /// Returns the arena that holds these buffers.
    fn mapping(&self, py: Python<'_>) -> PyResult<Option<ArenaMapping>> {
        self.with(py, |saving| Ok(saving.mapping().map(ArenaMapping)))
    }
}

impl Saving {
    fn with<T>(&self, py: Python<'_>, ask: impl FnOnce(&mut tensorcask_engine::Saving) -> tensorcask::Result<T>) -> PyResult<T> {
        let mut saving = self.inner.lock_py_attached(py).map_err(|_| poisoned())?;
        let saving = saving.as_mut().ok_or_else(|| PyValueError::new_err("this save has ended"))?;
        ask(saving).map_err(|e| raise(&e))
    }
}

/// Memory of an arena. The memory stays mapped while this value lives.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct ArenaMapping(Mapping);

#[pymethods]
impl ArenaMapping {
    #[getter]
    fn address(&self) -> usize {
        self.0.address() as usize
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

fn opened(engine: &mut Option<tensorcask_engine::Engine>) -> PyResult<&mut tensorcask_engine::Engine> {
    engine.as_mut().ok_or_else(|| PyValueError::new_err("the engine is closed"))
}

fn place_of(source: &Source) -> Place {
    match source {
        Source::Slot => ("slot", None),
        Source::Memory => ("memory", None),
        Source::Hosts => ("hosts", None),
        Source::Tier(_, url) => ("tier", Some(url.clone())),
    }
}

fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|e| PyValueError::new_err(format!("{name}={seconds}: {e}")))
}

/// Converts named options to the options of the Rust library.
fn options_of(store: &str, given: &Bound<'_, PyDict>) -> PyResult<EngineOptions> {
    let mut options = EngineOptions::new(store);
    let mut policy = None::<String>;
    let mut every = None;
    for (name, value) in given {
        let (name, name_of): (String, _) = (name.extract()?, |e: Error| raise(&e));
        let text = || value.extract::<String>();
        match name.as_str() {
            "next_tiers" => options.next_tiers = value.extract()?,
            "config" => options.config = value.extract()?,
            "fsync" => options.fsync = value.extract()?,
            "run" => options.run = value.extract()?,
            "rank" => options.rank = value.extract()?,
            "world" => options.world = value.extract()?,
            "hosts" => {
                let of = |(session, first, end, first_ranks, patience): HostsOption| {
                    Ok::<_, PyErr>(Hosts { first_ranks, patience: duration("patience", patience)?, ..Hosts::new(session, first..end) })
                };
                options.hosts = value.extract::<Option<HostsOption>>()?.map(of).transpose()?;
            }
            "peers" => options.peers = value.extract::<Option<PeersOption>>()?.map(peers_of).transpose()?,
            "slots" => options.slots = value.extract()?,
            "keep" => options.keep = value.extract()?,
            "memory_cap" => options.memory_cap = value.extract()?,
            "policy" => policy = Some(text()?),
            "every" => every = value.extract()?,
            "objective" => options.objective = ObjectiveSetting::from_name(&text()?).map_err(name_of)?,
            "codecs" => {
                let words: Vec<String> = value.extract()?;
                options.codecs = CodecRules::parse(words.iter().map(String::as_str)).map_err(name_of)?;
            }
            "roles" => {
                let words: Vec<String> = value.extract()?;
                options.roles = RoleRules::parse(words.iter().map(String::as_str)).map_err(name_of)?;
            }
            "precision" => {
                let words: Vec<String> = value.extract()?;
                options.precision = Precision::parse(words.iter().map(String::as_str)).map_err(name_of)?;
            }
            "statistics" => options.statistics = value.extract()?,
            "check" => {
                let name: Option<String> = value.extract()?;
                options.check = name.as_deref().map_or(Ok(FiniteCheck::Off), FiniteCheck::from_name).map_err(name_of)?;
            }
            "retention" => {
                options.retention = value.extract::<Option<RetentionArguments>>()?.map(retention_of).transpose()?;
            }
            "overwrite" => options.overwrite = value.extract()?,
            "keep_base_decoded" => options.keep_base_decoded = value.extract()?,
            "back_pressure" => options.back_pressure = BackPressure::from_name(&text()?).map_err(name_of)?,
            "on_agent_loss" => {
                options.on_agent_loss = match text()?.as_str() {
                    "restart" => OnAgentLoss::Restart,
                    "fail" => OnAgentLoss::Fail,
                    other => return Err(PyValueError::new_err(format!("on_agent_loss={other:?}: use 'restart' or 'fail'"))),
                }
            }
            "encode" => {
                options.encode = match text()?.as_str() {
                    "agent" => Encode::Agent,
                    "inline" => Encode::Inline,
                    other => return Err(PyValueError::new_err(format!("encode={other:?}: use 'agent' or 'inline'"))),
                }
            }
            "copy_threads" => options.copy_threads = value.extract()?,
            "agent" => options.agent = value.extract()?,
            "agent_idle_exit" => options.agent_idle_exit = duration("agent_idle_exit", value.extract()?)?,
            "folder" => options.folder = value.extract::<Option<PathBuf>>()?,
            "store_timeout" => options.store_timeout = duration("store_timeout", value.extract()?)?,
            _ => return Err(PyValueError::new_err(format!("the engine has no option {name}"))),
        }
    }
    if let Some(policy) = policy {
        options.policy = Policy::from_name(&policy, every).map_err(|e| raise(&e))?;
    }
    Ok(options)
}

/// Session, first and one beyond the last rank of this host, first rank of each host, and seconds of patience.
type HostsOption = (String, u32, u32, Vec<u32>, f64);

/// Address to listen on, addresses of all hosts, files of the certificates, replicas, jump, keep, and bandwidth.
type PeersOption = (String, Vec<String>, Option<(PathBuf, PathBuf, PathBuf)>, u32, u32, u32, Option<u64>);

fn peers_of((listen, addresses, tls, replicas, jump, keep, bandwidth): PeersOption) -> PyResult<Peers> {
    let address: SocketAddr = listen
        .parse()
        .map_err(|_| PyValueError::new_err(format!("listen={listen:?}: write the address of an interface and a port, as 0.0.0.0:7411")))?;
    let tls = tls.map(|(ca, certificate, key)| PeerTls { ca, certificate, key });
    Ok(Peers { tls, replicas, jump, keep, bandwidth, ..Peers::new(address, addresses) })
}

/// Returns the addresses of the agents of all hosts from a text, and checks them.
#[pyfunction]
fn peer_addresses(text: &str, hosts: u32) -> PyResult<Vec<String>> {
    Peers::addresses(text, hosts).map_err(|e| raise(&e))
}

/// Session, first and one beyond the last rank of this host, and first rank of each host.
type FoundHosts = (String, u32, u32, Vec<u32>);

/// Returns a name for this start of the job, the first and one beyond the last rank of this host, and the first rank of each host
/// if they have different numbers of ranks, from the variables of torchrun or Slurm.
#[pyfunction]
fn hosts_from_variables(rank: u32, variables: BTreeMap<String, String>) -> PyResult<Option<FoundHosts>> {
    let found = Hosts::from_variables(rank, |name| variables.get(name).cloned()).map_err(|e| raise(&e))?;
    Ok(found.map(|hosts| (hosts.session, hosts.local_ranks.start, hosts.local_ranks.end, hosts.first_ranks)))
}

/// Runs an agent in this process until it is told to stop. Returns the number of states that still wait in shared
/// memory.
#[pyfunction]
fn serve(py: Python<'_>, folder: Option<PathBuf>, idle_exit: f64, drain: f64, nice: i32, detach: bool) -> PyResult<u64> {
    let idle_exit = Some(duration("idle_exit", idle_exit)?).filter(|idle| !idle.is_zero());
    let options = AgentOptions { folder, idle_exit, drain: duration("drain", drain)?, nice, detach, ..AgentOptions::default() };
    match py.detach(|| run_agent(&options)).map_err(|e| raise(&e))? {
        Ended::AnotherRuns | Ended::Drained => Ok(0),
        Ended::Waiting(waiting) => Ok(waiting),
    }
}

/// Returns the status of a folder's agent as JSON.
#[pyfunction]
fn status(py: Python<'_>, folder: Option<PathBuf>) -> PyResult<String> {
    let status = py.detach(|| agent_status(folder.as_deref())).map_err(|e| raise(&e))?;
    serde_json::to_string(&status).map_err(|e| PyValueError::new_err(e.to_string()))
}

/// Tells the agent of a folder to finish the waiting states and then to stop.
#[pyfunction]
fn stop(py: Python<'_>, folder: Option<PathBuf>) -> PyResult<()> {
    py.detach(|| stop_agent(folder.as_deref())).map(|_| ()).map_err(|e| raise(&e))
}
