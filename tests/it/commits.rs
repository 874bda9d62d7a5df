//! Commits: races, fencing, unknown outcomes, and retention while a writer runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{SmallState, wrap};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::{Digest, Event, Id, Job, LogEntry, Receipt};
use tensorcask::{
    BaseKeeping, Blob, Claim, Dtype, ErrorKind, ExistingStep, Latest, Limits, Metadata, Policy, PolicyDecision, PreviousSave, Rank,
    SaveTimes, Slice, SnapshotInfo, Store, StoreOptions, TensorView, Writer, WriterOptions,
};

async fn save(writer: &mut Writer, step: u64) -> tensorcask::Result<tensorcask::SavedSnapshot> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await
}

async fn assert_holds(store: &Store, step: u64) {
    let snapshot = store.snapshot(step).await.unwrap();
    for (name, bytes) in SmallState::at(step).expected() {
        assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
    }
}

async fn assert_clean(store: &Store) {
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_of_ranks_record_the_times_of_the_slowest() {
    let store = Store::open("memory://times-of-ranks").unwrap();
    let mut coordinator = store.writer(Policy::Consecutive).await.unwrap();
    for step in 1..=4 {
        let parent = coordinator.next_parent(step).await.unwrap();
        let mut receipts = Vec::new();
        for rank in [0, 1] {
            let name = format!("w{rank}");
            let mut writer = store.rank_writer(Rank { rank, world: 2, attempt: 0 }, WriterOptions::default()).await.unwrap();
            let data = [step as u8; 4];
            let state = [TensorView::new(&name, Dtype::U8, &[4], &data).unwrap()];
            let mut receipt = writer.save_on(step, parent, &state, &[]).await.unwrap();
            assert!(receipt.encode_us.is_some() && receipt.upload_us.is_some());
            (receipt.encode_us, receipt.upload_us) = match step {
                // One rank does not know its times.
                3 if rank == 1 => (None, None),
                4 => (None, None),
                _ => (Some(u64::from(rank + 1) * 1000), Some(u64::from(2 - rank) * 1000 + 500)),
            };
            // As the rank hands it over.
            receipts.push(Receipt::decode(&receipt.encode().unwrap(), &Limits::default()).unwrap());
        }
        coordinator.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
        if step == 1 {
            coordinator.note_stall(std::time::Duration::from_millis(5));
        }
    }
    let times_of = async |step: u64| store.snapshot(step).await.unwrap().inspect().times();
    let first = times_of(1).await.unwrap();
    let second = times_of(2).await.unwrap();
    assert_eq!((first.encode_ms, first.upload_ms, first.previous), (Some(2.0), Some(2.5), None));
    let previous = second.previous.unwrap();
    assert_eq!((previous.step, previous.stall_ms), (1, Some(5.0)));
    assert!(previous.save_ms.unwrap() > 0.0);
    for step in [3, 4] {
        let times = times_of(step).await.unwrap();
        assert_eq!((times.encode_ms, times.upload_ms, times.previous.map(|save| save.step)), (None, None, Some(step - 1)));
    }
    let measured = maintain::measure(&store.snapshots().await.unwrap(), maintain::TimeOverrides::default()).unwrap();
    assert_eq!((measured.stall.seconds, measured.save.origin), (0.005, maintain::Origin::Measured));
}

/// Small casks go up in one request, together with the manifest, which therefore cannot record the time.
#[tokio::test(flavor = "multi_thread")]
async fn the_upload_of_small_casks_is_recorded_by_the_first_save_itself_and_later_by_the_next_one() {
    let store = StoreOptions { inline_bytes: 0, ..StoreOptions::default() }.open("memory://times-of-small-casks").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let mut uploads = Vec::new();
    for step in [1, 2, 3] {
        save(&mut writer, step).await.unwrap();
        let times = store.snapshot(step).await.unwrap().inspect().times().unwrap();
        uploads.push((times.upload_ms.is_some(), times.previous.map(|previous| previous.upload_ms.is_some())));
    }
    assert_eq!(uploads, [(true, None), (false, Some(false)), (false, Some(true))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_record_the_times_of_saves() {
    let store = Store::open("memory://times-of-saves").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in [1, 2] {
        save(&mut writer, step).await.unwrap();
    }
    let times_of = async |step: u64| store.snapshot(step).await.unwrap().inspect().times();
    let first = times_of(1).await.unwrap();
    let second = times_of(2).await.unwrap();
    // The casks are in the log entry, which is written last.
    assert!(first.encode_ms.is_some() && first.upload_ms.is_none() && first.previous.is_none());
    let previous = second.previous.unwrap();
    assert_eq!((previous.step, previous.stall_ms), (1, None));
    assert!(previous.save_ms.unwrap() >= first.encode_ms.unwrap() + previous.upload_ms.unwrap());

    // A save that fails leaves the times of the last one; those that a caller sets replace the measured ones.
    let name = Metadata { user: serde_json::Map::from_iter([("tc.times".into(), 1.into())]), ..Metadata::default() };
    assert!(writer.save(3, &[], &[], &name).await.is_err());
    let given = PreviousSave { step: 2, stall_ms: Some(0.5), save_ms: Some(40.0), ..PreviousSave::default() };
    writer.set_previous_save(Some(given));
    for step in [3, 4] {
        save(&mut writer, step).await.unwrap();
        let times = times_of(step).await.unwrap();
        assert_eq!((times.previous, times.upload_ms), (Some(given), None));
    }
    let infos = store.snapshots().await.unwrap();
    let by_step = SaveTimes::by_step(infos.iter().map(|info| (info.record.step, &info.user)));
    assert_eq!(by_step.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!((by_step[&1].save_ms, by_step[&2].stall_ms), (previous.save_ms, Some(0.5)));

    // A copy has log entries of its own, a moment apart. The times of the saves stay.
    let copy = Store::open("memory://times-of-saves-copied").unwrap();
    maintain::copy(&store, &copy, &maintain::CopyOptions::default()).await.unwrap();
    let written_ms = |infos: &[SnapshotInfo]| infos.iter().map(|info| SaveTimes::of(&info.user).unwrap().written_ms).collect::<Vec<_>>();
    assert!(written_ms(&infos).iter().all(Option::is_some));
    assert_eq!(written_ms(&copy.snapshots().await.unwrap()), written_ms(&infos));

    // Compaction keeps them: they are about the save.
    maintain::compact(&store, 2, &maintain::CompactOptions::default()).await.unwrap();
    assert_eq!(times_of(2).await.unwrap(), second);
}

/// Local disk fulfils the same contract as memory, with real files.
#[tokio::test(flavor = "multi_thread")]
async fn local_disk_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("new/run").to_str().unwrap()).unwrap();
    tensorcask::testing::store::run_all(&store).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_keeps_the_contract() {
    tensorcask::testing::store::run_all(&Store::open("memory://").unwrap()).await.unwrap();
}

/// Sixteen processes open one store. Each number of the log gets one entry, and all writers but the last are fenced.
#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_racing_writers_one_wins_each_number() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run").to_str().unwrap().to_owned();
    let racers: Vec<_> = (0..16u64)
        .map(|racer| {
            let url = url.clone();
            tokio::spawn(async move {
                // Opens the store anew, as another process would.
                let store = Store::open(&url).unwrap();
                let mut writer = store.writer(Policy::Consecutive).await.unwrap();
                (racer, save(&mut writer, racer).await)
            })
        })
        .collect();
    let mut saved = Vec::new();
    for racer in racers {
        match racer.await.unwrap() {
            (racer, Ok(_)) => saved.push(racer),
            (_, Err(e)) => assert_eq!(e.kind(), ErrorKind::Fenced, "{e}"),
        }
    }
    assert!(!saved.is_empty(), "the writer that opened last has nobody to fence it");
    let store = Store::open(&url).unwrap();
    assert_clean(&store).await;
    let mut live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    live.sort_unstable();
    saved.sort_unstable();
    assert_eq!(live, saved, "exactly the acknowledged saves are there");
    let entries = std::fs::read_dir(folder.path().join("run/log"))
        .unwrap()
        .filter(|e| !e.as_ref().unwrap().file_name().to_string_lossy().contains('#'))
        .count();
    assert_eq!(entries, 16 + saved.len(), "one entry per opening and per save");
}

#[tokio::test]
async fn an_old_writer_loses_to_its_replacement_and_says_so() {
    let store = Store::open("memory://").unwrap();
    let mut old = store.writer(Policy::Consecutive).await.unwrap();
    save(&mut old, 100).await.unwrap();
    let mut new = store.writer(Policy::Consecutive).await.unwrap();
    let error = save(&mut old, 101).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.to_string().contains("another job took over at step 100"), "{error}");
    save(&mut new, 80).await.unwrap();
    assert_eq!(save(&mut old, 102).await.unwrap_err().kind(), ErrorKind::Fenced, "and stays stopped");
    assert_eq!(store.snapshot(Latest).await.unwrap().step(), 80, "the newest by commit, not the highest step");
    assert!(store.snapshot(101).await.is_err());
    assert_clean(&store).await;
}

/// A job on another host; nothing is known of its process.
async fn saved_by_a_job_elsewhere() -> (Store, Arc<InMemory>) {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    save(&mut store.writer(Policy::Full).await.unwrap(), 7).await.unwrap();
    // The last entry may be changed, because no other follows it.
    let mut last = store.history().entries().await.unwrap().pop().unwrap();
    last.job = Some(Job { host: "node7".to_owned(), process: 4711, agent: None });
    let path = Path::from(LogEntry::path_of(last.sequence));
    memory.put(&path, last.encode().unwrap().0.into()).await.unwrap();
    (wrap(memory.clone()), memory)
}

#[tokio::test]
async fn a_save_by_hand_ends_no_job_unless_it_is_told_to() {
    let (store, _) = saved_by_a_job_elsewhere().await;
    let by = |claim| WriterOptions { claim, ..WriterOptions::default() };
    let error = store.writer_with(by(Claim::Once)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    for part in ["process 4711 on host node7 saved step 7", "--take-over", "Nothing was written"] {
        assert!(error.message().contains(part), "{error}");
    }
    assert_eq!(store.history().entries().await.unwrap().len(), 2, "not even an entry");
    save(&mut store.writer_with(by(Claim::OnceTakingOver)).await.unwrap(), 8).await.unwrap();
    save(&mut store.writer_with(by(Claim::Once)).await.unwrap(), 9).await.unwrap();
    assert_holds(&store, 9).await;
    // A job that starts again needs no permission.
    let mut job = store.writer(Policy::Full).await.unwrap();
    save(&mut job, 10).await.unwrap();
    assert_eq!(store.writer_with(by(Claim::Once)).await.unwrap_err().kind(), ErrorKind::Conflict, "this process is a job");
    save(&mut job, 11).await.unwrap();
    assert_clean(&store).await;
}

/// A job may import another checkpoint with its own id. It stays the owner.
#[tokio::test]
async fn a_save_by_hand_of_the_job_itself_gives_nothing_up() {
    let store = wrap(Arc::new(InMemory::new()));
    let by = |claim, id| WriterOptions { claim, id, ..WriterOptions::default() };
    for claim in [Claim::Once, Claim::OnceTakingOver] {
        let id = Some(Id([7; 16]));
        let mut job = store.writer_with(by(Claim::Job, id)).await.unwrap();
        let step = store.snapshots().await.unwrap().len() as u64 + 1;
        save(&mut job, step).await.unwrap();
        save(&mut store.writer_with(by(claim, id)).await.unwrap(), step + 1).await.unwrap();
        assert_eq!(store.writer_with(by(Claim::Once, None)).await.unwrap_err().kind(), ErrorKind::Conflict);
        save(&mut job, step + 2).await.unwrap();
    }
    assert_clean(&store).await;
}

#[tokio::test]
async fn a_copy_ends_no_job_unless_it_is_told_to() {
    let source = Store::open("memory://copied-to-a-job").unwrap();
    save(&mut source.writer(Policy::Full).await.unwrap(), 1).await.unwrap();
    let destination = wrap(Arc::new(InMemory::new()));
    let copy = |take_over| maintain::CopyOptions { take_over, ..maintain::CopyOptions::default() };
    maintain::copy(&source, &destination, &copy(false)).await.unwrap();
    save(&mut destination.writer_with(WriterOptions { claim: Claim::Once, ..WriterOptions::default() }).await.unwrap(), 2).await.unwrap();
    let mut job = destination.writer(Policy::Full).await.unwrap();
    save(&mut job, 3).await.unwrap();
    let error = maintain::copy(&source, &destination, &copy(false)).await.unwrap_err();
    assert_eq!((error.kind(), error.message().contains("saved step 3")), (ErrorKind::Conflict, true), "{error}");
    save(&mut job, 4).await.unwrap();
    save(&mut source.writer(Policy::Full).await.unwrap(), 5).await.unwrap();
    assert_eq!(maintain::copy(&source, &destination, &copy(true)).await.unwrap().snapshots, 1);
    assert_eq!(save(&mut job, 6).await.unwrap_err().kind(), ErrorKind::Fenced);
}

/// The old writer is past its check and about to commit when the new writer opens.
#[tokio::test]
async fn a_writer_that_is_overtaken_in_the_middle_of_a_save_loses() {
    let memory: Arc<InMemory> = Arc::new(InMemory::new());
    let (release, held) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(held);
    let reached = Arc::new(tokio::sync::Semaphore::new(0));
    let signal = reached.clone();
    let gated = FaultStore::new(memory.clone(), move |operation, path: &Path| {
        if operation == Operation::Create && path.as_ref().starts_with("snapshots/7-") {
            signal.add_permits(1);
            // The manifest waits until the other writer has opened.
            gate.lock().unwrap().recv().unwrap();
        }
        Fault::None
    });
    let old_store = wrap(Arc::new(gated));
    let mut old = old_store.writer(Policy::Full).await.unwrap();
    let old = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(save(&mut old, 7))
    });
    reached.acquire().await.unwrap().forget();
    let store = wrap(memory);
    let mut new = store.writer(Policy::Full).await.unwrap();
    release.send(()).unwrap();
    assert_eq!(old.join().unwrap().unwrap_err().kind(), ErrorKind::Fenced);
    save(&mut new, 8).await.unwrap();
    let steps: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(steps, [8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pin_and_forget_beside_a_hundred_saves_disturb_nothing() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Intermittent { every: 5 }).await.unwrap();
    save(&mut writer, 0).await.unwrap();
    let done = Arc::new(AtomicU64::new(0));
    let other = {
        let store = store.clone();
        let done = done.clone();
        tokio::spawn(async move {
            let mut forgotten = Vec::new();
            let mut next = 1;
            while next < 100 {
                if done.load(Ordering::SeqCst) < next {
                    tokio::task::yield_now().await;
                    continue;
                }
                store.pin(next).await.unwrap();
                store.unpin(next).await.unwrap();
                store.forget(&[next]).await.unwrap();
                forgotten.push(next);
                next += 7;
            }
            forgotten
        })
    };
    for step in 1..=100 {
        save(&mut writer, step).await.unwrap();
        done.store(step, Ordering::SeqCst);
    }
    let forgotten = other.await.unwrap();
    assert_eq!(forgotten.len(), 15);
    for step in 0..=100 {
        if forgotten.contains(&step) {
            assert_eq!(store.snapshot(step).await.unwrap_err().kind(), ErrorKind::NotFound);
        } else {
            assert_holds(&store, step).await;
        }
    }
    assert_clean(&store).await;
}

#[tokio::test]
async fn a_step_saved_again_is_refused_unless_it_is_the_same_or_to_be_replaced() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let save = async |writer: &mut Writer, step: u64, value: u8, blob: &str| {
        let data = [value; 400];
        let state = [TensorView::new("w", Dtype::U8, &[400], &data).unwrap()];
        writer.save(step, &state, &[Blob::new("rng", blob.as_bytes())], &Metadata::default()).await
    };
    for step in 1..=3 {
        save(&mut writer, step, step as u8, "a").await.unwrap();
    }
    for (value, blob) in [(4, "a"), (2, "b"), (2, "")] {
        let error = save(&mut writer, 2, value, blob).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains("step 2 is saved already, with other content"), "{error}");
    }
    // A job that missed the first answer saves the same state again.
    save(&mut writer, 3, 3, "a").await.unwrap();
    writer.on_existing_step(ExistingStep::Replace);
    save(&mut writer, 2, 4, "a").await.unwrap();
    save(&mut writer, 3, 5, "a").await.unwrap();
    let read = async |step: u64| store.snapshot(step).await.unwrap().read("w", &Slice::all()).await.unwrap().data[0];
    assert_eq!([read(1).await, read(2).await, read(3).await], [1, 4, 5]);
    let steps: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(steps, [1, 2, 3]);
    // A forgotten step can be saved again.
    store.forget(&[1]).await.unwrap();
    writer.on_existing_step(ExistingStep::Refuse);
    save(&mut writer, 1, 9, "a").await.unwrap();
    assert_eq!(read(1).await, 9);
}

/// A create of a log entry loses its answer, in every way in which real object stores lose it.
#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_neither_a_conflict_nor_a_second_commit() {
    for fault in [Fault::LostAnswer, Fault::LostThenExists, Fault::FailBefore] {
        let memory = Arc::new(InMemory::new());
        let count = AtomicU64::new(0);
        let faulty = FaultStore::new(memory.clone(), move |operation, path| {
            // Every second attempt at a log entry fails.
            if operation == Operation::Create && path.as_ref().starts_with("log/") && count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2)
            {
                fault
            } else {
                Fault::None
            }
        });
        let store = wrap(Arc::new(faulty));
        let mut writer = store.writer(Policy::Consecutive).await.unwrap();
        for step in 1..=6 {
            save(&mut writer, step).await.unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        }
        let clean = wrap(memory);
        let steps: Vec<u64> = clean.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
        assert_eq!(steps, [1, 2, 3, 4, 5, 6], "{fault:?}");
        for step in 1..=6 {
            assert_holds(&clean, step).await;
        }
        assert_clean(&clean).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_stays_unknown_stops_the_writer_and_deletes_nothing() {
    let memory = Arc::new(InMemory::new());
    let sent = Arc::new(AtomicU64::new(0));
    let count = sent.clone();
    let faulty = FaultStore::new(memory.clone(), move |operation, path| match operation {
        // Entry 3, the second save, is stored. Its answer is lost, and it cannot be read back.
        _ if !path.as_ref().ends_with("00003.json") => Fault::None,
        Operation::Create => {
            count.fetch_add(1, Ordering::SeqCst);
            Fault::LostAnswer
        }
        Operation::Get if count.load(Ordering::SeqCst) > 0 => Fault::FailBefore,
        _ => Fault::None,
    });
    let mut writer = wrap(Arc::new(faulty)).writer(Policy::Consecutive).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    assert_eq!(save(&mut writer, 2).await.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    assert!(sent.load(Ordering::SeqCst) > 1, "the same create was sent again");
    assert_eq!(save(&mut writer, 3).await.unwrap_err().kind(), ErrorKind::OutcomeUnknown, "the writer has stopped");
    // Any process that opens the store finds the complete commit that was stored.
    let store = wrap(memory);
    assert_holds(&store, 2).await;
    let mut next = store.writer(Policy::Consecutive).await.unwrap();
    save(&mut next, 3).await.unwrap();
    assert_clean(&store).await;
}

/// A process may sleep, or wait for the storage, between its last object and the commit.
#[tokio::test(start_paused = true)]
async fn a_commit_checks_the_age_of_its_objects_after_it_has_waited_for_the_store() {
    const WAIT: Duration = Duration::from_secs(60);
    let memory = Arc::new(InMemory::new());
    let is_slow = Arc::new(AtomicBool::new(false));
    let slow = is_slow.clone();
    let store = wrap(Arc::new(FaultStore::new(memory.clone(), move |operation, _| match operation {
        Operation::List if slow.load(Ordering::SeqCst) => Fault::Slow(WAIT),
        _ => Fault::None,
    })));
    let options = WriterOptions { age_floor: WAIT, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    is_slow.store(true, Ordering::SeqCst);
    let error = save(&mut writer, 2).await.unwrap_err();
    assert!(error.is_too_late(), "{error}");
    is_slow.store(false, Ordering::SeqCst);
    save(&mut writer, 2).await.unwrap();
    assert_eq!(store.history().entries().await.unwrap().len(), 3);
    assert_clean(&wrap(memory)).await;
}

/// Two mounts of a network file system: each alone keeps the condition, and one forgets it, or shows an old view, in one of 50 cases.
#[tokio::test]
async fn two_ways_to_a_storage_that_disagree_are_found() {
    let memory = Arc::new(InMemory::new());
    let second = |kind: Operation, fault: Fault| {
        let asked = AtomicUsize::new(0);
        let decide = move |operation, _: &_| match operation == kind && asked.fetch_add(1, Ordering::Relaxed) % 50 == 49 {
            true => fault,
            false => Fault::None,
        };
        wrap(Arc::new(FaultStore::new(memory.clone(), decide)))
    };
    let first = wrap(memory.clone());
    assert_eq!(maintain::probe_pair(&first, &second(Operation::Get, Fault::None)).await.unwrap().rounds, 200);
    for (kind, fault, says) in
        [(Operation::Create, Fault::IgnoreCondition, "overwrite each other's commits"), (Operation::Get, Fault::Stale, "is not seen both")]
    {
        let error = maintain::probe_pair(&first, &second(kind, fault)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnsafeStore, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[tokio::test]
async fn a_store_that_ignores_conditional_puts_is_refused() {
    let memory = Arc::new(InMemory::new());
    let ignoring = FaultStore::new(memory.clone(), |operation, _| match operation {
        Operation::Create => Fault::IgnoreCondition,
        _ => Fault::None,
    });
    let store = wrap(Arc::new(ignoring));
    let error = store.writer(Policy::Full).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnsafeStore);
    assert!(error.to_string().contains("put-if-absent"), "{error}");
    // Also if a sound server created the store, which is now behind another server.
    let mut writer = wrap(memory.clone()).writer(Policy::Full).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    assert_eq!(store.writer(Policy::Full).await.unwrap_err().kind(), ErrorKind::UnsafeStore);
    assert_holds(&wrap(memory), 1).await;
}

#[tokio::test]
async fn short_answers_are_errors_not_values() {
    let memory = Arc::new(InMemory::new());
    let mut writer = wrap(memory.clone()).writer(Policy::Full).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    let short = FaultStore::new(memory, |operation, path| match operation {
        Operation::Get if path.as_ref().starts_with("casks/") => Fault::ShortAnswer,
        _ => Fault::None,
    });
    let snapshot = wrap(Arc::new(short)).snapshot(1).await.unwrap();
    for (name, _) in SmallState::at(1).expected().into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
        assert!(snapshot.read(name, &Slice::all()).await.is_err(), "{name}");
    }
}

#[tokio::test]
async fn a_failed_save_leaves_store_and_writer_usable() {
    let memory = Arc::new(InMemory::new());
    let fail = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let switch = fail.clone();
    let faulty = FaultStore::new(memory.clone(), move |operation, path| match operation {
        Operation::Put | Operation::Create if switch.load(Ordering::SeqCst) && path.as_ref().starts_with("casks/") => Fault::FailBefore,
        _ => Fault::None,
    });
    let store = wrap(Arc::new(faulty));
    let options = WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    fail.store(true, Ordering::SeqCst);
    assert_eq!(save(&mut writer, 2).await.unwrap_err().kind(), ErrorKind::Storage);
    fail.store(false, Ordering::SeqCst);
    assert_eq!(store.snapshot(Latest).await.unwrap().step(), 1);
    let saved = save(&mut writer, 3).await.unwrap();
    assert_eq!(saved.kind.name(), "delta", "the base was read back");
    assert_holds(&store, 3).await;
    assert_clean(&store).await;
}

fn damage(objects: &InMemory, folder: &str) -> usize {
    futures::executor::block_on(async {
        use futures::TryStreamExt;
        use object_store::{ObjectStore, ObjectStoreExt};
        let found: Vec<_> = objects.list(Some(&folder.into())).try_collect().await.unwrap();
        for meta in &found {
            let mut bytes = objects.get(&meta.location).await.unwrap().bytes().await.unwrap().to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            objects.put(&meta.location, bytes.into()).await.unwrap();
        }
        found.len()
    })
}

/// If the parent of the next delta is damaged or too deep, the state is saved as a base.
#[tokio::test]
async fn a_damaged_parent_costs_a_base_not_the_checkpoint() {
    for base_cache in [BaseKeeping::Memory, BaseKeeping::None] {
        for folder in ["snapshots", "directories", "casks"] {
            let memory = Arc::new(InMemory::new());
            let options =
                WriterOptions { policy: Policy::Intermittent { every: 8 }, base_cache: base_cache.clone(), ..WriterOptions::default() };
            let mut writer = wrap(memory.clone()).writer_with(options.clone()).await.unwrap();
            save(&mut writer, 1).await.unwrap();
            assert!(damage(&memory, folder) > 0);
            // A restart, after which nothing of the parent is cached.
            let store = wrap(memory.clone());
            let mut writer = store.writer_with(options).await.unwrap();
            assert_eq!(save(&mut writer, 2).await.unwrap().kind.name(), "base", "{folder}");
            assert_eq!(save(&mut writer, 3).await.unwrap().kind.name(), "delta", "{folder}");
            assert_holds(&wrap(memory.clone()), 3).await;
        }
    }
    let memory = Arc::new(InMemory::new());
    let mut writer = wrap(memory.clone()).writer(Policy::Consecutive).await.unwrap();
    for step in 1..=6 {
        save(&mut writer, step).await.unwrap();
    }
    let limits = Limits { max_chain_depth: 4, ..Limits::default() };
    let shallow = Store::with_object_store(memory, Default::default(), StoreOptions { limits, ..StoreOptions::default() });
    let mut writer = shallow.writer(Policy::Consecutive).await.unwrap();
    assert_eq!(save(&mut writer, 7).await.unwrap().kind.name(), "base");
    assert_holds(&shallow, 7).await;
}

#[tokio::test]
async fn an_entry_that_nobody_could_read_is_not_committed() {
    let limits = Limits { max_entry_bytes: 1000, ..Limits::default() };
    let options = StoreOptions { limits, ..StoreOptions::default() };
    let store = Store::with_object_store(Arc::new(InMemory::new()), Default::default(), options);
    let mut writer = store.writer(Policy::Full).await.unwrap();
    for step in 0..40 {
        save(&mut writer, step).await.unwrap();
    }
    let all: Vec<u64> = (0..40).collect();
    assert_eq!(store.forget(&all).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(store.snapshots().await.unwrap().len(), 40, "the store is as it was");
    assert_eq!(store.forget(&[3, 3, 4, 3]).await.unwrap().len(), 2);
    save(&mut writer, 41).await.unwrap();
}

/// Catalogs save requests and change no result.
#[tokio::test]
async fn user_metadata_is_the_same_with_and_without_a_catalog() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Intermittent { every: 100 }).await.unwrap();
    let mut expected = Vec::new();
    for step in 0..70u64 {
        let mut metadata = Metadata::default();
        let user = serde_json::json!({
            "seed": 1_152_921_504_606_846_977u64, "nested": { "a": [1, 2.5, null] }, "none": null,
            "mixed": if step % 2 == 0 { serde_json::json!(1.5) } else { serde_json::json!("text") }, "loss": 1.0 / (step as f64 + 3.0),
        });
        metadata.user = user.as_object().unwrap().clone();
        let state = SmallState::at(step);
        let saved = writer.save(step, &state.tensors(), &[], &metadata).await.unwrap();
        metadata.user.insert(PolicyDecision::KEY.to_owned(), serde_json::to_value(saved.decision).unwrap());
        let times = store.snapshot(step).await.unwrap().user()[SaveTimes::KEY].clone();
        metadata.user.insert(SaveTimes::KEY.to_owned(), times);
        expected.push(metadata.user);
    }
    let found: Vec<_> = store.snapshots().await.unwrap().into_iter().map(|info| info.user).collect();
    assert_eq!(found, expected);
    assert_clean(&store).await;
}

/// A newer version may give guarantees that this version would violate.
#[tokio::test]
async fn a_store_with_unknown_features_is_read_but_not_written() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut writer = store.writer(Policy::Full).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    let head = {
        use object_store::ObjectStoreExt;
        let bytes = memory.get(&LogEntry::path_of(2).as_str().into()).await.unwrap().bytes().await.unwrap();
        LogEntry::decode(&bytes, 2, &Limits::default()).unwrap().1
    };
    let event = Event::Upgraded { must_understand: vec![], may_ignore: vec!["future.gc".into()] };
    let (bytes, _) = LogEntry::new(3, Some(head), Id([1; 16]), Id([2; 16]), 0, event).encode().unwrap();
    {
        use object_store::ObjectStoreExt;
        memory.put(&LogEntry::path_of(3).as_str().into(), bytes.into()).await.unwrap();
    }
    assert_holds(&store, 1).await;
    for error in [
        save(&mut writer, 2).await.unwrap_err(),
        store.writer(Policy::Full).await.unwrap_err(),
        store.pin(1).await.unwrap_err(),
        store.forget(&[1]).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("future.gc"), "{error}");
    }
}

#[tokio::test]
async fn a_catalog_of_an_absurd_number_is_no_catalog() {
    let memory = Arc::new(InMemory::new());
    let mut writer = wrap(memory.clone()).writer(Policy::Full).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    {
        use object_store::ObjectStoreExt;
        let name = format!("catalog/{}-{}.parquet", u64::MAX, Digest::of(b"x"));
        memory.put(&name.as_str().into(), b"x".to_vec().into()).await.unwrap();
    }
    assert_holds(&wrap(memory), 1).await;
}

#[tokio::test]
async fn a_reader_may_come_before_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run").to_str().unwrap().to_owned();
    let early = Store::open(&url).unwrap();
    assert_eq!(early.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::NotFound);
    let mut writer = Store::open(&url).unwrap().writer(Policy::Full).await.unwrap();
    save(&mut writer, 5).await.unwrap();
    assert_holds(&early, 5).await;
    // Two runs must not share a root because a part of the URL is ignored.
    for url in ["file:///x/run#1", "file:///x/run?1"] {
        assert_eq!(Store::open(url).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
