//! Whole casks: encoded, decoded, and with one fault.

use bytes::Bytes;
use serde::Deserialize;
use tensorcask::codec::{ChunkKind, CodecRef, EncodedChunk};
use tensorcask::container::{BlobEntry, CaskEncoder, CaskIndex, CaskReceipt, IndexDecoder, PageEntry, Progress, TensorEntry};
use tensorcask::wire::{Header, Id};
use tensorcask::{Dtype, Error, Limits, Rect};

use super::vectors::{Hex, Mismatches, Patch, patched, vectors};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskVector {
    pub(crate) name: String,
    pub(crate) id: Hex,
    pub(crate) alignment_exponent: u8,
    pub(crate) bytes: u64,
    pub(crate) index_offset: u64,
    pub(crate) root_offset: u64,
    pub(crate) digest: String,
    pub(crate) tensors: Vec<CaskTensor>,
    pub(crate) blobs: Vec<CaskBlob>,
    pub(crate) hex: Hex,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) shards: Vec<CaskShard>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskShard {
    pub(crate) offset: Vec<u64>,
    pub(crate) shape: Vec<u64>,
    pub(crate) chunks: Vec<CaskChunk>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskChunk {
    pub(crate) kind: String,
    pub(crate) codec: Option<String>,
    pub(crate) version: Option<u16>,
    #[serde(default)]
    pub(crate) columns: Vec<(String, Hex)>,
    pub(crate) crc: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskBlob {
    pub(crate) rank: u32,
    pub(crate) name: String,
    pub(crate) hex: Hex,
}

impl CaskVector {
    pub(crate) fn encode(&self) -> (Vec<u8>, CaskReceipt) {
        let mut encoder = CaskEncoder::new(self.id.id(), self.alignment_exponent).unwrap();
        for tensor in &self.tensors {
            encoder.tensor(&tensor.name, Dtype::from_name(&tensor.dtype).unwrap(), &tensor.shape).unwrap();
            for shard in &tensor.shards {
                encoder.shard(&Rect { offset: shard.offset.clone(), shape: shard.shape.clone() }).unwrap();
                for chunk in &shard.chunks {
                    encoder.chunk(chunk.encoded()).unwrap();
                }
            }
        }
        for blob in &self.blobs {
            encoder.blob(blob.rank, &blob.name, blob.hex.0.clone().into()).unwrap();
        }
        finish(encoder)
    }
}

impl CaskChunk {
    pub(crate) fn encoded(&self) -> EncodedChunk {
        let kinds = [ChunkKind::Unchanged, ChunkKind::Absolute, ChunkKind::Delta];
        EncodedChunk {
            kind: kinds.into_iter().find(|kind| kind.name() == self.kind).unwrap(),
            codec: self.codec.clone().zip(self.version).map(|(id, version)| CodecRef { id, version }),
            columns: self.columns.iter().map(|(name, bytes)| (name.clone(), bytes.0.clone().into())).collect(),
            crc: self.crc,
        }
    }
}

pub(crate) fn finish(mut encoder: CaskEncoder) -> (Vec<u8>, CaskReceipt) {
    let mut bytes = encoder.take_output();
    let (rest, receipt) = encoder.finish().unwrap();
    bytes.extend(rest);
    (bytes.concat(), receipt)
}

pub(crate) fn index_of(file: &[u8], id: Id) -> Result<CaskIndex, Error> {
    let mut decoder = IndexDecoder::new(id, file.len() as u64, Limits::default());
    loop {
        match decoder.poll()? {
            Progress::Done(index) => return Ok(index),
            Progress::Needs(range) => {
                decoder.push(range.start, Bytes::copy_from_slice(&file[range.start as usize..range.end as usize]))?;
            }
        }
    }
}

pub(crate) fn page_bytes<'a>(file: &'a [u8], page: &PageEntry) -> &'a [u8] {
    &file[page.range.start as usize..page.range.end as usize]
}

/// Reads a whole cask, except the padding between pages, which no decoder sees.
pub(crate) fn read_cask(file: &[u8], id: Id) -> Result<CaskIndex, Error> {
    let index = index_of(file, id)?;
    Header::decode(&file[..32])?;
    for (part, range) in index.missing_parts() {
        index.load_part(part, Bytes::copy_from_slice(&file[range.start as usize..range.end as usize]))?;
    }
    for shard in 0..index.shard_count() {
        for chunk in 0..index.grid(shard)?.chunk_count() {
            for page in index.chunk(shard, chunk)?.pages {
                page.check(page_bytes(file, &page))?;
            }
        }
    }
    for BlobEntry { page, .. } in index.blobs() {
        page.check(page_bytes(file, &page))?;
    }
    Ok(index)
}

pub(crate) fn cask_vectors() -> Vec<CaskVector> {
    vectors("container.toml", "cask")
}

#[test]
fn casks_encode_to_their_bytes_and_decode() {
    for vector in cask_vectors() {
        let (bytes, receipt) = vector.encode();
        assert_eq!(Hex(bytes.clone()), vector.hex, "{}", vector.name);
        let place = (receipt.bytes, receipt.index_offset, receipt.root_offset, receipt.digest.to_hex());
        assert_eq!(place, (vector.bytes, vector.index_offset, vector.root_offset, vector.digest.clone()));

        let index = read_cask(&bytes, vector.id.id()).unwrap();
        assert_eq!((index.file().index_offset, index.file().root_offset), (vector.index_offset, vector.root_offset));
        assert_eq!(index.file().digest.to_hex(), vector.digest);
        assert_eq!(index.tensor_count(), vector.tensors.len());
        for (t, tensor) in vector.tensors.iter().enumerate() {
            let name = tensor.name.as_str();
            let dtype = Dtype::from_name(&tensor.dtype).unwrap();
            assert_eq!(index.tensor(t), TensorEntry { name, dtype, shape: tensor.shape.clone() });
            assert_eq!(index.shards_of(t).len(), tensor.shards.len());
            for (row, shard) in index.shards_of(t).zip(&tensor.shards) {
                assert_eq!(index.rect(row), Rect { offset: shard.offset.clone(), shape: shard.shape.clone() });
                assert_eq!(index.grid(row).unwrap().chunk_count(), shard.chunks.len() as u64);
                for (number, chunk) in shard.chunks.iter().enumerate() {
                    let entry = index.chunk(row, number as u64).unwrap();
                    let columns = entry.pages.iter().map(|p| (p.column.clone(), Bytes::copy_from_slice(page_bytes(&bytes, p))));
                    let found = EncodedChunk { kind: entry.kind, codec: entry.codec.clone(), columns: columns.collect(), crc: entry.crc };
                    assert_eq!(found, chunk.encoded());
                }
            }
        }
        let blobs: Vec<_> = index.blobs().map(|blob| (blob.rank, blob.name, page_bytes(&bytes, &blob.page))).collect();
        assert_eq!(blobs, vector.blobs.iter().map(|b| (b.rank, b.name.as_str(), b.hex.0.as_slice())).collect::<Vec<_>>());
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskInvalid {
    pub(crate) cask: String,
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) patch: Vec<Patch>,
    pub(crate) keep: Option<usize>,
    pub(crate) hex: Option<Hex>,
    pub(crate) kind: String,
    pub(crate) clause: String,
}

#[test]
fn casks_with_one_fault_are_refused() {
    let casks = cask_vectors();
    let mut mismatches = Mismatches::default();
    for vector in vectors::<CaskInvalid>("container.toml", "cask_invalid") {
        let cask = casks.iter().find(|cask| cask.name == vector.cask).unwrap();
        let mut bytes = vector.hex.map_or_else(|| patched(&cask.hex.0, &vector.patch), |hex| hex.0);
        bytes.truncate(vector.keep.unwrap_or(bytes.len()));
        assert_ne!(bytes, cask.hex.0);
        mismatches.expect(&vector.name, read_cask(&bytes, cask.id.id()), &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaskExtended {
    pub(crate) cask: String,
    pub(crate) name: String,
    pub(crate) digest: String,
    pub(crate) hex: Hex,
}

#[test]
fn features_that_may_be_ignored_are() {
    let casks = cask_vectors();
    for vector in vectors::<CaskExtended>("container.toml", "cask_extended") {
        let cask = casks.iter().find(|cask| cask.name == vector.cask).unwrap();
        let plain = read_cask(&cask.hex.0, cask.id.id()).unwrap();
        let index = read_cask(&vector.hex.0, cask.id.id()).unwrap();
        assert_ne!(index.file().features.may_ignore, 0, "{}", vector.name);
        assert_eq!(index.file().digest.to_hex(), vector.digest);
        assert_eq!(
            (index.tables().shards().unwrap(), index.tables().pages(0).unwrap()),
            (plain.tables().shards().unwrap(), plain.tables().pages(0).unwrap())
        );
    }
}
