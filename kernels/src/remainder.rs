//! The difference between an f32 and its 16-bit rounding: the difference of magnitudes, as 16 bits in two planes.

super::for_every_level! {
    /// Returns the low and the high byte of each f32's magnitude minus the partner's magnitude, modulo 2^16.
    pub fn split / split_at(data: &[u8], partner: &[u8], f16: bool, low: &mut [u8], high: &mut [u8]) = split_any;
}

super::for_every_level! {
    /// Inverts `split` for differences in the window of the mode: from 0 on (`unsigned`), or from -2^15 on.
    pub fn join / join_at(partner: &[u8], f16: bool, unsigned: bool, low: &[u8], high: &[u8], out: &mut [u8]) = join_any;
}

super::for_every_level! {
    /// Rounds each f32 to the nearest bf16, ties to even. NaN stays NaN.
    pub fn round / round_at(data: &[u8], out: &mut [u8]) = round_any;
}

super::for_every_level! {
    /// Keeps `bits` bits, at most 15, of each difference of magnitudes: moves each number to the middle of all numbers
    /// with the same bits. A number stays if its difference does not come from rounding to nearest or towards zero.
    pub fn keep_bits / keep_bits_at(data: &[u8], partner: &[u8], f16: bool, bits: u8, out: &mut [u8]) = keep_bits_any;
}

/// Whether each f32 of a sample, evenly spaced over the elements, rounds to the 16-bit float of the same element. NaN counts
/// as equal to NaN.
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub fn rounds_to(data: &[u8], partner: &[u8], f16: bool) -> bool {
    let data = data.as_chunks::<4>().0;
    let partner = partner.as_chunks::<2>().0;
    let stride = data.len().div_ceil(SAMPLE_ELEMENTS).max(1);
    let agrees = |(ours, theirs): (&[u8; 4], &[u8; 2])| {
        let number = f32::from_le_bytes(*ours);
        let bits = u16::from_le_bytes(*theirs);
        let nearest = if f16 { half::f16::from_f32(number).to_bits() } else { half::bf16::from_f32(number).to_bits() };
        let is_nan = if f16 { half::f16::from_bits(bits).is_nan() } else { half::bf16::from_bits(bits).is_nan() };
        nearest == bits || number.is_nan() && is_nan
    };
    data.len() == partner.len() && data.iter().zip(partner).step_by(stride).all(agrees)
}

/// Elements that prove that one tensor is the rounding of another.
const SAMPLE_ELEMENTS: usize = 512;

#[inline(always)]
fn keep_bits_any(data: &[u8], partner: &[u8], f16: bool, bits: u8, out: &mut [u8]) {
    if f16 { keep_bits_with(data, partner, bits, out, widen_f16) } else { keep_bits_with(data, partner, bits, out, widen_bf16) }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn keep_bits_with(data: &[u8], partner: &[u8], bits: u8, out: &mut [u8], widen: impl Fn(u16) -> u32) {
    let width = 16 - u32::from(bits.min(15));
    let units = data.as_chunks::<4>().0.iter().zip(partner.as_chunks::<2>().0);
    for ((&data, &partner), out) in units.zip(out.as_chunks_mut::<4>().0) {
        let ours = u32::from_le_bytes(data);
        let theirs = widen(u16::from_le_bytes(partner));
        let difference = (ours & MAGNITUDE).wrapping_sub(theirs & MAGNITUDE) as i32;
        // Bins start at -2^15, so no bin spans two weights.
        let middle = ((difference >> width) << width) + (1 << (width - 1));
        let middle = if bits == 0 { 0 } else { middle };
        let moved = (theirs & MAGNITUDE).wrapping_add(middle as u32) & MAGNITUDE;
        let is_rounding = (-0x8000..0x1_0000).contains(&difference) & ((ours ^ theirs) >> 31 == 0);
        // Zeros, denormals and non-finite numbers stay. No other number becomes one of them.
        let is_normal = |magnitude: u32| (1..255).contains(&(magnitude >> 23));
        let moves = is_rounding & is_normal(ours & MAGNITUDE) & is_normal(moved);
        *out = (if moves { ours & !MAGNITUDE | moved } else { ours }).to_le_bytes();
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn round_any(data: &[u8], out: &mut [u8]) {
    for (data, out) in data.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<2>().0) {
        let bits = u32::from_le_bytes(*data);
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let is_nan = bits & MAGNITUDE > 0x7f80_0000;
        *out = (if is_nan { bits >> 16 | 0x40 } else { nearest } as u16).to_le_bytes();
    }
}

const MAGNITUDE: u32 = 0x7fff_ffff;

/// Converts the bits of a bf16 to the bits of the same f32.
#[inline(always)]
fn widen_bf16(bits: u16) -> u32 {
    u32::from(bits) << 16
}

/// Converts the bits of an f16 to the bits of the same f32. A subnormal is an integer multiple of 2^-24, so the
/// multiplication is exact.
#[inline(always)]
fn widen_f16(bits: u16) -> u32 {
    let exponent = u32::from(bits >> 10 & 0x1f);
    let mantissa = u32::from(bits & 0x3ff);
    let normal = (exponent + 112) << 23 | mantissa << 13;
    let subnormal = (mantissa as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
    let special = 0x7f80_0000 | mantissa << 13;
    let magnitude = if exponent == 0 {
        subnormal
    } else if exponent == 31 {
        special
    } else {
        normal
    };
    u32::from(bits >> 15) << 31 | magnitude
}

#[inline(always)]
fn split_any(data: &[u8], partner: &[u8], f16: bool, low: &mut [u8], high: &mut [u8]) {
    if f16 { split_with(data, partner, low, high, widen_f16) } else { split_with(data, partner, low, high, widen_bf16) }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn split_with(data: &[u8], partner: &[u8], low: &mut [u8], high: &mut [u8], widen: impl Fn(u16) -> u32) {
    let units = data.as_chunks::<4>().0.iter().zip(partner.as_chunks::<2>().0);
    for ((&data, &partner), (low, high)) in units.zip(low.iter_mut().zip(high)) {
        let ours = u32::from_le_bytes(data) & MAGNITUDE;
        let theirs = widen(u16::from_le_bytes(partner)) & MAGNITUDE;
        [*low, *high] = (ours.wrapping_sub(theirs) as u16).to_le_bytes();
    }
}

#[inline(always)]
fn join_any(partner: &[u8], f16: bool, unsigned: bool, low: &[u8], high: &[u8], out: &mut [u8]) {
    match (f16, unsigned) {
        (false, false) => join_with(partner, low, high, out, widen_bf16, |difference| difference as i16 as u32),
        (false, true) => join_with(partner, low, high, out, widen_bf16, u32::from),
        (true, false) => join_with(partner, low, high, out, widen_f16, |difference| difference as i16 as u32),
        (true, true) => join_with(partner, low, high, out, widen_f16, u32::from),
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn join_with(partner: &[u8], low: &[u8], high: &[u8], out: &mut [u8], widen: impl Fn(u16) -> u32, window: impl Fn(u16) -> u32) {
    let units = partner.as_chunks::<2>().0.iter().zip(low.iter().zip(high));
    for ((&partner, (&low, &high)), out) in units.zip(out.as_chunks_mut::<4>().0) {
        let theirs = widen(u16::from_le_bytes(partner));
        let magnitude = (theirs & MAGNITUDE).wrapping_add(window(u16::from_le_bytes([low, high]))) & MAGNITUDE;
        *out = (theirs & !MAGNITUDE | magnitude).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::Level;

    #[test]
    fn widening_is_exact() {
        for bits in 0..=u16::MAX {
            let brain = bf16::from_bits(bits);
            let half = f16::from_bits(bits);
            match brain.is_nan() {
                true => assert!(f32::from_bits(widen_bf16(bits)).is_nan()),
                false => assert_eq!(widen_bf16(bits), brain.to_f32().to_bits(), "{bits:#06x}"),
            }
            match half.is_nan() {
                true => assert!(f32::from_bits(widen_f16(bits)).is_nan()),
                false => assert_eq!(widen_f16(bits), half.to_f32().to_bits(), "{bits:#06x}"),
            }
        }
    }

    #[test]
    fn all_levels_agree() {
        let mut x = 3u64;
        let mut noise = |bytes: usize| -> Vec<u8> {
            let next = |_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) as u8
            };
            (0..bytes).map(next).collect()
        };
        for units in [0usize, 1, 7, 64, 1001] {
            let data = noise(4 * units);
            let partner = noise(2 * units);
            for f16 in [false, true] {
                let mut low = vec![0; units];
                let mut high = vec![0; units];
                split_at(Level::Scalar, &data, &partner, f16, &mut low, &mut high);
                for level in Level::available() {
                    let mut other_low = vec![0; units];
                    let mut other_high = vec![0; units];
                    split_at(level, &data, &partner, f16, &mut other_low, &mut other_high);
                    assert_eq!((&low, &high), (&other_low, &other_high), "{level:?}");
                    for unsigned in [false, true] {
                        let mut expected = vec![0; 4 * units];
                        let mut out = vec![0; 4 * units];
                        join_at(Level::Scalar, &partner, f16, unsigned, &low, &high, &mut expected);
                        join_at(level, &partner, f16, unsigned, &low, &high, &mut out);
                        assert_eq!(expected, out, "{level:?}");
                    }
                }
            }
        }
    }
}
