//! Hosts for tests: a run's folder with a store in memory, a server, and clients.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tensorcask::{Bandwidth, Dtype, Latest, Metadata, Policy, Store, TensorView, Writer};
use tokio::task::JoinHandle;

use crate::memory::stores::open_epoch;
use crate::os::folders::{EngineFolder, RunFolder};
use crate::peers::http_client::ResponseLimits;
use crate::peers::peer_objects::Peer;
use crate::peers::serve::PeerServer;
use crate::peers::tls::Tls;
use crate::run::peers_option::PeerTls;
use crate::run::spec::run_key;

pub(in crate::peers) const RUN: &str = "run";

pub(in crate::peers) fn key() -> String {
    run_key(RUN)
}

/// A host with a folder of the run.
pub(in crate::peers) struct Host {
    pub scratch: tempfile::TempDir,
    pub folder: RunFolder,
}

impl Host {
    pub(in crate::peers) fn new() -> Self {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = EngineFolder::open(Some(&scratch.path().join("e"))).unwrap().run(&key());
        folder.create().unwrap();
        Self { scratch, folder }
    }

    pub(in crate::peers) fn tls_folder(&self) -> PathBuf {
        self.scratch.path().join("tls")
    }

    pub(in crate::peers) fn memory(&self, epoch: u64) -> Store {
        open_epoch(&self.folder, epoch).unwrap()
    }

    pub(in crate::peers) async fn serve(&self, tls: Option<Arc<Tls>>) -> Server {
        self.serve_at("127.0.0.1:0".parse().unwrap(), tls).await
    }

    pub(in crate::peers) async fn serve_at(&self, listen: SocketAddr, tls: Option<Arc<Tls>>) -> Server {
        self.serve_hosts(listen, tls, 0).await
    }

    /// Serves a run on this many hosts.
    pub(in crate::peers) async fn serve_hosts(&self, listen: SocketAddr, tls: Option<Arc<Tls>>, hosts: usize) -> Server {
        let server = PeerServer::bind(listen, self.folder.root().to_owned(), &key(), tls, Bandwidth::default(), hosts).await.unwrap();
        let address = server.address().unwrap();
        Server { address, task: tokio::spawn(server.serve()) }
    }
}

/// A server that ends when it is dropped.
pub(in crate::peers) struct Server {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub(in crate::peers) fn peer(&self, tls: Option<Arc<Tls>>) -> Peer {
        peer(self.address, tls)
    }

    /// Ends the server and waits until its port is free.
    pub(in crate::peers) async fn stop(self) {
        let Self { task, .. } = self;
        task.abort();
        let _ = task.await;
    }
}

pub(in crate::peers) fn peer(address: SocketAddr, tls: Option<Arc<Tls>>) -> Peer {
    Peer::open(&address.to_string(), &key(), tls, ResponseLimits::default()).unwrap()
}

/// Limits of a client that gives up early.
pub(in crate::peers) fn impatient() -> ResponseLimits {
    ResponseLimits { answer: Duration::from_millis(500), least_bytes_per_second: 1 << 40, ..ResponseLimits::default() }
}

pub(in crate::peers) fn tls(files: &PeerTls) -> Arc<Tls> {
    Arc::new(Tls::open(files, &key()).unwrap())
}

/// State of a step: a tensor that changes in part.
pub(in crate::peers) fn state(step: u64) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..300_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    bytes.iter_mut().step_by(97).for_each(|byte| *byte = byte.wrapping_add(step as u8));
    bytes
}

pub(in crate::peers) async fn writer(store: &Store) -> Writer {
    store.writer(Policy::Consecutive).await.unwrap()
}

pub(in crate::peers) async fn save(writer: &mut Writer, step: u64) {
    let bytes = state(step);
    let tensor = TensorView::new("model.w", Dtype::U8, &[bytes.len() as u64], &bytes).unwrap();
    writer.save(step, &[tensor], &[], &Metadata::default()).await.unwrap();
}

/// Saves steps into the store of an epoch.
pub(in crate::peers) async fn save_steps(host: &Host, epoch: u64, steps: std::ops::RangeInclusive<u64>) {
    let mut writer = writer(&host.memory(epoch)).await;
    for step in steps {
        save(&mut writer, step).await;
    }
}

/// Checks that the newest snapshot of a store is the state of a step.
pub(in crate::peers) async fn assert_newest(store: &Store, step: u64) {
    let snapshot = store.snapshot(Latest).await.unwrap();
    assert_eq!(snapshot.step(), step);
    let read = snapshot.read("model.w", &tensorcask::Slice::all()).await.unwrap();
    assert!(read.data == state(step), "step {step} differs");
}

/// Relative paths of all files below a folder.
pub(in crate::peers) fn files_below(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()),
            }
        }
    }
    found.sort();
    found
}
