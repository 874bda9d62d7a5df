//! Starts of a job on many hosts while the store does not answer.

use std::path::Path;

use rustix::process::Signal;
use tensorcask::blocking::Store;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, TensorView};
use tensorcask_engine::{Engine, EngineOptions, Source, Until};

use super::host::*;
use super::hosts::*;

/// A job that has lost a host and the store: steps 1 and 2 are durable, step 3 is in the memory of the hosts only.
fn lose_host_and_store(lost: usize) -> (Job, Away) {
    let mut job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
        start.wait_all();
    }
    let away = Away::take(job.store_path.as_ref());
    start.save_all(3);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Replicated));
    for host in &job.hosts {
        let levels = host.status().runs[0].levels;
        assert_eq!((levels.replicated, levels.durable), (Some(3), Some(2)));
    }
    drop(start);
    job.hosts[lost] = Host::new();
    (job, away)
}

/// All ranks agree on a step, and restore every bit of it from memory.
fn resume(job: &Job, start: &mut Start, round: &str, step: u64, salt: u64) {
    assert_eq!(start.agree(round), [Some(step); WORLD as usize]);
    for (rank, engine) in (0..).zip(&start.engines) {
        let restored = engine.restore(step).unwrap();
        assert_eq!(restored.source, Source::Hosts, "rank {rank}: {:?}", restored.passed_over);
        let whole: Vec<u8> = (0..WORLD).flat_map(|rank| row(step, salt, rank)).collect();
        assert!(*restored.tensors[0].data == whole, "rank {rank}");
    }
    assert_eq!(is_without_store(job), [true; HOSTS as usize]);
}

fn is_without_store(job: &Job) -> Vec<bool> {
    job.hosts.iter().map(|host| host.status().runs[0].hosts.clone().unwrap().is_without_store).collect()
}

#[test]
fn a_job_starts_from_memory_and_commits_once_the_store_answers() {
    let (job, away) = lose_host_and_store(2);
    // Host 1 has copies of these.
    std::fs::read_dir(job.folder_of_run(0).join("mirror/casks")).unwrap().for_each(|cask| damage(&cask.unwrap().path()));
    let mut start = job.start_at_once("second", 2);
    resume(&job, &mut start, "second", 3, 1);
    for step in 4..=5 {
        start.save_all(step);
        (0..HOSTS).for_each(|host| start.wait(host, Until::Encoded));
    }
    away.back();
    start.wait_all();
    assert_eq!(is_without_store(&job), [false; HOSTS as usize]);
    start.save_all(6);
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 4, 5, 6]);
    job.assert_holds(2, 1);
    (4..=6).for_each(|step| job.assert_holds(step, 2));
    assert_eq!(job.sessions().len(), 2, "both sessions led");
    job.assert_clean();
    for engine in start.engines {
        engine.finish().unwrap();
    }
}

#[test]
fn a_second_loss_in_one_outage_costs_no_step_that_was_copied() {
    lose_two_hosts(2, 1);
}

/// Host 2 has the only copies of what host 1 saved before it was lost, until host 1 has copied them back.
#[test]
fn the_loss_of_the_only_copy_of_a_replaced_host_costs_no_step_that_was_copied() {
    lose_two_hosts(1, 2);
}

fn lose_two_hosts(first: usize, second: usize) {
    let (mut job, away) = lose_host_and_store(first);
    let mut start = job.start_at_once("second", 2);
    resume(&job, &mut start, "second", 3, 1);
    start.save_all(4);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Replicated));
    drop(start);
    job.hosts[second] = Host::new();

    let mut start = job.start_at_once("third", 3);
    resume(&job, &mut start, "third", 4, 2);
    start.save_all(5);
    away.back();
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 5]);
    job.assert_holds(5, 3);
    job.assert_clean();
}

#[test]
fn a_start_from_memory_ends_if_another_job_has_written_to_the_store() {
    let (job, away) = lose_host_and_store(2);
    let mut start = job.start_at_once("second", 2);
    resume(&job, &mut start, "second", 3, 1);
    start.save_all(4);
    // Another job reaches the store, while these hosts do not.
    let store = Store::open(away.kept().to_str().unwrap()).unwrap();
    let theirs = [7u8; 64];
    let state = [TensorView::new("theirs", Dtype::U8, &[64], &theirs).unwrap()];
    store.writer(Policy::Full).unwrap().save(4, &state, &[], &Metadata::default()).unwrap();
    away.back();
    for engine in &mut start.engines {
        let error = engine.wait(Until::Durable, LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert!(error.to_string().contains("another job has written to the store since this session began from memory"), "{error}");
    }
    assert_eq!(job.steps(), [1, 2, 4]);
    assert_eq!(job.store().snapshot(4).unwrap().read("theirs", &tensorcask::Slice::all()).unwrap().data, theirs);
    assert_eq!(job.sessions().len(), 1, "the second session never led");
}

#[test]
fn a_start_without_store_and_without_memory_fails() {
    let job = Job::new().with_peers();
    let _away = {
        job.store().writer(Policy::Full).unwrap();
        Away::take(job.store_path.as_ref())
    };
    for error in refused_starts(&job, "first") {
        assert!(error.kind() == ErrorKind::Storage && error.to_string().contains("cannot begin from memory"), "{error}");
    }
}

/// Otherwise the ranks would agree that nothing was ever saved, and train from the start.
#[test]
fn a_start_without_store_fails_if_memory_has_no_whole_step() {
    let (job, away) = lose_host_and_store(2);
    // The only copies of host 2.
    std::fs::remove_dir_all(job.folder_of_run(0).join("replica-2")).unwrap();
    for error in refused_starts(&job, "second") {
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Storage && text.contains("memory has no step with all of its casks"), "{text}");
        assert!(text.contains("the newest step is 2"), "{text}");
    }
    away.back();
    let mut start = job.start_at_once("third", 3);
    assert_eq!(start.agree("third"), [Some(2); WORLD as usize]);
}

/// A fresh host can encode from the moment at which its ranks have started.
#[test]
fn a_fresh_host_saves_if_the_store_goes_away_right_after_its_start() {
    let mut job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    drop(start);
    job.hosts[2] = Host::new();
    let mut start = job.start("second", 2);
    let away = Away::take(job.store_path.as_ref());
    start.save_all(2);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Encoded));
    away.back();
    start.wait_all();
    assert_eq!(job.steps(), [1, 2]);
    job.assert_holds(2, 2);
    job.assert_clean();
}

/// The store may answer some hosts a little later than others.
#[test]
fn a_host_that_reaches_the_store_late_joins_those_that_reached_it() {
    let job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    let lock = job.folder_of_run(2).join("hosts.lock");
    drop(start);
    let away = Away::take(job.store_path.as_ref());
    let engines = std::thread::scope(|scope| {
        let start = |rank| {
            let job = &job;
            scope.spawn(move || tensorcask_engine::Engine::start(job.options(rank, "second")))
        };
        let late: Vec<_> = (2 * RANKS..WORLD).map(start).collect();
        until("the last host asks the others", || std::fs::File::open(&lock).is_ok_and(|lock| lock.try_lock().is_err()));
        away.back();
        let starting: Vec<_> = (0..2 * RANKS).map(start).chain(late).collect();
        starting.into_iter().map(|start| start.join().unwrap().unwrap()).collect()
    });
    let mut start = Start { engines, salt: 2 };
    assert_eq!(is_without_store(&job), [false; HOSTS as usize]);
    assert_eq!(start.agree("second"), [Some(1); WORLD as usize]);
    start.save_all(2);
    start.wait_all();
    assert_eq!(job.steps(), [1, 2]);
}

/// The steps that wait for their commit are those of an earlier agent, too. Otherwise this agent would encode beyond the cap, and
/// lose a state when memory is full.
#[test]
fn an_agent_that_begins_with_full_memory_waits_for_the_store() {
    let job = Job::new();
    let engine = |rank| Engine::start(EngineOptions { memory_cap: Some(1), ..job.options(rank, "first") }).unwrap();
    let mut start = Start { engines: (0..WORLD).map(engine).collect(), salt: 1 };
    start.save_all(1);
    start.wait_all();
    let away = Away::take(job.store_path.as_ref());
    // Nothing waits for its commit, so room would never come: this step is encoded beyond the cap.
    start.save_all(2);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Encoded));
    start.save_all(3);
    let host = &job.hosts[0];
    let waits =
        || host.status().runs.first().and_then(|run| run.problem.clone()).is_some_and(|problem| problem.contains("wait for their commit"));
    until("step 3 waits", waits);
    host.kill_agent();
    let mut agent = host.start_agent(&[]);
    until("step 3 waits in the next agent", waits);
    let sessions = std::fs::read_dir(job.folder_of_run(0).join("mirror/receipts")).unwrap();
    let steps: usize = sessions.map(|session| std::fs::read_dir(session.unwrap().path()).unwrap().filter(is_step).count()).sum();
    assert!(steps <= 2, "{steps} steps in the mirror");
    away.back();
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 3]);
    job.assert_clean();
    for engine in start.engines {
        engine.finish().unwrap();
    }
    host.signal_agent(Signal::KILL);
    agent.wait().unwrap();
}

fn is_step(entry: &std::io::Result<std::fs::DirEntry>) -> bool {
    entry.as_ref().is_ok_and(|entry| entry.path().is_dir() && entry.file_name() != "ended")
}

/// The mirror of one host lacks the last entry of the log when the store goes away.
#[test]
fn hosts_with_different_mirrors_save_steps_that_can_be_restored() {
    // No other host takes over from the leader while that is stopped.
    let mut job = Job { patience: LONG, ..Job::new().with_peers() };
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    let logs: Vec<_> = (0..HOSTS).map(|host| job.folder_of_run(host).join("mirror/log")).collect();
    let entries = |host: usize| count_entries(&logs[host]);
    start.save(0, 2);
    start.save(1, 2);
    job.wait_for_receipts(2, 2 * RANKS);
    job.hosts[0].signal_agent(Signal::STOP);
    start.save(2, 2);
    job.wait_for_receipts(2, WORLD);
    job.hosts[2].signal_agent(Signal::STOP);
    job.hosts[0].signal_agent(Signal::CONT);
    until("step 2 is committed", || job.steps() == [1, 2]);
    until("the others have the entry", || entries(0) == 3 && entries(1) == 3);
    assert_eq!(entries(2), 2);
    let away = Away::take(job.store_path.as_ref());
    job.hosts[2].signal_agent(Signal::CONT);
    for step in 3..=5 {
        start.save_all(step);
        (0..HOSTS).for_each(|host| start.wait(host, Until::Replicated));
    }
    drop(start);
    job.hosts[1] = Host::new();
    let mut start = job.start_at_once("second", 2);
    resume(&job, &mut start, "second", 5, 1);
    start.save_all(6);
    away.back();
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 6]);
    job.assert_holds(6, 2);
    job.assert_clean();
}

/// The memory of the hosts keeps a base longer than the steps after the base.
#[test]
fn a_newer_step_in_the_store_comes_before_an_older_one_in_memory() {
    let mut job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
        start.wait_all();
    }
    job.wait_for_copy(2, 1, 2);
    let replica = job.folder_of_run(2).join("replica-1/casks");
    let before = files_in(&replica);
    start.save_all(3);
    start.wait_all();
    job.wait_for_copy(2, 1, 3);
    drop(start);
    // Only the store has this cask of host 1.
    std::fs::remove_file(files_in(&replica).difference(&before).next().unwrap()).unwrap();
    job.hosts[1] = Host::new();
    let mut start = job.start_at_once("second", 2);
    assert_eq!(start.agree("second"), [Some(3); WORLD as usize]);
}

/// Every start would agree on the same step otherwise, and fail.
#[test]
fn a_start_after_one_that_found_damage_takes_another_step() {
    let (job, away) = lose_host_and_store(2);
    // The only copies of what host 2 saved: all but one of its casks are whole.
    let replica = job.folder_of_run(0).join("replica-2");
    let sessions = files_in(&replica.join("receipts"));
    let receipts = sessions.first().unwrap().join(format!("{:020}-{:020}/4-5.json", 0, 3));
    damage(&named_cask(&replica.join("casks"), &receipts));
    let mut start = job.start_at_once("second", 2);
    assert_eq!(start.agree("second"), [Some(3); WORLD as usize]);
    // The first rank of each host finds the damage.
    let errors: Vec<String> = start.engines.iter().map(|engine| engine.restore(3).unwrap_err().to_string()).collect();
    assert_eq!(errors.iter().filter(|error| error.contains("checksum")).count(), HOSTS as usize, "{errors:?}");
    drop(start);
    let mut start = job.start_at_once("third", 3);
    resume(&job, &mut start, "third", 2, 1);
    start.save_all(3);
    away.back();
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 3]);
    job.assert_holds(3, 3);
}

/// The second start leads the log, and all of its processes are killed before it saves.
#[test]
fn steps_in_memory_outlast_a_start_that_saved_nothing() {
    for store_is_there in [true, false] {
        let (job, away) = lose_host_and_store(2);
        let start = lead_with_one_host(&job, away);
        let mirror = job.folder_of_run(0).join("mirror/log");
        let store = Path::new(&job.store_path).join("log");
        until("its host has the log in memory", || count_entries(&mirror) == count_entries(&store));
        // Otherwise, they would give up the step of host 0.
        job.hosts.iter().for_each(|host| host.signal_agent(Signal::KILL));
        job.hosts.iter().for_each(Host::agent_is_gone);
        drop(start);
        let away = (!store_is_there).then(|| Away::take(job.store_path.as_ref()));
        resume_after_a_start_that_saved_nothing(&job, away);
    }
}

/// The second start kept its step in memory. Those after it lead the log, and are killed before they save.
#[test]
fn steps_of_a_start_without_the_store_outlast_starts_that_saved_nothing() {
    let (job, away) = lose_host_and_store(2);
    let mut start = job.start_at_once("second", 2);
    resume(&job, &mut start, "second", 3, 1);
    start.save_all(4);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Replicated));
    let kill_all = || {
        job.hosts.iter().for_each(|host| host.signal_agent(Signal::KILL));
        job.hosts.iter().for_each(Host::agent_is_gone);
    };
    kill_all();
    drop(start);
    away.back();
    for (session, sessions) in [("third", 2), ("fourth", 3)] {
        let mut start = job.start_at_once(session, 3);
        assert_eq!(start.agree(session), [Some(4); WORLD as usize], "{session}");
        until("the start leads the log", || job.sessions().len() == sessions);
        kill_all();
    }
    let mut start = job.start_at_once("fifth", 5);
    assert_eq!(start.agree("fifth"), [Some(4); WORLD as usize]);
    let whole: Vec<u8> = (0..WORLD).flat_map(|rank| row(4, 2, rank)).collect();
    for engine in &start.engines {
        assert!(*engine.restore(4).unwrap().tensors[0].data == whole);
    }
    start.save_all(5);
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 5]);
    job.assert_clean();
}

/// Another host has led the log after the first, to give up the step of the second start.
#[test]
fn steps_in_memory_outlast_a_start_that_gave_up_its_only_step() {
    let (job, away) = lose_host_and_store(2);
    drop(lead_with_one_host(&job, away));
    until("a host gives up step 4", || job.leaders().iter().any(|leader| leader.above == Some(4)));
    resume_after_a_start_that_saved_nothing(&job, None);
}

/// The second start leads the log, and only host 0 saves.
fn lead_with_one_host(job: &Job, away: Away) -> Start {
    away.back();
    let mut start = job.start_at_once("second", 2);
    assert_eq!(start.agree("second"), [Some(3); WORLD as usize]);
    start.save(0, 4);
    start.wait(0, Until::Encoded);
    until("the second start leads the log", || job.sessions().len() == 2);
    start
}

fn resume_after_a_start_that_saved_nothing(job: &Job, away: Option<Away>) {
    let mut start = job.start_at_once("third", 3);
    assert_eq!(start.agree("third"), [Some(3); WORLD as usize], "without the store: {}", away.is_some());
    assert!(start.engines.iter().all(|engine| engine.restore(3).is_ok()));
    start.save_all(4);
    if let Some(away) = away {
        away.back();
    }
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 4]);
    job.assert_holds(4, 3);
}

/// Number of log entries in a folder, without those that are being written.
fn count_entries(log: &Path) -> usize {
    files_in(log).iter().filter(|name| name.extension().is_some_and(|extension| extension == "json")).count()
}

/// Errors of all ranks.
fn refused_starts(job: &Job, session: &str) -> Vec<tensorcask::Error> {
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || tensorcask_engine::Engine::start(job.options(rank, session)));
        let starting: Vec<_> = (0..WORLD).map(start).collect();
        starting.into_iter().map(|start| start.join().unwrap().unwrap_err()).collect()
    })
}
