//! Changed units as ranks: the position of each among the units whose base has the same exponent. Spec: `spec/codecs/sparse.md`.

use super::bytes;
use super::spare::Spare;

/// A changed unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Number of units of the same exponent before it.
    pub rank: u32,
    /// Difference of the ordered integers (ordered 2.1).
    pub difference: i64,
}

/// Number of parts of a base that are counted by turns. The count of one part does not wait for that of another.
const PARTS: usize = 4;

/// The units of a base by their exponents.
#[derive(Debug)]
pub struct Units {
    exponents: Spare,
    /// Number of units of each exponent before each part.
    before: [[u32; 256]; PARTS],
    totals: [u32; 256],
}

impl Units {
    /// `exponents`: one byte for each unit.
    pub fn new(exponents: Spare) -> Self {
        let mut totals = [0u32; 256];
        let before = parts(&exponents).map(|part| {
            let before = totals;
            totals.iter_mut().zip(bytes::histogram(part)).for_each(|(total, more)| *total = total.wrapping_add(more));
            before
        });
        Self { exponents, before, totals }
    }

    /// Number of units of each exponent.
    pub fn totals(&self) -> &[u32; 256] {
        &self.totals
    }

    /// The units of `width` bytes in `data` that differ from those of the base: those of each exponent, by rank.
    pub fn changes(&self, width: usize, base: &[u8], data: &[u8]) -> Vec<Vec<Change>> {
        match width {
            1 => self.changes_of::<1>(base, data),
            2 => self.changes_of::<2>(base, data),
            _ => self.changes_of::<4>(base, data),
        }
    }

    fn changes_of<const W: usize>(&self, base: &[u8], data: &[u8]) -> Vec<Vec<Change>> {
        let mut found: [Vec<Vec<Change>>; PARTS] = std::array::from_fn(|_| vec![Vec::new(); 256]);
        let mut seen = self.before;
        let base = parts(base.as_chunks::<W>().0);
        let data = parts(data.as_chunks::<W>().0);
        let exponents = parts(&self.exponents);
        let units: [_; PARTS] = std::array::from_fn(|part| exponents[part].iter().zip(base[part]).zip(data[part]));
        for_each_unit(units, |part, _, ((&exponent, old), new)| {
            let seen = &mut seen[part][usize::from(exponent)];
            if old != new
                && let Some(found) = found[part].get_mut(usize::from(exponent))
            {
                found.push(Change { rank: *seen, difference: difference::<W>(number(*old), number(*new)) });
            }
            *seen = seen.wrapping_add(1);
        });
        let [mut all, others @ ..] = found;
        for part in others {
            all.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
        }
        all
    }

    /// Applies changes to the units in `out`, which are those of the base. `changes` has those of each exponent, by rank.
    pub fn apply(&self, width: usize, changes: &[Vec<Change>], out: &mut [u8]) {
        match width {
            1 => self.apply_of::<1>(changes, out),
            2 => self.apply_of::<2>(changes, out),
            _ => self.apply_of::<4>(changes, out),
        }
    }

    fn apply_of<const W: usize>(&self, changes: &[Vec<Change>], out: &mut [u8]) {
        let units = out.as_chunks_mut::<W>().0;
        let exponents = parts(&self.exponents);
        // The next change of each exponent, and the number of its units up to that; 0 if there is none.
        let mut next = [[0usize; 256]; PARTS];
        let mut left = [[0u32; 256]; PARTS];
        for (part, before) in self.before.iter().enumerate() {
            for (exponent, (changes, &before)) in changes.iter().zip(before).enumerate() {
                let first = changes.partition_point(|change| change.rank < before);
                next[part][exponent] = first;
                left[part][exponent] = changes.get(first).map_or(0, |first| first.rank.wrapping_sub(before).wrapping_add(1));
            }
        }
        let starts: [usize; PARTS] = std::array::from_fn(|part| exponents.iter().take(part).map(|part| part.len()).sum());
        for_each_unit(exponents.map(<[u8]>::iter), |part, at, &exponent| {
            let exponent = usize::from(exponent);
            let left = &mut left[part][exponent];
            *left = left.wrapping_sub(1);
            if *left != 0 {
                return;
            }
            let next = &mut next[part][exponent];
            let Some(of_exponent) = changes.get(exponent).and_then(|changes| changes.get(*next..)) else { return };
            if let (Some(change), Some(unit)) = (of_exponent.first(), units.get_mut(starts[part].wrapping_add(at))) {
                *unit = moved(*unit, change.difference);
                *left = of_exponent.get(1).map_or(0, |after| after.rank.wrapping_sub(change.rank));
                *next = next.wrapping_add(1);
            }
        });
    }
}

/// The units in parts of equal length, but for the last one.
fn parts<T>(units: &[T]) -> [&[T]; PARTS] {
    let mut rest = units;
    let length = units.len().div_ceil(PARTS);
    std::array::from_fn(|_| {
        let (part, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        part
    })
}

/// Calls `act` with the part, the position in the part and the item of each unit, by turns of the parts.
#[inline(always)]
fn for_each_unit<I: ExactSizeIterator + Clone>([a, b, c, d]: [I; PARTS], mut act: impl FnMut(usize, usize, I::Item)) {
    let in_all = d.len();
    for (at, (((of_a, of_b), of_c), of_d)) in a.clone().zip(b.clone()).zip(c.clone()).zip(d).enumerate() {
        act(0, at, of_a);
        act(1, at, of_b);
        act(2, at, of_c);
        act(3, at, of_d);
    }
    for (part, units) in [a, b, c].into_iter().enumerate() {
        (in_all..).zip(units.skip(in_all)).for_each(|(at, item)| act(part, at, item));
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
    use super::{Change, Units, difference, moved, number};
    use crate::spare::Spare;

    /// Changes by the words of the spec: a rank is the number of units before with the same exponent.
    fn counted<const W: usize>(exponents: &[u8], base: &[u8], data: &[u8]) -> Vec<Vec<Change>> {
        let mut found = vec![Vec::new(); 256];
        let mut seen = [0u32; 256];
        for ((&exponent, base), data) in exponents.iter().zip(base.as_chunks::<W>().0).zip(data.as_chunks::<W>().0) {
            let rank = seen[usize::from(exponent)];
            if base != data {
                found[usize::from(exponent)].push(Change { rank, difference: difference::<W>(number(*base), number(*data)) });
            }
            seen[usize::from(exponent)] += 1;
        }
        found
    }

    #[test]
    fn changes_are_found_and_applied() {
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        for count in [0, 1, 2, 3, 4, 5, 63, 1000, 1026, 20_003] {
            // One of so many units changes, and so many exponents occur.
            for (one_of, kinds) in [(1, 3), (2, 1), (7, 256), (100, 20), (3000, 5), (1 << 40, 7)] {
                let exponents: Vec<u8> = (0..count).map(|_| (next() % kinds * 37) as u8).collect();
                for width in [1, 2, 4] {
                    let base: Vec<u8> = (0..count * width).map(|_| next() as u8).collect();
                    let mut data = base.clone();
                    for unit in data.chunks_mut(width) {
                        let change = if next().is_multiple_of(one_of) { next() as u8 } else { 0 };
                        unit[0] ^= change;
                    }
                    let expected = match width {
                        1 => counted::<1>(&exponents, &base, &data),
                        2 => counted::<2>(&exponents, &base, &data),
                        _ => counted::<4>(&exponents, &base, &data),
                    };
                    let units = Units::new(Spare::copy_of(&exponents).unwrap());
                    assert_eq!(units.changes(width, &base, &data), expected, "{count} units of {width} bytes, one of {one_of}");
                    let mut out = base.clone();
                    units.apply(width, &expected, &mut out);
                    assert!(out == data, "{count} units of {width} bytes, one of {one_of}");
                }
            }
        }
    }

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
