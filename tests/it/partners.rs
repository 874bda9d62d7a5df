//! Tensors that are stored relative to other tensors: whole, in slices, down chains, compacted, and without their
//! partners.

use std::sync::Arc;

use crate::common::{data, wrap};
use object_store::memory::InMemory;
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, CompactOptions, VerifyOptions};
use tensorcask::{
    BaseKeeping, Blob, Dtype, ErrorKind, Latest, Metadata, Policy, Rank, ReadRequest, Rect, SavedSnapshot, Slice, Snapshot, Store,
    TensorView, Writer, WriterOptions,
};

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

async fn save_file(writer: &mut Writer, step: u64) -> SavedSnapshot {
    let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
    writer.save(step, &input.tensors().unwrap(), &[], &Metadata::default()).await.unwrap()
}

/// Checks all tensors, together and alone, and some rows of each.
async fn check_file(store: &Store, step: u64) {
    let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
    let snapshot = store.snapshot(step).await.unwrap();
    let views = input.tensors().unwrap();
    let mut buffers: Vec<Vec<u8>> = views.iter().map(|view| vec![0xaa; view.data().len()]).collect();
    let wanted = views.iter().zip(&mut buffers).map(|(view, buffer)| ReadRequest { name: view.name(), slice: Slice::all(), out: buffer });
    snapshot.read_many_into(wanted.collect()).await.unwrap();
    for (view, buffer) in views.iter().zip(&buffers) {
        assert!(view.data() == buffer, "step {step}, {}", view.name());
        let row = view.data().len() / view.shape()[0] as usize;
        let rows = view.shape()[0] / 3..view.shape()[0] / 2 + 1;
        let read = snapshot.read(view.name(), &Slice::rows(rows.clone())).await.unwrap().data;
        assert!(read == view.data()[rows.start as usize * row..rows.end as usize * row], "step {step}, rows of {}", view.name());
    }
    snapshot.verify().await.unwrap();
}

#[tokio::test]
async fn masters_are_what_the_weights_lack() {
    for policy in [Policy::Full, Policy::Consecutive, Policy::OneShot] {
        for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
            let store = memory();
            let options = WriterOptions { policy, base_cache: base_cache.clone(), ..WriterOptions::default() };
            let mut writer = store.writer_with(options).await.unwrap();
            for step in [1000, 1001, 1010] {
                let saved = save_file(&mut writer, step).await;
                // One step ahead, Adam's own arithmetic gives both master and second moment.
                let expected = if step == 1001 && policy != Policy::Full { "tc.replay" } else { "tc.remainder" };
                assert!(saved.chunks.contains_key(expected), "{policy}, step {step}: {:?}", saved.chunks);
            }
            for step in [1000, 1001, 1010] {
                check_file(&store, step).await;
            }
            assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
        }
    }
}

/// The roles of a large state have casks of their own, which are written at once, parameter by parameter. A kept base is
/// not read back from the store.
#[tokio::test]
async fn a_large_state_is_written_parameter_by_parameter() {
    for base_cache in [BaseKeeping::None, BaseKeeping::Memory, BaseKeeping::Encoded] {
        let store = memory();
        let options = WriterOptions { policy: Policy::Consecutive, base_cache: base_cache.clone(), ..WriterOptions::default() };
        let mut writer = store.writer_with(options).await.unwrap();
        let mut base_bytes = 0;
        for step in [1000, 1001] {
            let input = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
            let views = input.tensors().unwrap();
            let copies = (48 << 20) / views.iter().map(|view| view.data().len()).sum::<usize>();
            // The order of masters contradicts the order of the other roles.
            let name = |view: &TensorView<'_>, copy: usize| match view.role() {
                "master" => format!("{}.copy{:03}", view.name(), copies - copy),
                _ => format!("{}.copy{copy:03}", view.name()),
            };
            // Each copy has memory of its own: tensors that share memory are stored once.
            let memory_of_copies: Vec<Vec<Vec<u8>>> =
                (0..copies).map(|_| views.iter().map(|view| view.data().to_vec()).collect()).collect();
            let copied = memory_of_copies.iter().enumerate();
            let state: Vec<TensorView<'_>> = copied
                .flat_map(|(copy, memory)| views.iter().zip(memory).map(move |(view, data)| (copy, view, data)))
                .map(|(copy, view, data)| {
                    let tensor = TensorView::new(name(view, copy), view.dtype(), view.shape(), data).unwrap();
                    tensor.with_role(view.role(), format!("{}.{copy}", view.param()))
                })
                .collect();
            let read_before = store.io().bytes_read;
            let saved = writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
            let read = store.io().bytes_read - read_before;
            let snapshot = store.snapshot(step).await.unwrap();
            assert_eq!(snapshot.manifest().casks.len(), 4);
            assert_eq!(saved.chunks.values().sum::<u64>(), state.len() as u64, "a tensor was not stored by itself");
            if step == 1000 {
                base_bytes = saved.stored_bytes;
            } else {
                assert!(saved.chunks.contains_key("tc.replay"), "{:?}", saved.chunks);
                // Without a kept base, both moments are read again for a master that is encoded apart from them.
                let most = if base_cache == BaseKeeping::None { 3 * base_bytes } else { base_bytes / 20 };
                assert!(read < most, "{base_cache:?}: {read} bytes were read, the base has {base_bytes}");
            }
            for tensor in &state {
                let found = snapshot.read(tensor.name(), &Slice::all()).await.unwrap();
                assert!(found.data == tensor.data(), "{base_cache:?}, step {step}, {}", tensor.name());
            }
        }
        maintain::compact(&store, 1001, &CompactOptions::default()).await.unwrap();
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
}

#[tokio::test]
async fn a_whole_state_takes_three_quarters_and_the_next_step_a_third() {
    let store = memory();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for (step, most) in [(1000, 0.75), (1001, 0.34), (1010, 0.70)] {
        let saved = save_file(&mut writer, step).await;
        let ratio = saved.stored_bytes as f64 / saved.tensor_bytes as f64;
        assert!(ratio < most, "step {step}: {ratio}");
    }
}

#[tokio::test]
async fn chains_of_masters_are_folded_reduced_and_made_whole() {
    let store = memory();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in [1000, 1001, 1010] {
        save_file(&mut writer, step).await;
    }
    maintain::compact(&store, 1010, &CompactOptions::default()).await.unwrap();
    check_file(&store, 1010).await;
    let archive = memory();
    maintain::consolidate(&store, &archive, 1010, &CompactOptions::default()).await.unwrap();
    check_file(&archive, 1010).await;
    let ours = store.snapshots().await.unwrap();
    let theirs = archive.snapshots().await.unwrap();
    assert!(ours.last().unwrap().stored_bytes as f64 / (ours[0].tensor_bytes as f64) < 0.75);
    assert!(theirs.last().unwrap().stored_bytes as f64 / (ours[0].tensor_bytes as f64) < 0.75);

    // Without the weights, the masters must be stored in full.
    let reduced = maintain::keep_roles(&store, &[1001], &["master".to_owned()], &CompactOptions::default()).await.unwrap();
    assert_eq!(reduced[0].held, None);
    let input = Files::open(&[data("step-1001.safetensors")]).unwrap();
    let snapshot = store.snapshot(1001).await.unwrap();
    assert!(!snapshot.tensors().is_empty());
    for view in input.tensors().unwrap().iter().filter(|view| view.role() == "master") {
        assert!(snapshot.read(view.name(), &Slice::all()).await.unwrap().data == view.data());
    }
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// The state of FSDP2 and of plain PyTorch: f32 weights, and no copy of them in 16 bits.
#[tokio::test]
async fn weights_without_masters_are_replayed() {
    let store = memory();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let inputs = [1000, 1001, 1010].map(|step| (step, Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap()));
    let states = inputs.each_ref().map(|(step, input)| {
        let is_kept = |view: &TensorView<'_>| view.role() != "model";
        let renamed = |view: &TensorView<'_>| view.name().replace("optimizer.master.", "model.");
        let views = input.tensors().unwrap();
        let state = views.iter().filter(|view| is_kept(view)).map(|view| (renamed(view), view.shape().to_vec(), view.data().to_vec()));
        (*step, state.collect::<Vec<_>>())
    });
    for (step, state) in &states {
        let views: Vec<TensorView<'_>> =
            state.iter().map(|(name, shape, data)| TensorView::new(name, Dtype::F32, shape, data).unwrap()).collect();
        let saved = writer.save(*step, &views, &[], &Metadata::default()).await.unwrap();
        let ratio = saved.stored_bytes as f64 / saved.tensor_bytes as f64;
        if *step == 1001 {
            let parameters = views.iter().filter(|view| view.role() == "model").count() as u64;
            // Second moments are replayed, too, or stored by their gradient.
            assert!(saved.chunks["tc.replay"] >= parameters, "{:?}", saved.chunks);
            assert!(ratio < 0.36, "{ratio}");
        }
    }
    maintain::compact(&store, 1010, &CompactOptions::default()).await.unwrap();
    let reduced = maintain::keep_roles(&store, &[1001], &["model".to_owned()], &CompactOptions::default()).await.unwrap();
    assert_eq!(reduced[0].held, None);
    for (step, state) in &states {
        let snapshot = store.snapshot(*step).await.unwrap();
        // Without the moments, the weights must be stored in full.
        let is_left = |name: &str| *step != 1001 || name.starts_with("model.");
        assert_eq!(snapshot.tensors().len(), state.iter().filter(|(name, ..)| is_left(name)).count());
        for (name, shape, data) in state.iter().filter(|(name, ..)| is_left(name)) {
            assert!(snapshot.read(name, &Slice::all()).await.unwrap().data == *data, "step {step}, {name}");
            let rows = shape[0] / 3..shape[0] / 2;
            let row = data.len() / shape[0] as usize;
            let read = snapshot.read(name, &Slice::rows(rows.clone())).await.unwrap().data;
            assert!(read == data[rows.start as usize * row..rows.end as usize * row], "step {step}, rows of {name}");
        }
    }
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// Reading only the weights touches only casks of role `model`.
#[tokio::test]
async fn weights_are_read_without_their_masters() {
    let store = memory();
    save_file(&mut store.writer(Policy::Full).await.unwrap(), 1000).await;
    let snapshot = store.snapshot(Latest).await.unwrap();
    let names: Vec<String> = snapshot.tensors().into_iter().filter(|tensor| tensor.role == "model").map(|tensor| tensor.name).collect();
    let model_cask = snapshot.manifest().casks[0].bytes;
    let before = store.io().bytes_read;
    for name in &names {
        snapshot.read(name, &Slice::all()).await.unwrap();
    }
    let read = store.io().bytes_read - before;
    assert!(read < model_cask + 4096, "{read} of {model_cask}");
}

/// Returns f32 values and their rounded values.
fn rounded(count: usize, dtype: Dtype, round: fn(f32) -> u16) -> (Vec<u8>, Vec<u8>) {
    let mut x = 9u64;
    let values: Vec<f32> = (0..count)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let unit = (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            unit * if dtype == Dtype::F16 { 0.125 } else { 0.02 }
        })
        .collect();
    (values.iter().flat_map(|v| v.to_le_bytes()).collect(), values.iter().flat_map(|&v| round(v).to_le_bytes()).collect())
}

#[tokio::test]
async fn every_rounding_and_every_odd_value_comes_back() {
    let nearest_even: fn(f32) -> u16 = |v| half::bf16::from_f32(v).to_bits();
    let half_up: fn(f32) -> u16 = |v| ((v.to_bits() + 0x8000) >> 16) as u16;
    let truncated: fn(f32) -> u16 = |v| (v.to_bits() >> 16) as u16;
    let f16: fn(f32) -> u16 = |v| half::f16::from_f32(v).to_bits();
    for (dtype, round) in [(Dtype::Bf16, nearest_even), (Dtype::Bf16, half_up), (Dtype::Bf16, truncated), (Dtype::F16, f16)] {
        let (mut master, model) = rounded(100_000, dtype, round);
        // Values that rounding does not explain: zeros of the other sign, infinities, NaN, ties.
        for (nth, bits) in [0x8000_0000u32, 0, 0x7f80_0000, 0xffc0_0001, 1, 0x3f80_8000, 0x3f81_8000].into_iter().enumerate() {
            master[4 * 1000 * nth..][..4].copy_from_slice(&bits.to_le_bytes());
        }
        let store = memory();
        let mut writer = store.writer(Policy::Full).await.unwrap();
        let state = [
            TensorView::new("model.w", dtype, &[1000, 100], &model).unwrap(),
            TensorView::new("master.w", Dtype::F32, &[1000, 100], &master).unwrap(),
        ];
        let saved = writer.save(1, &state, &[], &Metadata::default()).await.unwrap();
        assert_eq!(saved.chunks.get("tc.remainder"), Some(&1), "{dtype}: {:?}", saved.chunks);
        let snapshot = store.snapshot(Latest).await.unwrap();
        assert!(snapshot.read("master.w", &Slice::all()).await.unwrap().data == master);
        assert!(snapshot.read("model.w", &Slice::all()).await.unwrap().data == model);
    }
}

async fn assert_read(snapshot: &Snapshot, name: &str, bytes: &[u8]) {
    assert!(snapshot.read(name, &Slice::all()).await.unwrap().data == bytes, "{name}");
}

/// An ambiguous partner is not used.
#[tokio::test]
async fn without_a_partner_masters_are_stored_alone() {
    let (master, model) = rounded(30_000, Dtype::Bf16, |v| half::bf16::from_f32(v).to_bits());
    let view = |name, dtype, data, role: &str, param: &str| TensorView::new(name, dtype, &[300, 100], data).unwrap().with_role(role, param);
    let states = [
        // Another parameter; two weights of one parameter; a weight in another role; another shape.
        vec![view("a", Dtype::F32, &master, "master", "x"), view("b", Dtype::Bf16, &model, "model", "y")],
        vec![
            view("a", Dtype::F32, &master, "master", "x"),
            view("b", Dtype::Bf16, &model, "model", "x"),
            view("c", Dtype::Bf16, &model[..], "model", "x").with_role("model", "x"),
        ],
        vec![view("a", Dtype::F32, &master, "master", "x"), view("b", Dtype::Bf16, &model, "ema", "x")],
        vec![
            view("a", Dtype::F32, &master, "master", "x"),
            TensorView::new("b", Dtype::Bf16, &[100, 300], &model).unwrap().with_role("model", "x"),
        ],
    ];
    let other = model.clone();
    for (nth, mut state) in states.into_iter().enumerate() {
        if nth == 1 {
            // The same values in other memory are not tied.
            state[2] = view("c", Dtype::Bf16, &other, "model", "x");
        }
        let store = memory();
        let saved = store.writer(Policy::Full).await.unwrap().save(1, &state, &[], &Metadata::default()).await.unwrap();
        assert_eq!(saved.chunks.get("tc.remainder"), None, "state {nth}: {:?}", saved.chunks);
        assert_read(&store.snapshot(1).await.unwrap(), "a", &master).await;
    }
    // Tied weights are one tensor.
    let store = memory();
    let tied = [
        view("a", Dtype::F32, &master, "master", "x"),
        view("b", Dtype::Bf16, &model, "model", "x"),
        view("c", Dtype::Bf16, &model, "model", "x"),
    ];
    let saved = store.writer(Policy::Full).await.unwrap().save(1, &tied, &[], &Metadata::default()).await.unwrap();
    assert_eq!(saved.chunks.get("tc.remainder"), Some(&1));
    let snapshot = store.snapshot(1).await.unwrap();
    for (name, bytes) in [("a", &master), ("b", &model), ("c", &model)] {
        assert_read(&snapshot, name, bytes).await;
    }
}

/// A tensor that does not change is not stored again, even if its role changes. Its chunks are decoded with the
/// partners of the role that it had when they were stored.
#[tokio::test]
async fn roles_may_change_between_snapshots() {
    let (master, model) = rounded(3000, Dtype::Bf16, |x| (x.to_bits() >> 16) as u16);
    let other: Vec<u8> = master.iter().map(|byte| byte ^ 1).collect();
    for (roles, changed) in
        [(["master", "shadow"], false), (["master", "exp_avg_sq"], false), (["master", "shadow"], true), (["other", "master"], true)]
    {
        let store = memory();
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        for (step, role) in (1..).zip([roles[0], roles[1], roles[0]]) {
            let data = if changed && step == 2 { &other } else { &master };
            let tensors = [
                TensorView::new("master.p", Dtype::F32, &[3000], data).unwrap().with_role(role, "p"),
                TensorView::new("model.p", Dtype::Bf16, &[3000], &model).unwrap().with_role("model", "p"),
            ];
            let saved = writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
            let is_stored = step == 1 || changed;
            assert_eq!(saved.chunks.keys().any(|codec| codec.starts_with("tc.")), is_stored, "{:?}", saved.chunks);
        }
        for step in [1, 2, 3] {
            let snapshot = store.snapshot(step).await.unwrap();
            assert_read(&snapshot, "master.p", if changed && step == 2 { &other } else { &master }).await;
        }
        let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
        assert!(report.is_clean(), "{roles:?}: {report:?}");
    }
}

/// The partner appears, disappears and changes its type along the chain.
#[tokio::test]
async fn partners_may_change_between_snapshots() {
    let store = memory();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let (master, model) = rounded(40_000, Dtype::Bf16, |v| half::bf16::from_f32(v).to_bits());
    let (_, halves) = rounded(40_000, Dtype::Bf16, |v| half::f16::from_f32(v).to_bits());
    let mut later = master.clone();
    later[4] ^= 1;
    let tensor = |name, dtype, data| TensorView::new(name, dtype, &[400, 100], data).unwrap();
    let split = |offset: u64, rows: u64, data| {
        TensorView::shard("model.w", Dtype::Bf16, &[400, 100], Rect { offset: vec![offset, 0], shape: vec![rows, 100] }, data).unwrap()
    };
    let states: Vec<(Vec<TensorView<'_>>, &[u8])> = vec![
        (vec![tensor("master.w", Dtype::F32, &master), tensor("model.w", Dtype::Bf16, &model)], &master),
        (vec![tensor("master.w", Dtype::F32, &master)], &master),
        (vec![tensor("master.w", Dtype::F32, &later), tensor("model.w", Dtype::F16, &halves)], &later),
        (vec![tensor("master.w", Dtype::F32, &later), split(0, 100, &model[..20_000]), split(100, 300, &model[20_000..])], &later),
        (vec![tensor("master.w", Dtype::F32, &master), tensor("model.w", Dtype::Bf16, &model)], &master),
    ];
    for (step, (state, _)) in states.iter().enumerate() {
        writer.save(step as u64, state, &[], &Metadata::default()).await.unwrap();
    }
    for (step, (state, expected)) in states.iter().enumerate() {
        let snapshot = store.snapshot(step as u64).await.unwrap();
        assert_read(&snapshot, "master.w", expected).await;
        if state.len() == 2 {
            assert_read(&snapshot, "model.w", state[1].data()).await;
        }
    }
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    let have = store.snapshot(0).await.unwrap();
    for step in 1..states.len() as u64 {
        let mut held = master.clone();
        store.snapshot(step).await.unwrap().update_into(&have, vec![("master.w", &mut held)]).await.unwrap();
        assert!(held == states[step as usize].1, "step {step}");
    }
}

/// Two ranks, each with rows of both tensors; and two names for one parameter, which no reader could tell apart.
#[tokio::test]
async fn ranks_pair_what_they_hold() {
    let (master, model) = rounded(40_000, Dtype::Bf16, |v| half::bf16::from_f32(v).to_bits());
    let store = memory();
    let mut writer = store.writer(Policy::Full).await.unwrap();
    let rows = |rank: usize| Rect { offset: vec![rank as u64 * 200, 0], shape: vec![200, 100] };
    let mut receipts = Vec::new();
    for rank in 0..2 {
        let mut other = store.rank_writer(Rank { rank: rank as u32, world: 2, attempt: 0 }, WriterOptions::default()).await.unwrap();
        let state = [
            TensorView::shard("master.w", Dtype::F32, &[400, 100], rows(rank), &master[rank * 80_000..][..80_000]).unwrap(),
            TensorView::shard("model.w", Dtype::Bf16, &[400, 100], rows(rank), &model[rank * 40_000..][..40_000]).unwrap(),
        ];
        receipts.push(other.save(1, &state, &[Blob { rank: rank as u32, name: "rng".into(), data: vec![1].into() }]).await.unwrap());
    }
    writer.commit_receipts(1, &receipts, &Metadata::default()).await.unwrap();
    let snapshot = store.snapshot(1).await.unwrap();
    assert_read(&snapshot, "master.w", &master).await;
    let remainders = snapshot
        .inspect()
        .indexes()
        .await
        .unwrap()
        .iter()
        .filter(|(_, index)| index.codecs().iter().any(|c| c.id == "tc.remainder"))
        .count();
    assert_eq!(remainders, 2);

    let mut receipts = Vec::new();
    for (rank, names) in [["master.w", "model.w"], ["master.v", "module.w"]].into_iter().enumerate() {
        let mut other = store.rank_writer(Rank { rank: rank as u32, world: 2, attempt: 0 }, WriterOptions::default()).await.unwrap();
        let state = [
            TensorView::new(names[0], Dtype::F32, &[400, 100], &master).unwrap(),
            TensorView::new(names[1], Dtype::Bf16, &[400, 100], &model).unwrap(),
        ];
        receipts.push(other.save(2, &state, &[]).await.unwrap());
    }
    let error = writer.commit_receipts(2, &receipts, &Metadata::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains("module.w"), "{error}");
}
