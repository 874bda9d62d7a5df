//! Uploads one object in bounded memory: a single put while the object is small, otherwise equal multipart parts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::io::unconditional;
use super::local_file::LocalFile;
use super::tee::Tee;
use super::{Medium, Objects, Store};
use crate::{Error, ErrorKind, Result, boxed, parallel};

/// Objects below this size are sent in one request. No part of a remote object is smaller.
const MIN_PART_BYTES: u64 = 8 << 20;
/// Size of a part on local disk, where a part is a call of `write`: small, so that few bytes wait in memory.
const LOCAL_PART_BYTES: u64 = 2 << 20;
/// S3 allows 10,000 parts. The margin covers an estimate of the size that was too low.
const MAX_PARTS: u64 = 9_000;
/// Number of parts in flight at once. Limits the memory of uploads to this many parts.
const CONCURRENT_PARTS: usize = 4;
/// Largest number of parts in flight at once of a save, which has more of them if it has more threads.
const MAX_CONCURRENT_PARTS: usize = 32;

/// A limit on parts in flight that several uploads share, and the measured rate of these uploads.
#[derive(Debug, Clone)]
pub(crate) struct PartBudget {
    permits: Arc<Semaphore>,
    meter: Arc<Mutex<Meter>>,
}

impl Default for PartBudget {
    fn default() -> Self {
        Self::of(CONCURRENT_PARTS)
    }
}

/// Bytes that were sent, and the time during which at least one request was sending.
#[derive(Debug, Default)]
struct Meter {
    sent_bytes: u64,
    busy: Duration,
    requests: u32,
    bytes_in_flight: u64,
    /// Time up to which `busy` counts, while a request is sending.
    counted_to: Option<Instant>,
}

impl Meter {
    fn count(&mut self, now: Instant) {
        if let Some(since) = self.counted_to.filter(|_| self.requests > 0) {
            self.busy = self.busy.saturating_add(now.saturating_duration_since(since));
        }
        self.counted_to = Some(now);
    }
}

/// Progress of the uploads of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UploadProgress {
    /// Bytes that the store has taken.
    pub sent_bytes: u64,
    /// Time during which at least one request was sending.
    pub busy: Duration,
    /// Bytes of requests that have no answer yet.
    pub bytes_in_flight: u64,
}

impl PartBudget {
    fn of(parts: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(parts)), meter: Arc::default() }
    }

    /// Budget of a save, whose chunks are encoded by all threads.
    pub(crate) fn of_save() -> Self {
        Self::of(CONCURRENT_PARTS.saturating_mul(parallel::thread_pairs()).min(MAX_CONCURRENT_PARTS))
    }

    fn meter(&self) -> MutexGuard<'_, Meter> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Progress until now.
    pub(crate) fn progress(&self) -> UploadProgress {
        let mut meter = self.meter();
        meter.count(Instant::now());
        UploadProgress { sent_bytes: meter.sent_bytes, busy: meter.busy, bytes_in_flight: meter.bytes_in_flight }
    }

    /// Begins to measure a request.
    fn measure(&self, bytes: u64) -> Measurement {
        let mut meter = self.meter();
        meter.count(Instant::now());
        meter.requests = meter.requests.saturating_add(1);
        meter.bytes_in_flight = meter.bytes_in_flight.saturating_add(bytes);
        Measurement { budget: self.clone(), bytes, is_sent: false }
    }
}

/// A request that is being sent. Dropping it ends the measurement.
struct Measurement {
    budget: PartBudget,
    bytes: u64,
    is_sent: bool,
}

impl Measurement {
    fn end(mut self, is_sent: bool) {
        self.is_sent = is_sent;
    }
}

impl Drop for Measurement {
    fn drop(&mut self) {
        let mut meter = self.budget.meter();
        meter.count(Instant::now());
        meter.requests = meter.requests.saturating_sub(1);
        meter.bytes_in_flight = meter.bytes_in_flight.saturating_sub(self.bytes);
        if self.is_sent {
            meter.sent_bytes = meter.sent_bytes.saturating_add(self.bytes);
        }
    }
}

/// Upload of one object.
pub(crate) struct Upload {
    store: Store,
    pub(super) object: String,
    part_bytes: u64,
    pending: Vec<Bytes>,
    pending_bytes: u64,
    total_bytes: u64,
    multipart: Option<Box<dyn MultipartUpload>>,
    running: JoinSet<Result<(), object_store::Error>>,
    budget: PartBudget,
    /// End of a second store that gets the same bytes.
    pub(super) tee: Option<Tee>,
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Upload({}, {} bytes)", self.object, self.total_bytes)
    }
}

impl Upload {
    /// Creates an upload of about `expected_bytes`, which sets the size of parts.
    pub(crate) fn new(store: &Store, object: String, expected_bytes: u64) -> Self {
        let part_bytes = match store.objects().medium {
            Medium::Local(_) => LOCAL_PART_BYTES,
            Medium::Memory | Medium::Remote => MIN_PART_BYTES.max(expected_bytes.div_ceil(MAX_PARTS)),
        };
        Self {
            store: store.clone(),
            object,
            part_bytes,
            pending: Vec::new(),
            pending_bytes: 0,
            total_bytes: 0,
            multipart: None,
            running: JoinSet::new(),
            budget: PartBudget::default(),
            tee: None,
        }
    }

    /// Shares a budget of parts in flight with other uploads.
    pub(crate) fn within(mut self, budget: &PartBudget) -> Self {
        self.budget = budget.clone();
        self
    }

    /// Returns the number of bytes sent.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.total_bytes - self.pending_bytes
    }

    /// Takes the next bytes. Waits while too many parts are in flight.
    #[boxed]
    pub(crate) async fn push(&mut self, bytes: Vec<Bytes>) -> Result<()> {
        if let Some(tee) = &mut self.tee {
            tee.push(&bytes);
        }
        for piece in bytes {
            self.pending_bytes += piece.len() as u64;
            self.total_bytes += piece.len() as u64;
            self.pending.push(piece);
        }
        while self.pending_bytes > self.most_pending_bytes() {
            let part = self.take_part();
            self.send_part(part).await?;
        }
        Ok(())
    }

    /// Number of bytes that may wait for the next part. A small object goes in one request.
    fn most_pending_bytes(&self) -> u64 {
        if self.multipart.is_some() { self.part_bytes } else { self.part_bytes.max(MIN_PART_BYTES) }
    }

    /// Whether nothing was sent yet, and one request will send the whole object.
    pub(crate) fn is_one_request(&self) -> bool {
        self.multipart.is_none()
    }

    /// Bytes of an object of which nothing was sent. Gives the upload up.
    pub(crate) fn into_bytes(mut self) -> Vec<Bytes> {
        std::mem::take(&mut self.pending)
    }

    /// Sends the rest and publishes the object.
    #[boxed]
    pub(crate) async fn finish(mut self) -> Result<()> {
        let rest = std::mem::take(&mut self.pending);
        if self.multipart.is_none() {
            let measurement = self.budget.measure(self.total_bytes);
            self.store.inner.options.bandwidth.wait_for(self.total_bytes).await;
            let sent = self.store.objects().put_whole(&self.object, PutPayload::from_iter(rest)).await;
            measurement.end(sent.is_ok());
            return sent;
        }
        let sent = async {
            if !rest.is_empty() {
                self.send_part(rest).await?;
            }
            while let Some(done) = self.running.join_next().await {
                self.part_done(done)?;
            }
            Ok(())
        }
        .await;
        // Completes only after all parts have succeeded: an object store may publish an object even if a part failed.
        if let Err(e) = sent {
            self.abort().await;
            return Err(e);
        }
        let Some(mut multipart) = self.multipart.take() else { return Ok(()) };
        let store = self.store.clone();
        let object = self.object.clone();
        let total_bytes = self.total_bytes;
        let _pending = store.objects().request("write", &object, 0);
        match multipart.complete().await {
            Ok(_) => Ok(()),
            Err(e) if store.objects().medium == Medium::Remote && is_there(store.objects(), &object, total_bytes).await => {
                tracing::debug!(object, error = %e, "the upload is complete although its answer says otherwise");
                Ok(())
            }
            Err(e) => {
                // Whether the object exists is unknown. Its name is unique and nothing refers to it.
                Err(unconditional(&object, e))
            }
        }
    }

    /// Aborts the upload. Leaves nothing behind if the storage allows that.
    #[boxed]
    pub(crate) async fn abort(&mut self) {
        self.running.shutdown().await;
        if let Some(mut multipart) = self.multipart.take()
            && let Err(e) = multipart.abort().await
        {
            tracing::warn!(object = %self.object, error = %e, "an unfinished upload could not be removed");
        }
    }

    async fn send_part(&mut self, part: Vec<Bytes>) -> Result<()> {
        if self.multipart.is_none() {
            let objects = self.store.objects();
            let _pending = objects.request("write", &self.object, 0);
            let client = objects.client().await?;
            let started: Result<Box<dyn MultipartUpload>, _> = match objects.local_folder() {
                Some(folder) => LocalFile::begin(folder.join(&self.object), objects.fsync).await.map(|file| Box::new(file) as _),
                None => client.put_multipart(&objects.path(&self.object)).await,
            };
            self.multipart = Some(started.map_err(|e| unconditional(&self.object, e))?);
        }
        while let Some(done) = self.running.try_join_next() {
            self.part_done(done)?;
        }
        let permit = self.budget.permits.clone().acquire_owned().await;
        if let Some(multipart) = self.multipart.as_mut() {
            let bytes: u64 = part.iter().map(|piece| piece.len() as u64).sum();
            let pending = self.store.objects().request("write", &self.object, bytes);
            let sent = multipart.put_part(PutPayload::from_iter(part));
            let measurement = self.budget.measure(bytes);
            let bandwidth = self.store.inner.options.bandwidth.clone();
            self.running.spawn(async move {
                let _permit = permit;
                bandwidth.wait_for(bytes).await;
                let sent = sent.await;
                drop(pending);
                measurement.end(sent.is_ok());
                sent
            });
        }
        Ok(())
    }

    fn part_done(&self, done: Result<Result<(), object_store::Error>, tokio::task::JoinError>) -> Result<()> {
        match done {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(unconditional(&self.object, e)),
            Err(e) => Err(Error::new(ErrorKind::Storage, format!("an upload task ended early: {e}")).object(&self.object)),
        }
    }

    /// Splits exactly one part off the pending bytes.
    fn take_part(&mut self) -> Vec<Bytes> {
        let mut missing = self.part_bytes;
        let mut taken = 0;
        let mut part = Vec::new();
        for piece in &mut self.pending {
            if missing == 0 {
                break;
            }
            let take = (piece.len() as u64).min(missing);
            part.push(piece.split_to(take as usize));
            missing -= take;
            if piece.is_empty() {
                taken += 1;
            }
        }
        self.pending.drain(..taken);
        self.pending_bytes -= self.part_bytes - missing;
        part
    }
}

/// Returns whether an upload whose completion failed has arrived after all.
async fn is_there(objects: &Objects, object: &str, bytes: u64) -> bool {
    let Ok(client) = objects.client().await else { return false };
    let _pending = objects.request("look up", object, 0);
    matches!(client.head(&objects.path(object)).await, Ok(meta) if meta.size == bytes)
}

impl Drop for Upload {
    /// Aborts the upload of a failed or cancelled save, as long as a runtime is left to send the request.
    fn drop(&mut self) {
        self.running.abort_all();
        if self.store.objects().local_folder().is_some() {
            // Dropping the upload of a file removes the file.
            return;
        }
        if let (Some(mut multipart), Ok(runtime)) = (self.multipart.take(), tokio::runtime::Handle::try_current()) {
            let object = std::mem::take(&mut self.object);
            runtime.spawn(async move {
                if let Err(e) = multipart.abort().await {
                    tracing::warn!(object, error = %e, "an unfinished upload could not be removed");
                }
            });
        }
    }
}
