//! Replays a step of Adam: a weight and its second moment, in the order of operations of a trainer. Spec:
//! `spec/codecs/replay.md`.
//!
//! All arithmetic is binary32, except for the estimate of the gradient. Each operation is rounded once, in the order
//! that the form gives. A fused multiply-add is an operation of a form, never a liberty of the compiler.

use super::Level;
use super::environment::DefaultEnvironment;
use super::fma::fma;

/// How a weight is computed from its earlier value *w*, the decay *d*, the scale *s*, the first moment *m* and the
/// divisor *q*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// `w * d + (s * m) / q`
    ScaleFirst,
    /// `w * d + s * (m / q)`
    DivideFirst,
    /// `fma(s, m / q, w * d)`
    FusedScale,
    /// `fma(w, d, (s * m) / q)`
    FusedDecay,
    /// `fma(d, w, w) + (s * m) / q`: *d* is the decay less one.
    FusedLoss,
    /// `fma(s, m / q, fma(d, w, w))`
    FusedBoth,
}

impl Update {
    pub const ALL: [Self; 6] = [Self::ScaleFirst, Self::DivideFirst, Self::FusedScale, Self::FusedDecay, Self::FusedLoss, Self::FusedBoth];

    /// Whether *d* is the decay less one.
    pub fn takes_loss(self) -> bool {
        matches!(self, Self::FusedLoss | Self::FusedBoth)
    }
}

/// How the divisor is computed from the root of the second moment, *r*, its scale *b*, and epsilon *e*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisor {
    /// `r / b + e`
    Divided,
    /// `r * b + e`
    Multiplied,
    /// `fma(r, b, e)`
    Fused,
}

impl Divisor {
    pub const ALL: [Self; 3] = [Self::Divided, Self::Multiplied, Self::Fused];
}

/// One step of a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    pub update: Update,
    pub divisor: Divisor,
    /// Factor of the earlier weight, or that less one.
    pub decay: f32,
    /// Negative learning rate, over the first bias correction.
    pub scale: f32,
    /// Root of the second bias correction, or its inverse.
    pub correction: f32,
    pub epsilon: f32,
}

/// How a second moment is computed from its earlier value *v*, its decay *b*, the gradient *g* and its weight *o*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Square {
    /// `fma(o * g, g, v * b)`
    Fused,
    /// `v * b + (o * g) * g`
    Plain,
    /// `fma(v, b, (o * g) * g)`
    FusedDecay,
    /// `v * b + o * (g * g)`
    ShareLast,
    /// `fma(o, g * g, v * b)`
    FusedShare,
    /// `fma(v, b, o * (g * g))`
    FusedDecayShareLast,
}

impl Square {
    pub const ALL: [Self; 6] = [Self::Fused, Self::Plain, Self::FusedDecay, Self::ShareLast, Self::FusedShare, Self::FusedDecayShareLast];
}

/// One step of a second moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    pub square: Square,
    /// Factor of the earlier second moment.
    pub decay: f32,
    /// Weight of the squared gradient.
    pub share: f32,
    /// Weight of the gradient in the first moment.
    pub weight: f32,
}

/// Fills `out` with weights, from earlier weights and both moments after the step.
pub fn step(weights: &[u8], first: &[u8], second: &[u8], by: Step, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    step_at(Level::best(), weights, first, second, by, out);
}

/// Fills `out` with second moments, from earlier second moments and the first moments before and after the step.
pub fn moment(second: &[u8], before: &[u8], now: &[u8], by: Moment, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    moment_at(Level::best(), second, before, now, by, out);
}

/// Compiles a body for every level. Levels beyond the scalar one use the processor's fused multiply-add.
macro_rules! with_fma {
    (fn $at:ident = $body:ident($($argument:ident: $type:ty),*)) => {
        fn $at(level: $crate::Level, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
            fn avx512($($argument: $type),*) {
                $body::<true>($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2($($argument: $type),*) {
                $body::<true>($($argument),*)
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Level` comes from detection, and the other feature is detected here.
                $crate::Level::Avx512 if $crate::fma::is_hard() => unsafe { avx512($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::Level::Avx2 if $crate::fma::is_hard() => unsafe { avx2($($argument),*) },
                _ => $body::<false>($($argument),*),
            }
        }
    };
}
pub(crate) use with_fma;
with_fma!(fn step_at = step_any(weights: &[u8], first: &[u8], second: &[u8], by: Step, out: &mut [u8]));
with_fma!(fn moment_at = moment_any(second: &[u8], before: &[u8], now: &[u8], by: Moment, out: &mut [u8]));

/// Number of elements per pass, so that the divisors stay in the first-level cache.
const BLOCK: usize = 1024;

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub(super) fn number(unit: [u8; 4]) -> f32 {
    f32::from_le_bytes(unit)
}

/// Returns the bytes of a result. Every NaN becomes the same.
#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub(super) fn unit(result: f32) -> [u8; 4] {
    let bits = if result.is_nan() { 0x7fc0_0000 } else { result.to_bits() };
    bits.to_le_bytes()
}

#[inline(always)]
fn step_any<const HARD: bool>(weights: &[u8], first: &[u8], second: &[u8], by: Step, out: &mut [u8]) {
    let mut divisors = [0.0f32; BLOCK];
    let inputs = weights.chunks(4 * BLOCK).zip(first.chunks(4 * BLOCK)).zip(second.chunks(4 * BLOCK));
    for (((weights, first), second), out) in inputs.zip(out.chunks_mut(4 * BLOCK)) {
        // A loop for each form, so that each becomes vectors.
        match by.divisor {
            Divisor::Divided => divide(&mut divisors, second, |r| divisor::<HARD>(Divisor::Divided, r, by)),
            Divisor::Multiplied => divide(&mut divisors, second, |r| divisor::<HARD>(Divisor::Multiplied, r, by)),
            Divisor::Fused => divide(&mut divisors, second, |r| divisor::<HARD>(Divisor::Fused, r, by)),
        }
        let mut update = |form: Update| combine(weights, first, &divisors, out, |w, m, q| updated::<HARD>(form, w, m, q, by));
        match by.update {
            Update::ScaleFirst => update(Update::ScaleFirst),
            Update::DivideFirst => update(Update::DivideFirst),
            Update::FusedScale => update(Update::FusedScale),
            Update::FusedDecay => update(Update::FusedDecay),
            Update::FusedLoss => update(Update::FusedLoss),
            Update::FusedBoth => update(Update::FusedBoth),
        }
    }
}

/// Returns the divisor of a step from the root of the second moment.
#[inline(always)]
fn divisor<const HARD: bool>(form: Divisor, r: f32, Step { correction: b, epsilon: e, .. }: Step) -> f32 {
    match form {
        Divisor::Divided => r / b + e,
        Divisor::Multiplied => r * b + e,
        Divisor::Fused => fma::<HARD>(r, b, e),
    }
}

/// Returns a weight from its earlier value, the first moment and the divisor.
#[inline(always)]
fn updated<const HARD: bool>(form: Update, w: f32, m: f32, q: f32, Step { decay: d, scale: s, .. }: Step) -> f32 {
    match form {
        Update::ScaleFirst => w * d + (s * m) / q,
        Update::DivideFirst => w * d + s * (m / q),
        Update::FusedScale => fma::<HARD>(s, m / q, w * d),
        Update::FusedDecay => fma::<HARD>(w, d, (s * m) / q),
        Update::FusedLoss => fma::<HARD>(d, w, w) + (s * m) / q,
        Update::FusedBoth => fma::<HARD>(s, m / q, fma::<HARD>(d, w, w)),
    }
}

/// Returns a weight from its earlier value and both moments.
#[inline(always)]
pub(super) fn stepped<const HARD: bool>(w: f32, m: f32, v: f32, by: Step) -> f32 {
    updated::<HARD>(by.update, w, m, divisor::<HARD>(by.divisor, v.sqrt(), by), by)
}

/// Applies a function to the root of each number.
#[inline(always)]
fn divide(divisors: &mut [f32; BLOCK], second: &[u8], by: impl Fn(f32) -> f32) {
    for (slot, &v) in divisors.iter_mut().zip(second.as_chunks::<4>().0) {
        *slot = by(number(v).sqrt());
    }
}

#[inline(always)]
fn combine(weights: &[u8], first: &[u8], divisors: &[f32; BLOCK], out: &mut [u8], by: impl Fn(f32, f32, f32) -> f32) {
    let units = weights.as_chunks::<4>().0.iter().zip(first.as_chunks::<4>().0).zip(divisors);
    for (((&w, &m), &q), out) in units.zip(out.as_chunks_mut::<4>().0) {
        *out = unit(by(number(w), number(m), q));
    }
}

/// Returns the gradient that led from one first moment to the next, as far as rounding lets it be known.
#[inline(always)]
pub(super) fn gradient(before: f32, now: f32, inverse: f64) -> f32 {
    let before = f64::from(before);
    (before + (f64::from(now) - before) * inverse) as f32
}

#[inline(always)]
fn moment_any<const HARD: bool>(second: &[u8], before: &[u8], now: &[u8], by: Moment, out: &mut [u8]) {
    let Moment { square, decay: b, share: o, weight } = by;
    let inverse = 1.0 / f64::from(weight);
    let inputs = (second, before, now);
    match square {
        Square::Fused => fill(inputs, inverse, out, |v, g| combine_square::<HARD>(Square::Fused, b, o, v, g)),
        Square::Plain => fill(inputs, inverse, out, |v, g| combine_square::<HARD>(Square::Plain, b, o, v, g)),
        _ => fill(inputs, inverse, out, |v, g| combine_square::<HARD>(square, b, o, v, g)),
    }
}

/// Returns a second moment from its earlier value and the gradient.
#[inline(always)]
pub(super) fn combine_square<const HARD: bool>(square: Square, b: f32, o: f32, v: f32, g: f32) -> f32 {
    match square {
        Square::Fused => fma::<HARD>(o * g, g, v * b),
        Square::Plain => v * b + (o * g) * g,
        Square::FusedDecay => fma::<HARD>(v, b, (o * g) * g),
        Square::ShareLast => v * b + o * (g * g),
        Square::FusedShare => fma::<HARD>(o, g * g, v * b),
        Square::FusedDecayShareLast => fma::<HARD>(v, b, o * (g * g)),
    }
}

/// Fills `out` by a function of the earlier second moment and of the gradient.
#[inline(always)]
fn fill((second, before, now): (&[u8], &[u8], &[u8]), inverse: f64, out: &mut [u8], by: impl Fn(f32, f32) -> f32) {
    let units = second.as_chunks::<4>().0.iter().zip(before.as_chunks::<4>().0).zip(now.as_chunks::<4>().0);
    for (((&v, &before), &now), out) in units.zip(out.as_chunks_mut::<4>().0) {
        *out = unit(by(number(v), gradient(number(before), number(now), inverse)));
    }
}

#[cfg(test)]
mod tests {
    use super::{Divisor, Level, Moment, Square, Step, Update, moment, moment_at, step, step_at};
    use crate::floats::{odd_numbers, to_bytes};

    fn steps() -> Vec<Step> {
        let of = |update: Update, divisor| {
            let decay = if update.takes_loss() { -4.2e-5 } else { 0.999_958 };
            Step { update, divisor, decay, scale: -4.2e-4, correction: 0.97, epsilon: 1e-8 }
        };
        Update::ALL.into_iter().flat_map(|update| Divisor::ALL.map(|divisor| of(update, divisor))).collect()
    }

    fn moments() -> Vec<Moment> {
        Square::ALL.map(|square| Moment { square, decay: 0.95, share: 0.05, weight: 0.1 }).to_vec()
    }

    fn results(count: usize, run: impl Fn(&[Vec<u8>; 4], Result<Step, Moment>, &mut [u8])) -> Vec<Vec<u8>> {
        let inputs = [1, 2, 3, 4].map(|seed| to_bytes(&odd_numbers(seed, count)));
        let forms = steps().into_iter().map(Ok).chain(moments().into_iter().map(Err));
        forms
            .map(|form| {
                let mut out = vec![9; 4 * count];
                run(&inputs, form, &mut out);
                out
            })
            .collect()
    }

    #[test]
    fn all_levels_agree_to_the_bit() {
        for count in [0, 1, 3, 8, 1000, 4097, 100_000] {
            let at = |level: Level| {
                results(count, |[w, m0, m1, v], form, out| match form {
                    Ok(by) => step_at(level, w, m1, v, by, out),
                    Err(by) => moment_at(level, v, m0, m1, by, out),
                })
            };
            let expected = at(Level::Scalar);
            for level in Level::available() {
                assert!(at(level) == expected, "{level:?}, {count}");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_environment_of_the_caller_does_not_matter() {
        let run = || {
            results(1000, |[w, m0, m1, v], form, out| match form {
                Ok(by) => step(w, m1, v, by, out),
                Err(by) => moment(v, m0, m1, by, out),
            })
        };
        assert!(crate::with_odd_environment(run) == run());
    }

    #[test]
    #[allow(clippy::little_endian_bytes, reason = "elements are little-endian")]
    fn every_nan_is_the_same() {
        let bytes = |x: f32| x.to_le_bytes();
        let mut out = [0; 4];
        for (w, v) in [(f32::from_bits(0xffc0_0001), 1.0), (1.0, -1.0), (f32::INFINITY, f32::NAN)] {
            step(&bytes(w), &bytes(1.0), &bytes(v), steps()[0], &mut out);
            assert_eq!(u32::from_le_bytes(out), 0x7fc0_0000);
        }
    }
}
