//! Stores that are deleted, moved or replaced, or lose objects between two saves. After a save that returns `Ok`, the
//! next process can load the step. Otherwise the save fails and gives the reason.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{SmallState, copy_folder, without_inline, wrap};
use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use tensorcask::maintain::{self, Copier, CopyOptions, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Id;
use tensorcask::{BaseKeeping, ErrorKind, Latest, Policy, Rank, Result, SavedSnapshot, Slice, Store, StoreOptions, Writer, WriterOptions};

struct Run {
    folder: tempfile::TempDir,
}

impl Run {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Opens the store as a new process would, with empty caches.
    fn store(&self) -> Store {
        self.store_with(without_inline())
    }

    /// No power is cut in these tests, so nothing is synced.
    fn store_with(&self, options: StoreOptions) -> Store {
        StoreOptions { fsync: false, ..options }.open(self.path().to_str().unwrap()).unwrap()
    }

    async fn writer(&self) -> Writer {
        self.store().writer(Policy::Consecutive).await.unwrap()
    }

    /// Returns the objects of a folder of the store, ascending.
    fn objects(&self, folder: &str) -> Vec<PathBuf> {
        let mut found: Vec<_> = std::fs::read_dir(self.path().join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        found.sort();
        found
    }

    async fn assert_holds(&self, step: u64) {
        let store = self.store();
        assert_eq!(store.snapshot(Latest).await.unwrap().step(), step);
        let snapshot = store.snapshot(step).await.unwrap();
        for (name, bytes) in SmallState::at(step).expected() {
            assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
        }
    }

    async fn assert_clean(&self) {
        let report = maintain::verify(&self.store(), &VerifyOptions::default()).await.unwrap();
        assert!(report.is_clean(), "{:?}", report.problems);
    }
}

async fn save(writer: &mut Writer, step: u64) -> Result<SavedSnapshot> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await
}

#[tokio::test]
async fn after_the_folder_was_deleted_the_next_save_makes_a_store() {
    let run = Run::new();
    let mut writer = run.writer().await;
    save(&mut writer, 1).await.unwrap();
    let before = run.store().history().run().await.unwrap();
    std::fs::remove_dir_all(run.path()).unwrap();
    assert_eq!(save(&mut writer, 2).await.unwrap().kind.name(), "base");
    run.assert_holds(2).await;
    assert_ne!(run.store().history().run().await.unwrap(), before, "another run");
    assert_eq!(save(&mut writer, 3).await.unwrap().kind.name(), "delta", "and goes on as ever");
    run.assert_holds(3).await;
    run.assert_clean().await;
}

#[tokio::test]
async fn after_the_folder_was_moved_away_and_back_each_save_can_be_loaded() {
    let run = Run::new();
    let mut writer = run.writer().await;
    save(&mut writer, 1).await.unwrap();
    std::fs::rename(run.path(), run.beside("moved")).unwrap();
    save(&mut writer, 2).await.unwrap();
    run.assert_holds(2).await;
    // The first store comes back, as when an unmounted folder is mounted again.
    std::fs::rename(run.path(), run.beside("second")).unwrap();
    std::fs::rename(run.beside("moved"), run.path()).unwrap();
    run.assert_holds(1).await;
    save(&mut writer, 3).await.unwrap();
    run.assert_holds(3).await;
    run.assert_clean().await;
}

/// A job that is running begins no new log beside the snapshots of a lost one: the log could not be put back, and a collector
/// would take these snapshots for leftovers.
#[tokio::test]
async fn a_lost_log_is_not_begun_anew() {
    let run = Run::new();
    let mut writer = run.writer().await;
    save(&mut writer, 1).await.unwrap();
    save(&mut writer, 2).await.unwrap();
    let log = run.path().join("log");
    let store_file = run.path().join("store.json");
    for with_store_file in [true, false] {
        std::fs::rename(&log, run.beside("log")).unwrap();
        if !with_store_file {
            std::fs::rename(&store_file, run.beside("store.json")).unwrap();
        }
        let error = save(&mut writer, 3).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("although the store has 2 objects in snapshots/"), "{error}");
        assert!(!log.exists());
        std::fs::rename(run.beside("log"), &log).unwrap();
        if !with_store_file {
            std::fs::rename(run.beside("store.json"), &store_file).unwrap();
        }
        run.assert_clean().await;
    }
    save(&mut writer, 3).await.unwrap();
    run.assert_holds(3).await;
    assert_eq!(run.store().snapshots().await.unwrap().len(), 3);
}

#[tokio::test]
async fn an_older_copy_is_gone_on_with() {
    let run = Run::new();
    let mut writer = run.writer().await;
    save(&mut writer, 1).await.unwrap();
    copy_folder(&run.path(), &run.beside("backup"));
    for step in 2..=5 {
        save(&mut writer, step).await.unwrap();
    }
    std::fs::remove_dir_all(run.path()).unwrap();
    copy_folder(&run.beside("backup"), &run.path());
    assert_eq!(save(&mut writer, 6).await.unwrap().kind.name(), "base");
    run.assert_holds(6).await;
    let steps: Vec<u64> = run.store().snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(steps, [1, 6]);
    run.assert_clean().await;
}

/// Restores a backup from before this writer. The last writer in the backup is the one that this writer took over from,
/// and not another job.
#[tokio::test]
async fn a_copy_from_before_the_writer_is_gone_on_with() {
    let run = Run::new();
    save(&mut run.writer().await, 1).await.unwrap();
    copy_folder(&run.path(), &run.beside("backup"));
    let mut writer = run.writer().await;
    save(&mut writer, 2).await.unwrap();
    std::fs::remove_dir_all(run.path()).unwrap();
    copy_folder(&run.beside("backup"), &run.path());
    save(&mut writer, 3).await.unwrap();
    run.assert_holds(3).await;
    run.assert_clean().await;
}

#[tokio::test]
async fn a_job_that_made_a_new_store_in_the_place_of_the_old_is_not_disturbed() {
    let run = Run::new();
    let mut old = run.writer().await;
    save(&mut old, 1).await.unwrap();
    std::fs::remove_dir_all(run.path()).unwrap();
    let mut new = run.writer().await;
    save(&mut new, 10).await.unwrap();
    for _ in 0..2 {
        let error = save(&mut old, 2).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert!(error.to_string().contains("deleted or replaced since this job last saved"), "{error}");
    }
    save(&mut new, 11).await.unwrap();
    run.assert_holds(11).await;
    run.assert_clean().await;
}

/// What happens to an object behind the back of a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Harm {
    Removed,
    Truncated,
    Emptied,
    Flipped,
}

impl Harm {
    const ALL: [Self; 4] = [Self::Removed, Self::Truncated, Self::Emptied, Self::Flipped];

    fn apply(self, path: &Path) {
        let mut bytes = std::fs::read(path).unwrap();
        match self {
            Self::Removed => return std::fs::remove_file(path).unwrap(),
            Self::Truncated => bytes.truncate(bytes.len() - 1),
            Self::Emptied => bytes.clear(),
            // The first byte of JSON, the last one of what a log entry holds.
            Self::Flipped if path.to_string_lossy().contains("/log/") && bytes.last() != Some(&b'\n') => *bytes.last_mut().unwrap() ^= 1,
            Self::Flipped => bytes[0] ^= 1,
        }
        std::fs::write(path, bytes).unwrap();
    }
}

/// Harms an object of each kind. The save makes a base, restores the object, or reports what is wrong.
#[tokio::test(start_paused = true)]
async fn after_harm_to_any_one_object_a_save_can_be_loaded_or_fails() {
    let objects = [("", 0), ("casks", 0), ("directories", 0), ("snapshots", 0), ("snapshots", 1), ("log", 0), ("log", 1), ("log", 2)];
    for (keeping, is_inline) in [(BaseKeeping::Memory, false), (BaseKeeping::None, false), (BaseKeeping::Memory, true)] {
        let mut failures = Vec::new();
        for ((kind, nth), harm) in objects.into_iter().flat_map(|object| Harm::ALL.map(|harm| (object, harm))) {
            // The bytes of casks are not read again before each commit: `verify` finds such damage.
            if (kind == "casks" && harm == Harm::Flipped) || (is_inline && ["casks", "snapshots"].contains(&kind)) {
                continue;
            }
            let run = Run::new();
            let open = || match is_inline {
                true => run.store_with(StoreOptions::default()),
                false => run.store(),
            };
            let options = WriterOptions { policy: Policy::Consecutive, base_cache: keeping.clone(), ..WriterOptions::default() };
            let mut writer = open().writer_with(options).await.unwrap();
            for step in 1..=2 {
                save(&mut writer, step).await.unwrap();
            }
            let victim = if kind.is_empty() { run.path().join("store.json") } else { run.objects(kind)[nth].clone() };
            harm.apply(&victim);
            let told = |error: tensorcask::Error| {
                let name = victim.strip_prefix(run.path()).unwrap().to_str().unwrap().to_owned();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{harm:?} {kind} {nth}: {error}");
                assert!(error.to_string().contains(&name), "{harm:?} {kind} {nth}: {error}");
            };
            match save(&mut writer, 3).await {
                Ok(_) => run.assert_holds(3).await,
                Err(error) => {
                    told(error);
                    failures.push((kind, nth, harm));
                }
            }
            // A new process behaves the same.
            match open().writer(Policy::Consecutive).await {
                Ok(mut next) => {
                    save(&mut next, 4).await.unwrap();
                    run.assert_holds(4).await;
                }
                Err(error) => told(error),
            }
        }
        // Nobody can read the end of a log without its middle, and nothing says which run a damaged `store.json` named. The
        // snapshot in a damaged entry is no part of the log.
        let expected: Vec<(&str, usize, Harm)> = failures.iter().copied().filter(|(kind, ..)| ["", "log"].contains(kind)).collect();
        assert_eq!(failures, expected);
        for of_log in [("log", 0, Harm::Removed), ("log", 0, Harm::Flipped), ("log", 1, Harm::Removed), ("log", 0, Harm::Emptied)] {
            assert!(failures.contains(&of_log), "{of_log:?} of {failures:?}");
        }
        assert!(!failures.contains(&("log", 2, Harm::Removed)), "a shorter log is an older copy");
    }
}

/// A new process would have filled the gap with its own entry, and no reader could open the store any more.
#[tokio::test(start_paused = true)]
async fn nobody_commits_to_a_log_with_a_gap() {
    let run = Run::new();
    let mut writer = run.writer().await;
    for step in 1..=4 {
        save(&mut writer, step).await.unwrap();
    }
    let source = run.beside("source");
    copy_folder(&run.path(), &source);
    let source = without_inline().open(source.to_str().unwrap()).unwrap();
    let gap = run.objects("log")[2].clone();
    std::fs::remove_file(&gap).unwrap();
    let is_told = |error: tensorcask::Error| {
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!(error.object_name(), Some("log/00000000000000000003.json"));
        assert!(error.to_string().contains("Put the log back"), "{error}");
    };
    is_told(run.store().writer(Policy::Full).await.unwrap_err());
    is_told(run.store().pin(1).await.unwrap_err());
    is_told(save(&mut writer, 5).await.unwrap_err());
    // A copier would take the last writer before the gap for the last of all, and refuse for good.
    is_told(Copier::open(&source, &run.store(), Id::random().unwrap(), CopyOptions::default()).await.err().unwrap());
    assert!(!gap.exists());
}

/// Catalogs are optional: a reader that uses none must find every step that was acknowledged.
#[tokio::test(start_paused = true)]
async fn a_catalog_stands_for_no_entry() {
    // 63 steps: the catalog follows the last entry that the writer knows.
    for (steps, victims) in [(70, vec![30]), (63, vec![64]), (63, vec![63, 64])] {
        for catalog in [true, false] {
            let run = Run::new();
            let mut writer = run.writer().await;
            for step in 1..=steps {
                save(&mut writer, step).await.unwrap();
            }
            for victim in &victims {
                std::fs::remove_file(run.path().join(format!("log/{victim:020}.json"))).unwrap();
            }
            if !catalog {
                std::fs::remove_file(&run.objects("catalog")[0]).unwrap();
            }
            let is_end = victims.contains(&(steps + 1));
            let entries = run.objects("log");
            for saved in [save(&mut writer, 71).await.map(|_| ()), run.store().writer(Policy::Full).await.map(|_| ())] {
                match saved {
                    // The log looks like an older copy of itself.
                    Ok(()) => assert!(is_end && !catalog, "{victims:?}"),
                    Err(error) => {
                        assert_eq!((error.kind(), is_end && !catalog), (ErrorKind::Corrupt, false), "{victims:?}: {error}");
                        assert_eq!(error.object_name(), Some(format!("log/{:020}.json", victims[0]).as_str()));
                        assert!(error.to_string().contains("is missing, although"), "{error}");
                        assert!(error.to_string().contains("a stale cache"), "{error}");
                        assert_eq!(run.objects("log"), entries);
                    }
                }
            }
        }
    }
}

/// A lost log is put back while a copier opens the store, which first saw the catalog alone. Nobody goes by the state of the catalog.
#[tokio::test(start_paused = true)]
async fn a_log_that_comes_back_is_read_to_its_end() {
    let memory = Arc::new(InMemory::new());
    let source = wrap(memory.clone());
    let mut first = source.writer(Policy::Full).await.unwrap();
    for step in 1..=66 {
        save(&mut first, step).await.unwrap();
    }
    save(&mut source.writer(Policy::Full).await.unwrap(), 67).await.unwrap();
    let last = Copier::open(&source, &source, Id::random().unwrap(), CopyOptions::default()).await.unwrap().last_writer();
    let entries: Vec<_> = memory.list(Some(&"log".into())).try_collect().await.unwrap();
    let mut log = Vec::new();
    for entry in entries {
        log.push((entry.location.clone(), memory.get(&entry.location).await.unwrap().bytes().await.unwrap()));
    }
    let there = Arc::new(InMemory::new());
    for object in memory.list(None).try_collect::<Vec<_>>().await.unwrap() {
        if !object.location.as_ref().starts_with("log/") {
            there.put(&object.location, memory.get(&object.location).await.unwrap().bytes().await.unwrap().into()).await.unwrap();
        }
    }
    let objects = there.clone();
    let lists = std::sync::atomic::AtomicU64::new(0);
    let returning = FaultStore::new(there, move |operation, path| {
        if operation == Operation::List && path.as_ref().starts_with("log") && lists.fetch_add(1, Ordering::SeqCst) == 2 {
            for (path, bytes) in &log {
                futures::executor::block_on(objects.put(path, bytes.clone().into())).unwrap();
            }
        }
        Fault::None
    });
    let copier = Copier::open(&source, &wrap(Arc::new(returning)), Id::random().unwrap(), CopyOptions::default()).await.unwrap();
    assert_eq!((copier.last_writer(), copier.latest().map(|latest| latest.step)), (last, Some(67)));
}

/// A network file system may remember for a while that a name was absent. An entry that a listing shows is not lost.
#[tokio::test(start_paused = true)]
async fn an_entry_that_is_listed_but_hidden_is_no_gap() {
    for hidden_gets in [2, u64::MAX] {
        let memory = Arc::new(InMemory::new());
        for step in 1..=3 {
            save(&mut wrap(memory.clone()).writer(Policy::Full).await.unwrap(), step).await.unwrap();
        }
        let gets = std::sync::atomic::AtomicU64::new(0);
        let stale = FaultStore::new(memory.clone(), move |operation, path| {
            let is_hidden = operation == Operation::Get && path.as_ref() == "log/00000000000000000003.json";
            match is_hidden && gets.fetch_add(1, Ordering::SeqCst) < hidden_gets {
                true => Fault::Stale,
                false => Fault::None,
            }
        });
        match wrap(Arc::new(stale)).writer(Policy::Full).await {
            Ok(mut writer) => {
                save(&mut writer, 4).await.unwrap();
                assert_eq!(wrap(memory).snapshot(Latest).await.unwrap().step(), 4);
            }
            Err(error) => {
                assert_eq!((error.kind(), hidden_gets), (ErrorKind::Storage, u64::MAX), "{error}");
                assert!(
                    error.to_string().contains("is listed, but cannot be read") && error.to_string().contains("stale cache"),
                    "{error}"
                );
            }
        }
    }
}

/// The store disappears after the casks of a save were uploaded, right before the commit.
#[tokio::test]
async fn a_store_that_is_deleted_during_a_save_is_made_again_or_told() {
    let memory = Arc::new(InMemory::new());
    let armed = Arc::new(AtomicBool::new(false));
    let objects = memory.clone();
    let switch = armed.clone();
    let deleting = FaultStore::new(memory.clone(), move |operation, path| {
        if operation == Operation::Create && path.as_ref().starts_with("snapshots/") && switch.swap(false, Ordering::SeqCst) {
            delete_all(&objects);
        }
        Fault::None
    });
    let mut writer = wrap(Arc::new(deleting)).writer(Policy::Consecutive).await.unwrap();
    for step in 1..=4 {
        armed.store(step % 2 == 0, Ordering::SeqCst);
        let saved = save(&mut writer, step).await.unwrap();
        assert_eq!(saved.kind.name(), if step == 1 || step % 2 == 0 { "base" } else { "delta" }, "step {step}");
        let snapshot = wrap(memory.clone()).snapshot(Latest).await.unwrap();
        assert_eq!(snapshot.step(), step);
        snapshot.verify().await.unwrap();
    }
}

/// Another process deletes the store again and again. The save fails after a bounded number of attempts.
#[tokio::test]
async fn a_store_that_never_stays_is_an_error() {
    let memory = Arc::new(InMemory::new());
    let armed = Arc::new(AtomicBool::new(false));
    let objects = memory.clone();
    let switch = armed.clone();
    let deleting = FaultStore::new(memory.clone(), move |operation, path| {
        if operation == Operation::Create && path.as_ref().starts_with("snapshots/") && switch.load(Ordering::SeqCst) {
            let _ = futures::executor::block_on(objects.delete(&"store.json".into()));
            let _ = futures::executor::block_on(objects.delete(&"log/00000000000000000001.json".into()));
        }
        Fault::None
    });
    let mut writer = wrap(Arc::new(deleting)).writer(Policy::Full).await.unwrap();
    armed.store(true, Ordering::SeqCst);
    let error = save(&mut writer, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains("attempts to save step 1"), "{error}");
    armed.store(false, Ordering::SeqCst);
    save(&mut writer, 2).await.unwrap();
    assert_eq!(wrap(memory).snapshot(Latest).await.unwrap().step(), 2);
}

/// `store.json` is deleted between its read and its creation. That is not reported as a fault of the storage.
#[tokio::test]
async fn a_deletion_while_a_store_is_opened_does_not_blame_the_storage() {
    let memory = Arc::new(InMemory::new());
    save(&mut wrap(memory.clone()).writer(Policy::Full).await.unwrap(), 1).await.unwrap();
    let armed = Arc::new(AtomicBool::new(true));
    let objects = memory.clone();
    let switch = armed.clone();
    let deleting = FaultStore::new(memory.clone(), move |operation, path| {
        if operation == Operation::Create && path.as_ref() == "store.json" && switch.swap(false, Ordering::SeqCst) {
            futures::executor::block_on(objects.delete(&"store.json".into())).unwrap();
        }
        Fault::None
    });
    let mut writer = wrap(Arc::new(deleting)).writer(Policy::Full).await.unwrap();
    save(&mut writer, 2).await.unwrap();
    let store = wrap(memory);
    assert_eq!(store.snapshot(Latest).await.unwrap().step(), 2);
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// The same during the probe of a new store: another process deletes the scratch objects.
#[tokio::test]
async fn a_deletion_while_a_store_is_created_does_not_blame_the_storage() {
    let memory = Arc::new(InMemory::new());
    let count = std::sync::atomic::AtomicU64::new(0);
    let objects = memory.clone();
    let deleting = FaultStore::new(memory.clone(), move |operation, path| {
        let is_probe = operation == Operation::Create && path.as_ref().starts_with("probe/");
        // The marker and the two racing creates; then the third create, which must not succeed.
        if is_probe && count.fetch_add(1, Ordering::SeqCst) == 3 {
            delete_all(&objects);
        }
        Fault::None
    });
    let store = wrap(Arc::new(deleting));
    let error = store.writer(Policy::Full).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let text = error.to_string();
    assert!(text.contains("`probe/") && text.contains("was removed during the test"), "says what was seen: {text}");
    assert!(text.contains("Another process deletes or replaces this store; save again"), "{text}");
    save(&mut store.writer(Policy::Full).await.unwrap(), 1).await.unwrap();
}

fn delete_all(objects: &InMemory) {
    use futures::TryStreamExt;
    futures::executor::block_on(async {
        let all: Vec<_> = objects.list(None).try_collect().await.unwrap();
        for meta in all {
            objects.delete(&meta.location).await.unwrap();
        }
    });
}

/// Two writers of one job id do not fence each other. A writer with another id fences both.
#[tokio::test]
async fn writers_of_one_id_share_a_store() {
    let run = Run::new();
    let id = Id::random().unwrap();
    let options = WriterOptions { policy: Policy::Consecutive, id: Some(id), ..WriterOptions::default() };
    let mut first = run.store().writer_with(options.clone()).await.unwrap();
    let mut second = run.store().writer_with(options).await.unwrap();
    for step in (1..=6).step_by(2) {
        save(&mut first, step).await.unwrap();
        save(&mut second, step + 1).await.unwrap();
        run.assert_holds(step + 1).await;
    }
    std::fs::remove_dir_all(run.path()).unwrap();
    save(&mut second, 7).await.unwrap();
    save(&mut first, 8).await.unwrap();
    run.assert_holds(8).await;
    let mut other = run.writer().await;
    save(&mut other, 9).await.unwrap();
    for writer in [&mut first, &mut second] {
        assert_eq!(save(writer, 10).await.unwrap_err().kind(), ErrorKind::Fenced);
    }
    run.assert_clean().await;
}

#[tokio::test]
async fn ranks_begin_anew_in_a_store_that_was_deleted() {
    let run = Run::new();
    let store = run.store();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let options = WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() };
    let mut rank = store.rank_writer(Rank { rank: 0, world: 1, attempt: 0 }, options).await.unwrap();
    for step in 1..=6 {
        let kind = match step {
            3 => {
                std::fs::remove_dir_all(run.path()).unwrap();
                "base"
            }
            5 => {
                // Asks the coordinator first this time, as DCP does.
                std::fs::remove_dir_all(run.path()).unwrap();
                assert_eq!(writer.next_parent(step).await.unwrap(), None);
                "base"
            }
            1 => "base",
            _ => "delta",
        };
        let state = SmallState::at(step);
        let blobs: Vec<_> = state.blobs().into_iter().filter(|blob| blob.rank == 0).collect();
        let receipt = rank.save(step, &state.tensors(), &blobs).await.unwrap();
        let saved = writer.commit_receipts(step, &[receipt], &SmallState::metadata(step)).await.unwrap();
        assert_eq!(saved.kind.name(), kind, "step {step}");
        run.assert_holds(step).await;
    }
    run.assert_clean().await;
}

/// A copier that stays open, as in the engine: lost objects of the copy are copied again, and a deleted copy is
/// reported.
#[tokio::test]
async fn a_copy_that_lost_objects_gets_them_again() {
    let run = Run::new();
    let copy = Run::new();
    let mut writer = run.writer().await;
    save(&mut writer, 1).await.unwrap();
    let mut copier = Copier::open(&run.store(), &copy.store(), Id::random().unwrap(), CopyOptions::default()).await.unwrap();
    copier.copy_new(&run.store()).await.unwrap();
    for (step, folder) in [(2, "casks"), (3, "directories"), (4, "snapshots")] {
        std::fs::remove_file(&copy.objects(folder)[0]).unwrap();
        save(&mut writer, step).await.unwrap();
        copier.copy_new(&run.store()).await.unwrap();
        copy.assert_holds(step).await;
        copy.assert_clean().await;
    }
    std::fs::remove_dir_all(copy.path()).unwrap();
    save(&mut writer, 5).await.unwrap();
    let error = copier.copy_new(&run.store()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains("deleted, moved or replaced"), "{error}");
    let mut copier = Copier::open(&run.store(), &copy.store(), Id::random().unwrap(), CopyOptions::default()).await.unwrap();
    copier.copy_new(&run.store()).await.unwrap();
    copy.assert_holds(5).await;
    copy.assert_clean().await;
}
