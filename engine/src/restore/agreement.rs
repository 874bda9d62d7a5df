//! Agreement of all ranks on a step to restore.
//!
//! After a failure, each rank lists the steps that it can load from memory or the store, newest first. All ranks
//! restore the newest step that is in every list. Newer steps of a single rank were never complete and are pruned
//! (BitSnap, figure 4).

use std::collections::{BTreeMap, BTreeSet};

use tensorcask::session::RankOffer;
use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result};

/// Result of an agreement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreement {
    /// Newest step that all ranks can load; `None` if no step is in every list.
    pub step: Option<u64>,
    /// For each rank, the steps listed before the agreed one. The rank discards them with
    /// [`Engine::discard_after`](crate::Engine::discard_after).
    pub pruned: Vec<Vec<u64>>,
}

/// Finds the newest step that all ranks can load. Each list is newest first; after a rollback, a newer step may have a
/// lower number. If the lists differ in their order, the order of the first rank counts.
///
/// ```
/// // Rank 1 died during the save of step 300.
/// let found = tensorcask_engine::agree(&[vec![300, 200, 100], vec![200, 100], vec![300, 200, 100]]);
/// assert_eq!(found.step, Some(200));
/// assert_eq!(found.pruned, [vec![300], vec![], vec![300]]);
/// ```
pub fn agree(ranks: &[Vec<u64>]) -> Agreement {
    let others: Vec<BTreeSet<u64>> = ranks.iter().skip(1).map(|steps| steps.iter().copied().collect()).collect();
    let first = ranks.first().map(Vec::as_slice).unwrap_or_default();
    let step = first.iter().copied().find(|step| others.iter().all(|steps| steps.contains(step)));
    let pruned = ranks.iter().map(|steps| steps.iter().copied().take_while(|found| Some(*found) != step).collect());
    let pruned = if step.is_some() { pruned.collect() } else { vec![Vec::new(); ranks.len()] };
    Agreement { step, pruned }
}

/// The step that all ranks return to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AgreedStep {
    pub step: u64,
    /// Its snapshot; `None` if all ranks have a raw state.
    pub snapshot: Option<Id>,
}

/// Checks that all ranks begin after the same entry of the log. Otherwise, the memory of some hosts lacks what another job has saved
/// since, and equal numbers of steps may mean different states.
pub(crate) fn check_beginnings(offers: &[RankOffer]) -> Result<()> {
    let Some(first) = offers.first() else { return Ok(()) };
    let Some(rank) = offers.iter().position(|offer| offer.after != first.after) else { return Ok(()) };
    let entry = |rank: usize| offers.get(rank).and_then(|offer| offer.after).unwrap_or(0);
    let message = format!(
        "rank 0 begins after entry {} of the log, and rank {rank} after entry {}: the store answers on some hosts only, or memory of some \
         hosts is older; start the job again",
        entry(0),
        entry(rank)
    );
    Err(Error::new(ErrorKind::Conflict, message))
}

/// Finds the newest step that all ranks can load. Passes over a step of which they know different snapshots: some of them
/// cannot see that the job has continued elsewhere, and has saved another state of that step.
pub(crate) fn agree_on(offers: &[RankOffer]) -> Option<AgreedStep> {
    let mut snapshots: BTreeMap<u64, BTreeSet<Id>> = BTreeMap::new();
    for (step, id) in offers.iter().flat_map(|offer| &offer.snapshots) {
        snapshots.entry(*step).or_default().insert(*id);
    }
    let different: Vec<u64> = snapshots.iter().filter(|(_, ids)| ids.len() > 1).map(|(step, _)| *step).collect();
    if !different.is_empty() {
        tracing::warn!(steps = ?different, "ranks know different snapshots of these steps; none is restored");
    }
    let is_one = |step: &u64| !different.contains(step);
    let steps: Vec<Vec<u64>> = offers.iter().map(|offer| offer.steps.iter().copied().filter(is_one).collect()).collect();
    let step = agree(&steps).step?;
    Some(AgreedStep { step, snapshot: snapshots.get(&step).and_then(BTreeSet::first).copied() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_with_different_snapshots_is_passed_over() {
        let offer = |steps: &[(u64, Option<u8>)]| RankOffer {
            steps: steps.iter().map(|(step, _)| *step).collect(),
            snapshots: steps.iter().filter_map(|(step, id)| Some((*step, Id([(*id)?; 16])))).collect(),
            ..RankOffer::default()
        };
        let offers = [offer(&[(30, Some(3)), (20, None), (10, Some(1))]), offer(&[(30, Some(4)), (20, Some(2)), (10, Some(1))])];
        assert_eq!(agree_on(&offers), Some(AgreedStep { step: 20, snapshot: Some(Id([2; 16])) }));
        assert_eq!(agree_on(&[offer(&[(30, Some(3))]), offer(&[(30, Some(4))])]), None);
        let raw = [offer(&[(30, None)]), offer(&[(30, None)])];
        assert_eq!(agree_on(&raw), Some(AgreedStep { step: 30, snapshot: None }));
    }

    #[test]
    fn ranks_that_begin_after_different_entries_agree_on_nothing() {
        let offer = |after| RankOffer { steps: vec![60], after, ..RankOffer::default() };
        assert!(check_beginnings(&[offer(Some(7)), offer(Some(7))]).is_ok());
        assert!(check_beginnings(&[offer(None), offer(None)]).is_ok());
        assert!(check_beginnings(&[offer(Some(7)), offer(None)]).is_err());
        let error = check_beginnings(&[offer(Some(7)), offer(Some(7)), offer(Some(9))]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.message().contains("rank 2 after entry 9"), "{error}");
    }

    #[test]
    fn an_incomplete_newer_step_is_pruned() {
        // BitSnap, figure 4: iteration 80 is complete on three of four ranks, iteration 60 on all.
        let ranks = [vec![80, 60, 40], vec![80, 60, 40], vec![60, 40, 20], vec![80, 60]];
        let found = agree(&ranks);
        assert_eq!(found.step, Some(60));
        assert_eq!(found.pruned, [vec![80], vec![80], vec![], vec![80]]);
    }

    #[test]
    fn without_a_common_step_nothing_is_pruned() {
        assert_eq!(agree(&[vec![2], vec![1]]), Agreement { step: None, pruned: vec![vec![], vec![]] });
        assert_eq!(agree(&[vec![2], vec![]]).step, None);
        assert_eq!(agree(&[]), Agreement { step: None, pruned: vec![] });
        assert_eq!(agree(&[vec![3, 2]]), Agreement { step: Some(3), pruned: vec![vec![]] });
    }

    #[test]
    fn order_counts_rather_than_step_numbers_after_a_rollback() {
        let found = agree(&[vec![90, 80, 100], vec![90, 80, 100]]);
        assert_eq!((found.step, found.pruned), (Some(90), vec![vec![], vec![]]));
    }

    /// Compares with the definition, on all small lists.
    #[test]
    fn the_result_is_the_newest_common_step() {
        for bits in 0..1u32 << 12 {
            let ranks: Vec<Vec<u64>> = (0..3)
                .map(|rank| (1..=4u32).rev().filter(|step| bits >> (rank * 4 + step - 1) & 1 == 1).map(u64::from).collect())
                .collect();
            let common = (1..=4u64).rev().find(|step| ranks.iter().all(|rank| rank.contains(step)));
            let found = agree(&ranks);
            assert_eq!(found.step, common, "{ranks:?}");
            for (pruned, rank) in found.pruned.iter().zip(&ranks) {
                assert!(common.is_none() || pruned.iter().all(|step| Some(*step) > common && rank.contains(step)), "{ranks:?}");
            }
        }
    }
}
