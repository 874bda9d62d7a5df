//! Tests the one guarantee that commits need from a storage: of several concurrent creates of a name, exactly one wins, and
//! everyone sees what the winner wrote.

use bytes::Bytes;

use super::objects::blocking;
use super::{Created, Objects};
use crate::wire::Id;
use crate::{Error, ErrorKind, Result, boxed};

/// Rounds of racing creates. A storage that ignores the condition fails the first round. A storage that checks it
/// without a lock fails within a few.
const ROUNDS: u32 = 20;
/// Rounds between two ways to one storage, such as two mounts. Each may keep names and locks of its own, and on one file system
/// only 3 of 100 races of hard links had two winners.
const PAIR_ROUNDS: u32 = 200;

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeReport {
    /// Number of rounds of racing creates, each with exactly one winner.
    pub rounds: u32,
}

/// Races creates on scratch objects. Refuses a storage on which a name can be created twice.
pub(crate) async fn probe(objects: &Objects) -> Result<ProbeReport> {
    race(objects, objects, ROUNDS).await
}

/// Like [`probe`], in a place that has no store and may not exist. Leaves a local disk as it was.
pub(crate) async fn probe_without_store(objects: &Objects) -> Result<ProbeReport> {
    race_without_store(objects, objects, ROUNDS).await
}

/// Races creates of two ways to one storage. Refuses them if a name can be created by both, or if one does not see what the
/// other wrote. Neither needs a store.
pub(crate) async fn probe_pair(objects: &Objects, second: &Objects) -> Result<ProbeReport> {
    race_without_store(objects, second, PAIR_ROUNDS).await
}

/// The places that are asked: one, if both are the same.
fn each<'a>(objects: &'a Objects, second: &'a Objects) -> Vec<&'a Objects> {
    if std::ptr::eq(objects, second) { vec![objects] } else { vec![objects, second] }
}

/// The error of an object that only one of two places shows.
fn unseen(objects: &Objects, second: &Objects, object: &str) -> Error {
    let message = format!(
        "`{object}` was written, and is not seen both at `{}` and at `{}`: these are two storages, or one of them shows an old view \
         (a cache of its mount). Processes of one job that use both would fail; use one of them",
        objects.url, second.url
    );
    Error::new(ErrorKind::UnsafeStore, message).object(&second.url).clause("log 5")
}

/// Races creates of `objects` and `second`, which are the same or two ways to one storage, such as two mounts.
async fn race(objects: &Objects, second: &Objects, rounds: u32) -> Result<ProbeReport> {
    let run = Id::random()?;
    // The marker stays during all rounds. If it disappears, another process deletes objects here, and the rounds
    // prove nothing.
    let marker = format!("probe/{run}");
    objects.create_unique(&marker, Bytes::from_static(b"probe")).await?;
    let is_seen = match std::ptr::eq(objects, second) {
        true => Ok(true),
        false => second.head_if_present(&marker).await.map(|found| found.is_some()),
    };
    let found = match is_seen {
        Ok(true) => probe_rounds(objects, second, run, rounds).await,
        Ok(false) => Err(unseen(objects, second, &marker)),
        Err(error) => Err(error),
    };
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

/// Leaves a local disk as it was.
async fn race_without_store(objects: &Objects, second: &Objects, rounds: u32) -> Result<ProbeReport> {
    let Some(root) = objects.local_folder().map(ToOwned::to_owned) else { return race(objects, second, rounds).await };
    let made = blocking(objects.url.clone(), move || {
        let above = root.ancestors().take_while(|folder| matches!(folder.try_exists(), Ok(false))).map(ToOwned::to_owned);
        let made: Vec<_> = std::iter::once(root.join("probe")).chain(above).collect();
        std::fs::create_dir_all(&root).map_err(|e| Error::io(root.display().to_string(), e))?;
        Ok(made)
    });
    let made = made.await?;
    let found = race(objects, second, rounds).await;
    let remove = move || {
        // Fails for a folder with something in it, which then stays.
        made.iter().for_each(|folder| _ = std::fs::remove_dir(folder));
        Ok(())
    };
    blocking(objects.url.clone(), remove).await?;
    found
}

#[boxed]
async fn probe_rounds(objects: &Objects, second: &Objects, run: Id, rounds: u32) -> Result<ProbeReport> {
    for round in 0..rounds {
        let object = format!("probe/{run}-{round}");
        let mut outcome = probe_round(objects, second, &object).await;
        if let Ok(false) = outcome {
            // A server may report that nobody won a race. Nothing exists then, so the round is repeated with the same
            // name.
            objects.delete(&object).await?;
            outcome = probe_round(objects, second, &object).await;
        }
        // A leftover scratch object is harmless.
        for way in each(objects, second) {
            if let Err(e) = way.delete(&object).await {
                tracing::debug!(object, error = %e, "scratch object not removed");
            }
        }
        outcome?;
    }
    Ok(ProbeReport { rounds })
}

/// Races creates of one object. Returns whether one of the racers knows that it won.
#[boxed]
async fn probe_round(objects: &Objects, second: &Objects, object: &str) -> Result<bool> {
    let ways = each(objects, second);
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
    if ways.len() > 1 {
        // As a writer does before it creates a name. A mount may remember that there was none.
        for way in &ways {
            way.get_if_present(object, 1 << 10).await?;
        }
    }
    let outcomes = tokio::join!(objects.create(object, body(tokens[0])), second.create(object, body(tokens[1])));
    let mut winners = Vec::new();
    for (outcome, token) in [(outcomes.0, tokens[0]), (outcomes.1, tokens[1])] {
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
    for way in &ways {
        if let Created::Written = way.create(object, body(tokens[2])).await.map_err(fail)? {
            return refuse("an object that exists was created again");
        }
    }
    // After lost answers no racer knows that it won, so the object may hold either body.
    let expected = if winners.is_empty() { &tokens[..2] } else { &winners[..] };
    for way in &ways {
        let found = way.get(object, 1 << 10).await.map_err(|error| match error.kind() {
            ErrorKind::NotFound if ways.len() > 1 => unseen(objects, second, object),
            _ => error,
        })?;
        if !expected.iter().any(|token| body(*token) == found) {
            return refuse("an object does not hold what its only creator wrote");
        }
    }
    Ok(!winners.is_empty())
}
