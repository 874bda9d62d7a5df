//! Restarts of a job: with other options, on another host, or after the store was changed or unavailable.

use std::time::Duration;

use rustix::process::Signal;
use tensorcask::{Dtype, ErrorKind, Latest, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{BackPressure, Encode, Engine, EngineOptions, Source, Until};

use super::host::*;

pub(crate) const WORLD: u32 = 2;
const HALF: usize = 100_000;

pub(crate) fn rank(host: &Host, rank: u32) -> Engine {
    Engine::start(EngineOptions { rank, world: WORLD, ..host.options() }).unwrap()
}

/// Values of a step in one start of the job: one half per rank.
fn data(step: u64, attempt: u8) -> Vec<u8> {
    (0..HALF * 2).map(|i| (i / 7) as u8 ^ (step as u8).wrapping_mul(31) ^ attempt).collect()
}

pub(crate) fn save_half(engine: &mut Engine, rank: u32, step: u64, attempt: u8) {
    let all = data(step, attempt);
    let from = rank as usize * HALF;
    let rect = Rect { offset: vec![from as u64], shape: vec![HALF as u64] };
    let tensors = [TensorView::shard("w", Dtype::U8, &[2 * HALF as u64], rect, &all[from..from + HALF]).unwrap()];
    engine.save(step, &tensors, &[], &Metadata::default()).unwrap();
}

/// Checks that the last save of a rank is not encoded while another rank lacks the step. A slow agent can only hide a
/// fault here.
fn stays_incomplete(engine: &mut Engine) {
    let waited = engine.wait(Until::Encoded, Duration::from_millis(300)).unwrap();
    assert!(!waited.reached, "{waited:?}");
}

/// Both ranks, which have saved step 1.
fn with_step_1(host: &Host) -> (Engine, Engine) {
    let mut first = rank(host, 0);
    let mut second = rank(host, 1);
    save_half(&mut first, 0, 1, 1);
    save_half(&mut second, 1, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached && second.wait(Until::Durable, LONG).unwrap().reached);
    (first, second)
}

fn check_halves(host: &Host, step: u64, attempt: u8) {
    assert!(host.store().snapshot(step).unwrap().read("w", &Slice::all()).unwrap().data == data(step, attempt), "step {step}");
}

/// Ranks are killed between their saves of a step, and start again independently.
#[test]
fn states_of_two_starts_are_never_joined() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    for step in 1..=2 {
        save_half(&mut first, 0, step, 1);
        save_half(&mut second, 1, step, 1);
    }
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    save_half(&mut first, 0, 3, 1);
    drop((first, second));
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    for engine in [&first, &second] {
        assert_eq!(engine.restore(Latest).unwrap().step, 2, "rank 1 does not have step 3");
        assert_eq!(engine.loadable().unwrap()[0].step, 2);
    }
    // This time, only rank 1 saves step 3.
    save_half(&mut second, 1, 3, 2);
    stays_incomplete(&mut second);
    assert_eq!(host.stored_steps(), [1, 2]);
    // Both ranks are killed again. Rank 0 had saved nothing.
    drop((first, second));
    (first, second) = (rank(&host, 0), rank(&host, 1));
    assert_eq!((first.restore(Latest).unwrap().step, second.restore(Latest).unwrap().step), (2, 2));
    // The agent is killed, too. The next agent knows the earlier starts.
    host.kill_agent();
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
fn a_rank_that_restarts_alone_is_joined_by_the_others() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
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

/// Rank 1 misses a save that rank 0 makes. Both return to the step before within one start.
#[test]
fn a_state_from_before_a_return_is_not_joined_though_a_rank_missed_a_save() {
    let host = Host::new();
    let (mut first, mut second) = with_step_1(&host);
    save_half(&mut first, 0, 2, 1);
    let offers = [first.offer().unwrap(), second.offer().unwrap()];
    assert_eq!((offers[0].attempt, offers[1].attempt), (Some(0), Some(0)));
    for engine in [&mut first, &mut second] {
        assert_eq!(engine.agree(&offers).unwrap(), Some(1));
        assert_eq!(engine.restore(1).unwrap().step, 1);
    }
    // Rank 1 comes first: a state of rank 0 from before the return must not complete its state.
    save_half(&mut second, 1, 2, 2);
    stays_incomplete(&mut second);
    save_half(&mut first, 0, 2, 2);
    for step in 3..=4 {
        save_half(&mut first, 0, step, 2);
        save_half(&mut second, 1, step, 2);
    }
    for engine in [&mut first, &mut second] {
        let waited = engine.wait(Until::Durable, LONG).unwrap();
        assert!(waited.reached && waited.problem.is_none(), "{waited:?}");
    }
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
    (2..=4).for_each(|step| check_halves(&host, step, 2));
    // The discarded save did not become durable.
    assert!(first.wait_for(2, Until::Durable, LONG).unwrap().reached, "the save after the return");
}

/// A rank repeats a save that had succeeded. From then on, its states belong to no snapshot, and the others learn why.
#[test]
fn ranks_hear_that_one_of_them_repeated_a_save_alone() {
    let host = Host::new();
    let (mut first, mut second) = with_step_1(&host);
    save_half(&mut second, 1, 1, 1);
    save_half(&mut first, 0, 2, 1);
    let waited = first.wait(Until::Encoded, LONG).unwrap();
    assert!(waited.failed && waited.failures.iter().any(|failure| failure.message.contains("repeated a save")), "{waited:?}");
    // The next start agrees on a step.
    drop((first, second));
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    assert_eq!((first.restore(Latest).unwrap().step, second.restore(Latest).unwrap().step), (1, 1));
    save_half(&mut first, 0, 2, 2);
    save_half(&mut second, 1, 2, 2);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    check_halves(&host, 2, 2);
}

#[test]
fn a_rank_hears_that_another_has_ended() {
    let host = Host::new();
    let (mut first, second) = with_step_1(&host);
    drop(second);
    save_half(&mut first, 0, 2, 1);
    until("rank 0 hears of rank 1", || {
        let waited = first.wait(Until::Encoded, Duration::from_millis(100)).unwrap();
        waited.problem.is_some_and(|problem| problem.contains("rank 1, whose trainer has ended"))
    });
    let mut second = rank(&host, 1);
    save_half(&mut second, 1, 2, 1);
    save_half(&mut first, 0, 2, 1);
    assert!(second.wait(Until::Durable, LONG).unwrap().reached);
    check_halves(&host, 2, 1);
}

/// All ranks return to an older step within one start, without telling the engine.
#[test]
fn an_older_step_may_be_saved_again() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    for (step, attempt) in [(90, 1), (100, 1), (95, 2), (100, 2)] {
        save_half(&mut first, 0, step, attempt);
        stays_incomplete(&mut first);
        save_half(&mut second, 1, step, attempt);
        for engine in [&mut first, &mut second] {
            let waited = engine.wait(Until::Durable, LONG).unwrap();
            assert!(waited.reached && waited.failures.is_empty(), "step {step}: {waited:?}");
        }
    }
    check_halves(&host, 100, 2);
}

/// One rank saves a step again and is killed before the other rank does.
#[test]
fn saves_from_before_and_after_a_return_are_never_joined() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    for step in [90, 100] {
        save_half(&mut first, 0, step, 1);
        save_half(&mut second, 1, step, 1);
        assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    }
    save_half(&mut first, 0, 100, 2);
    drop((first, second));
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    for (number, engine) in [&first, &second].into_iter().enumerate() {
        let found = engine.restore(100).unwrap();
        let found = &found.tensors[0].data;
        let all = data(100, 1);
        let expected = if found.len() == HALF { &all[number * HALF..(number + 1) * HALF] } else { &all };
        assert!(**found == *expected, "rank {number}: values of the second attempt, or of both");
    }
    save_half(&mut first, 0, 101, 3);
    save_half(&mut second, 1, 101, 3);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [90, 100, 101]);
    check_halves(&host, 100, 1);
}

/// A new agent finds the session of each rank in its arena.
#[test]
fn a_rank_that_restarts_alone_with_a_new_agent_begins_a_session() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
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
    assert_eq!(host.stored_steps(), [1, 2, 4], "step 3 was saved in two attempts");
}

/// A trainer gave up here because the store was unavailable. When the store is back, the job runs on another host.
#[test]
fn an_agent_without_a_trainer_fences_no_other_job() {
    let host = Host::new();
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { folder: Some(elsewhere.engine_folder()), ..host.options() }).unwrap();
    save(&mut other, 1);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    let engine = host.engine();
    assert!(engine.restore(Latest).is_err());
    drop(engine);
    until("the trainer is gone", || host.status().runs[0].ranks[0].trainer.is_none());
    away.back();
    until("the agent has reached the store", || host.status().runs[0].problem.is_none());
    save(&mut other, 2);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    // The next agent does not fence it either. It ends once it has looked at the store.
    host.kill_agent();
    host.run_agent_until_idle();
    save(&mut other, 3);
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    // A trainer that starts here takes the store over.
    let mut engine = host.engine();
    assert_eq!(engine.restore(Latest).unwrap().step, 3);
    save(&mut engine, 4);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4]);
}

#[test]
fn arenas_of_former_ranks_are_removed() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    save_half(&mut first, 0, 1, 1);
    save_half(&mut second, 1, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    // Only rank 1 saves step 2.
    save_half(&mut second, 1, 2, 1);
    drop((first, second));
    let mut alone = host.engine();
    save(&mut alone, 3);
    assert!(alone.wait(Until::Durable, LONG).unwrap().reached);
    let arena = host.engine_folder().join(&host.status().runs[0].key).join("rank-1/arena");
    until("the arena of rank 1 is gone", || !arena.exists());
    host.kill_agent();
    save(&mut alone, 4);
    alone.finish().unwrap();
    until("the run is cleared", || host.status().runs.is_empty());
    assert_eq!(host.stored_steps(), [1, 3, 4]);
}

/// Raw states of two ranks wait when a job of one rank starts.
#[test]
fn waiting_states_are_encoded_before_a_job_of_another_size_continues() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    save_half(&mut first, 0, 1, 1);
    save_half(&mut second, 1, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save_half(&mut first, 0, 2, 1);
    save_half(&mut second, 1, 2, 1);
    host.kill_agent();
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

/// The job changes from encoding in the agent to inline encoding, and back.
#[test]
fn waiting_states_are_encoded_before_a_trainer_encodes_inline() {
    let host = Host::new();
    let inline = || EngineOptions { encode: Encode::Inline, ..host.options() };
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    save(&mut engine, 2);
    host.kill_agent();
    drop(engine);
    let mut engine = Engine::start(inline()).unwrap();
    assert_eq!(engine.restore(Latest).unwrap().step, 2);
    save(&mut engine, 3);
    drop(engine);
    let mut engine = Engine::start(inline()).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Memory), "an older raw state is not the newest");
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

/// A host trusts its memory because the store is unavailable, while the job has continued on another host.
#[test]
fn a_restart_while_the_store_is_unavailable_does_not_fence_a_job_on_another_host() {
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
    let mut fenced = None;
    until("the run is fenced", || {
        match engine.wait(Until::Durable, Duration::from_secs(1)) {
            Err(error) => fenced = Some(error),
            Ok(waited) => assert!(!waited.reached, "{waited:?}"),
        }
        fenced.is_some()
    });
    let error = fenced.unwrap();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.message().contains("step 40 was saved there by another job"), "{error}");
    State::new(41, SMALL).save(&mut other).unwrap();
    assert!(other.wait(Until::Durable, LONG).unwrap().reached, "the job on the other host was not fenced");
    assert_eq!(host.stored_steps(), [1, 2, 3, 40, 41]);
    drop((engine, other));
    assert_eq!(host.engine().restore(Latest).unwrap().step, 41);
}

/// A new host could not reach the store when its engine started. It continues from the step that it restores later.
#[test]
fn a_job_continues_from_a_store_that_was_unavailable_at_its_start() {
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

/// Saves 60 steps with an agent that encodes few of them, until they are durable.
fn drop_most_of_60_steps(host: &Host) {
    let back_pressure = BackPressure::DropOldestUncommitted;
    let mut engine = Engine::start(EngineOptions { back_pressure, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    (2..=60).for_each(|step| _ = save(&mut engine, step));
    host.signal_agent(Signal::CONT);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
}

/// Encoded snapshots of the agent fill memory. The agent removes them once the store has them all, so that the trainer has room.
#[test]
fn a_trainer_that_encodes_begins_although_memory_is_full() {
    let host = Host::new();
    drop_most_of_60_steps(&host);
    let memory_cap = Some(host.status().runs[0].memory_bytes);
    let mut engine = Engine::start(EngineOptions { encode: Encode::Inline, memory_cap, ..host.options() }).unwrap();
    for step in 61..=62 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    check_stored(&host.store(), 62, SMALL);
}

/// The agent before has counted far more saves than there are entries in memory's log, by which a trainer that encodes by itself
/// numbers its saves.
#[test]
fn a_save_of_a_trainer_that_encodes_is_not_durable_because_of_an_older_one() {
    let host = Host::new();
    drop_most_of_60_steps(&host);
    let mut engine = Engine::start(EngineOptions { encode: Encode::Inline, ..host.options() }).unwrap();
    let away = Away::take(&host.store_path());
    save(&mut engine, 61);
    // A slow agent can only hide a fault here.
    let waited = engine.wait(Until::Durable, Duration::from_millis(300)).unwrap();
    assert!(!waited.reached, "the store is away: {waited:?}");
    away.back();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    check_stored(&host.store(), 61, SMALL);
}

#[test]
fn steps_forgotten_in_the_store_are_not_restored_from_memory() {
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

/// A save after out-of-date memory was removed is new for the next start, too.
#[test]
fn saves_after_memory_was_removed_are_not_out_of_date() {
    let host = Host::new();
    let mut engine = host.engine();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    drop(engine);
    save_elsewhere(&host, 2);
    let mut engine = host.engine();
    assert_eq!(engine.restore(Latest).unwrap().step, 2);
    let away = Away::take(&host.store_path());
    save(&mut engine, 3);
    host.kill_agent();
    drop(engine);
    away.back();
    let mut engine = host.engine();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Slot));
    drop(found);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

/// A state no longer fits into the arena, and the agent is stopped.
#[test]
fn a_save_that_needs_a_larger_arena_may_be_skipped() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { back_pressure: BackPressure::Skip, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.signal_agent(Signal::STOP);
    assert!(save(&mut engine, 2).generation.is_some());
    let large = State::new(3, 4 * SMALL);
    assert_eq!(large.save(&mut engine).unwrap().generation, None);
    host.signal_agent(Signal::CONT);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert!(large.save(&mut engine).unwrap().generation.is_some());
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

/// An agent cannot finish its work because the store is unavailable. It ends when a trainer needs an agent.
#[test]
fn an_agent_that_is_about_to_end_lets_a_trainer_start_another() {
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
    until("the agent drains", || host.status().draining);
    let mut engine = host.engine();
    assert_ne!(host.agent(), draining);
    assert_eq!(engine.restore(Latest).unwrap().step, 2);
    save(&mut engine, 3);
    away.back();
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
}

/// The agent of a finished run dies before the last tier has everything.
#[test]
fn the_next_agent_clears_a_finished_run() {
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
    host.kill_agent();
    let run = host.engine_folder().join(key);
    assert!(run.join("memory-0").exists());
    away.back();
    host.run_agent_until_idle();
    assert!(!run.join("rank-0/arena").exists() && !run.join("memory-0").exists(), "memory is freed");
    let store = tensorcask::blocking::Store::open(far.to_str().unwrap()).unwrap();
    check_stored(&store, 2, SMALL);
}
