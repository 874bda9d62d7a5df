//! Benchmark of many hosts: what replicas cost the trainer, and how long a lost host takes to restore from a peer or the store.
//!
//! Two hosts with one rank each run on this machine. Each copies the memory of the other by mutual TLS over loopback.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

#[cfg(target_os = "linux")]
#[path = "../../benches/common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod host;

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::net::{SocketAddr, TcpListener};
    use std::path::Path;
    use std::time::{Duration, Instant};

    use serde_json::json;
    use tensorcask::{Metadata, Policy};
    use tensorcask_engine::{Engine, EngineOptions, Hosts, InitTls, PeerTls, Peers, Source, Until, init_tls};

    use crate::common::{Arguments, Memcpy, Owned, SPEED, Table, bytes_of, fail, median, report, synthetic};
    use crate::host::{Host, LONG, copy_seconds, views};

    const HOSTS: u32 = 2;

    /// A job of two hosts.
    struct Job {
        hosts: [Host; HOSTS as usize],
        store: String,
        tls: tempfile::TempDir,
        ports: Vec<u16>,
    }

    impl Job {
        fn new(store: Option<&str>, name: &str) -> Self {
            let hosts = [Host::new(None), Host::new(None)];
            let store = match store {
                Some(url) => format!("{url}/{name}-{}", std::process::id()),
                None => hosts[0].options().store,
            };
            let tls = tempfile::tempdir().unwrap();
            let run = tensorcask::absolute_url(&store).unwrap();
            init_tls(tls.path(), &InitTls { run, hosts: HOSTS, valid: Duration::from_secs(3600) }).unwrap();
            let listeners: Vec<TcpListener> = (0..HOSTS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let ports = listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
            Self { hosts, store, tls, ports }
        }

        fn options(&self, host: u32, session: &str, has_peers: bool) -> EngineOptions {
            let addresses = self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
            let tls = Some(PeerTls::in_folder(self.tls.path(), host));
            let listen = SocketAddr::from(([127, 0, 0, 1], self.ports[host as usize]));
            EngineOptions {
                rank: host,
                world: HOSTS,
                hosts: Some(Hosts::new(session, host..host + 1)),
                peers: has_peers.then(|| Peers { tls, ..Peers::new(listen, addresses) }),
                store: self.store.clone(),
                policy: Policy::Consecutive,
                ..self.hosts[host as usize].options()
            }
        }

        fn start(&self, session: &str, has_peers: bool) -> Vec<Engine> {
            std::thread::scope(|scope| {
                let start = |host| scope.spawn(move || Engine::start(self.options(host, session, has_peers)).unwrap());
                let starting: Vec<_> = (0..HOSTS).map(start).collect();
                starting.into_iter().map(|engine| engine.join().unwrap()).collect()
            })
        }
    }

    pub(super) fn main() {
        let arguments = Arguments::parse(&["mib", "rounds", "store"]);
        let bytes = (arguments.number("mib", 512.0) * (1u64 << 20) as f64) as u64;
        let rounds = arguments.number("rounds", 5.0) as usize;
        let data = arguments.text("data").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data"), Into::into);
        // The tensors of each rank are its own.
        let state = |step: u64, host: u32| {
            let mut state = synthetic(bytes, &data.join(format!("step-{step}.safetensors")));
            state.iter_mut().for_each(|tensor| tensor.name = format!("rank{host}.{}", tensor.name));
            state
        };
        let states = [1000, 1001].map(|step| [0, 1].map(|host| state(step, host)));
        let tables = [stall(&states, rounds), restore(&states, rounds, arguments.text("store"))];
        report("hosts", &tables, arguments.json);
    }

    type States = [[Vec<Owned>; HOSTS as usize]; 2];

    fn save(engines: &mut [Engine], states: &States, step: u64, host: usize) -> f64 {
        let views = views(&states[step as usize % 2][host]);
        engines[host].save(step, &views, &[], &Metadata::default()).unwrap().stall.as_secs_f64()
    }

    fn wait(engines: &mut [Engine], until: Until) {
        engines.iter_mut().for_each(|engine| assert!(engine.wait(until, LONG).unwrap().reached));
    }

    /// How long a save stops the trainer, with and without copies on the other host.
    fn stall(states: &States, rounds: usize) -> Table {
        let size = bytes_of(&states[0][0]);
        let title = format!("Stall of a save of {:.2} GB on each of {HOSTS} hosts, median of {rounds}", size as f64 / 1e9);
        let mut table = Table::new(title, &SPEED);
        let mut memcpy = Memcpy::new(size as usize);
        let mut reference = None;
        for has_peers in [false, true] {
            let job = Job::new(None, "stall");
            let mut engines = job.start("stall", has_peers);
            let mut copies = Vec::new();
            let mut idle = Vec::new();
            let mut busy = Vec::new();
            let mut replicated = Vec::new();
            for step in 1..=2 * rounds as u64 + 2 {
                let begun = Instant::now();
                let stalls = [0, 1].map(|host| save(&mut engines, states, step, host));
                // The first two saves make the arenas.
                match step {
                    0..=2 => {}
                    _ if step % 2 == 1 => idle.push(stalls[0]),
                    _ => busy.push(stalls[0]),
                }
                // Every second save comes while the agents encode the one before.
                if step % 2 == 1 && step > 2 {
                    continue;
                }
                if has_peers {
                    wait(&mut engines, Until::Replicated);
                    replicated.push(begun.elapsed().as_secs_f64());
                }
                wait(&mut engines, Until::Durable);
                copies.push(copy_seconds(&states[0][0], &mut memcpy));
            }
            let copy = *reference.get_or_insert(median(copies));
            if !has_peers {
                table.speed("memcpy, one thread", size, copy, copy);
            }
            let kind = if has_peers { "with copies on the other host" } else { "without copies" };
            table.speed(&format!("save, {kind}"), size, median(idle), copy);
            table.speed(&format!("save while the save before is encoded, {kind}"), size, median(busy), copy);
            if has_peers {
                table.speed("two saves on both hosts until `replicated`, nobody waits", size, median(replicated), copy);
            }
            engines.into_iter().for_each(|engine| engine.finish().unwrap());
        }
        table
    }

    /// A host is lost with its memory. Its rank restores from the other host, or from the store.
    fn restore(states: &States, rounds: usize, store: Option<&str>) -> Table {
        let size = bytes_of(&states[0][0]);
        let title = format!(
            "A host with {:.2} GB of state is replaced: restore of its rank, a base and a delta, every byte checked, median of {rounds}. Store: {}",
            size as f64 / 1e9,
            if store.is_some() { "S3 server on loopback" } else { "local disk, warm" }
        );
        let mut job = Job::new(store, "restore");
        let mut engines = job.start("first", true);
        for step in 1..=2 {
            [0, 1].into_iter().for_each(|host| _ = save(&mut engines, states, step, host));
            wait(&mut engines, Until::Replicated);
            wait(&mut engines, Until::Durable);
        }
        drop(engines);
        let mut times: [Vec<f64>; 2] = Default::default();
        for round in 0..rounds {
            for (times, has_peers) in times.iter_mut().zip([true, false]) {
                job.hosts[1] = Host::new(None);
                let engines = job.start(&format!("round-{round}-{has_peers}"), has_peers);
                let begun = Instant::now();
                let restored = engines[1].restore(2).unwrap();
                times.push(begun.elapsed().as_secs_f64());
                let is_expected = if has_peers { restored.source == Source::Hosts } else { matches!(restored.source, Source::Tier(..)) };
                assert!(is_expected, "restored from {}", restored.source);
                let expected = &states[0][1];
                let own = restored.tensors.iter().filter(|tensor| tensor.name.starts_with("rank1."));
                assert_eq!(own.clone().count(), expected.len());
                for tensor in own {
                    let known = expected.iter().find(|known| known.name == tensor.name).unwrap_or_else(|| fail("another tensor"));
                    assert!(*tensor.data == *known.data, "{} came back otherwise", tensor.name);
                }
            }
        }
        // Without names of tensors, a rank restores the state of all ranks.
        let bytes = size * u64::from(HOSTS);
        let mut table = Table::new(title, &["s", "GB/s", "x store"]);
        let of_store = median(times[1].clone());
        for (name, times) in ["from the memory of the other host", "from the store"].into_iter().zip(times) {
            let seconds = median(times);
            let rate = bytes as f64 / seconds / 1e9;
            let cells = vec![format!("{seconds:.3}"), format!("{rate:.2}"), format!("{:.2}", seconds / of_store)];
            table.row(name, cells, json!({ "seconds": seconds, "gb_per_s": rate, "times_store": seconds / of_store }));
        }
        table
    }
}
