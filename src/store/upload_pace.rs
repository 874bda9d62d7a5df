//! Time limits of uploads that share a connection to the internet.
//!
//! A save sends up to 32 parts of 8 MiB at once. On a link of 10 Mbit/s they take 200 s, all of them, so a fixed limit of 30 s
//! for each would end every part before it has arrived, and start it again, for ever. The limit therefore grows with the bytes
//! in flight and shrinks with the rate that was measured:
//!
//! ```text
//! limit = timeout of a request + 3 * bytes in flight / measured rate
//! ```
//!
//! Nothing is measured before the first upload has ended: 2 Mbit/s are assumed then. An upload that runs out of time lowers the
//! rate to what it proves, so the next limit is longer.

use std::time::Duration;

/// Bytes in flight to the servers of a store, and the rate of uploads.
#[derive(Debug, Default)]
pub(super) struct UploadPace {
    bytes_in_flight: u64,
    sent_bytes: u64,
    /// Bytes per second; `None` before the first upload has ended.
    rate: Option<f64>,
}

impl UploadPace {
    /// Begins an upload. Returns the bytes that were sent before.
    pub(super) fn begin(&mut self, bytes: u64) -> u64 {
        self.bytes_in_flight = self.bytes_in_flight.saturating_add(bytes);
        self.sent_bytes
    }

    /// Ends an upload, whether or not it succeeded.
    pub(super) fn end(&mut self, bytes: u64) {
        self.bytes_in_flight = self.bytes_in_flight.saturating_sub(bytes);
    }

    pub(super) fn bytes_in_flight(&self) -> u64 {
        self.bytes_in_flight
    }

    /// Returns the time that an upload has while so many bytes are in flight.
    pub(super) fn limit(&self, base: Duration, bytes_in_flight: u64) -> Duration {
        let bytes = bytes_in_flight as f64;
        let seconds = self.rate.map_or(bytes / ASSUMED_RATE, |rate| MARGIN * bytes / rate);
        base.saturating_add(Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST).min(LONGEST))
    }

    /// Notes an upload that succeeded. `sent_before` is what [`begin`](Self::begin) returned.
    pub(super) fn done(&mut self, bytes: u64, sent_before: u64, time: Duration) {
        self.sent_bytes = self.sent_bytes.saturating_add(bytes);
        let rate = self.sent_bytes.saturating_sub(sent_before) as f64 / time.as_secs_f64().max(SHORTEST_S);
        self.rate = Some(self.rate.map_or(rate, |old| f64::midpoint(old, rate)).max(LOWEST_RATE));
    }

    /// Notes an upload that ran out of time while so many bytes were in flight.
    pub(super) fn timed_out(&mut self, bytes_in_flight: u64, time: Duration) {
        let most = bytes_in_flight as f64 / time.as_secs_f64().max(SHORTEST_S);
        self.rate = Some(self.rate.unwrap_or(ASSUMED_RATE).min(most).max(LOWEST_RATE));
    }
}

/// Rate before anything was measured: 2 Mbit/s.
const ASSUMED_RATE: f64 = 250e3;
const LOWEST_RATE: f64 = 1e3;
/// Uploads at once do not get equal shares of a link.
const MARGIN: f64 = 3.0;
const LONGEST: Duration = Duration::from_secs(3600);
const SHORTEST_S: f64 = 1e-3;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::UploadPace;

    const BASE: Duration = Duration::from_secs(30);
    const PART: u64 = 8 << 20;

    fn seconds(pace: &UploadPace) -> u64 {
        pace.limit(BASE, pace.bytes_in_flight()).as_secs()
    }

    #[test]
    fn the_limit_grows_with_the_bytes_in_flight_and_shrinks_with_the_rate() {
        let mut pace = UploadPace::default();
        assert_eq!(seconds(&pace), 30);
        let before: Vec<u64> = (0..32).map(|_| pace.begin(PART)).collect();
        // 32 parts at 10 Mbit/s take 215 s.
        assert!(seconds(&pace) > 1000);
        for sent_before in before {
            pace.done(PART, sent_before, Duration::from_secs(215));
            pace.end(PART);
        }
        assert_eq!(pace.bytes_in_flight(), 0);
        (0..32).for_each(|_| _ = pace.begin(PART));
        assert!((300..1500).contains(&seconds(&pace)), "{}", seconds(&pace));
        // The same parts on a link of 8 Gbit/s.
        (0..16).for_each(|_| pace.done(PART, 0, Duration::from_millis(268)));
        assert!(seconds(&pace) < 40, "{}", seconds(&pace));
    }

    #[test]
    fn an_upload_that_ran_out_of_time_gets_more() {
        let mut pace = UploadPace::default();
        pace.begin(PART);
        pace.done(PART, 0, Duration::from_millis(10));
        let mut limit = seconds(&pace);
        for _ in 0..4 {
            pace.timed_out(PART, Duration::from_secs(limit));
            assert!(seconds(&pace) > limit, "{limit}");
            limit = seconds(&pace);
        }
        for _ in 0..40 {
            pace.timed_out(PART, Duration::from_secs(limit));
            limit = seconds(&pace);
        }
        assert!(limit <= 3630);
    }
}
