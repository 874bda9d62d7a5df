//! Finds the newest step that can be rebuilt, and reports why newer steps cannot. Spec: `spec/chain.md`, clause 5.

use super::Snapshot;
use super::content::check_content;
use super::open_chain::OpenChain;
use crate::commit::load_log;
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
    /// Damage makes it try the previous snapshot. Any other error (network, permission, an unknown feature) is
    /// returned, because an older state would hide it.
    ///
    /// Pages are checked when they are read. If a page is damaged, call this again with the failed ids in `excluded`.
    pub async fn recover(&self, excluded: &[Id]) -> Result<RecoveredSnapshot> {
        let log = load_log(self).await?;
        let mut skipped: Vec<SkippedSnapshot> = Vec::new();
        for record in log.state().whole().rev().filter(|record| !excluded.contains(&record.id)) {
            let opened = async {
                let snapshot = Snapshot::load(self, log.state(), record.id).await?;
                load_whole(&snapshot.chain).await?;
                Ok::<_, Error>(snapshot)
            };
            match opened.await {
                Ok(snapshot) => return Ok(RecoveredSnapshot { snapshot, skipped }),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!(step = record.step, %error, "this step cannot be rebuilt; trying the previous step");
                    skipped.push(SkippedSnapshot { step: record.step, snapshot: record.id, error });
                }
                Err(error) => return Err(error),
            }
        }
        Err(match skipped.into_iter().next() {
            Some(newest) => {
                let message = format!("no step can be rebuilt; the newest, {}, fails with: {}", newest.step, newest.error);
                Error::corrupt(message).source(newest.error)
            }
            None if !excluded.is_empty() => Error::corrupt("no step can be rebuilt, not even the oldest").object(self.url()),
            None => Error::not_found("the store has no snapshot").object(self.url()),
        })
    }
}

/// Reads the index of every cask of every link. Compares the chunk checksums with the content digests.
#[boxed]
async fn load_whole(chain: &OpenChain) -> Result<()> {
    let casks: Vec<(usize, usize)> =
        chain.links.iter().enumerate().flat_map(|(at, link)| (0..link.as_ref().manifest.casks.len()).map(move |cask| (at, cask))).collect();
    chain.load_indexes_from(&casks, false).await?;
    check_content(chain).await
}
