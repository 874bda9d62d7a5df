//! Casks sent to a second store while they are being written to the first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::path::Path;
use tensorcask::maintain::{self, Copier, CopyReport, VerifyOptions};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Id;
use tensorcask::{AheadUploads, Dtype, Metadata, Policy, Slice, Store, TensorView, Writer};

use crate::common::{DEADLINE, noise, objects_of, until, wrap};

async fn save(writer: &mut Writer, step: u64, data: &[u8]) {
    let tensors = [TensorView::new("w", Dtype::U8, &[data.len() as u64], data).unwrap()];
    writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap();
}

/// Returns a store, its writer, and a copier to a destination that already has everything saved so far.
async fn pair(destination: &Store) -> (Store, Writer, Copier) {
    let source = wrap(Arc::new(InMemory::new()));
    let mut writer = source.writer(Policy::Full).await.unwrap();
    save(&mut writer, 1, &noise(1, 1000)).await;
    let mut copier = Copier::open(&source, destination, Id::random().unwrap(), Default::default()).await.unwrap();
    copier.take_over().await.unwrap();
    assert_eq!(copier.copy_new(&source).await.unwrap().snapshots, 1);
    (source, writer, copier)
}

/// Saves step 2 ahead and copies it. Returns the report of the copy.
async fn save_ahead(destination: &Store, data: &[u8]) -> CopyReport {
    let (source, mut writer, mut copier) = pair(destination).await;
    let ahead = AheadUploads::new(destination);
    writer.send_ahead(Some(ahead.clone()));
    save(&mut writer, 2, data).await;
    assert!(destination.snapshot(2).await.is_err(), "nothing is there before it is committed");
    copier.finish_ahead(Some(ahead));
    let report = copier.copy_new(&source).await.unwrap();
    assert_eq!(report.snapshots, 1);
    assert!(destination.snapshot(2).await.unwrap().read("w", &Slice::all()).await.unwrap().data == data);
    let verified = maintain::verify(destination, &VerifyOptions::default()).await.unwrap();
    assert!(verified.is_clean(), "{:?}", verified.problems);
    report
}

#[tokio::test]
async fn the_copier_goes_on_where_the_writer_has_got_to() {
    let parts = Arc::new(AtomicU64::new(0));
    let counted = parts.clone();
    let store = FaultStore::new(Arc::new(InMemory::new()), move |operation, _| {
        counted.fetch_add(u64::from(operation == Operation::Part), Ordering::Relaxed);
        Fault::None
    });
    let report = save_ahead(&wrap(Arc::new(store)), &noise(2, 50 << 20)).await;
    assert!(report.ahead_bytes >= 24 << 20 && report.ahead_bytes <= report.bytes, "{report:?}");
    assert_eq!(parts.load(Ordering::Relaxed), 7, "each part goes once");
}

#[tokio::test]
async fn what_cannot_be_sent_ahead_is_copied_whole() {
    for operation in [Operation::StartMultipart, Operation::Part] {
        let broken = Arc::new(AtomicU64::new(1));
        let store = FaultStore::new(Arc::new(InMemory::new()), move |now, _: &Path| match now == operation {
            true if broken.swap(0, Ordering::Relaxed) == 1 => Fault::FailBefore,
            _ => Fault::None,
        });
        let report = save_ahead(&wrap(Arc::new(store)), &noise(3, 50 << 20)).await;
        assert_eq!(report.ahead_bytes, 0, "{operation:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_store_does_not_hold_the_writer_up() {
    const SLOW: Duration = Duration::from_secs(600);
    let store = FaultStore::new(Arc::new(InMemory::new()), |operation, _| match operation {
        Operation::Part => Fault::Slow(SLOW),
        _ => Fault::None,
    });
    let destination = wrap(Arc::new(store));
    let (source, mut writer, mut copier) = pair(&destination).await;
    let data = noise(4, 400 << 20);
    let ahead = AheadUploads::new(&destination);
    writer.send_ahead(Some(ahead.clone()));
    // A blocking task holds the paused clock: no part arrives until the save has ended.
    let (saved, held) = std::sync::mpsc::channel();
    let clock = tokio::task::spawn_blocking(move || held.recv_timeout(DEADLINE));
    save(&mut writer, 2, &data).await;
    assert!(saved.send(()).is_ok(), "the save waited for the slow store");
    clock.await.unwrap().unwrap();
    copier.finish_ahead(Some(ahead));
    let report = copier.copy_new(&source).await.unwrap();
    assert!(report.ahead_bytes > 0 && report.ahead_bytes < 300 << 20, "what waits is bounded: {report:?}");
    assert!(destination.snapshot(2).await.unwrap().read("w", &Slice::all()).await.unwrap().data == data);
}

#[tokio::test]
async fn what_nobody_goes_on_with_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let destination = Store::open(folder.path().to_str().unwrap()).unwrap();
    let (source, mut writer, mut copier) = pair(&destination).await;
    let before = objects_of(folder.path());
    let ahead = AheadUploads::new(&destination);
    writer.send_ahead(Some(ahead.clone()));
    save(&mut writer, 2, &noise(5, 50 << 20)).await;
    writer.send_ahead(None);
    drop(ahead);
    until("the upload that was begun is removed", async || objects_of(folder.path()) == before).await;
    assert_eq!(copier.copy_new(&source).await.unwrap().ahead_bytes, 0);
    assert!(maintain::verify(&destination, &VerifyOptions::default()).await.unwrap().is_clean());
}
