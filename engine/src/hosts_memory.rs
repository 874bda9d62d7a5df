//! The memory of all hosts of a run as one store: mirrors and replicas, here and on peers.
//!
//! A start of the job reads there what the start before left. The newest complete step may never have been committed, for
//! example because a host was lost first. It is then committed in the memory of this process only, with the checks of any
//! commit, and read as any other step.
//!
//! Casks and receipts that a peer forges together are recognised: each host signs its receipts, see `peers::receipt_proof`.
//!
//! Invariant: memory counts only if it has the log up to the entry after which this session begins. So a step of another job
//! that wrote to the store in between is never passed over, and no step of an older session comes back.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use tensorcask::wire::{Leader, SessionName, SessionStep};
use tensorcask::{
    Error, ErrorKind, LeaderState, LeaderWriter, RankSet, ReceiptProof, Result, SessionExchange, SessionLog, Store, WriterOptions,
};

use crate::folders::RunFolder;
use crate::hosts_option::HostsSpec;
use crate::peers::{CheckedPlace, Peer, Place, Placement, ResponseLimits, SignedReceipts, TOLERATED_LOSSES, Tls, union_store};
use crate::peers_option::Peers;
use crate::run_spec::RunSpec;

/// The memory of all hosts.
pub(crate) struct HostsMemory {
    pub store: Store,
    /// Newest step, if the store has never had it.
    pub uncommitted: Option<u64>,
}

/// Opens the memory of all hosts; `None` without peers, or if memory does not continue the store. Waits for hosts that do not
/// answer, at most for `timeout`.
pub(crate) async fn open_hosts_memory(spec: &RunSpec, run: &RunFolder, tier: &Store, timeout: Duration) -> Option<HostsMemory> {
    let (Some(hosts), Some(peers)) = (&spec.hosts, &spec.peers) else { return None };
    match open(spec, hosts, peers, run, tier, timeout).await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(run = spec.run, %error, "the memory of other hosts cannot be used");
            None
        }
    }
}

async fn open(
    spec: &RunSpec,
    hosts: &HostsSpec,
    peers: &Peers,
    run: &RunFolder,
    tier: &Store,
    timeout: Duration,
) -> Result<Option<HostsMemory>> {
    // Entries of this start of the job do not count.
    let Some(last_entry) = SessionExchange::beginning(tier, hosts.session).await? else { return Ok(None) };
    let own = hosts.position();
    let tls = peers.tls.as_ref().map(|files| Tls::open(files, &spec.key).map(Arc::new)).transpose()?;
    let proof = tls.clone().map(|tls| Arc::new(SignedReceipts::new(tls, hosts.ranks)) as Arc<dyn ReceiptProof>);
    let mut others = Vec::new();
    for (host, address) in (0u32..).zip(&peers.addresses).filter(|(host, _)| *host != own) {
        others.push((host, Peer::open(address, &spec.key, tls.clone(), ResponseLimits::default())?));
    }
    let begun = tokio::time::Instant::now();
    loop {
        let mut places = local_places(run)?;
        let mut is_silent = false;
        for (host, peer) in &others {
            match peer.answers().await {
                Ok(()) => places.extend(peer_places(peer, *host, peers).map(|place| checked(place, proof.as_ref()))),
                Err(_) => is_silent = true,
            }
        }
        let store = union_store(places, last_entry);
        let is_current = match SessionLog::open(&store).await {
            Ok(log) => log.sequence() == last_entry,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        // Agents follow the log soon after they start.
        if (is_current && !is_silent) || begun.elapsed() >= timeout {
            return match is_current {
                true => Ok(Some(HostsMemory { uncommitted: commit_newest(&store).await?, store })),
                false => Ok(None),
            };
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn local_places(run: &RunFolder) -> Result<Vec<Place>> {
    let replicas = run.replicas()?.into_iter().map(|host| run.replica(host));
    let folders = std::iter::once(run.mirror()).chain(replicas).filter(|folder| folder.is_dir());
    let open = |folder: &Path| -> Result<Place> {
        let found = LocalFileSystem::new_with_prefix(folder);
        Ok(Arc::new(found.map_err(|e| Error::io(folder.display().to_string(), e.into()))?))
    };
    folders.map(|folder| open(&folder)).collect()
}

/// The mirror of a peer, and its replicas.
fn peer_places(peer: &Peer, host: u32, peers: &Peers) -> impl Iterator<Item = Place> {
    let placement = Placement { hosts: peers.addresses.len() as u32, replicas: peers.replicas, jump: peers.jump };
    let replicas = placement.observed(host, TOLERATED_LOSSES).into_iter().map(|source| peer.place(&format!("replica-{source}")));
    std::iter::once(peer.place("mirror")).chain(replicas)
}

/// A place of a peer, whose receipts must be signed by the hosts that saved them.
fn checked(place: Place, proof: Option<&Arc<dyn ReceiptProof>>) -> Place {
    match proof {
        Some(proof) => Arc::new(CheckedPlace::new(place, proof.clone())),
        None => place,
    }
}

/// Commits the newest complete step that the store has never had, in this process only; returns the step.
async fn commit_newest(store: &Store) -> Result<Option<u64>> {
    let log = SessionLog::open(store).await?;
    let Some(LeaderState { leader, newest, .. }) = log.leadership().leading().cloned() else { return Ok(None) };
    let session = SessionName { run: store.history().run().await?, session: leader.session };
    let exchange = SessionExchange::new(store, session);
    let after = newest.map(|step| SessionStep { attempt: leader.attempt, step });
    let found = exchange.survey(after).await?.steps;
    for (at, ranks) in found.into_iter().rev().filter(|(at, _)| at.attempt >= leader.attempt) {
        // The store has another state of this step, which a rank without this memory would restore.
        if log.records().iter().any(|record| record.step == at.step) {
            continue;
        }
        match commit(store, &exchange, leader, at, &ranks).await {
            Ok(true) => return Ok(Some(at.step)),
            Ok(false) => {}
            Err(error) => tracing::warn!(step = at.step, %error, "a step in the memory of the hosts cannot be used"),
        }
    }
    Ok(None)
}

/// Commits a step; returns `false` if not all ranks have saved it.
async fn commit(store: &Store, exchange: &SessionExchange, leader: Leader, at: SessionStep, ranks: &RankSet) -> Result<bool> {
    let receipts = exchange.receipts(at, ranks).await?;
    if receipts.first().is_none_or(|first| !ranks.has_all(0..first.world)) {
        return Ok(false);
    }
    let leader = Leader { attempt: at.attempt, term: leader.term.saturating_add(1), above: None, ..leader };
    // Nothing is collected here, so casks may have any age.
    let options = WriterOptions { age_floor: Duration::from_secs(u64::from(u32::MAX)), ..WriterOptions::default() };
    LeaderWriter::open(store, leader, options).await?.commit(at.step, &receipts).await?;
    Ok(true)
}

/// Time between looks at hosts that do not answer.
const RETRY: Duration = Duration::from_millis(200);
