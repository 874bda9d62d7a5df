//! Sends objects to a second store while they are still being written to the first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;

use super::Store;
use super::tee::{Tee, byte_count};
use super::upload::Upload;
use crate::{Result, parallel};

/// Limit on the bytes that wait for the second store, besides the parts in flight; larger if a window of the save is larger,
/// because a window comes at once. Beyond the limit, an object is no longer sent ahead, and the copier copies the rest later.
const MAX_WAITING_BYTES: u64 = 64 << 20;

/// Casks sent to another store before their snapshot is committed in its own store.
///
/// [`Writer::send_ahead`](crate::Writer::send_ahead) sends each cask to the other store while its chunks are encoded.
/// [`Copier::finish_ahead`](crate::maintain::Copier::finish_ahead) continues each upload from the point that it has
/// reached.
///
/// The writer never waits for the other store and does not fail with it: the copier reads whatever the other store did
/// not take in time. An object is published there only after the copier has completed it and compared it with its
/// checksums. Dropping the last clone aborts the unfinished uploads.
#[derive(Debug, Clone)]
pub struct AheadUploads(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    destination: Store,
    waiting: Arc<AtomicU64>,
    max_waiting_bytes: u64,
    begun: Mutex<HashMap<String, JoinHandle<Result<Begun>>>>,
}

/// An object whose upload has begun.
#[derive(Debug)]
pub(crate) struct Begun {
    pub upload: Upload,
    /// Number of bytes, from the start of the object, that the upload has taken.
    pub bytes: u64,
    /// Number of those bytes that have been sent.
    pub sent_bytes: u64,
}

impl AheadUploads {
    /// Sends to `destination`, which must exist before the writer begins to send.
    pub fn new(destination: &Store) -> Self {
        let max_waiting_bytes = MAX_WAITING_BYTES.max(parallel::window_bytes(parallel::SAVE_WINDOW_BYTES));
        Self(Arc::new(Inner { destination: destination.clone(), waiting: Arc::default(), max_waiting_bytes, begun: Mutex::default() }))
    }

    /// Returns the destination store.
    pub fn destination(&self) -> &Store {
        &self.0.destination
    }

    fn begun(&self) -> MutexGuard<'_, HashMap<String, JoinHandle<Result<Begun>>>> {
        self.0.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an object of about `expected_bytes`.
    fn begin(&self, object: &str, expected_bytes: u64) -> Tee {
        let (sender, receiver) = unbounded_channel();
        let upload = Upload::new(&self.0.destination, object.to_owned(), expected_bytes);
        let sending = tokio::spawn(send(upload, receiver, self.0.waiting.clone()));
        self.begun().insert(object.to_owned(), sending);
        Tee { sender: Some(sender), waiting: self.0.waiting.clone(), max_waiting_bytes: self.0.max_waiting_bytes }
    }

    /// Returns the upload of an object whose writing has ended. Returns `None` if the object must be copied whole.
    pub(crate) async fn take(&self, object: &str) -> Option<Begun> {
        let sending = self.begun().remove(object)?;
        match sending.await {
            Ok(Ok(begun)) => Some(begun),
            Ok(Err(error)) => {
                tracing::warn!(store = self.0.destination.url(), object, %error, "the object could not be sent ahead; the copier will copy the whole object");
                None
            }
            Err(error) => {
                tracing::warn!(store = self.0.destination.url(), object, %error, "sending the object ahead ended early; the copier will copy the whole object");
                None
            }
        }
    }
}

impl Upload {
    /// Also sends the same bytes to another store.
    pub(crate) fn sent_ahead(mut self, ahead: Option<&AheadUploads>, expected_bytes: u64) -> Self {
        self.tee = ahead.map(|ahead| ahead.begin(&self.object, expected_bytes));
        self
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let begun = self.begun.get_mut().unwrap_or_else(PoisonError::into_inner);
        begun.values().for_each(JoinHandle::abort);
    }
}

async fn send(mut upload: Upload, mut receiver: UnboundedReceiver<Vec<Bytes>>, waiting: Arc<AtomicU64>) -> Result<Begun> {
    let mut bytes = 0;
    while let Some(pieces) = receiver.recv().await {
        let count = byte_count(&pieces);
        let pushed = upload.push(pieces).await;
        waiting.fetch_sub(count, Ordering::Relaxed);
        pushed?;
        bytes += count;
    }
    let sent_bytes = upload.sent_bytes();
    Ok(Begun { upload, bytes, sent_bytes })
}
