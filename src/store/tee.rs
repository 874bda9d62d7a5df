//! Passes the bytes of an object to a second store, as long as that store keeps up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

/// Writer's end of an object that also goes to a second store.
pub(super) struct Tee {
    pub(super) sender: Option<UnboundedSender<Vec<Bytes>>>,
    /// Bytes of all objects that wait for the second store.
    pub(super) waiting: Arc<AtomicU64>,
    pub(super) max_waiting_bytes: u64,
}

impl Tee {
    /// Passes the next bytes on. If the other store is behind, sends no more of this object ahead.
    pub(super) fn push(&mut self, pieces: &[Bytes]) {
        let Some(sender) = &self.sender else { return };
        let count = byte_count(pieces);
        let waiting = self.waiting.fetch_add(count, Ordering::Relaxed);
        if (waiting > 0 && waiting + count > self.max_waiting_bytes) || sender.send(pieces.to_vec()).is_err() {
            self.waiting.fetch_sub(count, Ordering::Relaxed);
            self.sender = None;
        }
    }
}

pub(super) fn byte_count(pieces: &[Bytes]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}
