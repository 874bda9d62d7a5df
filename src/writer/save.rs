//! One save: chunks in windows of bounded size, encoded in parallel, streamed up in order, then committed.

use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;

use super::base::{KeptShard, Parent, ShardKey};
use super::commit::is_damage;
use super::layout::{LayoutTensor, StateLayout};
use super::*;
use crate::chain::content_digests;
use crate::codec::{Chunk, ChunkKind, EncodedChunk, Registry, encode_chunk};
use crate::commit::Age;
use crate::container::CaskEncoder;
use crate::limits::zeroed;
use crate::plan::ChunkGrid;
use crate::reader::ChunkItem;
use crate::store::Upload;
use crate::wire::{CaskRef, Directory};
use crate::{Blob, TensorView};

/// Bytes of tensors that are encoded at once, unless one chunk is larger.
const WINDOW_BYTES: u64 = 32 << 20;

/// A chunk to encode.
#[derive(Debug, Clone, Copy)]
struct Job {
    tensor: usize,
    shard: usize,
    chunk: u64,
    /// The tensor's number in the parent's directory, if the parent has the shard.
    base: Option<usize>,
}

/// What the save knows when all casks are up.
pub(super) struct Written {
    pub casks: Vec<CaskRef>,
    pub content: BTreeMap<String, Digest>,
    pub chunks: BTreeMap<String, u64>,
    /// The decoded state, if the snapshot becomes the next base.
    pub kept: HashMap<ShardKey, KeptShard>,
}

impl Writer {
    /// Saves a state: all its tensors (or all shards of them), its blobs, and what the user says of it.
    ///
    /// Encoding runs on rayon's pool, called from this task; uploads go on meanwhile on a multi-threaded runtime. When
    /// this returns `Ok`, the snapshot is durable. Memory beyond the state: the base (unless
    /// [`BaseKeeping::None`]), a window of 32 MiB, at most five upload parts, and one blob.
    pub async fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<Saved> {
        self.check_usable()?;
        if let Some(key) = metadata.user.keys().find(|key| key.starts_with("tc.")) {
            return Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug())));
        }
        let layout = StateLayout::new(tensors, blobs, self.store.limits())?;
        let saved = self.save_layout(step, &layout, metadata).await;
        if let Err(e) = &saved
            && matches!(e.kind(), ErrorKind::Fenced | ErrorKind::OutcomeUnknown)
        {
            self.stopped = Some((e.kind(), e.message().to_owned()));
        }
        saved
    }

    async fn save_layout(&mut self, step: u64, layout: &StateLayout<'_>, metadata: &Metadata) -> Result<Saved> {
        let mut parent = self.parent().await?;
        loop {
            let keep = self.base.keeps() && self.becomes_base(parent.is_none());
            let age = Age::start();
            let (error, as_base) = match self.write_casks(layout, parent.as_ref(), keep).await {
                Ok(written) => match self.commit(step, layout, parent.as_ref(), &written, metadata, age).await {
                    Ok(saved) => {
                        if keep {
                            self.base.promote(saved.id, written.kept);
                        }
                        return Ok(saved);
                    }
                    // The parent was given up to garbage collection in the meantime.
                    Err(error) => {
                        let as_base = error.kind() == ErrorKind::Conflict;
                        (error, as_base)
                    }
                },
                Err(error) => {
                    let as_base = is_damage(&error);
                    (error, as_base)
                }
            };
            if keep {
                // Shards of the old base may have been released.
                self.base.clear();
            }
            if parent.is_none() || !as_base {
                return Err(error);
            }
            tracing::warn!(%error, "no delta can be made; saving a base instead");
            parent = None;
        }
    }

    /// Encodes and uploads all casks.
    async fn write_casks(&mut self, layout: &StateLayout<'_>, parent: Option<&Parent>, keep: bool) -> Result<Written> {
        let mut written = Written { casks: vec![], content: BTreeMap::new(), chunks: BTreeMap::new(), kept: HashMap::new() };
        let mut crcs: Vec<Vec<Vec<u32>>> = layout.tensors.iter().map(|t| t.shards.iter().map(|_| Vec::new()).collect()).collect();
        for slot in layout.slots() {
            let mut encoder = CaskEncoder::new(Id::random()?, self.options.alignment_exponent)?.with_limits(self.store.limits().clone());
            let tensors = layout.tensors.iter().filter(|t| t.slot == slot).flat_map(|t| &t.shards).map(|s| s.data().len() as u64);
            let blobs = layout.blobs.iter().filter(|blob| blob_slot(blob.rank) == slot).map(|blob| blob.data.len() as u64);
            let expected = tensors.chain(blobs).sum();
            let path = format!("casks/{}.cask", encoder.id());
            let mut upload = Upload::new(&self.store, path, expected);
            self.encode_slot(slot, layout, parent, keep, &mut encoder, &mut upload, &mut crcs, &mut written).await?;
            // A delta in which nothing of this slot changed has no cask for it.
            if encoder.is_empty() && parent.is_some() {
                continue;
            }
            let (rest, receipt) = encoder.finish()?;
            upload.push(rest).await?;
            upload.finish().await?;
            written.casks.push(CaskRef {
                slot,
                id: receipt.id,
                bytes: receipt.bytes,
                index_offset: receipt.index_offset,
                root_offset: receipt.root_offset,
                digest: receipt.digest,
            });
        }
        let directory = layout.directory()?;
        let directory = Directory::decode(directory.clone().into(), Digest::of(&directory), self.store.limits())?;
        let flat: Vec<&Vec<u32>> = crcs.iter().flatten().collect();
        written.content = content_digests(&directory, |shard, chunk| {
            let crc = flat.get(shard).and_then(|chunks| chunks.get(usize::try_from(chunk).ok()?));
            crc.copied().ok_or_else(|| Error::invalid("a chunk was not encoded"))
        })?;
        Ok(written)
    }

    #[allow(clippy::too_many_arguments, reason = "the state of one save, borrowed in parts")]
    async fn encode_slot(
        &mut self,
        slot: u32,
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
        keep: bool,
        encoder: &mut CaskEncoder,
        upload: &mut Upload,
        crcs: &mut [Vec<Vec<u32>>],
        written: &mut Written,
    ) -> Result<()> {
        let mut jobs = Vec::new();
        let mut window = 0u64;
        for (at, tensor) in layout.tensors.iter().enumerate() {
            if tensor.slot != slot {
                continue;
            }
            for (shard, view) in tensor.shards.iter().enumerate() {
                let base = parent.and_then(|parent| parent.find(view));
                let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
                for chunk in 0..grid.chunk_count() {
                    let bytes = grid.bytes(chunk);
                    if window + (bytes.end - bytes.start) > WINDOW_BYTES && !jobs.is_empty() {
                        self.encode_window(&std::mem::take(&mut jobs), layout, parent, keep, encoder, upload, crcs, written).await?;
                        window = 0;
                    }
                    window += bytes.end - bytes.start;
                    jobs.push(Job { tensor: at, shard, chunk, base });
                }
                if grid.chunk_count() == 0 && base.is_none() {
                    // The empty shard comes between chunks of its neighbours.
                    self.encode_window(&std::mem::take(&mut jobs), layout, parent, keep, encoder, upload, crcs, written).await?;
                    window = 0;
                    encoder.tensor(view.name(), view.dtype(), view.shape())?;
                    encoder.shard(view.rect())?;
                }
            }
        }
        self.encode_window(&jobs, layout, parent, keep, encoder, upload, crcs, written).await?;
        for blob in &layout.blobs {
            if blob_slot(blob.rank) == slot {
                encoder.blob(blob.rank, &blob.name, bytes::Bytes::copy_from_slice(&blob.data))?;
                upload.push(encoder.take_output()).await?;
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "the state of one save, borrowed in parts")]
    async fn encode_window(
        &mut self,
        jobs: &[Job],
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
        keep: bool,
        encoder: &mut CaskEncoder,
        upload: &mut Upload,
        crcs: &mut [Vec<Vec<u32>>],
        written: &mut Written,
    ) -> Result<()> {
        let read_back = self.read_missing_bases(jobs, layout, parent).await?;
        let registry = self.store.registry();
        let verify = self.options.verify_after_encode;
        let base = &self.base;
        let encoded: Vec<EncodedChunk> = jobs
            .par_iter()
            .zip(&read_back)
            .map(|(job, read_back)| {
                let tensor = &layout.tensors[job.tensor];
                let kept = read_back.is_none().then(|| kept_chunk(base, parent, tensor, *job)).flatten();
                encode_job(registry, tensor, *job, read_back.as_deref().or(kept), verify)
            })
            .collect::<Result<_>>()?;
        for (job, chunk) in jobs.iter().zip(encoded) {
            let tensor = &layout.tensors[job.tensor];
            let view = tensor.shards[job.shard];
            if job.chunk == 0 {
                if job.shard == 0 {
                    encoder.tensor(view.name(), view.dtype(), view.shape())?;
                }
                encoder.shard(view.rect())?;
            }
            let kind = chunk.codec.as_ref().map_or("unchanged", |codec| codec.id.as_str()).to_owned();
            *written.chunks.entry(kind).or_default() += 1;
            let shard_crcs = &mut crcs[job.tensor][job.shard];
            shard_crcs.push(chunk.crc);
            encoder.chunk(chunk).map_err(|e| e.tensor(view.name()).chunk(job.chunk))?;
            let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
            if keep && job.chunk + 1 == grid.chunk_count() {
                let key = (view.name().to_owned(), view.rect().clone());
                self.base.release(&key);
                let mut bytes = crate::limits::reserve(view.data().len(), "the next base")?;
                bytes.extend_from_slice(view.data());
                written.kept.insert(key, KeptShard { bytes, crcs: shard_crcs.clone() });
            }
        }
        upload.push(encoder.take_output()).await
    }

    /// For each job the chunk of the base, if it is not in memory, or damaged there.
    async fn read_missing_bases(&self, jobs: &[Job], layout: &StateLayout<'_>, parent: Option<&Parent>) -> Result<Vec<Option<Vec<u8>>>> {
        let mut buffers: Vec<Option<Vec<u8>>> = jobs.iter().map(|_| None).collect();
        let Some(parent) = parent else { return Ok(buffers) };
        let missing: Vec<bool> = jobs
            .par_iter()
            .map(|job| job.base.is_some() && kept_chunk(&self.base, Some(parent), &layout.tensors[job.tensor], *job).is_none())
            .collect();
        let mut items = Vec::new();
        for ((job, buffer), missing) in jobs.iter().zip(&mut buffers).zip(missing) {
            let (Some(tensor), true) = (job.base, missing) else { continue };
            let rect = layout.tensors[job.tensor].shards[job.shard].rect();
            let out = buffer.insert(zeroed(chunk_of(&layout.tensors[job.tensor], *job)?.len(), "a base chunk")?);
            items.push(ChunkItem { tensor, rect: rect.clone(), chunk: job.chunk, out });
        }
        if !items.is_empty() {
            parent.read(items).await?;
        }
        Ok(buffers)
    }
}

/// The bytes of a job's chunk.
fn chunk_of<'a>(tensor: &LayoutTensor<'a>, job: Job) -> Result<&'a [u8]> {
    let view = tensor.shards[job.shard];
    let range = ChunkGrid::new(view.dtype(), &view.rect().shape)?.bytes(job.chunk);
    view.data().get(range.start as usize..range.end as usize).ok_or_else(|| Error::invalid("a chunk outside its shard").tensor(view.name()))
}

/// The chunk of the base that is kept in memory, if it is there and has the checksum that it had when it was saved.
fn kept_chunk<'a>(base: &'a BaseCache, parent: Option<&Parent>, tensor: &LayoutTensor<'_>, job: Job) -> Option<&'a [u8]> {
    job.base?;
    let view = tensor.shards[job.shard];
    let shard = base.get(parent?.snapshot.record().id, &(view.name().to_owned(), view.rect().clone()))?;
    let range = ChunkGrid::new(view.dtype(), &view.rect().shape).ok()?.bytes(job.chunk);
    let bytes = shard.bytes.get(range.start as usize..range.end as usize)?;
    let crc = *shard.crcs.get(usize::try_from(job.chunk).ok()?)?;
    if crc32fast::hash(bytes) == crc {
        return Some(bytes);
    }
    tracing::warn!(tensor = view.name(), chunk = job.chunk, "the base in memory is damaged; reading it back from the store");
    None
}

fn encode_job(registry: &Registry, tensor: &LayoutTensor<'_>, job: Job, base: Option<&[u8]>, verify: bool) -> Result<EncodedChunk> {
    let view = tensor.shards[job.shard];
    let locate = |e: Error| e.tensor(view.name()).chunk(job.chunk);
    let grid = ChunkGrid::new(view.dtype(), &view.rect().shape).map_err(locate)?;
    let elements = grid.elements(job.chunk);
    let chunk = Chunk {
        dtype: view.dtype(),
        element_count: elements.end - elements.start,
        role: &tensor.description.role,
        data: chunk_of(tensor, job)?,
        base,
    };
    let encoded = encode_chunk(registry, &chunk, verify).map_err(locate)?;
    // Without a base, nothing can be unchanged or a delta.
    if base.is_none() && encoded.kind != ChunkKind::Absolute {
        return Err(locate(Error::invalid("a codec made a delta without a base")));
    }
    Ok(encoded)
}
