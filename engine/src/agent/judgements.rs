//! Judgements of the ranks of a host on its memory: whether it is up to date.
//!
//! Each rank compares memory with the stores when it starts. A store may answer one rank and not another. If one rank then
//! trusted memory and another did not, they would restore a step of the same number from two histories.
//!
//! On many hosts, ranks restore nothing from the memory that they judge, so their judgements do not count.

use std::collections::BTreeMap;

use tensorcask::{Error, ErrorKind, Result};

use crate::ipc::messages::{Attach, AttachMode};

/// Result of the comparison of a rank when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judgement {
    /// There is no memory.
    Empty,
    /// No store that answered has anything newer.
    Trusted,
    /// A store has newer snapshots of another host.
    Outdated,
}

impl Judgement {
    /// The judgement of a trainer that starts; `None` if it goes on.
    pub(super) fn of(request: &Attach) -> Option<Self> {
        match (request.mode, request.trusts_memory) {
            (AttachMode::Continue, _) => None,
            (AttachMode::TakeOverAfresh, _) => Some(Self::Outdated),
            (AttachMode::TakeOver, true) => Some(Self::Trusted),
            (AttachMode::TakeOver, false) => Some(Self::Empty),
        }
    }
}

/// Judgements of the connected ranks that have not saved since they started.
#[derive(Debug, Clone, Default)]
pub(super) struct Judgements(BTreeMap<u32, Judgement>);

impl Judgements {
    /// Adds the judgement of a rank. Fails with `Fenced` if it contradicts another. The first rank of the host decides whether
    /// memory is removed, so a later rank may have trusted what that removes.
    pub(super) fn add(&mut self, rank: u32, judgement: Judgement, first: u32, is_connected: impl Fn(u32) -> bool) -> Result<()> {
        self.0.retain(|other, _| *other != rank && is_connected(*other));
        let other = |wanted: Judgement| self.0.iter().find(|(_, found)| **found == wanted).map(|(rank, _)| *rank);
        let contradiction = match judgement {
            Judgement::Outdated => other(Judgement::Trusted).map(|trusting| (rank, trusting)),
            Judgement::Trusted if rank == first => other(Judgement::Outdated).map(|outdated| (outdated, rank)),
            _ => None,
        };
        if let Some((outdated, trusting)) = contradiction {
            let message = format!(
                "rank {outdated} found newer snapshots of another job in a store, but rank {trusting} trusts the memory of this host. They \
                 would restore different states. Start the job again"
            );
            return Err(Error::new(ErrorKind::Fenced, message));
        }
        self.0.insert(rank, judgement);
        Ok(())
    }

    /// Notes that memory was removed. Ranks that start later find nothing out of date.
    pub(super) fn on_memory_cleared(&mut self) {
        self.0.retain(|_, judgement| *judgement != Judgement::Outdated);
    }

    /// Forgets all judgements: the ranks have restored, and a rank has saved.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Judgement::{Empty, Outdated, Trusted};
    use super::Judgements;

    #[test]
    fn ranks_that_judge_differently_do_not_start_together() {
        let added = |list: &[(u32, super::Judgement)]| {
            let mut judgements = Judgements::default();
            list.iter().map(|&(rank, judgement)| judgements.add(rank, judgement, 0, |_| true).is_ok()).collect::<Vec<_>>()
        };
        assert_eq!(added(&[(0, Trusted), (1, Trusted), (2, Outdated), (3, Empty)]), [true, true, false, true]);
        assert_eq!(added(&[(1, Outdated), (0, Trusted), (0, Outdated)]), [true, false, true]);
        assert_eq!(added(&[(1, Trusted), (0, Outdated)]), [true, false], "rank 1 may have restored");
        assert_eq!(added(&[(0, Outdated), (1, Trusted)]), [true, true], "the memory of rank 1 is removed");
        assert_eq!(added(&[(0, Empty), (1, Outdated)]), [true, true]);
    }

    #[test]
    fn only_connected_ranks_that_have_not_saved_count() {
        let mut judgements = Judgements::default();
        judgements.add(0, Trusted, 0, |_| true).unwrap();
        judgements.add(1, Outdated, 0, |other| other != 0).unwrap();
        let mut judgements = Judgements::default();
        judgements.add(0, Trusted, 0, |_| true).unwrap();
        judgements.clear();
        judgements.add(1, Outdated, 0, |_| true).unwrap();
    }

    /// Both ranks find memory out of date, and it is removed. Rank 0 starts again before any rank has saved.
    #[test]
    fn a_rank_may_start_again_after_memory_was_removed() {
        let mut judgements = Judgements::default();
        judgements.add(0, Outdated, 0, |_| true).unwrap();
        judgements.add(1, Outdated, 0, |_| true).unwrap();
        judgements.on_memory_cleared();
        judgements.add(0, Trusted, 0, |_| true).unwrap();
    }
}
