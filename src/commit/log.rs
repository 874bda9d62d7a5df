//! Reads the log and commits to it. Spec: `spec/log.md`, clauses 4 and 5.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::store_file::read_store_file;
use super::{
    Age, CATALOG_INTERVAL, Catalog, LogState, Need, SnapshotRecord, SnapshotStatus, Stale, Standing, Summary, now_ms, read_manifest,
};
use crate::error::{ResultExt, is_out_of_reach, is_refusal};
use crate::store::{Created, Store, concurrently};
use crate::wire::{Digest, Event, Id, InlineSnapshot, Job, LogEntry, StoreFile};
use crate::{Error, ErrorKind, Result, boxed};

/// Log of a store, as far as it has been read.
#[derive(Debug)]
pub(crate) struct Log {
    pub(super) store: Store,
    pub(crate) store_file: StoreFile,
    pub(super) state: LogState,
    /// Entries that were read or written since the last entry that a catalog follows.
    pub(super) newest: BTreeMap<u64, KnownEntry>,
    /// Entry that the catalog by which the log was entered follows, and its digest by that catalog.
    pub(super) entered: Option<(u64, Digest)>,
    /// Errors of catalogs that were skipped: damaged, or listed and absent.
    pub(crate) skipped: Vec<Error>,
    /// Job that entries of this process name.
    pub(crate) job: Option<Job>,
}

/// An entry as it was read or written.
#[derive(Debug, Clone, Copy)]
pub(super) struct KnownEntry {
    pub digest: Digest,
    /// Size with the snapshot that it holds.
    pub bytes: u64,
}

/// Outcome of one attempt to write an entry.
enum Attempt {
    Ours,
    Taken,
}

/// Outcome of committing an entry that relies on other objects.
#[derive(Debug)]
pub(crate) enum Appended {
    /// Committed under this number.
    Committed(u64),
    /// Nothing was committed: the store differs from this log or lacks an object that the entry needs.
    Refused(Stale),
}

/// Number of entries requested first in a log without a catalog. Enough for two saves: the entries `opened`, `added` and
/// `added`, and the absent one after them.
const FIRST_ENTRIES: u64 = 4;
/// Number of entries requested together with a catalog. Such a log is long, and on average 32 entries follow the catalog.
const ENTRIES_AFTER_CATALOG: u64 = 8;
/// Number of manifests fetched at once.
const CONCURRENT_MANIFESTS: usize = 32;
/// Number of times that a reader looks at the log again, because a job has freed what it was about to read.
pub(crate) const MOST_LOOKS: u32 = 16;
/// Maximum number of attempts to send an entry while its outcome is unclear. The wait doubles after each attempt.
const ATTEMPTS: u32 = 6;
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// Time after which no further attempt begins. Each attempt includes the retries and timeouts of the object store.
const DEADLINE: Duration = Duration::from_secs(120);
/// Time after which the store is compared again before an entry is created.
const CONFIRMED: Duration = Duration::from_secs(120);

/// Snapshots whose manifests are damaged, with their errors.
#[must_use]
pub(crate) struct Damaged(pub Vec<(SnapshotRecord, Error)>);

impl Damaged {
    /// Returns the first error, if any.
    pub(crate) fn refuse(self) -> Result<()> {
        self.0.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl Log {
    /// Reads the newest intact catalog and the entries after it.
    ///
    /// Requests few entries at first, and twice as many each time that all of them exist. Both the requests for absent
    /// entries and the round trips stay few: at most five for the entries between two catalogs.
    ///
    /// Takes what is there for the whole log. A store is read with [`load_log`](super::load_log), which does not take a lost log for an
    /// empty one. A mirror may be without its log while it is made.
    #[boxed]
    pub(crate) async fn load_part(store: &Store) -> Result<Self> {
        let (store_file, catalogs) = tokio::join!(read_store_file(store), Catalog::list(store));
        let store_file = store_file?;
        let mut catalogs = catalogs?;
        let newest = BTreeMap::new();
        let skipped = Vec::new();
        let mut log = Self { store: store.clone(), store_file, state: LogState::default(), newest, entered: None, skipped, job: None };
        let mut entered = begin_with_catalog(&mut log, &catalogs).await?;
        if entered.is_none() && log.skipped.iter().any(|error| error.kind() == ErrorKind::Storage) {
            // A mirror removes older catalogs once it has a newer one.
            catalogs = Catalog::list(store).await?;
            log.skipped.clear();
            entered = begin_with_catalog(&mut log, &catalogs).await?;
        }
        let (entries, batch) = match entered {
            Some(entries) => (entries, ENTRIES_AFTER_CATALOG),
            None => {
                let (entries, directories) = tokio::join!(fetch_entries(store, 1, FIRST_ENTRIES), store.objects().list("directories"));
                // The directory is a hint and may be missing.
                if let Ok([only]) = directories.as_deref() {
                    log.state.directory = only.path.rsplit('/').next().and_then(|name| Digest::from_hex(name).ok());
                }
                (entries?, FIRST_ENTRIES)
            }
        };
        if log.apply(entries)? {
            log.refresh_by(batch).await?;
        }
        match log.skipped.is_empty() || log.state.sequence > 0 {
            true => Ok(log),
            // The log of a mirror begins with a catalog. It is not empty.
            false => Err(log.skipped.swap_remove(0)),
        }
    }

    pub(crate) fn state(&self) -> &LogState {
        &self.state
    }

    /// Reads the entries that have been committed since, usually none. Returns a `Conflict` if the store has been
    /// replaced.
    pub(crate) async fn refresh(&mut self) -> Result<()> {
        match self.catch_up().await? {
            Standing::Same => Ok(()),
            Standing::Stale(stale) => Err(stale.error),
        }
    }

    /// Does the same as [`refresh`](Self::refresh) and returns whether the last known entry is still there. Sends two
    /// requests together: one for that entry and one for the next.
    #[boxed]
    pub(crate) async fn catch_up(&mut self) -> Result<Standing> {
        let next = self.state.next_sequence()?;
        let known = self.state.sequence > 0;
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

    /// Reads the stored bytes of the last known entry.
    pub(super) async fn fetch_last(&self) -> Result<Option<Bytes>> {
        self.store.objects().get_if_present(&LogEntry::path_of(self.state.sequence), self.store.limits().max_entry_bytes).await
    }

    /// Requests `batch` entries, then twice as many, but never past the entry that a catalog follows.
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

    /// Applies entries up to the first absent one. Returns false if an entry was absent.
    fn apply(&mut self, entries: Vec<(u64, Option<Bytes>)>) -> Result<bool> {
        for (sequence, bytes) in entries {
            let Some(bytes) = bytes else { return Ok(false) };
            let (entry, digest) = LogEntry::decode(&bytes, sequence, self.store.limits()).in_object(LogEntry::path_of(sequence))?;
            self.state.apply(&entry, digest)?;
            self.keep_entry(&entry, digest, bytes);
        }
        Ok(true)
    }

    /// Remembers an entry that was read or written.
    fn keep_entry(&mut self, entry: &LogEntry, digest: Digest, bytes: Bytes) {
        if to_next_catalog(entry.sequence) == CATALOG_INTERVAL {
            self.newest.clear();
        }
        self.newest.insert(entry.sequence, KnownEntry { digest, bytes: bytes.len() as u64 });
        self.state.keep_entry(entry, bytes);
    }

    /// Commits the event that `decide` derives from the current state. Decides again right before the commit, and on the new
    /// state if other writers commit first. Returns a `Conflict` if the store has been replaced.
    pub(crate) async fn append(&mut self, writer: Id, decide: impl FnMut(&LogState) -> Result<Event>) -> Result<u64> {
        match self.append_relying_on(&[], None, writer, decide).await? {
            Appended::Committed(sequence) => Ok(sequence),
            Appended::Refused(stale) => Err(stale.error),
        }
    }

    /// Does the same as [`append`](Self::append) for an entry that relies on these objects. First compares the store
    /// with the known log and objects ([`confirm`](Self::confirm)). `inline` is the snapshot that the entry holds, if its
    /// event says so.
    pub(crate) async fn append_relying_on(
        &mut self,
        needs: &[Need],
        inline: Option<&[u8]>,
        writer: Id,
        mut decide: impl FnMut(&LogState) -> Result<Event>,
    ) -> Result<Appended> {
        let mut confirmed: Option<Age> = None;
        loop {
            refuse_features(self.store_file.may_ignore())?;
            refuse_features(&self.state.may_ignore)?;
            let mut event = decide(&self.state)?;
            if confirmed.is_none_or(|confirmed| confirmed.elapsed() > CONFIRMED) {
                let asked = Age::start();
                if let Standing::Stale(stale) = self.confirm(needs).await? {
                    return Ok(Appended::Refused(stale));
                }
                confirmed = Some(asked);
                refuse_features(self.store_file.may_ignore())?;
                // The comparison may have taken long, and the process may have been suspended. Decisions check the age of objects.
                event = decide(&self.state)?;
            }
            let sequence = self.state.next_sequence()?;
            let token = Id::random()?;
            let mut entry = LogEntry::new(sequence, self.state.head, token, writer, now_ms(), event);
            if matches!(entry.event, Event::Opened { .. } | Event::Added { .. }) {
                entry.job.clone_from(&self.job);
            }
            let (mut bytes, digest) = entry.encode()?;
            bytes.extend_from_slice(inline.unwrap_or_default());
            let bytes = Bytes::from(bytes);
            // Never commits an entry that readers would refuse: nobody could open the store any more.
            LogEntry::decode(&bytes, sequence, self.store.limits())
                .map_err(|e| Error::invalid(format!("the log entry would not be readable: {}", e.message())).source(e))?;
            self.state.check(&entry).map_err(|e| {
                let message = format!(
                    "the log entry is refused: {}; nothing was committed. If another process writes to the store, try again",
                    e.message()
                );
                Error::new(ErrorKind::Conflict, message).source(e)
            })?;
            match self.write_entry(sequence, token, bytes.clone()).await? {
                Attempt::Ours => {
                    self.state.apply(&entry, digest).map_err(|e| unknown(&LogEntry::path_of(sequence), Some(e)))?;
                    self.keep_entry(&entry, digest, bytes);
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

    /// Fills in the summaries for listings, of all snapshots or only of some. Reads the manifests that no catalog has
    /// summarised. Snapshots whose manifests are damaged get no summary.
    pub(crate) async fn summarise(&mut self, only: Option<&[Id]>) -> Result<Damaged> {
        let store = self.store.clone();
        self.summarise_from(&store, only).await
    }

    /// Does the same as [`summarise`](Self::summarise), with manifests that a mirror has.
    #[boxed]
    pub(crate) async fn summarise_from(&mut self, store: &Store, only: Option<&[Id]>) -> Result<Damaged> {
        let mut looks = 0;
        loop {
            let unreadable = self.read_summaries(store, only).await?;
            if unreadable.is_empty() || looks == MOST_LOOKS {
                return Ok(Damaged(unreadable));
            }
            // A job may have freed snapshots since the log was read, or a compaction replaced their manifests.
            if self.refresh().await.is_err() {
                return Ok(Damaged(unreadable));
            }
            looks += 1;
            let is_same = |known: &SnapshotRecord| self.state.by_id(known.id).is_some_and(|now| now.facts() == known.facts());
            if unreadable.iter().all(|(record, _)| is_same(record)) {
                return Ok(Damaged(unreadable));
            }
        }
    }

    /// Reads manifests once. Returns those that cannot be read.
    #[boxed]
    async fn read_summaries(&mut self, store: &Store, only: Option<&[Id]>) -> Result<Vec<(SnapshotRecord, Error)>> {
        let is_wanted = |record: &SnapshotRecord| only.is_none_or(|ids| ids.contains(&record.id));
        let missing: Vec<(usize, SnapshotRecord)> = self
            .state
            .snapshots()
            .iter()
            .enumerate()
            .filter(|(_, record)| record.summary.is_none() && record.status != SnapshotStatus::Collected && is_wanted(record))
            .map(|(at, record)| (at, record.clone()))
            .collect();
        let state = &self.state;
        let read = |(at, record): (usize, SnapshotRecord)| async move {
            let place = record.manifest_place();
            let known = place.inline_in.and_then(|sequence| Some((sequence, state.inline_entry(sequence)?)));
            let manifest = match known {
                Some((sequence, entry)) => InlineSnapshot::decode_manifest(entry, sequence, place.digest, store.limits())
                    .in_object(place.path)
                    .map(|found| found.0),
                None => read_manifest(store, &place).await,
            };
            match manifest {
                Ok(manifest) => Ok(Ok((at, Summary::of(&manifest)))),
                Err(error) if error.is_unreadable() => Ok(Err((record, error))),
                Err(error) => Err(error),
            }
        };
        let mut unreadable = Vec::new();
        for found in concurrently(CONCURRENT_MANIFESTS, missing.into_iter().map(read)).await? {
            match found {
                Ok((at, summary)) => {
                    if let Some(record) = self.state.snapshot_mut(at) {
                        record.summary = Some(summary);
                    }
                }
                Err(damaged) => unreadable.push(damaged),
            }
        }
        Ok(unreadable)
    }

    /// Stores a summary that is already known.
    pub(crate) fn note_summary(&mut self, id: Id, summary: Summary) {
        let at = self.state.snapshots().iter().rposition(|record| record.id == id);
        if let Some(record) = at.and_then(|at| self.state.snapshot_mut(at)) {
            record.summary = Some(summary);
        }
    }

    /// Writes a catalog at each interval of entries. Catalogs only save readers time, so a failure is logged and not
    /// returned.
    #[boxed]
    pub(crate) async fn write_catalog_if_due(&mut self) {
        if self.state.sequence == 0 || !self.state.sequence.is_multiple_of(CATALOG_INTERVAL) {
            return;
        }
        let written = match self.summarise(None).await.and_then(Damaged::refuse) {
            Ok(()) => Catalog::write(&self.store, &self.state).await,
            Err(e) => Err(e),
        };
        if let Err(e) = written {
            tracing::warn!(error = %e, sequence = self.state.sequence, "no catalog written; readers will read more log entries");
        }
    }

    /// Sends one entry until its outcome is known. Never guesses and never deletes.
    #[boxed]
    async fn write_entry(&self, sequence: u64, token: Id, bytes: Bytes) -> Result<Attempt> {
        let path = LogEntry::path_of(sequence);
        let local = self.store.objects().local_folder().is_some();
        let started = tokio::time::Instant::now();
        let mut wait = FIRST_WAIT;
        let mut last_error = None;
        for attempt in 0..ATTEMPTS {
            let mut refusal = None;
            match self.store.objects().create(&path, bytes.clone()).await {
                Ok(Created::Written) => return Ok(Attempt::Ours),
                // The entry is another writer's, or our own after a lost answer.
                Ok(Created::Exists) => {}
                Err(e) => {
                    let definite = attempt == 0 && (is_refusal(&e) || (local && !is_out_of_reach(&e)));
                    let error = Error::storage(&path, e);
                    if definite { refusal = Some(error) } else { last_error = Some(error) }
                }
            }
            let found = self.store.objects().get_if_present(&path, self.store.limits().max_entry_bytes).await;
            match (refusal, found) {
                // No entry exists, and the storage gave the reason.
                (Some(error), Ok(None)) => {
                    return Err(Error::new(ErrorKind::Storage, format!("{}; nothing was committed", error.message()))
                        .object(path)
                        .source(error));
                }
                (refusal, Ok(Some(found))) => match LogEntry::decode(&found, sequence, self.store.limits()) {
                    // Some file systems report any error to the loser of a race.
                    Ok((entry, _)) if entry.token != token => return Ok(Attempt::Taken),
                    // On local disk, an entry that exists after an error may not be durable, and reading it back proves
                    // nothing.
                    Ok(_) if !local || (refusal.is_none() && last_error.is_none()) => return Ok(Attempt::Ours),
                    Ok(_) => return Err(unknown(&path, refusal.or(last_error))),
                    Err(e) => return Err(unknown(&path, Some(refusal.unwrap_or(e)))),
                },
                (Some(error), Err(_)) if local => return Err(unknown(&path, Some(error))),
                (None, Ok(None)) => {
                    last_error = last_error.or_else(|| {
                        let message = "the storage answers that the entry exists, but does not return it";
                        Some(Error::new(ErrorKind::Storage, message).object(&path))
                    });
                }
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

/// The log of a store that does not answer, as far as a mirror has it. The next reading compares it with the store.
pub(crate) async fn load_from(mirror: &Store, store: &Store) -> Result<Log> {
    Ok(Log { store: store.clone(), skipped: Vec::new(), ..Log::load_part(mirror).await? })
}

/// Replaces a log by what a mirror of the store has of it, even if that is less. Does nothing if the mirror belongs to another
/// run.
pub(crate) async fn replace_from(log: &mut Log, mirror: &Store) -> Result<()> {
    let mirrored = load_from(mirror, &log.store).await?;
    if mirrored.store_file.run == log.store_file.run {
        *log = mirrored;
    }
    Ok(())
}

/// Takes the state of the newest intact catalog; returns the entries after it. `None` if there is no such catalog.
#[boxed]
async fn begin_with_catalog(log: &mut Log, catalogs: &[String]) -> Result<Option<Vec<(u64, Option<Bytes>)>>> {
    for name in catalogs {
        // The catalog's name tells its last entry, so the entries after it are requested at the same time.
        let first = Catalog::sequence_of(name).unwrap_or_default().saturating_add(1);
        let (catalog, entries) = tokio::join!(Catalog::read(&log.store, name), fetch_entries(&log.store, first, ENTRIES_AFTER_CATALOG));
        let error = match catalog {
            Ok(state) => {
                log.entered = state.head.map(|head| (state.sequence, head));
                log.state = state;
                return Ok(Some(entries?));
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {
                Error::new(ErrorKind::Storage, "the storage lists this catalog, but does not return it; try again").object(name).source(e)
            }
            Err(e) if e.kind().is_damaged_object() => e,
            // A storage that fails now does not prove that the catalog is damaged.
            Err(e) => return Err(e),
        };
        tracing::warn!(%error, "a catalog cannot be used; reading an older one, or the log instead");
        log.skipped.push(error);
    }
    Ok(None)
}

/// Returns the range of entries from `first` up to and including the next entry that a catalog follows.
fn to_next_catalog(first: u64) -> u64 {
    CATALOG_INTERVAL - first.saturating_sub(1) % CATALOG_INTERVAL
}

/// Fetches `count` entries from `first` on, all at once. An absent entry is `None`.
#[boxed]
async fn fetch_entries(store: &Store, first: u64, count: u64) -> Result<Vec<(u64, Option<Bytes>)>> {
    let fetch = |sequence| async move {
        let bytes = store.objects().get_if_present(&LogEntry::path_of(sequence), store.limits().max_entry_bytes).await?;
        Ok((sequence, bytes))
    };
    concurrently(CATALOG_INTERVAL as usize, (first..first.saturating_add(count)).map(fetch)).await
}

fn unknown(path: &str, cause: Option<Error>) -> Error {
    let why = cause.as_ref().map(|cause| format!(" ({})", cause.message())).unwrap_or_default();
    let message = format!(
        "the commit was sent, but its outcome is unknown{why}; nothing was deleted. Open the store again to see whether the commit is there"
    );
    let unknown = Error::new(ErrorKind::OutcomeUnknown, message).object(path);
    match cause {
        Some(cause) => unknown.source(cause),
        None => unknown,
    }
}

/// Refuses unknown features. A writer must know even those that readers may ignore, because it could violate what they
/// guarantee.
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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use object_store::local::LocalFileSystem;

    use super::Log;
    use crate::store::local_with;
    use crate::testing::fault::{Fault, FaultStore, Operation};
    use crate::wire::{Event, Id, LogEntry};
    use crate::{ErrorKind, Policy, Store};

    /// A store of which the next log entry is created by somebody else, and whose answer to us is an unclear error. SSHFS
    /// answers so: its protocol has one code for all failures.
    async fn raced(folder: &Path) -> Log {
        let url = folder.to_str().unwrap();
        Store::open(url).unwrap().writer(Policy::Full).await.unwrap();
        let known = Log::load_part(&Store::open(url).unwrap()).await.unwrap();
        let other = LogEntry::new(2, known.state.head, Id([7; 16]), Id([9; 16]), 0, Event::Opened { leader: None });
        let bytes = other.encode().unwrap().0;
        let path = folder.join(LogEntry::path_of(2));
        let client = FaultStore::new(Arc::new(LocalFileSystem::new_with_prefix(folder).unwrap()), move |operation, object| {
            if operation == Operation::Create && object.as_ref() == LogEntry::path_of(2) {
                std::fs::write(&path, &bytes).unwrap();
                return Fault::FailBefore;
            }
            Fault::None
        });
        let store = local_with(folder, Arc::new(client));
        Log::load_part(&store).await.unwrap()
    }

    #[tokio::test]
    async fn an_unclear_error_of_a_lost_race_on_local_disk_is_a_lost_race() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = raced(folder.path()).await;
        let mut seen = Vec::new();
        let appended = log.append(Id([8; 16]), |state| {
            seen.push(state.sequence);
            Ok(Event::Opened { leader: None })
        });
        assert_eq!(appended.await.unwrap(), 3);
        assert_eq!(seen.last(), Some(&2), "decided again, after the entry of the winner");
    }

    /// The bytes may not be durable, so reading them back proves nothing.
    #[tokio::test]
    async fn our_own_entry_after_an_error_on_local_disk_is_an_unknown_outcome() {
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_str().unwrap();
        Store::open(url).unwrap().writer(Policy::Full).await.unwrap();
        let client =
            FaultStore::new(Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap()), |operation, object| {
                match operation == Operation::Create && object.as_ref() == LogEntry::path_of(2) {
                    true => Fault::LostAnswer,
                    false => Fault::None,
                }
            });
        let store = local_with(folder.path(), Arc::new(client));
        let mut log = Log::load_part(&store).await.unwrap();
        let error = log.append(Id([8; 16]), |_| Ok(Event::Opened { leader: None })).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
        assert!(error.to_string().contains("connection reset"), "{error}");
    }
}
