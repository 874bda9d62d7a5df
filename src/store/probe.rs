//! Tests the one guarantee that commits need from a storage: of several concurrent creates of a name, exactly one wins.

use bytes::Bytes;

use super::{Created, Objects};
use crate::wire::Id;
use crate::{Error, ErrorKind, Result, boxed};

/// Rounds of racing creates. A storage that ignores the condition fails the first round. A storage that checks it
/// without a lock fails within a few.
const ROUNDS: u32 = 20;

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeReport {
    /// Number of rounds of racing creates, each with exactly one winner.
    pub rounds: u32,
}

/// Races creates on scratch objects. Refuses a storage on which a name can be created twice.
pub(crate) async fn probe(objects: &Objects) -> Result<ProbeReport> {
    let run = Id::random()?;
    // The marker stays during all rounds. If it disappears, another process deletes objects here, and the rounds
    // prove nothing.
    let marker = format!("probe/{run}");
    objects.create_unique(&marker, Bytes::from_static(b"probe")).await?;
    let found = probe_rounds(objects, run).await;
    if found.as_ref().is_err_and(|e| e.kind() == ErrorKind::UnsafeStore) && objects.head_if_present(&marker).await?.is_none() {
        let message = format!(
            "`{marker}`, which tensorcask had written to test the storage, was removed during the test. Another process deletes or \
             replaces this store; save again when it is done"
        );
        return Err(Error::new(ErrorKind::Conflict, message).object(&objects.url));
    }
    if let Err(e) = objects.delete(&marker).await {
        tracing::debug!(object = marker, error = %e, "scratch object not removed");
    }
    found
}

/// Like [`probe`], in a place that has no store and may not exist. Leaves a local disk as it was.
pub(crate) async fn probe_without_store(objects: &Objects) -> Result<ProbeReport> {
    let Some(root) = objects.local_folder() else { return probe(objects).await };
    let missing: Vec<_> = root.ancestors().take_while(|folder| matches!(folder.try_exists(), Ok(false))).collect();
    std::fs::create_dir_all(root).map_err(|e| Error::io(root.display().to_string(), e))?;
    let found = probe(objects).await;
    for folder in std::iter::once(root.join("probe").as_path()).chain(missing) {
        // Fails for a folder with something in it, which then stays.
        let _ = std::fs::remove_dir(folder);
    }
    found
}

#[boxed]
async fn probe_rounds(objects: &Objects, run: Id) -> Result<ProbeReport> {
    for round in 0..ROUNDS {
        let object = format!("probe/{run}-{round}");
        let mut outcome = probe_round(objects, &object).await;
        if let Ok(false) = outcome {
            // A server may report that nobody won a race. Nothing exists then, so the round is repeated with the same
            // name.
            objects.delete(&object).await?;
            outcome = probe_round(objects, &object).await;
        }
        // A leftover scratch object is harmless.
        if let Err(e) = objects.delete(&object).await {
            tracing::debug!(object, error = %e, "scratch object not removed");
        }
        outcome?;
    }
    Ok(ProbeReport { rounds: ROUNDS })
}

/// Races creates of one object. Returns whether one of the racers knows that it won.
#[boxed]
async fn probe_round(objects: &Objects, object: &str) -> Result<bool> {
    let tokens = [Id::random()?, Id::random()?, Id::random()?];
    let body = |token: Id| Bytes::from(token.to_hex());
    let refuse = |message: &str| {
        Err(Error::new(
            ErrorKind::UnsafeStore,
            format!(
                "{message}. Two jobs could overwrite each other's commits here, so tensorcask refuses this storage. \
                 It needs put-if-absent (`If-None-Match: *`), and hard links on a file system"
            ),
        )
        .object(&objects.url)
        .clause("log 5"))
    };
    let fail = |e| Error::storage(object, e);
    let (first, second) = tokio::join!(objects.create(object, body(tokens[0])), objects.create(object, body(tokens[1])));
    let mut winners = Vec::new();
    for (outcome, token) in [(first, tokens[0]), (second, tokens[1])] {
        if let Created::Written = outcome.map_err(fail)? {
            winners.push(token);
        }
    }
    if winners.len() > 1 {
        return refuse("two creates of one object both succeeded");
    }
    if winners.is_empty() && objects.get_if_present(object, 1 << 10).await?.is_none() {
        return Ok(false);
    }
    if let Created::Written = objects.create(object, body(tokens[2])).await.map_err(fail)? {
        return refuse("an object that exists was created again");
    }
    let found = objects.get(object, 1 << 10).await?;
    // After lost answers no racer knows that it won, so the object may hold either body.
    let expected = if winners.is_empty() { &tokens[..2] } else { &winners[..] };
    if !expected.iter().any(|token| body(*token) == found) {
        return refuse("an object does not hold what its only creator wrote");
    }
    Ok(!winners.is_empty())
}
