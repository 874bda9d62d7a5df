//! Messages of the ranks of a job, exchanged through the store: offers of the steps that a rank can load, and receipts of
//! uploaded shards. Spec: `spec/manifest.md`, clauses 6 and 7.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::ResultExt;
use crate::store::{Created, concurrently, objects_after};
use crate::wire::{Id, Receipt, SessionName, SessionStep, SharedParent};
use crate::{Error, ErrorKind, Result, Store};

/// Number of objects read at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Maximum size of an offer, in bytes.
const MAX_OFFER_BYTES: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    steps: Vec<u64>,
}

/// Messages of the ranks of a job, exchanged through a store: the steps that each rank can load, and the receipts of a
/// save.
#[derive(Debug, Clone)]
pub struct RankExchange {
    store: Store,
}

impl RankExchange {
    /// Exchanges messages through this store. Sends no request.
    pub fn new(store: &Store) -> Self {
        Self { store: store.clone() }
    }

    /// Tells the other ranks which steps this rank can load, newest first. `round` names one start of a job and may
    /// contain lower-case letters, digits, `-` and `_`. A rank may repeat the same list within a round; a different
    /// list is a `Conflict`.
    pub async fn put_offer(&self, round: &str, rank: u32, steps: &[u64]) -> Result<()> {
        self.store.objects().ensure_root()?;
        let path = path_of(round, rank)?;
        let json = serde_json::to_vec(&Offer { steps: steps.to_vec() }).map_err(|e| Error::invalid(format!("steps: {e}")))?;
        self.store.objects().create_unique(&path, json.into()).await.map_err(|e| match e.kind() {
            ErrorKind::Corrupt | ErrorKind::LimitExceeded => {
                let message = "this rank has offered other steps in this round; each start of the job needs a round of its own";
                Error::new(ErrorKind::Conflict, message).object(path)
            }
            _ => e,
        })
    }

    /// Returns the offer of each rank in a round, or `None` for a rank without one.
    pub async fn offers(&self, round: &str, world: u32) -> Result<Vec<Option<Vec<u64>>>> {
        let read = |rank: u32| async move {
            let path = path_of(round, rank)?;
            let Some(bytes) = self.store.objects().get_if_present(&path, MAX_OFFER_BYTES).await? else { return Ok(None) };
            let offer: Offer =
                serde_json::from_slice(&bytes).map_err(|e| Error::corrupt(format!("not a list of steps: {e}")).object(path))?;
            Ok(Some(offer.steps))
        };
        concurrently(CONCURRENT_REQUESTS, (0..world).map(read)).await
    }

    /// Puts a receipt into the store, for a coordinator that gets it no other way. The same receipt may be put twice.
    pub async fn put_receipt(&self, receipt: &Receipt) -> Result<()> {
        let path = Receipt::path_of(receipt.step, receipt.attempt, receipt.rank);
        self.store.objects().create_unique(&path, receipt.encode()?.into()).await.map_err(|e| match e.kind() {
            ErrorKind::Corrupt | ErrorKind::LimitExceeded => {
                Error::new(ErrorKind::Conflict, "the store has another receipt of this rank, step and attempt; increase `attempt`")
                    .object(path)
            }
            _ => e,
        })
    }

    /// Returns the receipts of a step and attempt that are in the store so far, by rank.
    pub async fn receipts(&self, step: u64, attempt: u64, world: u32) -> Result<Vec<Receipt>> {
        let read = |rank: u32| async move {
            let path = Receipt::path_of(step, attempt, rank);
            let bytes = self.store.objects().get_if_present(&path, self.store.limits().max_manifest_bytes).await?;
            bytes.map(|bytes| Receipt::decode(&bytes, self.store.limits()).in_object(path)).transpose()
        };
        let found: Vec<Option<Receipt>> = concurrently(CONCURRENT_REQUESTS, (0..world).map(read)).await?;
        Ok(found.into_iter().flatten().collect())
    }
}

/// Messages of the hosts of one session, through a store.
#[derive(Debug, Clone)]
pub struct SessionExchange {
    store: Store,
    session: SessionName,
}

impl SessionExchange {
    /// Exchanges the messages of a session through this store. Sends no request.
    pub fn new(store: &Store, session: SessionName) -> Self {
        Self { store: store.clone(), session }
    }

    /// Returns the parent that is fixed for a step: `None` if none is fixed yet, `Some(None)` for a base.
    pub async fn parent(&self, at: SessionStep) -> Result<Option<Option<Id>>> {
        let path = self.session.parent_path(at);
        let found = self.store.objects().get_if_present(&path, self.store.limits().max_entry_bytes).await?;
        let decode = |bytes: bytes::Bytes| SharedParent::decode(&bytes, self.store.limits()).in_object(&path);
        Ok(found.map(decode).transpose()?.map(|shared| shared.parent))
    }

    /// Fixes the parent of a step for all hosts, unless another host was faster. Returns the fixed parent.
    pub async fn fix_parent(&self, at: SessionStep, parent: Option<Id>) -> Result<Option<Id>> {
        let (path, bytes) = (self.session.parent_path(at), bytes::Bytes::from(SharedParent::new(parent).encode()?));
        for _ in 0..3 {
            let created = self.store.objects().create(&path, bytes.clone()).await;
            if let Some(fixed) = self.parent(at).await? {
                return Ok(fixed);
            }
            // Lost, refused, or lost in a race that nobody won.
            created.map_err(|e| Error::storage(&path, e))?;
        }
        Err(Error::new(ErrorKind::Storage, "the storage reports that the object exists, but does not return it; try again").object(path))
    }

    /// Creates the receipt of a rank in the store. A receipt that exists stays: an earlier process of the rank wrote it,
    /// for the same state.
    pub async fn put_receipt(&self, receipt: &Receipt) -> Result<()> {
        let path = self.session.receipt_path(SessionStep { attempt: receipt.attempt, step: receipt.step }, receipt.rank);
        let bytes = bytes::Bytes::from(receipt.encode()?);
        let created = self.store.objects().create(&path, bytes).await;
        if let Ok(Created::Written) = created {
            return Ok(());
        }
        // It exists, or the answer was lost.
        match self.store.objects().head_if_present(&path).await? {
            Some(_) => Ok(()),
            None => match created {
                Err(e) => Err(Error::storage(&path, e)),
                Ok(_) => Err(Error::new(ErrorKind::Storage, "the storage neither keeps nor refuses the object; try again").object(path)),
            },
        }
    }

    /// Lists the ranks with a receipt of each step after `after`. Listings may lag, so a receipt may be missing.
    pub async fn survey(&self, after: Option<SessionStep>) -> Result<BTreeMap<SessionStep, BTreeSet<u32>>> {
        let after = after.map(SessionStep::folder).unwrap_or_default();
        let mut found: BTreeMap<SessionStep, BTreeSet<u32>> = BTreeMap::new();
        for (name, object) in objects_after(self.store.objects(), &self.session.folder(), &after).await? {
            let rank = object.strip_suffix(".json").and_then(|rank| rank.parse().ok());
            if let (Some(at), Some(rank)) = (SessionStep::from_folder(&name), rank) {
                found.entry(at).or_default().insert(rank);
            }
        }
        Ok(found)
    }

    /// Reads the receipts of all ranks of a step. Fails with `NotFound` if one is missing.
    pub async fn receipts(&self, at: SessionStep, world: u32) -> Result<Vec<Receipt>> {
        self.receipts_of(at, 0..world).await
    }

    /// Reads the receipts of some ranks of a step. Fails with `NotFound` if one is missing.
    pub(crate) async fn receipts_of(&self, at: SessionStep, ranks: impl IntoIterator<Item = u32>) -> Result<Vec<Receipt>> {
        let read = |rank: u32| async move {
            let path = self.session.receipt_path(at, rank);
            let bytes = self.store.objects().get(&path, self.store.limits().max_manifest_bytes).await?;
            Receipt::decode(&bytes, self.store.limits()).in_object(path)
        };
        concurrently(CONCURRENT_REQUESTS, ranks.into_iter().map(read)).await
    }
}

fn path_of(round: &str, rank: u32) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    if round.is_empty() || round.len() > 128 || !round.chars().all(plain) {
        return Err(Error::invalid(format!("round `{}`: use lower-case letters, digits, - and _", round.escape_debug())));
    }
    Ok(format!("offers/{round}/{rank}.json"))
}
