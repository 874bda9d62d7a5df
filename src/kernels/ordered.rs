//! Differences of floats as ordered integers: tokens, extra bits, and classes by the base's exponent.
//!
//! The sign-magnitude bits of a float map to an unsigned integer in the order of the numbers; neighbours differ by one.

use super::bits::{BitReader, BitWriter};

/// Where the exponent of a float lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exponent {
    /// Bits of the mantissa below it.
    pub(crate) shift: u32,
    /// The exponent's bits, shifted down.
    pub(crate) mask: u32,
}

/// Most classes.
pub(crate) const MAX_CLASSES: usize = 16;
/// Zigzag differences below this are tokens of their own.
const LITERALS: u32 = 16;

/// Extra bits of a token.
#[inline(always)]
pub(crate) fn extra_bits(token: u8) -> u32 {
    u32::from((token >> 3).max(1).wrapping_sub(1))
}

/// The largest token of units of `width` bytes.
pub(crate) fn max_token(width: usize) -> u8 {
    (LITERALS as usize + (8 * width - 4) * 8 - 1) as u8
}

/// Elements handled before the next step: their differences stay in the first-level cache.
const BLOCK: usize = 2048;

super::for_every_level! {
    /// The token of the difference of each unit of `width` bytes (1, 2 or 4) from that of the base.
    pub(crate) fn tokens / tokens_at(width: usize, base: &[u8], data: &[u8], out: &mut [u8]) = tokens_any;
}
super::for_every_level! {
    /// The extra bits of all differences, of which these are the tokens, as a stream.
    pub(crate) fn put_extra / put_extra_at(width: usize, base: &[u8], data: &[u8], tokens: &[u8]) -> Vec<u8> = put_extra_any;
}
super::for_every_level! {
    /// Units of `width` bytes from those of the base, tokens, and the stream of their extra bits; false if it does not end with the last of
    /// them. Differences that do not fit the width are taken modulo it.
    pub(crate) fn apply / apply_at(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool = apply_any;
}
super::for_every_level! {
    /// The exponent of each unit.
    pub(crate) fn exponents / exponents_at(width: usize, exponent: Exponent, units: &[u8], out: &mut [u8]) = exponents_any;
}
super::for_every_level! {
    /// The class of each exponent: how many of `bounds`, 255 for none, lie below it. In place.
    pub(crate) fn classes / classes_at(exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) = classes_any;
}
#[inline(always)]
fn all_literal(tokens: &[u8]) -> bool {
    u32::from(tokens.iter().copied().fold(0, u8::max)) < LITERALS
}

/// Differences of a block, and how long it is.
type Block = [u32; BLOCK];

#[inline(always)]
fn tokens_any(width: usize, base: &[u8], data: &[u8], out: &mut [u8]) {
    let mut block: Block = [0; BLOCK];
    for (at, out) in out.chunks_mut(BLOCK).enumerate() {
        let differences = &mut block[..out.len()];
        let range = at * BLOCK * width..(at * BLOCK + out.len()) * width;
        differences_of(width, &base[range.clone()], &data[range], differences);
        tokens_of(differences, out);
    }
}

#[inline(always)]
fn put_extra_any(width: usize, base: &[u8], data: &[u8], tokens: &[u8]) -> Vec<u8> {
    let of_block = |tokens: &[u8]| tokens.iter().map(|&token| extra_bits(token)).fold(0, u32::wrapping_add) as usize;
    let bits: usize = tokens.chunks(BLOCK).map(of_block).fold(0, usize::wrapping_add);
    let mut out = crate::spare::output(bits.div_ceil(8) + 8);
    out.resize(bits.div_ceil(8) + 8, 0);
    let mut writer = BitWriter::new(&mut out);
    let mut block: Block = [0; BLOCK];
    for (at, tokens) in tokens.chunks(BLOCK).enumerate() {
        if all_literal(tokens) {
            continue;
        }
        let differences = &mut block[..tokens.len()];
        let range = at * BLOCK * width..(at * BLOCK + tokens.len()) * width;
        differences_of(width, &base[range.clone()], &data[range], differences);
        // As many as fit into 56 bits: 12 each of 16-bit units, 28 of 32-bit units.
        if width == 4 { put_groups::<2>(differences, &mut writer) } else { put_groups::<4>(differences, &mut writer) }
    }
    let bytes = writer.finish();
    out.truncate(bytes);
    out
}

#[inline(always)]
fn put_groups<const N: usize>(differences: &[u32], writer: &mut BitWriter<'_>) {
    let (groups, rest) = differences.as_chunks::<N>();
    for group in groups {
        put_group(group, writer);
    }
    put_group(rest, writer);
}

#[inline(always)]
fn put_group(group: &[u32], writer: &mut BitWriter<'_>) {
    let (mut bits, mut count) = (0u64, 0u32);
    for &z in group {
        // The top bit and the three below stand in the token.
        let own = 28u32.wrapping_sub((z | (LITERALS - 1)).leading_zeros());
        bits |= u64::from(z & !(u32::MAX << (own & 31))) << (count & 63);
        count = count.wrapping_add(own);
    }
    writer.put(bits, count);
}

#[inline(always)]
fn apply_any(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    let mut reader = BitReader::new(bits);
    let mut block: Block = [0; BLOCK];
    for (at, tokens) in tokens.chunks(BLOCK).enumerate() {
        let differences = &mut block[..tokens.len()];
        if all_literal(tokens) {
            for (slot, &token) in differences.iter_mut().zip(tokens) {
                *slot = u32::from(token);
            }
        } else if width == 4 {
            take_groups::<2>(tokens, &mut reader, differences);
        } else {
            take_groups::<4>(tokens, &mut reader, differences);
        }
        let range = at * BLOCK * width..(at * BLOCK + tokens.len()) * width;
        apply_differences(width, &base[range.clone()], differences, &mut out[range]);
    }
    reader.is_at_end()
}

#[inline(always)]
fn take_groups<const N: usize>(tokens: &[u8], reader: &mut BitReader<'_>, out: &mut [u32]) {
    let (groups, rest) = tokens.as_chunks::<N>();
    let (slots, last) = out.as_chunks_mut::<N>();
    for (group, slots) in groups.iter().zip(slots) {
        take_group(group, reader, slots);
    }
    take_group(rest, reader, last);
}

#[inline(always)]
fn take_group(tokens: &[u8], reader: &mut BitReader<'_>, out: &mut [u32]) {
    let (mut word, mut count) = (reader.peek(), 0u32);
    for (slot, &token) in out.iter_mut().zip(tokens) {
        let own = extra_bits(token) & 31;
        *slot = least(token).wrapping_add(word as u32 & !(u32::MAX << own));
        word >>= own;
        count = count.wrapping_add(own);
    }
    reader.skip(count);
}

trait Unit<const W: usize>: Copy {
    fn get(bytes: [u8; W]) -> u32;
    fn put(value: u32) -> [u8; W];
}
macro_rules! unit {
    ($type:ty, $width:literal) => {
        #[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
        impl Unit<$width> for $type {
            #[inline(always)]
            fn get(bytes: [u8; $width]) -> u32 {
                u32::from(<$type>::from_le_bytes(bytes))
            }
            #[inline(always)]
            fn put(value: u32) -> [u8; $width] {
                (value as $type).to_le_bytes()
            }
        }
    };
}
unit!(u8, 1);
unit!(u16, 2);
unit!(u32, 4);

/// The ordered integer in the upper bits of 32, so that all widths wrap alike.
#[inline(always)]
fn order<const W: usize>(x: u32) -> u32 {
    let x = x << (32 - 8 * W as u32);
    let negative = ((x as i32) >> 31) as u32;
    x ^ (negative | 1 << 31)
}

#[inline(always)]
fn unorder<const W: usize>(x: u32) -> u32 {
    let positive = ((x as i32) >> 31) as u32;
    (x ^ (!positive | 1 << 31)) >> (32 - 8 * W as u32)
}

#[inline(always)]
fn differences_of(width: usize, base: &[u8], data: &[u8], out: &mut [u32]) {
    match width {
        1 => differences_width::<u8, 1>(base, data, out),
        2 => differences_width::<u16, 2>(base, data, out),
        _ => differences_width::<u32, 4>(base, data, out),
    }
}

#[inline(always)]
fn differences_width<U: Unit<W>, const W: usize>(base: &[u8], data: &[u8], out: &mut [u32]) {
    let bits = 8 * W as u32;
    let keep = u32::MAX << (32 - bits);
    for ((slot, base), new) in out.iter_mut().zip(base.as_chunks::<W>().0).zip(data.as_chunks::<W>().0) {
        // Ones below a negative number's bits come from the complement: cut them off.
        let difference = (order::<W>(U::get(*new)) & keep).wrapping_sub(order::<W>(U::get(*base)) & keep) as i32 >> (32 - bits);
        *slot = (difference as u32) << 1 ^ (difference >> 31) as u32;
    }
    if W < 4 {
        for slot in out.iter_mut() {
            *slot &= (1u32 << (bits & 31)).wrapping_sub(1);
        }
    }
}

#[inline(always)]
fn apply_differences(width: usize, base: &[u8], differences: &[u32], out: &mut [u8]) {
    match width {
        1 => apply_width::<u8, 1>(base, differences, out),
        2 => apply_width::<u16, 2>(base, differences, out),
        _ => apply_width::<u32, 4>(base, differences, out),
    }
}

#[inline(always)]
fn apply_width<U: Unit<W>, const W: usize>(base: &[u8], differences: &[u32], out: &mut [u8]) {
    let bits = 8 * W as u32;
    let keep = u32::MAX << (32 - bits);
    for ((unit, base), &z) in out.as_chunks_mut::<W>().0.iter_mut().zip(base.as_chunks::<W>().0).zip(differences) {
        let difference = (z >> 1) ^ (z & 1).wrapping_neg();
        let sum = (order::<W>(U::get(*base)) & keep).wrapping_add(difference << (32 - bits));
        *unit = U::put(unorder::<W>(sum));
    }
}

#[inline(always)]
fn exponents_any(width: usize, exponent: Exponent, units: &[u8], out: &mut [u8]) {
    match width {
        1 => exponents_width::<u8, 1>(exponent, units, out),
        2 => exponents_width::<u16, 2>(exponent, units, out),
        _ => exponents_width::<u32, 4>(exponent, units, out),
    }
}

#[inline(always)]
fn exponents_width<U: Unit<W>, const W: usize>(exponent: Exponent, units: &[u8], out: &mut [u8]) {
    for (slot, unit) in out.iter_mut().zip(units.as_chunks::<W>().0) {
        *slot = ((U::get(*unit) >> (exponent.shift & 31)) & exponent.mask) as u8;
    }
}

#[inline(always)]
fn classes_any(exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) {
    for slot in exponents.iter_mut() {
        let mut class = 0u8;
        for &bound in bounds {
            class = class.wrapping_add(u8::from(*slot > bound));
        }
        *slot = class;
    }
}

#[inline(always)]
fn tokens_of(differences: &[u32], out: &mut [u8]) {
    for (slot, &z) in out.iter_mut().zip(differences) {
        // Of a difference of 16 or more: its top bit and the three below.
        let e = 31u32.wrapping_sub((z | LITERALS).leading_zeros());
        let top = (z >> (e.wrapping_sub(3) & 31)) & 7;
        let bucket = LITERALS.wrapping_add(e.wrapping_sub(4).wrapping_mul(8)).wrapping_add(top);
        *slot = if z < LITERALS { z } else { bucket } as u8;
    }
}

/// The smallest difference of a token.
#[inline(always)]
pub(crate) fn least(token: u8) -> u32 {
    let buckets = (8 | u32::from(token) & 7) << (extra_bits(token) & 31);
    if token < 8 { u32::from(token) } else { buckets }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Level;

    #[test]
    fn tokens_cover_every_difference_once() {
        let mut next = 0u64;
        for token in 0..=max_token(4) {
            assert_eq!(u64::from(least(token)), next, "token {token}");
            next += 1u64 << extra_bits(token);
        }
        assert_eq!(next, 1 << 32);
        let mut next = 0u64;
        (0..=max_token(2)).for_each(|token| next += 1u64 << extra_bits(token));
        assert_eq!(next, 1 << 16);
        let mut next = 0u64;
        (0..=max_token(1)).for_each(|token| next += 1u64 << extra_bits(token));
        assert_eq!(next, 1 << 8);
    }

    #[test]
    #[allow(clippy::little_endian_bytes, reason = "elements are little-endian")]
    fn neighbours_differ_by_one_ulp() {
        let pairs =
            [(1.0f32, 1.0f32.next_up(), 2), (1.0, 1.0f32.next_down(), 1), (-0.0, 0.0, 2), (0.0, -0.0, 1), (-1.0, (-1.0f32).next_up(), 2)];
        for (base, new, z) in pairs {
            let mut out = [9];
            differences_of(4, &base.to_bits().to_le_bytes(), &new.to_bits().to_le_bytes(), &mut out);
            assert_eq!(out, [z], "{base} to {new}");
        }
    }

    #[test]
    fn every_level_gives_the_same_and_apply_inverts() {
        let noise = |seed: u64, bytes: usize| -> Vec<u8> {
            let mut state = seed;
            (0..bytes)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 56) as u8
                })
                .collect()
        };
        for width in [1, 2, 4] {
            for units in [0, 1, 15, 16, 17, 1000, 2 * BLOCK + 3] {
                let (base, mut data) = (noise(1, width * units), noise(2, width * units));
                data[..width * units / 2].copy_from_slice(&base[..width * units / 2]);
                let exponent = Exponent { shift: 2, mask: 0x1f };
                let mut bounds = [255; MAX_CLASSES - 1];
                bounds[..3].copy_from_slice(&[3, 7, 20]);
                let mut z = vec![0; units];
                differences_of(width, &base, &data, &mut z);
                let all = |level| {
                    let (mut t, mut c) = (vec![0; units], vec![0; units]);
                    tokens_at(level, width, &base, &data, &mut t);
                    exponents_at(level, width, exponent, &base, &mut c);
                    classes_at(level, &mut c, &bounds);
                    let bits = put_extra_at(level, width, &base, &data, &t);
                    let mut out = vec![0xaa; width * units];
                    assert!(apply_at(level, width, &base, &t, &bits, &mut out));
                    assert!(out == data, "{level:?}, {units} of {width}");
                    let longer = [bits.as_slice(), &[0]].concat();
                    assert!(!apply_at(level, width, &base, &t, &longer, &mut out), "a byte too many");
                    for (&t, &z) in t.iter().zip(&z) {
                        assert!(t <= max_token(width) && z >= least(t) && z - least(t) < 1 << extra_bits(t));
                    }
                    (t, c, bits)
                };
                let scalar = all(Level::Scalar);
                for level in Level::available() {
                    assert!(all(level) == scalar, "{level:?}");
                }
            }
        }
    }
}
