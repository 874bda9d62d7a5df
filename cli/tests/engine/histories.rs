//! The ranks of a host see different histories of their job. They never restore states of both.

use tensorcask::blocking::Store;
use tensorcask::{ErrorKind, Latest};
use tensorcask_engine::{Engine, EngineOptions, Source, Until};

use super::comebacks::{WORLD, rank, save_half};
use super::host::*;

fn save_both(first: &mut Engine, second: &mut Engine, step: u64, attempt: u8) {
    save_half(first, 0, step, attempt);
    save_half(second, 1, step, attempt);
}

/// The job went on elsewhere. When it comes back, the store answers only one of the two ranks.
#[test]
fn ranks_that_see_different_histories_do_not_start_together() {
    let host = Host::new();
    let mut first = rank(&host, 0);
    let mut second = rank(&host, 1);
    save_both(&mut first, &mut second, 1, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached && second.wait(Until::Durable, LONG).unwrap().reached);
    let away = Away::take(&host.store_path());
    save_both(&mut first, &mut second, 2, 1);
    assert!(first.wait(Until::Encoded, LONG).unwrap().reached);
    drop((first, second));
    host.kill_agent();
    away.back();
    let other = Host::new();
    let there = |rank| EngineOptions { rank, world: WORLD, store: host.options().store, ..other.options() };
    let mut first = Engine::start(there(0)).unwrap();
    let mut second = Engine::start(there(1)).unwrap();
    assert_eq!(first.restore(Latest).unwrap().step, 1);
    save_both(&mut first, &mut second, 2, 2);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached && second.wait(Until::Durable, LONG).unwrap().reached);
    drop((first, second));
    // The first of these ranks does not reach the store and trusts memory, which has step 2 of the first job. It may have restored
    // before the other one starts.
    for (trusting, refused) in [(0, 1), (1, 0)] {
        let away = Away::take(&host.store_path());
        let _trusting = rank(&host, trusting);
        away.back();
        let error = Engine::start(EngineOptions { rank: refused, world: WORLD, ..host.options() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    }
    let first = rank(&host, 0);
    let second = rank(&host, 1);
    for engine in [&first, &second] {
        assert_eq!(engine.loadable().unwrap()[0].step, 2);
        assert!(matches!(engine.restore(2).unwrap().source, Source::Tier(..)), "step 2 of the job elsewhere");
    }
}

/// Step 2 is on the disk of a host that is lost, and the job saves another step 2 elsewhere. When it comes back, the store that
/// all hosts share answers only one of the two ranks.
#[test]
fn ranks_agree_on_no_step_of_which_they_know_different_snapshots() {
    let host = Host::new();
    let far = host.stores.path().join("far");
    let start = |host: &Host, rank| {
        let next_tiers = vec![far.to_str().unwrap().to_owned()];
        Engine::start(EngineOptions { rank, world: WORLD, next_tiers, ..host.options() }).unwrap()
    };
    let has_step = |step| until("the shared store has the step", || Store::open(far.to_str().unwrap()).unwrap().snapshot(step).is_ok());
    let mut first = start(&host, 0);
    let mut second = start(&host, 1);
    save_both(&mut first, &mut second, 1, 1);
    has_step(1);
    let away = Away::take(&far);
    save_both(&mut first, &mut second, 2, 1);
    assert!(first.wait(Until::Durable, LONG).unwrap().reached && second.wait(Until::Durable, LONG).unwrap().reached);
    drop((first, second));
    host.kill_agent();
    std::fs::remove_dir_all(host.engine_folder()).unwrap();
    away.back();
    let elsewhere = Host::new();
    let mut first = start(&elsewhere, 0);
    let mut second = start(&elsewhere, 1);
    assert_eq!(first.restore(Latest).unwrap().step, 1);
    save_both(&mut first, &mut second, 2, 2);
    has_step(2);
    drop((first, second));
    // Rank 1 sees only the disk of its host.
    let away = Away::take(&far);
    let mut second = start(&host, 1);
    let alone = second.offer().unwrap();
    away.back();
    let mut first = start(&host, 0);
    let offers = [first.offer().unwrap(), alone];
    assert_eq!(offers.each_ref().map(|offer| offer.steps.clone()), [[2, 1], [2, 1]]);
    assert_ne!(offers[0].snapshots[&2], offers[1].snapshots[&2]);
    for engine in [&mut first, &mut second] {
        assert_eq!(engine.agree(&offers).unwrap(), Some(1));
        assert_eq!(engine.restore(1).unwrap().step, 1);
    }
    // Both see the shared store, and it is gone again when rank 1 restores.
    let offers = [first.offer().unwrap(), second.offer().unwrap()];
    for engine in [&mut first, &mut second] {
        assert_eq!(engine.agree(&offers).unwrap(), Some(2));
    }
    let source = first.restore(2).unwrap().source;
    assert!(matches!(source, Source::Tier(1, _)), "{source:?}");
    let _away = Away::take(&far);
    let error = second.restore(2).unwrap_err();
    // If the agent has removed the abandoned step from the disk by now, only the shared store has a step 2.
    assert!(matches!(error.kind(), ErrorKind::Conflict | ErrorKind::Storage), "{error}");
}
