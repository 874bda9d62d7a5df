//! A limit of bytes per second that all connections of a server share.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Limit of bytes per second. Each sender books the time that its bytes take, and waits until that time has come.
#[derive(Debug)]
pub(super) struct Bandwidth {
    bytes_per_second: Option<u64>,
    /// Time at which all booked bytes have been sent.
    busy_until: Mutex<Instant>,
}

impl Bandwidth {
    /// `None` for no limit.
    pub(super) fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, busy_until: Mutex::new(Instant::now()) }
    }

    /// Waits until these bytes may be sent.
    pub(super) async fn wait_for(&self, bytes: u64) {
        if let Some(begin) = self.book(bytes, Instant::now()) {
            tokio::time::sleep_until(begin).await;
        }
    }

    /// Books bytes; returns the time at which to send them.
    fn book(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let rate = self.bytes_per_second?.max(1);
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = (*busy_until).max(now);
        *busy_until = begin + Duration::from_secs_f64(bytes as f64 / rate as f64);
        Some(begin)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::Bandwidth;

    #[test]
    fn bytes_are_spread_over_time() {
        let now = Instant::now();
        let limit = Bandwidth::new(Some(1000));
        let begins = [500, 500, 1000].map(|bytes| limit.book(bytes, now).unwrap().saturating_duration_since(now));
        for (begin, seconds) in begins.into_iter().zip([0.0, 0.5, 1.0]) {
            assert!(begin.abs_diff(Duration::from_secs_f64(seconds)) < Duration::from_millis(5), "{begin:?}");
        }
        // An idle time is not saved up.
        let later = now + Duration::from_secs(60);
        assert_eq!(limit.book(1, later), Some(later));
        assert_eq!(Bandwidth::new(None).book(1, now), None);
    }
}
