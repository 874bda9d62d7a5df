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
    /// A base: with the objective `auto`, a delta would be durable later.
    SlowDelta,
    /// A base: the chain that a delta would extend cannot be read.
    BrokenParent,
    /// A base or a delta, as the policy prescribes.
    Policy,
    /// A delta: its estimate is at most 0.9 of a base.
    SmallDelta,
    /// A delta: the adaptive policy had no sizes to compare, because the committing process has no tensors.
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
            Self::SlowDelta => "slow_delta",
            Self::BrokenParent => "broken_parent",
            Self::Policy => "policy",
            Self::SmallDelta => "small_delta",
            Self::NotEstimated => "not_estimated",
        }
    }
}

/// Estimated size of a save, from a sample of its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeltaEstimate {
    /// Size as a base.
    pub base_bytes: u64,
    /// Size as a delta against the last base.
    pub delta_bytes: u64,
    /// Number of chunks in the sample.
    pub sampled_chunks: u64,
}

impl DeltaEstimate {
    /// Returns whether a delta would save less than a tenth of a base.
    pub(crate) fn is_too_large(&self) -> bool {
        u128::from(self.delta_bytes) * 10 > u128::from(self.base_bytes) * 9
    }
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
