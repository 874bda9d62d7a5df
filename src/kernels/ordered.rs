//! Differences of floats as ordered integers: tokens, extra bits, and classes by the base's exponent.
//!
//! The sign-magnitude bits of a float map to an unsigned integer in numeric order. Adjacent floats map to adjacent
//! integers.

use super::Level;
use super::bits::{BitReader, BitWriter};

/// Position of the exponent in a float.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exponent {
    /// Number of mantissa bits below the exponent.
    pub(crate) shift: u32,
    /// Mask of the exponent after the shift.
    pub(crate) mask: u32,
}

/// Greatest number of classes.
pub(crate) const MAX_CLASSES: usize = 16;
/// Zigzag differences below this value are tokens themselves.
const LITERALS: u32 = 16;

/// Returns the number of extra bits of a token.
#[inline(always)]
pub(crate) fn extra_bits(token: u8) -> u32 {
    u32::from((token >> 3).max(1).wrapping_sub(1))
}

/// Returns the greatest token of units of `width` bytes.
pub(crate) fn max_token(width: usize) -> u8 {
    (LITERALS as usize + (8 * width - 4) * 8 - 1) as u8
}

/// Number of elements per step, so that their differences stay in the first-level cache.
const BLOCK: usize = 2048;

super::for_every_level! {
    /// Returns the token of each unit's difference from the base's unit, for a `width` of 1, 2 or 4 bytes.
    pub(crate) fn tokens / tokens_at(width: usize, base: &[u8], data: &[u8], out: &mut [u8]) = tokens_any;
}
super::for_every_level! {
    /// Returns the exponent of each unit.
    pub(crate) fn exponents / exponents_at(width: usize, exponent: Exponent, units: &[u8], out: &mut [u8]) = exponents_any;
}
super::for_every_level! {
    /// Replaces each exponent by its class: the number of `bounds` below the exponent. Unused bounds are 255.
    pub(crate) fn classes / classes_at(exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) = classes_any;
}
/// Returns the extra bits of all differences as a bit stream. `tokens` are the tokens of the differences.
pub(crate) fn put_extra(width: usize, base: &[u8], data: &[u8], tokens: &[u8]) -> Vec<u8> {
    put_extra_at(Level::best(), width, base, data, tokens)
}

fn put_extra_at(level: Level, width: usize, base: &[u8], data: &[u8], tokens: &[u8]) -> Vec<u8> {
    match (level, width) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        (Level::Avx2, _) => unsafe { x86::put_extra_avx2(width, base, data, tokens) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Level::Avx512, _) => unsafe { x86::put_extra_avx512(width, base, data, tokens) },
        (_, 4) => put_extra_any(width, base, data, tokens, extract::<2>),
        _ => put_extra_any(width, base, data, tokens, extract::<4>),
    }
}

/// Decodes units of `width` bytes from the base's units, tokens, and the stream of extra bits. Returns false if the
/// stream does not end with the last unit. Differences wrap modulo the width.
pub(crate) fn apply(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    apply_at(Level::best(), width, base, tokens, bits, out)
}

fn apply_at(level: Level, width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    match (level, width) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        (Level::Avx2, _) => unsafe { x86::apply_avx2(width, base, tokens, bits, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Level::Avx512, _) => unsafe { x86::apply_avx512(width, base, tokens, bits, out) },
        (_, 4) => apply_any(width, base, tokens, bits, out, deposit::<2>),
        _ => apply_any(width, base, tokens, bits, out, deposit::<4>),
    }
}

/// The same bodies, compiled with the instructions that extract and deposit bits under a mask (BMI2).
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_pdep_u64, _pext_u64};

    use super::{apply_any, put_extra_any};

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn put_extra_avx2(width: usize, base: &[u8], data: &[u8], tokens: &[u8]) -> Vec<u8> {
        put_extra_any(width, base, data, tokens, |word, mask| _pext_u64(word, mask))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn put_extra_avx512(width: usize, base: &[u8], data: &[u8], tokens: &[u8]) -> Vec<u8> {
        put_extra_any(width, base, data, tokens, |word, mask| _pext_u64(word, mask))
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn apply_avx2(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
        apply_any(width, base, tokens, bits, out, |word, mask| _pdep_u64(word, mask))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn apply_avx512(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
        apply_any(width, base, tokens, bits, out, |word, mask| _pdep_u64(word, mask))
    }
}

/// Extracts the bits under the mask from each of `N` lanes, and concatenates them. The mask covers the lowest bits of
/// each lane.
#[inline(always)]
fn extract<const N: usize>(word: u64, mask: u64) -> u64 {
    let (mut bits, mut count) = (0, 0u32);
    for lane in 0..N as u32 {
        let at = 64 / N as u32 * lane;
        let own = mask >> at & u64::MAX >> (64 - 64 / N);
        bits |= (word >> at & own) << (count & 63);
        count = count.wrapping_add(own.count_ones());
    }
    bits
}

/// Inverts [`extract`].
#[inline(always)]
fn deposit<const N: usize>(mut bits: u64, mask: u64) -> u64 {
    let mut word = 0;
    for lane in 0..N as u32 {
        let at = 64 / N as u32 * lane;
        let own = mask >> at & u64::MAX >> (64 - 64 / N);
        word |= (bits & own) << at;
        bits >>= own.count_ones() & 63;
    }
    word
}

#[inline(always)]
fn tokens_any(width: usize, base: &[u8], data: &[u8], out: &mut [u8]) {
    match width {
        1 => narrow::tokens::<u8, 1>(base, data, out),
        2 => narrow::tokens::<u16, 2>(base, data, out),
        _ => wide::tokens::<u32, 4>(base, data, out),
    }
}

#[inline(always)]
fn all_literal(tokens: &[u8]) -> bool {
    u32::from(tokens.iter().copied().fold(0, u8::max)) < LITERALS
}

/// Returns whether so few tokens are `least` or more that they are better handled one by one.
#[inline(always)]
fn are_few(tokens: &[u8], least: u8) -> bool {
    let count = tokens.iter().map(|&token| u32::from(token >= least)).fold(0, u32::wrapping_add);
    count as usize <= tokens.len() / 16
}

/// Calls `act` with the position of each token that is `least` or more.
#[inline(always)]
fn for_each_from(tokens: &[u8], least: u8, mut act: impl FnMut(usize, u8)) {
    for (at, some) in tokens.chunks(32).enumerate() {
        if some.iter().copied().fold(0, u8::max) < least {
            continue;
        }
        for (i, &token) in some.iter().enumerate() {
            if token >= least {
                act(32 * at + i, token);
            }
        }
    }
}

#[inline(always)]
fn put_extra_any(width: usize, base: &[u8], data: &[u8], tokens: &[u8], extract: impl Fn(u64, u64) -> u64) -> Vec<u8> {
    let of_block = |tokens: &[u8]| tokens.iter().map(|&token| extra_bits(token)).fold(0, u32::wrapping_add) as usize;
    let bits: usize = tokens.chunks(BLOCK).map(of_block).fold(0, usize::wrapping_add);
    let mut out = crate::spare::output(bits.div_ceil(8) + 8);
    out.resize(bits.div_ceil(8) + 8, 0);
    let mut writer = BitWriter::new(&mut out);
    match width {
        1 => narrow::put_extra::<u8, 1>(base, data, tokens, extract, &mut writer),
        2 => narrow::put_extra::<u16, 2>(base, data, tokens, extract, &mut writer),
        _ => wide::put_extra::<u32, 4>(base, data, tokens, extract, &mut writer),
    }
    let bytes = writer.finish();
    out.truncate(bytes);
    out
}

#[inline(always)]
fn apply_any(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8], deposit: impl Fn(u64, u64) -> u64) -> bool {
    let mut reader = BitReader::new(bits);
    match width {
        1 => narrow::apply::<u8, 1>(base, tokens, &mut reader, out, deposit),
        2 => narrow::apply::<u16, 2>(base, tokens, &mut reader, out, deposit),
        _ => wide::apply::<u32, 4>(base, tokens, &mut reader, out, deposit),
    }
    reader.is_at_end()
}

/// Unsigned integer of `W` bytes, in the byte order of elements.
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

/// Computes differences in blocks. Lanes have the narrowest type that fits: a vector holds twice as many 16-bit lanes
/// as 32-bit lanes.
macro_rules! lanes {
    ($name:ident, $lane:ty, $signed:ty) => {
        mod $name {
            use super::{BLOCK, BitReader, BitWriter, LITERALS, Unit, all_literal, are_few, extra_bits, for_each_from};

            const BITS: u32 = <$lane>::BITS;
            /// Number of lanes in a word.
            const LANES: usize = 64 / BITS as usize;
            type Block = [$lane; BLOCK];
            type Words = [u64; BLOCK / LANES];

            /// Returns the ordered integer in the upper bits of a lane, with zeros below, so that all widths wrap
            /// alike.
            #[inline(always)]
            fn order<const W: usize>(unit: u32) -> $lane {
                let x = (unit as $lane) << (BITS - 8 * W as u32);
                let negative = ((x as $signed) >> (BITS - 1)) as $lane;
                // The complement of a negative number sets the bits below the integer; clear them.
                (x ^ (negative | 1 << (BITS - 1))) & <$lane>::MAX << (BITS - 8 * W as u32)
            }

            #[inline(always)]
            fn unorder<const W: usize>(x: $lane) -> u32 {
                let positive = ((x as $signed) >> (BITS - 1)) as $lane;
                u32::from((x ^ (!positive | 1 << (BITS - 1))) >> (BITS - 8 * W as u32))
            }

            #[inline(always)]
            pub(super) fn differences<U: Unit<W>, const W: usize>(base: &[u8], data: &[u8], out: &mut [$lane]) {
                for ((slot, base), new) in out.iter_mut().zip(base.as_chunks::<W>().0).zip(data.as_chunks::<W>().0) {
                    *slot = difference::<W>(U::get(*base), U::get(*new));
                }
            }

            #[inline(always)]
            fn difference<const W: usize>(base: u32, new: u32) -> $lane {
                let difference = order::<W>(new).wrapping_sub(order::<W>(base)) as $signed >> (BITS - 8 * W as u32);
                let zigzag = (difference as $lane) << 1 ^ (difference >> (BITS - 1)) as $lane;
                zigzag & <$lane>::MAX >> (BITS - 8 * W as u32)
            }

            /// Inverts [`difference`].
            #[inline(always)]
            fn sum<const W: usize>(base: u32, z: $lane) -> u32 {
                let difference = (z >> 1) ^ (z & 1).wrapping_neg();
                unorder::<W>(order::<W>(base).wrapping_add(difference << (BITS - 8 * W as u32)))
            }

            /// Returns a mask of a token's extra bits.
            #[inline(always)]
            fn mask_of(token: u8) -> u64 {
                !(u64::MAX << (extra_bits(token) & (BITS - 1)))
            }

            /// Returns the smallest difference of a token.
            #[inline(always)]
            pub(super) fn least(token: u8) -> $lane {
                let buckets = <$lane>::from(8 | token & 7) << (extra_bits(token) & (BITS - 1));
                if token < 8 { <$lane>::from(token) } else { buckets }
            }

            /// Writes a mask of each token's extra bits; zero for the rest of the block.
            #[inline(always)]
            fn masks_of(tokens: &[u8], masks: &mut Block) {
                for (mask, &token) in masks.iter_mut().zip(tokens) {
                    *mask = !(<$lane>::MAX << (extra_bits(token) & (BITS - 1)));
                }
                masks[tokens.len()..].fill(0);
            }

            #[inline(always)]
            fn join(numbers: &Block, words: &mut Words) {
                for (word, numbers) in words.iter_mut().zip(numbers.as_chunks::<LANES>().0) {
                    let mut joined = 0;
                    for (lane, &number) in (0u32..).zip(numbers) {
                        joined |= u64::from(number) << BITS.wrapping_mul(lane);
                    }
                    *word = joined;
                }
            }

            #[inline(always)]
            pub(super) fn tokens<U: Unit<W>, const W: usize>(base: &[u8], data: &[u8], out: &mut [u8]) {
                let mut block: Block = [0; BLOCK];
                let inputs = base.chunks(BLOCK * W).zip(data.chunks(BLOCK * W));
                for (out, (base, data)) in out.chunks_mut(BLOCK).zip(inputs) {
                    differences::<U, W>(base, data, &mut block);
                    for (slot, &z) in out.iter_mut().zip(&block) {
                        let z = u32::from(z);
                        // A token of a difference of 16 or more holds the position of its top bit and the next three
                        // bits.
                        let e = 31u32.wrapping_sub((z | LITERALS).leading_zeros());
                        let top = (z >> (e.wrapping_sub(3) & 31)) & 7;
                        let bucket = LITERALS.wrapping_add(e.wrapping_sub(4).wrapping_mul(8)).wrapping_add(top);
                        *slot = if z < LITERALS { z } else { bucket } as u8;
                    }
                }
            }

            #[inline(always)]
            pub(super) fn put_extra<U: Unit<W>, const W: usize>(
                base: &[u8],
                data: &[u8],
                tokens: &[u8],
                extract: impl Fn(u64, u64) -> u64,
                writer: &mut BitWriter<'_>,
            ) {
                let (mut block, mut masks): (Block, Block) = ([0; BLOCK], [0; BLOCK]);
                let (mut words, mut under): (Words, Words) = ([0; BLOCK / LANES], [0; BLOCK / LANES]);
                let inputs = base.chunks(BLOCK * W).zip(data.chunks(BLOCK * W));
                for (tokens, (base, data)) in tokens.chunks(BLOCK).zip(inputs) {
                    if all_literal(tokens) {
                        continue;
                    }
                    if are_few(tokens, LITERALS as u8) {
                        let (base, data) = (base.as_chunks::<W>().0, data.as_chunks::<W>().0);
                        for_each_from(tokens, LITERALS as u8, |at, token| {
                            let (Some(base), Some(new)) = (base.get(at), data.get(at)) else { return };
                            let z = difference::<W>(U::get(*base), U::get(*new));
                            writer.put(u64::from(z) & mask_of(token), extra_bits(token));
                        });
                        continue;
                    }
                    differences::<U, W>(base, data, &mut block);
                    masks_of(tokens, &mut masks);
                    join(&block, &mut words);
                    join(&masks, &mut under);
                    // Append as many numbers as fit into 56 bits.
                    for (&word, &mask) in words.iter().zip(&under).take(tokens.len().div_ceil(LANES)) {
                        writer.put(extract(word, mask), mask.count_ones());
                    }
                }
            }

            #[inline(always)]
            pub(super) fn apply<U: Unit<W>, const W: usize>(
                base: &[u8],
                tokens: &[u8],
                reader: &mut BitReader<'_>,
                out: &mut [u8],
                deposit: impl Fn(u64, u64) -> u64,
            ) {
                let (mut block, mut masks): (Block, Block) = ([0; BLOCK], [0; BLOCK]);
                let mut words: Words = [0; BLOCK / LANES];
                let outputs = base.chunks(BLOCK * W).zip(out.chunks_mut(BLOCK * W));
                for (tokens, (base, out)) in tokens.chunks(BLOCK).zip(outputs) {
                    if are_few(tokens, 1) && out.len() == base.len() {
                        out.copy_from_slice(base);
                        let (base, out) = (base.as_chunks::<W>().0, out.as_chunks_mut::<W>().0);
                        for_each_from(tokens, 1, |at, token| {
                            let extra = (reader.peek() & mask_of(token)) as $lane;
                            reader.skip(extra_bits(token));
                            let (Some(base), Some(unit)) = (base.get(at), out.get_mut(at)) else { return };
                            *unit = U::put(sum::<W>(U::get(*base), least(token).wrapping_add(extra)));
                        });
                        continue;
                    }
                    for (slot, &token) in block.iter_mut().zip(tokens) {
                        *slot = least(token);
                    }
                    if !all_literal(tokens) {
                        masks_of(tokens, &mut masks);
                        join(&masks, &mut words);
                        for word in words.iter_mut().take(tokens.len().div_ceil(LANES)) {
                            let mask = *word;
                            *word = deposit(reader.peek(), mask);
                            reader.skip(mask.count_ones());
                        }
                        for (numbers, &word) in block.as_chunks_mut::<LANES>().0.iter_mut().zip(&words) {
                            for (lane, number) in (0u32..).zip(numbers) {
                                *number = number.wrapping_add((word >> BITS.wrapping_mul(lane)) as $lane);
                            }
                        }
                    }
                    for ((unit, base), &z) in out.as_chunks_mut::<W>().0.iter_mut().zip(base.as_chunks::<W>().0).zip(&block) {
                        *unit = U::put(sum::<W>(U::get(*base), z));
                    }
                }
            }
        }
    };
}
lanes!(narrow, u16, i16);
lanes!(wide, u32, i32);

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_cover_every_difference_once() {
        let mut next = 0u64;
        for token in 0..=max_token(4) {
            assert_eq!(u64::from(wide::least(token)), next, "token {token}");
            assert!(token > max_token(2) || u64::from(narrow::least(token)) == next, "token {token}");
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
            wide::differences::<u32, 4>(&base.to_bits().to_le_bytes(), &new.to_bits().to_le_bytes(), &mut out);
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
                // Few of many differ.
                (0..width * units / 2).step_by(61).for_each(|at| data[at] ^= 1 << (at % 8));
                let exponent = Exponent { shift: 2, mask: 0x1f };
                let mut bounds = [255; MAX_CLASSES - 1];
                bounds[..3].copy_from_slice(&[3, 7, 20]);
                let (mut z, mut z16) = (vec![0; units], vec![0; units]);
                match width {
                    1 => narrow::differences::<u8, 1>(&base, &data, &mut z16),
                    2 => narrow::differences::<u16, 2>(&base, &data, &mut z16),
                    _ => wide::differences::<u32, 4>(&base, &data, &mut z),
                }
                if width < 4 {
                    z = z16.into_iter().map(u32::from).collect();
                }
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
                        assert!(t <= max_token(width) && z >= wide::least(t) && z - wide::least(t) < 1 << extra_bits(t));
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
