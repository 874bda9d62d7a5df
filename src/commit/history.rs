//! Access to the whole log and the run, for inspection.

use futures::{StreamExt, TryStreamExt};

use super::LogState;
use crate::error::ResultExt;
use crate::wire::{Id, LogEntry};
use crate::{Result, Store};

/// Number of entries fetched at once.
const BATCH: u64 = 32;

impl Store {
    /// Returns the id of the training run, or `NotFound` if there is no store. Reads only `store.json`.
    pub async fn run(&self) -> Result<Id> {
        Ok(self.read_store_file().await?.run)
    }

    /// Returns all entries of the log, from the first on. Checks each against its predecessors.
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
