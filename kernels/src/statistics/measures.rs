//! Measures of the elements of a chunk, and the rules of sums and ranges that all types share. Spec:
//! spec/statistics.md, clauses 3 and 4.

/// Counts, extremes, sums and exponents of the elements of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ValueStatistics {
    /// Number of NaN.
    pub nan: u64,
    /// Number of positive infinities.
    pub positive_infinity: u64,
    /// Number of negative infinities.
    pub negative_infinity: u64,
    /// Number of zeros of either sign.
    pub zero: u64,
    /// Number of subnormal elements.
    pub subnormal: u64,
    /// Least finite element; `None` if no element is finite.
    pub min: Option<f64>,
    /// Greatest finite element; `None` if no element is finite.
    pub max: Option<f64>,
    /// Sum of the finite elements; `None` if it exceeds binary64.
    pub sum: Option<f64>,
    /// Sum of the squares of the finite elements; `None` if it exceeds binary64.
    pub squares: Option<f64>,
    /// Number of sampled elements in each range of exponents, see [`ValueStatistics::first_exponent`]. One element in 16
    /// is sampled; zeros, infinities and NaN count in no range.
    pub exponents: [u64; 16],
}

/// Change of the elements of a chunk since a reference step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ChangeStatistics {
    /// Number of elements with other bits.
    pub changed: u64,
    /// Sum of squared differences of elements that are finite at both steps; `None` if it exceeds binary64.
    pub squares: Option<f64>,
    /// Greatest distance of elements that are finite at both steps, in units in the last place.
    pub ulps: u64,
}

impl ValueStatistics {
    /// Least power of two in a range of exponents. The first range has no lower end, the last no upper end.
    pub fn first_exponent(range: usize) -> Option<i32> {
        (1..16).contains(&range).then(|| FIRST_EXPONENT + WIDTH * range as i32)
    }

    /// Adds the elements of another chunk.
    pub fn and(self, other: Self) -> Self {
        let sum = |a: Option<f64>, b: Option<f64>| Some(a? + b?).filter(|sum| sum.is_finite());
        let extreme = |a: Option<f64>, b: Option<f64>, of: fn(f64, f64) -> f64| a.zip(b).map(|(a, b)| of(a, b)).or(a).or(b);
        let mut exponents = self.exponents;
        for (all, more) in exponents.iter_mut().zip(other.exponents) {
            *all = all.saturating_add(more);
        }
        Self {
            nan: self.nan.saturating_add(other.nan),
            positive_infinity: self.positive_infinity.saturating_add(other.positive_infinity),
            negative_infinity: self.negative_infinity.saturating_add(other.negative_infinity),
            zero: self.zero.saturating_add(other.zero),
            subnormal: self.subnormal.saturating_add(other.subnormal),
            min: extreme(self.min, other.min, f64::min),
            max: extreme(self.max, other.max, f64::max),
            sum: sum(self.sum, other.sum),
            squares: sum(self.squares, other.squares),
            exponents,
        }
    }
}

impl ChangeStatistics {
    /// Adds the elements of another chunk.
    pub fn and(self, other: Self) -> Self {
        let squares = self.squares.zip(other.squares).map(|(a, b)| a + b).filter(|sum| sum.is_finite());
        Self { changed: self.changed.saturating_add(other.changed), squares, ulps: self.ulps.max(other.ulps) }
    }
}

/// Number of partial sums. Element *i* belongs to sum *i* mod 16.
pub(crate) const LANES: usize = 16;
/// One element in this many is sampled.
pub(crate) const SAMPLE: usize = 16;
/// Exponent at which the first range would begin, and number of exponents in a range.
const FIRST_EXPONENT: i32 = -48;
const WIDTH: i32 = 1 << WIDTH_BITS;
const WIDTH_BITS: u32 = 2;

/// Range of the exponent of a value; 16 for zero. The subnormal numbers of binary64 have the exponent field 0, far below
/// the second range.
#[inline(always)]
pub(crate) fn range_of(value: f64) -> usize {
    let bits = value.to_bits();
    let exponent = (bits >> 52 & 0x7ff) as i32 - 1023;
    let range = ((exponent - FIRST_EXPONENT) >> WIDTH_BITS).clamp(0, 15) as usize;
    if bits << 1 == 0 { 16 } else { range }
}

/// Adds the partial sums in order; `None` if the result is not finite.
#[inline(always)]
pub(crate) fn total(sums: &[f64; LANES]) -> Option<f64> {
    Some(sums.iter().fold(0.0, |all, &sum| all + sum)).filter(|sum: &f64| sum.is_finite())
}
