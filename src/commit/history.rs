//! The whole log and the run, for those who want to look at them.

use futures::{StreamExt, TryStreamExt};

use super::LogState;
use crate::error::ResultExt;
use crate::wire::{Id, LogEntry};
use crate::{Result, Store};

/// Entries fetched at once.
const BATCH: u64 = 32;

impl Store {
    /// The id of the training run; `NotFound` where there is no store. Reads `store.json` only.
    pub async fn run(&self) -> Result<Id> {
        Ok(self.read_store_file().await?.run)
    }

    /// All entries of the log, from the first on, each checked against those before it.
    pub async fn log_entries(&self) -> Result<Vec<LogEntry>> {
        self.run().await?;
        let mut state = LogState::default();
        let mut entries = Vec::new();
        loop {
            let first = state.sequence + 1;
            let read: Vec<Option<bytes::Bytes>> = futures::stream::iter(first..first + BATCH)
                .map(|sequence| async move { self.get_if_present(&LogEntry::path_of(sequence), self.limits().max_entry_bytes).await })
                .buffered(BATCH as usize)
                .try_collect()
                .await?;
            for (sequence, bytes) in (first..).zip(read) {
                let Some(bytes) = bytes else { return Ok(entries) };
                let decoded = LogEntry::decode(&bytes, sequence, self.limits());
                let (entry, digest) = decoded.in_object(LogEntry::path_of(sequence))?;
                state.apply(&entry, digest)?;
                entries.push(entry);
            }
        }
    }
}
