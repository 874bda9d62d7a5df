//! A replica: a copy of the part of a mirror that only one host has, in the memory of another host.
//!
//! In a session of many hosts (spec log 8), each host has the casks and receipts of its ranks in a [`Mirror`](super::Mirror). A replica
//! has the complete steps of one such mirror, as far as there is room, and the casks of its ranks in the chains of the newest
//! committed snapshot and of the parents of these steps. Log, manifests and directories are in every mirror, so a replica has none.
//!
//! A mirror has all steps that are neither committed nor given up. A replica needs the older ones, too: hosts may save at
//! different speeds, and a lost host is restored to a step that all hosts have.
//!
//! The source is not trusted. Every byte of a cask is checked before it is written, and the cask appears once all of it was
//! checked. A receipt is written after the casks that it names. A step that is a delta counts only if the casks of its parent's chain are there,
//! too, and checked.
//!
//! Invariant: a pull removes no step and no link of the chain before the replica has newer steps in their place. A source
//! that is empty, because its host was replaced, removes nothing. Neither does a source whose log does not describe the chains yet.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::exchange::SessionExchange;
use super::log::SessionLog;
use super::mirror::{clear, needed_links};
use super::rank_set::RankSet;
use super::receipt_proof::ReceiptProof;
use super::refill::{WantedCask, casks_of};
use crate::chain::chain_of;
use crate::commit::read_store_file;
use crate::maintain::{CopyFailure, copy_checked_cask, present, verify_cask};
use crate::reader::CaskSource;
use crate::store::concurrently;
use crate::wire::{CaskRef, Id, RankRange, Receipt, STORE_FILE, SessionName, SessionStep, rank_of_slot};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Number of casks that are copied at once. Each holds a few windows of 8 MiB in memory.
const CONCURRENT_CASKS: usize = 2;

/// A copy of another host's part of a session.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::session::Replica;
/// use tensorcask::wire::Id;
/// use tensorcask::{Policy, Store};
/// let (source, memory) = (Store::open("memory://replica-source")?, Store::open("memory://replica-memory")?);
/// source.writer(Policy::Full).await?;
/// let mut replica = Replica::new(&source, &memory, Id::random()?, 0..2, 2);
/// assert!(replica.pull().await?.newest.is_none(), "no rank has saved yet");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Replica {
    source: Store,
    memory: Store,
    session: Id,
    ranks: Range<u32>,
    keep: usize,
    /// Log of the source, as far as it was read.
    log: Option<SessionLog>,
    /// Links of the chains of the newest committed snapshot, and of the parents of steps in the replica.
    links: BTreeMap<Id, Link>,
    /// Parent of each step in the replica; `None` for a base.
    parents: BTreeMap<SessionStep, Option<Id>>,
    /// Checks the receipts of the source.
    proof: Option<Arc<dyn ReceiptProof>>,
    /// Bytes that the next pulls may add.
    room: u64,
    /// Whether the last copy failed because it needs more.
    lacks_room: bool,
    /// Newest step that was removed for want of room. It and all older steps are not copied again.
    gave_way: Option<SessionStep>,
    /// Casks in the replica that were checked since it was opened.
    checked: BTreeSet<Id>,
}

/// Result of a pull.
#[derive(Debug, Default)]
pub struct ReplicaReport {
    /// Newest complete step of the replica. It can be read with the replica, the log, and the copies of other hosts.
    pub newest: Option<SessionStep>,
    /// All such steps, oldest first.
    pub whole: Vec<SessionStep>,
    /// Newest complete step of the source.
    pub newest_at_source: Option<SessionStep>,
    /// Number of wanted steps that the replica lacks, or of whose chain it lacks a part.
    pub missing: u64,
    /// Number of casks that were copied.
    pub casks: u64,
    /// Size of those casks, in bytes.
    pub bytes: u64,
    /// Reason why a step is missing. Other steps were copied nevertheless.
    pub problem: Option<Error>,
}

/// A link of a chain: the casks of these ranks.
#[derive(Debug, Clone)]
struct Link {
    parent: Option<Id>,
    casks: Vec<WantedCask>,
}

impl Replica {
    /// A replica in `memory` of the ranks of one host, from `source`, the mirror of that host. Keeps the newest `keep` steps,
    /// at least one, and while there is room all that the mirror has. Sends no request.
    pub fn new(source: &Store, memory: &Store, session: Id, ranks: Range<u32>, keep: u32) -> Self {
        Self {
            source: source.clone(),
            memory: memory.clone(),
            session,
            ranks,
            keep: keep.max(1) as usize,
            log: None,
            links: BTreeMap::new(),
            parents: BTreeMap::new(),
            proof: None,
            room: u64::MAX,
            lacks_room: false,
            gave_way: None,
            checked: BTreeSet::new(),
        }
    }

    /// Copies only receipts that come with a proof, and the proofs with them.
    pub fn require_proof(&mut self, proof: Option<Arc<dyn ReceiptProof>>) {
        self.proof = proof;
    }

    /// Limits the bytes of casks that the next pulls may add. If there is no room for a new step, older steps give way first,
    /// the oldest before the others; then the step is not copied, and the report says why. Without any room, all but the newest
    /// `keep` steps give way.
    pub fn set_room(&mut self, bytes: u64) {
        self.room = bytes;
    }

    /// The place of the replica.
    pub fn memory(&self) -> &Store {
        &self.memory
    }

    /// Copies what the replica lacks, and removes what neither side needs. Each pull copies the newest `keep` steps, and at most
    /// one older step, so that older steps delay no newer one. Fails if the source cannot be read at all. A pull that was
    /// interrupted is resumed by pulling again.
    #[boxed]
    pub async fn pull(&mut self) -> Result<ReplicaReport> {
        let Some(session) = self.begin().await? else {
            let whole = self.whole_without_source().await?;
            return Ok(ReplicaReport { newest: whole.last().copied(), whole, ..ReplicaReport::default() });
        };
        let from = SessionExchange::new(&self.source, session).with_proof(self.proof.clone());
        let to = SessionExchange::new(&self.memory, session);
        let at_source = self.complete_steps(&from).await?;
        let mut held: BTreeSet<SessionStep> = self.complete_steps(&to).await?.into_keys().collect();
        let mut of_wanted = BTreeSet::new();
        let mut report = ReplicaReport { newest_at_source: at_source.keys().next_back().copied(), ..ReplicaReport::default() };
        for (at, error) in self.read_parents(&to, &mut held).await? {
            if at_source.contains_key(&at) {
                self.discard(session, at).await?;
            }
            report.problem.get_or_insert(error);
        }
        let mut chain = self.follow_chains(&mut report).await;
        let is_past = |at: &SessionStep| self.gave_way.is_some_and(|gone| *at <= gone);
        let newest_first = at_source.into_iter().rev().enumerate();
        let wanted: BTreeMap<SessionStep, (RankSet, bool)> = newest_first
            .filter(|(place, (at, _))| *place < self.keep || !is_past(at))
            .map(|(place, (at, present))| (at, (present, place < self.keep)))
            .collect();
        let mut may_copy_older = true;
        for (at, (present, is_recent)) in wanted.iter().rev() {
            if held.contains(at) {
                continue;
            }
            let may_copy = *is_recent || (self.room > 0 && std::mem::take(&mut may_copy_older));
            if !may_copy {
                break;
            }
            let mut copied = self.copy_step(&from, &to, *at, present, &mut of_wanted, &mut report).await;
            let newest = held.last().copied();
            while self.lacks_room
                && newest.is_some_and(|newest| newest < *at)
                && held.len() > 1
                && let Some(chain) = &chain
            {
                self.gave_way = held.pop_first().max(self.gave_way);
                if !self.describes(&held) {
                    continue;
                }
                let freed = self.prune(&to, session, &held, chain, &of_wanted).await?;
                self.room = self.room.saturating_add(freed);
                copied = self.copy_step(&from, &to, *at, present, &mut of_wanted, &mut report).await;
            }
            match copied {
                Ok(()) => _ = held.insert(*at),
                // There is no room for a step that is no longer the newest.
                Err(_) if self.lacks_room && newest.is_some_and(|newest| newest > *at) => {}
                Err(error) => _ = report.problem.get_or_insert(error),
            }
        }
        for (_, error) in self.read_parents(&to, &mut held).await? {
            report.problem.get_or_insert(error);
        }
        if chain.is_some() {
            chain = self.known_chains(&mut report).await;
        }
        if let (Some(chain), false) = (&chain, wanted.is_empty()) {
            let older = held.iter().rev().skip(self.keep);
            if self.room == 0 {
                self.gave_way = older.clone().next().copied().max(self.gave_way);
            }
            let is_kept = |at: &&SessionStep| wanted.contains_key(*at) && self.gave_way.is_none_or(|gone| **at > gone);
            let kept = held.iter().rev().take(self.keep).chain(older.filter(is_kept)).copied().collect();
            if self.describes(&kept) {
                self.prune(&to, session, &kept, chain, &of_wanted).await?;
            }
        }
        report.whole = held.iter().filter(|at| self.missing_link(**at).is_none()).copied().collect();
        report.newest = report.whole.last().copied();
        let is_newer = |at: &SessionStep| report.newest.is_none_or(|newest| *at > newest);
        report.missing = wanted.keys().filter(|at| is_newer(at)).count() as u64;
        if let (Some(newest), None) = (held.last().filter(|at| is_newer(at)), &report.problem)
            && let Some(lack) = self.missing_link(*newest)
        {
            let message = format!("step {} was copied, but not the chain of its parent: {lack}", newest.step);
            report.problem = Some(Error::not_found(message).object(format!("{}/{}", session.folder(), newest.folder())));
        }
        Ok(report)
    }

    /// The steps of which the chain is known to be here. The source has no store.
    async fn whole_without_source(&mut self) -> Result<Vec<SessionStep>> {
        let file = match read_store_file(&self.memory).await {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e),
        };
        let to = SessionExchange::new(&self.memory, SessionName { run: file.run, session: self.session });
        let mut held: BTreeSet<SessionStep> = self.complete_steps(&to).await?.into_keys().collect();
        self.read_parents(&to, &mut held).await?;
        Ok(held.iter().filter(|at| self.missing_link(**at).is_none()).copied().collect())
    }

    /// Reads the parents of the steps in the replica. Takes steps with damaged receipts out of `held`, and returns them.
    #[boxed]
    async fn read_parents(&mut self, to: &SessionExchange, held: &mut BTreeSet<SessionStep>) -> Result<Vec<(SessionStep, Error)>> {
        self.parents.retain(|at, _| held.contains(at));
        let mut damaged = Vec::new();
        if held.iter().all(|at| self.parents.contains_key(at)) {
            return Ok(damaged);
        }
        for (at, present) in self.complete_steps(to).await? {
            if !held.contains(&at) || self.parents.contains_key(&at) {
                continue;
            }
            match parent_of(to, at, &present).await {
                Ok(parent) => _ = self.parents.insert(at, parent),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    held.remove(&at);
                    damaged.push((at, error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(damaged)
    }

    /// Removes the receipts of a damaged step, so that it is copied again. Its casks stay.
    async fn discard(&mut self, session: SessionName, at: SessionStep) -> Result<()> {
        self.parents.remove(&at);
        let objects = self.memory.objects();
        for found in objects.list(&format!("{}/{}", session.folder(), at.folder())).await? {
            objects.delete(&found.path).await?;
        }
        Ok(())
    }

    /// Reads what the source has committed since, and copies the chains as [`copy_chains`](Self::copy_chains) does. `None` if the
    /// chains are not known: the source has no log yet, or cannot be read.
    async fn follow_chains(&mut self, report: &mut ReplicaReport) -> Option<Vec<WantedCask>> {
        match SessionLog::follow(&mut self.log, &self.source).await.map(SessionLog::sequence) {
            Ok(0) => None,
            Ok(_) => self.known_chains(report).await,
            Err(error) => {
                report.problem.get_or_insert(error);
                None
            }
        }
    }

    /// Copies the chains; `None` if the source cannot be read.
    async fn known_chains(&mut self, report: &mut ReplicaReport) -> Option<Vec<WantedCask>> {
        match self.copy_chains(report).await {
            Ok(chain) => Some(chain),
            Err(error) => {
                self.log = None;
                report.problem.get_or_insert(error);
                None
            }
        }
    }

    /// Whether the source has described the chains of the newest committed snapshot and of the parents of these steps. Otherwise
    /// it is not known which casks they need.
    fn describes(&self, steps: &BTreeSet<SessionStep>) -> bool {
        let Some(log) = self.log.as_ref().map(SessionLog::state).filter(|log| log.sequence > 0) else { return false };
        let is_described = |id: Id| match chain_of(log, id, self.source.limits().max_chain_depth) {
            Ok(links) => links.iter().all(|link| self.links.contains_key(&link.id)),
            // No step can be read with a parent that was collected. But a log that is too short may come to this parent.
            Err(_) => log.by_id(id).is_some(),
        };
        let is_known = |at: &SessionStep| self.parents.get(at).is_some_and(|parent| parent.is_none_or(is_described));
        log.latest().is_none_or(|latest| is_described(latest.id)) && steps.iter().all(is_known)
    }

    /// Says what the replica lacks of the chain of a step's parent; `None` if it lacks nothing.
    fn missing_link(&self, at: SessionStep) -> Option<String> {
        let Some(mut next) = self.parents.get(&at).copied() else { return Some("its receipts cannot be read".to_owned()) };
        // A chain has no circle: links are records of one log.
        while let Some(id) = next {
            let Some(link) = self.links.get(&id) else {
                return Some(format!("{} does not describe snapshot {id}", self.source.url()));
            };
            if let Some(lack) = link.casks.iter().find(|wanted| !self.checked.contains(&wanted.cask.id)) {
                return Some(format!("{} is not here, and {} does not have it", lack.cask.path(), self.source.url()));
            }
            next = link.parent;
        }
        None
    }

    /// Complete steps of the session in the replica, oldest first. Reads only the replica, so it does not say whether the
    /// chains of their parents are there.
    pub async fn steps(&self) -> Result<Vec<SessionStep>> {
        match read_store_file(&self.memory).await {
            Ok(file) => {
                let session = SessionName { run: file.run, session: self.session };
                Ok(self.complete_steps(&SessionExchange::new(&self.memory, session)).await?.into_keys().collect())
            }
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    /// Prepares the replica; returns the session, or `None` while the source has no store. A replica of another run is emptied
    /// once the source has a complete step of its own.
    async fn begin(&self) -> Result<Option<SessionName>> {
        let file = match read_store_file(&self.source).await {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let session = SessionName { run: file.run, session: self.session };
        self.memory.objects().ensure_root().await?;
        match read_store_file(&self.memory).await {
            Ok(found) if found.run == file.run => return Ok(Some(session)),
            Ok(_) => {
                if self.complete_steps(&SessionExchange::new(&self.source, session)).await?.is_empty() {
                    return Ok(None);
                }
                clear(&self.memory).await?;
            }
            // All objects have names that no other run uses.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {}
            Err(e) => return Err(e),
        }
        self.memory.objects().put_whole(STORE_FILE, Bytes::from(file.encode()?).into()).await?;
        Ok(Some(session))
    }

    /// Steps with receipts of all ranks, and the ranks whose receipts there are.
    async fn complete_steps(&self, exchange: &SessionExchange) -> Result<BTreeMap<SessionStep, RankSet>> {
        let found = exchange.survey(None).await?.steps;
        Ok(found.into_iter().filter(|(_, present)| present.has_all(self.ranks.clone())).collect())
    }

    /// Copies the casks of these ranks in the chains of the newest committed snapshot and of the parents of held steps. Returns
    /// the casks; none before the first commit.
    #[boxed]
    async fn copy_chains(&mut self, report: &mut ReplicaReport) -> Result<Vec<WantedCask>> {
        let Some(log) = &self.log else { return Ok(Vec::new()) };
        let parents = self.parents.values().copied().flatten().collect();
        let mut links = BTreeMap::new();
        for link in needed_links(log.state(), &parents, self.source.limits().max_chain_depth)? {
            let casks = match self.links.get(&link.id) {
                Some(known) => Some(known.casks.clone()),
                None => casks_of(&self.source, &link, &self.ranks).await?,
            };
            links.extend(casks.map(|casks| (link.id, Link { parent: link.parent, casks })));
        }
        self.links = links;
        let casks: Vec<WantedCask> = self.links.values().flat_map(|link| link.casks.iter().cloned()).collect();
        match self.copy_casks(&casks, report).await {
            // A host that was replaced has no casks of snapshots from before.
            Err(error) if error.kind() != ErrorKind::NotFound => _ = report.problem.get_or_insert(error),
            _ => {}
        }
        Ok(casks)
    }

    /// Copies the casks and the receipts of a step.
    #[boxed]
    async fn copy_step(
        &mut self,
        from: &SessionExchange,
        to: &SessionExchange,
        at: SessionStep,
        present: &RankSet,
        of_wanted: &mut BTreeSet<String>,
        report: &mut ReplicaReport,
    ) -> Result<()> {
        let mut objects = from.objects(at, present).await?;
        objects.retain(|object| self.ranks.contains(&object.ranks.first) && self.ranks.contains(&object.ranks.last));
        let receipts = || objects.iter().flat_map(|object| &object.receipts);
        receipts().try_for_each(|receipt| check_receipt(receipt, from.session(), at))?;
        let of_step = receipts().flat_map(|receipt| receipt.casks.iter().map(|cask| (cask, receipt.parent.is_none())));
        let casks: Vec<WantedCask> = of_step.map(|(cask, of_base)| WantedCask { cask: cask.clone(), of_base }).collect();
        // A part of the step that was copied stays until the next pull.
        of_wanted.extend(casks.iter().map(|wanted| wanted.cask.path()));
        self.copy_casks(&casks, report).await?;
        // A part of a step may be damaged, too.
        if to.parent(at).await.is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
            self.discard(from.session(), at).await?;
        }
        if let Some(parent) = from.parent(at).await?
            && to.fix_parent(at, parent).await? != parent
        {
            let message = "the source had another parent for this step before";
            return Err(Error::new(ErrorKind::Conflict, message).object(from.session().parent_path(at)));
        }
        for object in objects {
            to.put_object(at, object.ranks, object.bytes, object.proof).await?;
        }
        Ok(())
    }

    /// Copies the casks that the replica lacks, and checks every byte of each.
    #[boxed]
    async fn copy_casks(&mut self, wanted: &[WantedCask], report: &mut ReplicaReport) -> Result<()> {
        self.lacks_room = false;
        let unchecked: Vec<&WantedCask> = wanted.iter().filter(|wanted| !self.checked.contains(&wanted.cask.id)).collect();
        let mut needed = 0u64;
        for WantedCask { cask, .. } in unchecked.iter().copied() {
            if present(&self.memory, &cask.path(), cask.bytes).await?.is_none() {
                needed = needed.saturating_add(cask.bytes);
            }
        }
        if needed > self.room {
            let message = format!("there is no room for this copy: it needs {needed} bytes of memory, and may use {}", self.room);
            self.lacks_room = true;
            return Err(Error::new(ErrorKind::LimitExceeded, message));
        }
        let this = &*self;
        let copied = concurrently(
            CONCURRENT_CASKS,
            unchecked.into_iter().map(|wanted| async move { Ok((wanted.cask.id, this.copy_one(wanted).await)) }),
        );
        let mut outcome = Ok(());
        for (id, copied) in copied.await? {
            match copied {
                Ok(bytes) => {
                    self.checked.insert(id);
                    report.casks += u64::from(bytes > 0);
                    report.bytes += bytes;
                    self.room = self.room.saturating_sub(bytes);
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }

    /// Copies a cask, unless the replica has it undamaged; returns the bytes that were copied.
    #[boxed]
    async fn copy_one(&self, wanted: &WantedCask) -> Result<u64> {
        let WantedCask { cask, of_base } = wanted;
        let to = CaskSource::object(&self.memory, cask);
        let is_present = present(&self.memory, &cask.path(), cask.bytes).await?.is_some();
        if is_present && verify_cask(&to, cask, *of_base, self.memory.limits()).await.is_ok() {
            return Ok(0);
        }
        match copy_checked_cask(&CaskSource::object(&self.source, cask), &self.memory, cask, *of_base).await {
            Ok(()) => Ok(cask.bytes),
            Err(CopyFailure::Source(error)) if error.kind() == ErrorKind::Corrupt => {
                let message = format!("{} sent wrong bytes: {}", self.source.url(), error.message());
                Err(Error::corrupt(message).object(cask.path()).source(error))
            }
            Err(CopyFailure::Source(error) | CopyFailure::Destination(error)) => Err(error),
        }
    }

    /// Removes receipts and casks of other steps, except `of_wanted`, the casks of steps that are being copied. Those of other
    /// sessions stay until this session has committed a step: the job may resume from them if it fails before. Returns the bytes
    /// of removed casks.
    #[boxed]
    async fn prune(
        &mut self,
        to: &SessionExchange,
        session: SessionName,
        kept: &BTreeSet<SessionStep>,
        chain: &[WantedCask],
        of_wanted: &BTreeSet<String>,
    ) -> Result<u64> {
        let has_committed = self.log.as_ref().is_some_and(|log| log.has_committed(self.session));
        let folder = format!("{}/", session.folder());
        let mut needed: BTreeSet<String> = chain.iter().map(|wanted| wanted.cask.path()).chain(of_wanted.iter().cloned()).collect();
        let held = self.complete_steps(to).await?;
        for (at, present) in held.iter().filter(|(at, _)| kept.contains(at)) {
            let receipts = match to.receipts(*at, present).await {
                Ok(receipts) => receipts,
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::error!(%error, "a step is damaged in this copy; it is copied again");
                    // The next pull reads it again. Until then its casks are not known.
                    self.parents.remove(at);
                    return Ok(0);
                }
                Err(error) => return Err(error),
            };
            needed.extend(receipts.iter().flat_map(|receipt| &receipt.casks).map(CaskRef::path));
        }
        let objects = self.memory.objects();
        let mut unneeded = Vec::new();
        for found in objects.list("receipts").await? {
            let (step, object) = match found.path.strip_prefix(&folder) {
                Some(rest) => (rest.split('/').next().and_then(SessionStep::from_folder), None),
                None => (None, found.path.rsplit('/').next().and_then(RankRange::from_object)),
            };
            if step.is_some_and(|step| kept.contains(&step)) {
                continue;
            }
            if found.path.starts_with(&folder) || has_committed {
                unneeded.push(found.path);
            } else if let Some(ranks) = object {
                let bytes = objects.get(&found.path, self.memory.limits().max_manifest_bytes).await?;
                // Damaged receipts are of no use.
                let receipts = Receipt::decode_all(&bytes, ranks, self.memory.limits()).unwrap_or_default();
                needed.extend(receipts.iter().flat_map(|receipt| &receipt.casks).map(CaskRef::path));
            }
        }
        let casks: Vec<_> = objects.list("casks").await?.into_iter().filter(|found| !needed.contains(&found.path)).collect();
        let freed = casks.iter().fold(0u64, |sum, found| sum.saturating_add(found.bytes));
        unneeded.extend(casks.into_iter().map(|found| found.path));
        for path in &unneeded {
            objects.delete(path).await?;
        }
        self.checked.retain(|id| needed.contains(&format!("casks/{id}.cask")));
        Ok(freed)
    }
}

/// Parent of a step in the replica. All its receipts are read, so damage is found.
async fn parent_of(to: &SessionExchange, at: SessionStep, present: &RankSet) -> Result<Option<Id>> {
    let receipts = to.receipts(at, present).await?;
    // If this host wrote whole chunks while others wrote deltas, the snapshot needs the whole chain of their parent.
    Ok(match to.parent(at).await? {
        Some(noted) => noted,
        None => receipts.iter().find_map(|receipt| receipt.parent.as_ref()).map(|parent| parent.snapshot),
    })
}

/// Checks that a receipt is of the step that was asked for, and names casks of its own rank only.
fn check_receipt(receipt: &Receipt, session: SessionName, at: SessionStep) -> Result<()> {
    let found = SessionStep { attempt: receipt.attempt, step: receipt.step };
    let fail =
        |message: String, clause| Err(Error::corrupt(message).object(format!("{}/{}", session.folder(), at.folder())).clause(clause));
    if found != at || receipt.session != Some(session) {
        return fail(format!("a receipt of step {} is in the place of step {}", found.step, at.step), "manifest 6.2");
    }
    match receipt.casks.iter().find(|cask| rank_of_slot(cask.slot) != receipt.rank) {
        Some(cask) => fail(format!("the receipt of rank {} names a cask in slot {}", receipt.rank, cask.slot), "manifest 5"),
        None => Ok(()),
    }
}
