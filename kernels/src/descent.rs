//! Replays a step of gradient descent with momentum, in the order of operations of a trainer. Spec: `spec/codecs/descent.md`.
//!
//! All arithmetic is binary32, except for the gradient of Nesterov's step. Each operation is rounded once, in the order that the form
//! gives.

use super::Level;
use super::environment::DefaultEnvironment;
use super::fma::fma;
use super::replay::{number, unit, with_fma};

/// How a weight is computed from its earlier value *w*, the decay *d*, the scale *s* and the direction *u*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// `fma(s, u, w * d)`
    Fused,
    /// `w * d + s * u`
    Plain,
}

impl Update {
    pub const ALL: [Self; 2] = [Self::Fused, Self::Plain];
}

/// How the direction is computed from the momentum *m1*, its earlier value *m0* and the share *b* of *m0* in *m1*. The gradient *g* is
/// `m1 - m0 * b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// `m1`
    Momentum,
    /// `fma(b, m1, g)`
    Nesterov,
    /// `m1 * b + g`
    PlainNesterov,
}

impl Direction {
    pub const ALL: [Self; 3] = [Self::Momentum, Self::Nesterov, Self::PlainNesterov];
}

/// One step of a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    pub update: Update,
    pub direction: Direction,
    /// Factor of the earlier weight.
    pub decay: f32,
    /// Negative learning rate.
    pub scale: f32,
    /// Share of the earlier momentum in the momentum.
    pub momentum: f32,
}

/// Fills `out` with the weights after a step, from the weights before it and the momenta before and after it.
pub fn step(weights: &[u8], before: &[u8], now: &[u8], by: Step, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    step_at(Level::best(), weights, before, now, by, out);
}

with_fma!(fn step_at = step_any(weights: &[u8], before: &[u8], now: &[u8], by: Step, out: &mut [u8]));

#[inline(always)]
fn step_any<const HARD: bool>(weights: &[u8], before: &[u8], now: &[u8], by: Step, out: &mut [u8]) {
    let b = by.momentum;
    let inputs = (weights, before, now);
    let gradient = |m0: f32, m1: f32| (f64::from(m1) - f64::from(m0) * f64::from(b)) as f32;
    match by.direction {
        Direction::Momentum => update::<HARD>(inputs, by, out, |_, m1| m1),
        Direction::Nesterov => update::<HARD>(inputs, by, out, |m0, m1| fma::<HARD>(b, m1, gradient(m0, m1))),
        Direction::PlainNesterov => update::<HARD>(inputs, by, out, |m0, m1| m1 * b + gradient(m0, m1)),
    }
}

#[inline(always)]
fn update<const HARD: bool>(inputs: (&[u8], &[u8], &[u8]), by: Step, out: &mut [u8], direction: impl Fn(f32, f32) -> f32) {
    let Step { decay: d, scale: s, .. } = by;
    match by.update {
        Update::Fused => fill(inputs, out, |w, m0, m1| fma::<HARD>(s, direction(m0, m1), w * d)),
        Update::Plain => fill(inputs, out, |w, m0, m1| w * d + s * direction(m0, m1)),
    }
}

#[inline(always)]
fn fill((weights, before, now): (&[u8], &[u8], &[u8]), out: &mut [u8], by: impl Fn(f32, f32, f32) -> f32) {
    let units = weights.as_chunks::<4>().0.iter().zip(before.as_chunks::<4>().0).zip(now.as_chunks::<4>().0);
    for (((&w, &m0), &m1), out) in units.zip(out.as_chunks_mut::<4>().0) {
        *out = unit(by(number(w), number(m0), number(m1)));
    }
}

#[cfg(test)]
mod tests {
    use super::{Direction, Level, Step, Update, step, step_at};
    use crate::floats::{odd_numbers, to_bytes};

    fn steps() -> impl Iterator<Item = Step> {
        let of = |update, direction| Step { update, direction, decay: 0.999_958, scale: -4.2e-3, momentum: 0.9 };
        Update::ALL.into_iter().flat_map(move |update| Direction::ALL.map(|direction| of(update, direction)))
    }

    #[test]
    fn all_levels_agree_to_the_bit() {
        for count in [0, 1, 3, 8, 1000, 4097] {
            let [w, m0, m1] = [1, 2, 3].map(|seed| to_bytes(&odd_numbers(seed, count)));
            for by in steps() {
                let at = |level: Level| {
                    let mut out = vec![9; 4 * count];
                    step_at(level, &w, &m0, &m1, by, &mut out);
                    out
                };
                let expected = at(Level::Scalar);
                for level in Level::available() {
                    assert!(at(level) == expected, "{level:?}, {by:?}, {count}");
                }
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_environment_of_the_caller_does_not_matter() {
        let [w, m0, m1] = [1, 2, 3].map(|seed| to_bytes(&odd_numbers(seed, 1000)));
        let run = || {
            let of = |by| {
                let mut out = vec![9; 4000];
                step(&w, &m0, &m1, by, &mut out);
                out
            };
            steps().map(of).collect::<Vec<_>>()
        };
        assert!(crate::with_odd_environment(run) == run());
    }
}
