//! What the log says, entry by entry. No I/O.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value};

use crate::version::check_feature_names;
use crate::wire::{Digest, Event, Id, LogEntry, Manifest, SnapshotKind};
use crate::{Error, Result};

/// What a snapshot is to its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// Restored by its step, and listed.
    Live,
    /// A newer snapshot of the same step counts; kept while a chain needs it.
    Superseded,
    /// Not wanted any more; kept while a chain needs it.
    Forgotten,
    /// Given up: no chain may need it, and its objects are deleted in time.
    Collected,
}

impl Status {
    /// The name in JSON and the catalog.
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
    /// Number of the log entry that named its manifest: `sequence`, unless it was compacted.
    pub revision: u64,
    /// The id.
    pub id: Id,
    /// The training step.
    pub step: u64,
    /// The snapshot that it needs, if it is a delta.
    pub parent: Option<Id>,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// What it is to the store.
    pub status: Status,
    /// Whether it is protected from being forgotten.
    pub pinned: bool,
    /// When it was committed, in milliseconds since 1970, by the writer's clock.
    pub time_ms: u64,
    /// The roles that it still has, ascending, if it was reduced to some of those that it was saved with.
    pub roles: Option<Vec<String>>,
    pub(crate) summary: Option<Summary>,
}

impl SnapshotRecord {
    /// Whether it stands alone.
    pub fn kind(&self) -> SnapshotKind {
        if self.parent.is_some() { SnapshotKind::Delta } else { SnapshotKind::Base }
    }

    /// Path of its manifest below the store's root.
    pub fn manifest_path(&self) -> String {
        match self.revision == self.sequence {
            true => Manifest::path_of(self.step, self.id),
            false => Manifest::path_of_compacted(self.step, self.id, self.manifest),
        }
    }
}

/// What listings tell of a snapshot: a copy of facts of its manifest.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Summary {
    pub tensor_bytes: u64,
    pub stored_bytes: u64,
    pub user: Map<String, Value>,
    /// Unknown where a catalog told the rest.
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

/// The writer that committed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastWriter {
    pub writer: Id,
    pub sequence: u64,
}

/// The state of a store after an entry of its log.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogState {
    pub sequence: u64,
    pub head: Option<Digest>,
    pub last_writer: Option<LastWriter>,
    /// Ids of the writers of `opened` and `added` entries, as far as these were read: a catalog tells only the last.
    pub writers: BTreeSet<Id>,
    pub must_understand: Vec<String>,
    pub may_ignore: Vec<String>,
    /// A directory that the newest snapshot probably has: a hint for reading ahead.
    pub directory: Option<Digest>,
    snapshots: Vec<SnapshotRecord>,
    by_id: HashMap<Id, usize>,
    /// The newest snapshot of a step that was ever live.
    by_step: HashMap<u64, usize>,
}

impl LogState {
    /// The state after `entry`, whose digest is `digest`.
    pub(crate) fn apply(&mut self, entry: &LogEntry, digest: Digest) -> Result<()> {
        let bad = |message: String, clause| Err(Error::corrupt(message).object(LogEntry::path_of(entry.sequence)).clause(clause));
        if Some(entry.sequence) != self.sequence.checked_add(1) {
            return bad(format!("entry {} follows entry {}", entry.sequence, self.sequence), "log 3.1");
        }
        if entry.previous != self.head {
            return bad("does not continue the entry before it: one of the two was replaced".into(), "log 3.2");
        }
        match &entry.event {
            Event::Opened {} => {}
            Event::Added { snapshot, step, parent, manifest } => {
                if let Some(parent) = parent
                    && !self.by_id.contains_key(parent)
                {
                    return bad(format!("adds a delta on {parent}, which no earlier entry added"), "log 3.4");
                }
                self.insert(SnapshotRecord {
                    sequence: entry.sequence,
                    revision: entry.sequence,
                    id: *snapshot,
                    step: *step,
                    parent: *parent,
                    manifest: *manifest,
                    status: Status::Live,
                    pinned: false,
                    time_ms: entry.time_ms,
                    roles: None,
                    summary: None,
                })?;
            }
            Event::Forgotten { snapshots } => {
                for id in snapshots {
                    match self.by_id.get(id).and_then(|&at| self.snapshots.get_mut(at)) {
                        Some(record) if record.status == Status::Collected => {}
                        Some(record) => record.status = Status::Forgotten,
                        None => return bad(format!("forgets {id}, which no earlier entry added"), "log 3.4"),
                    }
                }
            }
            Event::Pinned { snapshot, pinned } => match self.by_id.get(snapshot).and_then(|&at| self.snapshots.get_mut(at)) {
                Some(record) => record.pinned = *pinned,
                None => return bad(format!("pins {snapshot}, which no earlier entry added"), "log 3.4"),
            },
            Event::Compacted { snapshot, parent, manifest, roles } => {
                let Some(record) = self.by_id.get(snapshot).and_then(|&at| self.snapshots.get_mut(at)) else {
                    return bad(format!("compacts {snapshot}, which no earlier entry added"), "log 3.4");
                };
                if parent.is_some() && *parent != record.parent {
                    return bad(format!("gives {snapshot} a parent that it did not have"), "log 3.5");
                }
                if let Some(roles) = roles {
                    let had = |role: &String| record.roles.as_ref().is_none_or(|had| had.contains(role));
                    if roles.is_empty() || !roles.is_sorted_by(|a, b| a < b) || !roles.iter().all(had) {
                        return bad(format!("gives {snapshot} roles that do not ascend, or that it did not have"), "log 3.6");
                    }
                    record.roles = Some(roles.clone());
                }
                (record.parent, record.manifest, record.revision) = (*parent, *manifest, entry.sequence);
                record.summary = None;
            }
            Event::Collecting { snapshots } => {
                for id in snapshots {
                    match self.by_id.get(id).and_then(|&at| self.snapshots.get_mut(at)) {
                        Some(record) => record.status = Status::Collected,
                        None => return bad(format!("collects {id}, which no earlier entry added"), "log 3.4"),
                    }
                }
            }
            Event::Upgraded { must_understand, may_ignore } => {
                check_feature_names(must_understand)?;
                self.must_understand.extend(must_understand.iter().cloned());
                self.may_ignore.extend(may_ignore.iter().cloned());
            }
        }
        self.may_ignore.extend(entry.may_ignore().iter().cloned());
        if matches!(entry.event, Event::Opened {} | Event::Added { .. }) {
            self.last_writer = Some(LastWriter { writer: entry.writer, sequence: entry.sequence });
            self.writers.insert(entry.writer);
        }
        self.sequence = entry.sequence;
        self.head = Some(digest);
        Ok(())
    }

    /// Adds a record; an older live one of the same step is superseded.
    pub(crate) fn insert(&mut self, record: SnapshotRecord) -> Result<()> {
        if self.by_id.contains_key(&record.id) {
            return Err(Error::corrupt(format!("snapshot {} was added twice", record.id)).clause("log 3.4"));
        }
        if record.status == Status::Live
            && let Some(older) = self.by_step.insert(record.step, self.snapshots.len())
            && let Some(older) = self.snapshots.get_mut(older)
            && older.status == Status::Live
        {
            older.status = Status::Superseded;
        }
        self.by_id.insert(record.id, self.snapshots.len());
        self.snapshots.push(record);
        Ok(())
    }

    /// The number of the next entry.
    pub(crate) fn next_sequence(&self) -> Result<u64> {
        self.sequence
            .checked_add(1)
            .ok_or_else(|| Error::corrupt("the log is full: its newest entry has the highest number").clause("log 3.1"))
    }

    /// All snapshots, by commit.
    pub(crate) fn snapshots(&self) -> &[SnapshotRecord] {
        &self.snapshots
    }

    pub(crate) fn snapshot_mut(&mut self, at: usize) -> Option<&mut SnapshotRecord> {
        self.snapshots.get_mut(at)
    }

    /// Live snapshots, by commit.
    pub(crate) fn live(&self) -> impl DoubleEndedIterator<Item = &SnapshotRecord> {
        self.snapshots.iter().filter(|record| record.status == Status::Live)
    }

    /// Live snapshots with all roles that they were saved with, by commit.
    pub(crate) fn whole(&self) -> impl DoubleEndedIterator<Item = &SnapshotRecord> {
        self.live().filter(|record| record.roles.is_none())
    }

    /// The newest live snapshot that is whole, by commit.
    pub(crate) fn latest(&self) -> Option<&SnapshotRecord> {
        self.whole().next_back()
    }

    pub(crate) fn at_step(&self, step: u64) -> Option<&SnapshotRecord> {
        let record = self.snapshots.get(*self.by_step.get(&step)?)?;
        (record.status == Status::Live).then_some(record)
    }

    pub(crate) fn by_id(&self, id: Id) -> Option<&SnapshotRecord> {
        self.by_id.get(&id).and_then(|&at| self.snapshots.get(at))
    }

    /// Step of the newest snapshot of a writer or, if it has none, of the store.
    pub(crate) fn newest_step(&self) -> Option<u64> {
        self.snapshots.last().map(|record| record.step)
    }
}
