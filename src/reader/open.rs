//! Chooses the snapshot to open, and lists snapshots.

use serde_json::{Map, Value};

use super::Snapshot;
use crate::commit::{Log, SnapshotRecord};
use crate::{Error, Result, Store};

/// Selector of the newest live snapshot by commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latest;

/// Selector of the snapshot to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepSelector {
    /// Newest live snapshot by commit, which is not always the highest step.
    Latest,
    /// Live snapshot of a step.
    Step(u64),
}

impl From<Latest> for StepSelector {
    fn from(_: Latest) -> Self {
        Self::Latest
    }
}

impl From<u64> for StepSelector {
    fn from(step: u64) -> Self {
        Self::Step(step)
    }
}

/// A snapshot, as shown in listings.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotInfo {
    /// Record of the snapshot in the log.
    pub record: SnapshotRecord,
    /// Bytes of the decoded tensors.
    pub tensor_bytes: u64,
    /// Bytes of its casks.
    pub stored_bytes: u64,
    /// User metadata.
    pub user: Map<String, Value>,
}

impl Store {
    /// Opens a snapshot. Checks all log entries, manifests and directories of its chain.
    pub async fn snapshot(&self, at: impl Into<StepSelector>) -> Result<Snapshot> {
        let log = Log::load(self).await?;
        let state = log.state();
        let (record, wanted) = match at.into() {
            StepSelector::Latest => (state.latest(), "snapshot".to_owned()),
            StepSelector::Step(step) => (state.at_step(step), format!("step {step}")),
        };
        let record = record
            .ok_or_else(|| Error::not_found(format!("the store has no {wanted}; `tensorcask ls` lists its steps")).object(self.url()))?;
        Snapshot::load(self, state, record.id).await
    }

    /// Returns all live snapshots, ordered by commit.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let mut log = Log::load(self).await?;
        log.summarise(None).await?.refuse()?;
        Ok(log
            .state()
            .live()
            .map(|record| {
                let summary = record.summary.clone().unwrap_or_default();
                SnapshotInfo {
                    record: record.clone(),
                    tensor_bytes: summary.tensor_bytes,
                    stored_bytes: summary.stored_bytes,
                    user: summary.user,
                }
            })
            .collect())
    }
}
