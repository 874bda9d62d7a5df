//! Snapshots in memory that are damaged, or that the store can never take.

use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

use tensorcask::Latest;
use tensorcask::blocking::maintain;
use tensorcask::maintain::GcOptions;
use tensorcask_engine::{Encode, Engine, EngineOptions, Source, Until};

use super::host::*;

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
    host.kill_agent();
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
            let waited = engine.wait(Until::Durable, LONG).unwrap();
            assert!(waited.reached, "step {step}: {waited:?}\n{}", host.agent_log());
        }
        host.store().forget(&[1, 2]).unwrap();
        let all = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
        maintain::gc(&host.store(), &all).unwrap();
        save(&mut engine, 3);
        let third = engine.wait(Until::Durable, LONG).unwrap();
        assert!(third.failed && third.failures[0].step == 3, "{third:?}");
        assert!(third.failures[0].message.contains("no longer has the whole snapshot that this delta refers to"), "{third:?}");
        save(&mut engine, 4);
        let fourth = engine.wait(Until::Durable, LONG).unwrap();
        // The trainer encodes inline, and may have encoded before it hears that its memory was given up.
        assert!(fourth.reached || inline && fourth.failed, "{fourth:?}\n{}", host.agent_log());
        save(&mut engine, 5);
        let fifth = engine.wait(Until::Durable, LONG).unwrap();
        assert!(fifth.reached, "{fifth:?}\n{}", host.agent_log());
        assert_eq!(host.stored_steps(), if fourth.reached { vec![4, 5] } else { vec![5] });
        check_stored(&host.store(), 5, SMALL);
    }
}

/// The store went away in the middle of a snapshot, and answers again after more than half of the age floor. What it has of the
/// snapshot is sent again, and so is no old leftover.
#[test]
fn a_part_of_a_snapshot_that_has_waited_too_long_is_sent_again() {
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
    assert!(second.reached && !second.failed, "{second:?}");
    let sent = host.store_path().join("casks").join(cask.file_name().unwrap());
    assert!(std::fs::metadata(sent).unwrap().modified().unwrap() > long_ago);
    save(&mut engine, 3);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    assert_eq!(host.stored_steps(), [1, 2, 3]);
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

#[test]
fn a_base_damaged_in_memory_is_followed_by_another_base() {
    let host = Host::new();
    // The agent reads the base again for each delta.
    let mut engine = Engine::start(EngineOptions { keep_base_decoded: false, ..host.options() }).unwrap();
    save(&mut engine, 1);
    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    damage_cask_of(&host, 1);
    // A new agent has not read the base yet.
    host.kill_agent();
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
    host.kill_agent();
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

/// The next agent cannot read in memory which saves are lost, or finds another run in the store and removes memory.
#[test]
fn the_next_agent_knows_the_saves_that_memory_has_lost() {
    for (encode, is_other_run) in [(Encode::Agent, false), (Encode::Inline, false), (Encode::Agent, true)] {
        let host = Host::new();
        let mut engine = Engine::start(EngineOptions { encode, ..host.options() }).unwrap();
        save(&mut engine, 1);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        let memory = memory_of(&host);
        let away = Away::take(&host.store_path());
        save(&mut engine, 2);
        assert!(engine.wait(Until::Encoded, LONG).unwrap().reached);
        host.kill_agent();
        match is_other_run {
            false => {
                damage_log(&memory);
                away.back();
            }
            true => {
                away.back();
                let other = Host::new();
                save_elsewhere(&other, 9);
                std::fs::remove_dir_all(host.store_path()).unwrap();
                std::fs::create_dir(host.store_path()).unwrap();
                std::fs::copy(other.store_path().join("store.json"), host.store_path().join("store.json")).unwrap();
            }
        }
        save(&mut engine, 3);
        let third = engine.wait(Until::Durable, LONG).unwrap();
        // A trainer that encodes by itself may have added the third snapshot behind the damage.
        assert!(third.reached || encode == Encode::Inline && third.failed, "{third:?}\n{}", host.agent_log());
        let second = engine.wait_for(2, Until::Durable, LONG).unwrap();
        assert!(second.failed && !second.reached, "{encode:?}, another run: {is_other_run}: {second:?}");
        save(&mut engine, 4);
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        assert!(engine.wait_for(1, Until::Durable, LONG).unwrap().reached);
        check_stored(&host.store(), 4, SMALL);
    }
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
