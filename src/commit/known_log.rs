//! The log as a session knows it that begins while the store does not answer. Spec: `spec/log.md`, clause 8.6.
//!
//! The hosts of such a session know the log only as far as their memory has it. When the store answers again, it may have
//! more entries. If these are not the session's own past, another job has moved on in the meantime, and the session must
//! not write: it would hide the work of that job.
//!
//! This is pure logic without I/O, like [`Leadership`]. A writer asks before each attempt to create its `opened` entry, on
//! the state after *all* entries below it.

use serde::{Deserialize, Serialize};

use super::Leadership;
use crate::wire::Id;
use crate::{Error, ErrorKind, Result};

/// The log as a session knows it that begins while the store does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownLog {
    /// Id of the training run.
    pub run: Id,
    /// Number of the last known entry: the `after` of the session.
    pub sequence: u64,
    /// Leadership after that entry.
    pub leadership: Leadership,
    /// Sessions that this one continues.
    pub continued: Vec<ContinuedSession>,
}

/// A session whose steps the hosts had in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContinuedSession {
    /// Its id.
    pub session: Id,
    /// Its last known attempt.
    pub attempt: u64,
    /// Newest step of the attempt that memory had completely, or that the known log has.
    pub newest: Option<u64>,
}

impl KnownLog {
    /// Fails with `Fenced` if a store is of another training run.
    pub fn check_run(&self, run: Id) -> Result<()> {
        match run == self.run {
            true => Ok(()),
            false => Err(ended("the store is of another training run than the one that memory holds, and this session began from memory")),
        }
    }

    /// Fails with `Fenced` if a session that has no entry yet must not write to a log. `sequence`: number of the last entry.
    pub fn check_log(&self, sequence: u64, log: &Leadership) -> Result<()> {
        if sequence < self.sequence {
            return Err(ended("the store is an older copy of itself: it lacks entries of the log that memory has"));
        }
        match self.admits(log) {
            true => Ok(()),
            false => Err(ended(
                "another job has written to the store since this session began from memory, without the store; this session must not \
                 write, and ends",
            )),
        }
    }

    /// Whether a log has nothing that the session did not know when it began: no other writer has opened the log, and the
    /// sessions that this one continues have committed only steps up to those that memory had.
    fn admits(&self, log: &Leadership) -> bool {
        let is_known = |session: &ContinuedSession| {
            log.leading().is_some_and(|now| {
                now.leader.session == session.session && now.leader.attempt == session.attempt && now.newest <= session.newest
            })
        };
        *log == self.leadership || self.continued.iter().any(is_known)
    }
}

fn ended(why: &str) -> Error {
    Error::new(ErrorKind::Fenced, why).clause("log 8.6")
}

#[cfg(test)]
mod tests {
    use super::{ContinuedSession, KnownLog};
    use crate::commit::Leadership;
    use crate::wire::{Id, Leader};

    fn id(n: u8) -> Id {
        Id([n; 16])
    }

    fn leader(session: u8, attempt: u64, term: u64) -> Leader {
        Leader { session: id(session), after: u64::from(session), attempt, term, above: None }
    }

    /// A log that session 1 leads, with step 10.
    fn log() -> Leadership {
        let mut log = Leadership::default();
        log.on_opened(id(11), 2, Some(leader(1, 0, 1)));
        log.on_added(id(11), 3, 10);
        log
    }

    #[test]
    fn steps_that_memory_had_may_be_committed_meanwhile() {
        let continued = ContinuedSession { session: id(1), attempt: 0, newest: Some(12) };
        let known = KnownLog { run: id(0), sequence: 3, leadership: log(), continued: vec![continued] };
        let mut now = log();
        assert!(known.admits(&now));
        now.on_added(id(11), 4, 11);
        assert!(known.admits(&now));
        now.on_opened(id(12), 5, Some(leader(1, 0, 2)));
        now.on_added(id(12), 6, 12);
        assert!(known.admits(&now), "another host of the session before has committed what memory had");
        now.on_added(id(12), 7, 13);
        assert!(!known.admits(&now), "a step that this session does not have");
        assert!(!KnownLog { continued: Vec::new(), ..known }.admits(&now));
    }

    #[test]
    fn another_writer_or_attempt_is_refused() {
        let continued = ContinuedSession { session: id(1), attempt: 0, newest: Some(12) };
        let known = KnownLog { run: id(0), sequence: 3, leadership: log(), continued: vec![continued] };
        for opened in [Some(leader(2, 0, 1)), Some(leader(1, 1, 2)), None] {
            let mut now = log();
            now.on_opened(id(20), 4, opened);
            assert!(!known.admits(&now), "{opened:?}");
        }
        let mut now = log();
        now.on_added(id(20), 4, 11);
        assert!(!known.admits(&now), "another writer");
        // Nobody leads: an entry of a writer without a session.
        let mut ordinary = Leadership::default();
        ordinary.on_opened(id(20), 1, None);
        let known = KnownLog { leadership: ordinary.clone(), continued: Vec::new(), ..known };
        assert!(known.admits(&ordinary));
        ordinary.on_added(id(20), 4, 1);
        assert!(!known.admits(&ordinary));
    }
}
