//! What this host knows of the tiers of a run: what of the run outlives the agent, besides what it is and what is in memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;
use tensorcask::{Error, Result};

use crate::place::{RunPlace, lock_file, replace_file};

/// By tier, of which the URL is the name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Seen {
    tiers: BTreeMap<String, SeenTier>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeenTier {
    /// The newest snapshot that it had when this host last looked: another one there was made elsewhere.
    pub latest: Option<Id>,
    /// As whom the agent writes there.
    pub writer: Option<Id>,
    /// That it is about to take it over, or has just done so.
    pub taking_over: Option<TakingOver>,
    /// Writers from whom this run took the tier over, the last ones: they come back with an older copy of the store, and are no other job.
    #[serde(default)]
    pub predecessors: Vec<Id>,
}

/// Predecessors that are remembered, at most.
const MAX_PREDECESSORS: usize = 64;

impl SeenTier {
    /// Notes that the tier was taken over.
    pub(crate) fn taken_over(&mut self, latest: Option<Id>, id: Id, from: Option<Id>) {
        self.predecessors.extend(self.writer.into_iter().chain(from).filter(|former| *former != id));
        let old = self.predecessors.len().saturating_sub(MAX_PREDECESSORS);
        self.predecessors.drain(..old);
        (self.latest, self.writer, self.taking_over) = (latest, Some(id), None);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TakingOver {
    /// As whom.
    pub id: Id,
    /// From whom: who had written there last.
    pub from: Option<Id>,
}

impl Seen {
    pub(crate) fn read(place: &RunPlace) -> Self {
        let found = std::fs::read(place.seen()).ok().and_then(|json| serde_json::from_slice(&json).ok());
        found.unwrap_or_default()
    }

    /// Of a tier.
    pub(crate) fn tier(&self, url: &str) -> SeenTier {
        self.tiers.get(url).cloned().unwrap_or_default()
    }

    /// Notes something of a tier. Trainers and the agent may do so at once.
    pub(crate) fn update(place: &RunPlace, url: &str, change: impl FnOnce(&mut SeenTier)) -> Result<()> {
        let _held = lock_file(&place.seen_lock())?;
        let mut seen = Self::read(place);
        let before = seen.clone();
        change(seen.tiers.entry(url.to_owned()).or_default());
        if seen == before {
            return Ok(());
        }
        seen.write(place)
    }

    /// Forgets what was known, for the newest snapshot of each tier, by its URL.
    pub(crate) fn replace(place: &RunPlace, latest: &BTreeMap<String, Option<Id>>) -> Result<()> {
        let _held = lock_file(&place.seen_lock())?;
        let tiers = latest.iter().map(|(url, latest)| (url.clone(), SeenTier { latest: *latest, ..SeenTier::default() }));
        Self { tiers: tiers.collect() }.write(place)
    }

    fn write(&self, place: &RunPlace) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|e| Error::invalid(format!("what is known of a run: {e}")))?;
        replace_file(&place.seen(), &json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;

    #[test]
    fn what_several_note_at_once_is_all_kept() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::open(Some(&folder.path().join("e"))).unwrap().run("0");
        place.create().unwrap();
        let ids: Vec<Id> = (0..4).map(|_| Id::random().unwrap()).collect();
        std::thread::scope(|scope| {
            for (tier, id) in ids.iter().enumerate() {
                let place = &place;
                scope.spawn(move || {
                    for _ in 0..50 {
                        Seen::update(place, &format!("tier-{tier}"), |seen| seen.latest = None).unwrap();
                        Seen::update(place, &format!("tier-{tier}"), |seen| seen.latest = Some(*id)).unwrap();
                    }
                });
            }
        });
        let seen = Seen::read(&place);
        assert!(ids.iter().enumerate().all(|(tier, id)| seen.tier(&format!("tier-{tier}")).latest == Some(*id)), "{seen:?}");
        Seen::replace(&place, &BTreeMap::from([("tier-0".to_owned(), Some(ids[1]))])).unwrap();
        assert_eq!(Seen::read(&place).tier("tier-0").latest, Some(ids[1]));
        assert_eq!(Seen::read(&place).tier("tier-1"), SeenTier::default());
    }
}
