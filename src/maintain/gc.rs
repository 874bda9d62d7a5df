//! Garbage collection: gives up snapshots that no other needs, then deletes objects that have not been needed for a
//! while. Spec: `spec/log.md`, clause 7.
//!
//! Phase one commits `collecting` entries to the log. Phase two marks the objects that any state of the log has needed
//! since the age floor (`mark`), and deletes the other objects that are older than the age floor, by the clock of the
//! storage.
//!
//! Invariants: it is a dry run by default. An object is deleted only if two listings, with a refresh of the log between
//! them, agree that nothing needs it, and if it is still old right before its deletion. Objects that name others are
//! deleted after them.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::mark::{History, Marks};
use crate::commit::{
    Age, Contents, DEFAULT_AGE_FLOOR, Log, LogState, SnapshotRecord, is_root, load_complete_log, lost_end, newer_than_log, now_ms,
    read_store_file, refuse_features, unneeded,
};
use crate::store::{Listed, Work, concurrently, remove_staged_file, staged_files};
use crate::wire::{Event, Id, lasting_folders};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Options of garbage collection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcOptions {
    /// Whether to delete. Otherwise the report only says what would be deleted.
    pub apply: bool,
    /// Smallest time for which an object must not have been needed. Must be at least the age floor of the writers of
    /// the store: see [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
    /// Whether to give up forgotten and superseded snapshots that no chain needs. Otherwise only leftovers are deleted.
    pub collect: bool,
    /// Whether to delete directories that nothing names, too. A writer may use the name of a directory again at any
    /// time, so no writer, compaction or copy may run meanwhile.
    pub directories: bool,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self { apply: false, age_floor: DEFAULT_AGE_FLOOR, collect: true, directories: false }
    }
}

/// An object that nothing needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deletable {
    /// Path below the store's root.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// Result of garbage collection, or of a dry run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GcReport {
    /// Whether objects were deleted; `false` for a dry run.
    pub applied: bool,
    /// Snapshots given up by this run. New deltas cannot need them; their objects are deleted once they are old enough.
    pub collected: Vec<SnapshotRecord>,
    /// Size of the casks of those snapshots, in bytes.
    pub collected_bytes: u64,
    /// Deleted objects and, on local disk, files of interrupted writes.
    pub deleted: Vec<Deletable>,
    /// Objects that nothing needs, but that are too young to be deleted, or directories.
    pub waiting: Vec<Deletable>,
    /// Forgotten and superseded snapshots that chains of other snapshots need.
    pub held: Vec<SnapshotRecord>,
    /// Size of the casks of those snapshots, in bytes.
    pub held_bytes: u64,
    /// Snapshots whose parent is one of those. Compaction of them lets the held snapshots go.
    pub held_by: Vec<SnapshotRecord>,
}

impl GcReport {
    /// Size of the deleted objects, in bytes.
    pub fn freed_bytes(&self) -> u64 {
        self.deleted.iter().fold(0, |sum, object| sum.saturating_add(object.bytes))
    }

    /// Size of the waiting objects, in bytes.
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().fold(0, |sum, object| sum.saturating_add(object.bytes))
    }
}

/// Largest number of snapshots that one log entry gives up. The entry stays well below the limit on its size.
const MAX_COLLECTED: usize = 10_000;
/// Number of concurrent delete requests.
const CONCURRENT_DELETES: usize = 16;
/// Time after which the answer about an object's age is out of date. Longer than a request takes with all its retries.
const MAX_ANSWER_AGE: Duration = Duration::from_secs(600);
/// Folders of the objects of snapshots, of the messages of ranks and of scratch objects, in the order of deletion: objects that
/// name others go last.
const FOLDERS: [&str; 6] = ["casks", "directories", "snapshots", "receipts", "offers", "probe"];

/// Collects garbage in two phases. First, gives up forgotten and superseded snapshots that no other snapshot needs.
/// Second, deletes objects that are older than the age floor and that no state of the log has needed since, by the
/// clock of the storage. Safe beside writers, readers and compaction.
///
/// Deletes nothing if the log was not read as a whole: an entry is missing, log and catalogs disagree, or manifests are newer
/// than the log.
pub async fn gc(store: &Store, options: &GcOptions) -> Result<GcReport> {
    let (report, refused) = collect_once(store, options).await?;
    let Some(refused) = refused else { return Ok(report) };
    if report.deleted.is_empty() {
        return Err(refused);
    }
    // A full disk has room for the entry now.
    let (mut again, refused) = collect_once(store, options).await?;
    let mut deleted = report.deleted;
    deleted.append(&mut again.deleted);
    refused.map_or(Ok(GcReport { deleted, ..again }), Err)
}

/// Runs both phases. If the storage refuses the entry of the first one, runs the second one nevertheless, and returns the error,
/// too: a full disk must not keep what was given up before.
#[boxed]
async fn collect_once(store: &Store, options: &GcOptions) -> Result<(GcReport, Option<Error>)> {
    let mut report = GcReport { applied: options.apply, ..GcReport::default() };
    let mut refused = None;
    // Before the log, so that it names what was committed in between.
    let manifests = store.objects().list("snapshots").await?;
    let mut log = load_complete_log(store).await?;
    refuse_features(read_store_file(store).await?.may_ignore())?;
    refuse_features(&log.state().may_ignore)?;
    let newer = newer_than_log(store, log.state(), &manifests).await?;
    lost_end(&newer).map_or(Ok(()), Err)?;
    // The entry that names this snapshot may be lost, or still be written.
    let kept: BTreeSet<Id> = newer.iter().filter_map(|newer| Some(newer.manifest.parent.as_ref()?.snapshot)).collect();
    let staged = staged(store, options.age_floor, options.apply).await?;
    if options.collect {
        report.collected = unneeded(log.state(), &kept).0.into_iter().cloned().collect();
        if options.apply && !report.collected.is_empty() {
            report.collected = match give_up(&mut log, &kept).await {
                Err(error) if error.kind() == ErrorKind::Storage => {
                    tracing::warn!(%error, "snapshots cannot be given up now; deleting what was given up before");
                    refused = Some(error);
                    Vec::new()
                }
                given_up => given_up?,
            };
        }
    }
    report.held = unneeded(log.state(), &kept).1.into_iter().cloned().collect();
    report.held_by = needing(log.state(), &report.held);

    let now = if options.apply { storage_clock_ms(store).await? } else { now_ms() };
    let floor_ms = u64::try_from(options.age_floor.as_millis()).unwrap_or(u64::MAX);
    let threshold = now.saturating_sub(floor_ms);
    let mut history = History::load(store, threshold, log.state()).await?;
    let mut marks = Marks::default();
    marks.add(store, &history.needed(), &history.needed()).await?;
    let needed = marks.paths.clone();
    marks.add(store, &history.named, &history.needed()).await?;
    newer.iter().for_each(|newer| marks.add_unnamed(newer));
    report.held_bytes = marks.bytes_of(&report.held);
    report.collected_bytes = marks.bytes_of(&report.collected);
    // The session that leads may go on.
    let lasting = log.state().leadership.leading().map(|leading| lasting_folders(leading.leader.session)).into_iter().flatten();
    let lasting: Vec<String> = lasting.collect();
    let is_lasting = |path: &str| lasting.iter().any(|folder| path.starts_with(folder));
    let is_unneeded = |listed: &Listed| !needed.contains(&listed.path) && !is_lasting(&listed.path);
    let unneeded: Vec<Listed> = list_all(store).await?.into_iter().filter(is_unneeded).collect();
    let ripe = |listed: &Listed, marks: &Marks| {
        let kind = options.directories || !listed.path.starts_with("directories/");
        kind && listed.modified_ms <= threshold && !marks.paths.contains(&listed.path)
    };
    let (mut ripe_now, waiting): (Vec<Listed>, Vec<Listed>) = unneeded.into_iter().partition(|listed| ripe(listed, &marks));
    if history.state().sequence == 0 && !ripe_now.is_empty() {
        // Casks of a session or of a copy in parts may come before the log. Or the log is lost.
        Contents::of(store, &["casks"]).await?.lost_log().map_or(Ok(()), Err)?;
    }
    report.waiting = waiting.into_iter().map(Deletable::of).collect();
    if options.apply && !ripe_now.is_empty() {
        // List again, then read the log again, in this order. An object of this age was committed half the age
        // floor before the listing, or its commit will be refused.
        let again: BTreeSet<(String, u64)> = list_all(store).await?.into_iter().map(|listed| (listed.path, listed.modified_ms)).collect();
        history.refresh(store).await?;
        // The log that was read must still be that of the store.
        log.refresh().await?;
        refuse_features(&history.state().may_ignore)?;
        marks.add(store, &history.named, &history.needed()).await?;
        ripe_now.retain(|listed| again.contains(&(listed.path.clone(), listed.modified_ms)) && ripe(listed, &marks));
        ripe_now = delete(store, ripe_now, threshold).await?;
    }
    report.deleted = ripe_now.into_iter().chain(staged).map(Deletable::of).collect();
    Ok((report, refused))
}

/// Time by the clock of the storage. A disk without room for a scratch object has at least come to the time of its newest object.
async fn storage_clock_ms(store: &Store) -> Result<u64> {
    let error = match store.objects().clock_ms().await {
        Err(e) if e.kind() == ErrorKind::Storage && store.objects().local_folder().is_some() => e,
        found => return found,
    };
    tracing::warn!(%error, "the clock of the storage cannot be read; taking the time of the newest object instead");
    let mut listed = list_all(store).await?;
    listed.extend(store.objects().list("log").await?);
    // A file may have a time to come.
    listed.into_iter().map(|listed| listed.modified_ms.min(now_ms())).max().ok_or(error)
}

/// Finds the files of interrupted writes on local disk that are at least this old, and deletes them if told so. They are no
/// objects, so nothing can need them.
#[boxed]
pub(super) async fn staged(store: &Store, age_floor: Duration, apply: bool) -> Result<Vec<Listed>> {
    let floor_ms = u64::try_from(age_floor.as_millis()).unwrap_or(u64::MAX);
    let mut found = staged_files(store.objects()).await?;
    found.retain(|listed| now_ms().saturating_sub(listed.modified_ms) >= floor_ms);
    for listed in found.iter().filter(|_| apply) {
        remove_staged_file(store.objects(), &listed.path).await?;
    }
    Ok(found)
}

/// Deletes objects, folder by folder. Returns the objects that are gone. The others were written again since the listing.
#[boxed]
async fn delete(store: &Store, objects: Vec<Listed>, threshold: u64) -> Result<Vec<Listed>> {
    let work = Mutex::new(Work::plan(store, objects.len() as u64));
    let delete = |listed: Listed| {
        let work = &work;
        async move {
            let is_gone = delete_if_old(store, &listed.path, threshold).await?;
            work.lock().unwrap_or_else(PoisonError::into_inner).add(1);
            Ok(is_gone.then_some(listed))
        }
    };
    let mut gone = Vec::new();
    for folder in FOLDERS {
        let of_folder = objects.iter().filter(|listed| listed.path.split('/').next() == Some(folder));
        gone.extend(concurrently(CONCURRENT_DELETES, of_folder.cloned().map(delete)).await?.into_iter().flatten());
    }
    Ok(gone)
}

/// Deletes an object, unless it was modified after `threshold`. Returns whether it is gone.
///
/// Copies and reductions give a cask the same name each time. While this process was suspended, another collection may
/// have deleted the cask, and a copy may have written it again.
async fn delete_if_old(store: &Store, path: &str, threshold: u64) -> Result<bool> {
    loop {
        let asked = Age::start();
        match store.objects().head_if_present(path).await? {
            Some(found) if found.modified_ms > threshold => return Ok(false),
            // An older answer says nothing: the process may have been suspended before it read the answer.
            Some(_) if asked.elapsed() > MAX_ANSWER_AGE => {}
            Some(_) => return store.objects().delete(path).await.map(|()| true),
            None => return Ok(true),
        }
    }
}

#[boxed]
async fn list_all(store: &Store) -> Result<Vec<Listed>> {
    let mut all = Vec::new();
    for folder in FOLDERS {
        all.extend(store.objects().list(folder).await?);
    }
    Ok(all)
}

impl Deletable {
    pub(super) fn of(listed: Listed) -> Self {
        Self { path: listed.path, bytes: listed.bytes }
    }
}

/// Snapshots that are no leftovers themselves, and whose parent is one of these.
fn needing(state: &LogState, held: &[SnapshotRecord]) -> Vec<SnapshotRecord> {
    let held: BTreeSet<Id> = held.iter().map(|record| record.id).collect();
    let needs = |record: &&SnapshotRecord| is_root(record) && record.parent.is_some_and(|parent| held.contains(&parent));
    state.snapshots().iter().filter(needs).cloned().collect()
}

/// Commits which snapshots are given up. After a commit of another writer, the snapshots are determined again.
#[boxed]
async fn give_up(log: &mut Log, kept: &BTreeSet<Id>) -> Result<Vec<SnapshotRecord>> {
    let writer = Id::random()?;
    let mut given_up: Vec<Id> = Vec::new();
    loop {
        let mut last = Vec::new();
        log.append(writer, |state| {
            last = unneeded(state, kept).0.into_iter().take(MAX_COLLECTED).map(|record| record.id).collect();
            Ok(Event::Collecting { snapshots: last.clone() })
        })
        .await?;
        log.write_catalog_if_due().await;
        given_up.append(&mut last);
        if unneeded(log.state(), kept).0.is_empty() {
            return Ok(given_up.into_iter().filter_map(|id| log.state().by_id(id).cloned()).collect());
        }
    }
}
