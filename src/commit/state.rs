//! State of a store, built from the log entry by entry. No I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use serde_json::{Map, Value};

use super::Leadership;
use crate::version::check_feature_names;
use crate::wire::{Digest, Event, Id, LogEntry, Manifest, SnapshotKind};
use crate::{Error, Result};

/// Status of a snapshot in its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SnapshotStatus {
    /// Can be restored by its step, and is listed.
    Live,
    /// Replaced by a newer snapshot of the same step; kept while a chain needs it.
    Superseded,
    /// No longer wanted; kept while a chain needs it.
    Forgotten,
    /// Abandoned: no chain may need it, and garbage collection deletes its objects.
    Collected,
}

impl SnapshotStatus {
    /// Returns the name used in JSON and in the catalog.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Superseded => "superseded",
            Self::Forgotten => "forgotten",
            Self::Collected => "collected",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::Live, Self::Superseded, Self::Forgotten, Self::Collected].into_iter().find(|status| status.name() == name)
    }
}

/// A committed snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotRecord {
    /// Number of the log entry that committed it.
    pub sequence: u64,
    /// Number of the log entry that named its manifest. Equals `sequence` unless the snapshot was compacted.
    pub revision: u64,
    /// Unique id.
    pub id: Id,
    /// Training step.
    pub step: u64,
    /// Snapshot that a delta needs; `None` for a base.
    pub parent: Option<Id>,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Status in the store.
    pub status: SnapshotStatus,
    /// Whether it is protected from being forgotten.
    pub pinned: bool,
    /// Time of the commit in milliseconds since 1970, by the writer's clock.
    pub time_ms: u64,
    /// Remaining roles, ascending, if the snapshot was reduced to some of its roles.
    pub roles: Option<Vec<String>>,
    /// Size of the manifest in bytes, if the log entry holds manifest and casks; `None` if they are objects.
    pub inline: Option<u64>,
    pub(crate) summary: Option<Summary>,
}

impl SnapshotRecord {
    /// Returns whether the snapshot is a base or a delta.
    pub fn kind(&self) -> SnapshotKind {
        if self.parent.is_some() { SnapshotKind::Delta } else { SnapshotKind::Base }
    }

    /// Returns the path below the store's root of the object that holds the manifest.
    pub fn manifest_path(&self) -> String {
        if self.inline.is_some() {
            return LogEntry::path_of(self.sequence);
        }
        match self.revision == self.sequence {
            true => Manifest::path_of(self.step, self.id),
            false => Manifest::path_of_compacted(self.step, self.id, self.manifest),
        }
    }

    /// Returns what the log says of the snapshot. The summary comes from the manifest.
    pub(crate) fn facts(&self) -> Self {
        Self { summary: None, ..self.clone() }
    }

    /// Returns the location of the manifest.
    pub(crate) fn manifest_place(&self) -> ManifestPlace {
        ManifestPlace { path: self.manifest_path(), digest: self.manifest, inline_in: self.inline.map(|_| self.sequence) }
    }
}

/// Location of a manifest: an object of its own, or the log entry that holds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ManifestPlace {
    /// Path of the object that holds it.
    pub path: String,
    /// Digest of the manifest.
    pub digest: Digest,
    /// Number of the log entry, if the manifest lies in one.
    pub inline_in: Option<u64>,
}

/// Summary of a snapshot for listings, copied from its manifest.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Summary {
    pub tensor_bytes: u64,
    pub stored_bytes: u64,
    pub user: Map<String, Value>,
    /// Digest of the directory. Unknown if the summary came from a catalog.
    pub directory: Option<Digest>,
}

impl Summary {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        Self {
            tensor_bytes: manifest.tensor_bytes,
            stored_bytes: manifest.stored_bytes(),
            user: manifest.user.clone(),
            directory: Some(manifest.directory),
        }
    }
}

/// Writer that committed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastWriter {
    pub writer: Id,
    pub sequence: u64,
}

/// Number of entries with a snapshot whose bytes are kept: those from one catalog to the next.
const MAX_INLINE_ENTRIES: usize = 64;

/// State of a store after an entry of its log.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogState {
    pub sequence: u64,
    pub head: Option<Digest>,
    pub last_writer: Option<LastWriter>,
    /// Whether that writer gave a job in that entry. Unknown, and `false`, if the state came from a catalog.
    pub last_is_job: bool,
    /// Leader of the many hosts that write to the store, if they do.
    pub leadership: Leadership,
    /// Ids of the writers of the `opened` and `added` entries read so far. A catalog holds only the last.
    pub writers: BTreeSet<Id>,
    pub must_understand: Vec<String>,
    pub may_ignore: Vec<String>,
    /// Likely directory of the newest snapshot, as a hint for reading ahead.
    pub directory: Option<Digest>,
    /// Newest entries that hold a snapshot, as they were read or written.
    inline_entries: BTreeMap<u64, Bytes>,
    snapshots: Vec<SnapshotRecord>,
    by_id: HashMap<Id, usize>,
    /// Newest snapshot that was ever live, by step.
    by_step: HashMap<u64, usize>,
}

/// Whether an entry may reduce a snapshot to these roles: at least one, strictly ascending.
fn is_valid_reduction(roles: &[String]) -> bool {
    !roles.is_empty() && roles.is_sorted_by(|a, b| a < b)
}

impl LogState {
    /// Checks that `entry` may follow this state (log 3): readers refuse the log otherwise. Reads no object.
    pub(crate) fn check(&self, entry: &LogEntry) -> Result<()> {
        let bad = |message: String, clause| Err(Error::corrupt(message).object(LogEntry::path_of(entry.sequence)).clause(clause));
        if Some(entry.sequence) != self.sequence.checked_add(1) {
            return bad(format!("entry {} follows entry {}", entry.sequence, self.sequence), "log 3.1");
        }
        if entry.previous != self.head {
            return bad("does not continue the entry before it: one of the two was replaced".into(), "log 3.2");
        }
        let unknown = |ids: &[Id]| ids.iter().copied().find(|id| !self.by_id.contains_key(id));
        match &entry.event {
            Event::Opened { .. } => Ok(()),
            Event::Added { snapshot, parent, roles, .. } => match (parent, roles) {
                _ if self.by_id.contains_key(snapshot) => bad(format!("snapshot {snapshot} was added twice"), "log 3.4"),
                (Some(parent), _) if !self.by_id.contains_key(parent) => {
                    bad(format!("adds a delta on {parent}, which no earlier entry added"), "log 3.4")
                }
                (_, Some(roles)) if !is_valid_reduction(roles) => {
                    bad(format!("adds {snapshot} with an empty or unsorted list of roles"), "log 3.6")
                }
                _ => Ok(()),
            },
            Event::Forgotten { snapshots } => match unknown(snapshots) {
                Some(id) => bad(format!("forgets {id}, which no earlier entry added"), "log 3.4"),
                None => Ok(()),
            },
            Event::Pinned { snapshot, .. } => match unknown(&[*snapshot]) {
                Some(id) => bad(format!("pins {id}, which no earlier entry added"), "log 3.4"),
                None => Ok(()),
            },
            Event::Compacted { snapshot, parent, roles, .. } => {
                let Some(record) = self.by_id(*snapshot) else {
                    return bad(format!("compacts {snapshot}, which no earlier entry added"), "log 3.4");
                };
                if parent.is_some() && *parent != record.parent {
                    return bad(format!("gives {snapshot} a parent that it did not have"), "log 3.5");
                }
                let had = |role: &String| record.roles.as_ref().is_none_or(|had| had.contains(role));
                match roles {
                    Some(roles) if !is_valid_reduction(roles) || !roles.iter().all(had) => {
                        bad(format!("gives {snapshot} roles that do not ascend, or that it did not have"), "log 3.6")
                    }
                    _ => Ok(()),
                }
            }
            Event::Collecting { snapshots } => match unknown(snapshots) {
                Some(id) => bad(format!("collects {id}, which no earlier entry added"), "log 3.4"),
                None => Ok(()),
            },
            Event::Upgraded { must_understand, .. } => check_feature_names(must_understand),
        }
    }

    /// Updates the state by `entry`, whose digest is `digest`. An entry that may not follow changes nothing.
    pub(crate) fn apply(&mut self, entry: &LogEntry, digest: Digest) -> Result<()> {
        self.check(entry)?;
        match &entry.event {
            Event::Opened { leader } => self.leadership.on_opened(entry.writer, entry.sequence, *leader),
            Event::Added { snapshot, step, parent, manifest, inline, roles } => {
                // A pin protects the step, so it moves to the snapshot that replaces the step.
                let replaced = self.at_step(*step).filter(|older| older.pinned).map(|older| older.id);
                if let Some(older) = replaced.and_then(|id| self.record_mut(id)) {
                    older.pinned = false;
                }
                self.insert(SnapshotRecord {
                    sequence: entry.sequence,
                    revision: entry.sequence,
                    id: *snapshot,
                    step: *step,
                    parent: *parent,
                    manifest: *manifest,
                    status: SnapshotStatus::Live,
                    pinned: replaced.is_some(),
                    time_ms: entry.time_ms,
                    roles: roles.clone(),
                    inline: *inline,
                    summary: None,
                })?;
                self.leadership.on_added(entry.writer, entry.sequence, *step);
            }
            Event::Forgotten { snapshots } => {
                for id in snapshots {
                    if let Some(record) = self.record_mut(*id).filter(|record| record.status != SnapshotStatus::Collected) {
                        record.status = SnapshotStatus::Forgotten;
                    }
                }
            }
            Event::Pinned { snapshot, pinned } => {
                if let Some(record) = self.record_mut(*snapshot) {
                    record.pinned = *pinned;
                }
            }
            Event::Compacted { snapshot, parent, manifest, roles } => {
                if let Some(record) = self.record_mut(*snapshot) {
                    if roles.is_some() {
                        record.roles.clone_from(roles);
                    }
                    (record.parent, record.manifest, record.revision) = (*parent, *manifest, entry.sequence);
                    (record.inline, record.summary) = (None, None);
                }
            }
            Event::Collecting { snapshots } => {
                for id in snapshots {
                    if let Some(record) = self.record_mut(*id) {
                        record.status = SnapshotStatus::Collected;
                    }
                }
            }
            Event::Upgraded { must_understand, may_ignore } => {
                self.must_understand.extend(must_understand.iter().cloned());
                self.may_ignore.extend(may_ignore.iter().cloned());
            }
        }
        self.may_ignore.extend(entry.may_ignore().iter().cloned());
        if matches!(entry.event, Event::Opened { .. } | Event::Added { .. }) {
            self.last_writer = Some(LastWriter { writer: entry.writer, sequence: entry.sequence });
            self.last_is_job = entry.job.is_some();
            self.writers.insert(entry.writer);
        }
        self.sequence = entry.sequence;
        self.head = Some(digest);
        Ok(())
    }

    fn record_mut(&mut self, id: Id) -> Option<&mut SnapshotRecord> {
        self.by_id.get(&id).and_then(|&at| self.snapshots.get_mut(at))
    }

    /// Keeps the bytes of an entry that holds a snapshot, so that opening the snapshot needs no request. Drops the oldest
    /// such entry beyond a limit.
    pub(crate) fn keep_entry(&mut self, entry: &LogEntry, bytes: Bytes) {
        if matches!(entry.event, Event::Added { inline: Some(_), .. }) {
            self.inline_entries.insert(entry.sequence, bytes);
            if self.inline_entries.len() > MAX_INLINE_ENTRIES {
                self.inline_entries.pop_first();
            }
        }
    }

    /// Returns the bytes of an entry that holds a snapshot, if they were kept.
    pub(crate) fn inline_entry(&self, sequence: u64) -> Option<&Bytes> {
        self.inline_entries.get(&sequence)
    }

    /// Adds a record. An older live record of the same step becomes superseded.
    pub(crate) fn insert(&mut self, record: SnapshotRecord) -> Result<()> {
        if self.by_id.contains_key(&record.id) {
            return Err(Error::corrupt(format!("snapshot {} was added twice", record.id)).clause("log 3.4"));
        }
        if record.status == SnapshotStatus::Live
            && let Some(older) = self.by_step.insert(record.step, self.snapshots.len())
            && let Some(older) = self.snapshots.get_mut(older)
            && older.status == SnapshotStatus::Live
        {
            older.status = SnapshotStatus::Superseded;
        }
        self.by_id.insert(record.id, self.snapshots.len());
        self.snapshots.push(record);
        Ok(())
    }

    /// Whether a job has become the last writer since `seen` was.
    pub(crate) fn has_new_job(&self, seen: Option<LastWriter>) -> bool {
        self.last_writer != seen && self.last_is_job
    }

    /// Returns the number of the next entry.
    pub(crate) fn next_sequence(&self) -> Result<u64> {
        self.sequence
            .checked_add(1)
            .ok_or_else(|| Error::corrupt("the log is full: its newest entry has the highest number").clause("log 3.1"))
    }

    /// Returns all snapshots, ordered by commit.
    pub(crate) fn snapshots(&self) -> &[SnapshotRecord] {
        &self.snapshots
    }

    pub(crate) fn snapshot_mut(&mut self, at: usize) -> Option<&mut SnapshotRecord> {
        self.snapshots.get_mut(at)
    }

    /// Returns live snapshots, ordered by commit.
    pub(crate) fn live(&self) -> impl DoubleEndedIterator<Item = &SnapshotRecord> {
        self.snapshots.iter().filter(|record| record.status == SnapshotStatus::Live)
    }

    /// Returns live snapshots that still have all their roles, ordered by commit.
    pub(crate) fn whole(&self) -> impl DoubleEndedIterator<Item = &SnapshotRecord> {
        self.live().filter(|record| record.roles.is_none())
    }

    /// Returns the newest live snapshot, by commit, that still has all its roles.
    pub(crate) fn latest(&self) -> Option<&SnapshotRecord> {
        self.whole().next_back()
    }

    pub(crate) fn at_step(&self, step: u64) -> Option<&SnapshotRecord> {
        let record = self.snapshots.get(*self.by_step.get(&step)?)?;
        (record.status == SnapshotStatus::Live).then_some(record)
    }

    pub(crate) fn by_id(&self, id: Id) -> Option<&SnapshotRecord> {
        self.by_id.get(&id).and_then(|&at| self.snapshots.get(at))
    }

    /// Returns the step of the snapshot that was committed last.
    pub(crate) fn newest_step(&self) -> Option<u64> {
        self.snapshots.last().map(|record| record.step)
    }
}
