//! A run on many hosts: each test host has its own folder and its own agent. All share one store.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use rustix::process::Signal;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::{GcOptions, VerifyOptions};
use tensorcask::wire::{Event, Leader};
use tensorcask::{Blob, Dtype, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{AgentStatus, Engine, EngineOptions, Hosts, InitTls, PeerTls, Peers, Source, Until, init_tls};

use super::host::*;

pub(crate) const HOSTS: u32 = 3;
pub(crate) const RANKS: u32 = 2;
pub(crate) const WORLD: u32 = HOSTS * RANKS;
const ROW: u64 = 60_000;

/// The hosts of a job. The store is on the first.
pub(crate) struct Job {
    pub hosts: Vec<Host>,
    /// Time without a commit after which another host looks whether the leader is gone.
    pub patience: Duration,
    pub store_path: String,
    pub next_tiers: Vec<String>,
    /// Ports of the agents, if they copy each other's memory.
    pub ports: Vec<u16>,
}

/// The engines of one start of the job, by rank.
pub(crate) struct Start {
    pub engines: Vec<Engine>,
    /// Every state of this start differs from those of other starts.
    pub salt: u64,
}

impl Job {
    pub(crate) fn new() -> Self {
        let hosts: Vec<Host> = (0..HOSTS).map(|_| Host::new()).collect();
        let store_path = hosts[0].store_path().to_str().unwrap().to_owned();
        Self { hosts, patience: Duration::from_millis(300), store_path, next_tiers: Vec::new(), ports: Vec::new() }
    }

    /// Each host is copied to the next. All have certificates.
    pub(crate) fn with_peers(self) -> Self {
        let run = tensorcask::absolute_url(&self.store_path).unwrap();
        init_tls(&self.tls_folder(), &InitTls { run, hosts: HOSTS, valid: Duration::from_secs(3600) }).unwrap();
        let listeners: Vec<TcpListener> = (0..HOSTS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        Self { ports: listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect(), ..self }
    }

    fn peers(&self, host: u32) -> Option<Peers> {
        let listen = SocketAddr::from(([127, 0, 0, 1], *self.ports.get(host as usize)?));
        let tls = Some(PeerTls::in_folder(self.tls_folder(), host));
        Some(Peers { tls, ..Peers::new(listen, self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect()) })
    }

    /// Folder of the run in shared memory of a host.
    pub(crate) fn folder_of_run(&self, host: u32) -> std::path::PathBuf {
        let host = &self.hosts[host as usize];
        host.engine_folder().join(&host.status().runs[0].key)
    }

    fn tls_folder(&self) -> std::path::PathBuf {
        std::path::Path::new(&self.store_path).with_file_name("tls")
    }

    pub(crate) fn store(&self) -> Store {
        Store::open(&self.store_path).unwrap()
    }

    pub(crate) fn options(&self, rank: u32, session: &str) -> EngineOptions {
        let host = rank / RANKS;
        let hosts = Hosts { patience: self.patience, ..Hosts::new(session, host * RANKS..(host + 1) * RANKS) };
        EngineOptions {
            rank,
            world: WORLD,
            hosts: Some(hosts),
            peers: self.peers(host),
            store: self.store_path.clone(),
            next_tiers: self.next_tiers.clone(),
            ..self.hosts[host as usize].options()
        }
    }

    pub(crate) fn start(&self, session: &str, salt: u64) -> Start {
        let engines = (0..WORLD).map(|rank| Engine::start(self.options(rank, session)).unwrap()).collect();
        Start { engines, salt }
    }

    /// Starts all ranks at once: without the store, each host waits for the agents of the others.
    pub(crate) fn start_at_once(&self, session: &str, salt: u64) -> Start {
        let engines = std::thread::scope(|scope| {
            let starting: Vec<_> =
                (0..WORLD).map(|rank| scope.spawn(move || Engine::start(self.options(rank, session)).unwrap())).collect();
            starting.into_iter().map(|start| start.join().unwrap()).collect()
        });
        Start { engines, salt }
    }

    /// Waits until a host has copied a step of another.
    pub(crate) fn wait_for_copy(&self, holder: u32, source: u32, step: u64) {
        let has_copy = |found: &AgentStatus| {
            let mut replicas = found.runs.iter().flat_map(|run| &run.replicas);
            replicas.any(|replica| replica.host == source && replica.last_step == Some(step))
        };
        until("a host has copied a step of another", || has_copy(&self.hosts[holder as usize].status()));
    }

    /// Leaders that opened the log, in order.
    pub(crate) fn leaders(&self) -> Vec<Leader> {
        let entries = self.store().history().entries().unwrap();
        entries.into_iter().filter_map(|entry| if let Event::Opened { leader } = entry.event { leader } else { None }).collect()
    }

    /// Sessions that have led. A session on a busy machine may have had several leaders.
    pub(crate) fn sessions(&self) -> std::collections::BTreeSet<tensorcask::wire::Id> {
        self.leaders().into_iter().map(|leader| leader.session).collect()
    }

    pub(crate) fn assert_holds(&self, step: u64, salt: u64) {
        let found = self.store().snapshot(step).unwrap().read("model.w", &Slice::all()).unwrap().data;
        assert!(found == (0..WORLD).flat_map(|rank| row(step, salt, rank)).collect::<Vec<u8>>(), "step {step}");
    }

    pub(crate) fn assert_clean(&self) {
        let report = maintain::verify(&self.store(), &VerifyOptions::default()).unwrap();
        assert!(report.is_clean(), "{:?}", report.problems);
    }

    /// Folder of the receipts of a step of the first session in the store.
    fn receipts_of_first_session(&self, step: u64) -> std::path::PathBuf {
        let sessions = std::fs::read_dir(format!("{}/receipts", self.store_path)).unwrap().map(|entry| entry.unwrap().path());
        let session = sessions.into_iter().find(|path| !path.to_str().unwrap().ends_with("-start")).unwrap();
        session.join(format!("{:020}-{step:020}", 0))
    }

    /// Waits until so many ranks have uploaded a step of the first session in the store.
    pub(crate) fn wait_for_receipts(&self, step: u64, ranks: u32) {
        let folder = self.receipts_of_first_session(step);
        let of_host = |host: u32| format!("{}-{}.json", host * RANKS, (host + 1) * RANKS - 1);
        let receipts = || (0..HOSTS).filter(|host| folder.join(of_host(*host)).exists()).count() as u32;
        until("the receipts are in the store", || receipts() * RANKS == ranks);
    }

    pub(crate) fn steps(&self) -> Vec<u64> {
        self.store().snapshots().map_or_else(|_| Vec::new(), |all| all.iter().map(|info| info.record.step).collect())
    }
}

impl Start {
    pub(crate) fn save(&mut self, host: u32, step: u64) {
        for rank in host * RANKS..(host + 1) * RANKS {
            save_rank(&mut self.engines[rank as usize], rank, step, self.salt);
        }
    }

    /// Each rank restores the whole step of another start.
    fn assert_restores(&self, step: u64, salt: u64) {
        let whole: Vec<u8> = (0..WORLD).flat_map(|rank| row(step, salt, rank)).collect();
        for (rank, engine) in (0..).zip(&self.engines) {
            assert!(*engine.restore(step).unwrap().tensors[0].data == whole, "rank {rank}");
        }
    }

    /// The step that all ranks restore, by rank.
    pub(crate) fn agree(&mut self, round: &str) -> Vec<Option<u64>> {
        std::thread::scope(|scope| {
            let agree = |engine| scope.spawn(move || Engine::agree_by_store(engine, round, LONG).unwrap());
            let waiting: Vec<_> = self.engines.iter_mut().map(agree).collect();
            waiting.into_iter().map(|agreed| agreed.join().unwrap()).collect()
        })
    }

    pub(crate) fn save_all(&mut self, step: u64) {
        (0..HOSTS).for_each(|host| self.save(host, step));
    }

    pub(crate) fn wait(&mut self, host: u32, until: Until) {
        for rank in host * RANKS..(host + 1) * RANKS {
            let waited = self.engines[rank as usize].wait(until, LONG).unwrap();
            assert!(waited.reached, "rank {rank}: {waited:?}");
        }
    }

    pub(crate) fn wait_all(&mut self) {
        (0..HOSTS).for_each(|host| self.wait(host, Until::Durable));
    }
}

/// Saves the state of a rank: its row, and a count that all ranks have.
pub(crate) fn save_rank(engine: &mut Engine, rank: u32, step: u64, salt: u64) {
    let row = row(step, salt, rank);
    let count = step.to_le_bytes();
    let rect = Rect { offset: vec![u64::from(rank), 0], shape: vec![1, ROW] };
    let tensors = [
        TensorView::shard("model.w", Dtype::U8, &[u64::from(WORLD), ROW], rect, &row).unwrap(),
        TensorView::new("optimizer.step", Dtype::U64, &[], &count).unwrap(),
    ];
    let blobs = [Blob { rank, name: "rng".into(), data: vec![rank as u8; 4].into() }];
    let mut metadata = Metadata::default();
    metadata.user.insert("loss".into(), (1.0 / (step + 1) as f64).into());
    engine.save(step, &tensors, &blobs, &metadata).unwrap();
}

/// The row of a rank: a few bytes change from step to step.
pub(crate) fn row(step: u64, salt: u64, rank: u32) -> Vec<u8> {
    (0..ROW).map(|at| (at * 7 + u64::from(rank) + salt * 31 + if at % 1000 == step { 1 } else { 0 }) as u8).collect()
}

#[test]
fn many_agents_make_one_snapshot_of_each_step() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    for step in 1..=4 {
        start.save_all(step);
    }
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 3, 4]);
    (1..=4).for_each(|step| job.assert_holds(step, 1));
    let newest = job.store().snapshot(4).unwrap();
    assert_eq!((newest.blobs().unwrap().len(), newest.user().get("loss")), (WORLD as usize, Some(&0.2.into())));
    assert_eq!(job.sessions().len(), 1, "one session");
    job.assert_clean();
    for engine in start.engines {
        engine.finish().unwrap();
    }
}

#[test]
fn another_host_commits_after_the_leader_was_killed_between_receipts_and_commit() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    // The receipts of the leader's ranks are in the store. It cannot commit yet, because those of other ranks are not.
    start.save(0, 2);
    job.wait_for_receipts(2, RANKS);
    job.hosts[0].kill_agent();
    start.save(1, 2);
    start.save(2, 2);
    start.wait(1, Until::Durable);
    start.wait(2, Until::Durable);
    let leaders = job.leaders();
    assert_eq!(leaders.iter().map(|leader| leader.term).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(leaders[0].session, leaders[1].session);
    // The next agent of the first host, which its trainers start, finds that its step is committed.
    start.wait(0, Until::Durable);
    start.save_all(3);
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 3]);
    (1..=3).for_each(|step| job.assert_holds(step, 1));
    job.assert_clean();
}

#[test]
fn a_lost_hosts_step_is_given_up_and_never_mixed_with_the_next_start() {
    let mut job = Job::new();
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
    }
    start.wait_all();
    // The last host is lost before it saves step 3.
    start.save(0, 3);
    start.save(1, 3);
    job.wait_for_receipts(3, 2 * RANKS);
    drop(start);
    job.hosts[2] = Host::new();
    // A start without a new session is refused.
    assert!(Engine::start(job.options(0, "first")).unwrap_err().to_string().contains("a session of its own"));
    let mut start = job.start("second", 2);
    assert_eq!(start.agree("second"), [Some(2); WORLD as usize]);
    start.assert_restores(2, 1);
    // The lost host saves first: its receipt and the old ones would be complete.
    for host in [2, 1, 0] {
        start.save(host, 3);
    }
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 3]);
    job.assert_holds(2, 1);
    job.assert_holds(3, 2);
    let all = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
    let report = maintain::gc(&job.store(), &all).unwrap();
    let casks = report.deleted.iter().filter(|object| object.path.starts_with("casks/")).count();
    assert_eq!(casks, 2 * 2 * RANKS as usize, "the casks of step 3 of the first start, two for each rank");
    job.assert_holds(3, 2);
    job.assert_clean();
}

/// The store failed after hosts had agreed on the parent of a step, and answers again after more than half of the age floor.
#[test]
fn steps_are_committed_after_one_that_has_waited_too_long() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    start.save(0, 2);
    start.save(1, 2);
    job.wait_for_receipts(2, 2 * RANKS);
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(13 * 3600);
    let parent = job.receipts_of_first_session(2).join("parent.json");
    std::fs::File::options().write(true).open(parent).unwrap().set_modified(long_ago).unwrap();
    start.save(2, 2);
    for engine in &mut start.engines {
        let waited = engine.wait(Until::Durable, LONG).unwrap();
        assert!(waited.failed && !waited.reached, "{waited:?}");
    }
    start.save_all(3);
    start.wait_all();
    assert_eq!(job.steps(), [1, 3]);
    job.assert_holds(3, 1);
    job.assert_clean();
}

/// All hosts read this object before they encode the step.
#[test]
fn a_damaged_parent_in_the_store_costs_one_step() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    let folder = job.receipts_of_first_session(2);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("parent.json"), "{").unwrap();
    for step in 2..=3 {
        start.save_all(step);
    }
    for engine in &mut start.engines {
        let waited = engine.wait(Until::Durable, LONG).unwrap();
        assert!(waited.reached, "{waited:?}");
        assert_eq!(waited.failures.iter().map(|failure| failure.step).collect::<Vec<_>>(), [2]);
    }
    assert_eq!(job.steps(), [1, 3]);
    job.assert_holds(3, 1);
}

/// Of several steps that were committed since the session began, the newest counts.
#[test]
fn ranks_agree_on_the_newest_step_of_their_own_session() {
    let job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    drop(start);
    let mut start = job.start("second", 2);
    assert_eq!(start.agree("second"), [Some(1); WORLD as usize]);
    for step in 2..=4 {
        start.save_all(step);
        start.wait_all();
    }
    assert_eq!(start.agree("again"), [Some(4); WORLD as usize]);
    let listed: Vec<u64> = start.engines[0].loadable().unwrap().iter().map(|found| found.step).collect();
    assert_eq!(listed, [4, 3, 2, 1]);
}

#[test]
fn the_host_that_leads_fills_the_next_tier_from_which_the_job_survives_the_loss_of_the_first() {
    let mut job = Job::new();
    let far = std::path::Path::new(&job.store_path).with_file_name("far").to_str().unwrap().to_owned();
    job.next_tiers = vec![far.clone()];
    let far = || Store::open(&far).unwrap();
    let far_steps = || far().snapshots().map_or_else(|_| Vec::new(), |all| all.iter().map(|info| info.record.step).collect::<Vec<u64>>());
    let far_has = |steps: &[u64]| until("the next tier has all steps", || far_steps() == steps);
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
    }
    start.wait_all();
    far_has(&[1, 2]);
    // Another host leads after the agent of the leader was killed, and fills the tier from then on.
    start.save(0, 3);
    job.wait_for_receipts(3, RANKS);
    job.hosts[0].kill_agent();
    start.save(1, 3);
    start.save(2, 3);
    start.wait(1, Until::Durable);
    start.wait(2, Until::Durable);
    far_has(&[1, 2, 3]);
    start.wait(0, Until::Durable);
    start.save_all(4);
    start.wait_all();
    far_has(&[1, 2, 3, 4]);
    assert!(job.leaders().len() > 1);
    job.assert_clean();
    assert!(maintain::verify(&far(), &VerifyOptions::default()).unwrap().is_clean());
    // The first tier and the memory of all hosts are lost.
    drop(start);
    for host in &job.hosts {
        host.kill_agent();
        std::fs::remove_dir_all(host.engine_folder()).unwrap();
    }
    std::fs::remove_dir_all(&job.store_path).unwrap();
    let mut start = job.start("second", 2);
    assert_eq!(start.agree("second"), [Some(4); WORLD as usize]);
    start.assert_restores(4, 1);
    start.save_all(5);
    start.wait_all();
    far_has(&[1, 2, 3, 4, 5]);
    assert_eq!(job.steps(), [5]);
    job.assert_holds(5, 2);
    assert_eq!(far().history().run().unwrap(), job.store().history().run().unwrap());
    assert!(maintain::verify(&far(), &VerifyOptions::default()).unwrap().is_clean());
    // The last agent ends only after it has filled the tier.
    start.save_all(6);
    for engine in start.engines {
        engine.finish().unwrap();
    }
    far_has(&[1, 2, 3, 4, 5, 6]);
}

/// Somebody forgets all steps and collects them, while the job runs.
#[test]
fn saves_of_many_hosts_go_on_after_the_store_has_lost_their_base() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
        start.wait_all();
    }
    job.store().forget(&[1, 2]).unwrap();
    maintain::gc(&job.store(), &GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() }).unwrap();
    for step in 3..=4 {
        start.save_all(step);
        start.wait_all();
        job.assert_holds(step, 1);
    }
    assert_eq!(job.steps(), [3, 4]);
    job.assert_clean();
}

#[test]
fn another_host_begins_the_session_while_the_first_is_not_there() {
    let job = Job::new();
    let start = |rank: u32| Engine::start(job.options(rank, "first")).unwrap();
    let mut late: Vec<Engine> = (RANKS..WORLD).map(start).collect();
    for (rank, engine) in (RANKS..).zip(&mut late) {
        save_rank(engine, rank, 1, 1);
    }
    until("a session begins", || job.store().history().entries().is_ok_and(|entries| !entries.is_empty()));
    let mut engines: Vec<Engine> = (0..RANKS).map(start).collect();
    for (rank, engine) in (0..).zip(&mut engines) {
        save_rank(engine, rank, 1, 1);
    }
    for engine in engines.iter_mut().chain(&mut late) {
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
    }
    let leaders = job.leaders();
    assert!(leaders.iter().all(|leader| leader.session == leaders[0].session) && leaders[0].term == 1, "{leaders:?}");
    job.assert_holds(1, 1);
}

#[test]
fn ranks_may_end_with_different_last_steps() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
    }
    // Host 1 saves step 3 on both ranks, host 2 on one, host 0 not at all.
    start.save(1, 3);
    save_rank(&mut start.engines[4], 4, 3, 1);
    let finished = std::thread::scope(|scope| {
        let finishing: Vec<_> = start.engines.into_iter().map(|engine| scope.spawn(|| engine.finish())).collect();
        finishing.into_iter().map(|finish| finish.join().unwrap().err().map(|error| error.to_string())).collect::<Vec<_>>()
    });
    for (rank, error) in finished.iter().enumerate() {
        match rank {
            2 | 3 => {
                let text = error.as_deref().unwrap();
                assert!(text.contains("step 3") && text.contains("rank 0 to 1 and 4 to 5 did not save"), "{text}");
            }
            4 => assert!(error.as_deref().unwrap().contains("not all ranks have saved this step"), "{error:?}"),
            _ => assert_eq!(*error, None),
        }
    }
    assert_eq!(job.steps(), [1, 2]);
    job.assert_clean();
}

#[test]
fn an_agent_uploads_what_an_earlier_agent_left_in_memory() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    // The store does not answer.
    let hidden = format!("{}-hidden", job.store_path);
    std::fs::rename(&job.store_path, &hidden).unwrap();
    std::fs::write(&job.store_path, b"not a folder").unwrap();
    start.save_all(2);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Encoded));
    for host in &job.hosts {
        host.kill_agent();
    }
    std::fs::remove_file(&job.store_path).unwrap();
    std::fs::rename(&hidden, &job.store_path).unwrap();
    // A trainer starts the next agent when it waits, so all must wait.
    let is_durable = |engine: &mut Engine| engine.wait(Until::Durable, Duration::from_millis(100)).unwrap().reached;
    until("the step is durable", || start.engines.iter_mut().map(is_durable).fold(true, |all, one| all & one));
    assert_eq!(job.steps(), [1, 2]);
    (1..=2).for_each(|step| job.assert_holds(step, 1));
    assert!(job.store().snapshot(2).unwrap().record().parent.is_some(), "a delta on the step that memory holds");
    job.assert_clean();
}

#[test]
fn a_lost_host_costs_no_step_that_another_host_has_copied() {
    let mut job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    for step in 1..=2 {
        start.save_all(step);
        start.wait_all();
    }
    // The store does not answer, so step 3 is in the memory of the hosts only.
    let away = Away::take(job.store_path.as_ref());
    start.save_all(3);
    (0..HOSTS).for_each(|host| start.wait(host, Until::Encoded));
    job.wait_for_copy(0, 2, 3);
    drop(start);
    job.hosts[2] = Host::new();
    away.back();

    let mut start = job.start("second", 2);
    assert_eq!(start.agree("second"), [Some(3); WORLD as usize]);
    for (rank, engine) in (0..).zip(&start.engines) {
        let restored = engine.restore(3).unwrap();
        assert_eq!(restored.source, Source::Hosts, "rank {rank}: {:?}", restored.passed_over);
        let whole: Vec<u8> = (0..WORLD).flat_map(|rank| row(3, 1, rank)).collect();
        assert!(*restored.tensors[0].data == whole, "rank {rank}");
        assert_eq!(restored.metadata.user.get("loss"), Some(&0.25.into()), "rank {rank}");
        assert_eq!(engine.restore(2).unwrap().source, Source::Hosts, "the committed step");
    }
    start.save_all(4);
    start.wait_all();
    assert_eq!(job.steps(), [1, 2, 4]);
    job.assert_holds(2, 1);
    job.assert_holds(4, 2);
    job.assert_clean();
}

#[test]
fn another_start_of_the_job_ends_the_session_of_hosts_that_live_on() {
    let job = Job::new();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    // The job starts again on other hosts, while these live on.
    let other = Job { store_path: job.store_path.clone(), ..Job::new() };
    let mut next = other.start("second", 2);
    next.save_all(2);
    next.wait_all();
    start.save_all(2);
    until("the first start hears of the second", || start.engines[0].wait(Until::Durable, Duration::from_millis(200)).is_err());
    assert_eq!(job.steps(), [1, 2]);
    job.assert_holds(2, 2);
    job.assert_clean();
}

/// Memory for encoded snapshots is full from the first step on: copies of other hosts wait, own saves do not, and the status
/// says both.
#[test]
fn a_full_memory_stops_copies_of_other_hosts_and_no_save() {
    let job = Job::new().with_peers();
    let engine = |rank| Engine::start(EngineOptions { memory_cap: Some(1), ..job.options(rank, "first") }).unwrap();
    let mut start = Start { engines: (0..WORLD).map(engine).collect(), salt: 1 };
    let key = job.hosts[0].status().runs[0].key.clone();
    // The copy of a host that an earlier, larger job has left.
    let former = job.hosts[0].engine_folder().join(key).join("replica-9");
    std::fs::create_dir_all(former.join("casks")).unwrap();
    for step in 1..=3 {
        start.save_all(step);
        start.wait_all();
    }
    let run = || job.hosts[0].status().runs.remove(0);
    until("the status says that memory is full", || run().problem.is_some_and(|problem| problem.contains("memory_cap")));
    let full = |problem: &Option<String>| problem.as_ref().is_some_and(|problem| problem.contains("no room"));
    until("the copies say so, too", || run().replicas.iter().any(|replica| full(&replica.problem) && replica.last_step.is_none()));
    assert!(run().memory_bytes > run().memory_cap_bytes);
    until("the former copy is gone", || !former.exists());
    assert_eq!(job.steps(), [1, 2, 3]);
    for engine in start.engines {
        engine.finish().unwrap();
    }
}

/// The signatures in the mirror of a host are gone, as if its receipts were forged. Its peer copies nothing from there, and the
/// status says why.
#[test]
fn receipts_without_their_signature_are_reported_in_the_status() {
    let job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    let replica = |found: &AgentStatus| found.runs[0].replicas.iter().find(|replica| replica.host == 0).cloned().unwrap();
    until("host 1 has copied step 1 of host 0", || replica(&job.hosts[1].status()).last_step == Some(1));
    let folder = |host: usize| job.hosts[host].engine_folder().join(&job.hosts[1].status().runs[0].key);
    let mirror = folder(0).join("mirror/receipts");
    let copy = folder(1).join("replica-0");
    job.hosts[1].kill_agent();
    std::fs::remove_dir_all(&copy).unwrap();
    let mut removed = 0;
    for session in std::fs::read_dir(mirror).unwrap() {
        for step in std::fs::read_dir(session.unwrap().path()).unwrap() {
            for object in std::fs::read_dir(step.unwrap().path()).unwrap().map(|object| object.unwrap().path()) {
                if object.extension().is_some_and(|extension| extension == "proof") {
                    std::fs::remove_file(object).unwrap();
                    removed += 1;
                }
            }
        }
    }
    assert_eq!(removed, 1, "one signature for the ranks of a host at a step");
    let mut agent = job.hosts[1].start_agent(&[]);
    let reported = || replica(&job.hosts[1].status()).problem.unwrap_or_default();
    until("the status says what is wrong", || reported().contains("the signature of the host is missing"));
    let port = job.ports[0].to_string();
    let problem = reported();
    assert!([port.as_str(), "step 1", "ranks 0 to 1", "0-1.json"].iter().all(|named| problem.contains(named)), "{problem}");
    assert_eq!(replica(&job.hosts[1].status()).last_step, None);
    job.hosts[1].signal_agent(Signal::KILL);
    agent.wait().unwrap();
}

/// The agent of a host is stopped: its connections stay open, and nothing comes through them.
#[test]
fn a_host_that_does_not_answer_is_named_by_those_that_wait_for_it() {
    let job = Job::new().with_peers();
    let mut start = job.start("first", 1);
    start.save_all(1);
    start.wait_all();
    job.wait_for_copy(1, 0, 1);
    job.hosts[1].signal_agent(Signal::STOP);
    start.save(0, 2);
    start.save(2, 2);
    // Host 1 copies host 0, and host 2 copies host 1.
    let run = |host: usize| job.hosts[host].status().runs.remove(0);
    until("host 0 says that its step waits for copies", || run(0).peers_problem.is_some_and(|problem| problem.contains("step 2 waits")));
    let problem = run(0).peers_problem.unwrap();
    assert!(problem.contains("since ") && problem.contains("GMT"), "{problem}");
    let waited = start.engines[0].wait(Until::Replicated, Duration::ZERO).unwrap();
    assert!(!waited.reached && waited.problem.as_ref().is_some_and(|problem| problem.contains("step 2 waits")), "{waited:?}");
    let port = job.ports[1].to_string();
    let names_host = |problem: String| problem.contains(&port);
    until("host 2 names the host", || run(2).replicas.iter().any(|replica| replica.problem.clone().is_some_and(names_host)));
    job.hosts[1].signal_agent(Signal::CONT);
    start.save(1, 2);
    start.wait_all();
    for host in [0, 2] {
        until("the problem is gone", || {
            let run = run(host);
            run.peers_problem.is_none() && run.replicas.iter().all(|replica| replica.problem.is_none())
        });
    }
    assert_eq!(job.steps(), [1, 2]);
    job.assert_clean();
}
