//! Times as RFC 3339 in UTC.

/// Formats milliseconds since 1970 as `2026-01-31T23:59:59.123Z`.
pub(crate) fn rfc3339(ms: u64) -> String {
    let (days, of_day) = (ms / 86_400_000, ms % 86_400_000);
    let (year, month, day) = civil(days);
    let (hours, minutes) = (of_day / 3_600_000, of_day / 60_000 % 60);
    let (seconds, millis) = (of_day / 1000 % 60, of_day % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}.{millis:03}Z")
}

/// Formats milliseconds since 1970 to the second.
pub(crate) fn human_time(ms: u64) -> String {
    rfc3339(ms / 1000 * 1000).replace(".000Z", "Z")
}

/// Year, month and day of a number of days since 1970. Howard Hinnant's `civil_from_days`; its years begin in March.
fn civil(days: u64) -> (u64, u64, u64) {
    let since = days + 719_468;
    let (era, of_era) = (since / 146_097, since % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_827_696_789), "2000-02-29T12:34:56.789Z");
        assert_eq!(human_time(4_102_444_799_999), "2099-12-31T23:59:59Z");
        assert!(rfc3339(u64::MAX).ends_with('Z'), "forged times end in text, not in a panic");
    }
}
