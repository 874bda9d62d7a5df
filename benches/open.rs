//! Measures how a store with many commits opens: time and requests.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;

use common::{Arguments, Table, median, report, seconds};
use serde_json::json;
use tensorcask::blocking::Store;
use tensorcask::{Dtype, IoCounts, Latest, Metadata, Policy, StoreOptions, TensorView};

const ROUNDS: usize = 7;
/// Numbers of commits to measure. The worst case has 63 entries after the last catalog, which follows every 64th entry.
const COMMITS: [u64; 5] = [10, 1_000, 1_022, 10_000, 10_046];
/// Maximum number of requests for 10,000 commits.
const TARGET: u64 = 70;

fn main() {
    let arguments = Arguments::parse(&["most"]);
    let most = arguments.number("most", 10_046.0) as u64;
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run").to_str().unwrap().to_owned();
    let title = "Opening a store on a warm local disk; entries after the last catalog are those that must be read one by one";
    let mut table = Table::new(
        title,
        &[
            "entries after the catalog",
            "`snapshot(Latest)`, ms",
            "requests",
            "KB read",
            "`snapshots()`, ms",
            "requests",
            "KB read",
            "ms per save before",
        ],
    );
    let store = open(&url);
    let mut writer = store.writer(Policy::Intermittent { every: 8 }).unwrap();
    let mut saved = 0;
    for commits in COMMITS.into_iter().filter(|&commits| commits <= most) {
        let (save_seconds, ()) = seconds(|| {
            for step in saved..commits {
                save(&mut writer, step);
            }
        });
        let per_save = save_seconds / (commits - saved) as f64;
        saved = commits;
        let latest = measure(&url, |store| assert_eq!(store.snapshot(Latest).unwrap().step(), commits - 1));
        let all = measure(&url, |store| assert_eq!(store.snapshots().unwrap().len() as u64, commits));
        // Counts the writer's `opened` entry, too.
        let tail = (commits + 1) % 64;
        let cells = |(seconds, io): &(f64, IoCounts)| {
            [format!("{:.1}", seconds * 1e3), io.requests.to_string(), format!("{:.0}", io.bytes_read as f64 / 1e3)]
        };
        let value = |(seconds, io): &(f64, IoCounts)| json!({ "seconds": seconds, "requests": io.requests, "bytes_read": io.bytes_read });
        let row = [vec![tail.to_string()], cells(&latest).to_vec(), cells(&all).to_vec(), vec![format!("{:.2}", per_save * 1e3)]].concat();
        table.row(
            &format!("{commits} commits"),
            row,
            json!({ "entries_after_catalog": tail, "latest": value(&latest), "all": value(&all), "seconds_per_save": per_save, "target_requests": TARGET }),
        );
    }
    report("open", &[table], arguments.json);
}

/// Opens a store without fsync, because the benchmark measures reading.
fn open(url: &str) -> Store {
    Store::with(StoreOptions { fsync: false, ..StoreOptions::default() }.open(url).unwrap()).unwrap()
}

fn save(writer: &mut tensorcask::blocking::Writer, step: u64) {
    let mut weights = [7u8; 256];
    (weights[0], weights[1]) = (step as u8, (step >> 8) as u8);
    let state = [TensorView::new("model.w", Dtype::F32, &[8, 8], &weights).unwrap()];
    let mut metadata = Metadata::default();
    metadata.user.insert("loss".into(), json!(1.0 / (step + 1) as f64));
    writer.save(step, &state, &[], &metadata).unwrap();
}

/// Returns the median of seconds and the requests of one round. Each round opens the store anew.
fn measure(url: &str, run: impl Fn(&Store)) -> (f64, IoCounts) {
    let mut times = Vec::new();
    let mut io = IoCounts::default();
    for _ in 0..ROUNDS {
        let store = open(url);
        times.push(seconds(|| run(&store)).0);
        io = store.inner().io();
    }
    (median(times), io)
}
