//! Agreement of all ranks on a step to restore.
//!
//! After a failure, each rank lists the steps that it can load from memory or the store, newest first. All ranks
//! restore the newest step that is in every list. Newer steps of a single rank were never complete and are pruned
//! (BitSnap, figure 4).

use std::collections::BTreeSet;

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

#[cfg(test)]
mod tests {
    use super::*;

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
