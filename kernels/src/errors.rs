//! Measures the rounding error of a chunk. Spec: spec/errors.md.

use super::floats::floats;

/// Sums over the elements of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sums {
    /// Number of elements that are finite and not zero.
    pub elements: u64,
    pub max_relative: f64,
    pub relative: f64,
    pub squares: f64,
    pub flips: u64,
}

super::for_every_level! {
    /// Compares numbers before and after rounding.
    pub fn measure / measure_at(before: &[u8], after: &[u8]) -> Sums = measure_any;
}

super::for_every_level! {
    /// Returns the sum of squared errors of the update m / (sqrt(v) + 1e-8), and the sum of squared updates. Each
    /// argument holds the moments before and after rounding.
    pub fn updates / updates_at(first: [&[u8]; 2], second: [&[u8]; 2]) -> [f64; 2] = updates_any;
}

/// Number of sums computed side by side.
const LANES: usize = 8;
/// Bytes after which the lane counts are added up, so that they stay below 2^32.
const BLOCK: usize = (LANES * 4) << 20;

#[inline(always)]
fn lanes(bytes: &[u8; LANES * 4]) -> [f32; LANES] {
    let mut numbers = [0.0; LANES];
    for (number, x) in numbers.iter_mut().zip(floats(bytes)) {
        *number = x;
    }
    numbers
}

#[inline(always)]
fn measure_any(before: &[u8], after: &[u8]) -> Sums {
    let mut max = [0f64; LANES];
    let mut relative = [0f64; LANES];
    let mut squares = [0f64; LANES];
    let mut elements = [0u32; LANES];
    let mut flips = [0u32; LANES];
    let mut all_elements = 0u64;
    let mut all_flips = 0u64;
    for (before, after) in before.chunks(BLOCK).zip(after.chunks(BLOCK)) {
        let mut add = |before: &[u8; LANES * 4], after: &[u8; LANES * 4]| {
            let before = lanes(before);
            let after = lanes(after);
            for lane in 0..LANES {
                let x = before[lane];
                let y = after[lane];
                let magnitude = f64::from(x.abs());
                let error = (f64::from(y) - f64::from(x)).abs();
                let is_finite = x.abs() < f32::INFINITY;
                let counts = is_finite & (x != 0.0);
                let of = (if counts { error } else { 0.0 }) / (if counts { magnitude } else { 1.0 });
                max[lane] = if of > max[lane] { of } else { max[lane] };
                relative[lane] += of;
                squares[lane] += if is_finite { error * error } else { 0.0 };
                elements[lane] += u32::from(counts);
                flips[lane] += u32::from((x < 0.0) & (y > 0.0) | (x > 0.0) & (y < 0.0));
            }
        };
        let ((whole_before, rest_before), (whole_after, rest_after)) = (before.as_chunks(), after.as_chunks());
        for (before, after) in whole_before.iter().zip(whole_after) {
            add(before, after);
        }
        // Pad the remaining elements with zeros, which add nothing to the sums.
        let filled = |rest: &[u8]| {
            let mut all = [0; LANES * 4];
            for (slot, byte) in all.iter_mut().zip(rest) {
                *slot = *byte;
            }
            all
        };
        add(&filled(rest_before), &filled(rest_after));
        all_elements += elements.iter().map(|&n| u64::from(n)).sum::<u64>();
        all_flips += flips.iter().map(|&n| u64::from(n)).sum::<u64>();
        (elements, flips) = ([0; LANES], [0; LANES]);
    }
    Sums {
        elements: all_elements,
        max_relative: max.into_iter().fold(0.0, f64::max),
        relative: relative.iter().sum(),
        squares: squares.iter().sum(),
        flips: all_flips,
    }
}

#[inline(always)]
fn updates_any(first: [&[u8]; 2], second: [&[u8]; 2]) -> [f64; 2] {
    let mut errors = [0f64; LANES];
    let mut sizes = [0f64; LANES];
    let update = |m: f32, v: f32| f64::from(m) / (f64::from(v).sqrt() + 1e-8);
    let befores = floats(first[0]).zip(floats(second[0]));
    let afters = floats(first[1]).zip(floats(second[1]));
    for (at, ((m, v), (rounded_m, rounded_v))) in befores.zip(afters).enumerate() {
        let before = update(m, v);
        let after = update(rounded_m, rounded_v);
        let error = after - before;
        let counts = before.is_finite() & after.is_finite();
        errors[at % LANES] += if counts { error * error } else { 0.0 };
        sizes[at % LANES] += if counts { before * before } else { 0.0 };
    }
    [errors.iter().sum(), sizes.iter().sum()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::floats::to_bytes;

    #[test]
    fn errors_are_those_of_the_definition_at_every_level() {
        let before = [1.0, -2.0, 0.0, 4.0, f32::NAN, f32::INFINITY, -1e-40, 8.0, -0.0, 3.0f32];
        let after = [1.5, -2.0, 0.0, -4.0, f32::NAN, f32::INFINITY, -1e-40, 9.0, 0.0, 0.0f32];
        for level in Level::available() {
            let found = measure_at(level, &to_bytes(&before), &to_bytes(&after));
            let expected =
                Sums { elements: 6, max_relative: 2.0, relative: 0.5 + 2.0 + 0.125 + 1.0, squares: 0.25 + 64.0 + 1.0 + 9.0, flips: 1 };
            assert_eq!(found, expected, "{level:?}");
            let moments = [[1.0, 2.0f32], [1.0, 1.0f32]].map(|m| to_bytes(&m));
            let second = to_bytes(&[1.0, 4.0]);
            let [error, size] = updates_at(level, [&moments[0], &moments[1]], [&second, &second]);
            assert!((error - 0.25).abs() < 1e-6 && (size - 2.0).abs() < 1e-6, "{level:?} {error} {size}");
        }
    }
}
