//! The ranks of one host in a session of many: fixes the parent of a step, uploads the ranks' casks, and publishes their
//! receipts. Spec: `spec/manifest.md`, clauses 6 and 6.3.
//!
//! All ranks of a host share one view of the log, so a save costs few requests. The leader of the session commits.

use std::sync::Arc;

use super::exchange::SessionExchange;
use super::receipt_proof::ReceiptProof;
use crate::chain::chain_of;
use crate::commit::{Log, SnapshotRecord, Standing, load_from, load_log, read_manifest, refuse_features, replace_from};
use crate::wire::{CaskRef, Id, MAX_RANK, Receipt, SessionName, SessionStep, rank_of_slot};
use crate::writer::{Parent, Rank, RankPart, Unreadable, decide_for_ranks, open_parent, parts_are_refused};
use crate::{Blob, Error, Metadata, Result, Store, TensorView, WriterOptions, boxed};

/// Tensors, blobs and metadata of one rank at one step.
#[derive(Debug)]
pub struct RankState<'a> {
    /// Its shards.
    pub tensors: Vec<TensorView<'a>>,
    /// Its blobs.
    pub blobs: Vec<Blob<'a>>,
    /// Metadata of the snapshot, if this rank has it.
    pub metadata: Metadata,
}

/// Uploads the states of the ranks of one host in a session of many hosts.
#[derive(Debug)]
pub struct HostWriter {
    store: Store,
    /// Place of casks and receipts: the store, or a mirror of it.
    memory: Store,
    session: SessionName,
    exchange: SessionExchange,
    log: Log,
    parts: Vec<RankPart>,
    options: WriterOptions,
    /// Whether the store did not answer when the last parent was chosen.
    is_cut_off: bool,
    proof: Option<Arc<dyn ReceiptProof>>,
}

impl HostWriter {
    /// Opens a store for the saves of some ranks of a session. Fails with `NotFound` before the first leader has opened
    /// the store. All hosts use the same policy.
    pub async fn open(store: &Store, session: Id, ranks: &[u32], world: u32, options: WriterOptions) -> Result<Self> {
        Self::open_with_mirror(store, store, session, ranks, world, options).await
    }

    /// Like [`open`](Self::open). Writes casks and receipts to a mirror in memory: see
    /// [`Mirror`](crate::session::Mirror), which uploads them.
    pub async fn open_with_mirror(
        store: &Store,
        memory: &Store,
        session: Id,
        ranks: &[u32],
        world: u32,
        options: WriterOptions,
    ) -> Result<Self> {
        Self::with_log(load_log(store).await?, store, memory, session, ranks, world, options)
    }

    /// Like [`open_with_mirror`](Self::open_with_mirror), while the store does not answer: takes the log from the mirror. Sends
    /// no request to the store.
    pub async fn open_in_mirror(
        store: &Store,
        memory: &Store,
        session: Id,
        ranks: &[u32],
        world: u32,
        options: WriterOptions,
    ) -> Result<Self> {
        Self::with_log(load_from(memory, store).await?, store, memory, session, ranks, world, options)
    }

    fn with_log(log: Log, store: &Store, memory: &Store, session: Id, ranks: &[u32], world: u32, options: WriterOptions) -> Result<Self> {
        if world > MAX_RANK || ranks.iter().any(|rank| *rank >= world) {
            return Err(Error::invalid(format!("ranks {ranks:?} of {world}: ranks count from 0 to world - 1")));
        }
        if options.precision.needs_whole_state() {
            return Err(parts_are_refused(world));
        }
        let session = SessionName { run: log.store_file.run, session };
        let part = |rank: &u32| RankPart::new(memory, Rank { rank: *rank, world, attempt: 0 }, options.clone());
        let parts = ranks.iter().map(part).collect();
        let exchange = SessionExchange::new(store, session);
        let store = store.clone();
        let memory = memory.clone();
        Ok(Self { store, memory, session, exchange, log, parts, options, is_cut_off: false, proof: None })
    }

    /// Publishes a proof with the receipts in the mirror, for hosts that copy them from there.
    pub fn prove_receipts(&mut self, proof: Option<Arc<dyn ReceiptProof>>) {
        self.proof = proof;
    }

    /// Name of the session.
    pub fn session(&self) -> SessionName {
        self.session
    }

    /// Returns the parent of the deltas of all ranks for a step, `None` for a base. The first host that asks chooses the
    /// parent by its policy.
    #[boxed]
    pub async fn fix_parent(&mut self, at: SessionStep) -> Result<Option<Id>> {
        match self.fixed_parent(at).await? {
            Some(fixed) => Ok(fixed),
            None => self.choose_parent(at).await,
        }
    }

    /// The parent that a host has fixed for a step; `None` if none has.
    pub async fn fixed_parent(&mut self, at: SessionStep) -> Result<Option<Option<Id>>> {
        let fixed = self.exchange.parent(at).await?;
        self.is_cut_off = false;
        Ok(fixed)
    }

    /// Fixes the parent that another host has chosen while the store did not answer; returns the fixed parent.
    pub async fn adopt_parent(&self, at: SessionStep, parent: Option<Id>) -> Result<Option<Id>> {
        self.exchange.fix_parent(at, parent).await
    }

    /// Chooses the parent of a step by the policy, and fixes it unless another host was faster; returns the fixed parent.
    pub async fn choose_parent(&mut self, at: SessionStep) -> Result<Option<Id>> {
        self.catch_up().await?;
        let (parent, _) = decide_for_ranks(self.options.policy, &mut self.log, &self.store, at.step).await?;
        self.exchange.fix_parent(at, parent).await
    }

    /// Encodes and uploads the states of all ranks of this host, in the order of [`open`](Self::open). Then publishes
    /// their receipts, all at once. A rank whose parent cannot be used writes whole chunks. Returns the receipts.
    #[boxed]
    pub async fn save(&mut self, at: SessionStep, parent: Option<Id>, states: &[RankState<'_>]) -> Result<Vec<Receipt>> {
        if states.len() != self.parts.len() {
            return Err(Error::invalid(format!("{} states for {} ranks", states.len(), self.parts.len())));
        }
        if !self.is_cut_off && parent.is_some_and(|parent| self.log.state().by_id(parent).is_none()) {
            // Another host chose a snapshot that was committed since.
            self.catch_up().await?;
        }
        refuse_features(&self.log.state().may_ignore)?;
        let mut in_memory = false;
        let chosen = parent;
        let mut parent = match parent.and_then(|id| self.log.state().by_id(id)) {
            Some(record) if self.has_mirror() && self.is_mirrored(record).await? => {
                let in_mirror = open_parent(&self.memory, self.log.state(), parent).await?;
                in_memory = in_mirror.is_some();
                match in_mirror {
                    // The mirror is damaged.
                    None if !self.is_cut_off => open_parent(&self.store, self.log.state(), parent).await?,
                    in_mirror => in_mirror,
                }
            }
            _ if self.is_cut_off => None,
            _ => open_parent(&self.store, self.log.state(), parent).await?,
        };
        let parent_id = parent.as_ref().map(|parent| parent.snapshot.record().id);
        let receipts_at = SessionExchange::new(&self.memory, self.session);
        if self.has_mirror() {
            // The one that all hosts choose. A rank that writes whole chunks agrees with any.
            receipts_at.note_parent(at, chosen).await?;
        }
        let mut receipts = Vec::with_capacity(states.len());
        for (part, state) in self.parts.iter_mut().zip(states) {
            part.rank.attempt = at.attempt;
            let unreadable = if in_memory { Unreadable::Fail } else { Unreadable::SaveWhole };
            let mut receipt = match part.upload(at.step, parent.as_ref(), unreadable, &state.tensors, &state.blobs).await {
                // A mirror lacks the parent of a shard that a rank of another host has, too.
                Err(error) if in_memory && Parent::is_dispensable(&error) => {
                    parent = match self.is_cut_off {
                        true => None,
                        false => open_parent(&self.store, self.log.state(), parent_id).await?,
                    };
                    in_memory = false;
                    part.upload(at.step, parent.as_ref(), Unreadable::SaveWhole, &state.tensors, &state.blobs).await?
                }
                uploaded => uploaded?,
            };
            receipt.session = Some(self.session);
            (receipt.user, receipt.metadata) = (state.metadata.user.clone(), state.metadata.file.clone());
            receipts.push(receipt);
        }
        receipts_at.with_proof(self.proof.clone()).put_receipts(&receipts).await?;
        Ok(receipts)
    }

    /// Parent of the deltas of all hosts for a step, if the store does not answer: the one that the policy chooses from the
    /// log in the mirror, if the mirror has it. The upload fails if the other hosts choose another parent, because their mirrors
    /// have more of the log.
    #[boxed]
    pub async fn mirrored_parent(&mut self, at: SessionStep) -> Result<Option<Id>> {
        self.cut_off().await?;
        let (parent, _) = decide_for_ranks(self.options.policy, &mut self.log, &self.memory, at.step).await?;
        match parent {
            Some(parent) if self.has_parent(parent).await? => Ok(Some(parent)),
            _ => Ok(None),
        }
    }

    /// Whether the log in the mirror names a snapshot, and the mirror has this host's part of the snapshot's chain.
    pub async fn has_parent(&self, parent: Id) -> Result<bool> {
        match self.log.state().by_id(parent) {
            Some(record) => self.is_mirrored(record).await,
            None => Ok(false),
        }
    }

    /// The snapshots of a parent's chain, newest first; none if the log does not name the parent.
    #[boxed]
    pub async fn chain_of_parent(&mut self, parent: Id) -> Result<Vec<SnapshotRecord>> {
        if self.log.state().by_id(parent).is_none() {
            // Another host chose a snapshot that was committed since.
            self.catch_up().await?;
        }
        match self.log.state().by_id(parent) {
            Some(_) => chain_of(self.log.state(), parent, self.store.limits().max_chain_depth),
            None => Ok(Vec::new()),
        }
    }

    /// Takes the log from the mirror, and forgets what it has read beyond that: other hosts copy a step only from a mirror that
    /// names the parent. The next save sends no request to the store; it writes whole chunks if the mirror lacks its parent.
    pub async fn cut_off(&mut self) -> Result<()> {
        self.is_cut_off = true;
        replace_from(&mut self.log, &self.memory).await
    }

    fn has_mirror(&self) -> bool {
        self.memory.url() != self.store.url()
    }

    /// Whether the mirror has the casks of this host's ranks for a snapshot and its chain, and undamaged manifests.
    async fn is_mirrored(&self, record: &SnapshotRecord) -> Result<bool> {
        let objects = self.memory.objects();
        for link in chain_of(self.log.state(), record.id, self.store.limits().max_chain_depth)? {
            let place = link.manifest_place();
            if place.inline_in.is_some() || objects.head_if_present(&place.path).await?.is_none() {
                return Ok(false);
            }
            let manifest = match read_manifest(&self.memory, &place).await {
                Ok(manifest) => manifest,
                Err(error) if error.kind().is_damaged_object() => {
                    tracing::error!(%error, "a manifest is damaged in memory; the parent is not read from memory");
                    return Ok(false);
                }
                Err(error) => return Err(error),
            };
            let is_ours = |cask: &&CaskRef| self.parts.iter().any(|part| part.rank.rank == rank_of_slot(cask.slot));
            for cask in manifest.casks.iter().filter(is_ours) {
                if objects.head_if_present(&cask.path()).await?.is_none_or(|found| found.bytes != cask.bytes) {
                    return Ok(false);
                }
            }
            if objects.head_if_present(&format!("directories/{}", manifest.directory)).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads the entries of the log that were committed since. Fails with `Conflict` if the store was deleted or replaced.
    #[boxed]
    async fn catch_up(&mut self) -> Result<()> {
        match self.log.catch_up().await? {
            Standing::Same => Ok(()),
            Standing::Stale(stale) => {
                self.parts.iter_mut().for_each(RankPart::forget_base);
                Err(stale.error)
            }
        }
    }
}
