//! Retention, compaction and garbage collection, alone and beside writers and readers.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{SmallState, objects_of, wrap};
use object_store::memory::InMemory;
use tensorcask::{
    BaseKeeping, CompactOptions, ErrorKind, GcOptions, Latest, Policy, Retention, Slice, Snapshot, Status, Store, StoreOptions,
    VerifyOptions, Writer, WriterOptions,
};

const NOW: GcOptions = GcOptions { apply: true, age_floor: Duration::ZERO, collect: true, directories: false };

async fn save(writer: &mut Writer, step: u64) -> tensorcask::Result<tensorcask::Saved> {
    let state = SmallState::at(step);
    writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await
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
    let report = store.verify(&VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// A store in memory with a consecutive chain of these steps.
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
    store.pin(2, true).await.unwrap();
    let retention = Retention { keep_last: Some(2), keep_every: Some(4) };
    let steps = |records: Vec<tensorcask::SnapshotRecord>| records.iter().map(|record| record.step).collect::<Vec<_>>();
    assert_eq!(steps(store.retain(retention, false).await.unwrap()), [1, 3, 5, 6, 7]);
    assert_eq!(store.snapshots().await.unwrap().len(), 9, "only told");
    assert_eq!(steps(store.retain(retention, true).await.unwrap()), [1, 3, 5, 6, 7]);
    assert_holds(&store, [2, 4, 8, 9]).await;
    assert_eq!(steps(store.retain(Retention { keep_last: None, keep_every: Some(100) }, true).await.unwrap()), [4, 8]);
    assert_holds(&store, [2, 9]).await;
    for nothing in
        [Retention::default(), Retention { keep_last: Some(0), keep_every: None }, Retention { keep_last: None, keep_every: Some(0) }]
    {
        assert_eq!(store.retain(nothing, true).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

#[tokio::test]
async fn a_folded_chain_restores_bit_for_bit_and_deltas_on_it_stay() {
    let (store, mut writer) = chain(1..=6).await;
    let before = store.snapshot(6).await.unwrap();
    assert_eq!(before.chain().len(), 6);
    let compacted = store.compact(4, &CompactOptions::default()).await.unwrap();
    assert_eq!((compacted.links, compacted.record.parent, compacted.record.step), (4, None, 4));
    assert_holds(&store, 1..=6).await;
    let after = store.snapshot(6).await.unwrap();
    assert_eq!(after.chain().len(), 3, "6 and 5, on 4");
    assert_eq!(after.manifest().content, before.manifest().content);
    let folded = store.snapshot(4).await.unwrap();
    assert_eq!((folded.manifest().id, folded.user()), (compacted.record.id, &SmallState::metadata(4).user));

    // The writer goes on upon its own chain; what is a base already is left alone.
    save(&mut writer, 7).await.unwrap();
    let again = store.compact(4, &CompactOptions::default()).await.unwrap();
    assert_eq!((again.sequence, again.links), (None, 1));
    assert_eq!(store.compact(99, &CompactOptions::default()).await.unwrap_err().kind(), ErrorKind::NotFound);
    store.compact(Latest, &CompactOptions::default()).await.unwrap();
    assert_holds(&store, 1..=7).await;
    // A newcomer builds upon it, without the state in memory.
    let options = WriterOptions { policy: Policy::Consecutive, base_cache: BaseKeeping::None, ..WriterOptions::default() };
    let saved = save(&mut store.writer_with(options).await.unwrap(), 8).await.unwrap();
    assert_eq!(saved.parent, Some(store.snapshot(7).await.unwrap().record().id));
    assert_holds(&store, 1..=8).await;
}

/// More than 64 entries, so that what follows is read from a catalog.
#[tokio::test]
async fn catalogs_know_what_was_compacted_and_collected() {
    let (store, mut writer) = chain(1..=20).await;
    store.compact(20, &CompactOptions::default()).await.unwrap();
    store.retain(Retention { keep_last: Some(1), keep_every: None }, true).await.unwrap();
    store.gc(&NOW).await.unwrap();
    for step in 21..=63 {
        save(&mut writer, step).await.unwrap();
    }
    assert_holds(&store, 20..=63).await;
    store.compact(63, &CompactOptions::default()).await.unwrap();
    store.gc(&NOW).await.unwrap();
    assert_holds(&store, 20..=63).await;
}

#[tokio::test]
async fn gc_frees_what_nothing_needs_and_only_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreOptions { fsync: false, ..StoreOptions::default() }.open(folder.path().to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    for step in 1..=6 {
        save(&mut writer, step).await.unwrap();
    }
    store.forget(&[1, 2, 4]).await.unwrap();
    let objects = objects_of(folder.path());

    let told = store.gc(&GcOptions { apply: false, ..NOW }).await.unwrap();
    let steps = |records: &[tensorcask::SnapshotRecord]| records.iter().map(|record| record.step).collect::<Vec<_>>();
    assert_eq!((steps(&told.collected), steps(&told.held)), (vec![2], vec![1, 4]), "3, 5 and 6 need their bases");
    assert!(told.collected_bytes > 0 && told.held_bytes > told.collected_bytes);
    assert_eq!(objects_of(folder.path()), objects, "nothing was done");

    // The floor counts from the entry that gives a snapshot up, however old its objects are.
    let waits = GcOptions { age_floor: Duration::from_secs(3600), ..NOW };
    let report = store.gc(&waits).await.unwrap();
    assert_eq!((steps(&report.collected), report.deleted.len()), (vec![2], 0));
    assert_eq!(report.waiting_bytes(), report.waiting.iter().map(|object| object.bytes).sum::<u64>());
    assert_eq!(report.waiting.len(), 4, "three casks and a manifest: {:?}", report.waiting);
    assert_holds(&store, [3, 5, 6]).await;

    // An object that nothing names, young and old; others are none of gc's business.
    std::fs::write(folder.path().join("casks/00000000000000000000000000000000.cask"), b"left over").unwrap();
    std::fs::write(folder.path().join("notes.txt"), b"mine").unwrap();
    assert!(store.gc(&waits).await.unwrap().deleted.is_empty());
    tokio::time::sleep(Duration::from_millis(20)).await;
    let report = store.gc(&NOW).await.unwrap();
    assert_eq!(report.deleted.len(), 5, "{:?}", report.deleted);
    assert_eq!(report.freed_bytes(), report.deleted.iter().map(|object| object.bytes).sum::<u64>());
    assert_holds(&store, [3, 5, 6]).await;
    assert!(folder.path().join("notes.txt").exists());
    assert_eq!(store.gc(&NOW).await.unwrap().deleted, [], "nothing is left to do");

    // With the chain folded, nothing holds the old base.
    store.compact(3, &CompactOptions::default()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let report = store.gc(&NOW).await.unwrap();
    assert_eq!(steps(&report.collected), [1]);
    assert_holds(&store, [3, 5, 6]).await;
    assert_eq!(store.snapshot(6).await.unwrap().chain()[1].record.status, Status::Forgotten, "4 is still held");
}

#[tokio::test]
async fn pins_outlive_everything() {
    let (store, mut writer) = chain(1..=2).await;
    store.pin(2, true).await.unwrap();
    save(&mut writer, 2).await.unwrap();
    assert!(store.forget(&[1, 2]).await.is_ok(), "the second snapshot of step 2 is not pinned");
    let report = store.gc(&NOW).await.unwrap();
    assert_eq!(report.collected.len(), 1, "the pinned one and its parent are held: {report:?}");
    assert_eq!(report.held.iter().map(|record| record.step).collect::<Vec<_>>(), [1], "the pinned one needs it");
}

/// The parent of a delta is given up while the delta is being saved: it becomes a base.
#[tokio::test]
async fn no_delta_is_committed_on_a_snapshot_that_was_given_up() {
    use tensorcask::testing::fault::{Fault, FaultStore, Operation};
    let memory: Arc<InMemory> = Arc::new(InMemory::new());
    let plain = wrap(memory.clone());
    let (armed, other) = (Arc::new(AtomicBool::new(false)), plain.clone());
    let gate = armed.clone();
    let gated = FaultStore::new(memory, move |operation, path| {
        if operation == Operation::Create && path.as_ref().starts_with("snapshots/2-") && gate.swap(false, Ordering::SeqCst) {
            let store = other.clone();
            let meddle = async move {
                store.forget(&[1]).await.unwrap();
                assert_eq!(store.gc(&NOW).await.unwrap().collected.len(), 1);
            };
            std::thread::spawn(move || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(meddle))
                .join()
                .unwrap();
        }
        Fault::None
    });
    let mut writer = wrap(Arc::new(gated)).writer(Policy::Consecutive).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    armed.store(true, Ordering::SeqCst);
    let saved = save(&mut writer, 2).await.unwrap();
    assert_eq!(saved.parent, None);
    assert_eq!(save(&mut writer, 3).await.unwrap().parent, Some(saved.id));
    assert_holds(&plain, [2, 3]).await;
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
    let on_disk = Store::open(folder.path().to_str().unwrap()).unwrap();
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
    let error = on_disk.gc(&NOW).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("nothing is deleted"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path().join("casks")).unwrap().count(), casks);
    drop(store);
}

/// A writer, a compaction, a collection and readers at once, on a real disk, with a floor that they reach many times.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writers_readers_compaction_and_gc_at_once() {
    const FLOOR: Duration = Duration::from_millis(400);
    const ROUNDS: u64 = 120;
    let folder = tempfile::tempdir().unwrap();
    let open = {
        let url = folder.path().to_str().unwrap().to_owned();
        move || StoreOptions { fsync: false, ..StoreOptions::default() }.open(&url).unwrap()
    };
    let options = WriterOptions { policy: Policy::Intermittent { every: 5 }, age_floor: FLOOR, ..WriterOptions::default() };
    let mut writer = open().writer_with(options.clone()).await.unwrap();
    save(&mut writer, 0).await.unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let (reads, freed, folded) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));

    let collector = tokio::spawn({
        let (store, done, freed) = (open(), done.clone(), freed.clone());
        async move {
            while !done.load(Ordering::SeqCst) {
                store.retain(Retention { keep_last: Some(6), keep_every: Some(25) }, true).await.unwrap();
                let report = store.gc(&GcOptions { age_floor: FLOOR, ..NOW }).await.unwrap();
                freed.fetch_add(report.deleted.len() as u64, Ordering::SeqCst);
            }
        }
    });
    let compactor = tokio::spawn({
        let (store, done, folded) = (open(), done.clone(), folded.clone());
        async move {
            let compact = CompactOptions { age_floor: FLOOR, ..CompactOptions::default() };
            while !done.load(Ordering::SeqCst) {
                let live = store.snapshots().await.unwrap();
                for record in live.iter().rev().take(3).map(|info| &info.record) {
                    let begun = Instant::now();
                    match store.compact(record.step, &compact).await {
                        Ok(compacted) => _ = folded.fetch_add(u64::from(compacted.sequence.is_some()), Ordering::SeqCst),
                        // Forgotten meanwhile, or too slow: both are answers, not damage.
                        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Conflict) => {}
                        Err(e) => assert!(begun.elapsed() > FLOOR / 2, "{e}"),
                    }
                }
            }
        }
    });
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (store, done, reads) = (open(), done.clone(), reads.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::SeqCst) {
                    // What was live when the log was read stays readable for the floor.
                    let begun = Instant::now();
                    let read = async { check(&store.snapshot(Latest).await?).await };
                    match read.await {
                        Ok(()) => _ = reads.fetch_add(1, Ordering::SeqCst),
                        Err(e) => assert!(begun.elapsed() > FLOOR, "after {:?}: {e}", begun.elapsed()),
                    }
                }
            })
        })
        .collect();
    let mut saved = 0;
    for step in 1..=ROUNDS {
        let begun = Instant::now();
        match save(&mut writer, step).await {
            Ok(_) => saved += 1,
            Err(e) => assert!(begun.elapsed() > FLOOR / 2, "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    done.store(true, Ordering::SeqCst);
    collector.await.unwrap();
    compactor.await.unwrap();
    for reader in readers {
        reader.await.unwrap();
    }
    let store = open();
    let live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_holds(&store, live).await;
    let counts = [saved, reads.load(Ordering::SeqCst), freed.load(Ordering::SeqCst), folded.load(Ordering::SeqCst)];
    println!("saved, read, freed, folded: {counts:?}");
    assert!(counts.iter().all(|&count| count > 10), "all of them did something: {counts:?}");
    // Afterwards nothing but what is needed is left.
    tokio::time::sleep(2 * FLOOR).await;
    store.gc(&GcOptions { age_floor: FLOOR, ..NOW }).await.unwrap();
    tokio::time::sleep(2 * FLOOR).await;
    let last = store.gc(&GcOptions { age_floor: FLOOR, ..NOW }).await.unwrap();
    assert_eq!((last.collected.len(), last.waiting.len()), (0, 0), "{:?}", last.waiting);
}
