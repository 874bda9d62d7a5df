//! `save` killed with SIGKILL at any moment: no acknowledged step is lost, none is half there.
#![cfg(unix)]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tensorcask::Slice;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::VerifyOptions;

/// Number of kills in the quick tier, enough for every moment. `TENSORCASK_THOROUGH=1` makes fifty.
const QUICK_KILLS: u64 = 24;
/// Files that a save adds, about: two log entries, two casks, a manifest, and their temporary files.
const MOMENTS: usize = 8;

fn data(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(file)
}

fn save(store: &Path, step: u64, file: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
    command.arg("save").arg(store).args(["--step", &step.to_string(), "--policy", "consecutive"]).arg(file);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Files below a folder. One that goes away meanwhile counts or does not.
fn count_files(folder: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries.flatten().map(|entry| if entry.path().is_dir() { count_files(&entry.path()) } else { 1 }).sum()
}

#[test]
fn kills_lose_no_acknowledged_step() {
    let kills = if std::env::var_os("TENSORCASK_THOROUGH").is_some() { 50 } else { QUICK_KILLS };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("run");
    let files = [data("step-1000.safetensors"), data("step-1001.safetensors"), data("step-1010.safetensors")];
    let inputs: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();

    assert!(save(&root, 0, &files[0]).status().unwrap().success());
    let mut acknowledged = vec![0u64];
    let mut killed = 0;
    let mut step = 0;
    // Saves that finish before their kill do not count; they are bounded all the same.
    while killed < kills && step < 4 * kills {
        step += 1;
        let before = count_files(&root);
        let mut child = save(&root, step, &files[step as usize % 3]).spawn().unwrap();
        // Every third save dies at once; the others, when the store has gained so many files, which falls all over a
        // save.
        let moment = if step % 3 == 0 { 0 } else { step as usize % MOMENTS };
        while count_files(&root) < before + moment && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let _ = child.kill();
        if child.wait().unwrap().success() {
            acknowledged.push(step);
        } else {
            killed += 1;
        }
        let store = Store::open(root.to_str().unwrap()).unwrap();
        let live: Vec<u64> = store.snapshots().unwrap().iter().map(|info| info.record.step).collect();
        for known in &acknowledged {
            assert!(live.contains(known), "step {known} was acknowledged and is gone after kill {killed}");
        }
        // A kill between commit and answer leaves a step that nobody was told of: it must be whole.
        if let Some(&last) = live.last() {
            let snapshot = store.snapshot(last).unwrap();
            let input = safetensors::SafeTensors::deserialize(&inputs[last as usize % 3]).unwrap();
            for (name, view) in input.iter() {
                assert_eq!(snapshot.read(name, &Slice::all()).unwrap().data, view.data(), "step {last}, {name}");
            }
        }
    }
    assert!(killed >= kills, "only {killed} saves were killed in {step}");
    let store = Store::open(root.to_str().unwrap()).unwrap();
    let report = maintain::verify(&store, &VerifyOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}
