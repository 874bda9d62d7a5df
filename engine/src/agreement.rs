//! Which step all ranks can load.
//!
//! After a failure each rank lists what it can load, from memory or the store, newest first. The newest step that all lists have is the
//! one to restore; whatever a rank has that is newer was never complete, and is pruned (BitSnap, figure 4).

use std::collections::BTreeSet;

/// What ranks agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreement {
    /// The newest step that all ranks can load; none if they have none in common.
    pub step: Option<u64>,
    /// For each rank, the steps that it lists before that one: to be given up ([`Engine::discard_after`](crate::Engine::discard_after)).
    pub pruned: Vec<Vec<u64>>,
}

/// The newest step that all ranks can load, each rank's list being newest first: a run that was rolled back may have a newer
/// step of a lower number. Where lists disagree about the order, that of the first rank counts.
///
/// ```
/// // Rank 1 died while it saved step 300.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_4_the_broken_newer_step_is_pruned() {
        // Iteration 80 is whole on three ranks of four; 60 on all.
        let ranks = [vec![80, 60, 40], vec![80, 60, 40], vec![60, 40, 20], vec![80, 60]];
        let found = agree(&ranks);
        assert_eq!(found.step, Some(60));
        assert_eq!(found.pruned, [vec![80], vec![80], vec![], vec![80]]);
    }

    #[test]
    fn nothing_in_common_prunes_nothing() {
        assert_eq!(agree(&[vec![2], vec![1]]), Agreement { step: None, pruned: vec![vec![], vec![]] });
        assert_eq!(agree(&[vec![2], vec![]]).step, None);
        assert_eq!(agree(&[]), Agreement { step: None, pruned: vec![] });
        assert_eq!(agree(&[vec![3, 2]]), Agreement { step: Some(3), pruned: vec![vec![]] });
    }

    #[test]
    fn after_a_rollback_the_order_counts_and_not_the_number() {
        let found = agree(&[vec![90, 80, 100], vec![90, 80, 100]]);
        assert_eq!((found.step, found.pruned), (Some(90), vec![vec![], vec![]]));
    }

    /// Against the plain definition, on small lists.
    #[test]
    fn it_is_the_newest_common_step() {
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
