//! Mirrors of many hosts: casks and receipts are written to memory, uploaded from there, and make the state again without
//! the store.

use std::path::Path;

use tensorcask::maintain::{self, VerifyOptions};
use tensorcask::session::{HostWriter, LeaderWriter, Mirror, RankState, SessionExchange, SessionLog};
use tensorcask::wire::{Id, Leader, Receipt, SessionName};
use tensorcask::{ErrorKind, Metadata, Slice, Store, StoreOptions};

use super::common::objects_of;
use super::sessions::{HOSTS, RANKS_PER_HOST, WORLD, assert_holds, at, options, receipts, row, state};

/// The hosts of a session, each with its mirror.
pub(super) struct Hosts {
    folder: tempfile::TempDir,
    pub(super) store: Store,
    pub(super) session: SessionName,
    leader: LeaderWriter,
    pub(super) hosts: Vec<(HostWriter, Mirror)>,
}

pub(super) fn memory(folder: &Path) -> Store {
    StoreOptions { fsync: false, inline_bytes: 0, ..StoreOptions::default() }.open(folder.to_str().unwrap()).unwrap()
}

pub(super) fn ranks(host: u32) -> Vec<u32> {
    (host * RANKS_PER_HOST..(host + 1) * RANKS_PER_HOST).collect()
}

impl Hosts {
    pub(super) async fn begin() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("store").to_str().unwrap()).unwrap();
        let session = Id::random().unwrap();
        let leader = Leader { session, after: 0, attempt: 0, term: 1, above: None };
        let leader = LeaderWriter::open(&store, leader, options()).await.unwrap();
        let mut hosts = Vec::new();
        for host in 0..HOSTS {
            let memory = memory(&folder.path().join(format!("mirror-{host}")));
            let writer = HostWriter::open_with_mirror(&store, &memory, session, &ranks(host), WORLD, options()).await.unwrap();
            hosts.push((writer, Mirror::new(&store, &memory)));
        }
        let session = hosts[0].0.session();
        Self { folder, store, session, leader, hosts }
    }

    /// Saves a step into the mirrors.
    pub(super) async fn save(&mut self, step: u64) {
        self.save_states(step, |rank| (row(step, rank), false)).await;
    }

    /// Saves a step of which all ranks have the same state.
    async fn save_replicas(&mut self, step: u64) {
        self.save_states(step, |_| (row(step, 0), true)).await;
    }

    /// Saves the rows of all ranks: each is a part of a tensor, or the whole tensor.
    async fn save_states(&mut self, step: u64, row_of: impl Fn(u32) -> (Vec<u8>, bool)) {
        let log = SessionLog::open(&self.store).await.unwrap();
        for (host, (writer, mirror)) in (0..).zip(&mut self.hosts) {
            mirror.follow(&log).await.unwrap();
            let parent = writer.fix_parent(at(0, step)).await.unwrap();
            save_on(writer, host, step, parent, &row_of).await;
        }
    }

    async fn upload(&self, step: u64) -> u64 {
        let mut sent = 0;
        for (_, mirror) in &self.hosts {
            sent += mirror.upload(self.session, at(0, step)).await.unwrap();
        }
        sent
    }

    pub(super) async fn save_durably(&mut self, step: u64) {
        self.save(step).await;
        self.upload(step).await;
        self.commit(step).await;
    }

    async fn commit(&mut self, step: u64) {
        let receipts = receipts(&SessionExchange::new(&self.store, self.session), at(0, step)).await;
        self.leader.commit(step, &receipts).await.unwrap();
    }

    pub(super) fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    /// Loses the store; returns a store of the objects of all mirrors.
    fn lose_store(&self) -> Store {
        std::fs::remove_dir_all(self.path("store")).unwrap();
        let union = self.path("union");
        for host in 0..HOSTS {
            copy_all(&self.path(&format!("mirror-{host}")), &union);
        }
        memory(&union)
    }
}

/// Saves the rows of the ranks of one host: each is a part of a tensor, or the whole tensor.
async fn save_on(
    writer: &mut HostWriter,
    host: u32,
    step: u64,
    parent: Option<Id>,
    row_of: impl Fn(u32) -> (Vec<u8>, bool),
) -> Vec<Receipt> {
    let rows: Vec<(Vec<u8>, bool)> = ranks(host).into_iter().map(row_of).collect();
    let mut states = Vec::new();
    for (rank, (row, is_whole)) in ranks(host).into_iter().zip(&rows) {
        states.push(match is_whole {
            true => RankState { metadata: Metadata::default(), ..state(0, 1, row) },
            false => state(rank, WORLD, row),
        });
    }
    writer.save(at(0, step), parent, &states).await.unwrap()
}

pub(super) fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_all(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

pub(super) fn count(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

#[tokio::test]
async fn casks_are_uploaded_from_mirrors_and_mirrors_hold_a_committed_step_without_the_store() {
    let mut hosts = Hosts::begin().await;
    for step in 1..=3 {
        let before = count(&hosts.path("store/casks"));
        hosts.save(step).await;
        assert_eq!(count(&hosts.path("store/casks")), before, "a save writes to memory only");
        assert!(hosts.upload(step).await > 0);
        assert_eq!(hosts.upload(step).await, 0, "nothing is sent twice");
        hosts.commit(step).await;
        assert_holds(&hosts.store, step).await;
    }
    assert!(hosts.store.history().records().await.unwrap().last().unwrap().parent.is_some(), "deltas");
    assert!(maintain::verify(&hosts.store, &VerifyOptions::default()).await.unwrap().is_clean());
    let log = SessionLog::open(&hosts.store).await.unwrap();
    for (_, mirror) in &mut hosts.hosts {
        mirror.follow(&log).await.unwrap();
        mirror.prune(hosts.session, at(0, 3)).await.unwrap();
    }
    let union = hosts.lose_store();
    assert_holds(&union, 3).await;
}

/// The mirror does not know the last commit, but has the casks of this host. The store stops answering.
#[tokio::test]
async fn a_mirror_that_describes_a_parent_makes_a_delta_without_the_store() {
    let mut hosts = Hosts::begin().await;
    hosts.save_durably(1).await;
    let (writer, mirror) = &mut hosts.hosts[0];
    let parent = writer.fix_parent(at(0, 2)).await.unwrap().unwrap();
    assert!(!writer.has_parent(parent).await.unwrap());
    mirror.describe(&writer.chain_of_parent(parent).await.unwrap()).await.unwrap();
    assert!(writer.has_parent(parent).await.unwrap());
    let described = SessionLog::open(mirror.memory()).await.unwrap();
    assert_eq!(described.records().last().map(|record| record.id), Some(parent), "other hosts read it here");
    std::fs::rename(hosts.path("store"), hosts.path("away")).unwrap();
    let receipts = save_on(&mut hosts.hosts[0].0, 0, 2, Some(parent), |rank| (row(2, rank), false)).await;
    assert!(receipts.iter().all(|receipt| receipt.parent.as_ref().is_some_and(|found| found.snapshot == parent)), "{receipts:?}");
}

/// The store stops answering after the encoder has read the last commit there, and before the mirror names it. Other hosts could
/// not copy a step with this parent.
#[tokio::test]
async fn a_host_that_is_cut_off_chooses_a_parent_that_its_mirror_names() {
    let mut hosts = Hosts::begin().await;
    hosts.save_durably(1).await;
    hosts.save_durably(2).await;
    let (writer, mirror) = &mut hosts.hosts[0];
    let unnamed = writer.fix_parent(at(0, 3)).await.unwrap().unwrap();
    let named = SessionLog::open(mirror.memory()).await.unwrap().records().last().unwrap().id;
    assert_ne!(unnamed, named);
    // The copy of the description is interrupted before its last part, the log.
    mirror.describe(&writer.chain_of_parent(unnamed).await.unwrap()).await.unwrap();
    let entries = std::fs::read_dir(hosts.path("mirror-0/log")).unwrap();
    std::fs::remove_file(entries.map(|entry| entry.unwrap().path()).max().unwrap()).unwrap();
    std::fs::rename(hosts.path("store"), hosts.path("away")).unwrap();
    let writer = &mut hosts.hosts[0].0;
    assert_eq!(writer.mirrored_parent(at(0, 4)).await.unwrap(), Some(named));
    assert!(!writer.has_parent(unnamed).await.unwrap());
    let receipts = save_on(writer, 0, 4, Some(named), |rank| (row(4, rank), false)).await;
    assert!(receipts.iter().all(|receipt| receipt.parent.as_ref().is_some_and(|found| found.snapshot == named)), "{receipts:?}");
}

#[tokio::test]
async fn mirrors_hold_a_step_that_was_never_uploaded() {
    let mut hosts = Hosts::begin().await;
    for step in 1..=2 {
        hosts.save_durably(step).await;
    }
    hosts.save(3).await;
    for (_, mirror) in &hosts.hosts {
        mirror.prune(hosts.session, at(0, 3)).await.unwrap();
    }
    let session = hosts.session;
    let union = hosts.lose_store();
    assert_eq!(union.snapshot(3).await.unwrap_err().kind(), ErrorKind::NotFound);
    let leader = Leader { session: session.session, after: 0, attempt: 0, term: 2, above: None };
    let mut leader = LeaderWriter::open(&union, leader, options()).await.unwrap();
    let receipts = receipts(&SessionExchange::new(&union, session), at(0, 3)).await;
    leader.commit(3, &receipts).await.unwrap();
    assert_holds(&union, 3).await;
}

#[tokio::test]
async fn hosts_with_nothing_but_replicas_make_deltas() {
    let mut hosts = Hosts::begin().await;
    for step in 1..=2 {
        hosts.save_replicas(step).await;
        hosts.upload(step).await;
        hosts.commit(step).await;
        for receipt in receipts(&SessionExchange::new(&hosts.store, hosts.session), at(0, step)).await {
            assert_eq!(receipt.parent.is_some(), step > 1, "rank {}", receipt.rank);
        }
    }
    let found = hosts.store.snapshot(2).await.unwrap().read("model.w", &Slice::all()).await.unwrap().data;
    assert!(found == row(2, 0));
}

#[tokio::test]
async fn pruning_removes_older_steps() {
    let mut hosts = Hosts::begin().await;
    for step in 1..=2 {
        hosts.save_durably(step).await;
    }
    hosts.save(3).await;
    let mirror = &hosts.hosts[0].1;
    mirror.prune(hosts.session, at(0, 3)).await.unwrap();
    let casks = |step: u64| RANKS_PER_HOST as usize * step as usize;
    // Step 2 is a delta on step 1.
    assert_eq!(count(&hosts.path("mirror-0/casks")), casks(3));
    hosts.upload(3).await;
    hosts.commit(3).await;
    assert_eq!(hosts.hosts[0].1.steps(hosts.session, 0..RANKS_PER_HOST).await.unwrap(), [at(0, 3)]);
}

#[tokio::test]
async fn damaged_memory_is_not_uploaded() {
    let mut hosts = Hosts::begin().await;
    hosts.save(1).await;
    let cask = std::fs::read_dir(hosts.path("mirror-0/casks")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&cask).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&cask, bytes).unwrap();
    let error = hosts.hosts[0].1.upload(hosts.session, at(0, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(count(&hosts.path("store/receipts")), 1, "the parent only");
}

#[tokio::test]
async fn a_mirror_of_another_store_is_emptied() {
    let mut hosts = Hosts::begin().await;
    hosts.save(1).await;
    let other = Store::open(hosts.path("other").to_str().unwrap()).unwrap();
    other.writer(tensorcask::Policy::Full).await.unwrap();
    let mut mirror = Mirror::new(&other, &memory(&hosts.path("mirror-0")));
    mirror.follow(&SessionLog::open(&other).await.unwrap()).await.unwrap();
    assert_eq!(count(&hosts.path("mirror-0/casks")), 0);
    assert_eq!(SessionLog::open(mirror.memory()).await.unwrap().sequence(), 1);
}

/// Without the store, hosts may choose different parents. Deltas against two snapshots cannot become one.
#[tokio::test]
async fn hosts_with_deltas_against_different_snapshots_are_told() {
    let mut hosts = Hosts::begin().await;
    hosts.save_durably(1).await;
    hosts.save_durably(2).await;
    let log = SessionLog::open(&hosts.store).await.unwrap();
    let ids: Vec<Id> = log.records().iter().map(|record| record.id).collect();
    let key = at(0, 3);
    for (host, parent) in [(0, Some(ids[1])), (1, Some(ids[0])), (2, None)] {
        let (writer, mirror) = &mut hosts.hosts[host as usize];
        mirror.follow(&log).await.unwrap();
        let rows: Vec<Vec<u8>> = ranks(host).into_iter().map(|rank| row(3, rank)).collect();
        let states: Vec<RankState<'_>> = ranks(host).into_iter().zip(&rows).map(|(rank, row)| state(rank, WORLD, row)).collect();
        let receipts = writer.save(key, parent, &states).await.unwrap();
        assert!(receipts.iter().all(|receipt| receipt.parent.as_ref().map(|parent| parent.snapshot) == parent), "host {host}");
    }
    let memory = |host: usize| hosts.hosts[host].1.memory().clone();
    for (host, other, expected) in [(1, 0, false), (0, 1, false), (2, 0, true), (0, 2, true), (0, 0, true)] {
        let fits = hosts.hosts[host].1.fits(&memory(other), hosts.session, key).await.unwrap();
        assert_eq!(fits, Some(expected), "host {host} and host {other}");
    }
    assert_eq!(hosts.hosts[0].1.fits(&memory(1), hosts.session, at(0, 4)).await.unwrap(), Some(true), "nothing is saved");
    // The host that wrote whole chunks fixes `None`, and the other host still agrees.
    hosts.hosts[2].1.agree_on_parent(hosts.session, key).await.unwrap();
    hosts.hosts[0].1.agree_on_parent(hosts.session, key).await.unwrap();
    let fixed = SessionExchange::new(&hosts.store, hosts.session).parent(key).await.unwrap();
    assert_eq!(fixed, Some(None));
}

/// The store goes away before one host has read the last commit.
#[tokio::test]
async fn a_mirror_learns_the_last_commits_from_another() {
    let mut hosts = Hosts::begin().await;
    hosts.save_durably(1).await;
    hosts.save_durably(2).await;
    let log = SessionLog::open(&hosts.store).await.unwrap();
    // The first has not read step 2.
    hosts.hosts[1].1.follow(&log).await.unwrap();
    let [behind, ahead] = [0, 1].map(|host| hosts.hosts[host].1.memory().clone());
    std::fs::remove_dir_all(hosts.path("store")).unwrap();
    assert_eq!(SessionLog::open(&behind).await.unwrap().sequence() + 1, log.sequence());
    assert!(!Mirror::learn(&behind, &ahead).await.unwrap(), "the other has less");
    assert!(Mirror::learn(&ahead, &behind).await.unwrap());
    assert!(!Mirror::learn(&ahead, &behind).await.unwrap(), "both have the same");
    for memory in [behind, ahead] {
        let known = SessionLog::open(&memory).await.unwrap();
        assert_eq!(known.sequence(), log.sequence());
        for record in known.records() {
            assert!(memory.snapshot(record.step).await.is_ok(), "the manifest of step {}", record.step);
        }
    }
    // Both choose the same parent now.
    let one = hosts.hosts[0].0.mirrored_parent(at(0, 3)).await.unwrap();
    assert!(one.is_some());
    assert_eq!(one, hosts.hosts[1].0.mirrored_parent(at(0, 3)).await.unwrap());
}

/// A mirror drops the manifests of a chain that it needs no more, while another mirror still needs them.
#[tokio::test]
async fn a_mirror_learns_from_another_that_lacks_links_which_it_has_itself() {
    let mut hosts = Hosts::begin().await;
    for step in 1..=3 {
        hosts.save_durably(step).await;
    }
    let log = SessionLog::open(&hosts.store).await.unwrap();
    // The first has not read step 3.
    hosts.hosts[1].1.follow(&log).await.unwrap();
    let [behind, ahead] = [0, 1].map(|host| hosts.hosts[host].1.memory().clone());
    let manifests = std::fs::read_dir(hosts.path("mirror-1/snapshots")).unwrap().map(|entry| entry.unwrap().path());
    for older in manifests.filter(|path| !path.file_name().unwrap().to_str().unwrap().starts_with("3-")) {
        std::fs::remove_file(older).unwrap();
    }
    assert!(Mirror::learn(&ahead, &behind).await.unwrap());
    assert_eq!(SessionLog::open(&behind).await.unwrap().sequence(), log.sequence());
    assert!(behind.snapshot(3).await.is_ok());
}

/// While one task of a host reads the log of the store, another copies newer entries from a peer.
#[tokio::test]
async fn a_mirror_that_has_moved_on_since_the_log_was_read_is_kept() {
    let mut hosts = Hosts::begin().await;
    hosts.save_durably(1).await;
    let older = SessionLog::open(&hosts.store).await.unwrap();
    hosts.save_durably(2).await;
    let newer = SessionLog::open(&hosts.store).await.unwrap();
    let mirror = &mut hosts.hosts[0].1;
    mirror.follow(&newer).await.unwrap();
    let memory = mirror.memory().clone();
    let held = objects_of(&hosts.path("mirror-0"));
    Mirror::new(&hosts.store, &memory).follow(&older).await.unwrap();
    assert_eq!(objects_of(&hosts.path("mirror-0")), held);
}
