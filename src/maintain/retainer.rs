//! Retention of a store that a job goes on saving to: forgets steps, and reduces others to their weights.

use std::collections::BTreeMap;

use super::CompactOptions;
use super::reduce::{Hold, OnDamage, Reduced, reduce_all};
use crate::commit::{FiniteMarks, Freeing, Log, SnapshotRecord, Standing, decide_retention, forget_unwanted, load_complete_log};
use crate::wire::Id;
use crate::{ErrorKind, Free, Result, Retained, Retention, Store};

/// Result of [`apply_retention`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RetentionReport {
    /// Snapshots that were forgotten, and the finite snapshot that was kept.
    pub retained: Retained,
    /// Snapshots of [`Retention::keep_weights_every`] that were reduced to roles `model` and `ema`, or are held as they are,
    /// newest first.
    pub reduced: Vec<Reduced>,
    /// Snapshots whose objects were deleted ([`Retention::free`]). They were forgotten before.
    pub freed: Vec<SnapshotRecord>,
}

/// Forgets the live steps that `retention` does not keep, as [`Store::retain`] does, and reduces the steps of
/// [`Retention::keep_weights_every`] to their weights. Nothing is deleted until [`gc`](super::gc()) runs.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::{Dtype, Metadata, Policy, Retention, Store, TensorView, maintain};
/// let store = Store::open("memory://maintain-retain-example")?;
/// let mut writer = store.writer(Policy::Full).await?;
/// for step in 1..=5 {
///     let names = ["model.w", "optimizer.exp_avg.w"];
///     let state = names.map(|name| TensorView::new(name, Dtype::U8, &[2], &[1, 2]).unwrap());
///     writer.save(step, &state, &[], &Metadata::default()).await?;
/// }
/// let retention = Retention { keep_last: Some(2), keep_weights_every: Some(2), ..Retention::default() };
/// let report = maintain::apply_retention(&store, retention, &maintain::CompactOptions::default()).await?;
/// assert_eq!(report.retained.forgotten.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 3]);
/// assert_eq!(report.reduced[0].record.roles.as_deref(), Some(&["model".to_owned()][..])); // step 2
/// # Ok(()) }
/// ```
pub async fn apply_retention(store: &Store, retention: Retention, options: &CompactOptions) -> Result<RetentionReport> {
    Retainer::new(store, retention, options.clone()).apply().await
}

/// Reduces the snapshots that `retention` does not keep to tensors of the given roles.
pub async fn retain_roles(store: &Store, retention: Retention, roles: &[String], options: &CompactOptions) -> Result<RetentionReport> {
    let mut log = load_complete_log(store).await?;
    let decision = decide_retention(&mut log, retention, &mut FiniteMarks::default()).await?;
    let records = [decision.forget, decision.reduce].concat();
    let reduced = reduce_all(store, &mut log, records, roles, options, OnDamage::Fail).await?;
    Ok(RetentionReport { retained: Retained { forgotten: vec![], kept_finite: decision.kept_finite }, reduced, freed: vec![] })
}

/// Applies a retention after each save, as [`apply_retention`] does. Keeps the log and the manifests between the calls,
/// and does not look again at snapshots that cannot be reduced. Looks at damaged ones every 100 calls: a copy may repair
/// them.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::{Dtype, Metadata, Policy, Retention, Store, TensorView, maintain};
/// let store = Store::open("memory://retainer-example")?;
/// let mut writer = store.writer(Policy::Full).await?;
/// let retention = Retention { keep_last: Some(1), ..Retention::default() };
/// let mut retainer = maintain::Retainer::new(&store, retention, maintain::CompactOptions::default());
/// for step in 1..=3 {
///     writer.save(step, &[TensorView::new("model.w", Dtype::U8, &[2], &[1, 2])?], &[], &Metadata::default()).await?;
///     assert_eq!(retainer.apply().await?.retained.forgotten.len(), usize::from(step > 1));
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Retainer {
    store: Store,
    retention: Retention,
    options: CompactOptions,
    /// The log; `None` before the first call and after a failed one.
    log: Option<Log>,
    /// Snapshots that cannot be reduced as long as they stay as they are.
    irreducible: BTreeMap<Id, Reduced>,
    /// Which snapshots are finite, as far as it was asked.
    marks: FiniteMarks,
    freeing: Freeing,
    /// Number of calls so far.
    calls: u64,
}

/// Roles that a step of [`Retention::keep_weights_every`] keeps: weights of the model, and averages of them.
const WEIGHTS: [&str; 2] = ["model", "ema"];

/// Number of calls after which damaged objects are looked at again.
const CALLS_BETWEEN_LOOKS: u64 = 100;

impl Retainer {
    /// Sends no request.
    pub fn new(store: &Store, retention: Retention, options: CompactOptions) -> Self {
        Self {
            store: store.clone(),
            retention,
            options,
            log: None,
            irreducible: BTreeMap::new(),
            marks: FiniteMarks::default(),
            freeing: Freeing::default(),
            calls: 0,
        }
    }

    /// The retention that is applied.
    pub fn retention(&self) -> Retention {
        self.retention
    }

    /// Applies another retention from the next call on.
    pub fn set_retention(&mut self, retention: Retention) {
        self.retention = retention;
    }

    /// Looks at the store before the first save of a process. The first [`apply`](Self::apply) then frees what an earlier process has
    /// forgotten. Does nothing after the first call of it, or if there is no store yet.
    pub async fn begin(&mut self) -> Result<()> {
        if self.calls > 0 {
            return Ok(());
        }
        let manifests = self.store.objects().list("snapshots").await?;
        match load_complete_log(&self.store).await {
            Ok(log) => {
                self.freeing = Freeing::begin(&self.store, log.state(), &manifests).await;
                self.log = Some(log);
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Forgets and reduces steps. After an error, the next call starts anew.
    pub async fn apply(&mut self) -> Result<RetentionReport> {
        if self.calls.is_multiple_of(CALLS_BETWEEN_LOOKS) {
            // The log still has the summaries of readable manifests, so only the others are requested again.
            self.marks = FiniteMarks::default();
            self.irreducible.retain(|_, held| held.hold == Hold::Lasting);
        }
        self.calls = self.calls.saturating_add(1);
        let mut log = match self.log.take() {
            Some(mut log) => match log.catch_up().await? {
                Standing::Same => log,
                Standing::Stale(_) => load_complete_log(&self.store).await?,
            },
            None => load_complete_log(&self.store).await?,
        };
        let (retained, mut records) = forget_unwanted(&mut log, self.retention, &mut self.marks).await?;
        let is_known =
            |record: &SnapshotRecord| self.irreducible.get(&record.id).is_some_and(|held| held.record.revision == record.revision);
        let mut reduced: Vec<Reduced> =
            records.extract_if(.., |record| is_known(record)).filter_map(|record| self.irreducible.get(&record.id).cloned()).collect();
        if !records.is_empty() {
            let roles = WEIGHTS.map(str::to_owned);
            reduced.extend(reduce_all(&self.store, &mut log, records, &roles, &self.options, OnDamage::Hold).await?);
        }
        self.irreducible = reduced.iter().filter(|held| held.hold != Hold::Brief).map(|held| (held.record.id, held.clone())).collect();
        reduced.sort_by_key(|reduced| std::cmp::Reverse(reduced.record.sequence));
        let freed = match self.retention.free {
            Free::NextSave => self.freeing.free(&mut log).await?,
            Free::Gc => Vec::new(),
        };
        self.log = Some(log);
        Ok(RetentionReport { retained, reduced, freed })
    }
}
