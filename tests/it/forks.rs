//! Forks: a new run that begins with a step of another one.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{SmallState, noise, wrap};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, CopyOptions, CopyReport, ForkOptions, GcOptions, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::{Dtype, ErrorKind, Latest, Metadata, Policy, Slice, Store, StoreOptions, TensorView, Writer};

const ELEMENTS: usize = 300_000;
/// Elements that differ from step to step.
const CHANGED: usize = 100_000;

/// State of a step: too large for a log entry, and partly as in the step before.
fn state(step: u64) -> Vec<u8> {
    let mut bytes = noise(7, ELEMENTS);
    bytes[..CHANGED].copy_from_slice(&noise(step, CHANGED));
    bytes
}

async fn save(writer: &mut Writer, step: u64, bytes: &[u8]) -> Option<u64> {
    let tensors = [TensorView::new("w", Dtype::U8, &[ELEMENTS as u64], bytes).unwrap()];
    let saved = writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
    saved.parent.map(|_| saved.stored_bytes)
}

/// A store of steps 1 to 4: a base and deltas, each on the one before.
async fn source(folder: &Path) -> Store {
    let store = Store::open(folder.to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in 1..=4 {
        save(&mut writer, step, &state(step)).await;
    }
    store
}

async fn assert_state(store: &Store, step: u64, bytes: &[u8]) {
    assert!(store.snapshot(step).await.unwrap().read("w", &Slice::all()).await.unwrap().data == bytes, "step {step}");
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

async fn steps(store: &Store) -> Vec<u64> {
    store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect()
}

async fn fork_step(source: &Store, destination: &Store, step: u64) -> CopyReport {
    let options = ForkOptions { step: Some(step), ..ForkOptions::default() };
    maintain::fork(source, destination, &options).await.unwrap().1
}

#[cfg(unix)]
#[tokio::test]
async fn a_fork_on_one_disk_shares_its_files_and_outlives_the_source() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().unwrap();
    let source_folder = folder.path().join("source");
    let source = source(&source_folder).await;
    let fork_folder = folder.path().join("fork");
    let fork = Store::open(fork_folder.to_str().unwrap()).unwrap();
    let report = fork_step(&source, &fork, 3).await;
    assert_eq!((report.snapshots, report.shared_objects), (3, 3));
    assert!(report.bytes < report.shared_bytes, "only manifests and the directory are transferred");
    for cask in std::fs::read_dir(fork_folder.join("casks")).unwrap() {
        assert_eq!(cask.unwrap().metadata().unwrap().nlink(), 2);
    }
    assert_eq!(steps(&fork).await, [1, 3], "the delta between the base and step 3 is no step of the fork");
    assert_ne!(fork.history().run().await.unwrap(), source.history().run().await.unwrap());
    // Forking again changes nothing.
    assert_eq!(fork_step(&source, &fork, 3).await.snapshots, 0);

    // Both runs go on. The fork saves a delta on its first step.
    let other = noise(99, ELEMENTS);
    let mut ours = state(3);
    ours[..100].copy_from_slice(&other[..100]);
    let delta = save(&mut fork.writer(Policy::Consecutive).await.unwrap(), 4, &ours).await.expect("a delta");
    assert!(delta < CHANGED as u64, "{delta} bytes");
    // The source forgets what the fork began with, and frees it.
    let mut writer = source.writer(Policy::Full).await.unwrap();
    save(&mut writer, 5, &other).await;
    source.forget(&[1, 2, 3, 4]).await.unwrap();
    let at_once = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
    assert!(!maintain::gc(&source, &at_once).await.unwrap().deleted.is_empty());
    assert_state(&source, 5, &other).await;
    assert_state(&fork, 3, &state(3)).await;
    assert_state(&fork, 4, &ours).await;
    // The fork frees what it does not need, and keeps what it does.
    maintain::gc(&fork, &at_once).await.unwrap();
    assert_state(&fork, 4, &ours).await;
    std::fs::remove_dir_all(source_folder).unwrap();
    assert_state(&fork, 3, &state(3)).await;
    assert_state(&fork, 4, &ours).await;
}

/// A fork that was killed has left a file under the name of a cask, long ago, and no entry names it.
#[tokio::test]
async fn a_file_that_an_earlier_fork_left_is_used_or_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(&folder.path().join("source")).await;
    let fork_folder = folder.path().join("fork");
    std::fs::create_dir_all(fork_folder.join("casks")).unwrap();
    let casks = std::fs::read_dir(folder.path().join("source/casks")).unwrap().map(|cask| cask.unwrap().path());
    for (number, cask) in casks.enumerate() {
        let left = fork_folder.join("casks").join(cask.file_name().unwrap());
        match number {
            0 => std::fs::hard_link(&cask, &left).unwrap(),
            1 => std::fs::write(&left, b"a part").unwrap(),
            _ => {}
        }
    }
    let fork = Store::open(fork_folder.to_str().unwrap()).unwrap();
    fork_step(&source, &fork, 4).await;
    assert_state(&fork, 4, &state(4)).await;
    assert_state(&source, 4, &state(4)).await;
}

#[tokio::test]
async fn a_fork_elsewhere_transfers_and_checks_every_byte() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(&folder.path().join("source")).await;
    let fork = wrap(Arc::new(InMemory::new()));
    let (step, report) = maintain::fork(&source, &fork, &ForkOptions::default()).await.unwrap();
    assert_eq!((step, report.snapshots, report.shared_objects), (4, 4, 0));
    assert_state(&fork, 4, &state(4)).await;
    // On one disk, too, if the caller asks for a copy.
    let apart = Store::open(folder.path().join("apart").to_str().unwrap()).unwrap();
    let (_, report) = maintain::fork(&source, &apart, &ForkOptions { share: false, ..ForkOptions::default() }).await.unwrap();
    assert_eq!(report.shared_objects, 0);
    assert_state(&apart, 4, &state(4)).await;
}

#[tokio::test]
async fn a_fork_of_a_small_state_lies_in_the_log() {
    let source = Store::open("memory://fork-of-a-small-state").unwrap();
    let mut writer = source.writer(Policy::Consecutive).await.unwrap();
    for step in 1..=2 {
        let state = SmallState::at(step);
        writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
    }
    let fork = Store::open("memory://fork-of-a-small-state-2").unwrap();
    maintain::fork(&source, &fork, &ForkOptions::default()).await.unwrap();
    let snapshot = fork.snapshot(Latest).await.unwrap();
    for (name, bytes) in SmallState::at(2).expected() {
        assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "{name}");
    }
}

#[tokio::test]
async fn a_fork_begins_no_run_where_another_one_is() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(&folder.path().join("source")).await;
    let place = |name: &str| Store::open(folder.path().join(name).to_str().unwrap()).unwrap();
    let fork = async |source: &Store, at: &Store, step| {
        maintain::fork(source, at, &ForkOptions { step: Some(step), ..ForkOptions::default() }).await.map_err(|error| error.kind())
    };
    assert_eq!(fork(&source, &source, 3).await, Err(ErrorKind::Conflict));
    let copy = place("copy");
    maintain::copy(&source, &copy, &CopyOptions::default()).await.unwrap();
    assert_eq!(fork(&source, &copy, 3).await, Err(ErrorKind::Conflict), "a copy is of the same run");
    assert_eq!(fork(&source, &place("new"), 9).await, Err(ErrorKind::NotFound));
    let trained = place("trained");
    assert!(fork(&source, &trained, 3).await.is_ok());
    save(&mut trained.writer(Policy::Full).await.unwrap(), 10, &state(10)).await;
    assert_eq!(fork(&source, &trained, 4).await, Err(ErrorKind::Conflict), "the fork has a step of its own");
    assert_eq!(steps(&trained).await, [1, 3, 10]);
    // A fork of the fork.
    assert!(fork(&trained, &place("second"), 10).await.is_ok());
    assert_state(&place("second"), 10, &state(10)).await;
}

/// The fork is interrupted before each of its writes in turn, and goes on where it was.
#[tokio::test]
async fn an_interrupted_fork_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(&folder.path().join("source")).await;
    for last in 0.. {
        let place = folder.path().join(format!("fork-{last}"));
        std::fs::create_dir(&place).unwrap();
        let files = || Arc::new(LocalFileSystem::new_with_prefix(&place).unwrap());
        let writes = AtomicU64::new(0);
        let broken = FaultStore::new(files(), move |operation, _| {
            let is_write = matches!(operation, Operation::Create | Operation::Put);
            if is_write && writes.fetch_add(1, Ordering::SeqCst) >= last { Fault::FailBefore } else { Fault::None }
        });
        let options = ForkOptions { step: Some(3), ..ForkOptions::default() };
        let forked = maintain::fork(&source, &wrap(Arc::new(broken)), &options).await;
        let store = StoreOptions::default().open(place.to_str().unwrap()).unwrap();
        fork_step(&source, &store, 3).await;
        assert_state(&store, 3, &state(3)).await;
        assert_eq!(steps(&store).await, [1, 3]);
        if forked.is_ok() {
            assert!(last > 10, "{last} writes");
            break;
        }
    }
}
