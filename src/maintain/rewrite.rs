//! Rewriting: reads shards of a snapshot through its chain and writes them into new casks, without a base.
//!
//! Compaction, reduction and consolidation all move tensors this way. The decoded bytes of a chunk do not change, so
//! content digests and deltas made against the snapshot stay valid.
//!
//! Memory: one window of 16 MiB, upload parts, and the largest blob.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use rayon::prelude::*;
use tokio::sync::OnceCell;

use crate::codec::{Candidate, Chunk, Codec, Objective, Trial};
use crate::commit::DEFAULT_AGE_FLOOR;
use crate::container::CaskEncoder;
use crate::limits::{to_usize, zeroed};
use crate::precision::Setting;
use crate::reader::{ChunkItem, ReadItem, Snapshot, shard_errors};
use crate::store::{PartBudget, Work};
use crate::tensor::{ChunkGrid, Rect, Run, copy_run, rects_of_run};
use crate::wire::{CaskRef, Directory, blob_slot, rank_of_slot};
use crate::writer::{
    CaskWriter, Choices, ChunkFamily, ChunkPlace, Destination, EncodeOptions, Entry, PartnerLink, PlannedShard, ShardLabel, Standalone,
    Unit, UnitChunk, UnitResult, Window, encode_unit, schedule,
};
use crate::{Error, Result, Store, boxed, parallel};

/// Options of a compaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompactOptions {
    /// Weights by which codecs are chosen: size, speed, precision.
    pub objective: Objective,
    /// Whether each chunk is decoded again before it is uploaded.
    pub verify_after_encode: bool,
    /// Page alignment: pages begin at multiples of two to the power of this, 6 to 12.
    pub alignment_exponent: u8,
    /// Age floor of garbage collection: see [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
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

    /// Rewrites all blobs and all tensors with a role to keep, rank by rank.
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
        let mut ranks: BTreeMap<u32, BTreeMap<u32, Vec<(usize, Rect)>>> = BTreeMap::new();
        for (slot, shards) in slots {
            ranks.entry(rank_of_slot(slot)).or_default().insert(slot, shards);
        }
        let mut casks = Vec::new();
        for slots in ranks.values() {
            casks.extend(self.rewrite_casks(slots).await?.into_values().map(|rewritten| rewritten.cask));
        }
        casks.sort_by_key(|cask| cask.slot);
        Ok(casks)
    }

    /// Writes the casks of some slots at once: the given shards, then all blobs of the slot. A shard is the number of a
    /// tensor and a rectangle: that of a shard of the snapshot, or the whole tensor. Shards ascend by tensor and
    /// position.
    #[boxed]
    pub(super) async fn rewrite_casks(&self, slots: &BTreeMap<u32, Vec<(usize, Rect)>>) -> Result<BTreeMap<u32, RewrittenCask>> {
        let directory = &self.snapshot.chain.newest().directory;
        let options = EncodeOptions::from(self.options);
        let destination = Destination { store: self.store, ahead: None, budget: PartBudget::default() };
        let shards = self.shards(slots)?;
        let mut casks = BTreeMap::new();
        for &slot in slots.keys() {
            let bytes =
                shards.iter().filter(|shard| shard.slot == slot).filter_map(|shard| shard.rect.element_count().zip(Some(shard.grid)));
            let expected_bytes = bytes.filter_map(|(count, grid)| grid.dtype().byte_count(count)).fold(0, u64::saturating_add);
            casks.insert(slot, (CaskWriter::new(&destination, slot, options, expected_bytes)?, Vec::new()));
        }
        let planned: Vec<PlannedShard> = shards.iter().map(SourceShard::planned).collect();
        let mut choices = Choices::default();
        let bytes_of = |window: &Window| -> u64 {
            let chunks = window.units.iter().flat_map(|unit| unit.shards.iter().map(move |&shard| (shard, unit.chunk)));
            chunks.map(|(shard, chunk)| decoded_bytes(&shards[shard], chunk)).fold(0, u64::saturating_add)
        };
        let windows = schedule(&planned);
        let mut work = Work::plan(self.store, windows.iter().map(bytes_of).fold(0, u64::saturating_add));
        for window in windows {
            let chunks = self.read_window(&shards, &window).await?;
            let trials = window.units.iter().map(|unit| unit.shards.iter().map(|&shard| choices.next(&shards[shard].family)).collect());
            let mut encoded = self.encode_window(&shards, &chunks, &window, trials.collect(), options).await?;
            for entry in window.in_cask_order() {
                let (Entry::Chunk { shard, .. } | Entry::EmptyShard(shard)) = entry;
                let source = &shards[shard];
                let Some((cask, crcs)) = casks.get_mut(&source.slot) else { continue };
                let Entry::Chunk { unit, member, .. } = entry else {
                    cask.begin_shard(source.label(directory))?;
                    continue;
                };
                let place = ChunkPlace { shard: source.label(directory), chunk: window.units[unit].chunk };
                let result = encoded.get_mut(unit).and_then(|unit| unit.get_mut(member)).and_then(Option::take);
                let result =
                    result.ok_or_else(|| Error::invalid("a chunk was not encoded").tensor(place.shard.tensor).chunk(place.chunk))?;
                choices.learn(&source.family, decoded_bytes(source, place.chunk), &result.chosen);
                crcs.push(result.chosen.encoded.crc);
                cask.append(&place, result.chosen.encoded)?;
            }
            for (cask, _) in casks.values_mut() {
                cask.send().await?;
            }
            work.add(bytes_of(&window));
        }
        let mut rewritten = BTreeMap::new();
        let blobs = self.snapshot.blobs().await?;
        for (slot, (mut cask, crcs)) in casks {
            let names: Vec<(u32, &str)> =
                blobs.iter().filter(|(rank, _)| blob_slot(*rank) == slot).map(|(rank, name)| (*rank, name.as_str())).collect();
            for ((rank, name), bytes) in names.iter().zip(self.snapshot.read_blobs(&names).await?) {
                cask.append_blob(*rank, name, bytes.into()).await?;
            }
            rewritten.insert(slot, RewrittenCask { cask: cask.finish().await?, crcs });
        }
        Ok(rewritten)
    }

    /// The shards to write, with their partners among them.
    fn shards(&self, slots: &BTreeMap<u32, Vec<(usize, Rect)>>) -> Result<Vec<SourceShard>> {
        let directory = &self.snapshot.chain.newest().directory;
        let mut sources = Vec::new();
        for (&slot, shards) in slots {
            for (tensor, rect) in shards {
                let grid = ChunkGrid::new(directory.dtype(*tensor), &rect.shape)?;
                let shape = directory.shape(*tensor);
                let row = directory.tensor(*tensor);
                let family = ChunkFamily::new(&row.role, &row.param, None);
                sources.push(SourceShard { slot, tensor: *tensor, shape, rect: rect.clone(), grid, partners: vec![], family });
            }
        }
        let positions: HashMap<(usize, Rect), usize> =
            sources.iter().enumerate().map(|(position, source)| ((source.tensor, source.rect.clone()), position)).collect();
        for source in &mut sources {
            for need in self.store.registry().partner_roles(directory.role(source.tensor)) {
                let partner = directory.partner(source.tensor, need.role);
                if let Some(&position) = partner.and_then(|tensor| positions.get(&(tensor, source.rect.clone()))) {
                    source.partners.push((need.role, position));
                }
            }
        }
        Ok(sources)
    }

    /// Reads the chunks of a window through the chain, by unit and member.
    #[boxed]
    async fn read_window(&self, shards: &[SourceShard], window: &Window) -> Result<Vec<Vec<DecodedChunk>>> {
        let directory = &self.snapshot.chain.newest().directory;
        let mut units = Vec::with_capacity(window.units.len());
        for unit in &window.units {
            let chunks = unit.shards.iter().map(|&shard| DecodedChunk::zeroed(&shards[shard], unit.chunk));
            units.push(chunks.collect::<Result<Vec<_>>>()?);
        }
        let (in_shards, in_wholes): (Vec<&mut DecodedChunk>, Vec<&mut DecodedChunk>) =
            units.iter_mut().flatten().partition(|decoded| decoded.is_shard(directory));
        let items = in_shards.into_iter().map(|decoded| {
            let DecodedChunk { tensor, rect, chunk, bytes } = decoded;
            ChunkItem { tensor: *tensor, rect: rect.clone(), chunk: *chunk, out: bytes }
        });
        self.snapshot.chain.read_chunks(items.collect()).await?;
        for decoded in in_wholes {
            read_across_shards(self.snapshot, decoded).await?;
        }
        Ok(units)
    }

    /// Encodes a window of chunks without a base.
    #[boxed]
    async fn encode_window(
        &self,
        shards: &[SourceShard],
        chunks: &[Vec<DecodedChunk>],
        window: &Window,
        trials: Vec<Vec<Trial>>,
        options: EncodeOptions,
    ) -> Result<Vec<Vec<Option<UnitResult>>>> {
        // Encoding a window is long work without an await. A caller that selects on something else gets a turn here.
        tokio::task::yield_now().await;
        let rounding_codecs = self.rounding_codecs.get_or_try_init(|| read_rounding_codecs(self.snapshot)).await?;
        let directory = &self.snapshot.chain.newest().directory;
        let encode = |((unit, decoded), trials): ((&Unit, &Vec<DecodedChunk>), Vec<Trial>)| {
            let chunks: Vec<Chunk<'_>> =
                unit.shards.iter().zip(decoded).map(|(&shard, decoded)| shards[shard].as_chunk(directory, decoded)).collect();
            let rounded: Vec<Option<Candidate>> = unit
                .shards
                .iter()
                .zip(&chunks)
                .map(|(&shard, chunk)| {
                    let key = (directory.name(shards[shard].tensor).to_owned(), shards[shard].rect.clone());
                    rounding_codecs.get(&key).and_then(|codec| encode_rounded(codec, chunk))
                })
                .collect();
            let members = unit.shards.iter().zip(chunks).zip(&rounded).zip(trials).map(|(((&shard, chunk), rounded), trial)| {
                let source = &shards[shard];
                let link = |&(role, partner): &(&'static str, usize)| {
                    let position = unit.shards.iter().position(|&known| known == partner)?;
                    Some(PartnerLink { role, position, base: false, is_hint: false })
                };
                UnitChunk {
                    place: ChunkPlace { shard: source.label(directory), chunk: unit.chunk },
                    chunk,
                    rounded: rounded.as_ref(),
                    assigned: None,
                    partners: source.partners.iter().filter_map(link).collect(),
                    is_encoded: true,
                    trial,
                }
            });
            encode_unit(self.store.registry(), options, Standalone::NotWanted, &members.collect::<Vec<_>>())
        };
        parallel::run(|| window.units.par_iter().zip(chunks).zip(trials).map(encode).collect())
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
    /// Slot of the cask that takes the shard.
    slot: u32,
    /// Number of the tensor in the snapshot's directory.
    tensor: usize,
    /// Global shape of the tensor.
    shape: Vec<u64>,
    rect: Rect,
    grid: ChunkGrid,
    /// Roles and positions of the partners, in the list of shards to write.
    partners: Vec<(&'static str, usize)>,
    family: ChunkFamily,
}

impl SourceShard {
    fn label<'a>(&'a self, directory: &'a Directory) -> ShardLabel<'a> {
        ShardLabel { tensor: directory.name(self.tensor), dtype: self.grid.dtype(), shape: &self.shape, rect: &self.rect }
    }

    fn planned(&self) -> PlannedShard {
        PlannedShard { cask: self.slot, grid: self.grid, partners: self.partners.iter().map(|&(_, position)| position).collect() }
    }

    fn as_chunk<'a>(&'a self, directory: &'a Directory, decoded: &'a DecodedChunk) -> Chunk<'a> {
        let elements = self.grid.elements(decoded.chunk);
        Chunk {
            role: directory.role(self.tensor),
            row_elements: self.grid.row_elements(),
            ..Chunk::new(self.grid.dtype(), elements.end.saturating_sub(elements.start), &decoded.bytes)
        }
    }
}

fn decoded_bytes(shard: &SourceShard, chunk: u64) -> u64 {
    let range = shard.grid.bytes(chunk);
    range.end.saturating_sub(range.start)
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
    fn zeroed(shard: &SourceShard, chunk: u64) -> Result<Self> {
        let bytes = zeroed(to_usize(decoded_bytes(shard, chunk), "a chunk")?, "a chunk")?;
        Ok(Self { tensor: shard.tensor, rect: shard.rect.clone(), chunk, bytes })
    }

    /// Whether the snapshot has a shard with this rectangle.
    fn is_shard(&self, directory: &Directory) -> bool {
        directory.find_shard(self.tensor, &self.rect).is_some()
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
        Self { objective, verify_after_encode, alignment_exponent, statistics: false, finite: false }
    }
}
