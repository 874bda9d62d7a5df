//! The trainers of ranks: when they detach, and when they do not come back.

use std::sync::Arc;
use std::time::Duration;

use super::run::Run;
use super::run_event::Event;
use crate::host_notes::HostNotes;
use crate::processes::Process;

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

    /// Process of the trainer, if it is still the last one of its rank.
    pub(super) fn trainer(&self) -> Option<u32> {
        self.run.read(|state, _| {
            let rank = state.ranks.get(&self.rank).filter(|rank| rank.attachment == self.attachment);
            rank.and_then(|rank| rank.trainer)
        })
    }

    /// Notes that a trainer has left when its process ends. Before, it may connect again.
    pub(super) async fn leave_with(self, process: Option<Process>) {
        let is_last = || self.run.read(|state, _| state.ranks.get(&self.rank).is_none_or(|rank| rank.attachment == self.attachment));
        while is_last() && process.as_ref().is_some_and(|process| !process.has_ended()) {
            tokio::time::sleep(PROCESS_POLL).await;
        }
        self.leave();
    }
}

/// Notes which ranks of a run on many hosts saved no more when an earlier agent ended, or have ended since.
pub(super) async fn watch_earlier_trainers(run: Arc<Run>, notes: HostNotes) {
    for rank in &notes.ended {
        run.apply(Event::SavesEnded { rank: *rank });
    }
    let running = notes.trainers.into_iter().filter(|(rank, _)| !notes.ended.contains(rank));
    let leaving = running.map(|(rank, trainer)| AttachedRank { run: run.clone(), rank, attachment: 0 }.leave_with(Some(trainer)));
    futures::future::join_all(leaving).await;
}

/// Time between looks whether a process has ended.
const PROCESS_POLL: Duration = Duration::from_millis(200);
