//! SIGKILL at any moment: every acknowledged save is restored, bit for bit.

use std::time::Duration;

use rustix::process::Signal;
use tensorcask::blocking::maintain;
use tensorcask::maintain::VerifyOptions;
use tensorcask::{ErrorKind, Latest, Policy};
use tensorcask_engine::{BackPressure, Encode, Engine, EngineOptions, OnAgentLoss, Until};

use super::host::*;

/// Number of kills in the quick tier. `TENSORCASK_THOROUGH=1` makes fifty.
const QUICK_KILLS: u64 = 15;
const BYTES: usize = 12 << 20;

#[test]
fn trainers_killed_during_saves_lose_nothing() {
    let kills = if std::env::var_os("TENSORCASK_THOROUGH").is_some() { 50 } else { QUICK_KILLS };
    let host = Host::new();
    let bytes = BYTES.to_string();
    let mut acknowledged = 0u64;
    let mut all = Vec::new();
    let mut from_slots = 0;
    for kill in 0..kills {
        // Every third trainer is killed with an incomplete copy in its arena, the others at varying moments.
        let is_incomplete = kill % 3 == 2;
        let words = [("TEST_BYTES", bytes.as_str()), ("TEST_INCOMPLETE", "1")];
        let mut trainer = host.trainer(if is_incomplete { &words } else { &words[..1] });
        let said = trainer.expect("restored");
        let restored: u64 = said[0].parse().unwrap();
        if kill > 0 {
            assert!(said[1].starts_with("memory"), "kill {kill}: restored from {}", said[1]);
            assert!(restored >= acknowledged, "kill {kill}: step {acknowledged} was acknowledged, step {restored} came back");
            from_slots += u64::from(said[1] == "memory (raw)");
            // A kill between the commit flag and the acknowledgement leaves a step that was not acknowledged.
            assert!(restored <= acknowledged + 1, "kill {kill}: {restored} came back after {acknowledged}");
            acknowledged = restored;
        }
        if is_incomplete {
            trainer.expect("begins");
            trainer.kill();
            continue;
        }
        // One or two saves succeed before the kill.
        for _ in 0..1 + kill % 3 {
            let begun: u64 = trainer.expect("begins")[0].parse().unwrap();
            assert_eq!(trainer.expect("saved")[0], begun.to_string());
            acknowledged = begun;
            all.push(begun);
        }
        trainer.expect("begins");
        vary_moment(Duration::from_micros(500 * (kill * 37 % 50)));
        trainer.kill();
        // More saves may have succeeded before the kill.
        while let Some(said) = trainer.says() {
            if said[0] == "saved" {
                acknowledged = said[1].parse().unwrap();
                all.push(acknowledged);
            }
        }
    }
    assert!(from_slots > 0, "no restore was served by a raw slot");
    let mut engine = Engine::start(host.options()).unwrap();
    check(&engine.restore(Latest).unwrap(), BYTES);
    State::new(acknowledged + 10, BYTES).save(&mut engine).unwrap();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let report = maintain::verify(&host.store(), &VerifyOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    let stored = host.stored_steps();
    assert!(all.iter().all(|step| stored.contains(step)), "acknowledged {all:?}, stored {stored:?}");
    for step in stored.iter().rev().take(5) {
        check_stored(&host.store(), *step, BYTES);
    }
}

#[test]
fn killed_agents_are_replaced_and_nothing_is_lost() {
    let host = Host::new();
    let mut engine = host.engine();
    let bytes = 4 << 20;
    for step in 1..=30 {
        State::new(step, bytes).save(&mut engine).unwrap();
        // The agent is encoding, uploading, committing or sleeping.
        vary_moment(Duration::from_millis(step * 7 % 25));
        if step % 3 == 0 {
            host.signal_agent(Signal::KILL);
        }
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), (1..=30).collect::<Vec<_>>());
    for step in 1..=30 {
        check_stored(&host.store(), step, bytes);
    }
    let report = maintain::verify(&host.store(), &VerifyOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

#[test]
fn a_lost_agent_is_an_error_if_the_policy_says_so() {
    let host = Host::new();
    let options = EngineOptions { on_agent_loss: OnAgentLoss::Fail, ..host.options() };
    let mut engine = Engine::start(options.clone()).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.kill_agent();
    let error = State::new(2, SMALL).save(&mut engine).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Storage);
    assert!(error.message().contains("step 2 is in shared memory"), "{error}");
    let found = engine.restore(Latest).unwrap();
    assert_eq!(found.step, 2);
    check(&found, SMALL);
    drop(found);
    drop(engine);
    // The next engine starts an agent, which finds the state in the arena.
    let mut engine = Engine::start(options).unwrap();
    save(&mut engine, 3);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

#[test]
fn memory_has_the_last_state_after_trainer_and_agent_are_killed() {
    let host = Host::new();
    let mut trainer = host.trainer(&[("TEST_STEPS", "4")]);
    trainer.expect("restored");
    for _ in 0..4 {
        trainer.expect("begins");
        trainer.expect("saved");
    }
    host.signal_agent(Signal::KILL);
    trainer.kill();
    let mut trainer = host.trainer(&[("TEST_STEPS", "6")]);
    assert_eq!(trainer.expect("restored")[..2], ["4".to_owned(), "memory (raw)".to_owned()]);
    while trainer.says().is_some_and(|said| said[0] != "done") {}
    until("all steps are in the store", || host.stored_steps() == [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_trainer_that_encodes_inline_needs_no_arena() {
    let host = Host::new();
    let mut trainer = host.trainer(&[("TEST_INLINE", "1"), ("TEST_STEPS", "5")]);
    assert_eq!(trainer.expect("restored")[0], "0");
    while trainer.says().is_some_and(|said| said[0] != "done") {}
    trainer.kill();
    let mut trainer = host.trainer(&[("TEST_INLINE", "1"), ("TEST_STEPS", "8")]);
    assert_eq!(trainer.expect("restored")[..2], ["5".to_owned(), "memory (encoded)".to_owned()]);
    while trainer.says().is_some_and(|said| said[0] != "done") {}
    until("all steps are in the store", || host.stored_steps() == (1..=8).collect::<Vec<_>>());
    check_stored(&host.store(), 8, SMALL);
    assert_eq!(host.status().runs[0].ranks[0].arena_bytes, 0);
}

#[test]
fn inline_saves_become_durable_and_obey_the_memory_cap() {
    let host = Host::new();
    let options = EngineOptions { encode: Encode::Inline, ..host.options() };
    let mut engine = Engine::start(options.clone()).unwrap();
    for step in 1..=6 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached, "step {step}");
    }
    save(&mut engine, 7);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    // The newest snapshot, the two previous ones, which are removed at the next save, and their base.
    assert_eq!(host.status().runs[0].memory_steps, [1, 5, 6, 7]);
    // A new agent does not know this save.
    save(&mut engine, 8);
    host.signal_agent(Signal::KILL);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), (1..=8).collect::<Vec<_>>());
    // The cap holds while the store is unavailable.
    let capped = EngineOptions { memory_cap: Some(400 << 10), back_pressure: BackPressure::Skip, policy: Policy::Full, ..options };
    let mut engine = Engine::start(capped).unwrap();
    save(&mut engine, 9);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    let mut step = 9;
    until("a save is skipped", || {
        step += 1;
        save(&mut engine, step).generation.is_none()
    });
    away.back();
    engine.finish().unwrap();
    assert_eq!(host.stored_steps(), (1..step).collect::<Vec<_>>());
}

#[test]
fn a_run_can_finish_after_its_agents_were_killed() {
    // The agent that encoded the last save is gone.
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.kill_agent();
    engine.finish().unwrap();
    // A new trainer, with a new agent, finishes the run of a killed trainer without saving.
    let mut engine = host.engine();
    save(&mut engine, 2);
    host.signal_agent(Signal::KILL);
    drop(engine);
    host.agent_is_gone();
    host.engine().finish().unwrap();
    assert_eq!(host.stored_steps(), [1, 2]);
    // A run without any save can finish, too.
    host.engine().finish().unwrap();
}

/// The next agent recognises an unfinished takeover as its own, whenever the first agent dies.
#[test]
fn an_agent_killed_during_a_takeover_is_replaced() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    for step in 2..=60 {
        drop(engine);
        engine = host.engine();
        vary_moment(Duration::from_micros(100 * step));
        host.kill_agent();
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached, "step {step}");
    }
    // Exactly between the log entry and the note that it is written.
    let key = host.status().runs[0].key.clone();
    host.kill_agent();
    let path = host.engine_folder().join(key).join("seen.json");
    let mut seen: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let tier = seen["tiers"].as_object_mut().unwrap().values_mut().next().unwrap();
    let new = "00112233445566778899aabbccddeeff";
    let other = "ffeeddccbbaa99887766554433221100";
    let written = tier["writer"].clone();
    *tier = serde_json::json!({ "latest": tier["latest"], "writer": new, "taking_over": { "id": written, "from": other } });
    std::fs::write(&path, seen.to_string()).unwrap();
    save(&mut engine, 61);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let seen: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let tier = seen["tiers"].as_object().unwrap().values().next().unwrap();
    assert_eq!((&tier["writer"], &tier["taking_over"]), (&written, &serde_json::Value::Null), "the next agent has noted the takeover");
    // Exactly between the note and the log entry, on a host that has never written to the store: the next agent takes
    // the store over, unless another job has taken it over since.
    for (step, id, from, expected) in [(62, new, &written, Ok(true)), (63, other, &other.into(), Err(ErrorKind::Fenced))] {
        host.kill_agent();
        let mut seen: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let tier = seen["tiers"].as_object_mut().unwrap().values_mut().next().unwrap();
        *tier = serde_json::json!({ "latest": tier["latest"], "writer": null, "taking_over": { "id": id, "from": from } });
        std::fs::write(&path, seen.to_string()).unwrap();
        let waited = State::new(step, SMALL).save(&mut engine).and_then(|_| engine.wait(Until::Durable, LONG));
        assert_eq!(waited.map(|waited| waited.reached).map_err(|error| error.kind()), expected);
    }
    assert_eq!(host.stored_steps(), (1..=62).collect::<Vec<_>>());
}
