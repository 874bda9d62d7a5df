//! The ranks of one host in a session of many: fixes the parent of a step, uploads the ranks' casks, and publishes their
//! receipts. Spec: `spec/manifest.md`, clauses 6 and 6.3.
//!
//! All ranks of a host share one view of the log, so a save costs few requests. The leader of the session commits.

use super::WriterOptions;
use super::ranks::{Rank, RankPart, open_parent};
use crate::commit::{Log, SessionExchange, Standing, refuse_features};
use crate::wire::{Id, MAX_RANK, Receipt, SessionName, SessionStep};
use crate::{Blob, Error, Metadata, Result, Store, TensorView, boxed};

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
    session: SessionName,
    exchange: SessionExchange,
    log: Log,
    parts: Vec<RankPart>,
    options: WriterOptions,
}

impl HostWriter {
    /// Opens a store for the saves of some ranks of a session. Fails with `NotFound` before the first leader has opened
    /// the store. All hosts use the same policy.
    pub async fn open(store: &Store, session: Id, ranks: &[u32], world: u32, options: WriterOptions) -> Result<Self> {
        if world > MAX_RANK || ranks.iter().any(|rank| *rank >= world) {
            return Err(Error::invalid(format!("ranks {ranks:?} of {world}: ranks count from 0 to world - 1")));
        }
        let log = Log::load(store).await?;
        let session = SessionName { run: log.store_file.run, session };
        let part = |rank: &u32| RankPart::new(store, Rank { rank: *rank, world, attempt: 0 }, options.clone());
        let parts = ranks.iter().map(part).collect();
        Ok(Self { store: store.clone(), session, exchange: SessionExchange::new(store, session), log, parts, options })
    }

    /// Name of the session.
    pub fn session(&self) -> SessionName {
        self.session
    }

    /// Returns the parent of the deltas of all ranks for a step, `None` for a base. The first host that asks chooses the
    /// parent by its policy.
    #[boxed]
    pub async fn fix_parent(&mut self, at: SessionStep) -> Result<Option<Id>> {
        if let Some(fixed) = self.exchange.parent(at).await? {
            return Ok(fixed);
        }
        self.catch_up().await?;
        let (parent, _) = self.options.policy.decide(self.log.state(), at.step, self.store.limits().max_chain_depth);
        self.exchange.fix_parent(at, parent).await
    }

    /// Encodes and uploads the states of all ranks of this host, in the order of [`open`](Self::open). Then publishes
    /// their receipts, all at once. A rank whose parent cannot be used writes whole chunks. Returns the receipts.
    #[boxed]
    pub async fn save(&mut self, at: SessionStep, parent: Option<Id>, states: &[RankState<'_>]) -> Result<Vec<Receipt>> {
        if states.len() != self.parts.len() {
            return Err(Error::invalid(format!("{} states for {} ranks", states.len(), self.parts.len())));
        }
        if parent.is_some_and(|parent| self.log.state().by_id(parent).is_none()) {
            // Another host chose a snapshot that was committed since.
            self.catch_up().await?;
        }
        refuse_features(&self.log.state().may_ignore)?;
        let parent = open_parent(&self.store, self.log.state(), parent).await?;
        let mut receipts = Vec::with_capacity(states.len());
        for (part, state) in self.parts.iter_mut().zip(states) {
            part.rank.attempt = at.attempt;
            let mut receipt = part.upload(at.step, parent.as_ref(), &state.tensors, &state.blobs).await?;
            receipt.session = Some(self.session);
            (receipt.user, receipt.metadata) = (state.metadata.user.clone(), state.metadata.file.clone());
            receipts.push(receipt);
        }
        self.exchange.put_receipts(&receipts).await?;
        Ok(receipts)
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
