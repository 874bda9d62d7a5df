//! The save pipeline: encodes one state and uploads its casks.
//!
//! ```text
//! for each slot: one cask
//!   for each window of chunks
//!     encode_window            base chunks -> rounding -> partners -> check of changed rows -> encode
//!     SaveRun::append_window   record -> append and upload -> next base
//!   blobs, index
//! ```
//!
//! [`encode_window`] changes nothing, so windows can be encoded ahead of the upload, or by parameter group.
//! [`SaveRun::append_window`] takes the windows of a slot in cask order. The pipeline commits nothing: casks that no
//! log entry names do not exist for readers.
//!
//! Memory beyond the state: the base (as [`BaseKeeping`] says), one window, its base and partner chunks, and upload
//! parts.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::base_cache::{BaseCache, NextBase, key_of};
use super::base_chunks::{PartnerChunk, base_chunks, partner_chunks};
use super::cask_writer::{CaskWriter, ChunkInput, ChunkPlace, EncodeOptions, encode_chunks, standalone_chunks};
use super::changed_rows::{ChangedRows, check_changed_rows};
use super::input::{ChunkRef, SaveInput, label};
use super::layout::StateLayout;
use super::parent::Parent;
use super::rounding::{RoundingRecord, stored_forms};
use super::window::{Section, WINDOW_BYTES, plan};
use super::{BaseKeeping, WriterOptions};
use crate::chain::{Policy, content_digests};
use crate::codec::{Chunk, EncodedChunk, Partner};
use crate::precision::Rounded;
use crate::store::{Upload, concurrently};
use crate::tensor::ChunkGrid;
use crate::wire::{CaskRef, Digest, Directory, ErrorsFile, blob_slot};
use crate::{Ahead, Error, Result, Setting, Store, boxed};

/// Maximum number of small casks that are published at once.
pub(super) const MAX_SLOTS_AT_ONCE: usize = 8;

/// Encodes and uploads one state at a time, and keeps what the next delta needs.
#[derive(Debug)]
pub(super) struct SavePipeline {
    pub store: Store,
    pub options: WriterOptions,
    /// The state that the next delta is made against.
    pub base: BaseCache,
    /// Rows that changed since that state, as far as callers named them.
    pub changed_rows: ChangedRows,
    /// Second store that casks are sent to while they are being written.
    pub ahead: Option<Ahead>,
}

/// Result of a run of the pipeline: all casks are uploaded or ready for one last request, and nothing is committed.
pub(super) struct UploadedCasks {
    pub casks: Vec<CaskRef>,
    /// Small casks that are still to be published. The commit sends them together with its other objects.
    pub unpublished: Vec<Upload>,
    /// Number of chunks by codec id, or `unchanged`.
    pub chunk_counts: BTreeMap<String, u64>,
    /// CRC-32 of decoded chunks, by tensor, shard and chunk.
    pub crcs: Vec<Vec<Vec<u32>>>,
    /// The state, if it becomes the base of the next delta and is kept.
    pub next_base: Option<NextBase>,
    pub rounding: RoundingRecord,
}

impl UploadedCasks {
    fn new(layout: &StateLayout<'_>, next_base: Option<NextBase>) -> Self {
        let crcs = layout.tensors.iter().map(|tensor| tensor.shards.iter().map(|_| Vec::new()).collect()).collect();
        Self { casks: vec![], unpublished: vec![], chunk_counts: BTreeMap::new(), crcs, next_base, rounding: RoundingRecord::default() }
    }

    /// Publishes the casks that are still to be published, all at once.
    pub(super) async fn publish(&mut self) -> Result<()> {
        let unpublished = std::mem::take(&mut self.unpublished);
        concurrently(MAX_SLOTS_AT_ONCE, unpublished.into_iter().map(Upload::finish)).await.map(|_: Vec<()>| ())
    }

    /// Content digests by role, for the stored form of the state's directory.
    pub(super) fn content(&self, directory: &[u8], store: &Store) -> Result<BTreeMap<String, Digest>> {
        let digest = Digest::of(directory);
        let directory = Directory::decode(Bytes::copy_from_slice(directory), digest, store.limits())?;
        let by_shard: Vec<&Vec<u32>> = self.crcs.iter().flatten().collect();
        content_digests(&directory, |shard, chunk| {
            let crc = by_shard.get(shard).and_then(|chunks| chunks.get(usize::try_from(chunk).ok()?));
            crc.copied().ok_or_else(|| Error::invalid("a chunk was not encoded"))
        })
    }
}

impl SavePipeline {
    pub(super) fn new(store: &Store, options: WriterOptions) -> Self {
        let (store, base, changed_rows) = (store.clone(), BaseCache::default(), ChangedRows::default());
        Self { store, options, base, changed_rows, ahead: None }
    }

    /// Input of a save of this state against a parent, for stages that run before the save.
    pub(super) fn input<'a>(&'a self, layout: &'a StateLayout<'a>, parent: Option<&'a Parent>) -> SaveInput<'a> {
        SaveInput { store: &self.store, options: &self.options, changed_rows: &self.changed_rows, layout, parent }
    }

    /// Whether the pipeline keeps a state that is saved against this parent, as the base of the next delta.
    pub(super) fn keeps_state(&self, parent: Option<&Parent>) -> bool {
        self.becomes_base(parent) && self.options.base_cache != BaseKeeping::None
    }

    /// Whether the next delta is made against a state that is saved against this parent.
    pub(super) fn becomes_base(&self, parent: Option<&Parent>) -> bool {
        match self.options.policy {
            Policy::Full => false,
            Policy::Consecutive => true,
            Policy::OneShot | Policy::Adaptive => parent.is_none(),
            Policy::Intermittent { every } => parent.is_none() && every > 1,
        }
    }

    /// Encodes and uploads all casks of a state: as a delta against `parent`, or as a base.
    #[boxed]
    pub(super) async fn write_casks(&mut self, layout: &StateLayout<'_>, parent: Option<&Parent>) -> Result<UploadedCasks> {
        let next_base = self.keeps_state(parent).then(|| NextBase::new(self.options.base_cache.clone()));
        let Self { store, options, base, changed_rows, ahead } = self;
        let input = SaveInput { store, options, changed_rows, layout, parent };
        let roles: BTreeSet<&str> = layout.tensors.iter().map(|tensor| tensor.description.role.as_str()).collect();
        let needs = roles.into_iter().flat_map(|role| input.store.registry().partner_roles(role));
        let partner_base_roles = needs.filter(|need| need.base).map(|need| need.role).collect();
        let mut slots = layout.slots();
        if layout.tensors.iter().any(|tensor| input.precision(tensor).setting != Setting::Lossless) {
            // The blob of rounding errors.
            slots.insert(blob_slot(layout.rank));
        }
        let uploaded = UploadedCasks::new(layout, next_base);
        let mut run = SaveRun { input, base, ahead: ahead.as_ref(), partner_base_roles, uploaded };
        for slot in slots {
            run.write_cask(slot).await?;
        }
        Ok(run.uploaded)
    }
}

/// One run of the pipeline.
struct SaveRun<'a> {
    input: SaveInput<'a>,
    base: &'a mut BaseCache,
    ahead: Option<&'a Ahead>,
    /// Roles whose base chunks are needed for tensors of other roles, too.
    partner_base_roles: BTreeSet<&'static str>,
    uploaded: UploadedCasks,
}

impl SaveRun<'_> {
    /// Writes the cask of a slot: shards by tensor and position, then blobs.
    #[boxed]
    async fn write_cask(&mut self, slot: u32) -> Result<()> {
        let input = self.input;
        let options = EncodeOptions::from(input.options);
        let mut cask = CaskWriter::new(input.store, slot, options, input.layout.slot_bytes(slot), self.ahead)?;
        let (shards, grids) = shards_of_slot(&input, slot)?;
        for section in plan(grids, WINDOW_BYTES) {
            match section {
                Section::Window(window) => {
                    let chunks: Vec<ChunkRef> = window.iter().map(|at| ChunkRef { chunk: at.chunk, ..shards[at.shard] }).collect();
                    let window = encode_window(&input, self.base, options, self.uploaded.next_base.as_ref(), chunks).await?;
                    self.append_window(&mut cask, window).await?;
                }
                Section::EmptyShard(shard) => cask.begin_shard(label(input.view(shards[shard])))?,
            }
        }
        for (rank, name, bytes) in self.blobs_of_slot(slot)? {
            cask.append_blob(rank, &name, bytes).await?;
        }
        // If nothing in the slot changed, a delta has no cask for it.
        if !cask.is_empty() || input.parent.is_none() {
            let (cask, upload) = cask.seal().await?;
            match upload.is_one_request() {
                true => self.uploaded.unpublished.push(upload),
                false => upload.finish().await?,
            }
            self.uploaded.casks.push(cask);
        }
        Ok(())
    }

    /// Records an encoded window, appends it to the cask, and takes it into the next base.
    async fn append_window(&mut self, cask: &mut CaskWriter, window: EncodedWindow<'_>) -> Result<()> {
        let input = self.input;
        let EncodedWindow { chunks, rounded, encoded, mut standalone } = window;
        for ((&at, rounded), encoded) in chunks.iter().zip(&rounded).zip(&encoded) {
            self.uploaded.rounding.record(&input, at, rounded)?;
            let codec = encoded.codec.as_ref().map_or("unchanged", |codec| codec.id.as_str());
            *self.uploaded.chunk_counts.entry(codec.to_owned()).or_default() += 1;
            self.uploaded.crcs[at.tensor][at.shard].push(encoded.crc);
        }
        let places: Vec<ChunkPlace<'_>> = chunks.iter().map(|&at| input.place(at)).collect();
        cask.append(&places, encoded).await?;
        let Some(next) = &mut self.uploaded.next_base else { return Ok(()) };
        for (&at, rounded) in chunks.iter().zip(&rounded) {
            let view = input.view(at);
            next.add_chunk(view.data().len(), &rounded.data, standalone.next())?;
            if at.chunk + 1 == input.grid(at)?.chunk_count() {
                if !self.partner_base_roles.contains(view.role()) {
                    self.base.release(&key_of(view));
                }
                next.finish_shard(view, self.uploaded.crcs[at.tensor][at.shard].clone());
            }
        }
        Ok(())
    }

    /// Blobs of a slot by rank and name: those of the caller, and the errors of all tensors that were rounded. The slot
    /// of blobs is the last of a rank, so all its tensors are rounded by then.
    fn blobs_of_slot(&mut self, slot: u32) -> Result<Vec<(u32, String, Bytes)>> {
        let layout = self.input.layout;
        let own = layout.blobs.iter().filter(|blob| blob_slot(blob.rank) == slot);
        let mut blobs: Vec<(u32, String, Bytes)> =
            own.map(|blob| (blob.rank, blob.name.to_string(), Bytes::copy_from_slice(&blob.data))).collect();
        if blob_slot(layout.rank) == slot
            && let Some(errors) = self.uploaded.rounding.take_blob()?
        {
            blobs.push((layout.rank, ErrorsFile::BLOB.to_owned(), errors.into()));
            blobs.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        }
        Ok(blobs)
    }
}

/// A window of chunks, encoded and not yet in a cask.
struct EncodedWindow<'a> {
    chunks: Vec<ChunkRef>,
    /// Stored form of each chunk.
    rounded: Vec<Rounded<'a>>,
    encoded: Vec<EncodedChunk>,
    /// Forms that decode without anything else, if the next base keeps encoded chunks.
    standalone: std::vec::IntoIter<EncodedChunk>,
}

/// Encodes a window of chunks. Reads the input and the base cache; changes nothing.
#[boxed]
async fn encode_window<'a>(
    input: &SaveInput<'a>,
    cache: &BaseCache,
    options: EncodeOptions,
    next_base: Option<&NextBase>,
    chunks: Vec<ChunkRef>,
) -> Result<EncodedWindow<'a>> {
    let registry = input.store.registry();
    let bases: Vec<Option<Cow<'_, [u8]>>> = base_chunks(input, cache, &chunks).await?;
    let rounded = stored_forms(input, &chunks, &bases)?;
    let partner_chunks: Vec<Vec<PartnerChunk<'_>>> = partner_chunks(input, cache, &chunks).await?;
    check_changed_rows(input, &chunks, &rounded, &bases).await?;
    let partners: Vec<Vec<Partner<'_>>> =
        partner_chunks.iter().map(|partners| partners.iter().map(PartnerChunk::as_partner).collect()).collect();
    let changed_rows: Vec<Option<Vec<u64>>> = chunks
        .iter()
        .zip(&bases)
        .map(|(&at, base)| if base.is_none() { input.changed_rows(at) } else { Ok(None) })
        .collect::<Result<_>>()?;
    let mut inputs = Vec::with_capacity(chunks.len());
    for (index, &at) in chunks.iter().enumerate() {
        let (base, changed_rows) = (bases[index].as_deref(), changed_rows[index].as_deref());
        let chunk = Chunk { base, changed_rows, partners: &partners[index], ..input.codec_chunk(at, &rounded[index].data)? };
        inputs.push(ChunkInput { place: input.place(at), chunk, rounded: rounded[index].given.as_ref() });
    }
    let encoded = encode_chunks(registry, options, &inputs).await?;
    let standalone = match next_base.is_some_and(NextBase::keeps_encoded) {
        true => standalone_chunks(registry, options, &inputs, &encoded)?,
        false => vec![],
    };
    drop(inputs);
    Ok(EncodedWindow { chunks, rounded, encoded, standalone: standalone.into_iter() })
}

/// Shards of a slot in cask order, each as its first chunk, and their grids. An empty shard that the parent has is
/// unchanged, and left out.
fn shards_of_slot(input: &SaveInput<'_>, slot: u32) -> Result<(Vec<ChunkRef>, Vec<ChunkGrid>)> {
    let (mut shards, mut grids) = (Vec::new(), Vec::new());
    for (number, tensor) in input.layout.tensors.iter().enumerate().filter(|(_, tensor)| tensor.slot == slot) {
        for (shard, view) in tensor.shards.iter().enumerate() {
            let base = input.parent.and_then(|parent| parent.find(view));
            let at = ChunkRef { tensor: number, shard, chunk: 0, base };
            let grid = input.grid(at)?;
            if grid.chunk_count() > 0 || base.is_none() {
                shards.push(at);
                grids.push(grid);
            }
        }
    }
    Ok((shards, grids))
}

impl From<&WriterOptions> for EncodeOptions {
    fn from(options: &WriterOptions) -> Self {
        let &WriterOptions { objective, verify_after_encode, alignment_exponent, .. } = options;
        Self { objective, verify_after_encode, alignment_exponent }
    }
}
