//! The trainers of ranks: when they detach, and when they do not come back.

use std::sync::Arc;
use std::time::Duration;

use super::run::Run;
use super::run_event::Event;
use crate::os::lock::is_held;
use crate::run::host_notes::HostNotes;

/// A rank to which a trainer has attached.
pub(super) struct AttachedRank {
    pub run: Arc<Run>,
    pub rank: u32,
    /// Number of the attachment; 0 if the trainer attached to an earlier agent only.
    pub attachment: u64,
}

impl AttachedRank {
    pub(super) fn detach(&self) {
        self.run.apply(Event::Detached { rank: self.rank, attachment: self.attachment });
    }

    pub(super) fn leave(&self) {
        self.run.apply(Event::Left { rank: self.rank, attachment: self.attachment });
    }

    /// Notes that a trainer has left when it no longer holds the lock of its rank. Before, it may connect again.
    pub(super) async fn leave_with_lock(self) {
        let is_last = || self.run.read(|state, _| state.ranks.get(&self.rank).is_none_or(|rank| rank.attachment == self.attachment));
        let lock = self.run.folder.rank(self.rank).lock();
        while is_last() && is_held(&lock) {
            tokio::time::sleep(LOCK_POLL).await;
        }
        self.leave();
    }
}

/// Notes which ranks of a run on many hosts saved no more when an earlier agent ended, or have ended since. Returns the ranks
/// whose trainers still run: [`leave_with_locks`] watches them. Call it once the arenas of all ranks are open, because they may
/// hold states of ranks that have ended, and before trainers connect: the last one to finish would otherwise end a run that
/// has not told the other hosts of its end.
pub(super) fn note_earlier_ends(run: &Arc<Run>) -> Vec<AttachedRank> {
    let Some(hosts) = &run.spec.hosts else { return Vec::new() };
    let notes = HostNotes::read(&run.folder, hosts.session);
    for rank in &notes.ended {
        run.apply(Event::SavesEnded { rank: *rank });
    }
    let others = notes.started.into_iter().filter(|rank| !notes.ended.contains(rank));
    let others = others.map(|rank| AttachedRank { run: run.clone(), rank, attachment: 0 });
    let (running, gone): (Vec<_>, Vec<_>) = others.partition(|other| is_held(&run.folder.rank(other.rank).lock()));
    gone.iter().for_each(AttachedRank::leave);
    running
}

/// Notes that each of these trainers has left, once it has.
pub(super) async fn leave_with_locks(running: Vec<AttachedRank>) {
    futures::future::join_all(running.into_iter().map(AttachedRank::leave_with_lock)).await;
}

/// Time between looks whether a lock is held.
const LOCK_POLL: Duration = Duration::from_millis(200);
