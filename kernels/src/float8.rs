//! Statistics of 8-bit floats, by tables of all 256 elements. Spec: spec/statistics.md, clauses 3 and 4.
//!
//! Most of a chunk's statistics follow from the number of times that each of the 256 elements occurs. Only the sums and
//! the sample depend on the order of the elements.

use super::statistics::measures::{ChangeStatistics, LANES, SAMPLE, ValueStatistics, range_of, total};
use crate::Float8Format;

/// All elements of an 8-bit float type.
pub(super) struct Float8 {
    /// Values by bits: numbers, infinities and NaN.
    values: [f64; 256],
    /// Values of the finite elements, and zero for others.
    finite: [f64; 256],
    /// Position of a finite element in their order. Both zeros have position 0.
    keys: [i16; 256],
    /// Least positive normal element.
    least_normal: f64,
}

impl Float8 {
    /// The elements of a format.
    pub(super) fn of(format: Float8Format) -> &'static Self {
        match format {
            Float8Format::E4M3 => &E4M3,
            Float8Format::E5M2 => &E5M2,
            Float8Format::E4M3Fnuz => &E4M3_FNUZ,
            Float8Format::E5M2Fnuz => &E5M2_FNUZ,
            Float8Format::E8M0 => &E8M0,
        }
    }

    /// Value of an element.
    #[cfg(test)]
    pub(super) fn value(&self, bits: u8) -> f64 {
        self.values[usize::from(bits)]
    }

    /// Least positive normal element.
    #[cfg(test)]
    pub(super) fn least_normal(&self) -> f64 {
        self.least_normal
    }

    /// Whether all elements are finite.
    pub(super) fn is_finite(&self, data: &[u8]) -> bool {
        data.iter().all(|&bits| self.values[usize::from(bits)].is_finite())
    }

    /// Measures elements.
    pub(super) fn measure(&self, data: &[u8]) -> ValueStatistics {
        let mut found = ValueStatistics::default();
        let mut sums = [0f64; LANES];
        let mut squares = [0f64; LANES];
        let mut counts = [0u64; 256];
        for row in data.chunks(LANES) {
            for ((sum, square), &bits) in sums.iter_mut().zip(&mut squares).zip(row) {
                let value = self.finite[usize::from(bits)];
                *sum += value;
                *square += value * value;
                counts[usize::from(bits)] += 1;
            }
        }
        for (&value, &count) in self.values.iter().zip(&counts).filter(|(_, count)| **count > 0) {
            match value {
                f64::INFINITY => found.positive_infinity += count,
                f64::NEG_INFINITY => found.negative_infinity += count,
                _ if value.is_nan() => found.nan += count,
                _ => {
                    // A negative zero becomes positive.
                    let value = value + 0.0;
                    found.zero += if value == 0.0 { count } else { 0 };
                    found.subnormal += if value != 0.0 && value.abs() < self.least_normal { count } else { 0 };
                    found.min = Some(found.min.map_or(value, |min| min.min(value)));
                    found.max = Some(found.max.map_or(value, |max| max.max(value)));
                }
            }
        }
        for &bits in data.iter().step_by(SAMPLE) {
            // Zero has a range of its own, which is not kept.
            if let Some(count) = found.exponents.get_mut(range_of(self.finite[usize::from(bits)])) {
                *count += 1;
            }
        }
        (found.sum, found.squares) = (total(&sums), total(&squares));
        found
    }

    /// Measures the change of elements.
    pub(super) fn compare(&self, before: &[u8], after: &[u8]) -> ChangeStatistics {
        let mut squares = [0f64; LANES];
        let mut changed = 0u64;
        let mut ulps = 0u16;
        for (before, after) in before.chunks(LANES).zip(after.chunks(LANES)) {
            for ((square, &x), &y) in squares.iter_mut().zip(before).zip(after).filter(|((_, x), y)| x != y) {
                let old = usize::from(x);
                let new = usize::from(y);
                changed += 1;
                if self.values[old].is_finite() && self.values[new].is_finite() {
                    let difference = self.values[new] - self.values[old];
                    *square += difference * difference;
                    ulps = ulps.max(self.keys[old].abs_diff(self.keys[new]));
                }
            }
        }
        ChangeStatistics { changed, squares: total(&squares), ulps: u64::from(ulps) }
    }

    const fn new(format: Format) -> Self {
        let mut all = Self { values: [0.0; 256], finite: [0.0; 256], keys: [0; 256], least_normal: format.least_normal() };
        let mut bits = 0;
        while bits < 256 {
            let value = format.value(bits as u8);
            all.values[bits] = value;
            all.finite[bits] = if value.is_finite() { value } else { 0.0 };
            all.keys[bits] = format.key(bits as u8);
            bits += 1;
        }
        all
    }
}

static E4M3: Float8 = Float8::new(Format::Signed { mantissa_bits: 3, bias: 7, special: Special::OneNan });
static E5M2: Float8 = Float8::new(Format::Signed { mantissa_bits: 2, bias: 15, special: Special::Ieee });
static E4M3_FNUZ: Float8 = Float8::new(Format::Signed { mantissa_bits: 3, bias: 8, special: Special::NegativeZero });
static E5M2_FNUZ: Float8 = Float8::new(Format::Signed { mantissa_bits: 2, bias: 16, special: Special::NegativeZero });
static E8M0: Float8 = Float8::new(Format::Scale);

/// Layout of an 8-bit float.
#[derive(Clone, Copy)]
enum Format {
    /// Sign, exponent, mantissa.
    Signed { mantissa_bits: u32, bias: i32, special: Special },
    /// Exponent only, with a bias of 127. All bits set are NaN.
    Scale,
}

/// Elements that are no finite numbers.
#[derive(Clone, Copy)]
enum Special {
    /// As in IEEE 754: the greatest exponent.
    Ieee,
    /// NaN of either sign: all bits but the sign set.
    OneNan,
    /// NaN: the bits that would be a negative zero.
    NegativeZero,
}

impl Format {
    const fn value(self, bits: u8) -> f64 {
        let Self::Signed { mantissa_bits, bias, special } = self else {
            return if bits == 0xff { f64::NAN } else { power_of_two(bits as i32 - 127) };
        };
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let magnitude = bits & 0x7f;
        match special {
            Special::OneNan if magnitude == 0x7f => return f64::NAN,
            Special::NegativeZero if bits == 0x80 => return f64::NAN,
            Special::Ieee if magnitude >> mantissa_bits == 0x7f >> mantissa_bits => {
                let is_infinite = magnitude.trailing_zeros() >= mantissa_bits;
                return if is_infinite { sign * f64::INFINITY } else { f64::NAN };
            }
            _ => {}
        }
        let exponent = (magnitude >> mantissa_bits) as i32;
        let mantissa = (magnitude & ((1 << mantissa_bits) - 1)) as f64;
        let one = power_of_two(mantissa_bits as i32);
        match exponent {
            0 => sign * mantissa * power_of_two(1 - bias - mantissa_bits as i32),
            _ => sign * (one + mantissa) * power_of_two(exponent - bias - mantissa_bits as i32),
        }
    }

    const fn key(self, bits: u8) -> i16 {
        match self {
            Self::Scale => bits as i16,
            Self::Signed { .. } if bits & 0x80 == 0 => bits as i16,
            Self::Signed { .. } => -((bits & 0x7f) as i16),
        }
    }

    const fn least_normal(self) -> f64 {
        match self {
            Self::Scale => power_of_two(-127),
            Self::Signed { bias, .. } => power_of_two(1 - bias),
        }
    }
}

/// A power of two that is a normal number of binary64.
const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}
