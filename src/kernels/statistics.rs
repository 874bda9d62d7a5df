//! Measures the elements of a chunk, and their change since a base. Spec: spec/statistics.md, clauses 3 and 4.
//!
//! Elements are summed in [`LANES`] partial sums, as the spec says, so every level gives the same bits. Counts and extremes
//! are found in integers, in which the order does not matter. Elements are measured in blocks. Only blocks with NaN or
//! infinities, which are few, take the loops that leave these out.

use super::environment::DefaultEnvironment;
use super::float8::Float8;
use crate::Dtype;

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
pub(super) const LANES: usize = 16;
/// Number of elements in a block. Counts of a block fit 16 bits.
const BLOCK: usize = 512;
/// One element in this many is sampled.
pub(super) const SAMPLE: usize = 16;
/// Exponent at which the first range would begin, and number of exponents in a range.
const FIRST_EXPONENT: i32 = -48;
const WIDTH: i32 = 1 << WIDTH_BITS;
const WIDTH_BITS: u32 = 2;

super::for_every_level! {
    /// Measures the elements of a chunk; `None` if elements of this type are not measured.
    pub(crate) fn values / values_at(dtype: Dtype, data: &[u8]) -> Option<ValueStatistics> = values_any;
}

super::for_every_level! {
    /// Measures the change of the elements of a chunk; `None` if elements of this type are not measured. Both arguments
    /// must have the same length.
    pub(crate) fn changes / changes_at(dtype: Dtype, before: &[u8], after: &[u8]) -> Option<ChangeStatistics> = changes_any;
}

/// Returns whether elements of this type are measured. These are all types that can hold NaN or infinities.
pub(crate) fn is_measured(dtype: Dtype) -> bool {
    dtype.is_float() && !dtype.is_packed()
}

/// Returns how many numbers of a measured type an element holds: the two parts of a complex number are measured one
/// after the other.
pub(crate) fn numbers_per_element(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::C64 | Dtype::C128 => 2,
        _ => 1,
    }
}

#[inline(always)]
fn values_any(dtype: Dtype, data: &[u8]) -> Option<ValueStatistics> {
    let _environment = DefaultEnvironment::enter();
    match dtype {
        Dtype::F16 => Some(measure::<F16, 2>(data)),
        Dtype::Bf16 => Some(measure::<Bf16, 2>(data)),
        Dtype::F32 | Dtype::C64 => Some(measure::<F32, 4>(data)),
        Dtype::F64 | Dtype::C128 => Some(measure::<F64, 8>(data)),
        _ => Float8::of(dtype).map(|all| all.measure(data)),
    }
}

#[inline(always)]
fn changes_any(dtype: Dtype, before: &[u8], after: &[u8]) -> Option<ChangeStatistics> {
    let _environment = DefaultEnvironment::enter();
    match dtype {
        Dtype::F16 => Some(compare::<F16, 2>(before, after)),
        Dtype::Bf16 => Some(compare::<Bf16, 2>(before, after)),
        Dtype::F32 | Dtype::C64 => Some(compare::<F32, 4>(before, after)),
        Dtype::F64 | Dtype::C128 => Some(compare::<F64, 8>(before, after)),
        _ => Float8::of(dtype).map(|all| all.compare(before, after)),
    }
}

/// A float type of `W` bytes.
trait Element<const W: usize> {
    /// Unsigned integer that holds the bits of an element.
    type Bits: Copy + Ord + Default;
    /// Signed integer in the order of the elements.
    type Key: Copy + Ord;
    /// Float that holds every element exactly.
    type Number: Copy + PartialOrd + Into<f64>;
    /// Bits of the positive infinity.
    const INFINITY: Self::Bits;
    /// Bits of the least positive normal element.
    const NORMAL: Self::Bits;
    /// Bounds of the keys.
    const KEYS: [Self::Key; 2];

    fn bits(stored: [u8; W]) -> Self::Bits;
    /// Bits without the sign.
    fn magnitude(bits: Self::Bits) -> Self::Bits;
    fn number(bits: Self::Bits) -> Self::Number;
    /// Position of an element in their order. Both zeros have position 0.
    fn key(bits: Self::Bits) -> Self::Key;
    fn of_key(key: Self::Key) -> f64;
    /// Distance of two finite elements in units in the last place.
    fn distance(x: Self::Bits, y: Self::Bits) -> Self::Bits;
    fn widen(bits: Self::Bits) -> u64;
}

macro_rules! element {
    ($name:ident, $stored:ident, $bits:ident, $key:ident, $number:ident, $sign:literal, $infinity:literal, $normal:literal, $of:expr) => {
        struct $name;

        impl Element<{ size_of::<$stored>() }> for $name {
            type Bits = $bits;
            type Key = $key;
            type Number = $number;
            const INFINITY: $bits = $infinity;
            const NORMAL: $bits = $normal;
            const KEYS: [$key; 2] = [$key::MIN, $key::MAX];

            #[inline(always)]
            #[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
            fn bits(stored: [u8; size_of::<$stored>()]) -> $bits {
                $bits::from($stored::from_le_bytes(stored))
            }

            #[inline(always)]
            fn magnitude(bits: $bits) -> $bits {
                bits & ($sign - 1)
            }

            #[inline(always)]
            fn number(bits: $bits) -> $number {
                $of(bits)
            }

            #[inline(always)]
            fn key(bits: $bits) -> $key {
                let magnitude = Self::magnitude(bits) as $key;
                if bits & $sign == 0 { magnitude } else { magnitude.wrapping_neg() }
            }

            #[inline(always)]
            fn of_key(key: $key) -> f64 {
                let sign = if key < 0 { $sign } else { 0 };
                Self::number(key.unsigned_abs() | sign).into()
            }

            #[inline(always)]
            fn distance(x: $bits, y: $bits) -> $bits {
                let (left, right) = (Self::magnitude(x), Self::magnitude(y));
                if (x ^ y) & $sign == 0 { left.abs_diff(right) } else { left.wrapping_add(right) }
            }

            #[inline(always)]
            fn widen(bits: $bits) -> u64 {
                u64::from(bits)
            }
        }
    };
}

element!(F16, u16, u32, i32, f32, 0x8000, 0x7c00, 0x0400, f16_number);
element!(Bf16, u16, u32, i32, f32, 0x8000, 0x7f80, 0x0080, |bits: u32| f32::from_bits(bits << 16));
element!(F32, u32, u32, i32, f32, 0x8000_0000, 0x7f80_0000, 0x0080_0000, f32::from_bits);
element!(F64, u64, u64, i64, f64, 0x8000_0000_0000_0000, 0x7ff0_0000_0000_0000, 0x0010_0000_0000_0000, f64::from_bits);

/// Number of finite bits of an f16. Multiplying moves the exponent to its place and makes subnormal elements normal.
#[inline(always)]
fn f16_number(bits: u32) -> f32 {
    /// 2^112.
    const SCALE: f32 = f32::from_bits(0x7780_0000);
    f32::from_bits((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * SCALE
}

/// Elements of a block: their bits, and their values as binary64. Loops over these arrays are simple enough for the
/// compiler to vectorise.
struct Block<E: Element<W>, const W: usize> {
    bits: [E::Bits; BLOCK],
    /// Values of the finite elements, and zero for others and beyond the end.
    wide: [f64; BLOCK],
    len: usize,
}

impl<E: Element<W>, const W: usize> Block<E, W> {
    #[inline(always)]
    fn new() -> Self {
        Self { bits: [E::Bits::default(); BLOCK], wide: [0.0; BLOCK], len: 0 }
    }

    /// Takes up to [`BLOCK`] elements.
    #[inline(always)]
    fn load(&mut self, elements: &[[u8; W]]) {
        self.len = elements.len();
        for (bits, &element) in self.bits.iter_mut().zip(elements) {
            *bits = E::bits(element);
        }
        for (wide, &bits) in self.wide.iter_mut().zip(&self.bits[..self.len]) {
            *wide = E::number(bits).into();
        }
        self.wide[self.len..].fill(0.0);
    }

    #[inline(always)]
    fn bits(&self) -> &[E::Bits] {
        &self.bits[..self.len]
    }

    /// Replaces the values of elements that are not finite by zero.
    #[inline(always)]
    fn mask(&mut self) {
        for (wide, &bits) in self.wide.iter_mut().zip(&self.bits[..self.len]) {
            *wide = if E::magnitude(bits) < E::INFINITY { *wide } else { 0.0 };
        }
    }
}

#[inline(always)]
fn measure<E: Element<W>, const W: usize>(data: &[u8]) -> ValueStatistics {
    let elements = data.as_chunks::<W>().0;
    let mut found = ValueStatistics::default();
    let (mut sum, mut squares) = ([0f64; LANES], [0f64; LANES]);
    let [low, high] = E::KEYS;
    let (mut min, mut max, mut small) = (high, low, 0u64);
    let mut exponents = [0u64; 17];
    let mut block = Block::<E, W>::new();
    for part in elements.chunks(BLOCK) {
        block.load(part);
        let mut scan = scan_block::<E, W, false>(block.bits());
        if scan.greatest >= E::INFINITY {
            block.mask();
            scan = scan_block::<E, W, true>(block.bits());
            count_special::<E, W>(&mut found, block.bits());
        }
        found.zero += u64::from(scan.zero);
        small += u64::from(scan.small);
        (min, max) = (min.min(scan.min), max.max(scan.max));
        add_all::<false>(&mut sum, &block.wide);
        add_all::<true>(&mut squares, &block.wide);
        // Values beyond the end of the last block are zero and count in no range.
        for row in block.wide.as_chunks::<SAMPLE>().0 {
            let count = &mut exponents[range_of(row[0])];
            *count = count.wrapping_add(1);
        }
    }
    // Elements below the least normal one are subnormal or zero.
    found.subnormal = small - found.zero;
    (found.sum, found.squares) = (total(&sum), total(&squares));
    let special = found.nan + found.positive_infinity + found.negative_infinity;
    if special < elements.len() as u64 {
        (found.min, found.max) = (Some(E::of_key(min)), Some(E::of_key(max)));
    }
    found.exponents.copy_from_slice(&exponents[..16]);
    found
}

/// Range of the exponent of a value; 16 for zero. The subnormal numbers of binary64 have the exponent field 0, far below
/// the second range.
#[inline(always)]
pub(super) fn range_of(value: f64) -> usize {
    let bits = value.to_bits();
    let exponent = (bits >> 52 & 0x7ff) as i32 - 1023;
    let range = ((exponent - FIRST_EXPONENT) >> WIDTH_BITS).clamp(0, 15) as usize;
    if bits << 1 == 0 { 16 } else { range }
}

/// Adds values, or the squares of values, to partial sums. The compiler makes wide vectors only of one kind of sum at a
/// time.
#[inline(always)]
fn add_all<const SQUARES: bool>(sums: &mut [f64; LANES], values: &[f64; BLOCK]) {
    let mut all = *sums;
    for row in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            all[lane] += if SQUARES { row[lane] * row[lane] } else { row[lane] };
        }
    }
    *sums = all;
}

/// Adds the partial sums in order; `None` if the result is not finite.
#[inline(always)]
pub(super) fn total(sums: &[f64; LANES]) -> Option<f64> {
    Some(sums.iter().fold(0.0, |all, &sum| all + sum)).filter(|sum: &f64| sum.is_finite())
}

/// Extremes and counts of a block.
struct Scan<B, K> {
    /// Greatest magnitude.
    greatest: B,
    min: K,
    max: K,
    zero: u32,
    /// Number of elements that are zero or subnormal.
    small: u32,
}

/// Scans a block, in integers alone, whose order of additions does not matter. With `MASKED`, elements that are not
/// finite are no extremes.
#[inline(always)]
fn scan_block<E: Element<W>, const W: usize, const MASKED: bool>(block: &[E::Bits]) -> Scan<E::Bits, E::Key> {
    let [low, high] = E::KEYS;
    let (mut greatest, mut min, mut max) = (E::Bits::default(), high, low);
    let (mut zero, mut small) = (0u32, 0u32);
    for &bits in block {
        let (magnitude, key) = (E::magnitude(bits), E::key(bits));
        let is_counted = !MASKED || magnitude < E::INFINITY;
        greatest = greatest.max(magnitude);
        min = min.min(if is_counted { key } else { high });
        max = max.max(if is_counted { key } else { low });
        zero = zero.wrapping_add(u32::from(magnitude == E::Bits::default()));
        small = small.wrapping_add(u32::from(magnitude < E::NORMAL));
    }
    Scan { greatest, min, max, zero, small }
}

/// Counts the elements of a block that are not finite.
#[inline(always)]
fn count_special<E: Element<W>, const W: usize>(found: &mut ValueStatistics, block: &[E::Bits]) {
    let (mut nan, mut positive, mut infinite) = (0u32, 0u32, 0u32);
    for &bits in block {
        positive = positive.wrapping_add(u32::from(bits == E::INFINITY));
        infinite = infinite.wrapping_add(u32::from(E::magnitude(bits) == E::INFINITY));
        nan = nan.wrapping_add(u32::from(E::magnitude(bits) > E::INFINITY));
    }
    found.nan += u64::from(nan);
    found.positive_infinity += u64::from(positive);
    found.negative_infinity += u64::from(infinite - positive);
}

#[inline(always)]
fn compare<E: Element<W>, const W: usize>(before: &[u8], after: &[u8]) -> ChangeStatistics {
    let (before, after) = (before.as_chunks::<W>().0, after.as_chunks::<W>().0);
    let mut squares = [0f64; LANES];
    let (mut ulps, mut changed) = (E::Bits::default(), 0u64);
    let (mut old, mut new) = (Block::<E, W>::new(), Block::<E, W>::new());
    for (before, after) in before.chunks(BLOCK).zip(after.chunks(BLOCK)) {
        old.load(before);
        new.load(after);
        let mut count = 0u32;
        for ((&x, &y), (old, new)) in old.bits.iter().zip(&new.bits).zip(old.wide.iter().zip(&mut new.wide)) {
            let is_finite = E::magnitude(x).max(E::magnitude(y)) < E::INFINITY;
            *new = if is_finite { *new - *old } else { 0.0 };
        }
        for (&x, &y) in old.bits().iter().zip(new.bits()) {
            let is_finite = E::magnitude(x).max(E::magnitude(y)) < E::INFINITY;
            ulps = ulps.max(if is_finite { E::distance(x, y) } else { E::Bits::default() });
            count = count.wrapping_add(u32::from(x != y));
        }
        changed += u64::from(count);
        add_all::<true>(&mut squares, &new.wide);
    }
    ChangeStatistics { changed, squares: total(&squares), ulps: E::widen(ulps) }
}

#[cfg(test)]
mod tests {
    use super::{ChangeStatistics, LANES, ValueStatistics, changes_at, values, values_at};
    use crate::Dtype;
    use crate::kernels::Level;
    use crate::kernels::float8::Float8;
    use crate::kernels::floats::{odd_numbers, to_bytes};

    const DTYPES: [Dtype; 9] = [
        Dtype::F16,
        Dtype::Bf16,
        Dtype::F32,
        Dtype::F64,
        Dtype::F8E4M3,
        Dtype::F8E5M2,
        Dtype::F8E4M3Fnuz,
        Dtype::F8E5M2Fnuz,
        Dtype::F8E8M0,
    ];

    /// Bytes of elements of all kinds, including the extremes.
    fn odd_bytes(seed: u64, dtype: Dtype, count: usize) -> Vec<u8> {
        let mut bytes = to_bytes(&odd_numbers(seed, count * 2));
        if dtype == Dtype::F64 {
            // The upper half of the number decides about exponent and sign.
            bytes.chunks_mut(8).for_each(|number| number.reverse());
        }
        bytes.truncate(count * (dtype.bits() / 8) as usize);
        bytes
    }

    #[allow(clippy::little_endian_bytes, reason = "a test: elements are little-endian")]
    fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
        let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        match dtype {
            Dtype::F16 => bytes.chunks(2).map(|unit| half::f16::from_bits(half(unit)).into()).collect(),
            Dtype::Bf16 => bytes.chunks(2).map(|unit| half::bf16::from_bits(half(unit)).into()).collect(),
            Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|unit| f32::from_le_bytes(*unit).into()).collect(),
            _ if let Some(all) = Float8::of(dtype) => bytes.iter().map(|&bits| all.value(bits)).collect(),
            _ => bytes.as_chunks::<8>().0.iter().map(|unit| f64::from_le_bytes(*unit)).collect(),
        }
    }

    /// The definition in the spec, element by element.
    fn by_definition(dtype: Dtype, bytes: &[u8]) -> ValueStatistics {
        let least_normal = match dtype {
            Dtype::F16 => 2f64.powi(-14),
            Dtype::Bf16 | Dtype::F32 => f64::from(f32::MIN_POSITIVE),
            _ => Float8::of(dtype).map_or(f64::MIN_POSITIVE, Float8::least_normal),
        };
        let mut found = ValueStatistics::default();
        let (mut sums, mut squares) = ([0.0; LANES], [0.0; LANES]);
        for (i, x) in numbers(dtype, bytes).into_iter().enumerate() {
            match x {
                _ if x.is_nan() => found.nan += 1,
                f64::INFINITY => found.positive_infinity += 1,
                f64::NEG_INFINITY => found.negative_infinity += 1,
                _ => {
                    found.zero += u64::from(x == 0.0);
                    found.subnormal += u64::from(x != 0.0 && x.abs() < least_normal);
                    found.min = Some(found.min.map_or(x, |min| min.min(x)) + 0.0);
                    found.max = Some(found.max.map_or(x, |max| max.max(x)) + 0.0);
                    sums[i % LANES] += x;
                    squares[i % LANES] += x * x;
                    if i % 16 == 0 && x != 0.0 {
                        let range = (1..16).rev().find(|&range| x.abs() >= 2f64.powi(4 * range - 48)).unwrap_or(0);
                        found.exponents[range as usize] += 1;
                    }
                }
            }
        }
        let total = |sums: [f64; LANES]| Some(sums.into_iter().fold(0.0, |a, b| a + b)).filter(|sum| sum.is_finite());
        (found.sum, found.squares) = (total(sums), total(squares));
        found
    }

    #[test]
    fn statistics_are_those_of_the_definition_at_every_level() {
        for dtype in DTYPES {
            for (seed, count) in [(1, 0), (2, 1), (3, 7), (4, 8), (5, 511), (6, 512), (7, 513), (8, 5000)] {
                let mut bytes = odd_bytes(seed, dtype, count);
                let expected = by_definition(dtype, &bytes);
                let finite_blocks: Vec<u8> = {
                    let width = (dtype.bits() / 8) as usize;
                    bytes.chunks_mut(width).for_each(|unit| *unit.last_mut().unwrap() &= 0xbf);
                    bytes
                };
                let expected_finite = by_definition(dtype, &finite_blocks);
                for level in Level::available() {
                    let bytes = odd_bytes(seed, dtype, count);
                    assert_eq!(values_at(level, dtype, &bytes), Some(expected), "{dtype} {count} {level:?}");
                    assert_eq!(values_at(level, dtype, &finite_blocks), Some(expected_finite), "{dtype} {count} {level:?}");
                }
            }
        }
    }

    #[test]
    fn changes_are_those_of_the_definition_at_every_level() {
        for dtype in DTYPES {
            let (before, mut after) = (odd_bytes(1, dtype, 1237), odd_bytes(2, dtype, 1237));
            after[..64].copy_from_slice(&before[..64]);
            let width = (dtype.bits() / 8) as usize;
            let ordered = |unit: &[u8]| {
                let bits = unit.iter().rev().fold(0i128, |bits, &byte| bits << 8 | i128::from(byte));
                let sign = 1i128 << (dtype.bits() - 1);
                if bits & sign == 0 || dtype == Dtype::F8E8M0 { bits } else { sign - bits }
            };
            let (mut changed, mut squares, mut ulps) = (0, [0.0; LANES], 0);
            let pairs = numbers(dtype, &before).into_iter().zip(numbers(dtype, &after));
            for (i, ((x, y), (old, new))) in pairs.zip(before.chunks(width).zip(after.chunks(width))).enumerate() {
                changed += u64::from(old != new);
                if x.is_finite() && y.is_finite() {
                    squares[i % LANES] += (y - x) * (y - x);
                    ulps = ulps.max((ordered(old) - ordered(new)).unsigned_abs() as u64);
                }
            }
            let squares = Some(squares.into_iter().fold(0.0, |a, b| a + b)).filter(|sum: &f64| sum.is_finite());
            for level in Level::available() {
                let found = changes_at(level, dtype, &before, &after);
                assert_eq!(found, Some(ChangeStatistics { changed, squares, ulps }), "{dtype} {level:?}");
                let same = changes_at(level, dtype, &before, &before);
                assert_eq!(same, Some(ChangeStatistics { changed: 0, squares: Some(0.0), ulps: 0 }), "{dtype} {level:?}");
            }
        }
    }

    #[test]
    fn vectors_of_the_spec_hold_at_every_level() {
        let vectors: toml::Table = toml::from_str(include_str!("../../spec/vectors/statistics.toml")).unwrap();
        let tables = |name: &str| vectors[name].as_array().unwrap().iter().map(|table| table.as_table().unwrap());
        let dtype = |table: &toml::Table| Dtype::from_name(table["dtype"].as_str().unwrap()).unwrap();
        let data = |table: &toml::Table, key: &str| -> Vec<u8> {
            let digits = table[key].as_str().unwrap().as_bytes().as_chunks::<2>().0;
            digits.iter().map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
        };
        let count = |table: &toml::Table, key: &str| table[key].as_integer().unwrap() as u64;
        let float = |table: &toml::Table, key: &str| {
            table.get(key).map(|hex| f64::from_bits(u64::from_str_radix(hex.as_str().unwrap(), 16).unwrap()))
        };
        for table in tables("values") {
            let expected = ValueStatistics {
                nan: count(table, "nan"),
                positive_infinity: count(table, "positive_infinity"),
                negative_infinity: count(table, "negative_infinity"),
                zero: count(table, "zero"),
                subnormal: count(table, "subnormal"),
                min: float(table, "min"),
                max: float(table, "max"),
                sum: float(table, "sum"),
                squares: float(table, "sum_squares"),
                exponents: table["exponents"].clone().try_into().unwrap(),
            };
            for level in Level::available() {
                // `Debug` shows the sign of a zero.
                let found = values_at(level, dtype(table), &data(table, "data"));
                assert_eq!(format!("{found:?}"), format!("{:?}", Some(expected)), "{level:?}, {table:?}");
            }
        }
        for table in tables("changes") {
            let squares = float(table, "change_squares");
            let ulps = table["change_ulps"].as_str().unwrap().parse().unwrap();
            let expected = ChangeStatistics { changed: count(table, "changed"), squares, ulps };
            for level in Level::available() {
                let found = changes_at(level, dtype(table), &data(table, "before"), &data(table, "after"));
                assert_eq!(found, Some(expected), "{level:?}, {table:?}");
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_environment_of_the_caller_does_not_count() {
        let bytes = odd_bytes(3, Dtype::F16, 3000);
        let expected = values(Dtype::F16, &bytes);
        crate::kernels::with_odd_environment(|| assert_eq!(values(Dtype::F16, &bytes), expected));
    }

    #[test]
    fn chunks_add_up() {
        let bytes = odd_bytes(9, Dtype::Bf16, 4096);
        let (first, second) = bytes.split_at(4096);
        let whole = values(Dtype::Bf16, &bytes).unwrap();
        let added = values(Dtype::Bf16, first).unwrap().and(values(Dtype::Bf16, second).unwrap());
        assert_eq!(ValueStatistics { sum: None, squares: None, ..added }, ValueStatistics { sum: None, squares: None, ..whole });
        assert_eq!((ValueStatistics::first_exponent(0), ValueStatistics::first_exponent(1)), (None, Some(-44)));
        assert_eq!(values(Dtype::I32, &bytes), None);
        assert_eq!(values(Dtype::F4E2M1, &bytes), None);
    }

    #[test]
    fn complex_numbers_are_measured_by_their_parts() {
        let (before, after) = (odd_bytes(1, Dtype::F64, 400), odd_bytes(2, Dtype::F64, 400));
        for (complex, part) in [(Dtype::C64, Dtype::F32), (Dtype::C128, Dtype::F64)] {
            assert_eq!(values(complex, &before), values(part, &before));
            assert_eq!(super::changes(complex, &before, &after), super::changes(part, &before, &after));
        }
    }
}
