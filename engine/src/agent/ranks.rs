//! Which state of several ranks is encoded next, and which can never be complete. No I/O.

use crate::arena::Kept;
use crate::slot::State;

/// What a rank has in its arena.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Held {
    /// Whole states.
    pub kept: Vec<Kept>,
    /// The newest generation that is encoded.
    pub encoded: u64,
    /// Its trainer saves no more.
    pub is_over: bool,
}

/// What all ranks save alike: states with the same name are parts of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub session: u64,
    pub attempt: u64,
    pub step: u64,
}

impl Name {
    pub(super) fn of(kept: &Kept) -> Self {
        Self { session: kept.session, attempt: kept.attempt, step: kept.step }
    }
}

/// What to do with what all ranks hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// All ranks have this state.
    Encode(Name),
    /// These (rank, state) will never be complete: their ranks have gone on, or another has without them.
    Drop(Vec<(usize, Name)>),
    /// Some rank has not saved yet.
    Wait,
}

impl Held {
    fn waits(&self) -> impl Iterator<Item = &Kept> {
        self.kept.iter().filter(|kept| kept.word.state == State::Full)
    }

    fn waiting(&self, name: Name) -> Option<&Kept> {
        self.waits().find(|kept| Name::of(kept) == name)
    }

    /// Whether it has saved a later step in this session, or saves no more, and does not wait with this one.
    fn has_gone_on(&self, name: Name) -> bool {
        // What is encoded comes before all that waits: after a return to an older step, its number may be the greater one.
        let since = self.kept.iter().filter(|kept| kept.session == name.session && kept.word.generation > self.encoded);
        let newest = since.max_by_key(|kept| kept.word.generation);
        (self.is_over || newest.is_some_and(|newest| Name::of(newest) > name)) && self.waiting(name).is_none()
    }
}

/// Decides by what each rank holds, while the job is in this session. A state counts if all ranks, and no others, wait with it; the oldest by
/// rank 0 comes first.
pub(super) fn next(ranks: &[Held], session: u64) -> Next {
    let Some(first) = ranks.first() else { return Next::Wait };
    let is_of_all = |kept: &Kept| kept.world as usize == ranks.len();
    let complete = first.waits().filter(|kept| is_of_all(kept) && ranks.iter().all(|rank| rank.waiting(Name::of(kept)).is_some()));
    if let Some(chosen) = complete.min_by_key(|kept| kept.word.generation).map(Name::of) {
        let mut behind = Vec::new();
        for (number, rank) in ranks.iter().enumerate() {
            let Some(ours) = rank.waiting(chosen) else { continue };
            let before = rank.waits().filter(|kept| kept.word.generation < ours.word.generation);
            behind.extend(before.map(|kept| (number, Name::of(kept))));
        }
        return if behind.is_empty() { Next::Encode(chosen) } else { Next::Drop(behind) };
    }
    let mut hopeless = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        for kept in rank.waits() {
            let name = Name::of(kept);
            // Nobody adds to a session that is over.
            if kept.session < session || !is_of_all(kept) || ranks.iter().any(|other| other.has_gone_on(name)) {
                hopeless.push((number, name));
            }
        }
    }
    if hopeless.is_empty() { Next::Wait } else { Next::Drop(hopeless) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Word;

    const SESSION: u64 = 3;

    fn kept(session: u64, step: u64, generation: u64, waits: bool, world: usize) -> Kept {
        let state = if waits { State::Full } else { State::Released };
        Kept { word: Word { state, generation }, step, session, attempt: 0, world: world as u32 }
    }

    /// Of two ranks: steps of the session in the order in which they were saved, and whether each waits; what does not is encoded. Each that is
    /// not later than the one before is another attempt.
    fn rank(steps: &[(u64, bool)]) -> Held {
        let (mut attempt, mut last) = (0, 0);
        let mut kept: Vec<Kept> = (1..).zip(steps).map(|(at, &(step, waits))| kept(SESSION, step, at, waits, 2)).collect();
        for kept in &mut kept {
            attempt += u64::from(kept.step <= last);
            (kept.attempt, last) = (attempt, kept.step);
        }
        let encoded = kept.iter().filter(|kept| kept.word.state == State::Released).map(|kept| kept.word.generation).max().unwrap_or(0);
        Held { kept, encoded, is_over: false }
    }

    fn name(attempt: u64, step: u64) -> Name {
        Name { session: SESSION, attempt, step }
    }

    fn next_of(ranks: &[Held]) -> Next {
        next(ranks, SESSION)
    }

    #[test]
    fn a_step_is_encoded_once_all_ranks_have_it() {
        assert_eq!(next_of(&[rank(&[(10, true)]), rank(&[])]), Next::Wait);
        assert_eq!(next_of(&[rank(&[(10, true)]), rank(&[(10, true)])]), Next::Encode(name(0, 10)));
        assert_eq!(next_of(&[rank(&[(10, true), (11, true)]), rank(&[(10, true), (11, true)])]), Next::Encode(name(0, 10)));
        assert_eq!(next_of(&[rank(&[(10, false), (11, true)]), rank(&[(10, false)])]), Next::Wait);
    }

    #[test]
    fn what_a_rank_skipped_is_dropped_by_the_others() {
        assert_eq!(next_of(&[rank(&[(10, true), (11, true)]), rank(&[(11, true)])]), Next::Drop(vec![(0, name(0, 10))]));
        // No step in common, and nobody may wait for ever.
        assert_eq!(
            next_of(&[rank(&[(10, true), (11, true)]), rank(&[(12, true), (13, true)])]),
            Next::Drop(vec![(0, name(0, 10)), (0, name(0, 11))])
        );
        // After a rollback, what was newer and never complete is behind.
        let behind = |held: Held| Held { kept: held.kept.into_iter().filter(|kept| kept.step == 90).collect(), ..held };
        let both = rank(&[(100, true), (90, true)]);
        assert_eq!(next_of(&[both.clone(), behind(both.clone())]), Next::Drop(vec![(0, name(0, 100))]));
        assert_eq!(next_of(&[behind(both.clone()), behind(both.clone())]), Next::Encode(name(1, 90)));
        // What was saved before it and what was saved after are never joined.
        let (before, again) = (rank(&[(100, true)]), rank(&[(100, false), (90, false), (100, true)]));
        assert_eq!(next_of(&[again.clone(), before.clone()]), Next::Drop(vec![(1, name(0, 100))]));
        let late = rank(&[(100, true), (90, false), (100, true)]);
        assert_eq!(next_of(&[again, late]), Next::Drop(vec![(1, name(0, 100))]));
        // After a rollback, what was newer and is encoded is no reason.
        assert_eq!(next_of(&[rank(&[(100, false), (90, true)]), rank(&[(100, false)])]), Next::Wait);
    }

    #[test]
    fn what_a_rank_that_is_over_never_saved_is_dropped_by_the_others() {
        let over = |steps| Held { is_over: true, ..rank(steps) };
        assert_eq!(next_of(&[rank(&[(10, true)]), over(&[])]), Next::Drop(vec![(0, name(0, 10))]));
        assert_eq!(next_of(&[rank(&[(10, true)]), over(&[(10, true)])]), Next::Encode(name(0, 10)));
        assert_eq!(next_of(&[rank(&[]), over(&[(10, true)])]), Next::Wait, "the other still may");
    }

    #[test]
    fn states_of_two_starts_are_never_joined() {
        let old = |step, at, waits| kept(SESSION - 1, step, at, waits, 2);
        let new = |step, at| kept(SESSION, step, at, true, 2);
        let held = |kept: &[Kept]| Held { kept: kept.to_vec(), ..Held::default() };
        // Rank 0 saved step 100 before all were killed; rank 1 saves it now.
        let ranks = [held(&[old(100, 1, true)]), held(&[new(100, 1)])];
        assert_eq!(next_of(&ranks), Next::Drop(vec![(0, Name { session: SESSION - 1, attempt: 0, step: 100 })]));
        // What was complete when they were killed is encoded first.
        let ranks = [held(&[old(99, 1, true), new(98, 2)]), held(&[old(99, 1, true)])];
        assert_eq!(next_of(&ranks), Next::Encode(Name { session: SESSION - 1, attempt: 0, step: 99 }));
        let ranks = [held(&[old(99, 1, false), new(98, 2)]), held(&[old(99, 1, false)])];
        assert_eq!(next_of(&ranks), Next::Wait, "rank 1 still saves step 98");
        // Of more ranks than there are now.
        let of_three = Kept { world: 3, ..old(99, 1, true) };
        let of_three = [held(&[of_three]), held(&[of_three])];
        assert!(matches!(next_of(&of_three), Next::Drop(dropped) if dropped.len() == 2));
    }

    #[test]
    fn ranks_that_save_at_random_always_come_to_an_end() {
        // Each of three ranks saves a random part of ten steps, in two starts; two slots each, the agent in between.
        for seed in 0..2000u64 {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut random = |n: u64| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) % n
            };
            let mut held = vec![Held::default(); 3];
            let (mut generation, mut encoded) = (0, Vec::new());
            for session in 1..=2 {
                let mut todo: Vec<Vec<u64>> = (0..3).map(|_| (1..=10).filter(|_| random(4) > 0).chain([11]).collect()).collect();
                // The first start may be killed anywhere.
                let mut turns = if session == 1 { random(60) } else { u64::MAX };
                while turns > 0 {
                    turns -= 1;
                    for (held, todo) in held.iter_mut().zip(&mut todo) {
                        let free = held.kept.len() < 2 || held.waits().count() < 2;
                        if free && !todo.is_empty() && random(2) == 0 {
                            if held.kept.len() == 2 {
                                let at = held.kept.iter().position(|kept| kept.word.state != State::Full).unwrap();
                                held.kept.remove(at);
                            }
                            generation += 1;
                            held.kept.push(kept(session, todo.remove(0), generation, true, 3));
                        }
                    }
                    match next(&held, session) {
                        Next::Encode(name) => {
                            encoded.push(name);
                            for held in &mut held {
                                let of_name = held.kept.iter_mut().filter(|kept| Name::of(kept) == name && kept.word.state == State::Full);
                                for kept in of_name {
                                    kept.word.state = State::Released;
                                    held.encoded = kept.word.generation;
                                }
                            }
                        }
                        Next::Drop(all) => {
                            for (rank, name) in all {
                                let of_name = held[rank].kept.iter_mut().filter(|kept| Name::of(kept) == name);
                                of_name.for_each(|kept| kept.word.state = State::Released);
                            }
                        }
                        Next::Wait if todo.iter().all(Vec::is_empty) => break,
                        Next::Wait => {
                            let stuck = held.iter().zip(&todo).all(|(held, todo)| todo.is_empty() || held.waits().count() == 2);
                            assert!(!stuck, "seed {seed}: {held:?}, to do {todo:?}");
                        }
                    }
                }
            }
            assert!(encoded.is_sorted() && encoded.last() == Some(&Name { session: 2, attempt: 0, step: 11 }), "seed {seed}: {encoded:?}");
        }
    }
}
