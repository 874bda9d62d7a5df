//! Opens a snapshot: log, manifests and directories first, cask indexes when they are needed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};

use super::{SharedLink, Snapshot};
use crate::chain::{Link, chain_of, check_link};
use crate::commit::{Catalog, Log, LogState, SnapshotRecord, read_manifest};
use crate::container::{CaskIndex, IndexDecoder, Progress};
use crate::error::ResultExt;
use crate::limits::to_usize;
use crate::store::concurrently;
use crate::wire::{CaskRef, Digest, Directory, Id, Manifest};
use crate::{Error, Result, Store, boxed};

/// Selector of the newest live snapshot by commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latest;

/// Selector of the snapshot to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// Newest live snapshot by commit, which is not always the highest step.
    Latest,
    /// Live snapshot of a step.
    Step(u64),
}

impl From<Latest> for At {
    fn from(_: Latest) -> Self {
        Self::Latest
    }
}

impl From<u64> for At {
    fn from(step: u64) -> Self {
        Self::Step(step)
    }
}

/// A snapshot, as shown in listings.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotInfo {
    /// Record of the snapshot in the log.
    pub record: SnapshotRecord,
    /// Bytes of the decoded tensors.
    pub tensor_bytes: u64,
    /// Bytes of its casks.
    pub stored_bytes: u64,
    /// User metadata.
    pub user: Map<String, Value>,
}

/// Number of objects read at once while a snapshot is opened.
const CONCURRENT_REQUESTS: usize = 16;
/// Cask size up to which the whole cask is read with its index. One request then replaces two.
const SMALL_CASK_BYTES: u64 = 256 << 10;
/// Index size above which the root is read first and the parts when they are needed.
const WHOLE_INDEX_BYTES: u64 = 1 << 20;

/// Numbers and byte ranges of index parts of one cask.
type PartRanges = Vec<(usize, Range<u64>)>;

impl Store {
    /// Opens a snapshot. Checks all log entries, manifests and directories of its chain.
    pub async fn snapshot(&self, at: impl Into<At>) -> Result<Snapshot> {
        let log = Log::load(self).await?;
        let state = log.state();
        let (record, wanted) = match at.into() {
            At::Latest => (state.latest(), "snapshot".to_owned()),
            At::Step(step) => (state.at_step(step), format!("step {step}")),
        };
        let record = record
            .ok_or_else(|| Error::not_found(format!("the store has no {wanted}; `tensorcask ls` lists its steps")).object(self.url()))?;
        Snapshot::load(self, state, record.id).await
    }

    /// Returns all live snapshots, ordered by commit.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let mut log = Log::load(self).await?;
        log.summarise().await?;
        Ok(log
            .state()
            .live()
            .map(|record| {
                let summary = record.summary.clone().unwrap_or_default();
                SnapshotInfo {
                    record: record.clone(),
                    tensor_bytes: summary.tensor_bytes,
                    stored_bytes: summary.stored_bytes,
                    user: summary.user,
                }
            })
            .collect())
    }

    /// Returns all snapshots in the log, whatever their status, ordered by commit. Reads only the log.
    pub async fn records(&self) -> Result<Vec<SnapshotRecord>> {
        Ok(Log::load(self).await?.state().snapshots().to_vec())
    }

    /// Returns all snapshots in the log as a table with the columns of a catalog (log 6).
    pub async fn catalog(&self) -> Result<arrow_array::RecordBatch> {
        let mut log = Log::load(self).await?;
        log.summarise().await?;
        Catalog::table(log.state())
    }
}

impl Snapshot {
    /// Opens the chain of snapshot `id`.
    #[boxed]
    pub(crate) async fn load(store: &Store, state: &LogState, id: Id) -> Result<Self> {
        let records = chain_of(state, id, store.limits().max_chain_depth)?;
        let read = |record: SnapshotRecord| async move { read_manifest(store, &record.manifest_path(), record.manifest).await };
        let ahead = async {
            // Reads the hinted directory into the cache. The hint may be wrong, so a later read reports any damage.
            if let Some(digest) = state.directory {
                let _ = read_directory(store, digest).await;
            }
        };
        let manifests = concurrently(CONCURRENT_REQUESTS, records.iter().cloned().map(read));
        let (manifests, ()): (Result<Vec<Manifest>>, ()) = tokio::join!(manifests, ahead);
        let manifests = manifests?;
        for (at, (record, manifest)) in records.iter().zip(&manifests).enumerate() {
            check_link(record, manifest, manifests.get(at + 1))?;
        }
        let mut digests: Vec<Digest> = manifests.iter().map(|manifest| manifest.directory).collect();
        digests.sort_unstable();
        digests.dedup();
        let read = |digest| async move { Ok((digest, read_directory(store, digest).await?)) };
        let directories: BTreeMap<Digest, Arc<Directory>> =
            concurrently(CONCURRENT_REQUESTS, digests.into_iter().map(read)).await?.into_iter().collect();
        let mut links = Vec::with_capacity(records.len());
        for (record, manifest) in records.into_iter().zip(manifests) {
            let directory = directories.get(&manifest.directory).cloned();
            let directory = directory.ok_or_else(|| Error::corrupt("a directory was not read").object(manifest.path()))?;
            links.push(SharedLink(Arc::new(Link::new(record, manifest, directory)?)));
        }
        Ok(Self { store: store.clone(), links, counts: Arc::default() })
    }

    /// Reads the indexes of these casks (link, cask) that have not been read yet, all at once.
    pub(crate) async fn load_indexes(&self, casks: &[(usize, usize)]) -> Result<()> {
        self.load_indexes_from(casks, true).await
    }

    /// Does the same as [`load_indexes`](Self::load_indexes). Uses the cache of the store's handle only if
    /// `remembered`.
    #[boxed]
    pub(crate) async fn load_indexes_from(&self, casks: &[(usize, usize)], remembered: bool) -> Result<()> {
        let mut missing: Vec<(usize, usize)> =
            casks.iter().copied().filter(|&(link, cask)| self.links[link].0.index(cask).is_none()).collect();
        missing.sort_unstable();
        missing.dedup();
        let read = |(at, cask): (usize, usize)| async move {
            let link = &self.links[at].0;
            let wanted = &link.manifest.casks[cask];
            let index = match self.store.cached_index(wanted).filter(|_| remembered) {
                Some(index) => index,
                None => {
                    let (index, small_cask) = read_cask(&self.store, wanted).await?;
                    let index = Arc::new(index);
                    self.store.cache_index(wanted, index.clone());
                    // Fails only if a concurrent reader has set the same bytes.
                    let _ = small_cask.map(|bytes| link.small_casks[cask].set(bytes));
                    index
                }
            };
            // Fails only if a concurrent reader has set the same bytes.
            let _ = link.indexes[cask].set(index);
            Ok(())
        };
        concurrently(CONCURRENT_REQUESTS, missing.into_iter().map(read)).await.map(|_: Vec<()>| ())
    }

    /// Reads parts (link, cask, part, range), all at once.
    #[boxed]
    pub(crate) async fn load_parts(&self, mut parts: Vec<(usize, usize, usize, Range<u64>)>) -> Result<()> {
        parts.sort_unstable_by_key(|part| (part.0, part.1, part.2));
        parts.dedup();
        let mut groups: BTreeMap<(usize, usize), PartRanges> = BTreeMap::new();
        for (link, cask, part, range) in parts {
            groups.entry((link, cask)).or_default().push((part, range));
        }
        let load = |((link, cask), parts): ((usize, usize), PartRanges)| async move {
            let link = &self.links[link].0;
            let path = link.manifest.casks[cask].path();
            let ranges: Vec<Range<u64>> = parts.iter().map(|(_, range)| range.clone()).collect();
            let index = link.index(cask).ok_or_else(|| Error::invalid("its index has not been read").object(path.as_str()))?;
            for ((part, _), bytes) in parts.iter().zip(self.store.get_ranges(&path, &ranges).await?) {
                index.load_part(*part, bytes).in_object(path.as_str())?;
            }
            Ok(())
        };
        concurrently(CONCURRENT_REQUESTS, groups.into_iter().map(load)).await.map(|_: Vec<()>| ())
    }

    /// Reads all index parts of all casks of a link. The indexes must have been read.
    pub(crate) async fn load_all_parts(&self, link: usize) -> Result<()> {
        let casks = self.links[link].0.indexes.iter().enumerate();
        let parts = casks
            .filter_map(|(cask, index)| Some((cask, index.get()?.missing_parts())))
            .flat_map(|(cask, parts)| parts.into_iter().map(move |(part, range)| (link, cask, part, range)))
            .collect();
        self.load_parts(parts).await
    }
}

#[boxed]
pub(crate) async fn read_directory(store: &Store, digest: Digest) -> Result<Arc<Directory>> {
    if let Some(directory) = store.cached_directory(digest) {
        return Ok(directory);
    }
    let path = format!("directories/{digest}");
    let bytes = store.get(&path, store.limits().max_directory_bytes).await.map_err(|e| match e.kind() {
        crate::ErrorKind::NotFound => {
            Error::corrupt("the directory of a committed snapshot is missing").object(path.as_str()).clause("manifest 3.1")
        }
        _ => e,
    })?;
    let directory = Arc::new(Directory::decode(bytes, digest, store.limits()).in_object(path)?);
    store.cache_directory(digest, directory.clone());
    Ok(directory)
}

/// Reads the index of a cask and compares it with the manifest.
pub(crate) async fn read_index(store: &Store, cask: &CaskRef) -> Result<CaskIndex> {
    Ok(read_cask(store, cask).await?.0)
}

/// Reads the index of a cask and compares it with the manifest. Also returns the whole cask if it is small. Its pages
/// are not checked yet.
#[boxed]
async fn read_cask(store: &Store, cask: &CaskRef) -> Result<(CaskIndex, Option<Bytes>)> {
    let path = cask.path();
    let read = async {
        let mut decoder = IndexDecoder::new(cask.id, cask.bytes, store.limits().clone());
        let first = if cask.bytes - cask.index_offset <= WHOLE_INDEX_BYTES { cask.index_offset } else { cask.root_offset };
        crate::Limits::check(cask.bytes - first, store.limits().max_index_bytes, "size of the index")?;
        let is_small = cask.bytes <= SMALL_CASK_BYTES;
        let start = if is_small { 0 } else { first };
        let read = store.get_range(&path, start..cask.bytes).await.map_err(|e| match e.kind() {
            crate::ErrorKind::NotFound => Error::corrupt("a cask of a committed snapshot is missing").clause("manifest 2.3"),
            _ => e,
        })?;
        decoder.push(first, read.slice(to_usize(first - start, "an offset")?..))?;
        let index = loop {
            match decoder.poll()? {
                Progress::Done(index) => break index,
                Progress::Needs(range) => {
                    let bytes = store.get_range(&path, range.clone()).await?;
                    decoder.push(range.start, bytes)?;
                }
            }
        };
        if index.digest() != cask.digest || index.index_offset() != cask.index_offset || index.root_offset() != cask.root_offset {
            return Err(Error::corrupt("is not the cask that the manifest names: its digest differs").clause("manifest 2.3"));
        }
        Ok((index, is_small.then_some(read)))
    };
    read.await.in_object(path.as_str())
}
