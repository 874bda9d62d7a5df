//! Updates a state that a reader holds to another snapshot. Reads only the changes between the two.

use bytes::Bytes;
use rayon::prelude::*;
use tensorcask_kernels::spare::Spare;

use super::Snapshot;
use super::changes::{ChangedElements, TensorChange};
use super::execute::{ChunkItem, PageFetch, Pages};
use super::open_chain::OpenChain;
use crate::chain::{ChunkPlan, ShardPlan, Step, check_decoded};
use crate::codec::Columns;
use crate::limits::to_usize;
use crate::tensor::{Rect, Run, contiguous_runs, copy_run};
use crate::wire::Id;
use crate::{Error, Result, boxed, parallel};

/// Limit on the bytes of chunks that two threads update together. More threads get larger batches, see
/// [`parallel::window_bytes`]. A single larger chunk exceeds this limit.
const BATCH_BYTES: u64 = 32 << 20;

/// Result of an update, counted in chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UpdateReport {
    /// Number of chunks that are the same in both snapshots. Nothing was read for them.
    pub unchanged: u64,
    /// Number of chunks made from the held bytes and the deltas in between.
    pub advanced: u64,
    /// Number of chunks rebuilt from their whole chain.
    pub rebuilt: u64,
}

/// Method that turns a held chunk into the wanted one.
enum Way {
    Same,
    /// Deltas to apply, newest first.
    Deltas(Vec<Step>),
    Rebuild,
}

impl Way {
    /// Bytes of the pages that are read for it, besides those of a rebuild, which are limited by themselves.
    fn page_bytes(&self) -> u64 {
        let Self::Deltas(steps) = self else { return 0 };
        let pages = steps.iter().flat_map(|step| &step.entry.pages);
        pages.map(|page| page.range.end.saturating_sub(page.range.start)).fold(0, u64::saturating_add)
    }
}

struct Work {
    item: usize,
    shard: usize,
    chunk: u64,
    /// Expected CRC-32 of the held bytes, if they can be used.
    held_crc: Option<u32>,
    crc: u32,
    way: Way,
}

impl Snapshot {
    /// Turns whole tensors of the snapshot `have`, held in these buffers, into those of this snapshot. Reads only the
    /// changes between the two. A tensor that `have` lacks, or has with another type or shape, is read whole.
    ///
    /// Held bytes are compared with their checksums first. A chunk that does not match `have` is rebuilt. After an
    /// error, each buffer may hold chunks of both snapshots.
    pub async fn update_into(&self, have: &Snapshot, tensors: Vec<(&str, &mut [u8])>) -> Result<UpdateReport> {
        Ok(self.update(have, tensors, None).await?.0)
    }

    /// Like [`update_into`](Self::update_into). Returns for each tensor, in the order of `tensors`, which of its elements have other
    /// bits now. Of a tensor with more changed elements than the share `limit`, from 0 to 1, they are not listed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Dtype, Metadata, Policy, Store, TensorChange, TensorView};
    /// let store = Store::open("memory://changes-example")?;
    /// let mut writer = store.writer(Policy::Consecutive).await?;
    /// for (step, bytes) in [(1, [1, 2, 3, 4]), (2, [1, 2, 9, 4])] {
    ///     writer.save(step, &[TensorView::new("w", Dtype::U8, &[4], &bytes)?], &[], &Metadata::default()).await?;
    /// }
    /// let mut held = [1, 2, 3, 4];
    /// let (have, new) = (store.snapshot(1).await?, store.snapshot(2).await?);
    /// let changes = new.update_and_compare(&have, vec![("w", &mut held)], 0.5).await?;
    /// assert_eq!((changes, held), (vec![TensorChange::Elements(vec![2])], [1, 2, 9, 4]));
    /// # Ok(()) }
    /// ```
    pub async fn update_and_compare(&self, have: &Snapshot, tensors: Vec<(&str, &mut [u8])>, limit: f64) -> Result<Vec<TensorChange>> {
        Ok(self.update(have, tensors, Some(limit)).await?.1)
    }

    async fn update(
        &self,
        have: &Snapshot,
        tensors: Vec<(&str, &mut [u8])>,
        limit: Option<f64>,
    ) -> Result<(UpdateReport, Vec<TensorChange>)> {
        let mut outs = Vec::new();
        let mut shards = Vec::new();
        let mut owners = Vec::new();
        // Shards of `have`, and for each shard here the index of its counterpart in `have`.
        let mut held = Vec::new();
        let mut matching = Vec::new();
        for (name, out) in tensors {
            let directory = &self.chain.newest().directory;
            let tensor = self.chain.find(name)?;
            let tensor = directory.alias_of(tensor).unwrap_or(tensor);
            let whole = Rect::whole(&directory.shape(tensor));
            let bytes = whole.element_count().and_then(|count| directory.dtype(tensor).byte_count(count));
            if bytes != Some(out.len() as u64) {
                return Err(
                    Error::invalid(format!("the buffer has {} bytes, but the tensor has {}", out.len(), bytes.unwrap_or(0))).tensor(name)
                );
            }
            for shard in directory.shards_of(tensor) {
                let plan = ShardPlan::new(&self.chain.links, tensor, shard)?;
                let same = held_shard(&have.chain, name, directory.name(tensor), &plan)?;
                matching.push(same.as_ref().map(|_| held.len()));
                held.extend(same);
                shards.push(plan);
                owners.push((outs.len(), tensor));
            }
            let elements = whole.element_count().unwrap_or(0);
            let changed = limit.map(|limit| ChangedElements::new(directory.dtype(tensor), elements, limit));
            outs.push(Held { whole, out, changed });
        }
        let rows = self.chain.load_plans(&shards).await?;
        let held_rows = have.chain.load_plans(&held).await?;
        let update = Update { chain: &self.chain, have: &have.chain, shards: &shards, owners: &owners };
        let mut done = UpdateReport::default();
        let mut batch = Vec::new();
        let mut batch_bytes = 0u64;
        let most = parallel::window_bytes(BATCH_BYTES);
        for (at, plan) in shards.iter().enumerate() {
            for chunk in 0..plan.grid.chunk_count() {
                let wanted = plan.chunk(&self.chain.links, &rows[at], chunk)?;
                let known = match matching[at] {
                    // A chunk that cannot be planned in `have` is rebuilt in full.
                    Some(other) => held[other].chunk(&have.chain.links, &held_rows[other], chunk).ok(),
                    None => None,
                };
                let crc = wanted.crc;
                let held_crc = known.as_ref().map(|known| known.crc);
                let way = update.way(plan, wanted, known);
                let bytes = plan.grid.bytes(chunk);
                batch_bytes = batch_bytes.saturating_add(bytes.end - bytes.start).saturating_add(way.page_bytes());
                batch.push(Work { item: owners[at].0, shard: at, chunk, held_crc, crc, way });
                if batch_bytes >= most {
                    update.apply(std::mem::take(&mut batch), &mut outs, &mut done).await?;
                    batch_bytes = 0;
                }
            }
        }
        update.apply(batch, &mut outs, &mut done).await?;
        let changes = outs.into_iter().filter_map(|held| held.changed).map(ChangedElements::into_change);
        Ok((done, changes.collect()))
    }
}

/// A whole tensor in a buffer of the caller.
struct Held<'a> {
    whole: Rect,
    out: &'a mut [u8],
    /// The elements that change, if the caller wants to know them.
    changed: Option<ChangedElements>,
}

/// An update of shards from the snapshot `have` to that of `chain`.
struct Update<'a> {
    chain: &'a OpenChain,
    have: &'a OpenChain,
    shards: &'a [ShardPlan],
    /// Buffer and tensor of each shard.
    owners: &'a [(usize, usize)],
}

impl Update<'_> {
    /// Returns the deltas between the two snapshots, if the older steps of the chunk are those of the held chunk.
    fn way(&self, plan: &ShardPlan, wanted: ChunkPlan, known: Option<ChunkPlan>) -> Way {
        let Some(known) = known else { return Way::Rebuild };
        let Some(between) = wanted.steps.len().checked_sub(known.steps.len()) else { return Way::Rebuild };
        let same = |(ours, theirs): (&Step, &Step)| cask_of(self.chain, ours) == cask_of(self.have, theirs) && ours.entry == theirs.entry;
        if !wanted.steps.iter().skip(between).zip(&known.steps).all(same) {
            return Way::Rebuild;
        }
        // A delta that needs partners is rebuilt with them, from the whole chain.
        let registry = self.chain.store.registry();
        let alone = |step: &Step| {
            let role = plan.role(&self.chain.links, step.link);
            step.entry.codec.as_ref().is_none_or(|codec| registry.needs(codec, role).is_empty())
        };
        match between {
            0 => Way::Same,
            _ if !wanted.steps.iter().take(between).all(alone) => Way::Rebuild,
            _ => Way::Deltas(wanted.steps.into_iter().take(between).collect()),
        }
    }

    #[boxed]
    async fn apply(&self, batch: Vec<Work>, outs: &mut [Held<'_>], done: &mut UpdateReport) -> Result<()> {
        let mut rebuild: Vec<(Work, Spare)> = Vec::new();
        let mut advance: Vec<(Work, Vec<Step>, Spare)> = Vec::new();
        let with_held = |work: Work| self.take_held(&outs[work.item], work);
        let checked: Vec<(Work, Spare)> = parallel::run(|| batch.into_par_iter().map(with_held).collect::<Result<_>>())?;
        for (mut work, held) in checked {
            match std::mem::replace(&mut work.way, Way::Rebuild) {
                Way::Same => done.unchanged += 1,
                Way::Deltas(steps) => advance.push((work, steps, held)),
                Way::Rebuild => rebuild.push((work, held)),
            }
        }
        let mut pages = PageFetch::new(self.chain, advance.iter().flat_map(|(_, steps, _)| steps), |_| true).read().await?.into_iter();
        let pages: Vec<Vec<Pages>> = advance.iter().map(|(_, steps, _)| pages.by_ref().take(steps.len()).collect()).collect();
        let to_new = |((work, steps, mut held), pages): ((Work, Vec<Step>, Spare), Vec<Pages>)| {
            self.count_pages(&steps);
            self.advance(&work, &steps, &pages, &mut held).map(|()| (work, held))
        };
        let advanced: Vec<(Work, Spare)> = parallel::run(|| advance.into_par_iter().zip(pages).map(to_new).collect::<Result<_>>())?;
        for (work, bytes) in &advanced {
            put(&self.shards[work.shard], work.chunk, bytes, &mut outs[work.item]);
            done.advanced += 1;
        }
        let items = rebuild.iter_mut().map(|(work, buffer)| ChunkItem {
            tensor: self.owners[work.shard].1,
            rect: self.shards[work.shard].rect.clone(),
            chunk: work.chunk,
            out: buffer,
        });
        let items: Vec<ChunkItem<'_>> = items.collect();
        if !items.is_empty() {
            self.chain.read_chunks(items).await?;
        }
        for (work, bytes) in &rebuild {
            put(&self.shards[work.shard], work.chunk, bytes, &mut outs[work.item]);
            done.rebuilt += 1;
        }
        Ok(())
    }

    /// Copies the held bytes of a chunk. They are of no use if their checksum is not that of the chunk in `have`.
    fn take_held(&self, Held { whole, out, .. }: &Held<'_>, mut work: Work) -> Result<(Work, Spare)> {
        let plan = &self.shards[work.shard];
        let bytes = plan.grid.bytes(work.chunk);
        let mut held = Spare::new(to_usize(bytes.end - bytes.start, "a chunk")?, "a chunk")?;
        if let Some(crc) = work.held_crc {
            move_runs(plan, work.chunk, whole, |run| {
                let back = Run { source: run.destination, destination: run.source, count: run.count };
                copy_run(plan.dtype, back, out, &mut held);
            });
            if crc32fast::hash(&held) != crc {
                work.way = Way::Rebuild;
            }
        }
        Ok((work, held))
    }

    fn count_pages(&self, steps: &[Step]) {
        let pages = steps.iter().flat_map(|step| &step.entry.pages);
        let bytes = pages.clone().map(|page| page.range.end - page.range.start).sum();
        self.chain.count(1, pages.count() as u64, bytes);
    }

    /// Applies deltas, listed newest first, to the bytes of a chunk.
    fn advance(&self, work: &Work, steps: &[Step], pages: &[Pages], held: &mut Spare) -> Result<()> {
        let plan = &self.shards[work.shard];
        let elements = plan.grid.elements(work.chunk);
        for (step, pages) in steps.iter().zip(pages).rev() {
            let locate = |e: Error| self.chain.source(step.link, step.cask).locate(e).tensor(&plan.name).chunk(work.chunk);
            for (page, bytes) in step.entry.pages.iter().zip(pages) {
                page.check(bytes).map_err(locate)?;
            }
            let codec = step.entry.codec.as_ref().ok_or_else(|| locate(Error::corrupt("a stored chunk without a codec")))?;
            let codec = self.chain.store.registry().resolve(codec).map_err(locate)?;
            let columns: Vec<(&str, Bytes)> =
                step.entry.pages.iter().zip(pages).map(|(page, bytes)| (page.column.as_str(), bytes.clone())).collect();
            let mut out = Spare::new(held.len(), "a chunk")?;
            let input = Columns {
                dtype: plan.dtype,
                element_count: elements.end - elements.start,
                columns: &columns,
                base: Some(held),
                partners: &[],
            };
            crate::codec::decode(codec.as_ref(), &input, &mut out).map_err(locate)?;
            *held = out;
        }
        check_decoded(held, work.crc).map_err(|e| e.tensor(&plan.name).chunk(work.chunk))
    }
}

/// Returns the plan of the same shard in another snapshot, if it exists there.
fn held_shard(have: &OpenChain, name: &str, stored_name: &str, wanted: &ShardPlan) -> Result<Option<ShardPlan>> {
    let directory = &have.newest().directory;
    let found = directory.find(name).map(|tensor| directory.alias_of(tensor).unwrap_or(tensor)).filter(|&tensor| {
        let same = directory.dtype(tensor) == wanted.dtype && directory.shape(tensor) == wanted.shape;
        same && directory.name(tensor) == stored_name
    });
    let shard = found.and_then(|tensor| Some((tensor, directory.find_shard(tensor, &wanted.rect)?)));
    shard.map(|(tensor, shard)| ShardPlan::new(&have.links, tensor, shard)).transpose()
}

/// Returns the id of the cask that holds the chunk of a step.
fn cask_of(chain: &OpenChain, step: &Step) -> Id {
    chain.links[step.link].0.manifest.casks[step.cask].id
}

/// Calls `each` for every run of a chunk, mapped from the chunk to the whole tensor.
fn move_runs(plan: &ShardPlan, chunk: u64, whole: &Rect, mut each: impl FnMut(Run)) {
    let window = plan.grid.elements(chunk);
    let start = window.start;
    for run in contiguous_runs(&plan.rect, whole, window) {
        each(Run { source: run.source - start, ..run });
    }
}

fn put(plan: &ShardPlan, chunk: u64, bytes: &[u8], Held { whole, out, changed }: &mut Held<'_>) {
    move_runs(plan, chunk, whole, |run| {
        if let Some(changed) = changed {
            changed.compare(run, bytes, out);
        }
        copy_run(plan.dtype, run, bytes, out);
    });
}
