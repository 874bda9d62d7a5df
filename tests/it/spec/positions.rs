//! Positions and checksums of pages, parts and the root.

use bytes::Bytes;
use serde::Deserialize;
use tensorcask::codec::{ChunkKind, CodecRef, EncodedChunk};
use tensorcask::container::{CaskEncoder, IndexDecoder, Progress};
use tensorcask::wire::{Digest, Postscript};
use tensorcask::{ChunkGrid, Dtype, Limits, Rect};

use super::casks::{CaskVector, cask_vectors, finish, index_of};
use super::vectors::{Hex, vectors};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PageVector {
    pub(crate) cask: String,
    pub(crate) shard: usize,
    pub(crate) chunk: Option<u64>,
    pub(crate) column: Option<String>,
    pub(crate) offset: u64,
    pub(crate) place: Hex,
    pub(crate) page: Hex,
    pub(crate) crc: u32,
}

#[test]
fn page_checksums() {
    let casks = cask_vectors();
    for vector in vectors::<PageVector>("container.toml", "page") {
        let cask = casks.iter().find(|cask| cask.name == vector.cask).unwrap();
        let index = index_of(&cask.hex.0, cask.id.id()).unwrap();
        let page = match vector.chunk {
            Some(chunk) => {
                let pages = index.chunk(vector.shard, chunk).unwrap().pages;
                pages.into_iter().find(|page| Some(&page.column) == vector.column.as_ref()).unwrap()
            }
            None => index.blobs().nth(vector.shard).unwrap().page,
        };
        assert_eq!((page.range.start, page.crc), (vector.offset, vector.crc));
        page.check(&vector.page.0).unwrap();
        assert_eq!(vector.place.0.len(), 48);
        assert_eq!(crc32fast::hash(&[vector.place.0, vector.page.0].concat()), vector.crc);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlacementVector {
    pub(crate) name: String,
    pub(crate) id: Hex,
    pub(crate) alignment_exponent: u8,
    pub(crate) shapes: Vec<Vec<u64>>,
    pub(crate) pages: Vec<(u64, u64)>,
    pub(crate) bytes: u64,
    pub(crate) index_offset: u64,
    pub(crate) root_offset: u64,
    pub(crate) parts: usize,
    pub(crate) sha256: String,
}

#[test]
fn page_positions() {
    for vector in vectors::<PlacementVector>("container.toml", "placement") {
        let mut encoder = CaskEncoder::new(vector.id.id(), vector.alignment_exponent).unwrap();
        for (t, shape) in vector.shapes.iter().enumerate() {
            let data: Vec<u8> = (0..shape.iter().product::<u64>()).map(|i| ((i + t as u64) % 251) as u8).collect();
            let grid = ChunkGrid::new(Dtype::U8, shape).unwrap();
            encoder.tensor(&format!("t{t:04}"), Dtype::U8, shape).unwrap();
            encoder.shard(&Rect::whole(shape)).unwrap();
            for chunk in 0..grid.chunk_count() {
                let range = grid.bytes(chunk);
                let bytes = Bytes::copy_from_slice(&data[range.start as usize..range.end as usize]);
                let crc = crc32fast::hash(&bytes);
                let codec = Some(CodecRef { id: "tc.raw".into(), version: 1 });
                let columns = vec![("values".to_owned(), bytes)];
                encoder.chunk(EncodedChunk { kind: ChunkKind::Absolute, codec, columns, crc }).unwrap();
            }
        }
        let (bytes, receipt) = finish(encoder);
        let place = (receipt.bytes, receipt.index_offset, receipt.root_offset);
        assert_eq!(place, (vector.bytes, vector.index_offset, vector.root_offset), "{}", vector.name);
        assert_eq!(Digest::of(&bytes).to_hex(), vector.sha256);

        // With only the postscript, the decoder asks for parts and root.
        let mut decoder = IndexDecoder::new(receipt.id, receipt.bytes, Limits::default());
        decoder.push(receipt.root_offset, Bytes::copy_from_slice(&bytes[receipt.root_offset as usize..])).unwrap();
        let Progress::Done(index) = decoder.poll().unwrap() else { panic!("the root was given") };
        let parts = index.missing_parts();
        assert_eq!(parts.len(), vector.parts);
        // The parts may arrive in any order.
        for (part, range) in parts.into_iter().rev() {
            index.load_part(part, Bytes::copy_from_slice(&bytes[range.start as usize..range.end as usize])).unwrap();
        }
        let chunks = (0..index.shard_count()).flat_map(|s| (0..index.grid(s).unwrap().chunk_count()).map(move |c| (s, c)));
        let pages: Vec<_> = chunks
            .flat_map(|(shard, chunk)| index.chunk(shard, chunk).unwrap().pages)
            .map(|page| (page.range.start, page.range.end - page.range.start))
            .collect();
        assert_eq!(pages, vector.pages);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RootVector {
    pub(crate) cask: String,
    pub(crate) offset: u64,
    pub(crate) crc: u32,
    pub(crate) head: Hex,
    pub(crate) columns: Vec<(String, usize)>,
    pub(crate) hex: Hex,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PartVector {
    pub(crate) cask: String,
    pub(crate) part: usize,
    pub(crate) offset: u64,
    pub(crate) crc: u32,
    pub(crate) chunks: usize,
    pub(crate) pages: usize,
    pub(crate) columns: Vec<(String, usize)>,
    pub(crate) hex: Hex,
}

#[test]
fn roots_and_parts() {
    let casks = cask_vectors();
    let cask = |name: &str| casks.iter().find(|cask| cask.name == name).unwrap();
    let index_crc = |id: &Hex, offset: u64, bytes: &[u8]| crc32fast::hash(&[&id.0, offset.to_le_bytes().as_slice(), bytes].concat());
    let lies_in = |cask: &CaskVector, offset: u64, hex: &Hex| cask.hex.0[offset as usize..].starts_with(&hex.0);
    for vector in vectors::<RootVector>("index.toml", "root") {
        let cask = cask(&vector.cask);
        assert!(lies_in(cask, vector.offset, &vector.hex) && vector.hex.0.starts_with(&vector.head.0));
        assert_eq!((vector.offset, vector.head.0.len()), (cask.root_offset, 128));
        assert_eq!(index_crc(&cask.id, vector.offset, &vector.hex.0), vector.crc);
        let tail = &cask.hex.0[cask.hex.0.len() - 96..];
        assert_eq!(Postscript::decode(tail, cask.id.id(), cask.bytes).unwrap().root_crc, vector.crc);
        assert!(vector.columns.iter().all(|(_, at)| at % 64 == 0));
    }
    for vector in vectors::<PartVector>("index.toml", "part") {
        let cask = cask(&vector.cask);
        let mut decoder = IndexDecoder::new(cask.id.id(), cask.bytes, Limits::default());
        decoder.push(cask.root_offset, Bytes::copy_from_slice(&cask.hex.0[cask.root_offset as usize..])).unwrap();
        let Progress::Done(index) = decoder.poll().unwrap() else { panic!("the root was given") };
        let range = vector.offset..vector.offset + vector.hex.0.len() as u64;
        assert_eq!(index.missing_parts()[vector.part], (vector.part, range));
        assert_eq!(index_crc(&cask.id, vector.offset, &vector.hex.0), vector.crc);
        index.load_part(vector.part, vector.hex.0.clone().into()).unwrap();
        assert!(lies_in(cask, vector.offset, &vector.hex) && vector.columns.len() == 7);
        let rows = (index.tables().chunks(vector.part).unwrap().num_rows(), index.tables().pages(vector.part).unwrap().num_rows());
        assert_eq!(rows, (vector.chunks, vector.pages));
    }
}
