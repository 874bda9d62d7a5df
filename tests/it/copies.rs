//! Copies of a store: beside another copy, interrupted, and with reduced snapshots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use crate::common::{SmallState, without_inline, wrap};
use object_store::ObjectStoreExt;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use tensorcask::maintain::{self, CompactOptions, Copier, CopyOptions, GcOptions, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Id;
use tensorcask::{ErrorKind, ExistingStep, Latest, Policy, Slice, Store, Writer, WriterOptions};

/// A store with a base of each step.
async fn source(steps: &[u64]) -> Store {
    let store = wrap(Arc::new(InMemory::new()));
    add(&store, steps).await;
    store
}

async fn add(store: &Store, steps: &[u64]) {
    let mut writer = store.writer(Policy::Full).await.unwrap();
    for &step in steps {
        save(&mut writer, step).await;
    }
}

async fn save(writer: &mut Writer, step: u64) {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
}

/// A store with a base of step 1, and deltas on it up to this step.
async fn with_deltas(last: u64) -> (Store, Writer) {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer(Policy::Intermittent { every: 10 }).await.unwrap();
    for step in 1..=last {
        save(&mut writer, step).await;
    }
    (store, writer)
}

async fn assert_clean(store: &Store, steps: &[u64]) {
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    let found: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(found, steps);
}

/// `objects`, which another copy of `source` fills right before its first request that creates a log entry.
fn filled_meanwhile(objects: &Arc<InMemory>, source: &Store) -> Store {
    let other = objects.clone();
    let source = source.clone();
    let first = AtomicU64::new(1);
    let raced = FaultStore::new(objects.clone(), move |operation, path: &Path| {
        if operation == Operation::Create && path.as_ref().starts_with("log/") && first.swap(0, Ordering::SeqCst) == 1 {
            let source = source.clone();
            let destination = wrap(other.clone());
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
    let objects = Arc::new(InMemory::new());
    let entries = AtomicU64::new(0);
    let broken = FaultStore::new(objects.clone(), move |operation, path: &Path| {
        let is_entry = operation == Operation::Create && path.as_ref().starts_with("log/");
        if is_entry && entries.fetch_add(1, Ordering::SeqCst) >= 2 { Fault::FailBefore } else { Fault::None }
    });
    maintain::copy(&source, &wrap(Arc::new(broken)), &CopyOptions::default()).await.unwrap_err();
    let partial = wrap(objects);
    assert_clean(&partial, &[1]).await;
    assert_weights_only(&partial, 1).await;
    assert_eq!(partial.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::Template, "not an empty store");
    assert_eq!(partial.recover(&[]).await.unwrap_err().kind(), ErrorKind::Template);
    maintain::copy(&source, &partial, &CopyOptions::default()).await.unwrap();
    assert_clean(&partial, &[1, 2, 3]).await;
    assert_eq!(whole(partial).await, [2, 3]);
}

#[tokio::test]
async fn a_reduced_delta_is_copied_with_its_chain() {
    let source = wrap(Arc::new(InMemory::new()));
    let mut writer = source.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    for step in 1..=7 {
        save(&mut writer, step).await;
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

/// A delta would pass, and its optimizer state could not be read.
#[tokio::test]
async fn a_delta_is_not_copied_onto_a_snapshot_that_the_destination_has_reduced() {
    let ((source, mut writer), destination) = (with_deltas(3).await, wrap(Arc::new(InMemory::new())));
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    maintain::compact(&destination, 3, &CompactOptions::default()).await.unwrap();
    destination.forget(&[2]).await.unwrap();
    let reduced = maintain::keep_roles(&destination, &[1], &["model".to_owned()], &CompactOptions::default()).await.unwrap();
    assert!(reduced[0].held.is_none(), "{reduced:?}");

    save(&mut writer, 4).await;
    let error = maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.clause_name()), (ErrorKind::Corrupt, Some("log 4.7")), "{error}");
    let mut copier = Copier::open(&source, &destination, Id::random().unwrap(), CopyOptions::default()).await.unwrap();
    assert!(copier.lacks_parents_of(&source).await.unwrap());
    assert_clean(&destination, &[1, 3]).await;
    // As the message says.
    maintain::compact(&source, 4, &CompactOptions::default()).await.unwrap();
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_clean(&destination, &[1, 3, 4]).await;
}

#[tokio::test]
async fn a_step_that_the_destination_has_forgotten_is_not_reported_as_present() {
    let source = source(&[1, 2]).await;
    let destination = wrap(Arc::new(InMemory::new()));
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    destination.forget(&[1]).await.unwrap();
    let report = maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_eq!((report.snapshots, report.present, report.forgotten), (0, 1, 1));
    let only_this = CopyOptions { steps: Some(vec![1]), ..CopyOptions::default() };
    let error = maintain::copy(&source, &destination, &only_this).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert_clean(&destination, &[2]).await;
}

/// Its base was copied as a link of the chain only.
#[tokio::test]
async fn a_repeated_copy_of_a_delta_reports_nothing_as_forgotten() {
    let ((source, _), destination) = (with_deltas(2).await, wrap(Arc::new(InMemory::new())));
    let only = |step| CopyOptions { steps: Some(vec![step]), ..CopyOptions::default() };
    maintain::copy(&source, &destination, &only(2)).await.unwrap();
    let again = maintain::copy(&source, &destination, &only(2)).await.unwrap();
    assert_eq!((again.snapshots, again.present, again.forgotten), (0, 2, 0));
    assert_eq!(maintain::copy(&source, &destination, &only(1)).await.unwrap_err().kind(), ErrorKind::Conflict);
    assert_clean(&destination, &[2]).await;
}

#[tokio::test]
async fn a_step_that_is_pinned_at_the_destination_stays() {
    let ((source, _), destination) = (with_deltas(2).await, wrap(Arc::new(InMemory::new())));
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    destination.pin(1).await.unwrap();
    source.forget(&[1]).await.unwrap();
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_clean(&destination, &[1, 2]).await;
    destination.unpin(1).await.unwrap();
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_clean(&destination, &[2]).await;
}

/// A copy takes the place of no step that was saved at the destination.
#[tokio::test]
async fn a_copy_replaces_no_step_of_the_destination() {
    for pinned in [false, true] {
        let ((from, mut writer), there) = (with_deltas(2).await, wrap(Arc::new(InMemory::new())));
        maintain::copy(&from, &there, &CopyOptions::default()).await.unwrap();
        add(&there, &[3, 4]).await;
        if pinned {
            there.pin(3).await.unwrap();
        }
        save(&mut writer, 3).await;
        let taking_over = CopyOptions { take_over: true, ..CopyOptions::default() };
        let before = there.history().entries().await.unwrap().len();
        let error = maintain::copy(&from, &there, &taking_over).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(error.message().contains("Forget it there"), "{error}");
        assert_eq!(there.history().entries().await.unwrap().len(), before, "no job was fenced");
        assert_clean(&there, &[1, 2, 3, 4]).await;
        // As the message says.
        there.unpin(3).await.unwrap();
        there.forget(&[3]).await.unwrap();
        maintain::copy(&from, &there, &taking_over).await.unwrap();
        assert_clean(&there, &[1, 2, 4, 3]).await;
    }
}

/// A pin moves with its step. One that the source has taken off stays at the destination, and protects the step there.
#[tokio::test]
async fn a_step_that_was_copied_with_its_pin_can_be_copied_again() {
    let ((from, writer), there) = (with_deltas(2).await, wrap(Arc::new(InMemory::new())));
    drop(writer);
    from.pin(2).await.unwrap();
    maintain::copy(&from, &there, &CopyOptions::default()).await.unwrap();
    let replace = WriterOptions { policy: Policy::Full, existing_step: ExistingStep::Replace, ..WriterOptions::default() };
    let mut writer = from.writer_with(replace).await.unwrap();
    save(&mut writer, 2).await;
    maintain::copy(&from, &there, &CopyOptions::default()).await.unwrap();
    assert_clean(&there, &[1, 2]).await;

    from.unpin(2).await.unwrap();
    save(&mut writer, 2).await;
    let error = maintain::copy(&from, &there, &CopyOptions::default()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Conflict && error.message().contains("Unpin it there"), "{error}");
    there.unpin(2).await.unwrap();
    maintain::copy(&from, &there, &CopyOptions::default()).await.unwrap();
    assert_clean(&there, &[1, 2]).await;
}

/// The writer of the destination goes on: nothing has fenced it.
#[tokio::test]
async fn a_refused_consolidation_stops_no_job() {
    let from = source(&[1]).await;
    let job = wrap(Arc::new(InMemory::new()));
    let mut writer = job.writer(Policy::Full).await.unwrap();
    for step in 2..=3 {
        save(&mut writer, step).await;
        let error = maintain::consolidate(&from, &job, 1, &CompactOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    assert_clean(&job, &[2, 3]).await;
}

/// Another process pins a snapshot while it is being forgotten.
#[tokio::test]
async fn a_snapshot_that_was_pinned_meanwhile_is_not_reported_as_forgotten() {
    let objects = Arc::new(InMemory::new());
    add(&wrap(objects.clone()), &[1, 2, 3]).await;
    let other = objects.clone();
    let first = AtomicU64::new(1);
    let raced = FaultStore::new(objects.clone(), move |operation, path: &Path| {
        if operation == Operation::Create && path.as_ref().starts_with("log/") && first.swap(0, Ordering::SeqCst) == 1 {
            let store = wrap(other.clone());
            let pinned = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(store.pin(1))
            });
            pinned.join().unwrap().unwrap();
        }
        Fault::None
    });
    let store = wrap(Arc::new(raced));
    let ids: Vec<Id> = store.snapshots().await.unwrap().iter().take(2).map(|info| info.record.id).collect();
    let forgotten = store.history().forget_snapshots(&ids).await.unwrap();
    assert_eq!(forgotten.iter().map(|record| record.step).collect::<Vec<_>>(), [2]);
    assert_clean(&wrap(objects), &[1, 3]).await;
}

/// Garbage collection may delete it at any time.
#[tokio::test]
async fn an_old_cask_of_an_interrupted_reduction_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let url = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let store = Store::open(&url("run")).unwrap();
    add(&store, &[1, 2]).await;
    assert!(store.snapshot(1).await.unwrap().record().inline.is_some());
    let model = ["model".to_owned()];
    // The casks that the reduction writes.
    let twin = Store::open(&url("twin")).unwrap();
    maintain::copy(&store, &twin, &CopyOptions::default()).await.unwrap();
    maintain::keep_roles(&twin, &[1], &model, &CompactOptions::default()).await.unwrap();
    std::fs::create_dir_all(folder.path().join("run/casks")).unwrap();
    for cask in std::fs::read_dir(folder.path().join("twin/casks")).unwrap() {
        let cask = cask.unwrap();
        let left = folder.path().join("run/casks").join(cask.file_name());
        std::fs::copy(cask.path(), &left).unwrap();
        make_old(&left);
    }
    maintain::keep_roles(&store, &[1], &model, &CompactOptions::default()).await.unwrap();
    // Written again, the cask is no old leftover.
    maintain::gc(&store, &GcOptions { apply: true, ..GcOptions::default() }).await.unwrap();
    assert_weights_only(&store, 1).await;
    assert_clean(&store, &[1, 2]).await;
}

/// Copies and reductions give a cask the same name each time.
#[tokio::test]
async fn a_cask_that_is_written_anew_after_gc_has_listed_it_stays() {
    let folder = tempfile::tempdir().unwrap();
    let cask = |name: &str| folder.path().join("casks").join(name);
    let old = cask("00000000000000000000000000000000.cask");
    let anew = cask("11111111111111111111111111111111.cask");
    let written = anew.clone();
    let files = FaultStore::new(Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap()), move |operation, path| {
        if operation == Operation::Head && written.ends_with(path.filename().unwrap_or_default()) {
            std::fs::write(&written, b"written anew").unwrap();
        }
        Fault::None
    });
    let store = wrap(Arc::new(files));
    add(&store, &[1]).await;
    for path in [&old, &anew] {
        std::fs::write(path, b"left over").unwrap();
        make_old(path);
    }
    let report = maintain::gc(&store, &GcOptions { apply: true, ..GcOptions::default() }).await.unwrap();
    let deleted: Vec<&str> = report.deleted.iter().map(|object| object.path.as_str()).collect();
    assert_eq!(deleted, ["casks/00000000000000000000000000000000.cask"]);
    assert!(!old.exists() && anew.exists());
}

/// An interrupted copy goes on, however long ago it was: what it left is written again, and so is younger than the age floor.
#[tokio::test]
async fn a_copy_goes_on_from_what_an_old_one_left() {
    let objects = Arc::new(InMemory::new());
    let source = wrap(objects.clone());
    add(&source, &[1, 2]).await;
    let folder = tempfile::tempdir().unwrap();
    let destination = without_inline().open(folder.path().to_str().unwrap()).unwrap();
    maintain::copy(&source, &destination, &CopyOptions { steps: Some(vec![1]), ..CopyOptions::default() }).await.unwrap();
    let shard = CopyOptions { shard: Some((0, 1)), ..CopyOptions::default() };
    let sent = maintain::copy(&source, &destination, &shard).await.unwrap().objects;
    assert!(sent > 0);
    // Then a manifest, before the process was killed.
    let manifest = source.history().records().await.unwrap()[1].manifest_path();
    let bytes = objects.get(&Path::from(manifest.as_str())).await.unwrap().bytes().await.unwrap();
    std::fs::write(folder.path().join(&manifest), bytes).unwrap();
    let casks = std::fs::read_dir(folder.path().join("casks")).unwrap().map(|found| found.unwrap().path());
    casks.chain([folder.path().join(&manifest)]).for_each(|path| make_old(&path));
    maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_eq!(destination.snapshots().await.unwrap().len(), 2);
    assert!(maintain::verify(&destination, &VerifyOptions::default()).await.unwrap().is_clean());
    assert!(maintain::gc(&destination, &GcOptions { apply: true, ..GcOptions::default() }).await.unwrap().deleted.is_empty());
}

/// Sets the time of last modification back to before the default age floor.
fn make_old(path: &std::path::Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - 2 * GcOptions::default().age_floor).unwrap();
}
