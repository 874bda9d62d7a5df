//! Policies: when to write a base, and which snapshot a delta refers to.

use super::{DecisionReason, PolicyDecision, chain_of};
use crate::commit::{LogState, SnapshotStatus};
use crate::wire::Id;
use crate::{Error, Result};

/// Rule for when a writer writes a base, and which snapshot its deltas refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Bases only.
    Full,
    /// One base; all deltas against that base.
    OneShot,
    /// Deltas against the previous snapshot.
    Consecutive,
    /// A new base at a fixed interval; deltas against the last base.
    Intermittent {
        /// Number of snapshots from one base to the next, at least 1.
        every: u64,
    },
    /// A new base after a jump in steps, or when a delta is estimated at more than 0.9 of a base, and at least every 8th
    /// snapshot; deltas against the last base.
    #[default]
    Adaptive,
}

/// Default maximum number of snapshots from one base to the next.
const EVERY: u64 = 8;

/// Factor by which a step's distance must exceed the previous distance to count as a jump.
const JUMP: u64 = 8;

impl Policy {
    /// Returns the policy with this name: `adaptive`, `full`, `one_shot`, `consecutive` or `intermittent`. Only
    /// `intermittent` takes `every`.
    ///
    /// ```
    /// use tensorcask::Policy;
    /// assert_eq!(Policy::from_name("intermittent", Some(4))?, Policy::Intermittent { every: 4 });
    /// assert!(Policy::from_name("full", Some(4)).is_err());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn from_name(name: &str, every: Option<u64>) -> Result<Self> {
        match (name, every) {
            ("adaptive", None) => Ok(Self::Adaptive),
            ("full", None) => Ok(Self::Full),
            ("one_shot", None) => Ok(Self::OneShot),
            ("consecutive", None) => Ok(Self::Consecutive),
            ("intermittent", None) => Ok(Self::Intermittent { every: EVERY }),
            ("intermittent", Some(every)) if every > 0 => Ok(Self::Intermittent { every }),
            ("intermittent", Some(_)) => Err(Error::invalid("`every` is 1 or more")),
            ("adaptive" | "full" | "one_shot" | "consecutive", Some(_)) => Err(Error::invalid(format!("policy `{name}` takes no `every`"))),
            _ => Err(Error::invalid(format!(
                "`{}` is not a policy; use adaptive, full, one_shot, consecutive or intermittent",
                name.escape_debug()
            ))),
        }
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::OneShot => "one_shot",
            Self::Consecutive => "consecutive",
            Self::Intermittent { .. } => "intermittent",
            Self::Adaptive => "adaptive",
        }
    }

    /// Returns the parent of a snapshot of `step` (`None` for a base) and the reason. Chooses a base if a delta would
    /// exceed `max_depth` or its chain is broken. A caller that estimates sizes replaces
    /// `NotEstimated`.
    pub(crate) fn decide(self, state: &LogState, step: u64, max_depth: u64) -> (Option<Id>, PolicyDecision) {
        let decision = |reason, since_base| PolicyDecision { reason, since_base, estimate: None };
        let Some(latest) = state.latest() else { return (None, decision(DecisionReason::First, 0)) };
        let Ok(chain) = chain_of(state, latest.id, max_depth) else { return (None, decision(DecisionReason::BrokenParent, 0)) };
        if chain.iter().any(|link| link.roles.is_some()) {
            return (None, decision(DecisionReason::BrokenParent, 0));
        }
        let Some(base) = chain.last().filter(|base| base.status != SnapshotStatus::Forgotten) else {
            return (None, decision(DecisionReason::First, 0));
        };
        let since = state.snapshots().iter().filter(|record| record.sequence >= base.sequence).count() as u64;
        let full = (None, decision(DecisionReason::Interval, since));
        let delta = |parent, reason| (Some(parent), decision(reason, since));
        match self {
            Self::Full => (None, decision(DecisionReason::Policy, since)),
            Self::OneShot if max_depth >= 2 => delta(base.id, DecisionReason::Policy),
            Self::Consecutive if (chain.len() as u64) < max_depth => delta(latest.id, DecisionReason::Policy),
            Self::Intermittent { every } if since < every && max_depth >= 2 => delta(base.id, DecisionReason::Policy),
            Self::Adaptive if jumps(state, base.sequence, step) => (None, decision(DecisionReason::Jump, since)),
            Self::Adaptive if since < EVERY && max_depth >= 2 => delta(base.id, DecisionReason::NotEstimated),
            _ => full,
        }
    }
}

/// Returns whether a step goes back, or much farther ahead than the previous step did.
fn jumps(state: &LogState, base_sequence: u64, step: u64) -> bool {
    let mut newest = state.live().rev();
    let (Some(last), before) = (newest.next(), newest.next()) else { return false };
    let usual = before.filter(|before| before.sequence >= base_sequence).map(|before| last.step.saturating_sub(before.step).max(1));
    step <= last.step || usual.is_some_and(|usual| step - last.step > usual.saturating_mul(JUMP))
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Intermittent { every } => write!(f, "intermittent:{every}"),
            other => f.write_str(other.name()),
        }
    }
}
