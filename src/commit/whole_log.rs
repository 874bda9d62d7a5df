//! Checks that a log was read as a whole. Spec: `spec/log.md`, clauses 3.1, 4.8 and 7.3.
//!
//! A reader stops at the first absent entry. So a log of which entries were lost looks like a shorter one, and a lost log like
//! that of an empty store. Whoever takes the rest for all deletes or overwrites what the lost entries name.

use std::collections::BTreeSet;

use super::entries::{PUT_BACK, STALE_WAITS, gap};
use super::{Catalog, Log, LogState, SnapshotRecord, Standing, read_store_file};
use crate::error::ResultExt;
use crate::store::Store;
use crate::wire::{Id, LogEntry, STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, Result, boxed};

/// Reads the log of a store. Fails if the log or `store.json` is gone, while other objects show that there was one: such a store
/// is not empty.
#[boxed]
pub(crate) async fn load_log(store: &Store) -> Result<Log> {
    let mut log = unless_lost(store, Log::load_part(store).await).await?;
    refuse_lost_log(&log).await?;
    if log.state.snapshots().is_empty() {
        // Entries after a gap may name snapshots: this store may not pass for one in which nothing was saved.
        log.read_to_end().await?;
    }
    Ok(log)
}

/// The log of a store, if it says something else by now of a snapshot, or of its chain, than it did `before`: a job has freed
/// objects of it since, or a compaction has replaced them (log 7.6). Then objects that are gone are no damage.
#[boxed]
pub(crate) async fn changed_log(store: &Store, before: &LogState, snapshot: Id) -> Result<Option<Log>> {
    let log = load_log(store).await?;
    let links = std::iter::successors(before.by_id(snapshot), |link| before.by_id(link.parent?));
    let is_same = |link: &SnapshotRecord| log.state().by_id(link.id).is_some_and(|now| now.facts() == link.facts());
    let limit = usize::try_from(store.limits().max_chain_depth).unwrap_or(usize::MAX);
    let changed = !links.take(limit.saturating_add(1)).all(is_same);
    Ok(changed.then_some(log))
}

/// Reads `store.json`. Fails with `NotFound` if there is no store, and with `Corrupt` if only this file is gone.
#[boxed]
pub(crate) async fn store_file_of(store: &Store) -> Result<StoreFile> {
    unless_lost(store, read_store_file(store).await).await
}

/// Replaces the answer that there is no store, if only `store.json` is gone.
async fn unless_lost<T>(store: &Store, found: Result<T>) -> Result<T> {
    match found {
        Err(e) if e.kind() == ErrorKind::NotFound => Err(without_store_file(store).await?.unwrap_or(e)),
        found => found,
    }
}

/// Reads the log for a decision that something is not needed. Fails unless every entry is there, and the catalogs belong to this
/// log.
#[boxed]
pub(crate) async fn load_complete_log(store: &Store) -> Result<Log> {
    let mut log = load_log(store).await?;
    log.read_to_end().await?;
    check_catalogs(&mut log).await?;
    log.refuse_gap().await?;
    Ok(log)
}

/// Fails if a log is empty and other objects show that it was not.
#[boxed]
pub(crate) async fn refuse_lost_log(log: &Log) -> Result<()> {
    if log.state.sequence > 0 {
        return Ok(());
    }
    // A copy in parts and a session may write casks before the first entry. These objects follow it.
    let Some(lost) = Contents::of(&log.store, &["log", "catalog", "directories", "snapshots"]).await?.lost_log() else { return Ok(()) };
    // Another process may have begun the log since it was read.
    let has_begun = log.store.objects().head_if_present(&LogEntry::path_of(1)).await?.is_some();
    if has_begun { Ok(()) } else { Err(lost) }
}

impl Log {
    /// Fails if the log is gone, but catalogs or snapshots that it named are there: it was lost, and the store was not replaced.
    ///
    /// Objects that the log did not name are no sign of it: a save that is under way leaves them where a store was deleted.
    #[boxed]
    pub(crate) async fn refuse_lost_below_snapshots(&self) -> Result<()> {
        let objects = self.store.objects();
        let known: BTreeSet<String> = self.state.snapshots().iter().map(SnapshotRecord::manifest_path).collect();
        let mut waits = STALE_WAITS.into_iter();
        loop {
            if objects.head_if_present(&LogEntry::path_of(1)).await?.is_some() {
                return Ok(());
            }
            let (catalogs, snapshots) = tokio::join!(objects.list("catalog"), objects.list("snapshots"));
            let snapshots = snapshots?.into_iter().filter(|object| known.contains(&object.path)).count();
            let left = Contents(vec![("catalog", catalogs?.len()), ("snapshots", snapshots)]);
            let Some(lost) = left.without_empty().lost_log() else { return Ok(()) };
            // A deletion may be under way, and views of network file systems may lag.
            let Some(wait) = waits.next() else {
                let message = format!("{}. If the store was deleted on purpose, delete the rest of it, too", lost.message());
                return Err(Error::corrupt(message).object(LogEntry::path_of(1)).clause("log 5.7"));
            };
            tokio::time::sleep(wait).await;
        }
    }
}

/// Fails if a catalog follows an entry that the log does not have, or if the catalog by which the log was entered is of another
/// log.
#[boxed]
async fn check_catalogs(log: &mut Log) -> Result<()> {
    for catalog in Catalog::list(&log.store).await? {
        let Some(sequence) = Catalog::sequence_of(&catalog).filter(|&sequence| sequence > log.state.sequence) else { continue };
        // Another writer may have written it since the log was read.
        if let Standing::Stale(stale) = log.catch_up().await? {
            return Err(stale.error);
        }
        if sequence > log.state.sequence {
            let last = log.state.sequence;
            let message = format!(
                "belongs to entry {sequence}, but the log ends with entry {last}: entries were lost, or the log is an older copy. {PUT_BACK}"
            );
            return Err(Error::corrupt(message).object(catalog).clause("log 6.4"));
        }
    }
    let Some((sequence, head)) = log.entered else { return Ok(()) };
    let path = LogEntry::path_of(sequence);
    let bytes = log.store.objects().get_if_present(&path, log.store.limits().max_entry_bytes).await?;
    let bytes = bytes.ok_or_else(|| gap(sequence, "a catalog of that entry", "log 6.4"))?;
    let (_, digest) = LogEntry::decode(&bytes, sequence, log.store.limits()).in_object(path.as_str())?;
    match digest == head {
        true => Ok(()),
        false => {
            let message = format!("is not the entry that the catalog of entry {sequence} names: log and catalog disagree. {PUT_BACK}");
            Err(Error::corrupt(message).object(path).clause("log 6.4"))
        }
    }
}

/// Fails if the storage has entries or catalogs after the last entry that was read, or other objects although none was read.
#[boxed]
pub(crate) async fn check_log_ends(store: &Store, state: &LogState) -> Result<()> {
    let mut log = Log { state: state.clone(), ..Log::load_part(store).await? };
    refuse_lost_log(&log).await?;
    log.read_to_end().await?;
    log.entered = None;
    check_catalogs(&mut log).await
}

/// The error for a place with objects of a store, but without `store.json`.
pub(crate) async fn without_store_file(store: &Store) -> Result<Option<Error>> {
    let found = Contents::of(store, &["log", "snapshots"]).await?;
    // Another process may have created the store since.
    if found.0.is_empty() || store.objects().head_if_present(STORE_FILE).await?.is_some() {
        return Ok(None);
    }
    let message =
        format!("is missing, although {found} are there: put it back from a copy of the store. To give these up, save to a new place");
    Ok(Some(Error::corrupt(message).object(STORE_FILE).clause("log 2.1")))
}

/// Number of objects of some folders, without the empty ones.
pub(crate) struct Contents(Vec<(&'static str, usize)>);

impl Contents {
    pub(crate) async fn of(store: &Store, folders: &[&'static str]) -> Result<Self> {
        let count = |folder: &'static str| async move { Ok((folder, store.objects().list(folder).await?.len())) };
        let counts = crate::store::concurrently(folders.len(), folders.iter().copied().map(count)).await?;
        Ok(Self(counts).without_empty())
    }

    fn without_empty(mut self) -> Self {
        self.0.retain(|(_, count)| *count > 0);
        self
    }

    /// The error for a log without its first entry, if there are objects.
    pub(crate) fn lost_log(self) -> Option<Error> {
        (!self.0.is_empty()).then(|| gap(1, &self.to_string(), "log 4.8"))
    }
}

impl std::fmt::Display for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, (folder, count)) in self.0.iter().enumerate() {
            let objects = if *count == 1 { "object" } else { "objects" };
            write!(f, "{}{count} {objects} in {folder}/", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
