//! Which steps of this host other hosts have copied. Holders may copy newer steps before older ones, or have no room for some.

use std::collections::BTreeMap;

use tensorcask::wire::SessionStep;

use super::run_event::{RankGeneration, ReplicatedSaves};

/// The steps of this host that wait for copies, and the newest one that has enough of them.
#[derive(Debug, Default)]
pub(super) struct CopiedSteps {
    /// Encoded steps of which too few copies are known.
    awaited: BTreeMap<SessionStep, Vec<RankGeneration>>,
    newest: Option<(SessionStep, Vec<RankGeneration>)>,
    /// By rank: newest generation whose copies are not watched. Older ones are not watched, either.
    unwatched: BTreeMap<u32, u64>,
}

impl CopiedSteps {
    /// Adds a step that this agent has encoded.
    pub(super) fn add(&mut self, key: SessionStep, saves: Vec<RankGeneration>) {
        self.awaited.insert(key, saves);
        while self.awaited.len() > MAX_AWAITED {
            for save in self.awaited.pop_first().map_or_else(Vec::new, |(_, saves)| saves) {
                self.leave_unwatched(save);
            }
        }
    }

    /// Adds the undecided steps that an earlier agent encoded. `encoded`: newest encoded generation of each rank.
    pub(super) fn add_earlier(&mut self, earlier: BTreeMap<SessionStep, Vec<RankGeneration>>, encoded: &[RankGeneration]) {
        for (key, saves) in earlier {
            self.awaited.entry(key).or_insert(saves);
        }
        for newest in encoded {
            let saves = self.awaited.values().flatten().filter(|save| save.rank == newest.rank);
            let oldest = saves.map(|save| save.generation).min();
            let before = oldest.map_or(newest.generation, |oldest| oldest.saturating_sub(1));
            self.leave_unwatched(RankGeneration { generation: before, ..*newest });
        }
    }

    fn leave_unwatched(&mut self, save: RankGeneration) {
        let newest = self.unwatched.entry(save.rank).or_default();
        *newest = save.generation.max(*newest);
    }

    /// The awaited steps after `decided`, oldest first. The log has decided about the others, so nobody needs copies of them.
    pub(super) fn awaited(&self, decided: Option<SessionStep>) -> impl Iterator<Item = SessionStep> + '_ {
        self.awaited.keys().copied().filter(move |key| decided.is_none_or(|decided| *key > decided))
    }

    /// Notes that enough hosts have copied a step.
    pub(super) fn note_copied(&mut self, key: SessionStep) {
        let Some(saves) = self.awaited.remove(&key) else { return };
        if self.newest.as_ref().is_none_or(|(newest, _)| *newest < key) {
            self.newest = Some((key, saves));
        }
    }

    /// Leaves a step out. Call it once its fate is reported: before, it would count as copied like its successor.
    pub(super) fn forget(&mut self, key: SessionStep) {
        self.awaited.remove(&key);
    }

    /// Returns the saves to report; `None` before the first copy.
    pub(super) fn report(&self) -> Option<ReplicatedSaves> {
        let (newest, saves) = self.newest.as_ref()?;
        let unwatched = self.unwatched.iter().map(|(rank, generation)| RankGeneration { rank: *rank, generation: *generation });
        Some(ReplicatedSaves {
            step: newest.step,
            newest: saves.clone(),
            missing: self.awaited.range(..newest).flat_map(|(_, saves)| saves.iter().copied()).collect(),
            unwatched: unwatched.collect(),
        })
    }
}

/// Number of steps that wait for copies.
const MAX_AWAITED: usize = 1024;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tensorcask::wire::SessionStep;

    use super::{CopiedSteps, MAX_AWAITED};
    use crate::agent::run_event::RankGeneration;

    fn key(step: u64) -> SessionStep {
        SessionStep { attempt: 1, step }
    }

    fn save(rank: u32, generation: u64) -> RankGeneration {
        RankGeneration { rank, generation }
    }

    fn saves(generation: u64) -> Vec<RankGeneration> {
        vec![save(3, generation)]
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
        assert_eq!(steps.awaited(Some(key(10))).collect::<Vec<_>>(), [key(30)]);
        assert_eq!(steps.report().unwrap().missing, [saves(1)[0], saves(3)[0]], "the fate of step 10 is not reported yet");
        steps.forget(key(10));
        assert_eq!(steps.report().unwrap().missing, saves(3));
        steps.note_copied(key(30));
        assert_eq!((steps.awaited(None).count(), steps.report().unwrap().missing, steps.report().unwrap().step), (0, vec![], 50));
    }

    #[test]
    fn steps_that_wait_too_long_are_unwatched() {
        let mut steps = CopiedSteps::default();
        (1..=MAX_AWAITED as u64 + 2).for_each(|number| steps.add(key(number), saves(number)));
        steps.note_copied(key(MAX_AWAITED as u64 + 2));
        assert_eq!(steps.report().unwrap().unwatched, saves(2));
    }

    #[test]
    fn a_new_agent_watches_only_the_saves_that_it_finds() {
        let mut steps = CopiedSteps::default();
        steps.add(key(90), vec![save(1, 9), save(2, 10)]);
        // The slots of rank 3 hold newer states that are not encoded.
        let earlier = BTreeMap::from([(key(70), vec![save(1, 7)]), (key(80), vec![save(1, 8), save(2, 9)])]);
        steps.add_earlier(earlier, &[save(1, 9), save(2, 10), save(3, 4)]);
        steps.note_copied(key(90));
        let report = steps.report().unwrap();
        assert_eq!(report.missing, [save(1, 7), save(1, 8), save(2, 9)]);
        assert_eq!(report.unwatched, [save(1, 6), save(2, 8), save(3, 4)]);
    }
}
