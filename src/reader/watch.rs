//! New snapshots, as they are committed.

use std::time::Duration;

use crate::commit::{Log, SnapshotRecord, Status};
use crate::{Result, Store};

/// How often the log is asked, if nothing else is said.
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for snapshots. Sends two small requests at each look while there is nothing new: for the last known log entry and the next.
#[derive(Debug)]
pub struct Watch {
    log: Log,
    after: u64,
    interval: Duration,
}

impl Store {
    /// Watches for snapshots committed after log entry `after`: 0 for all that are live, a snapshot's
    /// [`SnapshotRecord::sequence`] for those that follow it.
    pub async fn watch(&self, after: u64) -> Result<Watch> {
        Ok(Watch { log: Log::load(self).await?, after, interval: INTERVAL })
    }
}

impl Watch {
    /// Looks this often.
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// The next snapshot, in the order of commits; waits until there is one. What has been superseded or forgotten by then is
    /// passed over. After an error it may be called again. If the store was deleted or replaced, each call fails with `Conflict`.
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

    /// The next snapshot that has been seen and not been given yet.
    fn known(&mut self) -> Option<SnapshotRecord> {
        let records = self.log.state().snapshots();
        let first = records.partition_point(|record| record.sequence <= self.after);
        let found = records.iter().skip(first).find(|record| record.status == Status::Live).cloned()?;
        self.after = found.sequence;
        Some(found)
    }
}
