//! Space that a job frees while it saves: each save deletes what the save before it has forgotten (log 7.6).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{SmallState, until, without_inline, wrap, wrap_inline};
use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tensorcask::maintain::{self, CompactOptions, CopyOptions, GcOptions, Retainer, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Event;
use tensorcask::{ErrorKind, ExistingStep, Free, Latest, Policy, Rank, Retention, Slice, Snapshot, Store, Writer, WriterOptions};

fn keep_last(last: u64) -> Retention {
    Retention { keep_last: Some(last), ..Retention::default() }
}

async fn writer(store: &Store, policy: Policy, retention: Retention) -> Writer {
    store.writer_with(WriterOptions { policy, retention: Some(retention), ..WriterOptions::default() }).await.unwrap()
}

async fn save(writer: &mut Writer, step: u64) -> tensorcask::Result<()> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.map(|_| ())
}

async fn check(snapshot: &Snapshot) -> tensorcask::Result<()> {
    for (name, bytes) in SmallState::at(snapshot.step()).expected() {
        assert_eq!(snapshot.read(name, &Slice::all()).await?.data, bytes, "step {}, {name}", snapshot.step());
    }
    Ok(())
}

async fn live(store: &Store) -> Vec<u64> {
    store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect()
}

/// Checks that all live steps are whole, and returns them.
async fn whole_steps(store: &Store) -> Vec<u64> {
    let steps = live(store).await;
    for &step in &steps {
        check(&store.snapshot(step).await.unwrap()).await.unwrap();
    }
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    steps
}

async fn paths(objects: &dyn ObjectStore, folder: &str) -> BTreeSet<String> {
    let found: Vec<_> = objects.list(Some(&Path::from(folder))).try_collect().await.unwrap();
    found.into_iter().map(|meta| meta.location.to_string()).collect()
}

#[tokio::test]
async fn each_save_deletes_what_the_save_before_it_forgot() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut writer = writer(&store, Policy::Full, keep_last(2)).await;
    for step in 1..=9 {
        save(&mut writer, step).await.unwrap();
        let kept = 1.max(step.saturating_sub(2))..=step;
        let manifests: BTreeSet<u64> = paths(&*memory, "snapshots")
            .await
            .iter()
            .map(|path| path["snapshots/".len()..].split('-').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(manifests, kept.clone().collect(), "the two live steps, and the one that was forgotten last");
        let casks = paths(&*memory, "casks").await.len() as u64;
        let of_one = store.snapshot(Latest).await.unwrap().manifest().casks.len() as u64;
        assert_eq!(casks, of_one * kept.count() as u64);
        assert_eq!(whole_steps(&store).await, (1.max(step.saturating_sub(1))..=step).collect::<Vec<_>>());
    }
    // Garbage collection has nothing to say against it.
    let report = maintain::gc(&store, &GcOptions::default()).await.unwrap();
    assert_eq!(report.collected.iter().map(|record| record.step).collect::<Vec<_>>(), [7]);
}

/// The outcome of a commit was not known, and the same receipts are committed again. Both snapshots have the same casks.
#[tokio::test]
async fn casks_of_receipts_that_were_committed_twice_stay() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = writer(&store, Policy::Full, keep_last(9)).await;
    writer.on_existing_step(ExistingStep::Replace);
    let mut rank = store.rank_writer(Rank { rank: 0, world: 1, attempt: 0 }, WriterOptions::default()).await.unwrap();
    let state = SmallState::at(1);
    let parent = writer.next_parent(1).await.unwrap();
    let receipts = [rank.save_on(1, parent, &state.tensors(), &[]).await.unwrap()];
    for _ in 0..2 {
        writer.commit_receipts(1, &receipts, &SmallState::metadata(1)).await.unwrap();
    }
    for step in 2..=4 {
        save(&mut writer, step).await.unwrap();
    }
    let kinds = store.history().entries().await.unwrap().into_iter().map(|entry| entry.event.name()).collect::<Vec<_>>();
    assert!(kinds.contains(&"collecting"), "the first snapshot of step 1 was freed: {kinds:?}");
    assert_eq!(whole_steps(&store).await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_retention_that_leaves_it_to_garbage_collection_deletes_nothing() {
    let memory = Arc::new(InMemory::new());
    let mut writer = writer(&wrap(memory.clone()), Policy::Full, Retention { free: Free::Gc, ..keep_last(1) }).await;
    for step in 1..=5 {
        save(&mut writer, step).await.unwrap();
    }
    assert_eq!(paths(&*memory, "snapshots").await.len(), 5);
}

/// Entries at the end of the log were lost, and with them the saves and pins in them. A new job continues from an older step.
#[tokio::test]
async fn a_job_frees_nothing_if_the_log_has_lost_its_end() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut first = writer(&store, Policy::Full, keep_last(9)).await;
    for step in 1..=6 {
        save(&mut first, step).await.unwrap();
    }
    let log = paths(&*memory, "log").await;
    for path in log.iter().rev().take(3) {
        memory.delete(&Path::from(path.as_str())).await.unwrap();
    }
    let before = paths(&*memory, "snapshots").await;
    let store = wrap(memory.clone());
    let mut next = writer(&store, Policy::Full, keep_last(1)).await;
    for step in 4..=9 {
        save(&mut next, step).await.unwrap();
    }
    assert!(paths(&*memory, "snapshots").await.is_superset(&before));
    assert_eq!(whole_steps(&store).await, [9]);
}

#[tokio::test]
async fn parents_stay_until_the_last_delta_on_them_is_freed() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut most = 0;
    let mut writer = writer(&store, Policy::Consecutive, keep_last(1)).await;
    for step in 1..=40 {
        if step % 5 == 0 {
            // A chain ends here: the next snapshot is a base.
            writer = self::writer(&store, Policy::Full, keep_last(1)).await;
        } else if step % 5 == 1 {
            writer = self::writer(&store, Policy::Consecutive, keep_last(1)).await;
        }
        save(&mut writer, step).await.unwrap();
        assert_eq!(whole_steps(&store).await, [step]);
        most = most.max(paths(&*memory, "snapshots").await.len());
    }
    assert!(most <= 12, "two chains of five links at most, and what waits: {most}");
}

/// A store of an older version, or of a job that left the deletion to garbage collection: no save is held up by all of it at once.
#[tokio::test]
async fn many_forgotten_steps_are_freed_in_portions() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut first = writer(&store, Policy::Full, Retention { free: Free::Gc, ..keep_last(1) }).await;
    for step in 1..=40 {
        save(&mut first, step).await.unwrap();
    }
    let mut next = writer(&store, Policy::Full, keep_last(1)).await;
    let mut left = Vec::new();
    for step in 41..=43 {
        save(&mut next, step).await.unwrap();
        left.push(paths(&*memory, "snapshots").await.len());
    }
    assert_eq!(left, [25, 10, 2]);
    assert_eq!(whole_steps(&store).await, [43]);
}

/// Without the permission to delete, saves go on, and nothing is tried again and again.
#[tokio::test]
async fn a_storage_that_refuses_deletions_costs_one_attempt() {
    let memory = Arc::new(InMemory::new());
    let deletions = Arc::new(AtomicU64::new(0));
    let count = deletions.clone();
    let strict = FaultStore::new(memory.clone(), move |operation, path: &Path| {
        let is_kept = operation == Operation::Delete && !path.as_ref().starts_with("probe/");
        if is_kept {
            count.fetch_add(1, Ordering::SeqCst);
        }
        if is_kept { Fault::Status(403) } else { Fault::None }
    });
    let store = wrap(Arc::new(strict));
    let mut writer = writer(&store, Policy::Full, keep_last(1)).await;
    for step in 1..=8 {
        save(&mut writer, step).await.unwrap();
    }
    assert_eq!(whole_steps(&store).await, [8]);
    let of_one = store.snapshot(Latest).await.unwrap().manifest().casks.len() as u64;
    assert!(deletions.load(Ordering::SeqCst) <= of_one, "one step was tried");
    assert_eq!(paths(&*memory, "snapshots").await.len(), 8);
}

/// Snapshots in log entries are never freed, so giving them up would only lengthen the log.
#[tokio::test]
async fn small_snapshots_are_not_given_up() {
    let store = wrap_inline(Arc::new(InMemory::new()));
    let mut writer = writer(&store, Policy::Full, keep_last(1)).await;
    for step in 1..=8 {
        save(&mut writer, step).await.unwrap();
    }
    let entries = store.history().entries().await.unwrap();
    assert!(entries.iter().all(|entry| !matches!(entry.event, Event::Collecting { .. })));
    assert_eq!(whole_steps(&store).await, [8]);
}

/// The retainer of the engine's tiers, and of `Store.save` in Python.
#[tokio::test]
async fn a_retainer_frees_with_its_next_call() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut writer = store.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    let mut retainer = Retainer::new(&store, keep_last(2), CompactOptions::default());
    let mut freed = 0;
    for step in 1..=20 {
        save(&mut writer, step).await.unwrap();
        freed += retainer.apply().await.unwrap().freed.len();
        whole_steps(&store).await;
    }
    let left = paths(&*memory, "snapshots").await.len();
    assert_eq!(freed + left, 20);
    assert!(left <= 6, "two live deltas, their base, and what waits: {left}");
}

#[tokio::test]
async fn a_slow_reader_learns_that_its_step_is_gone_and_a_pin_protects_it() {
    let memory = Arc::new(InMemory::new());
    let store = wrap(memory.clone());
    let mut writer = writer(&store, Policy::Full, keep_last(1)).await;
    save(&mut writer, 1).await.unwrap();
    let slow = store.snapshot(1).await.unwrap();
    store.pin(1).await.unwrap();
    for step in 2..=5 {
        save(&mut writer, step).await.unwrap();
    }
    check(&slow).await.unwrap();
    // Nothing of it is cached.
    let unpinned = wrap(memory.clone()).snapshot(1).await.unwrap();
    store.unpin(1).await.unwrap();
    for step in 6..=8 {
        save(&mut writer, step).await.unwrap();
    }
    let error = check(&unpinned).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "no first start: {error}");
    assert!(error.message().contains("step 1 was forgotten") && error.message().contains("pin"), "{error}");
    assert_eq!(whole_steps(&store).await, [8]);
}

/// A compaction takes the parents from a live step. Readers that opened it before still read them.
#[tokio::test]
async fn readers_of_a_step_that_is_compacted_go_on() {
    for restarts in [false, true] {
        let memory = Arc::new(InMemory::new());
        let store = wrap(memory.clone());
        let keep = Retention { keep_every: Some(3), ..keep_last(3) };
        let mut writer = writer(&store, Policy::Consecutive, keep).await;
        for step in 1..=3 {
            save(&mut writer, step).await.unwrap();
        }
        let before = wrap(memory.clone()).snapshot(3).await.unwrap();
        let compacted = maintain::compact(&store, 3, &CompactOptions::default()).await.unwrap();
        assert!(compacted.sequence.is_some(), "step 3 was a delta");
        if restarts {
            writer = self::writer(&store, Policy::Full, keep).await;
        }
        for step in 4..=12 {
            save(&mut writer, step).await.unwrap();
        }
        check(&before).await.unwrap();
        assert_eq!(whole_steps(&store).await, [3, 6, 9, 10, 11, 12]);
    }
}

/// A store of which a job saves steps 4 to 6, and keeps only the last, as soon as somebody reads the manifest of step 1.
fn freed_at_the_first_look(memory: &Arc<InMemory>) -> Store {
    freed_at_the_first_read(memory, "snapshots/1-")
}

/// A store of which a job saves steps 4 to 6, and keeps only the last, as soon as somebody reads an object with this prefix.
fn freed_at_the_first_read(memory: &Arc<InMemory>, prefix: &'static str) -> Store {
    let armed = AtomicBool::new(true);
    let objects = memory.clone();
    let raced = FaultStore::new(memory.clone(), move |operation, path: &Path| {
        if operation == Operation::Get && path.as_ref().starts_with(prefix) && armed.swap(false, Ordering::SeqCst) {
            let store = wrap(objects.clone());
            let saving = async move {
                let mut writer = writer(&store, Policy::Full, keep_last(1)).await;
                for step in 4..=6 {
                    save(&mut writer, step).await.unwrap();
                }
            };
            let run = move || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(saving);
            std::thread::spawn(run).join().unwrap();
        }
        Fault::None
    });
    wrap(Arc::new(raced))
}

/// A job frees steps between two reads of a recovery: neither is an older step returned, nor "no step" said.
#[tokio::test]
async fn a_recovery_returns_the_newest_step_of_a_job_that_frees() {
    for pinned in [None, Some(1)] {
        for prefix in ["snapshots/3-", "casks/"] {
            let memory = Arc::new(InMemory::new());
            let store = wrap(memory.clone());
            let mut first = writer(&store, Policy::Full, keep_last(3)).await;
            for step in 1..=3 {
                save(&mut first, step).await.unwrap();
            }
            if let Some(step) = pinned {
                store.pin(step).await.unwrap();
            }
            let found = freed_at_the_first_read(&memory, prefix).recover(&[]).await.unwrap();
            assert_eq!((found.snapshot.step(), found.skipped.len()), (6, 0), "{prefix}, {pinned:?}");
            check(&found.snapshot).await.unwrap();
        }
    }
}

/// The same of a compaction: it folds the newest step.
#[tokio::test]
async fn a_compaction_looks_again_if_a_job_frees_its_step() {
    let memory = Arc::new(InMemory::new());
    let mut first = writer(&wrap(memory.clone()), Policy::Consecutive, keep_last(3)).await;
    for step in 1..=3 {
        save(&mut first, step).await.unwrap();
    }
    let compacted = maintain::compact(&freed_at_the_first_look(&memory), Latest, &CompactOptions::default()).await.unwrap();
    assert_eq!(compacted.record.step, 6);
    assert_eq!(whole_steps(&wrap(memory)).await, [6]);
}

/// The source frees a step while it is being copied: the copy looks at the source again.
#[tokio::test]
async fn a_copy_leaves_out_what_the_source_frees_meanwhile() {
    let memory = Arc::new(InMemory::new());
    let mut first = writer(&wrap(memory.clone()), Policy::Full, keep_last(3)).await;
    for step in 1..=3 {
        save(&mut first, step).await.unwrap();
    }
    let source = freed_at_the_first_look(&memory);
    let destination = wrap(Arc::new(InMemory::new()));
    let report = maintain::copy(&source, &destination, &CopyOptions::default()).await.unwrap();
    assert_eq!(report.snapshots, 1, "the other three were given up: {report:?}");
    assert_eq!(whole_steps(&destination).await, [6]);
}

/// A job frees steps between two reads of a verification or of a garbage collection. Neither reports damage.
#[tokio::test]
async fn checks_pass_over_what_a_job_frees_meanwhile() {
    for collects in [false, true] {
        let memory = Arc::new(InMemory::new());
        let mut first = writer(&wrap(memory.clone()), Policy::Full, keep_last(3)).await;
        for step in 1..=3 {
            save(&mut first, step).await.unwrap();
        }
        let store = freed_at_the_first_look(&memory);
        if collects {
            let report = maintain::gc(&store, &GcOptions::default()).await.unwrap();
            assert!(report.deleted.is_empty(), "{report:?}");
        } else {
            let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
            assert!(report.is_clean(), "{:?}", report.problems);
        }
        assert_eq!(live(&wrap(memory.clone())).await, [6], "the job saved in between");
        assert_eq!(whole_steps(&wrap(memory)).await, [6]);
    }
}

/// Whatever request of a save fails or loses its answer, each step that was saved and is kept stays whole.
#[tokio::test]
async fn any_failing_request_loses_no_live_step() {
    for fault in [Fault::FailBefore, Fault::LostAnswer] {
        for failing in 0.. {
            let memory = Arc::new(InMemory::new());
            let requests = Arc::new(AtomicU64::new(0));
            let count = requests.clone();
            let faulty = FaultStore::new(memory.clone(), move |operation, _: &Path| {
                let changes = matches!(operation, Operation::Create | Operation::Put | Operation::Delete);
                match changes && count.fetch_add(1, Ordering::SeqCst) == failing {
                    true => fault,
                    false => Fault::None,
                }
            });
            let store = wrap(Arc::new(faulty));
            let retention = keep_last(2);
            let options =
                || WriterOptions { policy: Policy::Intermittent { every: 3 }, retention: Some(retention), ..WriterOptions::default() };
            let mut acknowledged = Vec::new();
            let mut open = None;
            for step in 1..=9 {
                let mut current = match open.take() {
                    Some(writer) => writer,
                    None => match store.writer_with(options()).await {
                        Ok(writer) => writer,
                        Err(_) => continue,
                    },
                };
                if save(&mut current, step).await.is_ok() {
                    acknowledged.push(step);
                    open = Some(current);
                }
            }
            let plain = wrap(memory.clone());
            let steps = whole_steps(&plain).await;
            assert!(acknowledged.iter().rev().take(2).all(|step| steps.contains(step)), "{fault:?} {failing}: {acknowledged:?}, {steps:?}");
            if requests.load(Ordering::SeqCst) <= failing {
                break;
            }
        }
    }
}

/// Readers of the newest step, a compaction and a copy go on while a job frees what it forgets.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_of_live_steps_and_copies_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let open = |name: &str| without_inline().open(folder.path().join(name).to_str().unwrap()).unwrap();
    let store = open("run");
    let mut writer = writer(&store, Policy::Intermittent { every: 4 }, keep_last(8)).await;
    save(&mut writer, 0).await.unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let reads = Arc::new(AtomicU64::new(0));
    let copies = Arc::new(AtomicU64::new(0));
    let folded = Arc::new(AtomicU64::new(0));
    let reader = tokio::spawn({
        let store = open("run");
        let done = done.clone();
        let reads = reads.clone();
        async move {
            while !done.load(Ordering::SeqCst) {
                let newest = store.snapshot(Latest).await.unwrap();
                match check(&newest).await {
                    Ok(()) => _ = reads.fetch_add(1, Ordering::SeqCst),
                    // The reader was slower than nine saves.
                    Err(e) => assert!(!live(&store).await.contains(&newest.step()), "{e}"),
                }
            }
        }
    });
    let compactor = tokio::spawn({
        let store = open("run");
        let done = done.clone();
        let folded = folded.clone();
        async move {
            while !done.load(Ordering::SeqCst) {
                let newest = live(&store).await.last().copied().unwrap();
                match maintain::compact(&store, newest, &CompactOptions::default()).await {
                    Ok(compacted) => _ = folded.fetch_add(u64::from(compacted.sequence.is_some()), Ordering::SeqCst),
                    Err(e) => assert!(e.kind() == ErrorKind::Conflict || !live(&store).await.contains(&newest), "{e}"),
                }
            }
        }
    });
    let copier = tokio::spawn({
        let store = open("run");
        let copy = open("copy");
        let done = done.clone();
        let copies = copies.clone();
        async move {
            while !done.load(Ordering::SeqCst) {
                match maintain::copy(&store, &copy, &CopyOptions::default()).await {
                    Ok(_) => _ = copies.fetch_add(1, Ordering::SeqCst),
                    // The copier was slower than the saves, again and again.
                    Err(e) => assert_eq!(e.kind(), ErrorKind::Conflict, "{e}"),
                }
            }
        }
    });
    let mut step = 0;
    until("each of them did something", async || {
        step += 1;
        save(&mut writer, step).await.unwrap();
        let ended = [&reader, &compactor, &copier].into_iter().any(|task| task.is_finished());
        ended || (step >= 30 && [&reads, &copies, &folded].iter().all(|count| count.load(Ordering::SeqCst) > 4))
    })
    .await;
    done.store(true, Ordering::SeqCst);
    for task in [reader, compactor, copier] {
        task.await.unwrap();
    }
    whole_steps(&store).await;
    whole_steps(&open("copy")).await;
}
