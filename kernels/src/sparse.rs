//! Changed units as ranks: the position of each among the units whose base has the same exponent. Spec: `spec/codecs/sparse.md`.

use super::bytes;

/// A changed unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Number of units of the same exponent before it.
    pub rank: u32,
    /// Difference of the ordered integers (ordered 2.1).
    pub difference: i64,
}

/// Number of units from which a histogram is faster than counting one by one.
const MANY: usize = 512;

/// Number of units that are compared as a whole. Most blocks of a chunk with few changes have none.
const BLOCK: usize = 32;

/// Calls `act` with each changed unit and its exponent, for units of 1, 2 or 4 bytes.
pub fn find(width: usize, exponents: &[u8], base: &[u8], data: &[u8], act: impl FnMut(u8, Change)) {
    match width {
        1 => find_width::<1>(exponents, base, data, act),
        2 => find_width::<2>(exponents, base, data, act),
        _ => find_width::<4>(exponents, base, data, act),
    }
}

fn find_width<const W: usize>(exponents: &[u8], base: &[u8], data: &[u8], mut act: impl FnMut(u8, Change)) {
    let mut seen = [0u32; 256];
    let mut counted = 0;
    let blocks = base.as_chunks::<W>().0.chunks(BLOCK).zip(data.as_chunks::<W>().0.chunks(BLOCK));
    for (block, (base, data)) in blocks.enumerate() {
        if base == data {
            continue;
        }
        for (i, (base, data)) in base.iter().zip(data).enumerate().filter(|(_, (base, data))| base != data) {
            let at = BLOCK * block + i;
            let before = exponents.get(counted..at).unwrap_or_default();
            if before.len() >= MANY {
                seen.iter_mut().zip(bytes::histogram(before)).for_each(|(seen, more)| *seen = seen.wrapping_add(more));
            } else {
                before.iter().for_each(|&exponent| seen[usize::from(exponent)] = seen[usize::from(exponent)].wrapping_add(1));
            }
            counted = at;
            let exponent = exponents.get(at).copied().unwrap_or_default();
            let difference = difference::<W>(number(*base), number(*data));
            act(exponent, Change { rank: seen[usize::from(exponent)], difference });
        }
    }
}

/// Applies changes to the units in `out`, which are those of the base. `changes` has those of each exponent, by rank.
pub fn apply(width: usize, exponents: &[u8], changes: &[Vec<Change>], out: &mut [u8]) {
    match width {
        1 => apply_width::<1>(exponents, changes, out),
        2 => apply_width::<2>(exponents, changes, out),
        _ => apply_width::<4>(exponents, changes, out),
    }
}

fn apply_width<const W: usize>(exponents: &[u8], changes: &[Vec<Change>], out: &mut [u8]) {
    // Number of units of each exponent up to its next change; 0 if there is none.
    let mut left = [0u32; 256];
    let mut next = [0usize; 256];
    for (left, changes) in left.iter_mut().zip(changes) {
        *left = changes.first().map_or(0, |first| first.rank.wrapping_add(1));
    }
    for (&exponent, unit) in exponents.iter().zip(out.as_chunks_mut::<W>().0) {
        let exponent = usize::from(exponent);
        left[exponent] = left[exponent].wrapping_sub(1);
        if left[exponent] != 0 {
            continue;
        }
        let Some(of_exponent) = changes.get(exponent).and_then(|changes| changes.get(next[exponent]..)) else { continue };
        if let Some(change) = of_exponent.first() {
            *unit = moved(*unit, change.difference);
            left[exponent] = of_exponent.get(1).map_or(0, |after| after.rank.wrapping_sub(change.rank));
            next[exponent] = next[exponent].wrapping_add(1);
        }
    }
}

fn number<const W: usize>(unit: [u8; W]) -> u64 {
    unit.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// The ordered integer of a unit (ordered 2).
fn ordered<const W: usize>(unit: u64) -> i64 {
    let half = 1i64 << (8 * W - 1);
    let unit = unit as i64;
    if unit < half { unit + half } else { 2 * half - 1 - unit }
}

fn difference<const W: usize>(base: u64, data: u64) -> i64 {
    let whole = 1i64 << (8 * W);
    let difference = ordered::<W>(data) - ordered::<W>(base);
    // From -whole / 2 to whole / 2 - 1.
    (difference + whole + whole / 2) % whole - whole / 2
}

fn moved<const W: usize>(unit: [u8; W], difference: i64) -> [u8; W] {
    let half = 1i64 << (8 * W - 1);
    let value = ordered::<W>(number(unit)).wrapping_add(difference).rem_euclid(2 * half);
    let unit = if value >= half { value - half } else { 2 * half - 1 - value };
    std::array::from_fn(|i| (unit >> (8 * i)) as u8)
}

#[cfg(test)]
mod tests {
    use super::{difference, moved, number};

    #[test]
    fn differences_lead_from_any_unit_to_any_other() {
        for base in 0..=255u8 {
            for data in 0..=255u8 {
                let d = difference::<1>(u64::from(base), u64::from(data));
                assert!((-128..128).contains(&d) && (d == 0) == (base == data));
                assert_eq!(moved([base], d), [data]);
            }
        }
        let unit = |bits: u32| -> [u8; 4] { std::array::from_fn(|i| (bits >> (8 * i)) as u8) };
        let ends = [0u32, 1, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, 0xffff_ffff, 0x3f80_0000, 0xbf80_0000];
        for base in ends {
            for data in ends {
                let d = difference::<4>(u64::from(base), u64::from(data));
                assert_eq!(number(moved(unit(base), d)), u64::from(data));
            }
        }
    }
}
