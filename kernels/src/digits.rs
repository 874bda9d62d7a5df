//! Quotients as exponents, numbers of significant bits, and those bits. Spec: `spec/codecs/gradient.md`.

use super::bits::{BitReader, BitWriter};
use super::floats::{floats, unit};

/// Length that stands for an element stored as it is.
pub const ESCAPE: u8 = 25;

/// Number of stored bits of a length: the sign, and what lies between the first and the last significant bit.
#[inline(always)]
fn stored_bits(length: u8) -> u32 {
    match length {
        0 => 0,
        1..ESCAPE => u32::from(length).max(2).wrapping_sub(1),
        _ => 32,
    }
}

/// Returns exponent and number of significant bits of a quotient.
#[inline(always)]
pub fn shape(quotient: f32) -> (u8, u8) {
    let bits = quotient.to_bits();
    let exponent = (bits >> 23) as u8;
    let length = 24u32.wrapping_sub((bits | 1 << 23).trailing_zeros()) as u8;
    match exponent {
        _ if bits == 0 => (0, 0),
        1..=254 => (exponent, length),
        _ => (0, ESCAPE),
    }
}

/// Splits quotients. Returns the stream of bits; `elements` are stored where there is no quotient.
pub fn split(quotients: &[u8], elements: &[u8], exponents: &mut [u8], lengths: &mut [u8]) -> Vec<u8> {
    let mut total = 0usize;
    for (quotient, (exponent, length)) in floats(quotients).zip(exponents.iter_mut().zip(lengths.iter_mut())) {
        (*exponent, *length) = shape(quotient);
        total = total.wrapping_add(stored_bits(*length) as usize);
    }
    let mut out = crate::spare::output(total / 8 + 9);
    out.resize(total / 8 + 9, 0);
    let mut writer = BitWriter::new(&mut out);
    for ((quotient, element), &length) in floats(quotients).zip(floats(elements)).zip(lengths.iter()) {
        let bits = quotient.to_bits();
        let middle = (bits & 0x7f_ffff) >> (25u32.wrapping_sub(u32::from(length)) & 31);
        let stored = match length {
            0 => 0,
            1 => bits >> 31,
            2..ESCAPE => bits >> 31 | middle << 1,
            _ => element.to_bits(),
        };
        writer.put(u64::from(stored), stored_bits(length));
    }
    let bytes = writer.finish();
    out.truncate(bytes);
    out
}

/// Inverts [`split`]. Where there is no quotient, `out` gets the element. Returns false if exponents, lengths and bits
/// disagree.
pub fn join(exponents: &[u8], lengths: &[u8], bits: &[u8], out: &mut [u8]) -> bool {
    let mut reader = BitReader::new(bits);
    let mut agree = true;
    for ((&exponent, &length), out) in exponents.iter().zip(lengths).zip(out.as_chunks_mut::<4>().0) {
        let count = stored_bits(length);
        let stored = (reader.peek() & ((1 << count) - 1)) as u32;
        reader.skip(count);
        let is_number = (1..ESCAPE).contains(&length);
        agree &= length <= ESCAPE && is_number == (1..=254).contains(&exponent) && (is_number || exponent == 0);
        let last = if length > 1 { 1 << (24u32.wrapping_sub(u32::from(length)) & 31) } else { 0 };
        let middle = (stored >> 1).wrapping_shl(25u32.wrapping_sub(u32::from(length)));
        let number = (stored & 1) << 31 | u32::from(exponent) << 23 | if length > 2 { middle } else { 0 } | last;
        let whole = if is_number { number } else { stored };
        *out = unit(f32::from_bits(whole));
    }
    agree && reader.is_at_end()
}

#[cfg(test)]
mod tests {
    use super::{ESCAPE, join, split};
    use crate::floats::to_bytes;

    #[test]
    fn join_inverts_split() {
        let mut x = 3u64;
        let numbers: Vec<f32> = (0..10_000u32)
            .map(|i| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let bits = (x >> 32) as u32 & u32::MAX << (i % 24);
                f32::from_bits(if i % 50 == 0 { 0 } else { bits })
            })
            .collect();
        let quotients = to_bytes(&numbers);
        let elements = to_bytes(&numbers.iter().map(|x| x + 1.0).collect::<Vec<_>>());
        let mut exponents = vec![0; numbers.len()];
        let mut lengths = vec![0; numbers.len()];
        let bits = split(&quotients, &elements, &mut exponents, &mut lengths);
        let mut out = vec![0; quotients.len()];
        assert!(join(&exponents, &lengths, &bits, &mut out));
        for ((out, &length), (quotient, element)) in
            out.as_chunks::<4>().0.iter().zip(&lengths).zip(quotients.as_chunks::<4>().0.iter().zip(elements.as_chunks::<4>().0))
        {
            assert_eq!(out, if length == ESCAPE { element } else { quotient });
        }
        assert!(!join(&exponents, &lengths, &[bits.as_slice(), &[0]].concat(), &mut out), "a byte too many");
        exponents[1] = 255;
        assert!(!join(&exponents, &lengths, &bits, &mut out), "an exponent of no number");
    }
}
