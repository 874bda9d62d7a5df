//! Exponents of a matrix relative to a prediction from their row and column. Spec: spec/codecs/factored.md.

/// Symbol of a zero exponent, for every prediction.
const ZERO: u8 = 128;

super::for_every_level! {
    /// Replaces the exponents of one row by symbols: the difference of each exponent from `(row + columns[j]) >> 2`.
    pub fn to_symbols / to_symbols_at(row: i16, columns: &[i8], exponents: &mut [u8]) = to_symbols_any;
}

super::for_every_level! {
    /// Inverts `to_symbols`.
    pub fn to_exponents / to_exponents_at(row: i16, columns: &[i8], symbols: &mut [u8]) = to_exponents_any;
}

super::for_every_level! {
    /// Adds the nonzero exponents of one row to the sums of their columns, and counts them.
    pub fn add_to_columns / add_to_columns_at(exponents: &[u8], sums: &mut [u32], counts: &mut [u32]) = add_to_columns_any;
}

#[inline(always)]
fn expected(row: i16, column: i8) -> u8 {
    (row.wrapping_add(i16::from(column)) >> 2) as u8
}

#[inline(always)]
fn to_symbols_any(row: i16, columns: &[i8], exponents: &mut [u8]) {
    for (slot, &column) in exponents.iter_mut().zip(columns) {
        let expected = expected(row, column);
        let difference = slot.wrapping_sub(expected);
        // Zero takes the symbol of difference 128, so difference 128 takes the symbol of zero.
        let other = if difference == ZERO { expected.wrapping_neg() } else { difference };
        *slot = if *slot == 0 { ZERO } else { other };
    }
}

#[inline(always)]
fn to_exponents_any(row: i16, columns: &[i8], symbols: &mut [u8]) {
    for (slot, &column) in symbols.iter_mut().zip(columns) {
        let expected = expected(row, column);
        let difference = if *slot == expected.wrapping_neg() { ZERO } else { *slot };
        *slot = if *slot == ZERO { 0 } else { expected.wrapping_add(difference) };
    }
}

#[inline(always)]
fn add_to_columns_any(exponents: &[u8], sums: &mut [u32], counts: &mut [u32]) {
    for ((&exponent, sum), count) in exponents.iter().zip(sums).zip(counts) {
        *sum = sum.wrapping_add(u32::from(exponent));
        *count = count.wrapping_add(u32::from(exponent != 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn every_exponent_beside_every_expectation_comes_back_at_every_level() {
        let all: Vec<u8> = (0..=255).collect();
        for row in (-130i16..1160).step_by(3) {
            for column in [-128i8, -3, -1, 0, 2, 127] {
                let columns = [column; 256];
                let mut scalar = all.clone();
                to_symbols_at(Level::Scalar, row, &columns, &mut scalar);
                assert_eq!(scalar[0], ZERO);
                let mut seen = scalar.clone();
                seen.sort_unstable();
                assert_eq!(seen, all, "each exponent has a symbol of its own");
                for level in Level::available() {
                    let mut symbols = all.clone();
                    to_symbols_at(level, row, &columns, &mut symbols);
                    assert_eq!(symbols, scalar, "{level:?}");
                    to_exponents_at(level, row, &columns, &mut symbols);
                    assert_eq!(symbols, all, "{level:?}");
                }
            }
        }
    }
}
