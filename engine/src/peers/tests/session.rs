//! A session of four ranks on two hosts, each with a mirror, a server and a replica of the other.

use std::sync::Arc;

use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use tensorcask::session::{HostWriter, LeaderWriter, Mirror, RankState, ReceiptProof, Replica, SessionExchange, SessionLog};
use tensorcask::wire::{Id, Leader, SessionStep};
use tensorcask::{Dtype, Metadata, Policy, Rect, Slice, Store, TensorView, WriterOptions};

use super::support::{Host, tls};
use crate::memory::stores::{open_mirror, open_replica};
use crate::peers::certificates::CertificateFiles;
use crate::peers::peer_objects::Peer;
use crate::peers::receipt_proof::SignedReceipts;
use crate::peers::union::{ListedPlace, Place, union_store};
use crate::run::hosts_option::Hosts;
use crate::run::peers_option::PeerTls;

pub(in crate::peers) const RANKS: u32 = 2;
pub(in crate::peers) const WORLD: u32 = 4;
const ROW: u64 = 100_000;

/// A job on two hosts with one store.
pub(in crate::peers) struct Job {
    pub scratch: tempfile::TempDir,
    pub store: Store,
    pub id: Id,
    leader: LeaderWriter,
    pub hosts: Vec<JobHost>,
}

pub(in crate::peers) struct JobHost {
    pub host: Host,
    writer: HostWriter,
    pub mirror: Mirror,
}

/// Signs and checks receipts with the certificates of one host.
pub(in crate::peers) fn proof(files: &PeerTls) -> Arc<dyn ReceiptProof> {
    Arc::new(SignedReceipts::new(tls(files), Hosts::new("job", 0..RANKS).spec(0, WORLD).unwrap()))
}

pub(in crate::peers) fn ranks(host: u32) -> Vec<u32> {
    (host * RANKS..(host + 1) * RANKS).collect()
}

pub(in crate::peers) fn at(step: u64) -> SessionStep {
    SessionStep { attempt: 0, step }
}

fn row(step: u64, rank: u32) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..ROW as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8 ^ rank as u8).collect();
    bytes.iter_mut().step_by(89).for_each(|byte| *byte = byte.wrapping_add(step as u8));
    bytes
}

fn options() -> WriterOptions {
    WriterOptions { policy: Policy::Consecutive, ..WriterOptions::default() }
}

impl Job {
    pub(in crate::peers) async fn begin() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path().join("store").to_str().unwrap()).unwrap();
        let id = Id::random().unwrap();
        let leader = Leader { session: id, after: 0, attempt: 0, term: 1, above: None };
        let leader = LeaderWriter::open(&store, leader, options()).await.unwrap();
        let mut job = Self { scratch, store, id, leader, hosts: Vec::new() };
        for host in 0..2 {
            let added = job.join(host).await;
            job.hosts.push(added);
        }
        job
    }

    /// From now on, the hosts sign their receipts with these certificates.
    pub(in crate::peers) fn sign(&mut self, made: &CertificateFiles) {
        for (JobHost { writer, .. }, files) in self.hosts.iter_mut().zip(&made.hosts) {
            writer.prove_receipts(Some(proof(files)));
        }
    }

    /// A mirror of host 0 in which somebody else has forged casks and receipts of a step, with the right structure.
    pub(in crate::peers) async fn forge(&self, step: u64, signed: Option<&PeerTls>) -> Host {
        let machine = Host::new();
        let memory = open_mirror(&machine.folder).unwrap();
        let mut mirror = Mirror::new(&self.store, &memory);
        mirror.follow(&SessionLog::open(&self.store).await.unwrap()).await.unwrap();
        let mut writer = HostWriter::open_with_mirror(&self.store, &memory, self.id, &ranks(0), WORLD, options()).await.unwrap();
        writer.prove_receipts(signed.map(proof));
        let rows: Vec<Vec<u8>> = ranks(0).into_iter().map(|rank| noise(rank + 77, ROW as usize)).collect();
        let state = |(rank, row)| RankState { tensors: vec![part(rank, row)], blobs: Vec::new(), metadata: Metadata::default() };
        let states: Vec<RankState<'_>> = ranks(0).into_iter().zip(&rows).map(|(rank, row)| state((rank, row.as_slice()))).collect();
        writer.save(at(step), None, &states).await.unwrap();
        machine
    }

    /// A host with empty memory.
    pub(in crate::peers) async fn join(&self, host: u32) -> JobHost {
        let machine = Host::new();
        let memory = open_mirror(&machine.folder).unwrap();
        let writer = HostWriter::open_with_mirror(&self.store, &memory, self.id, &ranks(host), WORLD, options()).await.unwrap();
        JobHost { host: machine, writer, mirror: Mirror::new(&self.store, &memory) }
    }

    /// Saves, uploads and commits a step of random rows of this size.
    pub(in crate::peers) async fn commit_noise(&mut self, step: u64, row_bytes: usize) {
        for host in 0..2 {
            let rows: Vec<Vec<u8>> = ranks(host).into_iter().map(|rank| noise(rank + 1000 * step as u32, row_bytes)).collect();
            self.save_rows(host, step, &rows).await;
        }
        self.finish(step).await;
    }

    pub(in crate::peers) async fn save_on(&mut self, host: u32, step: u64) {
        let rows: Vec<Vec<u8>> = ranks(host).into_iter().map(|rank| row(step, rank)).collect();
        self.save_rows(host, step, &rows).await;
    }

    async fn save_rows(&mut self, host: u32, step: u64, rows: &[Vec<u8>]) {
        let log = SessionLog::open(&self.store).await.unwrap();
        let JobHost { writer, mirror, .. } = &mut self.hosts[host as usize];
        mirror.follow(&log).await.unwrap();
        let parent = writer.fix_parent(at(step)).await.unwrap();
        let mut states = Vec::new();
        for (rank, row) in ranks(host).into_iter().zip(rows) {
            states.push(RankState { tensors: vec![part(rank, row)], blobs: Vec::new(), metadata: Metadata::default() });
        }
        writer.save(at(step), parent, &states).await.unwrap();
    }

    /// Saves a step on all hosts, into their mirrors.
    pub(in crate::peers) async fn save(&mut self, step: u64) {
        for host in 0..2 {
            self.save_on(host, step).await;
        }
    }

    /// Saves, uploads and commits a step; each mirror drops older ones.
    pub(in crate::peers) async fn commit(&mut self, step: u64) {
        self.save(step).await;
        self.finish(step).await;
    }

    /// Uploads and commits a step that was saved.
    pub(in crate::peers) async fn finish(&mut self, step: u64) {
        let session = self.hosts[0].writer.session();
        for JobHost { mirror, .. } in &self.hosts {
            mirror.upload(session, at(step)).await.unwrap();
        }
        let exchange = SessionExchange::new(&self.store, session);
        let present = exchange.survey(None).await.unwrap().steps.remove(&at(step)).unwrap();
        let receipts = exchange.receipts(at(step), &present).await.unwrap();
        self.leader.commit(step, &receipts).await.unwrap();
        let log = SessionLog::open(&self.store).await.unwrap();
        for JobHost { mirror, .. } in &mut self.hosts {
            mirror.follow(&log).await.unwrap();
            mirror.prune(session, at(step)).await.unwrap();
        }
    }

    /// The replica of host 0 in the memory of host 1.
    pub(in crate::peers) fn replica(&self, peer: &Peer, keep: u32) -> Replica {
        let memory = open_replica(&self.hosts[1].host.folder, 0).unwrap();
        Replica::new(&peer.store("mirror"), &memory, self.id, 0..RANKS, keep)
    }

    /// The store as host 1 alone has it: its mirror and its replica of host 0.
    pub(in crate::peers) async fn without_host_0(&self) -> Store {
        let folder = &self.hosts[1].host.folder;
        union_store(vec![listed(local(&folder.mirror())).await, listed(local(&folder.replica(0))).await], u64::MAX)
    }
}

pub(in crate::peers) async fn listed(place: Place) -> ListedPlace {
    ListedPlace { objects: place.list(None).try_collect().await.unwrap(), place }
}

fn part(rank: u32, row: &[u8]) -> TensorView<'_> {
    let columns = row.len() as u64;
    let rect = Rect { offset: vec![u64::from(rank), 0], shape: vec![1, columns] };
    TensorView::shard("model.w", Dtype::U8, &[u64::from(WORLD), columns], rect, row).unwrap()
}

fn noise(seed: u32, bytes: usize) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let mut next = || {
        (state, _) = state.overflowing_mul(6_364_136_223_846_793_005);
        (state, _) = state.overflowing_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

pub(in crate::peers) fn local(folder: &std::path::Path) -> Place {
    Arc::new(LocalFileSystem::new_with_prefix(folder).unwrap())
}

pub(in crate::peers) async fn assert_whole(store: &Store, step: u64) {
    let found = store.snapshot(step).await.unwrap().read("model.w", &Slice::all()).await.unwrap().data;
    assert!(found == (0..WORLD).flat_map(|rank| row(step, rank)).collect::<Vec<u8>>(), "step {step}");
}
