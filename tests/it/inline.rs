//! Snapshots inside of log entries: one object per small save, and every operation on such snapshots. Spec: log 3.7.

use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::{ObjectStore, path::Path};
use tensorcask::maintain::{self, CompactOptions, CopyOptions, GcOptions, VerifyOptions};
use tensorcask::{ErrorKind, Latest, Metadata, Policy, Slice, SnapshotStatus, Store, StoreOptions, Writer};

use crate::common::{SmallState, noise, wrap, wrap_inline};

const NOW: GcOptions = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };

async fn save(writer: &mut Writer, step: u64) {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
}

/// Asserts that the steps restore bit for bit, through a handle without a cache.
async fn assert_holds(objects: &Arc<InMemory>, steps: impl IntoIterator<Item = u64>) {
    let store = wrap_inline(objects.clone());
    for step in steps {
        let snapshot = store.snapshot(step).await.unwrap();
        let state = SmallState::at(step);
        for (name, bytes) in state.expected() {
            assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
        }
        let rows = snapshot.read("model.sparse", &Slice::rows(3..5)).await.unwrap();
        assert_eq!(rows.data, state.sparse[60..100], "step {step}");
        assert_eq!(snapshot.read_blob(0, "rng").await.unwrap(), state.rng);
        assert_eq!(snapshot.user()["loss"], 1.0 / (step as f64 + 1.0));
        snapshot.verify().await.unwrap();
    }
    let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// Number of objects in a folder.
async fn count(objects: &Arc<InMemory>, folder: &str) -> usize {
    objects.list(Some(&Path::from(folder))).try_collect::<Vec<_>>().await.unwrap().len()
}

async fn assert_counts(objects: &Arc<InMemory>, casks: usize, manifests: usize, entries: usize) {
    let found = (count(objects, "casks").await, count(objects, "snapshots").await, count(objects, "log").await);
    assert_eq!(found, (casks, manifests, entries), "casks, manifests, entries");
}

#[tokio::test]
async fn a_small_save_is_one_object() {
    let objects = Arc::new(InMemory::new());
    let store = wrap_inline(objects.clone());
    let mut writer = store.writer(Policy::Intermittent { every: 4 }).await.unwrap();
    for step in 0..70 {
        save(&mut writer, step).await;
    }
    assert_counts(&objects, 0, 0, 71).await;
    assert_eq!(count(&objects, "directories").await, 1);
    // The first steps are known from a catalog, the last from their entries.
    assert_eq!(count(&objects, "catalog").await, 1);
    assert_holds(&objects, [0, 3, 4, 61, 62, 63, 68, 69]).await;
    // Another writer goes on, also with deltas on a parent that only the catalog names.
    let mut writer = wrap_inline(objects.clone()).writer(Policy::Intermittent { every: 4 }).await.unwrap();
    save(&mut writer, 70).await;
    assert_holds(&objects, [69, 70]).await;
    let listed = wrap_inline(objects.clone()).snapshots().await.unwrap();
    assert_eq!(listed.len(), 71);
    assert!(listed.iter().all(|info| info.stored_bytes > 0 && info.record.inline.is_some()));
}

#[tokio::test]
async fn a_large_save_is_objects() {
    let objects = Arc::new(InMemory::new());
    let store = wrap_inline(objects.clone());
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let mut large = noise(1, 100_000);
    for step in 1..=3 {
        large[step as usize] ^= 1;
        let state = [tensorcask::TensorView::new("w", tensorcask::Dtype::U8, &[100_000], &large).unwrap()];
        writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
    }
    // The base is large; the deltas on it are small.
    assert_counts(&objects, 1, 1, 4).await;
    let fresh = wrap_inline(objects.clone());
    assert_eq!(fresh.snapshot(Latest).await.unwrap().read("w", &Slice::all()).await.unwrap().data, large);
    assert!(maintain::verify(&fresh, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// Chains of both forms, in both orders, by writers with other options.
#[tokio::test]
async fn objects_and_entries_make_one_chain() {
    let objects = Arc::new(InMemory::new());
    for step in 1..=6 {
        let open = if step % 2 == 0 { wrap } else { wrap_inline };
        let mut writer = open(objects.clone()).writer(Policy::Consecutive).await.unwrap();
        save(&mut writer, step).await;
    }
    let chain = wrap(objects.clone()).snapshot(6).await.unwrap().inspect().chain();
    assert_eq!(chain.iter().map(|link| link.record.inline.is_some()).collect::<Vec<_>>(), [false, true, false, true, false, true]);
    assert_holds(&objects, 1..=6).await;
}

#[tokio::test]
async fn gc_compaction_and_pins() {
    let objects = Arc::new(InMemory::new());
    let store = wrap_inline(objects.clone());
    let mut writer = store.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    for step in 1..=6 {
        save(&mut writer, step).await;
    }
    store.pin(5).await.unwrap();
    store.forget(&[1, 2, 4]).await.unwrap();
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!(report.collected.iter().map(|record| record.step).collect::<Vec<_>>(), [2]);
    assert_eq!((report.deleted.len(), report.freed_bytes(), report.collected_bytes), (0, 0, 0), "entries are never deleted");
    assert_holds(&objects, [3, 5, 6]).await;

    let compacted = maintain::compact(&store, 6, &CompactOptions::default()).await.unwrap();
    assert_eq!(compacted.links, 2);
    assert!(compacted.record.inline.is_none());
    assert_holds(&objects, [3, 5, 6]).await;
    save(&mut writer, 7).await;
    assert_holds(&objects, [3, 5, 6, 7]).await;
    store.forget(&[6, 7]).await.unwrap();
    maintain::gc(&store, &NOW).await.unwrap();
    assert_counts(&objects, 0, 0, count(&objects, "log").await).await;
    assert_holds(&objects, [3, 5]).await;
    let statuses = store.history().records().await.unwrap();
    assert_eq!(statuses.iter().filter(|record| record.status == SnapshotStatus::Live).count(), 2);
}

#[tokio::test]
async fn a_reduced_snapshot_becomes_objects() {
    let objects = Arc::new(InMemory::new());
    let store = wrap_inline(objects.clone());
    let mut writer = store.writer(Policy::Full).await.unwrap();
    for step in 1..=2 {
        save(&mut writer, step).await;
    }
    let reduced = maintain::keep_roles(&store, &[1], &["model".into()], &CompactOptions::default()).await.unwrap();
    assert!(reduced[0].held.is_none() && reduced[0].record.inline.is_none());
    let snapshot = wrap_inline(objects.clone()).snapshot(1).await.unwrap();
    assert_eq!(snapshot.read("model.dense", &Slice::all()).await.unwrap().data, SmallState::at(1).dense);
    assert!(snapshot.tensor("optimizer.step").is_err());
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());

    // A copy has the reduced snapshot as objects and the other one inside of its entry.
    let copied = Arc::new(InMemory::new());
    let destination = wrap_inline(copied.clone());
    maintain::copy(&store, &destination, &CopyOptions::default()).await.unwrap();
    assert!(maintain::verify(&destination, &VerifyOptions::default()).await.unwrap().is_clean());
    assert_eq!(destination.snapshot(1).await.unwrap().read("model.dense", &Slice::all()).await.unwrap().data, SmallState::at(1).dense);
    assert!(destination.snapshot(2).await.unwrap().record().inline.is_some());
}

/// From either form into either form, in two goes.
#[tokio::test]
async fn copies() {
    for (from, to) in [(true, true), (true, false), (false, true)] {
        let open = |inline: bool, objects: &Arc<InMemory>| if inline { wrap_inline(objects.clone()) } else { wrap(objects.clone()) };
        let source = Arc::new(InMemory::new());
        let destination = Arc::new(InMemory::new());
        let mut writer = open(from, &source).writer(Policy::Consecutive).await.unwrap();
        for step in 1..=3 {
            save(&mut writer, step).await;
        }
        let copy = async || maintain::copy(&open(from, &source), &open(to, &destination), &CopyOptions::default()).await.unwrap();
        let report = copy().await;
        assert_eq!((report.snapshots, report.present), (3, 0));
        assert_holds(&destination, 1..=3).await;
        assert_eq!(count(&destination, "casks").await == 0, to);
        save(&mut writer, 4).await;
        let report = copy().await;
        assert_eq!((report.snapshots, report.present), (1, 3));
        assert_holds(&destination, 1..=4).await;
        // Ids, and so digests of the manifests, stay the same.
        let records = |store: Store| async move { store.history().records().await.unwrap() };
        let ours = records(open(from, &source)).await;
        let theirs = records(open(to, &destination)).await;
        assert!(ours.iter().zip(&theirs).all(|(a, b)| (a.id, a.manifest) == (b.id, b.manifest)));
    }
}

/// A damaged snapshot is not copied.
#[tokio::test]
async fn damage_is_not_copied() {
    let source = Arc::new(InMemory::new());
    let mut writer = wrap_inline(source.clone()).writer(Policy::Full).await.unwrap();
    save(&mut writer, 1).await;
    let path = Path::from("log/00000000000000000002.json");
    let entry = object_store::ObjectStoreExt::get(source.as_ref(), &path).await.unwrap().bytes().await.unwrap();
    let dense = SmallState::at(1).dense;
    let page = entry.windows(dense.len()).position(|window| window == dense).unwrap();
    let mut damaged = entry.to_vec();
    damaged[page] ^= 1;
    object_store::ObjectStoreExt::put(source.as_ref(), &path, damaged.into()).await.unwrap();
    for open in [wrap, wrap_inline] {
        let destination = open(Arc::new(InMemory::new()));
        assert!(maintain::copy(&wrap_inline(source.clone()), &destination, &CopyOptions::default()).await.is_err());
        assert!(destination.snapshots().await.unwrap().is_empty());
    }
}

/// A snapshot whose directory is damaged is not copied.
#[tokio::test]
async fn a_damaged_directory_is_not_copied() {
    let source = Arc::new(InMemory::new());
    save(&mut wrap_inline(source.clone()).writer(Policy::Full).await.unwrap(), 1).await;
    let listed: Vec<_> = futures::TryStreamExt::try_collect(source.list(Some(&Path::from("directories")))).await.unwrap();
    let path: &Path = &listed.first().map(|meta: &object_store::ObjectMeta| meta.location.clone()).unwrap();
    let mut bytes = object_store::ObjectStoreExt::get(source.as_ref(), path).await.unwrap().bytes().await.unwrap().to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    object_store::ObjectStoreExt::put(source.as_ref(), path, bytes.into()).await.unwrap();
    let destination = wrap(Arc::new(InMemory::new()));
    let error = maintain::copy(&wrap_inline(source), &destination, &CopyOptions::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::Corrupt, Some(path.as_ref())), "{error}");
    assert!(destination.snapshots().await.unwrap().is_empty());
}

/// A writer whose store option is smaller than the snapshot, or whose limit on entries is, saves objects.
#[tokio::test]
async fn options_bound_what_an_entry_holds() {
    for (inline_bytes, max_entry_bytes, casks) in [(64 << 10, 1 << 20, 0), (100, 1 << 20, 3), (64 << 10, 5000, 3)] {
        let objects = Arc::new(InMemory::new());
        let limits = tensorcask::Limits { max_entry_bytes, ..tensorcask::Limits::default() };
        let options = StoreOptions { inline_bytes, limits, ..StoreOptions::default() };
        let store = Store::with_object_store(objects.clone(), Path::default(), options);
        save(&mut store.writer(Policy::Full).await.unwrap(), 1).await;
        assert_eq!(count(&objects, "casks").await, casks);
        assert_holds(&objects, [1]).await;
    }
}
