//! A thread that makes the memory of an arena present in the background, so that saves need not wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::Arena;

/// A thread that makes an arena present. Dropping this ends the thread.
#[derive(Debug)]
pub(crate) struct Population {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Population {
    /// Starts the thread. It goes through the slots in order, as the first saves do.
    pub(crate) fn start(arena: &Arc<Arena>) -> std::io::Result<Self> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let arena = arena.clone();
        let stop = is_stopped.clone();
        let thread = std::thread::Builder::new().name("tensorcask-memory".to_owned());
        let thread = thread.spawn(move || populate(&arena, &stop))?;
        Ok(Self { is_stopped, thread: Some(thread) })
    }
}

impl Drop for Population {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn populate(arena: &Arena, is_stopped: &AtomicBool) {
    // Of this thread alone. Training comes first.
    let _ = rustix::process::nice(NICE);
    for block in 0..arena.file().blocks() {
        if is_stopped.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = arena.file().make_block_present(block) {
            tracing::warn!(%error, "cannot take the memory of the arena in advance; a save that needs it will fail if that lasts");
            return;
        }
    }
}

/// Added to the nice value of the thread.
const NICE: i32 = 10;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::Arena;
    use super::{Population, populate};

    #[test]
    fn all_slots_become_present() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let arena = Arc::new(Arena::create(&folder.path().join("arena"), 3, 5 << 20, 0).unwrap());
        let present = || std::fs::metadata(folder.path().join("arena")).unwrap().blocks() * 512;
        assert!(present() < 1 << 20, "creating an arena takes {} bytes", present());
        populate(&arena, &AtomicBool::new(true));
        assert!(present() < 1 << 20, "a stopped thread takes {} bytes", present());
        populate(&arena, &AtomicBool::new(false));
        assert_eq!(present(), arena.file().bytes());
    }

    #[test]
    fn a_dropped_population_has_ended() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let arena = Arc::new(Arena::create(&folder.path().join("arena"), 2, 64 << 20, 0).unwrap());
        drop(Population::start(&arena).unwrap());
        assert_eq!(Arc::strong_count(&arena), 1);
    }
}
