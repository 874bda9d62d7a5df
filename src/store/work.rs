//! How far the operations on a store have come, for progress bars.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Store;

/// Work of the operations on a store and its clones.
#[derive(Debug, Default)]
pub(super) struct WorkCounters {
    pub(super) planned: AtomicU64,
    pub(super) done: AtomicU64,
}

/// Planned work of one operation: bytes or objects.
#[derive(Debug)]
pub(crate) struct Work {
    store: Store,
    left: u64,
}

impl Work {
    /// Plans work. What is left of it counts as done when the plan is dropped.
    pub(crate) fn plan(store: &Store, units: u64) -> Self {
        store.objects().work.planned.fetch_add(units, Ordering::Relaxed);
        Self { store: store.clone(), left: units }
    }

    /// Counts units as done, up to those that were planned.
    pub(crate) fn add(&mut self, units: u64) {
        let done = units.min(self.left);
        self.left = self.left.saturating_sub(done);
        self.store.objects().work.done.fetch_add(done, Ordering::Release);
    }

    /// Counts all but `left` units as done.
    pub(crate) fn leave(&mut self, left: u64) {
        self.add(self.left.saturating_sub(left));
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.leave(0);
    }
}
