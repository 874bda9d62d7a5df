//! What ranks can load, told to each other through the store. Spec: `spec/manifest.md`, clause 7.

use serde::{Deserialize, Serialize};

use crate::store::concurrently;
use crate::{Error, Result, Store};

/// Objects read at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Bytes of an offer, at most.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    steps: Vec<u64>,
}

impl Store {
    /// Tells the other ranks which steps this one can load, newest first. `round` names one start of a job: lower-case letters, digits,
    /// `-` and `_`. A rank may say the same twice in a round; another list is a `Conflict`.
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

    /// What each rank has offered in a round; none for those that have not yet.
    pub async fn offers(&self, round: &str, world: u32) -> Result<Vec<Option<Vec<u64>>>> {
        let read = |rank: u32| async move {
            let path = path_of(round, rank)?;
            let Some(bytes) = self.get_if_present(&path, MAX_BYTES).await? else { return Ok(None) };
            let offer: Offer = serde_json::from_slice(&bytes).map_err(|e| Error::corrupt(format!("no list of steps: {e}")).object(path))?;
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
