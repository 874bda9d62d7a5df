//! Terms of rows and columns, in fractions of an octave. `tc.factored`, `tc.magnitudes` and `tc.loguniform` predict
//! numbers from them.

/// Least number of rows and columns. With fewer, too few elements share a term.
pub(super) const LEAST: usize = 16;

/// Clamps a term to its stored range.
pub(super) fn term(value: i64) -> i8 {
    value.clamp(-127, 127) as i8
}

/// Returns `sum / count`, rounded to the nearest integer; 0 if `count` is 0.
pub(super) fn mean(sum: i64, count: i64) -> i64 {
    if count == 0 { 0 } else { (2 * sum + count).div_euclid(2 * count) }
}
