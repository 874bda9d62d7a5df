//! Fetches and decodes chunks in batches of bounded size. Fetches the next batch while one is decoded.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use bytes::Bytes;
use rayon::prelude::*;

use super::cask_source::{CaskSource, slice_of};
use super::open_chain::OpenChain;
use crate::chain::{Aim, DecodedChunk, Plans, Recipe, ShardPlan, Step, decode_recipe};
use crate::container::PageEntry;
use crate::store::{Work, concurrently};
use crate::tensor::{ChunkGrid, Rect, Run, contiguous_runs, copy_run, element_span};
use crate::wire::Directory;
use crate::{Error, Result, boxed, parallel};

/// A rectangle of a tensor, and the buffer that receives it.
pub(crate) struct ReadItem<'a> {
    pub tensor: usize,
    pub rect: Rect,
    pub out: &'a mut [u8],
}

/// A chunk of a shard, and the buffer that receives it. `tensor` is the number in the newest directory, `rect` the
/// shard's rectangle.
pub(crate) struct ChunkItem<'a> {
    pub tensor: usize,
    pub rect: Rect,
    pub chunk: u64,
    pub out: &'a mut [u8],
}

/// Limit on the decoded and encoded bytes of a batch with two threads. More threads get larger batches, see
/// [`parallel::window_bytes`]. A single larger chunk exceeds this limit.
const BATCH_BYTES: u64 = 32 << 20;

/// Number of objects read at once for a batch.
const CONCURRENT_OBJECTS: usize = 8;

/// Chunks that are rebuilt together: a single chunk, or chunks of one family at the same place.
pub(super) struct Job<'a> {
    chunk: u64,
    recipe: Recipe,
    wanted: Vec<Wanted<'a>>,
}

struct Wanted<'a> {
    shard: usize,
    op: usize,
    /// Expected CRC-32 of the decoded bytes.
    crc: u32,
    target: Target<'a>,
}

pub(super) enum Target<'a> {
    /// One run of the destination, for decoding in place.
    InPlace(&'a mut [u8]),
    /// A separate buffer, whose runs are then copied into the buffer of an item.
    Copy { item: usize },
    /// A separate buffer for the gradients that the chunk stores. The chunk itself is only checked.
    Gradient { item: usize },
    /// No destination: the chunk is only checked.
    Nothing,
}

/// Collects requested chunks into jobs.
pub(super) struct Jobs<'a, 'b> {
    chain: &'b OpenChain,
    plans: &'b Plans,
    pub(super) jobs: Vec<Job<'a>>,
    /// Job for a chunk of a family, by family and chunk.
    by_family: HashMap<(usize, u64), usize>,
}

impl<'a, 'b> Jobs<'a, 'b> {
    pub(super) fn new(chain: &'b OpenChain, plans: &'b Plans) -> Self {
        Self { chain, plans, jobs: Vec::new(), by_family: HashMap::new() }
    }

    pub(super) fn add(&mut self, shard: usize, chunk: u64, target: Target<'a>) -> Result<()> {
        let number = match self.plans.family(shard) {
            Some(family) => *self.by_family.entry((family, chunk)).or_insert(self.jobs.len()),
            None => self.jobs.len(),
        };
        if number == self.jobs.len() {
            self.jobs.push(Job { chunk, recipe: Recipe::default(), wanted: Vec::new() });
        }
        let Some(job) = self.jobs.get_mut(number) else { return Ok(()) };
        let registry = self.chain.store.registry();
        let (op, crc) = self.plans.add(&mut job.recipe, &self.chain.links, registry, shard, chunk)?;
        // A second buffer for the same chunk gets a job of its own.
        if job.wanted.iter().any(|wanted| wanted.op == op) {
            let mut recipe = Recipe::default();
            let (op, crc) = self.plans.add(&mut recipe, &self.chain.links, registry, shard, chunk)?;
            self.jobs.push(Job { chunk, recipe, wanted: vec![Wanted { shard, op, crc, target }] });
            return Ok(());
        }
        job.wanted.push(Wanted { shard, op, crc, target });
        Ok(())
    }
}

/// A chunk that was decoded into a separate buffer.
pub(super) struct Apart {
    item: usize,
    pub(super) shard: usize,
    pub(super) chunk: u64,
    pub(super) decoded: DecodedChunk,
}

/// Pages of one step, in column order.
pub(super) type Pages = Vec<Bytes>;

/// Pages of the ops of a job.
type JobPages = Vec<Pages>;

impl OpenChain {
    /// Reads rectangles of tensors into their buffers.
    #[boxed]
    pub(crate) async fn read_items<'i>(&'i self, items: Vec<ReadItem<'i>>) -> Result<()> {
        let directory = self.newest().directory.clone();
        let mut shards = Vec::new();
        let mut wanted = Vec::new();
        let mut outs = Vec::with_capacity(items.len());
        for (item, ReadItem { tensor, rect, out }) in items.into_iter().enumerate() {
            let tensor = directory.alias_of(tensor).unwrap_or(tensor);
            let dtype = directory.dtype(tensor);
            let bytes = rect.element_count().and_then(|n| dtype.byte_count(n));
            if bytes != Some(out.len() as u64) {
                return Err(Error::invalid(format!(
                    "the buffer has {} bytes, which do not fit {} of {dtype}",
                    out.len(),
                    crate::tensor::format_shape(&rect.shape)
                ))
                .tensor(directory.name(tensor)));
            }
            let first = shards.len();
            shards.extend(self.shards_in(tensor, &rect)?);
            let mut chunks = Vec::new();
            for (shard, plan) in shards.iter().enumerate().skip(first) {
                chunks.extend(touched(plan.grid, &plan.rect, &rect).map(|chunk| (shard, chunk)));
            }
            wanted.push((item, chunks));
            outs.push(Some((rect, out)));
        }
        let plans = self.load_family_plans(shards).await?;
        let shards = &plans.shards;

        let mut jobs = Jobs::new(self, &plans);
        let mut copies: Vec<Option<(Rect, &mut [u8])>> = outs.iter().map(|_| None).collect();
        for (item, chunks) in wanted {
            let Some((rect, out)) = outs[item].take() else { continue };
            let places = places_in(shards, &chunks, &rect, out.len());
            let mut rest = out;
            let mut position = 0;
            let in_place = places.is_some();
            for (at, (shard, chunk)) in chunks.into_iter().enumerate() {
                let target = match &places {
                    Some(places) => {
                        let (_, tail) = rest.split_at_mut(places[at].start - position);
                        let (slice, tail) = tail.split_at_mut(places[at].len());
                        rest = tail;
                        position = places[at].end;
                        Target::InPlace(slice)
                    }
                    None => Target::Copy { item },
                };
                jobs.add(shard, chunk, target)?;
            }
            if !in_place {
                // Copying runs of packed elements leaves the unused bits of the last byte unchanged. They must be zero.
                if let Some(last) = rest.last_mut() {
                    *last = 0;
                }
                copies[item] = Some((rect, rest));
            }
        }
        let jobs = jobs.jobs;
        self.run(shards, jobs, None, |apart: Apart| {
            let copy = copies.get_mut(apart.item).and_then(Option::as_mut);
            if let (Some((rect, out)), Some(bytes)) = (copy, &apart.decoded.bytes) {
                let plan = &shards[apart.shard];
                let window = plan.grid.elements(apart.chunk);
                let start = window.start;
                for run in contiguous_runs(&plan.rect, rect, window) {
                    copy_run(plan.dtype, Run { source: run.source - start, ..run }, bytes, out);
                }
            }
        })
        .await
    }

    /// Checks that the indexes hold the last chunk of each shard that a rectangle intersects, and therefore all chunks.
    /// A directory alone could claim any size.
    pub(crate) async fn check_present(&self, tensor: usize, rect: &Rect) -> Result<()> {
        let shards = self.shards_in(tensor, rect)?;
        let rows = self.load_plans(&shards).await?;
        for (shard, rows) in shards.iter().zip(&rows) {
            shard.chunk(&self.links, rows, shard.grid.chunk_count().saturating_sub(1))?;
        }
        Ok(())
    }

    /// Reads whole chunks of shards into their buffers.
    #[boxed]
    pub(crate) async fn read_chunks<'i>(&'i self, items: Vec<ChunkItem<'i>>) -> Result<()> {
        let directory = &self.newest().directory;
        let mut shards: Vec<ShardPlan> = Vec::new();
        let mut wanted = Vec::with_capacity(items.len());
        for ChunkItem { tensor, rect, chunk, out } in items {
            let tensor = directory.alias_of(tensor).unwrap_or(tensor);
            let name = directory.name(tensor);
            if shards.last().is_none_or(|last| last.name != name || last.rect != rect) {
                let shard = directory.find_shard(tensor, &rect);
                let shard = shard.ok_or_else(|| Error::invalid("the snapshot has no such shard").tensor(name))?;
                shards.push(ShardPlan::new(&self.links, tensor, shard)?);
            }
            wanted.push((shards.len() - 1, chunk, out));
        }
        let plans = self.load_family_plans(shards).await?;
        let shards = &plans.shards;
        let mut jobs = Jobs::new(self, &plans);
        for (shard, chunk, out) in wanted {
            let bytes = shards[shard].grid.bytes(chunk);
            if out.len() as u64 != bytes.end - bytes.start {
                return Err(Error::invalid(format!("the buffer has {} bytes, but the chunk has {}", out.len(), bytes.end - bytes.start)));
            }
            jobs.add(shard, chunk, Target::InPlace(out))?;
        }
        let jobs = jobs.jobs;
        self.run(shards, jobs, None, |_| {}).await
    }

    /// Decodes and checks every chunk of some tensors, then drops the bytes.
    /// Counts the page bytes that were read as work.
    pub(crate) async fn check_tensors(&self, tensors: impl IntoIterator<Item = usize>, work: &mut Work) -> Result<()> {
        let mut shards = Vec::new();
        for tensor in tensors {
            for shard in self.newest().directory.shards_of(tensor) {
                shards.push(ShardPlan::new(&self.links, tensor, shard)?);
            }
        }
        let count = shards.len();
        let plans = self.load_family_plans(shards).await?;
        let mut jobs = Jobs::new(self, &plans);
        for (shard, plan) in plans.shards.iter().enumerate().take(count) {
            for chunk in 0..plan.grid.chunk_count() {
                jobs.add(shard, chunk, Target::Nothing)?;
            }
        }
        let jobs = jobs.jobs;
        self.run(&plans.shards, jobs, Some(work), |_| {}).await
    }

    /// Plans shards and the partners that their chunks need, and reads their indexes and parts. Takes two rounds of
    /// requests, and two more for each step from partner to partner.
    #[boxed]
    pub(super) async fn load_family_plans(&self, shards: Vec<ShardPlan>) -> Result<Plans> {
        let mut plans = Plans::of(shards);
        let mut done = 0;
        while done < plans.shards.len() {
            let end = plans.shards.len();
            let rows = self.load_plans(plans.shards.get(done..end).unwrap_or_default()).await?;
            plans.rows.extend(rows);
            for shard in done..end {
                plans.add_partners(&self.links, self.store.registry(), shard)?;
            }
            done = end;
        }
        Ok(plans)
    }

    /// Rebuilds the chunks of all jobs. Passes the chunks that were decoded into separate buffers to `apart`.
    pub(super) async fn run(
        &self,
        shards: &[ShardPlan],
        jobs: Vec<Job<'_>>,
        mut work: Option<&mut Work>,
        mut apart: impl FnMut(Apart),
    ) -> Result<()> {
        let mut batches = split(shards, jobs).into_iter().peekable();
        let start = |batch: &Vec<Job<'_>>| {
            let steps = batch.iter().flat_map(|job| &job.recipe.ops).map(|op| &op.step);
            tokio::spawn(PageFetch::new(self, steps, |_| true).read())
        };
        let mut next = batches.peek().map(start);
        while let (Some(batch), Some(fetch)) = (batches.next(), next.take()) {
            let fetched = fetch.await.map_err(|e| Error::new(crate::ErrorKind::Storage, format!("a fetch ended early: {e}")))?;
            let pages = self.explained(fetched).await?;
            next = batches.peek().map(start);
            let pages_of = batch.iter().flat_map(|job| &job.recipe.ops).flat_map(|op| &op.step.entry.pages);
            let (count, bytes) = pages_of.fold((0, 0), |(count, bytes), page| (count + 1, bytes + (page.range.end - page.range.start)));
            self.count(batch.iter().map(|job| job.wanted.len() as u64).sum(), count, bytes);
            let mut pages = pages.into_iter();
            let pages: Vec<JobPages> = batch.iter().map(|job| pages.by_ref().take(job.recipe.ops.len()).collect()).collect();
            let decoded: Vec<Vec<Apart>> = parallel::run(|| {
                batch.into_par_iter().zip(pages).map(|(job, pages)| self.decode(shards, job, &pages)).collect::<Result<_>>()
            })?;
            decoded.into_iter().flatten().for_each(&mut apart);
            if let Some(work) = &mut work {
                work.add(bytes);
            }
        }
        Ok(())
    }

    fn decode(&self, shards: &[ShardPlan], job: Job<'_>, pages: &[Pages]) -> Result<Vec<Apart>> {
        let Job { chunk, recipe, wanted } = job;
        let locate = |(op, e): (usize, Error)| match recipe.ops.get(op) {
            Some(op) => self.source(op.step.link, op.step.cask).locate(e.tensor(&shards[op.shard].name).chunk(chunk)),
            None => e,
        };
        for (at, (op, pages)) in recipe.ops.iter().zip(pages).enumerate() {
            for (page, bytes) in op.step.entry.pages.iter().zip(pages) {
                page.check(bytes).map_err(|e| locate((at, e)))?;
            }
        }
        let mut aims = Vec::with_capacity(wanted.len());
        let mut places = Vec::with_capacity(wanted.len());
        for Wanted { shard, op, crc, target } in wanted {
            let gradient = matches!(target, Target::Gradient { .. });
            let (out, item) = match target {
                Target::InPlace(out) => (Some(out), None),
                Target::Copy { item } | Target::Gradient { item } => (None, Some(item)),
                Target::Nothing => (None, None),
            };
            aims.push(Aim { op, crc, out, gradient });
            places.push((shard, item));
        }
        let made = decode_recipe(self.store.registry(), shards, &recipe, chunk, pages, aims).map_err(locate)?;
        let apart = made.into_iter().zip(places).filter_map(|(decoded, (shard, item))| Some(Apart { item: item?, shard, chunk, decoded }));
        Ok(apart.collect())
    }
}

/// Returns the number of chunks that a rectangle touches.
pub(super) fn chunk_count(directory: &Directory, tensor: usize, rect: &Rect) -> Result<u64> {
    let tensor = directory.alias_of(tensor).unwrap_or(tensor);
    let mut count = 0;
    for shard in directory.shards_of(tensor) {
        let shard = directory.shard(shard).rect;
        let grid = ChunkGrid::new(directory.dtype(tensor), &shard.shape)?;
        count += touched(grid, &shard, rect).count() as u64;
    }
    Ok(count)
}

/// Returns the chunks of a shard that hold an element of `rect`.
pub(super) fn touched<'a>(grid: ChunkGrid, shard: &'a Rect, rect: &'a Rect) -> impl Iterator<Item = u64> + 'a {
    grid.chunks_of(element_span(shard, rect)).filter(move |&chunk| contiguous_runs(shard, rect, grid.elements(chunk)).next().is_some())
}

/// Returns the position of each chunk in the destination if all can be decoded in place: each chunk is one run there,
/// and the runs ascend.
fn places_in(shards: &[ShardPlan], chunks: &[(usize, u64)], rect: &Rect, out_bytes: usize) -> Option<Vec<Range<usize>>> {
    let mut places = Vec::with_capacity(chunks.len());
    let mut end = 0;
    for &(shard, chunk) in chunks {
        let plan = &shards[shard];
        let window = plan.grid.elements(chunk);
        let run = contiguous_runs(&plan.rect, rect, window.clone()).next()?;
        if plan.dtype.is_packed() && (shards.len() > 1 || run.destination % 8 != 0) {
            return None;
        }
        let start = usize::try_from(plan.dtype.byte_count(run.destination)?).ok()?;
        let length = usize::try_from(plan.dtype.byte_count(run.count)?).ok()?;
        if run.count != window.end - window.start || start < end || start + length > out_bytes {
            return None;
        }
        end = start + length;
        places.push(start..end);
    }
    Some(places)
}

/// Splits jobs into batches of bounded size.
fn split<'a>(shards: &[ShardPlan], jobs: Vec<Job<'a>>) -> Vec<Vec<Job<'a>>> {
    let mut batches: Vec<Vec<Job<'a>>> = Vec::new();
    let mut size = u64::MAX;
    let decoded = |shard: usize, chunk: u64| {
        let bytes = shards[shard].grid.bytes(chunk);
        bytes.end - bytes.start
    };
    let all: u64 =
        jobs.iter().flat_map(|job| job.wanted.iter().map(|wanted| decoded(wanted.shard, job.chunk))).fold(0, u64::saturating_add);
    // Several batches for each call: the next is fetched while one is decoded.
    let most = parallel::window_bytes(BATCH_BYTES).min((all / 4).max(BATCH_BYTES));
    for job in jobs {
        let pages = job.recipe.ops.iter().flat_map(|op| &op.step.entry.pages).map(|page| page.range.end - page.range.start);
        let cost = job.wanted.iter().map(|wanted| decoded(wanted.shard, job.chunk)).sum::<u64>() + pages.sum::<u64>();
        if size.saturating_add(cost) > most {
            batches.push(Vec::new());
            size = 0;
        }
        size += cost;
        if let Some(batch) = batches.last_mut() {
            batch.push(job);
        }
    }
    batches
}

/// Pages to read: groups of ranges, each in one cask of the chain.
pub(super) struct PageFetch {
    casks: BTreeMap<CaskAt, CaskFetch>,
    /// Cask and number of ranges of each group.
    groups: Vec<(CaskAt, usize)>,
}

/// Numbers of a link and of a cask in its manifest.
type CaskAt = (usize, usize);

struct CaskFetch {
    source: CaskSource,
    /// Bytes of a cask that was read whole.
    whole: Option<Bytes>,
    ranges: Vec<Range<u64>>,
}

impl PageFetch {
    /// Prepares to read the pages of steps for which `wanted` holds, one group for each step.
    pub(super) fn new<'s>(chain: &OpenChain, steps: impl Iterator<Item = &'s Step>, wanted: impl Fn(&PageEntry) -> bool) -> Self {
        let mut fetch = Self { casks: BTreeMap::new(), groups: Vec::new() };
        for step in steps {
            let at = (step.link, step.cask);
            let cask = fetch.casks.entry(at).or_insert_with(|| {
                let whole = chain.links[step.link].0.small_casks[step.cask].get().cloned();
                CaskFetch { source: chain.source(step.link, step.cask), whole, ranges: Vec::new() }
            });
            let before = cask.ranges.len();
            cask.ranges.extend(step.entry.pages.iter().filter(|page| wanted(page)).map(|page| page.range.clone()));
            fetch.groups.push((at, cask.ranges.len() - before));
        }
        fetch
    }

    /// Reads all ranges of a cask in one fetch, and several casks at once. Returns the pages of each group.
    #[boxed]
    pub(super) async fn read(self) -> Result<Vec<Pages>> {
        let Self { casks, groups } = self;
        let fetch = |(at, cask): (CaskAt, CaskFetch)| async move {
            let pages = match &cask.whole {
                Some(whole) => {
                    let pages: Result<_> = cask.ranges.iter().map(|range| slice_of(whole, range)).collect();
                    pages.map_err(|e| cask.source.locate(e))?
                }
                None => cask.source.get_ranges(&cask.ranges).await?,
            };
            Ok((at, pages.into_iter()))
        };
        let mut received: BTreeMap<CaskAt, std::vec::IntoIter<Bytes>> =
            concurrently(CONCURRENT_OBJECTS, casks.into_iter().map(fetch)).await?.into_iter().collect();
        let pages_of = |(at, count)| received.get_mut(&at).map(|bytes| bytes.by_ref().take(count).collect()).unwrap_or_default();
        Ok(groups.into_iter().map(pages_of).collect())
    }
}
