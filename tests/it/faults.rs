//! Storage that fails at random: no false conflict, no double commit, no wrong byte, and no loss of an acknowledged
//! save.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{is_thorough, wrap, wrap_inline};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Event;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, Slice, Store, TensorView, Writer};

fn state(step: u64, bytes: usize) -> Vec<u8> {
    let mut data: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    for at in 0..8usize {
        data[at * (bytes / 8)] = step as u8;
    }
    data
}

async fn save(writer: &mut Writer, step: u64, bytes: usize) -> tensorcask::Result<()> {
    let data = state(step, bytes);
    let tensors = [TensorView::new("w", Dtype::U8, &[bytes as u64], &data)?];
    writer.save(step, &tensors, &[], &Metadata::default()).await.map(|_| ())
}

/// Asserts that an error is one that a single writer may get when storage fails.
fn assert_honest(error: &tensorcask::Error, what: &str) {
    let conflict = [ErrorKind::Conflict, ErrorKind::Fenced, ErrorKind::UnsafeStore, ErrorKind::InvalidArgument, ErrorKind::Unsupported];
    assert!(!conflict.contains(&error.kind()), "{what}: {error}");
}

/// Saves steps through a faulty store, reopens it if the writer asks for that, and reads them back through it.
async fn storm(faulty: &dyn Fn() -> Store, clean: &Store, steps: u64, bytes: usize, what: &str) -> (u64, u64) {
    let mut acknowledged = Vec::new();
    let mut failures = 0;
    let mut writer = None::<Writer>;
    for step in 1..=steps {
        let mut current = match writer.take() {
            Some(writer) => writer,
            None => match faulty().writer(Policy::Consecutive).await {
                Ok(writer) => writer,
                Err(e) => {
                    assert_honest(&e, what);
                    failures += 1;
                    continue;
                }
            },
        };
        match save(&mut current, step, bytes).await {
            Ok(()) => acknowledged.push(step),
            Err(e) => {
                assert_honest(&e, what);
                failures += 1;
                if e.kind() == ErrorKind::OutcomeUnknown {
                    continue;
                }
            }
        }
        writer = Some(current);
        // Each read is right or an error.
        if let Ok(snapshot) = faulty().snapshot(step).await
            && let Ok(tensor) = snapshot.read("w", &Slice::all()).await
        {
            assert!(tensor.data == state(step, bytes), "{what}: step {step} reads as other bytes");
        }
    }
    let mut commits: BTreeMap<u64, u64> = BTreeMap::new();
    match clean.history().entries().await {
        Ok(entries) => {
            for entry in entries {
                if let Event::Added { step, .. } = entry.event {
                    *commits.entry(step).or_default() += 1;
                }
            }
        }
        Err(e) => assert!(e.kind() == ErrorKind::NotFound && acknowledged.is_empty(), "{what}: {e}"),
    }
    assert!(commits.values().all(|&count| count == 1), "{what}: a step was committed twice: {commits:?}");
    for step in &acknowledged {
        assert!(commits.contains_key(step), "{what}: step {step} was acknowledged and is not there");
    }
    for &step in commits.keys() {
        let read = clean.snapshot(step).await.unwrap().read("w", &Slice::all()).await.unwrap();
        assert!(read.data == state(step, bytes), "{what}: step {step} holds other bytes");
    }
    if !commits.is_empty() {
        let report = maintain::verify(clean, &VerifyOptions::default()).await.unwrap();
        assert!(report.is_clean(), "{what}: {:?}", report.problems);
    }
    (acknowledged.len() as u64, failures)
}

#[tokio::test(start_paused = true)]
async fn random_faults_of_many_seeds() {
    let seeds: u64 = if is_thorough() { 1000 } else { 240 };
    let mut saved = 0;
    let mut failed = 0;
    for seed in 0..seeds {
        let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let opened = AtomicU64::new(0);
        // Each handle has its own faults and an empty cache.
        let faulty = || {
            let nth = opened.fetch_add(1, Ordering::Relaxed);
            let seeded = FaultStore::seeded(memory.clone(), seed.wrapping_mul(1_000_003) + nth, [5, 30, 120][seed as usize % 3]);
            if seed % 2 == 0 { wrap(Arc::new(seeded)) } else { wrap_inline(Arc::new(seeded)) }
        };
        let (ok, bad) = storm(&faulty, &wrap(memory.clone()), 6, 4000, &format!("seed {seed}")).await;
        saved += ok;
        failed += bad;
    }
    assert!(2 * saved > 3 * seeds && 10 * failed > 3 * seeds, "{saved} saved, {failed} failed");
}

/// Casks of several parts.
#[tokio::test(start_paused = true)]
async fn random_faults_in_uploads_of_many_parts() {
    let mut saved = 0;
    let mut failed = 0;
    for seed in 0..12u64 {
        let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        // Creates the store beforehand, because creation alone takes more than a hundred requests.
        wrap(memory.clone()).writer(Policy::Full).await.unwrap();
        let opened = AtomicU64::new(0);
        let faulty = || {
            let nth = opened.fetch_add(1, Ordering::Relaxed);
            let inner = memory.clone();
            let seeded = FaultStore::seeded(inner, seed * 77 + nth, 20);
            wrap(Arc::new(seeded))
        };
        let (ok, bad) = storm(&faulty, &wrap(memory.clone()), 3, 17 << 20, &format!("seed {seed}")).await;
        saved += ok;
        failed += bad;
    }
    assert!(saved > 5 && failed > 2, "{saved} saved, {failed} failed");
}

/// Every fault, at every request of its kind, once and twice in a row.
#[tokio::test(start_paused = true)]
async fn every_fault_at_every_request() {
    try_every_fault(wrap).await;
}

/// The same with snapshots inside of log entries: a save creates one object.
#[tokio::test(start_paused = true)]
async fn every_fault_at_every_request_of_inline_saves() {
    try_every_fault(wrap_inline).await;
}

async fn try_every_fault(open: fn(Arc<dyn ObjectStore>) -> Store) {
    use Operation::{Create, Delete, Get, Head, List, Put};
    let mut met = 0;
    for operation in [Create, Put, Get, Head, List, Delete] {
        for &fault in Fault::of(operation) {
            for first in 0..60u64 {
                let mut is_met = false;
                for length in [1, 2] {
                    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
                    // Creates the store beforehand, because creation alone takes more than a hundred requests.
                    save(&mut wrap(memory.clone()).writer(Policy::Full).await.unwrap(), 100, 4000).await.unwrap();
                    let count = Arc::new(AtomicU64::new(0));
                    let seen = count.clone();
                    let decide = move |of: Operation, _: &object_store::path::Path| match of == operation {
                        true if (first..first + length).contains(&seen.fetch_add(1, Ordering::SeqCst)) => fault,
                        _ => Fault::None,
                    };
                    let faulty = open(Arc::new(FaultStore::new(memory.clone(), decide)));
                    let what = format!("{fault:?} at {operation:?} {first}, {length} times");
                    let open = async || {
                        // At most two faults occur, so the third attempt meets none.
                        for _ in 0..2 {
                            match faulty.writer(Policy::Consecutive).await {
                                Ok(writer) => return writer,
                                Err(e) => assert_honest(&e, &what),
                            }
                        }
                        faulty.writer(Policy::Consecutive).await.unwrap_or_else(|e| panic!("{what}: {e}"))
                    };
                    let mut writer = open().await;
                    for step in 101..104 {
                        for attempt in 0..3 {
                            let Err(e) = save(&mut writer, step, 4000).await else { break };
                            assert_honest(&e, &what);
                            assert!(attempt < 2, "{what}: {e}");
                            if e.kind() == ErrorKind::OutcomeUnknown {
                                writer = open().await;
                            }
                            if wrap(memory.clone()).snapshot(step).await.is_ok() {
                                break;
                            }
                        }
                    }
                    let clean = wrap(memory.clone());
                    for step in 101..104 {
                        let read = clean.snapshot(step).await.unwrap().read("w", &Slice::all()).await.unwrap();
                        assert!(read.data == state(step, 4000), "{what}");
                    }
                    let added =
                        clean.history().entries().await.unwrap().into_iter().filter(|e| matches!(e.event, Event::Added { .. })).count();
                    assert_eq!(added, 4, "{what}");
                    assert!(maintain::verify(&clean, &VerifyOptions::default()).await.unwrap().is_clean(), "{what}");
                    if count.load(Ordering::SeqCst) > first {
                        is_met = true;
                        met += 1;
                    }
                }
                // Later requests of this kind do not exist either.
                if !is_met {
                    break;
                }
            }
        }
    }
    assert!(met > 200, "only {met} faults were met");
}
