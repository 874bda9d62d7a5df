//! Measures the cost of policies and base caches over a run: store, restore, memory. Writes the tables of
//! docs/src/benchmarks/policies.md.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;
#[path = "../tests/it/common/training.rs"]
mod training;

use common::{Arguments, Owned, Table, bytes_of, median, report, seconds, synthetic};
use serde_json::json;
use tensorcask::blocking::Store;
use tensorcask::{BaseKeeping, Dtype, Metadata, Policy, ReadRequest, Slice, StoreOptions, TensorView, WriterOptions};

fn main() {
    let arguments = Arguments::parse(&["mib", "steps", "folder"]);
    let folder = match arguments.text("folder") {
        Some(folder) => tempfile::tempdir_in(folder).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let bytes = (arguments.number("mib", 64.0) * 1048576.0) as u64;
    let steps = arguments.number("steps", 56.0) as u64;
    let file = |step: u64| arguments.data().join(format!("step-{step}.safetensors"));
    let start = synthetic(bytes, &file(1000));
    let total = bytes_of(&start);
    let gigabytes = total as f64 / 1e9;
    let mut nth = 0;
    let mut run = |options: WriterOptions| {
        nth += 1;
        let url = folder.path().join(format!("run-{nth}")).to_str().unwrap().to_owned();
        let result = train(&url, options, &start, steps);
        std::fs::remove_dir_all(&url).unwrap();
        result
    };

    let mut trainings = Table::new(
        "Policies over 16 steps of a simulated training, each saved: states of `tests/data` and what AdamW makes of them",
        &["bases", "save / state", "largest read / that of a base", "longest restore / that of a base"],
    );
    for policy in [Policy::Full, Policy::Intermittent { every: 8 }, Policy::Consecutive, Policy::Adaptive] {
        let found = save_training(policy, arguments.data().as_path(), bytes);
        let [save, read, time] = [found.save, found.read, found.time];
        trainings.row(
            &format!("`{policy}`"),
            vec![found.bases.to_string(), format!("{save:.3}"), format!("{read:.2}"), format!("{time:.2}")],
            json!({ "bases": found.bases, "stored_per_state": save, "read_per_base": read, "seconds_per_base": time }),
        );
    }

    let title = format!(
        "Policies: {steps} steps of a state of {gigabytes:.2} GB; every step flips the lowest bit of a twentieth of the elements (synthetic)"
    );
    let mut policies = Table::new(
        title,
        &["bases", "store / one state", "store / all states", "restore, s", "read / state", "kept base, GB per GB of state", "save, s"],
    );
    let all = [Policy::Full, Policy::OneShot, Policy::Consecutive, Policy::Intermittent { every: 8 }, Policy::Adaptive];
    for policy in all {
        let found = run(WriterOptions { policy, ..WriterOptions::default() });
        let [one, every, read, kept] = [
            found.stored as f64 / total as f64,
            found.stored as f64 / (total * steps) as f64,
            found.read as f64 / total as f64,
            found.kept as f64 / total as f64,
        ];
        policies.row(
            &format!("`{policy}`"),
            vec![
                found.bases.to_string(),
                format!("{one:.2}"),
                format!("{every:.3}"),
                format!("{:.3}", found.restore),
                format!("{read:.2}"),
                format!("{kept:.2}"),
                format!("{:.3}", found.save),
            ],
            json!({ "bases": found.bases, "stored_bytes": found.stored, "restore_seconds": found.restore, "bytes_read": found.read, "kept_bytes": found.kept, "save_seconds": found.save }),
        );
    }

    let mut bases = Table::new(
        format!("Where the base is kept: `intermittent:8`, a state of {gigabytes:.2} GB"),
        &["kept base, GB per GB of state", "save of a delta, s", "store / all states"],
    );
    let keepings = [
        ("memory", BaseKeeping::Memory),
        ("encoded", BaseKeeping::Encoded),
        ("disk", BaseKeeping::Disk(folder.path().join("bases"))),
        ("none", BaseKeeping::None),
    ];
    for (name, base_cache) in keepings {
        let found = run(WriterOptions { policy: Policy::Intermittent { every: 8 }, base_cache, ..WriterOptions::default() });
        let kept = found.kept as f64 / total as f64;
        let every = found.stored as f64 / (total * steps) as f64;
        bases.row(
            &format!("`{name}`"),
            vec![format!("{kept:.2}"), format!("{:.3}", found.save), format!("{every:.3}")],
            json!({ "kept_bytes": found.kept, "save_seconds": found.save, "stored_bytes": found.stored }),
        );
    }

    let mut ratios = Table::new(
        "Whole states k steps apart, as one base and one delta: stored bytes of the delta / state",
        &["delta", "base", "state, MB"],
    );
    for (label, from, to) in [
        ("k = 1, learning rate 5e-4", 1000, 1001),
        ("k = 10, learning rate 5e-4", 1000, 1010),
        ("k = 100, learning rate 5e-4", 1000, 1100),
        ("k = 1, learning rate 2e-6, weights only", 2400, 2401),
        ("k = 10, learning rate 2e-6", 2400, 2410),
    ] {
        if !file(from).exists() || !file(to).exists() {
            continue;
        }
        let later = synthetic(0, &file(to));
        // Keeps only the tensors that both files hold.
        let mut earlier = synthetic(0, &file(from));
        let before = earlier.len();
        earlier.retain(|tensor| later.iter().any(|other| other.name == tensor.name));
        let share = if earlier.len() == before { "" } else { ", tensors in both" };
        let later: Vec<Owned> = later.into_iter().filter(|tensor| earlier.iter().any(|other| other.name == tensor.name)).collect();
        let store = Store::open("memory://").unwrap();
        let mut writer = store.writer(Policy::OneShot).unwrap();
        let base = writer.save(0, &views(&earlier), &[], &Metadata::default()).unwrap();
        let delta = writer.save(1, &views(&later), &[], &Metadata::default()).unwrap();
        let of = |bytes: u64| bytes as f64 / bytes_of(&later) as f64;
        ratios.row(
            &format!("{label}{share}"),
            vec![
                format!("{:.3}", of(delta.stored_bytes)),
                format!("{:.3}", of(base.stored_bytes)),
                format!("{:.1}", bytes_of(&later) as f64 / 1e6),
            ],
            json!({ "delta_bytes": delta.stored_bytes, "base_bytes": base.stored_bytes, "state_bytes": bytes_of(&later) }),
        );
    }
    report("policies", &[trainings, policies, bases, ratios], arguments.json);
}

fn views(state: &[Owned]) -> Vec<TensorView<'_>> {
    state.iter().map(|tensor| TensorView::new(tensor.name.as_str(), tensor.dtype, &tensor.shape, &tensor.data).unwrap()).collect()
}

/// Costs of a policy in a training: of the average save as part of the state, and of the dearest restore in those of a base.
struct Costs {
    bases: usize,
    save: f64,
    read: f64,
    time: f64,
}

/// Saves 16 steps, one after the other, and restores each.
fn save_training(policy: Policy, data: &std::path::Path, bytes: u64) -> Costs {
    const LAYER_BYTES: u64 = 14 * (256 * 256 + 5 * 256);
    let mut training = training::Training::new(data, (bytes / LAYER_BYTES).max(1) as usize, 1);
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run").to_str().unwrap().to_owned();
    let open = || Store::with(StoreOptions { fsync: false, ..StoreOptions::default() }.open(&url).unwrap()).unwrap();
    let mut writer = open().writer(policy).unwrap();
    let mut stored = 0;
    let mut total = 0;
    let mut bases = Vec::new();
    let mut restores = Vec::new();
    for step in 0..16u64 {
        let state = training.state();
        let saved = writer.save(step, &training::views(&state), &[], &Metadata::default()).unwrap();
        (stored, total) = (stored + saved.stored_bytes, total + saved.tensor_bytes);
        if saved.parent.is_none() {
            bases.push(step as usize);
        }
        let mut times = Vec::new();
        let mut read = 0;
        for _ in 0..3 {
            let store = open();
            let snapshot = store.snapshot(step).unwrap();
            let mut buffers: Vec<Vec<u8>> = state.iter().map(|(.., data)| vec![0; data.len()]).collect();
            let items = state.iter().zip(&mut buffers).map(|((name, ..), out)| ReadRequest { name, slice: Slice::all(), out }).collect();
            times.push(seconds(|| store.block_on(snapshot.read_many_into(items)).unwrap()).0);
            assert!(state.iter().zip(&buffers).all(|((.., data), out)| data == out));
            read = store.inner().io().bytes_read;
        }
        restores.push((read as f64, median(times)));
        training.train();
    }
    let of_bases = |cost: fn(&(f64, f64)) -> f64| median(bases.iter().map(|&base| cost(&restores[base])).collect());
    let most = |cost: fn(&(f64, f64)) -> f64| restores.iter().map(cost).fold(0.0, f64::max) / of_bases(cost);
    Costs { bases: bases.len(), save: stored as f64 / total as f64, read: most(|found| found.0), time: most(|found| found.1) }
}

struct Found {
    bases: u64,
    stored: u64,
    restore: f64,
    read: u64,
    kept: u64,
    save: f64,
}

/// Trains for some steps. Each step flips the lowest bit of some elements, like small updates of rounded weights.
/// Half-way, the state is drawn anew, as after a jump.
fn train(url: &str, options: WriterOptions, start: &[Owned], steps: u64) -> Found {
    let open = || Store::with(StoreOptions { fsync: false, ..StoreOptions::default() }.open(url).unwrap()).unwrap();
    let mut state: Vec<Owned> =
        start.iter().map(|t| Owned { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone(), data: t.data.clone() }).collect();
    let store = open();
    let mut writer = store.writer_with(options).unwrap();
    let mut bases = 0;
    let mut stored = 0;
    let mut kept = 0;
    let mut saves = Vec::new();
    for step in 0..steps {
        perturb(&mut state, step, step == steps / 2);
        let (time, saved) = seconds(|| writer.save(step, &views(&state), &[], &Metadata::default()).unwrap());
        bases += u64::from(saved.parent.is_none());
        stored += saved.stored_bytes;
        // Measures deltas, if the policy makes any.
        if saved.parent.is_some() || bases == step + 1 {
            saves.push(time);
        }
        kept = kept.max(writer.base_cache_bytes());
    }
    drop(writer);
    let mut times = Vec::new();
    let mut read = 0;
    for _ in 0..3 {
        let store = open();
        let snapshot = store.snapshot(steps - 1).unwrap();
        let mut buffers: Vec<Vec<u8>> = state.iter().map(|tensor| vec![0; tensor.data.len()]).collect();
        let items = state
            .iter()
            .zip(&mut buffers)
            .map(|(tensor, buffer)| ReadRequest { name: &tensor.name, slice: Slice::all(), out: buffer })
            .collect();
        times.push(seconds(|| store.block_on(snapshot.read_many_into(items)).unwrap()).0);
        assert!(state.iter().zip(&buffers).all(|(tensor, buffer)| tensor.data == *buffer));
        read = store.inner().io().bytes_read;
    }
    Found { bases, stored, restore: median(times), read, kept, save: median(saves) }
}

fn perturb(state: &mut [Owned], step: u64, jump: bool) {
    for tensor in state {
        let width = if tensor.dtype == Dtype::F32 { 4 } else { 2 };
        let (first, stride) = if jump { (0, 1) } else { ((step * 7 % 20) as usize, 20) };
        let elements = tensor.data.len() / width;
        for element in (first..elements).step_by(stride) {
            let at = element * width;
            tensor.data[at] = if jump { tensor.data[at].wrapping_mul(167).wrapping_add(element as u8) } else { tensor.data[at] ^ 1 };
        }
    }
}
