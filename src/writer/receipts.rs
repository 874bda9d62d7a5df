//! The commit of many ranks: one snapshot of all receipts, or none.
//!
//! The coordinator's [`Writer`] checks that receipts are complete and agree, that every cask is in the store with its
//! size, and merges their tensors into one directory (`merged.rs`). Then it commits as any save does.
//!
//! Invariants: receipts of two steps or two attempts are never mixed, and all deltas share one parent.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::commit::{Commit, Prepared};
use super::merged::Merged;
use super::parent::Parent;
use super::ranks::decide_for_ranks;
use super::{Metadata, SavedSnapshot, Stopped, Writer, check_user};
use crate::chain::{DecisionReason, Policy, PolicyDecision, PreviousSave, SaveTimes, content_digests, milliseconds};
use crate::codec::Registry;
use crate::commit::Age;
use crate::precision::PrecisionDecision;
use crate::store::concurrently;
use crate::wire::{CaskRef, Digest, Directory, Id, Leader, MAX_RANK, Receipt, SessionName, SessionStep, slots_of_rank};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Number of casks that are checked at once.
const CONCURRENT_REQUESTS: usize = 32;

/// The session and attempt that a writer leads.
#[derive(Debug, Clone, Copy)]
struct LedSession {
    name: SessionName,
    attempt: u64,
}

impl LedSession {
    fn new(run: Id, leader: Leader) -> Self {
        Self { name: SessionName { run, session: leader.session }, attempt: leader.attempt }
    }
}

impl Writer {
    /// Parent of the deltas of all ranks for a snapshot of `step`, by the policy; `None` for a base. Fails with
    /// `Conflict`, before any rank uploads, if the step is saved already and must not be replaced. The time of the save
    /// counts from this call on.
    pub async fn next_parent(&mut self, step: u64) -> Result<Option<Id>> {
        let begun = Instant::now();
        self.stopped.check()?;
        let (parent, _) = self.decide_for_ranks(step).await?;
        self.replaceable(step, &BTreeMap::new(), None).await?;
        self.begun = Some((step, begun));
        Ok(parent)
    }

    /// Commits one snapshot of the casks of all ranks, or nothing. There must be a receipt of each rank for this step
    /// and one attempt. The shards of a tensor must agree and tile it, and every cask must be in the store. A shard that
    /// several ranks have is taken from the lowest of them; all must have saved the same bytes. Metadata of the receipts is
    /// added to `metadata`.
    pub async fn commit_receipts(&mut self, step: u64, receipts: &[Receipt], metadata: &Metadata) -> Result<SavedSnapshot> {
        self.stopped.check()?;
        let mut metadata = metadata.clone();
        for receipt in receipts {
            let user = receipt.user.iter().filter(|(key, _)| *key != PrecisionDecision::KEY);
            metadata.user.extend(user.map(|(key, value)| (key.clone(), value.clone())));
            metadata.file.extend(receipt.metadata.clone());
        }
        check_user(&metadata)?;
        let saved = self.commit_all(step, receipts, &metadata).await;
        let begun = self.begun.take().filter(|(begun_step, _)| *begun_step == step);
        if saved.is_ok() && self.measures_saves {
            let save_ms = begun.map(|(_, begun)| milliseconds(begun.elapsed()));
            self.previous = Some(PreviousSave { step, save_ms, upload_ms: self.upload_ms, ..PreviousSave::default() });
        }
        self.stopped = Stopped::after(&saved);
        saved
    }

    #[boxed]
    async fn commit_all(&mut self, step: u64, receipts: &[Receipt], metadata: &Metadata) -> Result<SavedSnapshot> {
        check_ranks(step, receipts)?;
        let led = self.leader.map(|leader| LedSession::new(self.log.store_file.run, leader));
        check_session(led, receipts)?;
        let store = self.pipeline.store.clone();
        let (_, mut decision) = self.decide_for_ranks(step).await?;
        let parent = self.common_parent(receipts).await?;
        let is_adaptive_delta = matches!(decision.reason, DecisionReason::NotEstimated | DecisionReason::SmallDelta);
        let is_delta = is_adaptive_delta || decision.reason == DecisionReason::Policy;
        match &parent {
            None if is_delta && self.pipeline.options.policy != Policy::Full => decision.reason = DecisionReason::BrokenParent,
            Some(_) if !is_adaptive_delta => decision.reason = DecisionReason::Policy,
            _ => {}
        }

        let merged = Merged::new(receipts, store.limits())?;
        check_partners(&merged, receipts, store.registry())?;
        let mut casks: Vec<CaskRef> = receipts.iter().flat_map(|receipt| merged.used_casks(receipt)).cloned().collect();
        casks.sort_by_key(|cask| cask.slot);
        let age = age_of(&store, led, step, &casks).await?;
        let directory = Directory::encode(&merged.rows)?;
        let decoded = Directory::decode(directory.clone().into(), Digest::of(&directory), store.limits())
            .map_err(|e| Error::invalid(format!("the tensors of the receipts make no valid directory: {}", e.message())).source(e))?;
        let content = content_digests(&decoded, |shard, chunk| {
            let crc = merged.crcs.get(shard).and_then(|crcs| crcs.get(usize::try_from(chunk).ok()?));
            crc.copied().ok_or_else(|| Error::invalid("a receipt has too few checksums for its shards"))
        })?;
        let tensor_bytes = merged.tensor_bytes;
        // The state is not known to be finite if one rank made no check.
        let finite = receipts.iter().map(|receipt| receipt.finite).reduce(|a, b| match (a, b) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (a, b) => Some(a? && b?),
        });
        // A rank that has the whole state may have decided.
        let precision = receipts.iter().find_map(|receipt| PrecisionDecision::of(&receipt.user));
        let finite = finite.flatten();
        let chunk_counts = BTreeMap::new();
        let times = times_of(receipts, self.measures_saves);
        let prepared = Prepared {
            directory,
            tensor_bytes,
            casks,
            content,
            blobs: None,
            chunk_counts,
            rounding: None,
            finite,
            decision,
            precision,
            times,
            age,
        };
        let mut saved = match self.commit(step, parent.as_ref(), &prepared, vec![], metadata).await? {
            // The log was replaced after `decide`. A base needs no other snapshot, so it is committed to the new log.
            Commit::Stale(stale) if stale.replaced && parent.is_none() => {
                self.restart_in_replaced_store(&stale.error).await?;
                self.commit(step, None, &prepared, vec![], metadata).await?.done()?
            }
            Commit::Stale(stale) => {
                let message = format!("{}. Save the step again, on all ranks", stale.error.message());
                return Err(Error::new(ErrorKind::Conflict, message).object(store.url()).source(stale.error));
            }
            other => other.done()?,
        };
        let earlier = self.pipeline.options.recall.then_some((&self.pipeline.store, self.log.state()));
        saved.unchanged = self.unchanged.find(earlier, step, &merged.tensors(), &self.frozen).await;
        Ok(saved)
    }

    /// Parent of a snapshot of all ranks, by the policy, the current log and the sizes of earlier snapshots.
    #[boxed]
    async fn decide_for_ranks(&mut self, step: u64) -> Result<(Option<Id>, PolicyDecision)> {
        let decided = self.decide(step).await?;
        if decided.1.reason != DecisionReason::NotEstimated {
            return Ok(decided);
        }
        decide_for_ranks(self.pipeline.options.policy, &mut self.log, &self.pipeline.store, step).await
    }

    /// Opens the common parent of all deltas; `None` if no rank wrote a delta. A rank that wrote its shards whole
    /// agrees with all others.
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
        let parent = Parent::open(&self.pipeline.store, self.log.state(), first.snapshot).await?;
        match parent {
            Some(parent) if parent.reference() == *first => Ok(Some(parent)),
            _ => Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "the ranks made their deltas against snapshot {}, which the store no longer has as they saw it. Save the step again",
                    first.snapshot
                ),
            )),
        }
    }
}

/// Age of the oldest cask. In a session, the message with the parent is older than all casks of its step.
#[boxed]
async fn age_of(store: &Store, session: Option<LedSession>, step: u64, casks: &[CaskRef]) -> Result<Age> {
    let age = Age::start();
    let now = store.objects().clock_ms().await?;
    let oldest = match session {
        Some(LedSession { name, attempt }) => store.objects().head(&name.parent_path(SessionStep { attempt, step })).await?.modified_ms,
        None => {
            let all: Vec<u64> = concurrently(CONCURRENT_REQUESTS, casks.iter().map(|cask| modified_ms(store, cask))).await?;
            all.into_iter().min().unwrap_or(now)
        }
    };
    Ok(age.older_by(Duration::from_millis(now.saturating_sub(oldest))))
}

async fn modified_ms(store: &Store, cask: &CaskRef) -> Result<u64> {
    let path = cask.path();
    let bytes = cask.bytes;
    match store.objects().head(&path).await {
        Ok(found) if found.bytes == bytes => Ok(found.modified_ms),
        Ok(found) => Err(Error::corrupt(format!("the cask has {} bytes, but its receipt says {bytes}", found.bytes)).object(path)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::not_found("a receipt names this cask, but the store does not have it").object(path))
        }
        Err(error) => Err(error),
    }
}

/// Refuses receipts of another session or attempt than those that the writer leads.
fn check_session(led: Option<LedSession>, receipts: &[Receipt]) -> Result<()> {
    let is_ours = |receipt: &Receipt| match led {
        Some(led) => receipt.session == Some(led.name) && receipt.attempt == led.attempt,
        None => receipt.session.is_none(),
    };
    match receipts.iter().find(|receipt| !is_ours(receipt)) {
        None => Ok(()),
        Some(other) => Err(Error::invalid(format!("the receipt of rank {} is of another session or attempt", other.rank))),
    }
}

/// Times of the slowest rank, as far as all ranks know theirs.
fn times_of(receipts: &[Receipt], measures_uploads: bool) -> SaveTimes {
    let slowest = |time: fn(&Receipt) -> Option<u64>| {
        let slowest = receipts.iter().map(time).reduce(|a, b| Some(a?.max(b?))).flatten();
        slowest.map(|us| milliseconds(Duration::from_micros(us)))
    };
    let upload_ms = slowest(|receipt| receipt.upload_us).filter(|_| measures_uploads);
    SaveTimes { encode_ms: slowest(|receipt| receipt.encode_us), upload_ms, ..SaveTimes::default() }
}

/// Refuses partners that are not unique. Readers find a partner by role and parameter among the tensors of all ranks,
/// but a rank sees only its own.
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
                        "its partner is ambiguous: ranks have {} of role `{}` for parameter `{}`; give each parameter a name of its own",
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

/// Checks that there is one receipt of each rank, of this step and one attempt, with casks in slots of the rank.
fn check_ranks(step: u64, receipts: &[Receipt]) -> Result<()> {
    let Some(first) = receipts.first() else { return Err(Error::invalid("no receipts: nothing was committed")) };
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
            return Err(Error::invalid(format!("{place} is given twice, or its rank is not below the {world} ranks")));
        }
        let is_own = |slot: u32| slots_of_rank(rank).iter().any(|slots| slots.contains(&slot));
        let mut used = BTreeSet::new();
        if receipt.casks.iter().any(|cask| !is_own(cask.slot) || !used.insert(cask.slot)) {
            return Err(Error::invalid(format!("{place} names casks in slots of another rank, or two casks in one slot")));
        }
        if receipt.tensors.iter().any(|tensor| !is_own(tensor.slot)) {
            return Err(Error::invalid(format!("{place} names tensors in slots of another rank")));
        }
    }
    let missing: Vec<String> = (0..first.world).filter(|rank| !ranks.contains(rank)).take(8).map(|rank| rank.to_string()).collect();
    if !missing.is_empty() {
        return Err(Error::invalid(format!("no receipt of rank {}: nothing was committed", missing.join(", "))));
    }
    Ok(())
}
