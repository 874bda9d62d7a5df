//! Connections of peers that wait until the server has a place for them. A peer that waits sees a slow host, and nothing else, so
//! this host says why.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The connections that wait for a place.
#[derive(Debug)]
pub(crate) struct ConnectionWaits {
    /// Number of places.
    places: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    next_number: u64,
    /// Begin of each wait, in their order.
    since: BTreeMap<u64, Instant>,
    /// Whether the present waits were logged.
    is_logged: bool,
}

impl ConnectionWaits {
    /// `places`: number of connections that are served at once.
    pub(super) fn new(places: usize) -> Self {
        Self { places, waiting: Mutex::default() }
    }

    /// Waits for a place, and counts as waiting until then.
    pub(super) async fn noted<T>(&self, place: impl Future<Output = T>) -> T {
        let _wait = self.begin(Instant::now());
        let mut place = std::pin::pin!(place);
        match tokio::time::timeout(LONG_WAIT, &mut place).await {
            Ok(found) => found,
            Err(_) => {
                self.log();
                place.await
            }
        }
    }

    /// Says how many connections wait, if one of them has waited for long.
    pub(crate) fn problem(&self, now: Instant) -> Option<String> {
        let waiting = self.lock();
        let longest = now.saturating_duration_since(*waiting.since.values().next()?);
        (longest >= LONG_WAIT).then(|| {
            let since = SystemTime::now().checked_sub(longest).unwrap_or(SystemTime::UNIX_EPOCH);
            let count = waiting.since.len();
            let places = self.places;
            let since = httpdate::fmt_http_date(since);
            format!("{count} connections of other hosts wait for one of {places} places, the first since {since}")
        })
    }

    fn begin(&self, now: Instant) -> Wait<'_> {
        let mut waiting = self.lock();
        let number = waiting.next_number;
        waiting.next_number = number.wrapping_add(1);
        waiting.since.insert(number, now);
        Wait { all: self, number }
    }

    /// Logs the problem once, until no connection waits.
    fn log(&self) {
        let problem = self.problem(Instant::now());
        if !std::mem::replace(&mut self.lock().is_logged, true)
            && let Some(problem) = problem
        {
            tracing::warn!(problem, "peers wait for this host");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that waits. Dropping it ends the wait.
struct Wait<'a> {
    all: &'a ConnectionWaits,
    number: u64,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut waiting = self.all.lock();
        waiting.since.remove(&self.number);
        waiting.is_logged &= !waiting.since.is_empty();
    }
}

/// Time after which a wait is reported.
const LONG_WAIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::ConnectionWaits;

    #[test]
    fn connections_that_wait_for_long_are_counted_until_they_have_a_place() {
        let waits = ConnectionWaits::new(72);
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let first = waits.begin(at(0));
        let second = waits.begin(at(4));
        assert_eq!(waits.problem(at(4)), None);
        let problem = waits.problem(at(5)).unwrap();
        assert!(problem.contains("2 connections") && problem.contains("72 places") && problem.contains("since "), "{problem}");
        drop(first);
        assert_eq!(waits.problem(at(8)), None, "the other one waits since 4");
        assert!(waits.problem(at(9)).unwrap().contains("1 connections"));
        drop(second);
        assert_eq!(waits.problem(at(99)), None);
    }
}
