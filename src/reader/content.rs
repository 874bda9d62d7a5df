//! Verification of a snapshot: content digests and chunk checksums, from the indexes alone or with every page.

use std::collections::BTreeMap;

use super::Snapshot;
use super::blobs::{read_stored, stored_blobs, windows};
use super::open_chain::OpenChain;
use crate::chain::{ShardPlan, content_digests};
use crate::store::Work;
use crate::tensor::Rect;
use crate::wire::Digest;
use crate::{Error, Result, boxed};

impl Snapshot {
    /// Decodes every chunk, compares it with its checksum, and compares the content digests.
    pub async fn verify(&self) -> Result<()> {
        verify_counting(self, &mut Work::plan(&self.chain.store, 0)).await
    }
}

/// Like [`Snapshot::verify`]. Counts the bytes of pages as work.
pub(crate) async fn verify_counting(snapshot: &Snapshot, work: &mut Work) -> Result<()> {
    let chain = snapshot.chain.without_read_casks().await?;
    check_content(&chain).await?;
    chain.check_tensors(0..chain.newest().directory.len(), work).await?;
    for window in windows(&stored_blobs(&chain).await?) {
        read_stored(&chain, &window, &|blob| format!("blob {}/{}", blob.rank, blob.name)).await?;
    }
    Ok(())
}

/// Compares the chunk checksums in the chain's indexes with the content digests in the manifest. Reads no page.
pub(crate) async fn check_content(chain: &OpenChain) -> Result<()> {
    let link = chain.newest();
    let found = content(chain).await?;
    if found == link.manifest.content {
        return Ok(());
    }
    let role = found.iter().find(|(role, digest)| link.manifest.content.get(*role) != Some(digest)).map(|(role, _)| role.as_str());
    Err(Error::corrupt(format!(
        "the bytes of role `{}` in the chain do not have the content digest in the manifest",
        role.unwrap_or("?").escape_debug()
    ))
    .object(link.record.manifest_path())
    .clause("manifest 4"))
}

#[boxed]
async fn content(chain: &OpenChain) -> Result<BTreeMap<String, Digest>> {
    let directory = chain.newest().directory.clone();
    let mut shards = Vec::new();
    for tensor in 0..directory.len() {
        for shard in directory.shards_of(tensor) {
            shards.push(ShardPlan::new(&chain.links, tensor, shard)?);
        }
    }
    // The directory numbers its shards in the same order.
    let rows = chain.load_plans(&shards).await?;
    content_digests(&directory, |shard, chunk| Ok(shards[shard].chunk(&chain.links, &rows[shard], chunk)?.crc))
}

/// Returns the CRC-32 of the decoded bytes of all chunks of some tensors, by tensor, shard and chunk; nothing for other
/// tensors. Reads indexes but no page.
#[boxed]
pub(crate) async fn tensor_crcs(chain: &OpenChain, wanted: &(dyn Fn(usize) -> bool + Sync)) -> Result<Vec<Vec<Vec<u32>>>> {
    let directory = chain.newest().directory.clone();
    let mut shards = Vec::new();
    for tensor in (0..directory.len()).filter(|&tensor| wanted(tensor)) {
        for shard in directory.shards_of(tensor) {
            shards.push((tensor, ShardPlan::new(&chain.links, tensor, shard)?));
        }
    }
    let (tensors, shards): (Vec<usize>, Vec<ShardPlan>) = shards.into_iter().unzip();
    let rows = chain.load_plans(&shards).await?;
    let mut found: Vec<Vec<Vec<u32>>> = vec![vec![]; directory.len()];
    for ((tensor, shard), rows) in tensors.into_iter().zip(&shards).zip(&rows) {
        let crcs = (0..shard.grid.chunk_count()).map(|chunk| Ok(shard.chunk(&chain.links, rows, chunk)?.crc));
        if let Some(of_tensor) = found.get_mut(tensor) {
            of_tensor.push(crcs.collect::<Result<_>>()?);
        }
    }
    Ok(found)
}

/// Returns the CRC-32 of the decoded bytes of chunks, identified by tensor, rectangle and chunk number. Reads
/// indexes but no page.
#[boxed]
pub(crate) async fn chunk_crcs(chain: &OpenChain, wanted: &[(usize, Rect, u64)]) -> Result<Vec<u32>> {
    let directory = chain.newest().directory.clone();
    let mut shards = Vec::with_capacity(wanted.len());
    for (tensor, rect, _) in wanted {
        let shard = directory.find_shard(*tensor, rect).ok_or_else(|| Error::invalid("no such shard"))?;
        shards.push(ShardPlan::new(&chain.links, *tensor, shard)?);
    }
    let rows = chain.load_plans(&shards).await?;
    let plans = shards.iter().zip(&rows).zip(wanted);
    plans.map(|((shard, rows), (_, _, chunk))| Ok(shard.stored(&chain.links, rows, *chunk, 0)?.1)).collect()
}
