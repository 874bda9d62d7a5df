//! The beginning of a session of many hosts: all hosts agree on the log entry after which it begins.
//!
//! They agree through the store if it answers. Otherwise, the host of rank 0 reads what all hosts have in memory, and tells
//! the others through its agent. The session then knows the log only up to that entry: see [`KnownLog`]. If only host 0 reaches
//! the store at first, the other hosts wait, and join when they reach it.

use std::time::Duration;

use tensorcask::maintain;
use tensorcask::session::{KnownLog, Mirror, SessionExchange, SessionLog};
use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, Store};

use crate::memory::stores::open_mirror;
use crate::os::folders::{RunFolder, publish};
use crate::os::lock::wait_for_lock;
use crate::peers::other_hosts::OtherHosts;
use crate::peers::union_store;
use crate::restore::damaged_copies::damaged_copies;
use crate::restore::earlier_sessions::{Beginning, beginnings, remove_messages};
use crate::restore::hosts_memory::HostsView;
use crate::restore::hosts_survey::{HostsSurvey, SurveyWait};
use crate::run::host_notes::HostNotes;
use crate::run::hosts_option::HostsSpec;
use crate::run::spec::RunSpec;
use crate::run::tier_query::nearest_existing;

/// Notes that a rank starts in the session of a run on many hosts, here and in the store. If the store does not answer within
/// `limit`, the session begins from the memory of all hosts, if the run has peers.
pub(crate) async fn join_session(spec: &RunSpec, run: &RunFolder, rank: u32, limit: Duration) -> Result<()> {
    let Some(hosts) = &spec.hosts else { return Ok(()) };
    let stores = &spec.stores()?;
    let first = stores.first().ok_or_else(|| Error::invalid("the run has no store"))?;
    let notes = HostNotes::read(run, hosts.session);
    let process = Id::random()?;
    if let Some(known) = &notes.known {
        // Another rank of this host has found that the store does not answer.
        return HostNotes::start_rank(run, hosts.session, rank, known.sequence, Some(process));
    }
    let Some(others) = OtherHosts::open(spec)? else {
        let after = join_by_store(stores, hosts, run, rank, process).await?;
        return HostNotes::start_rank(run, hosts.session, rank, after, None);
    };
    let error = match tokio::time::timeout(limit, join_by_store(stores, hosts, run, rank, process)).await {
        Ok(Ok(after)) => {
            remove_messages(run, hosts.session)?;
            return HostNotes::start_rank(run, hosts.session, rank, after, None);
        }
        Ok(Err(error)) if !error.is_unanswered() => return Err(error),
        Ok(Err(error)) => error,
        Err(_) => Error::new(ErrorKind::Storage, format!("no answer within {limit:?}")).object(first.url()),
    };
    tracing::warn!(run = spec.run, store = first.url(), %error, "the store does not answer; asking the other hosts where the session begins");
    let found = join_by_hosts(first, hosts, run, &others).await.map_err(|memory| {
        let message =
            format!("the store does not answer ({}), and the session cannot begin from memory: {}", error.message(), memory.message());
        Error::new(ErrorKind::Storage, message).object(first.url()).source(error)
    })?;
    match found {
        Some(after) => HostNotes::start_rank(run, hosts.session, rank, after, Some(process)),
        None => {
            let after = join_by_store(stores, hosts, run, rank, process).await?;
            remove_messages(run, hosts.session)?;
            HostNotes::start_rank(run, hosts.session, rank, after, None)
        }
    }
}

/// Returns the log entry after which the session begins, from other ranks of this host, or from the memory of all hosts.
/// `None` if the store has answered in the meantime: the other hosts have agreed there.
async fn join_by_hosts(store: &Store, hosts: &HostsSpec, run: &RunFolder, others: &OtherHosts) -> Result<Option<u64>> {
    let _held = wait_for_lock(&run.hosts_lock()).await?;
    let notes = HostNotes::read(run, hosts.session);
    match (notes.known, notes.after) {
        (Some(known), _) => return Ok(Some(known.sequence)),
        // The store answered a moment ago.
        (None, Some(after)) => return Ok(Some(after)),
        (None, None) => {}
    }
    let Some(beginning) = join_by_memory(store, hosts, run, others).await? else { return Ok(None) };
    let after = beginning.known.sequence;
    HostNotes::update(run, hosts.session, |notes| {
        notes.known = Some(beginning.known);
        Ok(())
    })?;
    Ok(Some(after))
}

/// All hosts agree through the store on the log entry after which the session begins; returns its number. Prepares this host's
/// mirror.
async fn join_by_store(stores: &[Store], hosts: &HostsSpec, run: &RunFolder, rank: u32, process: Id) -> Result<u64> {
    let (store, further) = stores.split_first().ok_or_else(|| Error::invalid("the run has no store"))?;
    let after = match SessionExchange::beginning(store, hosts.session).await? {
        Some(after) => after,
        None => {
            let last = match SessionLog::open(store).await {
                Ok(log) => log.sequence(),
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    create_for_further_tiers(store, further).await?;
                    0
                }
                Err(e) => return Err(e),
            };
            SessionExchange::begin(store, hosts.session, last).await?
        }
    };
    fill_mirror(run, store).await?;
    SessionExchange::start_rank(store, hosts.session, rank, process).await?;
    Ok(after)
}

/// Creates the first tier for the run of the nearest further tier that exists: otherwise it would begin another run, which the
/// further tiers refuse.
async fn create_for_further_tiers(store: &Store, further: &[Store]) -> Result<()> {
    match nearest_existing(further).await? {
        Some((tier, _)) if matches!(store.history().run().await, Err(e) if e.kind() == ErrorKind::NotFound) => {
            maintain::create_for_run_of(tier, store).await
        }
        _ => Ok(()),
    }
}

/// Copies the log into an empty mirror, with manifests and directories of the newest snapshot. The host can then encode its
/// first step even if the store stops answering before that.
async fn fill_mirror(run: &RunFolder, store: &Store) -> Result<()> {
    let _held = wait_for_lock(&run.hosts_lock()).await?;
    let memory = open_mirror(run)?;
    match SessionLog::open(&memory).await {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        // The agent keeps it up to date.
        _ => return Ok(()),
    }
    match SessionLog::open(store).await {
        Ok(log) => Mirror::new(store, &memory).follow(&log).await,
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Begins the session from the memory of all hosts, and prepares this host's mirror. The caller holds the lock of hosts.
/// `None` if the session begins in the store.
async fn join_by_memory(store: &Store, hosts: &HostsSpec, run: &RunFolder, others: &OtherHosts) -> Result<Option<Beginning>> {
    let beginning = match others.own {
        0 => match begin(hosts, run, others).await {
            Ok(beginning) => beginning,
            Err(error) => {
                publish(run, &refusal_of(hosts), error.message().as_bytes())?;
                return Err(error);
            }
        },
        _ => match wait_for_beginning(hosts, others, store).await? {
            Some(beginning) => beginning,
            None => return Ok(None),
        },
    };
    let known = &beginning.known;
    let wait = SurveyWait { timeout: HOSTS_TIMEOUT, entry: Some(known.sequence) };
    let survey = HostsSurvey::shared(run, hosts.session, others, wait).await?;
    let union = union_store(survey.stores(run, others)?, known.sequence);
    let log = SessionLog::open(&union).await?;
    let memory = open_mirror(run)?;
    if log.sequence() != known.sequence || union.history().run().await? != known.run {
        let message = "the hosts that answer do not have the log as host 0 knows it; start the job again";
        return Err(Error::new(ErrorKind::Conflict, message));
    }
    match SessionLog::open(&memory).await {
        // Following an older log would empty the mirror.
        Ok(own) if own.sequence() > known.sequence || memory.history().run().await? != known.run => {
            let message = "this host's memory has more of the log than host 0 knows; start the job again";
            return Err(Error::new(ErrorKind::Conflict, message));
        }
        Ok(_) => {}
        Err(error) if error.is_damage() => {}
        Err(error) => return Err(error),
    }
    // The encoder needs the log, and later starts of the job, too.
    Mirror::new(&union, &memory).follow(&log).await?;
    publish(run, &Beginning::name_of(hosts.session), &beginning.encode()?)?;
    remove_messages(run, hosts.session)?;
    tracing::warn!(
        store = store.url(),
        entry = known.sequence,
        step = known.continued.last().and_then(|session| session.newest),
        silent = ?survey.silent,
        "the session begins from memory; nothing is committed until the store answers"
    );
    Ok(Some(beginning))
}

/// Host 0 decides where the session begins.
async fn begin(hosts: &HostsSpec, run: &RunFolder, others: &OtherHosts) -> Result<Beginning> {
    let wait = SurveyWait { timeout: HOSTS_TIMEOUT, entry: None };
    let survey = HostsSurvey::shared(run, hosts.session, others, wait).await?.without(&damaged_copies(run));
    let places = survey.stores(run, others)?;
    let union = union_store(places.clone(), u64::MAX);
    let log = SessionLog::open(&union).await.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::new(ErrorKind::NotFound, "no host has this run in memory"),
        _ => error,
    })?;
    let earlier = beginnings(run, others, &survey, hosts.session).await;
    let view = HostsView::find(&places, log.sequence(), &earlier).await?;
    check_usable(&log, &view).await?;
    let run = union.history().run().await?;
    let leadership = log.leadership().clone();
    let known = KnownLog { run, sequence: log.sequence(), leadership, continued: view.continued };
    let number = earlier.iter().filter(|earlier| earlier.known.sequence == known.sequence).map(|earlier| earlier.number).max().unwrap_or(0);
    Ok(Beginning { session: hosts.session, number: number.saturating_add(1), known })
}

/// Without this check, ranks would agree that there is no step, and train from the start although the store has snapshots.
async fn check_usable(log: &SessionLog, view: &HostsView) -> Result<()> {
    let saved = log.records().iter().map(|record| record.step).max();
    let newest = saved.max(view.continued.iter().filter_map(|session| session.newest).max());
    match newest {
        Some(newest) if view.is_empty().await? => {
            let message = format!(
                "the newest step is {newest}, and memory has no step with all of its casks; start the job again when the store answers"
            );
            Err(Error::new(ErrorKind::NotFound, message))
        }
        _ => Ok(()),
    }
}

/// The other hosts learn from host 0 where the session begins. `None` if hosts that reach the store have agreed there.
async fn wait_for_beginning(hosts: &HostsSpec, others: &OtherHosts, store: &Store) -> Result<Option<Beginning>> {
    let begun = tokio::time::Instant::now();
    let mut in_store = std::pin::pin!(begun_in_store(store, hosts.session));
    loop {
        let why = match others.read_message(0, &Beginning::name_of(hosts.session)).await {
            Ok(Some(bytes)) => return Beginning::decode(&bytes, hosts.session).map(Some),
            Ok(None) => match others.read_message(0, &refusal_of(hosts)).await {
                Ok(Some(why)) => return Err(Error::new(ErrorKind::NotFound, format!("host 0: {}", String::from_utf8_lossy(&why)))),
                _ => "host 0 has not begun the session: the store may answer there".to_owned(),
            },
            Err(error) => error.message().to_owned(),
        };
        if begun.elapsed() >= HOSTS_TIMEOUT {
            return Err(Error::new(ErrorKind::NotFound, why));
        }
        tokio::select! {
            () = &mut in_store => return Ok(None),
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

/// Waits until the store answers, and knows where the session begins.
async fn begun_in_store(store: &Store, session: Id) {
    while !matches!(SessionExchange::beginning(store, session).await, Ok(Some(_))) {
        tokio::time::sleep(RETRY_STORE).await;
    }
}

/// Name of the message that host 0 cannot begin the session.
fn refusal_of(hosts: &HostsSpec) -> String {
    format!("{}/refusal", hosts.session)
}

/// Timeout for joining a session through the store. `store_timeout`: timeout of one request. `is_silent`: whether the store did not
/// answer a moment ago.
pub(crate) fn join_timeout(store_timeout: Duration, is_silent: bool) -> Duration {
    match is_silent {
        true => store_timeout.min(AFTER_SILENCE),
        false => store_timeout.saturating_mul(STORE_REQUESTS),
    }
}

/// Requests to the store that a start of a rank sends, about.
const STORE_REQUESTS: u32 = 3;
/// Time for a store that did not answer a moment ago.
const AFTER_SILENCE: Duration = Duration::from_secs(2);
/// Time to wait for the agents of all hosts, if the store does not answer.
const HOSTS_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between questions to host 0.
const RETRY: Duration = Duration::from_millis(200);
/// Time between questions to the store meanwhile.
const RETRY_STORE: Duration = Duration::from_secs(1);
