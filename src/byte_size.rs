//! Numbers of bytes in text.

/// Writes a number of bytes with a unit.
///
/// ```
/// assert_eq!([1000, 2560, 3 << 30].map(tensorcask::human_bytes), ["1000 B", "2.5 KiB", "3.0 GiB"]);
/// ```
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS.get(unit).unwrap_or(&"EiB"))
}

#[cfg(test)]
mod tests {
    use super::human_bytes;

    #[test]
    fn sizes_are_short() {
        let sizes = [0, 1023, 1024, 1_048_524, 1_048_575, u64::MAX].map(human_bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "1023.9 KiB", "1.0 MiB", "16.0 EiB"]);
    }
}
