//! Objects that go to a second store while they are being written to a first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use super::Store;
use super::upload::Upload;
use crate::Result;

/// Bytes that may wait for the second store, beside the parts that are under way there. What it does not take in time it gets later.
const MAX_WAITING_BYTES: u64 = 64 << 20;

/// Casks on their way to another store before the snapshot that needs them is committed in its own.
///
/// [`Writer::send_ahead`](crate::Writer::send_ahead) has each cask go there, too, while its chunks are being encoded;
/// [`Copier::finish_ahead`](crate::Copier::finish_ahead) goes on from where that has got to. The writer never waits for the other store, and
/// does not fail with it: what that does not take in time, the copier reads. Nothing is published there before the copier has finished it,
/// and has compared it with its checksums. What is left when the last of these is dropped is given up.
#[derive(Debug, Clone)]
pub struct Ahead(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    destination: Store,
    waiting: Arc<AtomicU64>,
    begun: Mutex<HashMap<String, JoinHandle<Result<Begun>>>>,
}

/// An object of which a part is on its way.
#[derive(Debug)]
pub(crate) struct Begun {
    pub upload: Upload,
    /// So many of its first bytes are in it.
    pub bytes: u64,
    /// Of these, so many have left.
    pub sent_bytes: u64,
}

impl Ahead {
    /// To this store, which has to be there when a writer begins to send.
    pub fn new(destination: &Store) -> Self {
        Self(Arc::new(Inner { destination: destination.clone(), waiting: Arc::default(), begun: Mutex::default() }))
    }

    /// The other store.
    pub fn destination(&self) -> &Store {
        &self.0.destination
    }

    fn begun(&self) -> MutexGuard<'_, HashMap<String, JoinHandle<Result<Begun>>>> {
        self.0.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an object of about this size.
    pub(super) fn begin(&self, object: &str, expected_bytes: u64) -> Tee {
        let (sender, receiver) = unbounded_channel();
        let upload = Upload::new(&self.0.destination, object.to_owned(), expected_bytes);
        let sending = tokio::spawn(send(upload, receiver, self.0.waiting.clone()));
        self.begun().insert(object.to_owned(), sending);
        Tee { sender: Some(sender), waiting: self.0.waiting.clone() }
    }

    /// What has become of an object whose writing has ended; none if it has to be copied whole.
    pub(crate) async fn take(&self, object: &str) -> Option<Begun> {
        let sending = self.begun().remove(object)?;
        match sending.await {
            Ok(Ok(begun)) => Some(begun),
            Ok(Err(error)) => {
                tracing::warn!(store = self.0.destination.url(), object, %error, "could not be sent ahead; it is copied whole");
                None
            }
            Err(error) => {
                tracing::warn!(store = self.0.destination.url(), object, %error, "sending ahead ended early; it is copied whole");
                None
            }
        }
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

fn byte_count(pieces: &[Bytes]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

/// The writer's end of an object that goes to a second store, too.
pub(super) struct Tee {
    sender: Option<UnboundedSender<Vec<Bytes>>>,
    waiting: Arc<AtomicU64>,
}

impl Tee {
    /// Passes the next bytes on, unless the other store is behind: then no more of this object is sent ahead.
    pub(super) fn push(&mut self, pieces: &[Bytes]) {
        let Some(sender) = &self.sender else { return };
        let count = byte_count(pieces);
        let waiting = self.waiting.fetch_add(count, Ordering::Relaxed);
        if (waiting > 0 && waiting + count > MAX_WAITING_BYTES) || sender.send(pieces.to_vec()).is_err() {
            self.waiting.fetch_sub(count, Ordering::Relaxed);
            self.sender = None;
        }
    }
}
