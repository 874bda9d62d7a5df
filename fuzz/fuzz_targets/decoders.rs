//! Every decoder, with columns of the right names: an error or a full buffer, and the same with scalar kernels. Decoded
//! data survives another encoding and decoding. For a lossy codec, that holds for the data that it has encoded itself.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::codec::{Chunk, Codec, Columns, Registry};
use tensorcask_fuzz::{ChunkInput, OwnPartners};

fuzz_target!(|data: &[u8]| {
    let Some(ChunkInput { codec, dtype, element_count, base, columns }) = ChunkInput::parse(data) else { return };
    let registry = Registry::default();
    let Some(codec) = registry.iter().find(|known| known.id() == codec) else { return };
    let length = dtype.byte_count(element_count).unwrap() as usize;
    let columns: Vec<(&str, Bytes)> = columns.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect();
    let partners = OwnPartners::of(element_count, base.as_deref().unwrap_or_default());
    let partners = partners.borrow();
    let columns = Columns { dtype, element_count, columns: &columns, base: base.as_deref(), partners: &partners };
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
    for role in ["model", "master", "exp_avg_sq"] {
        let chunk = Chunk { role, base: base.as_deref(), partners: &partners, ..Chunk::new(dtype, element_count, &out) };
        again(codec.as_ref(), &chunk);
    }
});

fn again(codec: &dyn Codec, chunk: &Chunk<'_>) {
    let Some(out) = encoded_and_decoded(codec, chunk) else { return };
    if codec.is_lossless() {
        assert_eq!(out, chunk.data);
    } else {
        assert_eq!(encoded_and_decoded(codec, &Chunk { data: &out, ..*chunk }), Some(out));
    }
}

fn encoded_and_decoded(codec: &dyn Codec, chunk: &Chunk<'_>) -> Option<Vec<u8>> {
    codec.estimate(chunk)?;
    let &Chunk { dtype, element_count, partners, .. } = chunk;
    let encoded = codec.encode(chunk).unwrap();
    let names: Vec<&str> = encoded.columns.iter().map(|column| column.0).collect();
    codec.check_columns(dtype, &names).unwrap();
    let columns: Vec<(&str, Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect();
    let mut out = vec![0; chunk.data.len()];
    let base = chunk.base.filter(|_| encoded.uses_base);
    codec.decode(&Columns { dtype, element_count, columns: &columns, base, partners }, &mut out).unwrap();
    Some(out)
}
