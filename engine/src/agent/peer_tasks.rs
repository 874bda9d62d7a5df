//! The tasks for other hosts: one serves this host's memory, and one per observed host copies its mirror while this host
//! is its holder.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::session::{ReceiptProof, Replica, SessionLog};
use tensorcask::{ErrorKind, Result};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::copy_report::CopyReport;
use super::retry::Backoff;
use super::run::Run;
use crate::memory::stores::{encoded_bytes, open_mirror, open_replica, replica_bytes};
use crate::os::files::remove_folder;
use crate::peers::{Peer, PeerServer, Placement, Pulled, ResponseLimits, TOLERATED_LOSSES, Tls, signed_receipts};
use crate::run::hosts_option::HostsSpec;
use crate::run::peers_option::Peers;

/// Removes the copies of hosts that this host no longer observes. Call it once the session has committed a step: until then,
/// the job may resume from them.
pub(super) fn remove_former_replicas(run: &Run) -> Result<()> {
    let observed = match (&run.spec.peers, &run.spec.hosts) {
        (Some(peers), Some(hosts)) => Placement::of(peers).observed(hosts.position(), TOLERATED_LOSSES),
        _ => Vec::new(),
    };
    let former = run.folder.replicas()?.into_iter().filter(|host| !observed.contains(host));
    former.into_iter().try_for_each(|host| remove_copy(run, host))
}

/// Removes the copy of a host, and tells so first.
fn remove_copy(run: &Run, host: u32) -> Result<()> {
    if let Some(hosts) = &run.spec.hosts {
        CopyReport::new(hosts.session, &[]).publish(&run.folder, host)?;
    }
    remove_folder(&run.folder.replica(host))
}

/// Signs and checks the receipts of a run; `None` without certificates.
pub(super) fn receipt_proof(run: &Run) -> Result<Option<Arc<dyn ReceiptProof>>> {
    let (Some(peers), Some(hosts)) = (&run.spec.peers, &run.spec.hosts) else { return Ok(None) };
    Ok(signed_receipts(Tls::of_run(peers, &run.spec.key)?, hosts))
}

/// Starts the tasks for the peers of a run; none without peers.
pub(super) fn spawn_peer_tasks(run: &Arc<Run>) -> Vec<JoinHandle<()>> {
    let (Some(peers), Some(hosts)) = (run.spec.peers.clone(), run.spec.hosts.clone()) else { return Vec::new() };
    let own = hosts.position();
    let placement = Placement::of(&peers);
    let observed = placement.observed(own, TOLERATED_LOSSES);
    let context = Arc::new(Context { run: run.clone(), peers, hosts, own, placement, observed });
    let observed = context.observed.clone();
    for host in &observed {
        run.replicas().observe(*host, &context.address(*host), Instant::now());
    }
    let serving = tokio::spawn(serve_loop(context.clone()));
    [serving].into_iter().chain(observed.into_iter().map(|host| tokio::spawn(observe_loop(context.clone(), host)))).collect()
}

struct Context {
    run: Arc<Run>,
    peers: Peers,
    hosts: HostsSpec,
    /// Number of this host.
    own: u32,
    placement: Placement,
    /// Hosts that this host observes.
    observed: Vec<u32>,
}

impl Context {
    fn address(&self, host: u32) -> String {
        self.peers.addresses.get(host as usize).cloned().unwrap_or_default()
    }

    fn tls(&self) -> Result<Option<Arc<Tls>>> {
        Tls::of_run(&self.peers, &self.run.spec.key)
    }

    /// Whether this host copies another one now. Hosts that have been silent for a while are taken for gone, and their
    /// successors copy in their place.
    fn holds(&self, host: u32) -> bool {
        // A silent host is still copied: it may come back, and it is only gone as a holder.
        let gone = self.run.replicas().gone(Instant::now());
        self.placement.holders(host, &gone).contains(&self.own)
    }

    /// Bytes that the copy of one host may grow now. Hosts that are copied at the same time share what is free.
    fn room(&self) -> Result<u64> {
        let held = self.observed.iter().filter(|host| self.holds(**host)).count() as u64;
        let free = self.run.cap.saturating_sub(encoded_bytes(&self.run.folder)?);
        Ok(free.checked_div(held).unwrap_or(free))
    }

    /// Whether the session has committed a step, as far as this host knows.
    async fn has_committed(&self) -> Result<bool> {
        match SessionLog::open(&open_mirror(&self.run.folder)?).await {
            Ok(log) => Ok(log.has_committed(self.hosts.session)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn ranks(&self, host: u32) -> Range<u32> {
        self.hosts.ranks_of(host, self.run.spec.world)
    }
}

/// Serves this host's memory until the agent ends.
async fn serve_loop(context: Arc<Context>) {
    let run = &context.run;
    let mut backoff = Backoff::new();
    loop {
        let bound = async {
            let root = run.folder.root().to_owned();
            let tls = context.tls()?;
            let hosts = context.peers.addresses.len();
            PeerServer::bind(context.peers.listen, root, &run.spec.key, tls, run.bandwidth.clone(), hosts).await
        };
        match bound.await {
            Ok(server) => {
                (run.replicas().server_problem, run.replicas().waits) = (None, Some(server.waits()));
                server.serve().await;
            }
            Err(error) => {
                tracing::warn!(run = run.spec.run, %error, "cannot serve other hosts; trying again");
                run.replicas().server_problem = Some(error.to_string());
                backoff.wait(std::future::pending()).await;
            }
        }
    }
}

/// Observes a host, and copies its mirror while this host is a holder, until the agent ends.
async fn observe_loop(context: Arc<Context>, host: u32) {
    let run = &context.run;
    let mut copied = None;
    let mut backoff = Backoff::new();
    let mut pace = Pace { changes: run.changes(), active: Instant::now() };
    loop {
        let observed = waiting_noted(run, host, observe(&context, host, &mut copied)).await;
        match observed {
            Ok(look) => {
                backoff.reset();
                pace.pause(look).await;
            }
            Err(error) => {
                // An error on this side is no silence of the other.
                if let Some(open) = &copied
                    && open.peer.answers().await.is_ok()
                {
                    run.replicas().note_alive(host, Instant::now());
                }
                run.replicas().on_silence(host, error.to_string());
                // The certificates, and the replica, are opened again.
                copied = None;
                backoff.wait(std::future::pending()).await;
            }
        }
    }
}

/// Result of a look at another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// It has something new, or something that is not copied yet.
    Changed,
    /// It has nothing new.
    Same,
    /// It answers, and another host copies it.
    Alive,
}

/// Time between looks at a host: short while hosts save, and longer in between. Looks of many agents on one machine would
/// otherwise take its processors from the saves.
struct Pace {
    /// Events of this host. It saves when the other hosts do.
    changes: watch::Receiver<u64>,
    /// Time of the last event here, or change there.
    active: Instant,
}

impl Pace {
    async fn pause(&mut self, look: Look) {
        if look == Look::Changed {
            self.active = Instant::now();
        }
        tokio::time::sleep(POLL).await;
        let rest = IDLE_POLL.saturating_sub(POLL);
        if look == Look::Alive {
            return tokio::time::sleep(rest).await;
        }
        let is_active = self.active.elapsed() < ACTIVE;
        let woken = match is_active {
            true => self.changes.has_changed().unwrap_or(false),
            false => tokio::time::timeout(rest, self.changes.changed()).await.is_ok(),
        };
        if woken {
            self.changes.mark_unchanged();
            self.active = Instant::now();
        }
    }
}

/// Does work that waits for another host. Reports if that takes long and the host is silent.
async fn waiting_noted<T>(run: &Run, host: u32, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(SIGN_OF_LIFE) => {
                if let Some(problem) = run.replicas().on_wait(host, Instant::now()) {
                    tracing::warn!(run = run.spec.run, host, problem, "waiting for another host");
                }
            }
        }
    }
}

/// A connection to a peer, and the replica of its mirror.
struct Copied {
    peer: Peer,
    replica: Replica,
    /// Time since which another host is the holder.
    released: Option<Instant>,
    /// Copies that the other host was told of last.
    told: Option<CopyReport>,
}

async fn observe(context: &Context, host: u32, copied: &mut Option<Copied>) -> Result<Look> {
    let run = &context.run;
    let Copied { peer, replica, released, told } = match copied {
        Some(open) => open,
        None => {
            let peer = Peer::open(&context.address(host), &run.spec.key, context.tls()?, ResponseLimits::default())?;
            let memory = open_replica(&run.folder, host)?;
            let session = context.hosts.session;
            let ranks = context.ranks(host);
            let mut replica = Replica::new(&peer.store("mirror"), &memory, session, ranks, context.peers.keep);
            replica.require_proof(receipt_proof(run)?);
            copied.insert(Copied { peer, replica, released: None, told: None })
        }
    };
    if !context.holds(host) {
        peer.answers().await?;
        run.replicas().on_answer(host, Instant::now());
        // The other host answers, so its holders can copy what this host has. Until the session has committed a step, the job may
        // resume from this copy.
        if released.get_or_insert_with(Instant::now).elapsed() >= RELEASED && context.has_committed().await? {
            remove_copy(run, host)?;
            // The replica remembers what it has checked.
            *copied = None;
        }
        return Ok(Look::Alive);
    }
    *released = None;
    replica.set_room(context.room()?);
    let report = {
        let pulling = replica.pull();
        tokio::pin!(pulling);
        loop {
            tokio::select! {
                report = &mut pulling => break report?,
                // A long pull is no silence.
                () = tokio::time::sleep(SIGN_OF_LIFE) => {
                    if peer.answers().await.is_ok() {
                        run.replicas().note_alive(host, Instant::now());
                    }
                }
            }
        }
    };
    let copies = CopyReport::new(context.hosts.session, &report.whole);
    if told.as_ref() != Some(&copies) {
        copies.publish(&run.folder, host)?;
        *told = Some(copies);
    }
    if report.casks > 0 {
        tracing::debug!(run = run.spec.run, host, casks = report.casks, bytes = report.bytes, "copied from another host");
    }
    let pulled = Pulled {
        last_step: report.newest.map(|at| at.step),
        source_step: report.newest_at_source.map(|at| at.step),
        pending: report.missing,
        bytes: replica_bytes(&run.folder, host)?,
        problem: report.problem.map(|error| error.to_string()),
    };
    if let Some(problem) = &pulled.problem {
        tracing::warn!(run = run.spec.run, host, problem, "a step of another host cannot be copied; trying again");
    }
    let has_problem = pulled.problem.is_some();
    let is_same = report.casks == 0 && pulled.pending == 0 && pulled.last_step == pulled.source_step && !has_problem;
    run.replicas().on_pulled(host, pulled, Instant::now());
    if has_problem {
        tokio::time::sleep(AFTER_PROBLEM).await;
    }
    Ok(if is_same { Look::Same } else { Look::Changed })
}

/// Time between checks whether a host answers while it is copied.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Time between looks at a host while hosts save.
const POLL: Duration = Duration::from_millis(250);
/// Time between looks at a host while nothing happens.
const IDLE_POLL: Duration = Duration::from_secs(1);
/// Time for which hosts are looked at often after something has happened.
const ACTIVE: Duration = Duration::from_secs(5);
/// Time after which the copy of a host is removed if another host is its holder, and both answer.
const RELEASED: Duration = Duration::from_secs(300);
const AFTER_PROBLEM: Duration = Duration::from_secs(5);
