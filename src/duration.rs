//! Times in text, as settings and the command line take them.

use std::time::Duration;

use crate::{Error, Result};

/// Parses a number with a unit, `ms`, `s`, `m`, `h` or `d`; `0` needs no unit.
///
/// ```
/// use std::time::Duration;
/// use tensorcask::parse_duration;
/// assert_eq!(parse_duration("24h")?, Duration::from_secs(86_400));
/// assert_eq!(parse_duration("0")?, Duration::ZERO);
/// assert!(parse_duration("5").is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad =
        || Error::invalid(format!("`{}` is not a time: write a number and ms, s, m, h or d, such as 30s or 24h", text.escape_debug()));
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let milliseconds: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" if number == "0" => 1,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().map_err(|_| bad())?;
    number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(bad)
}
