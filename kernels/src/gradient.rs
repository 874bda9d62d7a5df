//! The shortest gradient that leads from one first moment to the next. Spec: `spec/codecs/gradient.md`.
//!
//! The first moments of two steps give the gradient to about 20 bits. A gradient that was computed in 16-bit numbers,
//! added up a few times and clipped by one factor is a short number times that factor. So the shortest quotient within
//! the interval that rounding leaves open is nearly always the true one. Its middle follows from decay and weight: a moving
//! average keeps what it does not take from the gradient, a sum keeps any share.
//!
//! Worked example: the interval 0.7109 to 0.7130 is 0.10110101111... to 0.10110110100... in binary. The numbers first
//! differ at the seventh digit; cutting the upper one behind it gives 0.1011011, 0.7109375, the shortest number inside.

use super::Level;
use super::digits::ESCAPE;
use super::environment::DefaultEnvironment;
use super::fma::fma;
use super::replay::{Square, combine_square, gradient, number, unit, with_fma};

/// How a first moment is computed from its earlier value *m*, its decay *b*, the gradient *g* and its weight *w*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blend {
    /// `fma(w, g - m, m)`
    Fused,
    /// `m + w * (g - m)`
    Plain,
    /// `m * b + g * w`
    Sum,
    /// `fma(g, w, m * b)`
    FusedGradient,
    /// `fma(m, b, g * w)`
    FusedDecay,
}

impl Blend {
    pub const ALL: [Self; 5] = [Self::Fused, Self::Plain, Self::Sum, Self::FusedGradient, Self::FusedDecay];
}

/// Operation on quotients before the factor of all gradients, such as a division by the number of micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// No operation: a factor of 1 changes no number.
    None,
    Times(f32),
    Over(f32),
}

/// One step of a first moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct First {
    pub blend: Blend,
    pub decay: f32,
    pub weight: f32,
    pub scale: Scale,
    /// Factor of all gradients.
    pub clip: f32,
}

impl First {
    /// Whether the moment keeps another share than its weight leaves.
    pub fn is_sum(self) -> bool {
        (f64::from(self.decay) + f64::from(self.weight) - 1.0).abs() > 1e-6
    }

    /// Returns the gradient of a quotient.
    #[inline(always)]
    pub fn gradient(self, quotient: f32) -> f32 {
        match self.scale {
            Scale::None => quotient * self.clip,
            Scale::Times(scale) => quotient * scale * self.clip,
            Scale::Over(scale) => quotient / scale * self.clip,
        }
    }
}

/// Quotient that stands for none.
pub const NONE: u32 = 0x7fc0_0000;

/// Fills `out` with the shortest quotient of gradient and clip factor that leads from `before` to `now`, or [`NONE`].
pub fn shorten(before: &[u8], now: &[u8], by: First, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    shorten_at(Level::best(), before, now, by, out);
}

/// Like [`shorten`], for moments that keep another share than their weight leaves, such as the momentum of SGD.
pub fn shorten_sum(before: &[u8], now: &[u8], by: First, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    shorten_sum_at(Level::best(), before, now, by, out);
}

/// Fills `out` with the first moments that quotients lead to.
pub fn blend(before: &[u8], quotients: &[u8], by: First, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    blend_at(Level::best(), before, quotients, by, out);
}

/// Fills `out` with the gradients of quotients. Where a length says that there is none, it is estimated from the first
/// moments before and after the step.
pub fn gradients([before, now]: [&[u8]; 2], quotients: &[u8], lengths: &[u8], by: First, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    let inverse = 1.0 / f64::from(by.weight);
    let moments = before.as_chunks::<4>().0.iter().zip(now.as_chunks::<4>().0);
    let units = quotients.as_chunks::<4>().0.iter().zip(lengths).zip(moments);
    for (((&quotient, &length), (&before, &now)), out) in units.zip(out.as_chunks_mut::<4>().0) {
        let known = by.gradient(number(quotient));
        *out = unit(if length == ESCAPE { gradient(number(before), number(now), inverse) } else { known });
    }
}

/// Numbers of a step of a second moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Second {
    pub square: Square,
    pub decay: f32,
    pub share: f32,
}

/// Fills `out` with second moments. `out` holds the quotients before; for [`NONE`], the gradient is estimated.
pub fn square(second: &[u8], before: &[u8], now: &[u8], by: (First, Second), out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    square_at(Level::best(), second, before, now, by, out);
}

super::for_every_level! {
    /// Counts the numbers from 1 to 2 whose quotient is so close to a multiple of 1 / `grid` that no distance exceeds the
    /// tolerance. The mantissa of each quotient counts.
    pub fn count_near / count_near_at(numbers: &[f64], by: Near) -> usize = count_near_any;
}

/// Divisor of numbers, and the multiples that their quotients are compared with.
#[derive(Debug, Clone, Copy)]
pub struct Near {
    /// Inverse of the divisor.
    pub inverse: f64,
    pub grid: f64,
    pub tolerance: f64,
}

#[inline(always)]
fn count_near_any(numbers: &[f64], Near { inverse, grid, tolerance }: Near) -> usize {
    let is_near = |number: f64| {
        let x = number * inverse;
        let x = (if x < 1.0 { 2.0 * x } else { x }) * grid;
        // Adding and subtracting 1.5 * 2^52 rounds to an integer.
        (x - ((x + 6_755_399_441_055_744.0) - 6_755_399_441_055_744.0)).abs() < grid * tolerance
    };
    numbers.iter().fold(0u64, |count, &number| count.wrapping_add(u64::from(is_near(number)))) as usize
}

with_fma!(fn shorten_at = shorten_any(before: &[u8], now: &[u8], by: First, out: &mut [u8]));
with_fma!(fn shorten_sum_at = shorten_sum_any(before: &[u8], now: &[u8], by: First, out: &mut [u8]));
with_fma!(fn blend_at = blend_any(before: &[u8], quotients: &[u8], by: First, out: &mut [u8]));
with_fma!(fn square_at = square_any(second: &[u8], before: &[u8], now: &[u8], by: (First, Second), out: &mut [u8]));

#[inline(always)]
fn blended<const HARD: bool>(by: First, m: f32, g: f32) -> [u8; 4] {
    unit(blended_number::<HARD>(by, m, g))
}

/// Returns a first moment from its earlier value and the gradient.
#[inline(always)]
pub(super) fn blended_number<const HARD: bool>(by: First, m: f32, g: f32) -> f32 {
    let First { blend, decay: b, weight: w, .. } = by;
    match blend {
        Blend::Fused => fma::<HARD>(w, g - m, m),
        Blend::Plain => m + w * (g - m),
        Blend::Sum => m * b + g * w,
        Blend::FusedGradient => fma::<HARD>(g, w, m * b),
        Blend::FusedDecay => fma::<HARD>(m, b, g * w),
    }
}

/// Widths of the interval, in rounding errors of the gradient beyond half an ulp of the moment, in the order of trial.
const MARGINS: [f64; 6] = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0];

/// Returns the shortest number within a margin of the quotient. It may have more than 24 bits; then it is rounded. The
/// moment is a sum of any shares, or a moving average.
#[inline(always)]
fn candidate<const SUM: bool>(m0: f32, m1: f32, decay: f64, inverses: [f64; 2], margin: f64) -> f32 {
    let [inverse_weight, inverse_clip] = inverses;
    let exponent = (m1.to_bits() >> 23 & 255).max(1);
    // Half an ulp of the moment is 2^(exponent - 151).
    let half = f64::from_bits(u64::from(exponent.wrapping_add(872)) << 52);
    let m0 = f64::from(m0);
    // The largest rounding error beside that of the gradient: of the decayed moment, or of the change of the moment.
    let rest = if SUM { m0 * decay * inverse_weight } else { (f64::from(m1) - m0) * inverse_weight };
    let gradient = if SUM { f64::from(m1) * inverse_weight - rest } else { m0 + rest };
    let error = max(gradient.abs(), rest.abs()) * (inverse_clip * (1.0 / 16_777_216.0));
    let width = max(half * (inverse_weight * inverse_clip) + margin * error, 0.0);
    let middle = gradient * inverse_clip;
    let near = middle.abs() - width;
    let far = middle.abs() + width;
    let short = shortest_between(near, far);
    let short = if near > 0.0 { short } else { 0.0 };
    (if middle < 0.0 { 0.0 - short } else { short }) as f32
}

/// Returns the shortest number from `near`, which is positive, to `far`.
#[inline(always)]
pub(super) fn shortest_between(near: f64, far: f64) -> f64 {
    // The first bit in which the ends differ. The lower end itself is inside.
    let top = far.to_bits();
    let mut below = near.to_bits().wrapping_sub(1) ^ top;
    below |= below >> 1;
    below |= below >> 2;
    below |= below >> 4;
    below |= below >> 8;
    below |= below >> 16;
    below |= below >> 32;
    f64::from_bits(top & !(below >> 1))
}

#[inline(always)]
fn max(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

fn inverses(by: First) -> [f64; 2] {
    let inverse_clip = 1.0 / f64::from(by.clip);
    let inverse = match by.scale {
        Scale::None => inverse_clip,
        Scale::Times(scale) => inverse_clip / f64::from(scale),
        Scale::Over(scale) => inverse_clip * f64::from(scale),
    };
    [1.0 / f64::from(by.weight), inverse]
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn shorten_any<const HARD: bool>(before: &[u8], now: &[u8], by: First, out: &mut [u8]) {
    match (by.blend, by.scale) {
        // The usual form, in a loop of its own that the compiler turns into vectors.
        (Blend::Fused, Scale::None) => shorten_by::<HARD, false>(before, now, First { blend: Blend::Fused, scale: Scale::None, ..by }, out),
        _ => shorten_by::<HARD, false>(before, now, by, out),
    }
}

#[inline(always)]
fn shorten_sum_any<const HARD: bool>(before: &[u8], now: &[u8], by: First, out: &mut [u8]) {
    match (by.blend, by.scale) {
        // As above.
        (Blend::FusedGradient, Scale::None) => {
            shorten_by::<HARD, true>(before, now, First { blend: Blend::FusedGradient, scale: Scale::None, ..by }, out)
        }
        _ => shorten_by::<HARD, true>(before, now, by, out),
    }
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn shorten_by<const HARD: bool, const SUM: bool>(before: &[u8], now: &[u8], by: First, out: &mut [u8]) {
    let decay = f64::from(by.decay);
    let inverses = inverses(by);
    let units = || before.as_chunks::<4>().0.iter().zip(now.as_chunks::<4>().0);
    for ((&before, &now), out) in units().zip(out.as_chunks_mut::<4>().0) {
        let m0 = number(before);
        let m1 = number(now);
        let quotient = candidate::<SUM>(m0, m1, decay, inverses, MARGINS[0]);
        let found = blended::<HARD>(by, m0, by.gradient(quotient)) == now;
        *out = if found { quotient.to_le_bytes() } else { NONE.to_le_bytes() };
    }
    for ((&before, &now), out) in units().zip(out.as_chunks_mut::<4>().0) {
        if *out != NONE.to_le_bytes() {
            continue;
        }
        let m0 = number(before);
        let m1 = number(now);
        for margin in MARGINS.into_iter().skip(1) {
            let quotient = candidate::<SUM>(m0, m1, decay, inverses, margin);
            if blended::<HARD>(by, m0, by.gradient(quotient)) == now && !quotient.is_nan() {
                *out = quotient.to_le_bytes();
                break;
            }
        }
    }
}

#[inline(always)]
fn blend_any<const HARD: bool>(before: &[u8], quotients: &[u8], by: First, out: &mut [u8]) {
    let units = before.as_chunks::<4>().0.iter().zip(quotients.as_chunks::<4>().0);
    for ((&before, &quotient), out) in units.zip(out.as_chunks_mut::<4>().0) {
        *out = blended::<HARD>(by, number(before), by.gradient(number(quotient)));
    }
}

#[inline(always)]
fn square_any<const HARD: bool>(second: &[u8], before: &[u8], now: &[u8], (first, by): (First, Second), out: &mut [u8]) {
    let [inverse, _] = inverses(first);
    let moments = before.as_chunks::<4>().0.iter().zip(now.as_chunks::<4>().0);
    for ((&v, (&before, &now)), out) in second.as_chunks::<4>().0.iter().zip(moments).zip(out.as_chunks_mut::<4>().0) {
        let quotient = number(*out);
        let estimate = gradient(number(before), number(now), inverse);
        let g = if quotient.is_nan() { estimate } else { first.gradient(quotient) };
        *out = unit(combine_square::<HARD>(by.square, by.decay, by.share, number(v), g));
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Blend, First, Level, NONE, Near, Scale, Second, Square, blend_at, count_near_at, number, shorten_at, shorten_sum_at, square_at,
    };
    use crate::floats::{odd_numbers, to_bytes};

    #[test]
    fn all_levels_agree_to_the_bit() {
        let scales = [Scale::None, Scale::Times(1.0 / 3.0), Scale::Over(3.0), Scale::Over(0.0)];
        for (blend, scale) in Blend::ALL.into_iter().flat_map(|blend| scales.map(|scale| (blend, scale))) {
            for count in [1, 8, 1000, 4099] {
                let first = First { blend, decay: 0.9, weight: 0.1, scale, clip: 1.371_189_2 };
                let second = Second { square: Square::Fused, decay: 0.95, share: 0.05 };
                let [before, noise, v] = [1, 2, 3].map(|seed| odd_numbers(seed, count));
                let moved = |i: usize| if i.is_multiple_of(5) { noise[i] } else { before[i] + (noise[i] - before[i]) * 0.1 };
                let now: Vec<f32> = (0..count).map(moved).collect();
                let [before, now, v] = [&before, &now, &v].map(|numbers| to_bytes(numbers));
                let at = |level: Level| {
                    let mut quotients = vec![1; 4 * count];
                    let mut moments = vec![2; 4 * count];
                    let mut of_sum = vec![3; 4 * count];
                    shorten_at(level, &before, &now, first, &mut quotients);
                    shorten_sum_at(level, &before, &now, First { weight: 1.0, ..first }, &mut of_sum);
                    blend_at(level, &before, &quotients, first, &mut moments);
                    let mut squares = quotients.clone();
                    square_at(level, &v, &before, &now, (first, second), &mut squares);
                    // Which NaN stands for no quotient does not matter.
                    let [quotients, of_sum] = [quotients, of_sum].map(|found| {
                        let numbers = found.as_chunks::<4>().0.iter().map(|unit| number(*unit));
                        numbers.map(|x| if x.is_nan() { NONE } else { x.to_bits() }).collect::<Vec<u32>>()
                    });
                    (quotients, of_sum, moments, squares)
                };
                let expected = at(Level::Scalar);
                for level in Level::available() {
                    assert!(at(level) == expected, "{level:?}, {blend:?}, {scale:?}, {count}");
                }
            }
        }
    }

    #[test]
    fn all_levels_count_alike() {
        let numbers: Vec<f64> = odd_numbers(5, 1003).into_iter().map(|x| 1.0 + f64::from(x).abs().fract()).collect();
        for (inverse, grid) in [(1.0, 32.0), (0.7, 2048.0), (0.51, 64.0)] {
            let by = Near { inverse, grid, tolerance: 1e-4 };
            let expected = count_near_at(Level::Scalar, &numbers, by);
            for level in Level::available() {
                assert_eq!(count_near_at(level, &numbers, by), expected, "{level:?}, {by:?}");
            }
        }
    }
}
