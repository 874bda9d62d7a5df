//! Policies: when to write a base, and which snapshot a delta refers to.

use super::{DecisionReason, DeltaEstimate, ParentChoice, ParentSizes, PolicyDecision, chain_of};
use crate::commit::{LogState, SnapshotRecord, SnapshotStatus};
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
    /// Deltas against the previous snapshot or the last base, whichever is estimated to be smaller. A new base when a
    /// delta would take more than 0.9 of a base, when its chain would take more than 3 bases, after a jump in steps, and
    /// at least every 8th snapshot.
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
    /// exceed `max_depth` or its chain is broken. For `Adaptive`, the parent is the previous snapshot; a caller that knows
    /// sizes may replace it, and `NotEstimated`: see [`ParentChoice`](super::ParentChoice).
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
            Self::Adaptive if since < EVERY && (chain.len() as u64) < max_depth => delta(latest.id, DecisionReason::NotEstimated),
            Self::Adaptive if since < EVERY && max_depth >= 2 => delta(base.id, DecisionReason::NotEstimated),
            _ => full,
        }
    }

    /// Like [`decide`](Self::decide), for a state that no process has as a whole. `Adaptive` expects that a delta takes as
    /// much as the one before. The summaries of the chain of the newest snapshot have the sizes.
    pub(crate) fn decide_by_sizes(self, state: &LogState, step: u64, max_depth: u64) -> (Option<Id>, PolicyDecision) {
        let (parent, mut decision) = self.decide(state, step, max_depth);
        let Some(id) = parent.filter(|_| decision.reason == DecisionReason::NotEstimated) else { return (parent, decision) };
        let chain = chain_of(state, id, max_depth).unwrap_or_default();
        let Some((estimate, sizes)) = known_sizes(&chain) else { return (parent, decision) };
        decision.estimate = Some(estimate);
        match ParentChoice::of(estimate.base_bytes, sizes, None) {
            ParentChoice::Base(reason) => (None, PolicyDecision { reason, ..decision }),
            ParentChoice::Previous | ParentChoice::LastBase => (parent, PolicyDecision { reason: DecisionReason::SmallDelta, ..decision }),
        }
    }
}

/// Sizes of the base of a chain and of the newest delta; `None` while they are not known.
fn known_sizes(chain: &[SnapshotRecord]) -> Option<(DeltaEstimate, ParentSizes)> {
    let sizes: Vec<u64> = chain.iter().map(|link| Some(link.summary.as_ref()?.stored_bytes)).collect::<Option<_>>()?;
    let [delta_bytes, .., base_bytes] = *sizes.as_slice() else { return None };
    let estimate = DeltaEstimate { base_bytes, delta_bytes, last_base_delta_bytes: None, sampled_chunks: 0 };
    Some((estimate, ParentSizes { chain_bytes: sizes.iter().copied().fold(0, u64::saturating_add), delta_bytes }))
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
