//! Finds the newest step that can be rebuilt, and reports why newer steps cannot. Spec: `spec/chain.md`, clause 5.

use super::Snapshot;
use super::content::check_content;
use super::open_chain::OpenChain;
use crate::commit::{Log, LogState, MOST_LOOKS, SnapshotRecord, changed_log, load_log};
use crate::wire::Id;
use crate::{Error, ErrorKind, Result, Store, boxed};

/// A snapshot that was skipped.
#[derive(Debug)]
pub struct SkippedSnapshot {
    /// Its step.
    pub step: u64,
    /// Its id.
    pub snapshot: Id,
    /// Error in the snapshot or its chain, with the object at fault.
    pub error: Error,
}

/// Newest snapshot that can be rebuilt, with the newer ones that cannot.
#[derive(Debug)]
pub struct RecoveredSnapshot {
    /// Snapshot that can be rebuilt.
    pub snapshot: Snapshot,
    /// Newer snapshots that cannot be rebuilt, newest first.
    pub skipped: Vec<SkippedSnapshot>,
}

impl Store {
    /// Opens the newest live snapshot whose whole chain is intact. Reads every manifest, directory and cask index and
    /// compares it with its digest.
    ///
    /// Damage makes it try the previous snapshot. A job that frees steps meanwhile makes it look at the log again. Any other error
    /// (network, permission, an unknown feature) is returned, because an older state would hide it.
    ///
    /// Pages are checked when they are read. If a page is damaged, call this again with the failed ids in `excluded`.
    pub async fn recover(&self, excluded: &[Id]) -> Result<RecoveredSnapshot> {
        let mut log = load_log(self).await?;
        for _ in 0..MOST_LOOKS {
            match self.recover_by(&log, excluded).await? {
                Recovery::Found(found) => return Ok(found),
                Recovery::Changed(now) => log = *now,
            }
        }
        let message = "a job forgets and frees steps faster than they can be opened here; nothing is damaged. Pin a step and open it, or \
                       let the job keep more steps";
        Err(Error::new(ErrorKind::Conflict, message).object(self.url()))
    }

    #[boxed]
    async fn recover_by(&self, log: &Log, excluded: &[Id]) -> Result<Recovery> {
        let mut skipped: Vec<SkippedSnapshot> = Vec::new();
        let candidates: Vec<&SnapshotRecord> = log.state().whole().rev().filter(|record| !excluded.contains(&record.id)).collect();
        for record in candidates {
            let opened = async {
                let snapshot = Snapshot::load(self, log.state(), record.id).await?;
                load_whole(&snapshot.chain).await?;
                Ok::<_, Error>(snapshot)
            };
            let error = match opened.await {
                Ok(snapshot) => return Ok(Recovery::Found(RecoveredSnapshot { snapshot, skipped })),
                Err(error) if error.is_damage() => error,
                Err(error) => return Err(error),
            };
            if let Some(now) = changed_log(self, log.state(), record.id).await? {
                return Ok(Recovery::Changed(Box::new(now)));
            }
            if error.kind() != ErrorKind::Corrupt {
                return Err(error);
            }
            tracing::warn!(step = record.step, %error, "this step cannot be rebuilt; trying the previous step");
            skipped.push(SkippedSnapshot { step: record.step, snapshot: record.id, error });
        }
        Err(match skipped.into_iter().next() {
            Some(newest) => {
                let message = format!("no step can be rebuilt; the newest, {}, fails with: {}", newest.step, newest.error);
                Error::corrupt(message).source(newest.error)
            }
            None if !excluded.is_empty() => Error::corrupt("no step can be rebuilt, not even the oldest").object(self.url()),
            None => without_whole_step(self, log.state()),
        })
    }
}

/// Result of one look at the log.
enum Recovery {
    Found(RecoveredSnapshot),
    /// A snapshot was given up or compacted while it was opened. The log as it is now.
    Changed(Box<Log>),
}

/// The error of a store in which no step can be the latest. Steps of which tensors were left out are no reason to begin anew.
pub(super) fn without_whole_step(store: &Store, state: &LogState) -> Error {
    let error = match state.live().next_back() {
        None => Error::not_found("the store has no snapshot; `tensorcask ls` lists its steps"),
        Some(reduced) => Error::template(format!(
            "no live step is whole: all were reduced to some roles. To read the newest, ask for step {}. To train on, save to a new place",
            reduced.step
        )),
    };
    error.object(store.url())
}

/// Reads the index of every cask of every link. Compares the chunk checksums with the content digests.
#[boxed]
async fn load_whole(chain: &OpenChain) -> Result<()> {
    let casks: Vec<(usize, usize)> =
        chain.links.iter().enumerate().flat_map(|(at, link)| (0..link.as_ref().manifest.casks.len()).map(move |cask| (at, cask))).collect();
    chain.load_indexes_from(&casks, false).await?;
    check_content(chain).await
}
