//! Many ranks: one snapshot of all of them, or none. Layouts may change between snapshots.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::wrap;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::session::RankExchange;
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::wire::Receipt;
use tensorcask::{
    BaseKeeping, Blob, Dtype, ErrorKind, Latest, Metadata, Policy, Rank, RankWriter, Rect, Slice, Store, TensorView, WriterOptions,
};

const COLUMNS: u64 = 512;
const WORLD: u32 = 4;

/// Where a rank halts, step by step: before a request of a folder, counted from 0. Steps 1, 4, 7 and 10 are bases.
const HALTS: [&str; 10] = ["never", "log 0", "casks 5", "casks 0", "casks 0", "casks 1", "casks 1", "casks 2", "receipts 0", "end"];
const HALTED: &str = "this rank waits to be killed";

/// The element bytes of a row at a step: every row differs, and a few change from step to step.
fn row(step: u64, row: u64) -> Vec<u8> {
    let mut x = row.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes: Vec<u8> = (0..COLUMNS * 4)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 56) as u8
        })
        .collect();
    bytes[(step % 64) as usize] ^= 0x55;
    bytes
}

fn rows(step: u64, range: std::ops::Range<u64>) -> Vec<u8> {
    range.flat_map(|at| row(step, at)).collect()
}

fn options(policy: Policy) -> WriterOptions {
    WriterOptions { policy, ..WriterOptions::default() }
}

/// Saves the rows of one of `world` ranks. Rank 0 also saves a vector.
async fn save_rank(writer: &mut RankWriter, rank: u32, world: u32, step: u64, total: u64) -> tensorcask::Result<Receipt> {
    let share = total / u64::from(world);
    let first = u64::from(rank) * share;
    let weights = rows(step, first..first + share);
    let vector = row(step + 1, 7);
    let rect = Rect { offset: vec![first, 0], shape: vec![share, COLUMNS] };
    let shard = |name: &str| TensorView::shard(name, Dtype::F32, &[total, COLUMNS], rect.clone(), &weights);
    let mut state = vec![shard("model.w")?, shard("optimizer.exp_avg.w")?];
    if rank == 0 {
        state.push(TensorView::new("model.bias", Dtype::F32, &[COLUMNS], &vector)?);
    }
    let blob = Blob { rank, name: "rng".into(), data: vec![rank as u8; 9].into() };
    writer.save(step, &state, &[blob]).await
}

async fn assert_holds(store: &Store, step: u64, total: u64) {
    let snapshot = store.snapshot(step).await.unwrap();
    assert!(snapshot.read("model.w", &Slice::all()).await.unwrap().data == rows(step, 0..total), "step {step}");
    assert!(snapshot.read("optimizer.exp_avg.w", &Slice::all()).await.unwrap().data == rows(step, 0..total), "step {step}");
    assert!(snapshot.read("model.bias", &Slice::all()).await.unwrap().data == row(step + 1, 7), "step {step}");
}

async fn assert_clean(store: &Store) {
    let report = maintain::verify(store, &VerifyOptions::default()).await.unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

async fn rank_writers(store: &Store, world: u32, policy: Policy) -> Vec<RankWriter> {
    let mut writers = Vec::new();
    for rank in 0..world {
        writers.push(store.rank_writer(Rank { rank, world, attempt: 0 }, options(policy)).await.unwrap());
    }
    writers
}

async fn save_all(writers: &mut [RankWriter], step: u64, total: u64) -> Vec<Receipt> {
    let world = writers.len() as u32;
    let mut receipts = Vec::new();
    for (rank, writer) in writers.iter_mut().enumerate() {
        let receipt = save_rank(writer, rank as u32, world, step, total).await.unwrap();
        // Serializes the receipt, as a collective would.
        let carried: Receipt = serde_json::from_str(&serde_json::to_string(&receipt).unwrap()).unwrap();
        assert_eq!(carried, receipt);
        receipts.push(carried);
    }
    receipts
}

/// Says so on stdout, and holds the process until it is killed; ends it if the test that started it is gone.
fn halt() -> ! {
    println!("\n{HALTED}");
    _ = std::io::stdin().read(&mut [0]);
    std::process::exit(1)
}

/// The store of a rank that halts before request number `at` of a folder.
fn halting(url: &str, folder: &str, at: u64) -> Store {
    let local = LocalFileSystem::new_with_prefix(url).unwrap();
    let folder = folder.to_owned();
    let requests = AtomicU64::new(0);
    wrap(Arc::new(FaultStore::new(Arc::new(local), move |_, path| {
        if path.as_ref().starts_with(&folder) && requests.fetch_add(1, Ordering::SeqCst) == at {
            halt();
        }
        Fault::None
    })))
}

/// A child process of the test below: one rank saves a step, as the environment tells it, and may halt on the way.
#[test]
fn rank_process() {
    let Ok(job) = std::env::var("TENSORCASK_TEST_RANK") else { return };
    let words: Vec<&str> = job.splitn(5, ' ').collect();
    let [url, rank, attempt, step, halts] = words[..] else { panic!("{job}") };
    let rank = rank.parse().unwrap();
    let attempt = attempt.parse().unwrap();
    let step = step.parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = match halts.split_once(' ') {
            Some((folder, at)) => halting(url, folder, at.parse().unwrap()),
            None => Store::open(url).unwrap(),
        };
        let who = Rank { rank, world: WORLD, attempt };
        let mut writer = store.rank_writer(who, options(Policy::Intermittent { every: 3 })).await.unwrap();
        let receipt = save_rank(&mut writer, rank, WORLD, step, 1024).await.unwrap();
        RankExchange::new(&store).put_receipt(&receipt).await.unwrap();
        if halts == "end" {
            halt();
        }
    });
}

/// Starts a rank; `halts` is one of [`HALTS`].
fn spawn_rank(url: &str, rank: u32, attempt: u64, step: u64, halts: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", "ranks::rank_process"]);
    command.env("TENSORCASK_TEST_RANK", format!("{url} {rank} {attempt} {step} {halts}"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// Four processes; at each step one of them is killed at another request of its save, and the step is saved again.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_rank_leaves_no_half_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let root: PathBuf = folder.path().join("run");
    let url = root.to_str().unwrap();
    let store = Store::open(url).unwrap();
    let mut writer = store.writer(Policy::Intermittent { every: 3 }).await.unwrap();
    let mut killed = 0;
    for (step, halts) in (1u64..).zip(HALTS) {
        let mut attempt = 0;
        loop {
            let victim = (step % u64::from(WORLD)) as usize;
            let halts_of = |rank| if attempt == 0 && rank as usize == victim { halts } else { "never" };
            let mut ranks: Vec<Child> = (0..WORLD).map(|rank| spawn_rank(url, rank, attempt, step, halts_of(rank))).collect();
            // The lines end with the process, if it ends before it halts.
            let mut lines = BufReader::new(ranks[victim].stdout.take().unwrap()).lines();
            let halted = lines.any(|line| line.unwrap() == HALTED);
            assert_eq!(halted, halts_of(victim as u32) != "never", "step {step}, {halts}");
            if halted {
                // SIGKILL, to this one process.
                ranks[victim].kill().unwrap();
            }
            let ended: Vec<bool> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
            let receipts = RankExchange::new(&store).receipts(step, attempt, WORLD).await.unwrap();
            for (rank, ended) in ended.iter().enumerate() {
                assert!(!ended || receipts.iter().any(|receipt| receipt.rank == rank as u32), "rank {rank} ended and left no receipt");
                assert!(*ended || (attempt == 0 && rank == victim), "rank {rank} failed");
            }
            if receipts.len() == WORLD as usize {
                writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
                break;
            }
            killed += 1;
            let error = writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap_err();
            assert!(error.to_string().contains(&format!("no receipt of rank {victim}")), "{error}");
            assert_eq!(store.snapshot(step).await.unwrap_err().kind(), ErrorKind::NotFound, "half a snapshot is none");
            attempt += 1;
        }
        assert_holds(&store, step, 1024).await;
    }
    assert_eq!(killed, HALTS.len() - 2, "each that halts before its end is killed without a receipt");
    let steps: Vec<u64> = store.snapshots().await.unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(steps, (1..=HALTS.len() as u64).collect::<Vec<_>>());
    assert!(store.snapshots().await.unwrap().iter().filter(|info| info.record.parent.is_some()).count() >= 6, "deltas among them");
    assert_clean(&store).await;
}

#[tokio::test]
async fn receipts_that_do_not_fit_are_refused() {
    let store = Store::open("memory://").unwrap();
    let mut writer = store.writer(Policy::Consecutive).await.unwrap();
    let mut ranks = rank_writers(&store, 2, Policy::Consecutive).await;
    let good = save_all(&mut ranks, 1, 64).await;
    let metadata = Metadata::default();
    let with = |change: &dyn Fn(&mut Vec<Receipt>)| {
        let mut receipts = good.clone();
        change(&mut receipts);
        receipts
    };
    type Change = dyn Fn(&mut Vec<Receipt>);
    let wrong: [(&str, &Change); 10] = [
        ("no receipts", &|r| r.clear()),
        ("no receipt of rank 1", &|r| _ = r.pop()),
        ("is given twice", &|r| r[1] = r[0].clone()),
        ("of step 9", &|r| r[1].step = 9),
        ("attempt 5", &|r| r[1].attempt = 5),
        ("disagree", &|r| r[1].tensors[0].role = "other".into()),
        ("disagree", &|r| r[1].tensors[0].dtype = "i32".into()),
        ("do not tile", &|r| r[1].tensors[0].shards[0].offset[0] += 1),
        ("slots of another rank", &|r| r[1].casks[0].slot = 0),
        ("too few checksums", &|r| r[1].tensors[0].shards[0].crcs.clear()),
    ];
    for (says, change) in wrong {
        let error = writer.commit_receipts(1, &with(change), &metadata).await.unwrap_err();
        assert!(error.to_string().contains(says), "{says}: {error}");
    }
    let absent = with(&|r| r[1].casks[0].id = tensorcask::wire::Id([9; 16]));
    assert_eq!(writer.commit_receipts(1, &absent, &metadata).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store.snapshots().await.unwrap().is_empty(), "nothing was committed");
    writer.commit_receipts(1, &good, &metadata).await.unwrap();
    assert_holds(&store, 1, 64).await;

    // One rank had not seen the last commit, so the deltas have different parents.
    let late = save_rank(&mut ranks[1], 1, 2, 3, 64).await.unwrap();
    let two = save_all(&mut ranks, 2, 64).await;
    writer.commit_receipts(2, &two, &metadata).await.unwrap();
    let early = save_rank(&mut ranks[0], 0, 2, 3, 64).await.unwrap();
    assert_eq!(writer.commit_receipts(3, &[early, late], &metadata).await.unwrap_err().kind(), ErrorKind::Conflict);
    let three = save_all(&mut ranks, 3, 64).await;
    assert_eq!(writer.commit_receipts(3, &three, &metadata).await.unwrap().kind.name(), "delta");
    assert_holds(&store, 3, 64).await;
    assert_clean(&store).await;
    // A different receipt under the same attempt is refused; the same receipt is accepted.
    RankExchange::new(&store).put_receipt(&three[0]).await.unwrap();
    RankExchange::new(&store).put_receipt(&three[0]).await.unwrap();
    let again = save_all(&mut ranks, 3, 64).await;
    assert_eq!(RankExchange::new(&store).put_receipt(&again[0]).await.unwrap_err().kind(), ErrorKind::Conflict);
}

/// A rank keeps its base, and drops it if the coordinator committed something else.
#[tokio::test]
async fn ranks_make_deltas_against_what_was_committed() {
    for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
        let store = Store::open("memory://").unwrap();
        let options = WriterOptions { policy: Policy::Consecutive, base_cache, ..WriterOptions::default() };
        let mut writer = store.writer_with(options.clone()).await.unwrap();
        let mut ranks = vec![
            store.rank_writer(Rank { rank: 0, world: 2, attempt: 0 }, options.clone()).await.unwrap(),
            store.rank_writer(Rank { rank: 1, world: 2, attempt: 0 }, options).await.unwrap(),
        ];
        for step in 1..=6 {
            if step == 4 {
                // Uploads a step that is never committed.
                save_all(&mut ranks, 99, 64).await;
            }
            let receipts = save_all(&mut ranks, step, 64).await;
            let saved = writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
            assert_eq!(saved.kind.name(), if step == 1 { "base" } else { "delta" });
        }
        for step in 1..=6 {
            assert_holds(&store, step, 64).await;
        }
        assert_clean(&store).await;
    }
}

/// Another world size, whole tensors again, and back: all are allowed between snapshots.
#[tokio::test]
async fn the_world_may_change_its_size() {
    for policy in [Policy::Consecutive, Policy::Intermittent { every: 8 }, Policy::Adaptive] {
        let store = Store::open("memory://").unwrap();
        let mut step = 0;
        for world in [4u32, 2, 1, 8, 8] {
            // A restart with another number of ranks.
            let mut writer = store.writer(policy).await.unwrap();
            let mut ranks = rank_writers(&store, world, policy).await;
            for _ in 0..2 {
                step += 1;
                let receipts = save_all(&mut ranks, step, 64).await;
                writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
            }
        }
        for step in 1..=step {
            assert_holds(&store, step, 64).await;
        }
        let rank_seven = store.snapshot(Latest).await.unwrap().read_blob(7, "rng").await.unwrap();
        assert_eq!(rank_seven, [7; 9]);
        assert_clean(&store).await;
    }
}

/// Returns the casks that were requested while `run` ran.
async fn casks_read(objects: &Arc<InMemory>, run: impl AsyncFnOnce(Store)) -> BTreeSet<String> {
    let seen: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let note = seen.clone();
    let watched: Arc<dyn ObjectStore> = Arc::new(FaultStore::new(objects.clone(), move |_, path| {
        if path.as_ref().starts_with("casks/") {
            note.lock().unwrap().insert(path.to_string());
        }
        Fault::None
    }));
    run(wrap(watched)).await;
    let seen = seen.lock().unwrap();
    seen.clone()
}

#[tokio::test]
async fn a_rank_of_the_same_layout_reads_only_its_own_casks() {
    let objects = Arc::new(InMemory::new());
    let store = wrap(objects.clone());
    let mut writer = store.writer(Policy::Intermittent { every: 8 }).await.unwrap();
    let mut ranks = rank_writers(&store, 4, Policy::Intermittent { every: 8 }).await;
    let mut own: Vec<BTreeSet<String>> = vec![BTreeSet::new(); 4];
    for step in 1..=2 {
        let receipts = save_all(&mut ranks, step, 64).await;
        for receipt in &receipts {
            own[receipt.rank as usize].extend(receipt.casks.iter().map(|cask| cask.path()));
        }
        writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
    }
    for rank in 0..4u64 {
        let read = casks_read(&objects, async |store| {
            let snapshot = store.snapshot(2).await.unwrap();
            for name in ["model.w", "optimizer.exp_avg.w"] {
                let shard = snapshot.read(name, &Slice::rows(rank * 16..rank * 16 + 16)).await.unwrap();
                assert!(shard.data == rows(2, rank * 16..rank * 16 + 16));
            }
        })
        .await;
        assert_eq!(read, own[rank as usize], "rank {rank}");
    }
}

/// Name, dtype, shape, and shards if there are several.
type Described = (&'static str, Dtype, Vec<u64>, Vec<Rect>);

/// Added, removed, reshaped, re-typed and re-sharded tensors between a parent and its delta.
#[tokio::test]
async fn tensors_may_come_go_and_change() {
    let halves = |at: u64| -> Vec<Rect> {
        vec![Rect { offset: vec![0, 0], shape: vec![at, 8] }, Rect { offset: vec![at, 0], shape: vec![12 - at, 8] }]
    };
    let bytes = |seed: u8, count: usize| -> Vec<u8> { (0..count).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect() };
    let whole = vec![Rect::whole(&[12, 8])];
    for policy in [Policy::OneShot, Policy::Consecutive, Policy::Intermittent { every: 3 }, Policy::Adaptive] {
        for base_cache in [BaseKeeping::Memory, BaseKeeping::None] {
            let store = Store::open("memory://").unwrap();
            let mut writer =
                store.writer_with(WriterOptions { policy, base_cache: base_cache.clone(), ..WriterOptions::default() }).await.unwrap();
            let layouts: Vec<Vec<Described>> = vec![
                vec![("a", Dtype::F32, vec![12, 8], whole.clone()), ("b", Dtype::F32, vec![12, 8], halves(6))],
                vec![
                    ("a", Dtype::F32, vec![8, 12], vec![]),
                    ("b", Dtype::F32, vec![12, 8], halves(4)),
                    ("c", Dtype::Bf16, vec![5], vec![]),
                ],
                vec![("a", Dtype::I32, vec![8, 12], vec![]), ("c", Dtype::Bf16, vec![5], vec![])],
                vec![
                    ("a", Dtype::F32, vec![12, 8], halves(4)),
                    ("b", Dtype::F32, vec![12, 8], halves(6)),
                    ("c", Dtype::Bf16, vec![], vec![]),
                ],
                vec![("a", Dtype::F32, vec![12, 8], whole.clone()), ("b", Dtype::F32, vec![12, 8], whole.clone())],
            ];
            let mut expected = Vec::new();
            for (step, layout) in layouts.iter().enumerate() {
                let data: Vec<Vec<u8>> = layout
                    .iter()
                    .map(|(_, dtype, shape, _)| bytes(step as u8 / 2, dtype.byte_count(shape.iter().product()).unwrap() as usize))
                    .collect();
                let mut views = Vec::new();
                for ((name, dtype, shape, shards), data) in layout.iter().zip(&data) {
                    match shards.len() {
                        0 | 1 => views.push(TensorView::new(*name, *dtype, shape, data).unwrap()),
                        _ => {
                            for rect in shards {
                                let at = rect.offset[0] as usize * 32;
                                let part = &data[at..at + rect.shape[0] as usize * 32];
                                views.push(TensorView::shard(*name, *dtype, shape, rect.clone(), part).unwrap());
                            }
                        }
                    }
                }
                writer.save(step as u64, &views, &[], &Metadata::default()).await.unwrap();
                expected.push(layout.iter().map(|(name, ..)| *name).zip(data).collect::<Vec<_>>());
            }
            for (step, tensors) in expected.iter().enumerate() {
                let snapshot = store.snapshot(step as u64).await.unwrap();
                let names: Vec<String> = snapshot.tensors().into_iter().map(|tensor| tensor.name).collect();
                assert_eq!(names, tensors.iter().map(|(name, _)| *name).collect::<Vec<_>>(), "what was removed is gone");
                for (name, data) in tensors {
                    assert_eq!(&snapshot.read(name, &Slice::all()).await.unwrap().data, data, "{policy}, step {step}, {name}");
                }
            }
            assert_clean(&store).await;
        }
    }
}

/// The clock of the storage is read without deleting anything, also where objects cannot be overwritten.
#[tokio::test]
async fn a_commit_of_ranks_needs_no_permission_to_delete_or_overwrite() {
    for refused in [Operation::Delete, Operation::Put] {
        let memory = Arc::new(InMemory::new());
        let objects =
            FaultStore::new(memory.clone(), move |operation, path| match operation == refused && !path.as_ref().starts_with("casks/") {
                true => Fault::FailBefore,
                false => Fault::None,
            });
        let store = wrap(Arc::new(objects));
        let mut coordinator = store.writer(Policy::Full).await.unwrap();
        let mut writers = rank_writers(&store, 2, Policy::Full).await;
        for step in 1..=3 {
            let receipts = save_all(&mut writers, step, 64).await;
            coordinator.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
        }
        assert_holds(&wrap(memory), 3, 64).await;
    }
}
