//! Offers: the steps that each rank can load, exchanged through the store. Spec: `spec/manifest.md`, clause 7.

use serde::{Deserialize, Serialize};

use crate::store::concurrently;
use crate::{Error, Result, Store};

/// Number of objects read at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Maximum size of an offer, in bytes.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    steps: Vec<u64>,
}

impl Store {
    /// Tells the other ranks which steps this rank can load, newest first. `round` names one start of a job and may
    /// contain lower-case letters, digits, `-` and `_`. A rank may repeat the same list within a round; a different
    /// list is a `Conflict`.
    pub async fn put_offer(&self, round: &str, rank: u32, steps: &[u64]) -> Result<()> {
        self.ensure_root()?;
        let path = path_of(round, rank)?;
        let json = serde_json::to_vec(&Offer { steps: steps.to_vec() }).map_err(|e| Error::invalid(format!("steps: {e}")))?;
        self.create_unique(&path, json.into()).await.map_err(|e| match e.kind() {
            crate::ErrorKind::Corrupt | crate::ErrorKind::LimitExceeded => {
                let message = "this rank has offered other steps in this round; each start of the job needs a round of its own";
                Error::new(crate::ErrorKind::Conflict, message).object(path)
            }
            _ => e,
        })
    }

    /// Returns the offer of each rank in a round, or `None` for a rank without one.
    pub async fn offers(&self, round: &str, world: u32) -> Result<Vec<Option<Vec<u64>>>> {
        let read = |rank: u32| async move {
            let path = path_of(round, rank)?;
            let Some(bytes) = self.get_if_present(&path, MAX_BYTES).await? else { return Ok(None) };
            let offer: Offer =
                serde_json::from_slice(&bytes).map_err(|e| Error::corrupt(format!("not a list of steps: {e}")).object(path))?;
            Ok(Some(offer.steps))
        };
        concurrently(CONCURRENT_REQUESTS, (0..world).map(read)).await
    }
}

fn path_of(round: &str, rank: u32) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    if round.is_empty() || round.len() > 128 || !round.chars().all(plain) {
        return Err(Error::invalid(format!("round `{}`: use lower-case letters, digits, - and _", round.escape_debug())));
    }
    Ok(format!("offers/{round}/{rank}.json"))
}
