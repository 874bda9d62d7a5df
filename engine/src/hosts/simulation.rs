//! Simulation of a job on many hosts: deterministic by seed, and far faster than the events that it simulates.
//!
//! Hosts copy steps, upload and commit through a store with put if absent. Requests take time, are lost before or after
//! they take effect, and survive the death of their sender. The store answers nobody for a while. Hosts crash, are cut off,
//! are slow, and have clocks that disagree. Agents are killed and replaced. The job starts again in a new session, while hosts of the old one live on,
//! and returns to older steps within a session.
//!
//! `TENSORCASK_SIMULATION_SEEDS` sets the number of seeds of each size.

use super::simulated_cluster::{Cluster, Counts};
use super::simulated_setup::{Mistake, Setup};

/// Runs a seed; returns the first violation.
fn run(seed: u64, setup: Setup) -> Option<String> {
    let mut cluster = Cluster::new(seed, setup);
    cluster.run();
    cluster.violation()
}

fn seeds(default: u64) -> u64 {
    std::env::var("TENSORCASK_SIMULATION_SEEDS").map_or(default, |text| text.parse().expect("a number of seeds"))
}

/// Runs seeds on all processors, and fails with the first that violates an invariant.
fn assert_clean(first: u64, count: u64, setup: impl Fn(u64) -> Setup + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let setup = &setup;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                scope.spawn(move || {
                    (first..first + count).filter(|seed| seed % threads == worker).find_map(|seed| Some((seed, run(seed, setup(seed))?)))
                })
            })
            .collect();
        for worker in workers {
            let found = worker.join().expect("a seed panicked");
            assert_eq!(found, None, "seed and violation");
        }
    });
}

#[test]
fn no_seed_of_3_to_8_hosts_violates_an_invariant() {
    assert_clean(0, seeds(198), |seed| Setup::small(seed, Mistake::None));
}

/// The thorough run has one large seed for each 99 small ones.
#[test]
fn no_seed_of_64_hosts_with_512_ranks_violates_an_invariant() {
    assert_clean(1_000_000, seeds(198).div_ceil(99), |_| Setup { hosts: 64, ranks_per_host: 8, mistake: Mistake::None });
}

#[test]
fn a_seed_gives_the_same_run_again() {
    let trace = |seed| {
        let mut cluster = Cluster::new(seed, Setup::small(seed, Mistake::None));
        cluster.run();
        (cluster.store.log.clone(), cluster.requests)
    };
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}

/// Without these, a quiet simulation would prove nothing.
#[test]
fn faults_happen_and_steps_are_committed() {
    let mut total = Counts::default();
    for seed in 0..60 {
        let mut cluster = Cluster::new(seed, Setup::small(seed, Mistake::None));
        cluster.run();
        total.add(&cluster.counts);
    }
    let things = [
        "commits",
        "takeovers",
        "sessions",
        "returns",
        "host_deaths",
        "agent_deaths",
        "partitions",
        "outages",
        "lost_after_effect",
        "lost_numbers",
        "given_up",
        "ended",
        "impossible",
        "gave_up_in_log",
        "begun_by_another",
        "dropped",
    ];
    assert!(total.all_above(&things, 10), "{total:?}");
}

#[test]
fn each_planted_mistake_is_found() {
    use Mistake::{FenceCheckedOnce, LateBeginning, LostAnswerIsFailure, ParentByEachHost, ReceiptsWithoutSession};
    for mistake in [FenceCheckedOnce, LostAnswerIsFailure, ParentByEachHost, ReceiptsWithoutSession, LateBeginning] {
        let found = (0..3000).find_map(|seed| Some((seed, run(seed, Setup::small(seed, mistake))?)));
        assert!(found.is_some(), "{mistake:?} was not found");
    }
}
