//! Text for people: lines, tables and sizes, without raw control characters.

pub(crate) use tensorcask::human_bytes;

/// Text for people, line by line. Characters that are not printable are escaped.
#[derive(Debug, Default)]
pub(crate) struct Text(String);

impl Text {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Text that is printed as it is. It must not hold anything from outside of this program.
    #[cfg(feature = "manual")]
    pub(crate) fn verbatim(text: String) -> Self {
        Self(text)
    }

    pub(crate) fn line(&mut self, line: impl AsRef<str>) {
        self.0.push_str(printable(line.as_ref()).trim_end());
        self.0.push('\n');
    }

    /// Adds names and values, with the values in one column.
    pub(crate) fn fields(&mut self, fields: &[(&str, String)]) {
        let width = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, value) in fields {
            self.line(format!("{name}{}  {value}", blanks(name, width)));
        }
    }

    /// Adds a table. A column whose heading starts with `>` is aligned to the right.
    pub(crate) fn table(&mut self, headings: &[&str], rows: &[Vec<String>]) {
        let right: Vec<bool> = headings.iter().map(|heading| heading.starts_with('>')).collect();
        let first = headings.iter().map(|heading| heading.trim_start_matches('>').to_owned()).collect();
        let rows = std::iter::once(&first).chain(rows).map(|row| row.iter().map(|cell| printable(cell)).collect());
        let rows: Vec<Vec<String>> = rows.collect();
        let mut widths = vec![0; headings.len()];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().min(MAX_WIDTH).max(*width);
            }
        }
        for row in &rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&right) {
                let blanks = blanks(cell, *width);
                let (before, after) = if *right { (blanks.as_str(), "") } else { ("", blanks.as_str()) };
                line.extend([before, cell.as_str(), after, "  "]);
            }
            self.0.push_str(line.trim_end());
            self.0.push('\n');
        }
    }
}

/// Widest column of a table. A longer cell moves the rest of its row: texts of users may have any length.
const MAX_WIDTH: usize = 120;

/// Blanks that fill a column of this width after a text. The width of a format specification ends at 65,535.
fn blanks(text: &str, width: usize) -> String {
    " ".repeat(width.saturating_sub(text.chars().count()))
}

/// Time with a unit, or with two above a minute.
pub(crate) fn human_seconds(seconds: f64) -> String {
    let two = |whole: f64, unit: &str, rest: &str, parts: f64| {
        let units = (whole / parts).floor();
        let left = whole % parts;
        if left == 0.0 { format!("{units} {unit}") } else { format!("{units} {unit} {left} {rest}") }
    };
    match seconds {
        s if s < 0.9995 => format!("{} ms", significant(s * 1e3)),
        s if s < 59.95 => format!("{} s", significant(s)),
        s if s < 3599.5 => two(s.round(), "min", "s", 60.0),
        s if s < 86_370.0 => two((s / 60.0).round(), "h", "min", 60.0),
        s => two((s / 3600.0).round(), "d", "h", 24.0),
    }
}

/// Number with three digits, or all digits of its whole part.
fn significant(value: f64) -> String {
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Number of things, with the noun in the singular or the plural.
pub(crate) fn counted(count: u64, one: &str, many: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {many}"),
    }
}

/// Tensor bytes over stored bytes; `None` if nothing is stored.
pub(crate) fn ratio(tensor_bytes: u64, stored_bytes: u64) -> Option<f64> {
    (stored_bytes > 0).then(|| (tensor_bytes as f64 / stored_bytes as f64 * 1000.0).round() / 1000.0)
}

/// Ratio as text.
pub(crate) fn human_ratio(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}x"))
}

/// Share of changed elements; `None` for zero elements.
pub(crate) fn share(changed: u64, elements: u64) -> Option<f64> {
    (elements > 0).then(|| changed as f64 / elements as f64)
}

/// Share as a percentage.
pub(crate) fn percent(share: Option<f64>) -> String {
    match share {
        None => "-".to_owned(),
        Some(share) if share > 0.0 && share < 0.0001 => "<0.01%".to_owned(),
        Some(share) => format!("{:.2}%", share * 100.0),
    }
}

/// Shape as text.
pub(crate) fn human_shape(shape: &[u64]) -> String {
    let extents: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("[{}]", extents.join(", "))
}

/// Escapes control, format and other invisible characters, including newlines.
pub(crate) fn printable(text: &str) -> String {
    let escape = |c: char| match c {
        '\'' | '"' | '\\' => c.to_string(),
        _ => c.escape_debug().to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_printed_raw() {
        assert_eq!(printable("a\u{1b}[2J\nb\u{202e}c'\\"), "a\\u{1b}[2J\\nb\\u{202e}c'\\");
        let mut text = Text::default();
        text.table(&["name", ">n"], &[vec!["x\n".into(), "10".into()]]);
        assert_eq!(text.as_str(), "name   n\nx\\n   10\n");
    }

    #[test]
    fn a_cell_may_have_any_length() {
        let mut text = Text::default();
        let long = "x".repeat(70_000);
        text.table(&["name", ">n"], &[vec![long.clone(), "1".into()], vec!["y".into(), long.clone()]]);
        let lines: Vec<&str> = text.as_str().lines().collect();
        assert_eq!(lines[1].trim_start_matches('x').trim_start(), "1");
        assert_eq!(lines[2].len(), MAX_WIDTH + 2 + long.len());
    }

    #[test]
    fn times_are_short() {
        let times = [0.0, 0.0123, 0.9996, 1.5, 59.96, 170.0, 3600.0, 7860.0, 86_400.0, 90_000.0].map(human_seconds);
        assert_eq!(times, ["0 ms", "12.3 ms", "1 s", "1.5 s", "1 min", "2 min 50 s", "1 h", "2 h 11 min", "1 d", "1 d 1 h"]);
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!((ratio(10, 4), ratio(10, 0)), (Some(2.5), None));
        assert_eq!([0, 1, 2].map(|count| counted(count, "log entry", "log entries")), ["0 log entries", "1 log entry", "2 log entries"]);
    }
}
