//! The leader of a session of many hosts: opens the log for the session, and commits its steps. Spec: `spec/log.md`,
//! clause 8.

use crate::commit::{KnownLog, read_store_file};
use crate::wire::{Leader, Receipt};
use crate::writer::open_as;
use crate::{Metadata, Result, SavedSnapshot, Store, Writer, WriterOptions};

/// Commits the steps of a session of many hosts, as its leader.
///
/// Every commit asks the log again whether this writer still leads. So two hosts that both believe to lead do no harm.
#[derive(Debug)]
pub struct LeaderWriter {
    writer: Writer,
    leader: Leader,
}

impl LeaderWriter {
    /// Opens the store as the leader of a session. Creates the store if it does not exist.
    ///
    /// Fails with `Fenced` if the session has ended, and with `Conflict` if another host leads it: see
    /// [`Leadership::may_open`](crate::session::Leadership::may_open).
    pub async fn open(store: &Store, leader: Leader, options: WriterOptions) -> Result<Self> {
        Ok(Self { writer: open_as(store, options, Some(leader), None).await?, leader })
    }

    /// Like [`open`](Self::open), for a session that began while the store did not answer. Never creates a store.
    ///
    /// Also fails with `Fenced` if the store is of another training run, or if [`KnownLog::check_log`] does: another job has
    /// written to the store in the meantime, for example.
    pub async fn open_known(store: &Store, leader: Leader, known: &KnownLog, options: WriterOptions) -> Result<Self> {
        known.check_run(read_store_file(store).await?.run).map_err(|error| error.object(store.url()))?;
        Ok(Self { writer: open_as(store, options, Some(leader), Some(known)).await?, leader })
    }

    /// Session, attempt and term.
    pub fn leader(&self) -> Leader {
        self.leader
    }

    /// Commits one snapshot of the casks of all ranks, or nothing. There must be a receipt of each rank, of this session and
    /// attempt. The shards of a tensor must agree and tile it, and every cask must be in the store.
    ///
    /// Fails with `Fenced` or `Conflict` if the log does not admit the step: another host leads, the session has ended, or a
    /// step of this attempt that is at least as new is committed.
    pub async fn commit(&mut self, step: u64, receipts: &[Receipt]) -> Result<SavedSnapshot> {
        self.writer.commit_receipts(step, receipts, &Metadata::default()).await
    }
}
