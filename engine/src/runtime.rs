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

/// Threads that read and write files. The allocator keeps several megabytes per thread, and tokio's default is 512
/// threads.
const MAX_BLOCKING_THREADS: usize = 16;
