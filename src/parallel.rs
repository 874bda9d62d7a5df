//! Runs parallel work, also in a forked process.
//!
//! Rayon's global pool belongs to the process that started it. A forked child has the pool's memory but none of its
//! threads, so work on the global pool would wait forever there. PyTorch's data loaders and many training scripts fork.
//! All parallel work of this crate therefore goes through [`run`], which gives a forked child a pool of its own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Largest number of decoded bytes in the first window of a save, and with two threads in every window, unless one unit is
/// larger. A state of this size has one window.
pub(crate) const SAVE_WINDOW_BYTES: u64 = 16 << 20;

/// Limit on the bytes of a window, for machines with many cores.
const MAX_WINDOW_BYTES: u64 = 256 << 20;

/// Id of the process that uses the global pool; 0 before the first call.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Pool of a forked process, with its process id.
static OF_CHILD: Mutex<Option<(u32, Arc<rayon::ThreadPool>)>> = Mutex::new(None);

/// Runs work whose parallel iterators use a pool with threads in this process: rayon's global pool, or the pool of a
/// forked child.
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

/// Number of pairs of threads, at least 1. Limits that suit a machine with two cores grow with it.
pub(crate) fn thread_pairs() -> usize {
    (run(rayon::current_num_threads) / 2).max(1)
}

/// Size of a window of work that all threads share, in bytes: `of_two` with two threads or fewer, and in proportion with
/// more, so that each thread finds work in every window.
pub(crate) fn window_bytes(of_two: u64) -> u64 {
    of_two.saturating_mul(thread_pairs() as u64).min(MAX_WINDOW_BYTES.max(of_two))
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
        // Dropping the parent's pool would wait for threads that this process does not have.
        std::mem::forget(of_parent);
    }
    pool
}

/// Creates a pool. If the system provides no threads, the pool uses only the calling thread.
fn new_pool() -> rayon::ThreadPool {
    let built = rayon::ThreadPoolBuilder::new().build();
    built.or_else(|_| rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build()).unwrap_or_else(|error| {
        // Rayon's own global pool also panics in a process that can start no thread.
        unreachable!("no thread for parallel work: {error}")
    })
}
