//! Reads f32 tensors as bf16. If the roundings are stored in columns of their own, reads only those columns.

use bytes::Bytes;
use rayon::prelude::*;

use super::execute::{ChunkItem, PageFetch, touched};
use super::open_chain::OpenChain;
use super::{ReadRequest, Snapshot};
use crate::chain::{ShardPlan, Step};
use crate::codec::{ChunkKind, Columns, Rounded};
use crate::container::PageEntry;
use crate::limits::{to_usize, zeroed};
use crate::store::concurrently;
use crate::tensor::{Rect, Run, contiguous_runs, copy_run};
use crate::{Dtype, Error, Result, Slice, Tensor, boxed, parallel};

/// Limit on the decoded bytes of all batches at a time with two threads. More threads get larger batches, see
/// [`parallel::window_bytes`]. A single larger chunk exceeds this limit.
const BATCH_BYTES: u64 = 64 << 20;

/// Number of tensors read at once.
const CONCURRENT_TENSORS: usize = 4;

/// A chunk to read.
struct Wanted {
    shard: usize,
    chunk: u64,
    /// Stored form, if the columns of roundings are enough.
    rounded: Option<Step>,
}

/// View of a snapshot that reads f32 tensors as bf16. [`Snapshot::as_bf16`] returns it.
#[derive(Debug, Clone, Copy)]
pub struct Bf16View<'s> {
    chain: &'s OpenChain,
    snapshot: &'s Snapshot,
}

impl Snapshot {
    /// Returns a view that reads f32 tensors as bf16. Sends no request.
    pub fn as_bf16(&self) -> Bf16View<'_> {
        Bf16View { chain: &self.chain, snapshot: self }
    }
}

impl Bf16View<'_> {
    /// Reads a slice of an f32 tensor as bf16. Rounds each element to the nearest value, ties to even; NaN stays NaN. A
    /// bf16 tensor is read as it is.
    ///
    /// For chunks stored with codec `tc.rounded`, reads only the roundings, about 0.35 of the bytes. Other chunks are
    /// read whole and then rounded.
    ///
    /// The checksum of a chunk covers its f32 values, so it cannot check roundings that are read alone. The checksums
    /// of their pages do.
    pub async fn read(&self, name: &str, slice: &Slice) -> Result<Tensor> {
        let tensor = self.snapshot.tensor(name)?;
        match tensor.dtype {
            Dtype::Bf16 => return self.snapshot.read(name, slice).await,
            Dtype::F32 => {}
            other => return Err(Error::invalid(format!("a tensor of {other} cannot be read as bf16")).tensor(name)),
        }
        let rect = slice.of(&tensor.shape).map_err(|e| e.tensor(name))?;
        let bytes = Dtype::Bf16.byte_count(rect.element_count().unwrap_or(u64::MAX)).unwrap_or(u64::MAX);
        crate::Limits::check(bytes, self.chain.store.limits().max_read_bytes, "size of the slice").map_err(|e| e.tensor(name))?;
        self.chain.check_present(self.chain.find(name)?, &rect).await?;
        let mut data = zeroed(to_usize(bytes, "a tensor")?, "a tensor")?;
        self.read_many_into(vec![ReadRequest { name, slice: slice.clone(), out: &mut data }]).await?;
        Ok(Tensor { name: name.to_owned(), dtype: Dtype::Bf16, shape: rect.shape, data })
    }

    /// Reads several slices of f32 tensors, as [`read`](Self::read) does. Each buffer has
    /// exactly the size of its slice as bf16.
    pub async fn read_many_into(&self, requests: Vec<ReadRequest<'_>>) -> Result<()> {
        let mut wanted = Vec::with_capacity(requests.len());
        for ReadRequest { name, slice, out } in requests {
            let tensor = self.chain.find(name)?;
            let directory = &self.chain.newest().directory;
            let rect = slice.of(&directory.shape(tensor)).map_err(|e| e.tensor(name))?;
            let bytes = rect.element_count().and_then(|count| Dtype::Bf16.byte_count(count));
            if directory.dtype(tensor) != Dtype::F32 || bytes != Some(out.len() as u64) {
                let message = format!("{} bytes for {} of f32 as bf16", out.len(), crate::tensor::format_shape(&rect.shape));
                return Err(Error::invalid(message).tensor(name));
            }
            wanted.push(async move { self.read_roundings(tensor, &rect, out).await.map_err(|e| e.tensor(name)) });
        }
        concurrently(CONCURRENT_TENSORS, wanted).await.map(drop)
    }

    #[boxed]
    async fn read_roundings(&self, tensor: usize, rect: &Rect, out: &mut [u8]) -> Result<()> {
        let shards = self.chain.shards_in(tensor, rect)?;
        let rows = self.chain.load_plans(&shards).await?;
        let mut batch = Vec::new();
        let mut batch_bytes = 0u64;
        let most = parallel::window_bytes(BATCH_BYTES) / CONCURRENT_TENSORS as u64;
        for (at, (plan, rows)) in shards.iter().zip(&rows).enumerate() {
            for chunk in touched(plan.grid, &plan.rect, rect) {
                let (step, _) = plan.stored(&self.chain.links, rows, chunk, 0)?;
                let codec = step.entry.codec.as_ref().filter(|codec| codec.id == Rounded::ID && step.entry.kind == ChunkKind::Absolute);
                if let Some(codec) = codec {
                    self.chain.store.registry().resolve(codec)?;
                }
                let rounded = codec.is_some().then_some(step);
                let bytes = plan.grid.bytes(chunk);
                batch_bytes = batch_bytes.saturating_add(bytes.end - bytes.start);
                batch.push(Wanted { shard: at, chunk, rounded });
                if batch_bytes >= most {
                    self.round_batch(tensor, &shards, std::mem::take(&mut batch), rect, out).await?;
                    batch_bytes = 0;
                }
            }
        }
        self.round_batch(tensor, &shards, batch, rect, out).await
    }

    #[boxed]
    async fn round_batch(&self, tensor: usize, shards: &[ShardPlan], batch: Vec<Wanted>, rect: &Rect, out: &mut [u8]) -> Result<()> {
        let elements = |wanted: &Wanted| shards[wanted.shard].grid.elements(wanted.chunk);
        let mut whole = Vec::new();
        let mut buffers = Vec::new();
        let mut steps = Vec::new();
        for wanted in &batch {
            match &wanted.rounded {
                Some(step) => steps.push(step),
                None => {
                    let bytes = shards[wanted.shard].grid.bytes(wanted.chunk);
                    buffers.push(zeroed(to_usize(bytes.end - bytes.start, "a chunk")?, "a chunk")?);
                    whole.push(wanted);
                }
            }
        }
        let items = whole.iter().zip(&mut buffers);
        let items = items.map(|(wanted, out)| ChunkItem { tensor, rect: shards[wanted.shard].rect.clone(), chunk: wanted.chunk, out });
        let items: Vec<ChunkItem<'_>> = items.collect();
        if !items.is_empty() {
            self.chain.read_chunks(items).await?;
        }
        let pages = PageFetch::new(self.chain, steps.into_iter(), is_rounding).read().await?;
        let bytes = pages.iter().flatten().map(|page| page.len() as u64).sum();
        self.chain.count(pages.len() as u64, pages.iter().map(|pages| pages.len() as u64).sum(), bytes);
        let mut pages = pages.into_iter();
        let mut buffers = buffers.into_iter();
        let mut sources = Vec::with_capacity(batch.len());
        for wanted in &batch {
            sources.push(match &wanted.rounded {
                Some(step) => Source::Pages(step, pages.next().unwrap_or_default()),
                None => Source::Whole(buffers.next().unwrap_or_default()),
            });
        }
        let decode = |(wanted, source): (&Wanted, Source<'_>)| {
            let window = elements(wanted);
            let mut rounded = zeroed(to_usize(2 * (window.end - window.start), "a chunk")?, "a chunk")?;
            match source {
                Source::Whole(data) => Rounded::round(&data, &mut rounded),
                Source::Pages(step, pages) => decode_pages(step, &pages, &mut rounded)
                    .map_err(|e| self.chain.source(step.link, step.cask).locate(e))
                    .map_err(|e| e.tensor(&shards[wanted.shard].name).chunk(wanted.chunk))?,
            }
            Ok(rounded)
        };
        let decoded: Vec<Vec<u8>> = parallel::run(|| batch.par_iter().zip(sources).map(decode).collect::<Result<_>>())?;
        for (wanted, bytes) in batch.iter().zip(decoded) {
            let window = elements(wanted);
            let start = window.start;
            for run in contiguous_runs(&shards[wanted.shard].rect, rect, window) {
                copy_run(Dtype::Bf16, Run { source: run.source - start, ..run }, &bytes, out);
            }
        }
        Ok(())
    }
}

/// Data that a chunk is rounded from.
enum Source<'a> {
    Whole(Vec<u8>),
    Pages(&'a Step, Vec<Bytes>),
}

/// Returns the pages of a chunk that hold its roundings.
fn roundings(step: &Step) -> impl Iterator<Item = &PageEntry> {
    step.entry.pages.iter().filter(|page| is_rounding(page))
}

fn is_rounding(page: &PageEntry) -> bool {
    Rounded::ROUNDINGS.contains(&page.column.as_str())
}

fn decode_pages(step: &Step, pages: &[Bytes], out: &mut [u8]) -> Result<()> {
    let mut columns: Vec<(&str, Bytes)> = Vec::with_capacity(pages.len());
    for (page, bytes) in roundings(step).zip(pages) {
        page.check(bytes)?;
        columns.push((page.column.as_str(), bytes.clone()));
    }
    let element_count = (out.len() / 2) as u64;
    Rounded::decode_roundings(&Columns { dtype: Dtype::F32, element_count, columns: &columns, base: None, partners: &[] }, out)
}
