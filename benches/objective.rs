//! Measures how soon a save is durable with each objective, in environments where different ones win: a fast disk, a store
//! that takes 100 MB/s, and cores that other programs use.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Arguments, Owned, Table, bytes_of, median, report, seconds, synthetic};
use object_store::memory::InMemory;
use serde_json::json;
use tensorcask::codec::ObjectiveSetting;
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::{BaseKeeping, Metadata, Policy, Store, StoreOptions, TensorView, WriterOptions};

/// Bytes of a part of an upload.
const PART_BYTES: f64 = (8u32 << 20) as f64;

const STEPS: [u64; 3] = [1000, 1001, 1010];

fn main() {
    let arguments = Arguments::parse(&["gib", "rounds", "folder"]);
    let bytes = (arguments.number("gib", 0.5) * (1u64 << 30) as f64) as u64;
    let rounds = arguments.number("rounds", 3.0) as usize;
    let states = STEPS.map(|step| synthetic(bytes, &arguments.data().join(format!("step-{step}.safetensors"))));
    let folder = || match arguments.text("folder") {
        Some(folder) => tempfile::tempdir_in(folder).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let size = bytes_of(&states[0]);
    let mut tables = Vec::new();
    for (environment, megabytes_per_second, busy_threads) in [
        ("A disk, no other work", None, 0),
        ("A store that takes 100 MB/s", Some(100.0), 0),
        ("A store that takes 400 MB/s", Some(400.0), 0),
        ("The same store, and two busy threads per core", Some(400.0), 2 * std::thread::available_parallelism().map_or(1, usize::from)),
    ] {
        let title = format!(
            "{environment}: {:.2} GB, median of {rounds} rounds; seconds until the save is durable, and stored / state",
            size as f64 / 1e9
        );
        let mut table =
            Table::new(title, &["base, s", "stored", "1 step later, s", "stored", "10 steps later, s", "stored", "chosen by `auto`"]);
        let busy = Busy::start(busy_threads);
        let objectives = ["smallest", "balanced", "fastest", "auto"];
        let mut found: Vec<Vec<Vec<(f64, f64)>>> = vec![vec![Vec::new(); states.len()]; objectives.len()];
        let mut chosen = vec![String::new(); objectives.len()];
        for _ in 0..rounds {
            for (nth, name) in objectives.into_iter().enumerate() {
                let folder = folder();
                let objective = ObjectiveSetting::from_name(name).unwrap();
                let store = match megabytes_per_second {
                    Some(rate) => limited(rate),
                    None => Store::open(folder.path().to_str().unwrap()).unwrap(),
                };
                let options =
                    WriterOptions { policy: Policy::OneShot, objective, base_cache: BaseKeeping::Memory, ..WriterOptions::default() };
                let mut writer = runtime.block_on(store.writer_with(options)).unwrap();
                for (position, state) in states.iter().enumerate() {
                    let tensors = views(state);
                    let metadata = Metadata::default();
                    let save = writer.save(STEPS[position], &tensors, &[], &metadata);
                    let (seconds, saved) = seconds(|| runtime.block_on(save).unwrap());
                    found[nth][position].push((seconds, saved.stored_bytes as f64 / size as f64));
                    if let Some(report) = saved.objective {
                        chosen[nth] = if position > 0 { format!("{}; {report}", chosen[nth]) } else { report.to_string() };
                    }
                }
            }
        }
        drop(busy);
        for ((name, cells), chosen) in objectives.into_iter().zip(&found).zip(chosen) {
            let medians: Vec<(f64, f64)> = cells
                .iter()
                .map(|rounds| (median(rounds.iter().map(|round| round.0).collect()), median(rounds.iter().map(|round| round.1).collect())))
                .collect();
            let mut row: Vec<String> =
                medians.iter().flat_map(|(seconds, stored)| [format!("{seconds:.2}"), format!("{stored:.3}")]).collect();
            row.push(chosen.clone());
            table.row(name, row, json!({ "seconds_and_shares": medians, "chosen": chosen }));
        }
        tables.push(table);
    }
    report("objective", &tables, arguments.json);
}

fn views(state: &[Owned]) -> Vec<TensorView<'_>> {
    state.iter().map(|tensor| TensorView::new(tensor.name.as_str(), tensor.dtype, &tensor.shape, &tensor.data).unwrap()).collect()
}

/// A store in memory whose uploads share a rate.
fn limited(megabytes_per_second: f64) -> Store {
    let free = Mutex::new(Instant::now());
    let slow = FaultStore::new(Arc::new(InMemory::new()), move |operation, _| match operation {
        Operation::Part => {
            let now = Instant::now();
            let mut free = free.lock().unwrap();
            *free = (*free).max(now) + Duration::from_secs_f64(PART_BYTES / megabytes_per_second / 1e6);
            Fault::Slow(free.duration_since(now))
        }
        _ => Fault::None,
    });
    Store::with_object_store(Arc::new(slow), Default::default(), StoreOptions::default())
}

/// Threads that use the cores.
struct Busy {
    ends: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Busy {
    fn start(threads: usize) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let spin = |_| {
            let ends = ends.clone();
            std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..threads).map(spin).collect();
        Self { ends, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}
