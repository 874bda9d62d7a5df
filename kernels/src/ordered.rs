//! Differences of floats as ordered integers: tokens, extra bits, and classes by the base's exponent.
//!
//! The sign-magnitude bits of a float map to an unsigned integer in numeric order. Adjacent floats map to adjacent
//! integers.

mod lanes;

use super::Level;
use super::bits::{BitAppender, BitReader};
pub use lanes::extra_bits;
use lanes::{LITERALS, Unit, narrow, wide};

/// Position of the exponent in a float.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exponent {
    /// Number of mantissa bits below the exponent.
    pub shift: u32,
    /// Mask of the exponent after the shift.
    pub mask: u32,
}

/// Greatest number of classes.
pub const MAX_CLASSES: usize = 16;

/// Returns the greatest token of units of `width` bytes.
pub fn max_token(width: usize) -> u8 {
    (LITERALS as usize + (8 * width - 4) * 8 - 1) as u8
}

super::for_every_level! {
    /// Returns the token of each unit's difference from the base's unit, for a `width` of 1, 2 or 4 bytes.
    pub fn tokens / tokens_at(width: usize, base: &[u8], data: &[u8], out: &mut [u8]) = tokens_any;
}
super::for_every_level! {
    /// Returns the exponent of each unit.
    pub fn exponents / exponents_at(width: usize, exponent: Exponent, units: &[u8], out: &mut [u8]) = exponents_any;
}
super::for_every_level! {
    #[allow(dead_code, reason = "its caller knows the level")]
    /// Like [`classes`], by comparing each exponent with every bound.
    fn compare / compare_at(exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) = compare_any;
}

/// Replaces each exponent by its class: the number of `bounds` below the exponent. Unused bounds are 255.
pub fn classes(exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) {
    classes_at(Level::best(), exponents, bounds);
}

/// With AVX-512, looks up each class in a table of all 256 exponents, if there are enough to pay for it.
fn classes_at(level: Level, exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) {
    let rest = match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if exponents.len() >= 1024 => {
            let mut table: [u8; 256] = std::array::from_fn(|exponent| exponent as u8);
            compare_at(level, &mut table, bounds);
            // SAFETY: the level says that the features were detected.
            unsafe { x86::look_up(&table, exponents) }
        }
        _ => exponents,
    };
    compare_at(level, rest, bounds);
}

/// Fills `tokens` with the token of each unit's difference from the base's unit. Returns the extra bits of all
/// differences as a bit stream.
pub fn encode(width: usize, base: &[u8], data: &[u8], tokens: &mut [u8]) -> Vec<u8> {
    encode_at(Level::best(), width, base, data, tokens)
}

fn encode_at(level: Level, width: usize, base: &[u8], data: &[u8], tokens: &mut [u8]) -> Vec<u8> {
    match (level, width) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        (Level::Avx2, _) => unsafe { x86::encode_avx2(width, base, data, tokens) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Level::Avx512, _) => unsafe { x86::encode_avx512(width, base, data, tokens) },
        (_, 4) => encode_any(width, base, data, tokens, (extract::<2>, lanes::find)),
        _ => encode_any(width, base, data, tokens, (extract::<4>, lanes::find)),
    }
}

/// Decodes units of `width` bytes from the base's units, tokens, and the stream of extra bits. Returns false if the
/// stream does not end with the last unit. Differences wrap modulo the width.
pub fn apply(width: usize, base: &[u8], tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    apply_at(Level::best(), width, Some(base), tokens, bits, out)
}

/// Like [`apply`]. `out` holds the base's units.
pub fn apply_in_place(width: usize, tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    apply_at(Level::best(), width, None, tokens, bits, out)
}

fn apply_at(level: Level, width: usize, base: Option<&[u8]>, tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    match (level, width) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the features were detected.
        (Level::Avx2, _) => unsafe { x86::apply_avx2(width, base, tokens, bits, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Level::Avx512, _) => unsafe { x86::apply_avx512(width, base, tokens, bits, out) },
        (_, 4) => apply_any(width, base, tokens, bits, out, (deposit::<2>, lanes::find)),
        _ => apply_any(width, base, tokens, bits, out, (deposit::<4>, lanes::find)),
    }
}

/// The same bodies, compiled with the instructions that extract and deposit bits under a mask (BMI2).
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{apply_any, encode_any};

    #[target_feature(enable = "avx2")]
    fn find_avx2(tokens: &[u8; 64], least: u8) -> u64 {
        let least = _mm256_set1_epi8(least as i8);
        let [low, high] = [0, 32].map(|at| {
            // SAFETY: a load of 32 bytes from an array of 64, at 0 or 32.
            let tokens = unsafe { _mm256_loadu_si256(tokens.as_ptr().add(at).cast()) };
            _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(tokens, least), tokens)) as u32
        });
        u64::from(high) << 32 | u64::from(low)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    fn find_avx512(tokens: &[u8; 64], least: u8) -> u64 {
        // SAFETY: a load of 64 bytes from an array of 64.
        let tokens = unsafe { _mm512_loadu_si512(tokens.as_ptr().cast()) };
        _mm512_cmpge_epu8_mask(tokens, _mm512_set1_epi8(least as i8))
    }

    /// Replaces whole groups of 64 bytes by their entries in a table. Returns the remaining bytes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) fn look_up<'a>(table: &[u8; 256], bytes: &'a mut [u8]) -> &'a mut [u8] {
        // SAFETY: four loads of 64 bytes within 256.
        let table: [__m512i; 4] = std::array::from_fn(|i| unsafe { _mm512_loadu_si512(table.as_ptr().add(64 * i).cast()) });
        let (groups, rest) = bytes.as_chunks_mut::<64>();
        for group in groups {
            // SAFETY: a load of 64 bytes from an array of 64.
            let at = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
            let low = _mm512_permutex2var_epi8(table[0], at, table[1]);
            let high = _mm512_permutex2var_epi8(table[2], at, table[3]);
            let found = _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
            // SAFETY: a store of 64 bytes to an array of 64.
            unsafe { _mm512_storeu_si512(group.as_mut_ptr().cast(), found) };
        }
        rest
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn encode_avx2(width: usize, base: &[u8], data: &[u8], tokens: &mut [u8]) -> Vec<u8> {
        encode_any(width, base, data, tokens, (|word, mask| _pext_u64(word, mask), |tokens, least| find_avx2(tokens, least)))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn encode_avx512(width: usize, base: &[u8], data: &[u8], tokens: &mut [u8]) -> Vec<u8> {
        encode_any(width, base, data, tokens, (|word, mask| _pext_u64(word, mask), |tokens, least| find_avx512(tokens, least)))
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn apply_avx2(width: usize, base: Option<&[u8]>, tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
        apply_any(width, base, tokens, bits, out, (|word, mask| _pdep_u64(word, mask), |tokens, least| find_avx2(tokens, least)))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) fn apply_avx512(width: usize, base: Option<&[u8]>, tokens: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
        apply_any(width, base, tokens, bits, out, (|word, mask| _pdep_u64(word, mask), |tokens, least| find_avx512(tokens, least)))
    }
}

/// Extracts the bits under the mask from each of `N` lanes, and concatenates them. The mask covers the lowest bits of
/// each lane.
#[inline(always)]
fn extract<const N: usize>(word: u64, mask: u64) -> u64 {
    let mut bits = 0;
    let mut count = 0u32;
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
fn encode_any(
    width: usize,
    base: &[u8],
    data: &[u8],
    tokens: &mut [u8],
    by: (impl Fn(u64, u64) -> u64, impl Fn(&[u8; 64], u8) -> u64 + Copy),
) -> Vec<u8> {
    let mut bits = BitAppender::default();
    match width {
        1 => narrow::encode::<u8, 1>(base, data, tokens, by, &mut bits),
        2 => narrow::encode::<u16, 2>(base, data, tokens, by, &mut bits),
        _ => wide::encode::<u32, 4>(base, data, tokens, by, &mut bits),
    }
    bits.finish()
}

#[inline(always)]
fn apply_any(
    width: usize,
    base: Option<&[u8]>,
    tokens: &[u8],
    bits: &[u8],
    out: &mut [u8],
    by: (impl Fn(u64, u64) -> u64, impl Fn(&[u8; 64], u8) -> u64 + Copy),
) -> bool {
    let mut reader = BitReader::new(bits);
    match width {
        1 => narrow::apply::<u8, 1>(base, tokens, &mut reader, out, by),
        2 => narrow::apply::<u16, 2>(base, tokens, &mut reader, out, by),
        _ => wide::apply::<u32, 4>(base, tokens, &mut reader, out, by),
    }
    reader.is_at_end()
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
fn compare_any(exponents: &mut [u8], bounds: &[u8; MAX_CLASSES - 1]) {
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
    use super::lanes::BLOCK;
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
    fn every_level_finds_the_class_of_every_exponent() {
        let bounds = [0, 1, 62, 63, 64, 126, 127, 128, 190, 191, 192, 253, 254, 255, 255];
        let exponents: Vec<u8> = (0..2053).map(|i| i as u8).collect();
        let expected: Vec<u8> = exponents.iter().map(|e| bounds.iter().filter(|&bound| e > bound).count() as u8).collect();
        for level in Level::available() {
            for count in [0, 5, 1000, exponents.len()] {
                let mut found = exponents[..count].to_vec();
                classes_at(level, &mut found, &bounds);
                assert!(found == expected[..count], "{level:?}, {count} exponents");
            }
        }
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
                let base = noise(1, width * units);
                let mut data = noise(2, width * units);
                data[..width * units / 2].copy_from_slice(&base[..width * units / 2]);
                // Few of many differ.
                (0..width * units / 2).step_by(61).for_each(|at| data[at] ^= 1 << (at % 8));
                let exponent = Exponent { shift: 2, mask: 0x1f };
                let mut bounds = [255; MAX_CLASSES - 1];
                bounds[..3].copy_from_slice(&[3, 7, 20]);
                let mut z = vec![0; units];
                let mut z16 = vec![0; units];
                match width {
                    1 => narrow::differences::<u8, 1>(&base, &data, &mut z16),
                    2 => narrow::differences::<u16, 2>(&base, &data, &mut z16),
                    _ => wide::differences::<u32, 4>(&base, &data, &mut z),
                }
                if width < 4 {
                    z = z16.into_iter().map(u32::from).collect();
                }
                let all = |level| {
                    let mut t = vec![0; units];
                    let mut c = vec![0; units];
                    let mut only_tokens = t.clone();
                    let bits = encode_at(level, width, &base, &data, &mut t);
                    tokens_at(level, width, &base, &data, &mut only_tokens);
                    assert!(t == only_tokens);
                    exponents_at(level, width, exponent, &base, &mut c);
                    classes_at(level, &mut c, &bounds);
                    let mut out = vec![0xaa; width * units];
                    assert!(apply_at(level, width, Some(&base), &t, &bits, &mut out));
                    assert!(out == data, "{level:?}, {units} of {width}");
                    out.copy_from_slice(&base);
                    assert!(apply_at(level, width, None, &t, &bits, &mut out));
                    assert!(out == data, "in place, {level:?}, {units} of {width}");
                    let longer = [bits.as_slice(), &[0]].concat();
                    assert!(!apply_at(level, width, Some(&base), &t, &longer, &mut out), "a byte too many");
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
