//! Directories and content digests.

use bytes::Bytes;
use serde::Deserialize;
use tensorcask::wire::{Digest, Directory, DirectoryShard, DirectoryTensor};
use tensorcask::{ChunkGrid, Dtype, Error, Limits, Rect};

use super::vectors::{Hex, Mismatches, Patch, patched, vectors};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DirectoryVector {
    pub(crate) name: String,
    pub(crate) digest: String,
    pub(crate) tensors: Vec<DirectoryTensorVector>,
    pub(crate) hex: Hex,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DirectoryTensorVector {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) role: String,
    pub(crate) param: String,
    pub(crate) alias_of: String,
    pub(crate) shards: Vec<DirectoryShardVector>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DirectoryShardVector {
    pub(crate) offset: Vec<u64>,
    pub(crate) shape: Vec<u64>,
    pub(crate) slot: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DirectoryInvalid {
    pub(crate) directory: String,
    pub(crate) name: String,
    pub(crate) patch: Vec<Patch>,
    pub(crate) digest: String,
    pub(crate) kind: String,
    pub(crate) clause: String,
}

impl DirectoryVector {
    pub(crate) fn rows(&self) -> Vec<(DirectoryTensor, Vec<DirectoryShard>)> {
        let shard =
            |s: &DirectoryShardVector| DirectoryShard { rect: Rect { offset: s.offset.clone(), shape: s.shape.clone() }, slot: s.slot };
        let row = |t: &DirectoryTensorVector| {
            let tensor = DirectoryTensor {
                name: t.name.clone(),
                dtype: Dtype::from_name(&t.dtype).unwrap(),
                shape: t.shape.clone(),
                role: t.role.clone(),
                param: t.param.clone(),
                alias_of: self.tensors.iter().position(|other| !t.alias_of.is_empty() && other.name == t.alias_of),
            };
            (tensor, t.shards.iter().map(shard).collect())
        };
        self.tensors.iter().map(row).collect()
    }
}

pub(crate) fn decode_directory(bytes: &[u8], digest: &str) -> Result<Directory, Error> {
    Directory::decode(Bytes::copy_from_slice(bytes), Digest::from_hex(digest).unwrap(), &Limits::default())
}

#[test]
fn directories() {
    let all = vectors::<DirectoryVector>("manifest.toml", "directory");
    for vector in &all {
        let rows = vector.rows();
        assert_eq!(Hex(Directory::encode(&rows).unwrap()), vector.hex, "{}", vector.name);
        let directory = decode_directory(&vector.hex.0, &vector.digest).unwrap();
        let decoded: Vec<_> = (0..directory.len())
            .map(|t| (directory.tensor(t), directory.shards_of(t).map(|s| directory.shard(s)).collect::<Vec<_>>()))
            .collect();
        assert_eq!(decoded, rows);
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<DirectoryInvalid>("manifest.toml", "directory_invalid") {
        let valid = all.iter().find(|directory| directory.name == vector.directory).unwrap();
        let bytes = patched(&valid.hex.0, &vector.patch);
        mismatches.expect(&vector.name, decode_directory(&bytes, &vector.digest), &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContentVector {
    pub(crate) directory: String,
    pub(crate) role: String,
    pub(crate) crcs: Vec<u32>,
    pub(crate) covered: Hex,
    pub(crate) digest: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContentOfData {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) role: String,
    pub(crate) crcs: Vec<u32>,
    pub(crate) digest: String,
}

/// Returns the bytes that the content digest of a role covers (manifest 4.1).
pub(crate) fn content_of(directory: &Directory, role: &str, mut crcs: impl Iterator<Item = u32>) -> Vec<u8> {
    let mut out = Vec::new();
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    };
    for tensor in (0..directory.len()).filter(|&t| directory.role(t) == role) {
        text(&mut out, directory.name(tensor));
        if let Some(alias) = directory.alias_of(tensor) {
            out.push(0);
            text(&mut out, directory.name(alias));
            continue;
        }
        let shape = directory.shape(tensor);
        out.push(directory.dtype(tensor).code());
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|extent| out.extend(extent.to_le_bytes()));
        out.extend((directory.shards_of(tensor).len() as u32).to_le_bytes());
        for shard in directory.shards_of(tensor) {
            let rect = directory.shard(shard).rect;
            rect.offset.iter().chain(&rect.shape).for_each(|value| out.extend(value.to_le_bytes()));
            for _ in 0..ChunkGrid::new(directory.dtype(tensor), &rect.shape).unwrap().chunk_count() {
                out.extend(crcs.next().unwrap().to_le_bytes());
            }
        }
    }
    assert_eq!(crcs.next(), None);
    out
}

#[test]
fn content_digests_cover_what_the_page_says() {
    let directories = vectors::<DirectoryVector>("manifest.toml", "directory");
    for vector in vectors::<ContentVector>("manifest.toml", "content") {
        let directory = directories.iter().find(|directory| directory.name == vector.directory).unwrap();
        let directory = decode_directory(&directory.hex.0, &directory.digest).unwrap();
        let covered = content_of(&directory, &vector.role, vector.crcs.into_iter());
        assert_eq!(Hex(covered.clone()), vector.covered);
        assert_eq!(Digest::of(&covered).to_hex(), vector.digest);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn content_digests_of_a_saved_state() {
    for vector in vectors::<ContentOfData>("manifest.toml", "content_of_data") {
        let data: Vec<u8> = (0..vector.shape.iter().product::<u64>()).flat_map(|i| (i as u32).to_le_bytes()).collect();
        let view = tensorcask::TensorView::new(&vector.name, Dtype::from_name(&vector.dtype).unwrap(), &vector.shape, &data);
        let view = view.unwrap().with_role(&vector.role, &vector.name);
        let store = tensorcask::Store::open("memory://").unwrap();
        let mut writer = store.writer(tensorcask::Policy::default()).await.unwrap();
        writer.save(1, &[view], &[], &tensorcask::Metadata::default()).await.unwrap();
        let snapshot = store.snapshot(1).await.unwrap();
        assert_eq!(snapshot.manifest().content[&vector.role].to_hex(), vector.digest);
        let (_, index) = &snapshot.inspect().indexes().await.unwrap()[0];
        let crcs: Vec<u32> = (0..vector.crcs.len()).map(|chunk| index.chunk(0, chunk as u64).unwrap().crc).collect();
        assert_eq!(crcs, vector.crcs);
    }
}
