//! Watches the copies that other hosts have of this host's steps, as their agents tell.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::wire::SessionStep;

use super::copies::Copies;
use super::host_work::HostWork;
use crate::other_hosts::OtherHosts;
use crate::peers::Placement;
use crate::peers_option::Peers;

/// Reports the steps that other hosts have copied, until the agent ends.
pub(super) async fn copy_watch_loop(work: Arc<HostWork>, peers: Peers) {
    let (run, own) = (&work.run, work.hosts.position());
    let placement = Placement::of(&peers);
    let (mut others, mut found_earlier) = (None, false);
    loop {
        tokio::time::sleep(POLL).await;
        if !found_earlier && work.has_arenas() {
            work.await_copies_of_earlier();
            found_earlier = true;
        }
        if !work.awaits_copies() {
            continue;
        }
        // Certificates may have been renewed since a failure.
        let open = match others.take() {
            Some(open) => Some(open),
            None => OtherHosts::open(&run.spec).unwrap_or_default(),
        };
        let Some(open) = open else { continue };
        let gone = run.replicas().gone(Instant::now());
        let (mut copies, mut has_failed): (BTreeMap<SessionStep, usize>, bool) = (BTreeMap::new(), false);
        let wanted = placement.holders(own, &gone).into_iter().map(|holder| (holder, Copies::name_for(own))).collect();
        for told in open.read_messages(wanted).await {
            match told.and_then(|json| json.map(|json| Copies::decode(&json)).transpose()) {
                Ok(told) => {
                    told.into_iter().flat_map(|told| told.of(work.hosts.session)).for_each(|key| *copies.entry(key).or_default() += 1);
                }
                Err(error) => {
                    tracing::debug!(run = run.spec.run, %error, "a holder does not tell its copies");
                    has_failed = true;
                }
            }
        }
        others = Some(open).filter(|_| !has_failed);
        work.report_copies(&copies, peers.replicas as usize);
    }
}

/// Time between questions to the holders, while a step waits for copies.
const POLL: Duration = Duration::from_millis(250);
