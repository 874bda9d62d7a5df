//! Watches for new snapshots as they are committed.

use std::time::Duration;

use crate::commit::{Log, SnapshotRecord, SnapshotStatus, load_log};
use crate::{Result, Store};

/// Default interval between checks of the log.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for snapshots. While nothing is new, each check sends two small requests: for the last known log entry and for
/// the next.
#[derive(Debug)]
pub struct SnapshotWatch {
    log: Log,
    after: u64,
    interval: Duration,
}

impl Store {
    /// Watches for snapshots committed after log entry `after`. Pass 0 to start with all live snapshots, or a
    /// snapshot's [`SnapshotRecord::sequence`] for those that follow it.
    pub async fn watch(&self, after: u64) -> Result<SnapshotWatch> {
        Ok(SnapshotWatch { log: load_log(self).await?, after, interval: INTERVAL })
    }
}

impl SnapshotWatch {
    /// Sets the interval between checks.
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Waits for the next snapshot, in the order of commits. Skips snapshots that have been superseded or forgotten by
    /// then. May be called again after an error. If the store was deleted or replaced, each call fails with `Conflict`.
    pub async fn next(&mut self) -> Result<SnapshotRecord> {
        loop {
            if let Some(record) = self.known() {
                return Ok(record);
            }
            self.log.refresh().await?;
            match self.known() {
                Some(record) => return Ok(record),
                None => tokio::time::sleep(self.interval).await,
            }
        }
    }

    /// Returns the next snapshot that is known and was not returned yet.
    fn known(&mut self) -> Option<SnapshotRecord> {
        let records = self.log.state().snapshots();
        let first = records.partition_point(|record| record.sequence <= self.after);
        let found = records.iter().skip(first).find(|record| record.status == SnapshotStatus::Live).cloned()?;
        self.after = found.sequence;
        Some(found)
    }
}
