//! The history of a store: the run, all entries of the log, and all snapshots that it has ever named.

use futures::{StreamExt, TryStreamExt};

use super::log::Damaged;
use super::retention::{decide_retention, forget_by_id};
use super::{
    Catalog, FiniteMarks, LogState, Retained, Retention, SnapshotRecord, check_log_ends, load_complete_log, load_log, store_file_of,
};
use crate::error::ResultExt;
use crate::wire::{Id, LogEntry};
use crate::{Result, Store};

/// Number of entries fetched at once.
const BATCH: u64 = 32;

/// View of the whole history of a store, whatever the status of its snapshots. [`Store::history`] returns it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
/// let store = Store::open("memory://history-example")?;
/// let mut writer = store.writer(Policy::Full).await?;
/// for step in [1, 2] {
///     writer.save(step, &[TensorView::new("w", Dtype::U8, &[2], &[1, 2])?], &[], &Metadata::default()).await?;
/// }
/// store.forget(&[1]).await?;
/// assert_eq!(store.snapshots().await?.len(), 1);
/// assert_eq!(store.history().records().await?.len(), 2);
/// assert_eq!(store.history().entries().await?.len(), 4); // opened, added, added, forgotten
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct History<'s> {
    pub(crate) store: &'s Store,
}

impl Store {
    /// Returns the history of the store: its run, its log, and all snapshots that it has ever named. Sends no request.
    pub fn history(&self) -> History<'_> {
        History { store: self }
    }
}

impl History<'_> {
    /// Returns the id of the training run. Reads only `store.json`. Fails with `NotFound` if there is no store, and with `Corrupt`
    /// if only this file is gone.
    pub async fn run(&self) -> Result<Id> {
        Ok(store_file_of(self.store).await?.run)
    }

    /// Returns all entries of the log, from the first on. Checks each against its predecessors. Fails if an entry is missing,
    /// and names it.
    pub async fn entries(&self) -> Result<Vec<LogEntry>> {
        self.run().await?;
        let mut state = LogState::default();
        let mut entries = Vec::new();
        loop {
            let first = state.sequence + 1;
            let read: Vec<Option<bytes::Bytes>> = futures::stream::iter(first..first + BATCH)
                .map(|sequence| async move {
                    self.store.objects().get_if_present(&LogEntry::path_of(sequence), self.store.limits().max_entry_bytes).await
                })
                .buffered(BATCH as usize)
                .try_collect()
                .await?;
            for (sequence, bytes) in (first..).zip(read) {
                let Some(bytes) = bytes else {
                    check_log_ends(self.store, &state).await?;
                    return Ok(entries);
                };
                let decoded = LogEntry::decode(&bytes, sequence, self.store.limits());
                let (entry, digest) = decoded.in_object(LogEntry::path_of(sequence))?;
                state.apply(&entry, digest)?;
                entries.push(entry);
            }
        }
    }

    /// Returns all snapshots in the log, whatever their status, ordered by commit. Reads only the log.
    pub async fn records(&self) -> Result<Vec<SnapshotRecord>> {
        Ok(load_log(self.store).await?.state().snapshots().to_vec())
    }

    /// Returns the same for a decision that something is not needed. Fails with `Corrupt` unless the whole log is there.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Policy, Store};
    /// let store = Store::open("memory://complete-example")?;
    /// store.writer(Policy::Full).await?;
    /// assert!(store.history().complete_records().await?.is_empty());
    /// # Ok(()) }
    /// ```
    pub async fn complete_records(&self) -> Result<Vec<SnapshotRecord>> {
        Ok(load_complete_log(self.store).await?.state().snapshots().to_vec())
    }

    /// Returns all snapshots in the log as a table with the columns of a catalog (log 6). Leaves out snapshots whose
    /// manifests are damaged, with a warning.
    pub async fn catalog(&self) -> Result<arrow_array::RecordBatch> {
        let mut log = load_log(self.store).await?;
        let Damaged(damaged) = log.summarise(None).await?;
        for (record, error) in &damaged {
            tracing::warn!(step = record.step, %error, "the manifest of this step cannot be read; the step is left out");
        }
        let is_readable = |record: &&SnapshotRecord| damaged.iter().all(|(damaged, _)| damaged.id != record.id);
        let records: Vec<&SnapshotRecord> = log.state().snapshots().iter().filter(is_readable).collect();
        Catalog::table(&records)
    }

    /// Returns what [`Store::retain`] would do, and does nothing.
    pub async fn unwanted(&self, retention: Retention) -> Result<Retained> {
        let mut log = load_complete_log(self.store).await?;
        let decision = decide_retention(&mut log, retention, &mut FiniteMarks::default()).await?;
        Ok(Retained { forgotten: decision.forget, kept_finite: decision.kept_finite })
    }

    /// Forgets snapshots by id. Skips snapshots that are no longer live, such as those whose step was saved again
    /// meanwhile. Skips pinned snapshots, too.
    pub async fn forget_snapshots(&self, snapshots: &[Id]) -> Result<Vec<SnapshotRecord>> {
        forget_by_id(self.store, snapshots).await
    }
}
