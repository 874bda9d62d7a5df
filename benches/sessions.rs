//! Measures a commit of a session of many hosts: requests, bytes, and the memory of the leader.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::{Arguments, Table, fail, report};
use object_store::local::LocalFileSystem;
use serde_json::{Value, json};
use tensorcask::session::{HostWriter, LeaderWriter, RankState, SessionExchange, SessionLog};
use tensorcask::wire::{Id, Leader, SessionStep};
use tensorcask::{Dtype, Metadata, Policy, Rect, Store, StoreOptions, TensorView, WriterOptions};

const RANKS_PER_HOST: u32 = 8;
const HOSTS: [u32; 4] = [1, 8, 64, 1250];
/// Hosts whose requests are counted. The others are assumed to send as many each.
const COUNTED_HOSTS: u32 = 64;
/// Columns of each tensor. Each rank has one row.
const COLUMNS: u64 = 256;
/// Requests of the agent of each host that this process does not make: its mirror takes a log entry and a manifest, and each rank's
/// cask is looked for before its upload.
const MIRROR_REQUESTS: u64 = 2;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments = Arguments::parse(&["tensors", "most-hosts", "commit", "session", "world", "step"]);
    if let Some(folder) = arguments.text("commit") {
        let session = Id::from_hex(arguments.text("session").unwrap()).unwrap();
        let world = arguments.number("world", 0.0) as u32;
        let step = arguments.number("step", 0.0) as u64;
        println!("{}", commit(folder, session, world, step).await);
        return;
    }
    let tensors = arguments.number("tensors", 50.0) as usize;
    let most = arguments.number("most-hosts", 1250.0) as u32;
    let title = format!("A delta of {tensors} tensors, each divided among all ranks; {RANKS_PER_HOST} ranks per host; one cask per rank");
    let columns =
        ["requests of all", "per rank", "receipts per host, KB", "manifest, KB", "leader reads, MB", "leader's memory, MB", "leader, s"];
    let mut table = Table::new(title, &columns);
    for hosts in HOSTS.into_iter().filter(|hosts| *hosts <= most) {
        let (cells, values) = measure(hosts, tensors).await;
        table.row(&format!("{} ranks", hosts * RANKS_PER_HOST), cells, values);
    }
    report("sessions", &[table], arguments.json);
}

/// A store of files that counts requests as those of an object store.
fn open(folder: &str) -> Store {
    let files = LocalFileSystem::new_with_prefix(folder).unwrap();
    Store::with_object_store(Arc::new(files), "run".into(), StoreOptions { fsync: false, ..StoreOptions::default() })
}

fn at(step: u64) -> SessionStep {
    SessionStep { attempt: 0, step }
}

fn options() -> WriterOptions {
    WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() }
}

/// Saves a base and a delta on all hosts; the leader of each step is a process of its own.
async fn measure(hosts: u32, tensors: usize) -> (Vec<String>, Value) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().to_str().unwrap();
    let world = hosts * RANKS_PER_HOST;
    let session = Id::random().unwrap();
    let names: Vec<String> = (0..tensors).map(|number| format!("model.layers.{number}.weight")).collect();
    // Opens the log.
    let leader = Leader { session, after: 0, attempt: 0, term: 1, above: None };
    LeaderWriter::open(&open(path), leader, options()).await.unwrap();
    let open_writer = async |host: u32, store: &Store| {
        let ranks: Vec<u32> = (host * RANKS_PER_HOST..(host + 1) * RANKS_PER_HOST).collect();
        HostWriter::open(store, session, &ranks, world, options()).await.unwrap()
    };
    // A writer holds the directory of the parent, which names the parts of all ranks. So not all hosts keep theirs.
    let mut counted = Vec::new();
    for host in 0..hosts.min(COUNTED_HOSTS) {
        let store = open(path);
        counted.push((open_writer(host, &store).await, store));
    }
    let mut of_counted = 0;
    let mut of_leader = Value::Null;
    for step in 1..=2 {
        let before: u64 = counted.iter().map(|(_, store)| store.io().requests).sum();
        for (host, (writer, _)) in (0..).zip(&mut counted) {
            save(writer, host, world, step, &names).await;
        }
        of_counted = counted.iter().map(|(_, store)| store.io().requests).sum::<u64>() - before;
        for host in COUNTED_HOSTS..hosts {
            save(&mut open_writer(host, &open(path)).await, host, world, step, &names).await;
        }
        of_leader = commit_in_child(path, session, world, step);
    }
    let of_hosts = of_counted * u64::from(hosts) / counted.len() as u64;
    let store = open(path);
    let receipts = bytes_below(&folder.path().join("run/receipts").join(format!("{session}/{:020}-{:020}", 0, 2)));
    let manifest = newest_file(&folder.path().join("run/snapshots"));
    let latest = store.snapshot(2u64).await.unwrap();
    assert!(latest.record().parent.is_some() && latest.tensors().len() == tensors);
    let number = |name: &str| of_leader[name].as_u64().unwrap();
    let of_agents = u64::from(hosts) * MIRROR_REQUESTS + u64::from(world);
    let requests = of_hosts + number("requests") + of_agents;
    let per_host = receipts / u64::from(hosts);
    let seconds = of_leader["seconds"].as_f64().unwrap();
    let cells = vec![
        requests.to_string(),
        format!("{:.2}", requests as f64 / f64::from(world)),
        format!("{:.1}", per_host as f64 / 1e3),
        format!("{:.1}", manifest as f64 / 1e3),
        format!("{:.2}", number("bytes_read") as f64 / 1e6),
        format!("{:.0}", number("memory") as f64 / 1e6),
        format!("{seconds:.2}"),
    ];
    let values = json!({
        "requests": requests, "receipts_per_host": per_host, "manifest": manifest, "leader_reads": number("bytes_read"),
        "leader_memory": number("memory"), "leader_seconds": seconds,
    });
    (cells, values)
}

async fn save(writer: &mut HostWriter, host: u32, world: u32, step: u64, names: &[String]) {
    let parent = writer.fix_parent(at(step)).await.unwrap();
    let rows: Vec<(u32, Vec<u8>)> = (host * RANKS_PER_HOST..(host + 1) * RANKS_PER_HOST)
        .map(|rank| (rank, (0..COLUMNS).map(|column| (column * 7 + u64::from(rank) + u64::from(column == step)) as u8).collect()))
        .collect();
    let states: Vec<RankState<'_>> = rows
        .iter()
        .map(|(rank, row)| {
            let part = |name: &String| {
                let rect = Rect { offset: vec![u64::from(*rank), 0], shape: vec![1, COLUMNS] };
                TensorView::shard(name.as_str(), Dtype::U8, &[u64::from(world), COLUMNS], rect, row).unwrap()
            };
            RankState { tensors: names.iter().map(part).collect(), blobs: Vec::new(), metadata: Metadata::default() }
        })
        .collect();
    writer.save(at(step), parent, &states).await.unwrap();
}

fn commit_in_child(folder: &str, session: Id, world: u32, step: u64) -> Value {
    let world = world.to_string();
    let step = step.to_string();
    let words = ["--commit", folder, "--session", &session.to_string(), "--world", &world, "--step", &step];
    let ended = Command::new(std::env::current_exe().unwrap()).args(words).output().unwrap();
    if !ended.status.success() {
        fail(&String::from_utf8_lossy(&ended.stderr));
    }
    serde_json::from_slice(&ended.stdout).unwrap()
}

/// Leads the session in this process, and commits a step.
async fn commit(folder: &str, session: Id, world: u32, step: u64) -> Value {
    let store = open(folder);
    let term = SessionLog::open(&store).await.unwrap().leadership().of(session).unwrap().leader.term + 1;
    let leader = Leader { session, after: 0, attempt: 0, term, above: None };
    let mut writer = LeaderWriter::open(&store, leader, options()).await.unwrap();
    let exchange = SessionExchange::new(&store, tensorcask::wire::SessionName { run: store.history().run().await.unwrap(), session });
    let io = store.io();
    let memory = memory("VmRSS:");
    let begun = Instant::now();
    let found = exchange.survey(step.checked_sub(1).filter(|before| *before > 0).map(at)).await.unwrap();
    assert!(found.steps[&at(step)].has_all(0..world));
    let receipts = exchange.receipts(at(step), &found.steps[&at(step)]).await.unwrap();
    writer.commit(step, &receipts).await.unwrap();
    let now = store.io();
    json!({
        "requests": now.requests - io.requests, "bytes_read": now.bytes_read - io.bytes_read,
        "memory": self::memory("VmHWM:") - memory, "seconds": begun.elapsed().as_secs_f64(),
    })
}

/// A number of bytes from the status of this process.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn files_in(folder: &std::path::Path) -> impl Iterator<Item = std::fs::Metadata> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap())
}

fn bytes_below(folder: &std::path::Path) -> u64 {
    files_in(folder).map(|found| found.len()).sum()
}

fn newest_file(folder: &std::path::Path) -> u64 {
    files_in(folder).max_by_key(|found| found.modified().unwrap()).unwrap().len()
}
