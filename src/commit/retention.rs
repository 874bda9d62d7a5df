//! Pin and forget: entries of the log that never disturb a writer.

use std::collections::BTreeSet;

use super::{Log, LogState, SnapshotRecord};
use crate::wire::{Event, Id};
use crate::{Error, Result, Store};

impl Store {
    /// Protects a step from being forgotten, or ends that.
    pub async fn pin(&self, step: u64, pinned: bool) -> Result<SnapshotRecord> {
        let mut log = Log::load(self).await?;
        log.append(Id::random()?, |state| Ok(Event::Pinned { snapshot: live_step(state, step)?.id, pinned })).await?;
        log.write_catalog_if_due().await;
        live_step(log.state(), step).cloned()
    }

    /// Says that steps are no longer wanted. Their bytes stay while a newer delta needs them, and until they are collected.
    ///
    /// One commit takes up to ten thousand steps; of more, the first commits stand if a later one fails.
    pub async fn forget(&self, steps: &[u64]) -> Result<Vec<SnapshotRecord>> {
        let mut log = Log::load(self).await?;
        let steps: Vec<u64> = steps.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        if steps.is_empty() {
            return Err(Error::invalid("no step to forget"));
        }
        let wanted = |state: &LogState, steps: &[u64]| -> Result<Vec<Id>> {
            let forget = |&step: &u64| match live_step(state, step)? {
                record if record.pinned => Err(Error::invalid(format!("step {step} is pinned; unpin it first"))),
                record => Ok(record.id),
            };
            steps.iter().map(forget).collect()
        };
        // All of them before the first commit.
        let ids = wanted(log.state(), &steps)?;
        for steps in steps.chunks(MAX_FORGOTTEN) {
            log.append(Id::random()?, |state| Ok(Event::Forgotten { snapshots: wanted(state, steps)? })).await?;
            log.write_catalog_if_due().await;
        }
        Ok(ids.iter().filter_map(|&id| log.state().by_id(id).cloned()).collect())
    }
}

/// Snapshots that one entry forgets, at most: it stays well below the limit on entries.
const MAX_FORGOTTEN: usize = 10_000;

fn live_step(state: &LogState, step: u64) -> Result<&SnapshotRecord> {
    state.at_step(step).ok_or_else(|| Error::not_found(format!("the store has no step {step}")))
}
