//! The store is deleted, moved, or loses objects while a job runs: a new process can still load every durable step.

use std::path::Path;

use tensorcask::{Latest, Policy};
use tensorcask_engine::{Engine, EngineOptions, Until};

use super::host::*;

/// Saves a step, waits until it is durable, and loads it through a new store.
fn save_durably(host: &Host, engine: &mut Engine, step: u64) {
    save(engine, step);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached, "step {step}: {}", host.agent_log());
    check_stored(&host.store(), step, SMALL);
    assert_eq!(host.store().snapshot(Latest).unwrap().step(), step);
}

fn first_object(folder: &Path) -> std::path::PathBuf {
    let mut found: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found.swap_remove(0)
}

#[test]
fn a_store_that_disappears_during_a_job_is_filled_again() {
    for policy in [Policy::Consecutive, Policy::Adaptive] {
        let host = Host::new();
        let mut engine = Engine::start(EngineOptions { policy, ..host.options() }).unwrap();
        save_durably(&host, &mut engine, 1);
        save_durably(&host, &mut engine, 2);
        std::fs::remove_dir_all(host.store_path()).unwrap();
        save_durably(&host, &mut engine, 3);
        std::fs::rename(host.store_path(), host.stores.path().join("moved")).unwrap();
        save_durably(&host, &mut engine, 4);
        for (step, folder) in [(5, "casks"), (6, "directories"), (7, "snapshots")] {
            std::fs::remove_file(first_object(&host.store_path().join(folder))).unwrap();
            save_durably(&host, &mut engine, step);
        }
        std::fs::remove_file(host.store_path().join("store.json")).unwrap();
        save_durably(&host, &mut engine, 8);
        // The first store is moved back.
        std::fs::rename(host.store_path(), host.stores.path().join("second")).unwrap();
        std::fs::rename(host.stores.path().join("moved"), host.store_path()).unwrap();
        save_durably(&host, &mut engine, 9);
        engine.finish().unwrap();
        check_stored(&host.store(), 9, SMALL);
    }
}

/// The writer of a backup from before this start of the job is not another job.
#[test]
fn a_job_continues_with_an_older_copy_of_its_store() {
    let host = Host::new();
    let mut engine = host.engine();
    save_durably(&host, &mut engine, 1);
    engine.finish().unwrap();
    let backup = host.stores.path().join("backup");
    copy_folder(&host.store_path(), &backup);
    let mut engine = host.engine();
    save_durably(&host, &mut engine, 2);
    std::fs::remove_dir_all(host.store_path()).unwrap();
    std::fs::rename(&backup, host.store_path()).unwrap();
    save_durably(&host, &mut engine, 3);
    engine.finish().unwrap();
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to.join(entry.file_name())),
            false => _ = std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap(),
        }
    }
}
