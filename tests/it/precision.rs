//! Tensors that are rounded on purpose: bounds are kept, reports are right, errors do not accumulate, and all other
//! tensors are lossless.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{data, is_thorough, wrap};
use object_store::memory::InMemory;
use proptest::prelude::*;
use tensorcask::codec::CodecRules;
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, CompactOptions, VerifyOptions};
use tensorcask::precision::Setting;
use tensorcask::{
    BaseKeeping, Blob, Dtype, ErrorKind, Metadata, Policy, Precision, Rank, Rect, RoundingReport, SavedSnapshot, Slice, Snapshot, Store,
    TensorView, WriterOptions,
};

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

fn options(precision: Precision) -> WriterOptions {
    WriterOptions { precision, policy: Policy::Consecutive, ..WriterOptions::default() }
}

fn one(setting: Setting) -> Precision {
    Precision::default().with("*", setting, None).unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|unit| f32::from_le_bytes(unit.try_into().unwrap())).collect()
}

/// Numbers of an f32 tensor, or of a bf16 one.
fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::Bf16 => bytes.chunks_exact(2).map(|unit| f32::from_le_bytes([0, 0, unit[0], unit[1]])).collect(),
        _ => floats(bytes),
    }
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// State of a step, keyed by tensor name.
type State = BTreeMap<String, Vec<u8>>;

async fn read(snapshot: &Snapshot) -> State {
    let mut state = State::new();
    for tensor in snapshot.tensors() {
        state.insert(tensor.name.clone(), snapshot.read(&tensor.name, &Slice::all()).await.unwrap().data);
    }
    state
}

#[tokio::test]
async fn only_roles_that_are_certain_are_rounded() {
    let weights: Vec<f32> = (1..=300).map(|n| n as f32 / 7.0).collect();
    let exact = bytes(&weights);
    let short: Vec<u8> = weights.iter().flat_map(|w| half::bf16::from_f32(*w).to_bits().to_le_bytes()).collect();
    let other = bytes(&weights.iter().map(|w| w + 1.0).collect::<Vec<f32>>());
    // Name, type, content, and whether the tensor keeps its bits.
    let cases = [
        // Weights of modules called momentum, master and mu.
        ("momentum.w", Dtype::F32, &exact, true),
        ("model.momentum.w2", Dtype::F32, &exact, true),
        ("master.alone", Dtype::F32, &exact, true),
        ("params.mu.w", Dtype::F32, &exact, true),
        ("optimizer.state.mu.w.step", Dtype::F32, &exact, true),
        // A master rounds to its model weight; another tensor of that name does not.
        ("a", Dtype::Bf16, &short, true),
        ("master.a", Dtype::F32, &exact, false),
        ("b", Dtype::Bf16, &short, true),
        ("master.b", Dtype::F32, &other, true),
        // State of optimizers, and the caller's word.
        ("optimizer.state.mu.w.exp_avg", Dtype::F32, &exact, false),
        ("optimizer.state.0.momentum_buffer", Dtype::F32, &exact, false),
        ("optimizer.state.0.exp_avg.scale", Dtype::F32, &exact, true),
        ("velocity", Dtype::F32, &exact, false),
    ];
    // Tensors of one memory would be tied.
    let cases = cases.map(|(name, dtype, data, is_exact)| (name, dtype, data.clone(), is_exact));
    let store = memory();
    let views = cases.iter().map(|(name, dtype, data, _)| TensorView::new(*name, *dtype, &[300], data).unwrap());
    let state: Vec<TensorView<'_>> =
        views.map(|view| if view.name() == "velocity" { view.with_role("momentum", "w3") } else { view }).collect();
    store.writer_with(options(Precision::near())).await.unwrap().save(1, &state, &[], &Metadata::default()).await.unwrap();
    let loaded = read(&store.snapshot(1).await.unwrap()).await;
    for (name, _, data, is_exact) in &cases {
        assert_eq!(loaded[*name] == *data, *is_exact, "{name}");
    }
}

/// Returns the relative errors of all elements that are finite and not zero.
fn relative(before: &[f32], after: &[f32]) -> Vec<f64> {
    let pairs = before.iter().copied().zip(after.iter().copied());
    let counts = pairs.filter(|(x, _)| x.is_finite() && *x != 0.0);
    counts.map(|(x, y)| (f64::from(y) - f64::from(x)).abs() / f64::from(x).abs()).collect()
}

/// Checks that the report equals a comparison of the states.
async fn check_receipt(snapshot: &Snapshot, before: &State) {
    let after = read(snapshot).await;
    let errors = snapshot.rounding().await.unwrap();
    for (name, bytes) in before {
        let stored = &after[name];
        let Some(receipt) = errors.iter().find(|errors| errors.name == *name) else {
            assert!(stored == bytes, "{name} differs, and no receipt says so");
            continue;
        };
        let dtype = snapshot.tensor(name).unwrap().dtype;
        let before = numbers(dtype, bytes);
        let after = numbers(dtype, stored);
        let found = relative(&before, &after);
        let max = found.iter().copied().fold(0.0, f64::max);
        let total = receipt.total;
        assert!((total.max_relative - max).abs() <= 1e-9 * max, "{name}: {} told, {max} found", total.max_relative);
        let mean = found.iter().sum::<f64>() / found.len().max(1) as f64;
        assert!((total.mean_relative() - mean).abs() <= 1e-9 * mean, "{name}: mean {} told, {mean} found", total.mean_relative());
        let squares = before.iter().zip(&after).filter(|(x, _)| x.is_finite());
        let squares: f64 = squares.map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
        let squared = squares / before.len().max(1) as f64;
        assert!((total.mean_squared() - squared).abs() <= 1e-9 * squared, "{name}: {} told, {squared} found", total.mean_squared());
    }
}

fn state_of(step: u64) -> (Files, State) {
    let files = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
    let state = files.tensors().unwrap().iter().map(|view| (view.name().to_owned(), view.data().to_vec())).collect();
    (files, state)
}

async fn save(store: &Store, options: WriterOptions, steps: &[u64]) -> Vec<SavedSnapshot> {
    let mut writer = store.writer_with(options).await.unwrap();
    let mut saves = Vec::new();
    for step in steps {
        let files = state_of(*step).0;
        saves.push(writer.save(*step, &files.tensors().unwrap(), &[], &Metadata::default()).await.unwrap());
    }
    saves
}

#[tokio::test]
async fn profiles_store_real_states_in_few_bytes_with_small_errors() {
    // Bytes per parameter (of 14) of the base and of a later step, mean error of masters, and error of the update.
    for (profile, full, delta, master, update) in [(Precision::near(), 4.2, 3.3, 1e-5, 0.015), (Precision::compact(), 3.5, 2.5, 1e-4, 0.03)]
    {
        for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
            let store = memory();
            let saves = save(&store, WriterOptions { base_cache, ..options(profile.clone()) }, &[1000, 1001, 1010]).await;
            let each = |saved: &SavedSnapshot| 14.0 * saved.stored_bytes as f64 / saved.tensor_bytes as f64;
            assert!(each(&saves[0]) <= full, "{profile}: {} of 14 bytes", each(&saves[0]));
            assert!(each(&saves[1]) <= delta, "{profile}, a step later: {} of 14 bytes", each(&saves[1]));
            for step in [1000, 1001, 1010] {
                let snapshot = store.snapshot(step).await.unwrap();
                check_receipt(&snapshot, &state_of(step).1).await;
                let errors = snapshot.rounding().await.unwrap();
                let of = |role: &str| {
                    let all = errors.iter().filter(|tensor| tensor.role == role).map(|tensor| tensor.total);
                    all.fold(RoundingReport::default(), RoundingReport::and)
                };
                assert!(of("master").mean_relative() <= master, "{:?}", of("master"));
                assert!(of("exp_avg_sq").update_error().unwrap() <= update, "{:?}", of("exp_avg_sq"));
            }
            assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
        }
    }
}

#[tokio::test]
async fn every_setting_gives_what_its_receipt_says_and_stays_through_compaction() {
    let settings = [
        "lossless",
        "loguniform:1",
        "loguniform:128",
        "remainder:0",
        "remainder:8",
        "remainder:16",
        "cluster:16:normal:linear",
        "cluster:16:normal:dynamic",
        "cluster:16:sample:linear",
        "cluster:3:sample:dynamic",
        "kmeans:16:pruned=50:protected=10:absolute",
        "kmeans:256",
        "blockwise8",
    ];
    for setting in settings {
        let store = memory();
        let saves = save(&store, options(one(setting.parse().unwrap())), &[1000, 1001, 1010]).await;
        let lossless = ["lossless", "remainder:16"].contains(&setting);
        assert_eq!(saves.iter().all(|saved| saved.rounding.is_none()), lossless, "{setting}");
        let mut before = Vec::new();
        for step in [1000, 1001, 1010] {
            let snapshot = store.snapshot(step).await.unwrap();
            check_receipt(&snapshot, &state_of(step).1).await;
            before.push(read(&snapshot).await);
        }
        let compacted = maintain::compact(&store, 1010, &CompactOptions::default()).await.unwrap();
        let snapshot = store.snapshot(1010).await.unwrap();
        assert_eq!(snapshot.inspect().chain().len(), 1);
        assert!(read(&snapshot).await == before[2], "{setting}: compaction changes nothing");
        check_receipt(&snapshot, &state_of(1010).1).await;
        let delta = saves[2].stored_bytes;
        let base = saves[0].stored_bytes;
        assert!(compacted.stored_bytes < base + base / 10, "{setting}: {} of {base}, {delta}", compacted.stored_bytes);
        // Decoded values are stored again without a further loss.
        let again = memory();
        let files = state_of(1010).0;
        let rounded: Vec<TensorView<'_>> = files
            .tensors()
            .unwrap()
            .iter()
            .map(|view| TensorView::new(view.name().to_owned(), view.dtype(), view.shape(), &before[2][view.name()]).unwrap())
            .collect();
        let mut writer = again.writer_with(options(one(setting.parse().unwrap()))).await.unwrap();
        writer.save(1, &rounded, &[], &Metadata::default()).await.unwrap();
        assert!(read(&again.snapshot(1).await.unwrap()).await == before[2], "{setting}: a second rounding changes nothing");
    }
}

/// Generates numbers of adversaries and of optimizers.
fn hostile() -> impl Strategy<Value = Vec<f32>> {
    let number = prop_oneof![
        4 => any::<u32>().prop_map(f32::from_bits),
        4 => (-30i32..30, -1.0f32..1.0).prop_map(|(exponent, x)| x * 10f32.powi(exponent)),
        1 => prop_oneof![Just(0.0f32), Just(-0.0), Just(f32::NAN), Just(f32::INFINITY), Just(f32::MAX), Just(f32::MIN_POSITIVE), Just(1e-45)],
    ];
    let varied = prop::collection::vec(number.clone(), 0..700);
    let equal = (number.clone(), 1usize..600).prop_map(|(x, count)| vec![x; count]);
    let finite = prop::collection::vec((-38i32..38, -1.0f32..1.0).prop_map(|(e, x)| x * 10f32.powi(e)), 1..700);
    let one_cluster = (number, prop::collection::vec(1.0f32..1.0001, 1..600)).prop_map(|(odd, mut all)| {
        all[0] = odd;
        all
    });
    prop_oneof![varied, equal, finite, one_cluster]
}

fn setting() -> impl Strategy<Value = Setting> {
    let text = prop_oneof![
        (0u32..8).prop_map(|log2| format!("loguniform:{}", 1 << log2)),
        (0u32..17).prop_map(|bits| format!("remainder:{bits}")),
        (1u32..17, any::<bool>(), any::<bool>()).prop_map(|(m, normal, linear)| {
            format!("cluster:{m}:{}:{}", if normal { "normal" } else { "sample" }, if linear { "linear" } else { "dynamic" })
        }),
        (2u32..257, 0u32..300, 0u32..300)
            .prop_map(|(levels, pruned, protected)| format!("kmeans:{levels}:pruned={pruned}:protected={protected}")),
        Just("blockwise8".to_owned()),
    ];
    text.prop_map(|text| text.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn bounds_hold_and_receipts_are_right_whatever_the_numbers(numbers in hostile(), setting in setting(), bound in prop::option::of(0.0001f64..0.5)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let precision = Precision::default().with("*", setting, bound).unwrap();
            let data = bytes(&numbers);
            let tensors = [TensorView::new("optim.exp_avg.w", Dtype::F32, &[numbers.len() as u64], &data).unwrap()];
            let store = memory();
            let mut writer = store.writer_with(options(precision)).await.unwrap();
            for step in 0..2 {
                writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
            }
            let snapshot = store.snapshot(1).await.unwrap();
            check_receipt(&snapshot, &State::from([("optim.exp_avg.w".to_owned(), data.clone())])).await;
            let stored = read(&snapshot).await["optim.exp_avg.w"].clone();
            for (x, y) in numbers.iter().zip(floats(&stored)) {
                assert!(x.is_finite() || x.to_bits() == y.to_bits(), "{setting}: {x} became {y}");
            }
            let max = relative(&floats(&data), &floats(&stored)).into_iter().fold(0.0, f64::max);
            let promised = match setting {
                Setting::LogUniform { steps } => {
                    let ratio = (1.0 / f64::from(steps)).exp2();
                    (ratio - 1.0) / (ratio + 1.0) + 1e-6
                }
                _ => f64::INFINITY,
            };
            assert!(max <= bound.unwrap_or(promised).min(promised), "{setting}: {max}, promised {promised}, bound {bound:?}");
        });
    }
}

/// A run whose state drifts a little at each step.
fn drift(step: u64) -> [Vec<u8>; 2] {
    let of = |scale: f32, decay: f32| -> Vec<f32> {
        let at = |i: u64| {
            scale * ((i * 37 % 101) as f32 - 50.0) * (1.0 + (i as f32 * 0.1 + step as f32 * 0.02).sin() * 0.2) * decay.powi(step as i32)
        };
        (0..4096).map(at).collect()
    };
    let first = of(1e-4, 0.999);
    let second: Vec<f32> = of(1e-4, 0.9995).iter().map(|x| x * x).collect();
    [bytes(&first), bytes(&second)]
}

#[tokio::test]
async fn errors_do_not_grow_along_a_chain() {
    let steps = if is_thorough() { 50 } else { 16 };
    for setting in ["loguniform:16", "cluster", "kmeans:64", "blockwise8"] {
        let store = memory();
        let mut writer = store.writer_with(options(one(setting.parse().unwrap()))).await.unwrap();
        for step in 1..=steps {
            let [first, second] = drift(step);
            let tensors = [
                TensorView::new("optim.exp_avg.w", Dtype::F32, &[64, 64], &first).unwrap(),
                TensorView::new("optim.exp_avg_sq.w", Dtype::F32, &[64, 64], &second).unwrap(),
            ];
            writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
        }
        let start = store.snapshot(1).await.unwrap();
        let end = store.snapshot(steps).await.unwrap();
        assert_eq!(end.inspect().chain().len() as u64, steps);
        for (first, last) in start.rounding().await.unwrap().iter().zip(end.rounding().await.unwrap()) {
            let begun = first.total.mean_relative();
            let ended = last.total.mean_relative();
            assert!(ended <= begun * 1.25, "{setting}, {}: {begun} at step 1, {ended} at step {steps}", first.name);
            if setting == "loguniform:16" {
                assert!(first.total.max_relative < 0.0217 && last.total.max_relative < 0.0217);
            }
        }
        let [first, second] = drift(steps);
        let before = State::from([("optim.exp_avg.w".to_owned(), first), ("optim.exp_avg_sq.w".to_owned(), second)]);
        check_receipt(&end, &before).await;
    }
}

#[tokio::test]
async fn rules_choose_by_role_and_name_and_the_last_counts() {
    let precision = Precision::parse(["compact", "*attn_proj.bias=lossless", "exp_avg=cluster<=0.001"]).unwrap();
    let store = memory();
    save(&store, options(precision), &[1000]).await;
    let snapshot = store.snapshot(1000).await.unwrap();
    let errors = snapshot.rounding().await.unwrap();
    assert!(!errors.is_empty());
    for tensor in &errors {
        assert!(!tensor.name.ends_with("attn_proj.bias") && tensor.role != "model", "{}", tensor.name);
        // The clusters cannot keep that bound, so those chunks are stored without loss.
        assert!(tensor.role != "exp_avg" || tensor.total.max_relative <= 0.001, "{}", tensor.name);
    }
    let refused = snapshot.check_rounding(1e-6).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.to_string().contains("optimizer.exp_avg_sq"), "{refused}");
    snapshot.check_rounding(0.05).await.unwrap();
    let rule = Precision::parse(["a=b*=kmeans:16:pruned=50:protected=5"]).unwrap();
    assert_ne!(rule.of("model", "a=b.weight").setting, Setting::Lossless, "an `=` in names and in settings");
    for wrong in [
        "nearly",
        "exp_avg=loguniform:3",
        "exp_avg=remainder:17",
        "[=blockwise8",
        "x=cluster:17",
        "x=cluster<=-1",
        "x=kmeans:1",
        "x=lossless:1",
    ] {
        let error = Precision::parse([wrong]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{wrong}: {error}");
    }
}

/// Tied tensors are stored once, so a rule for one name would round the other.
#[tokio::test]
async fn tied_tensors_need_the_same_precision() {
    let numbers: Vec<u8> = bytes(&(0..1000).map(|i| (i as f32).sin()).collect::<Vec<_>>());
    let ids = [7; 64];
    let tensor = |name, data| TensorView::new(name, Dtype::F32, &[1000], data).unwrap().with_role("model", name);
    let id = |name| TensorView::new(name, Dtype::I64, &[8], &ids).unwrap().with_role("model", name);
    let state = [tensor("a.w", &numbers), tensor("b.w", &numbers), id("a.ids"), id("b.ids")];
    for (rules, is_refused) in [
        (vec!["a.*=kmeans:16"], true),
        (vec!["b.*=kmeans:16"], true),
        (vec!["model=kmeans:16", "a.*=lossless"], true),
        (vec!["model=kmeans:16", "a.*=kmeans:16<=0.5"], true),
        (vec!["model=kmeans:16"], false),
        (vec!["model=kmeans:16|blockwise8"], false),
        (vec!["model=kmeans:16|blockwise8", "b.w=kmeans:16"], true),
        (vec!["near", "a.w=lossless"], false),
        (vec!["*.w=kmeans:16", "a.ids=lossless"], false),
    ] {
        let store = memory();
        let mut writer = store.writer_with(options(Precision::parse(rules.iter().copied()).unwrap())).await.unwrap();
        let saved = writer.save(1, &state, &[], &Metadata::default()).await;
        assert_eq!(saved.is_err(), is_refused, "{rules:?}: {saved:?}");
        if let Err(error) = saved {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains("`a.w`") && error.to_string().contains("b.w"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_receipt_is_the_writers_own() {
    let store = memory();
    let mut writer = store.writer(Policy::Full).await.unwrap();
    let error = writer.save(1, &[], &[Blob::new("tc.errors", &b"all is well"[..])], &Metadata::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

/// Unchanged rows keep their values, rounded or not. Row hints work, and a wrong hint is detected.
#[tokio::test]
async fn changed_rows_go_with_rounding() {
    let store = memory();
    let precision = Precision::parse(["near"]).unwrap();
    let codecs = CodecRules::parse(["*=tc.rows"]).unwrap();
    let options = WriterOptions { base_cache: BaseKeeping::None, codecs, ..options(precision) };
    let mut writer = store.writer_with(options).await.unwrap();
    let mut numbers: Vec<f32> = (0..64 * 256).map(|i| (i as f32 * 0.7).sin() * 1e-3).collect();
    let before = bytes(&numbers);
    let view = |data| TensorView::new("optim.exp_avg.embedding", Dtype::F32, &[256, 64], data).unwrap();
    writer.save(1, &[view(&before)], &[], &Metadata::default()).await.unwrap();
    for x in &mut numbers[64 * 3..64 * 4] {
        *x *= 1.5;
    }
    let after = bytes(&numbers);
    let saved = writer.save(2, &[view(&after).with_changed_rows(&[3]).unwrap()], &[], &Metadata::default()).await.unwrap();
    assert!(saved.chunks.contains_key("tc.rows"), "{:?}", saved.chunks);
    let snapshot = store.snapshot(2).await.unwrap();
    check_receipt(&snapshot, &State::from([("optim.exp_avg.embedding".to_owned(), after)])).await;
}

#[tokio::test]
async fn ranks_write_receipts_of_their_shards() {
    let store = memory();
    let numbers: Vec<f32> = (1..=4096).map(|i| 1.0 / i as f32).collect();
    let whole = bytes(&numbers);
    let mut coordinator = store.writer_with(options(Precision::near())).await.unwrap();
    let mut receipts = Vec::new();
    for rank in 0..2u32 {
        let half = &whole[rank as usize * 8192..(rank as usize + 1) * 8192];
        let rect = Rect { offset: vec![u64::from(rank) * 32, 0], shape: vec![32, 64] };
        let tensors = [TensorView::shard("optim.exp_avg.w", Dtype::F32, &[64, 64], rect, half).unwrap()];
        let mut writer = store.rank_writer(Rank { rank, world: 2, attempt: 0 }, options(Precision::near())).await.unwrap();
        receipts.push(writer.save(7, &tensors, &[]).await.unwrap());
    }
    coordinator.commit_receipts(7, &receipts, &Metadata::default()).await.unwrap();
    let snapshot = store.snapshot(7).await.unwrap();
    let errors = snapshot.rounding().await.unwrap();
    assert_eq!(errors[0].chunks.iter().map(|rounding| (rounding.offset[0], rounding.chunk)).collect::<Vec<_>>(), [(0, 0), (32, 0)]);
    check_receipt(&snapshot, &State::from([("optim.exp_avg.w".to_owned(), whole)])).await;
}
