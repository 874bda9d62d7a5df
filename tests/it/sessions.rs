//! Sessions of many hosts: each host uploads its ranks' parts, one leader commits.

use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, CompactOptions, GcOptions, VerifyOptions};
use tensorcask::session::{ContinuedSession, HostWriter, KnownLog, LeaderWriter, RankState, SessionExchange, SessionLog};
use tensorcask::wire::{Id, Leader, RankRange, Receipt, SessionStep};
use tensorcask::{
    Dtype, ErrorKind, Latest, Limits, Metadata, Policy, Rect, SavedSnapshot, Slice, Store, StoreOptions, TensorView, WriterOptions,
};

pub(super) const HOSTS: u32 = 3;
pub(super) const RANKS_PER_HOST: u32 = 2;
pub(super) const WORLD: u32 = HOSTS * RANKS_PER_HOST;
const ROW: u64 = 40_000;

pub(super) fn options() -> WriterOptions {
    WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() }
}

/// The rows of a rank at a step: a few bytes change from step to step.
pub(super) fn row(step: u64, rank: u32) -> Vec<u8> {
    (0..ROW).map(|at| (at * 7 + u64::from(rank) + if at % 1000 == step { 1 } else { 0 }) as u8).collect()
}

/// The state of a rank: its row of a matrix.
pub(super) fn state(rank: u32, world: u32, row: &[u8]) -> RankState<'_> {
    let rect = Rect { offset: vec![u64::from(rank), 0], shape: vec![1, ROW] };
    let tensors = vec![TensorView::shard("model.w", Dtype::U8, &[u64::from(world), ROW], rect, row).unwrap()];
    let mut metadata = Metadata::default();
    if rank == 0 {
        metadata.user.insert("loss".to_owned(), 0.5.into());
    }
    RankState { tensors, blobs: Vec::new(), metadata }
}

/// A session of hosts in this process.
struct Session {
    store: Store,
    hosts: Vec<HostWriter>,
}

impl Session {
    async fn begin(store: &Store, id: Id) -> (Self, LeaderWriter) {
        let after = match SessionLog::open(store).await {
            Ok(log) => log.sequence(),
            Err(e) if e.kind() == ErrorKind::NotFound => 0,
            Err(e) => panic!("{e}"),
        };
        let leader = LeaderWriter::open(store, Leader { session: id, after, attempt: 0, term: 1, above: None }, options()).await.unwrap();
        let mut hosts = Vec::new();
        for host in 0..HOSTS {
            let ranks: Vec<u32> = (host * RANKS_PER_HOST..(host + 1) * RANKS_PER_HOST).collect();
            hosts.push(HostWriter::open(store, id, &ranks, WORLD, options()).await.unwrap());
        }
        (Self { store: store.clone(), hosts }, leader)
    }

    fn exchange(&self) -> SessionExchange {
        SessionExchange::new(&self.store, self.hosts[0].session())
    }

    /// Saves a step on one host.
    async fn save_on(&mut self, host: u32, at: SessionStep) -> tensorcask::Result<()> {
        let parent = self.hosts[host as usize].fix_parent(at).await?;
        let ranks: Vec<u32> = (host * RANKS_PER_HOST..(host + 1) * RANKS_PER_HOST).collect();
        let rows: Vec<Vec<u8>> = ranks.iter().map(|rank| row(at.step, *rank)).collect();
        let states = ranks.iter().zip(&rows).map(|(rank, row)| state(*rank, WORLD, row));
        self.hosts[host as usize].save(at, parent, &states.collect::<Vec<_>>()).await.map(|_| ())
    }

    async fn save(&mut self, at: SessionStep) {
        for host in 0..HOSTS {
            self.save_on(host, at).await.unwrap();
        }
    }

    async fn commit(&self, leader: &mut LeaderWriter, at: SessionStep) -> tensorcask::Result<SavedSnapshot> {
        leader.commit(at.step, &receipts(&self.exchange(), at).await).await
    }
}

/// All receipts of a step.
pub(super) async fn receipts(exchange: &SessionExchange, at: SessionStep) -> Vec<Receipt> {
    let found = exchange.survey(None).await.unwrap();
    exchange.receipts(at, &found.steps[&at]).await.unwrap()
}

pub(super) fn at(attempt: u64, step: u64) -> SessionStep {
    SessionStep { attempt, step }
}

pub(super) async fn assert_holds(store: &Store, step: u64) {
    let found = store.snapshot(step).await.unwrap().read("model.w", &Slice::all()).await.unwrap().data;
    assert!(found == (0..WORLD).flat_map(|rank| row(step, rank)).collect::<Vec<u8>>(), "step {step}");
}

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("run").to_str().unwrap()).unwrap();
    (folder, store)
}

#[tokio::test]
async fn hosts_upload_and_the_leader_commits_deltas_on_one_parent() {
    let (_folder, store) = store();
    let (mut session, mut leader) = Session::begin(&store, Id::random().unwrap()).await;
    for step in 1..=3 {
        session.save(at(0, step)).await;
        let found = session.exchange().survey(step.checked_sub(2).map(|before| at(0, before + 1))).await.unwrap();
        assert_eq!(found.steps.keys().collect::<Vec<_>>(), [&at(0, step)]);
        assert!(found.steps[&at(0, step)].has_all(0..WORLD) && found.ended.is_empty());
        let saved = session.commit(&mut leader, at(0, step)).await.unwrap();
        assert_eq!(saved.parent.is_some(), step > 1);
        assert_holds(&store, step).await;
    }
    let user = store.snapshot(Latest).await.unwrap().user().clone();
    assert_eq!(user.get("loss"), Some(&0.5.into()), "the metadata of rank 0");
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn the_first_host_fixes_the_parent_and_a_late_commit_changes_nothing() {
    let (_folder, store) = store();
    let (mut session, mut leader) = Session::begin(&store, Id::random().unwrap()).await;
    session.save(at(0, 1)).await;
    // Host 0 begins with step 2 before step 1 is committed: the step becomes a base on all hosts.
    session.save_on(0, at(0, 2)).await.unwrap();
    session.commit(&mut leader, at(0, 1)).await.unwrap();
    session.save_on(1, at(0, 2)).await.unwrap();
    session.save_on(2, at(0, 2)).await.unwrap();
    assert_eq!(session.commit(&mut leader, at(0, 2)).await.unwrap().parent, None);
    // Host 0 begins with step 3 after the commit of step 2, of which hosts 1 and 2 have not read.
    session.save(at(0, 3)).await;
    assert!(session.commit(&mut leader, at(0, 3)).await.unwrap().parent.is_some());
    assert_holds(&store, 3).await;
}

#[tokio::test]
async fn another_host_takes_over_and_the_former_leader_commits_nothing() {
    let (_folder, store) = store();
    let id = Id::random().unwrap();
    let (mut session, mut first) = Session::begin(&store, id).await;
    session.save(at(0, 1)).await;
    let takeover = Leader { session: id, after: 0, attempt: 0, term: 2, above: None };
    let mut second = LeaderWriter::open(&store, takeover, options()).await.unwrap();
    assert_eq!(LeaderWriter::open(&store, takeover, options()).await.unwrap_err().kind(), ErrorKind::Conflict, "the term is taken");
    assert!(session.commit(&mut first, at(0, 1)).await.is_err());
    session.commit(&mut second, at(0, 1)).await.unwrap();
    let again = session.commit(&mut second, at(0, 1)).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Conflict, "{again}");
    assert_eq!(store.history().records().await.unwrap().len(), 1);
    assert_holds(&store, 1).await;
}

#[tokio::test]
async fn an_ended_session_commits_nothing_and_never_comes_back() {
    let (_folder, store) = store();
    let old = Id::random().unwrap();
    let (mut session, mut leader) = Session::begin(&store, old).await;
    session.save(at(0, 1)).await;
    let (mut next, mut leader_of_next) = Session::begin(&store, Id::random().unwrap()).await;
    assert_eq!(session.commit(&mut leader, at(0, 1)).await.unwrap_err().kind(), ErrorKind::Fenced);
    for term in [1, 2] {
        let back = Leader { session: old, after: 0, attempt: 0, term, above: None };
        assert_eq!(LeaderWriter::open(&store, back, options()).await.unwrap_err().kind(), ErrorKind::Fenced, "term {term}");
    }
    next.save(at(0, 1)).await;
    // Receipts of two sessions are never mixed.
    let mut mixed = receipts(&next.exchange(), at(0, 1)).await;
    mixed[0] = receipts(&session.exchange(), at(0, 1)).await.remove(0);
    let mixed = leader_of_next.commit(1, &mixed).await.unwrap_err();
    assert_eq!(mixed.kind(), ErrorKind::InvalidArgument, "{mixed}");
    next.commit(&mut leader_of_next, at(0, 1)).await.unwrap();
    assert_holds(&store, 1).await;
}

#[tokio::test]
async fn a_return_to_an_older_step_is_another_attempt() {
    let (_folder, store) = store();
    let id = Id::random().unwrap();
    let (mut session, mut leader) = Session::begin(&store, id).await;
    for step in 1..=3 {
        session.save(at(0, step)).await;
        session.commit(&mut leader, at(0, step)).await.unwrap();
    }
    session.save(at(1, 2)).await;
    assert!(session.commit(&mut leader, at(1, 2)).await.is_err(), "the leader opened the log for attempt 0");
    let mut leader =
        LeaderWriter::open(&store, Leader { session: id, after: 0, attempt: 1, term: 2, above: None }, options()).await.unwrap();
    session.commit(&mut leader, at(1, 2)).await.unwrap();
    let log = SessionLog::open(&store).await.unwrap();
    let attempts: Vec<_> = log.records().iter().map(|record| (record.step, log.leadership().attempt_of(id, record.sequence))).collect();
    assert_eq!(attempts, [(1, Some(0)), (2, Some(0)), (3, Some(0)), (2, Some(1))]);
    assert_eq!(store.snapshot(Latest).await.unwrap().record().step, 2);
}

#[tokio::test]
async fn the_first_receipt_of_a_rank_stays() {
    let (_folder, store) = store();
    let (mut session, mut leader) = Session::begin(&store, Id::random().unwrap()).await;
    session.save(at(0, 1)).await;
    // The agent of host 1 was killed before it knew that its receipts are there.
    session.save_on(1, at(0, 1)).await.unwrap();
    session.commit(&mut leader, at(0, 1)).await.unwrap();
    assert_holds(&store, 1).await;
}

#[tokio::test]
async fn garbage_collection_removes_messages_and_the_casks_of_steps_that_were_given_up() {
    let (folder, store) = store();
    let (mut session, mut leader) = Session::begin(&store, Id::random().unwrap()).await;
    session.save_on(0, at(0, 1)).await.unwrap();
    session.save(at(0, 2)).await;
    session.commit(&mut leader, at(0, 2)).await.unwrap();
    let objects = |name: &str| walk(&folder.path().join("run").join(name));
    assert_eq!((objects("receipts"), objects("casks")), (2 + 1 + 3, 2 + 6), "casks of two ranks of step 1, of six of step 2");
    let young = maintain::gc(&store, &GcOptions { apply: true, ..GcOptions::default() }).await.unwrap();
    assert_eq!((young.deleted.len(), young.waiting.len()), (0, 8));
    // The session goes on, so what was told at its start is still needed.
    let id = session.hosts[0].session().session;
    SessionExchange::begin(&store, id, 0).await.unwrap();
    let all = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
    let report = maintain::gc(&store, &all).await.unwrap();
    assert_eq!(SessionExchange::beginning(&store, id).await.unwrap(), Some(0));
    assert_eq!(report.deleted.len(), 8);
    assert_eq!((objects("receipts"), objects("casks")), (1, 6));
    assert_holds(&store, 2).await;
}

/// The step count of an optimizer and a replicated weight: every rank of every host has them.
#[tokio::test]
async fn equal_parts_of_several_ranks_are_stored_once_and_different_ones_are_an_error() {
    let (folder, store) = store();
    let id = Id::random().unwrap();
    let mut leader =
        LeaderWriter::open(&store, Leader { session: id, after: 0, attempt: 0, term: 1, above: None }, options()).await.unwrap();
    let mut writers = Vec::new();
    for rank in 0..2 {
        writers.push(HostWriter::open(&store, id, &[rank], 2, options()).await.unwrap());
    }
    let exchange = SessionExchange::new(&store, writers[0].session());
    for step in 1..=4u64 {
        for (rank, writer) in (0..).zip(&mut writers) {
            // At step 3, one byte of rank 1 differs.
            let own = row(step, rank);
            let count = (step + u64::from(step == 3 && rank == 1)).to_le_bytes();
            let shared = row(step, 9);
            let mut state = state(rank, 2, &own);
            state.tensors.push(TensorView::new("optim.step", Dtype::I64, &[], &count).unwrap());
            state.tensors.push(TensorView::new("model.bias", Dtype::U8, &[ROW], &shared).unwrap());
            let parent = writer.fix_parent(at(0, step)).await.unwrap();
            writer.save(at(0, step), parent, std::slice::from_ref(&state)).await.unwrap();
        }
        let saved = leader.commit(step, &receipts(&exchange, at(0, step)).await).await;
        if step == 3 {
            let error = saved.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains("ranks 0 and 1") && text.contains("step 3") && text.contains("`optim.step`"), "{text}");
            continue;
        }
        let saved = saved.unwrap();
        assert_eq!(saved.parent.is_some(), step > 1);
        let snapshot = store.snapshot(step).await.unwrap();
        assert_eq!(snapshot.read("optim.step", &Slice::all()).await.unwrap().data, step.to_le_bytes());
        assert!(snapshot.read("model.bias", &Slice::all()).await.unwrap().data == row(step, 9));
        assert!(snapshot.read("model.w", &Slice::all()).await.unwrap().data == [row(step, 0), row(step, 1)].concat());
    }
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    // Compaction takes the replica that the directory names.
    maintain::compact(&store, 4, &CompactOptions::default()).await.unwrap();
    assert_eq!(store.snapshot(4).await.unwrap().read("optim.step", &Slice::all()).await.unwrap().data, 4u64.to_le_bytes());
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    drop(folder);
}

/// A rank that holds nothing but replicas.
#[tokio::test]
async fn a_cask_of_replicas_alone_is_not_part_of_the_snapshot() {
    let (_folder, store) = store();
    let id = Id::random().unwrap();
    let mut leader =
        LeaderWriter::open(&store, Leader { session: id, after: 0, attempt: 0, term: 1, above: None }, options()).await.unwrap();
    let mut receipts = Vec::new();
    for rank in 0..3 {
        let mut writer = HostWriter::open(&store, id, &[rank], 3, options()).await.unwrap();
        let whole = row(1, 0);
        let tensors = vec![TensorView::new("model.w", Dtype::U8, &[ROW], &whole).unwrap()];
        let blobs = match rank {
            2 => vec![tensorcask::Blob { rank, name: "rng".into(), data: vec![7; 4].into() }],
            _ => Vec::new(),
        };
        assert_eq!(writer.fix_parent(at(0, 1)).await.unwrap(), None);
        receipts.extend(writer.save(at(0, 1), None, &[RankState { tensors, blobs, metadata: Metadata::default() }]).await.unwrap());
    }
    leader.commit(1, &receipts).await.unwrap();
    let snapshot = store.snapshot(1).await.unwrap();
    let slots: Vec<u32> = snapshot.manifest().casks.iter().map(|cask| cask.slot).collect();
    assert_eq!(slots, [0, 5], "the weights of rank 0 and the blob of rank 2");
    assert!(snapshot.read("model.w", &Slice::all()).await.unwrap().data == row(1, 0));
    let all = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
    let report = maintain::gc(&store, &all).await.unwrap();
    assert_eq!(report.deleted.iter().filter(|object| object.path.starts_with("casks/")).count(), 2);
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn the_first_host_fixes_the_beginning_of_a_session_and_ends_are_listed() {
    let (_folder, store) = store();
    let id = Id::random().unwrap();
    assert_eq!(SessionExchange::beginning(&store, id).await.unwrap(), None);
    assert_eq!(SessionExchange::begin(&store, id, 0).await.unwrap(), 0, "before there is a store");
    assert_eq!(SessionExchange::begin(&store, id, 7).await.unwrap(), 0);
    assert_eq!(SessionExchange::beginning(&store, id).await.unwrap(), Some(0));
    let process = Id::random().unwrap();
    for _ in 0..2 {
        SessionExchange::start_rank(&store, id, 5, process).await.unwrap();
    }
    let again = SessionExchange::start_rank(&store, id, 5, Id::random().unwrap()).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Conflict, "{again}");
    let (mut session, mut leader) = Session::begin(&store, id).await;
    session.save_on(0, at(0, 1)).await.unwrap();
    for _ in 0..2 {
        SessionExchange::end_ranks(&store, id, RankRange { first: 2, last: 3 }).await.unwrap();
    }
    let survey = session.exchange().survey(None).await.unwrap();
    assert_eq!(survey.ended.missing(0..WORLD).to_string(), "0 to 1 and 4 to 5");
    assert!(survey.is_hopeless(at(0, 1), &survey.ended, WORLD));
    assert!(!survey.is_hopeless(at(0, 2), &survey.ended, WORLD), "nobody has saved it");
    session.save_on(1, at(0, 1)).await.unwrap();
    let survey = session.exchange().survey(None).await.unwrap();
    assert!(!survey.is_hopeless(at(0, 1), &survey.ended, WORLD), "rank 4 may still save it");
    session.save_on(2, at(0, 1)).await.unwrap();
    session.commit(&mut leader, at(0, 1)).await.unwrap();
    let survey = session.exchange().survey(Some(at(0, 1))).await.unwrap();
    assert!(survey.steps.is_empty() && !survey.ended.is_empty());
}

/// The receipts of a host are one object, or several if one would be too large.
#[tokio::test]
async fn receipts_of_a_host_are_split_by_size() {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let with_limit = |bytes: u64| {
        let limits = Limits { max_manifest_bytes: bytes, ..Limits::default() };
        Store::with_object_store(objects.clone(), "run".into(), StoreOptions { limits, ..StoreOptions::default() })
    };
    let id = Id::random().unwrap();
    let (_, mut leader) = Session::begin(&with_limit(1 << 20), id).await;
    let mut one = HostWriter::open(&with_limit(1 << 20), id, &[0, 1, 3], 5, options()).await.unwrap();
    let mut split = HostWriter::open(&with_limit(1000), id, &[0, 1, 2, 4], 5, options()).await.unwrap();
    let exchange = SessionExchange::new(&with_limit(1 << 20), one.session());
    for (writer, ranks) in [(&mut one, vec![0, 1, 3]), (&mut split, vec![0, 1, 2, 4])] {
        let rows: Vec<Vec<u8>> = ranks.iter().map(|rank| row(1, *rank)).collect();
        let states: Vec<RankState<'_>> = ranks.iter().zip(&rows).map(|(rank, row)| state(*rank, 5, row)).collect();
        assert_eq!(writer.fix_parent(at(0, 1)).await.unwrap(), None);
        writer.save(at(0, 1), None, &states).await.unwrap();
    }
    let found = exchange.survey(None).await.unwrap();
    let ranges: Vec<RankRange> = found.steps[&at(0, 1)].ranges().collect();
    let range = |first, last| RankRange { first, last };
    assert_eq!(ranges[..2], [range(0, 0), range(0, 1)], "{ranges:?}");
    assert!(ranges.contains(&range(3, 3)) && ranges.contains(&range(4, 4)), "{ranges:?}");
    let receipts = exchange.receipts(at(0, 1), &found.steps[&at(0, 1)]).await.unwrap();
    assert_eq!(receipts.iter().map(|receipt| receipt.rank).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    leader.commit(1, &receipts).await.unwrap();
}

/// Number of files below a folder.
fn walk(folder: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { walk(&path) } else { 1 }).sum()
}

/// Requests of the second step, of hosts that share no cache.
async fn requests(hosts: u32, ranks_per_host: u32) -> u64 {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let open = || Store::with_object_store(objects.clone(), "run".into(), StoreOptions::default());
    let (stores, of_leader): (Vec<Store>, Store) = ((0..hosts).map(|_| open()).collect(), open());
    let id = Id::random().unwrap();
    let world = hosts * ranks_per_host;
    let mut leader =
        LeaderWriter::open(&of_leader, Leader { session: id, after: 0, attempt: 0, term: 1, above: None }, options()).await.unwrap();
    let mut writers = Vec::new();
    for (host, store) in (0..).zip(&stores) {
        let ranks: Vec<u32> = (host * ranks_per_host..(host + 1) * ranks_per_host).collect();
        writers.push(HostWriter::open(store, id, &ranks, world, options()).await.unwrap());
    }
    let exchange = SessionExchange::new(&of_leader, writers[0].session());
    let total = || stores.iter().chain([&of_leader]).map(|store| store.io().requests).sum::<u64>();
    let mut before = 0;
    for step in 1..=2 {
        before = total();
        for (host, writer) in (0..).zip(&mut writers) {
            let parent = writer.fix_parent(at(0, step)).await.unwrap();
            let rows: Vec<(u32, Vec<u8>)> =
                (host * ranks_per_host..(host + 1) * ranks_per_host).map(|rank| (rank, row(step, rank))).collect();
            let states: Vec<RankState<'_>> = rows.iter().map(|(rank, row)| state(*rank, world, row)).collect();
            writer.save(at(0, step), parent, &states).await.unwrap();
        }
        let found = exchange.survey(step.checked_sub(1).map(|before| at(0, before))).await.unwrap();
        assert!(found.steps[&at(0, step)].has_all(0..world));
        let receipts = exchange.receipts(at(0, step), &found.steps[&at(0, step)]).await.unwrap();
        let saved = leader.commit(step, &receipts).await.unwrap();
        assert_eq!(saved.parent.is_some(), step > 1);
    }
    total() - before
}

/// Requests of a commit without the parts of large casks. One cask per rank, on S3-like storage.
#[tokio::test]
async fn a_commit_takes_few_requests_per_rank_and_per_host() {
    let [small, more_ranks, more_hosts] = [requests(2, 2).await, requests(2, 6).await, requests(4, 2).await];
    let per_rank = (more_ranks - small) as f64 / 8.0;
    let per_host = (more_hosts - small) as f64 / 2.0 - 2.0 * per_rank;
    let constant = small as f64 - 4.0 * per_rank - 2.0 * per_host;
    println!("{per_rank} requests per rank, {per_host} per host, and {constant}");
    assert!(per_rank <= 3.0 && per_host <= 9.0 && constant <= 18.0, "{per_rank} {per_host} {constant}");
}

#[tokio::test]
async fn a_catalog_keeps_the_leadership() {
    let (folder, store) = store();
    let id = Id::random().unwrap();
    let (mut session, mut leader) = Session::begin(&store, id).await;
    session.save(at(0, 1)).await;
    session.commit(&mut leader, at(0, 1)).await.unwrap();
    while SessionLog::open(&store).await.unwrap().sequence() < 65 {
        store.pin(1).await.unwrap();
        store.unpin(1).await.unwrap();
    }
    assert_eq!(walk(&folder.path().join("run/catalog")), 1);
    let fresh = Store::open(folder.path().join("run").to_str().unwrap()).unwrap();
    let log = SessionLog::open(&fresh).await.unwrap();
    let leading = log.leadership().of(id).unwrap();
    assert_eq!((leading.leader, leading.newest), (leader.leader(), Some(1)));
    assert!(maintain::verify(&fresh, &VerifyOptions::default()).await.unwrap().is_clean(), "the catalog agrees with the log");
    // The leader goes on after entries that do not fence it.
    session.save(at(0, 2)).await;
    session.commit(&mut leader, at(0, 2)).await.unwrap();
}

/// A session that began while the store did not answer, with the log as its hosts knew it.
#[tokio::test]
async fn a_session_that_began_without_the_store_hides_no_other_work() {
    let (_folder, store) = store();
    let before = Id::random().unwrap();
    let (mut session, mut leader) = Session::begin(&store, before).await;
    session.save(at(0, 1)).await;
    session.commit(&mut leader, at(0, 1)).await.unwrap();
    let log = SessionLog::open(&store).await.unwrap();
    let run = session.hosts[0].session().run;
    let known = |newest: u64| KnownLog {
        run,
        sequence: log.sequence(),
        leadership: log.leadership().clone(),
        continued: vec![ContinuedSession { session: before, attempt: 0, newest: Some(newest) }],
    };
    let without_2 = known(1);
    let with_2 = known(2);
    let next = || Leader { session: Id::random().unwrap(), after: log.sequence(), attempt: 0, term: 1, above: None };
    let refused = |opened: tensorcask::Result<LeaderWriter>| {
        let error = opened.unwrap_err();
        assert_eq!((error.kind(), error.clause_name()), (ErrorKind::Fenced, Some("log 8.6")), "{error}");
    };
    // The store commits a step, and its answer is lost.
    session.save(at(0, 2)).await;
    session.commit(&mut leader, at(0, 2)).await.unwrap();
    let entries = SessionLog::open(&store).await.unwrap().sequence();
    let other = KnownLog { run: Id::random().unwrap(), ..known(2) };
    refused(LeaderWriter::open_known(&store, next(), &without_2, options()).await);
    refused(LeaderWriter::open_known(&store, next(), &other, options()).await);
    assert_eq!(SessionLog::open(&store).await.unwrap().sequence(), entries, "nothing was written");
    let mut began = LeaderWriter::open_known(&store, next(), &with_2, options()).await.unwrap();
    assert!(leader.commit(3, &[]).await.is_err(), "the session before has ended");
    // Another host of the session takes over by the rules of any session.
    let takeover = Leader { term: 2, ..began.leader() };
    LeaderWriter::open_known(&store, takeover, &with_2, options()).await.unwrap();
    assert!(began.commit(3, &[]).await.is_err());
    // Another job.
    store.writer(Policy::Full).await.unwrap();
    let error = LeaderWriter::open_known(&store, next(), &with_2, options()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    // A store that is gone is not made again.
    let empty = tempfile::tempdir().unwrap();
    let gone = empty.path().join("gone");
    let error = LeaderWriter::open_known(&Store::open(gone.to_str().unwrap()).unwrap(), next(), &with_2, options()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::NotFound && !gone.exists(), "{error}");
}
