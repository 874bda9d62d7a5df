//! Setup of a simulation: its size, a planted mistake, and random numbers.

/// Size of a cluster, and what its protocol does wrong.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    pub hosts: u32,
    pub ranks_per_host: u32,
    pub mistake: Mistake,
}

impl Setup {
    /// 3 to 8 hosts with 1 to 3 ranks each.
    pub(super) fn small(seed: u64, mistake: Mistake) -> Self {
        let mut random = Random(seed ^ 0x5eed);
        Self { hosts: 3 + random.below(6) as u32, ranks_per_host: 1 + random.below(3) as u32, mistake }
    }

    pub(super) fn world(self) -> u32 {
        self.hosts * self.ranks_per_host
    }
}

/// A mistake in a protocol, which the simulation must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mistake {
    None,
    /// A writer that loses a number takes the next one without asking the log again.
    FenceCheckedOnce,
    /// A lost answer counts as a failure: the same entry is created again under the next number.
    LostAnswerIsFailure,
    /// Each host chooses the parent of its deltas by the log that it has read.
    ParentByEachHost,
    /// Receipts do not name their session.
    ReceiptsWithoutSession,
    /// A session is ordered by the time when it opens the log, not by the start of its job.
    LateBeginning,
}

/// A generator of random numbers (splitmix64).
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(super) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}
