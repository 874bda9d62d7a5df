//! Codecs with this machine's kernels against the scalar kernels: same columns, same estimate, same decoded bytes. A
//! lossless codec must decode to the chunk.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::codec::{Chunk, Columns, Registry};
use tensorcask_fuzz::{Elements, OwnPartners};

fuzz_target!(|data: &[u8]| {
    let Some(Elements { dtype, element_count, data, base }) = Elements::parse(data) else { return };
    let partners = OwnPartners::of(element_count, &data);
    let partners = partners.borrow();
    let registry = Registry::default();
    let roles = ["model", "master", "exp_avg_sq"];
    for (codec, role) in registry.iter().flat_map(|codec| roles.map(|role| (codec, role))) {
        let chunk = Chunk { role, base: base.as_deref(), partners: &partners, ..Chunk::new(dtype, element_count, &data) };
        let estimate = codec.estimate(&chunk);
        assert_eq!(estimate, tensorcask::with_scalar_kernels(|| codec.estimate(&chunk)), "{}", codec.id());
        if estimate.is_none() {
            continue;
        }
        let encoded = codec.encode(&chunk).unwrap();
        assert_eq!(encoded, tensorcask::with_scalar_kernels(|| codec.encode(&chunk)).unwrap(), "{}", codec.id());
        let columns: Vec<(&str, Bytes)> = encoded.columns.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect();
        let base = base.as_deref().filter(|_| encoded.uses_base);
        let columns = Columns { dtype, element_count, columns: &columns, base, partners: &partners };
        let mut out = vec![0; data.len()];
        codec.decode(&columns, &mut out).unwrap();
        assert!(!codec.is_lossless() || out == data, "{}", codec.id());
        let mut scalar = vec![0; data.len()];
        tensorcask::with_scalar_kernels(|| codec.decode(&columns, &mut scalar)).unwrap();
        assert_eq!(out, scalar, "{}", codec.id());
    }
});
