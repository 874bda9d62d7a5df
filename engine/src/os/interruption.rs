//! A check that ends a wait, such as that of an interpreter for signals.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tensorcask::{Error, Result};
use tokio::runtime::Runtime;

/// A check that can end a wait with an error. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Interruption(Option<Arc<Mutex<Check>>>);

type Check = Box<dyn FnMut() -> Result<()> + Send + Sync>;

impl Interruption {
    pub(crate) fn new(check: impl FnMut() -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(Mutex::new(Box::new(check)))))
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |check| check.lock().unwrap_or_else(PoisonError::into_inner)())
    }

    /// Sleeps. Fails if the check does.
    pub(crate) fn sleep(&self, time: Duration) -> Result<()> {
        let mut left = time;
        while !left.is_zero() {
            self.check()?;
            let piece = left.min(INTERVAL);
            std::thread::sleep(piece);
            left = left.saturating_sub(piece);
        }
        self.check()
    }

    /// Runs work on this thread to its end, or until the check fails. The work is then dropped.
    pub(crate) fn block_on<T>(&self, runtime: &Runtime, work: impl Future<Output = Result<T>>) -> Result<T> {
        runtime.block_on(async {
            tokio::select! {
                biased;
                done = work => done,
                error = self.failed() => Err(error),
            }
        })
    }

    async fn failed(&self) -> Error {
        loop {
            if let Err(error) = self.check() {
                return error;
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

impl fmt::Debug for Interruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Interruption({})", self.0.is_some())
    }
}

/// Interval between checks.
pub(crate) const INTERVAL: Duration = Duration::from_millis(50);
