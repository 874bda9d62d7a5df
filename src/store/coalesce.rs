//! Merges the byte ranges that a read needs into few requests.

use std::ops::Range;

/// Rules for merging ranges into requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Coalesce {
    /// Largest gap between two ranges that are read as one.
    pub max_gap_bytes: u64,
    /// Largest request that merging may produce.
    pub max_request_bytes: u64,
}

impl Default for Coalesce {
    fn default() -> Self {
        Self { max_gap_bytes: 16 << 10, max_request_bytes: 8 << 20 }
    }
}

impl Coalesce {
    /// Returns requests that cover `ranges`, ascending and disjoint. The input may be in any order; empty ranges are
    /// skipped.
    pub(crate) fn requests(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
        let mut sorted: Vec<Range<u64>> = ranges.into_iter().filter(|r| !r.is_empty()).collect();
        sorted.sort_unstable_by_key(|r| (r.start, r.end));
        let mut requests: Vec<Range<u64>> = Vec::new();
        for range in sorted {
            if let Some(last) = requests.last_mut() {
                let overlaps = range.start < last.end;
                let near = range.start.saturating_sub(last.end) <= self.max_gap_bytes;
                let small = range.end.saturating_sub(last.start) <= self.max_request_bytes;
                if overlaps || (near && small) {
                    last.end = last.end.max(range.end);
                    continue;
                }
            }
            requests.push(range);
        }
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_merge_and_far_ones_do_not() {
        let rule = Coalesce { max_gap_bytes: 10, max_request_bytes: 100 };
        assert_eq!(rule.requests([50..60, 0..20, 25..30, 30..30]), [0..30, 50..60]);
        assert_eq!(rule.requests([0..60, 60..120]), [0..60, 60..120], "a request stays within its size");
        assert_eq!(rule.requests([0..150, 149..160]), [0..160], "overlapping ranges are never split");
        assert!(rule.requests([5..5]).is_empty());
    }
}
