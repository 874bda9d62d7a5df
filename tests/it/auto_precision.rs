//! The precision `auto`: profiles follow the stage of the training, bounds are kept, and a new process decides alike.

use std::sync::Arc;

use object_store::memory::InMemory;
use tensorcask::maintain::{self, CompactOptions};
use tensorcask::precision::{PrecisionReason, Profile};
use tensorcask::session::HostWriter;
use tensorcask::{
    Dtype, ErrorKind, ExistingStep, Latest, Metadata, Policy, Precision, PrecisionDecision, Rank, SavedSnapshot, Slice, Snapshot, Store,
    TensorView, Writer, WriterOptions,
};

use crate::common::wrap;

const ROWS: usize = 96;
const COUNT: usize = ROWS * 64;

/// A training with Adam's moments, whose weights move by a random walk of equal steps.
#[derive(Clone)]
struct Training {
    random: u64,
    masters: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Training {
    fn new() -> Self {
        let mut training = Self { random: 1, masters: vec![0.0; COUNT], first: vec![0.0; COUNT], second: vec![0.0; COUNT] };
        training.walk(0.02);
        training
    }

    fn number(&mut self) -> f32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Moves each weight by at most `distance`.
    fn walk(&mut self, distance: f32) {
        for at in 0..COUNT {
            let gradient = self.number();
            self.masters[at] += distance * gradient;
            self.first[at] = 0.9 * self.first[at] + 0.1 * gradient;
            self.second[at] = 0.99 * self.second[at] + 0.01 * gradient * gradient;
        }
    }

    fn state(&self) -> Vec<(&'static str, Dtype, Vec<u8>)> {
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let model = self.masters.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        vec![
            ("model.w", Dtype::Bf16, model),
            ("optim.master.w", Dtype::F32, bytes(&self.masters)),
            ("optim.exp_avg.w", Dtype::F32, bytes(&self.first)),
            ("optim.exp_avg_sq.w", Dtype::F32, bytes(&self.second)),
        ]
    }
}

fn views<'a>(state: &'a [(&'static str, Dtype, Vec<u8>)]) -> Vec<TensorView<'a>> {
    state.iter().map(|(name, dtype, data)| TensorView::new(*name, *dtype, &[ROWS as u64, 64], data).unwrap()).collect()
}

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

fn auto() -> WriterOptions {
    WriterOptions { precision: Precision::auto(), ..WriterOptions::default() }
}

async fn writer(store: &Store, options: WriterOptions) -> Writer {
    store.writer_with(options).await.unwrap()
}

async fn save(writer: &mut Writer, step: u64, training: &Training) -> SavedSnapshot {
    writer.save(step, &views(&training.state()), &[], &Metadata::default()).await.unwrap()
}

fn decision(saved: &SavedSnapshot) -> (Profile, PrecisionReason) {
    let decision = saved.precision.as_ref().unwrap();
    (decision.profile, decision.reason)
}

/// Distances of the saves: faster and faster, steady, and faster again.
const COURSE: [f32; 16] = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0];

#[tokio::test]
async fn decisions_follow_the_training_and_are_those_of_a_new_process() {
    let store = memory();
    let other = memory();
    let mut kept = writer(&store, auto()).await;
    let mut training = Training::new();
    let mut found = Vec::new();
    for (distance, step) in COURSE.into_iter().zip(1u64..) {
        training.walk(1e-4 * distance);
        let saved = save(&mut kept, step * 10, &training).await;
        let again = save(&mut writer(&other, auto()).await, step * 10, &training).await;
        assert_eq!(saved.precision, again.precision, "step {step}: a new writer decides as the old one");
        let ours = saved.stored_bytes;
        let fresh = again.stored_bytes;
        assert!(ours * 20 <= fresh * 21, "step {step}: {ours} bytes, {fresh} without codecs that were chosen for another profile");
        let snapshot = other.snapshot(Latest).await.unwrap();
        assert_eq!(PrecisionDecision::of(snapshot.user()), saved.precision, "the manifest records the decision");
        check_bounds(&snapshot, &training, saved.precision.as_ref().unwrap()).await;
        found.push(decision(&saved));
    }
    use {PrecisionReason as Reason, Profile::*};
    let expected = [
        // Warm-up: nothing to compare with, three saves of waiting, and rises until the fourth save.
        (Lossless, Reason::First),
        (Lossless, Reason::Waiting),
        (Lossless, Reason::Waiting),
        (Near, Reason::Rising),
        // The rises took three saves, so the third save after them is the first that counts as stable.
        (Near, Reason::Rising),
        (Near, Reason::Rising),
        (Near, Reason::Waiting),
        (Near, Reason::Waiting),
        (Compact, Reason::Stable),
        (Compact, Reason::Stable),
        (Compact, Reason::Stable),
        // Twice as fast.
        (Near, Reason::Rising),
        (Near, Reason::Waiting),
        (Near, Reason::Waiting),
        (Compact, Reason::Stable),
        (Compact, Reason::Stable),
    ];
    assert_eq!(found, expected);
}

/// Compares what was stored with the training: errors are within the bounds of the profile, and the recorded measurements are
/// those of the state.
async fn check_bounds(snapshot: &Snapshot, training: &Training, decision: &PrecisionDecision) {
    let read = async |name: &str| {
        let data = snapshot.read(name, &Slice::all()).await.unwrap().data;
        data.chunks_exact(4).map(|unit| f32::from_le_bytes(unit.try_into().unwrap())).collect::<Vec<f32>>()
    };
    let (master_bound, moment_bound) = match decision.profile {
        Profile::Lossless => (0.0, 0.0),
        Profile::Near => (2f64.powi(-16), 0.022),
        Profile::Compact => (2f64.powi(-12), 0.0434),
    };
    let states = [
        ("master", &training.masters, master_bound),
        ("exp_avg", &training.first, moment_bound),
        ("exp_avg_sq", &training.second, moment_bound),
    ];
    for (role, before, bound) in states {
        let after = read(&format!("optim.{role}.w")).await;
        for (x, y) in before.iter().zip(after) {
            assert!(f64::from((y - x).abs()) <= bound * f64::from(x.abs()), "{role}: {x} became {y} by {}", decision.profile.name());
        }
    }
    let Some(measured) = decision.measured else { return };
    let errors = match decision.profile {
        Profile::Lossless => return assert!(snapshot.rounding().await.unwrap().is_empty()),
        Profile::Near => measured.near,
        Profile::Compact => measured.compact,
    };
    let squares: f64 = training.masters.iter().map(|x| f64::from(*x).powi(2)).sum();
    let reports = snapshot.rounding().await.unwrap();
    let report = |role: &str| reports.iter().find(|report| report.role == role).unwrap().total;
    // The state is smaller than a sample, so only the distance is an estimate.
    let exact = (report("master").squares / squares).sqrt() / measured.change;
    assert!((errors.weights / exact - 1.0).abs() < 1e-3, "{} recorded, {exact} found", errors.weights);
    let update = report("exp_avg_sq").update_error().unwrap();
    assert!((errors.update.unwrap() / update - 1.0).abs() < 1e-3, "{errors:?}, {update} found");
    assert!(errors.weights <= 0.1 * 1.25 && update <= 0.04 * 1.25, "{errors:?}");
}

#[tokio::test]
async fn a_training_that_comes_to_rest_is_saved_without_loss() {
    let store = memory();
    let mut training = Training::new();
    let mut profiles = Vec::new();
    for step in 1..30u64 {
        training.walk(if step < 12 { 1e-3 } else { 1e-3 * 0.5f32.powi(step as i32 - 12) });
        profiles.push(save(&mut writer(&store, auto()).await, step, &training).await.precision.unwrap());
    }
    assert_eq!(profiles[11].profile, Profile::Compact);
    assert!(profiles[11..].is_sorted_by(|a, b| a.profile >= b.profile), "{profiles:#?}");
    assert!(profiles[11..].iter().any(|decision| decision.profile == Profile::Near));
    let last = profiles.last().unwrap();
    assert_eq!((last.profile, last.reason), (Profile::Lossless, PrecisionReason::WeightsError));
}

/// A training that is saved by `compact`, and its next step.
async fn stable(store: &Store, options: &WriterOptions) -> (Training, u64) {
    let mut training = Training::new();
    for step in 1..9 {
        training.walk(1e-3);
        save(&mut writer(store, options.clone()).await, step, &training).await;
    }
    (training, 9)
}

#[tokio::test]
async fn a_release_is_saved_without_loss_and_the_next_save_decides_as_before() {
    let store = memory();
    let (mut training, step) = stable(&store, &auto()).await;
    training.walk(1e-3);
    assert_eq!(decision(&save(&mut writer(&store, auto()).await, step, &training).await).0, Profile::Compact);
    let release = WriterOptions { precision: Precision::lossless(), existing_step: ExistingStep::Replace, ..WriterOptions::default() };
    let saved = save(&mut writer(&store, release).await, step, &training).await;
    assert_eq!((saved.precision, saved.rounding), (None, None));
    let snapshot = store.snapshot(step).await.unwrap();
    for (name, _, data) in training.state() {
        assert!(snapshot.read(name, &Slice::all()).await.unwrap().data == data, "{name} is exact");
    }
    training.walk(1e-3);
    let next = save(&mut writer(&store, auto()).await, step + 1, &training).await;
    assert_eq!(decision(&next), (Profile::Compact, PrecisionReason::Stable));
    assert_eq!(next.precision.unwrap().measured.unwrap().since_step, step - 1, "the release records no decision");
}

#[tokio::test]
async fn rules_after_auto_hold_whatever_it_chooses() {
    let store = memory();
    let options = WriterOptions { precision: Precision::parse(["auto", "exp_avg=lossless"]).unwrap(), ..WriterOptions::default() };
    assert_eq!(options.precision.words(), ["auto", "exp_avg=lossless"]);
    assert!(!options.precision.is_lossless() && Precision::parse(["auto", "lossless"]).unwrap().is_lossless());
    let (_, step) = stable(&store, &options).await;
    let snapshot = store.snapshot(step - 1).await.unwrap();
    assert_eq!(PrecisionDecision::of(snapshot.user()).unwrap().profile, Profile::Compact);
    let rounded: Vec<String> = snapshot.rounding().await.unwrap().into_iter().map(|tensor| tensor.role).collect();
    assert_eq!(rounded, ["exp_avg_sq", "master"]);
}

#[tokio::test]
async fn auto_is_never_the_default() {
    assert!(!WriterOptions::default().precision.is_auto() && WriterOptions::default().precision.is_lossless());
    let saved = save(&mut writer(&memory(), WriterOptions::default()).await, 1, &Training::new()).await;
    assert_eq!(saved.precision, None);
}

#[tokio::test]
async fn one_rank_may_decide_and_several_may_not() {
    let store = memory();
    let whole = memory();
    let mut training = Training::new();
    let mut coordinator = writer(&store, auto()).await;
    let rank = |world| Rank { rank: 0, world, attempt: 0 };
    for step in 1..10 {
        training.walk(1e-3);
        let state = training.state();
        let mut ours = store.rank_writer(rank(1), auto()).await.unwrap();
        let receipt = ours.save(step, &views(&state), &[]).await.unwrap();
        let saved = coordinator.commit_receipts(step, &[receipt], &Metadata::default()).await.unwrap();
        assert_eq!(saved.precision, save(&mut writer(&whole, auto()).await, step, &training).await.precision, "step {step}");
        assert_eq!(PrecisionDecision::of(store.snapshot(step).await.unwrap().user()), saved.precision);
    }
    let refused = store.rank_writer(rank(2), auto()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.message().contains("use lossless, near or compact"), "{refused}");
    let hosts = HostWriter::open(&store, tensorcask::wire::Id::random().unwrap(), &[0], 1, auto()).await.unwrap_err();
    assert_eq!(hosts.kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn rows_that_did_not_change_may_be_rounded_by_another_profile() {
    let store = memory();
    let mut kept = writer(&store, WriterOptions { policy: Policy::Consecutive, ..auto() }).await;
    let mut training = Training::new();
    let mut profiles = Vec::new();
    for step in 1..8 {
        // The first row alone changes.
        for weight in &mut training.masters[..64] {
            *weight += 0.01;
        }
        let state = training.state();
        let tensors: Vec<TensorView<'_>> = views(&state).into_iter().map(|view| view.with_changed_rows(&[0]).unwrap()).collect();
        let saved = kept.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
        check_bounds(&store.snapshot(step).await.unwrap(), &training, saved.precision.as_ref().unwrap()).await;
        profiles.push(decision(&saved).0);
    }
    profiles.dedup();
    assert_eq!(profiles, [Profile::Lossless, Profile::Near, Profile::Compact]);
}

#[tokio::test]
async fn a_compacted_step_keeps_its_decision() {
    let store = memory();
    let (_, step) = stable(&store, &WriterOptions { policy: Policy::Consecutive, ..auto() }).await;
    let before = PrecisionDecision::of(store.snapshot(step - 1).await.unwrap().user());
    maintain::compact(&store, step - 1, &CompactOptions::default()).await.unwrap();
    let snapshot = store.snapshot(step - 1).await.unwrap();
    assert_eq!(snapshot.inspect().chain().len(), 1);
    assert!(before.is_some() && PrecisionDecision::of(snapshot.user()) == before);
}

#[tokio::test]
async fn another_store_goes_on_with_a_decision_that_is_handed_over() {
    let before = memory();
    let after = memory();
    let (mut training, step) = stable(&before, &auto()).await;
    let earlier = PrecisionDecision::of(before.snapshot(step - 1).await.unwrap().user()).map(|decision| (step - 1, decision));
    training.walk(1e-3);
    let mut next = writer(&after, WriterOptions { earlier_precision: earlier, ..auto() }).await;
    assert_eq!(decision(&save(&mut next, step, &training).await), (Profile::Compact, PrecisionReason::Stable));
    assert_eq!(decision(&save(&mut writer(&memory(), auto()).await, step, &training).await), (Profile::Lossless, PrecisionReason::First));
}
