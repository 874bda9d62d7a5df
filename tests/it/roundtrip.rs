//! Saved states are read back unchanged: every dtype, many shapes, every policy, sharded and not, by name, slice and
//! chain.

use crate::common::{data, is_thorough, on_this_thread as on};
use proptest::prelude::*;
use tensorcask::interchange::safetensors::{Files, Selected};
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::{
    BaseKeeping, ChunkGrid, Dtype, ErrorKind, Latest, Metadata, Policy, Rect, Slice, Store, StoreOptions, TensorView, WriterOptions,
};

#[derive(Debug, Clone)]
struct Spec {
    dtype: Dtype,
    shape: Vec<u64>,
    /// Rows at which the first dimension is cut into shards.
    cuts: Vec<u64>,
    seed: u64,
}

fn spec() -> impl Strategy<Value = Spec> {
    let shape = prop_oneof![
        Just(vec![]),
        prop::collection::vec(0u64..6, 1..4),
        // More than 2^18 elements, for several chunks.
        (3u64..6, 100_000u64..140_000).prop_map(|(a, b)| vec![a, b]),
        (300_000u64..600_000).prop_map(|n| vec![n]),
    ];
    (prop::sample::select(Dtype::ALL.to_vec()), shape, prop::collection::vec(1u64..6, 0..3), any::<u64>())
        .prop_map(|(dtype, shape, cuts, seed)| Spec { dtype, shape, cuts, seed })
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::Full),
        Just(Policy::OneShot),
        Just(Policy::Consecutive),
        (1u64..4).prop_map(|every| Policy::Intermittent { every }),
    ]
}

impl Spec {
    /// Returns rectangles and bytes of the shards at a step. Later steps change some bytes of some shards.
    fn shards(&self, step: u64) -> Vec<(Rect, Vec<u8>)> {
        let rows = self.shape.first().copied().unwrap_or(0);
        let mut edges: Vec<u64> = self.cuts.iter().copied().filter(|&cut| cut < rows && !self.shape.contains(&0)).collect();
        edges.extend([0, rows]);
        edges.sort_unstable();
        edges.dedup();
        let rects: Vec<Rect> = match self.shape.is_empty() || self.shape.contains(&0) {
            true => vec![Rect::whole(&self.shape)],
            false => edges
                .windows(2)
                .map(|edge| {
                    let mut rect = Rect::whole(&self.shape);
                    (rect.offset[0], rect.shape[0]) = (edge[0], edge[1] - edge[0]);
                    rect
                })
                .collect(),
        };
        rects
            .into_iter()
            .enumerate()
            .map(|(nth, rect)| {
                let elements = rect.element_count().unwrap();
                let bytes = self.dtype.byte_count(elements).unwrap() as usize;
                let mut x = self.seed.wrapping_add(nth as u64) | 1;
                let mut next = move || {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (x >> 40) as usize
                };
                let constant = self.seed.is_multiple_of(5);
                let mut bytes: Vec<u8> = (0..bytes).map(|_| if constant { 7 } else { next() as u8 }).collect();
                for _ in 0..step * (self.seed % 4) {
                    let length = bytes.len().max(1);
                    if let Some(byte) = bytes.get_mut(next() % length) {
                        *byte = byte.wrapping_add(1);
                    }
                }
                let used = (elements % 8 * self.dtype.bits() % 8) as u32;
                if let (Some(last), true) = (bytes.last_mut(), used != 0) {
                    *last &= (1 << used) - 1;
                }
                (rect, bytes)
            })
            .collect()
    }
}

/// Returns element `i` of row-major packed bytes as bits.
fn element(dtype: Dtype, bytes: &[u8], i: u64) -> Vec<bool> {
    (i * dtype.bits()..(i + 1) * dtype.bits()).map(|bit| bytes[(bit / 8) as usize] >> (bit % 8) & 1 == 1).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if is_thorough() { 60 } else { 20 }, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn states_come_back(specs in prop::collection::vec(spec(), 1..4), policy in policy(), keep in any::<bool>(), alignment in 6u8..13) {
        on(async {
            let store = Store::open("memory://").unwrap();
            let base_cache = if keep { BaseKeeping::Memory } else { BaseKeeping::None };
            let options = WriterOptions { policy, base_cache, alignment_exponent: alignment, ..WriterOptions::default() };
            let mut writer = store.writer_with(options.clone()).await.unwrap();
            for step in 0..5u64 {
                if step == 3 {
                    // A restart, after which the next delta reads its base back.
                    writer = store.writer_with(options.clone()).await.unwrap();
                }
                let state: Vec<Vec<(Rect, Vec<u8>)>> = specs.iter().map(|spec| spec.shards(step)).collect();
                let views: Vec<TensorView<'_>> = specs.iter().zip(&state).enumerate().flat_map(|(i, (spec, shards))| {
                    shards.iter().map(move |(rect, bytes)| TensorView::shard(format!("t{i}"), spec.dtype, &spec.shape, rect.clone(), bytes).unwrap())
                }).collect();
                writer.save(step, &views, &[], &Metadata::default()).await.unwrap();
            }
            for step in 0..5u64 {
                let snapshot = store.snapshot(step).await.unwrap();
                for (i, spec) in specs.iter().enumerate() {
                    let shards = spec.shards(step);
                    let tensor = snapshot.read(&format!("t{i}"), &Slice::all()).await.unwrap();
                    assert_eq!(tensor.shape, spec.shape);
                    let mut at = 0;
                    for (rect, bytes) in &shards {
                        let count = rect.element_count().unwrap();
                        if count > 5000 && !spec.dtype.is_packed() {
                            let start = spec.dtype.byte_count(at).unwrap() as usize;
                            assert!(tensor.data[start..start + bytes.len()] == bytes[..], "step {step}, t{i}");
                        } else {
                            for e in (0..count).step_by(if count > 5000 { 97 } else { 1 }) {
                                assert_eq!(element(spec.dtype, &tensor.data, at + e), element(spec.dtype, bytes, e), "step {step}, t{i}, element {e}");
                            }
                        }
                        at += count;
                    }
                    // A slice equals the rows of the whole tensor.
                    if let Some(&rows) = spec.shape.first().filter(|&&rows| rows > 1) {
                        let from = rows / 3;
                        let to = rows / 3 + (rows / 2).max(1);
                        let slice = Slice::rows(from..to);
                        let part = snapshot.read(&format!("t{i}"), &slice).await.unwrap();
                        let row: u64 = spec.shape[1..].iter().product();
                        for e in (0..(to - from) * row).step_by(if row * rows > 5000 { 101 } else { 1 }) {
                            assert_eq!(element(spec.dtype, &part.data, e), element(spec.dtype, &tensor.data, from * row + e), "step {step}, t{i}[{from}..{to}], element {e}");
                        }
                    }
                }
            }
            let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
            assert!(report.is_clean(), "{:?}", report.problems);
        });
    }
}

fn stored_names(store: &tensorcask::blocking::Store, step: u64) -> Vec<Selected> {
    let snapshot = store.snapshot(step).unwrap();
    snapshot.tensors().into_iter().map(|tensor| Selected { name: tensor.name, slice: Slice::all() }).collect()
}

/// Saves real checkpoints as a base and two deltas, and exports them to safetensors with equal names, types, shapes,
/// bytes and metadata.
#[test]
fn real_checkpoints_come_back_as_they_were() {
    for (files, every_delta_is_smaller) in [
        (vec!["step-1000.safetensors", "step-1001.safetensors", "step-1010.safetensors"], true),
        (vec!["step-2400.safetensors", "step-2401.safetensors"], true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let store = tensorcask::blocking::Store::open(folder.path().join("run").to_str().unwrap()).unwrap();
        let mut writer = store.writer(Policy::Consecutive).unwrap();
        let mut base_bytes = 0;
        for (step, file) in files.iter().enumerate() {
            let input = Files::open(&[data(file)]).unwrap();
            let metadata = Metadata { file: input.metadata().unwrap(), ..Metadata::default() };
            let saved = writer.save(step as u64, &input.tensors().unwrap(), &[], &metadata).unwrap();
            assert_eq!(saved.kind.name(), if step == 0 { "base" } else { "delta" });
            if step == 0 {
                base_bytes = saved.stored_bytes;
            } else {
                assert_eq!(saved.stored_bytes < base_bytes, every_delta_is_smaller);
            }
        }
        for (step, file) in files.iter().enumerate() {
            let mut out = std::io::Cursor::new(Vec::new());
            store.snapshot(step as u64).unwrap().write_safetensors(&stored_names(&store, step as u64), &mut out).unwrap();
            let out = out.into_inner();
            let input = std::fs::read(data(file)).unwrap();
            let a = safetensors::SafeTensors::deserialize(&input).unwrap();
            let b = safetensors::SafeTensors::deserialize(&out).unwrap();
            let sorted = |file: &safetensors::SafeTensors<'_>| {
                let mut tensors: Vec<_> =
                    file.iter().map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())).collect();
                tensors.sort_by(|a, b| a.0.cmp(&b.0));
                tensors
            };
            assert!(sorted(&a) == sorted(&b), "{file}");
            let metadata = |bytes: &[u8]| safetensors::SafeTensors::read_metadata(bytes).unwrap().1.metadata().clone();
            assert_eq!(metadata(&input), metadata(&out));
        }
    }
}

/// A slice reads only the chunks that cover it, from each link.
#[test]
fn a_slice_reads_only_the_chunks_that_cover_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = tensorcask::blocking::Store::open(folder.path().join("run").to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Consecutive).unwrap();
    let shape = [4096u64, 512];
    let mut weights: Vec<u8> = (0..shape[0] * shape[1] * 4).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    let chunk_rows = ChunkGrid::new(Dtype::F32, &shape).unwrap().chunk_elements() / shape[1];
    for step in 0..4u64 {
        // Each step changes rows of chunk `step` only.
        let row = (step * chunk_rows) as usize;
        weights[row * 512 * 4] ^= 1;
        let state = [TensorView::new("w", Dtype::F32, &shape, &weights).unwrap()];
        writer.save(step, &state, &[], &Metadata::default()).unwrap();
    }
    let snapshot = store.snapshot(3).unwrap();
    let rows = 2 * chunk_rows + 5..2 * chunk_rows + 9;
    let part = snapshot.read("w", &Slice::rows(rows.clone())).unwrap();
    assert_eq!(part.data, weights[(rows.start * 2048) as usize..(rows.end * 2048) as usize]);
    let counts = snapshot.inspect().read_counts();
    assert_eq!(counts.chunks, 1);
    assert_eq!(snapshot.inspect().chunks_of("w", &Slice::rows(rows)).unwrap(), 1);
    // The base's page, and mask and values of the only delta that changed this chunk.
    assert_eq!(counts.pages, 3);
    // A second chunk, which no delta changed, takes one page of the base.
    snapshot.read("w", &Slice::rows(5 * chunk_rows..5 * chunk_rows + 1)).unwrap();
    assert_eq!(snapshot.inspect().read_counts().pages, 4);
}

#[test]
fn ten_thousand_small_tensors_stay_small() {
    let folder = tempfile::tempdir().unwrap();
    let options = StoreOptions { fsync: false, ..Default::default() };
    let store = tensorcask::blocking::Store::with(options.open(folder.path().join("run").to_str().unwrap()).unwrap()).unwrap();
    let mut writer = store.writer(Policy::Full).unwrap();
    let data: Vec<u8> = (0..10_000u64 * 1024).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u8).collect();
    let state: Vec<TensorView<'_>> = data
        .chunks(1024)
        .enumerate()
        .map(|(i, data)| TensorView::new(format!("model.layers.{i}.attention.bias"), Dtype::Bf16, &[8, 64], data).unwrap())
        .collect();
    let saved = writer.save(1, &state, &[], &Metadata::default()).unwrap();
    assert!(saved.stored_bytes <= 10_000 * (1024 * 12 / 10 + 128), "{} bytes", saved.stored_bytes);
    let mut out = std::io::Cursor::new(Vec::new());
    store.snapshot(Latest).unwrap().write_safetensors(&stored_names(&store, 1), &mut out).unwrap();
    let out = out.into_inner();
    let file = safetensors::SafeTensors::deserialize(&out).unwrap();
    assert_eq!(file.tensor("model.layers.77.attention.bias").unwrap().data(), &data[77 * 1024..78 * 1024]);
}

/// Tensors may appear, disappear, and change shape, type or shards from one snapshot to the next.
#[test]
fn layouts_may_change_between_snapshots() {
    on(async {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        let a = vec![1u8; 24];
        let b: Vec<u8> = (0..24).collect();
        let half =
            |offset: u64, data| TensorView::shard("a", Dtype::F32, &[6], Rect { offset: vec![offset], shape: vec![3] }, data).unwrap();
        let whole = |dtype, shape: &[u64]| TensorView::new("a", dtype, shape, &b).unwrap();
        let other = TensorView::new("b", Dtype::U8, &[24], &a).unwrap();
        let states: Vec<Vec<TensorView<'_>>> = vec![
            vec![whole(Dtype::F32, &[6]), other.clone()],
            vec![whole(Dtype::F32, &[6])],
            vec![whole(Dtype::F32, &[2, 3]), other.clone()],
            vec![whole(Dtype::I32, &[2, 3]), other.clone()],
            vec![half(0, &b[..12]), half(3, &b[12..]), other.clone()],
            vec![half(0, &b[..12]), half(3, &b[12..]), other],
        ];
        for (step, state) in states.iter().enumerate() {
            writer.save(step as u64, state, &[], &Metadata::default()).await.unwrap();
        }
        for (step, state) in states.iter().enumerate() {
            let snapshot = store.snapshot(step as u64).await.unwrap();
            let names: Vec<String> = snapshot.tensors().into_iter().map(|tensor| tensor.name).collect();
            assert_eq!(names.len(), if step == 1 { 1 } else { 2 }, "{names:?}");
            let tensor = snapshot.read("a", &Slice::all()).await.unwrap();
            assert_eq!((tensor.dtype, tensor.shape.as_slice(), &tensor.data), (state[0].dtype(), state[0].shape(), &b), "step {step}");
        }
        let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
        assert!(report.is_clean(), "{:?}", report.problems);
    });
}

#[test]
fn what_cannot_be_stored_is_refused_by_name() {
    on(async {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Full).await.unwrap();
        let data = [0u8; 16];
        let view = |name: &str| TensorView::new(name, Dtype::F32, &[4], &data).unwrap();
        let half = TensorView::shard("cut", Dtype::F32, &[8], Rect { offset: vec![0], shape: vec![4] }, &data).unwrap();
        for (state, message) in [
            (vec![view("a"), view("a")], "given twice"),
            (vec![half.clone()], "do not tile"),
            (vec![half.clone(), half], "do not tile"),
            (vec![view("tc.tree")], "reserved"),
        ] {
            let error = writer.save(1, &state, &[], &Metadata::default()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(message) && error.tensor_name().is_some(), "{error}");
        }
        assert!(TensorView::new("w", Dtype::F32, &[u64::MAX, u64::MAX], &[]).is_err());
        assert!(TensorView::new("w", Dtype::Int4, &[3], &[0x21, 0xf3]).is_err(), "unused bits");
        assert_eq!(store.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

/// A buffer may hold any bytes before the read. Unused bits of packed elements are zero afterwards.
#[test]
fn packed_slices_clear_what_they_do_not_use() {
    on(async {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::Full).await.unwrap();
        writer
            .save(1, &[TensorView::new("w", Dtype::Int4, &[7], &[0x21, 0x43, 0x65, 0x07]).unwrap()], &[], &Metadata::default())
            .await
            .unwrap();
        let snapshot = store.snapshot(1).await.unwrap();
        for (rows, expected) in [(0..3, vec![0x21, 0x03]), (1..4, vec![0x32, 0x04]), (0..7, vec![0x21, 0x43, 0x65, 0x07])] {
            let mut out = vec![0xff; expected.len()];
            snapshot.read_into("w", &Slice::rows(rows), &mut out).await.unwrap();
            assert_eq!(out, expected);
        }
    });
}
