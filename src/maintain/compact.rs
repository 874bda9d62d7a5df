//! Compaction: folds a chain into a new base, without changing what any step restores to.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use rayon::prelude::*;

use crate::codec::{Candidate, Chunk, Codec, EncodedChunk, Objective, Partner, Registry, encode_given};
use crate::commit::{Age, DEFAULT_AGE_FLOOR, Log, LogState, SnapshotRecord, Status, now_ms, refuse_features};
use crate::container::{CaskEncoder, CaskReceipt};
use crate::error::ResultExt;
use crate::limits::{to_usize, zeroed};
use crate::parallel;
use crate::reader::{ChunkItem, ReadItem, Snapshot};
use crate::store::Upload;
use crate::tensor::ChunkGrid;
use crate::tensor::{Rect, Run, copy_run, rects_of_run};
use crate::wire::blob_slot;
use crate::wire::{CaskRef, Digest, Directory, Event, Id, Manifest, SnapshotKind};
use crate::{At, Error, ErrorKind, Result, Setting, Store, boxed};

/// How to compact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompactOptions {
    /// What codecs are chosen for.
    pub objective: Objective,
    /// Whether each chunk is decoded again before it goes up.
    pub verify_after_encode: bool,
    /// Pages begin at multiples of two to the power of this: 6 to 12.
    pub alignment_exponent: u8,
    /// As [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
}

impl Default for CompactOptions {
    fn default() -> Self {
        Self {
            objective: Objective::SMALLEST,
            verify_after_encode: true,
            alignment_exponent: CaskEncoder::DEFAULT_ALIGNMENT_EXPONENT,
            age_floor: DEFAULT_AGE_FLOOR,
        }
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

impl Moved {
    /// Whether the snapshot has a shard of this rectangle.
    fn is_shard(&self, directory: &Directory) -> bool {
        directory.find_shard(self.tensor, &self.rect).is_some()
    }
}

impl Store {
    /// Folds the chain of a live snapshot into a base that stands for it under the same id, with the same content: deltas made
    /// against it stay as they are. Runs beside writers and readers; needs a window of 32 MiB, the partners of its chunks,
    /// upload parts, and the largest blob.
    pub async fn compact(&self, at: impl Into<At>, options: &CompactOptions) -> Result<Compacted> {
        let mut log = Log::load(self).await?;
        refuse_features(self.read_store_file().await?.may_ignore())?;
        let record = match at.into() {
            At::Latest => log.state().latest(),
            At::Step(step) => log.state().at_step(step),
        };
        let record = record
            .cloned()
            .ok_or_else(|| Error::not_found("the store has no such step; `tensorcask ls` lists its steps").object(self.url()))?;
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
        manifest.casks = write_base(self, &snapshot, options, &|_| true).await?;
        (manifest.kind, manifest.parent, manifest.time_ms) = (SnapshotKind::Base, None, now_ms());
        let (path, digest) = put_manifest(self, &record, &manifest).await?;
        let sequence = log
            .append(Id::random()?, |state| {
                age.check(options.age_floor)?;
                check_unchanged(state, &record)?;
                Ok(Event::Compacted { snapshot: record.id, parent: None, manifest: digest, roles: None })
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

/// Writes the manifest that is to stand for a snapshot from now on; gives its path and digest.
#[boxed]
pub(super) async fn put_manifest(store: &Store, record: &SnapshotRecord, manifest: &Manifest) -> Result<(String, Digest)> {
    let (bytes, digest) = manifest.encode()?;
    Manifest::decode(&bytes, store.limits())
        .map_err(|e| Error::invalid(format!("the manifest would not be readable: {}", e.message())).source(e))?;
    let path = Manifest::path_of_compacted(record.step, record.id, digest);
    store.create_unique(&path, bytes.into()).await?;
    Ok((path, digest))
}

/// Whether the snapshot is what it was when it was read.
pub(super) fn check_unchanged(state: &LogState, before: &SnapshotRecord) -> Result<()> {
    let now = state.by_id(before.id);
    if now.is_some_and(|now| now.status != Status::Collected && now.revision == before.revision) {
        return Ok(());
    }
    let message = format!("step {} was compacted or given up by somebody else in the meantime; nothing was committed", before.step);
    Err(Error::new(ErrorKind::Conflict, message))
}

/// Writes the shards of tensors whose role `keeps` wants, and all blobs, into casks of their own.
#[boxed]
pub(super) async fn write_base(
    store: &Store,
    snapshot: &Snapshot,
    options: &CompactOptions,
    keeps: &(dyn Fn(&str) -> bool + Sync),
) -> Result<Vec<CaskRef>> {
    let directory = &snapshot.newest().directory;
    let blobs = snapshot.blobs().await?;
    let mut slots: BTreeMap<u32, Vec<(usize, Rect)>> = blobs.iter().map(|(rank, _)| (blob_slot(*rank), vec![])).collect();
    for tensor in (0..directory.len()).filter(|&tensor| keeps(directory.role(tensor))) {
        for shard in directory.shards_of(tensor).map(|shard| directory.shard(shard)) {
            slots.entry(shard.slot).or_default().push((tensor, shard.rect));
        }
    }
    let mut casks = Vec::new();
    for (slot, shards) in slots {
        casks.push(write_cask(store, snapshot, options, slot, &shards, keeps).await?.0);
    }
    Ok(casks)
}

/// Writes shards (tensor by number, rectangle), ascending, and all blobs of a slot into a cask of a store. The rectangles are
/// those of the snapshot's shards, or whole tensors; of partners, only roles that `keeps` wants will be there. Gives the checksums
/// of the decoded chunks, too, in the order of the shards.
#[boxed]
pub(super) async fn write_cask(
    store: &Store,
    snapshot: &Snapshot,
    options: &CompactOptions,
    slot: u32,
    shards: &[(usize, Rect)],
    keeps: &(dyn Fn(&str) -> bool + Sync),
) -> Result<(CaskRef, Vec<u32>)> {
    let mut cask = BaseCask::new(store, snapshot, options, shards, keeps)?;
    for shard in snapshot.shard_errors().await? {
        if let Some(codec) = shard.setting.parse::<Setting>().ok().and_then(|setting| setting.codec()) {
            cask.rounding.insert((shard.tensor.clone(), shard.rect()), codec);
        }
    }
    for (at, (tensor, rect)) in shards.iter().enumerate() {
        let first_of_tensor = at.checked_sub(1).and_then(|at| shards.get(at)).is_none_or(|(before, _)| before != tensor);
        cask.shard(*tensor, rect, first_of_tensor).await?;
    }
    cask.flush().await?;
    for (rank, name) in snapshot.blobs().await?.iter().filter(|(rank, _)| blob_slot(*rank) == slot) {
        let bytes = snapshot.read_blob(*rank, name).await?;
        cask.encoder.blob(*rank, name, bytes.into())?;
        cask.upload.push(cask.encoder.take_output()).await?;
    }
    let (receipt, crcs) = cask.finish().await?;
    Ok((receipt.in_slot(slot), crcs))
}

/// One cask of the new base, on its way up.
struct BaseCask<'a> {
    snapshot: &'a Snapshot,
    registry: &'a Registry,
    options: &'a CompactOptions,
    keeps: &'a (dyn Fn(&str) -> bool + Sync),
    encoder: CaskEncoder,
    upload: Upload,
    window: Vec<Moved>,
    window_bytes: u64,
    crcs: Vec<u32>,
    /// Codecs that stored shards rounded, by what the snapshot says of its errors: they have a form for them that others have not.
    rounding: HashMap<(String, Rect), Arc<dyn Codec>>,
}

impl<'a> BaseCask<'a> {
    fn new(
        store: &'a Store,
        snapshot: &'a Snapshot,
        options: &'a CompactOptions,
        shards: &[(usize, Rect)],
        keeps: &'a (dyn Fn(&str) -> bool + Sync),
    ) -> Result<Self> {
        let encoder = CaskEncoder::new(Id::random()?, options.alignment_exponent)?.with_limits(store.limits().clone());
        let directory = &snapshot.newest().directory;
        let bytes_of = |(tensor, rect): &(usize, Rect)| directory.dtype(*tensor).byte_count(rect.element_count()?);
        let expected = shards.iter().filter_map(bytes_of).fold(0u64, u64::saturating_add);
        let upload = Upload::new(store, format!("casks/{}.cask", encoder.id()), expected);
        Ok(Self {
            snapshot,
            registry: store.registry(),
            options,
            keeps,
            encoder,
            upload,
            window: vec![],
            window_bytes: 0,
            crcs: vec![],
            rounding: HashMap::new(),
        })
    }

    /// Takes a shard.
    #[boxed]
    async fn shard(&mut self, tensor: usize, rect: &Rect, mut first_of_tensor: bool) -> Result<()> {
        let directory = self.snapshot.newest().directory.clone();
        let grid = ChunkGrid::new(directory.dtype(tensor), &rect.shape)?;
        if grid.chunk_count() == 0 {
            // The empty shard comes between chunks of its neighbours.
            self.flush().await?;
            if first_of_tensor {
                self.encoder.tensor(directory.name(tensor), directory.dtype(tensor), &directory.shape(tensor))?;
            }
            self.encoder.shard(rect)?;
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
                rect: rect.clone(),
                chunk,
                first_of_tensor: std::mem::take(&mut first_of_tensor),
                first_of_shard: chunk == 0,
                bytes: zeroed(to_usize(bytes, "a chunk")?, "a chunk")?,
            });
        }
        Ok(())
    }

    /// Reads the chunks of the window through the chain, and encodes them anew.
    #[boxed]
    async fn flush(&mut self) -> Result<()> {
        tokio::task::yield_now().await;
        let mut window = std::mem::take(&mut self.window);
        self.window_bytes = 0;
        let directory = self.snapshot.newest().directory.clone();
        // Partners are read along with the chunks that may need them.
        let mut partners = Vec::new();
        for (at, moved) in window.iter().enumerate() {
            for need in self.registry.partner_roles(directory.role(moved.tensor)) {
                let partner = directory.partner(moved.tensor, need.role).filter(|_| (self.keeps)(need.role));
                let same = |partner: &usize| moved.is_shard(&directory) == directory.find_shard(*partner, &moved.rect).is_some();
                let Some(partner) = partner.filter(same) else { continue };
                let bytes = ChunkGrid::new(directory.dtype(partner), &moved.rect.shape)?.bytes(moved.chunk);
                let bytes = zeroed(to_usize(bytes.end - bytes.start, "a chunk")?, "a chunk")?;
                let (rect, chunk) = (moved.rect.clone(), moved.chunk);
                partners.push((
                    at,
                    need.role,
                    Moved { tensor: partner, rect, chunk, first_of_tensor: false, first_of_shard: false, bytes },
                ));
            }
        }
        let all = window.iter_mut().chain(partners.iter_mut().map(|(_, _, moved)| moved));
        let (shards, wholes): (Vec<&mut Moved>, Vec<&mut Moved>) = all.partition(|moved| moved.is_shard(&directory));
        let items = shards.into_iter().map(|moved| ChunkItem {
            tensor: moved.tensor,
            rect: moved.rect.clone(),
            chunk: moved.chunk,
            out: &mut moved.bytes,
        });
        self.snapshot.read_chunks(items.collect()).await?;
        for moved in wholes {
            gather(self.snapshot, moved).await?;
        }
        let (registry, verify) = (self.registry, self.options.verify_after_encode);
        let encode = |(at, moved): (usize, &Moved)| -> Result<EncodedChunk> {
            let grid = ChunkGrid::new(directory.dtype(moved.tensor), &moved.rect.shape)?;
            let elements = grid.elements(moved.chunk);
            let first = partners.partition_point(|(of, _, _)| *of < at);
            let of_chunk = partners.iter().skip(first).take_while(|(of, _, _)| *of == at);
            let partners: Vec<Partner<'_>> = of_chunk
                .map(|(_, role, moved)| Partner { role, dtype: directory.dtype(moved.tensor), data: &moved.bytes, base: None })
                .collect();
            let chunk = Chunk {
                role: directory.role(moved.tensor),
                partners: &partners,
                row_elements: grid.row_elements(),
                ..Chunk::new(grid.dtype(), elements.end - elements.start, &moved.bytes)
            };
            let rounding = self.rounding.get(&(directory.name(moved.tensor).to_owned(), moved.rect.clone()));
            let given = rounding.and_then(|codec| again(codec, &chunk));
            encode_given(registry, self.options.objective, &chunk, given.as_ref(), verify)
                .map_err(|e| e.tensor(directory.name(moved.tensor)).chunk(moved.chunk))
        };
        let encoded: Vec<EncodedChunk> = parallel::run(|| window.par_iter().enumerate().map(encode).collect::<Result<_>>())?;
        for (moved, chunk) in window.iter().zip(encoded) {
            let name = directory.name(moved.tensor);
            if moved.first_of_tensor {
                self.encoder.tensor(name, directory.dtype(moved.tensor), &directory.shape(moved.tensor))?;
            }
            if moved.first_of_shard {
                self.encoder.shard(&moved.rect)?;
            }
            self.crcs.push(chunk.crc);
            self.encoder.chunk(chunk).map_err(|e| e.tensor(name).chunk(moved.chunk))?;
        }
        self.upload.push(self.encoder.take_output()).await
    }

    async fn finish(self) -> Result<(CaskReceipt, Vec<u32>)> {
        let (rest, receipt) = self.encoder.finish()?;
        let mut upload = self.upload;
        upload.push(rest).await?;
        upload.finish().await?;
        Ok((receipt, self.crcs))
    }
}

/// A chunk as the codec that rounded it stores it again, without a further loss.
fn again(codec: &Arc<dyn Codec>, chunk: &Chunk<'_>) -> Option<Candidate> {
    let given = Candidate { codec: codec.clone(), encoded: codec.estimate(chunk).and_then(|_| codec.encode(chunk).ok())? };
    let mut decoded = zeroed(chunk.data.len(), "a chunk").ok()?;
    given.decode(chunk, &mut decoded).ok()?;
    (decoded == chunk.data).then_some(given)
}

/// Reads a chunk of a whole tensor from the shards that it lies in.
#[boxed]
async fn gather(snapshot: &Snapshot, moved: &mut Moved) -> Result<()> {
    let dtype = snapshot.newest().directory.dtype(moved.tensor);
    let elements = ChunkGrid::new(dtype, &moved.rect.shape)?.elements(moved.chunk);
    let mut parts = Vec::new();
    for rect in rects_of_run(&moved.rect.shape, elements) {
        let bytes = rect.element_count().and_then(|count| dtype.byte_count(count));
        parts.push((zeroed(to_usize(bytes.unwrap_or(u64::MAX), "a part of a chunk")?, "a part of a chunk")?, rect));
    }
    let items = parts.iter_mut().map(|(bytes, rect)| ReadItem { tensor: moved.tensor, rect: rect.clone(), out: bytes });
    snapshot.read_items(items.collect()).await?;
    let mut destination = 0;
    for (bytes, rect) in &parts {
        let count = rect.element_count().unwrap_or(0);
        copy_run(dtype, Run { source: 0, destination, count }, bytes, &mut moved.bytes);
        destination += count;
    }
    Ok(())
}
