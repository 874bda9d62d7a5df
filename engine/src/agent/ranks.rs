//! Which step of several ranks is encoded next, and which can never be complete. No I/O.

use std::collections::BTreeSet;

/// A whole state in a slot of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub step: u64,
    pub generation: u64,
    /// Whether it still waits to be encoded.
    pub waits: bool,
}

/// What to do with what all ranks hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// All ranks have this step.
    Encode(u64),
    /// These (rank, step) will never be complete: their ranks have gone on, or another has without them.
    Drop(Vec<(usize, u64)>),
    /// Some rank has not saved yet.
    Wait,
}

/// Decides by what each rank holds. A step counts if all ranks wait with it; the oldest by rank 0 comes first.
pub(super) fn next(ranks: &[Vec<Held>]) -> Next {
    let waiting = |rank: &[Held], step: u64| rank.iter().find(|held| held.waits && held.step == step).copied();
    let Some(first) = ranks.first() else { return Next::Wait };
    let complete = first.iter().filter(|held| held.waits && ranks.iter().all(|rank| waiting(rank, held.step).is_some()));
    if let Some(chosen) = complete.min_by_key(|held| held.generation) {
        let mut behind = Vec::new();
        for (number, rank) in ranks.iter().enumerate() {
            let Some(ours) = waiting(rank, chosen.step) else { continue };
            behind.extend(rank.iter().filter(|held| held.waits && held.generation < ours.generation).map(|held| (number, held.step)));
        }
        return if behind.is_empty() { Next::Encode(chosen.step) } else { Next::Drop(behind) };
    }
    let mut hopeless = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        let steps: BTreeSet<u64> = rank.iter().filter(|held| held.waits).map(|held| held.step).collect();
        for step in steps {
            let gone_on = |other: &Vec<Held>| {
                let newest = other.iter().max_by_key(|held| held.generation);
                newest.is_some_and(|newest| newest.step > step) && waiting(other, step).is_none()
            };
            if ranks.iter().any(gone_on) {
                hopeless.push((number, step));
            }
        }
    }
    if hopeless.is_empty() { Next::Wait } else { Next::Drop(hopeless) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(steps: &[(u64, bool)]) -> Vec<Held> {
        steps.iter().enumerate().map(|(at, &(step, waits))| Held { step, generation: at as u64 + 1, waits }).collect()
    }

    #[test]
    fn a_step_is_encoded_once_all_ranks_have_it() {
        assert_eq!(next(&[rank(&[(10, true)]), rank(&[])]), Next::Wait);
        assert_eq!(next(&[rank(&[(10, true)]), rank(&[(10, true)])]), Next::Encode(10));
        assert_eq!(next(&[rank(&[(10, true), (11, true)]), rank(&[(10, true), (11, true)])]), Next::Encode(10));
        assert_eq!(next(&[rank(&[(10, false), (11, true)]), rank(&[(10, false)])]), Next::Wait);
    }

    #[test]
    fn what_a_rank_skipped_is_dropped_by_the_others() {
        assert_eq!(next(&[rank(&[(10, true), (11, true)]), rank(&[(11, true)])]), Next::Drop(vec![(0, 10)]));
        // No step in common, and nobody may wait for ever.
        assert_eq!(next(&[rank(&[(10, true), (11, true)]), rank(&[(12, true), (13, true)])]), Next::Drop(vec![(0, 10), (0, 11)]));
        // After a rollback, what was newer and never complete is behind.
        assert_eq!(next(&[rank(&[(100, true), (90, true)]), rank(&[(90, true)])]), Next::Drop(vec![(0, 100)]));
    }

    #[test]
    fn ranks_that_save_at_random_always_come_to_an_end() {
        // Each of three ranks saves a random part of ten steps; two slots each, the agent in between.
        for seed in 0..2000u64 {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut random = |n: u64| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) % n
            };
            let mut todo: Vec<Vec<u64>> = (0..3).map(|_| (1..=10).filter(|_| random(4) > 0).chain([11]).collect()).collect();
            let mut held: Vec<Vec<Held>> = vec![Vec::new(); 3];
            let mut generation = 0;
            let mut encoded = Vec::new();
            loop {
                for rank in 0..3 {
                    let free = held[rank].len() < 2 || held[rank].iter().any(|held| !held.waits);
                    if free && !todo[rank].is_empty() && random(2) == 0 {
                        if held[rank].len() == 2 {
                            let at = held[rank].iter().position(|held| !held.waits).unwrap();
                            held[rank].remove(at);
                        }
                        generation += 1;
                        let step = todo[rank].remove(0);
                        held[rank].push(Held { step, generation, waits: true });
                    }
                }
                match next(&held) {
                    Next::Encode(step) => {
                        encoded.push(step);
                        held.iter_mut().flatten().filter(|held| held.step == step).for_each(|held| held.waits = false);
                    }
                    Next::Drop(all) => {
                        for (rank, step) in all {
                            held[rank].iter_mut().filter(|held| held.step == step).for_each(|held| held.waits = false);
                        }
                    }
                    Next::Wait if todo.iter().all(Vec::is_empty) => break,
                    Next::Wait => {
                        let stuck = held
                            .iter()
                            .zip(&todo)
                            .all(|(held, todo)| todo.is_empty() || (held.len() == 2 && held.iter().all(|held| held.waits)));
                        assert!(!stuck, "seed {seed}: {held:?}, to do {todo:?}");
                    }
                }
            }
            assert!(encoded.is_sorted() && encoded.last() == Some(&11), "seed {seed}: {encoded:?}");
        }
    }
}
