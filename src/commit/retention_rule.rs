//! Which snapshots a retention keeps. Pure: what is not known yet is named in the decision.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::finite_marks::{FiniteMarks, LastGood};
use super::{LogState, SnapshotRecord};
use crate::wire::Id;
use crate::{Error, Result};

/// Live steps to keep; all others are forgotten. Pinned steps are always kept, and the newest step that was not reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Retention {
    /// Number of newest snapshots to keep, by commit. Reduced ones do not count.
    pub keep_last: Option<u64>,
    /// Interval of steps to keep: the multiples of this number.
    pub keep_every: Option<u64>,
    /// Interval of steps that are not forgotten, although nothing else keeps them.
    /// [`maintain::apply_retention`](crate::maintain::apply_retention()) reduces them to their weights.
    pub keep_weights_every: Option<u64>,
    /// When the objects of forgotten steps are deleted.
    pub free: Free,
}

/// When the objects of forgotten steps are deleted, if a job applies a [`Retention`] after each save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Free {
    /// With the save after the one that forgot the step, as soon as no other step needs it. A reader that takes longer than one
    /// save for a step has to pin the step before. Steps that were compacted, and runs on many hosts, wait for garbage collection.
    #[default]
    NextSave,
    /// By [`maintain::gc`](crate::maintain::gc()).
    Gc,
}

impl Free {
    /// Finds a value by its name: `next_save` or `gc`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "next_save" => Ok(Self::NextSave),
            "gc" => Ok(Self::Gc),
            _ => Err(Error::invalid(format!("`{}` frees nothing: use `next_save` or `gc`", name.escape_debug()))),
        }
    }
}

impl Retention {
    /// Whether each save frees what an earlier one has forgotten.
    pub(crate) fn frees(self) -> bool {
        self.free == Free::NextSave
    }

    /// Refuses a retention that keeps nothing.
    pub fn check(self) -> Result<()> {
        let all = [self.keep_last, self.keep_every, self.keep_weights_every];
        match all == [None; 3] || all.contains(&Some(0)) {
            true => {
                Err(Error::invalid("nothing to keep was given: set how many last steps to keep, or an interval of steps, each at least 1"))
            }
            false => Ok(()),
        }
    }

    /// Decides which live snapshots this retention keeps, as far as `marks` tell which of them are finite.
    pub(crate) fn decide(self, state: &LogState, marks: &FiniteMarks) -> Result<Decision> {
        self.check()?;
        let is_multiple = |every: Option<u64>, step: u64| every.is_some_and(|every| step.is_multiple_of(every));
        // Number of newer snapshots that a job can resume from. Reduced ones do not count.
        let mut newer = 0u64;
        let keeps = |record: &&SnapshotRecord| {
            let nth = newer;
            newer += u64::from(record.roles.is_none());
            nth == 0 || record.pinned || self.keep_last.is_some_and(|last| nth < last) || is_multiple(self.keep_every, record.step)
        };
        let (kept, mut dropped): (Vec<&SnapshotRecord>, Vec<&SnapshotRecord>) = state.live().rev().partition(keeps);
        let mut decision = Decision::default();
        if !dropped.is_empty() {
            let kept: BTreeSet<Id> = kept.iter().map(|record| record.id).collect();
            // Snapshots with all roles, newest first. A job cannot resume from a reduced snapshot.
            let whole = state.live().rev().filter(|record| record.roles.is_none());
            match marks.last_good(whole.map(|record| (record.id, kept.contains(&record.id)))) {
                LastGood::Unknown(ids) => decision.unknown = ids,
                LastGood::Dropped(id) => decision.kept_finite = state.by_id(id).cloned(),
                LastGood::NotNeeded => {}
            }
        }
        let finite = decision.kept_finite.as_ref().map(|record| record.id);
        dropped.retain(|record| Some(record.id) != finite);
        dropped.reverse();
        let (reduce, forget): (Vec<_>, Vec<_>) = dropped.into_iter().partition(|record| is_multiple(self.keep_weights_every, record.step));
        decision.reduce = reduce.into_iter().filter(|record| record.roles.is_none()).cloned().collect();
        decision.forget = forget.into_iter().cloned().collect();
        Ok(decision)
    }
}

/// Live snapshots that a retention forgets or reduces, ordered by commit.
#[derive(Debug, Default)]
pub(crate) struct Decision {
    pub forget: Vec<SnapshotRecord>,
    /// Snapshots to reduce to their weights.
    pub reduce: Vec<SnapshotRecord>,
    /// Newest finite snapshot, if it stays only for being that.
    pub kept_finite: Option<SnapshotRecord>,
    /// Snapshots that may be finite or not. The decision holds only once it is known of these.
    pub unknown: Vec<Id>,
}
