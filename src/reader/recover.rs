//! The newest step that can be rebuilt, and why newer ones cannot. Spec: `spec/chain.md`, clause 5.

use super::Snapshot;
use crate::commit::Log;
use crate::wire::Id;
use crate::{Error, ErrorKind, Result, Store, boxed};

/// A snapshot that was passed over.
#[derive(Debug)]
pub struct Skipped {
    /// Its step.
    pub step: u64,
    /// Its id.
    pub snapshot: Id,
    /// What is wrong with it or with its chain, and in which object.
    pub error: Error,
}

/// The newest snapshot that can be rebuilt.
#[derive(Debug)]
pub struct Recovered {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Newer ones that cannot, newest first; empty where nothing is wrong.
    pub skipped: Vec<Skipped>,
}

impl Store {
    /// Opens the newest live snapshot whose whole chain is there: every manifest, directory and cask index is read and
    /// compared with its digest. Damage leads to the snapshot before; any other error (network, permission, a feature that
    /// this version does not know) is returned, because an older state would hide it.
    ///
    /// Pages are checked when they are read. If that fails, pass the ids that failed as `excluded`.
    pub async fn recover(&self, excluded: &[Id]) -> Result<Recovered> {
        let log = Log::load(self).await?;
        let mut skipped: Vec<Skipped> = Vec::new();
        for record in log.state().whole().rev().filter(|record| !excluded.contains(&record.id)) {
            let opened = async {
                let snapshot = Snapshot::load(self, log.state(), record.id).await?;
                snapshot.load_whole_chain().await?;
                Ok::<_, Error>(snapshot)
            };
            match opened.await {
                Ok(snapshot) => return Ok(Recovered { snapshot, skipped }),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!(step = record.step, %error, "this step cannot be rebuilt; trying the one before");
                    skipped.push(Skipped { step: record.step, snapshot: record.id, error });
                }
                Err(error) => return Err(error),
            }
        }
        Err(match skipped.into_iter().next() {
            Some(newest) => {
                let message = format!("no step can be rebuilt; the newest, {}, fails with: {}", newest.step, newest.error);
                Error::corrupt(message).source(newest.error)
            }
            None if !excluded.is_empty() => Error::corrupt("no step can be rebuilt: the oldest fails too").object(self.url()),
            None => Error::not_found("the store has no snapshot").object(self.url()),
        })
    }
}

impl Snapshot {
    /// Reads the index of every cask of every link, and compares what they hold with the content digests.
    #[boxed]
    async fn load_whole_chain(&self) -> Result<()> {
        let casks: Vec<(usize, usize)> = self
            .links
            .iter()
            .enumerate()
            .flat_map(|(at, link)| (0..link.as_ref().manifest.casks.len()).map(move |cask| (at, cask)))
            .collect();
        self.load_indexes_from(&casks, false).await?;
        self.check_content().await
    }
}
