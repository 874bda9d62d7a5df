//! The memory of all hosts of a run as one store: mirrors and replicas, here and on peers.
//!
//! A start of the job reads there what the starts before left. The newest complete steps may never have been committed, for
//! example because a host was lost first, or because the store did not answer. They are then committed in the memory of
//! this process only, with the checks of any commit, and read as any other step.
//!
//! Casks and receipts that a peer forges together are recognised: each host signs its receipts, see `peers::receipt_proof`.
//!
//! Invariant: memory counts only if it has the log up to the entry after which this session begins. So a step of another job
//! that wrote to the store in between is never passed over, and no step of an older session comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tensorcask::session::{ContinuedSession, LeaderWriter, RankSet, SessionExchange, SessionLog, held_steps};
use tensorcask::wire::{Id, Leader, Receipt, SessionName, SessionStep};
use tensorcask::{ErrorKind, Result, Store, WriterOptions};

use super::damaged_copies::{CopyId, damaged_copies, note_damaged_copy};
use super::earlier_sessions::{Beginning, beginnings};
use super::hosts_survey::{HostsSurvey, SurveyWait};
use crate::os::folders::RunFolder;
use crate::peers::other_hosts::OtherHosts;
use crate::peers::{ListedPlace, union_store};
use crate::run::host_notes::HostNotes;
use crate::run::spec::RunSpec;

/// The memory of all hosts.
pub(crate) struct HostsMemory {
    pub store: Store,
    /// Log entry of the first tier after which the session begins.
    pub after: u64,
    /// Steps that can be restored and were not committed up to this entry, newest first.
    pub uncommitted: Vec<u64>,
    /// Committed steps that can be restored, newest first.
    pub committed: Vec<u64>,
    /// Damaged copies that were left out.
    pub damaged: BTreeSet<CopyId>,
}

/// Opens the memory of all hosts; `None` without peers, or if memory does not continue the store. Waits for hosts that do not
/// answer, at most for `timeout`.
pub(crate) async fn open_hosts_memory(spec: &RunSpec, run: &RunFolder, timeout: Duration) -> Option<HostsMemory> {
    let begun = Instant::now();
    loop {
        let left = timeout.saturating_sub(begun.elapsed());
        let damaged = damaged_copies(run);
        match open(spec, run, left, &damaged).await {
            Ok(found) => return found,
            // A connection may have broken off. Without this memory, the ranks would agree on an older step.
            Err(error) if error.kind() == ErrorKind::Storage && left > AGAIN => {
                tracing::debug!(run = spec.run, %error, "the memory of other hosts cannot be read; trying again");
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => {
                // Another place may have an undamaged copy. Each turn leaves out one more.
                let is_damaged = error.kind() == ErrorKind::Corrupt && !left.is_zero();
                if let Some(path) = error.object_name().filter(|_| is_damaged)
                    && note_damage(spec, run, path, &damaged).await.unwrap_or(false)
                {
                    continue;
                }
                tracing::warn!(run = spec.run, %error, "the memory of other hosts cannot be used");
                return None;
            }
        }
    }
}

async fn open(spec: &RunSpec, run: &RunFolder, timeout: Duration, damaged: &BTreeSet<CopyId>) -> Result<Option<HostsMemory>> {
    let (Some(hosts), Some(others)) = (&spec.hosts, OtherHosts::open(spec)?) else { return Ok(None) };
    let notes = HostNotes::read(run, hosts.session);
    // Before the first entry, there is nothing to continue.
    let Some(after) = notes.after.filter(|after| *after > 0) else { return Ok(None) };
    let wait = SurveyWait { timeout, entry: Some(after) };
    let survey = HostsSurvey::locked(run, hosts.session, &others, wait).await?.without(damaged);
    let places = survey.stores(run, &others)?;
    match SessionLog::open(&union_store(places.clone(), after)).await {
        Ok(log) if log.sequence() == after => {}
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let view = match notes.known {
        Some(known) => HostsView::known(&places, after, known.continued).await?,
        None => HostsView::find(&places, after, &beginnings(run, &others, &survey, hosts.session).await).await?,
    };
    let log = SessionLog::open(&view.store).await?;
    let is_committed = |step: &u64| !log.records().iter().any(|record| record.step == *step && record.sequence > view.last);
    let (committed, uncommitted) = held_steps(&view.store, MOST_STEPS).await?.into_iter().partition(is_committed);
    Ok(Some(HostsMemory { store: view.store, after, uncommitted, committed, damaged: damaged.clone() }))
}

/// The memory of all hosts up to a log entry, with the steps that the store lacks committed in this process.
///
/// A session that leads the log may have no step, because the job failed before all ranks had saved. The steps of the session
/// before are then the newest, and the view ends where that session still led.
#[derive(Debug)]
pub(crate) struct HostsView {
    pub store: Store,
    /// Last entry that the store of the run has, too. Later entries are of this process.
    pub last: u64,
    /// The sessions that have these steps, oldest first.
    pub continued: Vec<ContinuedSession>,
}

impl HostsView {
    /// Looks for the sessions: the one that leads the log, and the newest complete ones of those that began after the same entry
    /// while the store did not answer.
    pub(crate) async fn find(places: &[ListedPlace], mut last: u64, earlier: &[Beginning]) -> Result<Self> {
        let patience = Patience::new();
        loop {
            let store = union_store(places.to_vec(), last);
            let log = SessionLog::open(&store).await?;
            let continued = continued_sessions(&store, &log, earlier, &patience).await?;
            commit_continued(&store, log.sequence(), &continued, &patience).await?;
            let before = before_leader(&log);
            let committed = SessionLog::open(&store).await?;
            match before.filter(|before| committed.records().iter().all(|record| record.sequence <= *before)) {
                Some(before) => last = before,
                None => return Ok(Self { store, last, continued }),
            }
        }
    }

    /// The view with these sessions.
    pub(crate) async fn known(places: &[ListedPlace], mut last: u64, continued: Vec<ContinuedSession>) -> Result<Self> {
        let patience = Patience::new();
        loop {
            let store = union_store(places.to_vec(), last);
            let log = SessionLog::open(&store).await?;
            let leads = |session: &ContinuedSession| log.leadership().of(session.session).is_some();
            match before_leader(&log).filter(|_| !continued.is_empty() && !continued.iter().any(leads)) {
                Some(before) => last = before,
                None => {
                    commit_continued(&store, log.sequence(), &continued, &patience).await?;
                    return Ok(Self { store, last, continued });
                }
            }
        }
    }

    /// Whether no step can be restored from it.
    pub(crate) async fn is_empty(&self) -> Result<bool> {
        Ok(held_steps(&self.store, 1).await?.is_empty())
    }
}

/// The log entry before the session that leads the log; `None` if there is none.
fn before_leader(log: &SessionLog) -> Option<u64> {
    let first = log.leadership().leading()?.attempts.first()?;
    first.since.checked_sub(1).filter(|before| *before > 0)
}

/// Notes that the copy of an object which was read is damaged. `left_out`: the damaged copies that the reader knew. Returns whether
/// there was such a copy: the memory has to be opened again, and then has another one, or none.
pub(crate) async fn note_damage(spec: &RunSpec, run: &RunFolder, path: &str, left_out: &BTreeSet<CopyId>) -> Result<bool> {
    let (Some(hosts), Some(others)) = (&spec.hosts, OtherHosts::open(spec)?) else { return Ok(false) };
    // Made before, by this rank or another of this host.
    let wait = SurveyWait { timeout: Duration::ZERO, entry: None };
    // The copy that this reader has read. Other ranks may have noted it since, and must not make this one note the next copy.
    let survey = HostsSurvey::locked(run, hosts.session, &others, wait).await?.without(left_out);
    match survey.first_copy(path) {
        Some(copy) => note_damaged_copy(run, copy).map(|()| true),
        None => Ok(false),
    }
}

/// The session that leads the log, and those that began after its last entry while the store did not answer.
async fn continued_sessions(store: &Store, log: &SessionLog, earlier: &[Beginning], patience: &Patience) -> Result<Vec<ContinuedSession>> {
    let run = store.history().run().await?;
    let mut continued = Vec::new();
    if let Some(leading) = log.leadership().leading() {
        let session = leading.leader.session;
        let attempt = leading.leader.attempt;
        let complete = newest_complete(store, SessionName { run, session }, patience).await?;
        // A later attempt has not been committed yet.
        continued.push(match complete.filter(|at| at.attempt >= attempt) {
            Some(at) if at.attempt > attempt => ContinuedSession { session, attempt: at.attempt, newest: Some(at.step) },
            complete => ContinuedSession { session, attempt, newest: leading.newest.max(complete.map(|at| at.step)) },
        });
    }
    let mut unopened: Vec<&Beginning> =
        earlier.iter().filter(|beginning| beginning.known.run == run && beginning.known.sequence == log.sequence()).collect();
    unopened.sort_by_key(|beginning| beginning.number);
    for Beginning { session, .. } in unopened {
        let complete = newest_complete(store, SessionName { run, session: *session }, patience).await?;
        continued.extend(complete.map(|at| ContinuedSession { session: *session, attempt: at.attempt, newest: Some(at.step) }));
    }
    Ok(continued)
}

/// Newest step of a session of which the store has receipts of all ranks.
async fn newest_complete(store: &Store, session: SessionName, patience: &Patience) -> Result<Option<SessionStep>> {
    let exchange = SessionExchange::new(store, session);
    for (at, ranks) in exchange.survey(None).await?.steps.iter().rev() {
        match patience.ask(async || complete_receipts(&exchange, *at, ranks).await).await {
            Ok(Some(_)) => return Ok(Some(*at)),
            Ok(None) => {}
            Err(error) => tracing::warn!(step = at.step, %error, "the receipts of a step cannot be read"),
        }
    }
    Ok(None)
}

/// Asks again, a few times in all, if a host does not answer: without its part, the ranks would agree on an older step.
struct Patience {
    left: AtomicU32,
}

impl Patience {
    fn new() -> Self {
        Self { left: AtomicU32::new(RETRIES) }
    }

    async fn ask<T>(&self, request: impl AsyncFn() -> Result<T>) -> Result<T> {
        loop {
            let answer = request().await;
            let is_silent = answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Storage);
            if !is_silent || self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
                return answer;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// The receipts of a step, if those of all ranks are there. A forged receipt is as good as none. Fails with `Storage` if a host does
/// not answer.
async fn complete_receipts(exchange: &SessionExchange, at: SessionStep, ranks: &RankSet) -> Result<Option<Vec<Receipt>>> {
    match exchange.receipts(at, ranks).await {
        Ok(receipts) => Ok(receipts.first().is_some_and(|first| ranks.has_all(0..first.world)).then_some(receipts)),
        Err(error) if error.kind() == ErrorKind::Storage => Err(error),
        Err(error) => {
            tracing::warn!(step = at.step, %error, "the receipts of a step cannot be read");
            Ok(None)
        }
    }
}

/// Commits the complete steps that the store has never had, in this process only: those of the session that leads the log, and
/// of the newest session after it. The log admits only one of the sessions that began after the same entry.
async fn commit_continued(store: &Store, after: u64, continued: &[ContinuedSession], patience: &Patience) -> Result<()> {
    let run = store.history().run().await?;
    let log = SessionLog::open(store).await?;
    let (opened, unopened): (Vec<&ContinuedSession>, Vec<_>) =
        continued.iter().partition(|session| log.leadership().of(session.session).is_some());
    for of in opened.into_iter().chain(unopened.into_iter().next_back()) {
        let exchange = SessionExchange::new(store, SessionName { run, session: of.session });
        let found = exchange.survey(None).await?.steps;
        let is_wanted = |at: &SessionStep| at.attempt == of.attempt && Some(at.step) <= of.newest;
        let wanted: BTreeMap<&SessionStep, &RankSet> = found.iter().filter(|(at, _)| is_wanted(at)).rev().take(MOST_STEPS).collect();
        for (at, ranks) in wanted {
            if let Err(error) = patience.ask(async || commit(store, &exchange, after, of.session, *at, ranks).await).await {
                tracing::warn!(step = at.step, %error, "a step in the memory of the hosts cannot be used");
            }
        }
    }
    Ok(())
}

/// Commits a step, unless not all ranks have saved it, or the log has it.
async fn commit(store: &Store, exchange: &SessionExchange, after: u64, session: Id, at: SessionStep, ranks: &RankSet) -> Result<()> {
    let Some(receipts) = complete_receipts(exchange, at, ranks).await? else { return Ok(()) };
    let log = SessionLog::open(store).await?;
    let begins = Leader { session, after, attempt: at.attempt, term: 1, above: None };
    let leader = match log.leadership().of(session) {
        Some(leading) if leading.leader.attempt > at.attempt => return Ok(()),
        Some(leading) if leading.leader.attempt == at.attempt && leading.newest >= Some(at.step) => return Ok(()),
        Some(leading) => Leader { attempt: at.attempt, term: leading.leader.term.saturating_add(1), above: None, ..leading.leader },
        None => begins,
    };
    // The store has another state of this step, which a rank without this memory would restore.
    if log.records().iter().any(|record| record.step == at.step && record.sequence <= after) {
        return Ok(());
    }
    // Nothing is collected here, so casks may have any age.
    let options = WriterOptions { age_floor: Duration::from_secs(u64::from(u32::MAX)), ..WriterOptions::default() };
    LeaderWriter::open(store, leader, options).await?.commit(at.step, &receipts).await?;
    Ok(())
}

/// Time between attempts to read the memory of the hosts.
const AGAIN: Duration = Duration::from_millis(500);
/// Number of times that a reader of the memory asks again.
const RETRIES: u32 = 4;
/// Number of steps of a session, and of committed steps, to offer.
const MOST_STEPS: usize = 8;
