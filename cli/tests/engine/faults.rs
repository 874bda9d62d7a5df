//! Faults: unavailable stores, full memory, two trainers of one run, damaged memory.

use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use tensorcask::blocking::maintain;
use tensorcask::maintain::GcOptions;
use tensorcask::{ErrorKind, Latest, Policy};
use tensorcask_engine::{BackPressure, Encode, Engine, EngineOptions, Source, Until};

use super::host::*;
use super::memory::arena_is_present;

#[test]
fn saves_wait_in_memory_while_the_store_is_unavailable() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    for step in 2..=6 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Encoded, LONG).unwrap().reached, "step {step}");
    }
    until("the trainer hears of the problem", || {
        let waited = engine.wait(Until::Durable, Duration::from_millis(300)).unwrap();
        assert!(!waited.reached, "{waited:?}");
        waited.problem.is_some()
    });
    // Memory keeps every snapshot that the store lacks.
    until("memory has them all", || host.status().runs[0].memory_steps.ends_with(&[2, 3, 4, 5, 6]));
    // If trainer and agent die now, their successors find everything in memory.
    drop(engine);
    host.signal_agent(Signal::KILL);
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, found.source.clone()), (6, Source::Slot));
    check(&found, SMALL);
    drop(found);
    save(&mut engine, 7);
    away.back();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4, 5, 6, 7]);
    save(&mut engine, 8);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    until("old snapshots are removed again", || host.status().runs[0].memory_steps.len() <= 3);
}

/// The arena stays full, because the agent is stopped.
#[test]
fn a_full_arena_makes_saves_skip_drop_or_wait_as_the_policy_says() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { back_pressure: BackPressure::Skip, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    assert!(save(&mut engine, 2).generation.is_some() && save(&mut engine, 3).generation.is_some());
    let skipped = save(&mut engine, 4);
    assert_eq!((skipped.generation, skipped.dropped), (None, None));
    host.signal_agent(Signal::CONT);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    drop(engine);

    let mut engine = Engine::start(EngineOptions { back_pressure: BackPressure::DropOldestUncommitted, ..host.options() }).unwrap();
    host.signal_agent(Signal::STOP);
    assert_eq!((save(&mut engine, 5).dropped, save(&mut engine, 6).dropped), (None, None));
    assert_eq!(save(&mut engine, 7).dropped, Some(5));
    assert_eq!(engine.restore(Latest).unwrap().step, 7);
    host.signal_agent(Signal::CONT);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 6, 7]);
    drop(engine);

    let mut engine = host.engine();
    host.signal_agent(Signal::STOP);
    save(&mut engine, 8);
    save(&mut engine, 9);
    // The agent continues once the save waits: the engine calls this only while it waits.
    let (agent, has_waited) = (host.agent().unwrap(), Arc::new(AtomicBool::new(false)));
    let waits = has_waited.clone();
    engine.interrupt_with(move || {
        if !waits.swap(true, Ordering::Relaxed) {
            rustix::process::kill_process(agent, Signal::CONT).unwrap();
        }
        Ok(())
    });
    assert!(save(&mut engine, 10).generation.is_some() && has_waited.load(Ordering::Relaxed));
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 6, 7, 8, 9, 10]);
}

#[test]
fn states_wait_in_the_arena_while_memory_is_at_its_cap() {
    let host = Host::new();
    let options = EngineOptions { memory_cap: Some(300 << 10), back_pressure: BackPressure::Skip, policy: Policy::Full, ..host.options() };
    let mut engine = Engine::start(options).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    let (mut step, mut saved) = (1, vec![1]);
    let mut save_next = |engine: &mut Engine| {
        step += 1;
        let in_arena = save(engine, step).generation.is_some();
        saved.extend(in_arena.then_some(step));
        in_arena
    };
    until("the agent reports the cap", || {
        save_next(&mut engine);
        host.status().runs[0].problem.as_ref().is_some_and(|problem| problem.contains("over the cap"))
    });
    until("a save is skipped", || !save_next(&mut engine));
    let run = host.status().runs.remove(0);
    // One more snapshot may be under way when memory reaches the cap.
    assert!(run.memory_bytes < (300 << 10) + (200 << 10), "{run:?}");
    away.back();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), saved);
}

/// A state becomes larger than the arena, and then its metadata does.
#[test]
fn an_arena_grows_with_the_state() {
    let host = Host::new();
    let mut engine = host.engine();
    for (step, bytes) in [(1, SMALL), (2, 4 * SMALL), (3, SMALL)] {
        State::new(step, bytes).save(&mut engine).unwrap();
    }
    let mut metadata = State::new(4, SMALL).metadata();
    metadata.user.insert("notes".into(), "x".repeat(8 << 20).into());
    let state = State::new(4, 4 * SMALL);
    engine.save(4, &state.tensors(), &state.blobs(), &metadata).unwrap();
    assert_eq!(engine.restore(Latest).unwrap().metadata.user, metadata.user);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
    check_stored(&host.store(), 2, 4 * SMALL);
}

/// Each cap is smaller than a base and a delta.
#[test]
fn a_memory_cap_smaller_than_a_chain_stops_no_save() {
    for cap in [1, 100 << 10, 220 << 10] {
        let host = Host::new();
        let mut engine = Engine::start(EngineOptions { memory_cap: Some(cap), ..host.options() }).unwrap();
        for step in 1..=8 {
            save(&mut engine, step);
        }
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached, "cap {cap}");
        assert_eq!(host.stored_steps(), (1..=8).collect::<Vec<_>>());
        check_stored(&host.store(), 8, SMALL);
        let run = host.status().runs.remove(0);
        // A snapshot that exceeds the cap is kept alone.
        assert!(run.memory_bytes < cap + (200 << 10), "{run:?}");
    }
}

/// Mounts a tmpfs of this size; `None` without the permission to mount.
pub(crate) fn mounted(size: &str) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(folder.path()).status();
    if mounted.is_ok_and(|status| status.success()) {
        return Some(folder);
    }
    eprintln!("NOT RUN: mounting a tmpfs needs root");
    None
}

pub(crate) fn unmount(folder: &tempfile::TempDir) {
    let agent: i32 = std::fs::read_to_string(folder.path().join("e/agent.lock")).unwrap().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(agent).unwrap(), Signal::KILL).unwrap();
    until("the folder is free", || Command::new("umount").arg(folder.path()).status().unwrap().success());
}

#[test]
fn too_little_shared_memory_is_an_error_that_names_the_needed_size() {
    let Some(folder) = mounted("3m") else { return };
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { folder: Some(folder.path().join("e")), ..host.options() }).unwrap();
    let error = State::new(1, 4 << 20).save(&mut engine).unwrap_err();
    drop(engine);
    unmount(&folder);
    assert_eq!(error.kind(), ErrorKind::Storage);
    let needed: Vec<u64> = error.message().split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    assert!(needed.iter().any(|number| (8 << 20..10 << 20).contains(number)), "{error}");
    assert!(error.message().contains("--shm-size"), "{error}");
}

/// The arena fits into memory, and an encoded snapshot does not.
#[test]
fn too_little_shared_memory_for_a_snapshot_fails_only_that_save() {
    let Some(folder) = mounted("13m") else { return };
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { folder: Some(folder.path().join("e")), ..host.options() }).unwrap();
    engine.prepare(4_000_000).unwrap();
    arena_is_present(&folder.path().join("e"));
    let mut x = 1u64;
    let noise: Vec<u8> = (0..4_000_000)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 56) as u8
        })
        .collect();
    let mut save = |step: u64, bytes: usize| {
        let tensors = [tensorcask::TensorView::new("w", tensorcask::Dtype::U8, &[bytes as u64], &noise[..bytes]).unwrap()];
        engine.save(step, &tensors, &[], &Default::default()).unwrap();
        engine.wait(Until::Durable, LONG).unwrap()
    };
    let (first, second, third) = (save(1, 1_000_000), save(2, 4_000_000), save(3, 1_000_001));
    drop(engine);
    unmount(&folder);
    assert!(first.reached && third.reached && !third.failed, "{first:?} {third:?}");
    assert!(second.failed && !second.reached, "{second:?}");
    assert!(second.failures[0].message.contains("step 2 needs up to 4000000 bytes"), "{second:?}");
    assert_eq!(host.stored_steps(), [1, 3]);
}

/// With inline encoding, a snapshot that does not fit replaces the chain that the store has.
#[test]
fn too_little_shared_memory_for_an_inline_snapshot_removes_the_chain() {
    let Some(folder) = mounted("4m") else { return };
    let host = Host::new();
    let options = EngineOptions {
        folder: Some(folder.path().join("e")),
        encode: Encode::Inline,
        keep: 8,
        memory_cap: Some(1 << 30),
        ..host.options()
    };
    let mut engine = Engine::start(options).unwrap();
    let mut reached = Vec::new();
    for step in 1..=8u64 {
        // Each step has other noise, so a delta is as large as a base.
        let noise: Vec<u8> =
            State::new(step, 0).noise().iter().cycle().zip(0u32..).map(|(byte, at)| byte ^ (at / 40_000) as u8).take(1_000_000).collect();
        let tensors = [tensorcask::TensorView::new("w", tensorcask::Dtype::U8, &[1_000_000], &noise).unwrap()];
        let saved = engine.save(step, &tensors, &[], &Default::default());
        reached.push(saved.map(|saved| saved.generation.is_some()).map_err(|e| e.to_string()));
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    drop(engine);
    unmount(&folder);
    assert!(reached.iter().all(|saved| *saved == Ok(true)), "{reached:?}");
    assert_eq!(host.stored_steps(), (1..=8).collect::<Vec<_>>());
}

/// A trainer whose step 3 is damaged in memory before the store has it. Step 1 is durable, and step 2 will be.
fn lose_step_3(host: &Host) -> Engine {
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    // While step 2 waits, the agent has not read step 3 yet, and cannot upload it as it was before the damage.
    for step in 2..=3 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    }
    damage_cask_of(host, 3);
    away.back();
    engine
}

#[test]
fn a_snapshot_damaged_in_memory_is_reported_and_later_saves_continue() {
    let host = Host::new();
    let mut engine = lose_step_3(&host);
    let waited = engine.wait(Until::Durable, LONG).unwrap();
    assert!(waited.failed && !waited.reached, "{waited:?}");
    assert!(waited.failures[0].step == 3 && waited.failures[0].message.contains("damaged in memory"), "{waited:?}");
    save(&mut engine, 4);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 4]);
    check_stored(&host.store(), 4, SMALL);
    // The raw state was undamaged all the time.
    drop(engine);
    assert_eq!(host.engine().restore(Latest).unwrap().step, 4);
}

/// Otherwise, the next agent would call step 3 durable because step 4 is.
#[test]
fn the_next_agent_knows_of_a_snapshot_damaged_in_memory() {
    let host = Host::new();
    let mut engine = lose_step_3(&host);
    assert!(engine.wait(Until::Durable, LONG).unwrap().failed);
    save(&mut engine, 4);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    save(&mut engine, 5);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let third = engine.wait_for(3, Until::Durable, LONG).unwrap();
    assert!(third.failed && !third.reached, "{third:?}");
    assert!(third.failures[0].step == 3 && third.failures[0].message.contains("damaged in memory"), "{third:?}");
    assert!(engine.wait_for(4, Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 4, 5]);
}

/// Somebody forgets all steps and collects them, while the job runs.
#[test]
fn saves_go_on_after_the_store_has_lost_their_base() {
    for inline in [false, true] {
        let host = Host::new();
        let encode = if inline { Encode::Inline } else { Encode::Agent };
        let mut engine = Engine::start(EngineOptions { encode, ..host.options() }).unwrap();
        for step in 1..=2 {
            save(&mut engine, step);
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        }
        host.store().forget(&[1, 2]).unwrap();
        let all = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
        maintain::gc(&host.store(), &all).unwrap();
        save(&mut engine, 3);
        let third = engine.wait(Until::Durable, LONG).unwrap();
        assert!(third.failed && third.failures[0].step == 3, "{third:?}");
        assert!(third.failures[0].message.contains("no longer has the snapshot that this delta refers to"), "{third:?}");
        for step in 4..=5 {
            save(&mut engine, step);
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached, "step {step}");
        }
        assert_eq!(host.stored_steps(), [4, 5]);
        check_stored(&host.store(), 5, SMALL);
    }
}

/// The store went away in the middle of a snapshot, and answers again after more than half of the age floor.
#[test]
fn saves_go_on_after_a_part_of_a_snapshot_has_waited_too_long() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    save(&mut engine, 2);
    assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    let cask = cask_of(&host, 2);
    let part = away.kept().join("casks").join(cask.file_name().unwrap());
    std::fs::copy(&cask, &part).unwrap();
    let long_ago = SystemTime::now() - Duration::from_secs(13 * 3600);
    std::fs::File::options().write(true).open(&part).unwrap().set_modified(long_ago).unwrap();
    away.back();
    let second = engine.wait(Until::Durable, LONG).unwrap();
    assert!(second.failed && second.failures[0].message.contains("for too long"), "{second:?}");
    save(&mut engine, 3);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 3]);
    check_stored(&host.store(), 3, SMALL);
}

/// A run that lost its last save cannot finish, and frees nothing: the raw state is undamaged.
#[test]
fn a_run_whose_last_save_failed_is_not_finished() {
    let host = Host::new();
    let engine = lose_step_3(&host);
    let error = engine.finish().unwrap_err();
    assert!(error.message().contains("step 3: ") && error.message().contains("damaged in memory"), "{error}");
    // The next trainer cannot finish the run either, until it has saved a step.
    let mut engine = host.engine();
    assert!(engine.wait(Until::Durable, LONG).unwrap().failed);
    assert!(engine.finish().unwrap_err().message().contains("step 3: "));
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Slot));
    check(&found, SMALL);
    drop(found);
    save(&mut engine, 4);
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2, 4]);
}

/// Memory at its cap is freed as soon as the store is available, even if the new trainer has not saved yet.
#[test]
fn memory_at_its_cap_is_freed_for_a_new_trainer() {
    let host = Host::new();
    let options =
        || EngineOptions { memory_cap: Some(300 << 10), back_pressure: BackPressure::Skip, policy: Policy::Full, ..host.options() };
    let mut engine = Engine::start(options()).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    let mut step = 1;
    let mut save_next = |engine: &mut Engine| {
        step += 1;
        save(engine, step).generation.is_some()
    };
    until("the agent reports the cap", || {
        save_next(&mut engine);
        host.status().runs[0].problem.as_ref().is_some_and(|problem| problem.contains("over the cap"))
    });
    until("a save is skipped", || !save_next(&mut engine));
    drop(engine);
    let mut engine = Engine::start(options()).unwrap();
    away.back();
    until("a state is saved again", || save_next(&mut engine));
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
}

#[test]
fn a_base_damaged_in_memory_is_followed_by_another_base() {
    let host = Host::new();
    // The agent reads the base again for each delta.
    let mut engine = Engine::start(EngineOptions { keep_base_decoded: false, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    damage_cask_of(&host, 1);
    // A new agent has not read the base yet.
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    for step in 2..=3 {
        save(&mut engine, step);
        let waited = engine.wait(Until::Durable, LONG).unwrap();
        assert!(waited.reached && waited.failures.is_empty(), "{waited:?}");
    }
    let kinds: Vec<_> = host.status().runs[0].saves.iter().map(|save| (save.step, save.kind.clone().unwrap_or_default())).collect();
    assert_eq!(kinds, [(2, "base".to_owned()), (3, "delta".to_owned())]);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    (2..=3).for_each(|step| check_stored(&host.store(), step, SMALL));
}

#[test]
fn memory_that_cannot_be_opened_is_kept_beside_a_new_store() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let folder = host.engine_folder().join(&host.status().runs[0].key);
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    std::fs::write(folder.join("memory-0/store.json"), b"damage").unwrap();
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert!(folder.join("memory-0/casks").exists() && folder.join("memory-1/casks").exists());
    assert_eq!(host.stored_steps(), [1, 2]);
}

/// Overwrites the middle of a cask of a step in memory.
fn damage_cask_of(host: &Host, step: u64) {
    damage(&cask_of(host, step));
}

/// A cask of a step in the first store in memory.
fn cask_of(host: &Host, step: u64) -> std::path::PathBuf {
    let manifests = files_in(&memory_of(host).join("snapshots"));
    let is_of_step = |path: &&std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{step}-"));
    named_cask(&memory_of(host).join("casks"), manifests.iter().find(is_of_step).unwrap())
}

fn memory_of(host: &Host) -> std::path::PathBuf {
    host.engine_folder().join(&host.status().runs[0].key).join("memory-0")
}

#[test]
fn a_second_trainer_of_a_run_is_refused_while_the_first_lives() {
    let host = Host::new();
    let mut first = host.trainer(&[("TEST_STEPS", "1")]);
    assert_eq!(first.expect("restored")[0], "0");
    while first.says().is_some_and(|said| said[0] != "done") {}
    let mut second = host.trainer(&[]);
    let said = second.expect("refused");
    assert_eq!(said[0], "conflict");
    assert!(said[1].contains(&format!("process {}", first.child.id())), "{said:?}");
    // Another run may start.
    let other = Engine::start(EngineOptions {
        run: Some("another".into()),
        store: host.stores.path().join("b").to_str().unwrap().into(),
        ..host.options()
    });
    drop(other.unwrap());
    first.kill();
    let mut third = host.trainer(&[("TEST_STEPS", "2")]);
    assert_eq!(third.expect("restored")[0], "1");
}

#[test]
fn a_restore_passes_over_damaged_memory_and_reports_it() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=3 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    check_into(&engine, 3, &Source::Slot);
    drop(engine);
    let run = host.status().runs.remove(0);
    let folder = host.engine_folder().join(&run.key);
    // Damage every slot. The tensors begin after the pages of the arena.
    let arena = std::fs::OpenOptions::new().read(true).write(true).open(folder.join("rank-0/arena")).unwrap();
    let slots = run.ranks[0].slots.len() as u64;
    let slot_bytes = (arena.metadata().unwrap().len() - 4096 * (1 + slots)) / slots;
    let start = |slot: u64| 4096 * (1 + slots) + slot * slot_bytes + 1000;
    arena.write_all_at(b"damage", start(0)).unwrap();
    arena.write_all_at(b"damage", start(1)).unwrap();
    let engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source, found.passed_over.len()), (3, &Source::Memory, 1));
    check(&found, SMALL);
    check_into(&engine, 3, &Source::Memory);
    drop(engine);
    // Damage the newest snapshot in memory, too. The store has a copy of it.
    damage_cask_of(&host, 3);
    let engine = host.engine();
    for found in [engine.restore(Latest).unwrap(), engine.restore(3).unwrap()] {
        assert!(found.step == 3 && matches!(found.source, Source::Tier(0, _)), "{:?}", found.source);
        check(&found, SMALL);
    }
    check_into(&engine, 3, &Source::Tier(0, host.store_path().to_str().unwrap().to_owned()));
    drop(engine);
    // The store also serves if no snapshot in memory can be opened, rather than an older raw state.
    let kept: Vec<_> = files_in(&memory_of(&host).join("casks")).into_iter().map(|path| (std::fs::read(&path).unwrap(), path)).collect();
    kept.iter().for_each(|(_, path)| std::fs::remove_file(path).unwrap());
    let engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert!(found.step == 3 && matches!(found.source, Source::Tier(0, _)), "{:?}", found.source);
    drop(found);
    drop(engine);
    kept.iter().for_each(|(bytes, path)| std::fs::write(path, bytes).unwrap());
    // If the store is unavailable, memory serves the previous step. The restore reports the copies passed over and the
    // tier that did not answer.
    let _away = Away::take(&host.store_path());
    let engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (2, &Source::Memory), "{:?}", found.passed_over);
    check(&found, SMALL);
    let passed: Vec<_> = found.passed_over.iter().map(|passed| (passed.source.clone(), passed.step)).collect();
    assert!(passed.contains(&(Source::Slot, Some(3))) && passed.contains(&(Source::Memory, Some(3))), "{passed:?}");
    let unreachable = found.passed_over.iter().find(|passed| matches!(passed.source, Source::Tier(0, _))).unwrap();
    assert!(unreachable.error.message().contains("could not be asked when the engine began"), "{unreachable:?}");
}

/// With a damaged log, no snapshot of a store in memory can be read.
#[test]
fn a_log_damaged_in_memory_stops_no_save() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=2 {
        save(&mut engine, step);
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let memory = host.engine_folder().join(&host.status().runs[0].key);
    damage_log(&memory.join("memory-0"));
    save(&mut engine, 3);
    // The writer does not read the log for each save. If it added the snapshot behind the damage, the save is reported
    // as lost.
    let third = engine.wait(Until::Durable, LONG).unwrap();
    let is_reported = third.failed && third.failures.iter().any(|failure| failure.step == 3);
    assert!(third.reached || is_reported, "{third:?}\n{:?}\n{}", host.status(), host.agent_log());
    // A snapshot that the store lacks is reported as lost. The raw state is still in the arena.
    let away = Away::take(&host.store_path());
    save(&mut engine, 4);
    assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    let newest = std::fs::read_dir(&memory).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.join("log").is_dir()).max();
    damage_log(&newest.unwrap());
    away.back();
    let waited = engine.wait(Until::Durable, LONG).unwrap();
    assert!(waited.failed && waited.failures.iter().any(|failure| failure.step == 4), "{waited:?}");
    assert_eq!(engine.restore(Latest).unwrap().step, 4);
    save(&mut engine, 5);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), if is_reported { vec![1, 2, 5] } else { vec![1, 2, 3, 5] });
    check_stored(&host.store(), 5, SMALL);
}

/// The same with a trainer that encodes by itself: it reads the log in memory, too.
#[test]
fn a_log_damaged_in_memory_stops_no_inline_save() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { encode: Encode::Inline, ..host.options() }).unwrap();
    for step in 1..=2 {
        save(&mut engine, step);
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let memory = host.engine_folder().join(&host.status().runs[0].key);
    damage_log(&memory.join("memory-0"));
    for step in 3..=5 {
        save(&mut engine, step);
        let waited = engine.wait(Until::Durable, LONG).unwrap();
        let is_reported = waited.failed && waited.failures.iter().any(|failure| failure.step == step);
        assert!(waited.reached || is_reported, "{waited:?}");
    }
    assert!(host.stored_steps().ends_with(&[4, 5]), "{:?}", host.stored_steps());
    check_stored(&host.store(), 5, SMALL);
    drop(engine);
    let mut engine = Engine::start(EngineOptions { encode: Encode::Inline, ..host.options() }).unwrap();
    assert_eq!(engine.restore(Latest).unwrap().step, 5);
    save(&mut engine, 6);
    engine.finish().unwrap();
}

/// Overwrites the newest entry of a store's log.
fn damage_log(store: &std::path::Path) {
    let entries = std::fs::read_dir(store.join("log")).unwrap().map(|entry| entry.unwrap().path());
    let newest = entries.filter(|path| path.is_file()).max().unwrap();
    std::fs::write(newest, b"damage").unwrap();
}

#[test]
fn an_arena_that_cannot_be_used_is_replaced() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    let rank = host.engine_folder().join(&host.status().runs[0].key).join("rank-0");
    std::fs::write(rank.join("arena"), b"damage").unwrap();
    std::fs::write(rank.join("arena.new"), b"left by a trainer that died").unwrap();
    let mut engine = host.engine();
    assert!(!rank.join("arena.new").exists());
    assert_eq!(engine.restore(Latest).unwrap().source, Source::Memory);
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2]);
}

#[test]
fn memory_that_is_older_than_the_store_is_not_restored() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    // The job continues on another host.
    let elsewhere = Host::new();
    let options = EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() };
    let mut other = Engine::start(options).unwrap();
    assert!(matches!(other.restore(Latest).unwrap().source, Source::Tier(0, _)));
    save(&mut other, 3);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    // A save on this host fails.
    let (mut fenced, mut step) = (None, 2);
    until("a save is fenced", || {
        step += 1;
        fenced = State::new(step, SMALL).save(&mut engine).err();
        fenced.is_some()
    });
    assert_eq!(fenced.unwrap().kind(), ErrorKind::Fenced);
    drop((engine, other));
    // When the job comes back to this host, memory is older than the store.
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!(found.step, 3);
    assert!(matches!(found.source, Source::Tier(0, _)), "{:?}", found.source);
    check(&found, SMALL);
    drop(found);
    // A new save is restored from memory while the store lacks it.
    let away = Away::take(&host.store_path());
    save(&mut engine, 4);
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (4, &Source::Slot));
    drop(found);
    assert_eq!(engine.loadable().unwrap()[0].step, 4);
    away.back();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
    drop(engine);
    assert_eq!(host.engine().restore(Latest).unwrap().source, Source::Slot);
}

#[test]
fn a_state_that_cannot_be_encoded_is_reported_at_the_next_save() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    let state = State::new(2, SMALL);
    let mut tensors = state.tensors();
    tensors.push(tensors[0].clone());
    engine.save(2, &tensors, &[], &Default::default()).unwrap();
    let waited = engine.wait(Until::Encoded, LONG).unwrap();
    assert_eq!(waited.failures.iter().map(|failure| failure.step).collect::<Vec<_>>(), [2]);
    let next = save(&mut engine, 3);
    assert!(next.failures.len() == 1 && next.failures[0].message.contains("given twice"), "{next:?}");
    assert!(save(&mut engine, 4).failures.is_empty(), "a failure is reported once");
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 3, 4]);
    assert_eq!(host.status().runs[0].failed_saves, 1);
}
