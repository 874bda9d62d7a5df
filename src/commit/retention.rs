//! Pin, forget and retention: log entries that never disturb a writer.

use std::collections::BTreeSet;

use super::{Decision, FiniteMarks, Log, LogState, Retention, SnapshotRecord, SnapshotStatus, load_complete_log, load_log};
use crate::wire::{Event, FINITE, Id};
use crate::{Error, ErrorKind, Result, Store, boxed};

impl Store {
    /// Protects a step from being forgotten until it is unpinned.
    pub async fn pin(&self, step: u64) -> Result<SnapshotRecord> {
        set_pinned(self, step, true).await
    }

    /// Ends the protection of a step. An unpinned step stays as it is.
    pub async fn unpin(&self, step: u64) -> Result<SnapshotRecord> {
        set_pinned(self, step, false).await
    }

    /// Marks steps as no longer wanted. Their bytes stay until no newer delta needs them and garbage collection runs.
    ///
    /// One commit covers up to ten thousand steps. Of a longer list, the first commits stand if a later one fails.
    pub async fn forget(&self, steps: &[u64]) -> Result<Vec<SnapshotRecord>> {
        let mut log = load_complete_log(self).await?;
        let steps: Vec<u64> = steps.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        if steps.is_empty() {
            return Err(Error::invalid("no step to forget"));
        }
        let wanted = |state: &LogState, steps: &[u64]| -> Result<Vec<Id>> {
            let forget = |&step: &u64| match live_step(state, step)? {
                record if record.pinned => Err(Error::invalid(format!("step {step} is pinned; unpin it first (`tensorcask pin --off`)"))),
                record => Ok(record.id),
            };
            steps.iter().map(forget).collect()
        };
        // Checks all steps before the first commit.
        let ids = wanted(log.state(), &steps)?;
        for steps in steps.chunks(MAX_FORGOTTEN) {
            log.append(Id::random()?, |state| Ok(Event::Forgotten { snapshots: wanted(state, steps)? })).await?;
            log.write_catalog_if_due().await;
        }
        Ok(ids.iter().filter_map(|&id| log.state().by_id(id).cloned()).collect())
    }

    /// Forgets the live steps that `retention` does not keep. Decides again on the state of the log at each
    /// commit, so a step that is pinned or saved meanwhile is safe. [`History::unwanted`](super::History::unwanted)
    /// returns the same snapshots and forgets nothing.
    ///
    /// If a kept step is marked as not finite, the newest finite step before it stays, too. Saves with statistics or with
    /// a [`FiniteCheck`](crate::FiniteCheck) mark their steps.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Dtype, FiniteCheck, Metadata, Policy, Retention, Store, TensorView, WriterOptions};
    /// let store = Store::open("memory://retain-example")?;
    /// let options = WriterOptions { policy: Policy::Full, check: FiniteCheck::Tag, ..WriterOptions::default() };
    /// let mut writer = store.writer_with(options).await?;
    /// for (step, value) in [(1, 0.5f32), (2, 0.25), (3, f32::NAN), (4, f32::NAN)] {
    ///     let bytes = value.to_le_bytes();
    ///     let state = [TensorView::new("w", Dtype::F32, &[], &bytes)?];
    ///     writer.save(step, &state, &[], &Metadata::default()).await?;
    /// }
    /// let retained = store.retain(Retention { keep_last: Some(2), ..Retention::default() }).await?;
    /// assert_eq!(retained.forgotten.iter().map(|record| record.step).collect::<Vec<_>>(), [1]);
    /// assert_eq!(retained.kept_finite.map(|record| record.step), Some(2));
    /// # Ok(()) }
    /// ```
    pub async fn retain(&self, retention: Retention) -> Result<Retained> {
        forget_unwanted(&mut load_complete_log(self).await?, retention, &mut FiniteMarks::default()).await.map(|(retained, _)| retained)
    }
}

/// Forgets the live steps of a log that `retention` does not keep. Also returns the snapshots that it reduces to their
/// weights, which are still whole.
pub(crate) async fn forget_unwanted(
    log: &mut Log,
    retention: Retention,
    marks: &mut FiniteMarks,
) -> Result<(Retained, Vec<SnapshotRecord>)> {
    let writer = Id::random()?;
    let mut forgotten: Vec<Id> = Vec::new();
    let Decision { reduce, kept_finite, .. } = loop {
        let decision = decide_retention(log, retention, marks).await?;
        if decision.forget.is_empty() {
            break decision;
        }
        let (mut last, mut is_outdated): (Vec<Id>, bool) = (Vec::new(), false);
        let appended = log
            .append(writer, |state| {
                let decision = retention.decide(state, marks)?;
                last = decision.forget.iter().take(MAX_FORGOTTEN).map(|record| record.id).collect();
                // Another process changed the store: which of its snapshots are finite is not known yet.
                is_outdated = !decision.unknown.is_empty() || last.is_empty();
                match is_outdated {
                    true => Err(Error::new(ErrorKind::Conflict, "the store changed while steps were being forgotten; try again")),
                    false => Ok(Event::Forgotten { snapshots: last.clone() }),
                }
            })
            .await;
        match appended {
            Ok(_) => {
                log.write_catalog_if_due().await;
                forgotten.append(&mut last);
            }
            // Each round reads at least one more entry of another process.
            Err(error) if is_outdated && error.kind() == ErrorKind::Conflict => {}
            Err(error) => return Err(error),
        }
    };
    if let Some(kept) = &kept_finite {
        tracing::warn!(step = kept.step, "steps that are kept hold NaN or infinities, so the newest finite step before them stays");
    }
    let forgotten = forgotten.into_iter().filter_map(|id| log.state().by_id(id).cloned()).collect();
    Ok((Retained { forgotten, kept_finite }, reduce))
}

/// Decides what a retention forgets. Reads manifests until it is known whether the kept snapshots are finite, newest first.
pub(crate) async fn decide_retention(log: &mut Log, retention: Retention, marks: &mut FiniteMarks) -> Result<Decision> {
    loop {
        let decision = retention.decide(log.state(), marks)?;
        if decision.unknown.is_empty() {
            return Ok(decision);
        }
        // Nothing is known of snapshots whose manifests are damaged.
        let _damaged = log.summarise(Some(&decision.unknown)).await?;
        for id in decision.unknown {
            let summary = log.state().by_id(id).and_then(|record| record.summary.as_ref());
            marks.note(id, summary.and_then(|summary| summary.user.get(FINITE)?.as_bool()));
        }
    }
}

/// Result of [`Store::retain`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Retained {
    /// Snapshots that were forgotten, or would be, ordered by commit.
    pub forgotten: Vec<SnapshotRecord>,
    /// Snapshot that the retention alone would not keep. It stays because it is the newest finite one, and a newer snapshot
    /// that is kept holds NaN or infinities.
    pub kept_finite: Option<SnapshotRecord>,
}

async fn set_pinned(store: &Store, step: u64, pinned: bool) -> Result<SnapshotRecord> {
    let mut log = load_log(store).await?;
    log.append(Id::random()?, |state| Ok(Event::Pinned { snapshot: live_step(state, step)?.id, pinned })).await?;
    log.write_catalog_if_due().await;
    live_step(log.state(), step).cloned()
}

/// Forgets the live snapshots among these, unless they are pinned.
pub(super) async fn forget_by_id(store: &Store, snapshots: &[Id]) -> Result<Vec<SnapshotRecord>> {
    let mut log = load_complete_log(store).await?;
    forget_among(&mut log, Id::random()?, snapshots).await
}

/// Forgets the live snapshots among these, unless they are pinned. Returns those that were forgotten.
#[boxed]
pub(crate) async fn forget_among(log: &mut Log, writer: Id, snapshots: &[Id]) -> Result<Vec<SnapshotRecord>> {
    let mut forgotten = Vec::new();
    for some in snapshots.chunks(MAX_FORGOTTEN) {
        let wanted = |state: &LogState| -> Vec<Id> {
            let is_live = |id: &&Id| state.by_id(**id).is_some_and(|record| record.status == SnapshotStatus::Live && !record.pinned);
            some.iter().filter(is_live).copied().collect()
        };
        if wanted(log.state()).is_empty() {
            continue;
        }
        let mut ids = Vec::new();
        let mut are_gone = false;
        let appended = log.append(writer, |state| {
            // Another process may have pinned or forgotten some since.
            ids = wanted(state);
            are_gone = ids.is_empty();
            match are_gone {
                true => Err(Error::new(ErrorKind::Conflict, "another process has pinned or forgotten these snapshots")),
                false => Ok(Event::Forgotten { snapshots: ids.clone() }),
            }
        });
        match appended.await {
            Ok(_) => log.write_catalog_if_due().await,
            Err(_) if are_gone => {}
            Err(error) => return Err(error),
        }
        forgotten.extend(ids.iter().filter_map(|&id| log.state().by_id(id).cloned()));
    }
    Ok(forgotten)
}

/// Maximum number of snapshots that one entry forgets. Keeps the entry well below its size limit.
const MAX_FORGOTTEN: usize = 10_000;

/// Returns the live snapshot of a step.
pub(crate) fn live_step(state: &LogState, step: u64) -> Result<&SnapshotRecord> {
    state.at_step(step).ok_or_else(|| Error::not_found(format!("the store has no step {step}; `tensorcask ls` lists its steps")))
}
