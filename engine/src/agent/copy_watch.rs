//! Watches the copies that other hosts have of this host's steps, as their agents tell, and refills this host's memory from
//! copies of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tensorcask::session::{Mirror, Refill};
use tensorcask::wire::{SessionName, SessionStep};
use tensorcask::{Result, Store};

use super::copy_report::CopyReport;
use super::first_host::FirstHost;
use super::host_work::{HostWork, has_arenas};
use crate::peers::other_hosts::OtherHosts;
use crate::peers::{Peer, Placement, ResponseLimits, TOLERATED_LOSSES, Tls};
use crate::run::peers_option::Peers;

/// Reports the steps that other hosts have copied, until the agent ends.
pub(super) async fn copy_watch_loop(work: Arc<HostWork>, peers: Peers, memory: Store) {
    let run = &work.run;
    let own = work.hosts.position();
    let mut holders = Holders::new(&peers, own);
    let mut unfit = BTreeSet::new();
    let mut first = None;
    let mut found_earlier = false;
    let mut waiting_since = None;
    let mut refill = Refill::new(&memory, run.spec.local_ranks());
    let mut was_whole = false;
    let mut lateness = Lateness::default();
    loop {
        tokio::time::sleep(POLL).await;
        // A step that does not fit to that of host 0 waits for its commit alone.
        let waiting = work.awaited_copies().into_iter().filter(|key| !unfit.contains(key)).min();
        if let Some(problem) = lateness.look(waiting, &holders.problems, Instant::now()) {
            if let Some(problem) = &problem {
                tracing::warn!(run = run.spec.run, problem, "steps are not replicated yet");
            }
            run.replicas().copies_problem = problem;
        }
        if !found_earlier && has_arenas(run) {
            work.await_copies_of_earlier();
            found_earlier = true;
        }
        if was_whole && work.awaited_copies().is_empty() {
            continue;
        }
        match refill_mirror(&work, &peers, &mut refill).await {
            Ok(true) => was_whole = refill.has_log(),
            // While the only copy of a part is on another host, a loss of that host would lose it.
            Ok(false) => {
                tokio::time::sleep(WHILE_MISSING).await;
                continue;
            }
            Err(error) => {
                tracing::warn!(run = run.spec.run, %error, "the parts of earlier snapshots cannot be copied into memory; trying again");
                tokio::time::sleep(AFTER_PROBLEM).await;
                continue;
            }
        }
        let awaited = work.awaited_copies();
        if awaited.is_empty() {
            continue;
        }
        // The store may have gone away before this host had read the last commits. Without them, nobody can copy its deltas.
        if work.contact.is_silent(SILENCE) && waiting_since.get_or_insert_with(Instant::now).elapsed() >= SILENCE {
            learn_from_others(&work, &peers, &memory).await;
            waiting_since = None;
        }
        let copies = holders.count_copies(&work).await;
        let mut copied = Vec::new();
        let mut unknown = 0;
        for key in awaited.iter().copied() {
            if unfit.contains(&key) || copies.get(&key).is_none_or(|found| *found < peers.replicas as usize) {
                continue;
            }
            match fits_to_first_host(&work, &mut first, &memory, key).await {
                Ok(Some(true)) => copied.push(key),
                Ok(Some(false)) => _ = unfit.insert(key),
                // Host 0 may come to this step later, or have no part of it.
                Ok(None) => {
                    unknown += 1;
                    if unknown >= MOST_UNKNOWN {
                        break;
                    }
                }
                Err(error) => {
                    tracing::debug!(run = run.spec.run, step = key.step, %error, "cannot read the parent that host 0 chose");
                    first = None;
                    break;
                }
            }
        }
        unfit.retain(|key| awaited.contains(key));
        if !copied.is_empty() {
            waiting_since = None;
        }
        work.report_copies(&copied);
    }
}

/// The hosts that may have copies of this host's steps.
struct Holders {
    others: Option<OtherHosts>,
    /// All that would be holders if some hosts were gone: this host does not observe its holders, so it does not know which are.
    hosts: Vec<u32>,
    /// Hosts that did not answer, and when.
    silent: BTreeMap<u32, Instant>,
    /// Errors of the hosts that did not answer last.
    problems: BTreeMap<u32, String>,
}

impl Holders {
    fn new(peers: &Peers, own: u32) -> Self {
        Self {
            others: None,
            hosts: Placement::of(peers).possible_holders(own, TOLERATED_LOSSES),
            silent: BTreeMap::new(),
            problems: BTreeMap::new(),
        }
    }

    /// Number of hosts that have a copy of each step of the session.
    async fn count_copies(&mut self, work: &HostWork) -> BTreeMap<SessionStep, usize> {
        let run = &work.run;
        let own = work.hosts.position();
        let mut copies = BTreeMap::new();
        // Certificates may have been renewed since a failure.
        let opened = match self.others.take() {
            Some(open) => Some(open),
            None => OtherHosts::open(&run.spec).unwrap_or_default(),
        };
        let Some(others) = opened else { return copies };
        self.silent.retain(|_, since| since.elapsed() < AFTER_PROBLEM);
        let asked: Vec<u32> = self.hosts.iter().filter(|host| !self.silent.contains_key(host)).copied().collect();
        let told = others.read_messages(asked.iter().map(|host| (*host, CopyReport::name_for(own))).collect()).await;
        let mut has_failed = false;
        for (host, told) in asked.into_iter().zip(told) {
            match told.and_then(|json| json.map(|json| CopyReport::decode(&json)).transpose()) {
                Ok(told) => {
                    self.problems.remove(&host);
                    let steps: BTreeSet<SessionStep> = told.into_iter().flat_map(|told| told.of(work.hosts.session)).collect();
                    steps.into_iter().for_each(|key| *copies.entry(key).or_default() += 1);
                }
                Err(error) => {
                    tracing::debug!(run = run.spec.run, host, %error, "a holder does not tell its copies");
                    self.silent.insert(host, Instant::now());
                    self.problems.insert(host, error.to_string());
                    has_failed = true;
                }
            }
        }
        self.others = Some(others).filter(|_| !has_failed);
        copies
    }
}

/// How long the oldest step has waited for its copies.
#[derive(Debug, Default)]
struct Lateness {
    oldest: Option<(SessionStep, Instant)>,
    is_reported: bool,
}

impl Lateness {
    /// Looks at the oldest step that waits. Returns a problem that is new, or `None` inside once it is over. `problems`: errors of the hosts that should copy.
    fn look(&mut self, oldest: Option<SessionStep>, problems: &BTreeMap<u32, String>, now: Instant) -> Option<Option<String>> {
        if oldest != self.oldest.map(|(key, _)| key) {
            self.oldest = oldest.map(|key| (key, now));
        }
        let late = self.oldest.map(|(key, since)| (key, now.saturating_duration_since(since))).filter(|(_, waited)| *waited >= LATE);
        if late.is_some() == std::mem::replace(&mut self.is_reported, late.is_some()) {
            return None;
        }
        Some(late.map(|(key, waited)| {
            let since = httpdate::fmt_http_date(SystemTime::now().checked_sub(waited).unwrap_or(SystemTime::UNIX_EPOCH));
            let named: Vec<String> = problems.iter().map(|(host, error)| format!("host {host}: {error}")).collect();
            let why = if named.is_empty() { "they answer, and have not copied it".to_owned() } else { named.join("; ") };
            format!("step {} waits for copies on other hosts since {since} ({why})", key.step)
        }))
    }
}

/// Whether this host's part of a step and that of host 0 can become one snapshot. Hosts may have used different parents if the
/// store went away or came back during the step. Such a step cannot be committed, so its copies do not count.
///
/// `None` while host 0 has no part of the step.
async fn fits_to_first_host(work: &HostWork, first: &mut Option<FirstHost>, memory: &Store, key: SessionStep) -> Result<Option<bool>> {
    if first.is_none() {
        *first = FirstHost::open(work)?;
    }
    let (Some(first), Some(store)) = (first, work.run.tiers.first()) else { return Ok(Some(true)) };
    let session = SessionName { run: memory.history().run().await?, session: work.hosts.session };
    // Host 0 forgets the parents of decided steps.
    let fits = first.agrees(&Mirror::new(store, memory), session, key).await?;
    Ok(fits.or_else(|| work.is_decided(key).then_some(true)))
}

/// Copies log entries that this host's mirror lacks from other hosts.
async fn learn_from_others(work: &HostWork, peers: &Peers, memory: &Store) {
    let spec = &work.run.spec;
    let own = work.hosts.position();
    let placement = Placement::of(peers);
    let holders = placement.possible_holders(own, TOLERATED_LOSSES);
    let observed = placement.observed(own, TOLERATED_LOSSES);
    let asked: BTreeSet<u32> = holders.into_iter().chain(observed).chain([0]).filter(|host| *host != own).collect();
    for host in asked {
        let Some(address) = peers.addresses.get(host as usize) else { continue };
        let learned = async {
            let peer = Peer::open(address, &spec.key, Tls::of_run(peers, &spec.key)?, ResponseLimits::default())?;
            Mirror::learn(&peer.store("mirror"), memory).await
        };
        let Ok(learned) = tokio::time::timeout(LEARN_TIMEOUT, learned).await else { continue };
        match learned {
            Ok(false) => {}
            Ok(true) => tracing::info!(run = spec.run, host, "read the last commits from another host, because the store does not answer"),
            Err(error) => tracing::debug!(run = spec.run, host, %error, "the log cannot be copied from another host"),
        }
    }
}

/// Copies what this host's mirror lacks of its own part, from other hosts or from the store; returns whether it is whole.
async fn refill_mirror(work: &HostWork, peers: &Peers, refill: &mut Refill) -> Result<bool> {
    let missing = refill.missing().await?;
    if missing.is_empty() {
        return Ok(true);
    }
    let spec = &work.run.spec;
    let own = work.hosts.position();
    let tls = Tls::of_run(peers, &spec.key)?;
    let mut sources = Vec::new();
    for holder in Placement::of(peers).possible_holders(own, TOLERATED_LOSSES) {
        let Some(address) = peers.addresses.get(holder as usize) else { continue };
        sources.push(Peer::open(address, &spec.key, tls.clone(), ResponseLimits::default())?.store(&format!("replica-{own}")));
    }
    sources.extend(work.run.tiers.first().filter(|_| !work.is_without_store()).cloned());
    let mut still_missing = missing.len();
    for wanted in &missing {
        for source in &sources {
            match refill.copy(wanted, source).await {
                Ok(false) => {}
                Ok(true) => {
                    still_missing = still_missing.saturating_sub(1);
                    break;
                }
                Err(error) => {
                    tracing::debug!(run = spec.run, source = source.url(), %error, "a part of this host cannot be copied from there")
                }
            }
        }
    }
    tracing::info!(run = spec.run, copied = missing.len().saturating_sub(still_missing), still_missing, "refilled the memory of this host");
    Ok(still_missing == 0)
}

/// Time without an answer after which the store counts as silent, and between questions to other hosts meanwhile.
const SILENCE: Duration = Duration::from_secs(3);
/// Number of steps of which host 0 has no part that are looked at in one turn.
const MOST_UNKNOWN: usize = 16;
/// Time for one of these hosts to answer.
const LEARN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which a step that waits for its copies is reported.
const LATE: Duration = Duration::from_secs(10);
/// Time between attempts while other places lack a part, too.
const WHILE_MISSING: Duration = Duration::from_secs(1);
/// Time between attempts after a failure.
const AFTER_PROBLEM: Duration = Duration::from_secs(5);
/// Time between questions to the holders, while a step waits for copies.
const POLL: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    use tensorcask::wire::SessionStep;

    use super::Lateness;

    #[test]
    fn a_step_that_waits_for_its_copies_is_reported_once_and_until_it_has_them() {
        let mut lateness = Lateness::default();
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let step = |step: u64| Some(SessionStep { attempt: 0, step });
        let silent = BTreeMap::from([(3, "no connection within 5s".to_owned())]);
        assert_eq!(lateness.look(step(1), &silent, at(0)), None);
        // A step that is copied in time is no problem, however many follow.
        assert_eq!(lateness.look(step(2), &silent, at(9)), None);
        assert_eq!(lateness.look(step(2), &silent, at(18)), None);
        let problem = lateness.look(step(2), &silent, at(19)).unwrap().unwrap();
        assert!(["step 2 ", " since ", "host 3: no connection"].iter().all(|part| problem.contains(part)), "{problem}");
        assert_eq!(lateness.look(step(2), &silent, at(20)), None);
        assert_eq!(lateness.look(None, &silent, at(21)), Some(None));
    }
}
