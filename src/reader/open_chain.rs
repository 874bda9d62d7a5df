//! The chain of a snapshot, opened: log records, manifests and directories first, cask indexes when they are needed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::CaskSource;
use crate::chain::{Link, Rows, ShardPlan, chain_of, check_link};
use crate::commit::{LogState, SnapshotRecord, SnapshotStatus, load_log, read_inline, read_manifest};
use crate::container::{CaskIndex, IndexDecoder, Progress};
use crate::error::{GIVEN_UP, ResultExt};
use crate::limits::to_usize;
use crate::store::concurrently;
use crate::tensor::Rect;
use crate::wire::{CaskRef, Digest, Directory, Id, InlineSnapshot, Manifest};
use crate::{Error, ErrorKind, Limits, Result, Store, boxed};

/// The links of a snapshot's chain, and the store that holds their objects. `execute` decodes chunks through it.
#[derive(Debug, Clone)]
pub(crate) struct OpenChain {
    pub(super) store: Store,
    /// Links, newest first. At least one.
    pub(super) links: Vec<SharedLink>,
    pub(super) counts: Arc<ReadCounters>,
}

/// A link that several readers share.
#[derive(Debug, Clone)]
pub(crate) struct SharedLink(pub(super) Arc<Link>);

impl AsRef<Link> for SharedLink {
    fn as_ref(&self) -> &Link {
        &self.0
    }
}

#[derive(Debug, Default)]
pub(super) struct ReadCounters {
    pub(super) chunks: AtomicU64,
    pub(super) pages: AtomicU64,
    pub(super) page_bytes: AtomicU64,
}

/// Number of objects read at once while a snapshot is opened.
const CONCURRENT_REQUESTS: usize = 16;
/// Cask size up to which the whole cask is read with its index. One request then replaces two.
const SMALL_CASK_BYTES: u64 = 256 << 10;
/// Index size above which the root is read first and the parts when they are needed.
const WHOLE_INDEX_BYTES: u64 = 1 << 20;

/// Numbers and byte ranges of index parts of one cask.
type PartRanges = Vec<(usize, Range<u64>)>;

impl OpenChain {
    /// Opens the chain of snapshot `id`.
    #[boxed]
    pub(crate) async fn load(store: &Store, state: &LogState, id: Id) -> Result<Self> {
        let records = chain_of(state, id, store.limits().max_chain_depth)?;
        let read = |record: SnapshotRecord| async move {
            let place = record.manifest_place();
            match place.inline_in {
                Some(sequence) => {
                    let inline = read_inline(store, &place, sequence, state.inline_entry(sequence).cloned()).await?;
                    Ok((inline.manifest.clone(), Some(inline)))
                }
                None => Ok((read_manifest(store, &place).await?, None)),
            }
        };
        let ahead = async {
            // Reads the hinted directory into the cache. The hint may be wrong, so a later read reports any damage.
            if let Some(digest) = state.directory {
                let _ = read_directory(store, digest).await;
            }
        };
        let manifests = concurrently(CONCURRENT_REQUESTS, records.iter().cloned().map(read));
        let (manifests, ()) = tokio::join!(manifests, ahead);
        let (manifests, inline): (Vec<Manifest>, Vec<Option<InlineSnapshot>>) = manifests?.into_iter().unzip();
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
        for ((record, manifest), inline) in records.into_iter().zip(manifests).zip(inline) {
            let directory = directories.get(&manifest.directory).cloned();
            let directory = directory.ok_or_else(|| Error::corrupt("a directory was not read").object(record.manifest_path()))?;
            let link = match inline {
                Some(inline) => Link::new_inline(record, inline, directory)?,
                None => Link::new(record, manifest, directory)?,
            };
            links.push(SharedLink(Arc::new(link)));
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
            let index = match self.store.caches().index(wanted).filter(|_| remembered) {
                Some(index) => index,
                None => {
                    let (index, small_cask) = read_cask(&self.source(at, cask), wanted, self.store.limits()).await?;
                    let index = Arc::new(index);
                    self.store.caches().keep_index(wanted, index.clone());
                    // Fails only if a concurrent reader has set the same bytes.
                    let _ = small_cask.map(|bytes| link.small_casks[cask].set(bytes));
                    index
                }
            };
            // Fails only if a concurrent reader has set the same bytes.
            let _ = link.indexes[cask].set(index);
            Ok(())
        };
        let read = concurrently(CONCURRENT_REQUESTS, missing.into_iter().map(read)).await.map(|_: Vec<()>| ());
        self.explained(read).await
    }

    /// Says of objects that are missing that the snapshot was given up while it was read, if that is why.
    #[boxed]
    pub(super) async fn explained<T: Send>(&self, read: Result<T>) -> Result<T> {
        let error = match read {
            Err(error) if error.is_damage() => error,
            read => return read,
        };
        let record = &self.newest().record;
        let found = load_log(&self.store).await.ok();
        let is_given_up = |found: &SnapshotRecord| found.status == SnapshotStatus::Collected;
        if !found.is_some_and(|log| log.state().by_id(record.id).is_some_and(is_given_up)) {
            return Err(error);
        }
        let message = format!(
            "step {} was forgotten since this snapshot was opened, and its objects are deleted. Open a newer step; to read a step for longer \
             than one save takes, pin it first (`tensorcask pin`)",
            record.step
        );
        // Not `NotFound`, on which a caller may begin anew: the store has newer steps.
        Err(Error::new(ErrorKind::Conflict, message).object(record.manifest_path()).clause(GIVEN_UP).source(error))
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
            let source = CaskSource::of_link(&self.store, link, cask);
            let ranges: Vec<Range<u64>> = parts.iter().map(|(_, range)| range.clone()).collect();
            let index = link.index(cask).ok_or_else(|| Error::invalid("its index has not been read").object(source.path()))?;
            for ((part, _), bytes) in parts.iter().zip(source.get_ranges(&ranges).await?) {
                index.load_part(*part, bytes).map_err(|e| source.locate(e))?;
            }
            Ok(())
        };
        let loaded = concurrently(CONCURRENT_REQUESTS, groups.into_iter().map(load)).await.map(|_: Vec<()>| ());
        self.explained(loaded).await
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

    /// Returns a chain that reads pages from the store, even if an earlier read fetched their whole cask. Reads log
    /// entries that hold casks again.
    #[boxed]
    pub(super) async fn without_read_casks(&self) -> Result<Self> {
        let read_again = |link: SharedLink| async move {
            let link = &link.0;
            let place = link.record.manifest_place();
            let inline = match place.inline_in {
                Some(sequence) => Some(read_inline(&self.store, &place, sequence, None).await?),
                None => None,
            };
            Ok(SharedLink(Arc::new(Link {
                record: link.record.clone(),
                manifest: link.manifest.clone(),
                directory: link.directory.clone(),
                indexes: link.indexes.clone(),
                small_casks: link.manifest.casks.iter().map(|_| OnceLock::new()).collect(),
                inline,
            })))
        };
        let links = concurrently(CONCURRENT_REQUESTS, self.links.iter().cloned().map(read_again)).await?;
        Ok(Self { links, ..self.clone() })
    }

    /// Returns the source of a cask of a link.
    pub(super) fn source(&self, link: usize, cask: usize) -> CaskSource {
        CaskSource::of_link(&self.store, &self.links[link].0, cask)
    }

    /// Returns the links, newest first.
    pub(crate) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().map(AsRef::as_ref)
    }

    /// The chain of the base alone; `None` if there is no other link.
    pub(crate) fn base(&self) -> Option<Self> {
        let base = self.links.last().filter(|_| self.links.len() > 1)?;
        Some(Self { store: self.store.clone(), links: vec![base.clone()], counts: Arc::default() })
    }

    pub(crate) fn newest(&self) -> &Link {
        // A snapshot always has at least one link.
        &self.links[0].0
    }

    pub(crate) fn find(&self, name: &str) -> Result<usize> {
        let found = self.newest().directory.find(name);
        found.ok_or_else(|| Error::not_found(format!("step {} has no tensor of this name", self.newest().record.step)).tensor(name))
    }

    /// Plans the shards of a tensor (or of the tensor that it is tied to) that a rectangle intersects.
    pub(super) fn shards_in(&self, tensor: usize, rect: &Rect) -> Result<Vec<ShardPlan>> {
        let directory = &self.newest().directory;
        let tensor = directory.alias_of(tensor).unwrap_or(tensor);
        let plans = directory.shards_of(tensor).map(|shard| ShardPlan::new(&self.links, tensor, shard));
        plans.filter(|plan| plan.as_ref().map_or(true, |plan| plan.rect.intersection(rect).is_some())).collect()
    }

    /// Reads the indexes and parts that the shards need. Returns the rows of each shard.
    #[boxed]
    pub(super) async fn load_plans(&self, shards: &[ShardPlan]) -> Result<Vec<Rows>> {
        let casks: Vec<(usize, usize)> = shards.iter().flat_map(|shard| shard.candidates().iter().copied()).collect();
        self.load_indexes(&casks).await?;
        let rows = shards.iter().map(|shard| shard.rows(&self.links)).collect::<Result<Vec<_>>>()?;
        let mut parts = Vec::new();
        for &(link, cask, row) in rows.iter().flatten() {
            let missing = self.links[link].0.index(cask).and_then(|index| index.missing_part(row));
            parts.extend(missing.map(|(part, range)| (link, cask, part, range)));
        }
        self.load_parts(parts).await?;
        Ok(rows)
    }

    pub(super) fn count(&self, chunks: u64, pages: u64, page_bytes: u64) {
        self.counts.chunks.fetch_add(chunks, Ordering::Relaxed);
        self.counts.pages.fetch_add(pages, Ordering::Relaxed);
        self.counts.page_bytes.fetch_add(page_bytes, Ordering::Relaxed);
    }
}

#[boxed]
pub(crate) async fn read_directory(store: &Store, digest: Digest) -> Result<Arc<Directory>> {
    if let Some(directory) = store.caches().directory(digest) {
        return Ok(directory);
    }
    let path = format!("directories/{digest}");
    let bytes = store.objects().get(&path, store.limits().max_directory_bytes).await.map_err(|e| match e.kind() {
        crate::ErrorKind::NotFound => {
            Error::corrupt("the directory of a committed snapshot is missing").object(path.as_str()).clause("manifest 3.1")
        }
        _ => e,
    })?;
    let directory = Arc::new(Directory::decode(bytes, digest, store.limits()).in_object(path)?);
    store.caches().keep_directory(digest, directory.clone());
    Ok(directory)
}

/// Reads the index of a cask and compares it with the manifest.
pub(crate) async fn read_index(source: &CaskSource, cask: &CaskRef, limits: &Limits) -> Result<CaskIndex> {
    Ok(read_cask(source, cask, limits).await?.0)
}

/// Reads the index of a cask and compares it with the manifest. Also returns the whole cask if it is small. Its pages
/// are not checked yet.
#[boxed]
async fn read_cask(source: &CaskSource, cask: &CaskRef, limits: &Limits) -> Result<(CaskIndex, Option<Bytes>)> {
    let read = async {
        let mut decoder = IndexDecoder::new(cask.id, cask.bytes, limits.clone());
        let first = if cask.bytes - cask.index_offset <= WHOLE_INDEX_BYTES { cask.index_offset } else { cask.root_offset };
        Limits::check(cask.bytes - first, limits.max_index_bytes, "size of the index")?;
        let is_small = cask.bytes <= SMALL_CASK_BYTES;
        let start = if is_small { 0 } else { first };
        let read = source.get_range(start..cask.bytes).await.map_err(|e| match e.kind() {
            crate::ErrorKind::NotFound => Error::corrupt("a cask of a committed snapshot is missing").clause("manifest 2.3"),
            _ => e,
        })?;
        decoder.push(first, read.slice(to_usize(first - start, "an offset")?..))?;
        let index = loop {
            match decoder.poll()? {
                Progress::Done(index) => break index,
                Progress::Needs(range) => {
                    let bytes = source.get_range(range.clone()).await?;
                    decoder.push(range.start, bytes)?;
                }
            }
        };
        is_index_of(&index, cask)?;
        Ok((index, is_small.then_some(read)))
    };
    read.await.map_err(|e| source.locate(e))
}

/// Reads the index of a cask with all its parts by one request, and compares it with the manifest. Also returns the bytes: the end
/// of the cask.
#[boxed]
pub(crate) async fn read_whole_index(source: &CaskSource, cask: &CaskRef, limits: &Limits) -> Result<(CaskIndex, Bytes)> {
    let read = async {
        Limits::check(cask.bytes.saturating_sub(cask.index_offset), limits.max_index_bytes, "size of the index")?;
        let tail = source.get_range(cask.index_offset..cask.bytes).await?;
        let mut decoder = IndexDecoder::new(cask.id, cask.bytes, limits.clone());
        decoder.push(cask.index_offset, tail.clone())?;
        match decoder.poll()? {
            Progress::Done(index) if index.missing_parts().is_empty() => {
                is_index_of(&index, cask)?;
                Ok((index, tail))
            }
            _ => Err(Error::corrupt("the index begins before the offset that the manifest names").clause("manifest 2.3")),
        }
    };
    read.await.map_err(|e| source.locate(e))
}

/// Checks that an index is of the cask that the manifest names.
fn is_index_of(index: &CaskIndex, cask: &CaskRef) -> Result<()> {
    let file = index.file();
    if file.digest != cask.digest || file.index_offset != cask.index_offset || file.root_offset != cask.root_offset {
        return Err(Error::corrupt("is not the cask that the manifest names: its digest differs").clause("manifest 2.3"));
    }
    Ok(())
}
