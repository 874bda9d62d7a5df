//! `tc.kmeans`: a few levels that represent all numbers. Small numbers are pruned to zero, large numbers are protected.
//!
//! Spec:   spec/codecs/kmeans.md
//! Input:  n f32, and n f32 of the base for a delta
//! Output: levels; one code per number, or its difference from the code of the base, coded by spec/entropy.md;
//!         protected numbers
//! Errors: `Corrupt` if levels do not ascend, a code has no level, or protected numbers are out of order
//! Cost:   a histogram and some passes over it; a search of 8 steps per number; a delta sorts elements by the base's
//!         code
//! Source: Agrawal et al., DynaQuant (arXiv 2306.11800)

use std::collections::HashMap;

use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded};
use crate::entropy;
use crate::kernels::floats::{floats, to_bytes, unit};
use crate::limits::reserve;
use crate::spare::Spare;
use crate::wire::{Cursor, Put};
use crate::{Dtype, Error, Result};

/// Stores numbers as codes of a few levels. Rounds numbers, except those that an earlier decode of this codec produced.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, KMeans}};
/// let data: Vec<u8> = (1..=5000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
/// let codec = KMeans { levels: 16, ..KMeans::default() };
/// let bytes: usize = codec.encode(&Chunk::new(Dtype::F32, 5000, &data))?.columns.iter().map(|(_, column)| column.len()).sum();
/// assert!(bytes < 5000 / 2 + 200, "about 4 bits for each number");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KMeans {
    /// Number of levels, 2 to 256.
    pub levels: u16,
    /// Share of the smallest magnitudes that become zero, in thousandths.
    pub pruned: u16,
    /// Share of the greatest magnitudes that keep full precision, in thousandths.
    pub protected: u16,
    /// Whether k-means minimises relative errors instead of absolute errors.
    pub relative: bool,
}

impl Default for KMeans {
    fn default() -> Self {
        Self { levels: 256, pruned: 0, protected: 5, relative: true }
    }
}

const COLUMNS: [&str; 3] = ["levels", "codes", "protected"];
const MAX_LEVELS: usize = 256;
const PROTECTED_BYTES: usize = 8;

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("levels of {dtype}")).clause("kmeans 1")),
    }
}

/// Returns the boundaries between adjacent levels.
fn midpoints(levels: &[f32]) -> Vec<f64> {
    levels.windows(2).map(|pair| (f64::from(pair[0]) + f64::from(pair[1])) / 2.0).collect()
}

/// Returns the index of the level nearest to `x`.
#[inline]
fn level_of(midpoints: &[f64], x: f32) -> usize {
    midpoints.partition_point(|middle| f64::from(x) > *middle)
}

/// A quantized chunk.
struct Levels {
    levels: Vec<f32>,
    codes: Vec<u8>,
    /// Positions of the elements that keep full precision, ascending.
    protected: Vec<usize>,
}

/// A histogram bin of nearly equal numbers.
struct Bin {
    value: f64,
    weight: f64,
}

impl KMeans {
    fn share(permille: u16, count: usize) -> usize {
        count * usize::from(permille.min(1000)) / 1000
    }

    fn level_count(&self) -> usize {
        usize::from(self.levels).clamp(1, MAX_LEVELS)
    }

    fn quantize(&self, data: &[u8]) -> Levels {
        if let Some(exact) = self.exactly(data) {
            return exact;
        }
        let units = data.len() / 4;
        // Find the pruning and protection thresholds.
        let mut magnitudes: Vec<u32> = floats(data).filter(|x| x.is_finite()).map(|x| x.abs().to_bits()).collect();
        let finite = magnitudes.len();
        let least = nth(&mut magnitudes, Self::share(self.pruned, units));
        let greatest = nth(&mut magnitudes, finite.saturating_sub(Self::share(self.protected, units)));
        let is_pruned = |x: f32| least.is_some_and(|least| x.abs().to_bits() < least);
        let is_protected = |x: f32| !x.is_finite() || greatest.is_some_and(|greatest| x.abs().to_bits() >= greatest);
        let mut kept = floats(data).filter(|x| !is_protected(*x)).map(|x| if is_pruned(x) { 0.0 } else { x + 0.0 }).collect::<Vec<f32>>();
        kept.sort_unstable_by(f32::total_cmp);
        let levels = self.means(&kept);
        let between = midpoints(&levels);
        let (mut codes, mut protected) = (Vec::with_capacity(units), Vec::new());
        for (at, x) in floats(data).enumerate() {
            if is_protected(x) {
                protected.push(at);
                codes.push(0);
            } else {
                codes.push(level_of(&between, if is_pruned(x) { 0.0 } else { x }) as u8);
            }
        }
        Levels { levels, codes, protected }
    }

    /// Fits levels to sorted numbers by k-means on a histogram.
    fn means(&self, sorted: &[f32]) -> Vec<f32> {
        const BINS: usize = 4096;
        const ROUNDS: usize = 24;
        let zeros = sorted.iter().filter(|x| **x == 0.0).count();
        let weigh = |x: f64| if self.relative { 1.0 / (x * x).max(f64::MIN_POSITIVE) } else { 1.0 };
        let mut bins: Vec<Bin> = Vec::new();
        for run in sorted.chunks(sorted.len().div_ceil(BINS).max(1)) {
            // Zero gets a level of its own.
            let some = run.iter().filter(|x| **x != 0.0).map(|x| f64::from(*x));
            let (sum, count) = some.fold((0.0, 0.0), |(sum, count), x| (sum + x, count + 1.0));
            if count > 0.0 {
                bins.push(Bin { value: sum / count, weight: count * weigh(sum / count) });
            }
        }
        let wanted = (self.level_count() - usize::from(zeros > 0)).max(1).min(bins.len());
        // Start with levels at equal shares of the sorted numbers.
        let mut centers: Vec<f64> =
            (0..wanted).filter_map(|k| bins.get((2 * k + 1) * bins.len() / (2 * wanted))).map(|bin| bin.value).collect();
        for _ in 0..ROUNDS {
            let mut sums = vec![(0.0, 0.0); centers.len()];
            let mut at = 0;
            for bin in &bins {
                while at + 1 < centers.len() && (bin.value - centers[at + 1]).abs() <= (bin.value - centers[at]).abs() {
                    at += 1;
                }
                if let Some((sum, weight)) = sums.get_mut(at) {
                    *sum += bin.value * bin.weight;
                    *weight += bin.weight;
                }
            }
            for (center, (sum, weight)) in centers.iter_mut().zip(sums) {
                if weight > 0.0 && (sum / weight).is_finite() {
                    *center = sum / weight;
                }
            }
            centers.sort_unstable_by(f64::total_cmp);
        }
        let mut levels: Vec<f32> = centers.into_iter().map(|center| center as f32 + 0.0).filter(|level| level.is_finite()).collect();
        if zeros > 0 || levels.is_empty() {
            levels.push(0.0);
        }
        levels.sort_unstable_by(f32::total_cmp);
        levels.dedup();
        levels
    }

    /// Finds levels that reproduce every bit of the chunk. Succeeds for numbers that an earlier decode produced, and
    /// for few distinct numbers.
    fn exactly(&self, data: &[u8]) -> Option<Levels> {
        let units = data.len() / 4;
        let most_protected = Self::share(self.protected, units);
        let mut counts: HashMap<u32, u32> = HashMap::new();
        for x in floats(data).filter(|x| x.is_finite() && x.to_bits() != 1 << 31) {
            *counts.entry(x.to_bits()).or_default() += 1;
            if counts.len() > self.level_count() + most_protected {
                return None;
            }
        }
        let mut by_count: Vec<(u32, u32)> = counts.into_iter().map(|(bits, count)| (count, bits)).collect();
        by_count.sort_unstable_by(|a, b| b.cmp(a));
        let rest: usize = by_count.iter().skip(self.level_count()).map(|(count, _)| *count as usize).sum();
        if rest > most_protected {
            return None;
        }
        let mut levels: Vec<f32> = by_count.iter().take(self.level_count()).map(|(_, bits)| f32::from_bits(*bits)).collect();
        levels.sort_unstable_by(f32::total_cmp);
        if levels.is_empty() {
            levels.push(0.0);
        }
        let (mut codes, mut protected) = (Vec::with_capacity(units), Vec::new());
        for (at, x) in floats(data).enumerate() {
            match levels.binary_search_by(|level| level.total_cmp(&x)) {
                Ok(code) => codes.push(code as u8),
                Err(_) => {
                    protected.push(at);
                    codes.push(0);
                }
            }
        }
        Some(Levels { levels, codes, protected })
    }
}

/// Returns the number at position `place` in ascending order, or `None` past the end.
fn nth(numbers: &mut [u32], place: usize) -> Option<u32> {
    (place < numbers.len()).then(|| *numbers.select_nth_unstable(place).1)
}

/// Sorts element positions by expected level. Equal levels keep the order of positions.
fn order(expected: &[u8]) -> Result<Vec<u32>> {
    let mut next = [0u32; MAX_LEVELS + 1];
    for &level in expected {
        next[usize::from(level) + 1] += 1;
    }
    for at in 1..next.len() {
        next[at] += next[at - 1];
    }
    let mut order = reserve(expected.len(), "an order")?;
    order.resize(expected.len(), 0);
    for (number, &level) in expected.iter().enumerate() {
        let place = &mut next[usize::from(level)];
        if let Some(slot) = order.get_mut(*place as usize) {
            *slot = number as u32;
        }
        *place += 1;
    }
    Ok(order)
}

fn expected_levels(levels: &[f32], base: &[u8]) -> Result<Vec<u8>> {
    let between = midpoints(levels);
    let mut expected = reserve(base.len() / 4, "levels to expect")?;
    expected.extend(floats(base).map(|x| level_of(&between, x) as u8));
    Ok(expected)
}

impl Codec for KMeans {
    fn id(&self) -> &str {
        "tc.kmeans"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        dtype == Dtype::F32
    }

    fn is_lossless(&self) -> bool {
        false
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::PerChunk
    }

    fn cost(&self) -> Cost {
        Cost { encode: 60.0, decode: 6.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        let protected = element_count.saturating_mul(PROTECTED_BYTES as u64);
        entropy::max_encoded_bytes(element_count).saturating_add(protected).saturating_add(4 * MAX_LEVELS as u64)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let bits = u64::from(usize::BITS - self.level_count().leading_zeros());
        let protected = chunk.element_count.saturating_mul(u64::from(self.protected)) / 1000 * PROTECTED_BYTES as u64;
        (chunk.dtype == Dtype::F32).then(|| vec![4 * u64::from(self.levels), chunk.element_count.saturating_mul(bits) / 8, protected])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        if chunk.dtype != Dtype::F32 {
            return Err(Error::invalid(format!("needs f32, not {}", chunk.dtype)));
        }
        let Levels { levels, mut codes, protected } = self.quantize(chunk.data);
        let coded = |plane: &[u8]| entropy::coded(plane);
        let mut best = (coded(&codes), false);
        if let Some(base) = chunk.whole_base() {
            let expected = expected_levels(&levels, base)?;
            for at in &protected {
                codes[*at] = expected[*at];
            }
            let symbols: Vec<u8> = order(&expected)?.into_iter().map(|at| codes[at as usize].wrapping_sub(expected[at as usize])).collect();
            let delta = coded(&symbols);
            if delta.len() < best.0.len() {
                best = (delta, true);
            }
        }
        let units = chunk.data.as_chunks::<4>().0;
        let mut kept = Vec::with_capacity(protected.len() * PROTECTED_BYTES);
        for at in protected {
            kept.put_u32(at as u32);
            kept.extend_from_slice(units.get(at).map_or(&[][..], |unit| unit));
        }
        let stored = [to_bytes(&levels), best.0, kept];
        Ok(Encoded { uses_base: best.1, columns: COLUMNS.into_iter().zip(stored).collect() })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let [levels, codes, protected] = columns.exactly(COLUMNS)?;
        let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
        if levels.len() % 4 != 0 || !(1..=MAX_LEVELS).contains(&(levels.len() / 4)) {
            return bad(format!("{} bytes of levels", levels.len()), "kmeans 1");
        }
        let levels: Vec<f32> = floats(levels).collect();
        if !levels.iter().all(|level| level.is_finite()) || !levels.windows(2).all(|pair| pair[0] < pair[1]) {
            return bad("levels do not ascend or are not finite".into(), "kmeans 1");
        }
        let (protected, rest) = protected.as_chunks::<PROTECTED_BYTES>();
        let units = out.len() / 4;
        if !rest.is_empty() || protected.len() > units {
            return bad(format!("{} protected elements of {units}, or a part of one", protected.len()), "kmeans 1");
        }
        let mut symbols = Spare::new(units, "codes")?;
        entropy::decode(codes, &mut symbols)?;
        let mut highest = 0;
        let level = |code: u8| unit(levels.get(usize::from(code)).copied().unwrap_or_default());
        match columns.base {
            None => {
                for (&code, out) in symbols.iter().zip(out.as_chunks_mut::<4>().0) {
                    highest = highest.max(code);
                    *out = level(code);
                }
            }
            Some(_) => {
                let expected = expected_levels(&levels, columns.base(out.len())?)?;
                let out = out.as_chunks_mut::<4>().0;
                for (at, &symbol) in order(&expected)?.into_iter().zip(symbols.iter()) {
                    let (Some(expected), Some(out)) = (expected.get(at as usize), out.get_mut(at as usize)) else { continue };
                    let code = expected.wrapping_add(symbol);
                    highest = highest.max(code);
                    *out = level(code);
                }
            }
        }
        if units > 0 && usize::from(highest) >= levels.len() {
            return bad(format!("code {highest} of {} levels", levels.len()), "kmeans 4");
        }
        let mut before = None;
        for kept in protected {
            let (position, bits) = kept.split_at(4);
            let at = Cursor::new(position, "a protected element").u32()?;
            let place = out.as_chunks_mut::<4>().0.get_mut(at as usize).filter(|_| before.is_none_or(|before| before < at));
            let Some(place) = place else { return bad(format!("protected element {at} of {units}, out of order or beyond"), "kmeans 1") };
            place.copy_from_slice(bits);
            before = Some(at);
        }
        Ok(())
    }
}
