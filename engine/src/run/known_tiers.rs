//! Notes of this host about the tiers of a run, in `seen.json`: the newest snapshot and the writer of each tier.
//!
//! The notes outlive the agent. They tell a later start whether another job has written to a tier.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tensorcask::wire::Id;
use tensorcask::{Error, Result};

use crate::os::files::{read_file, replace_file};
use crate::os::folders::RunFolder;
use crate::os::lock::lock_beside;

/// Notes about all tiers, by URL.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KnownTiers {
    tiers: BTreeMap<String, KnownTier>,
}

/// Notes about a tier.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KnownTier {
    /// Newest snapshot when this host last looked. If the tier has another one now, another host made it.
    pub latest: Option<Id>,
    /// Writer id of the agent in this tier.
    pub writer: Option<Id>,
    /// Takeover that is about to happen, or has just happened.
    pub taking_over: Option<Takeover>,
    /// Recent writers that this run took the tier over from. They reappear with an older copy of the store and are no
    /// other job.
    #[serde(default)]
    pub predecessors: Vec<Id>,
}

impl KnownTier {
    /// Notes that the run took the tier over as writer `id`.
    pub(crate) fn taken_over(&mut self, latest: Option<Id>, id: Id, from: Option<Id>) {
        self.predecessors.extend(self.writer.into_iter().chain(from).filter(|former| *former != id));
        let old = self.predecessors.len().saturating_sub(MAX_PREDECESSORS);
        self.predecessors.drain(..old);
        (self.latest, self.writer, self.taking_over) = (latest, Some(id), None);
    }
}

/// A takeover of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Takeover {
    /// New writer.
    pub id: Id,
    /// Previous writer.
    pub from: Option<Id>,
}

impl KnownTiers {
    /// Reads the notes. Missing or damaged notes are empty. Any other failure is an error: without the notes, memory could pass for
    /// that of another job, and be removed.
    pub(crate) fn read(folder: &RunFolder) -> Result<Self> {
        let path = folder.known_tiers();
        let Some(json) = read_file(&path)? else { return Ok(Self::default()) };
        Ok(serde_json::from_slice(&json).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "the notes about the tiers are damaged");
            Self::default()
        }))
    }

    /// The notes about a tier.
    pub(crate) fn tier(&self, url: &str) -> KnownTier {
        self.tiers.get(url).cloned().unwrap_or_default()
    }

    /// Changes the notes about a tier. Trainers and the agent may do so at the same time.
    pub(crate) fn update(folder: &RunFolder, url: &str, change: impl FnOnce(&mut KnownTier)) -> Result<()> {
        let _held = lock_beside(&folder.known_tiers())?;
        let mut known = Self::read(folder)?;
        let before = known.clone();
        change(known.tiers.entry(url.to_owned()).or_default());
        if known == before {
            return Ok(());
        }
        known.write(folder)
    }

    /// Replaces all notes by the newest snapshot of each tier.
    pub(crate) fn replace(folder: &RunFolder, latest: &BTreeMap<String, Option<Id>>) -> Result<()> {
        let _held = lock_beside(&folder.known_tiers())?;
        let tiers = latest.iter().map(|(url, latest)| (url.clone(), KnownTier { latest: *latest, ..KnownTier::default() }));
        Self { tiers: tiers.collect() }.write(folder)
    }

    fn write(&self, folder: &RunFolder) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|e| Error::invalid(format!("cannot encode the notes about the tiers: {e}")))?;
        replace_file(&folder.known_tiers(), &json)
    }
}

/// Number of predecessors to remember.
const MAX_PREDECESSORS: usize = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tensorcask::wire::Id;

    use super::{KnownTier, KnownTiers};
    use crate::os::folders::EngineFolder;

    #[test]
    fn concurrent_updates_are_all_kept() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = EngineFolder::open(Some(&temporary.path().join("e"))).unwrap().run("0");
        folder.create().unwrap();
        let ids: Vec<Id> = (0..4).map(|_| Id::random().unwrap()).collect();
        std::thread::scope(|scope| {
            for (tier, id) in ids.iter().enumerate() {
                let folder = &folder;
                scope.spawn(move || {
                    for _ in 0..50 {
                        KnownTiers::update(folder, &format!("tier-{tier}"), |known| known.latest = None).unwrap();
                        KnownTiers::update(folder, &format!("tier-{tier}"), |known| known.latest = Some(*id)).unwrap();
                    }
                });
            }
        });
        let known = KnownTiers::read(&folder).unwrap();
        assert!(ids.iter().enumerate().all(|(tier, id)| known.tier(&format!("tier-{tier}")).latest == Some(*id)), "{known:?}");
        KnownTiers::replace(&folder, &BTreeMap::from([("tier-0".to_owned(), Some(ids[1]))])).unwrap();
        assert_eq!(KnownTiers::read(&folder).unwrap().tier("tier-0").latest, Some(ids[1]));
        assert_eq!(KnownTiers::read(&folder).unwrap().tier("tier-1"), KnownTier::default());
    }
}
