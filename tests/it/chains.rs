//! Policies, base caches, updates of a held step, and watching for new snapshots.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{SmallState, data, noise, objects_of, wrap};
use object_store::memory::InMemory;
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::{
    BaseKeeping, DecisionReason, Dtype, ExistingStep, Latest, Metadata, Policy, Slice, Store, TensorView, UpdateReport, Writer,
    WriterOptions,
};

const ELEMENTS: usize = 3 << 18;

async fn save(writer: &mut Writer, step: u64, weights: &[u8]) -> tensorcask::SavedSnapshot {
    let state = [TensorView::new("model.w", Dtype::Bf16, &[weights.len() as u64 / 2], weights).unwrap()];
    writer.save(step, &state, &[], &Metadata::default()).await.unwrap()
}

#[tokio::test]
async fn the_adaptive_policy_says_why() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::default()).await.unwrap();
    writer.on_existing_step(ExistingStep::Replace);
    let mut weights = noise(1, 2 * ELEMENTS);
    let mut reasons = Vec::new();
    let mut saved = async |writer: &mut Writer, step: u64, weights: &[u8]| {
        let saved = save(writer, step, weights).await;
        assert_eq!(saved.parent.is_none(), saved.kind.name() == "base");
        let found = store.snapshot(step).await.unwrap();
        assert_eq!(found.inspect().decision(), Some(saved.decision), "the manifest tells the same");
        reasons.push((step, saved.kind.name(), saved.decision.reason));
        saved
    };
    saved(&mut writer, 10, &weights).await;
    for step in 11..=17 {
        weights[step as usize * 2] ^= 1;
        let saved = saved(&mut writer, step, &weights).await;
        let estimate = saved.decision.estimate.unwrap();
        assert!(estimate.delta_bytes < estimate.base_bytes / 2 && estimate.sampled_chunks == 3, "{estimate:?}");
        // The estimate equals the stored bytes, except for the index.
        assert!(saved.stored_bytes.abs_diff(estimate.delta_bytes) < estimate.base_bytes / 50, "{estimate:?}, {}", saved.stored_bytes);
        assert_eq!(saved.decision.since_base, step - 10);
    }
    // The eighth snapshot after the base, then a state that has nothing in common with the others.
    saved(&mut writer, 18, &weights).await;
    weights = noise(2, 2 * ELEMENTS);
    let large = saved(&mut writer, 19, &weights).await.decision.estimate.unwrap();
    assert!(large.delta_bytes * 10 > large.base_bytes * 9, "{large:?}");
    saved(&mut writer, 20, &weights).await;
    // A step back, then a step far ahead.
    saved(&mut writer, 15, &weights).await;
    saved(&mut writer, 16, &weights).await;
    saved(&mut writer, 40, &weights).await;
    // A process that saves only once makes the same decision.
    let mut writer = store.writer(Policy::Adaptive).await.unwrap();
    saved(&mut writer, 41, &weights).await;
    let expected: Vec<(u64, &str, DecisionReason)> = [(10, "base", DecisionReason::First)]
        .into_iter()
        .chain((11..=17).map(|step| (step, "delta", DecisionReason::SmallDelta)))
        .chain([
            (18, "base", DecisionReason::Interval),
            (19, "base", DecisionReason::LargeDelta),
            (20, "delta", DecisionReason::SmallDelta),
        ])
        .chain([(15, "base", DecisionReason::Jump), (16, "delta", DecisionReason::SmallDelta), (40, "base", DecisionReason::Jump)])
        .chain([(41, "delta", DecisionReason::SmallDelta)])
        .collect();
    assert_eq!(reasons, expected);
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

/// Every base cache leads to the same snapshots. Their sizes may differ a little: a codec first tries the coefficients
/// that it found for another chunk, and chunks are encoded in any order.
#[tokio::test]
async fn four_ways_to_keep_a_base_make_equal_snapshots() {
    let scratch = tempfile::tempdir().unwrap();
    let keepings = [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::Disk(scratch.path().join("bases")), BaseKeeping::None];
    let files = ["step-1000.safetensors", "step-1001.safetensors", "step-1010.safetensors"];
    for policy in [Policy::Consecutive, Policy::OneShot, Policy::Intermittent { every: 3 }, Policy::Adaptive] {
        let mut seen = Vec::new();
        for base_cache in &keepings {
            let objects = Arc::new(InMemory::new());
            let store = wrap(objects.clone());
            let options = WriterOptions { policy, base_cache: base_cache.clone(), ..WriterOptions::default() };
            let mut writer = store.writer_with(options).await.unwrap();
            let mut kinds = Vec::new();
            let mut sizes = Vec::new();
            let mut read = Vec::new();
            for step in 0..5u64 {
                let input = Files::open(&[data(files[step as usize % 3])]).unwrap();
                let before = store.io().bytes_read;
                let saved = writer.save(step, &input.tensors().unwrap(), &[], &Metadata::default()).await.unwrap();
                read.push(store.io().bytes_read - before);
                let content = format!("{:?}", store.snapshot(step).await.unwrap().manifest().content);
                kinds.push((saved.kind, content));
                sizes.push(saved.stored_bytes as f64);
                let kept = writer.base_cache_bytes();
                match base_cache {
                    BaseKeeping::Memory => assert!(kept >= saved.tensor_bytes && kept < saved.tensor_bytes * 11 / 10, "{kept}"),
                    BaseKeeping::Encoded => assert!(kept > saved.tensor_bytes / 4 && kept < saved.tensor_bytes * 11 / 10, "{kept}"),
                    _ => assert!(kept < saved.tensor_bytes / 100, "{kept}"),
                }
            }
            // The parent is read back only if no cache keeps it. `adaptive` keeps the previous snapshot, and reads of the last base
            // what it compares.
            let most = read[1..].iter().max().unwrap();
            let reads_back = *base_cache == BaseKeeping::None || policy == Policy::Adaptive;
            assert_eq!(*most > 500_000, reads_back, "{policy}, {base_cache:?}: {read:?}");
            for step in 0..5u64 {
                let input = Files::open(&[data(files[step as usize % 3])]).unwrap();
                let snapshot = store.snapshot(step).await.unwrap();
                for view in input.tensors().unwrap() {
                    assert!(snapshot.read(view.name(), &Slice::all()).await.unwrap().data == view.data());
                }
            }
            seen.push((kinds, sizes));
        }
        for (keeping, (kinds, sizes)) in keepings.iter().zip(&seen) {
            assert_eq!(kinds, &seen[0].0, "{policy}, {keeping:?}");
            let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= 0.01 * b;
            assert!(sizes.iter().zip(&seen[0].1).all(is_near), "{policy}, {keeping:?}: {sizes:?}, {:?}", seen[0].1);
        }
    }
    assert!(objects_of(scratch.path()).is_empty(), "files of bases have no name");
}

#[tokio::test]
async fn a_base_that_cannot_be_kept_on_disk_costs_a_read_not_the_save() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    std::fs::write(&file, "not a folder").unwrap();
    let store = Store::open("memory://").unwrap();
    let options = WriterOptions { policy: Policy::Consecutive, base_cache: BaseKeeping::Disk(file), ..WriterOptions::default() };
    let mut writer = store.writer_with(options).await.unwrap();
    for step in 0..3u64 {
        let state = SmallState::at(step);
        let saved = writer.save(step, &state.tensors(), &state.blobs(), &Metadata::default()).await.unwrap();
        assert_eq!(saved.kind.name(), if step == 0 { "base" } else { "delta" });
    }
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn who_holds_a_step_reads_what_lies_between() {
    for policy in [Policy::Consecutive, Policy::Intermittent { every: 8 }] {
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(policy).await.unwrap();
        let mut weights = noise(1, 2 * ELEMENTS);
        let mut states = Vec::new();
        for step in 0..6u64 {
            // Only the second of three chunks changes.
            weights[(1 << 19) + step as usize * 4] ^= 0xff;
            save(&mut writer, step, &weights).await;
            states.push(weights.clone());
        }
        for (have, want) in [(2u64, 5u64), (0, 5), (4, 5), (5, 5), (5, 2)] {
            let held = store.snapshot(have).await.unwrap();
            let wanted = store.snapshot(want).await.unwrap();
            let mut buffer = states[have as usize].clone();
            let updated = wanted.update_into(&held, vec![("model.w", &mut buffer)]).await.unwrap();
            assert!(buffer == states[want as usize], "{policy}, from {have} to {want}");
            let bytes = wanted.inspect().read_counts().page_bytes;
            let forward = have < want && (policy == Policy::Consecutive || have == 0);
            match (have == want, forward) {
                (true, _) => assert_eq!((updated, bytes), (UpdateReport { unchanged: 3, ..UpdateReport::default() }, 0)),
                // Forwards along the chain: masks of changed elements, one per step in between.
                (_, true) => {
                    assert_eq!(updated, UpdateReport { unchanged: 2, advanced: 1, rebuilt: 0 }, "{policy}, from {have} to {want}");
                    assert!(bytes < 40_000 * (want - have), "{bytes}");
                }
                // Siblings, or backwards: the one chunk that differs is rebuilt from its base.
                _ => assert_eq!(updated, UpdateReport { unchanged: 2, advanced: 0, rebuilt: 1 }, "{policy}, from {have} to {want}"),
            }
        }
        // Checksums detect each chunk of a buffer with unexpected content.
        let held = store.snapshot(4).await.unwrap();
        let wanted = store.snapshot(5).await.unwrap();
        let mut buffer = states[4].clone();
        buffer[7] ^= 1;
        let updated = wanted.update_into(&held, vec![("model.w", &mut buffer)]).await.unwrap();
        assert!(buffer == states[5] && updated.rebuilt >= 1, "{updated:?}");
        assert!(wanted.update_into(&held, vec![("model.w", &mut buffer[1..])]).await.is_err());
    }
}

/// With shards, packed types, ties and changed layouts, an update always yields the newer state.
#[tokio::test]
async fn any_state_can_be_brought_forward() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in 0..4 {
        let state = SmallState::at(step);
        writer.save(step, &state.tensors(), &state.blobs(), &Metadata::default()).await.unwrap();
    }
    // The last state lacks a tensor, and has another tensor with another type.
    let state = SmallState::at(4);
    let mut tensors = state.tensors();
    tensors.retain(|view| view.name() != "model.packed" && view.name() != "optimizer.step");
    tensors.push(TensorView::new("optimizer.step", Dtype::I64, &[], &state.scalar).unwrap());
    writer.save(4, &tensors, &[], &Metadata::default()).await.unwrap();
    for (have, want) in [(0u64, 3u64), (3, 0), (2, 4), (4, 2)] {
        let held = store.snapshot(have).await.unwrap();
        let wanted = store.snapshot(want).await.unwrap();
        let mut buffers: Vec<(&str, Vec<u8>)> = SmallState::at(have).expected();
        let expected = SmallState::at(want).expected();
        if want == 4 {
            buffers.retain(|(name, _)| *name != "model.packed");
        }
        let items = buffers.iter_mut().map(|(name, bytes)| (*name, bytes.as_mut_slice())).collect();
        wanted.update_into(&held, items).await.unwrap();
        for (name, bytes) in &buffers {
            let (_, expected) = expected.iter().find(|(known, _)| known == name).unwrap();
            assert_eq!(bytes, expected, "from {have} to {want}: {name}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_yields_each_new_snapshot_once() {
    let objects = Arc::new(InMemory::new());
    let mut writer = wrap(objects.clone()).writer(Policy::Consecutive).await.unwrap();
    for step in [1, 2, 3] {
        save(&mut writer, step, &noise(step, 100)).await;
    }
    let reader = wrap(objects.clone());
    reader.forget(&[2]).await.unwrap();
    let mut all = reader.watch(0).await.unwrap();
    assert_eq!([all.next().await.unwrap().step, all.next().await.unwrap().step], [1, 3], "what is live");
    let latest = reader.snapshot(Latest).await.unwrap().record().sequence;
    let mut watch = reader.watch(latest).await.unwrap().every(Duration::from_secs(5));
    assert!(tokio::time::timeout(Duration::from_secs(60), watch.next()).await.is_err(), "nothing new");
    let before = reader.io().requests;
    assert!(tokio::time::timeout(Duration::from_secs(50), watch.next()).await.is_err());
    assert!(reader.io().requests - before <= 22, "two requests at each look: the last known entry and the next");
    let saver = tokio::spawn(async move {
        for step in 4..100 {
            tokio::time::sleep(Duration::from_secs(step % 11)).await;
            save(&mut writer, step, &noise(step, 100)).await;
        }
    });
    for step in 4..100 {
        assert_eq!(watch.next().await.unwrap().step, step);
    }
    saver.await.unwrap();
    // A step that is saved again is also reported.
    let mut writer = wrap(objects).writer(Policy::Full).await.unwrap();
    writer.on_existing_step(ExistingStep::Replace);
    save(&mut writer, 50, &noise(1, 100)).await;
    assert_eq!(watch.next().await.unwrap().step, 50);
}
