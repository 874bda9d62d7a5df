//! Content digests: digests of the content of each role, independent of the casks that hold it. Spec:
//! `spec/manifest.md`, clause 4.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use crate::Result;
use crate::tensor::ChunkGrid;
use crate::wire::{Digest, Directory, Put};

/// Hasher of one role. Takes the tensors one by one.
#[derive(Default)]
struct ContentHasher {
    hasher: Sha256,
}

impl Put for ContentHasher {
    fn put(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }
}

impl ContentHasher {
    fn name(&mut self, name: &str) {
        self.put_u32(name.len() as u32);
        self.put(name.as_bytes());
    }
}

/// Returns the digests of all roles of a directory. `crc(shard, chunk)` returns the CRC-32 of a decoded chunk.
pub(crate) fn content_digests(directory: &Directory, mut crc: impl FnMut(usize, u64) -> Result<u32>) -> Result<BTreeMap<String, Digest>> {
    let mut roles: BTreeMap<String, ContentHasher> = BTreeMap::new();
    for tensor in 0..directory.len() {
        let hasher = roles.entry(directory.role(tensor).to_owned()).or_default();
        hasher.name(directory.name(tensor));
        if let Some(alias) = directory.alias_of(tensor) {
            hasher.put_u8(0);
            hasher.name(directory.name(alias));
            continue;
        }
        let shape = directory.shape(tensor);
        hasher.put_u8(directory.dtype(tensor).code());
        hasher.put_u32(shape.len() as u32);
        shape.iter().for_each(|&extent| hasher.put_u64(extent));
        let shards = directory.shards_of(tensor);
        hasher.put_u32(shards.len() as u32);
        for shard in shards {
            let rect = directory.shard(shard).rect;
            rect.offset.iter().chain(&rect.shape).for_each(|&value| hasher.put_u64(value));
            for chunk in 0..ChunkGrid::new(directory.dtype(tensor), &rect.shape)?.chunk_count() {
                hasher.put_u32(crc(shard, chunk)?);
            }
        }
    }
    Ok(roles.into_iter().map(|(role, hasher)| (role, Digest(hasher.hasher.finalize().into()))).collect())
}
