//! Fixed-size parts of a cask, and chunk grids.

use serde::Deserialize;
use tensorcask::wire::{Header, Postscript};
use tensorcask::{ChunkGrid, Dtype, Features, FormatVersion};

use super::vectors::{Hex, Mismatches, vectors};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeaderVector {
    #[serde(rename = "name")]
    pub(crate) _name: String,
    pub(crate) id: Hex,
    pub(crate) hex: Hex,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeaderInvalid {
    pub(crate) name: String,
    pub(crate) hex: Hex,
    pub(crate) kind: String,
    pub(crate) clause: String,
}

#[test]
fn headers() {
    for vector in vectors::<HeaderVector>("container.toml", "header") {
        let header = Header { id: vector.id.id() };
        assert_eq!(Hex(header.encode()), vector.hex);
        assert_eq!(Header::decode(&vector.hex.0).unwrap(), header);
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<HeaderInvalid>("container.toml", "header_invalid") {
        mismatches.expect(&vector.name, Header::decode(&vector.hex.0), &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PostscriptVector {
    #[serde(rename = "name")]
    pub(crate) _name: String,
    pub(crate) id: Hex,
    pub(crate) file_bytes: u64,
    pub(crate) root_offset: u64,
    pub(crate) root_crc: u32,
    pub(crate) alignment_exponent: u8,
    pub(crate) major: u16,
    pub(crate) minor: u16,
    pub(crate) must_understand: u64,
    pub(crate) may_ignore: u64,
    pub(crate) hex: Hex,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PostscriptInvalid {
    pub(crate) name: String,
    pub(crate) id: Hex,
    pub(crate) file_bytes: u64,
    pub(crate) hex: Hex,
    pub(crate) kind: String,
    pub(crate) clause: String,
}

#[test]
fn postscripts() {
    for vector in vectors::<PostscriptVector>("container.toml", "postscript") {
        let postscript = Postscript {
            root_offset: vector.root_offset,
            root_crc: vector.root_crc,
            version: FormatVersion { major: vector.major, minor: vector.minor },
            features: Features { must_understand: vector.must_understand, may_ignore: vector.may_ignore },
            alignment_exponent: vector.alignment_exponent,
        };
        assert_eq!(Hex(postscript.encode(vector.id.id())), vector.hex);
        assert_eq!(Postscript::decode(&vector.hex.0, vector.id.id(), vector.file_bytes).unwrap(), postscript);
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<PostscriptInvalid>("container.toml", "postscript_invalid") {
        let result = Postscript::decode(&vector.hex.0, vector.id.id(), vector.file_bytes);
        mismatches.expect(&vector.name, result, &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GridVector {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) elements: u64,
    pub(crate) chunk_elements: u64,
    pub(crate) chunks: u64,
    pub(crate) last_chunk_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GridInvalid {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: String,
    pub(crate) clause: String,
}

#[test]
fn chunk_grids() {
    for vector in vectors::<GridVector>("container.toml", "grid") {
        let grid = ChunkGrid::new(Dtype::from_name(&vector.dtype).unwrap(), &vector.shape).unwrap();
        let found = (grid.element_count(), grid.chunk_elements(), grid.chunk_count());
        assert_eq!(found, (vector.elements, vector.chunk_elements, vector.chunks), "{} {:?}", vector.dtype, vector.shape);
        let last = grid.bytes(vector.chunks.saturating_sub(1));
        assert_eq!(last.end - last.start, vector.last_chunk_bytes);
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<GridInvalid>("container.toml", "grid_invalid") {
        let result = ChunkGrid::new(Dtype::from_name(&vector.dtype).unwrap(), &vector.shape);
        mismatches.expect(&format!("{:?}", vector.shape), result, &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}
