//! Which steps of this host other hosts have copied. Holders may copy newer steps before older ones, or have no room for some.

use std::collections::BTreeMap;

use tensorcask::wire::SessionStep;

use super::run_event::{RankGeneration, ReplicatedSaves};

/// The steps of this host that wait for copies, and the newest one that has enough of them.
#[derive(Debug, Default)]
pub(super) struct CopiedSteps {
    /// Encoded steps that have too few copies, as far as is known.
    awaited: BTreeMap<SessionStep, Vec<RankGeneration>>,
    newest: Option<(SessionStep, Vec<RankGeneration>)>,
    /// Of saves up to these, it is not known which have copies, unless they were reported before.
    unknown: Vec<RankGeneration>,
}

impl CopiedSteps {
    /// Adds a step that this agent has encoded.
    pub(super) fn add(&mut self, key: SessionStep, saves: Vec<RankGeneration>) {
        self.awaited.insert(key, saves);
        while self.awaited.len() > MAX_AWAITED {
            self.unknown = self.awaited.pop_first().map_or_else(Vec::new, |(_, saves)| saves);
        }
    }

    /// Adds the steps that an earlier agent encoded, as far as their slots still hold them. Older ones are unknown.
    pub(super) fn add_earlier(&mut self, earlier: BTreeMap<SessionStep, Vec<RankGeneration>>) {
        let oldest = earlier.first_key_value().filter(|(first, _)| self.awaited.first_key_value().is_none_or(|(known, _)| *first <= known));
        if let Some((_, saves)) = oldest.filter(|_| self.unknown.is_empty()) {
            let before = |save: &RankGeneration| RankGeneration { generation: save.generation.saturating_sub(1), ..*save };
            self.unknown = saves.iter().map(before).collect();
        }
        for (key, saves) in earlier {
            self.awaited.entry(key).or_insert(saves);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.awaited.is_empty()
    }

    /// The awaited steps, oldest first.
    pub(super) fn awaited(&self) -> impl Iterator<Item = SessionStep> + '_ {
        self.awaited.keys().copied()
    }

    /// Notes that enough hosts have copied a step.
    pub(super) fn note_copied(&mut self, key: SessionStep) {
        let Some(saves) = self.awaited.remove(&key) else { return };
        if self.newest.as_ref().is_none_or(|(newest, _)| *newest < key) {
            self.newest = Some((key, saves));
        }
    }

    /// Leaves out steps up to this one: they are committed or given up, so nobody needs copies of them.
    pub(super) fn forget(&mut self, decided: SessionStep) {
        self.awaited.retain(|key, _| *key > decided);
    }

    /// What to report; `None` before the first copy.
    pub(super) fn report(&self) -> Option<ReplicatedSaves> {
        let (newest, saves) = self.newest.as_ref()?;
        Some(ReplicatedSaves {
            step: newest.step,
            newest: saves.clone(),
            missing: self.awaited.range(..newest).flat_map(|(_, saves)| saves.iter().copied()).collect(),
            unknown: self.unknown.clone(),
        })
    }
}

/// Number of steps that wait for copies.
const MAX_AWAITED: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn key(step: u64) -> SessionStep {
        SessionStep { attempt: 1, step }
    }

    fn saves(generation: u64) -> Vec<RankGeneration> {
        vec![RankGeneration { rank: 3, generation }]
    }

    #[test]
    fn older_steps_without_copies_are_named() {
        let mut steps = CopiedSteps::default();
        (1..=5).for_each(|number| steps.add(key(number * 10), saves(number)));
        assert_eq!(steps.report(), None);
        [key(50), key(40)].into_iter().for_each(|key| steps.note_copied(key));
        let report = steps.report().unwrap();
        assert_eq!((report.step, report.newest, report.missing), (50, saves(5), [1, 2, 3].map(|number| saves(number)[0]).to_vec()));
        steps.note_copied(key(20));
        assert_eq!(steps.report().unwrap().missing, [saves(1)[0], saves(3)[0]]);
        steps.forget(key(20));
        assert_eq!(steps.report().unwrap().missing, saves(3));
        steps.note_copied(key(30));
        assert!(steps.is_empty() && steps.report().unwrap().missing.is_empty() && steps.report().unwrap().step == 50);
    }

    #[test]
    fn steps_that_are_no_longer_watched_are_unknown() {
        let mut steps = CopiedSteps::default();
        (1..=MAX_AWAITED as u64 + 2).for_each(|number| steps.add(key(number), saves(number)));
        steps.note_copied(key(MAX_AWAITED as u64 + 2));
        assert_eq!(steps.report().unwrap().unknown, saves(2));
    }

    #[test]
    fn saves_before_those_in_the_slots_are_unknown_to_a_new_agent() {
        let mut steps = CopiedSteps::default();
        steps.add_earlier(BTreeMap::from([(key(70), saves(7)), (key(80), saves(8))]));
        steps.note_copied(key(80));
        let report = steps.report().unwrap();
        assert_eq!((report.missing, report.unknown), (saves(7), saves(6)));
    }
}
