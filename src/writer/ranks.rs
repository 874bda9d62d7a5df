//! Many ranks, one snapshot: each uploads its casks and gives a receipt; one commits them all, or none.

use std::collections::{BTreeMap, BTreeSet};

use super::base::{NextBase, Parent};
use super::commit::{Commit, Prepared, is_damage, open_parent};
use super::layout::{StateLayout, check_tiles};
use super::save::Saver;
use super::*;
use crate::chain::{Reason, content_digests};
use crate::codec::Registry;
use crate::commit::Age;
use crate::commit::{Standing, refuse_features};
use crate::error::ResultExt;
use crate::store::{Ahead, concurrently};
use crate::tensor::{Rect, element_count};
use crate::wire::{
    CaskRef, Directory, DirectoryShard, DirectoryTensor, MAX_RANK, ParentRef, RankSave, Receipt, ReceiptShard, ReceiptTensor, blob_slot,
};
use crate::{Blob, Limits, TensorView, boxed};

/// Casks looked at, and receipts read, at once.
const CONCURRENT_REQUESTS: usize = 32;

/// Which rank a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// The rank, from 0 on.
    pub rank: u32,
    /// All ranks.
    pub world: u32,
    /// How often the job was started again. Receipts of two attempts are never mixed, so that what a killed attempt left behind
    /// does no harm.
    pub attempt: u64,
}

/// Saves what one rank has of a state. It commits nothing and fences nobody: the coordinator's [`Writer`] does.
#[derive(Debug)]
pub struct RankWriter {
    saver: Saver,
    rank: Rank,
    log: Log,
    /// What becomes the base when a snapshot with these casks is committed.
    pending: Option<(Vec<CaskRef>, NextBase)>,
}

/// Whether a rank may build on the snapshots that it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The log is that of the store as it is now.
    Store,
    /// The store was deleted: this rank's shards are saved whole.
    Nothing,
}

impl Store {
    /// Opens a store, which the coordinator has opened for writing before, for the saves of one rank. All ranks use the same
    /// policy; `Adaptive` decides by steps and counts alone, because no rank knows the sizes of all.
    pub async fn rank_writer(&self, rank: Rank, options: WriterOptions) -> Result<RankWriter> {
        if rank.rank >= rank.world || rank.world > MAX_RANK {
            return Err(Error::invalid(format!("rank {} of {}: ranks count from 0 to world - 1", rank.rank, rank.world)));
        }
        let log = Log::load(self).await?;
        Ok(RankWriter { saver: Saver::new(self, options), rank, log, pending: None })
    }

    /// Leaves a receipt in the store, for a coordinator that cannot be told otherwise. The same receipt may be left twice.
    pub async fn put_receipt(&self, receipt: &Receipt) -> Result<()> {
        let path = Receipt::path_of(receipt.step, receipt.attempt, receipt.rank);
        self.create_unique(&path, receipt.encode()?.into()).await.map_err(|e| match e.kind() {
            ErrorKind::Corrupt | ErrorKind::LimitExceeded => {
                Error::new(ErrorKind::Conflict, "another receipt of this rank, step and attempt is there; count `attempt` up").object(path)
            }
            _ => e,
        })
    }

    /// The receipts of a step and attempt that are in the store so far, by rank.
    pub async fn receipts(&self, step: u64, attempt: u64, world: u32) -> Result<Vec<Receipt>> {
        let read = |rank: u32| async move {
            let path = Receipt::path_of(step, attempt, rank);
            let bytes = self.get_if_present(&path, self.limits().max_manifest_bytes).await?;
            bytes.map(|bytes| Receipt::decode(&bytes, self.limits()).in_object(path)).transpose()
        };
        let found: Vec<Option<Receipt>> = concurrently(CONCURRENT_REQUESTS, (0..world).map(read)).await?;
        Ok(found.into_iter().flatten().collect())
    }
}

impl RankWriter {
    /// Encodes and uploads this rank's shards and blobs. Nothing exists until the coordinator has committed the receipts of all
    /// ranks.
    pub async fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        let known = self.catch_up().await?;
        let (parent, _) = self.saver.options.policy.decide(self.log.state(), step, self.saver.store.limits().max_chain_depth);
        self.upload(step, parent.filter(|_| known == Known::Store), tensors, blobs).await
    }

    /// Reads what has been committed since; reads the log anew where the store was deleted or replaced.
    #[boxed]
    async fn catch_up(&mut self) -> Result<Known> {
        let Standing::Stale(stale) = self.log.catch_up().await? else { return Ok(Known::Store) };
        tracing::warn!(error = %stale.error, rank = self.rank.rank, "reading the log anew");
        self.saver.base.clear();
        self.pending = None;
        match Log::load(&self.saver.store).await {
            Ok(log) => self.log = log,
            // The coordinator creates it before it commits.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Known::Nothing),
            Err(e) => return Err(e),
        }
        Ok(Known::Store)
    }

    /// As [`Writer::send_ahead`], for the casks of this rank.
    pub fn send_ahead(&mut self, ahead: Option<Ahead>) {
        self.saver.ahead = ahead;
    }

    /// The same against a parent that the coordinator has chosen for all ranks: [`Writer::next_parent`].
    pub async fn save_on(&mut self, step: u64, parent: Option<Id>, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        self.catch_up().await?;
        let parent = parent.filter(|id| self.log.state().by_id(*id).is_some());
        self.upload(step, parent, tensors, blobs).await
    }

    #[boxed]
    async fn upload(&mut self, step: u64, parent: Option<Id>, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        refuse_features(&self.log.state().may_ignore)?;
        let store = self.saver.store.clone();
        let Rank { rank, world, attempt } = self.rank;
        let layout = StateLayout::of_rank(tensors, blobs, store.limits(), Some(rank))?;
        let mut parent = match parent {
            Some(id) => open_parent(&store, self.log.state(), id).await?,
            None => None,
        };
        self.settle(parent.as_ref());
        let written = loop {
            match self.saver.write_casks(&layout, parent.as_ref(), self.saver.keeps(parent.is_none())).await {
                Ok(written) => break written,
                Err(error) => {
                    self.saver.base.clear();
                    if parent.is_none() || !is_damage(&error) {
                        return Err(error);
                    }
                    tracing::warn!(%error, "no delta can be made; saving this rank's shards whole");
                    parent = None;
                }
            }
        };
        let tensors = layout.tensors.iter().zip(&written.crcs).map(|(tensor, crcs)| {
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
        let parent = parent.map(|parent| parent_ref(&parent));
        let receipt = Receipt::new(RankSave { step, attempt, rank, world }, parent, written.casks, tensors.collect());
        self.pending = written.kept.map(|kept| (receipt.casks.clone(), kept));
        Ok(receipt)
    }

    /// The base that was saved last counts once a snapshot that holds its casks is the parent.
    fn settle(&mut self, parent: Option<&Parent>) {
        let Some((casks, next)) = self.pending.take() else { return };
        match parent {
            Some(parent) if !casks.is_empty() && casks.iter().all(|cask| parent.snapshot.manifest().casks.contains(cask)) => {
                self.saver.base.promote(parent.snapshot.record().id, next);
            }
            _ => {}
        }
    }
}

impl Writer {
    /// What the deltas of a snapshot of `step` are to be made against, by the policy; none for a base. `Conflict` if the step is saved
    /// already and is not to be replaced: then no rank uploads anything.
    pub async fn next_parent(&mut self, step: u64) -> Result<Option<Id>> {
        self.check_usable()?;
        let (parent, _) = self.decide(step).await?;
        self.replaceable(step, &BTreeMap::new(), None).await?;
        Ok(parent)
    }

    /// Commits one snapshot of what all ranks have uploaded, or nothing. All ranks must have given a receipt of this step and of
    /// one attempt; shards of a tensor must agree and tile it; every cask must be there.
    pub async fn commit_receipts(&mut self, step: u64, receipts: &[Receipt], metadata: &Metadata) -> Result<Saved> {
        self.check_usable()?;
        check_user(metadata)?;
        let saved = self.commit_all(step, receipts, metadata).await;
        self.stop_if_final(&saved);
        saved
    }

    #[boxed]
    async fn commit_all(&mut self, step: u64, receipts: &[Receipt], metadata: &Metadata) -> Result<Saved> {
        check_ranks(step, receipts)?;
        let store = self.saver.store.clone();
        let (_, mut decision) = self.decide(step).await?;
        let parent = self.common_parent(receipts).await?;
        match (&parent, decision.reason) {
            (None, Reason::SmallDelta | Reason::Policy) if self.saver.options.policy != Policy::Full => {
                decision.reason = Reason::BrokenParent
            }
            (Some(_), reason) if reason != Reason::SmallDelta => decision.reason = Reason::Policy,
            _ => {}
        }

        let merged = Merged::new(receipts, store.limits())?;
        check_partners(&merged, receipts, store.registry())?;
        let mut casks: Vec<CaskRef> = receipts.iter().flat_map(|receipt| receipt.casks.iter().cloned()).collect();
        casks.sort_by_key(|cask| cask.slot);
        let there = |cask: &CaskRef| {
            let (store, path, bytes) = (store.clone(), cask.path(), cask.bytes);
            async move {
                match store.head(&path).await {
                    Ok(found) if found.bytes == bytes => Ok(found.modified_ms),
                    Ok(found) => Err(Error::corrupt(format!("has {} bytes, its receipt says {bytes}", found.bytes)).object(path)),
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        Err(Error::not_found("a receipt names this cask, and it is not there").object(path))
                    }
                    Err(error) => Err(error),
                }
            }
        };
        let (age, now) = (Age::start(), store.clock_ms().await?);
        let written: Vec<u64> = concurrently(CONCURRENT_REQUESTS, casks.iter().map(there)).await?;
        let oldest = written.into_iter().min().unwrap_or(now);
        let age = age.older_by(Duration::from_millis(now.saturating_sub(oldest)));
        let directory = Directory::encode(&merged.rows)?;
        let decoded = Directory::decode(directory.clone().into(), Digest::of(&directory), store.limits())
            .map_err(|e| Error::invalid(format!("the receipts make no directory: {}", e.message())).source(e))?;
        let content = content_digests(&decoded, |shard, chunk| {
            let crc = merged.crcs.get(shard).and_then(|crcs| crcs.get(usize::try_from(chunk).ok()?));
            crc.copied().ok_or_else(|| Error::invalid("a receipt has too few checksums for its shards"))
        })?;
        let tensor_bytes = merged.tensor_bytes;
        let prepared =
            Prepared { directory, tensor_bytes, casks, content, blobs: None, chunks: BTreeMap::new(), rounding: None, decision, age };
        match self.commit(step, parent.as_ref(), &prepared, metadata).await? {
            // The log went between the two looks; a snapshot that stands alone needs no other.
            Commit::Stale(stale) if stale.replaced && parent.is_none() => {
                self.begin_anew(&stale.error).await?;
                self.commit(step, None, &prepared, metadata).await?.done()
            }
            Commit::Stale(stale) => {
                let message = format!("{}. Save the step again, on all ranks", stale.error.message());
                Err(Error::new(ErrorKind::Conflict, message).object(store.url()).source(stale.error))
            }
            other => other.done(),
        }
    }

    /// What the deltas of all ranks are made against, opened. A rank that wrote everything whole agrees with all others.
    #[boxed]
    async fn common_parent(&self, receipts: &[Receipt]) -> Result<Option<Parent>> {
        let mut parents = receipts.iter().filter_map(|receipt| receipt.parent.as_ref());
        let Some(first) = parents.next() else { return Ok(None) };
        if parents.any(|parent| parent != first) {
            return Err(Error::new(
                ErrorKind::Conflict,
                "ranks made their deltas against different snapshots: some had not seen the last commit. Save the step again",
            ));
        }
        let parent = open_parent(&self.saver.store, self.log.state(), first.snapshot).await?;
        match parent {
            Some(parent) if parent_ref(&parent) == *first => Ok(Some(parent)),
            _ => Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "snapshot {}, against which the ranks made their deltas, is not there as they saw it. Save the step again",
                    first.snapshot
                ),
            )),
        }
    }
}

fn parent_ref(parent: &Parent) -> ParentRef {
    ParentRef { snapshot: parent.snapshot.record().id, content: parent.snapshot.manifest().content.clone() }
}

/// A rank pairs a tensor with the only one of another role that it knows of the same parameter. That has to be the only one of all
/// ranks: by role and parameter, readers find it.
fn check_partners(merged: &Merged, receipts: &[Receipt], registry: &Registry) -> Result<()> {
    type Key<'a> = (&'a str, &'a str);
    let mut all: BTreeMap<Key<'_>, Vec<&str>> = BTreeMap::new();
    for (tensor, _) in merged.rows.iter().filter(|(tensor, _)| tensor.alias_of.is_none()) {
        all.entry((&tensor.role, &tensor.param)).or_default().push(&tensor.name);
    }
    for receipt in receipts {
        let mut own: BTreeMap<Key<'_>, usize> = BTreeMap::new();
        for tensor in receipt.tensors.iter().filter(|tensor| tensor.alias_of.is_none()) {
            *own.entry((&tensor.role, &tensor.param)).or_default() += 1;
        }
        for tensor in &receipt.tensors {
            for need in registry.partner_roles(&tensor.role) {
                let key = (need.role, tensor.param.as_str());
                let names = all.get(&key).map(Vec::as_slice).unwrap_or_default();
                if own.get(&key) == Some(&1) && names.len() > 1 {
                    let message = format!(
                        "its partner is not clear: ranks have {} of role `{}` for parameter `{}`; give each parameter a name of its own",
                        names.join(", "),
                        need.role,
                        tensor.param
                    );
                    return Err(Error::invalid(message).tensor(&tensor.name));
                }
            }
        }
    }
    Ok(())
}

/// One receipt of each rank, all of this step and of one attempt, each with casks in its own slots.
fn check_ranks(step: u64, receipts: &[Receipt]) -> Result<()> {
    let Some(first) = receipts.first() else { return Err(Error::invalid("no receipts")) };
    let mut ranks = BTreeSet::new();
    for receipt in receipts {
        let Receipt { rank, world, attempt, .. } = *receipt;
        let place = format!("the receipt of rank {rank}");
        if receipt.step != step || world != first.world || attempt != first.attempt {
            return Err(Error::invalid(format!(
                "{place} is of step {}, attempt {attempt}, {world} ranks; expected step {step}, attempt {}, {} ranks",
                receipt.step, first.attempt, first.world
            )));
        }
        if rank >= world || world > MAX_RANK || !ranks.insert(rank) {
            return Err(Error::invalid(format!("{place} is one too many: there are {world} ranks")));
        }
        let slots = blob_slot(rank).saturating_sub(1)..=blob_slot(rank);
        let mut used = BTreeSet::new();
        if receipt.casks.iter().any(|cask| !slots.contains(&cask.slot) || !used.insert(cask.slot)) {
            return Err(Error::invalid(format!("{place} names casks in slots of another rank, or two in one")));
        }
        if receipt.tensors.iter().any(|tensor| !slots.contains(&tensor.slot)) {
            return Err(Error::invalid(format!("{place} names tensors in slots of another rank")));
        }
    }
    let missing: Vec<String> = (0..first.world).filter(|rank| !ranks.contains(rank)).take(8).map(|rank| rank.to_string()).collect();
    if !missing.is_empty() {
        return Err(Error::invalid(format!("no receipt of rank {}: nothing was committed", missing.join(", "))));
    }
    Ok(())
}

/// Tensors of all receipts.
struct Merged {
    rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)>,
    /// Checksums of each shard, in the order of the directory.
    crcs: Vec<Vec<u32>>,
    tensor_bytes: u64,
}

impl Merged {
    fn new(receipts: &[Receipt], limits: &Limits) -> Result<Self> {
        let mut tensors: BTreeMap<&str, Vec<&ReceiptTensor>> = BTreeMap::new();
        for tensor in receipts.iter().flat_map(|receipt| &receipt.tensors) {
            tensors.entry(&tensor.name).or_default().push(tensor);
        }
        Limits::check(tensors.len() as u64, limits.max_tensors, "number of tensors")?;
        let numbers: BTreeMap<&str, usize> = tensors.keys().enumerate().map(|(at, name)| (*name, at)).collect();
        let mut merged = Self { rows: Vec::with_capacity(tensors.len()), crcs: vec![], tensor_bytes: 0 };
        for (name, parts) in &tensors {
            let Some(first) = parts.first() else { continue };
            let facts = |t: &ReceiptTensor| (t.dtype.clone(), t.shape.clone(), t.role.clone(), t.param.clone(), t.alias_of.clone());
            if parts.iter().any(|part| facts(part) != facts(first)) {
                return Err(Error::invalid("ranks disagree about its dtype, shape, role, param or tie").tensor(*name));
            }
            let alias_of = match &first.alias_of {
                None => None,
                Some(target) => {
                    let known = numbers.get(target.as_str());
                    Some(*known.ok_or_else(|| Error::invalid("is tied to a tensor that no rank has").tensor(*name))?)
                }
            };
            let dtype = first.dtype()?;
            let mut shards: Vec<(Rect, u32, Vec<u32>)> = Vec::new();
            for (part, shard) in parts.iter().flat_map(|part| part.shards.iter().map(move |shard| (part, shard))) {
                let rect = Rect { offset: shard.offset.clone(), shape: shard.shape.clone() };
                shards.push((rect, part.slot, shard.crcs().map_err(|e| e.tensor(*name))?));
            }
            shards.sort_by(|a, b| a.0.cmp(&b.0));
            if alias_of.is_none() {
                let rects: Vec<Rect> = shards.iter().map(|(rect, ..)| rect.clone()).collect();
                check_tiles(name, &first.shape, &rects)?;
                let bytes = element_count(&first.shape).and_then(|count| dtype.byte_count(count));
                merged.tensor_bytes = merged.tensor_bytes.saturating_add(bytes.unwrap_or(u64::MAX));
            }
            let description = DirectoryTensor {
                name: (*name).to_owned(),
                dtype,
                shape: first.shape.clone(),
                role: first.role.clone(),
                param: first.param.clone(),
                alias_of,
            };
            let rows = shards.iter().map(|(rect, slot, _)| DirectoryShard { rect: rect.clone(), slot: *slot }).collect();
            merged.rows.push((description, rows));
            merged.crcs.extend(shards.into_iter().map(|(_, _, crcs)| crcs));
        }
        Ok(merged)
    }
}
