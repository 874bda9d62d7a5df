//! Pin, forget and retention: log entries that never disturb a writer.

use std::collections::BTreeSet;

use super::{Log, LogState, SnapshotRecord, SnapshotStatus};
use crate::wire::{Event, Id};
use crate::{Error, ErrorKind, Result, Store};

impl Store {
    /// Protects a step from being forgotten until it is unpinned.
    pub async fn pin(&self, step: u64) -> Result<SnapshotRecord> {
        set_pinned(self, step, true).await
    }

    /// Ends the protection of a step. An unpinned step stays as it is.
    pub async fn unpin(&self, step: u64) -> Result<SnapshotRecord> {
        set_pinned(self, step, false).await
    }

    /// Marks steps as no longer wanted. Their bytes stay until no newer delta needs them and garbage collection runs.
    ///
    /// One commit covers up to ten thousand steps. Of a longer list, the first commits stand if a later one fails.
    pub async fn forget(&self, steps: &[u64]) -> Result<Vec<SnapshotRecord>> {
        let mut log = Log::load(self).await?;
        let steps: Vec<u64> = steps.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        if steps.is_empty() {
            return Err(Error::invalid("no step to forget"));
        }
        let wanted = |state: &LogState, steps: &[u64]| -> Result<Vec<Id>> {
            let forget = |&step: &u64| match live_step(state, step)? {
                record if record.pinned => Err(Error::invalid(format!("step {step} is pinned; unpin it first (`tensorcask pin --off`)"))),
                record => Ok(record.id),
            };
            steps.iter().map(forget).collect()
        };
        // Checks all steps before the first commit.
        let ids = wanted(log.state(), &steps)?;
        for steps in steps.chunks(MAX_FORGOTTEN) {
            log.append(Id::random()?, |state| Ok(Event::Forgotten { snapshots: wanted(state, steps)? })).await?;
            log.write_catalog_if_due().await;
        }
        Ok(ids.iter().filter_map(|&id| log.state().by_id(id).cloned()).collect())
    }

    /// Forgets the live steps that `retention` does not keep. Decides again on the state of the log at each
    /// commit, so a step that is pinned or saved meanwhile is safe. [`History::unwanted`](super::History::unwanted)
    /// returns the same snapshots and forgets nothing.
    pub async fn retain(&self, retention: Retention) -> Result<Vec<SnapshotRecord>> {
        let mut log = Log::load(self).await?;
        let writer = Id::random()?;
        let mut forgotten = Vec::new();
        while !retention.unwanted(log.state())?.is_empty() {
            let mut last: Vec<Id> = Vec::new();
            log.append(writer, |state| {
                last = retention.unwanted(state)?.iter().take(MAX_FORGOTTEN).map(|record| record.id).collect();
                Ok(Event::Forgotten { snapshots: last.clone() })
            })
            .await?;
            log.write_catalog_if_due().await;
            forgotten.append(&mut last);
        }
        Ok(forgotten.into_iter().filter_map(|id| log.state().by_id(id).cloned()).collect())
    }
}

async fn set_pinned(store: &Store, step: u64, pinned: bool) -> Result<SnapshotRecord> {
    let mut log = Log::load(store).await?;
    log.append(Id::random()?, |state| Ok(Event::Pinned { snapshot: live_step(state, step)?.id, pinned })).await?;
    log.write_catalog_if_due().await;
    live_step(log.state(), step).cloned()
}

/// Forgets the live snapshots among these, unless they are pinned.
pub(super) async fn forget_by_id(store: &Store, snapshots: &[Id]) -> Result<Vec<SnapshotRecord>> {
    let mut log = Log::load(store).await?;
    let mut forgotten = Vec::new();
    for some in snapshots.chunks(MAX_FORGOTTEN) {
        let wanted = |state: &LogState| -> Vec<Id> {
            let is_live = |id: &&Id| state.by_id(**id).is_some_and(|record| record.status == SnapshotStatus::Live && !record.pinned);
            some.iter().filter(is_live).copied().collect()
        };
        let ids = wanted(log.state());
        if ids.is_empty() {
            continue;
        }
        log.append(Id::random()?, |state| match wanted(state) {
            gone if gone.is_empty() => Err(Error::new(ErrorKind::Conflict, "another process forgot these snapshots meanwhile; try again")),
            snapshots => Ok(Event::Forgotten { snapshots }),
        })
        .await?;
        forgotten.extend(ids.iter().filter_map(|&id| log.state().by_id(id).cloned()));
        log.write_catalog_if_due().await;
    }
    Ok(forgotten)
}

/// Live steps to keep; all others are forgotten. Pinned steps and the newest step are always kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// Number of newest snapshots to keep, by commit.
    pub keep_last: Option<u64>,
    /// Interval of steps to keep: the multiples of this number.
    pub keep_every: Option<u64>,
}

impl Retention {
    /// Returns the live snapshots that this retention does not keep, ordered by commit.
    pub(crate) fn unwanted(self, state: &LogState) -> Result<Vec<SnapshotRecord>> {
        if self == Self::default() || self.keep_every == Some(0) || self.keep_last == Some(0) {
            return Err(Error::invalid(
                "nothing to keep was given: set how many last steps to keep, or an interval of steps, each at least 1",
            ));
        }
        let keeps = |nth: u64, step: u64| {
            nth == 0 || self.keep_last.is_some_and(|last| nth < last) || self.keep_every.is_some_and(|every| step.is_multiple_of(every))
        };
        let live = state.live().rev().zip(0u64..);
        let mut unwanted: Vec<SnapshotRecord> =
            live.filter(|(record, nth)| !record.pinned && !keeps(*nth, record.step)).map(|(record, _)| record.clone()).collect();
        unwanted.reverse();
        Ok(unwanted)
    }
}

/// Maximum number of snapshots that one entry forgets. Keeps the entry well below its size limit.
const MAX_FORGOTTEN: usize = 10_000;

/// Returns the live snapshot of a step.
pub(crate) fn live_step(state: &LogState, step: u64) -> Result<&SnapshotRecord> {
    state.at_step(step).ok_or_else(|| Error::not_found(format!("the store has no step {step}; `tensorcask ls` lists its steps")))
}
