//! Retention, compaction and garbage collection, alone and with concurrent writers and readers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{SmallState, objects_of, until, without_inline, wrap};
use object_store::memory::InMemory;
use tensorcask::maintain::{self, CompactOptions, DoctorOptions, GcOptions, VerifyOptions};
use tensorcask::{
    BaseKeeping, Blob, DecisionReason, Dtype, ErrorKind, Latest, Metadata, Policy, PolicyDecision, Rect, Retention, SaveTimes, Slice,
    Snapshot, SnapshotStatus, Store, StoreOptions, TensorView, Writer, WriterOptions,
};
use tokio::sync::{RwLock, RwLockReadGuard};

const NOW: GcOptions = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };

async fn save(writer: &mut Writer, step: u64) -> tensorcask::Result<tensorcask::SavedSnapshot> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await
}

/// The facts that the user passed to the save.
fn facts(snapshot: &Snapshot) -> serde_json::Map<String, serde_json::Value> {
    let mut facts = snapshot.user().clone();
    facts.remove(PolicyDecision::KEY);
    facts.remove(SaveTimes::KEY);
    facts
}

async fn check(snapshot: &Snapshot) -> tensorcask::Result<()> {
    let state = SmallState::at(snapshot.step());
    for (name, bytes) in state.expected() {
        assert_eq!(snapshot.read(name, &Slice::all()).await?.data, bytes, "step {}, {name}", snapshot.step());
    }
    assert_eq!(snapshot.read_blob(0, "rng").await?, state.rng);
    Ok(())
}

async fn assert_holds(store: &Store, steps: impl IntoIterator<Item = u64>) {
    let steps: Vec<u64> = steps.into_iter().collect();
    for &step in &steps {
        check(&store.snapshot(step).await.unwrap()).await.unwrap();
    }
    let live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(live, steps);
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// Returns a store in memory with a consecutive chain of these steps.
async fn chain(steps: impl IntoIterator<Item = u64>) -> (Store, Writer) {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in steps {
        save(&mut writer, step).await.unwrap();
    }
    (store, writer)
}

#[tokio::test]
async fn retention_keeps_the_last_every_nth_pins_and_the_newest() {
    let (store, _writer) = chain(1..=9).await;
    store.pin(2).await.unwrap();
    let retention = Retention { keep_last: Some(2), keep_every: Some(4), ..Retention::default() };
    let steps = |records: Vec<tensorcask::SnapshotRecord>| records.iter().map(|record| record.step).collect::<Vec<_>>();
    assert_eq!(steps(store.history().unwanted(retention).await.unwrap().forgotten), [1, 3, 5, 6, 7]);
    assert_eq!(store.snapshots().await.unwrap().len(), 9, "only told");
    assert_eq!(steps(store.retain(retention).await.unwrap().forgotten), [1, 3, 5, 6, 7]);
    assert_holds(&store, [2, 4, 8, 9]).await;
    assert_eq!(steps(store.retain(Retention { keep_every: Some(100), ..Retention::default() }).await.unwrap().forgotten), [4, 8]);
    assert_holds(&store, [2, 9]).await;
    for nothing in [
        Retention::default(),
        Retention { keep_last: Some(0), ..Retention::default() },
        Retention { keep_every: Some(0), ..Retention::default() },
    ] {
        assert_eq!(store.retain(nothing).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

/// A job cannot resume from a reduced step, so it stands for none of the last ones.
#[tokio::test]
async fn retention_keeps_a_step_to_resume_from() {
    let (store, _writer) = chain(1..=3).await;
    for step in [2, 3] {
        maintain::compact(&store, step, &CompactOptions::default()).await.unwrap();
    }
    let reduced = maintain::keep_roles(&store, &[2], &["model".to_owned()], &CompactOptions::default()).await.unwrap();
    assert!(reduced[0].held.is_none(), "{reduced:?}");
    store.forget(&[3]).await.unwrap();
    for keep_last in [1, 2] {
        let kept = store.retain(Retention { keep_last: Some(keep_last), ..Retention::default() }).await.unwrap();
        assert!(kept.forgotten.is_empty(), "{kept:?}");
    }
    assert_eq!(store.snapshot(Latest).await.unwrap().step(), 1);
    // Without one, nobody is told that nothing was saved.
    store.forget(&[1]).await.unwrap();
    assert_eq!(store.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::Template);
    assert_eq!(store.recover(&[]).await.unwrap_err().kind(), ErrorKind::Template);
}

#[tokio::test]
async fn a_folded_chain_restores_bit_for_bit_and_deltas_on_it_stay() {
    let (store, mut writer) = chain(1..=6).await;
    let before = store.snapshot(6).await.unwrap();
    assert_eq!(before.inspect().chain().len(), 6);
    let compacted = maintain::compact(&store, 4, &CompactOptions::default()).await.unwrap();
    assert_eq!((compacted.links, compacted.record.parent, compacted.record.step), (4, None, 4));
    assert_holds(&store, 1..=6).await;
    let after = store.snapshot(6).await.unwrap();
    assert_eq!(after.inspect().chain().len(), 3, "6 and 5, on 4");
    assert_eq!(after.manifest().content, before.manifest().content);
    let folded = store.snapshot(4).await.unwrap();
    assert_eq!((folded.manifest().id, facts(&folded)), (compacted.record.id, SmallState::metadata(4).user));
    assert_eq!(
        folded.inspect().decision().map(|decision| (decision.reason, decision.since_base)),
        Some((DecisionReason::Policy, 3)),
        "of the save"
    );

    // The writer continues its own chain. A snapshot that is a base already is left alone.
    save(&mut writer, 7).await.unwrap();
    let again = maintain::compact(&store, 4, &CompactOptions::default()).await.unwrap();
    assert_eq!((again.sequence, again.links), (None, 1));
    assert_eq!(maintain::compact(&store, 99, &CompactOptions::default()).await.unwrap_err().kind(), ErrorKind::NotFound);
    maintain::compact(&store, Latest, &CompactOptions::default()).await.unwrap();
    assert_holds(&store, 1..=7).await;
    // A new writer continues the chain, without the state in memory.
    let options = WriterOptions { policy: Policy::Consecutive, base_cache: BaseKeeping::None, ..WriterOptions::default() };
    let saved = save(&mut store.writer_with(options).await.unwrap(), 8).await.unwrap();
    assert_eq!(saved.parent, Some(store.snapshot(7).await.unwrap().record().id));
    assert_holds(&store, 1..=8).await;
}

/// Commits more than 64 entries, so that later readers use a catalog.
#[tokio::test]
async fn catalogs_know_what_was_compacted_and_collected() {
    let (store, mut writer) = chain(1..=20).await;
    maintain::compact(&store, 20, &CompactOptions::default()).await.unwrap();
    store.retain(Retention { keep_last: Some(1), ..Retention::default() }).await.unwrap();
    maintain::gc(&store, &NOW).await.unwrap();
    for step in 21..=63 {
        save(&mut writer, step).await.unwrap();
    }
    assert_holds(&store, 20..=63).await;
    maintain::compact(&store, 63, &CompactOptions::default()).await.unwrap();
    maintain::gc(&store, &NOW).await.unwrap();
    assert_holds(&store, 20..=63).await;
}

#[tokio::test]
async fn gc_frees_what_nothing_needs_and_only_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreOptions { fsync: false, ..without_inline() }.open(folder.path().to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    for step in 1..=6 {
        save(&mut writer, step).await.unwrap();
    }
    store.forget(&[1, 2, 4]).await.unwrap();
    let objects = objects_of(folder.path());

    let told = maintain::gc(&store, &GcOptions { apply: false, ..NOW }).await.unwrap();
    let steps = |records: &[tensorcask::SnapshotRecord]| records.iter().map(|record| record.step).collect::<Vec<_>>();
    assert_eq!((steps(&told.collected), steps(&told.held)), (vec![2], vec![1, 4]), "3, 5 and 6 need their bases");
    assert!(told.collected_bytes > 0 && told.held_bytes > told.collected_bytes);
    assert_eq!(objects_of(folder.path()), objects, "nothing was done");

    // The age floor counts from the entry that collects a snapshot, however old its objects are.
    let waits = GcOptions { age_floor: Duration::from_secs(3600), ..NOW };
    let report = maintain::gc(&store, &waits).await.unwrap();
    assert_eq!((steps(&report.collected), report.deleted.len()), (vec![2], 0));
    assert_eq!(report.waiting_bytes(), report.waiting.iter().map(|object| object.bytes).sum::<u64>());
    assert_eq!(report.waiting.len(), 4, "three casks and a manifest: {:?}", report.waiting);
    assert_holds(&store, [3, 5, 6]).await;

    // Unreferenced objects, young and old. Other objects are not garbage collection's business.
    std::fs::write(folder.path().join("casks/00000000000000000000000000000000.cask"), b"left over").unwrap();
    std::fs::write(folder.path().join("notes.txt"), b"mine").unwrap();
    assert!(maintain::gc(&store, &waits).await.unwrap().deleted.is_empty());
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!(report.deleted.len(), 5, "{:?}", report.deleted);
    assert_eq!(report.freed_bytes(), report.deleted.iter().map(|object| object.bytes).sum::<u64>());
    assert_holds(&store, [3, 5, 6]).await;
    assert!(folder.path().join("notes.txt").exists());
    assert_eq!(maintain::gc(&store, &NOW).await.unwrap().deleted, [], "nothing is left to do");

    // A longer floor changes nothing: the manifest of 2 is gone, with all objects that it named.
    assert_eq!(maintain::gc(&store, &waits).await.unwrap().deleted, []);
    assert!(maintain::doctor(&store, &DoctorOptions::default()).await.unwrap().is_healthy());

    // After the chain is compacted, nothing refers to the old base.
    maintain::compact(&store, 3, &CompactOptions::default()).await.unwrap();
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!(steps(&report.collected), [1]);
    assert_holds(&store, [3, 5, 6]).await;
    assert_eq!(store.snapshot(6).await.unwrap().inspect().chain()[1].record.status, SnapshotStatus::Forgotten, "4 is still held");
}

/// Checks the content of a snapshot that was reduced to its model.
async fn check_model(store: &Store, step: u64) {
    let snapshot = store.snapshot(step).await.unwrap();
    let state = SmallState::at(step);
    let names: Vec<String> = snapshot.tensors().into_iter().map(|tensor| tensor.name).collect();
    let expected: Vec<(&str, Vec<u8>)> = state.expected().into_iter().filter(|(name, _)| name.starts_with("model.")).collect();
    assert_eq!(names, expected.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for (name, bytes) in expected {
        assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
    }
    assert_eq!(snapshot.read_blob(0, "rng").await.unwrap(), state.rng);
    let error = snapshot.read("optimizer.step", &Slice::all()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn shards_of_many_ranks_become_whole_tensors() {
    let (store, mut writer) = chain(1..=2).await;
    let state = SmallState::at(3);
    let wide: Vec<u8> = (0..4 * 6 * 70_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let left: Vec<u8> = wide.chunks(4 * 70_000).flat_map(|row| &row[..4 * 30_001]).copied().collect();
    let right: Vec<u8> = wide.chunks(4 * 70_000).flat_map(|row| &row[4 * 30_001..]).copied().collect();
    // Three times 35 elements of 4 bits, so that the shards end within a byte.
    let packed: Vec<u8> = (0..53u8).map(|i| if i == 52 { 7 } else { i.wrapping_mul(37) }).collect();
    let nibble = |i: usize| packed[i / 2] >> (4 * (i % 2)) & 15;
    let pack = |range: std::ops::Range<usize>| -> Vec<u8> {
        range.clone().step_by(2).map(|i| nibble(i) | if i + 1 < range.end { nibble(i + 1) << 4 } else { 0 }).collect()
    };
    let first = pack(0..35);
    let second = pack(35..105);
    let shard = |name, dtype, shape: &[u64], offset: &[u64], extent: &[u64], data| {
        TensorView::shard(name, dtype, shape, Rect { offset: offset.to_vec(), shape: extent.to_vec() }, data).unwrap()
    };
    let mut tensors = state.tensors();
    tensors.push(shard("model.wide", Dtype::F32, &[6, 70_000], &[0, 0], &[6, 30_001], &left));
    tensors.push(shard("model.wide", Dtype::F32, &[6, 70_000], &[0, 30_001], &[6, 39_999], &right));
    tensors.push(shard("model.four", Dtype::Int4, &[3, 5, 7], &[0, 0, 0], &[1, 5, 7], &first));
    tensors.push(shard("model.four", Dtype::Int4, &[3, 5, 7], &[1, 0, 0], &[2, 5, 7], &second));
    writer.save(3, &tensors, &state.blobs(), &SmallState::metadata(3)).await.unwrap();

    let archive = wrap(Arc::new(InMemory::new()));
    let saved = maintain::consolidate(&store, &archive, 3, &CompactOptions::default()).await.unwrap();
    assert_eq!((saved.step, saved.parent), (3, None));
    assert!(maintain::verify(&archive, &VerifyOptions::default()).await.unwrap().is_clean());
    let snapshot = archive.snapshot(Latest).await.unwrap();
    check(&snapshot).await.unwrap();
    assert_eq!(snapshot.read("model.wide", &Slice::all()).await.unwrap().data, wide);
    assert_eq!(snapshot.read("model.four", &Slice::all()).await.unwrap().data, packed);
    assert_eq!(snapshot.read_blob(1, "loader").await.unwrap(), [9; 5]);
    let before = store.snapshot(3).await.unwrap();
    assert_eq!((facts(&snapshot), snapshot.metadata()), (facts(&before), before.metadata()));
    let described = |snapshot: &Snapshot| snapshot.tensors();
    assert_eq!(described(&snapshot), described(&before));
    let shards: usize = snapshot.inspect().indexes().await.unwrap().iter().map(|(_, index)| index.shard_count()).sum();
    assert_eq!(shards, snapshot.tensors().iter().filter(|tensor| tensor.alias_of.is_none()).count(), "one each");
    let again = maintain::consolidate(&store, &archive, 2, &CompactOptions::default()).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn old_steps_keep_their_weights_and_lose_the_rest() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    for step in 1..=8 {
        save(&mut writer, step).await.unwrap();
    }
    store.pin(2).await.unwrap();
    let model = ["model".to_owned()];
    let keep = Retention { keep_last: Some(2), ..Retention::default() };
    let reduced = maintain::retain_roles(&store, keep, &model, &CompactOptions::default()).await.unwrap().reduced;
    let held: Vec<(u64, bool)> = reduced.iter().map(|one| (one.record.step, one.held.is_some())).collect();
    // Steps 7 and 8 stay, and so do the snapshots that they and the pinned step 2 need. Step 7 is a base, and 1 is the
    // base of 2.
    assert_eq!(held, [(6, false), (5, false), (4, false), (3, false), (1, true)]);
    assert!(reduced.iter().filter(|one| one.held.is_none()).all(|one| one.stored_bytes < one.stored_bytes_before), "{reduced:?}");
    for step in 3..=6 {
        check_model(&store, step).await;
        assert_eq!(store.snapshot(step).await.unwrap().inspect().chain().len(), if step == 4 { 1 } else { 2 }, "deltas stay deltas");
    }
    assert!(maintain::gc(&store, &NOW).await.unwrap().freed_bytes() > 0);
    for step in 3..=6 {
        check_model(&store, step).await;
    }
    for step in [1, 2, 7, 8] {
        check(&store.snapshot(step).await.unwrap()).await.unwrap();
    }
    let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    let again = maintain::retain_roles(&store, keep, &model, &CompactOptions::default()).await.unwrap().reduced;
    assert!(again.iter().all(|one| one.held.is_some()), "{again:?}");
    // A copy of the store also has the reduced snapshots.
    let copy = wrap(Arc::new(InMemory::new()));
    maintain::copy(&store, &copy, &Default::default()).await.unwrap();
    check_model(&copy, 5).await;
    let roles = copy.snapshots().await.unwrap().into_iter().map(|info| info.record.roles.is_some());
    assert_eq!(roles.collect::<Vec<_>>(), [false, false, true, true, true, true, false, false]);
    assert_eq!(maintain::copy(&store, &copy, &Default::default()).await.unwrap().snapshots, 0);
}

#[tokio::test]
async fn a_reduced_step_is_never_the_latest_nor_a_parent() {
    let (store, mut writer) = chain(1..=3).await;
    let model = ["model".to_owned()];
    let held = maintain::keep_roles(&store, &[1, 3], &model, &CompactOptions::default()).await.unwrap();
    assert!(held.iter().all(|one| one.held.is_some()), "{held:?}");
    // Casks with mixed roles are rewritten, as a base.
    let roles = ["model".to_owned(), "step".to_owned()];
    store.forget(&[3]).await.unwrap();
    maintain::compact(&store, 2, &CompactOptions::default()).await.unwrap();
    let reduced = maintain::keep_roles(&store, &[1], &roles, &CompactOptions::default()).await.unwrap();
    assert_eq!((&reduced[0].held, &reduced[0].record.roles), (&None, &Some(roles.to_vec())));
    assert_eq!(store.snapshot(1).await.unwrap().read("optimizer.step", &Slice::all()).await.unwrap().data, SmallState::at(1).scalar);
    store.forget(&[2]).await.unwrap();
    assert_eq!(store.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::Template, "not an empty store");
    assert_eq!(store.recover(&[]).await.unwrap_err().kind(), ErrorKind::Template);
    assert_eq!(save(&mut writer, 4).await.unwrap().parent, None, "nothing whole is left to build upon");
    let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    assert_eq!(
        maintain::keep_roles(&store, &[1], &["optimizer".to_owned()], &CompactOptions::default()).await.unwrap()[0].held.as_deref(),
        Some("it has none of these roles")
    );
}

#[tokio::test]
async fn snapshots_are_forgotten_by_id_where_they_still_count() {
    let (store, mut writer) = chain(1..=4).await;
    let ids: Vec<_> = store.history().records().await.unwrap().iter().map(|record| record.id).collect();
    assert!(store.pin(1).await.unwrap().pinned);
    assert!(!store.unpin(1).await.unwrap().pinned);
    assert!(!store.unpin(1).await.unwrap().pinned, "again");
    store.pin(1).await.unwrap();
    save(&mut writer, 3).await.unwrap();
    // A pinned snapshot, a wanted one, one whose step was saved again meanwhile, and one that never existed.
    let unknown = tensorcask::wire::Id::random().unwrap();
    let forgotten = store.history().forget_snapshots(&[ids[0], ids[1], ids[2], unknown]).await.unwrap();
    assert_eq!(forgotten.iter().map(|record| record.id).collect::<Vec<_>>(), [ids[1]]);
    let live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(live, [1, 4, 3]);
    let before = store.history().records().await.unwrap();
    assert!(store.history().forget_snapshots(&ids[..3]).await.unwrap().is_empty());
    assert_eq!(store.history().records().await.unwrap(), before);
}

/// Only a process that knows a codec can tell which tensors the codec needs. Other processes must not drop roles.
#[tokio::test]
async fn roles_are_not_dropped_from_under_a_codec_that_is_not_known() {
    let objects = Arc::new(InMemory::new());
    let store = wrap(objects.clone());
    let mut writer = store.writer(Policy::Full).await.unwrap();
    let weights: Vec<u8> = (0..40_000u32).flat_map(|i| ((i % 40) as f32).to_le_bytes()).collect();
    for step in 1..=2 {
        let tensors = ["model.w", "optimizer.exp_avg.w"].map(|name| TensorView::new(name, Dtype::F32, &[200, 200], &weights).unwrap());
        writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
    }
    let registry = tensorcask::codec::Registry::default().only("tc.raw").unwrap();
    let poor = Store::with_object_store(objects, Default::default(), StoreOptions { registry, ..StoreOptions::default() });
    let error = maintain::keep_roles(&poor, &[1], &["model".to_owned()], &CompactOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("codec `tc.") && error.to_string().contains("casks/"), "{error}");
    assert_eq!(maintain::keep_roles(&store, &[1], &["model".to_owned()], &CompactOptions::default()).await.unwrap()[0].held, None);
}

#[tokio::test]
async fn pins_outlive_everything() {
    let (store, mut writer) = chain(1..=2).await;
    store.pin(2).await.unwrap();
    save(&mut writer, 2).await.unwrap();
    assert!(store.forget(&[1, 2]).await.is_err(), "the pin has moved to the second snapshot of step 2");
    store.forget(&[1]).await.unwrap();
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert!(report.collected.is_empty(), "the pinned one and its chain are held: {report:?}");
    assert_eq!(report.held.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 2], "the pinned one needs both");
}

/// Returns a store and a writer of consecutive or one-shot deltas. Another process interferes after the casks of step 3
/// were uploaded, right before the manifest is written.
async fn meddled<F: Future<Output = ()> + Send + 'static>(policy: Policy, meddle: fn(Store) -> F) -> (Store, Writer) {
    use tensorcask::testing::fault::{Fault, FaultStore, Operation};
    let memory: Arc<InMemory> = Arc::new(InMemory::new());
    let plain = wrap(memory.clone());
    let armed = Arc::new(AtomicBool::new(true));
    let other = plain.clone();
    let gated = FaultStore::new(memory, move |operation, path| {
        if operation == Operation::Create && path.as_ref().starts_with("snapshots/3-") && armed.swap(false, Ordering::SeqCst) {
            let meddling = meddle(other.clone());
            let run = move || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(meddling);
            std::thread::spawn(run).join().unwrap();
        }
        Fault::None
    });
    let writer = wrap(Arc::new(gated)).writer(policy).await.unwrap();
    (plain, writer)
}

#[tokio::test]
async fn no_delta_is_committed_on_a_snapshot_that_was_given_up() {
    let meddle = |store: Store| async move {
        store.forget(&[1, 2]).await.unwrap();
        assert_eq!(maintain::gc(&store, &NOW).await.unwrap().collected.len(), 2);
    };
    let (plain, mut writer) = meddled(Policy::Consecutive, meddle).await;
    for step in 1..=2 {
        save(&mut writer, step).await.unwrap();
    }
    let saved = save(&mut writer, 3).await.unwrap();
    assert_eq!(saved.parent, None);
    assert_eq!(save(&mut writer, 4).await.unwrap().parent, Some(saved.id));
    assert_holds(&plain, [3, 4]).await;
}

#[tokio::test]
async fn no_delta_is_committed_on_a_snapshot_that_was_reduced() {
    let meddle = |store: Store| async move {
        maintain::compact(&store, 2, &CompactOptions::default()).await.unwrap();
        let reduced = maintain::keep_roles(&store, &[1], &["model".to_owned()], &CompactOptions::default()).await.unwrap();
        assert_eq!(reduced[0].held, None);
    };
    let (plain, mut writer) = meddled(Policy::OneShot, meddle).await;
    for step in 1..=2 {
        save(&mut writer, step).await.unwrap();
    }
    let saved = save(&mut writer, 3).await.unwrap();
    assert_eq!(saved.parent, None);
    assert_eq!(save(&mut writer, 4).await.unwrap().parent, Some(saved.id));
    check_model(&plain, 1).await;
    for step in 2..=4 {
        check(&plain.snapshot(step).await.unwrap()).await.unwrap();
    }
    assert!(maintain::verify(&plain, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn a_commit_that_took_too_long_is_refused() {
    let store = wrap(Arc::new(InMemory::new()));
    let slow = WriterOptions { age_floor: Duration::from_nanos(2), ..WriterOptions::default() };
    let mut writer = store.writer_with(slow).await.unwrap();
    let error = save(&mut writer, 1).await.unwrap_err();
    assert!(error.to_string().contains("half the age floor"), "{error}");
    assert!(store.snapshots().await.unwrap().is_empty());
}

#[tokio::test]
async fn unknown_features_and_unreadable_manifests_stop_gc() {
    let (store, _writer) = chain(1..=3).await;
    let folder = tempfile::tempdir().unwrap();
    let on_disk = without_inline().open(folder.path().to_str().unwrap()).unwrap();
    let mut writer = on_disk.writer(Policy::Full).await.unwrap();
    for step in 1..=2 {
        save(&mut writer, step).await.unwrap();
    }
    on_disk.forget(&[1]).await.unwrap();
    let manifest = folder.path().join(on_disk.snapshot(2).await.unwrap().record().manifest_path());
    let mut bytes = std::fs::read(&manifest).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&manifest, bytes).unwrap();
    let casks = std::fs::read_dir(folder.path().join("casks")).unwrap().count();
    let error = maintain::gc(&on_disk, &NOW).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("nothing is deleted"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path().join("casks")).unwrap().count(), casks);
    drop(store);
}

/// Writers and readers of a store on disk whose objects age in jumps of half the age floor. An operation sees one jump at most: objects
/// that it wrote or reads never reach the floor before it has ended, however slow the machine is.
struct Ages {
    folder: PathBuf,
    epoch: AtomicU64,
    running: [RwLock<()>; 2],
}

impl Ages {
    const FLOOR: Duration = Duration::from_secs(3600);

    fn of(folder: &Path) -> Arc<Self> {
        Arc::new(Self { folder: folder.to_owned(), epoch: AtomicU64::new(0), running: Default::default() })
    }

    /// Begins an operation, which ends when the guard is dropped.
    async fn operation(&self) -> RwLockReadGuard<'_, ()> {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let guard = self.running[(epoch % 2) as usize].read().await;
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return guard;
            }
        }
    }

    /// Makes all objects older by half the floor, once the operations that saw the last jump have ended.
    async fn jump(&self) {
        let next = self.epoch.load(Ordering::SeqCst) + 1;
        drop(self.running[(next % 2) as usize].write().await);
        for folder in ["casks", "catalog", "directories", "log", "snapshots"] {
            let Ok(entries) = std::fs::read_dir(self.folder.join(folder)) else { continue };
            for path in entries.map(|entry| entry.unwrap().path()) {
                // A file that is being written has `#` in its name. Others may have been deleted meanwhile.
                let Some(file) = Some(&path).filter(|path| !path.to_str().unwrap().contains('#')) else { continue };
                let Ok(file) = std::fs::File::options().write(true).open(file) else { continue };
                file.set_modified(file.metadata().unwrap().modified().unwrap() - Self::FLOOR / 2).unwrap();
            }
        }
        self.epoch.store(next, Ordering::SeqCst);
    }
}

/// A writer, a compaction, a collection and readers at once, on a real disk, with objects that reach the age floor many times.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writers_readers_compaction_and_gc_at_once() {
    const FLOOR: Duration = Ages::FLOOR;
    const ROUNDS: u64 = 120;
    let folder = tempfile::tempdir().unwrap();
    let open = {
        let url = folder.path().to_str().unwrap().to_owned();
        move || StoreOptions { fsync: false, ..without_inline() }.open(&url).unwrap()
    };
    let ages = Ages::of(folder.path());
    let options = WriterOptions { policy: Policy::Intermittent { every: 5 }, age_floor: FLOOR, ..WriterOptions::default() };
    let mut writer = open().writer_with(options.clone()).await.unwrap();
    save(&mut writer, 0).await.unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let reads = Arc::new(AtomicU64::new(0));
    let freed = Arc::new(AtomicU64::new(0));
    let folded = Arc::new(AtomicU64::new(0));

    let collector = tokio::spawn({
        let store = open();
        let done = done.clone();
        let ages = ages.clone();
        let freed = freed.clone();
        async move {
            while !done.load(Ordering::SeqCst) {
                let operation = ages.operation().await;
                store.retain(Retention { keep_last: Some(6), keep_every: Some(25), ..Retention::default() }).await.unwrap();
                drop(operation);
                let report = maintain::gc(&store, &GcOptions { age_floor: FLOOR, ..NOW }).await.unwrap();
                freed.fetch_add(report.deleted.len() as u64, Ordering::SeqCst);
            }
        }
    });
    let compactor = tokio::spawn({
        let store = open();
        let done = done.clone();
        let ages = ages.clone();
        let folded = folded.clone();
        async move {
            let compact = CompactOptions { age_floor: FLOOR, ..CompactOptions::default() };
            while !done.load(Ordering::SeqCst) {
                let live = store.snapshots().await.unwrap();
                for record in live.iter().rev().take(3).map(|info| &info.record) {
                    let _operation = ages.operation().await;
                    match maintain::compact(&store, record.step, &compact).await {
                        Ok(compacted) => _ = folded.fetch_add(u64::from(compacted.sequence.is_some()), Ordering::SeqCst),
                        // Forgotten meanwhile.
                        Err(e) => assert!(matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Conflict), "{e}"),
                    }
                }
            }
        }
    });
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let store = open();
            let done = done.clone();
            let ages = ages.clone();
            let reads = reads.clone();
            tokio::spawn(async move {
                while !done.load(Ordering::SeqCst) {
                    // A snapshot that was live when the log was read stays readable for the floor.
                    let _operation = ages.operation().await;
                    check(&store.snapshot(Latest).await.unwrap()).await.unwrap();
                    reads.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let (fifth_step, mut fifth_steps) = tokio::sync::mpsc::unbounded_channel();
    let clock = tokio::spawn({
        let ages = ages.clone();
        async move {
            while fifth_steps.recv().await.is_some() {
                ages.jump().await;
            }
        }
    });
    let mut step = 0;
    until("each of them did something", async || {
        step += 1;
        let operation = ages.operation().await;
        save(&mut writer, step).await.unwrap();
        drop(operation);
        if step % 5 == 0 {
            fifth_step.send(()).unwrap();
        }
        let ended = [&collector, &compactor].into_iter().chain(&readers).any(|task| task.is_finished());
        ended || (step >= ROUNDS && [&reads, &freed, &folded].iter().all(|count| count.load(Ordering::SeqCst) > 10))
    })
    .await;
    done.store(true, Ordering::SeqCst);
    drop(fifth_step);
    for task in [collector, compactor, clock].into_iter().chain(readers) {
        task.await.unwrap();
    }
    println!("saved, read, freed, folded: {step}, {reads:?}, {freed:?}, {folded:?}");
    let store = open();
    let live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_holds(&store, live).await;
    // Afterwards nothing but what is needed is left.
    for collected_now in [true, false] {
        ages.jump().await;
        ages.jump().await;
        let report = maintain::gc(&store, &GcOptions { age_floor: FLOOR, ..NOW }).await.unwrap();
        assert!(collected_now || (report.collected.len(), report.waiting.len()) == (0, 0), "{report:?}");
    }
}

/// A large page fills a window of the check, an empty one follows, and the next is large again.
#[tokio::test]
async fn empty_blobs_between_large_ones_are_verified() {
    let store = Store::open("memory://empty-blobs").unwrap();
    let large: Vec<u8> = (0..(16u32 << 20)).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8 | 1).collect();
    for (step, sizes) in
        [(1, [16 << 20, 0, 9 << 20]), (2, [16 << 20, 9 << 20, 0]), (3, [0, 0, 16 << 20]), (4, [(8 << 20) - 64, 0, 9 << 20])]
    {
        let blob = |(number, bytes): (usize, usize)| Blob { rank: 0, name: format!("{number}"), data: large[..bytes].into() };
        let blobs: Vec<Blob<'_>> = sizes.into_iter().enumerate().map(blob).collect();
        store.writer(Policy::Full).await.unwrap().save(step, &[], &blobs, &Metadata::default()).await.unwrap();
        let options = VerifyOptions { step: Some(step), ..VerifyOptions::default() };
        let report = maintain::verify(&store, &options).await.unwrap();
        assert!(report.is_clean() && report.casks == 1, "{sizes:?}: {:?}", report.problems);
    }
}
