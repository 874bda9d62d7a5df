//! Reads the log, and commits to it. Spec: `spec/log.md`, clauses 4 and 5.

use std::time::Duration;

use bytes::Bytes;

use super::{CATALOG_INTERVAL, Catalog, LogState, Need, Stale, Standing, Status, Summary, now_ms};
use crate::error::ResultExt;
use crate::store::{Created, Medium, Store, concurrently};
use crate::wire::{Digest, Event, Id, LogEntry, Manifest, StoreFile};
use crate::{Error, ErrorKind, Result, boxed};

/// The log of a store, as far as it has been read.
#[derive(Debug)]
pub(crate) struct Log {
    pub(super) store: Store,
    pub(super) store_file: StoreFile,
    pub(super) state: LogState,
    /// The newest catalog that was read or written: its last entry, and its path.
    pub(super) catalog: Option<(u64, String)>,
    /// Catalogs that were damaged and therefore not used.
    pub(crate) skipped: Vec<Error>,
}

/// What became of one attempt to write an entry.
enum Attempt {
    Ours,
    Taken,
}

/// What became of an entry that relies on other objects.
#[derive(Debug)]
pub(crate) enum Appended {
    /// Committed, under this number.
    Committed(u64),
    /// Nothing was committed: the store is not what this log says, or lacks an object that the entry needs.
    Refused(Stale),
}

/// Manifests fetched at once.
const CONCURRENT_MANIFESTS: usize = 32;
/// How often an entry is sent again while its outcome is unclear, and the first wait, which doubles.
const ATTEMPTS: u32 = 6;
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// No attempt begins later than this; each has the retries and time-outs of the object store inside.
const DEADLINE: Duration = Duration::from_secs(120);

impl Log {
    /// Reads the newest catalog that is whole, and the entries after it.
    #[boxed]
    pub(crate) async fn load(store: &Store) -> Result<Self> {
        let (store_file, catalogs) = tokio::join!(store.read_store_file(), Catalog::list(store));
        let (store_file, state) = (store_file?, LogState::default());
        let mut log = Self { store: store.clone(), store_file, state, catalog: None, skipped: Vec::new() };
        let mut ahead = None;
        for name in catalogs? {
            // Its name says where it ends: what follows is asked for at the same time.
            let first = Catalog::sequence_of(&name).unwrap_or_default().saturating_add(1);
            let (catalog, entries) = tokio::join!(Catalog::read(store, &name), fetch_entries(store, first, to_next_catalog(first)));
            match catalog {
                Ok(state) => {
                    log.catalog = Some((state.sequence, name));
                    log.state = state;
                    ahead = Some(entries?);
                    break;
                }
                Err(e) if e.kind() == ErrorKind::Unsupported => return Err(e),
                Err(e) => {
                    tracing::warn!(error = %e, "a catalog is damaged; reading the log instead");
                    log.skipped.push(e);
                }
            }
        }
        let entries = match ahead {
            Some(entries) => entries,
            None => {
                let (entries, directories) = tokio::join!(fetch_entries(store, 1, CATALOG_INTERVAL), store.list("directories"));
                // A hint, which may be missing.
                if let Ok([only]) = directories.as_deref() {
                    log.state.directory = only.path.rsplit('/').next().and_then(|name| Digest::from_hex(name).ok());
                }
                entries?
            }
        };
        if log.apply(entries)? {
            log.refresh_by(CATALOG_INTERVAL).await?;
        }
        Ok(log)
    }

    pub(crate) fn state(&self) -> &LogState {
        &self.state
    }

    /// Reads the entries that have been committed since: none, most of the time. A `Conflict` if the store has been replaced.
    pub(crate) async fn refresh(&mut self) -> Result<()> {
        match self.catch_up().await? {
            Standing::Same => Ok(()),
            Standing::Stale(stale) => Err(stale.error),
        }
    }

    /// As [`refresh`](Self::refresh), and tells whether the last known entry is still there: its entry and the next are one request each,
    /// sent together.
    #[boxed]
    pub(crate) async fn catch_up(&mut self) -> Result<Standing> {
        let (next, known) = (self.state.next_sequence()?, self.state.sequence > 0);
        let mut entries = fetch_entries(&self.store, if known { self.state.sequence } else { next }, 1 + u64::from(known)).await?;
        if known {
            let (_, last) = entries.remove(0);
            if let Some(stale) = self.compare_last(last.as_ref())? {
                return Ok(Standing::Stale(stale));
            }
        }
        if self.apply(entries)? {
            self.refresh_by(2).await?;
        }
        Ok(Standing::Same)
    }

    /// The last known entry, as the store has it now.
    pub(super) async fn fetch_last(&self) -> Result<Option<Bytes>> {
        self.store.get_if_present(&LogEntry::path_of(self.state.sequence), self.store.limits().max_entry_bytes).await
    }

    /// Asks for `batch` entries, then for twice as many, but never past the entry that a catalog follows.
    #[boxed]
    async fn refresh_by(&mut self, mut batch: u64) -> Result<()> {
        loop {
            let first = self.state.next_sequence()?;
            let entries = fetch_entries(&self.store, first, batch.min(to_next_catalog(first))).await?;
            if !self.apply(entries)? {
                return Ok(());
            }
            batch = (batch * 2).min(CATALOG_INTERVAL);
        }
    }

    /// Applies entries up to the first absent one; false if there was one.
    fn apply(&mut self, entries: Vec<(u64, Option<Bytes>)>) -> Result<bool> {
        for (sequence, bytes) in entries {
            let Some(bytes) = bytes else { return Ok(false) };
            let (entry, digest) = LogEntry::decode(&bytes, sequence, self.store.limits()).in_object(LogEntry::path_of(sequence))?;
            self.state.apply(&entry, digest)?;
        }
        Ok(true)
    }

    /// Commits the event that `decide` makes of the current state; again, on the new state, as long as others are faster. A `Conflict` if
    /// the store has been replaced.
    pub(crate) async fn append(&mut self, writer: Id, decide: impl FnMut(&LogState) -> Result<Event>) -> Result<u64> {
        match self.append_relying_on(&[], writer, decide).await? {
            Appended::Committed(sequence) => Ok(sequence),
            Appended::Refused(stale) => Err(stale.error),
        }
    }

    /// As [`append`](Self::append), for an entry that relies on these objects. Before anything is created, the store is compared with what
    /// is known of it ([`confirm`](Self::confirm)).
    pub(crate) async fn append_relying_on(
        &mut self,
        needs: &[Need],
        writer: Id,
        mut decide: impl FnMut(&LogState) -> Result<Event>,
    ) -> Result<Appended> {
        let mut confirmed = false;
        loop {
            refuse_features(self.store_file.may_ignore())?;
            refuse_features(&self.state.may_ignore)?;
            let event = decide(&self.state)?;
            let sequence = self.state.next_sequence()?;
            let token = Id::random()?;
            let entry = LogEntry::new(sequence, self.state.head, token, writer, now_ms(), event);
            let (bytes, digest) = entry.encode()?;
            // What readers would refuse must never be committed: it would close the store to everybody.
            LogEntry::decode(&bytes, sequence, self.store.limits())
                .map_err(|e| Error::invalid(format!("the log entry would not be readable: {}", e.message())).source(e))?;
            if !confirmed && let Standing::Stale(stale) = self.confirm(needs).await? {
                return Ok(Appended::Refused(stale));
            }
            confirmed = true;
            match self.write_entry(sequence, token, bytes.into()).await? {
                Attempt::Ours => {
                    self.state.apply(&entry, digest)?;
                    return Ok(Appended::Committed(sequence));
                }
                Attempt::Taken => {
                    if let Standing::Stale(stale) = self.catch_up().await? {
                        return Ok(Appended::Refused(stale));
                    }
                }
            }
        }
    }

    /// Fills in what listings tell of snapshots, reading the manifests that no catalog has summarised.
    #[boxed]
    pub(crate) async fn summarise(&mut self) -> Result<()> {
        let missing: Vec<(usize, Digest, String)> = self
            .state
            .snapshots()
            .iter()
            .enumerate()
            .filter(|(_, record)| record.summary.is_none() && record.status != Status::Collected)
            .map(|(at, record)| (at, record.manifest, record.manifest_path()))
            .collect();
        let store = &self.store;
        let read = |(at, digest, path): (usize, Digest, String)| async move {
            let manifest = read_manifest(store, &path, digest).await?;
            Ok((at, Summary::of(&manifest)))
        };
        let found: Vec<(usize, Summary)> = concurrently(CONCURRENT_MANIFESTS, missing.into_iter().map(read)).await?;
        for (at, summary) in found {
            if let Some(record) = self.state.snapshot_mut(at) {
                record.summary = Some(summary);
            }
        }
        Ok(())
    }

    /// Notes a summary that is known without reading.
    pub(crate) fn note_summary(&mut self, id: Id, summary: Summary) {
        let at = self.state.snapshots().iter().rposition(|record| record.id == id);
        if let Some(record) = at.and_then(|at| self.state.snapshot_mut(at)) {
            record.summary = Some(summary);
        }
    }

    /// After every so many entries, writes a catalog. It only saves readers time: a failure is told, not returned.
    #[boxed]
    pub(crate) async fn write_catalog_if_due(&mut self) {
        if self.state.sequence == 0 || !self.state.sequence.is_multiple_of(CATALOG_INTERVAL) {
            return;
        }
        let written = match self.summarise().await {
            Ok(()) => Catalog::write(&self.store, &self.state).await,
            Err(e) => Err(e),
        };
        match written {
            Ok(path) => self.catalog = Some((self.state.sequence, path)),
            Err(e) => tracing::warn!(error = %e, sequence = self.state.sequence, "no catalog written; readers will read more log entries"),
        }
    }

    /// Sends one entry until it is known whose it is. Never guesses, never deletes.
    #[boxed]
    async fn write_entry(&self, sequence: u64, token: Id, bytes: Bytes) -> Result<Attempt> {
        let path = LogEntry::path_of(sequence);
        let local = matches!(self.store.medium(), Medium::Local(_));
        let started = tokio::time::Instant::now();
        let mut wait = FIRST_WAIT;
        let mut last_error = None;
        for attempt in 0..ATTEMPTS {
            let mut refusal = None;
            match self.store.create(&path, bytes.clone()).await {
                Ok(Created::Written) => return Ok(Attempt::Ours),
                // Either another writer's entry, or our own whose answer was lost.
                Ok(Created::Exists) => {}
                Err(e) => {
                    let definite = attempt == 0 && (local || is_refusal(&e));
                    let error = Error::storage(&path, e);
                    if definite { refusal = Some(error) } else { last_error = Some(error) }
                }
            }
            let found = self.store.get_if_present(&path, self.store.limits().max_entry_bytes).await;
            match (refusal, found) {
                // Nothing is there, and the storage said why.
                (Some(error), Ok(None)) => {
                    return Err(Error::new(ErrorKind::Storage, format!("{}; nothing was committed", error.message()))
                        .object(path)
                        .source(error));
                }
                // On local disk an entry that is there after an error may not be durable, and reading it back proves nothing.
                (Some(error), _) if local => return Err(unknown(&path, Some(error))),
                (refusal, Ok(Some(found))) => match LogEntry::decode(&found, sequence, self.store.limits()) {
                    Ok((entry, _)) => return Ok(if entry.token == token { Attempt::Ours } else { Attempt::Taken }),
                    Err(e) => return Err(unknown(&path, Some(refusal.unwrap_or(e)))),
                },
                (None, Ok(None)) => {}
                (refusal, Err(e)) => last_error = Some(refusal.unwrap_or(e)),
            }
            if started.elapsed() > DEADLINE {
                break;
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        Err(unknown(&path, last_error))
    }
}

/// Entries from number `first` up to the next that a catalog follows, that one included.
fn to_next_catalog(first: u64) -> u64 {
    CATALOG_INTERVAL - first.saturating_sub(1) % CATALOG_INTERVAL
}

/// `count` entries from number `first` on, all at once; none where there is none.
#[boxed]
async fn fetch_entries(store: &Store, first: u64, count: u64) -> Result<Vec<(u64, Option<Bytes>)>> {
    let fetch = |sequence| async move {
        let bytes = store.get_if_present(&LogEntry::path_of(sequence), store.limits().max_entry_bytes).await?;
        Ok((sequence, bytes))
    };
    concurrently(CATALOG_INTERVAL as usize, (first..first.saturating_add(count)).map(fetch)).await
}

/// Whether the storage said that it did not do it.
fn is_refusal(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    matches!(
        error,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } | E::NotImplemented { .. } | E::NotSupported { .. } | E::InvalidPath { .. }
    )
}

fn unknown(path: &str, cause: Option<Error>) -> Error {
    let unknown = Error::new(
        ErrorKind::OutcomeUnknown,
        "the commit was sent, but whether it arrived and will stay cannot be told; nothing was deleted. Open the store again to see",
    )
    .object(path);
    match cause {
        Some(cause) => unknown.source(cause),
        None => unknown,
    }
}

/// A writer must know even the features that readers may ignore: it could break what they promise.
pub(crate) fn refuse_features(may_ignore: &[String]) -> Result<()> {
    match may_ignore.first() {
        None => Ok(()),
        Some(name) => Err(Error::unsupported(format!(
            "the store uses feature `{}`, which this version cannot write; upgrade tensorcask",
            name.escape_debug()
        ))
        .clause("README 4")),
    }
}

/// A manifest, compared with the digest that the log names.
#[boxed]
pub(crate) async fn read_manifest(store: &Store, path: &str, digest: Digest) -> Result<Manifest> {
    let bytes = store.get(path, store.limits().max_manifest_bytes).await;
    let bytes = bytes.map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::corrupt("the manifest of a committed snapshot is missing").object(path).clause("manifest 1"),
        _ => e,
    })?;
    let (manifest, found) = Manifest::decode(&bytes, store.limits()).in_object(path)?;
    if found != digest {
        return Err(Error::corrupt("is not the manifest that the log names: replaced or swapped").object(path).clause("manifest 1"));
    }
    Ok(manifest)
}
