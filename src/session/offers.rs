//! Messages of the ranks of a job, exchanged through the store: offers of the steps that a rank can load, and receipts of
//! uploaded shards. Spec: `spec/manifest.md`, clauses 6 and 7.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::ResultExt;
use crate::store::concurrently;
use crate::wire::{Id, Receipt, is_round};
use crate::{Error, ErrorKind, Result, Store};

/// Number of objects read at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Maximum size of an offer, in bytes.
const MAX_OFFER_BYTES: u64 = 16 << 20;

/// Steps and attempt of a rank, with which all ranks agree on the step to return to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankOffer {
    /// Steps that the rank can load, newest first.
    pub steps: Vec<u64>,
    /// The snapshot of each step that the rank would load from a snapshot. A raw state has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub snapshots: BTreeMap<u64, Id>,
    /// Entry of the log after which the session of many hosts begins, as the rank knows it. `None` on one host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// How often the rank has returned to an older step in its session. `None` if it has not saved in the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u64>,
}

impl RankOffer {
    /// Whether both are offers of one rank at two times: a raw state may have become a snapshot in between.
    fn continues(&self, earlier: &Self) -> bool {
        let is_known = |(step, id): (&u64, &Id)| earlier.snapshots.get(step).is_none_or(|known| known == id);
        (&self.steps, self.after, self.attempt) == (&earlier.steps, earlier.after, earlier.attempt) && self.snapshots.iter().all(is_known)
    }
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

    /// Makes an offer to the other ranks. `round` names one agreement and may contain lower-case letters, digits, `-`
    /// and `_`. A rank may repeat an offer within a round, and the first one counts; an offer of other steps is a `Conflict`.
    pub async fn put_offer(&self, round: &str, rank: u32, offer: &RankOffer) -> Result<()> {
        self.store.objects().ensure_root().await?;
        let path = path_of(round, rank)?;
        let json = serde_json::to_vec(offer).map_err(|e| Error::invalid(format!("steps: {e}")))?;
        match self.store.objects().create_unique(&path, json.into()).await {
            Err(e) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::LimitExceeded) => {
                if self.offer(&path).await?.is_some_and(|earlier| offer.continues(&earlier)) {
                    return Ok(());
                }
                let message = "this rank has made another offer in this round; each agreement needs a round of its own";
                Err(Error::new(ErrorKind::Conflict, message).object(path))
            }
            put => put,
        }
    }

    async fn offer(&self, path: &str) -> Result<Option<RankOffer>> {
        let Some(bytes) = self.store.objects().get_if_present(path, MAX_OFFER_BYTES).await? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::corrupt(format!("not an offer: {e}")).object(path))
    }

    /// Returns the offer of each rank in a round, or `None` for a rank without one.
    pub async fn offers(&self, round: &str, world: u32) -> Result<Vec<Option<RankOffer>>> {
        let read = |rank: u32| async move { self.offer(&path_of(round, rank)?).await };
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

fn path_of(round: &str, rank: u32) -> Result<String> {
    if !is_round(round) {
        return Err(Error::invalid(format!("round `{}`: use lower-case letters, digits, - and _", round.escape_debug())));
    }
    Ok(format!("offers/{round}/{rank}.json"))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::{RankExchange, RankOffer};
    use crate::wire::Id;
    use crate::{ErrorKind, Store};

    fn offer(snapshots: &[(u64, Id)]) -> RankOffer {
        RankOffer { steps: vec![30, 20], snapshots: snapshots.iter().copied().collect(), after: None, attempt: Some(1) }
    }

    #[test]
    fn offers_are_those_of_the_spec() {
        #[derive(Deserialize)]
        struct Vectors {
            offer: Vec<Vector>,
        }
        #[derive(Deserialize)]
        struct Vector {
            offer: RankOffer,
            text: String,
        }
        let vectors: Vectors = toml::from_str(include_str!("../../spec/vectors/manifest.toml")).unwrap();
        for Vector { offer, text } in vectors.offer {
            assert_eq!(serde_json::to_string(&offer).unwrap(), text);
            assert_eq!(serde_json::from_str::<RankOffer>(&text).unwrap(), offer);
        }
    }

    /// A rank that repeats its offer may have encoded a raw state in between.
    #[tokio::test]
    async fn an_offer_may_be_repeated_with_more_snapshots() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().to_str().unwrap()).unwrap();
        let exchange = RankExchange::new(&store);
        let first = offer(&[(20, Id([2; 16]))]);
        exchange.put_offer("round", 0, &first).await.unwrap();
        exchange.put_offer("round", 0, &offer(&[(30, Id([3; 16])), (20, Id([2; 16]))])).await.unwrap();
        assert_eq!(exchange.offers("round", 2).await.unwrap(), [Some(first), None]);
        let other = [offer(&[(20, Id([4; 16]))]), RankOffer { steps: vec![30], ..offer(&[]) }, RankOffer { attempt: None, ..offer(&[]) }];
        for offer in &other {
            assert_eq!(exchange.put_offer("round", 0, offer).await.unwrap_err().kind(), ErrorKind::Conflict);
        }
    }
}
