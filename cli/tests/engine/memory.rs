//! The memory of an arena: taken in the background, again after a crash, and used again by a later start of the job.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tensorcask::{ErrorKind, Latest};
use tensorcask_engine::{BackPressure, Engine, EngineOptions, Source, Until, agent_status};

use super::faults::{mounted, unmount};
use super::host::*;

/// The only arena in an engine's folder.
fn arena_of(engine_folder: &Path) -> PathBuf {
    let entries = std::fs::read_dir(engine_folder).unwrap().map(|entry| entry.unwrap().path().join("rank-0/arena"));
    entries.into_iter().find(|path| path.is_file()).expect("no arena")
}

/// Size of the only arena, and the part that memory was taken for.
fn arena_bytes(engine_folder: &Path) -> (u64, u64) {
    let meta = std::fs::metadata(arena_of(engine_folder)).unwrap();
    (meta.len(), meta.blocks() * 512)
}

/// Waits until all memory of the arena is present.
pub(crate) fn arena_is_present(engine_folder: &Path) {
    until("all slots are present", || matches!(arena_bytes(engine_folder), (size, present) if size == present));
}

/// The next agent finds no arena, because there was no memory for a larger one, and still knows which save is durable.
#[test]
fn a_run_without_an_arena_finishes_with_the_next_agent() {
    let Some(folder) = mounted("20m") else { return };
    let host = Host::new();
    let engine_folder = folder.path().join("e");
    let mut engine = Engine::start(EngineOptions { folder: Some(engine_folder.clone()), ..host.options() }).unwrap();
    State::new(1, SMALL).save(&mut engine).unwrap();
    let first = engine.wait(Until::Durable, LONG);
    let filler = folder.path().join("filler");
    std::fs::write(&filler, vec![1; 10 << 20]).unwrap();
    let refused = State::new(2, 16 << 20).save(&mut engine);
    std::fs::remove_file(&filler).unwrap();
    let has_arena = std::fs::read_dir(&engine_folder).unwrap().any(|entry| entry.unwrap().path().join("rank-0/arena").exists());
    let pid: i32 = std::fs::read_to_string(engine_folder.join("agent.lock")).unwrap().trim().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
    let after = engine.wait(Until::Durable, LONG);
    let finished = engine.finish();
    unmount(&folder);
    assert!(first.unwrap().reached && refused.unwrap_err().kind() == ErrorKind::Storage && !has_arena);
    assert!(after.unwrap().reached && finished.is_ok());
}

/// Leaves the arena as a trainer does that dies before any slot is present.
fn lose_memory(engine_folder: &Path) {
    let arena = std::fs::OpenOptions::new().write(true).open(arena_of(engine_folder)).unwrap();
    let bytes = arena.metadata().unwrap().len();
    // Page 0 and the pages of two slots.
    arena.set_len(3 * 4096).unwrap();
    arena.set_len(bytes).unwrap();
    assert_eq!(arena_bytes(engine_folder), (bytes, 3 * 4096));
}

#[test]
fn a_prepared_arena_is_present_before_the_first_save() {
    let host = Host::new();
    let mut engine = host.engine();
    engine.prepare(SMALL as u64 * 2).unwrap();
    arena_is_present(&host.engine_folder());
    let prepared = std::fs::metadata(arena_of(&host.engine_folder())).unwrap().ino();
    save(&mut engine, 1);
    save(&mut engine, 2);
    engine.prepare(SMALL as u64 * 100).unwrap();
    assert_eq!(std::fs::metadata(arena_of(&host.engine_folder())).unwrap().ino(), prepared, "the first save uses the prepared arena");
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (2, &Source::Slot));
    check(&found, SMALL);
}

#[test]
fn a_state_larger_than_prepared_gets_a_larger_arena() {
    let host = Host::new();
    let mut engine = host.engine();
    engine.prepare(1000).unwrap();
    let state = State::new(1, 4 << 20);
    state.save(&mut engine).unwrap();
    check(&engine.restore(Latest).unwrap(), 4 << 20);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    check_stored(&host.store(), 1, 4 << 20);
}

#[test]
fn the_first_save_is_followed_by_memory_for_all_slots() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { slots: 4, ..host.options() }).unwrap();
    save(&mut engine, 1);
    arena_is_present(&host.engine_folder());
    check(&engine.restore(Latest).unwrap(), SMALL);
}

#[test]
fn a_trainer_that_dies_before_its_memory_is_present_does_no_harm() {
    let host = Host::new();
    let mut engine = host.engine();
    engine.prepare(SMALL as u64).unwrap();
    drop(engine);
    lose_memory(&host.engine_folder());
    let mut engine = host.engine();
    save(&mut engine, 1);
    check(&engine.restore(Latest).unwrap(), SMALL);
    arena_is_present(&host.engine_folder());
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    check_stored(&host.store(), 2, SMALL);
}

/// Something else takes the memory between the creation of the arena and its use.
#[test]
fn a_save_without_memory_for_its_slot_fails_and_a_later_one_succeeds() {
    let Some(folder) = mounted("20m") else { return };
    let host = Host::new();
    let engine_folder = folder.path().join("e");
    let options = EngineOptions { folder: Some(engine_folder.clone()), ..host.options() };
    let mut engine = Engine::start(options.clone()).unwrap();
    engine.prepare(4 << 20).unwrap();
    drop(engine);
    lose_memory(&engine_folder);
    let filler = folder.path().join("filler");
    std::fs::write(&filler, vec![1; 18 << 20]).unwrap();
    let mut engine = Engine::start(options).unwrap();
    let state = State::new(1, 4 << 20);
    let error = state.save(&mut engine).unwrap_err();
    std::fs::remove_file(&filler).unwrap();
    let saved = state.save(&mut engine).map(|_| engine.restore(Latest).unwrap().source);
    drop(engine);
    unmount(&folder);
    assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
    assert!(error.message().contains("--shm-size"), "{error}");
    assert_eq!(saved.unwrap(), Source::Slot);
}

#[test]
fn one_slot_is_enough_and_takes_the_least_memory() {
    let host = Host::new();
    let least = EngineOptions { slots: 1, keep: 1, keep_base_decoded: false, ..host.options() };
    let mut engine = Engine::start(least.clone()).unwrap();
    for step in 1..=3 {
        // Waits until the agent has encoded the step before.
        save(&mut engine, step);
        let found = engine.restore(Latest).unwrap();
        assert_eq!((found.step, &found.source), (step, &Source::Slot));
        check(&found, SMALL);
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let status = agent_status(Some(&host.engine_folder())).unwrap();
    let run = &status.runs[0];
    let rank = &status.runs[0].ranks[0];
    assert_eq!((rank.slots.len(), rank.arena_present_bytes), (1, rank.arena_bytes));
    assert_eq!(status.host_memory_bytes(), rank.arena_bytes + run.memory_bytes + status.private_bytes);
    assert!(status.private_bytes > 0 && status.private_bytes < status.resident_bytes);
    drop(engine);
    let options = EngineOptions { back_pressure: BackPressure::DropOldestUncommitted, ..least };
    assert_eq!(Engine::start(options).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// The job ran on another host and comes back: the states in the arena are out of date, and its memory is not.
#[test]
fn an_arena_with_out_of_date_states_is_used_again_without_them() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let arena = std::fs::metadata(arena_of(&host.engine_folder())).unwrap().ino();
    drop(engine);
    save_elsewhere(&host, 3);
    let mut engine = host.engine();
    assert!(!engine.loadable().unwrap().iter().any(|found| found.source == Source::Slot), "{:?}", engine.loadable());
    let found = engine.restore(Latest).unwrap();
    assert!(matches!((found.step, &found.source), (3, Source::Tier(0, _))), "{found:?}");
    drop(found);
    save(&mut engine, 4);
    assert_eq!(std::fs::metadata(arena_of(&host.engine_folder())).unwrap().ino(), arena);
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (4, &Source::Slot));
    check(&found, SMALL);
    drop(found);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
}

/// An arena belongs to its run: another job in the same folder makes its own.
#[test]
fn another_run_has_another_arena() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { folder: Some(host.engine_folder()), ..elsewhere.options() }).unwrap();
    assert_eq!(other.restore(Latest).unwrap_err().kind(), ErrorKind::NotFound);
    save(&mut other, 7);
    assert_eq!(other.restore(Latest).unwrap().step, 7);
    drop(other);
    assert_eq!(host.engine().restore(Latest).unwrap().step, 1);
}

/// Such a file system says that it has 0 blocks.
#[test]
fn a_file_system_without_a_limit_has_room_for_snapshots() {
    let Some(folder) = mounted("0") else { return };
    let host = Host::new();
    let engine_folder = folder.path().join("e");
    let mut engine = Engine::start(EngineOptions { folder: Some(engine_folder.clone()), ..host.options() }).unwrap();
    State::new(1, SMALL).save(&mut engine).unwrap();
    let waited = engine.wait(Until::Durable, LONG);
    let run = agent_status(Some(&engine_folder)).map(|mut status| status.runs.remove(0));
    let finished = engine.finish();
    unmount(&folder);
    assert!(waited.unwrap().reached && finished.is_ok());
    let run = run.unwrap();
    assert_eq!((run.memory_steps.as_slice(), run.problem.as_deref()), (&[1][..], None));
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total_bytes = total.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
    assert_eq!(run.memory_cap_bytes, total_bytes / 2);
}
