//! Reads a snapshot, its tensors, and slices of them.

mod execute;
mod narrow;
mod open;
mod recover;
mod since;
mod verify;
mod view;
mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use serde_json::{Map, Value};

pub(crate) use execute::{ChunkItem, ReadItem};
pub(crate) use open::read_directory;
pub use open::{At, Latest, SnapshotInfo};
pub use recover::{Recovered, Skipped};
pub use since::Updated;
pub use verify::{Depth, Problem, VerifyOptions, VerifyReport};
pub use watch::Watch;

use crate::chain::{Decision, Link};
use crate::commit::SnapshotRecord;
use crate::container::CaskIndex;
use crate::limits::{to_usize, zeroed};
use crate::wire::blob_slot;
use crate::wire::{DirectoryTensor, ErrorsFile, Manifest, ShardErrors, SnapshotKind};
use crate::{Blob, Error, Result, RoundingReport, Slice, Store, Tensor, TensorRounding, boxed};

/// A committed state at one step, with the chain that rebuilds it.
///
/// Opening checks log entries, manifests and directories of the whole chain. It reads no tensor bytes.
#[derive(Debug, Clone)]
pub struct Snapshot {
    store: Store,
    links: Vec<SharedLink>,
    counts: Arc<ReadCounters>,
}

/// A link that several readers share.
#[derive(Debug, Clone)]
pub(crate) struct SharedLink(Arc<Link>);

impl AsRef<Link> for SharedLink {
    fn as_ref(&self) -> &Link {
        &self.0
    }
}

#[derive(Debug, Default)]
struct ReadCounters {
    chunks: AtomicU64,
    pages: AtomicU64,
    page_bytes: AtomicU64,
}

/// Counts of the tensor data that a snapshot has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadCounts {
    /// Number of chunks rebuilt.
    pub chunks: u64,
    /// Number of pages read for these chunks, over all links of the chain.
    pub pages: u64,
    /// Number of bytes in these pages.
    pub page_bytes: u64,
}

/// A snapshot of a chain, as shown in listings.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkInfo {
    /// Record of the snapshot in the log.
    pub record: SnapshotRecord,
    /// Whether the snapshot is a base or a delta.
    pub kind: SnapshotKind,
    /// Bytes of its casks.
    pub stored_bytes: u64,
    /// Number of its casks.
    pub casks: usize,
}

impl Snapshot {
    /// Returns the step.
    pub fn step(&self) -> u64 {
        self.newest().record.step
    }

    /// Returns the record of the snapshot in the log.
    pub fn record(&self) -> &SnapshotRecord {
        &self.newest().record
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.newest().manifest
    }

    /// Returns the user metadata.
    pub fn user(&self) -> &Map<String, Value> {
        &self.newest().manifest.user
    }

    /// Returns why the adaptive policy chose a base or a delta. `None` if another policy saved the snapshot.
    pub fn decision(&self) -> Option<Decision> {
        serde_json::from_value(self.user().get(Decision::KEY)?.clone()).ok()
    }

    /// Returns the metadata of the state as files carry it (`__metadata__` of safetensors).
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.newest().manifest.metadata
    }

    /// Returns the chain, newest first.
    pub fn chain(&self) -> Vec<LinkInfo> {
        self.links
            .iter()
            .map(|link| {
                let Link { record, manifest, .. } = link.as_ref();
                LinkInfo { record: record.clone(), kind: manifest.kind, stored_bytes: manifest.stored_bytes(), casks: manifest.casks.len() }
            })
            .collect()
    }

    /// Returns all tensors, ordered by name, including aliases.
    pub fn tensors(&self) -> Vec<DirectoryTensor> {
        let directory = &self.newest().directory;
        (0..directory.len()).map(|tensor| directory.tensor(tensor)).collect()
    }

    /// Returns the description of a tensor.
    pub fn tensor(&self, name: &str) -> Result<DirectoryTensor> {
        Ok(self.newest().directory.tensor(self.find(name)?))
    }

    /// Reads a slice of a tensor. Fetches only the chunks that the slice touches, from each link of the chain that
    /// holds some of them.
    pub async fn read(&self, name: &str, slice: &Slice) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        let rect = slice.of(&tensor.shape).map_err(|e| e.tensor(name))?;
        let bytes = tensor.dtype.byte_count(rect.element_count().unwrap_or(u64::MAX)).unwrap_or(u64::MAX);
        crate::Limits::check(bytes, self.store.limits().max_read_bytes, "size of the slice").map_err(|e| e.tensor(name))?;
        self.check_present(self.find(name)?, &rect).await?;
        let mut data = zeroed(to_usize(bytes, "a tensor")?, "a tensor")?;
        self.read_into(name, slice, &mut data).await?;
        Ok(Tensor { name: name.to_owned(), dtype: tensor.dtype, shape: rect.shape, data })
    }

    /// Reads a slice of a tensor into a buffer of exactly its size.
    pub async fn read_into(&self, name: &str, slice: &Slice, out: &mut [u8]) -> Result<()> {
        let tensor = self.find(name)?;
        let rect = slice.of(&self.newest().directory.shape(tensor)).map_err(|e| e.tensor(name))?;
        self.read_items(vec![ReadItem { tensor, rect, out }]).await
    }

    /// Reads several slices in few requests. Each request is a name, a slice, and a buffer of exactly the slice's size.
    pub async fn read_many_into(&self, requests: Vec<(&str, Slice, &mut [u8])>) -> Result<()> {
        let mut items = Vec::with_capacity(requests.len());
        for (name, slice, out) in requests {
            let tensor = self.find(name)?;
            let rect = slice.of(&self.newest().directory.shape(tensor)).map_err(|e| e.tensor(name))?;
            items.push(ReadItem { tensor, rect, out });
        }
        self.read_items(items).await
    }

    /// Returns the number of chunks that a slice touches. Each takes at most one request.
    pub fn chunks_of(&self, name: &str, slice: &Slice) -> Result<u64> {
        let tensor = self.find(name)?;
        let rect = slice.of(&self.newest().directory.shape(tensor)).map_err(|e| e.tensor(name))?;
        execute::chunk_count(&self.newest().directory, tensor, &rect)
    }

    /// Returns rank and name of each blob.
    pub async fn blobs(&self) -> Result<Vec<(u32, String)>> {
        Ok(self.blob_pages().await?.into_iter().map(|(_, rank, name, _)| (rank, name)).collect())
    }

    /// Reads a blob.
    pub async fn read_blob(&self, rank: u32, name: &str) -> Result<Vec<u8>> {
        let found = self.blob_pages().await?.into_iter().find(|(_, r, n, _)| *r == rank && n == name);
        let (path, _, _, page) =
            found.ok_or_else(|| Error::not_found(format!("step {} has no blob of rank {rank}", self.step())).tensor(name))?;
        let link = self.newest();
        let small_cask = link.manifest.casks.iter().position(|cask| cask.path() == path).and_then(|at| link.small_casks[at].get());
        let bytes = match small_cask {
            Some(whole) => execute::slice_of(whole, &page.range).map_err(|e| e.object(path.as_str()))?,
            None => self.store.get_range(&path, page.range.clone()).await?,
        };
        page.check(&bytes).map_err(|e| e.object(path).tensor(name))?;
        Ok(bytes.to_vec())
    }

    /// Returns the rounding errors of the tensors that were saved with reduced precision, ordered by name. Empty if
    /// nothing was rounded. Reads no tensor bytes.
    ///
    /// ```
    /// use tensorcask::{Dtype, Metadata, Policy, Precision, TensorView, WriterOptions, blocking::Store};
    /// let store = Store::open("memory://rounding-example")?;
    /// let options = WriterOptions { precision: Precision::near(), policy: Policy::Full, ..WriterOptions::default() };
    /// let values: Vec<u8> = (1..1000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
    /// let state = [TensorView::new("optim.exp_avg.w", Dtype::F32, &[999], &values)?];
    /// store.writer_with(options)?.save(1, &state, &[], &Metadata::default())?;
    /// let errors = store.snapshot(1)?.rounding()?;
    /// assert_eq!((errors[0].name.as_str(), errors[0].setting.as_str()), ("optim.exp_avg.w", "loguniform:16"));
    /// assert!(errors[0].total.max_relative < 0.022);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub async fn rounding(&self) -> Result<Vec<TensorRounding>> {
        let directory = &self.newest().directory;
        let mut tensors: BTreeMap<String, TensorRounding> = BTreeMap::new();
        for shard in self.shard_errors().await? {
            let Some(number) = directory.find(&shard.tensor) else { continue };
            let (dtype, role) = (directory.dtype(number), directory.role(number));
            let found = tensors.entry(shard.tensor.clone()).or_insert_with(|| TensorRounding {
                name: shard.tensor.clone(),
                role: role.to_owned(),
                setting: shard.setting.clone(),
                total: RoundingReport::default(),
                chunks: vec![],
            });
            let bad = |e: crate::Error| e.tensor(&shard.tensor).clause("errors 2");
            let grid = crate::tensor::ChunkGrid::new(dtype, &shard.shape).map_err(bad)?;
            for chunk in &shard.chunks {
                if chunk.chunk >= grid.chunk_count() {
                    return Err(bad(Error::corrupt(format!("errors of chunk {} of {}", chunk.chunk, grid.chunk_count()))));
                }
                let elements = grid.elements(chunk.chunk);
                let report = RoundingReport::of_chunk(chunk, elements.end.saturating_sub(elements.start));
                found.total = found.total.and(report);
                found.chunks.push((shard.offset.clone(), chunk.chunk, report));
            }
        }
        Ok(tensors.into_values().collect())
    }

    /// Refuses a snapshot with a rounded tensor whose relative error exceeds `bound`.
    pub async fn check_rounding(&self, bound: f64) -> Result<()> {
        match self.rounding().await?.into_iter().find(|tensor| tensor.total.max_relative > bound) {
            None => Ok(()),
            Some(TensorRounding { name, setting, total, .. }) => Err(Error::invalid(format!(
                "step {} was saved with {setting}: its greatest relative error is {:.2e}, above the bound of {bound}; use another step or a higher bound",
                self.step(),
                total.max_relative
            ))
            .tensor(name)),
        }
    }

    /// Reads the error reports that the ranks wrote for their shards.
    #[boxed]
    pub(crate) async fn shard_errors(&self) -> Result<Vec<ShardErrors>> {
        let mut shards = Vec::new();
        for (rank, name) in self.blobs().await?.into_iter().filter(|(_, name)| name == ErrorsFile::BLOB) {
            let bytes = self.read_blob(rank, &name).await?;
            let file = ErrorsFile::decode(&bytes, self.store.limits());
            shards.extend(file.map_err(|e| e.object(format!("blob `{name}` of rank {rank}, step {}", self.step())))?.shards);
        }
        Ok(shards)
    }

    /// Returns how much tensor data this snapshot and its clones have read.
    pub fn read_counts(&self) -> ReadCounts {
        ReadCounts {
            chunks: self.counts.chunks.load(Ordering::Relaxed),
            pages: self.counts.pages.load(Ordering::Relaxed),
            page_bytes: self.counts.page_bytes.load(Ordering::Relaxed),
        }
    }

    /// Returns the slot and the index of each cask that the snapshot wrote. Reads no tensor bytes.
    pub async fn indexes(&self) -> Result<Vec<(u32, Arc<CaskIndex>)>> {
        let link = self.newest();
        let all: Vec<(usize, usize)> = (0..link.manifest.casks.len()).map(|cask| (0, cask)).collect();
        self.load_indexes(&all).await?;
        self.load_all_parts(0).await?;
        Ok(link.manifest.casks.iter().enumerate().filter_map(|(at, cask)| Some((cask.slot, link.index(at)?.clone()))).collect())
    }

    pub(crate) fn newest(&self) -> &Link {
        // A snapshot always has at least one link.
        &self.links[0].0
    }

    pub(crate) fn find(&self, name: &str) -> Result<usize> {
        let found = self.newest().directory.find(name);
        found.ok_or_else(|| Error::not_found(format!("step {} has no tensor of this name", self.step())).tensor(name))
    }

    /// Returns whether the snapshot has exactly these blobs, byte for byte. Ignores blobs that the library itself adds.
    #[boxed]
    pub(crate) async fn has_blobs(&self, wanted: &[&Blob<'_>]) -> Result<bool> {
        let mut found = self.blob_pages().await?;
        found.retain(|(_, _, name, _)| name != ErrorsFile::BLOB);
        if found.len() != wanted.len() {
            return Ok(false);
        }
        for blob in wanted {
            let page = found.iter().find(|(_, rank, name, _)| *rank == blob.rank && *name == blob.name);
            match page {
                Some((.., page)) if page.range.end.saturating_sub(page.range.start) == blob.data.len() as u64 => {}
                _ => return Ok(false),
            }
            if self.read_blob(blob.rank, &blob.name).await? != *blob.data {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the links of the chain, newest first.
    pub(crate) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().map(AsRef::as_ref)
    }

    /// Returns cask path, rank, name and page of each blob.
    #[boxed]
    async fn blob_pages(&self) -> Result<Vec<(String, u32, String, crate::container::PageEntry)>> {
        let link = self.newest();
        let all: Vec<(usize, usize)> = (0..link.manifest.casks.len()).map(|cask| (0, cask)).collect();
        self.load_indexes(&all).await?;
        let mut blobs = Vec::new();
        for (at, cask) in link.manifest.casks.iter().enumerate() {
            let Some(index) = link.index(at) else { continue };
            for (rank, name, page) in index.blobs() {
                if blob_slot(rank) != cask.slot {
                    let message = format!("a blob of rank {rank} in the cask of slot {}", cask.slot);
                    return Err(Error::corrupt(message).object(cask.path()).tensor(name).clause("manifest 5.4"));
                }
                let bytes = page.range.end.saturating_sub(page.range.start);
                crate::Limits::check(bytes, self.store.limits().max_blob_bytes, "size of the blob").map_err(|e| e.tensor(name))?;
                blobs.push((cask.path(), rank, name.to_owned(), page));
            }
        }
        Ok(blobs)
    }

    fn count(&self, chunks: u64, pages: u64, page_bytes: u64) {
        self.counts.chunks.fetch_add(chunks, Ordering::Relaxed);
        self.counts.pages.fetch_add(pages, Ordering::Relaxed);
        self.counts.page_bytes.fetch_add(page_bytes, Ordering::Relaxed);
    }
}

/// Pages of one step, in column order.
pub(crate) type Pages = Vec<Bytes>;
