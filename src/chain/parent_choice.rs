//! The choice of the policy `adaptive` between three forms of a snapshot: a delta against the previous snapshot, a delta
//! against the last base, or a base.
//!
//! Deltas against the previous snapshot are the smallest, but each makes the chain longer. So the bytes of a chain are
//! bounded: a restore reads at most [`MAX_CHAIN_BASES`] times as much as that of a base. At the bound, a delta against the
//! last base is taken only if it is so small that a new base would not pay. Let `b` be the size of a base, `p` that of a
//! delta against the previous snapshot, and `d` that of a delta against the last base. Until the bound is reached again,
//!
//! ```text
//! a base and     2b / p deltas      take 3b in 2b / p + 1 snapshots
//! d and    (2b - d) / p deltas      take 2b in (2b - d) / p + 1 snapshots
//! ```
//!
//! The second needs less for each snapshot if `3d < 2b + p`.

use super::DecisionReason;

/// Largest size of a chain, in bases.
const MAX_CHAIN_BASES: u128 = 3;

/// Bytes that a chain may take beyond that. Estimates leave out what each cask takes beside its chunks, and so few bytes do not
/// make a restore slower.
const FREE_BYTES: u128 = 8 << 10;

/// A parent, with sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParentSizes {
    /// Stored size of the parent's chain.
    pub chain_bytes: u64,
    /// Estimated size of a delta against the parent.
    pub delta_bytes: u64,
}

/// Form of a snapshot: a delta against one of two parents, or a base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParentChoice {
    /// A delta against the previous snapshot.
    Previous,
    /// A delta against the last base.
    LastBase,
    /// A base, for a reason.
    Base(DecisionReason),
}

impl ParentChoice {
    /// Whether a delta against the last base could hardly be better: one against the previous snapshot takes at most half
    /// of a base.
    pub(crate) fn is_clear(base_bytes: u64, previous: ParentSizes) -> bool {
        previous.fits(base_bytes) && u128::from(previous.delta_bytes) * 2 <= u128::from(base_bytes)
    }

    /// Chooses the form with the fewest bytes, and of two deltas of the same size the one with the shorter chain. `last_base`
    /// is `None` if that is the previous snapshot, or need not be looked at.
    pub(crate) fn of(base_bytes: u64, previous: ParentSizes, last_base: Option<ParentSizes>) -> Self {
        let previous_fits = previous.fits(base_bytes);
        let takes_previous = previous_fits && previous.is_small(base_bytes);
        let last_base = last_base.filter(|last_base| {
            let base = u128::from(base_bytes);
            let previous = u128::from(previous.delta_bytes);
            let delta = u128::from(last_base.delta_bytes);
            last_base.fits(base_bytes) && last_base.is_small(base_bytes) && (previous_fits || delta * 3 < base * 2 + previous)
        });
        match last_base {
            Some(last_base) if !takes_previous || last_base.delta_bytes <= previous.delta_bytes => Self::LastBase,
            _ if takes_previous => Self::Previous,
            _ if previous.is_small(base_bytes) => Self::Base(DecisionReason::LargeChain),
            _ => Self::Base(DecisionReason::LargeDelta),
        }
    }
}

impl ParentSizes {
    /// Whether a delta saves at least a tenth of a base.
    fn is_small(self, base_bytes: u64) -> bool {
        u128::from(self.delta_bytes) * 10 <= u128::from(base_bytes) * 9
    }

    /// Whether the chain with the delta stays within its bound.
    fn fits(self, base_bytes: u64) -> bool {
        u128::from(self.chain_bytes) + u128::from(self.delta_bytes) <= u128::from(base_bytes) * MAX_CHAIN_BASES + FREE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::{ParentChoice, ParentSizes};
    use crate::chain::DecisionReason;

    const BASE: u64 = 100 << 20;

    /// Sizes in hundredths of a base.
    fn sizes(chain: u64, delta: u64) -> ParentSizes {
        ParentSizes { chain_bytes: chain << 20, delta_bytes: delta << 20 }
    }

    const LARGE_DELTA: ParentChoice = ParentChoice::Base(DecisionReason::LargeDelta);
    const LARGE_CHAIN: ParentChoice = ParentChoice::Base(DecisionReason::LargeChain);

    #[test]
    fn a_small_delta_is_made_against_the_previous_snapshot_until_the_chain_is_large() {
        for chain in [100, 140, 220, 260] {
            assert!(ParentChoice::is_clear(BASE, sizes(chain, 40)), "{chain}");
            assert_eq!(ParentChoice::of(BASE, sizes(chain, 40), None), ParentChoice::Previous, "{chain}");
        }
        assert!(!ParentChoice::is_clear(BASE, sizes(261, 40)));
        assert_eq!(ParentChoice::of(BASE, sizes(261, 40), None), LARGE_CHAIN);
        assert_eq!(ParentChoice::of(BASE, sizes(261, 40), Some(sizes(100, 85))), LARGE_CHAIN);
        assert_eq!(ParentChoice::of(BASE, sizes(261, 40), Some(sizes(100, 79))), ParentChoice::LastBase);
        // A state that has become small does not get the chain of a large base.
        assert_eq!(ParentChoice::of(BASE, sizes(290, 40), None), LARGE_CHAIN);
        assert_eq!(ParentChoice::of(BASE, sizes(330, 40), Some(sizes(290, 40))), LARGE_CHAIN);
    }

    #[test]
    fn the_smaller_of_two_deltas_is_taken() {
        assert!(!ParentChoice::is_clear(BASE, sizes(150, 60)));
        assert_eq!(ParentChoice::of(BASE, sizes(150, 60), Some(sizes(100, 70))), ParentChoice::Previous);
        assert_eq!(ParentChoice::of(BASE, sizes(150, 60), Some(sizes(100, 55))), ParentChoice::LastBase);
        assert_eq!(ParentChoice::of(BASE, sizes(150, 60), Some(sizes(100, 60))), ParentChoice::LastBase, "nothing is gained");
        assert_eq!(ParentChoice::of(BASE, sizes(150, 95), Some(sizes(100, 88))), ParentChoice::LastBase);
    }

    #[test]
    fn a_delta_that_saves_less_than_a_tenth_becomes_a_base() {
        assert_eq!(ParentChoice::of(BASE, sizes(100, 90), None), ParentChoice::Previous);
        assert_eq!(ParentChoice::of(BASE, sizes(100, 91), None), LARGE_DELTA);
        assert_eq!(ParentChoice::of(BASE, sizes(150, 91), Some(sizes(100, 92))), LARGE_DELTA);
        let most = ParentSizes { chain_bytes: u64::MAX, delta_bytes: u64::MAX };
        assert_eq!(ParentChoice::of(u64::MAX, most, Some(most)), LARGE_DELTA);
    }

    #[test]
    fn the_chain_of_a_tiny_state_is_not_too_large() {
        // Each cask takes 4 KiB beside its chunks.
        assert_eq!(ParentChoice::of(146, ParentSizes { chain_bytes: 4480, delta_bytes: 73 }, None), ParentChoice::Previous);
    }
}
