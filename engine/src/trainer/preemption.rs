//! Preemption: signals and notices that announce the end of this process, and the drain before it ends.
//!
//! A signal sets a flag and nothing else. The training loop looks at the flag between steps, drains its last save, and ends.
//! So no save is cut off, and no state is saved in the middle of a step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorcask::{Error, ErrorKind, Result};
use tokio::signal::unix::{SignalKind, signal};

use super::engine::Engine;
use crate::ipc::messages::Until;
use crate::os::runtime::{self, QuickRuntime};

/// Signals to watch for, and the time between the first of them and the end of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreemptionOptions {
    /// Numbers of the signals. Default: SIGTERM, which schedulers send before they kill, and SIGUSR1, which Slurm sends on
    /// request (`--signal=USR1@120`).
    pub signals: Vec<i32>,
    /// Time that the scheduler leaves after the signal, less what the process needs to end. Default: 25 s, because `torchrun`,
    /// Slurm and Kubernetes kill after 30 s.
    pub grace: Duration,
}

impl Default for PreemptionOptions {
    fn default() -> Self {
        Self { signals: vec![SignalKind::terminate().as_raw_value(), SignalKind::user_defined1().as_raw_value()], grace: DEFAULT_GRACE }
    }
}

/// Watches for the announced end of this process. Clones share it.
///
/// ```no_run
/// # fn main() -> tensorcask::Result<()> {
/// # let (tensors, blobs, metadata) = (vec![], vec![], tensorcask::Metadata::default());
/// use tensorcask_engine::{Engine, EngineOptions, Preemption, PreemptionOptions};
/// let mut engine = Engine::start(EngineOptions::new("s3://bucket/run42"))?;
/// let preemption = Preemption::watch(PreemptionOptions::default())?;
/// engine.skip_waits_while(preemption.flag());
/// for step in 0.. {
///     // Train, then save.
///     engine.save(step, &tensors, &blobs, &metadata)?;
///     if preemption.is_requested() {
///         let drained = preemption.drain(&mut engine)?;
///         println!("the last save is {:?}", drained.level);
///         break;
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Preemption {
    grace: Duration,
    notice: Arc<Mutex<Option<Notice>>>,
    /// Whether there is a notice.
    flag: Arc<AtomicBool>,
    /// The watching thread ends with the last clone.
    _runtime: Arc<QuickRuntime>,
}

/// The first announcement.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Notice {
    at: Instant,
    reason: String,
}

/// Result of a drain: how safe the last save is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drained {
    /// Level that the last save has reached.
    pub level: Until,
    /// Reason why it is not durable, if one is known.
    pub problem: Option<String>,
}

impl Preemption {
    /// Begins to watch. From now on, these signals no longer end the process.
    pub fn watch(options: PreemptionOptions) -> Result<Self> {
        let runtime = runtime::build("tensorcask-preemption", 1)?;
        let notice = Arc::new(Mutex::new(None));
        let flag = Arc::new(AtomicBool::new(false));
        for number in options.signals {
            let _guard = runtime.enter();
            let mut received =
                signal(SignalKind::from_raw(number)).map_err(|e| Error::invalid(format!("signal {number} cannot be watched: {e}")))?;
            let notice = notice.clone();
            let flag = flag.clone();
            runtime.spawn(async move {
                while received.recv().await.is_some() {
                    note(&notice, &flag, &format!("signal {number}"));
                }
            });
        }
        Ok(Self { grace: options.grace, notice, flag, _runtime: Arc::new(QuickRuntime::new(runtime)) })
    }

    /// Announces the end of the process, for example after a notice of the cloud.
    pub fn request(&self, reason: &str) {
        note(&self.notice, &self.flag, reason);
    }

    /// A flag that is set once the end of the process is announced, for
    /// [`Engine::skip_waits_while`](crate::Engine::skip_waits_while): a save that waits for a slot would use up the time.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// Whether the end of the process is announced.
    pub fn is_requested(&self) -> bool {
        lock(&self.notice).is_some()
    }

    /// Cause of the announced end, such as `signal 15`; `None` before.
    pub fn reason(&self) -> Option<String> {
        lock(&self.notice).as_ref().map(|notice| notice.reason.clone())
    }

    /// Time that is left; all of it before the end is announced.
    pub fn time_left(&self) -> Duration {
        let passed = lock(&self.notice).as_ref().map_or(Duration::ZERO, |notice| notice.at.elapsed());
        self.grace.saturating_sub(passed)
    }

    /// Waits until the last save is durable, at most for the time that is left. Then returns its level. The agent goes on after
    /// this process, as long as nobody kills it.
    pub fn drain(&self, engine: &mut Engine) -> Result<Drained> {
        let waited = engine.wait(Until::Durable, self.time_left())?;
        let level = match waited.reached {
            true => Until::Durable,
            false if has_reached(engine, Until::Replicated)? => Until::Replicated,
            false if has_reached(engine, Until::Encoded)? => Until::Encoded,
            false => Until::Copied,
        };
        let failure = waited.failures.last().filter(|_| waited.failed).map(|failure| failure.message.clone());
        Ok(Drained { level, problem: failure.or(waited.problem).filter(|_| !waited.reached) })
    }
}

/// Whether the last save has reached a level. Without peers, no save is replicated.
fn has_reached(engine: &mut Engine, level: Until) -> Result<bool> {
    match engine.wait(level, Duration::ZERO) {
        Ok(waited) => Ok(waited.reached),
        Err(error) if error.kind() == ErrorKind::InvalidArgument => Ok(false),
        Err(error) => Err(error),
    }
}

fn lock(notice: &Mutex<Option<Notice>>) -> MutexGuard<'_, Option<Notice>> {
    notice.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes the first announcement.
fn note(notice: &Mutex<Option<Notice>>, flag: &AtomicBool, reason: &str) {
    lock(notice).get_or_insert_with(|| {
        tracing::info!(reason, "the end of this process is announced");
        Notice { at: Instant::now(), reason: reason.to_owned() }
    });
    flag.store(true, Ordering::Relaxed);
}

const DEFAULT_GRACE: Duration = Duration::from_secs(25);
