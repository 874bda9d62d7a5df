//! Times in text, as settings and the command line take them.

use std::time::Duration;

use crate::{Error, Result};

/// Parses numbers with units: `ms`, `s`, `m`, `h`, `d` and all others of [`humantime`]; `0` needs no unit.
///
/// ```
/// use std::time::Duration;
/// use tensorcask::parse_duration;
/// assert_eq!(parse_duration("24h")?, Duration::from_secs(86_400));
/// assert_eq!(parse_duration("1h 30m")?, Duration::from_secs(5400));
/// assert_eq!(parse_duration("0")?, Duration::ZERO);
/// assert!(parse_duration("5").is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn parse_duration(text: &str) -> Result<Duration> {
    humantime::parse_duration(text).map_err(|e| {
        let message = format!("`{}` is not a time: write a number and ms, s, m, h or d, such as 30s or 24h", text.escape_debug());
        Error::invalid(message).source(e)
    })
}
