//! Conversion between f32 and the bytes of a chunk.

/// Iterates over the numbers of a chunk.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub(crate) fn floats(data: &[u8]) -> impl Iterator<Item = f32> + Clone + '_ {
    data.as_chunks::<4>().0.iter().map(|unit| f32::from_le_bytes(*unit))
}

/// Returns the bytes of a number.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub(crate) fn unit(number: f32) -> [u8; 4] {
    number.to_le_bytes()
}

/// Returns the bytes of consecutive numbers.
pub(crate) fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| unit(*number)).collect()
}
