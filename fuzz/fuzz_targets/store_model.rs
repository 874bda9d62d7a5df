//! Saves, forgets, pins and compactions by short-lived writers on a failing storage. Acknowledged operations are
//! present and right, failed ones are present as a whole or absent, and nothing else exists.
#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, CompactOptions, GcOptions, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore};
use tensorcask::wire::{Id, StoreFile};
use tensorcask::{BaseKeeping, Dtype, ExistingStep, Metadata, Policy, Slice, StepSelector, Store, StoreOptions, TensorView, WriterOptions};

#[derive(Debug, Arbitrary)]
enum Operation {
    Save { step: u8, edits: Vec<(u16, u8)> },
    Forget(u8),
    Pin(u8, bool),
    Compact(u8),
    Collect,
    Reopen { policy: u8, keep: bool },
}

#[derive(Debug, Arbitrary)]
struct Input {
    operations: Vec<Operation>,
    /// Number of the fault for each request, among those that the request may meet.
    faults: Vec<u8>,
}

const MOST_OPERATIONS: usize = 10;
const STEPS: u8 = 6;
const BYTES: usize = 600;

/// Allowed content of a step.
#[derive(Debug, Default)]
struct Step {
    /// States of which one must exist. `None` means that the step may be absent.
    states: Vec<Option<Vec<u8>>>,
}

fuzz_target!(|input: Input| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(run(input));
});

async fn writer(store: &Store, policy: u8, keep: bool) -> Option<tensorcask::Writer> {
    let policy = match policy % 4 {
        0 => Policy::Full,
        1 => Policy::OneShot,
        2 => Policy::Consecutive,
        _ => Policy::Intermittent { every: 2 },
    };
    let base_cache = if keep { BaseKeeping::Memory } else { BaseKeeping::None };
    store.writer_with(WriterOptions { policy, base_cache, existing_step: ExistingStep::Replace, ..WriterOptions::default() }).await.ok()
}

async fn run(input: Input) {
    let memory = Arc::new(InMemory::new());
    memory.put(&"store.json".into(), StoreFile::new(Id([1; 16])).encode().unwrap().into()).await.unwrap();
    let faults = input.faults;
    let count = AtomicU64::new(0);
    let failing = FaultStore::new(memory.clone(), move |operation, _| {
        let number = faults.get(count.fetch_add(1, Ordering::Relaxed) as usize).copied().map_or(0, usize::from);
        // Most requests succeed, because a fault in every request would only test that errors are returned.
        let fault = number.checked_sub(128).and_then(|number| Fault::of(operation).get(number % 16)).copied();
        fault.unwrap_or(Fault::None)
    });
    let store = Store::with_object_store(Arc::new(failing), Default::default(), StoreOptions::default());
    let mut model: BTreeMap<u64, Step> = BTreeMap::new();
    let mut state = vec![0u8; BYTES];
    let mut current = writer(&store, 2, true).await;
    for operation in input.operations.into_iter().take(MOST_OPERATIONS) {
        match operation {
            Operation::Save { step, edits } => {
                let step = u64::from(step % STEPS);
                for (at, bits) in edits {
                    state[usize::from(at) % BYTES] ^= bits;
                }
                let Some(current) = current.as_mut() else { continue };
                let (model_part, rest) = state.split_at(BYTES / 3);
                let tensors = [
                    TensorView::new("m.weight", Dtype::Bf16, &[model_part.len() as u64 / 2], model_part).unwrap(),
                    TensorView::new("o.exp_avg", Dtype::F32, &[rest.len() as u64 / 4], rest).unwrap(),
                ];
                let entry = model.entry(step).or_insert_with(|| Step { states: vec![None] });
                match current.save(step, &tensors, &[], &Metadata::default()).await {
                    Ok(_) => entry.states = vec![Some(state.clone())],
                    Err(_) => entry.states.push(Some(state.clone())),
                }
            }
            Operation::Forget(step) => {
                let step = u64::from(step % STEPS);
                let done = store.forget(&[step]).await;
                if let Some(entry) = model.get_mut(&step) {
                    match done {
                        Ok(_) => entry.states = vec![None],
                        Err(_) => entry.states.push(None),
                    }
                }
            }
            Operation::Pin(step, true) => _ = store.pin(u64::from(step % STEPS)).await,
            Operation::Pin(step, false) => _ = store.unpin(u64::from(step % STEPS)).await,
            Operation::Compact(step) => {
                _ = maintain::compact(&store, StepSelector::Step(u64::from(step % STEPS)), &CompactOptions::default()).await
            }
            Operation::Collect => _ = maintain::gc(&store, &GcOptions { apply: true, ..GcOptions::default() }).await,
            Operation::Reopen { policy, keep } => current = writer(&store, policy, keep).await,
        }
    }
    drop(current);

    let plain = Store::with_object_store(memory, Default::default(), StoreOptions::default());
    let report = maintain::verify(&plain, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    let mut live = BTreeMap::new();
    for info in plain.snapshots().await.unwrap() {
        let snapshot = plain.snapshot(info.record.step).await.unwrap();
        let mut data = snapshot.read("m.weight", &Slice::all()).await.unwrap().data;
        data.extend(snapshot.read("o.exp_avg", &Slice::all()).await.unwrap().data);
        live.insert(info.record.step, data);
    }
    for (step, entry) in &model {
        assert!(entry.states.iter().any(|state| state.as_ref() == live.get(step)), "step {step}: {} may be", entry.states.len());
    }
    assert!(live.keys().all(|step| model.contains_key(step)));
}
