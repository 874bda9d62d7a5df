//! Conversion between f32 and the bytes of a chunk.

use crate::NumberFormat;
use crate::memory::OutOfMemory;
use crate::spare::{MaybeSpare, Spare};

/// Iterates over the numbers of a chunk.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub fn floats(data: &[u8]) -> impl Iterator<Item = f32> + Clone + '_ {
    data.as_chunks::<4>().0.iter().map(|unit| f32::from_le_bytes(*unit))
}

/// Iterates over the numbers of a chunk of f32, bf16 or f16, each as the f32 that equals it. Chunks of other formats have none.
#[inline(always)]
pub fn numbers(format: Option<NumberFormat>, data: &[u8]) -> impl Iterator<Item = f32> + Clone + '_ {
    let of = |wanted: NumberFormat| if format == Some(wanted) { data } else { &[] };
    let brain = halves(of(NumberFormat::Bf16)).map(|bits| half::bf16::from_bits(bits).to_f32());
    floats(of(NumberFormat::F32)).chain(brain).chain(halves(of(NumberFormat::F16)).map(|bits| half::f16::from_bits(bits).to_f32()))
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn halves(data: &[u8]) -> impl Iterator<Item = u16> + Clone + '_ {
    data.as_chunks::<2>().0.iter().map(|unit| u16::from_le_bytes(*unit))
}

/// Returns the numbers of a chunk of f32 or bf16 as f32.
pub fn widen(format: Option<NumberFormat>, data: &[u8]) -> Result<MaybeSpare<'_>, OutOfMemory> {
    if format == Some(NumberFormat::F32) {
        return Ok(MaybeSpare::Borrowed(data));
    }
    let mut wide = Spare::new(2 * data.len(), "numbers")?;
    for (&[low, high], out) in data.as_chunks::<2>().0.iter().zip(wide.as_chunks_mut::<4>().0) {
        *out = [0, 0, low, high];
    }
    Ok(MaybeSpare::Own(wide))
}

/// Inverts [`widen`], for numbers of the format's precision.
pub fn narrow_to(format: Option<NumberFormat>, wide: &[u8], out: &mut [u8]) {
    if format == Some(NumberFormat::F32) {
        return out.copy_from_slice(wide);
    }
    for (&[_, _, low, high], out) in wide.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<2>().0) {
        *out = [low, high];
    }
}

/// Returns the bytes of a number.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub fn unit(number: f32) -> [u8; 4] {
    number.to_le_bytes()
}

/// Returns the bytes of consecutive numbers.
pub fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| unit(*number)).collect()
}

/// Generates numbers of all sizes, including subnormals, infinities and NaN.
#[cfg(test)]
pub(super) fn odd_numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 32) as u32
    };
    let bits = |i: usize, random: u32| match i % 7 {
        0 => random,
        1 => random & 0x807f_ffff,
        _ => (random & 0x81ff_ffff) | 0x3800_0000,
    };
    (0..count).map(|i| f32::from_bits(bits(i, next()))).collect()
}
