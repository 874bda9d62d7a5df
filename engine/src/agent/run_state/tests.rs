//! Single sequences of events.

use std::collections::{BTreeMap, BTreeSet};

use tensorcask::wire::Id;

use super::super::run_event::{Action, ArenaSummary, Attachment, EncodedSave, Event, LostSnapshot, LostSnapshots, Upload};
use super::super::save_log::{Encoding, UploadTimes};
use super::RunState;
use crate::ipc::messages::AttachMode;
use crate::run::options::Encode;

fn attach(state: &mut RunState, rank: u32, mode: AttachMode) {
    let arena = Some(ArenaSummary { session: state.session, ..ArenaSummary::default() });
    state.apply(Event::Attached(Attachment { rank, pid: rank, mode, session: 0, arena, latest: BTreeMap::new() }));
}

/// A save of one rank is encoded.
fn encoded(generation: u64, epoch: u64) -> Event {
    let encoding = Encoding { encode_ms: 0.0, stored_bytes: 1, kind: "base".into() };
    Event::Encoded(EncodedSave { step: 10 * generation, generations: vec![generation], epoch, sequence: generation, encoding })
}

#[test]
fn results_of_earlier_orders_do_not_count_after_a_trainer_has_attached() {
    let mut state = RunState::new(1, Encode::Agent);
    let earlier = state.tiers[0].orders;
    attach(&mut state, 0, AttachMode::TakeOver);
    assert!(state.apply(Event::Fenced { orders: earlier, why: "fenced".into() }).is_empty());
    state.apply(Event::TierTakenOver { tier: 0, orders: earlier, latest: None });
    let orders = state.tiers[0].orders;
    assert!(state.stopped.is_none() && orders.take_over, "the order of the trainer stands");
    state.apply(Event::TierTakenOver { tier: 0, orders, latest: None });
    assert!(!state.tiers[0].orders.take_over);
    state.apply(Event::Fenced { orders, why: "fenced".into() });
    assert_eq!(state.stopped.as_deref(), Some("fenced"));
}

/// All orders of these ranks.
fn permutations(ranks: &[u32]) -> Vec<Vec<u32>> {
    if ranks.is_empty() {
        return vec![Vec::new()];
    }
    let with_first = |at: usize| {
        let rest: Vec<u32> = ranks.iter().copied().filter(|rank| *rank != ranks[at]).collect();
        permutations(&rest).into_iter().map(move |order| [vec![ranks[at]], order].concat())
    };
    (0..ranks.len()).flat_map(with_first).collect()
}

#[test]
fn ranks_share_a_session_after_any_order_of_starts() {
    for order in permutations(&[0, 1, 2]) {
        let mut state = RunState::new(1, Encode::Agent);
        order.iter().for_each(|rank| attach(&mut state, *rank, AttachMode::TakeOver));
        let sessions = |state: &RunState| state.ranks.values().map(|rank| rank.session).collect::<Vec<_>>();
        assert_eq!(sessions(&state), [1, 1, 1], "{order:?}");
        // All trainers die and start again, in any order.
        for restart in permutations(&[0, 1, 2]) {
            let mut state = state.clone();
            for rank in 0..3 {
                state.apply(Event::Detached { rank, attachment: 1 });
            }
            restart.iter().for_each(|rank| attach(&mut state, *rank, AttachMode::TakeOver));
            assert_eq!(sessions(&state), [2, 2, 2], "{order:?}, then {restart:?}");
            // One trainer starts again alone. The others, which are still connected, move to its session.
            for rank in 0..3 {
                let mut state = state.clone();
                state.apply(Event::Detached { rank, attachment: 2 });
                attach(&mut state, rank, AttachMode::TakeOver);
                assert_eq!(sessions(&state), [3, 3, 3], "rank {rank} alone");
            }
        }
    }
}

#[test]
fn the_end_of_an_old_connection_does_not_detach_a_new_trainer() {
    let mut state = RunState::new(1, Encode::Agent);
    attach(&mut state, 0, AttachMode::TakeOver);
    attach(&mut state, 0, AttachMode::TakeOver);
    state.apply(Event::Detached { rank: 0, attachment: 1 });
    assert!(state.is_attached());
    state.apply(Event::Detached { rank: 0, attachment: 2 });
    assert!(!state.is_attached());
}

#[test]
fn the_last_commit_is_known_if_an_earlier_upload_took_the_snapshot_along() {
    let mut state = RunState::new(1, Encode::Agent);
    attach(&mut state, 0, AttachMode::TakeOver);
    (1..=2).for_each(|generation| _ = state.apply(encoded(generation, 0)));
    // The first upload read the log in memory before it had the second snapshot, and copied both.
    for (generation, copied) in [(1, 2), (2, 0)] {
        state.apply(Event::Uploaded(Upload {
            tier: 0,
            encoded: BTreeMap::from([(0, generation)]),
            epoch: 0,
            sources: BTreeSet::from([0]),
            sequence: generation,
            step: Some(10 * generation),
            pending_before: 2,
            copied,
            times: UploadTimes { upload_ms: 0.0, ahead_bytes: 0, time_ms: 0 },
        }));
        assert_eq!(state.saves.last_commit.map(|commit| commit.step), Some(10 * generation));
        assert_eq!(state.ranks[&0].durable, generation);
    }
}

/// A lost connection does not mean that the trainer has ended, even if it once looked so.
#[test]
fn a_rank_of_many_hosts_that_attaches_again_has_not_ended() {
    let mut state = RunState::new(1, Encode::Agent).of_host(0..1);
    attach(&mut state, 0, AttachMode::TakeOver);
    state.apply(Event::Detached { rank: 0, attachment: 1 });
    assert!(state.apply(Event::Left { rank: 0, attachment: 1 }).contains(&Action::NoteEnd { rank: 0, has_ended: true }));
    assert!(super::owes_end(&state));
    let arena = Some(ArenaSummary::default());
    let again = Attachment { rank: 0, pid: 0, mode: AttachMode::Continue, session: 0, arena, latest: BTreeMap::new() };
    assert!(state.apply(Event::Attached(again.clone())).contains(&Action::NoteEnd { rank: 0, has_ended: false }));
    assert!(!super::owes_end(&state));
    state.apply(Event::Left { rank: 0, attachment: 1 });
    assert!(!super::owes_end(&state), "the news is of the earlier connection");
    // A new agent reads in the notes that the rank has ended, and the trainer comes back.
    state.apply(Event::SavesEnded { rank: 0 });
    assert!(super::owes_end(&state));
    state.apply(Event::Attached(again));
    assert!(!super::owes_end(&state));
}

#[test]
fn saves_in_memory_that_is_cleared_fail() {
    let mut state = RunState::new(1, Encode::Agent);
    attach(&mut state, 0, AttachMode::TakeOver);
    state.apply(encoded(1, 0));
    state.apply(Event::MemoryCleared);
    let progress = state.progress(0, 0);
    assert!(progress.has_failed(1) && state.tiers[0].pending == 0, "{progress:?}");
}

#[test]
fn saves_in_damaged_memory_fail_and_later_ones_count() {
    let mut state = RunState::new(1, Encode::Agent);
    attach(&mut state, 0, AttachMode::TakeOver);
    state.apply(encoded(1, 0));
    state.apply(encoded(2, 0));
    // Saves that the agent had encoded and the log in memory had not shown yet are lost, too.
    state.apply(encoded(3, 0));
    let snapshots = vec![LostSnapshot { id: Id([2; 16]), sequence: 2, step: 20 }];
    let lost = Some(LostSnapshots { snapshots, read: 2 });
    state.apply(Event::MemoryUnusable { epoch: 0, lost, why: "damage".into() });
    // This save was committed while the damage was found.
    state.apply(encoded(4, 0));
    state.apply(encoded(5, 1));
    let progress = state.progress(0, 0);
    assert_eq!(progress.failures.iter().map(|failure| failure.generation).collect::<Vec<_>>(), [2, 3, 4]);
    assert_eq!((progress.unusable_epoch, state.tiers[0].pending), (Some(0), 1));
    assert_eq!(progress.failures[0].message, "damage");
}
