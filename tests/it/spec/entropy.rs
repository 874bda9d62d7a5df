//! Planes, tested through `tc.planes` on bytes: its one column is the plane itself.

use bytes::Bytes;
use serde::Deserialize;
use tensorcask::codec::{Chunk, Codec, Columns, Planes};
use tensorcask::{Dtype, Error};

use super::vectors::{Hex, Mismatches, vectors};

/// Runs of bytes: hex and the number of repetitions.
#[derive(Deserialize)]
struct Repeated(Vec<(Hex, usize)>);

impl Repeated {
    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(hex, times)| hex.0.repeat(*times)).collect()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaneVector {
    name: String,
    written: bool,
    symbols: Repeated,
    code: Repeated,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaneInvalid {
    name: String,
    count: usize,
    code: Repeated,
    kind: String,
    clause: String,
}

fn encode(symbols: &[u8]) -> Vec<u8> {
    let chunk = Chunk::new(Dtype::U8, symbols.len() as u64, symbols);
    let encoded = Planes.encode(&chunk).unwrap();
    assert_eq!((encoded.uses_base, encoded.columns.len(), encoded.columns[0].0), (false, 1, "plane0"));
    encoded.columns.into_iter().next().unwrap().1
}

fn decode(code: Vec<u8>, count: usize) -> Result<Vec<u8>, Error> {
    let mut out = vec![0xee; count];
    let columns = [("plane0", Bytes::from(code))];
    Planes.decode(&Columns { dtype: Dtype::U8, element_count: count as u64, columns: &columns, base: None, partners: &[] }, &mut out)?;
    Ok(out)
}

#[test]
fn planes() {
    let mut kinds = [false; 6];
    for vector in vectors::<PlaneVector>("entropy.toml", "plane") {
        let symbols = vector.symbols.bytes();
        let code = vector.code.bytes();
        kinds[usize::from(code[1])] = true;
        let decoded = decode(code.clone(), symbols.len()).unwrap_or_else(|e| panic!("{}: {e}", vector.name));
        assert!(decoded == symbols, "{}: decodes to {:?}", vector.name, Hex(decoded));
        let written = encode(&symbols);
        if vector.written {
            assert!(written == code, "{}: the writer makes {:?}", vector.name, Hex(written));
        }
        assert!(decode(written, symbols.len()).unwrap() == symbols, "{}: what was written came back changed", vector.name);
    }
    // The first block of a plane cannot use an earlier table.
    assert_eq!(kinds, [true, true, true, true, false, true], "block kinds");
    let mut mismatches = Mismatches::default();
    for vector in vectors::<PlaneInvalid>("entropy.toml", "plane_invalid") {
        mismatches.expect(&vector.name, decode(vector.code.bytes(), vector.count), &vector.kind, Some(&vector.clause));
    }
    mismatches.assert_none();
}
