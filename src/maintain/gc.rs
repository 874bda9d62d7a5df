//! Garbage collection: gives up snapshots that nothing needs, and deletes what has been without need for long enough.
//! Spec: `spec/log.md`, clause 7.

use std::collections::BTreeSet;
use std::time::Duration;

use super::mark::{History, Marks};
use crate::commit::{DEFAULT_AGE_FLOOR, Log, LogState, SnapshotRecord, Status, now_ms, refuse_features};
use crate::store::{Listed, concurrently};
use crate::wire::{Event, Id};
use crate::{Result, Store, boxed};

/// How to collect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcOptions {
    /// Whether to do it; otherwise it is only told.
    pub apply: bool,
    /// How long an object has to have been without need. No less than what writers of the store were told, see
    /// [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
    /// Whether to give up forgotten and superseded snapshots that no chain needs; otherwise only leftovers are deleted.
    pub collect: bool,
    /// Whether to delete directories that nothing names, too. The name of a directory may be used again at any time, so no
    /// writer, compaction or copy may run meanwhile.
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
    /// The size.
    pub bytes: u64,
}

/// What was collected, or would be.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GcReport {
    /// Whether it was done.
    pub applied: bool,
    /// Snapshots given up now: no chain may need them any more; their objects follow once they are old enough.
    pub collected: Vec<SnapshotRecord>,
    /// Bytes of their casks.
    pub collected_bytes: u64,
    /// Objects deleted.
    pub deleted: Vec<Deletable>,
    /// Objects that nothing needs, but not for long enough, or that are directories.
    pub waiting: Vec<Deletable>,
    /// Forgotten and superseded snapshots that chains of others need.
    pub held: Vec<SnapshotRecord>,
    /// Bytes of their casks.
    pub held_bytes: u64,
}

impl GcReport {
    /// Bytes of the objects deleted.
    pub fn freed_bytes(&self) -> u64 {
        self.deleted.iter().fold(0, |sum, object| sum.saturating_add(object.bytes))
    }

    /// Bytes of the objects that wait.
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().fold(0, |sum, object| sum.saturating_add(object.bytes))
    }
}

/// Snapshots that one entry gives up, at most: it stays well below the limit on entries.
const MAX_COLLECTED: usize = 10_000;
/// Requests to delete under way at once.
const CONCURRENT_DELETES: usize = 16;
/// Where objects lie that snapshots are made of, in the order of deletion: what names others goes last.
const FOLDERS: [&str; 3] = ["casks", "directories", "snapshots"];

impl Store {
    /// Collects garbage, in two phases. First, forgotten and superseded snapshots that no other needs are given up in the log.
    /// Second, objects are deleted that no state of the log has needed for the age floor, by the clock of the storage, and
    /// that are older than it themselves. Safe beside writers, readers and compaction.
    pub async fn gc(&self, options: &GcOptions) -> Result<GcReport> {
        let mut report = GcReport { applied: options.apply, ..GcReport::default() };
        let mut log = Log::load(self).await?;
        refuse_features(self.read_store_file().await?.may_ignore())?;
        refuse_features(&log.state().may_ignore)?;
        if options.collect {
            report.collected = unneeded(log.state()).0.into_iter().cloned().collect();
            if options.apply && !report.collected.is_empty() {
                report.collected = give_up(&mut log).await?;
            }
        }
        report.held = unneeded(log.state()).1.into_iter().cloned().collect();

        let now = if options.apply { self.clock_ms().await? } else { now_ms() };
        let floor_ms = u64::try_from(options.age_floor.as_millis()).unwrap_or(u64::MAX);
        let threshold = now.saturating_sub(floor_ms);
        let mut history = History::load(self, threshold).await?;
        let mut marks = Marks::default();
        marks.add(self, &history.needed(), &history.needed()).await?;
        let needed = marks.paths.clone();
        marks.add(self, &history.named, &history.needed()).await?;
        report.held_bytes = marks.bytes_of(&report.held);
        report.collected_bytes = marks.bytes_of(&report.collected);
        let unneeded: Vec<Listed> = self.list_all().await?.into_iter().filter(|listed| !needed.contains(&listed.path)).collect();
        let ripe = |listed: &Listed, marks: &Marks| {
            let kind = options.directories || !listed.path.starts_with("directories/");
            kind && listed.modified_ms <= threshold && !marks.paths.contains(&listed.path)
        };
        let (mut ripe_now, waiting): (Vec<Listed>, Vec<Listed>) = unneeded.into_iter().partition(|listed| ripe(listed, &marks));
        report.waiting = waiting.into_iter().map(Deletable::of).collect();
        if options.apply && !ripe_now.is_empty() {
            // Again, in this order: an object as old as these was committed half the floor before the list, or will not be.
            let again: BTreeSet<(String, u64)> =
                self.list_all().await?.into_iter().map(|listed| (listed.path, listed.modified_ms)).collect();
            history.refresh(self).await?;
            refuse_features(&history.state().may_ignore)?;
            marks.add(self, &history.named, &history.needed()).await?;
            ripe_now.retain(|listed| again.contains(&(listed.path.clone(), listed.modified_ms)) && ripe(listed, &marks));
            for folder in FOLDERS {
                let of_folder = ripe_now.iter().filter(|listed| listed.path.split('/').next() == Some(folder));
                let delete = |path: &str| {
                    let path = path.to_owned();
                    async move { self.delete(&path).await }
                };
                concurrently(CONCURRENT_DELETES, of_folder.map(|listed| delete(&listed.path))).await.map(|_: Vec<()>| ())?;
            }
        }
        report.deleted = ripe_now.into_iter().map(Deletable::of).collect();
        Ok(report)
    }

    #[boxed]
    async fn list_all(&self) -> Result<Vec<Listed>> {
        let mut all = Vec::new();
        for folder in FOLDERS {
            all.extend(self.list(folder).await?);
        }
        Ok(all)
    }
}

impl Deletable {
    fn of(listed: Listed) -> Self {
        Self { path: listed.path, bytes: listed.bytes }
    }
}

/// Forgotten and superseded snapshots: those that no live or pinned one needs, and the others.
fn unneeded(state: &LogState) -> (Vec<&SnapshotRecord>, Vec<&SnapshotRecord>) {
    let mut needed: BTreeSet<Id> = BTreeSet::new();
    for record in state.snapshots().iter().filter(|record| is_root(record)) {
        let mut next = Some(record.id);
        while let Some(id) = next.filter(|&id| needed.insert(id)) {
            next = state.by_id(id).and_then(|record| record.parent);
        }
    }
    let idle = state.snapshots().iter().filter(|record| !is_root(record) && record.status != Status::Collected);
    idle.partition(|record| !needed.contains(&record.id))
}

fn is_root(record: &SnapshotRecord) -> bool {
    record.status == Status::Live || (record.pinned && record.status != Status::Collected)
}

/// Commits what nothing needs; on another writer's commit it is looked up anew.
#[boxed]
async fn give_up(log: &mut Log) -> Result<Vec<SnapshotRecord>> {
    let writer = Id::random()?;
    let mut given_up: Vec<Id> = Vec::new();
    loop {
        let mut last = Vec::new();
        log.append(writer, |state| {
            last = unneeded(state).0.into_iter().take(MAX_COLLECTED).map(|record| record.id).collect();
            Ok(Event::Collecting { snapshots: last.clone() })
        })
        .await?;
        log.write_catalog_if_due().await;
        given_up.append(&mut last);
        if unneeded(log.state()).0.is_empty() {
            return Ok(given_up.into_iter().filter_map(|id| log.state().by_id(id).cloned()).collect());
        }
    }
}
