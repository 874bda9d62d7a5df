//! Measures the cost of reading a chain: the whole state, and one row of a large tensor.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;

use common::{Arguments, Table, bytes_of, median, report, seconds, synthetic};
use serde_json::json;
use tensorcask::blocking::{Snapshot, Store};
use tensorcask::{Dtype, Metadata, Policy, ReadRequest, Slice, StoreOptions, TensorView};

const ROUNDS: usize = 5;
/// Number of links in the chain that is restored as a whole.
const DEPTH: u64 = 32;
/// Number of links in the chain of which one row is read.
const ROW_DEPTH: u64 = 8;

fn main() {
    let arguments = Arguments::parse(&["mib", "row-mib", "folder"]);
    let folder = match arguments.text("folder") {
        Some(folder) => tempfile::tempdir_in(folder).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let open = |name: &str| {
        let url = folder.path().join(name).to_str().unwrap().to_owned();
        Store::with(StoreOptions { fsync: false, ..StoreOptions::default() }.open(&url).unwrap()).unwrap()
    };
    let whole = restores(&open, &arguments);
    let row = one_row(&open, (arguments.number("row-mib", 1024.0) * 1048576.0) as u64);
    report("resolve", &[whole, row], arguments.json);
}

/// Restores a consecutive chain of real steps at each depth. Compares bytes and time with the base alone.
fn restores(open: &dyn Fn(&str) -> Store, arguments: &Arguments) -> Table {
    let bytes = (arguments.number("mib", 64.0) * 1048576.0) as u64;
    // Three steps at a falling learning rate, forwards and backwards, which gives small deltas as in a long run.
    let states: Vec<_> =
        ["step-2400", "step-2401"].iter().map(|file| synthetic(bytes, &arguments.data().join(format!("{file}.safetensors")))).collect();
    let total = bytes_of(&states[0]);
    let store = open("chain");
    let mut writer = store.writer(Policy::Consecutive).unwrap();
    for step in 0..DEPTH {
        let state = &states[(step % 2) as usize];
        let names: Vec<_> = states[1].iter().map(|tensor| &tensor.name).collect();
        let views: Vec<TensorView<'_>> = state
            .iter()
            .filter(|tensor| names.contains(&&tensor.name))
            .map(|tensor| TensorView::new(tensor.name.as_str(), tensor.dtype, &tensor.shape, &tensor.data).unwrap())
            .collect();
        writer.save(step, &views, &[], &Metadata::default()).unwrap();
    }
    let restore = |step: u64| {
        let mut times = Vec::new();
        let mut read = 0;
        for _ in 0..ROUNDS {
            let store = open("chain");
            let snapshot = store.snapshot(step).unwrap();
            let mut buffers: Vec<(String, Vec<u8>)> = snapshot
                .tensors()
                .into_iter()
                .map(|t| (t.name, vec![0u8; t.dtype.byte_count(t.shape.iter().product()).unwrap() as usize]))
                .collect();
            let request = |(name, out)| ReadRequest { name, slice: Slice::all(), out };
            let items = buffers.iter_mut().map(|(name, bytes)| request((name.as_str(), bytes.as_mut_slice()))).collect();
            times.push(seconds(|| store.block_on(async { inner(&snapshot).read_many_into(items).await.unwrap() })).0);
            read = store.inner().io().bytes_read;
        }
        (median(times), read)
    };
    let title = format!("Restore of a consecutive chain, about {:.2} GB of bf16 weights, warm local disk", total as f64 / 1e9);
    let mut table = Table::new(title, &["s", "x base", "MB read", "x base", "MB of the chain's casks", "read / casks"]);
    let base = restore(0);
    for depth in [1, 2, 4, 8, 16, DEPTH] {
        let (time, read) = restore(depth - 1);
        let stored: u64 = open("chain").snapshot(depth - 1).unwrap().inspect().chain().iter().map(|link| link.stored_bytes).sum();
        let [times, bytes, share] = [time / base.0, read as f64 / base.1 as f64, read as f64 / stored as f64];
        table.row(
            &format!("{depth} links"),
            vec![
                format!("{time:.3}"),
                format!("{times:.2}"),
                format!("{:.1}", read as f64 / 1e6),
                format!("{bytes:.2}"),
                format!("{:.1}", stored as f64 / 1e6),
                format!("{share:.2}"),
            ],
            json!({ "seconds": time, "bytes_read": read, "stored_bytes": stored, "times_base_seconds": times, "times_base_bytes": bytes }),
        );
    }
    table
}

fn inner(snapshot: &Snapshot) -> &tensorcask::Snapshot {
    snapshot
}

/// Reads one row of a large tensor at depth 8: a chunk and a part of the index from each link.
fn one_row(open: &dyn Fn(&str) -> Store, bytes: u64) -> Table {
    const COLUMNS: u64 = 4096;
    let rows = bytes / (4 * COLUMNS);
    let mut weights: Vec<u8> = vec![0; (rows * COLUMNS * 4) as usize];
    for (at, word) in weights.chunks_mut(8).enumerate() {
        let x = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.iter_mut().enumerate().for_each(|(byte, out)| *out = (x >> (8 * byte)) as u8);
    }
    let store = open("row");
    let mut writer = store.writer(Policy::Consecutive).unwrap();
    for step in 0..ROW_DEPTH {
        // Changes a thousandth of the elements, evenly spread.
        for at in (step as usize * 4..weights.len()).step_by(4000) {
            weights[at] ^= 1;
        }
        let state = [TensorView::new("w", Dtype::F32, &[rows, COLUMNS], &weights).unwrap()];
        writer.save(step, &state, &[], &Metadata::default()).unwrap();
    }
    drop(writer);
    let row = rows / 2;
    let mut times = Vec::new();
    let mut read = 0;
    let mut requests = 0;
    for _ in 0..ROUNDS {
        let store = open("row");
        let snapshot = store.snapshot(ROW_DEPTH - 1).unwrap();
        let before = store.inner().io();
        let (time, tensor) = seconds(|| snapshot.read("w", &Slice::rows(row..row + 1)).unwrap());
        let after = store.inner().io();
        let start = (row * COLUMNS * 4) as usize;
        assert!(tensor.data == weights[start..start + COLUMNS as usize * 4]);
        times.push(time);
        (read, requests) = (after.bytes_read - before.bytes_read, after.requests - before.requests);
    }
    let time = median(times);
    let mut table = Table::new(
        format!("One row of a tensor of {:.2} GB, {ROW_DEPTH} links; a chunk has 1.05 MB", weights.len() as f64 / 1e9),
        &["ms", "KB read", "requests"],
    );
    table.row(
        "one row",
        vec![format!("{:.1}", time * 1e3), format!("{:.0}", read as f64 / 1e3), requests.to_string()],
        json!({ "seconds": time, "bytes_read": read, "requests": requests }),
    );
    table
}
