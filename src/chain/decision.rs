//! Why a snapshot became a base or a delta.

use serde::{Deserialize, Serialize};

/// Why a snapshot became a base or a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// A base: the store has no base that a delta could be made against.
    First,
    /// A base: the chain or the interval is full.
    Interval,
    /// A base: the step goes back, or far ahead.
    Jump,
    /// A base: a delta would take nearly as much.
    LargeDelta,
    /// A base: what a delta needs cannot be read.
    BrokenParent,
    /// As the policy says of every snapshot.
    Policy,
    /// A delta: it is worth it.
    SmallDelta,
}

impl Reason {
    /// The name in JSON and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Interval => "interval",
            Self::Jump => "jump",
            Self::LargeDelta => "large_delta",
            Self::BrokenParent => "broken_parent",
            Self::Policy => "policy",
            Self::SmallDelta => "small_delta",
        }
    }
}

/// What a save would store, from a sample of its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Estimate {
    /// As a base.
    pub base_bytes: u64,
    /// As a delta against the last base.
    pub delta_bytes: u64,
    /// Chunks that were looked at.
    pub sampled_chunks: u64,
}

impl Estimate {
    /// Whether a delta would save less than a tenth of a base.
    pub(crate) fn is_too_large(&self) -> bool {
        u128::from(self.delta_bytes) * 10 > u128::from(self.base_bytes) * 9
    }
}

/// How a policy came to a base or a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Why.
    pub reason: Reason,
    /// Snapshots from the last base on, that base counted; 0 where there was none.
    pub since_base: u64,
    /// What the adaptive policy estimated, if it had to.
    pub estimate: Option<Estimate>,
}

impl Decision {
    /// The key under `user` of a manifest at which the adaptive policy leaves its decision.
    pub const KEY: &str = "tc.policy";
}
