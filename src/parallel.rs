//! Parallel work, also in a process that was forked.
//!
//! Rayon's global pool belongs to the process that started it. A forked child has its memory but none of its threads, so work that is handed
//! to the global pool there waits for ever. PyTorch's data loaders and many training scripts fork, so all parallel work of this crate
//! goes through [`run`], which gives a forked child a pool of its own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The process that uses the global pool; 0 before the first call.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The pool of a forked process, and its process id.
static OF_CHILD: Mutex<Option<(u32, Arc<rayon::ThreadPool>)>> = Mutex::new(None);

/// Runs work whose parallel iterators use a pool that has threads in this process: rayon's global one, or that of a forked child.
///
/// ```
/// use rayon::prelude::*;
/// let squares: Vec<u64> = tensorcask::parallel::run(|| (0..4u64).into_par_iter().map(|n| n * n).collect());
/// assert_eq!(squares, [0, 1, 4, 9]);
/// ```
pub fn run<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let process = std::process::id();
    match OWNER.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => work(),
        Err(owner) if owner == process => work(),
        Err(_) => pool_of_child(process).install(work),
    }
}

fn pool_of_child(process: u32) -> Arc<rayon::ThreadPool> {
    let mut kept = OF_CHILD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, pool)) = &*kept
        && *owner == process
    {
        return pool.clone();
    }
    let pool = Arc::new(new_pool());
    if let Some((_, of_parent)) = kept.replace((process, pool.clone())) {
        // Dropping it would wait for threads that this process does not have.
        std::mem::forget(of_parent);
    }
    pool
}

/// A pool; of the calling thread alone where the system gives no other threads.
fn new_pool() -> rayon::ThreadPool {
    let built = rayon::ThreadPoolBuilder::new().build();
    built.or_else(|_| rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build()).unwrap_or_else(|error| {
        // As rayon's own global pool does in a process that can start no thread.
        unreachable!("no thread for parallel work: {error}")
    })
}
