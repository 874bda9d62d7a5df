//! Pin, forget and retention: log entries that never disturb a writer.

use std::collections::{BTreeMap, BTreeSet};

use super::{Log, LogState, SnapshotRecord, SnapshotStatus};
use crate::wire::{Event, FINITE, Id};
use crate::{Error, ErrorKind, Result, Store};

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
        let mut log = Log::load(self).await?;
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
        forget_unwanted(&mut Log::load(self).await?, retention).await.map(|(retained, _)| retained)
    }
}

/// Forgets the live steps of a log that `retention` does not keep. Also returns the snapshots that it reduces to their
/// weights, which are still whole.
pub(crate) async fn forget_unwanted(log: &mut Log, retention: Retention) -> Result<(Retained, Vec<SnapshotRecord>)> {
    let writer = Id::random()?;
    let mut tags = FiniteTags::default();
    let mut forgotten: Vec<Id> = Vec::new();
    let Decision { reduce, kept_finite, .. } = loop {
        let decision = tags.decide(log, retention).await?;
        if decision.forget.is_empty() {
            break decision;
        }
        let (mut last, mut is_outdated): (Vec<Id>, bool) = (Vec::new(), false);
        let appended = log
            .append(writer, |state| {
                let decision = retention.decide(state, &tags)?;
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
    let mut log = Log::load(store).await?;
    log.append(Id::random()?, |state| Ok(Event::Pinned { snapshot: live_step(state, step)?.id, pinned })).await?;
    log.write_catalog_if_due().await;
    live_step(log.state(), step).cloned()
}

/// Forgets the live snapshots among these, unless they are pinned.
pub(super) async fn forget_by_id(store: &Store, snapshots: &[Id]) -> Result<Vec<SnapshotRecord>> {
    let mut log = Log::load(store).await?;
    let mut forgotten = Vec::new();
    for some in snapshots.chunks(MAX_FORGOTTEN) {
        let wanted = |state: &LogState| -> Vec<Id> {
            let is_live = |id: &&Id| state.by_id(**id).is_some_and(|record| record.status == SnapshotStatus::Live && !record.pinned);
            some.iter().filter(is_live).copied().collect()
        };
        let ids = wanted(log.state());
        if ids.is_empty() {
            continue;
        }
        log.append(Id::random()?, |state| match wanted(state) {
            gone if gone.is_empty() => Err(Error::new(ErrorKind::Conflict, "another process forgot these snapshots meanwhile; try again")),
            snapshots => Ok(Event::Forgotten { snapshots }),
        })
        .await?;
        forgotten.extend(ids.iter().filter_map(|&id| log.state().by_id(id).cloned()));
        log.write_catalog_if_due().await;
    }
    Ok(forgotten)
}

/// Live steps to keep; all others are forgotten. Pinned steps and the newest step are always kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// Number of newest snapshots to keep, by commit.
    pub keep_last: Option<u64>,
    /// Interval of steps to keep: the multiples of this number.
    pub keep_every: Option<u64>,
    /// Interval of steps that are not forgotten, although nothing else keeps them.
    /// [`maintain::retain`](crate::maintain::retain()) reduces them to their weights.
    pub keep_weights_every: Option<u64>,
}

impl Retention {
    /// Refuses a retention that keeps nothing.
    pub fn check(self) -> Result<()> {
        let all = [self.keep_last, self.keep_every, self.keep_weights_every];
        match self == Self::default() || all.contains(&Some(0)) {
            true => {
                Err(Error::invalid("nothing to keep was given: set how many last steps to keep, or an interval of steps, each at least 1"))
            }
            false => Ok(()),
        }
    }

    /// Decides which live snapshots this retention keeps, as far as `tags` tell which of them are finite.
    pub(crate) fn decide(self, state: &LogState, tags: &FiniteTags) -> Result<Decision> {
        self.check()?;
        let is_multiple = |every: Option<u64>, step: u64| every.is_some_and(|every| step.is_multiple_of(every));
        let keeps = |nth: u64, record: &SnapshotRecord| {
            nth == 0 || record.pinned || self.keep_last.is_some_and(|last| nth < last) || is_multiple(self.keep_every, record.step)
        };
        let (kept, dropped): (Vec<_>, Vec<_>) = state.live().rev().zip(0u64..).partition(|(record, nth)| keeps(*nth, record));
        let without_position = |(record, _)| record;
        let (kept, mut dropped): (Vec<&SnapshotRecord>, Vec<&SnapshotRecord>) =
            (kept.into_iter().map(without_position).collect(), dropped.into_iter().map(without_position).collect());
        let mut decision = Decision::default();
        if !dropped.is_empty() {
            let kept: BTreeSet<Id> = kept.iter().map(|record| record.id).collect();
            // Snapshots with all roles, newest first. A job cannot resume from a reduced snapshot.
            let whole = state.live().rev().filter(|record| record.roles.is_none());
            match tags.last_good(whole.map(|record| (record.id, kept.contains(&record.id)))) {
                LastGood::Unknown(ids) => decision.unknown = ids,
                LastGood::Dropped(id) => decision.kept_finite = state.by_id(id).cloned(),
                LastGood::NotNeeded => {}
            }
        }
        let finite = decision.kept_finite.as_ref().map(|record| record.id);
        dropped.retain(|record| Some(record.id) != finite);
        dropped.reverse();
        let (reduce, forget): (Vec<_>, Vec<_>) = dropped.into_iter().partition(|record| is_multiple(self.keep_weights_every, record.step));
        decision.reduce = reduce.into_iter().filter(|record| record.roles.is_none()).cloned().collect();
        decision.forget = forget.into_iter().cloned().collect();
        Ok(decision)
    }
}

/// Live snapshots that a retention forgets or reduces, ordered by commit.
#[derive(Debug, Default)]
pub(crate) struct Decision {
    pub forget: Vec<SnapshotRecord>,
    /// Snapshots to reduce to their weights.
    pub reduce: Vec<SnapshotRecord>,
    /// Newest finite snapshot, if it stays only for being that.
    pub kept_finite: Option<SnapshotRecord>,
    /// Snapshots that may be finite or not. The decision holds only once it is known of these.
    unknown: Vec<Id>,
}

/// Marks of snapshots as finite or not, from their manifests. Spec: `spec/manifest.md`, 1.4.
#[derive(Debug, Default)]
pub(crate) struct FiniteTags(BTreeMap<Id, FiniteTag>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FiniteTag {
    Finite,
    NotFinite,
    /// The manifest does not say, or cannot be read.
    Unchecked,
}

/// The last finite snapshot, from the view of a retention.
enum LastGood {
    /// No snapshot has to stay: the newest finite one is kept, or no newer one that is kept is known to hold NaN.
    NotNeeded,
    /// The newest finite snapshot would be dropped, and a newer one that is kept is not finite.
    Dropped(Id),
    /// Snapshots that come first and whose manifests were not read yet.
    Unknown(Vec<Id>),
}

impl FiniteTags {
    /// Decides what to forget. Reads manifests until it is known whether the kept snapshots are finite, newest first.
    pub(crate) async fn decide(&mut self, log: &mut Log, retention: Retention) -> Result<Decision> {
        loop {
            let decision = retention.decide(log.state(), self)?;
            if decision.unknown.is_empty() {
                return Ok(decision);
            }
            // Nothing is known of snapshots whose manifests are damaged.
            let _damaged = log.summarise(Some(&decision.unknown)).await?;
            for id in decision.unknown {
                let summary = log.state().by_id(id).and_then(|record| record.summary.as_ref());
                let tag = match summary.and_then(|summary| summary.user.get(FINITE)?.as_bool()) {
                    Some(true) => FiniteTag::Finite,
                    Some(false) => FiniteTag::NotFinite,
                    None => FiniteTag::Unchecked,
                };
                self.0.insert(id, tag);
            }
        }
    }

    /// Finds the last finite snapshot among whole snapshots: ids, and whether each is kept, newest first.
    fn last_good(&self, snapshots: impl Iterator<Item = (Id, bool)>) -> LastGood {
        let mut is_broken = false;
        let mut snapshots = snapshots.peekable();
        while let Some(&(id, is_kept)) = snapshots.peek() {
            match self.0.get(&id) {
                Some(FiniteTag::Finite) if is_broken && !is_kept => return LastGood::Dropped(id),
                Some(FiniteTag::Finite) => return LastGood::NotNeeded,
                Some(FiniteTag::NotFinite) => is_broken |= is_kept,
                Some(FiniteTag::Unchecked) => {}
                None => {
                    let unknown = snapshots.map(|(id, _)| id).filter(|id| !self.0.contains_key(id));
                    return LastGood::Unknown(unknown.take(MANIFESTS_AT_ONCE).collect());
                }
            }
            snapshots.next();
        }
        LastGood::NotNeeded
    }
}

/// Number of manifests that are read before the next decision.
const MANIFESTS_AT_ONCE: usize = 32;

/// Maximum number of snapshots that one entry forgets. Keeps the entry well below its size limit.
const MAX_FORGOTTEN: usize = 10_000;

/// Returns the live snapshot of a step.
pub(crate) fn live_step(state: &LogState, step: u64) -> Result<&SnapshotRecord> {
    state.at_step(step).ok_or_else(|| Error::not_found(format!("the store has no step {step}; `tensorcask ls` lists its steps")))
}
