//! Number of requests, in total and in sequence, for opening a store and reading a slice.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{is_thorough, noise, wrap};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::{Blob, Dtype, Latest, Metadata, Policy, Rank, Rect, Slice, Store, TensorView, Writer, WriterOptions};

const LATENCY: Duration = Duration::from_millis(50);

async fn save(writer: &mut Writer, step: u64) {
    let mut weights = [7u8; 256];
    (weights[0], weights[1]) = (step as u8, (step >> 8) as u8);
    let state = [TensorView::new("model.w", Dtype::F32, &[8, 8], &weights).unwrap()];
    writer.save(step, &state, &[], &Metadata::default()).await.unwrap();
}

async fn requests_to_open(objects: &Arc<InMemory>, step: u64) -> u64 {
    let store = wrap(objects.clone());
    assert_eq!(store.snapshot(Latest).await.unwrap().step(), step);
    store.io().requests
}

/// A reader of a short log asks for few entries that do not exist, in memory and on local disk.
#[tokio::test]
async fn a_few_elements_take_few_requests() {
    let folder = tempfile::tempdir().unwrap();
    let local = folder.path().join("run").to_str().unwrap().to_owned();
    for url in ["memory://few-requests", &local] {
        // The memory of a store lives as long as one of its handles.
        let first = Store::open(url).unwrap();
        let mut writer = first.writer(Policy::Intermittent { every: 8 }).await.unwrap();
        let mut step = 0;
        for (commits, most) in [(1, 10), (2, 12), (69, 16), (199, 32)] {
            while step < commits {
                save(&mut writer, step).await;
                step += 1;
            }
            let store = Store::open(url).unwrap();
            let snapshot = store.snapshot(Latest).await.unwrap();
            let opened = store.io().requests;
            let slice = Slice::ranges(&[0..1, 0..8]);
            assert_eq!(snapshot.read("model.w", &slice).await.unwrap().data[0], (commits - 1) as u8);
            let all = store.io().requests;
            assert!(all <= most, "{commits} commits in {url}: {opened} requests to open, {all} in all");
        }
    }
}

/// At most 63 entries follow the newest catalog, after 10,000 commits (`TENSORCASK_THOROUGH=1`) as after 1,000.
#[tokio::test]
async fn a_store_of_many_commits_opens_in_seventy_requests() {
    let objects = Arc::new(InMemory::new());
    let mut writer = wrap(objects.clone()).writer(Policy::Intermittent { every: 8 }).await.unwrap();
    let commits = if is_thorough() { 10_046 } else { 1_086 };
    let mut most = 0;
    for step in 0..commits {
        save(&mut writer, step).await;
        // Measures after each of the first and the last entries. The first entry is the writer's `opened`.
        if !(130..commits - 66).contains(&step) {
            most = most.max(requests_to_open(&objects, step).await);
        }
    }
    assert_eq!((commits + 1) % 64, 63, "the worst case was among them");
    assert!((60..=70).contains(&most), "{most} requests");
}

/// Catalogs are optional.
#[tokio::test]
async fn a_store_without_some_catalogs_opens_all_the_same() {
    let objects = Arc::new(InMemory::new());
    let failing = FaultStore::new(objects.clone(), |operation, path: &Path| match operation {
        Operation::Create if path.as_ref().starts_with("catalog/") => Fault::FailBefore,
        _ => Fault::None,
    });
    let mut writer = wrap(Arc::new(failing)).writer(Policy::Intermittent { every: 8 }).await.unwrap();
    for step in 0..200 {
        save(&mut writer, step).await;
    }
    let requests = requests_to_open(&objects, 199).await;
    assert!((201..201 + 70).contains(&requests), "{requests} requests for 201 entries");
    // A writer that continues makes the next catalog, and a damaged catalog is skipped.
    let mut writer = wrap(objects.clone()).writer(Policy::Intermittent { every: 8 }).await.unwrap();
    for step in 200..300 {
        save(&mut writer, step).await;
    }
    assert!(requests_to_open(&objects, 299).await <= 70);
    let catalogs = objects.list_with_delimiter(Some(&"catalog".into())).await.unwrap().objects;
    objects.put(&catalogs.last().unwrap().location, b"damaged".to_vec().into()).await.unwrap();
    requests_to_open(&objects, 299).await;
}

/// A save looks for one entry of another writer, not for many.
#[tokio::test]
async fn a_delta_takes_few_requests() {
    let objects = Arc::new(InMemory::new());
    let store = wrap(objects);
    let mut writer = store.writer(Policy::Intermittent { every: 100 }).await.unwrap();
    save(&mut writer, 1).await;
    save(&mut writer, 2).await;
    let before = store.io().requests;
    save(&mut writer, 3).await;
    // Reads the last entry and the next, and the parent's manifest; writes a cask, the manifest and the entry. The
    // check before the entry sends at once: store.json, the last entry, a listing of entries, two casks, the directory, the
    // new manifest, and the parent's manifest again.
    assert!(store.io().requests - before <= 14, "{} requests", store.io().requests - before);
}

/// Counts rounds of requests that wait for each other, and requests. The clock is paused and moves only when all requests of a round are
/// under way, so the requests of one round are made at one moment.
async fn rounds<T>(objects: &Arc<InMemory>, run: impl AsyncFnOnce(Store) -> T) -> (usize, u64, T) {
    let moments: Arc<Mutex<BTreeSet<tokio::time::Instant>>> = Arc::default();
    let seen = moments.clone();
    let slow = FaultStore::new(objects.clone(), move |_, _| {
        seen.lock().unwrap().insert(tokio::time::Instant::now());
        Fault::Slow(LATENCY)
    });
    let store = wrap(Arc::new(slow));
    let value = run(store.clone()).await;
    let rounds = moments.lock().unwrap().len();
    (rounds, store.io().requests, value)
}

/// From a URL to the rows of a tensor, on a base and on a delta, with 1 and with 512 casks per snapshot. In the quick tier, only a short
/// log has 512.
#[tokio::test(start_paused = true)]
async fn the_first_rows_arrive_within_five_rounds() {
    let ranks_of_a_long_log = if is_thorough() { 256 } else { 16 };
    for (ranks, commits) in [(1u32, 2u64), (256, 2), (1, 70), (ranks_of_a_long_log, 70)] {
        let objects = Arc::new(InMemory::new());
        let store = wrap(objects.clone());
        let options = WriterOptions { policy: Policy::Intermittent { every: 8 }, ..WriterOptions::default() };
        let mut writer = store.writer_with(options.clone()).await.unwrap();
        let shape = [u64::from(ranks) * 2, 16];
        let row = |step: u64, row: u32| [(row as u8).wrapping_add(step as u8).wrapping_mul(3); 2 * 16 * 4];
        let mut writers = Vec::new();
        for rank in 0..ranks {
            writers.push(store.rank_writer(Rank { rank, world: ranks, attempt: 0 }, options.clone()).await.unwrap());
        }
        let last = commits - 1;
        // All ranks save from shortly before the first catalog, which follows entry 64.
        let first = if commits > 64 { 61 } else { 0 };
        for step in 0..first {
            save(&mut writer, step).await;
        }
        for step in first..=last {
            let mut receipts = Vec::new();
            for (rank, writer) in writers.iter_mut().enumerate() {
                let rank = rank as u32;
                let data = row(step, rank);
                let rect = Rect { offset: vec![u64::from(rank) * 2, 0], shape: vec![2, 16] };
                let shard = |name: &str| TensorView::shard(name, Dtype::F32, &shape, rect.clone(), &data).unwrap();
                let state = [shard("model.w"), shard("optimizer.exp_avg.w").with_role("exp_avg", "w")];
                receipts.push(writer.save(step, &state, &[]).await.unwrap());
            }
            let saved = writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
            assert_eq!(store.snapshot(step).await.unwrap().manifest().casks.len(), ranks as usize * 2, "{saved:?}");
        }
        let (rounds, requests, rows) = rounds(&objects, async |store| {
            let snapshot = store.snapshot(Latest).await.unwrap();
            assert_eq!(snapshot.step(), last);
            snapshot.read("model.w", &Slice::rows(0..1)).await.unwrap()
        })
        .await;
        assert_eq!(rows.data, row(last, 0)[..64]);
        // Small casks are read whole, so a round brings both the index and the pages.
        assert!(rounds <= 5, "{rounds} rounds with {ranks} ranks and {commits} commits");
        // store.json, two listings (or a listing and a catalog), entries, two manifests, a directory, an index and
        // pages of each link.
        assert!(requests <= 64 + 4 + 3 + 4, "{requests} requests with {ranks} ranks and {commits} commits");
    }
}

/// The second read of a snapshot, and of the same casks through another snapshot, requests only pages.
#[tokio::test]
async fn an_index_is_read_once() {
    let objects = Arc::new(InMemory::new());
    let mut writer = wrap(objects.clone()).writer(Policy::OneShot).await.unwrap();
    save(&mut writer, 1).await;
    save(&mut writer, 2).await;
    let store = wrap(objects.clone());
    let read = async |store: &Store| {
        let snapshot = store.snapshot(2).await.unwrap();
        let before = store.io().requests;
        snapshot.read("model.w", &Slice::rows(0..1)).await.unwrap();
        store.io().requests - before
    };
    assert_eq!(read(&store).await, 2, "the whole of two small casks");
    assert_eq!(read(&store).await, 2, "pages only");
    let options = tensorcask::StoreOptions { index_cache_bytes: 0, ..Default::default() };
    let forgetful = Store::with_object_store(objects, Default::default(), options);
    assert_eq!((read(&forgetful).await, read(&forgetful).await), (2, 2), "nothing is kept beyond the bound");
    // Of a large cask, an index and a page are read.
    let objects = Arc::new(InMemory::new());
    let noise = noise(1, 1 << 20);
    let state = [TensorView::new("model.w", Dtype::U8, &[1 << 20], &noise).unwrap()];
    let mut writer = wrap(objects.clone()).writer(Policy::Full).await.unwrap();
    writer.save(2, &state, &[], &Metadata::default()).await.unwrap();
    let store = wrap(objects);
    assert_eq!((read(&store).await, read(&store).await), (2, 1));
}

/// The casks, the manifest and the directory of a save are written at once.
#[tokio::test(start_paused = true)]
async fn a_delta_is_saved_within_five_rounds() {
    let mut taken = Vec::new();
    for saves in [2, 3] {
        let (rounds, ..) = rounds(&Arc::new(InMemory::new()), async |store| {
            let mut writer = store.writer(Policy::Intermittent { every: 100 }).await.unwrap();
            for step in 0..saves {
                save(&mut writer, step).await;
            }
        })
        .await;
        taken.push(rounds);
    }
    // The newest entry, the manifest of the parent, the objects, the check of the store, and the entry.
    assert!(taken[1] - taken[0] <= 5, "{taken:?} rounds of two and of three saves");
}

/// Thousands of small values of a state are as many blobs.
#[tokio::test]
async fn many_blobs_take_few_requests() {
    let objects = Arc::new(InMemory::new());
    let data: Vec<Vec<u8>> = (0..3000).map(|number| noise(number, 300)).collect();
    let names: Vec<String> = (0..data.len()).map(|number| format!("value.{number}")).collect();
    let blobs: Vec<Blob<'_>> = names.iter().zip(&data).map(|(name, bytes)| Blob::new(name, bytes.as_slice())).collect();
    let mut writer = wrap(objects.clone()).writer(Policy::Full).await.unwrap();
    writer.save(1, &[], &blobs, &Metadata::default()).await.unwrap();

    let reader = wrap(objects);
    let snapshot = reader.snapshot(Latest).await.unwrap();
    let before = reader.io().requests;
    let wanted: Vec<(u32, &str)> = names.iter().map(|name| (0, name.as_str())).rev().collect();
    assert!(snapshot.read_blobs(&wanted).await.unwrap().iter().rev().eq(&data), "in the order of the question");
    assert!(reader.io().requests - before <= 4, "the index, and all blobs");
    let before = reader.io().requests;
    snapshot.verify().await.unwrap();
    assert!(reader.io().requests - before <= 6);
    // The same state again is compared, not saved.
    let mut again = reader.writer(Policy::Full).await.unwrap();
    let before = reader.io().requests;
    again.save(1, &[], &blobs, &Metadata::default()).await.unwrap();
    assert!(reader.io().requests - before <= 40, "{} requests", reader.io().requests - before);
    assert!(snapshot.read_blobs(&[(0, "value.0"), (0, "absent")]).await.unwrap_err().to_string().contains("absent"));
}
