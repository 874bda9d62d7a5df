//! When to write a base, and what a delta is made against.

use super::chain_of;
use crate::commit::{LogState, Status};
use crate::wire::Id;
use crate::{Error, Result};

/// When a writer writes a base, and what its deltas are made against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// Every snapshot is a base.
    Full,
    /// Every delta is made against the first base.
    OneShot,
    /// Every delta is made against the snapshot before it.
    Consecutive,
    /// A new base every so many snapshots; deltas are made against the last base.
    Intermittent {
        /// Snapshots from one base to the next, 1 or more.
        every: u64,
    },
}

impl Default for Policy {
    fn default() -> Self {
        Self::Intermittent { every: 8 }
    }
}

impl Policy {
    /// The policy of a name: `full`, `one_shot`, `consecutive` or `intermittent`, which takes `every`.
    ///
    /// ```
    /// use tensorcask::Policy;
    /// assert_eq!(Policy::from_name("intermittent", Some(4))?, Policy::Intermittent { every: 4 });
    /// assert!(Policy::from_name("full", Some(4)).is_err());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn from_name(name: &str, every: Option<u64>) -> Result<Self> {
        match (name, every) {
            ("full", None) => Ok(Self::Full),
            ("one_shot", None) => Ok(Self::OneShot),
            ("consecutive", None) => Ok(Self::Consecutive),
            ("intermittent", None) => Ok(Self::default()),
            ("intermittent", Some(every)) if every > 0 => Ok(Self::Intermittent { every }),
            ("intermittent", Some(_)) => Err(Error::invalid("`every` is 1 or more")),
            ("full" | "one_shot" | "consecutive", Some(_)) => Err(Error::invalid(format!("policy `{name}` takes no `every`"))),
            _ => Err(Error::invalid(format!("`{}` is not a policy; use full, one_shot, consecutive or intermittent", name.escape_debug()))),
        }
    }

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::OneShot => "one_shot",
            Self::Consecutive => "consecutive",
            Self::Intermittent { .. } => "intermittent",
        }
    }

    /// What the next snapshot is made against; none for a base. A delta that would exceed `max_depth`, or whose chain is
    /// broken already, becomes a base.
    pub(crate) fn parent(self, state: &LogState, max_depth: u64) -> Option<Id> {
        let latest = state.latest()?;
        let chain = chain_of(state, latest.id, max_depth).ok()?;
        let base = chain.last().filter(|base| base.status != Status::Forgotten)?;
        match self {
            Self::Full => None,
            Self::OneShot => (max_depth >= 2).then_some(base.id),
            Self::Consecutive => ((chain.len() as u64) < max_depth).then_some(latest.id),
            Self::Intermittent { every } => {
                let since = state.snapshots().iter().filter(|record| record.sequence >= base.sequence).count() as u64;
                (since < every && max_depth >= 2).then_some(base.id)
            }
        }
    }
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Intermittent { every } => write!(f, "intermittent({every})"),
            other => f.write_str(other.name()),
        }
    }
}
