//! Rewriting: reads shards of a snapshot through its chain and writes them into new casks, without a base.
//!
//! Compaction, reduction and consolidation all move tensors this way. The decoded bytes of a chunk do not change, so
//! content digests and deltas made against the snapshot stay valid.
//!
//! Memory: one window of 32 MiB, the partners of its chunks, upload parts, and the largest blob.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rayon::prelude::*;
use tokio::sync::OnceCell;

use super::compact::CompactOptions;
use crate::codec::{Candidate, Chunk, Codec, EncodedChunk, Partner};
use crate::limits::{to_usize, zeroed};
use crate::precision::Setting;
use crate::reader::{ChunkItem, ReadItem, Snapshot, shard_errors};
use crate::tensor::{ChunkGrid, Rect, Run, copy_run, rects_of_run};
use crate::wire::{CaskRef, Directory, blob_slot};
use crate::writer::{
    CaskWriter, ChunkInput, ChunkPlace, EncodeOptions, PlannedChunk, Section, ShardLabel, WINDOW_BYTES, encode_chunks, plan,
};
use crate::{Result, Store, boxed, parallel};

/// A rewritten cask.
pub(super) struct RewrittenCask {
    pub cask: CaskRef,
    /// CRC-32 of the decoded chunks, in the order of the shards.
    pub crcs: Vec<u32>,
}

/// Rewrites a snapshot into a store.
pub(super) struct Rewriter<'a> {
    /// Destination of the casks.
    store: &'a Store,
    snapshot: &'a Snapshot,
    options: &'a CompactOptions,
    /// Whether tensors of a role will be in the rewritten snapshot. Codecs may use no other tensors as partners.
    keeps: &'a (dyn Fn(&str) -> bool + Sync),
    rounding_codecs: OnceCell<RoundingCodecs>,
}

impl<'a> Rewriter<'a> {
    pub(super) fn new(
        store: &'a Store,
        snapshot: &'a Snapshot,
        options: &'a CompactOptions,
        keeps: &'a (dyn Fn(&str) -> bool + Sync),
    ) -> Self {
        Self { store, snapshot, options, keeps, rounding_codecs: OnceCell::new() }
    }

    /// Rewrites all blobs and all tensors with a role to keep, slot by slot.
    #[boxed]
    pub(super) async fn rewrite(&self) -> Result<Vec<CaskRef>> {
        let directory = &self.snapshot.chain.newest().directory;
        let blobs = self.snapshot.blobs().await?;
        let mut slots: BTreeMap<u32, Vec<(usize, Rect)>> = blobs.iter().map(|(rank, _)| (blob_slot(*rank), vec![])).collect();
        for tensor in (0..directory.len()).filter(|&tensor| (self.keeps)(directory.role(tensor))) {
            for shard in directory.shards_of(tensor).map(|shard| directory.shard(shard)) {
                slots.entry(shard.slot).or_default().push((tensor, shard.rect));
            }
        }
        let mut casks = Vec::new();
        for (slot, shards) in slots {
            casks.push(self.rewrite_cask(slot, &shards).await?.cask);
        }
        Ok(casks)
    }

    /// Writes one cask: the given shards, then all blobs of the slot. A shard is the number of a tensor and a
    /// rectangle: that of a shard of the snapshot, or the whole tensor. Shards ascend by tensor and position.
    #[boxed]
    pub(super) async fn rewrite_cask(&self, slot: u32, shards: &[(usize, Rect)]) -> Result<RewrittenCask> {
        let directory = &self.snapshot.chain.newest().directory;
        let options = EncodeOptions::from(self.options);
        let mut sources = Vec::with_capacity(shards.len());
        let mut expected_bytes = 0u64;
        for (tensor, rect) in shards {
            let dtype = directory.dtype(*tensor);
            let bytes = rect.element_count().and_then(|count| dtype.byte_count(count));
            expected_bytes = expected_bytes.saturating_add(bytes.unwrap_or(0));
            let grid = ChunkGrid::new(dtype, &rect.shape)?;
            sources.push(SourceShard { tensor: *tensor, shape: directory.shape(*tensor), rect: rect.clone(), grid });
        }
        let mut cask = CaskWriter::new(self.store, slot, options, expected_bytes, None)?;
        let mut crcs = Vec::new();
        for section in plan(sources.iter().map(|source| source.grid), WINDOW_BYTES) {
            match section {
                Section::Window(window) => {
                    let chunks = self.read_window(&sources, &window).await?;
                    let encoded = self.encode_window(&chunks, options).await?;
                    crcs.extend(encoded.iter().map(|chunk| chunk.crc));
                    let places: Vec<ChunkPlace<'_>> = chunks.iter().map(|chunk| chunk.place(directory)).collect();
                    cask.append(&places, encoded).await?;
                }
                Section::EmptyShard(shard) => cask.begin_shard(sources[shard].label(directory))?,
            }
        }
        for (rank, name) in self.snapshot.blobs().await?.iter().filter(|(rank, _)| blob_slot(*rank) == slot) {
            let bytes = self.snapshot.read_blob(*rank, name).await?;
            cask.append_blob(*rank, name, bytes.into()).await?;
        }
        Ok(RewrittenCask { cask: cask.finish().await?, crcs })
    }

    /// Reads a window of chunks and their partners through the chain.
    #[boxed]
    async fn read_window<'s>(&self, shards: &'s [SourceShard], window: &[PlannedChunk]) -> Result<Vec<WindowChunk<'s>>> {
        let directory = &self.snapshot.chain.newest().directory;
        let mut chunks = Vec::with_capacity(window.len());
        for at in window {
            let shard = &shards[at.shard];
            let decoded = DecodedChunk::zeroed(directory, shard.tensor, &shard.rect, at.chunk)?;
            let mut partners = Vec::new();
            for need in self.store.registry().partner_roles(directory.role(shard.tensor)) {
                let Some(partner) = directory.partner(shard.tensor, need.role).filter(|_| (self.keeps)(need.role)) else { continue };
                let partner = DecodedChunk::zeroed(directory, partner, &shard.rect, at.chunk)?;
                if partner.is_shard(directory) == decoded.is_shard(directory) {
                    partners.push((need.role, partner));
                }
            }
            chunks.push(WindowChunk { shard, decoded, partners });
        }
        let (mut all, mut partners) = (Vec::new(), Vec::new());
        for chunk in &mut chunks {
            all.push(&mut chunk.decoded);
            partners.extend(chunk.partners.iter_mut().map(|(_, partner)| partner));
        }
        all.append(&mut partners);
        let (in_shards, in_wholes): (Vec<&mut DecodedChunk>, Vec<&mut DecodedChunk>) =
            all.into_iter().partition(|decoded| decoded.is_shard(directory));
        let items = in_shards.into_iter().map(|decoded| {
            let DecodedChunk { tensor, rect, chunk, bytes } = decoded;
            ChunkItem { tensor: *tensor, rect: rect.clone(), chunk: *chunk, out: bytes }
        });
        self.snapshot.chain.read_chunks(items.collect()).await?;
        for decoded in in_wholes {
            read_across_shards(self.snapshot, decoded).await?;
        }
        Ok(chunks)
    }

    /// Encodes a window of chunks without a base.
    #[boxed]
    async fn encode_window(&self, chunks: &[WindowChunk<'_>], options: EncodeOptions) -> Result<Vec<EncodedChunk>> {
        let rounding_codecs = self.rounding_codecs.get_or_try_init(|| read_rounding_codecs(self.snapshot)).await?;
        let directory = &self.snapshot.chain.newest().directory;
        let partners: Vec<Vec<Partner<'_>>> = chunks.iter().map(|chunk| chunk.partners(directory)).collect();
        let mut inputs: Vec<ChunkInput<'_>> = chunks
            .iter()
            .zip(&partners)
            .map(|(chunk, partners)| ChunkInput {
                place: chunk.place(directory),
                chunk: chunk.as_chunk(directory, partners),
                rounded: None,
            })
            .collect();
        let again = inputs.par_iter().map(|input| {
            let shard = (input.place.shard.tensor.to_owned(), input.place.shard.rect.clone());
            rounding_codecs.get(&shard).and_then(|codec| encode_rounded(codec, &input.chunk))
        });
        let candidates: Vec<Option<Candidate>> = match rounding_codecs.is_empty() {
            true => Vec::new(),
            false => parallel::run(|| again.collect()),
        };
        for (input, candidate) in inputs.iter_mut().zip(&candidates) {
            input.rounded = candidate.as_ref();
        }
        encode_chunks(self.store.registry(), options, &inputs).await
    }
}

/// Codecs that rounded shards, by tensor name and rectangle. Such a codec often stores the rounded values in fewer
/// bytes than any other.
type RoundingCodecs = HashMap<(String, Rect), Arc<dyn Codec>>;

/// Reads which codecs rounded shards of a snapshot, from the snapshot's record of rounding errors.
#[boxed]
async fn read_rounding_codecs(snapshot: &Snapshot) -> Result<RoundingCodecs> {
    let mut codecs = RoundingCodecs::new();
    for shard in shard_errors(snapshot).await? {
        if let Some(codec) = shard.setting.parse::<Setting>().ok().and_then(|setting| setting.codec()) {
            codecs.insert((shard.tensor.clone(), shard.rect()), codec);
        }
    }
    Ok(codecs)
}

/// A shard to write.
struct SourceShard {
    /// Number of the tensor in the snapshot's directory.
    tensor: usize,
    /// Global shape of the tensor.
    shape: Vec<u64>,
    rect: Rect,
    grid: ChunkGrid,
}

impl SourceShard {
    fn label<'a>(&'a self, directory: &'a Directory) -> ShardLabel<'a> {
        ShardLabel { tensor: directory.name(self.tensor), dtype: self.grid.dtype(), shape: &self.shape, rect: &self.rect }
    }
}

/// Decoded bytes of a chunk of the snapshot.
struct DecodedChunk {
    tensor: usize,
    rect: Rect,
    chunk: u64,
    bytes: Vec<u8>,
}

impl DecodedChunk {
    /// A buffer for the chunk.
    fn zeroed(directory: &Directory, tensor: usize, rect: &Rect, chunk: u64) -> Result<Self> {
        let range = ChunkGrid::new(directory.dtype(tensor), &rect.shape)?.bytes(chunk);
        let bytes = zeroed(to_usize(range.end.saturating_sub(range.start), "a chunk")?, "a chunk")?;
        Ok(Self { tensor, rect: rect.clone(), chunk, bytes })
    }

    /// Whether the snapshot has a shard with this rectangle.
    fn is_shard(&self, directory: &Directory) -> bool {
        directory.find_shard(self.tensor, &self.rect).is_some()
    }
}

/// A chunk of a window, with the partners that the snapshot has for it.
struct WindowChunk<'s> {
    shard: &'s SourceShard,
    decoded: DecodedChunk,
    /// Partner chunks by role.
    partners: Vec<(&'static str, DecodedChunk)>,
}

impl WindowChunk<'_> {
    fn place<'a>(&'a self, directory: &'a Directory) -> ChunkPlace<'a> {
        ChunkPlace { shard: self.shard.label(directory), chunk: self.decoded.chunk }
    }

    fn partners<'a>(&'a self, directory: &Directory) -> Vec<Partner<'a>> {
        let as_partner = |(role, partner): &'a (&'static str, DecodedChunk)| Partner {
            role,
            dtype: directory.dtype(partner.tensor),
            data: &partner.bytes,
            base: None,
        };
        self.partners.iter().map(as_partner).collect()
    }

    fn as_chunk<'a>(&'a self, directory: &'a Directory, partners: &'a [Partner<'a>]) -> Chunk<'a> {
        let grid = self.shard.grid;
        let elements = grid.elements(self.decoded.chunk);
        Chunk {
            role: directory.role(self.shard.tensor),
            partners,
            row_elements: grid.row_elements(),
            ..Chunk::new(grid.dtype(), elements.end.saturating_sub(elements.start), &self.decoded.bytes)
        }
    }
}

/// Encodes a rounded chunk again with the codec that rounded it; `None` if that would lose anything more.
fn encode_rounded(codec: &Arc<dyn Codec>, chunk: &Chunk<'_>) -> Option<Candidate> {
    let candidate = Candidate { codec: codec.clone(), encoded: codec.estimate(chunk).and_then(|_| codec.encode(chunk).ok())? };
    let mut decoded = zeroed(chunk.data.len(), "a chunk").ok()?;
    candidate.decode(chunk, &mut decoded).ok()?;
    (decoded == chunk.data).then_some(candidate)
}

/// Reads a chunk of a whole tensor from the shards that it crosses.
#[boxed]
async fn read_across_shards(snapshot: &Snapshot, decoded: &mut DecodedChunk) -> Result<()> {
    let dtype = snapshot.chain.newest().directory.dtype(decoded.tensor);
    let elements = ChunkGrid::new(dtype, &decoded.rect.shape)?.elements(decoded.chunk);
    let mut pieces = Vec::new();
    for rect in rects_of_run(&decoded.rect.shape, elements) {
        let bytes = rect.element_count().and_then(|count| dtype.byte_count(count));
        pieces.push((zeroed(to_usize(bytes.unwrap_or(u64::MAX), "a piece of a chunk")?, "a piece of a chunk")?, rect));
    }
    let items = pieces.iter_mut().map(|(bytes, rect)| ReadItem { tensor: decoded.tensor, rect: rect.clone(), out: bytes });
    snapshot.chain.read_items(items.collect()).await?;
    let mut destination = 0;
    for (bytes, rect) in &pieces {
        let count = rect.element_count().unwrap_or(0);
        copy_run(dtype, Run { source: 0, destination, count }, bytes, &mut decoded.bytes);
        destination += count;
    }
    Ok(())
}

impl From<&CompactOptions> for EncodeOptions {
    fn from(options: &CompactOptions) -> Self {
        let &CompactOptions { objective, verify_after_encode, alignment_exponent, .. } = options;
        Self { objective, verify_after_encode, alignment_exponent }
    }
}
