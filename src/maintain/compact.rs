//! Compaction: folds a chain into a new base, without changing what any step restores to.

use std::collections::BTreeSet;
use std::time::Duration;

use rayon::prelude::*;

use crate::codec::{Chunk, EncodedChunk, encode_chunk};
use crate::commit::{Age, DEFAULT_AGE_FLOOR, Log, LogState, SnapshotRecord, Status, now_ms, refuse_features};
use crate::container::{CaskEncoder, CaskReceipt};
use crate::error::ResultExt;
use crate::limits::{to_usize, zeroed};
use crate::plan::ChunkGrid;
use crate::reader::{ChunkItem, Snapshot};
use crate::store::Upload;
use crate::tensor::Rect;
use crate::wire::{CaskRef, Event, Id, Manifest, SnapshotKind};
use crate::writer::blob_slot;
use crate::{At, Error, ErrorKind, Result, Store};

/// How to compact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompactOptions {
    /// Whether each chunk is decoded again before it goes up.
    pub verify_after_encode: bool,
    /// Pages begin at multiples of two to the power of this: 6 to 12.
    pub alignment_exponent: u8,
    /// As [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
}

impl Default for CompactOptions {
    fn default() -> Self {
        Self { verify_after_encode: true, alignment_exponent: CaskEncoder::DEFAULT_ALIGNMENT_EXPONENT, age_floor: DEFAULT_AGE_FLOOR }
    }
}

/// What a compaction made.
#[derive(Debug, Clone, PartialEq)]
pub struct Compacted {
    /// The snapshot, as it is now.
    pub record: SnapshotRecord,
    /// Number of the log entry; none if the snapshot was a base already.
    pub sequence: Option<u64>,
    /// Snapshots of its chain before.
    pub links: usize,
    /// Bytes of the casks of that chain.
    pub chain_bytes: u64,
    /// Bytes of its casks now.
    pub stored_bytes: u64,
}

/// Bytes of tensors that are decoded and encoded at once, unless one chunk is larger.
const WINDOW_BYTES: u64 = 32 << 20;

/// A chunk on its way from the chain to the new cask.
struct Moved {
    tensor: usize,
    rect: Rect,
    chunk: u64,
    first_of_tensor: bool,
    first_of_shard: bool,
    bytes: Vec<u8>,
}

impl Store {
    /// Folds the chain of a live snapshot into a base that stands for it under the same id, with the same content: deltas made
    /// against it stay as they are. Runs beside writers and readers; needs a window of 32 MiB, upload parts, and the largest blob.
    pub async fn compact(&self, at: impl Into<At>, options: &CompactOptions) -> Result<Compacted> {
        let mut log = Log::load(self).await?;
        refuse_features(self.read_store_file().await?.may_ignore())?;
        let record = match at.into() {
            At::Latest => log.state().latest(),
            At::Step(step) => log.state().at_step(step),
        };
        let record =
            record.cloned().ok_or_else(|| Error::not_found("the store has no such step; `ls` shows what it has").object(self.url()))?;
        let snapshot = Snapshot::load(self, log.state(), record.id).await?;
        let chain = snapshot.chain();
        let chain_bytes = chain.iter().fold(0u64, |sum, link| sum.saturating_add(link.stored_bytes));
        if chain.len() <= 1 {
            return Ok(Compacted { record, sequence: None, links: chain.len(), chain_bytes, stored_bytes: chain_bytes });
        }
        refuse_features(snapshot.manifest().may_ignore())?;
        // What the chain says of its chunks must be true before it is folded: afterwards nothing could tell.
        snapshot.check_content().await?;

        let age = Age::start();
        let mut manifest = snapshot.manifest().clone();
        manifest.casks = write_base(self, &snapshot, options).await?;
        (manifest.kind, manifest.parent, manifest.time_ms) = (SnapshotKind::Base, None, now_ms());
        let (bytes, digest) = manifest.encode()?;
        Manifest::decode(&bytes, self.limits())
            .map_err(|e| Error::invalid(format!("the manifest would not be readable: {}", e.message())).source(e))?;
        let path = Manifest::path_of_compacted(record.step, record.id, digest);
        self.create_unique(&path, bytes.into()).await?;
        let sequence = log
            .append(Id::random()?, |state| {
                age.check(options.age_floor)?;
                check_unchanged(state, &record)?;
                Ok(Event::Compacted { snapshot: record.id, parent: None, manifest: digest })
            })
            .await
            .in_object(path)?;
        log.write_catalog_if_due().await;
        let stored_bytes = manifest.stored_bytes();
        tracing::info!(step = record.step, snapshot = %record.id, links = chain.len(), bytes = stored_bytes, "compacted");
        let record = log.state().by_id(record.id).cloned().unwrap_or(record);
        Ok(Compacted { record, sequence: Some(sequence), links: chain.len(), chain_bytes, stored_bytes })
    }
}

/// Whether the snapshot is what it was when it was read.
fn check_unchanged(state: &LogState, before: &SnapshotRecord) -> Result<()> {
    let now = state.by_id(before.id);
    if now.is_some_and(|now| now.status != Status::Collected && now.revision == before.revision) {
        return Ok(());
    }
    let message = format!("step {} was compacted or given up by somebody else in the meantime; nothing was committed", before.step);
    Err(Error::new(ErrorKind::Conflict, message))
}

/// Writes all shards and blobs of a snapshot into casks of their own.
async fn write_base(store: &Store, snapshot: &Snapshot, options: &CompactOptions) -> Result<Vec<CaskRef>> {
    let directory = snapshot.newest().directory.clone();
    let blobs = snapshot.blobs().await?;
    let mut slots: BTreeSet<u32> = blobs.iter().map(|(rank, _)| blob_slot(*rank)).collect();
    for tensor in 0..directory.len() {
        slots.extend(directory.shards_of(tensor).map(|shard| directory.shard(shard).slot));
    }
    let mut casks = Vec::new();
    for slot in slots {
        let mut cask = BaseCask::new(store, snapshot, options, slot)?;
        for tensor in 0..directory.len() {
            cask.tensor(tensor).await?;
        }
        cask.flush().await?;
        for (rank, name) in blobs.iter().filter(|(rank, _)| blob_slot(*rank) == slot) {
            let bytes = snapshot.read_blob(*rank, name).await?;
            cask.encoder.blob(*rank, name, bytes.into())?;
            cask.upload.push(cask.encoder.take_output()).await?;
        }
        let receipt = cask.finish().await?;
        casks.push(CaskRef {
            slot,
            id: receipt.id,
            bytes: receipt.bytes,
            index_offset: receipt.index_offset,
            root_offset: receipt.root_offset,
            digest: receipt.digest,
        });
    }
    Ok(casks)
}

/// One cask of the new base, on its way up.
struct BaseCask<'a> {
    store: &'a Store,
    snapshot: &'a Snapshot,
    options: &'a CompactOptions,
    slot: u32,
    encoder: CaskEncoder,
    upload: Upload,
    window: Vec<Moved>,
    window_bytes: u64,
}

impl<'a> BaseCask<'a> {
    fn new(store: &'a Store, snapshot: &'a Snapshot, options: &'a CompactOptions, slot: u32) -> Result<Self> {
        let encoder = CaskEncoder::new(Id::random()?, options.alignment_exponent)?.with_limits(store.limits().clone());
        let directory = &snapshot.newest().directory;
        let mut expected = 0u64;
        for tensor in 0..directory.len() {
            for shard in directory.shards_of(tensor).map(|shard| directory.shard(shard)).filter(|shard| shard.slot == slot) {
                let bytes = shard.rect.element_count().and_then(|elements| directory.dtype(tensor).byte_count(elements));
                expected = expected.saturating_add(bytes.unwrap_or(0));
            }
        }
        let upload = Upload::new(store, format!("casks/{}.cask", encoder.id()), expected);
        Ok(Self { store, snapshot, options, slot, encoder, upload, window: vec![], window_bytes: 0 })
    }

    /// Takes the shards of a tensor that belong into this cask.
    async fn tensor(&mut self, tensor: usize) -> Result<()> {
        let directory = self.snapshot.newest().directory.clone();
        let mut first_of_tensor = true;
        for shard in directory.shards_of(tensor) {
            let shard = directory.shard(shard);
            if shard.slot != self.slot {
                continue;
            }
            let grid = ChunkGrid::new(directory.dtype(tensor), &shard.rect.shape)?;
            if grid.chunk_count() == 0 {
                // The empty shard comes between chunks of its neighbours.
                self.flush().await?;
                if std::mem::take(&mut first_of_tensor) {
                    self.encoder.tensor(directory.name(tensor), directory.dtype(tensor), &directory.shape(tensor))?;
                }
                self.encoder.shard(&shard.rect)?;
            }
            for chunk in 0..grid.chunk_count() {
                let bytes = grid.bytes(chunk);
                let bytes = bytes.end - bytes.start;
                if self.window_bytes + bytes > WINDOW_BYTES {
                    self.flush().await?;
                }
                self.window_bytes += bytes;
                self.window.push(Moved {
                    tensor,
                    rect: shard.rect.clone(),
                    chunk,
                    first_of_tensor: std::mem::take(&mut first_of_tensor),
                    first_of_shard: chunk == 0,
                    bytes: zeroed(to_usize(bytes, "a chunk")?, "a chunk")?,
                });
            }
        }
        Ok(())
    }

    /// Reads the chunks of the window through the chain, and encodes them anew.
    async fn flush(&mut self) -> Result<()> {
        let mut window = std::mem::take(&mut self.window);
        self.window_bytes = 0;
        let items = window.iter_mut().map(|moved| ChunkItem {
            tensor: moved.tensor,
            rect: moved.rect.clone(),
            chunk: moved.chunk,
            out: &mut moved.bytes,
        });
        self.snapshot.read_chunks(items.collect()).await?;
        let directory = self.snapshot.newest().directory.clone();
        let (registry, verify) = (self.store.registry(), self.options.verify_after_encode);
        let encode = |moved: &Moved| -> Result<EncodedChunk> {
            let elements = ChunkGrid::new(directory.dtype(moved.tensor), &moved.rect.shape)?.elements(moved.chunk);
            let chunk = Chunk {
                dtype: directory.dtype(moved.tensor),
                element_count: elements.end - elements.start,
                role: directory.role(moved.tensor),
                data: &moved.bytes,
                base: None,
            };
            encode_chunk(registry, &chunk, verify).map_err(|e| e.tensor(directory.name(moved.tensor)).chunk(moved.chunk))
        };
        let encoded: Vec<EncodedChunk> = window.par_iter().map(encode).collect::<Result<_>>()?;
        for (moved, chunk) in window.iter().zip(encoded) {
            let name = directory.name(moved.tensor);
            if moved.first_of_tensor {
                self.encoder.tensor(name, directory.dtype(moved.tensor), &directory.shape(moved.tensor))?;
            }
            if moved.first_of_shard {
                self.encoder.shard(&moved.rect)?;
            }
            self.encoder.chunk(chunk).map_err(|e| e.tensor(name).chunk(moved.chunk))?;
        }
        self.upload.push(self.encoder.take_output()).await
    }

    async fn finish(self) -> Result<CaskReceipt> {
        let (rest, receipt) = self.encoder.finish()?;
        let mut upload = self.upload;
        upload.push(rest).await?;
        upload.finish().await?;
        Ok(receipt)
    }
}
