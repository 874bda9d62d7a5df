//! Snapshots that no reader needs any more. Spec: `spec/log.md`, clause 7.

use std::collections::{BTreeMap, BTreeSet};

use super::{Log, LogState, SnapshotRecord, SnapshotStatus, find_lost_end, read_manifest, refuse_features};
use crate::store::{Listed, Store, concurrently};
use crate::wire::{Event, Id};
use crate::{Error, ErrorKind, Result, boxed};

/// Number of concurrent requests.
const CONCURRENT_REQUESTS: usize = 16;

/// Largest number of snapshots that one save frees. An older store may have thousands: they would hold up the save.
const MOST_FREED: usize = 16;

/// Forgotten and superseded snapshots: those that neither a live or pinned snapshot nor one of `kept` needs, and the others.
pub(crate) fn unneeded<'s>(state: &'s LogState, kept: &BTreeSet<Id>) -> (Vec<&'s SnapshotRecord>, Vec<&'s SnapshotRecord>) {
    let mut needed: BTreeSet<Id> = BTreeSet::new();
    let roots = state.snapshots().iter().filter(|record| is_root(record)).map(|record| record.id);
    roots.chain(kept.iter().copied()).for_each(|root| add_chain(state, root, &mut needed));
    let idle = state.snapshots().iter().filter(|record| !is_root(record) && record.status != SnapshotStatus::Collected);
    idle.partition(|record| !needed.contains(&record.id))
}

/// Whether a snapshot is no leftover: it is live or pinned.
pub(crate) fn is_root(record: &SnapshotRecord) -> bool {
    record.status == SnapshotStatus::Live || (record.pinned && record.status != SnapshotStatus::Collected)
}

/// Adds a snapshot and its chain by the log. What is there already stands for the rest of its chain.
fn add_chain(state: &LogState, root: Id, chain: &mut BTreeSet<Id>) {
    let mut next = Some(root);
    while let Some(id) = next.filter(|&id| chain.insert(id)) {
        next = state.by_id(id).and_then(|record| record.parent);
    }
}

/// Frees the space of forgotten snapshots while a job goes on saving (log 7.6): each save deletes what nothing has needed since the
/// save before.
#[derive(Debug, Default)]
pub(crate) struct Freeing {
    /// Snapshots that could have been freed after the last save.
    waiting: BTreeSet<Id>,
    /// By live snapshot: all snapshots that it has needed, as far as this job has seen. A reader may have opened it before a
    /// compaction, and still read the chain that it had then.
    chains: BTreeMap<Id, BTreeSet<Id>>,
    /// By live snapshot whose chain held a compacted snapshot when this job first saw it: the entry that added that snapshot.
    /// Before the compaction, the chain may have held any older snapshot.
    compacted_before: BTreeMap<Id, u64>,
    /// Whether nothing is freed: the storage has refused a deletion, for want of a permission perhaps, or the log may lack entries.
    is_refused: bool,
}

impl Freeing {
    /// Frees with the first save already what an earlier process has forgotten. Frees nothing if the log seems to lack entries at its
    /// end: they may have pinned what it gives up. `manifests`: a listing from before the log was read.
    pub(crate) async fn begin(store: &Store, state: &LogState, manifests: &[Listed]) -> Self {
        let lost = match find_lost_end(store, state, manifests).await {
            Ok(lost) => lost,
            // A storage error says nothing about the log. Garbage collection looks again.
            Err(error) if error.kind() == ErrorKind::Storage => None,
            Err(error) => Some(error),
        };
        let mut freeing = Self { is_refused: lost.is_some(), ..Self::default() };
        if let Some(error) = lost {
            tracing::warn!(
                %error,
                "saves may be missing from the log, so this job leaves forgotten steps to garbage collection until it is started again"
            );
        }
        freeing.waiting = freeing.freeable(state);
        freeing
    }

    /// Snapshots that nothing needs, and that no live snapshot has ever needed.
    fn freeable(&mut self, state: &LogState) -> BTreeSet<Id> {
        let mut known = std::mem::take(&mut self.chains);
        let mut compacted_before = std::mem::take(&mut self.compacted_before);
        for root in state.snapshots().iter().filter(|record| is_root(record)) {
            let compacted = match known.contains_key(&root.id) {
                true => compacted_before.remove(&root.id),
                false => newest_compacted(state, root.id),
            };
            self.compacted_before.extend(compacted.map(|sequence| (root.id, sequence)));
            let mut chain = known.remove(&root.id).unwrap_or_default();
            add_chain(state, root.id, &mut chain);
            self.chains.insert(root.id, chain);
        }
        let needed: BTreeSet<&Id> = self.chains.values().flatten().collect();
        let oldest_known = self.compacted_before.values().copied().max().unwrap_or(0);
        let (idle, _) = unneeded(state, &BTreeSet::new());
        // The space of a snapshot in a log entry is never freed.
        let is_free = |record: &&SnapshotRecord| record.inline.is_none() && record.sequence > oldest_known && !needed.contains(&record.id);
        idle.into_iter().filter(is_free).map(|record| record.id).collect()
    }

    /// Gives up the snapshots that could be freed at the last call already, and deletes their objects. Returns those that are gone. A
    /// failed deletion is a warning: garbage collection finds the objects.
    #[boxed]
    pub(crate) async fn free(&mut self, log: &mut Log) -> Result<Vec<SnapshotRecord>> {
        if self.is_refused {
            return Ok(Vec::new());
        }
        let now = self.freeable(log.state());
        let ripe: BTreeSet<Id> = self.waiting.intersection(&now).take(MOST_FREED).copied().collect();
        self.waiting = now;
        if ripe.is_empty() {
            return Ok(Vec::new());
        }
        let mut given_up = Vec::new();
        let mut are_needed = false;
        let appended = log.append(Id::random()?, |state| {
            // Another process may have pinned one since.
            given_up = self.freeable(state).intersection(&ripe).copied().collect();
            are_needed = given_up.is_empty();
            match are_needed {
                true => Err(Error::new(ErrorKind::Conflict, "another process needs these snapshots")),
                false => Ok(Event::Collecting { snapshots: given_up.clone() }),
            }
        });
        match appended.await {
            Ok(_) => log.write_catalog_if_due().await,
            Err(_) if are_needed => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let mut freed = Vec::new();
        for record in given_up.iter().filter_map(|&id| log.state().by_id(id)) {
            match delete_objects(log, record).await {
                Ok(()) => freed.push(record.clone()),
                Err(error) => {
                    self.is_refused |= error.kind() == ErrorKind::Storage && !error.is_unanswered();
                    let step = record.step;
                    tracing::warn!(step, %error, "a forgotten step could not be deleted; `tensorcask gc` deletes it");
                }
            }
        }
        Ok(freed)
    }
}

/// Number of the entry that added the newest compacted snapshot in the chain of another one.
fn newest_compacted(state: &LogState, root: Id) -> Option<u64> {
    let links = std::iter::successors(state.by_id(root), |link| state.by_id(link.parent?));
    links.filter(|link| link.revision != link.sequence).map(|link| link.sequence).max()
}

/// Deletes the casks of a collected snapshot, and then its manifest. Casks that another snapshot has, too, stay.
#[boxed]
async fn delete_objects(log: &Log, record: &SnapshotRecord) -> Result<()> {
    let place = record.manifest_place();
    let manifest = read_manifest(&log.store, &place).await?;
    refuse_features(manifest.may_ignore())?;
    let shared = casks_of_step(log, record).await?;
    let objects = log.store.objects();
    let delete = |path: String| async move { objects.delete(&path).await };
    let own = manifest.casks.iter().filter(|cask| !shared.contains(&cask.id));
    concurrently(CONCURRENT_REQUESTS, own.map(|cask| delete(cask.path()))).await?;
    objects.delete(&place.path).await
}

/// Casks of the other snapshots of a step. Ranks whose receipts were committed twice, because the outcome of the first commit was not
/// known, have the same casks in two snapshots.
async fn casks_of_step(log: &Log, record: &SnapshotRecord) -> Result<BTreeSet<Id>> {
    let mut casks = BTreeSet::new();
    let is_other = |other: &&SnapshotRecord| other.step == record.step && other.id != record.id;
    for other in log.state().snapshots().iter().filter(is_other).filter(|other| other.status != SnapshotStatus::Collected) {
        if other.revision != other.sequence {
            let message = "another snapshot of this step was compacted, and a reader may have its former casks";
            return Err(Error::new(ErrorKind::Conflict, message));
        }
        casks.extend(read_manifest(&log.store, &other.manifest_place()).await?.casks.iter().map(|cask| cask.id));
    }
    Ok(casks)
}
