//! Measures saving and restoring a large state through the command line, and loading it into memory: time, CPU time and
//! memory, next to plain copies.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Arguments, Memcpy, Owned, Table, alternate, bytes_of, fail, median, read_state, report, seconds, synthetic};
use serde_json::{Value, json};
use tensorcask::blocking::Store;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{ReadRequest, Slice, StoreOptions, TensorView};

/// Argument that turns this program into a launcher of another program.
const LAUNCH: &str = "launch";

/// Argument that turns this program into one that loads a step of a store into its memory.
const LOAD: &str = "load";

/// The allocator of the command line and of the Python package.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Memory beyond the size of the state that a save or restore may take.
const TARGET_BYTES: u64 = 512 << 20;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some(LAUNCH) => return launch(),
        Some(LOAD) => return load(),
        _ => {}
    }
    let arguments = Arguments::parse(&["gib", "rounds", "folder", "later", "whole"]);
    let program = program();
    let bytes = (arguments.number("gib", 1.0) * (1u64 << 30) as f64) as u64;
    let rounds = arguments.number("rounds", 3.0) as usize;
    // Steps of the base and of the delta. Their files are repeated up to the size, or taken as they are.
    let whole = arguments.text("whole").map(|steps| steps.split_once(',').unwrap_or_else(|| fail("--whole takes two steps: 30,31")));
    let later = (arguments.number("later", 1001.0) as u64).to_string();
    let (base, later) = whole.map_or(("1000".to_owned(), later), |(base, later)| (base.to_owned(), later.to_owned()));
    let read = |step: &str| {
        let file = arguments.data().join(format!("step-{step}.safetensors"));
        if whole.is_some() { read_state(&file) } else { synthetic(bytes, &file) }
    };
    let folder = match arguments.text("folder") {
        Some(folder) => tempfile::tempdir_in(folder).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let path = |name: &str| folder.path().join(name);

    let second = read(&later);
    write_safetensors(&second, &path("later.safetensors"), false);
    drop(second);
    let first = read(&base);
    let size = bytes_of(&first);
    let mut memcpy = Memcpy::new(size as usize);
    let mut children: Vec<Vec<Usage>> = vec![Vec::new(); 5];
    let mut stored = [0; 2];
    let mut times = Vec::new();
    for _ in 0..rounds {
        let others = alternate(
            1,
            &mut [
                ("memcpy", &mut || median((0..3).map(|_| memcpy.seconds(first.iter().map(|tensor| tensor.data.as_slice()))).collect())),
                ("safetensors", &mut || quiet(size, || write_safetensors(&first, &path("base.safetensors"), true))),
                ("copy", &mut || quiet(size, || copy(&path("base.safetensors"), &path("copy")))),
            ],
        );
        times.push(others);
        std::fs::remove_file(path("copy")).unwrap();
        let store = path("store");
        let run = |words: &[&str]| {
            settle(size);
            run(&program, words, &store)
        };
        let input = |name: &str| path(&format!("{name}.safetensors")).to_str().unwrap().to_owned();
        let output = path("restored").to_str().unwrap().to_owned();
        for (nth, (step, name)) in [(base.as_str(), "base"), (later.as_str(), "later")].into_iter().enumerate() {
            let (usage, said) = run(&["save", "STORE", "--json", "--policy", "consecutive", "--step", step, &input(name)]);
            children[nth].push(usage);
            let said: Value = serde_json::from_slice(&said).unwrap();
            stored[nth] = said["stored_bytes"].as_u64().unwrap();
            assert_eq!(said["kind"], ["base", "delta"][nth]);
        }
        children[2].push(run(&["restore", "STORE", "--step", &later, "--output", &output]).0);
        let restored = Files::open(&[path("restored")]).unwrap();
        let tensors = restored.tensors().unwrap();
        assert_same(&path("later.safetensors"), tensors.iter().map(|tensor| (tensor.name(), tensor.data())).collect());
        for (nth, step, name) in [(3, base.as_str(), "base.safetensors"), (4, later.as_str(), "later.safetensors")] {
            settle(size);
            children[nth].push(run_self(&[LOAD, store.to_str().unwrap(), step, path(name).to_str().unwrap()]).0);
        }
        std::fs::remove_dir_all(&store).unwrap();
        std::fs::remove_file(path("restored")).unwrap();
    }
    let column = |nth: usize| median(times.iter().map(|round| round[nth]).collect());
    let memcpy = column(0);

    let title = format!(
        "A state of {:.2} GB in {} tensors (bf16 model, f32 master and moments), median of {rounds}. Peak memory is the resident set \
         of the process, mapped pages of the input included; the target is at most the state and {} MiB",
        size as f64 / 1e9,
        first.len(),
        TARGET_BYTES >> 20
    );
    let mut table =
        Table::new(title, &["s", "GB/s", "x memcpy", "CPU s, user mode", "x memcpy", "stored / state", "peak, MiB", "peak - state, MiB"]);
    let mut row = |name: &str, seconds: f64, user: Option<f64>, stored: Option<u64>, peak: Option<u64>| {
        let mebi = |bytes: f64| format!("{:.0}", bytes / (1 << 20) as f64);
        let optional = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        let beyond = peak.map(|peak| peak as f64 - size as f64);
        let cells = vec![
            format!("{seconds:.2}"),
            format!("{:.2}", size as f64 / seconds / 1e9),
            format!("{:.1}", seconds / memcpy),
            optional(user.map(|user| format!("{user:.2}"))),
            optional(user.map(|user| format!("{:.1}", user / memcpy))),
            optional(stored.map(|stored| format!("{:.3}", stored as f64 / size as f64))),
            optional(peak.map(|peak| mebi(peak as f64))),
            optional(beyond.map(mebi)),
        ];
        let value = json!({
            "seconds": seconds, "times_memcpy": seconds / memcpy, "user_seconds": user, "stored_bytes": stored, "peak_bytes": peak, "state_bytes": size,
            "within_target": beyond.map(|beyond| beyond <= TARGET_BYTES as f64),
        });
        table.row(name, cells, value);
    };
    row("memcpy", memcpy, None, None, None);
    row("`safetensors::serialize_to_file`, fsync (in process)", column(1), None, Some(size), None);
    row("copy of a file, fsync", column(2), None, Some(size), None);
    let delta = format!("`tensorcask save`, delta of step {later} on step {base}");
    let rows = [
        "`tensorcask save`, base",
        &delta,
        "`tensorcask restore` of the delta",
        "load of the base into memory",
        "load of the delta into memory",
    ];
    for (nth, name) in rows.into_iter().enumerate() {
        let wall = median(children[nth].iter().map(|usage| usage.seconds).collect());
        // The peak of a load includes the size of this process, which started it.
        let peak = if nth < 3 { children[nth].iter().map(|usage| usage.peak_bytes).max() } else { None };
        let user = median(children[nth].iter().map(|usage| usage.user_seconds).collect());
        row(name, wall, Some(user), stored.get(nth).copied(), peak);
    }
    report("save_restore", &[table], arguments.json);
}

/// Returns the command-line program of the same build.
fn program() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let found = here.ancestors().skip(1).take(2).map(|folder| folder.join("tensorcask")).find(|path| path.is_file());
    found.unwrap_or_else(|| fail("the command line is not built: cargo build --release --workspace"))
}

/// Returns the seconds of `run`, measured after the machine has settled.
fn quiet<T>(state_bytes: u64, run: impl FnOnce() -> T) -> f64 {
    settle(state_bytes);
    seconds(run).0
}

/// Waits until all earlier writes have reached the disk, and touches as much free memory as a candidate may take. A
/// virtual machine gets unused memory from its host page by page, which would take longer than the measured work.
fn settle(state_bytes: u64) {
    assert!(Command::new("sync").status().unwrap().success());
    std::hint::black_box(vec![1u8; 3 * state_bytes as usize]);
}

/// Resources that a child used.
#[derive(Debug, Clone, Copy)]
struct Usage {
    seconds: f64,
    /// CPU time in user mode, of all threads.
    user_seconds: f64,
    peak_bytes: u64,
}

/// Runs the command line on a store, whose path replaces `STORE`. Returns the stdout, too.
fn run(program: &Path, words: &[&str], store: &Path) -> (Usage, Vec<u8>) {
    let store = store.to_str().unwrap();
    let words = words.iter().map(|&word| if word == "STORE" { store } else { word });
    run_self(&[LAUNCH, program.to_str().unwrap()].into_iter().chain(words).collect::<Vec<_>>())
}

/// Runs this program, which prints what it used in its last line. Returns all before that line, too.
fn run_self(words: &[&str]) -> (Usage, Vec<u8>) {
    let output = Command::new(std::env::current_exe().unwrap()).args(words).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{words:?} failed");
    let text = String::from_utf8(output.stdout).unwrap();
    let (said, usage) = text.trim_end().rsplit_once('\n').unwrap();
    let mut usage = usage.split(' ');
    let mut next = || usage.next().unwrap();
    let seconds = next().parse().unwrap();
    let user_seconds = next().parse().unwrap();
    (Usage { seconds, user_seconds, peak_bytes: next().parse().unwrap() }, said.as_bytes().to_vec())
}

/// Runs another program and prints seconds, seconds in user mode, and peak bytes in a last line. Runs in a process of its own: the peak that
/// the system reports for a child begins with the size of the process that started it.
#[allow(clippy::zombie_processes, reason = "`wait` waits for it")]
fn launch() {
    let mut words = std::env::args().skip(2);
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    let (seconds, (user_seconds, peak_bytes)) = seconds(|| wait(&command.spawn().unwrap()));
    println!("\n{seconds} {user_seconds} {peak_bytes}");
}

/// Waits for a child that must succeed. Returns its seconds in user mode and the peak of its resident set.
#[allow(unsafe_code, reason = "the standard library does not tell what a child used")]
fn wait(child: &std::process::Child) -> (f64, u64) {
    let mut status = 0;
    // SAFETY: `rusage` consists of plain integers, for which zero is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers point to locals that outlive the call, and nobody has waited for the child before.
    let waited = unsafe { libc::wait4(child.id() as libc::pid_t, &raw mut status, 0, &raw mut usage) };
    assert_eq!((waited, status), (child.id() as libc::pid_t, 0), "the command line failed");
    figures(&usage)
}

/// Loads a step of a store into memory that was touched before. Prints the resources used, in the format of [`launch`], and
/// compares the tensors with a file.
fn load() {
    let mut words = std::env::args().skip(2);
    let mut next = || words.next().unwrap();
    let store = Store::with(StoreOptions::default().open(&next()).unwrap()).unwrap();
    let snapshot = store.snapshot(next().parse::<u64>().unwrap()).unwrap();
    let mut buffers: Vec<(String, Vec<u8>)> = snapshot
        .tensors()
        .into_iter()
        .map(|tensor| (tensor.name, vec![1; tensor.dtype.byte_count(tensor.shape.iter().product()).unwrap() as usize]))
        .collect();
    let requests = buffers.iter_mut().map(|(name, out)| ReadRequest { name, slice: Slice::all(), out }).collect();
    let snapshot: &tensorcask::Snapshot = &snapshot;
    let before = usage_of_self().0;
    let (seconds, _) = seconds(|| store.block_on(async { snapshot.read_many_into(requests).await.unwrap() }));
    let (user_seconds, peak_bytes) = usage_of_self();
    println!("\n{seconds} {} {peak_bytes}", user_seconds - before);
    assert_same(Path::new(&next()), buffers.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect());
}

/// Seconds in user mode and the peak of the resident set of this process.
#[allow(unsafe_code, reason = "the standard library does not tell what a process used")]
fn usage_of_self() -> (f64, u64) {
    // SAFETY: `rusage` consists of plain integers, for which zero is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer points to a local that outlives the call.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) }, 0);
    figures(&usage)
}

/// Seconds in user mode and the peak of the resident set.
fn figures(usage: &libc::rusage) -> (f64, u64) {
    // Linux counts kibibytes, other systems count bytes.
    let peak_bytes = usage.ru_maxrss as u64 * if cfg!(target_os = "linux") { 1024 } else { 1 };
    (usage.ru_utime.tv_sec as f64 + usage.ru_utime.tv_usec as f64 / 1e6, peak_bytes)
}

fn write_safetensors(state: &[Owned], path: &Path, fsync: bool) {
    let views = state.iter().map(|tensor| {
        let dtype = match tensor.dtype {
            tensorcask::Dtype::Bf16 => safetensors::Dtype::BF16,
            tensorcask::Dtype::F32 => safetensors::Dtype::F32,
            other => fail(&format!("{other} in the data")),
        };
        let shape = tensor.shape.iter().map(|&extent| extent as usize).collect();
        (tensor.name.as_str(), safetensors::tensor::TensorView::new(dtype, shape, &tensor.data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
    if fsync {
        File::open(path).unwrap().sync_all().unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    let mut from = File::open(from).unwrap();
    let mut to = File::create(to).unwrap();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = from.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        to.write_all(&buffer[..count]).unwrap();
    }
    to.sync_all().unwrap();
}

/// Fails if the tensors, names and bytes, are not those of a file.
fn assert_same(wanted: &Path, mut found: Vec<(&str, &[u8])>) {
    let files = Files::open(&[wanted]).unwrap();
    let mut wanted = files.tensors().unwrap();
    wanted.sort_by(|a: &TensorView<'_>, b| a.name().cmp(b.name()));
    found.sort_by_key(|(name, _)| *name);
    assert_eq!(wanted.len(), found.len());
    for (wanted, found) in wanted.iter().zip(found) {
        assert!((wanted.name(), wanted.data()) == found, "{} came back otherwise", wanted.name());
    }
}
