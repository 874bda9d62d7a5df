//! Copies of a store: beside another copy, interrupted, and with reduced snapshots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{SmallState, wrap};
use object_store::memory::InMemory;
use object_store::path::Path;
use tensorcask::maintain::{self, CompactOptions, Copier, CopyOptions, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Id;
use tensorcask::{ErrorKind, Latest, Policy, Slice, Store};

/// A store with a base of each step.
async fn source(steps: &[u64]) -> Store {
    let store = wrap(Arc::new(InMemory::new()));
    add(&store, steps).await;
    store
}

async fn add(store: &Store, steps: &[u64]) {
    let mut writer = store.writer(Policy::Full).await.unwrap();
    for &step in steps {
        let state = SmallState::at(step);
        writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
    }
}

async fn assert_clean(store: &Store, steps: &[u64]) {
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    let found: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(found, steps);
}

/// `objects`, which another copy of `source` fills right before its first request that creates a log entry.
fn filled_meanwhile(objects: &Arc<InMemory>, source: &Store) -> Store {
    let (other, source, first) = (objects.clone(), source.clone(), AtomicU64::new(1));
    let raced = FaultStore::new(objects.clone(), move |operation, path: &Path| {
        if operation == Operation::Create && path.as_ref().starts_with("log/") && first.swap(0, Ordering::SeqCst) == 1 {
            let (source, destination) = (source.clone(), wrap(other.clone()));
            let copied = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(maintain::copy(&source, &destination, &CopyOptions::default()))
            });
            copied.join().unwrap().unwrap();
        }
        Fault::None
    });
    wrap(Arc::new(raced))
}

#[tokio::test]
async fn two_copies_at_once_add_each_snapshot_once() {
    let source = source(&[1]).await;
    let objects = Arc::new(InMemory::new());
    maintain::copy(&source, &wrap(objects.clone()), &CopyOptions::default()).await.unwrap();
    add(&source, &[2, 3]).await;
    let report = maintain::copy(&source, &filled_meanwhile(&objects, &source), &CopyOptions::default()).await.unwrap();
    assert_eq!((report.snapshots, report.present), (0, 3));
    assert_clean(&wrap(objects), &[1, 2, 3]).await;
}

/// A store of three bases, of which the first is reduced to its weights.
async fn reduced_source() -> Store {
    let source = source(&[1, 2, 3]).await;
    maintain::keep_roles(&source, &[1], &["model".to_owned()], &CompactOptions::default()).await.unwrap();
    source
}

async fn assert_weights_only(store: &Store, step: u64) {
    let snapshot = store.snapshot(step).await.unwrap();
    let state = SmallState::at(step);
    let mut roles: Vec<String> = snapshot.tensors().into_iter().map(|tensor| tensor.role).collect();
    roles.dedup();
    assert_eq!(roles, ["model"]);
    for (name, bytes) in state.expected().into_iter().filter(|(name, _)| snapshot.tensors().iter().any(|tensor| tensor.name == *name)) {
        assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
    }
}

#[tokio::test]
async fn a_reduced_snapshot_never_passes_as_whole() {
    let source = reduced_source().await;
    let destination = wrap(Arc::new(InMemory::new()));
    let mut copier = Copier::open(&source, &destination, Id::random().unwrap(), CopyOptions::default()).await.unwrap();
    copier.take_over().await.unwrap();
    copier.copy_new(&source).await.unwrap();
    assert_weights_only(&destination, 1).await;
    assert_clean(&destination, &[1, 2, 3]).await;
    let whole = |store: Store| async move {
        let snapshots = store.snapshots().await.unwrap();
        snapshots.into_iter().filter(|info| info.record.roles.is_none()).map(|info| info.record.step).collect::<Vec<_>>()
    };
    assert_eq!(whole(destination.clone()).await, [2, 3]);

    // An interrupted copy has only the reduced step.
    let (objects, entries) = (Arc::new(InMemory::new()), AtomicU64::new(0));
    let broken = FaultStore::new(objects.clone(), move |operation, path: &Path| {
        let is_entry = operation == Operation::Create && path.as_ref().starts_with("log/");
        if is_entry && entries.fetch_add(1, Ordering::SeqCst) >= 2 { Fault::FailBefore } else { Fault::None }
    });
    maintain::copy(&source, &wrap(Arc::new(broken)), &CopyOptions::default()).await.unwrap_err();
    let partial = wrap(objects);
    assert_clean(&partial, &[1]).await;
    assert_weights_only(&partial, 1).await;
    assert_eq!(partial.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(partial.recover(&[]).await.unwrap_err().kind(), ErrorKind::NotFound);
    maintain::copy(&source, &partial, &CopyOptions::default()).await.unwrap();
    assert_clean(&partial, &[1, 2, 3]).await;
    assert_eq!(whole(partial).await, [2, 3]);
}

#[tokio::test]
async fn a_reduced_delta_is_copied_with_its_chain() {
    let source = wrap(Arc::new(InMemory::new()));
    let mut writer = source.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    for step in 1..=7 {
        let state = SmallState::at(step);
        writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
    }
    let model = ["model".to_owned()];
    maintain::keep_roles(&source, &[1, 2, 3], &model, &CompactOptions::default()).await.unwrap();
    let destination = wrap(Arc::new(InMemory::new()));
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_clean(&destination, &[1, 2, 3, 4, 5, 6, 7]).await;
    for step in 1..=3 {
        assert_weights_only(&destination, step).await;
    }
    assert_eq!(destination.snapshot(Latest).await.unwrap().step(), 7);
}
