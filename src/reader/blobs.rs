//! Blobs of a snapshot.

use super::Snapshot;
use super::execute::slice_of;
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
    /// Reads the bytes and compares them with their checksum. An error names the blob by `label`.
    pub(super) async fn read(&self, chain: &OpenChain, label: &str) -> Result<bytes::Bytes> {
        let link = chain.newest();
        let source = chain.source(0, self.cask);
        let bytes = match link.small_casks[self.cask].get() {
            Some(whole) => slice_of(whole, &self.page.range).map_err(|e| source.locate(e))?,
            None => source.get_range(self.page.range.clone()).await?,
        };
        self.page.check(&bytes).map_err(|e| source.locate(e).tensor(label))?;
        Ok(bytes)
    }
}

impl Snapshot {
    /// Returns rank and name of each blob.
    pub async fn blobs(&self) -> Result<Vec<(u32, String)>> {
        Ok(stored_blobs(&self.chain).await?.into_iter().map(|blob| (blob.rank, blob.name)).collect())
    }

    /// Reads a blob.
    pub async fn read_blob(&self, rank: u32, name: &str) -> Result<Vec<u8>> {
        let found = stored_blobs(&self.chain).await?.into_iter().find(|blob| blob.rank == rank && blob.name == name);
        let found = found.ok_or_else(|| Error::not_found(format!("step {} has no blob of rank {rank}", self.step())).tensor(name))?;
        Ok(found.read(&self.chain, name).await?.to_vec())
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
    for blob in wanted {
        let stored = found.iter().find(|stored| stored.rank == blob.rank && stored.name == blob.name);
        let same_size = |stored: &&StoredBlob| stored.page.range.end.saturating_sub(stored.page.range.start) == blob.data.len() as u64;
        let Some(stored) = stored.filter(same_size) else { return Ok(false) };
        if *stored.read(&snapshot.chain, &stored.name).await? != *blob.data {
            return Ok(false);
        }
    }
    Ok(true)
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
            let bytes = page.range.end.saturating_sub(page.range.start);
            crate::Limits::check(bytes, chain.store.limits().max_blob_bytes, "size of the blob").map_err(|e| e.tensor(name))?;
            blobs.push(StoredBlob { cask: at, rank, name: name.to_owned(), page });
        }
    }
    Ok(blobs)
}
