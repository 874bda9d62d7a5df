//! Plan of a copy: its options, the snapshots that the destination lacks, and the report.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::chain::chain_of;
use crate::commit::{DEFAULT_AGE_FLOOR, LogState, SnapshotRecord, SnapshotStatus, live_step};
use crate::error::ResultExt;
use crate::wire::Id;
use crate::{Error, Result, Store};

/// Options of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOptions {
    /// Steps to copy, with their chains; `None` for all live snapshots.
    pub steps: Option<Vec<u64>>,
    /// Age floor of garbage collection at the destination: see
    /// [`WriterOptions::age_floor`](crate::WriterOptions::age_floor).
    pub age_floor: Duration,
    /// Part i of n of the casks, as `(i, n)`: only these are copied, and nothing is committed. After all parts were copied, a copy
    /// without a shard commits. `None` for a whole copy.
    pub shard: Option<(u64, u64)>,
    /// Whether to take the destination over from a job that saves to it: its next save fails with `Fenced`. Otherwise such a copy is
    /// refused with `Conflict`.
    pub take_over: bool,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self { steps: None, age_floor: DEFAULT_AGE_FLOOR, shard: None, take_over: false }
    }
}

/// Result of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyReport {
    /// Number of snapshots that this copy committed.
    pub snapshots: u64,
    /// Number of snapshots that the destination had already.
    pub present: u64,
    /// Number of live snapshots of the source that the destination has had, and forgotten. It never takes them back.
    pub forgotten: u64,
    /// Number of objects written.
    pub objects: u64,
    /// Size of those objects, in bytes.
    pub bytes: u64,
    /// Bytes of those objects that had been sent ahead.
    pub ahead_bytes: u64,
    /// Number of casks that a fork shares with the source, or that the storage copied itself. No byte of them was transferred.
    pub shared_objects: u64,
    /// Size of those casks, in bytes.
    pub shared_bytes: u64,
}

/// Snapshots to copy.
pub(super) struct CopyPlan {
    /// Snapshots that the destination should have, in the order of the source.
    pub wanted: Vec<SnapshotRecord>,
    /// Wanted snapshots that the destination lacks.
    pub missing: Vec<SnapshotRecord>,
    /// Wanted steps that are live at the source, and that the destination has forgotten.
    pub forgotten: Vec<u64>,
}

impl CopyPlan {
    pub(super) fn new(source: &Store, from: &LogState, there: &LogState, steps: Option<&[u64]>) -> Result<Self> {
        let wanted = snapshots_to_copy(source, from, there, steps)?;
        let missing: Vec<SnapshotRecord> = wanted.iter().filter(|record| there.by_id(record.id).is_none()).cloned().collect();
        check_order(from, there, &missing)?;
        missing.iter().try_for_each(|record| check_links(record, from, there))?;
        let is_asked = |record: &&SnapshotRecord| steps.is_none_or(|steps| steps.contains(&record.step));
        let is_gone = |state| matches!(state, SnapshotStatus::Forgotten | SnapshotStatus::Collected);
        let live = wanted.iter().filter(|record| record.status == SnapshotStatus::Live).filter(is_asked);
        let forgotten = live.filter(|record| there.by_id(record.id).is_some_and(|found| is_gone(found.status)));
        let forgotten = forgotten.map(|record| record.step).collect();
        Ok(Self { wanted, missing, forgotten })
    }

    /// Snapshots whose status the destination takes over: all, or those that were asked for or are new there. A step that the
    /// destination had before, and that nobody has named, keeps its status.
    pub(super) fn named(&self, steps: Option<&[u64]>) -> Vec<SnapshotRecord> {
        let is_new = |record: &SnapshotRecord| self.missing.iter().any(|missing| missing.id == record.id);
        let is_asked =
            |record: &SnapshotRecord| record.status == SnapshotStatus::Live && steps.is_none_or(|steps| steps.contains(&record.step));
        self.wanted.iter().filter(|record| steps.is_none() || is_asked(record) || is_new(record)).cloned().collect()
    }

    /// Counts snapshots as new that an earlier plan of this copy has added, with the status that they were to get.
    pub(super) fn note_added(&mut self, added: &BTreeMap<Id, SnapshotRecord>) {
        for record in &mut self.wanted {
            if let Some(earlier) = added.get(&record.id) {
                record.status = earlier.status;
            }
        }
        self.missing = added.values().cloned().collect();
    }

    /// Counts what the destination has before the copy.
    pub(super) fn report(&self) -> CopyReport {
        let present = self.wanted.len().saturating_sub(self.missing.len()).saturating_sub(self.forgotten.len());
        CopyReport { present: present as u64, forgotten: self.forgotten.len() as u64, ..CopyReport::default() }
    }
}

/// Snapshots to copy and their chains, in the order of their commits. A link that nobody asked for is copied as
/// forgotten, unless the destination had it before.
pub(super) fn snapshots_to_copy(
    store: &Store,
    state: &LogState,
    destination: &LogState,
    steps: Option<&[u64]>,
) -> Result<Vec<SnapshotRecord>> {
    let roots: Vec<&SnapshotRecord> = match steps {
        None => state.live().collect(),
        Some([]) => return Err(Error::invalid("no step to copy")),
        Some(steps) => steps.iter().map(|&step| live_step(state, step).in_object(store.url())).collect::<Result<_>>()?,
    };
    let asked: BTreeSet<Id> = roots.iter().map(|root| root.id).collect();
    let mut wanted: BTreeMap<u64, SnapshotRecord> = BTreeMap::new();
    for root in roots {
        for mut link in chain_of(state, root.id, store.limits().max_chain_depth)? {
            if steps.is_some() && !asked.contains(&link.id) && destination.by_id(link.id).is_none() {
                link.status = SnapshotStatus::Forgotten;
            }
            wanted.entry(link.sequence).or_insert(link);
        }
    }
    Ok(wanted.into_values().collect())
}

/// Refuses to add a snapshot after newer ones: `latest` is the newest commit, and must be the same at the destination.
fn check_order(source: &LogState, destination: &LogState, missing: &[SnapshotRecord]) -> Result<()> {
    let newest = destination.snapshots().iter().filter_map(|record| source.by_id(record.id)).map(|record| record.sequence).max();
    match missing.iter().find(|record| newest.is_some_and(|newest| record.sequence < newest)) {
        None => Ok(()),
        Some(record) => Err(Error::invalid(format!(
            "step {} was committed before steps that the destination has already, and cannot be added after them; copy into an empty place",
            record.step
        ))),
    }
}

/// The first link of a snapshot's chain that the destination has lost, or a part that the snapshot needs: it was collected there,
/// or reduced to fewer roles than at the source.
pub(super) fn lost_link<'s>(record: &SnapshotRecord, source: &LogState, there: &'s LogState) -> Option<&'s SnapshotRecord> {
    let mut next = record.parent;
    // A parent is committed before what needs it, in the log and in a catalog, so the chain ends.
    while let Some(id) = next {
        let ours = source.by_id(id);
        let Some(link) = there.by_id(id) else {
            // It will be copied as the source has it.
            next = ours?.parent;
            continue;
        };
        let is_reduced = ours.is_some_and(|ours| lacks_roles(link, [record, ours]));
        if link.status == SnapshotStatus::Collected || is_reduced {
            return Some(link);
        }
        next = link.parent;
    }
    None
}

/// Fails if the destination has lost what a snapshot needs of its chain.
pub(super) fn check_links(record: &SnapshotRecord, source: &LogState, there: &LogState) -> Result<()> {
    let Some(link) = lost_link(record, source, there) else { return Ok(()) };
    let (step, lost) = (record.step, link.step);
    let (what, clause) = match link.status {
        SnapshotStatus::Collected => ("collected", "chain 2.8"),
        _ => ("reduced to some roles", "log 4.7"),
    };
    let message = format!(
        "step {step} needs step {lost}, which the destination has {what}; compact the steps that need it at the source, and copy again"
    );
    Err(Error::corrupt(message).clause(clause))
}

/// Whether a link was reduced to fewer roles than all of these have.
fn lacks_roles(link: &SnapshotRecord, others: [&SnapshotRecord; 2]) -> bool {
    let Some(kept) = &link.roles else { return false };
    let others: Vec<&Vec<String>> = others.into_iter().filter_map(|other| other.roles.as_ref()).collect();
    let Some((first, rest)) = others.split_first() else { return true };
    first.iter().any(|role| rest.iter().all(|other| other.contains(role)) && !kept.contains(role))
}
