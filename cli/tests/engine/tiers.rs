//! Several tiers: commits in the first, copies to the others in the background, restores from the nearest undamaged
//! copy.

use std::process::Command;
use std::time::Duration;

use tensorcask::Latest;
use tensorcask::blocking::{Store, maintain};
use tensorcask::{Dtype, Metadata, Policy, Precision, TensorView};
use tensorcask_engine::{Engine, EngineOptions, Source, Until};

use super::host::*;

fn options(host: &Host) -> EngineOptions {
    EngineOptions { next_tiers: vec![far(host)], ..host.options() }
}

fn far(host: &Host) -> String {
    host.stores.path().join("far").to_str().unwrap().to_owned()
}

fn wait_for_all_tiers(host: &Host) {
    until("all tiers have everything", || host.status().runs[0].tiers.iter().all(|tier| tier.pending == 0));
}

/// Places of each step, as reported by `ls`.
fn places(host: &Host) -> Vec<(u64, Vec<String>)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
    let output = command.args(["ls", "--json"]).arg(host.store_path()).env("TENSORCASK_ENGINE_DIR", host.engine_folder()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let places =
        |row: &serde_json::Value| row["places"].as_array().unwrap().iter().map(|place| place.as_str().unwrap().to_owned()).collect();
    report["snapshots"].as_array().unwrap().iter().map(|row| (row["step"].as_u64().unwrap(), places(row))).collect()
}

#[test]
fn a_snapshot_is_sent_to_the_store_while_it_is_encoded() {
    let host = Host::new();
    let mut engine = Engine::start(EngineOptions { policy: Policy::Full, ..options(&host) }).unwrap();
    let save = |engine: &mut Engine, step: u64| {
        let data = noise(step, 24 << 20);
        let tensors = [TensorView::new("w", Dtype::U8, &[data.len() as u64], &data).unwrap()];
        engine.save(step, &tensors, &[], &Metadata::default()).unwrap();
    };
    for step in 1..=3 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let ahead: Vec<u64> = host.status().runs[0].saves.iter().map(|save| save.ahead_bytes.unwrap()).collect();
    assert!(ahead[1..].iter().any(|bytes| *bytes >= 8 << 20), "{ahead:?}");
    // The agent dies at any point of that.
    for step in 4..=7 {
        save(&mut engine, step);
        vary_moment(Duration::from_millis(30 * (step - 4)));
        host.kill_agent();
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    for url in [host.store_path().to_str().unwrap().to_owned(), far(&host)] {
        let store = Store::open(&url).unwrap();
        assert!(maintain::verify(&store, &Default::default()).unwrap().is_clean());
        for step in 1..=7 {
            let stored = store.snapshot(step).unwrap().read("w", &Default::default()).unwrap();
            assert!(stored.data == noise(step, 24 << 20), "{url}: step {step}");
        }
    }
}

#[test]
fn the_first_tier_commits_and_the_second_follows() {
    let host = Host::new();
    let mut engine = Engine::start(options(&host)).unwrap();
    save(&mut engine, 1);
    save(&mut engine, 2);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    // Commits continue while the second tier is unavailable.
    let away = Away::take(far(&host).as_ref());
    save(&mut engine, 3);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    until("the problem is reported", || host.status().runs[0].tiers[1].problem.is_some());
    let found = places(&host);
    assert_eq!(found.len(), 3);
    assert!(found[2].1.contains(&"memory".to_owned()) && !found[2].1.contains(&far(&host)), "{found:?}");
    away.back();
    wait_for_all_tiers(&host);
    assert!(
        places(&host)
            .iter()
            .all(|(_, places)| places.contains(&far(&host)) && places.contains(&host.store_path().to_str().unwrap().to_owned()))
    );
    let store = Store::open(&far(&host)).unwrap();
    (1..=3).for_each(|step| check_stored(&store, step, SMALL));
}

#[test]
fn a_host_that_lost_memory_and_disk_continues_from_the_far_tier() {
    let host = Host::new();
    let mut engine = Engine::start(options(&host)).unwrap();
    for step in 1..=3 {
        save(&mut engine, step);
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    drop(engine);
    // Without memory, the first tier serves.
    host.kill_agent();
    std::fs::remove_dir_all(host.engine_folder()).unwrap();
    let engine = Engine::start(options(&host)).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, matches!(found.source, Source::Tier(0, _))), (3, true));
    check(&found, SMALL);
    drop(found);
    drop(engine);
    // Without memory and disk, the second tier serves.
    host.kill_agent();
    std::fs::remove_dir_all(host.engine_folder()).unwrap();
    std::fs::remove_dir_all(host.store_path()).unwrap();
    let mut engine = Engine::start(options(&host)).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, matches!(found.source, Source::Tier(1, _))), (3, true));
    check(&found, SMALL);
    drop(found);
    save(&mut engine, 4);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    let steps = |url: &str| Store::open(url).unwrap().snapshots().unwrap().iter().map(|info| info.record.step).collect::<Vec<_>>();
    assert_eq!((host.stored_steps(), steps(&far(&host))), (vec![4], vec![1, 2, 3, 4]));
}

/// Needs an S3 server, which `bash tests/run` starts. Prints `NOT RUN` without one.
#[test]
fn the_second_tier_may_be_s3() {
    let Ok(bucket) = std::env::var("TENSORCASK_TEST_STORE") else {
        eprintln!("NOT RUN: a tier on S3 needs a server; use `bash tests/run`");
        return;
    };
    let host = Host::new();
    let far = format!("{bucket}/engine/{}", tensorcask::wire::Id::random().unwrap());
    let options = EngineOptions { next_tiers: vec![far.clone()], ..host.options() };
    let mut engine = Engine::start(options.clone()).unwrap();
    for step in 1..=3 {
        save(&mut engine, step);
    }
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    assert!(places(&host).iter().all(|(_, places)| places.contains(&far)));
    check_stored(&Store::open(&far).unwrap(), 3, SMALL);
    drop(engine);
    host.kill_agent();
    std::fs::remove_dir_all(host.engine_folder()).unwrap();
    std::fs::remove_dir_all(host.store_path()).unwrap();
    let engine = Engine::start(options).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (3, &Source::Tier(1, far)));
    check(&found, SMALL);
}

#[test]
fn every_tier_has_the_rounding_report() {
    let host = Host::new();
    let options = EngineOptions { precision: Precision::near(), ..options(&host) };
    let mut engine = Engine::start(options.clone()).unwrap();
    let numbers: Vec<u8> = (1..=10_000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
    let tensors = [TensorView::new("optimizer.exp_avg.w", Dtype::F32, &[100, 100], &numbers).unwrap()];
    for step in 1..=3 {
        engine.save(step, &tensors, &[], &Metadata::default()).unwrap();
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    wait_for_all_tiers(&host);
    for store in [host.store(), Store::open(&far(&host)).unwrap()] {
        for step in 1..=3 {
            let errors = store.snapshot(step).unwrap().rounding().unwrap();
            assert_eq!((errors.len(), errors[0].setting.as_str()), (1, "loguniform:16"), "step {step}");
        }
    }
    // The rounding report is no part of the restored state, so that the trainer can save the state again.
    drop(engine);
    let engine = Engine::start(options).unwrap();
    for step in [1u64, 3] {
        let restored = engine.restore(step).unwrap();
        assert!(restored.blobs.is_empty(), "step {step}: {:?}", restored.blobs);
    }
}

/// The profile follows the training, whichever process encodes and whether memory still has the saves before.
#[test]
fn the_precision_auto_goes_on_after_the_agent_and_memory_are_lost() {
    let host = Host::new();
    let options = EngineOptions { precision: Precision::auto(), ..host.options() };
    let mut engine = Engine::start(options.clone()).unwrap();
    for step in 1u16..=10 {
        if step == 5 || step == 9 {
            drop(engine);
            host.kill_agent();
            if step == 9 {
                std::fs::remove_dir_all(host.engine_folder()).unwrap();
            }
            engine = Engine::start(options.clone()).unwrap();
        }
        let sign = |at: u16| if at.count_ones().is_multiple_of(2) { 1e-3 } else { -1e-3 };
        let weights = (0..4096u16).map(|at| f32::from(at).sin() + sign(at) * f32::from(step));
        let bytes: Vec<u8> = weights.flat_map(f32::to_le_bytes).collect();
        let tensors = [TensorView::new("optim.master.w", Dtype::F32, &[64, 64], &bytes).unwrap()];
        engine.save(step.into(), &tensors, &[], &Metadata::default()).unwrap();
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let profile = |step: u64| host.store().snapshot(step).unwrap().inspect().precision().map(|decision| decision.profile.name());
    let profiles: Vec<&str> = (1..=10).filter_map(profile).collect();
    let [lossless, near, compact] = ["lossless", "near", "compact"];
    assert_eq!(profiles, [lossless, lossless, lossless, near, near, near, compact, compact, compact, compact]);
    let refused = Engine::start(EngineOptions { world: 2, ..options }).unwrap_err();
    assert!(refused.message().contains("use lossless, near or compact"), "{refused}");
}

/// The first tier is the disk of one host, the second a store that all hosts share.
#[test]
fn a_job_that_continued_on_another_host_is_followed_through_the_far_tier() {
    continue_elsewhere_and_return(|_| ());
}

/// The agent forgets the abandoned step itself, before or after it asks whether another job has written to the disk.
#[test]
fn an_abandoned_step_that_is_already_forgotten_fences_nobody() {
    continue_elsewhere_and_return(|host| _ = host.store().forget(&[4]).unwrap());
}

/// Saves steps 1 to 4 on one host and 4 to 6 on another, calls `between`, and saves step 7 on the first host.
fn continue_elsewhere_and_return(between: impl Fn(&Host)) {
    let host = Host::new();
    let mut engine = Engine::start(options(&host)).unwrap();
    (1..=3).for_each(|step| _ = save(&mut engine, step));
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    // The host is lost before step 4 reaches the second tier.
    let away = Away::take(far(&host).as_ref());
    save(&mut engine, 4);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    host.kill_agent();
    drop(engine);
    away.back();
    let elsewhere = Host::new();
    let mut other = Engine::start(EngineOptions { next_tiers: vec![far(&host)], ..elsewhere.options() }).unwrap();
    assert_eq!(other.restore(Latest).unwrap().step, 3);
    (4..=6).for_each(|step| _ = save(&mut other, step));
    assert!(other.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&elsewhere);
    drop(other);
    between(&host);
    // The job returns to the first host, whose memory and disk end with step 4.
    let mut engine = Engine::start(options(&host)).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, &found.source), (6, &Source::Tier(1, far(&host))));
    check(&found, SMALL);
    drop(found);
    // The steps for an agreement begin with the step that a restore would choose.
    let loadable = engine.loadable().unwrap();
    assert_eq!(loadable.first().map(|found| found.step), Some(6), "{loadable:?}");
    save(&mut engine, 7);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    // The abandoned step 4 was not copied to the second tier.
    let shared = Store::open(&far(&host)).unwrap();
    let steps: Vec<u64> = shared.snapshots().unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!((steps, host.stored_steps()), (vec![1, 2, 3, 4, 5, 6, 7], vec![1, 2, 3, 7]));
    assert_eq!(shared.snapshot(Latest).unwrap().step(), 7);
    drop(engine);
    assert_eq!(Engine::start(options(&host)).unwrap().restore(Latest).unwrap().source, Source::Slot);
}

#[test]
fn steps_in_memory_are_loadable_while_a_tier_is_unavailable() {
    let host = Host::new();
    let mut engine = Engine::start(options(&host)).unwrap();
    (1..=2).for_each(|step| _ = save(&mut engine, step));
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    wait_for_all_tiers(&host);
    let _away = Away::take(far(&host).as_ref());
    let steps = |engine: &Engine| engine.loadable().unwrap().iter().map(|found| found.step).collect::<Vec<_>>();
    assert_eq!(steps(&engine), [2, 1]);
    let _away = Away::take(&host.store_path());
    assert_eq!(steps(&engine), [2, 1]);
}

/// A step that is damaged in the first tier is restored from the second, rather than an older step.
#[test]
fn a_step_damaged_in_the_first_tier_is_restored_from_the_second() {
    let host = Host::new();
    let mut engine = Engine::start(options(&host)).unwrap();
    for step in 1..=3 {
        save(&mut engine, step);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    wait_for_all_tiers(&host);
    engine.finish().unwrap();
    let mut casks: Vec<_> = std::fs::read_dir(host.store_path().join("casks")).unwrap().map(|entry| entry.unwrap().path()).collect();
    casks.sort_by_key(|path| std::fs::metadata(path).unwrap().modified().unwrap());
    damage(casks.last().unwrap());
    let engine = Engine::start(options(&host)).unwrap();
    let found = engine.restore(Latest).unwrap();
    assert_eq!((found.step, found.source.clone()), (3, Source::Tier(1, far(&host))));
    assert!(found.passed_over.iter().any(|passed| matches!(passed.source, Source::Tier(0, _)) && passed.step == Some(3)));
    check(&found, SMALL);
}
