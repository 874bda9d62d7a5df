//! Predicts a weight and its second moment after one Adam step from the stored moments. Spec: `spec/codecs/predict.md`.
//!
//! All arithmetic is binary64 in a fixed order, so every machine predicts the same bits. Rust never fuses a
//! multiplication and an addition on its own.

use super::environment::DefaultEnvironment;

/// Moments before and after a step, as the bytes of f32.
#[derive(Debug, Clone, Copy)]
pub struct Moments<'a> {
    pub before: &'a [u8],
    pub now: &'a [u8],
}

/// Fills `out` with predicted weights, from earlier weights, both moments, and `[epsilon, a, b, c]`.
pub fn step(weights: &[u8], first: Moments<'_>, second: Moments<'_>, by: [f64; 4], out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    step_vector(weights, first, second, by, out);
}

/// Fills `out` with predicted second moments, from earlier second moments, first moments, and `[a, b, c, d]`.
pub fn moment(second: &[u8], first: Moments<'_>, by: [f64; 4], out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    moment_vector(second, first, by, out);
}

super::for_every_level! {
    fn step_vector / step_at(weights: &[u8], first: Moments<'_>, second: Moments<'_>, by: [f64; 4], out: &mut [u8]) = step_any;
}

super::for_every_level! {
    fn moment_vector / moment_at(second: &[u8], first: Moments<'_>, by: [f64; 4], out: &mut [u8]) = moment_any;
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
pub fn wide(bytes: [u8; 4]) -> f64 {
    f64::from(f32::from_le_bytes(bytes))
}

#[inline(always)]
#[allow(clippy::little_endian_bytes, reason = "a kernel: elements are little-endian")]
fn narrow(value: f64) -> [u8; 4] {
    let value = value as f32;
    if value.is_finite() { value.to_le_bytes() } else { [0; 4] }
}

/// Returns the first moment divided by the root of the second moment: Adam's change of a weight, up to a factor.
#[inline(always)]
pub fn direction(first: f64, second: f64, epsilon: f64) -> f64 {
    first / (second.sqrt() + epsilon)
}

#[inline(always)]
fn step_any(weights: &[u8], first: Moments<'_>, second: Moments<'_>, [epsilon, a, b, c]: [f64; 4], out: &mut [u8]) {
    let before = first.before.as_chunks::<4>().0.iter().zip(second.before.as_chunks::<4>().0);
    let now = first.now.as_chunks::<4>().0.iter().zip(second.now.as_chunks::<4>().0);
    let units = weights.as_chunks::<4>().0.iter().zip(before.zip(now));
    for ((&w, ((&m0, &v0), (&m1, &v1))), out) in units.zip(out.as_chunks_mut::<4>().0) {
        let w = wide(w);
        let newer = direction(wide(m1), wide(v1), epsilon);
        let older = direction(wide(m0), wide(v0), epsilon);
        *out = narrow(w + ((a * newer + b * older) + c * w));
    }
}

#[inline(always)]
fn moment_any(second: &[u8], first: Moments<'_>, [a, b, c, d]: [f64; 4], out: &mut [u8]) {
    let first = first.before.as_chunks::<4>().0.iter().zip(first.now.as_chunks::<4>().0);
    for ((&v, (&m0, &m1)), out) in second.as_chunks::<4>().0.iter().zip(first).zip(out.as_chunks_mut::<4>().0) {
        let v = wide(v);
        let m0 = wide(m0);
        let m1 = wide(m1);
        *out = narrow((a * v + b * (m1 * m1)) + (c * (m0 * m0) + d * (m0 * m1)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::floats::{odd_numbers, to_bytes};

    fn predictions(level: Level, count: usize) -> [Vec<u8>; 2] {
        let [w, m0, m1, v0, v1] = [1, 2, 3, 4, 5].map(|seed| to_bytes(&odd_numbers(seed, count)));
        let first = Moments { before: &m0, now: &m1 };
        let second = Moments { before: &v0, now: &v1 };
        let mut out = [vec![1; 4 * count], vec![2; 4 * count]];
        let [weights, moments] = &mut out;
        step_at(level, &w, first, second, [1e-8, -1e-3, 2e-4, -1e-5], weights);
        moment_at(level, &v0, first, [0.95, 5.0, 4.05, -9.0], moments);
        out
    }

    #[test]
    fn all_levels_agree_to_the_bit() {
        for count in [0, 1, 3, 8, 1000, 4097] {
            let expected = predictions(Level::Scalar, count);
            for level in Level::available() {
                assert!(predictions(level, count) == expected, "{level:?}");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_environment_of_the_caller_does_not_matter() {
        let run = || {
            let [w, m0, m1, v0, v1] = [1, 2, 3, 4, 5].map(|seed| to_bytes(&odd_numbers(seed, 1000)));
            let first = Moments { before: &m0, now: &m1 };
            let second = Moments { before: &v0, now: &v1 };
            let mut out = [vec![0; 4000], vec![0; 4000]];
            let [weights, moments] = &mut out;
            step(&w, first, second, [1e-40, -1e-3, 2e-4, -1e-5], weights);
            moment(&v0, first, [1e-38, 5.0, 4.05, -9.0], moments);
            out
        };
        let odd = |x: f32| std::hint::black_box(x) * std::hint::black_box(0.5f32);
        let subnormal = f32::from_bits(1 << 10);
        let expected = run();
        let (flushed, found) = crate::with_odd_environment(|| (odd(subnormal), run()));
        assert_eq!(flushed.to_bits(), 0, "the environment was odd");
        assert_ne!(odd(subnormal), 0.0);
        assert!(found == expected);
    }
}
