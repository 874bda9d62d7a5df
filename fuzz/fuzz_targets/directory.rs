//! A directory under its right digest. If it decodes, encoding and decoding it again gives the same.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::wire::{Digest, Directory, DirectoryShard, DirectoryTensor};
use tensorcask_fuzz::small_limits;

fuzz_target!(|data: &[u8]| {
    let Ok(directory) = decode(data.to_vec()) else { return };
    let rows = rows(&directory);
    for (at, (tensor, shards)) in rows.iter().enumerate() {
        assert_eq!(directory.find(&tensor.name), Some(at));
        for (nth, shard) in shards.iter().enumerate() {
            assert_eq!(directory.find_shard(at, &shard.rect), Some(directory.shards_of(at).start + nth));
        }
    }
    let encoded = Directory::encode(&rows).unwrap();
    assert_eq!(self::rows(&decode(encoded).unwrap()), rows);
});

fn decode(bytes: Vec<u8>) -> tensorcask::Result<Directory> {
    let digest = Digest::of(&bytes);
    Directory::decode(Bytes::from(bytes), digest, &small_limits())
}

fn rows(directory: &Directory) -> Vec<(DirectoryTensor, Vec<DirectoryShard>)> {
    let shards = |tensor| directory.shards_of(tensor).map(|shard| directory.shard(shard)).collect();
    (0..directory.len()).map(|tensor| (directory.tensor(tensor), shards(tensor))).collect()
}
