//! The time that a host waits for its leader. Time decides only who tries to lead; the log decides who leads.

use std::collections::VecDeque;

/// Measures commits, and derives from them how long to wait for one.
#[derive(Debug, Clone)]
pub(crate) struct TakeoverTimeout {
    shortest_ms: u64,
    recent_ms: VecDeque<u64>,
}

impl TakeoverTimeout {
    pub(crate) fn new(shortest_ms: u64) -> Self {
        Self { shortest_ms, recent_ms: VecDeque::new() }
    }

    /// Notes the time from the upload of a step to its commit.
    pub(crate) fn note(&mut self, commit_ms: u64) {
        self.recent_ms.push_back(commit_ms);
        if self.recent_ms.len() > RECENT {
            self.recent_ms.pop_front();
        }
    }

    /// Three times the median commit, at least the configured time.
    pub(crate) fn wait_ms(&self) -> u64 {
        let mut sorted: Vec<u64> = self.recent_ms.iter().copied().collect();
        sorted.sort_unstable();
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0);
        median.saturating_mul(3).max(self.shortest_ms)
    }
}

/// Number of commits that count.
const RECENT: usize = 15;

#[cfg(test)]
mod tests {
    use super::TakeoverTimeout;

    #[test]
    fn timeout_follows_the_median_commit() {
        let mut timeout = TakeoverTimeout::new(10);
        assert_eq!(timeout.wait_ms(), 10);
        for commit in [1, 9000, 7] {
            timeout.note(commit);
        }
        assert_eq!(timeout.wait_ms(), 21);
        for _ in 0..20 {
            timeout.note(2);
        }
        assert_eq!(timeout.wait_ms(), 10);
    }
}
