//! Formats of numbers.

/// Format of the numbers in a chunk, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberFormat {
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// One byte.
    F8(Float8Format),
}

/// Format of 8-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float8Format {
    /// OCP: 4 exponent bits, finite and NaN only.
    E4M3,
    /// OCP: 5 exponent bits.
    E5M2,
    /// 4 exponent bits, no negative zero.
    E4M3Fnuz,
    /// 5 exponent bits, no negative zero.
    E5M2Fnuz,
    /// OCP microscaling scale: exponent only.
    E8M0,
}
