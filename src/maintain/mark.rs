//! The mark phase of garbage collection: the objects that a store needs now or has needed since a given time.
//! Spec: `spec/log.md`, clause 7.
//!
//! [`History`] replays the log and collects the manifests that any state since that time names. [`Marks`] reads those
//! manifests and collects the paths of their casks and directories.
//!
//! Invariants: a log that was not read as a whole stops the collection. So does a manifest that cannot be read, because the
//! objects that it needs are unknown.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::commit::{
    Catalog, LogState, ManifestPlace, SnapshotRecord, SnapshotStatus, UnnamedManifest, load_log, read_manifest, refuse_features,
};
use crate::error::ResultExt;
use crate::reader::read_directory;
use crate::store::concurrently;
use crate::wire::{Digest, Event, Id, LogEntry, Manifest};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Number of objects that are read at once.
const CONCURRENT_REQUESTS: usize = 16;

/// A manifest that the log names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NamedManifest {
    step: u64,
    snapshot: Id,
    place: ManifestPlace,
}

impl NamedManifest {
    fn by(record: &SnapshotRecord) -> Self {
        Self { step: record.step, snapshot: record.id, place: record.manifest_place() }
    }
}

/// The state of the log at a given time, and the manifests that it has named since.
pub(super) struct History {
    state: LogState,
    /// Manifests that any state from that time to now needs.
    pub named: BTreeSet<NamedManifest>,
}

impl History {
    /// Reads the log up to the last entry committed at `threshold_ms`, by the clock of the storage, then the rest. `newest`: a
    /// state of the log that was read as a whole. Fails if the log has come to another state.
    #[boxed]
    pub(super) async fn load(store: &Store, threshold_ms: u64, newest: &LogState) -> Result<Self> {
        let mut times: BTreeMap<String, u64> =
            store.objects().list("log").await?.into_iter().map(|listed| (listed.path, listed.modified_ms)).collect();
        // Number of the first entry that is too young, or of the next entry to come.
        let mut boundary = 1u64;
        while times.remove(&LogEntry::path_of(boundary)).is_some_and(|modified_ms| modified_ms <= threshold_ms) {
            boundary = boundary.saturating_add(1);
        }
        boundary = boundary.min(newest.sequence.saturating_add(1));
        let mut state = LogState::default();
        for path in Catalog::list(store).await?.iter().filter(|path| Catalog::sequence_of(path).is_some_and(|at| at < boundary)) {
            match Catalog::read(store, path).await {
                Ok(found) => {
                    state = found;
                    break;
                }
                Err(e) if e.kind() == ErrorKind::Unsupported => return Err(e),
                Err(error) => tracing::warn!(%error, "a catalog is damaged; reading the log instead"),
            }
        }
        let mut history = Self { state, named: BTreeSet::new() };
        history.replay(store, Some(boundary)).await?;
        let kept = history.state.snapshots().iter().filter(|record| record.status != SnapshotStatus::Collected);
        history.named = kept.map(NamedManifest::by).collect();
        history.replay(store, newest.sequence.checked_add(1)).await?;
        // `newest` may come from a later catalog.
        let is_same = |(ours, theirs): (&SnapshotRecord, &SnapshotRecord)| ours.facts() == theirs.facts();
        let ours = history.state.snapshots();
        let theirs = newest.snapshots();
        if history.state.head != newest.head || ours.len() != theirs.len() || !ours.iter().zip(theirs).all(is_same) {
            let message = "the log and a catalog disagree about it, so nothing is deleted. Run `tensorcask verify --depth log`";
            return Err(Error::corrupt(message).object(LogEntry::path_of(newest.sequence)).clause("log 7.3"));
        }
        history.refresh(store).await?;
        Ok(history)
    }

    /// Reads the entries that were committed since.
    #[boxed]
    pub(super) async fn refresh(&mut self, store: &Store) -> Result<()> {
        self.replay(store, None).await
    }

    /// The newest state.
    pub(super) fn state(&self) -> &LogState {
        &self.state
    }

    /// Manifests that the newest state needs.
    pub(super) fn needed(&self) -> BTreeSet<NamedManifest> {
        self.state.snapshots().iter().filter(|record| record.status != SnapshotStatus::Collected).map(NamedManifest::by).collect()
    }

    /// Applies entries before `end`, or up to the last.
    #[boxed]
    async fn replay(&mut self, store: &Store, end: Option<u64>) -> Result<()> {
        const BATCH: u64 = 32;
        loop {
            let first = self.state.next_sequence()?;
            let last = first.saturating_add(BATCH).min(end.unwrap_or(u64::MAX));
            if first >= last {
                return Ok(());
            }
            let fetch = |sequence| async move {
                let bytes = store.objects().get_if_present(&LogEntry::path_of(sequence), store.limits().max_entry_bytes).await?;
                Ok((sequence, bytes))
            };
            let entries: Vec<(u64, Option<Bytes>)> = concurrently(CONCURRENT_REQUESTS, (first..last).map(fetch)).await?;
            for (sequence, bytes) in entries {
                let Some(bytes) = bytes else { return Ok(()) };
                let path = LogEntry::path_of(sequence);
                let (entry, digest) = LogEntry::decode(&bytes, sequence, store.limits()).in_object(path.as_str())?;
                self.state.apply(&entry, digest).in_object(path)?;
                if let Event::Added { snapshot, .. } | Event::Compacted { snapshot, .. } = &entry.event {
                    self.named.extend(self.state.by_id(*snapshot).map(NamedManifest::by));
                }
            }
        }
    }
}

/// Objects that snapshots need, by path.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Paths of casks, manifests and directories.
    pub paths: BTreeSet<String>,
    /// Size of the casks of each snapshot, in bytes, by the manifest that was added first. Casks in log entries do not
    /// count.
    cask_bytes: BTreeMap<Id, u64>,
    directories: BTreeSet<Digest>,
    /// Manifests that were added.
    added: BTreeSet<NamedManifest>,
}

impl Marks {
    /// Size of the casks of these snapshots, in bytes.
    pub(super) fn bytes_of(&self, records: &[SnapshotRecord]) -> u64 {
        records.iter().filter_map(|record| self.cask_bytes.get(&record.id)).fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Adds the objects of a snapshot that the log does not name.
    pub(super) fn add_unnamed(&mut self, unnamed: &UnnamedManifest) {
        self.paths.insert(unnamed.path.clone());
        self.paths.extend(unnamed.manifest.casks.iter().map(|cask| cask.path()));
        self.paths.insert(format!("directories/{}", unnamed.manifest.directory));
    }

    /// Adds the objects that manifests name. Fails if a manifest cannot be read. A manifest that the newest state does
    /// not need may be gone: an earlier collection with a shorter age floor has deleted it, after its casks. So may one that a job
    /// has freed since the state was read (log 7.6).
    #[boxed]
    pub(super) async fn add(&mut self, store: &Store, named: &BTreeSet<NamedManifest>, needed: &BTreeSet<NamedManifest>) -> Result<()> {
        let read = |named: NamedManifest| async move {
            let path = named.place.path.as_str();
            let manifest = match read_manifest(store, &named.place).await {
                Ok(manifest) => manifest,
                Err(_) if is_gone(store, path).await? && (!needed.contains(&named) || is_given_up(store, named.snapshot).await?) => {
                    return Ok(None);
                }
                Err(e) => {
                    let message = format!("{}; the objects that step {} needs are unknown, so nothing is deleted", e.message(), named.step);
                    return Err(Error::new(e.kind(), message).object(path).source(e));
                }
            };
            refuse_features(manifest.may_ignore()).in_object(path)?;
            Ok(Some((named, manifest)))
        };
        let new: Vec<NamedManifest> = named.difference(&self.added).cloned().collect();
        let found: Vec<Option<(NamedManifest, Manifest)>> = concurrently(CONCURRENT_REQUESTS, new.into_iter().map(read)).await?;
        for (named, manifest) in found.into_iter().flatten() {
            let directory = manifest.directory;
            // Nothing can be freed of a snapshot that its log entry holds.
            if named.place.inline_in.is_none() {
                self.paths.insert(named.place.path.clone());
                self.paths.extend(manifest.casks.iter().map(|cask| cask.path()));
                self.cask_bytes.entry(named.snapshot).or_insert(manifest.stored_bytes());
            }
            if self.directories.insert(directory) {
                self.paths.insert(format!("directories/{directory}"));
                if read_directory(store, directory).await?.features().may_ignore != 0 {
                    return Err(Error::unsupported(
                        "the store uses a directory with features that this version does not know; upgrade tensorcask",
                    )
                    .object(format!("directories/{directory}"))
                    .clause("README 4"));
                }
            }
            self.added.insert(named);
        }
        Ok(())
    }
}

/// Whether the log has given a snapshot up by now.
async fn is_given_up(store: &Store, snapshot: Id) -> Result<bool> {
    let log = load_log(store).await?;
    Ok(log.state().by_id(snapshot).is_some_and(|record| record.status == SnapshotStatus::Collected))
}

async fn is_gone(store: &Store, path: &str) -> Result<bool> {
    match store.objects().head(path).await {
        Ok(_) => Ok(false),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e),
    }
}
