//! A run on 64 hosts, each with an agent of its own and mutual TLS, on loopback addresses of this machine. `bash .ci/thorough
//! real-hosts` runs it with optimization, and prints how long each level takes after a save.
//!
//! The checks do not depend on time. Each step is encoded, replicated and committed on all hosts. No host reports a problem or a
//! lost save, and no connection is cut off.

use std::net::{SocketAddr, TcpListener};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::VerifyOptions;
use tensorcask::{Blob, Dtype, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{Engine, EngineOptions, Hosts, InitTls, PeerTls, Peers, RunStatus, Until, init_tls};

use super::host::*;

const COLUMNS: u64 = 5_000;
const LEVELS: [Until; 3] = [Until::Encoded, Until::Replicated, Until::Durable];

fn row(step: u64, host: u32) -> Vec<u8> {
    (0..COLUMNS).map(|at| (at * 7 + u64::from(host) + if at % 100 == step { 1 } else { 0 }) as u8).collect()
}

struct Cluster {
    hosts: Vec<Host>,
    store: String,
    addresses: Vec<SocketAddr>,
    tls: std::path::PathBuf,
}

impl Cluster {
    fn new(count: u32) -> Self {
        let hosts: Vec<Host> = (0..count).map(|_| Host::new()).collect();
        let store = hosts[0].store_path().to_str().unwrap().to_owned();
        let tls = hosts[0].stores.path().join("tls");
        let run = tensorcask::absolute_url(&store).unwrap();
        init_tls(&tls, &InitTls { run, hosts: count, valid: Duration::from_secs(24 * 3600) }).unwrap();
        // All connections come from one address, the worst case for the rule against floods.
        let listener = |host: u32| TcpListener::bind(SocketAddr::from(([127, 0, 1, host as u8], 0))).unwrap();
        let listeners: Vec<TcpListener> = (0..count).map(listener).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        Self { hosts, store, addresses, tls }
    }

    fn count(&self) -> u32 {
        self.hosts.len() as u32
    }

    fn engine(&self, host: u32) -> Engine {
        let addresses = self.addresses.iter().map(ToString::to_string).collect();
        let peers = Peers { tls: Some(PeerTls::in_folder(&self.tls, host)), ..Peers::new(self.addresses[host as usize], addresses) };
        let options = EngineOptions {
            rank: host,
            world: self.count(),
            hosts: Some(Hosts::new("first", host..host + 1)),
            peers: Some(peers),
            store: self.store.clone(),
            ..self.hosts[host as usize].options()
        };
        Engine::start(options).unwrap()
    }

    fn save(&self, engine: &mut Engine, step: u64, host: u32) {
        let row = row(step, host);
        let count = step.to_le_bytes();
        let rect = Rect { offset: vec![u64::from(host), 0], shape: vec![1, COLUMNS] };
        let tensors = [
            TensorView::shard("model.w", Dtype::U8, &[u64::from(self.count()), COLUMNS], rect, &row).unwrap(),
            TensorView::new("optimizer.step", Dtype::U64, &[], &count).unwrap(),
        ];
        let blobs = [Blob { rank: host, name: "rng".into(), data: vec![host as u8; 4].into() }];
        let outcome = engine.save(step, &tensors, &blobs, &Metadata::default()).unwrap();
        assert!(outcome.failures.is_empty(), "host {host}: {:?}", outcome.failures);
    }
}

/// Connections from other hosts to a host that are established now.
fn connections_to(address: SocketAddr) -> usize {
    let std::net::IpAddr::V4(ip) = address.ip() else { return 0 };
    let local = format!(": {:08X}:{:04X} ", u32::from_le_bytes(ip.octets()), address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table.lines().filter(|line| line.contains(&local) && line.split_whitespace().nth(3) == Some("01")).count()
}

/// Seconds that the agent of a host has computed.
fn agent_seconds(host: &Host) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", host.agent().unwrap().as_raw_nonzero())).unwrap();
    let after_name = stat.rsplit_once(") ").unwrap().1;
    let ticks: u64 = after_name.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

fn median_and_longest(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    format!("{:.2} ({:.2})", times[times.len() / 2].as_secs_f64(), times[times.len() - 1].as_secs_f64())
}

#[test]
#[ignore = "takes both cores of a small machine for a minute; bash .ci/thorough real-hosts"]
fn all_hosts_of_a_large_run_commit_and_replicate() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let count = number("TEST_HOSTS", 64) as u32;
    let steps = number("TEST_STEPS", 8);
    let pause = Duration::from_millis(number("TEST_PAUSE_MS", 0));
    let cluster = Cluster::new(count);
    let began = Instant::now();
    let starting = Barrier::new(count as usize);
    let saving = Barrier::new(count as usize);
    let waiting = Barrier::new(count as usize);
    let times: Vec<Vec<[Duration; 3]>> = std::thread::scope(|scope| {
        let cluster = &cluster;
        let starting = &starting;
        let saving = &saving;
        let waiting = &waiting;
        let train = move |host: u32| {
            let mut engine = cluster.engine(host);
            if starting.wait().is_leader() {
                let seconds = cluster.hosts.iter().map(agent_seconds).sum::<f64>();
                println!("all hosts have started after {:.0} s; their agents have computed {seconds:.1} s", began.elapsed().as_secs_f64());
            }
            let mut times = Vec::new();
            for step in 1..=steps {
                saving.wait();
                cluster.save(&mut engine, step, host);
                let saved = Instant::now();
                times.push(LEVELS.map(|level| {
                    let waited = engine.wait(level, LONG).unwrap();
                    assert!(waited.reached && waited.failures.is_empty(), "host {host}, step {step}: {waited:?}");
                    saved.elapsed()
                }));
                waiting.wait();
                // Agents look at each other meanwhile, as between the saves of a training.
                vary_moment(pause);
            }
            (engine, times)
        };
        let training: Vec<_> = (0..count).map(|host| scope.spawn(move || train(host))).collect();
        let (engines, times): (Vec<Engine>, _) = training.into_iter().map(|host| host.join().unwrap()).unzip();
        let mut computed: Vec<f64> = cluster.hosts.iter().map(agent_seconds).collect();
        let first = computed[0];
        let all = computed.iter().sum::<f64>();
        computed.sort_by(f64::total_cmp);
        println!("{count} hosts; connections to host 0: {}", connections_to(cluster.addresses[0]));
        println!("CPU s of the agents: host 0 {first:.1}, median {:.1}, all {all:.1}", computed[computed.len() / 2]);
        for host in &cluster.hosts {
            let is_copied = |run: &RunStatus| run.replicas.iter().all(|replica| !replica.is_held || replica.last_step == Some(steps));
            until("the last step is copied", || is_copied(&host.status().runs[0]));
            let run = host.status().runs.remove(0);
            assert!(run.replicas.iter().any(|replica| replica.is_held));
            let replica_problems: Vec<_> = run.replicas.iter().filter_map(|replica| replica.problem.clone()).collect();
            assert_eq!((run.problem, run.peers_problem, replica_problems), (None, None, Vec::new()));
            assert_eq!((run.levels.durable, run.failed_saves), (Some(steps), 0));
            let log = host.agent_log();
            assert!(!log.contains("too many connections") && !log.contains("was refused"), "{log}");
        }
        let finishing: Vec<_> = engines.into_iter().map(|engine| scope.spawn(|| engine.finish())).collect();
        finishing.into_iter().for_each(|host| host.join().unwrap().unwrap());
        times
    });
    println!("seconds after a save, median of all hosts (longest):");
    println!("| step | encoded | replicated | durable |\n|---|---|---|---|");
    for step in 0..steps as usize {
        let level = |level: usize| median_and_longest(times.iter().map(|host| host[step][level]).collect());
        println!("| {} | {} | {} | {} |", step + 1, level(0), level(1), level(2));
    }
    println!("the whole run took {:.0} s", began.elapsed().as_secs_f64());
    let store = Store::open(&cluster.store).unwrap();
    for step in 1..=steps {
        let found = store.snapshot(step).unwrap().read("model.w", &Slice::all()).unwrap().data;
        assert!(found == (0..count).flat_map(|host| row(step, host)).collect::<Vec<u8>>(), "step {step}");
    }
    let report = maintain::verify(&store, &VerifyOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}
