//! Terms of rows and columns, in parts of an octave: what `tc.factored`, `tc.magnitudes` and `tc.loguniform` expect of a number.

/// Fewer rows or columns than this share too few terms.
pub(super) const LEAST: usize = 16;

/// A term, as it is stored.
pub(super) fn term(value: i64) -> i8 {
    value.clamp(-127, 127) as i8
}

/// `sum / count`, to the nearest; 0 of nothing.
pub(super) fn mean(sum: i64, count: i64) -> i64 {
    if count == 0 { 0 } else { (2 * sum + count).div_euclid(2 * count) }
}
