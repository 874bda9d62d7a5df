//! The tokio runtime of a blocking store.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::{Error, ErrorKind, Result};

/// Maximum number of threads that read and write local files. More threads are no faster, and each keeps allocator
/// memory.
const MAX_BLOCKING_THREADS: usize = 16;

/// How long the last handle waits for work on local files. A thread in a file system that hangs never ends.
const LAST_WORK: Duration = Duration::from_secs(5);

/// A runtime that several handles share. The last handle stops its threads.
///
/// A forked child inherits the handles but none of the threads. Stopping the runtime in a child would wait for them
/// forever, so a child leaks the runtime instead.
#[derive(Debug, Clone)]
pub(super) struct Runtime(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    runtime: Option<tokio::runtime::Runtime>,
    /// Process that started the threads.
    process: u32,
}

impl Runtime {
    /// Starts a runtime with two worker threads.
    pub(super) fn start() -> Result<Self> {
        let built = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(MAX_BLOCKING_THREADS)
            .thread_name("tensorcask-io")
            .enable_all()
            .build();
        let runtime = built.map_err(|e| Error::new(ErrorKind::Storage, format!("cannot start threads for I/O: {e}")).source(e))?;
        Ok(Self(Arc::new(Owned { runtime: Some(runtime), process: std::process::id() })))
    }

    /// Runs a future to completion. Boxes the future, so the runtime's code is compiled once and not for each future
    /// type.
    pub(super) fn wait<F: Future>(&self, future: F) -> F::Output {
        let mut output = None;
        if let Some(runtime) = &self.0.runtime {
            let erased: Pin<Box<dyn Future<Output = ()> + '_>> = Box::pin(async { output = Some(future.await) });
            runtime.block_on(erased);
        }
        output.unwrap_or_else(|| unreachable!("the runtime is only taken when it is dropped, and a finished future leaves its output"))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.process != std::process::id() {
            std::mem::forget(runtime);
        } else if tokio::runtime::Handle::try_current().is_ok() {
            // A thread of a runtime must not wait for another. Python's garbage collector runs on any thread, also on one of
            // ours that hands a log message to Python. If no thread can be started, the runtime lives on.
            let runtime = ManuallyDrop::new(runtime);
            let _ = std::thread::Builder::new().spawn(move || ManuallyDrop::into_inner(runtime).shutdown_timeout(LAST_WORK));
        } else {
            runtime.shutdown_timeout(LAST_WORK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Runtime;

    #[test]
    fn the_last_handle_may_go_on_a_thread_of_a_runtime() {
        let (ends, ended) = std::sync::mpsc::channel::<()>();
        let last = Runtime::start().unwrap();
        last.0.runtime.as_ref().unwrap().spawn(async move {
            let _ends = ends;
            std::future::pending::<()>().await;
        });
        Runtime::start().unwrap().wait(async { drop(last) });
        // The runtime has ended, and its tasks with it.
        assert!(ended.recv().is_err());
    }
}
