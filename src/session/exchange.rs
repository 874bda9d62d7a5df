//! Messages of the hosts of one session, through a store: the beginning of the session, the parent of each step, receipts,
//! and notes that ranks have ended. Spec: `spec/manifest.md`, clauses 6.2 to 6.5.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use super::rank_set::RankSet;
use super::receipt_proof::{MAX_RECEIPT_PROOF_BYTES, ReceiptProof, receipt_proof_path};
use crate::error::ResultExt;
use crate::store::{Created, concurrently, objects_after};
use crate::wire::{
    ENDED_FOLDER, Id, RankRange, RankStart, RanksEnded, Receipt, SessionBeginning, SessionMessage, SessionName, SessionStep, SharedParent,
    beginning_path, ended_path, start_path,
};
use crate::{Error, ErrorKind, Result, Store};

/// Number of objects read at once.
const CONCURRENT_REQUESTS: usize = 32;

/// Messages of the hosts of one session, through a store.
#[derive(Debug, Clone)]
pub struct SessionExchange {
    store: Store,
    session: SessionName,
    /// Proves receipts that are created, and checks those that are read.
    proof: Option<Arc<dyn ReceiptProof>>,
}

/// An object with receipts, as it was read.
#[derive(Debug, Clone)]
pub(crate) struct ReceiptsObject {
    pub ranks: RankRange,
    pub bytes: Bytes,
    /// Its proof, checked; `None` if none was asked for.
    pub proof: Option<Bytes>,
    pub receipts: Vec<Receipt>,
}

/// Messages of a session in a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionSurvey {
    /// Ranks with a receipt, by step.
    pub steps: BTreeMap<SessionStep, RankSet>,
    /// Ranks that save no more: they were told to publish nothing after their last receipt.
    pub ended: RankSet,
}

impl SessionSurvey {
    /// Whether a step can never become complete: a rank without a receipt has ended. The listing may be older than the end of
    /// that rank, so a caller lists the receipts again after it has seen the end.
    pub fn is_hopeless(&self, at: SessionStep, ended: &RankSet, world: u32) -> bool {
        self.steps.get(&at).is_some_and(|ranks| ranks.missing(0..world).intersects(ended))
    }
}

impl SessionExchange {
    /// Exchanges the messages of a session through this store. Sends no request.
    pub fn new(store: &Store, session: SessionName) -> Self {
        Self { store: store.clone(), session, proof: None }
    }

    /// Publishes a proof with all receipts, and refuses receipts without one.
    pub fn with_proof(self, proof: Option<Arc<dyn ReceiptProof>>) -> Self {
        Self { proof, ..self }
    }

    /// The session.
    pub(crate) fn session(&self) -> SessionName {
        self.session
    }

    /// Agrees with all hosts on the log entry after which a session begins. `after`: the last log entry, 0 for an empty log or
    /// before there is a store. The first host that asks decides; returns its entry.
    pub async fn begin(store: &Store, session: Id, after: u64) -> Result<u64> {
        store.objects().ensure_root().await?;
        let bytes = SessionBeginning::new(after).encode()?;
        let found = agree(store, &beginning_path(session), bytes).await?;
        Ok(SessionBeginning::decode(&found, store.limits()).in_object(beginning_path(session))?.after)
    }

    /// The log entry after which a session begins; `None` if no host has told.
    pub async fn beginning(store: &Store, session: Id) -> Result<Option<u64>> {
        let path = beginning_path(session);
        let found = store.objects().get_if_present(&path, store.limits().max_entry_bytes).await?;
        let decode = |bytes: Bytes| SessionBeginning::decode(&bytes, store.limits()).in_object(&path);
        Ok(found.map(decode).transpose()?.map(|beginning| beginning.after))
    }

    /// Notes that a process starts as a rank of a session. Fails with `Conflict` if another process has done so: states from
    /// before and after a restart must not become one snapshot.
    pub async fn start_rank(store: &Store, session: Id, rank: u32, process: Id) -> Result<()> {
        let path = start_path(session, rank);
        let found = agree(store, &path, RankStart::new(process).encode()?).await?;
        if RankStart::decode(&found, store.limits()).in_object(&path)?.process == process {
            return Ok(());
        }
        let message = format!(
            "rank {rank} has started in this session before. Give each start of the job a session of its own, the same on all hosts"
        );
        Err(Error::new(ErrorKind::Conflict, message).object(path).clause("manifest 6.4"))
    }

    /// Notes that these ranks save no more: all their receipts are in the store.
    pub async fn end_ranks(store: &Store, session: Id, ranks: RankRange) -> Result<()> {
        store.objects().ensure_root().await?;
        create_or_keep(store, &ended_path(session, ranks), RanksEnded::new().encode()?.into()).await
    }

    /// Returns the parent that is fixed for a step: `None` if none is fixed yet, `Some(None)` for a base.
    pub async fn parent(&self, at: SessionStep) -> Result<Option<Option<Id>>> {
        let path = self.session.parent_path(at);
        let found = self.store.objects().get_if_present(&path, self.store.limits().max_entry_bytes).await?;
        let decode = |bytes: Bytes| SharedParent::decode(&bytes, self.store.limits()).in_object(&path);
        Ok(found.map(decode).transpose()?.map(|shared| shared.parent))
    }

    /// Fixes the parent of a step for all hosts, unless another host was faster. Returns the fixed parent.
    pub async fn fix_parent(&self, at: SessionStep, parent: Option<Id>) -> Result<Option<Id>> {
        let path = self.session.parent_path(at);
        let found = agree(&self.store, &path, SharedParent::new(parent).encode()?).await?;
        Ok(SharedParent::decode(&found, self.store.limits()).in_object(path)?.parent)
    }

    /// Notes the parent of a step in a mirror, unless the mirror has receipts of the step. Replaces the note of an attempt
    /// that failed.
    pub(crate) async fn note_parent(&self, at: SessionStep, parent: Option<Id>) -> Result<()> {
        if !self.ranks(at).await?.is_empty() {
            return Ok(());
        }
        let bytes = Bytes::from(SharedParent::new(parent).encode()?);
        self.store.objects().put_whole(&self.session.parent_path(at), bytes.into()).await
    }

    /// Creates the receipts of the ranks of a host, in rank order, all of one step: one object for consecutive ranks, or
    /// several if one would be too large. An object that exists stays: an earlier process of these ranks wrote it, for the
    /// same states.
    pub async fn put_receipts(&self, receipts: &[Receipt]) -> Result<()> {
        let mut objects: Vec<(SessionStep, RankRange, Vec<u8>)> = Vec::new();
        let limit = self.store.limits().max_manifest_bytes;
        for receipt in receipts {
            let at = SessionStep { attempt: receipt.attempt, step: receipt.step };
            let rank = receipt.rank;
            let encoded = receipt.encode()?;
            match objects.last_mut() {
                Some((before, ranks, bytes))
                    if *before == at && rank == ranks.last.saturating_add(1) && (bytes.len() + encoded.len()) as u64 <= limit =>
                {
                    ranks.last = rank;
                    bytes.extend(encoded);
                }
                _ => objects.push((at, RankRange { first: rank, last: rank }, encoded)),
            }
        }
        for (at, ranks, bytes) in objects {
            let proof = self.proof.as_ref().map(|proof| proof.prove(&bytes)).transpose()?;
            self.put_object(at, ranks, bytes.into(), proof.map(Bytes::from)).await?;
        }
        Ok(())
    }

    /// Creates an object with receipts, after its proof.
    pub(crate) async fn put_object(&self, at: SessionStep, ranks: RankRange, receipts: Bytes, proof: Option<Bytes>) -> Result<()> {
        let path = self.session.receipts_path(at, ranks);
        if let Some(proof) = proof {
            self.store.objects().put_whole(&receipt_proof_path(&path, &receipts), proof.into()).await?;
        }
        create_or_keep(&self.store, &path, receipts).await
    }

    /// Lists the ranks with a receipt of each step after `after`, and the ranks that have ended. Listings may lag, so a
    /// receipt may be missing.
    pub async fn survey(&self, after: Option<SessionStep>) -> Result<SessionSurvey> {
        let after = after.map(SessionStep::folder).unwrap_or_default();
        let mut survey = SessionSurvey::default();
        for (name, object) in objects_after(self.store.objects(), &self.session.folder(), &after).await? {
            let Some(ranks) = RankRange::from_object(&object) else { continue };
            match SessionStep::from_folder(&name) {
                Some(at) => survey.steps.entry(at).or_default().insert(ranks),
                None if name == ENDED_FOLDER => survey.ended.insert(ranks),
                None => {}
            }
        }
        Ok(survey)
    }

    /// Lists the ranks with a receipt of a step.
    pub async fn ranks(&self, at: SessionStep) -> Result<RankSet> {
        let before = at.step.checked_sub(1).map(|step| SessionStep { step, ..at });
        Ok(self.survey(before).await?.steps.remove(&at).unwrap_or_default())
    }

    /// Reads the receipts of these ranks of a step, one of each rank. `ranks`: as listed by [`survey`](Self::survey) or [`ranks`](Self::ranks).
    pub async fn receipts(&self, at: SessionStep, ranks: &RankSet) -> Result<Vec<Receipt>> {
        let mut receipts: BTreeMap<u32, Receipt> = BTreeMap::new();
        for receipt in self.objects(at, ranks).await?.into_iter().flat_map(|object| object.receipts) {
            // Two processes of a host may have split its ranks differently. Each receipt is complete by itself.
            receipts.entry(receipt.rank).or_insert(receipt);
        }
        Ok(receipts.into_values().collect())
    }

    /// Reads the objects with the receipts of these ranks.
    pub(crate) async fn objects(&self, at: SessionStep, ranks: &RankSet) -> Result<Vec<ReceiptsObject>> {
        concurrently(CONCURRENT_REQUESTS, ranks.ranges().map(|ranks| self.object(at, ranks))).await
    }

    async fn object(&self, at: SessionStep, ranks: RankRange) -> Result<ReceiptsObject> {
        let path = self.session.receipts_path(at, ranks);
        let objects = self.store.objects();
        let bytes = objects.get(&path, self.store.limits().max_manifest_bytes).await?;
        let mut found = None;
        if let Some(proof) = &self.proof {
            found = objects.get_if_present(&receipt_proof_path(&path, &bytes), MAX_RECEIPT_PROOF_BYTES).await?;
            let checked = proof.check(ranks, &bytes, found.as_deref());
            checked
                .map_err(|error| Error::new(error.kind(), format!("{}, step {}: {}", self.store.url(), at.step, error.message())))
                .in_object(path.clone())?;
        }
        let receipts = Receipt::decode_all(&bytes, ranks, self.store.limits()).in_object(path)?;
        Ok(ReceiptsObject { ranks, bytes, proof: found, receipts })
    }
}

/// Creates an object unless another host was faster; returns the bytes that it has.
async fn agree(store: &Store, path: &str, bytes: Vec<u8>) -> Result<Bytes> {
    let bytes = Bytes::from(bytes);
    for _ in 0..3 {
        let created = store.objects().create(path, bytes.clone()).await;
        if let Some(agreed) = store.objects().get_if_present(path, store.limits().max_entry_bytes).await? {
            return Ok(agreed);
        }
        // Lost, refused, or lost in a race that nobody won.
        created.map_err(|e| Error::storage(path, e))?;
    }
    Err(Error::new(ErrorKind::Storage, "the storage reports that the object exists, but does not return it; try again").object(path))
}

/// Creates an object. An object that exists stays.
async fn create_or_keep(store: &Store, path: &str, bytes: Bytes) -> Result<()> {
    let created = store.objects().create(path, bytes).await;
    if let Ok(Created::Written) = created {
        return Ok(());
    }
    // It exists, or the answer was lost.
    match store.objects().head_if_present(path).await? {
        Some(_) => Ok(()),
        None => match created {
            Err(e) => Err(Error::storage(path, e)),
            Ok(_) => Err(Error::new(ErrorKind::Storage, "the storage neither keeps nor refuses the object; try again").object(path)),
        },
    }
}
