//! Comparison of two runs of elements: number of changed elements, largest distance of floats, number of NaNs.
//!
//! Floats are compared as ordered integers: the sign and the magnitude of their bits. One step of this integer is one
//! unit in the last place (ulp). Both zeros are 0. A pair with a NaN counts as changed if its bits differ, but has no
//! distance.

use tensorcask::Dtype;

/// Result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Difference {
    pub elements: u64,
    pub changed: u64,
    /// Largest distance in ulps; `None` for types that are not floats.
    pub max_ulps: Option<u64>,
    /// Number of NaNs in the second run; `None` for types that are not floats.
    pub nans: Option<u64>,
}

/// Layout of the bits of a float, below the sign bit if the type has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Float {
    bits: u32,
    signed: bool,
    /// Largest magnitude that is a number; larger ones are NaNs.
    largest: u64,
    /// Whether the bits of negative zero are the NaN.
    nan_is_minus_zero: bool,
}

/// Layout of the bits of a float type; `None` for other types.
pub(crate) fn float_of(dtype: Dtype) -> Option<Float> {
    let float = |bits, largest| Some(Float { bits, signed: true, largest, nan_is_minus_zero: false });
    match dtype {
        Dtype::F16 => float(16, 0x7c00),
        Dtype::Bf16 => float(16, 0x7f80),
        Dtype::F32 | Dtype::C64 => float(32, 0x7f80_0000),
        Dtype::F64 | Dtype::C128 => float(64, 0x7ff0_0000_0000_0000),
        Dtype::F8E4M3 => float(8, 0x7e),
        Dtype::F8E5M2 => float(8, 0x7c),
        Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => Some(Float { bits: 8, signed: true, largest: 0x7f, nan_is_minus_zero: true }),
        Dtype::F8E8M0 => Some(Float { bits: 8, signed: false, largest: 0xfe, nan_is_minus_zero: false }),
        Dtype::F6E2M3 | Dtype::F6E3M2 => float(6, 0x1f),
        Dtype::F4E2M1 => float(4, 0x7),
        _ => None,
    }
}

impl Float {
    /// Ordered integer of a float; `None` for NaN.
    pub(crate) fn ordered(self, bits: u64) -> Option<i64> {
        let sign = if self.signed { 1 << (self.bits - 1) } else { 0 };
        let magnitude = bits & !sign;
        if magnitude > self.largest || (self.nan_is_minus_zero && bits == sign) {
            return None;
        }
        // `largest` keeps the magnitude below 2^63.
        let magnitude = magnitude as i64;
        Some(if bits & sign == 0 { magnitude } else { -magnitude })
    }
}

impl Difference {
    /// Creates an empty comparison.
    pub(crate) fn new(dtype: Dtype) -> Self {
        let zero = float_of(dtype).map(|_| 0);
        Self { elements: 0, changed: 0, max_ulps: zero, nans: zero }
    }

    /// Adds `elements` elements, row-major and little-endian. Both runs must have the same length.
    pub(crate) fn add(&mut self, dtype: Dtype, elements: u64, a: &[u8], b: &[u8]) {
        let float = float_of(dtype);
        self.elements += elements;
        each_element(dtype, elements, a, b, |parts| self.element(float, parts));
    }

    /// Adds one element, given as the bits of its parts in both runs.
    fn element(&mut self, float: Option<Float>, parts: &[(u64, u64)]) {
        let changed = parts.iter().any(|(a, b)| a != b);
        self.changed += u64::from(changed);
        let Some(float) = float else { return };
        if parts.iter().any(|(_, b)| float.ordered(*b).is_none()) {
            self.nans = self.nans.map(|nans| nans + 1);
        }
        if !changed {
            return;
        }
        for &(a, b) in parts {
            if let (Some(a), Some(b)) = (float.ordered(a), float.ordered(b)) {
                self.max_ulps = self.max_ulps.max(Some(a.abs_diff(b)));
            }
        }
    }
}

/// Calls `visit` for each element of two runs of the same length, with the bits of its parts in both. A complex number
/// has two parts.
pub(crate) fn each_element(dtype: Dtype, elements: u64, a: &[u8], b: &[u8], mut visit: impl FnMut(&[(u64, u64)])) {
    match (dtype.bits(), dtype.unit_bytes()) {
        (width @ 1..8, _) => (0..elements).for_each(|element| visit(&[(packed(a, element, width), packed(b, element, width))])),
        (8, _) => whole::<1>(a, b, visit),
        (16, _) => whole::<2>(a, b, visit),
        (32, _) => whole::<4>(a, b, visit),
        (64, 8) => whole::<8>(a, b, visit),
        (64, _) => complex::<4>(a, b, visit),
        _ => complex::<8>(a, b, visit),
    }
}

fn whole<const WIDTH: usize>(a: &[u8], b: &[u8], mut visit: impl FnMut(&[(u64, u64)])) {
    for (a, b) in a.as_chunks::<WIDTH>().0.iter().zip(b.as_chunks::<WIDTH>().0) {
        visit(&[(bits(a), bits(b))]);
    }
}

fn complex<const WIDTH: usize>(a: &[u8], b: &[u8], mut visit: impl FnMut(&[(u64, u64)])) {
    let a = a.as_chunks::<WIDTH>().0.as_chunks::<2>().0;
    let b = b.as_chunks::<WIDTH>().0.as_chunks::<2>().0;
    for ([a_real, a_imaginary], [b_real, b_imaginary]) in a.iter().zip(b) {
        visit(&[(bits(a_real), bits(b_real)), (bits(a_imaginary), bits(b_imaginary))]);
    }
}

/// Bits of a little-endian element.
fn bits<const WIDTH: usize>(bytes: &[u8; WIDTH]) -> u64 {
    bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))
}

/// Bits of element `element` in a packed run, low bits first.
fn packed(bytes: &[u8], element: u64, width: u64) -> u64 {
    let first = element * width;
    let byte = |at: u64| usize::try_from(at).ok().and_then(|at| bytes.get(at)).copied().map_or(0, u64::from);
    (byte(first / 8) | byte(first / 8 + 1) << 8) >> (first % 8) & ((1 << width) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(dtype: Dtype, elements: u64, a: &[u8], b: &[u8]) -> (u64, Option<u64>, Option<u64>) {
        let mut difference = Difference::new(dtype);
        difference.add(dtype, elements, a, b);
        assert_eq!(difference.elements, elements);
        (difference.changed, difference.max_ulps, difference.nans)
    }

    #[test]
    fn distances_of_floats() {
        // bf16: 1.0 and the next; the smallest positive and negative number, 2 apart; both zeros; NaN.
        let a = [0x80, 0x3f, 0x01, 0x00, 0x00, 0x00, 0x80, 0x3f];
        let b = [0x81, 0x3f, 0x01, 0x80, 0x00, 0x80, 0xc0, 0x7f];
        assert_eq!(compare(Dtype::Bf16, 4, &a, &b), (4, Some(2), Some(1)));
        assert_eq!(compare(Dtype::Bf16, 4, &b, &b), (0, Some(0), Some(1)), "a NaN that stays is counted");
        // f64: from one infinity to the other.
        let infinity = |sign: u8| [0, 0, 0, 0, 0, 0, 0xf0, 0x7f | sign];
        assert_eq!(compare(Dtype::F64, 1, &infinity(0), &infinity(0x80)), (1, Some(0xffe0_0000_0000_0000), Some(0)));
        assert_eq!(compare(Dtype::F8E4M3, 3, &[0x7e, 0x80, 1], &[0x7f, 0, 2]), (3, Some(1), Some(1)));
        assert_eq!(compare(Dtype::F8E5M2Fnuz, 2, &[0x80, 0x7f], &[0x80, 0xff]), (1, Some(254), Some(1)));
        assert_eq!(compare(Dtype::F8E8M0, 2, &[0, 1], &[0xfe, 0xff]), (2, Some(0xfe), Some(1)));
        // Complex: one element, of which only the imaginary part differs.
        assert_eq!(compare(Dtype::C64, 1, &[0; 8], &[0, 0, 0, 0, 3, 0, 0, 0]), (1, Some(3), Some(0)));
    }

    #[test]
    fn packed_and_whole_numbers() {
        assert_eq!(compare(Dtype::I32, 2, &[0; 8], &[0, 0, 0, 0, 9, 0, 0, 0]), (1, None, None));
        assert_eq!(compare(Dtype::Int4, 3, &[0x21, 0x03], &[0x31, 0x03]), (1, None, None));
        // f6: elements 1, 2, 3, 4 in 3 bytes; the second becomes -2, the last stays.
        let f6 = |elements: [u32; 4]| {
            let bits = elements.iter().rev().fold(0u32, |bits, element| bits << 6 | element);
            [bits as u8, (bits >> 8) as u8, (bits >> 16) as u8]
        };
        assert_eq!(compare(Dtype::F6E2M3, 4, &f6([1, 2, 3, 4]), &f6([1, 0x22, 3, 4])), (1, Some(4), Some(0)));
    }
}
