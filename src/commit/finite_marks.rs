//! Marks of snapshots as finite or not, from their manifests. Spec: `spec/manifest.md`, 1.4.1.

use std::collections::BTreeMap;

use crate::wire::Id;

/// Marks of snapshots that were read so far.
#[derive(Debug, Default)]
pub(crate) struct FiniteMarks(BTreeMap<Id, FiniteMark>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FiniteMark {
    Finite,
    NotFinite,
    /// The manifest does not say, or cannot be read.
    Unchecked,
}

/// The last finite snapshot, from the view of a retention.
pub(super) enum LastGood {
    /// No snapshot has to stay: the newest finite one is kept, or no newer one that is kept is known to hold NaN.
    NotNeeded,
    /// The newest finite snapshot would be dropped, and a newer one that is kept is not finite.
    Dropped(Id),
    /// Snapshots that come first and whose manifests were not read yet.
    Unknown(Vec<Id>),
}

impl FiniteMarks {
    /// Notes what the manifest of a snapshot says: finite, not finite, or nothing.
    pub(super) fn note(&mut self, id: Id, is_finite: Option<bool>) {
        let mark = match is_finite {
            Some(true) => FiniteMark::Finite,
            Some(false) => FiniteMark::NotFinite,
            None => FiniteMark::Unchecked,
        };
        self.0.insert(id, mark);
    }

    /// Finds the last finite snapshot among whole snapshots: ids, and whether each is kept, newest first.
    pub(super) fn last_good(&self, snapshots: impl Iterator<Item = (Id, bool)>) -> LastGood {
        let mut is_not_finite = false;
        let mut snapshots = snapshots.peekable();
        while let Some(&(id, is_kept)) = snapshots.peek() {
            match self.0.get(&id) {
                Some(FiniteMark::Finite) if is_not_finite && !is_kept => return LastGood::Dropped(id),
                Some(FiniteMark::Finite) => return LastGood::NotNeeded,
                Some(FiniteMark::NotFinite) => is_not_finite |= is_kept,
                Some(FiniteMark::Unchecked) => {}
                None => {
                    let unknown = snapshots.map(|(id, _)| id).filter(|id| !self.0.contains_key(id));
                    return LastGood::Unknown(unknown.take(MANIFESTS_AT_ONCE).collect());
                }
            }
            snapshots.next();
        }
        LastGood::NotNeeded
    }
}

/// Number of manifests that are read before the next decision.
const MANIFESTS_AT_ONCE: usize = 32;
