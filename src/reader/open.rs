//! Chooses the snapshot to open, and lists snapshots.

use serde_json::{Map, Value};

use super::recover::without_whole_step;
use super::{SkippedSnapshot, Snapshot, Survey};
use crate::commit::{History, MOST_LOOKS, SnapshotRecord, SnapshotStatus, changed_log, load_log};
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
        let at = at.into();
        let mut log = load_log(self).await?;
        let mut looks = 0;
        loop {
            let (record, wanted) = match at {
                StepSelector::Latest => (log.state().latest(), "snapshot".to_owned()),
                StepSelector::Step(step) => (log.state().at_step(step), format!("step {step}")),
            };
            let record = match record {
                Some(record) => record.clone(),
                None if at == StepSelector::Latest => return Err(without_whole_step(self, log.state())),
                None => {
                    return Err(Error::not_found(format!("the store has no {wanted}; `tensorcask ls` lists its steps")).object(self.url()));
                }
            };
            let error = match Snapshot::load(self, log.state(), record.id).await {
                Err(error) if error.is_damage() && looks < MOST_LOOKS => error,
                opened => return opened,
            };
            log = changed_log(self, log.state(), record.id).await?.ok_or(error)?;
            looks += 1;
        }
    }

    /// Returns all live snapshots, ordered by commit.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let mut log = load_log(self).await?;
        log.summarise(None).await?.refuse()?;
        Ok(log.state().live().map(SnapshotInfo::of).collect())
    }
}

impl History<'_> {
    /// Lists the live snapshots as [`Store::snapshots`] does, but leaves out those whose manifests are damaged.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
    /// let store = Store::open("memory://readable-example")?;
    /// let mut writer = store.writer(Policy::Full).await?;
    /// writer.save(1, &[TensorView::new("w", Dtype::U8, &[2], &[1, 2])?], &[], &Metadata::default()).await?;
    /// let listed = store.history().readable().await?;
    /// assert_eq!((listed.found[0].1.tensor_bytes, listed.skipped.len()), (2, 0));
    /// # Ok(()) }
    /// ```
    pub async fn readable(&self) -> Result<Survey<SnapshotInfo>> {
        let mut log = load_log(self.store).await?;
        let damaged = log.summarise(None).await?.0;
        let is_readable = |record: &&SnapshotRecord| damaged.iter().all(|(damaged, _)| damaged.id != record.id);
        let found = log.state().live().filter(is_readable).map(|record| (record.step, SnapshotInfo::of(record))).collect();
        let skipped = |(record, error): (SnapshotRecord, Error)| {
            let is_live = record.status == SnapshotStatus::Live;
            is_live.then_some(SkippedSnapshot { step: record.step, snapshot: record.id, error })
        };
        Ok(Survey { found, skipped: damaged.into_iter().filter_map(skipped).collect() })
    }
}

impl SnapshotInfo {
    fn of(record: &SnapshotRecord) -> Self {
        let summary = record.summary.clone().unwrap_or_default();
        Self { record: record.clone(), tensor_bytes: summary.tensor_bytes, stored_bytes: summary.stored_bytes, user: summary.user }
    }
}
