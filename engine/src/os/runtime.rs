//! The tokio runtimes of the trainer and of the agent.

use tensorcask::{Error, ErrorKind, Result};
use tokio::runtime::{Builder, Runtime};

/// Builds a runtime whose threads have this name.
pub(crate) fn build(thread_name: &str, worker_threads: usize) -> Result<Runtime> {
    let built = Builder::new_multi_thread()
        .worker_threads(worker_threads)
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .thread_name(thread_name)
        .enable_all()
        .build();
    built.map_err(|e| Error::new(ErrorKind::Storage, format!("cannot start the threads of `{thread_name}`: {e}")).source(e))
}

/// A runtime whose end waits for nothing: a thread that reads a file of a storage that hangs may never return.
#[derive(Debug)]
pub(crate) struct QuickRuntime(Option<Runtime>);

impl QuickRuntime {
    pub(crate) fn new(runtime: Runtime) -> Self {
        Self(Some(runtime))
    }

    /// The runtime, which lives as long as this value.
    pub(crate) fn get(&self) -> Result<&Runtime> {
        self.0.as_ref().ok_or_else(|| Error::new(ErrorKind::Storage, "the threads of this process have ended"))
    }
}

impl Drop for QuickRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Threads that read and write files. The allocator keeps several megabytes per thread, and tokio's default is 512
/// threads. A storage that hangs keeps the threads that wait for it, and must leave some for others.
const MAX_BLOCKING_THREADS: usize = 48;
