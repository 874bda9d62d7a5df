//! Pin and forget: entries of the log that never disturb a writer.

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
    pub async fn forget(&self, steps: &[u64]) -> Result<Vec<SnapshotRecord>> {
        let mut log = Log::load(self).await?;
        if steps.is_empty() {
            return Err(Error::invalid("no step to forget"));
        }
        let mut forgotten = Vec::new();
        let decide = |state: &LogState| {
            forgotten.clear();
            for &step in steps {
                let record = live_step(state, step)?;
                if record.pinned {
                    return Err(Error::invalid(format!("step {step} is pinned; unpin it first")));
                }
                forgotten.push(record.clone());
            }
            Ok(Event::Forgotten { snapshots: forgotten.iter().map(|record| record.id).collect() })
        };
        log.append(Id::random()?, decide).await?;
        log.write_catalog_if_due().await;
        Ok(forgotten.iter().filter_map(|record| log.state().by_id(record.id).cloned()).collect())
    }
}

fn live_step(state: &LogState, step: u64) -> Result<&SnapshotRecord> {
    state.at_step(step).ok_or_else(|| Error::not_found(format!("the store has no step {step}")))
}
