//! Watches the copies that other hosts have of this host's steps. A holder lists a step only after it has checked every byte
//! of the step's casks, so the listing of its receipts tells that a copy is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::wire::SessionName;
use tensorcask::{Result, SessionExchange, Store};

use super::host_work::HostWork;
use crate::hosts::StepKey;
use crate::peers::{Peer, Placement, ResponseLimits, Tls};
use crate::peers_option::Peers;

/// Reports the steps that other hosts have copied, until the agent ends. `memory`: the mirror.
pub(super) async fn copy_watch_loop(work: Arc<HostWork>, memory: Store, peers: Peers) {
    let (run, own) = (&work.run, work.hosts.position());
    let placement = Placement { hosts: peers.addresses.len() as u32, replicas: peers.replicas, jump: peers.jump };
    let mut found_earlier = false;
    loop {
        tokio::time::sleep(POLL).await;
        if !found_earlier && work.has_arenas() {
            work.await_copies_of_earlier();
            found_earlier = true;
        }
        if !work.awaits_copies() {
            continue;
        }
        let mut gone = run.replicas().silent_for(GONE, Instant::now());
        gone.remove(&own);
        let mut copies: BTreeMap<StepKey, usize> = BTreeMap::new();
        for holder in placement.holders(own, &gone) {
            match steps_of(&work, &memory, &peers, holder).await {
                Ok(steps) => steps.into_iter().for_each(|key| *copies.entry(key).or_default() += 1),
                Err(error) => tracing::debug!(run = run.spec.run, holder, %error, "this holder does not tell its copies"),
            }
        }
        work.report_copies(&copies, peers.replicas as usize);
    }
}

/// Complete steps of this host that a holder has.
async fn steps_of(work: &HostWork, memory: &Store, peers: &Peers, holder: u32) -> Result<BTreeSet<StepKey>> {
    let (spec, own) = (&work.run.spec, work.hosts.position());
    let tls = peers.tls.as_ref().map(|files| Tls::open(files, &spec.key).map(Arc::new)).transpose()?;
    let address = peers.addresses.get(holder as usize).cloned().unwrap_or_default();
    let peer = Peer::open(&address, &spec.key, tls, ResponseLimits::default())?;
    let session = SessionName { run: memory.history().run().await?, session: work.hosts.session };
    let found = SessionExchange::new(&peer.store(&format!("replica-{own}")), session).survey(None).await?;
    let complete = found.steps.into_iter().filter(|(_, ranks)| ranks.has_all(spec.local_ranks()));
    Ok(complete.map(|(at, _)| StepKey { attempt: at.attempt, step: at.step }).collect())
}

/// Time between questions to the holders, while a step waits for copies.
const POLL: Duration = Duration::from_millis(250);
/// Silence after which a host is replaced as a holder.
const GONE: Duration = Duration::from_secs(30);
