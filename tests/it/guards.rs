//! The check for finite values, and retention that keeps the last finite step.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tensorcask::blocking::{Store, Writer, maintain};
use tensorcask::{
    Dtype, ErrorKind, FiniteCheck, Free, Metadata, Policy, Rank, Rect, Retention, SavedSnapshot, SnapshotRecord, TensorView, WriterOptions,
};

use crate::common::without_inline;

fn options(check: FiniteCheck) -> WriterOptions {
    WriterOptions { policy: Policy::Consecutive, check, ..WriterOptions::default() }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Saves one tensor of role `model`, its first moment, and a mask.
fn save(writer: &mut Writer, step: u64, weight: f32, moment: f32) -> tensorcask::Result<SavedSnapshot> {
    let mut numbers = vec![0.5f32; 300_000];
    (numbers[0], numbers[299_999]) = (step as f32, weight);
    let weights = bytes_of(&numbers);
    let moments = bytes_of(&[0.25, moment]);
    let mask = bytes_of(&[0.0, f32::NEG_INFINITY]);
    let state = [
        TensorView::new("model.w", Dtype::F32, &[300_000], &weights)?,
        TensorView::new("optimizer.exp_avg.w", Dtype::F32, &[2], &moments)?,
        TensorView::new("model.attn.mask", Dtype::F32, &[2], &mask)?,
    ];
    writer.save(step, &state, &[], &Metadata::default())
}

fn steps(records: &[SnapshotRecord]) -> Vec<u64> {
    records.iter().map(|record| record.step).collect()
}

fn last(keep_last: u64) -> Retention {
    Retention { keep_last: Some(keep_last), ..Retention::default() }
}

#[test]
fn a_state_that_is_not_finite_is_refused_and_the_writer_goes_on() {
    let store = Store::open("memory://guards-refuse").unwrap();
    let mut writer = store.writer_with(options(FiniteCheck::Refuse)).unwrap();
    assert_eq!(save(&mut writer, 1, 1.0, 1.0).unwrap().finite, Some(true));
    let error = save(&mut writer, 2, f32::NAN, 1.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let text = error.to_string();
    assert!(text.contains("tensor `model.w`, chunk 1") && text.contains("1 NaN among 37856 elements"), "{text}");
    let error = save(&mut writer, 2, 1.0, f32::INFINITY).unwrap_err();
    assert!(error.to_string().contains("tensor `optimizer.exp_avg.w`, chunk 0") && error.message().contains("1 infinity"), "{error}");
    let saved = save(&mut writer, 3, 2.0, 1.0).unwrap();
    assert_eq!((saved.kind.name(), saved.finite), ("delta", Some(true)));
    assert_eq!(store.snapshots().unwrap().iter().map(|info| info.record.step).collect::<Vec<_>>(), [1, 3]);
    assert!(maintain::verify(&store, &maintain::VerifyOptions::default()).unwrap().is_clean());
}

#[test]
fn statistics_and_the_check_mark_a_snapshot_and_otherwise_nothing_is_known() {
    let store = Store::open("memory://guards-tag").unwrap();
    let tag = |step: u64| store.snapshot(step).unwrap().user().get("tc.finite").cloned();
    let mut writer = store.writer_with(options(FiniteCheck::Tag)).unwrap();
    save(&mut writer, 1, 1.0, 1.0).unwrap();
    assert_eq!(save(&mut writer, 2, 1.0, f32::NAN).unwrap().finite, Some(false));
    let mut writer = store.writer_with(WriterOptions { statistics: true, ..options(FiniteCheck::Off) }).unwrap();
    assert_eq!(save(&mut writer, 3, f32::NEG_INFINITY, 1.0).unwrap().finite, Some(false));
    let mut writer = store.writer_with(options(FiniteCheck::Off)).unwrap();
    assert_eq!(save(&mut writer, 4, f32::NAN, 1.0).unwrap().finite, None);
    assert_eq!([1, 2, 3, 4].map(tag), [Some(true.into()), Some(false.into()), Some(false.into()), None]);
    maintain::compact(&store, 2, &maintain::CompactOptions::default()).unwrap();
    assert_eq!(tag(2), Some(false.into()));
}

#[test]
fn narrow_floats_and_complex_numbers_are_checked() {
    // The last bytes are a NaN, except in a type that has none.
    for (dtype, role, is_finite) in [
        (Dtype::F8E4M3, "model", false),
        (Dtype::F8E5M2, "model", false),
        (Dtype::F8E8M0, "model", false),
        (Dtype::C64, "model", false),
        (Dtype::C128, "exp_avg", false),
        (Dtype::F6E2M3, "model", true),
        (Dtype::U8, "model", true),
        (Dtype::F8E5M2, "buffer", true),
    ] {
        let bytes = dtype.byte_count(4).unwrap() as usize;
        let state_of = |last: u8| [vec![1; bytes - 1], vec![last]].concat();
        for check in [FiniteCheck::Refuse, FiniteCheck::Tag] {
            let store = Store::open(&format!("memory://guards-{dtype}-{role}-{}", check.name().unwrap())).unwrap();
            let mut writer = store.writer_with(options(check)).unwrap();
            let mut save = |step, last: u8| {
                let data = match dtype {
                    Dtype::C64 | Dtype::C128 if last == 0xff => vec![0xff; bytes],
                    _ => state_of(last),
                };
                writer.save(step, &[TensorView::new("a", dtype, &[4], &data)?.with_role(role, "a")], &[], &Metadata::default())
            };
            assert_eq!(save(1, 1).unwrap().finite, Some(true), "{dtype} {role}");
            match save(2, 0xff) {
                Ok(saved) => assert!(saved.finite == Some(is_finite) && (is_finite || check == FiniteCheck::Tag), "{dtype} {role}"),
                Err(error) => assert!(!is_finite && check == FiniteCheck::Refuse && error.kind() == ErrorKind::InvalidArgument, "{error}"),
            }
        }
    }
}

#[test]
fn the_marks_of_all_ranks_are_joined() {
    let store = Store::open("memory://guards-ranks").unwrap();
    let mut coordinator = store.writer_with(options(FiniteCheck::Tag)).unwrap();
    let checks = [[FiniteCheck::Tag, FiniteCheck::Tag], [FiniteCheck::Off, FiniteCheck::Tag], [FiniteCheck::Off, FiniteCheck::Tag]];
    let numbers = [1.0, 1.0, f32::NAN];
    for (step, (checks, number)) in (1..).zip(checks.into_iter().zip(numbers)) {
        let bytes = [bytes_of(&[1.0]), bytes_of(&[number])];
        let mut receipts = Vec::new();
        for (rank, (check, bytes)) in (0..).zip(checks.into_iter().zip(&bytes)) {
            let mut writer = store.rank_writer(Rank { rank, world: 2, attempt: 0 }, options(check)).unwrap();
            let name = format!("w{rank}");
            receipts.push(writer.save(step, &[TensorView::new(&name, Dtype::F32, &[1], bytes).unwrap()], &[]).unwrap());
        }
        coordinator.commit_receipts(step, &receipts, &Metadata::default()).unwrap();
    }
    let tag = |step: u64| store.snapshot(step).unwrap().user().get("tc.finite").and_then(serde_json::Value::as_bool);
    assert_eq!([1, 2, 3].map(tag), [Some(true), None, Some(false)]);
}

#[test]
fn retention_keeps_the_newest_finite_step_while_all_kept_steps_are_broken() {
    let store = Store::open("memory://guards-retain").unwrap();
    let mut writer = store.writer_with(options(FiniteCheck::Tag)).unwrap();
    for (step, weight) in [(1, 1.0), (2, 2.0), (3, f32::NAN), (4, 3.0), (5, f32::NAN), (6, f32::NAN), (7, f32::NAN)] {
        save(&mut writer, step, weight, 1.0).unwrap();
    }
    let told = store.history().unwanted(last(2)).unwrap();
    assert_eq!((steps(&told.forgotten), told.kept_finite.map(|record| record.step)), (vec![1, 2, 3, 5], Some(4)));
    let retained = store.retain(last(2)).unwrap();
    assert_eq!((steps(&retained.forgotten), retained.kept_finite.map(|record| record.step)), (vec![1, 2, 3, 5], Some(4)));
    // Again: nothing to forget, and the step stays.
    let again = Store::open("memory://guards-retain").unwrap().retain(last(2)).unwrap();
    assert_eq!((again.forgotten, again.kept_finite.map(|record| record.step)), (vec![], Some(4)));
    // Once a finite step is among those to keep, the older one goes.
    save(&mut writer, 8, 4.0, 1.0).unwrap();
    let retained = store.retain(last(2)).unwrap();
    assert_eq!((steps(&retained.forgotten), retained.kept_finite), (vec![4, 6], None));
    assert!(maintain::verify(&store, &maintain::VerifyOptions::default()).unwrap().is_clean());
}

#[test]
fn an_old_finite_step_that_is_kept_does_not_replace_the_last_good_one() {
    let store = Store::open("memory://guards-old-finite").unwrap();
    let mut writer = store.writer_with(options(FiniteCheck::Tag)).unwrap();
    for (step, weight) in [(0, 1.0), (100, 2.0), (240, 3.0), (249, 4.0), (250, f32::NAN), (251, f32::NAN)] {
        save(&mut writer, step, weight, 1.0).unwrap();
    }
    store.pin(0).unwrap();
    let retention = Retention { keep_last: Some(2), keep_every: Some(100), ..Retention::default() };
    let retained = store.retain(retention).unwrap();
    assert_eq!((steps(&retained.forgotten), retained.kept_finite.map(|record| record.step)), (vec![240], Some(249)));
}

#[test]
fn unchecked_and_reduced_steps_are_not_taken_for_finite_ones() {
    let store = Store::open("memory://guards-unchecked").unwrap();
    let options = |check| WriterOptions { policy: Policy::Full, ..options(check) };
    let mut writer = store.writer_with(options(FiniteCheck::Tag)).unwrap();
    for step in [1, 2] {
        save(&mut writer, step, 1.0, 1.0).unwrap();
    }
    let mut unchecked = store.writer_with(options(FiniteCheck::Off)).unwrap();
    for step in [3, 4] {
        save(&mut unchecked, step, 1.0, 1.0).unwrap();
    }
    // Nothing says that the kept steps are broken.
    assert_eq!(steps(&store.history().unwanted(last(2)).unwrap().forgotten), [1, 2]);
    let mut writer = store.writer_with(options(FiniteCheck::Tag)).unwrap();
    save(&mut writer, 5, f32::NAN, 1.0).unwrap();
    let told = store.history().unwanted(last(2)).unwrap();
    assert_eq!((steps(&told.forgotten), told.kept_finite.map(|record| record.step)), (vec![1, 3], Some(2)));
    // Weights alone are no state to resume from.
    maintain::keep_roles(&store, &[2], &["model".to_owned()], &maintain::CompactOptions::default()).unwrap();
    let reduced = store.snapshot(2).unwrap().record().roles.is_some();
    let told = store.history().unwanted(last(2)).unwrap();
    assert_eq!((reduced, told.kept_finite.map(|record| record.step)), (true, Some(1)));
    // A pin keeps a step in any case.
    store.pin(1).unwrap();
    let told = store.history().unwanted(last(2)).unwrap();
    assert_eq!((steps(&told.forgotten), told.kept_finite), (vec![2, 3], None));
}

#[test]
fn a_writer_forgets_by_itself_and_keeps_the_last_finite_step() {
    let store = Store::open("memory://guards-automatic").unwrap();
    let retention = Retention { keep_every: Some(4), ..last(2) };
    let with = WriterOptions { retention: Some(retention), ..options(FiniteCheck::Tag) };
    let mut writer = store.writer_with(with.clone()).unwrap();
    let live = || store.snapshots().unwrap().iter().map(|info| info.record.step).collect::<Vec<_>>();
    for step in 1..=6 {
        save(&mut writer, step, step as f32, 1.0).unwrap();
    }
    assert_eq!(live(), [4, 5, 6]);
    for step in 7..=10 {
        save(&mut writer, step, f32::NAN, 1.0).unwrap();
    }
    // Step 4 is finite and kept, but step 6 is the last good one.
    assert_eq!(live(), [4, 6, 8, 9, 10]);
    let retention = Some(last(1));
    let mut writer = store.writer_with(WriterOptions { retention, ..with.clone() }).unwrap();
    save(&mut writer, 11, f32::NAN, 1.0).unwrap();
    assert_eq!(live(), [6, 11]);
    let nothing = WriterOptions { retention: Some(Retention::default()), ..with };
    assert_eq!(store.writer_with(nothing).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn steps_are_reduced_to_weights_except_the_last_finite_one() {
    let store = Store::open("memory://guards-weights").unwrap();
    let mut writer = store.writer_with(WriterOptions { policy: Policy::Full, ..options(FiniteCheck::Tag) }).unwrap();
    for step in 1..=8 {
        save(&mut writer, step, if step > 6 { f32::NAN } else { 1.0 }, 1.0).unwrap();
    }
    let retention = Retention { keep_weights_every: Some(2), ..last(2) };
    let report = maintain::apply_retention(&store, retention, &maintain::CompactOptions::default()).unwrap();
    assert_eq!((steps(&report.retained.forgotten), report.retained.kept_finite.map(|record| record.step)), (vec![1, 3, 5], Some(6)));
    let roles: Vec<(u64, bool)> = store.snapshots().unwrap().iter().map(|info| (info.record.step, info.record.roles.is_some())).collect();
    assert_eq!(roles, [(2, true), (4, true), (6, false), (7, false), (8, false)]);
    // Steps that are reduced already are left alone.
    assert_eq!(maintain::apply_retention(&store, retention, &maintain::CompactOptions::default()).unwrap().reduced, []);
}

#[test]
fn a_reduction_keeps_weights_of_any_name_and_drops_the_state_of_any_optimizer() {
    let store = Store::open("memory://guards-roles").unwrap();
    let mut writer = store.writer_with(WriterOptions { policy: Policy::Full, ..options(FiniteCheck::Off) }).unwrap();
    let data = bytes_of(&[1.0, 2.0]);
    let short = [0x80, 0x3f, 0, 0x40];
    let weights = ["model.momentum.w", "model.ema.w", "ema.w", "momentum.v", "master.v", "net.exp_avg.v"];
    let dropped =
        ["optimizer.state.0.square_avg", "optimizer.state.0.sum", "optimizer.state.0.exp_avg", "optimizer.state.w.step", "master.u"];
    for step in 1..=3 {
        let f32 = weights.iter().chain(&dropped).map(|name| TensorView::new(*name, Dtype::F32, &[2], &data).unwrap());
        let bf16 = TensorView::new("model.u", Dtype::Bf16, &[2], &short).unwrap();
        writer.save(step, &f32.chain([bf16]).collect::<Vec<_>>(), &[], &Metadata::default()).unwrap();
    }
    let retention = Retention { keep_weights_every: Some(1), ..last(1) };
    maintain::apply_retention(&store, retention, &maintain::CompactOptions::default()).unwrap();
    let left: BTreeSet<String> = store.snapshot(1).unwrap().tensors().iter().map(|tensor| tensor.name.clone()).collect();
    for name in weights.iter().chain(["model.u"].iter()) {
        // The name alone does not prove that `momentum.v`, `master.v` and `net.exp_avg.v` are no weights.
        assert!(left.contains(*name), "{name} is gone: {left:?}");
    }
    for name in dropped {
        let shares_a_guessed_role = name == "optimizer.state.0.exp_avg" || name == "master.u";
        assert_eq!(left.contains(name), shares_a_guessed_role, "{name}: {left:?}");
    }
}

#[test]
fn a_damaged_step_does_not_keep_others_from_being_reduced() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::with(without_inline().open(folder.path().to_str().unwrap()).unwrap()).unwrap();
    let mut writer = store.writer_with(WriterOptions { policy: Policy::Full, ..options(FiniteCheck::Off) }).unwrap();
    let casks =
        || -> BTreeSet<PathBuf> { std::fs::read_dir(folder.path().join("casks")).unwrap().map(|file| file.unwrap().path()).collect() };
    for step in 1..=8 {
        let before = if step == 6 { casks() } else { BTreeSet::new() };
        save(&mut writer, step, step as f32, 1.0).unwrap();
        for path in casks().difference(&before).filter(|_| step == 6) {
            let bytes = std::fs::read(path).unwrap();
            std::fs::write(path, vec![0; bytes.len()]).unwrap();
        }
    }
    let retention = Retention { keep_weights_every: Some(2), ..last(1) };
    let report = maintain::apply_retention(&store, retention, &maintain::CompactOptions::default()).unwrap();
    assert_eq!(steps(&report.retained.forgotten), [1, 3, 5, 7]);
    let reduced: Vec<(u64, bool)> = report.reduced.iter().map(|one| (one.record.step, one.held.is_some())).collect();
    assert_eq!(reduced, [(6, true), (4, false), (2, false)]);
}

#[test]
fn trained_parameters_that_stay_the_same_are_named_after_three_saves() {
    let store = Store::open("memory://guards-unchanged").unwrap();
    let frozen = WriterOptions { frozen: vec!["model.frozen*".into()], ..options(FiniteCheck::Off) };
    let mut writer = store.writer_with(frozen).unwrap();
    let names =
        ["model.a", "model.b", "model.frozen", "model.mask", "optimizer.exp_avg.a", "optimizer.exp_avg.b", "optimizer.exp_avg.frozen"];
    let mut save = |step: u64, a: f32, b: f32| {
        let bytes: Vec<Vec<u8>> = names.iter().map(|name| bytes_of(&[if name.ends_with('a') { a } else { b }, 1.0])).collect();
        let fixed = bytes_of(&[1.0, 1.0]);
        let data = |name: &str, bytes| if name.contains("frozen") || name.contains("mask") { &fixed } else { bytes };
        let state = names.iter().zip(&bytes).map(|(name, bytes)| TensorView::new(*name, Dtype::F32, &[2], data(name, bytes)).unwrap());
        let state: Vec<TensorView<'_>> = state.collect();
        let saved = writer.save(step, &state, &[], &Metadata::default()).unwrap();
        saved.unchanged.into_iter().map(|found| (found.tensor, found.since_step)).collect::<Vec<_>>()
    };
    assert_eq!(save(1, 1.0, 1.0), []);
    assert_eq!(save(2, 2.0, 2.0), []);
    assert_eq!(save(3, 3.0, 2.0), []);
    // Saving a step again is no further step.
    assert_eq!(save(3, 3.0, 2.0), []);
    assert_eq!(save(4, 4.0, 2.0), [("model.b".to_owned(), 2)]);
    assert_eq!(save(5, 5.0, 2.0), [("model.b".to_owned(), 2)]);
    assert_eq!(save(6, 6.0, 3.0), []);
}

#[test]
fn weights_alone_are_named_only_if_none_of_them_changed() {
    let store = Store::open("memory://guards-unchanged-weights").unwrap();
    let mut writer = store.writer_with(options(FiniteCheck::Off)).unwrap();
    let mut save = |step: u64, number: f32| {
        let changing = bytes_of(&[number]);
        let constant = bytes_of(&[0.5]);
        let state = [("w", &changing), ("inv_freq", &constant)];
        let state = state.map(|(name, bytes)| TensorView::new(name, Dtype::F32, &[1], bytes).unwrap());
        writer.save(step, &state, &[], &Metadata::default()).unwrap().unchanged
    };
    for step in 1..=4u64 {
        assert_eq!(save(step, step as f32), []);
    }
    assert_eq!(save(5, 4.0), []);
    let stale: Vec<String> = save(6, 4.0).into_iter().map(|found| found.tensor).collect();
    assert_eq!(stale, ["inv_freq", "w"]);
}

#[test]
fn a_coordinator_names_parameters_of_ranks_that_stay_the_same() {
    let store = Store::open("memory://guards-unchanged-ranks").unwrap();
    let mut coordinator = store.writer_with(options(FiniteCheck::Off)).unwrap();
    let mut writers: Vec<_> =
        (0..2).map(|rank| store.rank_writer(Rank { rank, world: 2, attempt: 0 }, options(FiniteCheck::Off)).unwrap()).collect();
    for step in 1..=4u64 {
        let mut receipts = Vec::new();
        for (rank, writer) in (0u64..).zip(&mut writers) {
            // Rank 1 stops training `b` after step 1.
            let a = bytes_of(&[step as f32]);
            let b = bytes_of(&[if rank == 0 { 0.5 } else { step.min(2) as f32 }]);
            let rect = Rect { offset: vec![rank], shape: vec![1] };
            let shard = |name: &str, bytes| TensorView::shard(name, Dtype::F32, &[2], rect.clone(), bytes).unwrap();
            let state = [shard("model.a", &a), shard("model.b", &b), shard("optimizer.exp_avg.a", &a), shard("optimizer.exp_avg.b", &a)];
            receipts.push(writer.save(step, &state, &[]).unwrap());
        }
        let saved = coordinator.commit_receipts(step, &receipts, &Metadata::default()).unwrap();
        let named: Vec<_> = saved.unchanged.iter().map(|found| (found.tensor.as_str(), found.since_step)).collect();
        assert_eq!(named, if step == 4 { vec![("model.b", 2)] } else { vec![] }, "step {step}");
    }
}

#[test]
fn a_writer_that_saves_once_recalls_the_two_steps_before() {
    let store = Store::open("memory://guards-recall").unwrap();
    let save = |step: u64, b: f32, recall: bool| {
        let a = bytes_of(&[step as f32]);
        let b = bytes_of(&[b]);
        let state = [("model.a", &a), ("model.b", &b), ("optimizer.exp_avg.a", &a), ("optimizer.exp_avg.b", &a)];
        let state = state.map(|(name, bytes)| TensorView::new(name, Dtype::F32, &[1], bytes).unwrap());
        let options = WriterOptions { recall, policy: Policy::Consecutive, ..options(FiniteCheck::Off) };
        let saved = store.writer_with(options).unwrap().save(step, &state, &[], &Metadata::default()).unwrap();
        saved.unchanged.into_iter().map(|found| (found.tensor, found.since_step)).collect::<Vec<_>>()
    };
    let named = |since: u64| vec![("model.b".to_owned(), since)];
    assert_eq!([save(1, 1.0, true), save(2, 1.0, true)], [vec![], vec![]]);
    assert_eq!(save(3, 1.0, false), []);
    assert_eq!(save(4, 1.0, true), named(2), "only two steps are read");
    assert_eq!([save(5, 2.0, true), save(6, 2.0, true)], [vec![], vec![]]);
    assert_eq!(save(7, 2.0, true), named(5));
    // A step that is saved again is compared with the steps before it.
    store.forget(&[5, 6, 7]).unwrap();
    assert_eq!(save(5, 1.0, true), named(3));
}

#[tokio::test]
async fn a_retainer_does_not_load_again_what_it_cannot_reduce() {
    let store = tensorcask::Store::open("memory://guards-retainer").unwrap();
    let mut writer = store.writer(Policy::Full).await.unwrap();
    let retention = Retention { keep_last: Some(1), keep_weights_every: Some(2), ..Retention::default() };
    let mut retainer = tensorcask::maintain::Retainer::new(&store, retention, maintain::CompactOptions::default());
    let bytes = bytes_of(&[1.0]);
    // Weights alone: nothing can be dropped.
    let state = [TensorView::new("model.w", Dtype::F32, &[1], &bytes).unwrap()];
    let mut requests = Vec::new();
    for step in 1..=24u64 {
        writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
        let before = store.io().requests;
        let report = retainer.apply().await.unwrap();
        requests.push(store.io().requests - before);
        let held: Vec<u64> = report.reduced.iter().map(|reduced| reduced.record.step).collect();
        assert_eq!(held, (1..step).rev().filter(|step| step % 2 == 0).collect::<Vec<_>>());
        assert!(report.reduced.iter().all(|reduced| reduced.held.as_deref() == Some("it has no other roles")));
    }
    // The number of requests does not grow with the number of held steps.
    assert!(requests[20..].iter().max() <= requests[4..8].iter().max(), "{requests:?}");
}

#[tokio::test]
async fn a_retainer_looks_again_at_a_step_that_could_not_be_read() {
    use futures::TryStreamExt;

    let memory = Arc::new(InMemory::new());
    let open = || {
        let options = tensorcask::StoreOptions { inline_bytes: 0, ..tensorcask::StoreOptions::default() };
        tensorcask::Store::with_object_store(memory.clone(), Path::default(), options)
    };
    let store = open();
    let with = WriterOptions { policy: Policy::Full, ..options(FiniteCheck::Tag) };
    let mut writer = store.writer_with(with).await.unwrap();
    for step in 1..=3 {
        let weights = bytes_of(&[step as f32]);
        let moments = bytes_of(&[1.0]);
        let state = [
            TensorView::new("model.w", Dtype::F32, &[1], &weights).unwrap(),
            TensorView::new("optimizer.exp_avg.w", Dtype::F32, &[1], &moments).unwrap(),
        ];
        writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
    }
    // The manifest of step 2 is missing for some time.
    let manifests: Vec<_> = memory.list(Some(&Path::from("snapshots"))).try_collect().await.unwrap();
    let place = manifests.into_iter().map(|meta| meta.location).find(|path| path.filename().unwrap().starts_with("2-")).unwrap();
    let bytes = memory.get(&place).await.unwrap().bytes().await.unwrap();
    memory.delete(&place).await.unwrap();

    let store = open();
    let retention = Retention { keep_last: Some(1), keep_weights_every: Some(2), free: Free::Gc, ..Retention::default() };
    let mut retainer = tensorcask::maintain::Retainer::new(&store, retention, maintain::CompactOptions::default());
    let mut requests = Vec::new();
    for call in 0..100 {
        let before = store.io().requests;
        let reduced = retainer.apply().await.unwrap().reduced;
        assert!(reduced.len() == 1 && reduced[0].record.step == 2 && reduced[0].held.is_some(), "{reduced:?}");
        requests.push(store.io().requests - before);
        if call == 50 {
            memory.put(&place, bytes.clone().into()).await.unwrap();
        }
    }
    assert!(requests[1..].iter().all(|&now| now == requests[1]) && requests[1] < 4, "it looks only whether the log goes on: {requests:?}");
    let reduced = retainer.apply().await.unwrap().reduced;
    assert_eq!((reduced[0].held.as_deref(), reduced[0].record.roles.as_deref()), (None, Some(&["model".to_owned()][..])));
}
