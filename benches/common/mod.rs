//! Shared parts of the benchmarks: arguments, timing, tables, and states tiled from real data.
#![allow(dead_code, unreachable_pub, reason = "each benchmark uses a part of this")]

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use tensorcask::interchange::safetensors::Files;
use tensorcask::{Dtype, TensorView};

/// Command line: `--name value`, and `--json`.
pub struct Arguments {
    pairs: Vec<(String, String)>,
    pub json: bool,
}

impl Arguments {
    /// Parses the arguments of this process. `known` lists the names that take a value, besides `data`.
    pub fn parse(known: &[&str]) -> Self {
        let mut arguments = Self { pairs: Vec::new(), json: false };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.strip_prefix("--") {
                Some("json") => arguments.json = true,
                // Cargo passes this argument to benchmarks.
                Some("bench") => {}
                Some(name) if name == "data" || known.contains(&name) => {
                    let value = words.next().unwrap_or_else(|| fail(&format!("--{name} needs a value")));
                    arguments.pairs.push((name.to_owned(), value));
                }
                _ => fail(&format!("`{word}` is not known; there are --json, --data and --{}", known.join(", --"))),
            }
        }
        arguments
    }

    /// Returns a number, or its default.
    pub fn number(&self, name: &str, default: f64) -> f64 {
        let found = self.pairs.iter().rev().find(|(known, _)| known == name);
        found.map_or(default, |(_, value)| value.parse().unwrap_or_else(|_| fail(&format!("--{name} takes a number"))))
    }

    /// Returns a text, if given.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.pairs.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns the folder of the real states.
    pub fn data(&self) -> PathBuf {
        self.text("data").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data"), PathBuf::from)
    }
}

/// Ends the process with a message.
pub fn fail(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(2)
}

/// Returns the seconds and the value of one call.
pub fn seconds<T>(run: impl FnOnce() -> T) -> (f64, T) {
    let begun = Instant::now();
    let value = run();
    (begun.elapsed().as_secs_f64(), value)
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the median seconds of each candidate over `rounds`. Each round runs all candidates in turn. A candidate
/// returns the seconds of the part that counts.
pub fn alternate(rounds: usize, candidates: &mut [(&str, &mut dyn FnMut() -> f64)]) -> Vec<f64> {
    let mut times: Vec<Vec<f64>> = candidates.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for ((_, run), times) in candidates.iter_mut().zip(&mut times) {
            times.push(run());
        }
    }
    times.into_iter().map(median).collect()
}

/// Copies memory to memory that has been touched before.
pub struct Memcpy {
    destination: Vec<u8>,
}

impl Memcpy {
    pub fn new(bytes: usize) -> Self {
        Self { destination: vec![1; bytes] }
    }

    /// Returns the seconds to copy all parts in turn.
    pub fn seconds<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> f64 {
        let (seconds, ()) = seconds(|| {
            let mut rest = self.destination.as_mut_slice();
            for part in parts {
                let (now, later) = rest.split_at_mut(part.len());
                now.copy_from_slice(part);
                rest = later;
            }
        });
        std::hint::black_box(&self.destination);
        seconds
    }
}

/// A table for people, and its rows for programs.
pub struct Table {
    title: String,
    columns: Vec<String>,
    rows: Vec<(String, Vec<String>, Value)>,
}

impl Table {
    pub fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        Self { title: title.into(), columns: columns.iter().map(|name| (*name).to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row with arbitrary cells.
    pub fn row(&mut self, name: &str, cells: Vec<String>, value: Value) {
        self.rows.push((name.to_owned(), cells, value));
    }

    /// Adds a row to a table with the columns `s`, `GB/s`, `x memcpy`.
    pub fn speed(&mut self, name: &str, bytes: u64, seconds: f64, memcpy: f64) {
        let rate = bytes as f64 / seconds / 1e9;
        self.row(
            name,
            vec![format!("{seconds:.3}"), format!("{rate:.2}"), format!("{:.2}", seconds / memcpy)],
            json!({ "seconds": seconds, "bytes": bytes, "gb_per_s": rate, "times_memcpy": seconds / memcpy }),
        );
    }
}

pub const SPEED: [&str; 3] = ["s", "GB/s", "x memcpy"];

/// Writes the tables to stdout.
pub fn report(benchmark: &str, tables: &[Table], json: bool) {
    if json {
        let rows =
            |table: &Table| -> Vec<Value> { table.rows.iter().map(|(name, _, value)| json!({ "name": name, "result": value })).collect() };
        let tables: Vec<Value> = tables.iter().map(|table| json!({ "title": table.title, "rows": rows(table) })).collect();
        println!("{}", json!({ "benchmark": benchmark, "machine": machine(), "tables": tables }));
        return;
    }
    println!("{}", machine());
    for table in tables {
        println!("\n{}\n\n| | {} |\n|---|{}", table.title, table.columns.join(" | "), "---:|".repeat(table.columns.len()));
        for (name, cells, _) in &table.rows {
            println!("| {name} | {} |", cells.join(" | "));
        }
    }
}

/// Describes processor, cores and system.
pub fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':')).map_or("unknown processor", |(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{model}, {cores} cores, {} {}", std::env::consts::OS, std::env::consts::ARCH)
}

/// A tensor of a synthetic state.
pub struct Owned {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

/// Number of times that the rows of a matrix are repeated.
const TILES: u64 = 16;

/// Returns a state of about `bytes` bytes, ascending by name. Its layers are made from those of one file, with repeated
/// rows. Values, and the changes from step to step, come from real training.
pub fn synthetic(bytes: u64, file: &Path) -> Vec<Owned> {
    let tensors = read_state(file);
    let tiles = |shape: &[u64]| if shape.len() > 1 { TILES } else { 1 };
    let layer_bytes: u64 = tensors.iter().map(|tensor| tensor.data.len() as u64 * tiles(&tensor.shape)).sum();
    let layers = (bytes + layer_bytes / 2) / layer_bytes;
    let mut state = Vec::new();
    for layer in 0..layers.max(1) {
        for tensor in &tensors {
            let mut shape = tensor.shape.clone();
            let tiles = tiles(&shape);
            if let Some(rows) = shape.first_mut() {
                *rows *= tiles;
            }
            let name = tensor.name.replace("h.2.", &format!("h.{layer}."));
            state.push(Owned { name, dtype: tensor.dtype, shape, data: tensor.data.repeat(tiles as usize) });
        }
    }
    state.sort_by(|a, b| a.name.cmp(&b.name));
    state
}

/// Returns all tensors of a file, ordered by name.
pub fn read_state(file: &Path) -> Vec<Owned> {
    let files = Files::open(&[file]).unwrap_or_else(|e| fail(&e.to_string()));
    let views = files.tensors().unwrap_or_else(|e| fail(&e.to_string()));
    let owned = |view: &TensorView<'_>| Owned {
        name: view.name().to_owned(),
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        data: view.data().to_vec(),
    };
    let mut state: Vec<Owned> = views.iter().map(owned).collect();
    state.sort_by(|a, b| a.name.cmp(&b.name));
    state
}

pub fn bytes_of(state: &[Owned]) -> u64 {
    state.iter().map(|tensor| tensor.data.len() as u64).sum()
}
