//! Jobs that come back: in another start, with other options, after the store was changed or out of reach.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tensorcask::{Dtype, ErrorKind, Latest, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{BackPressure, Encode, Engine, EngineOptions, Source, Until};

use super::host::*;

const WORLD: u32 = 2;
const HALF: usize = 100_000;

fn rank(host: &Host, rank: u32) -> Engine {
    Engine::start(EngineOptions { rank, world: WORLD, ..host.options() }).unwrap()
}

/// Both ranks' halves of a step, as a start of the job computes it.
fn data(step: u64, attempt: u8) -> Vec<u8> {
    (0..HALF * 2).map(|i| (i / 7) as u8 ^ (step as u8).wrapping_mul(31) ^ attempt).collect()
}

fn save_half(engine: &mut Engine, rank: u32, step: u64, attempt: u8) {
    let (all, from) = (data(step, attempt), rank as usize * HALF);
    let rect = Rect { offset: vec![from as u64], shape: vec![HALF as u64] };
    let tensors = [TensorView::shard("w", Dtype::U8, &[2 * HALF as u64], rect, &all[from..from + HALF]).unwrap()];
    engine.save(step, &tensors, &[], &Metadata::default()).unwrap();
}

fn check_halves(host: &Host, step: u64, attempt: u8) {
    assert!(host.store().snapshot(step).unwrap().read("w", &Slice::all()).unwrap().data == data(step, attempt), "step {step}");
}

/// Ranks that were killed between their saves of a step, and come back without a word to each other.
#[test]
fn states_of_two_starts_of_a_job_never_become_one_snapshot() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    for step in 1..=2 {
        save_half(&mut first, 0, step, 1);
        save_half(&mut second, 1, step, 1);
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    save_half(&mut first, 0, 3, 1);
    drop((first, second));
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    for engine in [&first, &second] {
        assert_eq!(engine.restore(Latest).unwrap().step, 2, "step 3 is of no use to rank 1");
        assert_eq!(engine.loadable().unwrap()[0].step, 2);
    }
    // This time it is rank 1 that comes to step 3.
    save_half(&mut second, 1, 3, 2);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.stored_steps(), [1, 2]);
    // And it is killed, and so is rank 0, which had nothing to save.
    drop((first, second));
    (first, second) = (rank(&host, 0), rank(&host, 1));
    assert_eq!((first.restore(Latest).unwrap().step, second.restore(Latest).unwrap().step), (2, 2));
    // The agent, too: the next one knows of the starts before it.
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    for (engine, rank) in [(&mut first, 0), (&mut second, 1)] {
        save_half(engine, rank, 3, 3);
        save_half(engine, rank, 4, 3);
    }
    for engine in [&mut first, &mut second] {
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
    (1..=2).for_each(|step| check_halves(&host, step, 1));
    (3..=4).for_each(|step| check_halves(&host, step, 3));
}

#[test]
fn a_rank_that_comes_back_alone_is_joined_by_those_that_went_on() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    save_half(&mut first, 0, 1, 1);
    save_half(&mut second, 1, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    drop(second);
    let mut second = rank(&host, 1);
    assert_eq!(second.restore(Latest).unwrap().step, 1);
    for step in 2..=3 {
        save_half(&mut second, 1, step, 1);
        save_half(&mut first, 0, step, 1);
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached && second.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    (1..=3).for_each(|step| check_halves(&host, step, 1));
}

/// In one start: all go back to an older step, of which nothing is said.
#[test]
fn a_step_before_the_last_may_be_saved_again() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    for (step, attempt) in [(90, 1), (100, 1), (95, 2), (100, 2)] {
        save_half(&mut first, 0, step, attempt);
        std::thread::sleep(Duration::from_millis(200));
        save_half(&mut second, 1, step, attempt);
        for engine in [&mut first, &mut second] {
            let waited = engine.wait(Until::Durable, LONG).unwrap();
            assert!(waited.reached && waited.failures.is_empty(), "step {step}: {waited:?}");
        }
    }
    check_halves(&host, 100, 2);
}

/// One rank had saved the step again, and was killed before the other did.
#[test]
fn what_was_saved_before_a_return_and_after_it_never_comes_back_together() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    for step in [90, 100] {
        save_half(&mut first, 0, step, 1);
        save_half(&mut second, 1, step, 1);
        assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    }
    save_half(&mut first, 0, 100, 2);
    drop((first, second));
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    for (number, engine) in [&first, &second].into_iter().enumerate() {
        let found = engine.restore(100).unwrap();
        let (found, all) = (&found.tensors[0].data, data(100, 1));
        let expected = if found.len() == HALF { &all[number * HALF..(number + 1) * HALF] } else { &all };
        assert!(**found == *expected, "rank {number}: of the second attempt, or of both");
    }
    save_half(&mut first, 0, 101, 3);
    save_half(&mut second, 1, 101, 3);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [90, 100, 101]);
    check_halves(&host, 100, 1);
}

/// Another agent does not know which ranks were in the session; it finds it in their arenas.
#[test]
fn a_rank_that_comes_back_alone_to_another_agent_begins_a_session() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    for step in 1..=2 {
        save_half(&mut first, 0, step, 1);
        save_half(&mut second, 1, step, 1);
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    save_half(&mut first, 0, 3, 1);
    host.signal_agent(Signal::KILL);
    drop(second);
    host.agent_is_gone();
    let _ = first.wait(Until::Encoded, Duration::from_millis(100)).unwrap();
    let mut second = rank(&host, 1);
    save_half(&mut second, 1, 3, 2);
    save_half(&mut first, 0, 4, 2);
    save_half(&mut second, 1, 4, 2);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 4], "step 3 is of two attempts");
}

/// A trainer that could not go on here, because the store was out of reach, and has gone; the job is elsewhere when the store is back.
#[test]
fn an_agent_without_a_trainer_fences_nobody_when_the_store_is_back() {
    let host = Host::new();
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() }).unwrap();
    save(&mut other, 1);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    let engine = host.engine();
    assert!(engine.restore(Latest).is_err());
    drop(engine);
    std::thread::sleep(Duration::from_millis(500));
    away.back();
    // Long enough for it to try again.
    std::thread::sleep(Duration::from_secs(3));
    save(&mut other, 2);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    // Nor does the agent after that.
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    let mut agent = host.start_agent(&[]);
    std::thread::sleep(Duration::from_millis(500));
    save(&mut other, 3);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::KILL);
    agent.wait().unwrap();
    // With a trainer that goes on here, the job has come back.
    host.agent_is_gone();
    let mut engine = host.engine();
    assert_eq!(engine.restore(Latest).unwrap().step, 3);
    save(&mut engine, 4);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
}

#[test]
fn a_job_of_fewer_ranks_leaves_nothing_of_those_that_are_no_more() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    save_half(&mut first, 0, 1, 1);
    save_half(&mut second, 1, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    // Of one rank alone.
    save_half(&mut second, 1, 2, 1);
    drop((first, second));
    let mut alone = host.engine();
    save(&mut alone, 3);
    assert!(alone.wait(Until::Durable, LONG).unwrap().reached);
    let arena = host.engine_folder().join(&host.status().runs[0].key).join("rank-1/arena");
    until("the arena of rank 1 is gone", || !arena.exists());
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    save(&mut alone, 4);
    alone.finish().unwrap();
    until("the run is over", || host.status().runs.is_empty());
    assert_eq!(host.stored_steps(), [1, 3, 4]);
}

/// Raw states of two ranks, and a job of one that comes back.
#[test]
fn what_waits_is_encoded_before_a_job_of_another_size_goes_on() {
    let host = Host::new();
    let (mut first, mut second) = (rank(&host, 0), rank(&host, 1));
    save_half(&mut first, 0, 1, 1);
    save_half(&mut second, 1, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save_half(&mut first, 0, 2, 1);
    save_half(&mut second, 1, 2, 1);
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    drop((first, second));
    let mut alone = host.engine();
    let found = alone.restore(Latest).unwrap();
    assert_eq!(found.step, 2);
    assert!(*found.tensors[0].data == data(2, 1));
    drop(found);
    save(&mut alone, 3);
    assert!(alone.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    check_halves(&host, 2, 1);
}

/// From encoding by the agent to encoding inline, and back.
#[test]
fn what_waits_is_encoded_before_a_trainer_encodes_itself() {
    let host = Host::new();
    let inline = || EngineOptions { encode: Encode::Inline, ..host.options() };
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save(&mut engine, 2);
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    drop(engine);
    let mut engine = Engine::start(inline()).unwrap();
    assert_eq!(engine.restore(Latest).unwrap().step, 2);
    save(&mut engine, 3);
    drop(engine);
    let mut engine = Engine::start(inline()).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Memory), "no older state counts as the newest");
    check(&found, SMALL);
    drop(found);
    save(&mut engine, 4);
    drop(engine);
    let mut engine = host.engine();
    assert_eq!(engine.restore(Latest).unwrap().step, 4);
    save(&mut engine, 5);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4, 5]);
    (1..=5).for_each(|step| check_stored(&host.store(), step, SMALL));
}

/// A host that could not ask the store, and trusted its memory, while the job was elsewhere.
#[test]
fn a_host_that_comes_back_while_the_store_is_away_does_not_fence_the_job_elsewhere() {
    let host = Host::new();
    let mut engine = host.engine();
    (1..=3).for_each(|step| _ = save(&mut engine, step));
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() }).unwrap();
    assert_eq!(other.restore(Latest).unwrap().step, 3);
    State::new(40, SMALL).save(&mut other).unwrap();
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Slot));
    assert!(found.passed_over.iter().any(|passed| matches!(passed.source, Source::Tier(0, _))), "{:?}", found.passed_over);
    drop(found);
    save(&mut engine, 4);
    away.back();
    let told = Instant::now();
    let error = loop {
        match engine.wait(Until::Durable, Duration::from_secs(1)) {
            Err(error) => break error,
            Ok(waited) => assert!(!waited.reached && told.elapsed() < LONG, "{waited:?}"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.message().contains("step 40 was saved there by another job"), "{error}");
    State::new(41, SMALL).save(&mut other).unwrap();
    assert!(other.wait(Until::Durable, LONG).unwrap().reached, "the job elsewhere was not fenced");
    assert_eq!(host.stored_steps(), [1, 2, 3, 40, 41]);
    drop((engine, other));
    assert_eq!(host.engine().restore(Latest).unwrap().step, 41);
}

/// A new host that could not ask the store at first goes on from what it restores there.
#[test]
fn a_job_goes_on_from_what_it_restored_from_a_store_that_was_slow_to_answer() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    let elsewhere = Host::new();
    let away = Away::take(&host.store_path());
    let mut other = Engine::start(EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() }).unwrap();
    assert!(other.restore(Latest).is_err());
    away.back();
    assert_eq!(other.restore(Latest).unwrap().step, 1);
    save(&mut other, 2);
    let waited = other.wait(Until::Durable, LONG).unwrap();
    assert!(waited.reached, "{waited:?}");
    assert_eq!(host.stored_steps(), [1, 2]);
}

#[test]
fn steps_that_were_forgotten_in_the_store_do_not_come_back_out_of_memory() {
    let host = Host::new();
    let mut engine = host.engine();
    for step in 1..=4 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    drop(engine);
    host.store().forget(&[3, 4]).unwrap();
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!(found.step, 2);
    check(&found, SMALL);
    drop(found);
    save(&mut engine, 3);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
    check_stored(&host.store(), 3, SMALL);
}

/// What is saved after memory was found to be out of date is new, for whoever comes next.
#[test]
fn what_was_saved_after_memory_went_is_not_taken_for_old() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() }).unwrap();
    save(&mut other, 2);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    drop(other);
    let mut engine = host.engine();
    assert_eq!(engine.restore(Latest).unwrap().step, 2);
    let away = Away::take(&host.store_path());
    save(&mut engine, 3);
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    drop(engine);
    away.back();
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Slot));
    drop(found);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

/// A state that has grown out of the arena, with an agent that stands still.
#[test]
fn a_save_that_needs_a_larger_arena_is_skipped_where_saves_are() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { back_pressure: BackPressure::Skip, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    assert!(save(&mut engine, 2).generation.is_some());
    let begun = Instant::now();
    let large = State::new(3, 4 * SMALL);
    assert_eq!(large.save(&mut engine).unwrap().generation, None);
    assert!(begun.elapsed() < Duration::from_secs(10));
    host.signal_agent(Signal::CONT);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert!(large.save(&mut engine).unwrap().generation.is_some());
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

/// The agent drains into a store that does not come back; a trainer does.
#[test]
fn an_agent_that_is_about_to_end_makes_way_for_a_trainer() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    save(&mut engine, 2);
    assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
    drop(engine);
    let draining = host.agent();
    host.signal_agent(Signal::TERM);
    until("it drains", || host.status().draining);
    let mut engine = host.engine();
    assert_ne!(host.agent(), draining);
    assert_eq!(engine.restore(Latest).unwrap().step, 2);
    save(&mut engine, 3);
    away.back();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

/// A run that is over, and whose agent dies before the last tier has everything.
#[test]
fn a_run_that_is_over_is_cleared_by_the_next_agent_too() {
    let host = Host::new();
    let far = host.stores.path().join("far");
    let mut engine = Engine::start(EngineOptions { next_tiers: vec![far.to_str().unwrap().to_owned()], ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    until("the second tier has it", || host.status().runs[0].tiers[1].last_step == Some(1));
    let key = host.status().runs[0].key.clone();
    let away = Away::take(&far);
    save(&mut engine, 2);
    engine.finish().unwrap();
    host.signal_agent(Signal::KILL);
    host.agent_is_gone();
    let run = host.engine_folder().join(key);
    assert!(run.join("memory-0").exists());
    away.back();
    let mut agent = host.start_agent(&["--idle-exit", "1s"]);
    until("memory is freed", || !run.join("rank-0/arena").exists() && !run.join("memory-0").exists());
    assert!(agent.wait().unwrap().success());
    let store = tensorcask::blocking::Store::open(far.to_str().unwrap()).unwrap();
    check_stored(&store, 2, SMALL);
}
