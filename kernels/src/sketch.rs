//! Sketches of numbers: a few sums from which the distance of two states is estimated without keeping either.
//!
//! Each number is added to one of the [`BUCKETS`] sums, with a sign. Bucket and sign are a hash of the position. The sketch
//! of a difference is the difference of the sketches, and the squares of its sums add up to the squared distance, on
//! average. With 64 sums, the standard error of the distance is 9 % (the square root of 1/128).
//!
//! Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (count sketch)

use super::floats::numbers;
use crate::NumberFormat;

/// Number of sums of a sketch.
pub const BUCKETS: usize = 64;

/// Sums of a part of a state. Parts with the same elements have comparable sketches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sketch {
    pub sums: [f64; BUCKETS],
    /// Sum of squares.
    pub squares: f64,
}

impl Sketch {
    pub const EMPTY: Self = Self { sums: [0.0; BUCKETS], squares: 0.0 };

    /// Returns whether [`Sketch::add`] reads numbers of this format.
    pub fn reads(format: Option<NumberFormat>) -> bool {
        matches!(format, Some(NumberFormat::F32 | NumberFormat::Bf16 | NumberFormat::F16))
    }

    /// Adds the numbers of a chunk. `chunk` tells chunks of a state apart. Numbers of other formats add nothing.
    pub fn add(&mut self, chunk: u64, format: Option<NumberFormat>, data: &[u8]) {
        self.add_all(chunk, numbers(format, data));
    }

    fn add_all(&mut self, chunk: u64, numbers: impl Iterator<Item = f32>) {
        let seed = mix(chunk);
        for (number, position) in numbers.map(f64::from).zip(0u64..) {
            let hash = mix(seed ^ position);
            let signed = if hash >> 63 == 0 { number } else { -number };
            self.sums[hash as usize % BUCKETS] += signed;
            self.squares += number * number;
        }
    }

    /// The sketch of both parts.
    pub fn and(mut self, other: &Self) -> Self {
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, more)| *sum += more);
        self.squares += other.squares;
        self
    }
}

/// The finalizer of SplitMix64: a hash of 64 bits.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::Sketch;
    use crate::NumberFormat;
    use crate::floats::to_bytes;

    fn sketch(numbers: &[f32]) -> Sketch {
        let mut sketch = Sketch::EMPTY;
        for (chunk, numbers) in (0..).zip(numbers.chunks(1000)) {
            sketch.add(chunk, Some(NumberFormat::F32), &to_bytes(numbers));
        }
        sketch
    }

    #[test]
    fn the_distance_of_two_states_is_estimated() {
        let before: Vec<f32> = (0..5000u32).map(|i| (i as f32 * 0.37).sin()).collect();
        for scale in [1e-5f32, 1e-2, 10.0] {
            let after: Vec<f32> = before.iter().zip(0u32..).map(|(x, i)| x + scale * (i as f32 * 1.7).cos()).collect();
            let exact: f64 = before.iter().zip(&after).map(|(a, b)| f64::from(b - a).powi(2)).sum();
            let a = sketch(&before);
            let b = sketch(&after);
            let estimate: f64 = a.sums.iter().zip(b.sums).map(|(a, b)| (a - b).powi(2)).sum();
            assert!((0.6..1.6).contains(&(estimate / exact)), "{scale}: {estimate} for {exact}");
        }
    }

    #[test]
    fn all_float_types_of_weights_are_read() {
        let bytes = |bits: u16| [bits as u8, (bits >> 8) as u8];
        let expected = sketch(&[1.5, -2.0]);
        for (format, data) in
            [(NumberFormat::Bf16, [bytes(0x3fc0), bytes(0xc000)].concat()), (NumberFormat::F16, [bytes(0x3e00), bytes(0xc000)].concat())]
        {
            let mut found = Sketch::EMPTY;
            found.add(0, Some(format), &data);
            assert_eq!(found, expected, "{format:?}");
            assert!(Sketch::reads(Some(format)));
        }
        let mut empty = Sketch::EMPTY;
        empty.add(0, None, &[1; 8]);
        assert_eq!(empty, Sketch::EMPTY);
    }
}
