//! Mirrors and replicas that are incomplete or damaged: nothing that is needed is removed, and the next pass repairs them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use tensorcask::session::{Mirror, RankState, Refill, Replica, ReplicaReport, SessionLog};
use tensorcask::testing::fault::{Fault, FaultStore, Operation};
use tensorcask::{ErrorKind, Store, StoreOptions};

use super::common::{objects_of, wrap};
use super::mirrors::{Hosts, copy_all, count, memory, ranks};
use super::sessions::{RANKS_PER_HOST, WORLD, at, row, state};

const OWN: std::ops::Range<u32> = 0..RANKS_PER_HOST;

/// Paths of the objects of a folder, ascending.
fn below(folder: &Path) -> Vec<PathBuf> {
    objects_of(folder).into_iter().map(|(name, _)| folder.join(name)).collect()
}

fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Commits entries until the log ends with this number.
async fn lengthen(hosts: &Hosts, last: u64) {
    let store = memory(&hosts.path("store"));
    while SessionLog::open(&store).await.unwrap().sequence() < last {
        store.pin(1).await.unwrap();
        store.unpin(1).await.unwrap();
    }
}

async fn log(hosts: &Hosts) -> SessionLog {
    SessionLog::open(&hosts.store).await.unwrap()
}

/// Follows a mirror as a process that has just started.
async fn follow_anew(hosts: &Hosts, mirror: &Store) {
    Mirror::new(&hosts.store, mirror).follow(&log(hosts).await).await.unwrap();
}

/// The replica of host 0 in the folder `replica`.
fn replica(hosts: &Hosts, keep: u32) -> Replica {
    Replica::new(hosts.hosts[0].1.memory(), &memory(&hosts.path("replica")), hosts.session.session, OWN, keep)
}

/// Two committed steps; the mirror of host 0 has followed both.
async fn two_steps() -> Hosts {
    let mut hosts = Hosts::begin().await;
    for step in 1..=2 {
        hosts.save_durably(step).await;
    }
    let log = log(&hosts).await;
    hosts.hosts[0].1.follow(&log).await.unwrap();
    hosts
}

/// Leaves of a mirror what its host has written since it was replaced: `store.json`, casks and receipts.
fn replace_host(mirror: &Path, before: &[PathBuf]) {
    for path in below(mirror) {
        let name = path.strip_prefix(mirror).unwrap().to_str().unwrap();
        let is_new = (name.starts_with("receipts/") || name.starts_with("casks/")) && !before.contains(&path);
        if !is_new && name != "store.json" {
            std::fs::remove_file(path).unwrap();
        }
    }
}

/// A host that was replaced fills its mirror, and others open the mirror before the log is there.
#[tokio::test]
async fn a_mirror_without_its_log_removes_nothing_from_a_replica_and_is_read_later() {
    let mut hosts = two_steps().await;
    lengthen(&hosts, 70).await;
    let mut replica = replica(&hosts, 1);
    assert!(replica.pull().await.unwrap().problem.is_none());
    let mirror = hosts.path("mirror-0");
    let casks_of_chain = below(&hosts.path("replica/casks"));
    assert_eq!(casks_of_chain.len(), 2 * RANKS_PER_HOST as usize);
    let before = below(&mirror);
    hosts.save(3).await;
    replace_host(&mirror, &before);

    let place = hosts.hosts[0].1.memory().clone();
    let mut refill = Refill::new(&place, OWN);
    assert!(refill.missing().await.unwrap().is_empty());
    assert!(!refill.has_log(), "an empty log is none");
    for _ in 0..2 {
        let report = replica.pull().await.unwrap();
        assert_eq!(report.newest_at_source, Some(at(0, 3)));
        assert!(casks_of_chain.iter().all(|cask| cask.exists()), "the only copy of the chain");
    }
    follow_anew(&hosts, &place).await;
    assert_eq!(refill.missing().await.unwrap().len(), 2 * RANKS_PER_HOST as usize, "the chain");
    assert!(refill.has_log());
    let report = replica.pull().await.unwrap();
    assert_eq!((report.newest, report.missing), (Some(at(0, 3)), 0), "{:?}", report.problem);
    assert!(casks_of_chain.iter().all(|cask| cask.exists()));
}

/// A source whose log ends before the parent of a step does not say which casks the step needs.
#[tokio::test]
async fn a_log_that_lacks_a_parent_removes_nothing_from_a_replica() {
    let mut hosts = two_steps().await;
    hosts.save(3).await;
    hosts.hosts[0].1.prune(hosts.session, at(0, 3)).await.unwrap();
    assert_eq!(replica(&hosts, 1).pull().await.unwrap().newest, Some(at(0, 3)));
    let held = objects_of(&hosts.path("replica"));
    let last = log(&hosts).await.sequence();
    std::fs::remove_file(hosts.path(&format!("mirror-0/log/{last:020}.json"))).unwrap();
    let report = replica(&hosts, 1).pull().await.unwrap();
    assert!(report.newest.is_none());
    assert!(objects_of(&hosts.path("replica")) == held);
}

/// `store.json` comes last, so nobody takes a new mirror for an empty store. A start that was interrupted is resumed.
#[tokio::test]
async fn a_new_mirror_is_a_store_once_its_log_is_there() {
    let hosts = two_steps().await;
    lengthen(&hosts, 70).await;
    let objects = Arc::new(InMemory::new());
    let is_cut = Arc::new(AtomicBool::new(true));
    let cut = is_cut.clone();
    let failing = FaultStore::new(objects.clone(), move |operation, path| match operation {
        Operation::Create if path.as_ref().starts_with("log/") && cut.load(Ordering::Relaxed) => Fault::FailBefore,
        _ => Fault::None,
    });
    let mirror = wrap(Arc::new(failing));
    let log = log(&hosts).await;
    let error = Mirror::new(&hosts.store, &mirror).follow(&log).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
    assert_eq!(SessionLog::open(&mirror).await.unwrap_err().kind(), ErrorKind::NotFound);
    is_cut.store(false, Ordering::Relaxed);
    Mirror::new(&hosts.store, &mirror).follow(&log).await.unwrap();
    assert_eq!(SessionLog::open(&mirror).await.unwrap().sequence(), log.sequence());
}

/// A host comes back after the log has become longer.
#[tokio::test]
async fn followers_of_a_mirror_come_to_the_entries_after_a_catalog() {
    let mut hosts = two_steps().await;
    let place = memory(&hosts.path("returned"));
    follow_anew(&hosts, &place).await;
    let mut refill = Refill::new(&place, OWN);
    assert_eq!(refill.missing().await.unwrap().len(), 2 * RANKS_PER_HOST as usize);
    lengthen(&hosts, 70).await;
    follow_anew(&hosts, &place).await;
    assert_eq!(count(&hosts.path("returned/log")) as u64, log(&hosts).await.sequence(), "no gap");
    lengthen(&hosts, 66 + 2 * Mirror::KEPT_ENTRIES).await;
    hosts.save_durably(3).await;
    follow_anew(&hosts, &place).await;
    assert!((count(&hosts.path("returned/log")) as u64) < log(&hosts).await.sequence(), "a gap");
    assert_eq!(refill.missing().await.unwrap().len(), 3 * RANKS_PER_HOST as usize);
}

/// The mirror of the other host has the entries from 64 before its catalog on, and this one ends before them.
#[tokio::test]
async fn a_mirror_learns_from_another_whose_log_is_shortened() {
    let hosts = two_steps().await;
    let behind = memory(&hosts.path("behind"));
    let other = memory(&hosts.path("other"));
    follow_anew(&hosts, &behind).await;
    lengthen(&hosts, 2 * Mirror::KEPT_ENTRIES).await;
    follow_anew(&hosts, &behind).await;
    let last = SessionLog::open(&behind).await.unwrap().sequence();
    let mut mirror = Mirror::new(&hosts.store, &other);
    mirror.follow(&log(&hosts).await).await.unwrap();
    lengthen(&hosts, last + Mirror::KEPT_ENTRIES).await;
    mirror.follow(&log(&hosts).await).await.unwrap();
    mirror.shorten_log().await.unwrap();
    assert!(!hosts.path("other/log").join(format!("{:020}.json", last + 1)).exists(), "the next entry is gone");
    assert!(Mirror::learn(&other, &behind).await.unwrap());
    assert_eq!(SessionLog::open(&behind).await.unwrap().sequence(), log(&hosts).await.sequence());
}

#[tokio::test]
async fn a_damaged_manifest_in_a_mirror_stops_neither_saves_nor_pruning_and_is_copied_again() {
    let mut hosts = two_steps().await;
    let mirror = hosts.path("mirror-0");
    let intact = objects_of(&mirror);
    for folder in ["snapshots", "directories"] {
        below(&mirror.join(folder)).iter().for_each(|path| damage(path));
    }
    let writer = &mut hosts.hosts[0].0;
    let parent = writer.fix_parent(at(0, 3)).await.unwrap();
    let rows: Vec<Vec<u8>> = ranks(0).into_iter().map(|rank| row(3, rank)).collect();
    let states: Vec<RankState<'_>> = ranks(0).into_iter().zip(&rows).map(|(rank, row)| state(rank, WORLD, row)).collect();
    let receipts = writer.save(at(0, 3), parent, &states).await.unwrap();
    assert!(receipts.iter().all(|receipt| receipt.parent.is_some()), "deltas on the parent in the store");

    let casks = count(&mirror.join("casks"));
    hosts.hosts[0].1.prune(hosts.session, at(0, 3)).await.unwrap();
    assert_eq!(count(&mirror.join("casks")), casks, "it is not known which casks the chain needs");

    let place = hosts.hosts[0].1.memory().clone();
    follow_anew(&hosts, &place).await;
    let repaired = objects_of(&mirror);
    let is_described = |name: &str| name.starts_with("snapshots/") || name.starts_with("directories/");
    for object in intact.iter().filter(|(name, _)| is_described(name)) {
        assert!(repaired.contains(object), "{}", object.0);
    }
    // A mirror that is open repairs a manifest, too.
    let log = log(&hosts).await;
    hosts.hosts[0].1.follow(&log).await.unwrap();
    below(&mirror.join("snapshots")).iter().for_each(|path| damage(path));
    hosts.hosts[0].1.follow(&log).await.unwrap();
    assert!(objects_of(&mirror) == repaired);
    hosts.hosts[0].1.prune(hosts.session, at(0, 3)).await.unwrap();
}

/// Later commits would never reach the mirror otherwise, and the host would save nothing once its memory is full.
#[tokio::test]
async fn a_damaged_manifest_in_the_store_does_not_keep_the_log_from_a_mirror() {
    let mut hosts = two_steps().await;
    hosts.save_durably(3).await;
    let newest = below(&hosts.path("store/snapshots")).into_iter().last().unwrap();
    let whole = std::fs::read(&newest).unwrap();
    let copy = hosts.path("mirror-0/snapshots").join(newest.file_name().unwrap());
    damage(&newest);
    let mirror = hosts.hosts[0].1.memory().clone();
    follow_anew(&hosts, &mirror).await;
    assert_eq!(SessionLog::open(&mirror).await.unwrap().sequence(), log(&hosts).await.sequence());
    assert!(!copy.exists());
    std::fs::write(&newest, whole).unwrap();
    follow_anew(&hosts, &mirror).await;
    assert!(copy.exists());
}

/// Without its catalog, a mirror that was shortened has no log that begins with entry 1. It must not look empty.
#[tokio::test]
async fn a_damaged_catalog_of_a_shortened_mirror_is_an_error_and_is_copied_again() {
    let hosts = two_steps().await;
    lengthen(&hosts, 70).await;
    let folder = hosts.path("short");
    let last = log(&hosts).await.sequence();
    let place = memory(&folder);
    follow_anew(&hosts, &place).await;
    assert!(!folder.join("log/00000000000000000001.json").exists(), "it begins with the catalog");
    let catalogs = below(&folder.join("catalog"));
    catalogs.iter().for_each(|path| damage(path));
    let error = SessionLog::open(&place).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.object_name().unwrap().starts_with("catalog/"), "{error}");
    follow_anew(&hosts, &place).await;
    assert_eq!(SessionLog::open(&place).await.unwrap().sequence(), last);
    damage(&folder.join(format!("log/{last:020}.json")));
    follow_anew(&hosts, &place).await;
    assert_eq!(SessionLog::open(&place).await.unwrap().sequence(), last);
}

/// A storage that fails, or a mirror that removes the catalog meanwhile, does not make a catalog damaged.
#[tokio::test]
async fn a_catalog_that_cannot_be_read_now_is_not_passed_over() {
    let hosts = two_steps().await;
    lengthen(&hosts, 70).await;
    let place = memory(&hosts.path("short"));
    follow_anew(&hosts, &place).await;
    let objects = Arc::new(InMemory::new());
    for (name, bytes) in objects_of(&hosts.path("short")) {
        objects.put(&name.as_str().into(), bytes.into()).await.unwrap();
    }
    let open = async |fault, times: usize| {
        let left = std::sync::atomic::AtomicUsize::new(times);
        let is_next = move || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        let inner: Arc<dyn ObjectStore> = objects.clone();
        let failing = FaultStore::new(inner, move |operation, path| match operation {
            Operation::Get if path.as_ref().starts_with("catalog/") && is_next() => fault,
            _ => Fault::None,
        });
        let store = Store::with_object_store(Arc::new(failing), Default::default(), StoreOptions::default());
        SessionLog::open(&store).await.map(|log| log.sequence())
    };
    let last = log(&hosts).await.sequence();
    assert_eq!(open(Fault::Status(503), 1).await.unwrap_err().kind(), ErrorKind::Storage);
    assert_eq!(open(Fault::Stale, 1).await.unwrap(), last, "the catalogs are listed again");
    assert_eq!(open(Fault::Stale, 2).await.unwrap_err().kind(), ErrorKind::Storage, "not an empty log");
}

/// A damaged step of a replica is copied again, whether its receipts or its parent are damaged.
#[tokio::test]
async fn a_damaged_step_of_a_replica_is_copied_again() {
    for victim in ["0-1.json", "parent.json"] {
        for is_open in [true, false] {
            let mut hosts = two_steps().await;
            hosts.save(3).await;
            let mut copy = replica(&hosts, 2);
            assert_eq!(copy.pull().await.unwrap().newest, Some(at(0, 3)));
            let held = objects_of(&hosts.path("replica"));
            let found = below(&hosts.path("replica/receipts")).into_iter().filter(|path| path.ends_with(victim));
            found.for_each(|path| damage(&path));
            if !is_open {
                copy = replica(&hosts, 2);
            }
            let mut problems = Vec::new();
            let mut report = ReplicaReport::default();
            for _ in 0..4 {
                report = copy.pull().await.unwrap();
                problems.extend(report.problem.take().map(|problem| problem.to_string()));
            }
            assert_eq!(report.newest, Some(at(0, 3)));
            // An open replica knows the parents, and does not read them again.
            if victim != "parent.json" || !is_open {
                assert!(problems.iter().any(|problem| problem.contains(victim)), "{problems:?}");
                assert!(objects_of(&hosts.path("replica")) == held);
            }
        }
    }
}

#[tokio::test]
async fn a_damaged_store_file_costs_a_mirror_and_a_replica_nothing() {
    let mut hosts = two_steps().await;
    hosts.save(3).await;
    replica(&hosts, 2).pull().await.unwrap();
    let place = hosts.hosts[0].1.memory().clone();
    for folder in ["mirror-0", "replica"] {
        let held = objects_of(&hosts.path(folder));
        damage(&hosts.path(folder).join("store.json"));
        match folder {
            "replica" => assert_eq!(replica(&hosts, 2).pull().await.unwrap().bytes, 0),
            _ => follow_anew(&hosts, &place).await,
        }
        assert!(objects_of(&hosts.path(folder)) == held, "{folder}");
    }
}

/// Log entries have the same names in all runs.
#[tokio::test]
async fn a_mirror_that_does_not_tell_its_run_keeps_no_log_of_another_run() {
    let mut hosts = two_steps().await;
    let other = two_steps().await;
    lengthen(&hosts, 70).await;
    lengthen(&other, 70).await;
    hosts.save(3).await;
    let folder = hosts.path("moved");
    let place = memory(&folder);
    follow_anew(&hosts, &place).await;
    copy_all(&hosts.path("mirror-0"), &folder);
    for is_absent in [false, true] {
        let store_file = folder.join("store.json");
        match is_absent {
            true => std::fs::remove_file(store_file).unwrap(),
            false => damage(&store_file),
        }
        let (from, to) = if is_absent { (&other, &hosts) } else { (&hosts, &other) };
        assert_ne!(from.session.run, to.session.run);
        follow_anew(to, &place).await;
        let found = SessionLog::open(&place).await.unwrap();
        let ids = |log: &SessionLog| log.records().iter().map(|record| record.id).collect::<Vec<_>>();
        assert_eq!(ids(&found), ids(&log(to).await));
        assert_eq!(place.history().run().await.unwrap(), to.session.run);
        assert_eq!(count(&folder.join("casks")), count(&hosts.path("mirror-0/casks")), "the casks stay");
    }
}
