//! Damage: flipped bits and truncations of every kind of object are detected, and no value is read wrong. With
//! `TENSORCASK_THOROUGH=1`, tests every bit and every length, which takes many minutes. Without it, tests some of each,
//! evenly spread.
//!
//! `tests/golden/v1` is a store that the first version wrote, and every later version must read it. To rewrite it (only
//! while the format is unreleased), remove it, then run `TENSORCASK_BLESS=1 cargo test --test it corruption`.

use std::num::NonZero;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{GOLDEN, SmallState, is_thorough, objects_of, on_this_thread as on, store_of, without_inline};
use tensorcask::maintain::{self, VerifyDepth, VerifyOptions};
use tensorcask::{ErrorKind, Latest, Policy, Slice};

const STEPS: [u64; 3] = [1, 2, 3];

fn golden() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(GOLDEN);
    if !folder.exists() && std::env::var_os("TENSORCASK_BLESS").is_some() {
        let store = tensorcask::blocking::Store::with(without_inline().open(GOLDEN).unwrap()).unwrap();
        let mut writer = store.writer(Policy::Consecutive).unwrap();
        for step in STEPS {
            let state = SmallState::at(step);
            writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).unwrap();
        }
        let _ = std::fs::remove_dir_all(folder.join("probe"));
    }
    objects_of(folder)
}

/// Asserts that each read of a step is right or an error.
fn assert_no_wrong_value(objects: &[(String, Vec<u8>)], what: &str) {
    let store = store_of(objects);
    for step in STEPS {
        let Ok(snapshot) = on(store.snapshot(step)) else { continue };
        let state = SmallState::at(step);
        for (name, bytes) in state.expected() {
            if let Ok(tensor) = on(snapshot.read(name, &Slice::all())) {
                assert_eq!(tensor.data, bytes, "{what}: step {step}, {name}");
            }
        }
        if let Ok(rng) = on(snapshot.read_blob(0, "rng")) {
            assert_eq!(rng, state.rng, "{what}: step {step}, blob");
        }
    }
}

/// Asserts that a full check finds the damage, names an object, and yields no wrong value.
fn assert_detected(objects: &[(String, Vec<u8>)], what: &str) {
    match on(maintain::verify(&store_of(objects), &VerifyOptions::default())) {
        Ok(report) => {
            assert!(!report.is_clean(), "{what}: not detected");
            assert!(report.problems.iter().any(|p| p.error.object_name().is_some()), "{what}: {:?} names no object", report.problems);
        }
        Err(e) => assert!(!matches!(e.kind(), ErrorKind::InvalidArgument), "{what}: {e}"),
    }
    assert_no_wrong_value(objects, what);
}

fn with(objects: &[(String, Vec<u8>)], at: usize, bytes: Vec<u8>) -> Vec<(String, Vec<u8>)> {
    let mut changed = objects.to_vec();
    changed[at].1 = bytes;
    changed
}

/// Returns the indexes of the objects in a folder, ordered by size.
fn below(objects: &[(String, Vec<u8>)], folder: &str) -> Vec<usize> {
    let mut found: Vec<usize> = (0..objects.len()).filter(|&i| objects[i].0.starts_with(folder)).collect();
    found.sort_by_key(|&i| objects[i].1.len());
    found
}

/// Runs `run` for each number, on plain threads: a thread of rayon that waits for the library may be given another number
/// meanwhile, and a runtime cannot start inside a runtime.
fn for_each(count: usize, run: impl Fn(usize) + Send + Sync) {
    let next = AtomicUsize::new(0);
    let take = || std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&number| number < count));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| take().for_each(&run));
        }
    });
}

/// Number of flips, and of truncations, tried per object by default.
const SOME: usize = 700;

/// Runs `run` for all numbers below `count`, or for `SOME` of them, evenly spread and covering every remainder by 8.
fn for_some(count: usize, run: impl Fn(usize) + Send + Sync) {
    let stride = if is_thorough() { 1 } else { count.div_ceil(SOME) | 1 };
    for_each(count.div_ceil(stride), |number| run(number * stride));
}

/// Runs `run` for the bytes with one bit flipped.
fn for_some_flips(bytes: &[u8], run: impl Fn(Vec<u8>, usize) + Send + Sync) {
    for_some(bytes.len() * 8, |bit| {
        let mut flipped = bytes.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        run(flipped, bit);
    });
}

fn flip_and_cut(objects: &[(String, Vec<u8>)], at: usize) {
    let (name, bytes) = &objects[at];
    for_some_flips(bytes, |flipped, bit| assert_detected(&with(objects, at, flipped), &format!("{name}, bit {bit}")));
    for_some(bytes.len(), |length| {
        assert_detected(&with(objects, at, bytes[..length].to_vec()), &format!("{name}, cut to {length}"));
    });
    assert_detected(&with(objects, at, [bytes.as_slice(), &[0]].concat()), &format!("{name}, one byte longer"));
    // Without its last entry, the log is a valid earlier log. No reader can detect that.
    if below(objects, "log/").iter().max() != Some(&at) {
        let mut gone = objects.to_vec();
        gone.remove(at);
        assert_detected(&gone, &format!("{name}, gone"));
    }
}

#[test]
fn the_golden_store_reads() {
    let objects = golden();
    assert!(objects.len() > 10, "the golden store is in the repository");
    let store = store_of(&objects);
    let report = on(maintain::verify(&store, &VerifyOptions::default())).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    for step in STEPS {
        let snapshot = on(store.snapshot(step)).unwrap();
        let state = SmallState::at(step);
        for (name, bytes) in state.expected() {
            assert_eq!(on(snapshot.read(name, &Slice::all())).unwrap().data, bytes, "step {step}, {name}");
        }
        assert_eq!(on(snapshot.read_blob(1, "loader")).unwrap(), [9; 5]);
        assert_eq!(snapshot.metadata().get("format").unwrap(), "pt");
        assert_eq!(
            snapshot.tensor("model.sparse_tied").unwrap().alias_of.map(|i| snapshot.tensors()[i].name.clone()).as_deref(),
            Some("model.sparse")
        );
    }
    let chain = on(store.snapshot(Latest)).unwrap().inspect().chain();
    assert_eq!(chain.iter().map(|link| link.kind.name()).collect::<Vec<_>>(), ["delta", "delta", "base"]);
}

#[test]
fn flips_and_cuts_of_a_base_cask_are_detected() {
    let objects = golden();
    let casks = below(&objects, "casks/");
    flip_and_cut(&objects, *casks.last().unwrap());
}

#[test]
fn flips_and_cuts_of_a_delta_cask_are_detected() {
    let objects = golden();
    let casks = below(&objects, "casks/");
    flip_and_cut(&objects, casks[0]);
}

#[test]
fn flips_and_cuts_of_a_manifest_are_detected() {
    let objects = golden();
    flip_and_cut(&objects, below(&objects, "snapshots/")[1]);
}

#[test]
fn flips_and_cuts_of_a_log_entry_are_detected() {
    let objects = golden();
    for entry in below(&objects, "log/") {
        flip_and_cut(&objects, entry);
    }
}

#[test]
fn flips_and_cuts_of_the_directory_are_detected() {
    let objects = golden();
    flip_and_cut(&objects, below(&objects, "directories/")[0]);
}

#[test]
fn flips_and_cuts_of_the_store_file_are_detected() {
    let objects = golden();
    let at = objects.iter().position(|(name, _)| name == "store.json").unwrap();
    flip_and_cut(&objects, at);
}

/// A damaged catalog costs time but never a value, because the log has all facts.
#[test]
fn flips_and_cuts_of_a_catalog_are_detected_and_harmless() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run").to_str().unwrap().to_owned();
    let options = tensorcask::StoreOptions { fsync: false, ..Default::default() };
    let store = tensorcask::blocking::Store::with(options.open(&url).unwrap()).unwrap();
    let mut writer = store.writer(Policy::Intermittent { every: 70 }).unwrap();
    for step in STEPS {
        let state = SmallState::at(step);
        writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).unwrap();
    }
    for i in 0..61 {
        (if i % 2 == 0 { store.pin(1) } else { store.unpin(1) }).unwrap();
    }
    let objects = objects_of(&folder.path().join("run"));
    let at = below(&objects, "catalog/")[0];
    let (name, bytes) = &objects[at];
    assert!(name.starts_with("catalog/00000000000000000064-"), "{name}");
    let check = |changed: Vec<u8>, what: String| {
        let objects = with(&objects, at, changed);
        let store = store_of(&objects);
        let report = on(maintain::verify(&store, &VerifyOptions { depth: VerifyDepth::Log, ..VerifyOptions::default() })).unwrap();
        assert_eq!(report.problems.len(), 1, "{what}: {:?}", report.problems);
        assert!(report.problems[0].error.object_name().unwrap().starts_with("catalog/"), "{what}");
        let listed = on(store.snapshots()).unwrap();
        assert_eq!(listed.iter().map(|info| info.record.step).collect::<Vec<_>>(), STEPS, "{what}");
        assert!(listed[0].record.pinned, "{what}: the log says so");
    };
    for_some_flips(bytes, |flipped, bit| check(flipped, format!("bit {bit}")));
    for_some(bytes.len(), |length| check(bytes[..length].to_vec(), format!("cut to {length}")));
}

/// Objects of a store whose snapshots are inside of log entries.
fn inline_objects() -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let options = tensorcask::StoreOptions { fsync: false, ..Default::default() };
    let store = options.open(folder.path().to_str().unwrap()).unwrap();
    let mut writer = on(store.writer(Policy::Consecutive)).unwrap();
    for step in STEPS {
        let state = SmallState::at(step);
        on(writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step))).unwrap();
    }
    let objects = objects_of(folder.path());
    assert!(below(&objects, "casks/").is_empty() && below(&objects, "snapshots/").is_empty());
    objects
}

#[test]
fn flips_and_cuts_of_inline_snapshots_are_detected() {
    let objects = inline_objects();
    for entry in below(&objects, "log/") {
        flip_and_cut(&objects, entry);
    }
}

/// Damage to a snapshot inside of a log entry is located, and later entries are read as before.
#[test]
fn damage_to_an_inline_snapshot_is_located_and_leaves_the_log_whole() {
    let objects = inline_objects();
    let at = objects.iter().position(|(name, _)| name == "log/00000000000000000002.json").unwrap();
    let (name, bytes) = &objects[at];
    let state = SmallState::at(1);
    let page = bytes.windows(state.dense.len()).position(|window| window == state.dense).unwrap();
    let mut damaged = bytes.clone();
    damaged[page] ^= 1;
    let store = store_of(&with(&objects, at, damaged));
    assert_eq!(on(store.snapshots()).unwrap().len(), 3);
    let error = on(on(store.snapshot(1)).unwrap().read("model.dense", &Slice::all())).unwrap_err();
    assert_eq!((error.object_name(), error.tensor_name(), error.chunk_number()), (Some(name.as_str()), Some("model.dense"), Some(0)));
    let report = on(maintain::verify(&store, &VerifyOptions::default())).unwrap();
    let error = &report.problems[0].error;
    assert_eq!((error.object_name(), error.tensor_name(), error.chunk_number()), (Some(name.as_str()), Some("model.dense"), Some(0)));
    assert_eq!(error.byte_offset(), Some(page as u64), "{error}");
    for cut in [bytes.len() - 1, page] {
        let store = store_of(&with(&objects, at, bytes[..cut].to_vec()));
        assert_eq!(on(store.snapshots()).unwrap().len(), 3);
        let error = on(store.snapshot(1)).unwrap_err();
        assert_eq!((error.object_name(), error.clause_name()), (Some(name.as_str()), Some("log 3.7")), "{error}");
        // The newer steps are deltas on the damaged one.
        assert!(on(store.recover(&[])).is_err());
    }
}

/// Intact objects in the place of others.
#[test]
fn swapped_objects_are_detected() {
    let objects = golden();
    for folder in ["casks/", "snapshots/", "log/"] {
        let found = below(&objects, folder);
        for &a in &found {
            for &b in found.iter().filter(|&&b| b > a) {
                let mut swapped = with(&objects, a, objects[b].1.clone());
                swapped[b].1 = objects[a].1.clone();
                assert_detected(&swapped, &format!("{} and {} swapped", objects[a].0, objects[b].0));
                assert_detected(&with(&objects, a, objects[b].1.clone()), &format!("{} replaced by {}", objects[a].0, objects[b].0));
            }
        }
    }
}

/// Each part decodes snapshots with casks that other parts check.
#[test]
fn the_parts_of_a_verification_report_together_what_a_whole_one_reports() {
    let objects = golden();
    let casks = objects.iter().enumerate().filter(|(_, (path, _))| path.starts_with("casks/"));
    for (at, (path, bytes)) in casks {
        for place in [bytes.len() / 3, bytes.len() / 2, bytes.len() - 100] {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1;
            let store = store_of(&with(&objects, at, damaged));
            let told = |shard| {
                let report = on(maintain::verify(&store, &VerifyOptions { shard, ..VerifyOptions::default() })).unwrap();
                report.problems.into_iter().map(|problem| (problem.error.to_string(), problem.step)).collect::<Vec<_>>()
            };
            let mut whole = told(None);
            whole.sort();
            for of in [2, 3] {
                let mut parts: Vec<_> = (0..of).flat_map(|part| told(Some((part, of)))).collect();
                parts.sort();
                assert_eq!(parts, whole, "{path} at {place}, {of} parts");
            }
        }
    }
}
