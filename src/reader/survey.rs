//! Reads the same thing from many snapshots. Leaves out damaged snapshots, so that one of them does not hide the others.

use std::future::Future;

use super::{SkippedSnapshot, Snapshot};
use crate::commit::{History, SnapshotRecord, SnapshotStatus, load_log};
use crate::store::concurrently;
use crate::{Error, Result};

/// Number of snapshots read at once.
pub(super) const CONCURRENT_SNAPSHOTS: usize = 8;

/// Results of [`History::survey`].
#[derive(Debug)]
pub struct Survey<T> {
    /// Step and result of each snapshot, ordered by commit.
    pub found: Vec<(u64, T)>,
    /// Snapshots that are damaged, ordered by commit.
    pub skipped: Vec<SkippedSnapshot>,
}

impl History<'_> {
    /// Calls `read` for each live snapshot, or only for those of `steps`. Reads several snapshots at once.
    ///
    /// Skips damaged snapshots with a warning. Any other error (network, permission) is returned. So is `NotFound` if
    /// `steps` names a step that the store does not have.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
    /// let store = Store::open("memory://survey-example")?;
    /// let mut writer = store.writer(Policy::Full).await?;
    /// for step in [1, 2] {
    ///     writer.save(step, &[TensorView::new("w", Dtype::U8, &[2], &[1, 2])?], &[], &Metadata::default()).await?;
    /// }
    /// let counted = store.history().survey(None, |snapshot| async move { Ok(snapshot.tensors().len()) }).await?;
    /// assert_eq!(counted.found, [(1, 1), (2, 1)]);
    /// assert!(counted.skipped.is_empty());
    /// # Ok(()) }
    /// ```
    pub async fn survey<T, F>(&self, steps: Option<&[u64]>, read: impl Fn(Snapshot) -> F) -> Result<Survey<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let log = load_log(self.store).await?;
        let state = log.state();
        if state.sequence == 0 {
            // Reports an empty folder as a missing store.
            self.run().await?;
        }
        let records: Vec<&SnapshotRecord> = match steps {
            None => state.live().collect(),
            Some(steps) => {
                let missing = |step: u64| Error::not_found(format!("the store has no step {step}; `tensorcask ls` lists its steps"));
                let of_step = |&step: &u64| state.at_step(step).ok_or_else(|| missing(step).object(self.store.url()));
                let mut records: Vec<&SnapshotRecord> = steps.iter().map(of_step).collect::<Result<_>>()?;
                records.sort_unstable_by_key(|record| record.sequence);
                records.dedup();
                records
            }
        };
        let read = &read;
        let of_record = |record: &SnapshotRecord| {
            let step = record.step;
            let id = record.id;
            async move {
                let result = match Snapshot::load(self.store, state, id).await {
                    Ok(snapshot) => read(snapshot).await,
                    Err(error) => Err(error),
                };
                match result {
                    Ok(found) => Ok(Ok((step, found))),
                    Err(error) if error.is_unreadable() => Ok(Err(SkippedSnapshot { step, snapshot: id, error })),
                    Err(error) => Err(error),
                }
            }
        };
        let mut survey = Survey { found: Vec::with_capacity(records.len()), skipped: Vec::new() };
        for result in concurrently(CONCURRENT_SNAPSHOTS, records.into_iter().map(of_record)).await? {
            match result {
                Ok(found) => survey.found.push(found),
                Err(skipped) => survey.skipped.push(skipped),
            }
        }
        if !survey.skipped.is_empty() {
            // A job may have freed steps meanwhile: they are no more, and no damage.
            let now = load_log(self.store).await?;
            let is_live =
                |skipped: &SkippedSnapshot| now.state().by_id(skipped.snapshot).is_some_and(|now| now.status == SnapshotStatus::Live);
            survey.skipped.retain(is_live);
        }
        for skipped in &survey.skipped {
            tracing::warn!(step = skipped.step, error = %skipped.error, "this step cannot be read; it is left out");
        }
        Ok(survey)
    }
}
