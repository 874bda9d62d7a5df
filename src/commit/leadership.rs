//! Leadership of many hosts: who commits for a session, by the log alone. Spec: `spec/log.md`, clause 8.
//!
//! The hosts of a job upload their ranks' parts of a step. One of them, the *leader*, commits the step. A leader opens
//! the log with its session, the attempt that it commits, and a term. Another host of the session takes over by a higher
//! term.
//!
//! This is pure logic without I/O. A writer asks [`may_open`](Leadership::may_open) and [`may_add`](Leadership::may_add)
//! about the state after *all* entries below the number that it is about to create. Put if absent makes this safe: if
//! another entry takes the number, the writer reads that entry and asks again. Clocks only decide which host tries.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::wire::{Id, Leader};

/// The leader at the end of a log, if the last `opened` or `added` entry is of one.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leadership {
    leading: Option<LeaderState>,
    /// Number of the last `opened` or `added` entry, if it is of a writer without a session.
    ordinary: Option<u64>,
}

/// A leader, and how far its attempt has been committed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaderState {
    /// Session, attempt and term.
    pub leader: Leader,
    /// Writer id of the leader.
    pub writer: Id,
    /// The attempts of this session so far, oldest first. The last is the leader's.
    pub attempts: Vec<AttemptStart>,
    /// Newest step of the attempt that is committed or given up; `None` if there is none.
    pub newest: Option<u64>,
}

/// Beginning of an attempt in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttemptStart {
    /// Number of the attempt.
    pub attempt: u64,
    /// Number of its first `opened` entry. The snapshots from there to the next attempt are its snapshots.
    pub since: u64,
}

/// Why a host may not open the log or add a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaderRefusal {
    /// The session does not lead the log, or no longer: it ends.
    Ended,
    /// Another host leads the session. This host may go on as a follower.
    Superseded {
        /// Term of the other leader.
        term: u64,
    },
    /// The attempt has this step, or a newer one. An older step is given up.
    Passed {
        /// Newest step of the attempt that is committed or given up.
        newest: u64,
    },
}

impl fmt::Display for LeaderRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => write!(f, "another job, or another start of this job, has taken the store over"),
            Self::Superseded { term } => write!(f, "another host leads the session, with term {term}"),
            Self::Passed { newest } => write!(f, "step {newest} of this attempt is committed or given up already"),
        }
    }
}

impl Leadership {
    /// Rebuilds the leadership that a catalog describes. `last`: number of the last `opened` or `added` entry.
    pub(crate) fn from_catalog(leading: Option<LeaderState>, last: Option<u64>) -> Self {
        let ordinary = last.filter(|_| leading.is_none());
        Self { leading, ordinary }
    }

    /// The current leader.
    pub fn leading(&self) -> Option<&LeaderState> {
        self.leading.as_ref()
    }

    /// The current leader, if it leads this session.
    pub fn of(&self, session: Id) -> Option<&LeaderState> {
        self.leading.as_ref().filter(|leading| leading.leader.session == session)
    }

    /// Follows an `opened` entry. Only readers of a log, and simulations, do so.
    #[doc(hidden)]
    pub fn on_opened(&mut self, writer: Id, sequence: u64, leader: Option<Leader>) {
        let Some(leader) = leader else {
            *self = Self { leading: None, ordinary: Some(sequence) };
            return;
        };
        let old = self.leading.take().filter(|old| old.leader.session == leader.session);
        let mut leading = match old {
            Some(old) => LeaderState { leader, writer, newest: old.newest.filter(|_| old.leader.attempt == leader.attempt), ..old },
            None => LeaderState { leader, writer, attempts: Vec::new(), newest: None },
        };
        if leading.attempts.last().is_none_or(|last| last.attempt != leader.attempt) {
            leading.attempts.push(AttemptStart { attempt: leader.attempt, since: sequence });
        }
        leading.newest = leading.newest.max(leader.above);
        *self = Self { leading: Some(leading), ordinary: None };
    }

    /// Follows an `added` entry. Only readers of a log, and simulations, do so. A writer other than the leader ends the session.
    #[doc(hidden)]
    pub fn on_added(&mut self, writer: Id, sequence: u64, step: u64) {
        match &mut self.leading {
            Some(leading) if leading.writer == writer => leading.newest = leading.newest.max(Some(step)),
            _ => *self = Self { leading: None, ordinary: Some(sequence) },
        }
    }

    /// The attempt of this session that committed the snapshot of a log entry; `None` if the session did not.
    pub fn attempt_of(&self, session: Id, sequence: u64) -> Option<u64> {
        let attempts = &self.of(session)?.attempts;
        attempts.iter().rev().find(|start| start.since < sequence).map(|start| start.attempt)
    }

    /// Whether a host may open the log as this leader.
    ///
    /// Term 1 begins a session, and ends the session or the writer before it. It must have started later: a host that was
    /// cut off must not end the session of a later start. A later term takes over from the leader of the same session,
    /// which must still lead the log.
    pub fn may_open(&self, next: Leader) -> Result<(), LeaderRefusal> {
        match (&self.leading, next.term) {
            (Some(now), _) if now.leader.session == next.session => {
                let Leader { attempt, term, after, .. } = now.leader;
                if after != next.after {
                    // Another `after` would let the session outrank a later start.
                    return Err(LeaderRefusal::Ended);
                }
                if term >= next.term || attempt > next.attempt { Err(LeaderRefusal::Superseded { term }) } else { Ok(()) }
            }
            (Some(other), 1) if other.leader.after < next.after => Ok(()),
            (None, 1) if self.ordinary.is_none_or(|sequence| sequence <= next.after) => Ok(()),
            _ => Err(LeaderRefusal::Ended),
        }
    }

    /// Whether this writer may add a step as the leader that it opened the log as.
    pub fn may_add(&self, writer: Id, leader: Leader, step: u64) -> Result<(), LeaderRefusal> {
        let leading = self.of(leader.session).ok_or(LeaderRefusal::Ended)?;
        if leading.writer != writer || leading.leader != leader {
            return Err(LeaderRefusal::Superseded { term: leading.leader.term });
        }
        match leading.newest {
            Some(newest) if newest >= step => Err(LeaderRefusal::Passed { newest }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LeaderRefusal, Leadership};
    use crate::wire::{Id, Leader};

    fn id(n: u8) -> Id {
        Id::from_hex(&format!("{n:032x}")).unwrap()
    }

    /// A leader of a session that began after ten times its number of entries.
    fn leader(session: u8, attempt: u64, term: u64) -> Leader {
        Leader { session: id(session), after: 10 * u64::from(session), attempt, term, above: None }
    }

    #[test]
    fn a_higher_term_takes_over_and_another_session_ends_it() {
        let mut log = Leadership::default();
        assert_eq!(log.may_open(leader(1, 0, 2)), Err(LeaderRefusal::Ended), "nobody has begun the session");
        assert_eq!(log.may_open(leader(1, 0, 1)), Ok(()));
        log.on_opened(id(11), 1, Some(leader(1, 0, 1)));
        assert_eq!(log.may_open(leader(1, 0, 1)), Err(LeaderRefusal::Superseded { term: 1 }));
        assert_eq!(log.may_add(id(11), leader(1, 0, 1), 10), Ok(()));
        log.on_added(id(11), 2, 10);
        assert_eq!(log.may_add(id(11), leader(1, 0, 1), 10), Err(LeaderRefusal::Passed { newest: 10 }));
        log.on_opened(id(12), 3, Some(leader(1, 0, 2)));
        assert_eq!(log.may_add(id(11), leader(1, 0, 1), 11), Err(LeaderRefusal::Superseded { term: 2 }));
        assert_eq!(log.may_add(id(12), leader(1, 0, 2), 10), Err(LeaderRefusal::Passed { newest: 10 }), "the predecessor committed it");
        assert_eq!(log.attempt_of(id(1), 2), Some(0));
        assert_eq!(log.may_open(leader(0, 0, 1)), Err(LeaderRefusal::Ended), "started before session 1");
        assert_eq!(log.may_open(leader(2, 0, 1)), Ok(()));
        log.on_opened(id(13), 4, Some(leader(2, 0, 1)));
        for refused in [log.may_open(leader(1, 0, 3)), log.may_add(id(12), leader(1, 0, 2), 11)] {
            assert_eq!(refused, Err(LeaderRefusal::Ended));
        }
    }

    #[test]
    fn a_return_to_an_older_step_needs_an_opening() {
        let mut log = Leadership::default();
        log.on_opened(id(11), 1, Some(leader(1, 0, 1)));
        log.on_added(id(11), 2, 100);
        assert!(log.may_add(id(11), leader(1, 0, 1), 90).is_err());
        assert!(log.may_add(id(11), leader(1, 1, 1), 90).is_err(), "not opened for that attempt");
        assert_eq!(log.may_open(leader(1, 1, 2)), Ok(()));
        log.on_opened(id(11), 3, Some(leader(1, 1, 2)));
        assert_eq!(log.may_add(id(11), leader(1, 1, 2), 90), Ok(()));
        assert!(log.may_open(leader(1, 0, 3)).is_err(), "the job has left attempt 0");
        assert_eq!([1, 2, 3, 4].map(|sequence| log.attempt_of(id(1), sequence)), [None, Some(0), Some(0), Some(1)]);
    }

    #[test]
    fn all_leaders_of_a_session_name_one_beginning() {
        let mut log = Leadership::default();
        log.on_opened(id(11), 1, Some(leader(1, 0, 1)));
        assert_eq!(log.may_open(Leader { after: 11, ..leader(1, 0, 2) }), Err(LeaderRefusal::Ended));
        assert_eq!(log.may_open(leader(1, 0, 2)), Ok(()));
        assert_eq!(log.may_open(Leader { session: id(2), ..leader(1, 0, 1) }), Err(LeaderRefusal::Ended), "the first to open wins");
    }

    #[test]
    fn a_leader_gives_steps_up_in_its_opening() {
        let mut log = Leadership::default();
        log.on_opened(id(11), 1, Some(leader(1, 0, 1)));
        log.on_added(id(11), 2, 10);
        let above = Leader { above: Some(11), ..leader(1, 0, 2) };
        log.on_opened(id(11), 3, Some(above));
        assert_eq!(log.may_add(id(11), above, 11), Err(LeaderRefusal::Passed { newest: 11 }));
        assert_eq!(log.may_add(id(11), above, 12), Ok(()));
        log.on_opened(id(12), 4, Some(leader(1, 0, 3)));
        assert_eq!(log.may_add(id(12), leader(1, 0, 3), 11), Err(LeaderRefusal::Passed { newest: 11 }), "it stays given up");
        log.on_opened(id(12), 5, Some(leader(1, 1, 4)));
        assert_eq!(log.may_add(id(12), leader(1, 1, 4), 11), Ok(()), "the next attempt saves it again");
    }

    #[test]
    fn a_writer_without_a_session_ends_it() {
        for added in [false, true] {
            let mut log = Leadership::default();
            log.on_opened(id(11), 1, Some(leader(1, 0, 1)));
            match added {
                true => log.on_added(id(20), 2, 5),
                false => log.on_opened(id(20), 2, None),
            }
            assert_eq!(log.leading(), None);
            assert_eq!(log.may_open(leader(1, 0, 2)), Err(LeaderRefusal::Ended));
            assert_eq!(log.may_open(leader(0, 0, 1)), Err(LeaderRefusal::Ended), "started before that writer");
            assert_eq!(log.may_open(leader(2, 0, 1)), Ok(()));
        }
    }
}
