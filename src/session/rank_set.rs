//! A set of ranks, as ranges: a job may have a million ranks, and a few hosts.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use crate::wire::RankRange;

/// A set of ranks.
///
/// ```
/// use tensorcask::session::RankSet;
/// use tensorcask::wire::RankRange;
/// let mut ranks = RankSet::default();
/// ranks.insert(RankRange { first: 0, last: 3 });
/// ranks.insert(RankRange { first: 6, last: 7 });
/// assert!(ranks.has_all(0..4) && !ranks.has_all(0..8));
/// assert_eq!(ranks.missing(0..9).to_string(), "4 to 5 and 8");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankSet {
    ranges: BTreeSet<RankRange>,
}

impl RankSet {
    /// Adds ranks. Ranges may overlap.
    pub fn insert(&mut self, ranks: RankRange) {
        self.ranges.insert(ranks);
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether the set has all of these ranks.
    pub fn has_all(&self, ranks: Range<u32>) -> bool {
        self.missing(ranks).is_empty()
    }

    /// Those of these ranks that the set lacks.
    pub fn missing(&self, ranks: Range<u32>) -> Self {
        let mut missing = Self::default();
        let mut next = ranks.start;
        for range in &self.ranges {
            if range.first > next && next < ranks.end {
                missing.insert(RankRange { first: next, last: range.first.min(ranks.end).saturating_sub(1) });
            }
            next = next.max(range.last.saturating_add(1));
        }
        if next < ranks.end {
            missing.insert(RankRange { first: next, last: ranks.end.saturating_sub(1) });
        }
        missing
    }

    /// Whether the two sets have a rank in common.
    pub fn intersects(&self, other: &Self) -> bool {
        let overlap = |a: &RankRange, b: &RankRange| a.first <= b.last && b.first <= a.last;
        self.ranges.iter().any(|range| other.ranges.iter().any(|theirs| overlap(range, theirs)))
    }

    /// The ranges in which ranks were added, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = RankRange> {
        self.ranges.iter().copied()
    }
}

impl fmt::Display for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |range: &RankRange| match range.first == range.last {
            true => range.first.to_string(),
            false => format!("{} to {}", range.first, range.last),
        };
        let mut shown: Vec<String> = self.ranges.iter().take(MAX_SHOWN).map(text).collect();
        if self.ranges.len() > MAX_SHOWN {
            shown.push("more".to_owned());
        }
        match shown.split_last() {
            None => write!(f, "none"),
            Some((last, [])) => write!(f, "{last}"),
            Some((last, others)) => write!(f, "{} and {last}", others.join(", ")),
        }
    }
}

/// Number of ranges that a message names.
const MAX_SHOWN: usize = 8;

#[cfg(test)]
mod tests {
    use super::RankSet;
    use crate::wire::RankRange;

    fn set(ranges: &[(u32, u32)]) -> RankSet {
        let mut set = RankSet::default();
        ranges.iter().for_each(|(first, last)| set.insert(RankRange { first: *first, last: *last }));
        set
    }

    /// Compares with a set of single ranks, for all pairs of ranges.
    #[test]
    fn missing_ranks_are_those_of_no_range() {
        for bits in 0..8u32.pow(4) {
            let [a, b, c, d] = [bits % 8, bits / 8 % 8, bits / 64 % 8, bits / 512].map(|rank| rank);
            let ranks = set(&[(a.min(b), a.max(b)), (c.min(d), c.max(d))]);
            let has = |rank: u32| ranks.ranges().any(|range| (range.first..=range.last).contains(&rank));
            let missing: Vec<u32> = ranks.missing(1..6).ranges().flat_map(|range| range.first..=range.last).collect();
            assert_eq!(missing, (1..6).filter(|rank| !has(*rank)).collect::<Vec<_>>(), "{ranks:?}");
            assert_eq!(ranks.has_all(1..6), missing.is_empty());
            assert_eq!(ranks.missing(0..8).intersects(&set(&[(2, 3)])), !has(2) || !has(3));
        }
        assert!(set(&[(0, u32::MAX)]).has_all(0..u32::MAX));
    }

    #[test]
    fn a_message_names_few_ranges() {
        assert_eq!(set(&[]).to_string(), "none");
        assert_eq!(set(&[(0, 3), (5, 5), (7, 8)]).to_string(), "0 to 3, 5 and 7 to 8");
        let many: Vec<(u32, u32)> = (0..100).map(|rank| (2 * rank, 2 * rank)).collect();
        assert!(set(&many).to_string().ends_with("12, 14 and more"));
    }
}
