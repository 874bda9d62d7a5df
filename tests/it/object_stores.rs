//! Real object-store servers. `bash tests/servers/run` starts them and prints their addresses (`bash tests/run` starts
//! one). Without a server, these tests report that they did not run.

use std::time::Duration;

use crate::common::{SmallState, data, until};
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, CompactOptions, ForkOptions, GcOptions, VerifyOptions};
use tensorcask::{Dtype, ErrorKind, Latest, Metadata, Policy, Slice, Store, TensorView};

/// Returns a store under a fresh prefix of the bucket.
fn store(name: &str) -> Option<Store> {
    let Ok(bucket) = std::env::var("TENSORCASK_TEST_STORE") else {
        eprintln!("NOT RUN: {name} needs a server; use `bash tests/servers/run`");
        return None;
    };
    let unique = tensorcask::wire::Id::random().unwrap();
    Some(Store::open(&format!("{bucket}/{name}/{unique}")).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_keeps_the_contract() {
    let Some(store) = store("contract") else { return };
    tensorcask::testing::store::run_all(&store).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn real_checkpoints_come_back_from_a_server() {
    let Some(store) = store("real") else { return };
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let files = ["step-1000.safetensors", "step-1001.safetensors", "step-1010.safetensors"];
    for (step, file) in files.iter().enumerate() {
        let input = Files::open(&[data(file)]).unwrap();
        writer.save(step as u64, &input.tensors().unwrap(), &[], &Metadata::default()).await.unwrap();
    }
    // Opens the store anew, as another process would.
    let store = Store::open(store.url()).unwrap();
    for (step, file) in files.iter().enumerate() {
        let input = Files::open(&[data(file)]).unwrap();
        let snapshot = store.snapshot(step as u64).await.unwrap();
        for view in input.tensors().unwrap() {
            assert_eq!(snapshot.read(view.name(), &Slice::all()).await.unwrap().data, view.data(), "{file}, {}", view.name());
        }
    }
    let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// The server copies the casks itself where it can. The fork has every byte, and outlives its source.
#[tokio::test(flavor = "multi_thread")]
async fn a_fork_in_one_bucket_outlives_its_source() {
    let Some(source) = store("forked") else { return };
    let mut writer = source.writer(Policy::Full).await.unwrap();
    let state = crate::common::noise(3, 300_000);
    let tensors = [TensorView::new("w", Dtype::U8, &[300_000], &state).unwrap()];
    writer.save(1, &tensors, &[], &Metadata::default()).await.unwrap();
    let fork = store("fork").unwrap();
    let (step, report) = maintain::fork(&source, &fork, &ForkOptions::default()).await.unwrap();
    eprintln!("{}: {report:?}", fork.url());
    assert_eq!((step, report.snapshots), (1, 1));
    writer.save(2, &tensors, &[], &Metadata::default()).await.unwrap();
    source.forget(&[1]).await.unwrap();
    let at_once = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
    maintain::gc(&source, &at_once).await.unwrap();
    let fork = Store::open(fork.url()).unwrap();
    assert!(maintain::verify(&fork, &VerifyOptions::default()).await.unwrap().is_clean());
    assert_eq!(fork.snapshot(Latest).await.unwrap().read("w", &Slice::all()).await.unwrap().data, state);
}

/// A mistyped bucket is no empty store: reading and saving fail, and the error names the bucket.
#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_does_not_exist_is_named() {
    let Some(store) = store("bucket") else { return };
    let (scheme, _) = store.url().split_once("://").unwrap();
    let missing = format!("tensorcask-missing-{}", tensorcask::wire::Id::random().unwrap());
    let missing = Store::open(&format!("{scheme}://{missing}/run")).unwrap();
    let state = SmallState::at(1);
    let read = missing.snapshot(Latest).await.map(|_| ());
    let saved = match missing.writer(Policy::Full).await {
        Ok(mut writer) => writer.save(1, &state.tensors(), &state.blobs(), &Metadata::default()).await.map(|_| ()),
        Err(error) => Err(error),
    };
    for error in [read.unwrap_err(), saved.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
        assert!(error.message().contains("does not exist at") && error.message().contains(missing.url()), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn old_steps_go_away_on_a_server() {
    let Some(store) = store("maintenance") else { return };
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    for step in 1..=6 {
        let state = SmallState::at(step);
        writer.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await.unwrap();
    }
    maintain::compact(&store, 4, &CompactOptions::default()).await.unwrap();
    maintain::compact(&store, 3, &CompactOptions::default()).await.unwrap();
    assert_eq!(maintain::keep_roles(&store, &[3], &["model".to_owned()], &CompactOptions::default()).await.unwrap()[0].held, None);
    store.forget(&[1, 2]).await.unwrap();
    let collect = |apply| GcOptions { apply, age_floor: Duration::ZERO, ..GcOptions::default() };
    let waits = maintain::gc(&store, &GcOptions { apply: true, ..GcOptions::default() }).await.unwrap();
    assert_eq!((waits.collected.len(), waits.deleted.len()), (2, 0), "{waits:?}");
    // Clocks of servers tick in seconds: objects written in this second may look younger than none. Only the compacted
    // manifest of step 3 is an object that nothing needs: log entries hold the first manifests.
    let mut manifests = 0;
    until("all that nothing needs is deleted", async || {
        let gone = maintain::gc(&store, &collect(true)).await.unwrap();
        manifests += gone.deleted.iter().filter(|object| object.path.starts_with("snapshots/")).count();
        manifests >= 1 && gone.waiting.iter().all(|object| object.path.starts_with("directories/"))
    })
    .await;
    assert_eq!(maintain::gc(&store, &collect(false)).await.unwrap().deleted, []);

    let copy = self::store("copy").unwrap();
    maintain::copy(&store, &copy, &Default::default()).await.unwrap();
    for store in [Store::open(store.url()).unwrap(), copy] {
        for step in 3..=6 {
            let snapshot = store.snapshot(step).await.unwrap();
            for (name, bytes) in SmallState::at(step).expected().into_iter().filter(|(name, _)| step > 3 || name.starts_with("model.")) {
                assert_eq!(snapshot.read(name, &Slice::all()).await.unwrap().data, bytes, "step {step}, {name}");
            }
        }
        let report = maintain::verify(&store, &VerifyOptions::default()).await.unwrap();
        assert!(report.is_clean(), "{:?}", report.problems);
        let health = maintain::doctor(&store, &Default::default()).await.unwrap();
        assert!(health.problems.is_empty(), "{health:?}");
    }
}

/// Casks of several parts, and slices that read a few of their ranges.
#[tokio::test(flavor = "multi_thread")]
async fn large_casks_go_up_in_parts() {
    let Some(store) = store("large") else { return };
    let mut writer = store.writer(Policy::Intermittent { every: 4 }).await.unwrap();
    let mut weights: Vec<u8> = (0..40u64 << 20).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 17) as u8).collect();
    let shape = [10_240u64, 1024];
    for step in 0..2 {
        weights[4096 * 9000 + step as usize] ^= 1;
        let state = [TensorView::new("w", Dtype::F32, &shape, &weights).unwrap()];
        writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
    }
    let store = Store::open(store.url()).unwrap();
    let snapshot = store.snapshot(Latest).await.unwrap();
    let before = store.io();
    let rows = snapshot.read("w", &Slice::rows(9000..9002)).await.unwrap();
    let after = store.io();
    assert_eq!(rows.data, weights[4096 * 9000..4096 * 9002]);
    // Two indexes, the chunk of the base, and the pages of the delta.
    assert!(after.bytes_read - before.bytes_read < 3 << 20, "{} bytes", after.bytes_read - before.bytes_read);
    assert!(after.requests - before.requests <= 5, "{} requests", after.requests - before.requests);
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_writers_on_a_server_have_one_winner_per_entry() {
    let Some(store) = store("race") else { return };
    let racers: Vec<_> = (0..16u64)
        .map(|racer| {
            let url = store.url().to_owned();
            tokio::spawn(async move {
                let store = Store::open(&url).unwrap();
                let state = SmallState::at(racer);
                let mut writer = store.writer(Policy::Full).await?;
                writer.save(racer, &state.tensors(), &[], &Metadata::default()).await
            })
        })
        .collect();
    let mut saved = Vec::new();
    for (racer, result) in racers.into_iter().enumerate() {
        match result.await.unwrap() {
            Ok(_) => saved.push(racer as u64),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Fenced, "{e}"),
        }
    }
    let mut live: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    live.sort_unstable();
    assert_eq!(live, saved);
    assert!(!saved.is_empty());
}

/// Some servers report success for a conditional put, but overwrite the object.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_ignores_conditions_is_refused() {
    let Ok(bucket) = std::env::var("TENSORCASK_TEST_UNSAFE_STORE") else { return };
    let store = Store::open(&format!("{bucket}/run")).unwrap();
    let error = store.writer(Policy::Full).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnsafeStore, "{error}");
    assert_eq!(store.snapshot(Latest).await.unwrap_err().kind(), ErrorKind::NotFound, "nothing was created");
}
