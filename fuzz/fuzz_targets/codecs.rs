//! Every codec: arbitrary columns end in an error or in a full buffer. Decoded data survives another encoding and
//! decoding.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use tensorcask::Dtype;
use tensorcask::codec::{Chunk, Columns, Registry};

#[derive(Debug, Arbitrary)]
struct Input {
    codec: u8,
    dtype: u8,
    element_count: u16,
    columns: Vec<(u8, Vec<u8>)>,
    with_base: bool,
    base: Vec<u8>,
}

const MOST_ELEMENTS: u16 = 1024;
const NAMES: [&str; 6] = ["values", "mask", "labels", "codes", "scale", "offset"];

fuzz_target!(|input: Input| {
    let registry = Registry::default();
    let Some(codec) = registry.iter().nth(usize::from(input.codec) % registry.iter().count()) else { return };
    let dtype = Dtype::ALL[usize::from(input.dtype) % Dtype::ALL.len()];
    // Empty shards have no chunks, so a chunk has at least one element.
    let element_count = u64::from(input.element_count % MOST_ELEMENTS) + 1;
    let length = dtype.byte_count(element_count).unwrap() as usize;
    let mut base = input.base;
    base.resize(length, 0x5a);
    let base = input.with_base.then_some(base.as_slice());

    let name = |nth: u8| NAMES[usize::from(nth) % NAMES.len()];
    let columns: Vec<(&str, Bytes)> = input.columns.into_iter().map(|(nth, bytes)| (name(nth), Bytes::from(bytes))).collect();
    let mut out = vec![0xee; length];
    let decoded = codec.decode(&Columns { dtype, element_count, columns: &columns, base, partners: &[] }, &mut out);
    if let Err(e) = &decoded {
        assert!(!e.to_string().is_empty());
        // The columns may also serve as data, so the input is encoded, too.
        let bytes: Vec<u8> = columns.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
        out = bytes.into_iter().chain(std::iter::repeat(7)).take(length).collect();
    }

    let chunk = Chunk { base, ..Chunk::new(dtype, element_count, &out) };
    let Some(estimate) = codec.estimate(&chunk) else { return };
    let encoded = codec.encode(&chunk).unwrap();
    assert_eq!(estimate.len(), encoded.columns.len());
    let total: u64 = encoded.columns.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    assert!(total <= codec.max_encoded_bytes(dtype, element_count), "{} takes {total} bytes", codec.id());
    let columns: Vec<(&str, Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect();
    let mut again = vec![0; length];
    codec
        .decode(&Columns { dtype, element_count, columns: &columns, base: base.filter(|_| encoded.uses_base), partners: &[] }, &mut again)
        .unwrap();
    if codec.is_lossless() {
        assert_eq!(again, out, "{}", codec.id());
    }
});
