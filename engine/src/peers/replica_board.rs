//! State of the copies of other hosts: who answers, what is copied, and what is missing. Pure but for the clock, which the
//! caller reads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::connection_waits::ConnectionWaits;
use crate::run::status::ReplicaStatus;

/// State of the observed hosts of a run.
#[derive(Debug, Default)]
pub(crate) struct ReplicaBoard {
    hosts: BTreeMap<u32, Observed>,
    /// Current problem of the server.
    pub server_problem: Option<String>,
    /// Connections of other hosts that wait for a place at the server.
    pub waits: Option<Arc<ConnectionWaits>>,
    /// Why steps of this host wait for their copies on other hosts.
    pub copies_problem: Option<String>,
}

#[derive(Debug)]
struct Observed {
    /// Last answer, or the beginning of the observation.
    answered: Instant,
    /// Time since which the copy lacks a step.
    behind_since: Option<Instant>,
    status: ReplicaStatus,
}

/// Result of a pull.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pulled {
    pub last_step: Option<u64>,
    pub source_step: Option<u64>,
    pub pending: u64,
    pub bytes: u64,
    pub problem: Option<String>,
}

impl ReplicaBoard {
    pub(crate) fn observe(&mut self, host: u32, address: &str, now: Instant) {
        let status = ReplicaStatus { host, address: address.to_owned(), ..ReplicaStatus::default() };
        self.hosts.insert(host, Observed { answered: now, behind_since: None, status });
    }

    /// Notes an answer of a host that is not copied.
    pub(crate) fn on_answer(&mut self, host: u32, now: Instant) {
        if let Some(observed) = self.hosts.get_mut(&host) {
            observed.answered = now;
            (observed.status.is_held, observed.status.problem) = (false, None);
            (observed.status.pending, observed.behind_since) = (0, None);
        }
    }

    /// Notes that a host answers.
    pub(crate) fn note_alive(&mut self, host: u32, now: Instant) {
        if let Some(observed) = self.hosts.get_mut(&host) {
            observed.answered = now;
        }
    }

    /// Notes the result of a pull.
    pub(crate) fn on_pulled(&mut self, host: u32, pulled: Pulled, now: Instant) {
        let Some(observed) = self.hosts.get_mut(&host) else { return };
        let Pulled { last_step, source_step, pending, bytes, problem } = pulled;
        observed.answered = now;
        observed.behind_since = (pending > 0).then(|| observed.behind_since.unwrap_or(now));
        let ReplicaStatus { host, address, .. } = std::mem::take(&mut observed.status);
        observed.status =
            ReplicaStatus { host, address, is_held: true, last_step, source_step, pending, bytes, problem, ..ReplicaStatus::default() };
    }

    /// Notes that a host did not answer.
    pub(crate) fn on_silence(&mut self, host: u32, problem: String) {
        if let Some(observed) = self.hosts.get_mut(&host) {
            observed.status.problem = Some(problem);
        }
    }

    /// Notes that a request to a host still waits for its answer. Returns the problem, if the host has been silent for long and
    /// that is new.
    pub(crate) fn on_wait(&mut self, host: u32, now: Instant) -> Option<String> {
        let observed = self.hosts.get_mut(&host).filter(|observed| observed.status.problem.is_none())?;
        let silent = now.saturating_duration_since(observed.answered);
        if silent < LONG_WAIT {
            return None;
        }
        let since = SystemTime::now().checked_sub(silent).unwrap_or(SystemTime::UNIX_EPOCH);
        let problem = format!("{} does not answer since {}; waiting for it", observed.status.address, httpdate::fmt_http_date(since));
        observed.status.problem = Some(problem.clone());
        Some(problem)
    }

    /// Problem of this host with its peers, other than that one of them is silent.
    pub(crate) fn problem(&self, now: Instant) -> Option<String> {
        let waits = || self.waits.as_ref().and_then(|waits| waits.problem(now));
        self.server_problem.clone().or_else(waits).or_else(|| self.copies_problem.clone())
    }

    /// Observed hosts that have been silent for so long that others take their place as holders.
    pub(crate) fn gone(&self, now: Instant) -> BTreeSet<u32> {
        self.silent_for(GONE, now)
    }

    /// Observed hosts that have not answered for this time.
    fn silent_for(&self, time: Duration, now: Instant) -> BTreeSet<u32> {
        let is_silent = |observed: &Observed| now.saturating_duration_since(observed.answered) >= time;
        self.hosts.iter().filter(|(_, observed)| is_silent(observed)).map(|(host, _)| *host).collect()
    }

    pub(crate) fn statuses(&self, now: Instant) -> Vec<ReplicaStatus> {
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        let status = |observed: &Observed| ReplicaStatus {
            lag_s: observed.behind_since.map_or(0.0, seconds),
            silent_s: seconds(observed.answered),
            ..observed.status.clone()
        };
        self.hosts.values().map(status).collect()
    }
}

/// Silence after which a host is replaced as a holder.
const GONE: Duration = Duration::from_secs(30);
/// Silence after which a request that waits is reported.
const LONG_WAIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::{Duration, Instant};

    use super::{Pulled, ReplicaBoard};

    #[test]
    fn lag_and_silence_are_counted() {
        let mut board = ReplicaBoard::default();
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        board.observe(1, "a:1", at(0));
        board.observe(2, "b:1", at(0));
        let pulled = |last_step, pending| Pulled { last_step: Some(last_step), source_step: Some(9), pending, ..Pulled::default() };
        board.on_pulled(1, pulled(7, 2), at(10));
        board.on_pulled(1, pulled(8, 1), at(20));
        board.on_silence(2, "no answer".into());
        let status = &board.statuses(at(25));
        assert_eq!((status[0].lag_s, status[0].silent_s, status[0].last_step, status[0].is_held), (15.0, 5.0, Some(8), true));
        assert_eq!((status[1].silent_s, status[1].problem.as_deref(), status[1].is_held), (25.0, Some("no answer"), false));
        assert_eq!(board.silent_for(Duration::from_secs(20), at(25)), BTreeSet::from([2]));
        board.on_pulled(1, pulled(9, 0), at(30));
        board.on_answer(2, at(30));
        assert_eq!(board.statuses(at(30)).iter().map(|status| status.lag_s + status.silent_s).sum::<f64>(), 0.0);
        // The copy stays, and its last step is known, when the other host is silent.
        board.on_silence(1, "gone".into());
        assert_eq!(board.statuses(at(90))[0].last_step, Some(9));
    }

    #[test]
    fn a_request_that_waits_for_long_is_a_problem_of_its_host() {
        let mut board = ReplicaBoard::default();
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        board.observe(1, "a:1", at(0));
        assert_eq!(board.on_wait(1, at(9)), None);
        let problem = board.on_wait(1, at(10)).unwrap();
        assert!(problem.contains("a:1 does not answer since ") && problem.contains("GMT"), "{problem}");
        assert_eq!(board.statuses(at(10))[0].problem, Some(problem));
        assert_eq!(board.on_wait(1, at(15)), None, "it is known");
        board.on_pulled(1, Pulled::default(), at(16));
        assert_eq!((board.statuses(at(16))[0].problem.as_ref(), board.on_wait(1, at(20))), (None, None));
    }
}
