//! The agent of one of many hosts is killed, and the next one knows what matters of the session.

use std::process::Child;
use std::time::Duration;

use tensorcask_engine::{Engine, Until};

use super::host::*;
use super::hosts::*;

/// An agent that the test starts, and ends with the value.
struct NextAgent<'h> {
    host: &'h Host,
    process: Child,
}

impl<'h> NextAgent<'h> {
    fn start(host: &'h Host) -> Self {
        Self { host, process: host.start_agent(&[]) }
    }
}

impl Drop for NextAgent<'_> {
    fn drop(&mut self) {
        if self.host.agent().is_some() {
            self.host.kill_agent();
        }
        let _ = self.process.wait();
    }
}

/// A job whose first step is durable.
fn job_after_a_step() -> (Job, Start) {
    let job = Job::new();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    (job, start)
}

/// The last step of a rank is given up, because host 1 did not save it.
fn assert_given_up(engine: &mut Engine) {
    let waited = engine.wait(Until::Durable, LONG).unwrap();
    assert!(!waited.reached && waited.failures[0].message.contains("rank 2 to 3 did not save"), "{waited:?}");
}

#[test]
fn a_new_agent_knows_which_ranks_have_ended() {
    let (job, mut start) = job_after_a_step();
    // Hosts 0 and 2 save another step. One rank of host 1 has ended.
    start.save(0, 2);
    start.save(2, 2);
    job.wait_for_receipts(2, 4);
    start.engines.remove(3).finish().unwrap();
    job.hosts[1].kill_agent();
    // The other rank of host 1 ends. Its trainer starts the next agent.
    start.engines.remove(2).finish().unwrap();
    start.engines.iter_mut().for_each(assert_given_up);
    assert_eq!(job.steps(), [1]);
}

#[test]
fn a_new_agent_removes_what_interrupted_writes_left_in_memory() {
    let (job, start) = job_after_a_step();
    let host = &job.hosts[1];
    let run = host.engine_folder().join(&host.status().runs[0].key);
    host.kill_agent();
    let casks = run.join("mirror/casks");
    let left = casks.join("name#1");
    let cask = files_in(&casks).pop_first().unwrap();
    std::fs::write(&left, b"part").unwrap();
    let _agent = NextAgent::start(host);
    until("the file is removed", || !left.exists());
    assert!(cask.exists());
    drop(start);
}

#[test]
fn a_new_agent_sees_that_trainers_ended_without_an_agent() {
    let (job, mut start) = job_after_a_step();
    start.save(0, 2);
    start.save(2, 2);
    job.wait_for_receipts(2, 4);
    job.hosts[1].kill_agent();
    // No agent hears of it.
    drop(start.engines.drain(2..4));
    let _agent = NextAgent::start(&job.hosts[1]);
    start.engines.iter_mut().for_each(assert_given_up);
}

/// The new agent must not tell the store that the ranks have ended before it has uploaded what their slots hold.
#[test]
fn the_last_step_of_ranks_that_ended_without_an_agent_is_committed() {
    let (job, mut start) = job_after_a_step();
    for step in 2..=10 {
        start.save_all(step);
        job.hosts[1].kill_agent();
        if step == 10 {
            drop(start.engines.drain(2..4));
        }
        let _agent = NextAgent::start(&job.hosts[1]);
        for engine in &mut start.engines {
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        }
    }
    assert_eq!(job.steps(), (1..=10).collect::<Vec<_>>());
}

/// A start that fails leaves no sign that its rank has ended.
#[test]
fn a_rank_whose_first_start_failed_saves_with_the_next_agent() {
    let job = Job::new();
    let start = job.start("zeroth", 1);
    drop(start);
    let away = Away::take(job.store_path.as_ref());
    assert!(Engine::start(job.options(2, "first")).is_err());
    away.back();
    let mut start = job.start("first", 2);
    start.save_all(1);
    start.wait_all();
    job.hosts[1].kill_agent();
    let _agent = NextAgent::start(&job.hosts[1]);
    // The others are first, and the new agent of host 1 waits for its trainers.
    for step in 2..=4 {
        start.save(0, step);
        start.save(2, step);
    }
    assert!(!start.engines[0].wait(Until::Durable, Duration::from_millis(1)).unwrap().failed);
    (2..=4).for_each(|step| start.save(1, step));
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 3, 4]);
}

#[test]
fn a_new_agent_knows_an_older_save_that_is_given_up_later() {
    let (job, mut start) = job_after_a_step();
    // Only host 1 saves step 2.
    start.save(1, 2);
    start.wait(1, Until::Encoded);
    // So many more steps that step 2 is in no slot any more.
    for step in 3..=8 {
        start.save(1, step);
        start.wait(1, Until::Encoded);
    }
    job.hosts[1].kill_agent();
    let _agent = NextAgent::start(&job.hosts[1]);
    for step in 3..=8 {
        start.save(0, step);
        start.save(2, step);
    }
    start.wait_all();
    for engine in &mut start.engines[2..4] {
        let waited = engine.wait_for(2, Until::Durable, LONG).unwrap();
        assert!(!waited.reached && waited.failures[0].message.contains("did not save"), "{waited:?}");
        assert!(engine.wait_for(3, Until::Durable, LONG).unwrap().reached);
    }
    assert_eq!(job.steps(), [1, 3, 4, 5, 6, 7, 8]);
}
