//! Finds NaN and infinities: in most types, floats whose exponent has all bits set. Reads each chunk once, for these
//! types as fast as memory gives it.

use super::float8::Float8;
use crate::NumberFormat;

super::for_every_level! {
    /// Returns whether all numbers are finite.
    pub fn is_finite / is_finite_at(format: NumberFormat, data: &[u8]) -> bool = is_finite_any;
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are stored in this order")]
fn is_finite_any(format: NumberFormat, data: &[u8]) -> bool {
    match format {
        NumberFormat::F16 => all(data, |bytes| u16::from_le_bytes(bytes) & 0x7c00 != 0x7c00),
        NumberFormat::Bf16 => all(data, |bytes| u16::from_le_bytes(bytes) & 0x7f80 != 0x7f80),
        NumberFormat::F32 => all(data, |bytes| u32::from_le_bytes(bytes) & 0x7f80_0000 != 0x7f80_0000),
        NumberFormat::F64 => all(data, |bytes| u64::from_le_bytes(bytes) & 0x7ff0_0000_0000_0000 != 0x7ff0_0000_0000_0000),
        NumberFormat::F8(format) => Float8::of(format).is_finite(data),
    }
}

/// Number of bytes after which the search may stop. Within a block there is no branch, so that the loop is vectorised.
const BLOCK_BYTES: usize = 4096;

#[inline(always)]
fn all<const W: usize>(data: &[u8], is_finite: impl Fn([u8; W]) -> bool) -> bool {
    data.chunks(BLOCK_BYTES).all(|block| block.as_chunks::<W>().0.iter().fold(true, |all, &bytes| all & is_finite(bytes)))
}

#[cfg(test)]
#[allow(clippy::little_endian_bytes, reason = "test data")]
mod tests {
    use super::is_finite_at;
    use crate::Level;
    use crate::{Float8Format, NumberFormat};

    /// One element of every kind at every place of a short list, and at the ends of a long one.
    #[test]
    fn every_level_finds_each_element_that_is_not_finite() {
        let numbers = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE / 2.0, -0.0];
        let encode = |format: NumberFormat, number: f32| match format {
            NumberFormat::F16 => half::f16::from_f32(number.clamp(-6e4, 6e4)).to_le_bytes().to_vec(),
            NumberFormat::Bf16 => half::bf16::from_bits((number.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
            NumberFormat::F32 => number.to_le_bytes().to_vec(),
            _ => f64::from(number).to_le_bytes().to_vec(),
        };
        for level in Level::available() {
            for format in [NumberFormat::F16, NumberFormat::Bf16, NumberFormat::F32, NumberFormat::F64] {
                for number in numbers {
                    let number = if format == NumberFormat::F16 && number.is_infinite() { f32::NAN } else { number };
                    for (count, places) in [(67usize, (0..67).collect::<Vec<_>>()), (5000, vec![0, 4999])] {
                        for place in places {
                            let data: Vec<u8> = (0..count).flat_map(|at| encode(format, if at == place { number } else { 1.5 })).collect();
                            assert_eq!(is_finite_at(level, format, &data), number.is_finite(), "{format:?} {number} at {place}");
                        }
                    }
                }
            }
            for (format, special) in [
                (NumberFormat::F8(Float8Format::E4M3), vec![0x7f, 0xff]),
                (NumberFormat::F8(Float8Format::E5M2), vec![0x7c, 0x7d, 0x7e, 0x7f, 0xfc, 0xfd, 0xfe, 0xff]),
                (NumberFormat::F8(Float8Format::E4M3Fnuz), vec![0x80]),
                (NumberFormat::F8(Float8Format::E5M2Fnuz), vec![0x80]),
                (NumberFormat::F8(Float8Format::E8M0), vec![0xff]),
            ] {
                let found: Vec<u8> = (0..=255).filter(|&bits| !is_finite_at(level, format, &[0, bits, 0])).collect();
                assert_eq!(found, special, "{format:?}");
            }
        }
    }
}
