//! Tests of single transitions of a host.

use tensorcask::session::Leadership;
use tensorcask::wire::{Id, Leader, SessionStep};

use super::{HostOptions, HostProtocol, waiting};
use crate::hosts::{Action, Event, LogView, Request, SurveyedStep};

const OURS: Id = Id([1; 16]);
const OTHER: Id = Id([2; 16]);
const HOST_0: Id = Id([10; 16]);
const HOST_1: Id = Id([11; 16]);

fn host(position: u32, after: Option<u64>) -> HostProtocol {
    HostProtocol::new(HostOptions { session: OURS, after, position, patience_ms: 100, previous_writer: None }, 0)
}

fn leader(session: Id, after: u64, term: u64) -> Leader {
    Leader { session, after, attempt: 0, term, above: None }
}

fn key(step: u64) -> SessionStep {
    SessionStep { attempt: 0, step }
}

/// A log of openings and steps, from entry 1.
fn view(entries: &[(Id, Result<u64, Option<Leader>>)]) -> LogView {
    let mut leadership = Leadership::default();
    let mut steps = Vec::new();
    for (sequence, (writer, change)) in (1..).zip(entries) {
        match change {
            Ok(step) => {
                leadership.on_added(*writer, sequence, *step);
                steps.push((sequence, *step));
            }
            Err(leader) => leadership.on_opened(*writer, sequence, *leader),
        }
    }
    LogView::from_steps(entries.len() as u64, &leadership, OURS, steps)
}

fn begun() -> LogView {
    view(&[(HOST_0, Err(Some(leader(OURS, 0, 1))))])
}

fn complete(step: u64) -> SurveyedStep {
    SurveyedStep { key: key(step), is_complete: true, is_hopeless: false, has_ours: true }
}

#[test]
fn a_host_that_rejoins_asks_for_its_uploaded_steps_until_it_knows_them() {
    let mut agent = host(1, None);
    assert_eq!(agent.apply(Event::Rejoin), [Action::ReadLog]);
    assert_eq!(agent.apply(Event::Failed(Request::ReadLog)), []);
    assert_eq!(agent.apply(Event::Tick { now_ms: 1 }), [Action::ReadLog]);
    assert_eq!(agent.apply(Event::LogRead(LogView::default())), [], "the session has not begun");
    assert_eq!(agent.apply(Event::Tick { now_ms: 2 }), [Action::ReadLog]);
    assert_eq!(agent.apply(Event::LogRead(begun())), [Action::Survey]);
    assert_eq!(agent.apply(Event::Failed(Request::Survey)), []);
    assert_eq!(agent.apply(Event::Tick { now_ms: 3 }), [Action::ReadLog]);
    assert_eq!(agent.apply(Event::LogRead(begun())), [Action::Survey]);
    let found = SurveyedStep { is_complete: false, ..complete(5) };
    assert_eq!(agent.apply(Event::Surveyed(vec![found])), []);
    assert_eq!(waiting(&agent).collect::<Vec<_>>(), [key(5)]);
    let committed = view(&[(HOST_0, Err(Some(leader(OURS, 0, 1)))), (HOST_0, Ok(5))]);
    assert_eq!(agent.apply(Event::LogRead(committed)), [Action::Durable(key(5))]);
    assert_eq!(agent.apply(Event::Tick { now_ms: 4 }), [], "all is known");
}

#[test]
fn an_older_view_neither_ends_the_session_nor_takes_the_leadership_back() {
    let mut agent = host(0, Some(1));
    let first = leader(OURS, 1, 1);
    let ordinary = (OTHER, Err(None));
    assert_eq!(agent.apply(Event::Begin { known: 1 }), [Action::Open { leader: first }]);
    let opened = view(&[ordinary, (HOST_0, Err(Some(first)))]);
    assert_eq!(agent.apply(Event::Opened { leader: first, view: opened.clone() }), []);
    assert_eq!(agent.apply(Event::LogRead(view(&[ordinary]))), [], "read before the opening");
    assert!(agent.leads() && !agent.is_ended());
    let taken = view(&[ordinary, (HOST_0, Err(Some(first))), (HOST_1, Err(Some(leader(OURS, 1, 2))))]);
    agent.apply(Event::LogRead(taken));
    assert!(!agent.leads());
    agent.apply(Event::Opened { leader: first, view: opened });
    assert!(!agent.leads(), "another host has taken over since");
}

#[test]
fn a_host_of_a_session_that_can_no_longer_begin_stops() {
    for other in [Some(leader(OTHER, 3, 1)), None] {
        let pin = (OTHER, Err(None));
        let taken = view(&[pin, pin, pin, (OTHER, Err(other))]);
        let mut follower = host(1, Some(2));
        follower.apply(Event::Copied(key(1)));
        follower.apply(Event::Uploaded(key(1)));
        assert_eq!(follower.apply(Event::LogRead(taken.clone())), [Action::Stop], "{other:?}");
        assert!(follower.is_ended());
        let mut beginner = host(0, None);
        beginner.apply(Event::Begin { known: 2 });
        assert_eq!(beginner.apply(Event::Refused(taken)), [Action::Stop]);
    }
    // The store of an earlier start: this session may still begin.
    let earlier = view(&[(OTHER, Err(Some(leader(OTHER, 0, 1))))]);
    assert_eq!(host(1, Some(1)).apply(Event::LogRead(earlier)), []);
}

#[test]
fn a_leader_gives_up_a_step_whose_receipts_make_no_snapshot() {
    let mut agent = host(0, Some(0));
    let first = leader(OURS, 0, 1);
    agent.apply(Event::Begin { known: 0 });
    agent.apply(Event::Opened { leader: first, view: begun() });
    agent.apply(Event::Copied(key(5)));
    assert_eq!(agent.apply(Event::Uploaded(key(5))), [Action::Survey]);
    assert_eq!(agent.apply(Event::Surveyed(vec![complete(5)])), [Action::Commit { leader: first, key: key(5) }]);
    let above = Leader { above: Some(5), ..leader(OURS, 0, 2) };
    assert_eq!(agent.apply(Event::Impossible(key(5))), [Action::Open { leader: above }]);
    // It tries again after a failure.
    agent.apply(Event::Failed(Request::Append));
    assert_eq!(agent.apply(Event::Tick { now_ms: 1 }), [Action::Survey, Action::ReadLog]);
    assert_eq!(agent.apply(Event::Surveyed(vec![complete(5)])), [Action::Open { leader: above }]);
    let given_up = view(&[(HOST_0, Err(Some(first))), (HOST_0, Err(Some(above)))]);
    assert_eq!(agent.apply(Event::Opened { leader: above, view: given_up.clone() }), [Action::GiveUp(key(5))]);
    assert!(agent.leads());
    let mut follower = host(1, Some(0));
    follower.apply(Event::Copied(key(5)));
    follower.apply(Event::Uploaded(key(5)));
    assert_eq!(follower.apply(Event::LogRead(given_up)), [Action::GiveUp(key(5))]);
}

#[test]
fn a_follower_takes_over_after_its_wait_in_order_of_the_hosts() {
    let mut follower = HostProtocol::new(
        HostOptions { session: OURS, after: Some(0), position: 1, patience_ms: 100, previous_writer: None },
        1_700_000_000_000,
    );
    let tick = |ms: u64| Event::Tick { now_ms: 1_700_000_000_000 + ms };
    follower.apply(Event::LogRead(begun()));
    follower.apply(Event::Copied(key(1)));
    follower.apply(Event::Uploaded(key(1)));
    assert_eq!(follower.apply(tick(99)), [Action::ReadLog]);
    assert_eq!(follower.apply(tick(100)), [Action::Survey], "the log is still being read");
    assert_eq!(follower.apply(Event::Surveyed(vec![complete(1)])), []);
    assert_eq!(follower.apply(tick(200)), [Action::Survey]);
    let next = leader(OURS, 0, 2);
    assert_eq!(follower.apply(Event::Surveyed(vec![complete(1)])), [Action::Open { leader: next }]);
}

#[test]
fn a_dropped_step_makes_way_for_the_next() {
    let mut agent = host(1, None);
    assert_eq!(agent.apply(Event::Copied(key(1))), [Action::FixParent(key(1))]);
    assert_eq!(agent.apply(Event::Copied(key(2))), []);
    assert_eq!(agent.apply(Event::ParentFixed { key: key(1), parent: None }), [Action::Upload { key: key(1), parent: None }]);
    assert_eq!(agent.apply(Event::Dropped(key(1))), [Action::FixParent(key(2))]);
}

#[test]
fn another_host_begins_the_session_if_the_first_does_not() {
    let mut agent = host(2, None);
    assert_eq!(agent.apply(Event::Begin { known: 3 }), []);
    assert_eq!(agent.apply(Event::Tick { now_ms: 500 }), [], "it has nothing to save");
    assert_eq!(agent.apply(Event::Copied(key(7))), [Action::FixParent(key(7))]);
    assert_eq!(agent.apply(Event::Tick { now_ms: 699 }), []);
    assert_eq!(agent.apply(Event::Tick { now_ms: 700 }), [Action::Open { leader: leader(OURS, 3, 1) }]);
    // The first host was faster.
    let log = view(&[(HOST_0, Ok(1)), (HOST_0, Ok(2)), (HOST_0, Ok(3)), (HOST_1, Err(Some(leader(OURS, 3, 1))))]);
    assert_eq!(agent.apply(Event::Refused(log)), []);
    assert!(!agent.leads() && !agent.is_ended());
    assert_eq!(agent.apply(Event::Tick { now_ms: 2000 }), []);
}

#[test]
fn a_step_that_a_rank_will_never_save_is_given_up_after_all_that_may_still_be_saved() {
    let mut agent = host(0, Some(0));
    agent.apply(Event::Begin { known: 0 });
    agent.apply(Event::Opened { leader: leader(OURS, 0, 1), view: begun() });
    for step in [5, 6] {
        agent.apply(Event::Copied(key(step)));
        agent.apply(Event::ParentFixed { key: key(step), parent: None });
        agent.apply(Event::Uploaded(key(step)));
    }
    let hopeless = SurveyedStep { is_complete: false, is_hopeless: true, ..complete(6) };
    let pending = SurveyedStep { is_complete: false, ..complete(5) };
    assert_eq!(agent.apply(Event::Surveyed(vec![pending, hopeless])), []);
    assert!(agent.apply(Event::Tick { now_ms: 1 }).contains(&Action::Survey));
    let above = Leader { term: 2, above: Some(6), ..leader(OURS, 0, 1) };
    let also_hopeless = SurveyedStep { is_hopeless: true, ..pending };
    let both = agent.apply(Event::Surveyed(vec![also_hopeless, hopeless]));
    assert_eq!(both, [Action::Open { leader: above }], "by one entry");
    let given_up = view(&[(HOST_0, Err(Some(leader(OURS, 0, 1)))), (HOST_0, Err(Some(above)))]);
    assert_eq!(agent.apply(Event::Opened { leader: above, view: given_up }), [Action::GiveUp(key(5)), Action::GiveUp(key(6))]);
}
