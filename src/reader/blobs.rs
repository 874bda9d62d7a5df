//! Blobs of a snapshot.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::OnceLock;

use bytes::Bytes;

use super::Snapshot;
use super::cask_source::slice_of;
use super::open_chain::OpenChain;
use crate::container::{BlobEntry, PageEntry};
use crate::wire::{blob_slot, is_writers_blob};
use crate::{Blob, Error, Result, boxed};

/// A blob of a snapshot, as its cask lists it.
pub(super) struct StoredBlob {
    /// Number of the cask in the manifest of the newest link.
    pub cask: usize,
    pub rank: u32,
    pub name: String,
    pub page: PageEntry,
}

impl StoredBlob {
    fn byte_count(&self) -> u64 {
        self.page.range.end.saturating_sub(self.page.range.start)
    }
}

/// Reads blobs and compares them with their checksums. Neighbours in a cask take one request. An error names a blob by its
/// `label`.
#[boxed]
pub(super) async fn read_stored(
    chain: &OpenChain,
    blobs: &[&StoredBlob],
    label: &(dyn Fn(&StoredBlob) -> String + Sync),
) -> Result<Vec<Bytes>> {
    let mut by_cask: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (number, blob) in blobs.iter().enumerate() {
        by_cask.entry(blob.cask).or_default().push(number);
    }
    let mut found = vec![Bytes::new(); blobs.len()];
    for (cask, numbers) in by_cask {
        let source = chain.source(0, cask);
        let ranges: Vec<Range<u64>> = numbers.iter().filter_map(|&number| Some(blobs.get(number)?.page.range.clone())).collect();
        let read = match chain.newest().small_casks.get(cask).and_then(OnceLock::get) {
            Some(whole) => ranges.iter().map(|range| slice_of(whole, range).map_err(|e| source.locate(e))).collect::<Result<Vec<_>>>()?,
            None => chain.explained(source.get_ranges(&ranges).await).await?,
        };
        for (number, bytes) in numbers.into_iter().zip(read) {
            if let (Some(blob), Some(place)) = (blobs.get(number), found.get_mut(number)) {
                blob.page.check(&bytes).map_err(|e| source.locate(e).tensor(label(blob)))?;
                *place = bytes;
            }
        }
    }
    Ok(found)
}

/// Divides blobs into runs of a bounded number of bytes, or one blob each.
pub(super) fn windows(blobs: &[StoredBlob]) -> Vec<Vec<&StoredBlob>> {
    let (mut windows, mut bytes): (Vec<Vec<&StoredBlob>>, u64) = (Vec::new(), u64::MAX);
    for blob in blobs {
        bytes = bytes.saturating_add(blob.byte_count());
        match windows.last_mut().filter(|_| bytes <= WINDOW_BYTES) {
            Some(window) => window.push(blob),
            None => {
                windows.push(vec![blob]);
                bytes = blob.byte_count();
            }
        }
    }
    windows
}

/// Bytes of blobs that are read at once where they are only compared.
const WINDOW_BYTES: u64 = 64 << 20;

impl Snapshot {
    /// Returns rank and name of each blob.
    pub async fn blobs(&self) -> Result<Vec<(u32, String)>> {
        Ok(stored_blobs(&self.chain).await?.into_iter().map(|blob| (blob.rank, blob.name)).collect())
    }

    /// Reads a blob.
    pub async fn read_blob(&self, rank: u32, name: &str) -> Result<Vec<u8>> {
        Ok(self.read_blobs(&[(rank, name)]).await?.pop().unwrap_or_default())
    }

    /// Reads blobs, given by rank and name, in few requests. Returns their bytes in the same order.
    #[boxed]
    pub async fn read_blobs(&self, wanted: &[(u32, &str)]) -> Result<Vec<Vec<u8>>> {
        let stored = stored_blobs(&self.chain).await?;
        let places = by_name(&stored);
        let mut blobs = Vec::with_capacity(wanted.len());
        for (rank, name) in wanted {
            let missing = || Error::not_found(format!("step {} has no blob of rank {rank}", self.step())).tensor(*name);
            blobs.push(*places.get(&(*rank, *name)).ok_or_else(missing)?);
        }
        let read = read_stored(&self.chain, &blobs, &|blob| blob.name.clone()).await?;
        Ok(read.into_iter().map(|bytes| bytes.to_vec()).collect())
    }
}

/// Returns whether the snapshot has exactly these blobs, byte for byte. Ignores blobs that the library itself adds.
#[boxed]
pub(crate) async fn has_blobs(snapshot: &Snapshot, wanted: &[&Blob<'_>]) -> Result<bool> {
    let mut found = stored_blobs(&snapshot.chain).await?;
    found.retain(|stored| !is_writers_blob(&stored.name));
    if found.len() != wanted.len() {
        return Ok(false);
    }
    let data: HashMap<(u32, &str), &[u8]> = wanted.iter().map(|blob| ((blob.rank, blob.name.as_str()), &*blob.data)).collect();
    let data_of = |stored: &StoredBlob| data.get(&(stored.rank, stored.name.as_str())).copied();
    if found.iter().any(|stored| data_of(stored).is_none_or(|data| data.len() as u64 != stored.byte_count())) {
        return Ok(false);
    }
    for window in windows(&found) {
        let read = read_stored(&snapshot.chain, &window, &|blob| blob.name.clone()).await?;
        if window.iter().zip(&read).any(|(stored, bytes)| data_of(stored) != Some(bytes)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn by_name(blobs: &[StoredBlob]) -> HashMap<(u32, &str), &StoredBlob> {
    blobs.iter().map(|blob| ((blob.rank, blob.name.as_str()), blob)).collect()
}

/// Lists the blobs in the casks of the newest link.
#[boxed]
pub(super) async fn stored_blobs(chain: &OpenChain) -> Result<Vec<StoredBlob>> {
    let link = chain.newest();
    let all: Vec<(usize, usize)> = (0..link.manifest.casks.len()).map(|cask| (0, cask)).collect();
    chain.load_indexes(&all).await?;
    let mut blobs = Vec::new();
    for (at, cask) in link.manifest.casks.iter().enumerate() {
        let Some(index) = link.index(at) else { continue };
        for BlobEntry { rank, name, page } in index.blobs() {
            if blob_slot(rank) != cask.slot {
                let message = format!("a blob of rank {rank} in the cask of slot {}", cask.slot);
                return Err(Error::corrupt(message).object(chain.source(0, at).path()).tensor(name).clause("manifest 5.4"));
            }
            let blob = StoredBlob { cask: at, rank, name: name.to_owned(), page };
            crate::Limits::check(blob.byte_count(), chain.store.limits().max_blob_bytes, "size of the blob").map_err(|e| e.tensor(name))?;
            blobs.push(blob);
        }
    }
    Ok(blobs)
}
