//! Many ranks, one snapshot: each rank uploads its casks and gives a receipt.
//!
//! A [`RankWriter`] encodes and uploads what one rank has of a state. It commits nothing: the coordinator's
//! [`Writer`](super::Writer) commits the receipts of all ranks, or none (`receipts.rs`).
//!
//! Invariant: the base that a rank keeps is used only after a snapshot of its receipt was committed.

use super::WriterOptions;
use super::base_cache::NextBase;
use super::changed_rows::NextRows;
use super::layout::StateLayout;
use super::parent::Parent;
use super::pipeline::SavePipeline;
use crate::chain::{Policy, PolicyDecision, chain_of, whole_microseconds};
use crate::commit::{Log, LogState, Standing, load_log, refuse_features};
use crate::precision::PrecisionDecision;
use crate::wire::{CaskRef, Id, MAX_RANK, RankSave, Receipt, ReceiptShard, ReceiptTensor};
use crate::{AheadUploads, Blob, Error, ErrorKind, Result, Store, TensorView, boxed};

/// Rank of a process in a job of many ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Number of the rank, from 0 on.
    pub rank: u32,
    /// Number of all ranks.
    pub world: u32,
    /// Number of restarts of the job. Receipts of two attempts are never mixed, so leftovers of a killed attempt do no
    /// harm.
    pub attempt: u64,
}

/// Uploads the shards and blobs of one rank. Commits nothing and fences nobody: the coordinator's
/// [`Writer`](crate::Writer) does.
#[derive(Debug)]
pub struct RankWriter {
    part: RankPart,
    log: Log,
}

/// Encodes and uploads what one rank has of each state.
#[derive(Debug)]
pub(crate) struct RankPart {
    pub(super) pipeline: SavePipeline,
    pub rank: Rank,
    /// Whether no other rank saves parameters or moments.
    is_alone: bool,
    pending: Option<Pending>,
}

/// Casks of the last save, and the base that they become once a snapshot with them is committed.
#[derive(Debug)]
struct Pending {
    casks: Vec<CaskRef>,
    /// The state, if it is kept.
    base: Option<NextBase>,
    rows: NextRows,
}

/// Treatment of a parent that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Save the shards of the rank whole.
    SaveWhole,
    /// Fail: the parent may be readable at another place.
    Fail,
}

/// Whether the store that a rank saves to is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StorePresence {
    /// The store is there, and its log was read.
    Present,
    /// The store was deleted. The shards of the rank are saved whole.
    Deleted,
}

impl Store {
    /// Opens a store for the saves of one rank. The coordinator must have opened the store for writing before. All
    /// ranks use the same policy; `Adaptive` decides by the sizes of the last snapshots, because no rank can estimate the size of
    /// all shards. Several ranks cannot use a precision that [needs the whole state](crate::Precision::needs_whole_state).
    pub async fn rank_writer(&self, rank: Rank, options: WriterOptions) -> Result<RankWriter> {
        if rank.rank >= rank.world || rank.world > MAX_RANK {
            return Err(Error::invalid(format!("rank {} of {}: ranks count from 0 to world - 1", rank.rank, rank.world)));
        }
        if options.precision.needs_whole_state() && rank.world > 1 {
            return Err(parts_are_refused(rank.world));
        }
        let log = load_log(self).await?;
        Ok(RankWriter { part: RankPart::new(self, rank, options), log })
    }
}

impl RankWriter {
    /// Encodes and uploads the shards and blobs of this rank. Readers see nothing until the coordinator has committed
    /// the receipts of all ranks.
    pub async fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        let presence = self.catch_up().await?;
        let policy = self.part.pipeline.options.policy;
        let (parent, _) = decide_for_ranks(policy, &mut self.log, &self.part.pipeline.store, step).await?;
        let parent = parent.filter(|_| presence == StorePresence::Present);
        self.upload(step, parent, tensors, blobs).await
    }

    #[boxed]
    async fn upload(&mut self, step: u64, parent: Option<Id>, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        refuse_features(&self.log.state().may_ignore)?;
        let parent = open_parent(&self.part.pipeline.store, self.log.state(), parent).await?;
        let Self { part, log } = self;
        let adapted = match part.pipeline.options.precision.is_auto() {
            true => {
                let roles = part.pipeline.options.roles.clone();
                let layout = StateLayout::of_rank(tensors, blobs, &roles, part.pipeline.store.limits(), Some(part.rank.rank))?;
                part.pipeline.adapt(log, step, &layout).await?
            }
            false => None,
        };
        let mut receipt = part.upload(step, parent.as_ref(), Unreadable::SaveWhole, tensors, blobs).await?;
        if let Some(adapted) = adapted {
            receipt.user.insert(PrecisionDecision::KEY.to_owned(), adapted.to_value()?);
        }
        Ok(receipt)
    }

    /// Reads the log entries committed since the last save. Reads the whole log if the store was deleted or replaced.
    #[boxed]
    async fn catch_up(&mut self) -> Result<StorePresence> {
        let Standing::Stale(stale) = self.log.catch_up().await? else { return Ok(StorePresence::Present) };
        tracing::warn!(error = %stale.error, rank = self.part.rank.rank, "the store was deleted or replaced; reading its log from the start");
        self.part.forget_base();
        match load_log(&self.part.pipeline.store).await {
            Ok(log) => self.log = log,
            // The coordinator creates the store before it commits.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(StorePresence::Deleted),
            Err(e) => return Err(e),
        }
        Ok(StorePresence::Present)
    }

    /// Says whether no other rank saves parameters or moments in the next save: their owner is this rank, as in a job with replicated
    /// data parallelism. This rank then finds the weights of moments that an optimizer numbers, as a [`Writer`](crate::Writer) does.
    pub fn set_alone(&mut self, is_alone: bool) {
        self.part.is_alone = is_alone;
    }

    /// Like [`Writer::send_ahead`](crate::Writer::send_ahead), for the casks of this rank.
    pub fn send_ahead(&mut self, ahead: Option<AheadUploads>) {
        self.part.pipeline.ahead = ahead;
    }

    /// Like [`save`](Self::save), against the parent that the coordinator chose for all ranks with
    /// [`Writer::next_parent`](crate::Writer::next_parent).
    pub async fn save_on(&mut self, step: u64, parent: Option<Id>, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        self.catch_up().await?;
        self.upload(step, parent, tensors, blobs).await
    }
}

impl RankPart {
    pub(crate) fn new(store: &Store, rank: Rank, options: WriterOptions) -> Self {
        Self { pipeline: SavePipeline::new(store, options), rank, is_alone: false, pending: None }
    }

    /// Forgets the base that is kept. The next save is a base, or reads its parent from the store.
    pub(crate) fn forget_base(&mut self) {
        self.pipeline.base.clear();
        self.pipeline.changed_rows.clear();
        self.pending = None;
    }

    /// Encodes and uploads a state against this parent, or whole without one. If the parent cannot be read, saves the shards
    /// whole, or fails.
    #[boxed]
    pub(crate) async fn upload(
        &mut self,
        step: u64,
        mut parent: Option<&Parent>,
        unreadable: Unreadable,
        tensors: &[TensorView<'_>],
        blobs: &[Blob<'_>],
    ) -> Result<Receipt> {
        let store = self.pipeline.store.clone();
        let Rank { rank, world, attempt } = self.rank;
        let roles = self.pipeline.options.roles.clone();
        let mut layout = StateLayout::of_rank(tensors, blobs, &roles, store.limits(), Some(rank))?;
        self.promote_pending(parent);
        self.pipeline.changed_rows.add(&layout);
        if world == 1 || self.is_alone {
            self.pipeline.pair_numbered(step, &mut layout, parent).await;
        }
        let mut uploaded = loop {
            match self.pipeline.write_casks(step, &layout, parent).await {
                Ok(uploaded) => break uploaded,
                Err(error) => {
                    self.pipeline.base.clear();
                    self.pipeline.discard_casks().await;
                    if parent.is_none() || !Parent::is_dispensable(&error) || unreadable == Unreadable::Fail {
                        return Err(error);
                    }
                    tracing::warn!(%error, "no delta can be made; saving this rank's shards whole");
                    parent = None;
                }
            }
        };
        if let Err(error) = uploaded.publish().await {
            // The failed attempt may have dropped chunks of the old base.
            self.pipeline.base.clear();
            self.pipeline.discard_casks().await;
            return Err(error);
        }
        let tensors = layout.tensors.iter().zip(&uploaded.crcs).map(|(tensor, crcs)| {
            let description = &tensor.description;
            let shards = tensor.shards.iter().zip(crcs).map(|(view, crcs)| ReceiptShard {
                offset: view.rect().offset.clone(),
                shape: view.rect().shape.clone(),
                crcs: ReceiptShard::crcs_to_text(crcs),
            });
            ReceiptTensor {
                name: description.name.clone(),
                dtype: description.dtype.name().to_owned(),
                shape: description.shape.clone(),
                role: description.role.clone(),
                param: description.param.clone(),
                alias_of: description.alias_of.and_then(|at| Some(layout.tensors.get(at)?.description.name.clone())),
                slot: tensor.slot,
                shards: shards.collect(),
            }
        });
        let next_rows = self.pipeline.next_rows(&layout, parent)?;
        let parent = parent.map(Parent::reference);
        let mut receipt = Receipt::new(RankSave { step, attempt, rank, world }, parent, uploaded.casks, tensors.collect());
        receipt.finite = uploaded.finite;
        let whole = |ms: Option<f64>| ms.map(whole_microseconds);
        (receipt.encode_us, receipt.upload_us) = (whole(uploaded.times.encode_ms), whole(uploaded.times.upload_ms));
        self.pending = next_rows.map(|rows| Pending { casks: receipt.casks.clone(), base: uploaded.next_base, rows });
        Ok(receipt)
    }

    /// Keeps the state of the last save as the base if the parent holds one of its casks; drops it otherwise.
    fn promote_pending(&mut self, parent: Option<&Parent>) {
        let Some(Pending { casks, base, rows }) = self.pending.take() else { return };
        match parent {
            // A snapshot leaves out casks that hold only replicas of what other ranks have.
            Some(parent) if casks.iter().any(|cask| parent.snapshot.manifest().casks.contains(cask)) => {
                let snapshot = parent.snapshot.record().id;
                if let Some(base) = base {
                    self.pipeline.base.promote(snapshot, base);
                }
                self.pipeline.changed_rows.restart(snapshot, rows);
            }
            _ => {}
        }
    }
}

/// The error of a job of several ranks with a precision that needs the whole state: no rank sees it, and replicas must be rounded
/// alike.
pub(crate) fn parts_are_refused(world: u32) -> Error {
    Error::unsupported(format!(
        "the precision `auto` and settings with `sensitive` measure the whole state, but {world} ranks save parts of it; \
         use lossless, near or compact, or other settings"
    ))
}

/// Parent of the deltas of all ranks for a snapshot of `step`, by a policy and the sizes of earlier snapshots, so that all
/// processes choose the same. `manifests` is the store, or a mirror of it.
#[boxed]
pub(crate) async fn decide_for_ranks(policy: Policy, log: &mut Log, manifests: &Store, step: u64) -> Result<(Option<Id>, PolicyDecision)> {
    let max_depth = manifests.limits().max_chain_depth;
    let newest = log.state().latest().map(|latest| latest.id).filter(|_| policy == Policy::Adaptive);
    let chain = newest.and_then(|newest| chain_of(log.state(), newest, max_depth).ok()).unwrap_or_default();
    let links: Vec<Id> = chain.iter().map(|link| link.id).collect();
    // A damaged manifest has no size; opening the parent finds the damage.
    let _damaged = log.summarise_from(manifests, Some(&links)).await?;
    Ok(policy.decide_by_sizes(log.state(), step, max_depth))
}

/// Opens the parent of deltas; `None` if the log does not have it, or it cannot be read.
#[boxed]
pub(crate) async fn open_parent(store: &Store, log: &LogState, parent: Option<Id>) -> Result<Option<Parent>> {
    match parent.filter(|id| log.by_id(*id).is_some()) {
        Some(id) => Parent::open(store, log, id).await,
        None => Ok(None),
    }
}
