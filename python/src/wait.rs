//! Waits for the library without the interpreter lock, and checks for Ctrl-C meanwhile.

use std::future::Future;
use std::time::Duration;

use pyo3::prelude::*;
use tensorcask::Result;
use tensorcask::blocking::Store;

use crate::errors::raise;
use crate::logging;

/// Interval between checks for signals.
const INTERVAL: Duration = Duration::from_millis(100);

/// Runs `work` to completion, or until a signal handler raises. In that case, drops the unfinished work: no commit is
/// ever partial. Must be called without the interpreter lock.
pub(crate) fn until_done<T>(store: &Store, work: impl Future<Output = Result<T>>) -> PyResult<T> {
    let done = store.block_on(async {
        tokio::select! {
            biased;
            result = work => result.map_err(|error| raise(&error)),
            interrupted = interrupted() => Err(interrupted),
        }
    });
    logging::take_raised().map_or(done, Err)
}

async fn interrupted() -> PyErr {
    loop {
        // Checks at once when the work waits for the first time: it may have kept this thread busy for long.
        if let Some(error) = logging::take_raised() {
            return error;
        }
        if let Err(error) = Python::attach(|py| py.check_signals()) {
            return error;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
