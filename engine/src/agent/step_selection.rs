//! Selection of the state that is encoded next, from the states of all ranks. No I/O.

use crate::arena::SlotHeader;
use crate::arena::slot::SlotState;

/// The states in the arena of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct RankStates {
    /// Complete states.
    pub headers: Vec<SlotHeader>,
    /// Newest generation that is encoded.
    pub encoded: u64,
    /// Whether the trainer saves no more.
    pub is_finished: bool,
}

/// Identifies a save. States of all ranks with the same key are parts of one snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SaveKey {
    pub session: u64,
    pub attempt: u64,
    pub step: u64,
}

impl SaveKey {
    pub(super) fn of(header: &SlotHeader) -> Self {
        Self { session: header.session, attempt: header.attempt, step: header.step }
    }
}

/// State of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StateOfRank {
    pub rank: usize,
    pub key: SaveKey,
}

/// The next work of the encoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selection {
    /// Encode this save, which all ranks have.
    Encode(SaveKey),
    /// Drop these states, which can never become complete: their ranks, or others, have continued without them.
    Drop(Vec<StateOfRank>),
    /// Wait, because some rank has not saved yet.
    Wait,
}

impl RankStates {
    fn waiting(&self) -> impl Iterator<Item = &SlotHeader> {
        self.headers.iter().filter(|header| header.word.state == SlotState::Full)
    }

    fn find_waiting(&self, key: SaveKey) -> Option<&SlotHeader> {
        self.waiting().find(|header| SaveKey::of(header) == key)
    }

    /// Whether the rank can no longer contribute to a save: it has saved a later step in this session, or saves no
    /// more.
    fn has_passed(&self, key: SaveKey) -> bool {
        // Encoded states do not count. After a return to an older step, they may have a higher step.
        let since = self.headers.iter().filter(|header| header.session == key.session && header.word.generation > self.encoded);
        let newest = since.max_by_key(|header| header.word.generation);
        (self.is_finished || newest.is_some_and(|newest| SaveKey::of(newest) > key)) && self.find_waiting(key).is_none()
    }
}

/// The sessions of which states are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sessions {
    /// States of older sessions are dropped.
    pub oldest: u64,
    /// Ranks still save in this session.
    pub current: u64,
}

/// Selects the next work from the states of all ranks of this host, in rank order, during this session. A save is complete
/// if all of them wait with it. `world`: number of ranks of the job. Of several complete saves, the oldest of rank 0 comes first.
pub(super) fn select_next(ranks: &[RankStates], sessions: Sessions, world: u32) -> Selection {
    let Some(first) = ranks.first() else { return Selection::Wait };
    let is_of_this_job = |header: &SlotHeader| header.world == world && header.session >= sessions.oldest;
    let is_complete =
        |header: &&SlotHeader| is_of_this_job(header) && ranks.iter().all(|rank| rank.find_waiting(SaveKey::of(header)).is_some());
    let oldest = first.waiting().filter(is_complete).min_by_key(|header| header.word.generation);
    if let Some(chosen) = oldest.map(SaveKey::of) {
        let mut older = Vec::new();
        for (number, rank) in ranks.iter().enumerate() {
            let Some(ours) = rank.find_waiting(chosen) else { continue };
            let before = rank.waiting().filter(|header| header.word.generation < ours.word.generation);
            older.extend(before.map(|header| StateOfRank { rank: number, key: SaveKey::of(header) }));
        }
        return if older.is_empty() { Selection::Encode(chosen) } else { Selection::Drop(older) };
    }
    let mut hopeless = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        for header in rank.waiting() {
            let key = SaveKey::of(header);
            // No rank adds to an earlier session.
            if header.session < sessions.current || !is_of_this_job(header) || ranks.iter().any(|other| other.has_passed(key)) {
                hopeless.push(StateOfRank { rank: number, key });
            }
        }
    }
    if hopeless.is_empty() { Selection::Wait } else { Selection::Drop(hopeless) }
}

#[cfg(test)]
mod tests {
    use super::{RankStates, SaveKey, Selection, Sessions, StateOfRank, select_next};
    use crate::arena::SlotHeader;
    use crate::arena::slot::{SlotState, SlotWord};

    const SESSION: u64 = 3;

    fn any(current: u64) -> Sessions {
        Sessions { oldest: 0, current }
    }

    fn kept(session: u64, step: u64, generation: u64, waits: bool, world: usize) -> SlotHeader {
        let state = if waits { SlotState::Full } else { SlotState::Released };
        SlotHeader { word: SlotWord { state, generation }, step, session, attempt: 0, world: world as u32 }
    }

    /// One of two ranks, with its steps in the order of their saves, and whether each step waits (otherwise it is
    /// encoded). A step that is not later than the previous one begins another attempt.
    fn rank(steps: &[(u64, bool)]) -> RankStates {
        let mut attempt = 0;
        let mut last = 0;
        let mut kept: Vec<SlotHeader> = (1..).zip(steps).map(|(at, &(step, waits))| kept(SESSION, step, at, waits, 2)).collect();
        for kept in &mut kept {
            attempt += u64::from(kept.step <= last);
            (kept.attempt, last) = (attempt, kept.step);
        }
        let encoded = kept.iter().filter(|kept| kept.word.state == SlotState::Released).map(|kept| kept.word.generation).max().unwrap_or(0);
        RankStates { headers: kept, encoded, is_finished: false }
    }

    fn name(attempt: u64, step: u64) -> SaveKey {
        SaveKey { session: SESSION, attempt, step }
    }

    fn next_of(ranks: &[RankStates]) -> Selection {
        select_next(ranks, any(SESSION), ranks.len() as u32)
    }

    #[test]
    fn a_step_is_encoded_once_all_ranks_have_it() {
        assert_eq!(next_of(&[rank(&[(10, true)]), rank(&[])]), Selection::Wait);
        assert_eq!(next_of(&[rank(&[(10, true)]), rank(&[(10, true)])]), Selection::Encode(name(0, 10)));
        assert_eq!(next_of(&[rank(&[(10, true), (11, true)]), rank(&[(10, true), (11, true)])]), Selection::Encode(name(0, 10)));
        assert_eq!(next_of(&[rank(&[(10, false), (11, true)]), rank(&[(10, false)])]), Selection::Wait);
    }

    #[test]
    fn states_that_another_rank_skipped_are_dropped() {
        assert_eq!(
            next_of(&[rank(&[(10, true), (11, true)]), rank(&[(11, true)])]),
            Selection::Drop(vec![StateOfRank { rank: 0, key: name(0, 10) }])
        );
        // The ranks have no step in common. No rank may wait for ever.
        assert_eq!(
            next_of(&[rank(&[(10, true), (11, true)]), rank(&[(12, true), (13, true)])]),
            Selection::Drop(vec![StateOfRank { rank: 0, key: name(0, 10) }, StateOfRank { rank: 0, key: name(0, 11) }])
        );
        // After a rollback, an incomplete state of a later step is older.
        let behind = |held: RankStates| RankStates { headers: held.headers.into_iter().filter(|kept| kept.step == 90).collect(), ..held };
        let both = rank(&[(100, true), (90, true)]);
        assert_eq!(next_of(&[both.clone(), behind(both.clone())]), Selection::Drop(vec![StateOfRank { rank: 0, key: name(0, 100) }]));
        assert_eq!(next_of(&[behind(both.clone()), behind(both.clone())]), Selection::Encode(name(1, 90)));
        // States from before and after a rollback are never joined.
        let before = rank(&[(100, true)]);
        let again = rank(&[(100, false), (90, false), (100, true)]);
        assert_eq!(next_of(&[again.clone(), before.clone()]), Selection::Drop(vec![StateOfRank { rank: 1, key: name(0, 100) }]));
        let late = rank(&[(100, true), (90, false), (100, true)]);
        assert_eq!(next_of(&[again, late]), Selection::Drop(vec![StateOfRank { rank: 1, key: name(0, 100) }]));
        // After a rollback, an encoded state of a later step does not make others drop theirs.
        assert_eq!(next_of(&[rank(&[(100, false), (90, true)]), rank(&[(100, false)])]), Selection::Wait);
    }

    #[test]
    fn states_that_a_finished_rank_never_saved_are_dropped() {
        let over = |steps| RankStates { is_finished: true, ..rank(steps) };
        assert_eq!(next_of(&[rank(&[(10, true)]), over(&[])]), Selection::Drop(vec![StateOfRank { rank: 0, key: name(0, 10) }]));
        assert_eq!(next_of(&[rank(&[(10, true)]), over(&[(10, true)])]), Selection::Encode(name(0, 10)));
        assert_eq!(next_of(&[rank(&[]), over(&[(10, true)])]), Selection::Wait, "the other rank may still save");
    }

    #[test]
    fn states_of_two_sessions_are_never_joined() {
        let old = |step, at, waits| kept(SESSION - 1, step, at, waits, 2);
        let new = |step, at| kept(SESSION, step, at, true, 2);
        let held = |kept: &[SlotHeader]| RankStates { headers: kept.to_vec(), ..RankStates::default() };
        // Rank 0 saved step 100 before all ranks were killed; rank 1 saves it now.
        let ranks = [held(&[old(100, 1, true)]), held(&[new(100, 1)])];
        assert_eq!(
            next_of(&ranks),
            Selection::Drop(vec![StateOfRank { rank: 0, key: SaveKey { session: SESSION - 1, attempt: 0, step: 100 } }])
        );
        // A save that was complete when they were killed is encoded first.
        let ranks = [held(&[old(99, 1, true), new(98, 2)]), held(&[old(99, 1, true)])];
        assert_eq!(next_of(&ranks), Selection::Encode(SaveKey { session: SESSION - 1, attempt: 0, step: 99 }));
        // One of many hosts drops it: the other hosts may have another state of that step.
        let only_new = Sessions { oldest: SESSION, current: SESSION };
        assert!(matches!(select_next(&ranks, only_new, 2), Selection::Drop(dropped) if dropped.len() == 2));
        let ranks = [held(&[old(99, 1, false), new(98, 2)]), held(&[old(99, 1, false)])];
        assert_eq!(next_of(&ranks), Selection::Wait, "rank 1 still saves step 98");
        // Saved by a job with more ranks.
        let of_three = SlotHeader { world: 3, ..old(99, 1, true) };
        let of_three = [held(&[of_three]), held(&[of_three])];
        assert!(matches!(next_of(&of_three), Selection::Drop(dropped) if dropped.len() == 2));
    }

    #[test]
    fn random_saves_of_several_ranks_never_block_each_other() {
        // In each of two sessions, each of three ranks saves a random part of ten steps into two slots, while the agent
        // works.
        for seed in 0..2000u64 {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut random = |n: u64| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) % n
            };
            let mut held = vec![RankStates::default(); 3];
            let mut generation = 0;
            let mut encoded = Vec::new();
            for session in 1..=2 {
                let mut todo: Vec<Vec<u64>> = (0..3).map(|_| (1..=10).filter(|_| random(4) > 0).chain([11]).collect()).collect();
                // The first session may be killed anywhere.
                let mut turns = if session == 1 { random(60) } else { u64::MAX };
                while turns > 0 {
                    turns -= 1;
                    for (held, todo) in held.iter_mut().zip(&mut todo) {
                        let free = held.headers.len() < 2 || held.waiting().count() < 2;
                        if free && !todo.is_empty() && random(2) == 0 {
                            if held.headers.len() == 2 {
                                let at = held.headers.iter().position(|kept| kept.word.state != SlotState::Full).unwrap();
                                held.headers.remove(at);
                            }
                            generation += 1;
                            held.headers.push(kept(session, todo.remove(0), generation, true, 3));
                        }
                    }
                    match select_next(&held, any(session), 3) {
                        Selection::Encode(name) => {
                            encoded.push(name);
                            for held in &mut held {
                                let of_name =
                                    held.headers.iter_mut().filter(|kept| SaveKey::of(kept) == name && kept.word.state == SlotState::Full);
                                for kept in of_name {
                                    kept.word.state = SlotState::Released;
                                    held.encoded = kept.word.generation;
                                }
                            }
                        }
                        Selection::Drop(all) => {
                            for StateOfRank { rank, key: name } in all {
                                let of_name = held[rank].headers.iter_mut().filter(|kept| SaveKey::of(kept) == name);
                                of_name.for_each(|kept| kept.word.state = SlotState::Released);
                            }
                        }
                        Selection::Wait if todo.iter().all(Vec::is_empty) => break,
                        Selection::Wait => {
                            let stuck = held.iter().zip(&todo).all(|(held, todo)| todo.is_empty() || held.waiting().count() == 2);
                            assert!(!stuck, "seed {seed}: {held:?}, to do {todo:?}");
                        }
                    }
                }
            }
            assert!(
                encoded.is_sorted() && encoded.last() == Some(&SaveKey { session: 2, attempt: 0, step: 11 }),
                "seed {seed}: {encoded:?}"
            );
        }
    }
}
