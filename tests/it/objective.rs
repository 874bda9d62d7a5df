//! The objective `auto`: levels follow the measured rates, and never change what is restored.

use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use tensorcask::codec::{Objective, ObjectiveSetting};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::{BaseKeeping, Metadata, Policy, SavedSnapshot, Slice, Store, WriterOptions};

use crate::common::{Layers, wrap};

/// Layers of a state of several windows: three with two threads, fewer with more threads.
const SEVERAL_WINDOWS: usize = 50;

/// A store that takes five minutes for each part of an upload, by the paused clock.
fn slow() -> Store {
    let decide = |operation, _: &_| if operation == Operation::Part { Fault::Slow(Duration::from_secs(300)) } else { Fault::None };
    wrap(Arc::new(FaultStore::new(Arc::new(InMemory::new()), decide)))
}

/// Saves two steps of a state of so many layers, and compares what is restored.
async fn save(store: &Store, layers: usize, objective: impl Into<ObjectiveSetting>, policy: Policy) -> Vec<SavedSnapshot> {
    let options = WriterOptions { policy, objective: objective.into(), base_cache: BaseKeeping::None, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).await.unwrap();
    let mut saved = Vec::new();
    for step in [1000, 1001] {
        let state = Layers::at_steps(&vec![step; layers]);
        let tensors = state.tensors();
        saved.push(writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap());
        let snapshot = store.snapshot(step).await.unwrap();
        for tensor in tensors.iter().step_by(101) {
            let read = snapshot.read(tensor.name(), &Slice::all()).await.unwrap();
            assert!(read.data == tensor.data(), "step {step}, {}", tensor.name());
        }
    }
    saved
}

#[tokio::test(start_paused = true)]
async fn on_a_slow_store_every_byte_counts() {
    for saved in save(&slow(), SEVERAL_WINDOWS, ObjectiveSetting::Auto, Policy::Consecutive).await {
        let report = saved.objective.unwrap();
        assert!(report.windows.values().sum::<u64>() > 1, "{report}");
        assert_eq!(report.windows.get("fastest"), None, "it stores more: {report}");
        assert!(report.upload_bytes_per_second.unwrap() < 1e6, "{report}");
    }
}

#[tokio::test]
async fn without_a_timed_delta_its_size_decides() {
    for objective in [ObjectiveSetting::Auto, Objective::BALANCED.into()] {
        let saved = save(&wrap(Arc::new(InMemory::new())), 4, objective, Policy::Adaptive).await;
        assert_eq!(saved[1].decision.reason.name(), "small_delta");
        assert_eq!(saved[1].objective.is_some(), objective == ObjectiveSetting::Auto);
    }
}
