//! Rounding by sensitivity: levels where gradients are large, levels of bf16, and a search over a whole state.

use std::sync::Arc;

use crate::common::{data, wrap};
use object_store::memory::InMemory;
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::precision::{Setting, StateBudget, search_state};
use tensorcask::{Dtype, ErrorKind, Latest, Metadata, Policy, Precision, Slice, Store, TensorView, WriterOptions};

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

fn options(words: &[&str]) -> WriterOptions {
    WriterOptions { precision: Precision::parse(words.iter().copied()).unwrap(), policy: Policy::Consecutive, ..WriterOptions::default() }
}

fn bytes(numbers: impl IntoIterator<Item = f32>) -> Vec<u8> {
    numbers.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|unit| f32::from_le_bytes(unit.try_into().unwrap())).collect()
}

fn bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|unit| f32::from_bits(u32::from(u16::from_le_bytes(unit.try_into().unwrap())) << 16)).collect()
}

async fn stored(store: &Store, name: &str) -> Vec<u8> {
    store.snapshot(Latest).await.unwrap().read(name, &Slice::all()).await.unwrap().data
}

const COUNT: u64 = 20_000;

/// Weights of which those between 0 and 0.5 have large gradients, in no order.
fn weights() -> (Vec<f32>, Vec<f32>) {
    let weights: Vec<f32> = (0..COUNT).map(|i| ((i * 7919 % COUNT) as f32 / COUNT as f32 - 0.5) * 2.0).collect();
    let gradients = weights.iter().map(|w| if (0.0..0.5).contains(w) { 1.0 } else { 1e-3 }).collect();
    (weights, gradients)
}

/// Mean squared error of the weights with large gradients.
fn error_that_counts(weights: &[f32], gradients: &[f32], after: &[u8]) -> f64 {
    let errors = weights.iter().zip(floats(after)).zip(gradients).filter(|(_, gradient)| **gradient == 1.0);
    let errors: Vec<f64> = errors.map(|((x, y), _)| (f64::from(*x) - f64::from(y)).powi(2)).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

#[tokio::test]
async fn levels_lie_where_gradients_are_large() {
    let (weights, gradients) = weights();
    let data = bytes(weights.iter().copied());
    let gradient = bytes(gradients.iter().copied());
    let second = bytes(gradients.iter().map(|g| g * g));
    let half: Vec<u8> = gradient.chunks_exact(4).flat_map(|unit| [unit[2], unit[3]]).collect();
    let view = TensorView::new("model.w", Dtype::F32, &[COUNT], &data).unwrap();
    let moment = TensorView::new("optim.exp_avg_sq.w", Dtype::F32, &[COUNT], &second).unwrap();
    let states = [
        ("absolute", vec![view.clone()]),
        ("sensitive", vec![view.clone().with_gradient(Dtype::F32, &gradient).unwrap()]),
        ("sensitive", vec![view.clone().with_gradient(Dtype::Bf16, &half).unwrap()]),
        ("sensitive", vec![view.clone(), moment]),
        ("sensitive", vec![view]),
    ];
    let mut errors = Vec::new();
    for (word, state) in states {
        let store = memory();
        let mut writer = store.writer_with(options(&[&format!("model=kmeans:16:protected=0:{word}")])).await.unwrap();
        let saved = writer.save(1, &state, &[], &Metadata::default()).await.unwrap();
        assert_eq!(store.snapshot(Latest).await.unwrap().tensors().len(), state.len(), "gradients are not stored");
        assert!(saved.stored_bytes < 100_000 + 4 * COUNT * state.len().saturating_sub(1) as u64);
        errors.push(error_that_counts(&weights, &gradients, &stored(&store, "model.w").await));
    }
    let [absolute, gradient, half, moment, neither] = errors.try_into().unwrap();
    assert!(gradient < absolute / 4.0, "{gradient} with gradients, {absolute} without");
    assert!((half / gradient - 1.0).abs() < 0.1 && (moment / gradient - 1.0).abs() < 0.1, "{gradient}, {half}, {moment}");
    assert!(neither > gradient * 2.0);
}

#[tokio::test]
async fn sensitive_numbers_are_protected_and_others_pruned() {
    let (weights, gradients) = weights();
    let data = bytes(weights.iter().copied());
    let gradient = bytes(gradients.iter().copied());
    let view = TensorView::new("model.w", Dtype::F32, &[COUNT], &data).unwrap().with_gradient(Dtype::F32, &gradient).unwrap();
    let store = memory();
    let mut writer = store.writer_with(options(&["model=kmeans:16:pruned=500:protected=100:sensitive"])).await.unwrap();
    writer.save(1, &[view], &[], &Metadata::default()).await.unwrap();
    let after = floats(&stored(&store, "model.w").await);
    let of =
        |wanted: f32| weights.iter().zip(&after).zip(&gradients).filter(move |(_, gradient)| **gradient == wanted).map(|(pair, _)| pair);
    assert!(of(1.0).all(|(before, after)| *before >= 0.4 && before == after || *before < 0.41), "the greatest products are exact");
    assert!(of(1e-3).filter(|(_, after)| **after == 0.0).count() > COUNT as usize * 48 / 100, "small gradients are pruned");
}

#[tokio::test]
async fn a_gradient_has_an_element_for_each_of_the_tensor() {
    let data = bytes([1.0; 12]);
    let view = TensorView::new("w", Dtype::F32, &[3, 4], &data).unwrap();
    for (dtype, gradient) in [(Dtype::F32, &data[..44]), (Dtype::Bf16, &data[..]), (Dtype::F64, &data[..]), (Dtype::I32, &data[..])] {
        let error = view.clone().with_gradient(dtype, gradient).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("gradient"), "{error}");
    }
}

#[tokio::test]
async fn weights_of_bf16_take_levels() {
    let state = |step: u64| -> Vec<u8> {
        (0..300_000u64)
            .flat_map(|i| (((i * 2_654_435_761 % 65_521) as f32 / 65_521.0 - 0.5 + step as f32 * 1e-4).to_le_bytes())[2..4].to_vec())
            .collect()
    };
    let store = memory();
    let mut writer = store.writer_with(options(&["model=kmeans:16"])).await.unwrap();
    let mut sizes = Vec::new();
    for step in [1, 2] {
        let data = state(step);
        let view = TensorView::new("model.w", Dtype::Bf16, &[1000, 300], &data).unwrap();
        let saved = writer.save(step, &[view], &[], &Metadata::default()).await.unwrap();
        sizes.push(saved.stored_bytes);
        let snapshot = store.snapshot(Latest).await.unwrap();
        let after = snapshot.read("model.w", &Slice::all()).await.unwrap().data;
        let before = bf16(&data);
        let after = bf16(&after);
        for chunk in 0..2 {
            let range = chunk * 262_000..((chunk + 1) * 262_000).min(after.len());
            let mut distinct: Vec<u32> = after[range.clone()].iter().map(|x| x.to_bits()).collect();
            let few = {
                distinct.sort_unstable();
                distinct.dedup();
                distinct.len()
            };
            assert!(few < range.len() / 100, "{few} values in chunk {chunk}");
        }
        let errors = snapshot.rounding().await.unwrap();
        let report = &errors.iter().find(|errors| errors.name == "model.w").unwrap().total;
        let squares: f64 = before.iter().zip(&after).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
        assert!((report.mean_squared() * before.len() as f64 / squares - 1.0).abs() < 1e-6);
        assert!(report.mean_relative() > 1e-3);
    }
    assert!(sizes[0] < 600_000 / 3 && sizes[1] < sizes[0] / 2, "{sizes:?}");
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn a_state_search_keeps_its_budget() {
    let files = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let state = files.tensors().unwrap();
    let mut sizes = Vec::new();
    for (update, weights) in [(0.01, 1e-5), (0.04, 1e-3), (0.3, 0.1)] {
        let found = search_state(&state, StateBudget { update, weights }).unwrap();
        assert!(found.errors.update <= update && found.errors.weights <= weights, "{:?}", found.errors);
        for (name, setting) in &found.settings {
            let tensor = state.iter().find(|tensor| tensor.name() == name).unwrap();
            assert_eq!(found.precision.of(tensor.role(), name).setting, *setting, "{name}");
        }
        assert!(state.iter().all(|tensor| tensor.dtype() == Dtype::F32 || found.precision.of(tensor.role(), tensor.name()).setting == Setting::Lossless));
        let store = memory();
        let options = WriterOptions { precision: found.precision, ..options(&[]) };
        let saved = store.writer_with(options).await.unwrap().save(1000, &state, &[], &Metadata::default()).await.unwrap();
        // The sample stands for the rest.
        let measured = saved.rounding.unwrap().update_error().unwrap();
        assert!(measured <= update * 1.1, "{measured} of {update}");
        sizes.push(saved.stored_bytes);
    }
    assert!(sizes.windows(2).all(|pair| pair[1] < pair[0]), "{sizes:?}");
    for budget in [StateBudget { update: f64::NAN, weights: 0.0 }, StateBudget { update: 0.0, weights: -1.0 }] {
        assert_eq!(search_state(&state, budget).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    let lossless = search_state(&state, StateBudget { update: 0.0, weights: 0.0 }).unwrap();
    assert!(lossless.errors == StateBudget { update: 0.0, weights: 0.0 });
}

#[tokio::test]
async fn levels_stay_while_numbers_change_little_and_do_not_depend_on_the_base() {
    let mut weights: Vec<f32> = (0..100_000u64).map(|i| ((i * 7919 % 99_991) as f32 / 99_991.0 - 0.5) * 0.1).collect();
    let store = memory();
    let mut sizes = Vec::new();
    let mut writer = store.writer_with(options(&["model=kmeans:16:absolute"])).await.unwrap();
    for step in 0..12u64 {
        // A hundredth of the weights move. At step 11, all of them are twice as large.
        for weight in weights.iter_mut().skip(step as usize).step_by(100) {
            *weight += 1e-3;
        }
        if step == 11 {
            weights.iter_mut().for_each(|weight| *weight *= 2.0);
        }
        let data = bytes(weights.iter().copied());
        let view = TensorView::new("model.w", Dtype::F32, &[1000, 100], &data).unwrap();
        let saved = writer.save(step, std::slice::from_ref(&view), &[], &Metadata::default()).await.unwrap();
        sizes.push(saved.stored_bytes);
        let alone = memory();
        let mut first = alone.writer_with(options(&["model=kmeans:16:absolute"])).await.unwrap();
        first.save(step, &[view], &[], &Metadata::default()).await.unwrap();
        assert!(stored(&store, "model.w").await == stored(&alone, "model.w").await, "step {step}");
    }
    assert!(sizes[1..].iter().all(|size| size * 4 < sizes[0]), "{sizes:?}");
}

#[tokio::test]
async fn a_tensor_without_gradients_does_not_decide_for_those_with_them() {
    let count = 50_000u64;
    let numbers = |scale: f32, seed: u64| bytes((0..count).map(move |i| ((i * (7919 + seed) % 49_999) as f32 / 49_999.0 - 0.5) * scale));
    let weights = numbers(0.04, 0);
    let first = numbers(1e-4, 2);
    let second = bytes((0..count).map(|i| 1e-8 + i as f32 * 1e-13));
    let variances = bytes((0..1000).map(|i| 1.0 + i as f32 * 1e-3));
    let tensors = [
        ("model.w", &weights, count),
        ("optim.exp_avg.w", &first, count),
        ("optim.exp_avg_sq.w", &second, count),
        ("model.running_var", &variances, 1000),
    ];
    let state: Vec<TensorView<'_>> =
        tensors.iter().map(|(name, data, count)| TensorView::new(*name, Dtype::F32, &[*count], data).unwrap()).collect();
    let found = search_state(&state, StateBudget { update: 0.02, weights: 1e-3 }).unwrap();
    let store = memory();
    let options = WriterOptions { precision: found.precision, ..options(&[]) };
    store.writer_with(options).await.unwrap().save(1, &state, &[], &Metadata::default()).await.unwrap();
    for (name, data, _) in [tensors[0], tensors[3]] {
        let pairs: Vec<(f32, f32)> = floats(data).into_iter().zip(floats(&stored(&store, name).await)).collect();
        let [error, size] = pairs
            .iter()
            .fold([0.0; 2], |[error, size], (x, y)| [error + (f64::from(*x) - f64::from(*y)).powi(2), size + f64::from(*x).powi(2)]);
        assert!((error / size).sqrt() <= 2e-3, "{name}: {}", (error / size).sqrt());
    }
    let shard = TensorView::shard("model.w", Dtype::F32, &[2 * count], tensorcask::Rect { offset: vec![0], shape: vec![count] }, &weights);
    assert_eq!(search_state(&[shard.unwrap()], StateBudget { update: 0.1, weights: 0.1 }).unwrap_err().kind(), ErrorKind::Unsupported);
}

/// Mean squared error of a tensor that was rounded, relative to its mean square.
async fn error_with(word: &str, numbers: &[f32]) -> f64 {
    let data = bytes(numbers.iter().copied());
    let view = TensorView::new("model.w", Dtype::F32, &[numbers.len() as u64], &data).unwrap();
    let store = memory();
    store.writer_with(options(&[word])).await.unwrap().save(1, &[view], &[], &Metadata::default()).await.unwrap();
    let after = floats(&stored(&store, "model.w").await);
    let errors: f64 = numbers.iter().zip(&after).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
    errors / numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()
}

#[tokio::test]
async fn levels_do_not_crowd_at_zero_where_numbers_cancel() {
    // Every run of sorted numbers around zero has the mean zero.
    let half = (1..40_000u32).map(|i| (i as f32 / 40_000.0).powi(2) * 0.1);
    let symmetric: Vec<f32> = half.flat_map(|x| [x, -x]).collect();
    let shifted: Vec<f32> = symmetric.iter().map(|x| if *x > 0.0 { x * 1.000_1 } else { *x }).collect();
    let errors = [error_with("model=kmeans:16:protected=0", &symmetric).await, error_with("model=kmeans:16:protected=0", &shifted).await];
    assert!(errors.iter().all(|error| *error < 0.1), "{errors:?}");
}

#[tokio::test]
async fn tight_clusters_keep_their_levels() {
    let numbers: Vec<f32> = (0..60_000u32).map(|i| (if i % 2 == 0 { 0.3 } else { 1.0 }) + (i % 997) as f32 * 1e-6).collect();
    let error = error_with("model=kmeans:2:protected=0:absolute", &numbers).await;
    // Evenly spread over a thousandth: a twelfth of its square, and a twentieth more.
    let exact = 1e-6 / 12.0 / ((0.09 + 1.0) / 2.0);
    assert!(error < exact * 1.1, "{error}, {exact} with the best levels");
}

#[tokio::test]
async fn several_ranks_cannot_round_by_sensitivity() {
    let store = memory();
    store.writer(Policy::Full).await.unwrap();
    for (words, is_refused) in
        [("model=kmeans:16:sensitive", true), ("exp_avg=kmeans:4|kmeans:16:sensitive", true), ("model=kmeans:16", false)]
    {
        let rank = tensorcask::Rank { rank: 0, world: 2, attempt: 0 };
        let writer = store.rank_writer(rank, options(&[words])).await;
        assert_eq!(writer.err().map(|error| error.kind()), is_refused.then_some(ErrorKind::Unsupported), "{words}");
        let alone = tensorcask::Rank { world: 1, ..rank };
        assert!(store.rank_writer(alone, options(&[words])).await.is_ok());
    }
}
