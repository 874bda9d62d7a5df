//! How old the objects of an unfinished commit are: garbage collection must not mistake them for leftovers.

use std::time::{Duration, Instant, SystemTime};

use crate::{Error, ErrorKind, Result};

/// Objects that nothing names are deleted when they are older than this, unless told otherwise.
pub(crate) const DEFAULT_AGE_FLOOR: Duration = Duration::from_secs(24 * 60 * 60);

/// The age of the oldest object that a commit is going to name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Age {
    before: Duration,
    started: Instant,
    started_by_clock: SystemTime,
}

impl Age {
    /// Of objects that are written from now on.
    pub(crate) fn start() -> Self {
        Self { before: Duration::ZERO, started: Instant::now(), started_by_clock: SystemTime::now() }
    }

    /// Of objects the oldest of which was `before` old when this began.
    pub(crate) fn older_by(self, before: Duration) -> Self {
        Self { before, ..self }
    }

    /// Refuses a commit that comes later than half the floor: the other half is the collector's.
    pub(crate) fn check(&self, floor: Duration) -> Result<()> {
        // A machine that slept has a clock that did not, or the reverse.
        let by_clock = self.started_by_clock.elapsed().unwrap_or_default();
        let age = self.before.saturating_add(self.started.elapsed().max(by_clock));
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
        .clause("log 7.5"))
    }
}
