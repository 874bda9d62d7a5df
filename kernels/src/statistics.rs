//! Measures the elements of a chunk, and their change since a base. Spec: spec/statistics.md, clauses 3 and 4.
//!
//! Elements are summed in `LANES` partial sums, as the spec says, so every level gives the same bits. Counts and extremes
//! are found in integers, in which the order does not matter. Elements are measured in blocks. Only blocks with NaN or
//! infinities, which are few, take the loops that leave these out.

pub(super) mod measures;

use super::environment::DefaultEnvironment;
use super::float8::Float8;
use crate::NumberFormat;
pub use measures::{ChangeStatistics, ValueStatistics};
use measures::{LANES, SAMPLE, range_of, total};

/// Number of elements in a block. Counts of a block fit 16 bits.
const BLOCK: usize = 512;
/// Number of exponent fields of the widest type.
const FIELDS: usize = 1 << 11;

super::for_every_level! {
    /// Measures the numbers of a chunk.
    pub fn values / values_at(format: NumberFormat, data: &[u8]) -> ValueStatistics = values_any;
}

super::for_every_level! {
    /// Measures the change of the numbers of a chunk. Both arguments must have the same length.
    pub fn changes / changes_at(format: NumberFormat, before: &[u8], after: &[u8]) -> ChangeStatistics = changes_any;
}

#[inline(always)]
fn values_any(format: NumberFormat, data: &[u8]) -> ValueStatistics {
    let _environment = DefaultEnvironment::enter();
    match format {
        NumberFormat::F16 => measure::<F16, 2>(data),
        NumberFormat::Bf16 => measure::<Bf16, 2>(data),
        NumberFormat::F32 => measure::<F32, 4>(data),
        NumberFormat::F64 => measure::<F64, 8>(data),
        NumberFormat::F8(format) => Float8::of(format).measure(data),
    }
}

#[inline(always)]
fn changes_any(format: NumberFormat, before: &[u8], after: &[u8]) -> ChangeStatistics {
    let _environment = DefaultEnvironment::enter();
    match format {
        NumberFormat::F16 => compare::<F16, 2>(before, after),
        NumberFormat::Bf16 => compare::<Bf16, 2>(before, after),
        NumberFormat::F32 => compare::<F32, 4>(before, after),
        NumberFormat::F64 => compare::<F64, 8>(before, after),
        NumberFormat::F8(format) => Float8::of(format).compare(before, after),
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
    /// The exponent field.
    fn field(bits: Self::Bits) -> usize;
    /// The least number with this exponent field, neither zero nor infinite.
    fn of_field(field: usize) -> f64;
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
                let left = Self::magnitude(x);
                let right = Self::magnitude(y);
                if (x ^ y) & $sign == 0 { left.abs_diff(right) } else { left.wrapping_add(right) }
            }

            #[inline(always)]
            fn widen(bits: $bits) -> u64 {
                u64::from(bits)
            }

            #[inline(always)]
            fn field(bits: $bits) -> usize {
                (Self::magnitude(bits) / $normal) as usize
            }

            #[inline(always)]
            fn of_field(field: usize) -> f64 {
                Self::number((field as $bits).wrapping_mul($normal)).into()
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
    let mut sum = [0f64; LANES];
    let mut squares = [0f64; LANES];
    let [low, high] = E::KEYS;
    let mut min = high;
    let mut max = low;
    let mut small = 0u64;
    let mut exponents = [0u64; 17];
    let mut fields = [0u32; FIELDS];
    let mut block = Block::<E, W>::new();
    for part in elements.chunks(BLOCK) {
        block.load(part);
        let mut scan = scan_block::<E, W, false>(block.bits());
        let is_finite = scan.greatest < E::INFINITY;
        if !is_finite {
            block.mask();
            scan = scan_block::<E, W, true>(block.bits());
            count_special::<E, W>(&mut found, block.bits());
        }
        let is_normal = scan.least >= E::NORMAL;
        if !is_normal {
            let (zeros, below) = count_small::<E, W>(block.bits());
            found.zero += u64::from(zeros);
            small += u64::from(below);
        }
        (min, max) = (min.min(scan.min), max.max(scan.max));
        add_all::<false>(&mut sum, &block.wide);
        add_all::<true>(&mut squares, &block.wide);
        if is_finite && is_normal && block.len == BLOCK {
            for row in block.bits.as_chunks::<SAMPLE>().0 {
                let count = &mut fields[E::field(row[0]) & (FIELDS - 1)];
                *count = count.wrapping_add(1);
            }
            continue;
        }
        // Values beyond the end of the last block are zero and count in no range.
        for row in block.wide.as_chunks::<SAMPLE>().0 {
            let count = &mut exponents[range_of(row[0])];
            *count = count.wrapping_add(1);
        }
    }
    for (field, &count) in fields.iter().enumerate().take(E::field(E::INFINITY)).filter(|(_, count)| **count > 0) {
        exponents[range_of(E::of_field(field))] += u64::from(count);
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

/// Extremes of a block.
struct Scan<B, K> {
    /// Least and greatest magnitude.
    least: B,
    greatest: B,
    min: K,
    max: K,
}

/// Scans a block, in integers alone, whose order of additions does not matter. With `MASKED`, elements that are not
/// finite are no extremes.
#[inline(always)]
fn scan_block<E: Element<W>, const W: usize, const MASKED: bool>(block: &[E::Bits]) -> Scan<E::Bits, E::Key> {
    let [low, high] = E::KEYS;
    let mut least = E::INFINITY;
    let mut greatest = E::Bits::default();
    let mut min = high;
    let mut max = low;
    for &bits in block {
        let magnitude = E::magnitude(bits);
        let key = E::key(bits);
        let is_counted = !MASKED || magnitude < E::INFINITY;
        (least, greatest) = (least.min(magnitude), greatest.max(magnitude));
        min = min.min(if is_counted { key } else { high });
        max = max.max(if is_counted { key } else { low });
    }
    Scan { least, greatest, min, max }
}

/// Counts the elements of a block that are zero, and those that are zero or subnormal.
#[inline(always)]
fn count_small<E: Element<W>, const W: usize>(block: &[E::Bits]) -> (u32, u32) {
    let mut zero = 0u32;
    let mut small = 0u32;
    for &bits in block {
        let magnitude = E::magnitude(bits);
        zero = zero.wrapping_add(u32::from(magnitude == E::Bits::default()));
        small = small.wrapping_add(u32::from(magnitude < E::NORMAL));
    }
    (zero, small)
}

/// Counts the elements of a block that are not finite.
#[inline(always)]
fn count_special<E: Element<W>, const W: usize>(found: &mut ValueStatistics, block: &[E::Bits]) {
    let mut nan = 0u32;
    let mut positive = 0u32;
    let mut infinite = 0u32;
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
    let before = before.as_chunks::<W>().0;
    let after = after.as_chunks::<W>().0;
    let mut squares = [0f64; LANES];
    let mut ulps = E::Bits::default();
    let mut changed = 0u64;
    let mut old = Block::<E, W>::new();
    let mut new = Block::<E, W>::new();
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
mod tests;
