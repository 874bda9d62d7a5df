//! Faults: unavailable stores, full memory, two trainers of one run.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
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
    // A later save is durable, the dropped one is not.
    let dropped = engine.wait_for(5, Until::Durable, LONG).unwrap();
    assert!(dropped.failed && !dropped.reached, "{dropped:?}");
    assert!(dropped.failures.iter().any(|failure| failure.step == 5 && failure.message.contains("dropped")), "{dropped:?}");
    assert!(engine.wait_for(6, Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 6, 7]);
    drop(engine);

    let mut engine = host.engine();
    host.signal_agent(Signal::STOP);
    save(&mut engine, 8);
    save(&mut engine, 9);
    // The agent continues once the save waits: the engine calls this only while it waits.
    let agent = host.agent().unwrap();
    let has_waited = Arc::new(AtomicBool::new(false));
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
    let mut step = 1;
    let mut saved = vec![1];
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
    let first = save(1, 1_000_000);
    let second = save(2, 4_000_000);
    let third = save(3, 1_000_001);
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
    let mut fenced = None;
    let mut step = 2;
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
