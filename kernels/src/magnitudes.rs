//! Magnitudes of floats with 8 exponent bits, relative to a prediction from their row and column. Spec:
//! spec/codecs/magnitudes.md.
//!
//! These kernels work on the *tops* of units: their upper 16 bits, in two bytes. A magnitude is the exponent and the
//! next three bits: bits 4 to 14 of a top.

/// Symbol of a magnitude that is stored apart.
const ESCAPE: u8 = 0;

/// Greatest magnitude.
pub const MOST: u16 = 2047;

super::for_every_level! {
    /// Splits units of 4 bytes into tops and two planes of the low bytes.
    pub fn split / split_at(data: &[u8], tops: &mut [u8], plane0: &mut [u8], plane1: &mut [u8]) = split_any;
}

super::for_every_level! {
    /// Inverts `split`.
    pub fn merge / merge_at(tops: &[u8], plane0: &[u8], plane1: &[u8], out: &mut [u8]) = merge_any;
}

super::for_every_level! {
    /// Returns the symbols of one row: the difference of each magnitude from `row + columns[j]`, or an escape outside 1
    /// to 255.
    pub fn to_symbols / to_symbols_at(row: i16, columns: &[i8], tops: &[u8], symbols: &mut [u8]) = to_symbols_any;
}

super::for_every_level! {
    /// Renumbers the symbols from `first` to `last`, starting at 1. All other symbols become escapes.
    pub fn narrow / narrow_at(symbols: &mut [u8], first: u8, last: u8) = narrow_any;
}

super::for_every_level! {
    /// Rebuilds the tops of one row from symbols and the result of [`unpack`]. An escape gets magnitude 0. Returns
    /// whether all magnitudes are valid.
    pub fn to_tops / to_tops_at(row: i16, columns: &[i8], symbols: &[u8], others: &[u8], tops: &mut [u8]) -> bool = to_tops_any;
}

super::for_every_level! {
    /// Packs the bits of tops that are not part of the magnitude, lowest bits first. A byte holds eight signs, or the
    /// low four bits of two tops.
    pub fn pack / pack_at(tops: &[u8], signs: &mut [u8], fractions: &mut [u8]) = pack_any;
}

super::for_every_level! {
    /// Unpacks sign and low four bits of each top to the two ends of a byte.
    pub fn unpack / unpack_at(signs: &[u8], fractions: &[u8], others: &mut [u8]) = unpack_any;
}

super::for_every_level! {
    /// Counts the escapes.
    pub fn count_escapes / count_escapes_at(symbols: &[u8]) -> usize = count_escapes_any;
}

super::for_every_level! {
    /// Adds the nonzero magnitudes of one row to the sums of their columns, and counts them.
    pub fn add_to_columns / add_to_columns_at(tops: &[u8], sums: &mut [u32], counts: &mut [u32]) = add_to_columns_any;
}

super::for_every_level! {
    /// Sums the differences of one row's nonzero magnitudes from the terms of their columns. Returns the sum and the
    /// number of summands.
    pub fn sum_of_row / sum_of_row_at(columns: &[i8], tops: &[u8]) -> (i64, u32) = sum_of_row_any;
}

/// Iterates over tops.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn each(tops: &[u8]) -> impl Iterator<Item = u16> {
    tops.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes))
}

/// Iterates over the magnitudes of tops.
#[inline(always)]
pub fn magnitudes(tops: &[u8]) -> impl Iterator<Item = u16> {
    each(tops).map(|top| top >> 4 & MOST)
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn split_any(data: &[u8], tops: &mut [u8], plane0: &mut [u8], plane1: &mut [u8]) {
    let units = data.as_chunks::<4>().0;
    for (unit, top) in units.iter().zip(tops.as_chunks_mut::<2>().0) {
        *top = ((u32::from_le_bytes(*unit) >> 16) as u16).to_le_bytes();
    }
    for ((unit, plane0), plane1) in units.iter().zip(plane0).zip(plane1) {
        let unit = u32::from_le_bytes(*unit);
        *plane0 = unit as u8;
        *plane1 = (unit >> 8) as u8;
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn merge_any(tops: &[u8], plane0: &[u8], plane1: &[u8], out: &mut [u8]) {
    for (((unit, top), &plane0), &plane1) in out.as_chunks_mut::<4>().0.iter_mut().zip(each(tops)).zip(plane0).zip(plane1) {
        *unit = (u32::from(top) << 16 | u32::from(plane1) << 8 | u32::from(plane0)).to_le_bytes();
    }
}

#[inline(always)]
fn to_symbols_any(row: i16, columns: &[i8], tops: &[u8], symbols: &mut [u8]) {
    for ((symbol, magnitude), &column) in symbols.iter_mut().zip(magnitudes(tops)).zip(columns) {
        let difference = (magnitude as i16).wrapping_sub(row).wrapping_sub(i16::from(column));
        *symbol = if (1..=255).contains(&difference) { difference as u8 } else { ESCAPE };
    }
}

#[inline(always)]
fn narrow_any(symbols: &mut [u8], first: u8, last: u8) {
    let count = last.wrapping_sub(first);
    for symbol in symbols {
        let above = symbol.wrapping_sub(first);
        *symbol = if above <= count { above.wrapping_add(1) } else { ESCAPE };
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn to_tops_any(row: i16, columns: &[i8], symbols: &[u8], others: &[u8], tops: &mut [u8]) -> bool {
    let mut beyond = 0u16;
    for (((top, &symbol), &other), &column) in tops.as_chunks_mut::<2>().0.iter_mut().zip(symbols).zip(others).zip(columns) {
        let sum = row.wrapping_add(i16::from(column)).wrapping_add(i16::from(symbol)) as u16;
        let magnitude = if symbol == ESCAPE { 0 } else { sum };
        beyond |= magnitude & !MOST;
        *top = (magnitude << 4 | u16::from(other & 0x80) << 8 | u16::from(other & 15)).to_le_bytes();
    }
    beyond == 0
}

/// Lowest bit of each byte of a word, and low half of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;
const HALVES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// Number of units per step, so that their bytes stay in the first-level cache.
const BLOCK: usize = 512;

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: element 0 is the lowest byte of a word")]
fn pack_any(tops: &[u8], signs: &mut [u8], fractions: &mut [u8]) {
    let mut others = [0u8; BLOCK];
    for ((tops, signs), fractions) in tops.chunks(2 * BLOCK).zip(signs.chunks_mut(BLOCK / 8)).zip(fractions.chunks_mut(BLOCK / 2)) {
        for (other, top) in others.iter_mut().zip(each(tops)) {
            *other = (top >> 8) as u8 & 0x80 | top as u8 & 15;
        }
        // Clear what an earlier, longer block left behind the last element.
        others.iter_mut().skip(tops.len() / 2).take(7).for_each(|other| *other = 0);
        let words = others.as_chunks::<8>().0;
        for (sign, eight) in signs.iter_mut().zip(words) {
            // Bit 8i of the word, times 2^(56 - 7i) in the factor, lands in bit 56 + i.
            *sign = ((u64::from_le_bytes(*eight) >> 7 & ONES).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
        }
        let packed = |eight: &[u8; 8]| {
            let halves = u64::from_le_bytes(*eight) & HALVES;
            let bytes = (halves | halves >> 4) & 0x00ff_00ff_00ff_00ff;
            let pairs = (bytes | bytes >> 8) & 0x0000_ffff_0000_ffff;
            ((pairs | pairs >> 16) as u32).to_le_bytes()
        };
        let (fours, rest) = fractions.as_chunks_mut::<4>();
        for (four, eight) in fours.iter_mut().zip(words) {
            *four = packed(eight);
        }
        if let Some(eight) = words.get(fours.len()) {
            for (slot, byte) in rest.iter_mut().zip(packed(eight)) {
                *slot = byte;
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: element 0 is the lowest byte of a word")]
fn unpack_any(signs: &[u8], fractions: &[u8], others: &mut [u8]) {
    let word = |sign: u8, packed: u32| {
        let pairs = (u64::from(packed) | u64::from(packed) << 16) & 0x0000_ffff_0000_ffff;
        let bytes = (pairs | pairs << 8) & 0x00ff_00ff_00ff_00ff;
        let halves = (bytes | bytes << 4) & HALVES;
        // Bit i moves to byte i. The addition carries a nonzero byte into that byte's highest bit, and no further.
        let spread = u64::from(sign).wrapping_mul(ONES) & 0x8040_2010_0804_0201;
        halves | spread.wrapping_add(0x7f7f_7f7f_7f7f_7f7f) & 0x8080_8080_8080_8080
    };
    let (eights, rest) = others.as_chunks_mut::<8>();
    for ((eight, &sign), four) in eights.iter_mut().zip(signs).zip(fractions.as_chunks::<4>().0) {
        *eight = word(sign, u32::from_le_bytes(*four)).to_le_bytes();
    }
    let mut four = [0; 4];
    for (slot, byte) in four.iter_mut().zip(fractions.chunks(4).nth(eights.len()).unwrap_or_default()) {
        *slot = *byte;
    }
    let sign = signs.get(eights.len()).copied().unwrap_or(0);
    for (slot, byte) in rest.iter_mut().zip(word(sign, u32::from_le_bytes(four)).to_le_bytes()) {
        *slot = byte;
    }
}

#[inline(always)]
fn count_escapes_any(symbols: &[u8]) -> usize {
    // Stretches of 255 symbols keep each count within a byte.
    symbols.chunks(255).map(|some| usize::from(some.iter().fold(0u8, |sum, &symbol| sum.wrapping_add(u8::from(symbol == ESCAPE))))).sum()
}

/// Calls `each` with the position of every escape, in order.
#[allow(clippy::little_endian_bytes, reason = "a kernel: element 0 is the lowest byte of a word")]
pub fn for_each_escape(symbols: &[u8], mut each: impl FnMut(usize)) {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const GROUP: usize = 64;
    for (group, symbols) in symbols.chunks(GROUP).enumerate() {
        // Most groups have no escape; the minimum of their symbols shows that.
        if symbols.iter().copied().fold(u8::MAX, u8::min) != ESCAPE {
            continue;
        }
        let (words, rest) = symbols.as_chunks::<8>();
        for (at, word) in words.iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            // Sets the highest bit of each zero byte.
            let mut zeros = !((word & LOW).wrapping_add(LOW) | word | LOW);
            while zeros != 0 {
                each(GROUP * group + 8 * at + zeros.trailing_zeros() as usize / 8);
                zeros &= zeros - 1;
            }
        }
        for (at, _) in rest.iter().enumerate().filter(|(_, symbol)| **symbol == ESCAPE) {
            each(GROUP * group + 8 * words.len() + at);
        }
    }
}

#[inline(always)]
fn add_to_columns_any(tops: &[u8], sums: &mut [u32], counts: &mut [u32]) {
    for ((magnitude, sum), count) in magnitudes(tops).zip(sums).zip(counts) {
        *sum = sum.wrapping_add(u32::from(magnitude));
        *count = count.wrapping_add(u32::from(magnitude != 0));
    }
}

#[inline(always)]
fn sum_of_row_any(columns: &[i8], tops: &[u8]) -> (i64, u32) {
    let mut total = 0i64;
    let mut count = 0u32;
    // Stretches of 4096 columns keep each sum within 32 bits.
    for (columns, tops) in columns.chunks(4096).zip(tops.chunks(8192)) {
        let mut sum = 0i32;
        for (&column, magnitude) in columns.iter().zip(magnitudes(tops)) {
            let used = i32::from(magnitude != 0);
            sum = sum.wrapping_add(i32::from(magnitude) - used * i32::from(column));
            count = count.wrapping_add(used as u32);
        }
        total = total.wrapping_add(i64::from(sum));
    }
    (total, count)
}

#[cfg(test)]
#[allow(clippy::little_endian_bytes, reason = "elements are little-endian")]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn every_escape_is_found_where_it_is() {
        let symbols: Vec<u8> = (0..1003u32).map(|i| [0, 1, 0x80, 255, 0, 7, 0x7f][(i * i % 97 % 7) as usize]).collect();
        for count in [0, 1, 7, 8, 9, 1003] {
            let mut found = vec![];
            for_each_escape(&symbols[..count], |at| found.push(at));
            let expected: Vec<usize> = (0..count).filter(|&at| symbols[at] == ESCAPE).collect();
            assert_eq!(found, expected);
            assert_eq!(count_escapes(&symbols[..count]), found.len());
        }
    }

    fn bytes(tops: &[u16]) -> Vec<u8> {
        tops.iter().flat_map(|top| top.to_le_bytes()).collect()
    }

    #[test]
    fn every_magnitude_above_every_floor_comes_back_at_every_level() {
        let units: Vec<u16> = (0..=u16::MAX).step_by(3).collect();
        let tops = bytes(&units);
        let others: Vec<u8> = units.iter().map(|unit| (unit >> 8) as u8 & 0x80 | *unit as u8 & 15).collect();
        let mut escapes = 0;
        for row in [-400, -128, -3, 0, 100, 900, 1010, 2047, 2174] {
            let columns: Vec<i8> = (0..units.len()).map(|i| (i * 7) as i8).collect();
            let mut scalar = vec![0; units.len()];
            to_symbols_at(Level::Scalar, row, &columns, &tops, &mut scalar);
            for level in Level::available() {
                let mut symbols = vec![1; units.len()];
                to_symbols_at(level, row, &columns, &tops, &mut symbols);
                assert!(symbols == scalar, "{level:?}");
                let mut back = vec![0xff; tops.len()];
                assert!(to_tops_at(level, row, &columns, &symbols, &others, &mut back), "{level:?}");
                for (i, symbol) in symbols.iter().enumerate() {
                    let wanted = if *symbol == ESCAPE { units[i] & 0x800f } else { units[i] };
                    assert_eq!(back[2 * i..][..2], wanted.to_le_bytes(), "{level:?}, unit {:x}, row {row}", units[i]);
                }
                escapes += symbols.iter().filter(|symbol| **symbol == ESCAPE).count();
            }
        }
        assert!(escapes > 1000);
    }

    #[test]
    fn what_is_no_magnitude_is_seen_at_every_level() {
        for level in Level::available() {
            for (row, column, symbol, is_right) in [
                (0, 0, 1, true),
                (0, -2, 1, false),
                (0, -2, 2, true),
                (2046, 0, 1, true),
                (2046, 1, 1, false),
                (1792, 0, 255, true),
                (1793, 0, 255, false),
                (i16::MAX, 127, 255, false),
                (i16::MIN, -128, 255, false),
                (-9, -9, ESCAPE, true),
            ] {
                let mut columns = [0; 70];
                let mut symbols = [ESCAPE; 70];
                (columns[66], symbols[66]) = (column, symbol);
                assert_eq!(to_tops_at(level, row, &columns, &symbols, &[0; 70], &mut [0; 140]), is_right, "{level:?} {row} {column}");
            }
        }
    }

    #[test]
    fn other_bits_and_bytes_come_back_at_every_level() {
        for length in [0usize, 1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 519, 1000] {
            let units: Vec<u16> = (0..length).map(|i| (i * i * 1291) as u16).collect();
            let tops = bytes(&units);
            let data: Vec<u8> =
                units.iter().enumerate().flat_map(|(i, top)| (u32::from(*top) << 16 | (i as u32 * 61)).to_le_bytes()).collect();
            for level in Level::available() {
                let mut signs = vec![0xaa; length.div_ceil(8)];
                let mut fractions = vec![0xaa; length.div_ceil(2)];
                pack_at(level, &tops, &mut signs, &mut fractions);
                for (i, unit) in units.iter().enumerate() {
                    assert_eq!(u16::from(signs[i / 8] >> (i % 8) & 1), unit >> 15, "{level:?}, {length}");
                    assert_eq!(u16::from(fractions[i / 2] >> (i % 2 * 4) & 15), unit & 15, "{level:?}, {length}");
                }
                assert!(length % 8 == 0 || signs[length / 8] >> (length % 8) == 0);
                assert!(length % 2 == 0 || fractions[length / 2] >> 4 == 0);
                let mut others = vec![0xff; length];
                unpack_at(level, &signs, &fractions, &mut others);
                assert!(units.iter().zip(&others).all(|(unit, other)| *other == (unit >> 8) as u8 & 0x80 | *unit as u8 & 15), "{level:?}");
                let (mut top, mut plane0, mut plane1, mut out) =
                    (vec![1; 2 * length], vec![1; length], vec![1; length], vec![1; 4 * length]);
                split_at(level, &data, &mut top, &mut plane0, &mut plane1);
                assert!(top == tops && (0..length).all(|i| plane0[i] == (i * 61) as u8 && plane1[i] == ((i * 61) >> 8) as u8), "{level:?}");
                merge_at(level, &top, &plane0, &plane1, &mut out);
                assert!(out == data, "{level:?}");
            }
        }
    }

    #[test]
    fn narrow_keeps_a_range() {
        for level in Level::available() {
            let mut symbols: Vec<u8> = (0..=255).collect();
            narrow_at(level, &mut symbols, 3, 250);
            assert_eq!(symbols[..6], [0, 0, 0, 1, 2, 3]);
            assert_eq!(symbols[249..], [247, 248, 0, 0, 0, 0, 0]);
            let many: Vec<u8> = symbols.iter().copied().cycle().take(70_001).chain([ESCAPE; 600]).collect();
            assert_eq!(count_escapes_at(level, &many), many.iter().filter(|symbol| **symbol == ESCAPE).count());
        }
    }

    #[test]
    fn sums_are_equal_at_every_level() {
        let units: Vec<u16> = (0..9000usize).map(|i| if i % 5 == 0 { 0x8007 } else { (i * 7919) as u16 }).collect();
        let tops = bytes(&units);
        let columns: Vec<i8> = (0..9000usize).map(|i| (i * 3) as i8).collect();
        let magnitude = |i: usize| i64::from(units[i] >> 4 & MOST);
        let used = || (0..9000).filter(|&i| magnitude(i) != 0);
        let wanted = (used().map(|i| magnitude(i) - i64::from(columns[i])).sum::<i64>(), used().count() as u32);
        for level in Level::available() {
            assert_eq!(sum_of_row_at(level, &columns, &tops), wanted, "{level:?}");
            let mut sums = vec![1; 9000];
            let mut counts = vec![2; 9000];
            add_to_columns_at(level, &tops, &mut sums, &mut counts);
            assert!((0..9000).all(|i| i64::from(sums[i]) == 1 + magnitude(i)), "{level:?}");
            assert!((0..9000).all(|i| counts[i] == 2 + u32::from(magnitude(i) != 0)), "{level:?}");
        }
    }
}
