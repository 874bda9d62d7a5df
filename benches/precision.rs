//! Measures every method of rounding optimizer state on the same real state, in one run: bits, errors, speed, and whole
//! states by profile.
//! `cargo bench --workspace --bench precision -- [--data DIR] [--json]`; speeds are of one core, in bytes of f32.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::little_endian_bytes, reason = "a benchmark")]

mod common;

use std::collections::BTreeMap;
use std::hint::black_box;

use common::{Arguments, fail, seconds};
use serde_json::json;
use tensorcask::blocking::Store;
use tensorcask::codec::{Chunk, Columns, EncodeCheck, Encoded, Objective, Partner, Registry, encode_chunk};
use tensorcask::interchange::safetensors::Files;
use tensorcask::precision::{BoundedSetting, RoundedChunk, Setting, round_chunk};
use tensorcask::{Metadata, Policy, Precision, RoundingReport, TensorView, WriterOptions};

const METHODS: [&str; 20] = [
    "lossless",
    "cluster:16:normal:linear",
    "cluster:16:normal:dynamic",
    "cluster:16:sample:linear",
    "cluster:16:sample:dynamic",
    "blockwise8",
    "kmeans:16",
    "kmeans:64",
    "kmeans:256",
    "kmeans:256:pruned=0:protected=0:absolute",
    "loguniform:4",
    "loguniform:8",
    "loguniform:16",
    "loguniform:32",
    "remainder:0",
    "remainder:4",
    "remainder:6",
    "remainder:8",
    "remainder:12",
    "remainder:16",
];

/// Result of a method for the tensors of a role.
#[derive(Default)]
struct Made {
    elements: u64,
    bytes: u64,
    delta_bytes: u64,
    rounding: RoundingReport,
    round: f64,
    encode: f64,
    decode: f64,
}

struct State {
    files: Files,
}

impl State {
    fn open(folder: &std::path::Path, step: u64) -> Option<Self> {
        let path = folder.join(format!("step-{step}.safetensors"));
        path.exists().then(|| Self { files: Files::open(&[path]).unwrap() })
    }

    fn tensors(&self) -> Vec<TensorView<'_>> {
        self.files.tensors().unwrap()
    }
}

/// Returns a tensor as one chunk, with its model weight as a partner.
fn chunk_of<'a>(view: &'a TensorView<'_>, partners: &'a [Partner<'a>]) -> Chunk<'a> {
    let count = view.shape().iter().product::<u64>();
    let row = if view.shape().len() > 1 { view.shape()[view.shape().len() - 1] } else { 0 };
    Chunk { role: view.role(), partners, row_elements: row, ..Chunk::new(view.dtype(), count, view.data()) }
}

fn size(encoded: &Encoded) -> u64 {
    encoded.columns.iter().map(|(_, column)| column.len() as u64).sum()
}

fn measure(setting: Setting, now: &[TensorView<'_>], base: Option<&[TensorView<'_>]>, keep: impl Fn(&TensorView<'_>) -> bool) -> Made {
    let registry = Registry::default();
    let mut made = Made::default();
    let bounded = BoundedSetting { setting, bound: None };
    for view in now.iter().filter(|view| keep(view)) {
        let model = now.iter().find(|other| other.role() == "model" && other.param() == view.param() && other.shape() == view.shape());
        let same = |base: &[TensorView<'_>]| base.iter().find(|other| other.name() == view.name()).map(|other| other.data().to_vec());
        let model = model.filter(|_| view.role() == "master");
        let partners: Vec<Partner<'_>> = model
            .iter()
            .map(|model| Partner { role: "model", dtype: model.dtype(), data: model.data(), base: None, gradient: None })
            .collect();
        let chunk = chunk_of(view, &partners);
        let RoundedChunk { data, encoded: own, rounding } = round_chunk(bounded, &chunk).unwrap();
        let rounded = Chunk { data: &data, ..chunk };
        let chosen = encode_chunk(&registry, Objective::SMALLEST, &rounded, EncodeCheck::Skip).unwrap();
        let lossless: u64 = chosen.columns.iter().map(|(_, column)| column.len() as u64).sum();
        let codec = match setting.codec() {
            Some(codec) => codec,
            None => registry.resolve(chosen.codec.as_ref().unwrap()).unwrap().clone(),
        };
        let least = |run: &mut dyn FnMut()| (0..5).map(|_| seconds(&mut *run).0).fold(f64::INFINITY, f64::min);
        made.round += least(&mut || drop(black_box(round_chunk(bounded, &chunk).unwrap())));
        // A codec that rounds does so while it encodes.
        let input = if setting.codec().is_some() { &chunk } else { &rounded };
        made.encode += least(&mut || drop(black_box(codec.encode(input).unwrap().into_bytes())));
        let columns = codec.encode(input).unwrap().into_bytes();
        let mut out = vec![0; data.len()];
        let &Chunk { dtype, element_count, .. } = &chunk;
        let input = Columns { dtype, element_count, columns: &columns, base: None, partners: &partners };
        made.decode += least(&mut || codec.decode(&input, &mut out).unwrap());
        assert!(out == *data);
        made.elements += chunk.element_count;
        // Counts the published form of other methods as published, and the smallest form of ours.
        made.bytes += own.map_or(lossless, |own| size(&own));
        if let Some(rounding) = rounding {
            made.rounding = made.rounding.and(rounding);
        }
        if let Some(before) = base.and_then(same) {
            let before_chunk = Chunk { data: &before, partners: &[], ..chunk };
            let before = round_chunk(bounded, &before_chunk).unwrap().data;
            let own = round_chunk(bounded, &Chunk { base: Some(&before), ..chunk }).unwrap().encoded.map(|own| size(&own));
            let delta =
                encode_chunk(&registry, Objective::SMALLEST, &Chunk { data: &data, base: Some(&before), ..chunk }, EncodeCheck::Skip)
                    .unwrap();
            let delta: u64 = delta.columns.iter().map(|(_, column)| column.len() as u64).sum();
            made.delta_bytes += own.map_or(delta, |own| own.min(delta));
        }
    }
    made
}

/// Returns the error of Adam's update with both moments rounded.
fn update_error(setting: Setting, now: &[TensorView<'_>], keep: impl Fn(&TensorView<'_>) -> bool) -> f64 {
    let floats = |bytes: &[u8]| -> Vec<f32> { bytes.chunks_exact(4).map(|unit| f32::from_le_bytes(unit.try_into().unwrap())).collect() };
    let rounded = |view: &TensorView<'_>| {
        let chunk = chunk_of(view, &[]);
        floats(&round_chunk(BoundedSetting { setting, bound: None }, &chunk).unwrap().data)
    };
    let mut error = 0.0;
    let mut size = 0.0;
    for second in now.iter().filter(|view| view.role() == "exp_avg_sq" && keep(view)) {
        let Some(first) = now.iter().find(|view| view.role() == "exp_avg" && view.param() == second.param()) else { continue };
        let update = |m: f32, v: f32| f64::from(m) / (f64::from(v).max(0.0).sqrt() + 1e-8);
        let exact = floats(first.data()).into_iter().zip(floats(second.data()));
        for ((m, v), (m2, v2)) in exact.zip(rounded(first).into_iter().zip(rounded(second))) {
            let before = update(m, v);
            let after = update(m2, v2);
            error += (after - before).powi(2);
            size += before.powi(2);
        }
    }
    if size > 0.0 { (error / size).sqrt() } else { 0.0 }
}

fn profile(precision: &Precision, states: &[(u64, &State)]) -> Vec<f64> {
    let name: String = precision.to_string().chars().filter(char::is_ascii_alphanumeric).collect();
    let store = Store::open(&format!("memory://precision-{name}")).unwrap();
    let options = WriterOptions {
        precision: precision.clone(),
        policy: Policy::OneShot,
        objective: Objective::SMALLEST.into(),
        ..WriterOptions::default()
    };
    let mut writer = store.writer_with(options).unwrap();
    let saves = states.iter().map(|(step, state)| {
        let saved = writer.save(*step, &state.tensors(), &[], &Metadata::default()).unwrap();
        14.0 * saved.stored_bytes as f64 / saved.tensor_bytes as f64
    });
    saves.collect()
}

fn main() {
    let arguments = Arguments::parse(&[]);
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
    let folder = arguments.data();
    let Some(now) = State::open(&folder, 1001) else { fail("no step-1001.safetensors in --data") };
    let base = State::open(&folder, 1000).unwrap_or_else(|| fail("no step-1000.safetensors in --data"));
    let later = State::open(&folder, 1010);
    let (tensors, before) = (now.tensors(), base.tensors());
    let is_embedding = |view: &TensorView<'_>| view.name().contains("wte") || view.name().contains("embed");
    let mut out = BTreeMap::new();
    println!(
        "| role | method | bits | as a delta, k = 1 | mean relative error | greatest | MSE | sign flips | round and measure | encode | decode |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for role in ["exp_avg", "exp_avg_sq", "master"] {
        for method in METHODS {
            let is_remainder = method.starts_with("remainder");
            if is_remainder != (role == "master") && method != "lossless" && !(role == "master" && method.starts_with("cluster")) {
                continue;
            }
            let made = measure(method.parse().unwrap(), &tensors, Some(&before), |view| view.role() == role);
            let bits = |bytes: u64| 8.0 * bytes as f64 / made.elements as f64;
            let speed = |seconds: f64| made.elements as f64 * 4.0 / seconds / 1e9;
            println!(
                "| {role} | {method} | {:.2} | {:.2} | {:.2e} | {:.2e} | {:.2e} | {} | {:.2} | {:.2} | {:.2} |",
                bits(made.bytes),
                bits(made.delta_bytes),
                made.rounding.mean_relative(),
                made.rounding.max_relative,
                made.rounding.mean_squared(),
                made.rounding.sign_flips,
                speed(made.round),
                speed(made.encode),
                speed(made.decode)
            );
            out.insert(format!("{role} {method}"), json!({"bits": bits(made.bytes), "mre": made.rounding.mean_relative()}));
        }
    }
    println!("\n| method on both moments | bits of m + v | update error | without the embedding |");
    println!("|---|---|---|---|");
    for method in METHODS.into_iter().filter(|method| !method.starts_with("remainder")) {
        let setting: Setting = method.parse().unwrap();
        let made = measure(setting, &tensors, None, |view| view.role() == "exp_avg" || view.role() == "exp_avg_sq");
        let all = update_error(setting, &tensors, |_| true);
        let rest = update_error(setting, &tensors, |view| !is_embedding(view));
        println!("| {method} | {:.2} | {all:.3e} | {rest:.3e} |", 16.0 * made.bytes as f64 / made.elements as f64);
        out.insert(format!("m+v {method}"), json!({"bits": 16.0 * made.bytes as f64 / made.elements as f64, "update": all}));
    }
    println!("\n| profile | full, bytes of 14 | k = 1 | k = 10 |");
    println!("|---|---|---|---|");
    for name in ["lossless", "near", "compact", "cluster"] {
        let words = if name == "cluster" {
            vec!["{exp_avg,exp_avg_sq,master}=cluster", "*=lossless", "master=cluster", "exp_avg=cluster", "exp_avg_sq=cluster"]
        } else {
            vec![name]
        };
        let mut states = vec![(1000, &base), (1001, &now)];
        states.extend(later.as_ref().map(|later| (1010, later)));
        let found = profile(&Precision::parse(words).unwrap(), &states);
        let cells: Vec<String> = found.iter().map(|bytes| format!("{bytes:.2}")).collect();
        println!("| {name} | {} |", cells.join(" | "));
        out.insert(format!("state {name}"), json!(found));
    }
    if arguments.json {
        println!("{}", serde_json::to_string(&out).unwrap());
    }
}
