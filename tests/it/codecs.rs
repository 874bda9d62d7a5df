//! Every codec keeps the contract, and stores real training states in fewer bytes than the fallback codec.

use std::path::Path;

use bytes::Bytes;
use safetensors::SafeTensors;
use tensorcask::Dtype;
use tensorcask::codec::{Chunk, Cluster, CodeMap, Codec, Columns, Edges, EncodeCheck, Objective, Registry, encode_chunk};

#[test]
fn every_codec_of_the_registry_keeps_the_contract() {
    for codec in Registry::default().iter() {
        tensorcask::testing::codec::run_all(codec.as_ref()).unwrap();
    }
}

#[test]
fn clusters_keep_the_contract_with_every_pair_of_options() {
    let normal = Edges::Normal;
    let sample = Edges::Sample;
    let linear = CodeMap::Linear;
    let dynamic = CodeMap::Dynamic;
    for (clusters, edges, map) in
        [(1, normal, linear), (1, sample, dynamic), (2, normal, dynamic), (2, sample, linear), (16, normal, linear), (16, sample, dynamic)]
    {
        tensorcask::testing::codec::run_all(&Cluster { clusters, edges, map }).unwrap();
    }
}

fn bytes_of(codec: &dyn Codec, chunk: &Chunk<'_>) -> Option<usize> {
    codec.estimate(chunk)?;
    let encoded = codec.encode(chunk).unwrap();
    let columns: Vec<(&str, Bytes)> = encoded.columns.iter().map(|(name, bytes)| (*name, Bytes::from(bytes.clone()))).collect();
    let mut out = vec![0; chunk.data.len()];
    let base = chunk.base.filter(|_| encoded.uses_base);
    codec
        .decode(&Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base, partners: &[] }, &mut out)
        .unwrap();
    assert!(out == chunk.data, "{} changed {} elements of {}", codec.id(), chunk.element_count, chunk.dtype);
    Some(columns.iter().map(|(_, bytes)| bytes.len()).sum())
}

/// Returns stored and original bytes of all tensors of a role.
fn stored(codec: &str, step: u32, base: Option<u32>, role: &str) -> (usize, usize) {
    let read =
        |step: u32| std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/step-{step}.safetensors"))).unwrap();
    let new = read(step);
    let old = base.map(read);
    let new = SafeTensors::deserialize(&new).unwrap();
    let old = old.as_ref().map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let registry = Registry::default();
    let codec = registry.get(codec).unwrap();
    let mut sum = (0, 0);
    for (name, tensor) in new.tensors().iter().filter(|(name, _)| name.starts_with(role)) {
        let dtype = if tensor.dtype() == safetensors::Dtype::BF16 { Dtype::Bf16 } else { Dtype::F32 };
        let base = old.as_ref().map(|old| old.tensor(name).unwrap().data());
        let element_count = tensor.shape().iter().product::<usize>() as u64;
        let row_elements = if tensor.shape().len() > 1 { tensor.shape().last().map_or(0, |&n| n as u64) } else { 0 };
        let chunk = Chunk { base, row_elements, ..Chunk::new(dtype, element_count, tensor.data()) };
        sum.0 += bytes_of(codec.as_ref(), &chunk).unwrap();
        sum.1 += chunk.data.len();
    }
    sum
}

#[test]
fn real_states_shrink_to_what_their_entropies_allow() {
    let ratio = |codec: &str, step, base, role: &str| {
        let (stored, original) = stored(codec, step, base, role);
        stored as f64 / original as f64
    };
    let full = ratio("tc.planes", 1000, None, "model.");
    assert!(full < 0.68, "bf16 weights alone: {full}");
    let magnitudes = ratio("tc.magnitudes", 1000, None, "model.");
    assert!(magnitudes < full - 0.004, "bf16 weights alone: {magnitudes}, planes {full}");
    for moment in ["optimizer.exp_avg.", "optimizer.exp_avg_sq."] {
        let planes = ratio("tc.planes", 1000, None, moment);
        let magnitudes = ratio("tc.magnitudes", 1000, None, moment);
        assert!(magnitudes < planes - 0.004, "{moment}: planes {planes}, magnitudes {magnitudes}");
    }
    let xor = ratio("tc.planes", 1001, Some(1000), "model.");
    let ordered = ratio("tc.ordered", 1001, Some(1000), "model.");
    assert!(xor < 0.30 && ordered < 0.22, "one step: planes {xor}, ordered {ordered}");
    let xor = ratio("tc.planes", 2401, Some(2400), "model.");
    let ordered = ratio("tc.ordered", 2401, Some(2400), "model.");
    assert!(xor < 0.03 && ordered < 0.02, "one step of fine-tuning: planes {xor}, ordered {ordered}");
    let sparse = ratio("tc.sparse", 2401, Some(2400), "model.");
    assert!(sparse < 0.8 * ordered, "one step of fine-tuning: ordered {ordered}, sparse {sparse}");
    let master = ratio("tc.ordered", 1001, Some(1000), "optimizer.master");
    assert!(master < 0.75, "masters: {master}");
}

/// Weights of a normal distribution that are rounded to bf16 after an update of about the same size for all.
#[test]
fn sparse_takes_a_byte_for_a_change_at_every_learning_rate() {
    let registry = Registry::default();
    let take = |codec: &str, chunk: &Chunk<'_>| bytes_of(registry.get(codec).unwrap().as_ref(), chunk).unwrap();
    let mut state = 7u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32
    };
    let mut normal = move || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
    let masters: Vec<f32> = (0..1 << 18).map(|_| 0.02 * normal()).collect();
    let updates: Vec<f32> = masters.iter().map(|_| normal()).collect();
    let rounded = |rate: f32| -> Vec<u8> {
        masters.iter().zip(&updates).flat_map(|(master, update)| half::bf16::from_f32(master + rate * update).to_le_bytes()).collect()
    };
    let base = rounded(0.0);
    for rate in [1e-7, 3e-7, 1e-6, 2e-6, 5e-6] {
        let data = rounded(rate);
        let changed = base.chunks(2).zip(data.chunks(2)).filter(|(base, data)| base != data).count();
        let chunk = Chunk { base: Some(&base), ..Chunk::new(Dtype::Bf16, 1 << 18, &data) };
        let [sparse, ordered] = ["tc.sparse", "tc.ordered"].map(|codec| take(codec, &chunk));
        assert!(sparse <= changed + changed / 10 + 40, "{rate}: {sparse} bytes for {changed} changes");
        assert!(sparse < ordered, "{rate}: {sparse} bytes, ordered {ordered}");
        let chosen = encode_chunk(&registry, Objective::BALANCED, &chunk, EncodeCheck::Decode).unwrap();
        assert_eq!(chosen.codec.unwrap().id, "tc.sparse", "{rate}");
    }
}

#[test]
fn ordered_beats_the_bitmask_at_every_rate_of_change() {
    let registry = Registry::default();
    let ordered = registry.get("tc.ordered").unwrap();
    let bitmask = registry.get("tc.bitmask").unwrap();
    let mut state = 7u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 40
    };
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F8E4M3] {
        let width = dtype.unit_bytes();
        let count = 1 << 18;
        for rate in [0.0001, 0.001, 0.01, 0.1, 0.3, 1.0] {
            let base: Vec<u8> =
                (0..count * width).map(|i| if i % width == width - 1 { 0x38 + (next() % 4) as u8 } else { next() as u8 }).collect();
            let mut data = base.clone();
            for unit in data.chunks_mut(width) {
                if (next() as f64) < rate * (1u64 << 24) as f64 {
                    unit[0] ^= 1 << (next() % 3);
                }
            }
            let chunk = Chunk { base: Some(&base), ..Chunk::new(dtype, count as u64, &data) };
            let ours = bytes_of(ordered.as_ref(), &chunk).unwrap();
            let theirs = bytes_of(bitmask.as_ref(), &chunk).unwrap();
            assert!(ours < theirs, "{dtype} at {rate}: {ours} bytes, bitmask {theirs}");
        }
    }
}
