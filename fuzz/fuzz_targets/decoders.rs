//! Each codec's decoder, with columns of its own names: an error or a full buffer, the same with scalar kernels; what was decoded encodes
//! and decodes to itself.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::Dtype;
use tensorcask::codec::{Chunk, Columns, Registry};
use tensorcask_fuzz::ChunkInput;

fuzz_target!(|data: &[u8]| {
    let Some(ChunkInput { codec, dtype, element_count, base, columns }) = ChunkInput::parse(data) else { return };
    let registry = Registry::default();
    let Some(codec) = registry.iter().find(|known| known.id() == codec) else { return };
    let length = dtype.byte_count(element_count).unwrap() as usize;
    let columns: Vec<(&str, Bytes)> = columns.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect();
    let columns = Columns { dtype, element_count, columns: &columns, base: base.as_deref() };
    let mut out = vec![0xee; length];
    let decoded = codec.decode(&columns, &mut out);
    let mut scalar = vec![0xdd; length];
    let with_scalar = tensorcask::with_scalar_kernels(|| codec.decode(&columns, &mut scalar));
    match (decoded, with_scalar) {
        (Ok(()), Ok(())) => assert_eq!(out, scalar),
        (Err(one), Err(other)) => {
            assert_eq!(one.to_string(), other.to_string());
            return;
        }
        (one, other) => panic!("{one:?}, but scalar {other:?}"),
    }
    again(codec.as_ref(), dtype, element_count, &out, base.as_deref());
});

fn again(codec: &dyn tensorcask::codec::Codec, dtype: Dtype, element_count: u64, data: &[u8], base: Option<&[u8]>) {
    let chunk = Chunk { dtype, element_count, role: "model", data, base };
    if codec.estimate(&chunk).is_none() {
        return;
    }
    let encoded = codec.encode(&chunk).unwrap();
    let names: Vec<&str> = encoded.columns.iter().map(|column| column.0).collect();
    codec.check_columns(dtype, &names).unwrap();
    let columns: Vec<(&str, Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect();
    let mut out = vec![0; data.len()];
    let base = base.filter(|_| encoded.uses_base);
    codec.decode(&Columns { dtype, element_count, columns: &columns, base }, &mut out).unwrap();
    assert_eq!(out, data);
}
