//! `tc.kmeans`: a few levels that represent all numbers. Small numbers are pruned to zero, large numbers are protected.
//!
//! Spec:   spec/codecs/kmeans.md
//! Input:  n f32 or bf16, and as many of the base for a delta; to encode by sensitivity, the gradients or the second moments
//! Output: levels; one code per number, or its difference from the code of the base, coded by spec/entropy.md;
//!         protected numbers
//! Errors: `Corrupt` if levels do not ascend, a code has no level, or protected numbers are out of order
//! Cost:   a histogram and some passes over it; a search of 8 steps per number; a delta sorts elements by the base's
//!         code
//! Source: Agrawal et al., DynaQuant (arXiv 2306.11800)

use std::collections::HashMap;

use tensorcask_kernels::floats::{numbers, unit};
use tensorcask_kernels::spare::Spare;

use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Partner};
use crate::entropy;
use crate::limits::reserve;
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
    /// Share of the least important numbers that become zero, in thousandths.
    pub pruned: u16,
    /// Share of the most important numbers that keep full precision, in thousandths.
    pub protected: u16,
    /// Error that the levels minimise. It also says which numbers are important.
    pub error: LevelError,
}

impl Default for KMeans {
    fn default() -> Self {
        Self { levels: 256, pruned: 0, protected: 5, error: LevelError::default() }
    }
}

/// Error that the levels of [`KMeans`] minimise, as a mean over all numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LevelError {
    /// Squared error. The greatest magnitudes are the most important numbers.
    Absolute,
    /// Squared relative error. The greatest magnitudes are the most important numbers.
    #[default]
    Relative,
    /// Squared error times sensitivity. The sensitivity of a number is its squared gradient: the partner of role `gradient`, or
    /// else the partner of role `exp_avg_sq`, Adam's mean of squared gradients. The greatest products of sensitivity and
    /// squared number are the most important. Without such a partner, as `Relative`.
    Sensitive,
}

const COLUMNS: [&str; 3] = ["levels", "codes", "protected"];
const MAX_LEVELS: usize = 256;
/// Bytes of the position of a protected element.
const POSITION_BYTES: usize = 4;
/// Least sensitivity that counts, as a share of the mean. Numbers without a gradient still have levels near them.
const LEAST_SENSITIVITY: f64 = 1e-3;

fn check_dtype(dtype: Dtype) -> Result<()> {
    match is_supported(dtype) {
        true => Ok(()),
        false => Err(Error::corrupt(format!("levels of {dtype}")).clause("kmeans 1")),
    }
}

fn is_supported(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16)
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

/// A number to find levels for, with the weight of its squared error.
type WeightedNumber = (f32, f64);

/// Moves ascending levels to round numbers, each so little that its mean squared error grows by at most a twentieth. Then a later
/// state, which differs little, mostly gets the same levels, and its delta is small.
///
/// The levels of the base would do the same. But the stored form of a chunk must not depend on its base, because a codec may need the
/// chunk as a partner where its base is not at hand.
fn snap_levels(levels: &[f64], bins: &[Bin]) -> Vec<f64> {
    let mut rest = bins;
    let snap = |(at, &level): (usize, &f64)| {
        let end = levels.get(at + 1).map_or(f64::INFINITY, |next| f64::midpoint(level, *next));
        let (own, others) = rest.split_at(rest.partition_point(|bin| bin.value <= end));
        rest = others;
        let [weight, squares] = own.iter().fold([0.0; 2], |[weight, squares], bin| {
            let distance = bin.value - level;
            [weight + bin.weight, squares + bin.weight * distance * distance]
        });
        // A level moves by at most half a step, a sixteenth of the width of an evenly filled cell with this error.
        let step = ((12.0 * squares / weight).sqrt() / 8.0).log2().floor().exp2();
        let snapped = (level / step).round() * step;
        if step.is_normal() && snapped.is_finite() { snapped } else { level }
    };
    levels.iter().enumerate().map(snap).collect()
}

/// First levels: as dense as the best levels of a smooth density are, in proportion to the cube root of the weight per width.
///
/// Source: Panter and Dite, "Quantization distortion in pulse-count modulation with nonuniform spacing of levels" (1951)
fn initial_levels(bins: &[Bin], count: usize) -> Vec<f64> {
    let value = |at: usize| bins.get(at).map_or(0.0, |bin| bin.value);
    // A bin reaches halfway to its neighbours.
    let left = |at: usize| f64::midpoint(value(at.saturating_sub(1)), value(at));
    let right = |at: usize| f64::midpoint(value(at), value((at + 1).min(bins.len().saturating_sub(1))));
    let share = |at: usize, bin: &Bin| {
        let width = right(at) - left(at);
        (width * width * bin.weight).cbrt()
    };
    let shares: Vec<f64> = bins.iter().enumerate().map(|(at, bin)| share(at, bin)).collect();
    let total: f64 = shares.iter().sum();
    if !(total.is_finite() && total > 0.0) {
        // Weights of the tiniest numbers overflow: take equal shares of the bins.
        return (0..count).map(|k| value((2 * k + 1) * bins.len() / (2 * count))).collect();
    }
    let mut at = 0;
    let mut before = 0.0;
    let place = |k: usize| {
        let wanted = total * (k as f64 + 0.5) / count as f64;
        while at + 1 < bins.len() && before + shares[at] < wanted {
            before += shares[at];
            at += 1;
        }
        let inside = if shares[at] > 0.0 { ((wanted - before) / shares[at]).clamp(0.0, 1.0) } else { 0.5 };
        left(at) + inside * (right(at) - left(at))
    };
    (0..count).map(place).collect()
}

/// Squared gradient of each number of a chunk, at least a small share of their mean; `None` without a partner that tells.
pub(crate) fn sensitivities(chunk: &Chunk<'_>) -> Option<Vec<f64>> {
    let known = |partner: &&Partner<'_>| matches!(partner.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16);
    let squared: Vec<f64> = if let Some(gradient) = chunk.partner("gradient").filter(known) {
        numbers(gradient.dtype.number_format(), gradient.data).map(|g| f64::from(g) * f64::from(g)).collect()
    } else {
        let second = chunk.partner("exp_avg_sq").filter(known)?;
        numbers(second.dtype.number_format(), second.data).map(f64::from).collect()
    };
    let finite = |x: f64| if x.is_finite() { x.max(0.0) } else { 0.0 };
    let mean = squared.iter().map(|&x| finite(x)).sum::<f64>() / squared.len().max(1) as f64;
    // All are zero at the first step.
    (mean > 0.0).then(|| squared.into_iter().map(|x| finite(x).max(mean * LEAST_SENSITIVITY)).collect())
}

impl KMeans {
    fn share(permille: u16, count: usize) -> usize {
        count * usize::from(permille.min(1000)) / 1000
    }

    fn level_count(&self) -> usize {
        usize::from(self.levels).clamp(1, MAX_LEVELS)
    }

    fn quantize(&self, chunk: &Chunk<'_>) -> Levels {
        let values: Vec<f32> = numbers(chunk.dtype.number_format(), chunk.data).collect();
        if let Some(exact) = self.exactly(&values) {
            return exact;
        }
        let sensitivities = if self.error == LevelError::Sensitive { sensitivities(chunk) } else { None };
        let sensitivity = |at: usize| sensitivities.as_ref().and_then(|all| all.get(at)).copied();
        // Magnitude of a number, or of what its loss would cost.
        let importance = |at: usize, x: f32| sensitivity(at).map_or_else(|| x.abs(), |s| (s.sqrt() * f64::from(x.abs())) as f32).to_bits();
        // Find the thresholds of pruned and protected numbers.
        let finite = values.iter().enumerate().filter(|(_, x)| x.is_finite());
        let mut order: Vec<u32> = finite.map(|(at, &x)| importance(at, x)).collect();
        let count = order.len();
        let least = nth(&mut order, Self::share(self.pruned, values.len()));
        let greatest = count.checked_sub(Self::share(self.protected, values.len()) + 1).and_then(|place| nth(&mut order, place));
        let is_pruned = |at: usize, x: f32| least.is_some_and(|least| importance(at, x) < least);
        // Of equal numbers, no more are protected than the share allows.
        let is_protected = |at: usize, x: f32| !x.is_finite() || greatest.is_none_or(|greatest| importance(at, x) > greatest);
        let kept = values.iter().enumerate().filter(|&(at, x)| !is_protected(at, *x));
        let weight = |at: usize| sensitivity(at).unwrap_or(1.0);
        let mut kept: Vec<WeightedNumber> =
            kept.map(|(at, &x)| if is_pruned(at, x) { (0.0, 0.0) } else { (x + 0.0, weight(at)) }).collect();
        kept.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
        let is_relative = self.error != LevelError::Absolute && sensitivities.is_none();
        let levels = self.means(&kept, is_relative, chunk.dtype);
        let between = midpoints(&levels);
        let mut codes = Vec::with_capacity(values.len());
        let mut protected = Vec::new();
        for (at, &x) in values.iter().enumerate() {
            if is_protected(at, x) {
                protected.push(at);
                codes.push(0);
            } else {
                codes.push(level_of(&between, if is_pruned(at, x) { 0.0 } else { x }) as u8);
            }
        }
        Levels { levels, codes, protected }
    }

    /// Fits levels to sorted numbers by k-means on a histogram. Levels are numbers of the dtype.
    fn means(&self, sorted: &[WeightedNumber], is_relative: bool, dtype: Dtype) -> Vec<f32> {
        const BINS: usize = 4096;
        const ROUNDS: usize = 24;
        let zeros = sorted.iter().filter(|(x, _)| *x == 0.0).count();
        let mut bins: Vec<Bin> = Vec::new();
        for run in sorted.chunks(sorted.len().div_ceil(BINS).max(1)) {
            // Zero gets a level of its own.
            let some = run.iter().filter(|(x, _)| *x != 0.0).map(|&(x, weight)| (f64::from(x), weight));
            let sums = some.fold([0.0; 3], |[all, sum, squares], (x, weight)| [all + weight, sum + x * weight, squares + x * x * weight]);
            let [weight, sum, squares] = sums;
            let value = sum / weight;
            if !(weight > 0.0 && value.is_finite()) {
                continue;
            }
            // Errors are relative to the magnitude of the bin: the few numbers nearest to zero would outweigh all others.
            let magnitude = (squares / weight).max(f64::MIN_POSITIVE);
            let weight = if is_relative { weight / magnitude } else { weight };
            match bins.last_mut().filter(|bin| bin.value == value) {
                Some(bin) => bin.weight += weight,
                None => bins.push(Bin { value, weight }),
            }
        }
        let wanted = (self.level_count() - usize::from(zeros > 0)).max(1).min(bins.len());
        let mut centers = initial_levels(&bins, wanted);
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
        let of_dtype = |center: f64| if dtype == Dtype::Bf16 { half::bf16::from_f64(center).to_f32() } else { center as f32 };
        let mut levels: Vec<f32> =
            snap_levels(&centers, &bins).into_iter().map(|center| of_dtype(center) + 0.0).filter(|level| level.is_finite()).collect();
        if zeros > 0 || levels.is_empty() {
            levels.push(0.0);
        }
        levels.sort_unstable_by(f32::total_cmp);
        levels.dedup();
        levels
    }

    /// Finds levels that reproduce every bit of the chunk. Succeeds for numbers that an earlier decode produced, and
    /// for few distinct numbers.
    fn exactly(&self, values: &[f32]) -> Option<Levels> {
        let most_protected = Self::share(self.protected, values.len());
        let mut counts: HashMap<u32, u32> = HashMap::new();
        for x in values.iter().filter(|x| x.is_finite() && x.to_bits() != 1 << 31) {
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
        let mut codes = Vec::with_capacity(values.len());
        let mut protected = Vec::new();
        for (at, x) in values.iter().enumerate() {
            match levels.binary_search_by(|level| level.total_cmp(x)) {
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

fn expected_levels(levels: &[f32], dtype: Dtype, base: &[u8]) -> Result<Vec<u8>> {
    let between = midpoints(levels);
    let mut expected = reserve(base.len() / 2, "levels to expect")?;
    expected.extend(numbers(dtype.number_format(), base).map(|x| level_of(&between, x) as u8));
    Ok(expected)
}

/// Bytes of levels, as elements of a chunk.
fn level_bytes(levels: &[f32], dtype: Dtype) -> Vec<u8> {
    let single = |level: &f32| unit(*level);
    match dtype {
        // The upper half is the level: levels of bf16 are numbers of bf16.
        Dtype::Bf16 => levels.iter().flat_map(|level| single(level).into_iter().skip(2)).collect(),
        _ => levels.iter().flat_map(single).collect(),
    }
}

impl Codec for KMeans {
    fn id(&self) -> &str {
        "tc.kmeans"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        is_supported(dtype)
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
        let protected = element_count.saturating_mul(POSITION_BYTES as u64 + 4);
        entropy::max_encoded_bytes(element_count).saturating_add(protected).saturating_add(4 * MAX_LEVELS as u64)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let bits = u64::from(usize::BITS - self.level_count().leading_zeros());
        let element = chunk.dtype.bits() / 8;
        let protected = chunk.element_count.saturating_mul(u64::from(self.protected)) / 1000 * (POSITION_BYTES as u64 + element);
        let codes = chunk.element_count.saturating_mul(bits) / 8;
        is_supported(chunk.dtype).then(|| vec![element * u64::from(self.levels), codes, protected])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        if !is_supported(chunk.dtype) {
            return Err(Error::invalid(format!("needs f32 or bf16, not {}", chunk.dtype)));
        }
        let Levels { levels, mut codes, protected } = self.quantize(chunk);
        let coded = |plane: &[u8]| entropy::coded(plane);
        let mut best = (coded(&codes), false);
        if let Some(base) = chunk.whole_base() {
            let expected = expected_levels(&levels, chunk.dtype, base)?;
            for at in &protected {
                codes[*at] = expected[*at];
            }
            let symbols: Vec<u8> = order(&expected)?.into_iter().map(|at| codes[at as usize].wrapping_sub(expected[at as usize])).collect();
            let delta = coded(&symbols);
            if delta.len() < best.0.len() {
                best = (delta, true);
            }
        }
        let element = (chunk.dtype.bits() / 8) as usize;
        let mut kept = Vec::with_capacity(protected.len() * (POSITION_BYTES + element));
        for at in protected {
            kept.put_u32(at as u32);
            kept.extend_from_slice(chunk.data.get(at * element..(at + 1) * element).unwrap_or_default());
        }
        let stored = [level_bytes(&levels, chunk.dtype), best.0, kept];
        Ok(Encoded { uses_base: best.1, columns: COLUMNS.into_iter().zip(stored).collect() })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        match columns.dtype {
            Dtype::Bf16 => decode_elements::<2>(columns, out),
            _ => decode_elements::<4>(columns, out),
        }
    }
}

/// Decodes a chunk of elements of `N` bytes.
fn decode_elements<const N: usize>(columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
    let [levels, codes, protected] = columns.exactly(COLUMNS)?;
    let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
    let (elements, rest) = levels.as_chunks::<N>();
    if !rest.is_empty() || !(1..=MAX_LEVELS).contains(&elements.len()) {
        return bad(format!("{} bytes of levels", levels.len()), "kmeans 1");
    }
    let levels: Vec<f32> = numbers(columns.dtype.number_format(), levels).collect();
    if !levels.iter().all(|level| level.is_finite()) || !levels.windows(2).all(|pair| pair[0] < pair[1]) {
        return bad("levels do not ascend or are not finite".into(), "kmeans 1");
    }
    let units = out.len() / N;
    let each = POSITION_BYTES + N;
    if !protected.len().is_multiple_of(each) || protected.len() / each > units {
        return bad(format!("{} bytes of protected elements, for {units} elements", protected.len()), "kmeans 1");
    }
    let mut symbols = Spare::new(units, "codes")?;
    entropy::decode(codes, &mut symbols)?;
    let mut highest = 0;
    let level = |code: u8| elements.get(usize::from(code)).copied().unwrap_or([0; N]);
    match columns.base {
        None => {
            for (&code, out) in symbols.iter().zip(out.as_chunks_mut::<N>().0) {
                highest = highest.max(code);
                *out = level(code);
            }
        }
        Some(_) => {
            let expected = expected_levels(&levels, columns.dtype, columns.base(out.len())?)?;
            let out = out.as_chunks_mut::<N>().0;
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
    for kept in protected.chunks_exact(each) {
        let (position, element) = kept.split_at(POSITION_BYTES);
        let at = Cursor::new(position, "a protected element").u32()?;
        let place = out.as_chunks_mut::<N>().0.get_mut(at as usize).filter(|_| before.is_none_or(|before| before < at));
        let Some(place) = place else { return bad(format!("protected element {at} of {units}, out of order or beyond"), "kmeans 1") };
        place.copy_from_slice(element);
        before = Some(at);
    }
    Ok(())
}
