//! Follows the log of a store, for a host that waits for the commits of its session's leader.

use crate::commit::{Catalog, Leadership, Log, LogState, SnapshotRecord, Standing, load_complete_log};
use crate::wire::Id;
use crate::{Result, Store};

/// The log of a store, as far as it has been read.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::session::SessionLog;
/// use tensorcask::{Policy, Store};
/// let store = Store::open("memory://session-log-example")?;
/// store.writer(Policy::Full).await?;
/// let mut log = SessionLog::open(&store).await?;
/// assert_eq!(log.sequence(), 1);
/// assert!(log.leadership().leading().is_none(), "the writer leads no session");
/// log.refresh().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct SessionLog {
    log: Log,
}

impl SessionLog {
    /// Reads the log of a store. Fails with `NotFound` if there is no store.
    pub async fn open(store: &Store) -> Result<Self> {
        Ok(Self { log: Log::load_part(store).await? })
    }

    /// Reads the log of a store for a decision that memory is not needed. Fails unless the whole log is there.
    pub(crate) async fn open_complete(store: &Store) -> Result<Self> {
        Ok(Self { log: load_complete_log(store).await? })
    }

    /// Reads the log of a mirror for a decision that memory is not needed. Fails if entries after a gap are there. Entries before the
    /// newest catalog may be gone: the log of a mirror is shortened.
    pub(crate) async fn open_to_end(mirror: &Store) -> Result<Self> {
        let mut log = Log::load_part(mirror).await?;
        log.read_to_end().await?;
        Ok(Self { log })
    }

    /// Reads the entries that were committed since. Fails with `Conflict` if the store was deleted or replaced.
    pub async fn refresh(&mut self) -> Result<()> {
        match self.log.catch_up().await? {
            Standing::Same => Ok(()),
            Standing::Stale(stale) => Err(stale.error),
        }
    }

    /// Reads what was committed since a log was read, or opens the log of a mirror. The log of a mirror may have gaps
    /// or begin with a catalog.
    pub(crate) async fn follow<'l>(known: &'l mut Option<Self>, mirror: &Store) -> Result<&'l Self> {
        // An empty log has no last entry to compare.
        let followed = match known.take().filter(|log| log.sequence() > 0) {
            Some(mut log) => {
                let before = log.sequence();
                // Only the catalog shows entries that follow a gap. One listing more costs little beside what a pull sends.
                let (refreshed, newest) = tokio::join!(log.refresh(), Catalog::newest_after(mirror, before));
                let is_whole = refreshed.is_ok() && newest?.is_none_or(|newest| newest <= log.sequence());
                Some(log).filter(|_| is_whole)
            }
            None => None,
        };
        match followed {
            Some(log) => Ok(known.insert(log)),
            None => Ok(known.insert(Self::open(mirror).await?)),
        }
    }

    pub(crate) fn state(&self) -> &LogState {
        self.log.state()
    }

    /// Who leads.
    pub fn leadership(&self) -> &Leadership {
        &self.log.state().leadership
    }

    /// All snapshots in the log, whatever their status, ordered by commit.
    pub fn records(&self) -> &[SnapshotRecord] {
        self.log.state().snapshots()
    }

    /// Whether a session that leads has committed a snapshot. A step that it gave up is none.
    pub fn has_committed(&self, session: Id) -> bool {
        let first = self.leadership().of(session).and_then(|leading| leading.attempts.first());
        first.is_some_and(|first| self.records().iter().any(|record| record.sequence >= first.since))
    }

    /// Number of the last entry; 0 for an empty log.
    pub fn sequence(&self) -> u64 {
        self.log.state().sequence
    }
}
