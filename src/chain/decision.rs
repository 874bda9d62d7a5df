//! Decisions of a policy: base or delta, and the reason.

use serde::{Deserialize, Serialize};

/// Reason for a base or a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DecisionReason {
    /// A base: the store has no base for a delta.
    First,
    /// A base: the chain or the interval has reached its maximum length.
    Interval,
    /// A base: the step goes back, or jumps far ahead.
    Jump,
    /// A base: a delta would be nearly as large.
    LargeDelta,
    /// A base: with a delta, the chain to read would be larger than 3 bases.
    LargeChain,
    /// A base: with the objective `auto`, a delta would be durable later.
    SlowDelta,
    /// A base: the chain that a delta would extend cannot be read.
    BrokenParent,
    /// A base or a delta, as the policy prescribes.
    Policy,
    /// A delta: its estimate is at most 0.9 of a base.
    SmallDelta,
    /// A delta: the adaptive policy had no sizes to compare, because no process has all tensors, and the snapshot before is a
    /// base.
    NotEstimated,
}

impl DecisionReason {
    /// Returns the name used in JSON and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Interval => "interval",
            Self::Jump => "jump",
            Self::LargeDelta => "large_delta",
            Self::LargeChain => "large_chain",
            Self::SlowDelta => "slow_delta",
            Self::BrokenParent => "broken_parent",
            Self::Policy => "policy",
            Self::SmallDelta => "small_delta",
            Self::NotEstimated => "not_estimated",
        }
    }
}

/// Estimated size of a save, from a sample of its chunks. A save of many ranks has no sample: it takes the sizes of earlier
/// snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeltaEstimate {
    /// Size as a base.
    pub base_bytes: u64,
    /// Size as a delta against the previous snapshot.
    pub delta_bytes: u64,
    /// Size as a delta against the last base; `None` if that is the previous snapshot, or could hardly be smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_base_delta_bytes: Option<u64>,
    /// Number of chunks in the sample; 0 if the sizes are those of the last base and of the delta before.
    pub sampled_chunks: u64,
}

/// A policy's decision for a base or a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyDecision {
    /// Reason for the decision.
    pub reason: DecisionReason,
    /// Position after the last base: 1 for the first snapshot after it. 0 if the store has no base.
    pub since_base: u64,
    /// Size estimate, if the adaptive policy made one.
    pub estimate: Option<DeltaEstimate>,
}

impl PolicyDecision {
    /// Key under `user` of a manifest where a writer stores its decision.
    pub const KEY: &str = "tc.policy";
}
