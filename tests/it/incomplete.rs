//! Stores of which a part is missing or foreign: nothing may take the rest for the whole, and nothing may be deleted by it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{SmallState, objects_of, without_inline, wrap};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use tempfile::TempDir;
use tensorcask::maintain::{self, CompactOptions, CopyOptions, DoctorOptions, GcOptions, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::{Error, ErrorKind, ExistingStep, Latest, Policy, Retention, Slice, Store, StoreOptions, Writer, WriterOptions};

const NOW: GcOptions = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: true };

/// A store in a folder, with a consecutive chain of these steps as objects of their own.
async fn saved(steps: impl IntoIterator<Item = u64>) -> (TempDir, Store) {
    saved_with(without_inline(), steps).await
}

async fn saved_with(options: StoreOptions, steps: impl IntoIterator<Item = u64>) -> (TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreOptions { fsync: false, ..options }.open(folder.path().to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in steps {
        save(&mut writer, step).await.unwrap();
    }
    (folder, store)
}

async fn save(writer: &mut Writer, step: u64) -> tensorcask::Result<()> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.map(|_| ())
}

fn entry(folder: &TempDir, sequence: u64) -> PathBuf {
    folder.path().join(format!("log/{sequence:020}.json"))
}

/// Fails with `Corrupt`, names the object, and leaves the folder as it was.
async fn refuses<T: std::fmt::Debug>(folder: &Path, object: &str, call: impl Future<Output = tensorcask::Result<T>>) -> Error {
    let before = objects_of(folder);
    let error = call.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.object_name().is_some_and(|found| found.contains(object)), "{error}");
    let after = objects_of(folder);
    assert!(before == after, "{object}: the store was changed");
    error
}

/// Everything that deletes, or decides that something is not needed.
async fn all_refuse(folder: &TempDir, store: &Store, object: &str) {
    let path = folder.path();
    let last = Retention { keep_last: Some(1), ..Retention::default() };
    refuses(path, object, maintain::gc(store, &NOW)).await;
    refuses(path, object, maintain::gc(store, &GcOptions { apply: false, ..NOW })).await;
    refuses(path, object, store.forget(&[1])).await;
    refuses(path, object, store.retain(last)).await;
    refuses(path, object, store.history().unwanted(last)).await;
    refuses(path, object, maintain::apply_retention(store, last, &CompactOptions::default())).await;
    refuses(path, object, maintain::keep_roles(store, &[1], &["model".to_owned()], &CompactOptions::default())).await;
    refuses(path, object, maintain::compact(store, 2, &CompactOptions::default())).await;
    refuses(path, object, store.history().entries()).await;
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.problems.iter().any(|problem| problem.error.kind() == ErrorKind::Corrupt), "{object}: {report:?}");
    let report = maintain::doctor(store, &DoctorOptions { apply: true, age_floor: Duration::ZERO }).await.unwrap();
    assert!(!report.is_healthy() && report.orphans.is_empty(), "{object}: {report:?}");
}

#[tokio::test]
async fn nothing_is_deleted_by_a_log_with_a_gap() {
    let (folder, store) = saved(1..=70).await;
    for lost in [1, 10, 64, 68] {
        let bytes = std::fs::read(entry(&folder, lost)).unwrap();
        std::fs::remove_file(entry(&folder, lost)).unwrap();
        all_refuse(&folder, &store, &format!("log/{lost:020}.json")).await;
        std::fs::write(entry(&folder, lost), bytes).unwrap();
    }
    assert!(maintain::gc(&store, &NOW).await.unwrap().deleted.is_empty(), "the log is whole again");
    assert_eq!(store.snapshots().await.unwrap().len(), 70);
}

#[tokio::test]
async fn nothing_is_deleted_if_log_and_catalog_disagree() {
    let (folder, store) = saved(1..=63).await;
    let (other, _) = saved(1..=63).await;
    let catalog = |folder: &TempDir| std::fs::read_dir(folder.path().join("catalog")).unwrap().next().unwrap().unwrap().path();
    // An older copy of the log.
    let ours = catalog(&folder);
    let last = std::fs::read(entry(&folder, 64)).unwrap();
    std::fs::remove_file(entry(&folder, 64)).unwrap();
    all_refuse(&folder, &store, "0064").await;
    std::fs::write(entry(&folder, 64), last).unwrap();
    // The catalog of another run.
    let theirs = catalog(&other);
    std::fs::rename(&ours, folder.path().join("aside")).unwrap();
    std::fs::copy(&theirs, folder.path().join("catalog").join(theirs.file_name().unwrap())).unwrap();
    refuses(folder.path(), "0064", maintain::gc(&store, &NOW)).await;
    std::fs::remove_file(folder.path().join("catalog").join(theirs.file_name().unwrap())).unwrap();
    std::fs::rename(folder.path().join("aside"), ours).unwrap();
    maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!(store.snapshots().await.unwrap().len(), 63);
}

/// The end of a log leaves no gap. But the manifests that it named are newer than the rest.
#[tokio::test]
async fn nothing_is_deleted_if_the_end_of_the_log_is_lost() {
    let (folder, store) = saved(1..=6).await;
    let lost: Vec<(PathBuf, Vec<u8>)> = (5..=7).map(|at| (entry(&folder, at), std::fs::read(entry(&folder, at)).unwrap())).collect();
    lost.iter().for_each(|(path, _)| std::fs::remove_file(path).unwrap());
    store.forget(&[1, 2, 3]).await.unwrap();
    refuses(folder.path(), "snapshots/", maintain::gc(&store, &NOW)).await;
    let report = maintain::doctor(&store, &DoctorOptions::default()).await.unwrap();
    assert!(report.problems[0].error.message().contains("lost"), "{report:?}");
    std::fs::remove_file(entry(&folder, 5)).unwrap();
    lost.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    maintain::gc(&store, &NOW).await.unwrap();
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    assert_eq!(store.snapshots().await.unwrap().len(), 6);

    // A single manifest may be that of a failed save. It stays until the log goes on, with the chain that it needs.
    let last = std::fs::read(entry(&folder, 7)).unwrap();
    std::fs::remove_file(entry(&folder, 7)).unwrap();
    store.forget(&[1, 2, 3, 4, 5]).await.unwrap();
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!((report.deleted.len(), report.collected.len()), (0, 0), "{report:?}");
    std::fs::write(entry(&folder, 7), last).unwrap();
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    std::fs::remove_file(entry(&folder, 7)).unwrap();
    store.writer(Policy::Full).await.unwrap();
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert!(!report.deleted.is_empty(), "the save has failed: {report:?}");
}

#[tokio::test]
async fn a_store_without_its_log_is_not_empty() {
    for options in [without_inline(), StoreOptions::default()] {
        let (folder, store) = saved_with(options, 1..=3).await;
        let path = folder.path();
        std::fs::remove_dir_all(path.join("log")).unwrap();
        all_refuse(&folder, &store, "log/00000000000000000001.json").await;
        refuses(path, "log/", store.snapshots()).await;
        refuses(path, "log/", store.snapshot(Latest)).await;
        refuses(path, "log/", store.history().records()).await;
        let error = store.writer(Policy::Full).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let place = tempfile::tempdir().unwrap();
        let to = Store::open(place.path().to_str().unwrap()).unwrap();
        refuses(path, "log/", maintain::copy(&store, &to, &CopyOptions::default())).await;
    }
    // Nothing was ever saved.
    let (_folder, store) = saved([]).await;
    assert!(store.snapshots().await.unwrap().is_empty());
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// A copy in parts writes casks before the first entry. That is no damage, but old ones must not be deleted either.
#[tokio::test]
async fn casks_without_a_log_are_not_deleted() {
    let (_source, store) = saved(1..=2).await;
    let place = tempfile::tempdir().unwrap();
    let to = without_inline().open(place.path().to_str().unwrap()).unwrap();
    maintain::copy(&store, &to, &CopyOptions { shard: Some((0, 1)), ..CopyOptions::default() }).await.unwrap();
    refuses(place.path(), "log/", maintain::gc(&to, &NOW)).await;
    maintain::copy(&store, &to, &CopyOptions::default()).await.unwrap();
    maintain::gc(&to, &NOW).await.unwrap();
    assert!(maintain::verify(&to, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn a_store_without_its_store_file_is_not_a_new_place() {
    let (folder, store) = saved(1..=2).await;
    let file = std::fs::read(folder.path().join("store.json")).unwrap();
    std::fs::remove_file(folder.path().join("store.json")).unwrap();
    refuses(folder.path(), "store.json", store.snapshots()).await;
    refuses(folder.path(), "store.json", maintain::verify(&store, &VerifyOptions::default())).await;
    refuses(folder.path(), "store.json", store.writer(Policy::Full)).await;
    std::fs::write(folder.path().join("store.json"), file).unwrap();
    save(&mut store.writer(Policy::Full).await.unwrap(), 3).await.unwrap();
}

/// Only regular files with the names of the spec are objects of a store.
#[cfg(unix)]
#[tokio::test]
async fn files_of_others_are_left_alone() {
    use std::os::unix::fs::symlink;
    let (folder, store) = saved(1..=3).await;
    let outside = tempfile::tempdir().unwrap();
    let id = "0123456789abcdef".repeat(2);
    for name in [format!("{id}.cask"), "notes.txt".to_owned()] {
        std::fs::write(outside.path().join(name), "precious").unwrap();
    }
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir_all(path("receipts/5-0")).unwrap();
    std::fs::create_dir_all(path("casks/old")).unwrap();
    let foreign =
        ["casks/notes.txt", "casks/x.cask", "snapshots/README", "receipts/5-0/log.txt", "casks/old/notes.cask", "casks/a#1", "notes.txt"];
    for name in foreign {
        std::fs::write(path(name), "precious").unwrap();
    }
    symlink(outside.path(), path("receipts/9-0")).unwrap();
    symlink(outside.path(), path("casks/all")).unwrap();
    symlink(outside.path().join("notes.txt"), path(&format!("casks/{}.cask", "f".repeat(32)))).unwrap();
    std::fs::write(path("receipts/5-0/0.json"), "an old message").unwrap();
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!(report.deleted.iter().map(|deleted| deleted.path.as_str()).collect::<Vec<_>>(), ["receipts/5-0/0.json"]);
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    assert!(foreign.iter().all(|name| path(name).exists()) && path("casks/all").is_symlink());
    assert_eq!(objects_of(outside.path()).len(), 2);

    // A folder of another store in place of our own.
    std::fs::rename(path("casks"), path("aside")).unwrap();
    symlink(outside.path(), path("casks")).unwrap();
    let error = maintain::gc(&store, &NOW).await.unwrap_err();
    assert!(error.message().contains("symbolic link"), "{error}");
    assert_eq!(objects_of(outside.path()).len(), 2);
    std::fs::remove_file(path("casks")).unwrap();
    std::fs::rename(path("aside"), path("casks")).unwrap();

    // A FIFO would block its reader for ever.
    for object in ["store.json", "log/00000000000000000002.json"] {
        std::fs::rename(path(object), path("aside")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path(object)).status().unwrap().success());
        let error = store.snapshots().await.unwrap_err();
        assert!(error.message().contains("neither a file nor a folder"), "{error}");
        std::fs::remove_file(path(object)).unwrap();
        std::fs::rename(path("aside"), path(object)).unwrap();
    }
    assert_eq!(store.snapshots().await.unwrap().len(), 3);
}

#[tokio::test]
async fn files_of_killed_processes_are_removed_everywhere() {
    let (folder, store) = saved(1..=1).await;
    let id = "0123456789abcdef".repeat(2);
    let staged = [format!("casks/{id}.cask#1"), "offers/start/0.json#2".into(), format!("probe/{id}#1"), "receipts/3-0/1.json#7".into()];
    let scratch = [format!("probe/{id}"), format!("probe/{id}-3")];
    let put = |names: &[String]| {
        for name in names {
            std::fs::create_dir_all(folder.path().join(name).parent().unwrap()).unwrap();
            std::fs::write(folder.path().join(name), "x").unwrap();
        }
    };
    put(&staged);
    put(&scratch);
    let paths = |found: &[maintain::Deletable]| found.iter().map(|found| found.path.clone()).collect::<Vec<_>>();
    let report = maintain::doctor(&store, &DoctorOptions { apply: true, ..DoctorOptions::default() }).await.unwrap();
    assert_eq!((report.staging.len(), report.orphans.len()), (0, 0), "too young");
    let report = maintain::doctor(&store, &DoctorOptions { apply: true, age_floor: Duration::ZERO }).await.unwrap();
    assert_eq!(paths(&report.staging), staged);
    assert_eq!(paths(&report.orphans), scratch);
    put(&staged);
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!(paths(&report.deleted), staged);
    let is_left = |name: &String| folder.path().join(name).exists();
    assert!(!staged.iter().chain(&scratch).any(is_left));
}

#[tokio::test]
async fn all_steps_that_need_a_damaged_object_are_named() {
    let (folder, store) = saved(1..=4).await;
    let base = store.snapshot(1).await.unwrap().manifest().casks[0].path();
    let bytes = std::fs::read(folder.path().join(&base)).unwrap();
    let mut damaged = bytes.clone();
    damaged[70] ^= 1;
    for contents in [Some(damaged), None] {
        match contents {
            Some(damaged) => std::fs::write(folder.path().join(&base), damaged).unwrap(),
            None => std::fs::remove_file(folder.path().join(&base)).unwrap(),
        }
        let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
        let named = report.problems.iter().find(|problem| problem.error.object_name() == Some(&base)).unwrap();
        assert_eq!(named.steps, [1, 2, 3, 4], "{report:?}");
    }
}

/// A copy of some steps decides about these steps only.
#[tokio::test]
async fn a_copy_of_one_step_forgets_no_other() {
    let (_folder, store) = saved(1..=2).await;
    let place = tempfile::tempdir().unwrap();
    let archive = without_inline().open(place.path().to_str().unwrap()).unwrap();
    let only = |step: u64| CopyOptions { steps: Some(vec![step]), ..CopyOptions::default() };
    maintain::copy(&store, &archive, &only(1)).await.unwrap();
    store.forget(&[1]).await.unwrap();
    maintain::copy(&store, &archive, &only(2)).await.unwrap();
    let steps = |store: Store| async move { store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect::<Vec<_>>() };
    assert_eq!(steps(archive.clone()).await, [1, 2]);
    // A link that is new there, and that nobody has asked for, is copied as forgotten.
    let place = tempfile::tempdir().unwrap();
    let other = without_inline().open(place.path().to_str().unwrap()).unwrap();
    maintain::copy(&store, &other, &only(2)).await.unwrap();
    assert_eq!(steps(other).await, [2]);
}

#[tokio::test]
async fn a_pinned_step_is_replaced_only_by_itself() {
    let (_folder, store) = saved(1..=2).await;
    let replace = WriterOptions { policy: Policy::Full, existing_step: ExistingStep::Replace, ..WriterOptions::default() };
    store.pin(2).await.unwrap();
    let mut writer = store.writer_with(replace).await.unwrap();
    let other = SmallState::at(7);
    let error = writer.save(2, &other.tensors(), &other.blobs(), &SmallState::metadata(2)).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Conflict && error.message().contains("pinned"), "{error}");
    // The same content again: the pin stays with the step, and what it replaces can be freed.
    save(&mut writer, 2).await.unwrap();
    let records = store.history().records().await.unwrap();
    let pinned: Vec<(u64, bool)> = records.iter().map(|record| (record.step, record.pinned)).collect();
    assert_eq!(pinned, [(1, false), (2, false), (2, true)]);
    let report = maintain::gc(&store, &NOW).await.unwrap();
    assert_eq!((report.collected.len(), report.held.len()), (1, 0));
    store.unpin(2).await.unwrap();
    writer.save(2, &other.tensors(), &other.blobs(), &SmallState::metadata(2)).await.unwrap();
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// Another process pins a step while the state that is to replace it is uploaded.
#[tokio::test]
async fn a_step_that_is_pinned_during_a_save_is_not_replaced() {
    let memory = Arc::new(InMemory::new());
    let armed = Arc::new(AtomicBool::new(false));
    let objects = memory.clone();
    let switch = armed.clone();
    let pinning = FaultStore::new(memory.clone(), move |operation, path: &object_store::path::Path| {
        if operation == Operation::Create && path.as_ref().starts_with("snapshots/") && switch.swap(false, Ordering::SeqCst) {
            let store = wrap(objects.clone());
            let pin = move || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(store.pin(1));
            std::thread::spawn(pin).join().unwrap().unwrap();
        }
        Fault::None
    });
    let replace = WriterOptions { policy: Policy::Full, existing_step: ExistingStep::Replace, ..WriterOptions::default() };
    let mut writer = wrap(Arc::new(pinning)).writer_with(replace).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    armed.store(true, Ordering::SeqCst);
    let other = SmallState::at(7);
    for _ in 0..2 {
        let error = writer.save(1, &other.tensors(), &other.blobs(), &SmallState::metadata(1)).await.unwrap_err();
        assert!(error.kind() == ErrorKind::Conflict && error.message().contains("pinned"), "{error}");
    }
    let store = wrap(memory);
    for (name, bytes) in SmallState::at(1).expected() {
        assert_eq!(store.snapshot(1).await.unwrap().read(name, &Slice::all()).await.unwrap().data, bytes, "{name}");
    }
    // The same content may take its place.
    save(&mut writer, 1).await.unwrap();
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn a_compaction_whose_entry_is_lost_keeps_its_objects() {
    let (folder, store) = saved(1..=3).await;
    maintain::compact(&store, 3, &CompactOptions::default()).await.unwrap();
    // After `opened` and three snapshots.
    let last = entry(&folder, 5);
    let kept = std::fs::read(&last).unwrap();
    std::fs::remove_file(&last).unwrap();
    let before = objects_of(folder.path());
    maintain::gc(&store, &GcOptions { directories: false, ..NOW }).await.unwrap();
    assert!(before == objects_of(folder.path()), "objects of the compaction were deleted");
    std::fs::write(&last, kept).unwrap();
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// A second run in the place of the first would take its steps for superseded ones.
#[tokio::test]
async fn a_store_without_its_name_is_damaged_for_every_reader_and_takes_no_copy_of_another() {
    let (folder, store) = saved(1..=3).await;
    let (_other_folder, other) = saved(1..=3).await;
    let (_third_folder, third) = saved([]).await;
    let name = folder.path().join("store.json");
    let bytes = std::fs::read(&name).unwrap();
    std::fs::remove_file(&name).unwrap();
    for options in [CopyOptions::default(), CopyOptions { shard: Some((0, 1)), ..CopyOptions::default() }] {
        refuses(folder.path(), "store.json", maintain::copy(&other, &store, &options)).await;
    }
    refuses(folder.path(), "store.json", maintain::create_for_run_of(&other, &store)).await;
    refuses(folder.path(), "store.json", maintain::copy(&store, &third, &CopyOptions::default())).await;
    refuses(folder.path(), "store.json", store.history().run()).await;
    refuses(folder.path(), "store.json", store.history().entries()).await;
    refuses(folder.path(), "store.json", store.history().records()).await;
    refuses(folder.path(), "store.json", store.snapshots()).await;
    std::fs::write(&name, bytes).unwrap();
    assert_eq!(store.snapshots().await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_gap_before_every_step_is_no_empty_store() {
    let (folder, store) = saved(1..=3).await;
    std::fs::remove_file(entry(&folder, 2)).unwrap();
    refuses(folder.path(), "0002.json", store.snapshots()).await;
    refuses(folder.path(), "0002.json", store.snapshot(Latest)).await;
    let (archive, empty) = saved([]).await;
    std::fs::remove_dir_all(archive.path()).unwrap();
    let options = CompactOptions::default();
    assert_eq!(maintain::consolidate(&store, &empty, Latest, &options).await.unwrap_err().kind(), ErrorKind::Corrupt);

    // Nor is a step before a gap the newest one.
    let (folder, store) = saved(1..=6).await;
    std::fs::remove_file(entry(&folder, 3)).unwrap();
    assert_eq!(maintain::consolidate(&store, &empty, Latest, &options).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(!archive.path().exists());
    // A step that the caller names can be saved from such a store.
    maintain::consolidate(&store, &empty, 1, &options).await.unwrap();
    assert_eq!(empty.snapshot(Latest).await.unwrap().step(), 1);
}

/// Whatever else lies below the root is none of the store's (log 2.4), as in a folder that somebody made for copies.
#[tokio::test]
async fn objects_below_the_folder_of_the_log_are_no_entries() {
    let objects = Arc::new(InMemory::new());
    let store = wrap(objects.clone());
    let (local, in_folder) = saved(1..=70).await;
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in 1..=70 {
        save(&mut writer, step).await.unwrap();
    }
    let path = |name: &str| object_store::path::Path::from(name);
    let first = objects.get(&path("log/00000000000000000001.json")).await.unwrap().bytes().await.unwrap();
    for name in ["log/backup/00000000000000000099.json", "log/backup/00000000000000000070.json", "catalog/old/00000000000000000099.parquet"]
    {
        objects.put(&path(name), first.clone().into()).await.unwrap();
    }
    std::fs::create_dir(local.path().join("log/backup")).unwrap();
    std::fs::copy(entry(&local, 1), local.path().join("log/backup/00000000000000000099.json")).unwrap();
    for (store, mut writer) in
        [(&store, store.writer(Policy::Full).await.unwrap()), (&in_folder, in_folder.writer(Policy::Full).await.unwrap())]
    {
        save(&mut writer, 71).await.unwrap();
        maintain::gc(store, &NOW).await.unwrap();
        assert_eq!(store.snapshot(Latest).await.unwrap().step(), 71);
    }
    // Nor do they fill a gap.
    let third = path("log/00000000000000000003.json");
    let bytes = objects.get(&third).await.unwrap().bytes().await.unwrap();
    objects.put(&path("log/backup/00000000000000000003.json"), bytes.into()).await.unwrap();
    objects.delete(&third).await.unwrap();
    let error = store.writer(Policy::Full).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}
