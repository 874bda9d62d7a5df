//! Opens a store for writing: creates the store if needed, checks the storage, and fences other writers.

use super::pipeline::SavePipeline;
use super::{Claim, ExistingStep, Stopped, UnchangedTensors, Writer, WriterOptions};
use crate::commit::{
    FiniteMarks, Freeing, KnownLog, LeaderRefusal, Log, Owner, check_root, has_store, read_store_file, refuse_lost_log, without_store_file,
};
use crate::store::{Created, probe};
use crate::wire::{Event, Id, Job, Leader, STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, NamePatterns, Policy, Result, Retention, Store, boxed};

impl Store {
    /// Opens the store for writing. Creates the store if it does not exist.
    pub async fn writer(&self, policy: Policy) -> Result<Writer> {
        self.writer_with(WriterOptions { policy, ..WriterOptions::default() }).await
    }

    /// Opens the store for writing with the given options.
    pub async fn writer_with(&self, options: WriterOptions) -> Result<Writer> {
        open_as(self, options, None, None).await
    }
}

/// Opens a store for writing: creates it if needed, checks that the storage honours put-if-absent, and fences other
/// writers. `known`: the log that a session began with which did not reach the store.
#[boxed]
pub(crate) async fn open_as(store: &Store, options: WriterOptions, leader: Option<Leader>, known: Option<&KnownLog>) -> Result<Writer> {
    options.retention.map_or(Ok(()), Retention::check)?;
    options.codecs.check(store.registry())?;
    let unchanged = UnchangedTensors::default();
    let frozen = NamePatterns::parse(&options.frozen)?;
    let id = match options.id {
        Some(id) => id,
        None => Id::random()?,
    };
    let frees = leader.is_none() && options.retention.is_some_and(Retention::frees);
    // Before the log, so that it names what was committed in between.
    let manifests = if frees { store.objects().list("snapshots").await? } else { Vec::new() };
    let mut log = open_log(store, None).await?;
    let freeing = if frees { Freeing::begin(store, log.state(), &manifests).await } else { Freeing::default() };
    let seen = match options.claim {
        Claim::Job => {
            log.job = Some(Job::here());
            None
        }
        Claim::Once | Claim::OnceTakingOver => {
            let takes_over = options.claim == Claim::OnceTakingOver;
            let owner = Owner::of(&log).await?;
            match owner {
                // The job itself saves by hand, and goes on.
                Some(owner) if owner.writer == id => log.job = Some(Job::here()),
                Some(owner) if !takes_over => return Err(owner.refusal(store)),
                _ => {}
            }
            (!takes_over).then_some(log.state().last_writer)
        }
    };
    let begins = leader.is_some_and(|leader| leader.term == 1);
    let opened = log.append(id, |state| match leader.map(|leader| state.leadership.may_open(leader)) {
        Some(Err(refusal)) => Err(refused(refusal)),
        _ if seen.is_some_and(|seen| state.has_new_job(seen)) => {
            Err(Error::new(ErrorKind::Conflict, "a job has opened the store at the same time; nothing was saved").object(store.url()))
        }
        _ => {
            known.filter(|_| begins).map_or(Ok(()), |known| known.check_log(state.sequence, &state.leadership))?;
            Ok(Event::Opened { leader })
        }
    });
    opened.await?;
    log.write_catalog_if_due().await;
    let predecessors = log.state().writers.clone();
    let mut pipeline = SavePipeline::new(store, options);
    if leader.is_some() {
        // The log admits a step of a session only once.
        pipeline.options.existing_step = ExistingStep::Replace;
    }
    Ok(Writer {
        pipeline,
        id,
        log,
        predecessors,
        durable_directory: None,
        unchanged,
        frozen,
        previous: None,
        upload_ms: None,
        begun: None,
        measures_saves: true,
        stopped: Stopped(None),
        marks: FiniteMarks::default(),
        freeing,
        leader,
    })
}

/// Reads the log of a store that is about to be written to. Creates `store.json` if it is missing.
///
/// `known`: the run of the store that the caller has written to. It goes on in what is there now (log 5.7). A new writer refuses
/// a store that has lost its log or `store.json` (log 4.8).
#[boxed]
pub(super) async fn open_log(store: &Store, known: Option<Id>) -> Result<Log> {
    check_root(store, has_store(store, known)).await?;
    store.objects().ensure_root().await?;
    match read_store_file(store).await {
        Ok(found) => {
            // The cheapest check of put-if-absent: creating an existing object must fail.
            let created = store.objects().create(STORE_FILE, found.encode()?.into()).await.map_err(|e| Error::storage(STORE_FILE, e))?;
            if let Created::Written = created {
                // Either the storage ignores the condition, or the file was removed between the two requests. The probe
                // tells which.
                probe(store.objects()).await?;
                tracing::warn!(store = store.url(), "store.json was removed while the store was being opened; it was created again");
            }
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            if known.is_none() {
                without_store_file(store).await?.map_or(Ok(()), Err)?;
            }
            probe(store.objects()).await?;
            let bytes = StoreFile::new(Id::random()?).encode()?;
            let bytes = bytes::Bytes::from(bytes);
            for attempt in 0..3 {
                // If another writer was faster, its file is as good. A server may also report a race that nobody won:
                // try again.
                store.objects().create(STORE_FILE, bytes.clone()).await.map_err(|e| Error::storage(STORE_FILE, e))?;
                match read_store_file(store).await {
                    Err(e) if e.kind() == ErrorKind::NotFound && attempt < 2 => {}
                    found => {
                        found?;
                        break;
                    }
                }
            }
        }
        Err(e) => return Err(e),
    }
    let log = Log::load_whole(store).await?;
    if known.is_none() {
        refuse_lost_log(&log).await?;
    }
    Ok(log)
}

/// The error of a host that may not open the log, or not add a step.
pub(super) fn refused(refusal: LeaderRefusal) -> Error {
    let kind = if refusal == LeaderRefusal::Ended { ErrorKind::Fenced } else { ErrorKind::Conflict };
    Error::new(kind, refusal.to_string()).clause("log 8")
}
