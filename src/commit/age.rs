//! Age of the objects of an unfinished commit, and of answers of the storage. Garbage collection must not delete those
//! objects as unreferenced.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::error::TOO_LATE;
use crate::{Error, ErrorKind, Result};

/// Default age floor: garbage collection deletes unreferenced objects that are older.
pub(crate) const DEFAULT_AGE_FLOOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Age of the oldest object that a commit will name, or of an answer of the storage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Age {
    before: Duration,
    started: Instant,
    started_by_clock: SystemTime,
}

impl Age {
    /// Starts the age of objects that are written from now on.
    pub(crate) fn start() -> Self {
        Self { before: Duration::ZERO, started: Instant::now(), started_by_clock: SystemTime::now() }
    }

    /// Adds the age that the oldest object already had at the start.
    pub(crate) fn older_by(self, before: Duration) -> Self {
        Self { before, ..self }
    }

    /// Returns the age now, by the faster of two clocks: one of them may stop while the machine is suspended.
    pub(crate) fn elapsed(&self) -> Duration {
        let by_clock = self.started_by_clock.elapsed().unwrap_or_default();
        self.before.saturating_add(self.started.elapsed().max(by_clock))
    }

    /// Refuses a commit later than half the age floor. The other half is the safety margin of garbage collection.
    pub(crate) fn check(&self, floor: Duration) -> Result<()> {
        let age = self.elapsed();
        if age <= floor / 2 {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Storage,
            format!(
                "the first object of this commit is {} s old, more than half the age floor of {} s: garbage collection could delete it; \
                 nothing was committed, try again",
                age.as_secs_f64().round(),
                floor.as_secs_f64()
            ),
        )
        .clause(TOO_LATE))
    }

    /// Like [`check`](Self::check), with advice for an object that an earlier attempt has left.
    pub(crate) fn check_leftover(&self, floor: Duration, advice: &str) -> Result<()> {
        self.check(floor).map_err(|e| Error::new(e.kind(), format!("{}; {advice}", e.message())).clause(TOO_LATE).source(e))
    }
}

/// Returns milliseconds since 1970 by this machine's clock, or 0 for an earlier time.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |elapsed| elapsed.as_millis() as u64)
}
