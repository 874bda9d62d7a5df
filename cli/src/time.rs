//! Times as RFC 3339 in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Formats milliseconds since 1970 as `2026-01-31T23:59:59.123Z`.
pub(crate) fn rfc3339(ms: u64) -> String {
    humantime::format_rfc3339_millis(time(ms)).to_string()
}

/// Formats milliseconds since 1970 to the second.
pub(crate) fn human_time(ms: u64) -> String {
    humantime::format_rfc3339_seconds(time(ms)).to_string()
}

fn time(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms.min(LATEST_MS))
}

/// The end of the year 9999, after which RFC 3339 has no times. A forged time may be later.
const LATEST_MS: u64 = 253_402_300_799_999;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_827_696_789), "2000-02-29T12:34:56.789Z");
        assert_eq!(human_time(4_102_444_799_999), "2099-12-31T23:59:59Z");
        assert_eq!(rfc3339(u64::MAX), "9999-12-31T23:59:59.999Z", "forged times end in text, not in a panic");
    }
}
