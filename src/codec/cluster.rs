//! `tc.cluster`: numbers in clusters of similar value, each cluster quantized to 8 bits.
//!
//! Spec: spec/codecs/cluster.md
//! Input:  n finite f32
//! Output: labels of 4 bits, codes of 8 bits, a scale and an offset for each cluster
//! Errors: `Corrupt` if labels or options are out of range, or scales and offsets are not finite
//! Cost:   15 comparisons and one multiplication per number to encode; one multiplication and one addition to decode
//! Source: BitSnap (arXiv 2511.12376), algorithm 2 and equation 3

use tensorcask_kernels::clusters::{self as kernel, MAX_CLUSTERS, Tables};
use tensorcask_kernels::floats::{floats, to_bytes};
use tensorcask_kernels::spare::Spare;

use super::{Chunk, Codec, Columns, Cost, Encoded, maps};
use crate::{Dtype, Error, Result};

/// Boundaries between clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Edges {
    /// Quantiles of a normal distribution with the mean and the standard deviation of the numbers.
    Normal,
    /// Quantiles of a sample of the numbers.
    #[default]
    Sample,
}

/// Numbers that codes represent, between the least and the greatest number of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CodeMap {
    /// Equal steps.
    #[default]
    Linear,
    /// The dynamic map of 8-bit optimizers, with finer steps near the least number.
    Dynamic,
}

/// Stores numbers in 12 bits each. Rounds numbers, except those that an earlier decode of this codec produced.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Cluster, Codec}};
/// let data: Vec<u8> = (1..=1000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
/// let encoded = Cluster::default().encode(&Chunk::new(Dtype::F32, 1000, &data))?;
/// let bytes: usize = encoded.columns.iter().map(|(_, column)| column.len()).sum();
/// assert_eq!(bytes, 1500 + 16 * 8 + 2);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cluster {
    /// Number of clusters, 1 to 16.
    pub clusters: u8,
    /// Boundaries between the clusters.
    pub edges: Edges,
    /// Numbers that codes represent.
    pub map: CodeMap,
}

impl Default for Cluster {
    fn default() -> Self {
        Self { clusters: MAX_CLUSTERS as u8, edges: Edges::default(), map: CodeMap::default() }
    }
}

const COLUMNS: [&str; 5] = ["labels", "codes", "scale", "offset", "options"];

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("clusters of {dtype}")).clause("cluster 1")),
    }
}

impl CodeMap {
    fn numbers(self) -> &'static maps::Map {
        match self {
            Self::Linear => &maps::LINEAR,
            Self::Dynamic => &maps::UNSIGNED,
        }
    }

    /// Returns the map's number for the highest code.
    fn span(self) -> f32 {
        self.numbers()[255]
    }
}

/// A quantized chunk.
struct Clusters {
    labels: Vec<u8>,
    codes: Vec<u8>,
    /// Offset and scale of each cluster.
    all: Vec<(f32, f32)>,
}

/// Returns a quantile of the standard normal distribution, by Acklam's rational approximation. Only the encoder uses
/// quantiles, so the approximation is precise enough.
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] =
        [-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.357751867269, -30.66479806614716, 2.506628277459239];
    const B: [f64; 5] = [-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572];
    const C: [f64; 6] =
        [-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968, 2.938163982698783];
    const D: [f64; 4] = [0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416];
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |p: f64| {
        let q = (-2.0 * p.ln()).sqrt();
        poly(&C, q) / (poly(&D, q) * q + 1.0)
    };
    match p {
        p if p < 0.02425 => tail(p),
        p if p > 1.0 - 0.02425 => -tail(1.0 - p),
        p => {
            let q = p - 0.5;
            poly(&A, q * q) * q / (poly(&B, q * q) * q * q + 1.0)
        }
    }
}

/// Number of elements in the sample for edges.
const SAMPLED: usize = 16_384;

impl Cluster {
    /// Returns the edges between clusters, ascending.
    fn edges(&self, data: &[u8]) -> Vec<f32> {
        let clusters = usize::from(self.clusters).clamp(1, MAX_CLUSTERS);
        let share = |i: usize| i as f64 / clusters as f64;
        match self.edges {
            Edges::Normal => {
                let count = (data.len() / 4).max(1) as f64;
                let mean = floats(data).map(f64::from).sum::<f64>() / count;
                let deviation = (floats(data).map(|x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count).sqrt();
                (1..clusters).map(|i| (mean + deviation * normal_quantile(share(i))) as f32).collect()
            }
            Edges::Sample => {
                let step = (data.len() / 4).div_ceil(SAMPLED).max(1);
                let mut sample: Vec<f32> = floats(data).step_by(step).collect();
                sample.sort_unstable_by(f32::total_cmp);
                let at = |i: usize| sample.get(sample.len() * i / clusters).copied().unwrap_or_default();
                (1..clusters).map(at).collect()
            }
        }
    }

    /// Quantizes a chunk. Returns `None` if a number is not finite, or a cluster's range exceeds f32.
    fn quantize(&self, data: &[u8]) -> Option<Clusters> {
        if !floats(data).all(f32::is_finite) {
            return None;
        }
        if let Some(exact) = self.exactly(data) {
            return Some(exact);
        }
        let units = data.len() / 4;
        let mut labels = vec![0; units];
        let mut codes = vec![0; units];
        kernel::labels(&self.edges(data), data, &mut labels);
        let mut all: Vec<(f32, f32)> = Vec::new();
        for (least, greatest) in kernel::ranges(&labels, data).into_iter().take(usize::from(self.clusters).clamp(1, MAX_CLUSTERS)) {
            // An empty cluster gets offset 0. Adding 0 turns -0 into 0, because no sum yields -0.
            let least = if least > greatest { 0.0 } else { least + 0.0 };
            let range = if greatest > least { greatest - least } else { 0.0 };
            let mut scale = range / self.map.span();
            // The sum may round up past the greatest number, and so into the next cluster.
            while scale > 0.0 && scale.is_finite() && kernel::number(scale, least, self.map.span()) > greatest {
                scale = scale.next_down();
            }
            all.push((least, scale));
        }
        if all.iter().any(|(offset, scale)| !(offset.is_finite() && scale.is_finite())) {
            return None;
        }
        match self.map {
            CodeMap::Linear => kernel::linear_codes(&labels, data, &tables(self.map, &all), &mut codes),
            CodeMap::Dynamic => {
                for ((x, label), code) in floats(data).zip(&labels).zip(&mut codes) {
                    let (offset, scale) = all.get(usize::from(*label)).copied().unwrap_or_default();
                    *code = maps::nearest(&maps::UNSIGNED, if scale > 0.0 { (x - offset) / scale } else { 0.0 });
                }
            }
        }
        Some(Clusters { labels, codes, all })
    }

    /// Finds clusters that reproduce every bit of the chunk. Succeeds for numbers that an earlier decode produced, and
    /// for few distinct numbers.
    fn exactly(&self, data: &[u8]) -> Option<Clusters> {
        let distinct = distinct(data, 256 * usize::from(self.clusters))?;
        let most = usize::from(self.clusters);
        let clusters = longest_runs(&distinct, self.map, most).or_else(|| fewest_runs(&distinct, self.map, most))?;
        // Each number is a code of the cluster whose run contains it.
        let mut labels = Vec::with_capacity(data.len() / 4);
        let mut codes = Vec::with_capacity(data.len() / 4);
        for x in floats(data) {
            let label = clusters.partition_point(|(first, _)| *first <= x).checked_sub(1)?;
            let (offset, scale) = *clusters.get(label)?;
            labels.push(label as u8);
            codes.push(code_of(self.map, offset, scale, x)?);
        }
        Some(Clusters { labels, codes, all: clusters })
    }
}

/// Returns the distinct numbers of a chunk, ascending. Returns `None` if there are more than `most`, or if one is -0.
fn distinct(data: &[u8], most: usize) -> Option<Vec<f32>> {
    let mut seen = std::collections::HashSet::new();
    for x in floats(data) {
        if seen.insert(x.to_bits()) && (seen.len() > most || x.to_bits() == 1 << 31) {
            return None;
        }
    }
    let mut all: Vec<f32> = seen.into_iter().map(f32::from_bits).collect();
    all.sort_unstable_by(f32::total_cmp);
    Some(all)
}

/// Returns the code that represents exactly `x`.
fn code_of(map: CodeMap, offset: f32, scale: f32, x: f32) -> Option<u8> {
    let about = if scale > 0.0 { (x - offset) / scale } else { 0.0 };
    let nearest = maps::nearest(map.numbers(), about);
    let stands_for = |code: u8| kernel::number(scale, offset, map.numbers()[usize::from(code)]);
    [nearest, nearest.saturating_sub(1), nearest.saturating_add(1)].into_iter().find(|code| stands_for(*code).to_bits() == x.to_bits())
}

/// Covers ascending numbers with at most `most` clusters that represent them exactly, each as long as possible. For
/// numbers that an earlier decode produced, this greedy search nearly always succeeds.
fn longest_runs(numbers: &[f32], map: CodeMap, most: usize) -> Option<Vec<(f32, f32)>> {
    let mut all = Vec::new();
    let mut rest = numbers;
    while let Some(first) = rest.first() {
        let runs = (2..=rest.len().min(256)).rev();
        let found = runs.into_iter().find_map(|length| Some((length, scale_of(rest.get(..length)?, map)?)));
        let (length, scale) = found.unwrap_or((1, 0.0));
        all.push((*first, scale));
        rest = rest.get(length..)?;
        if all.len() > most {
            return None;
        }
    }
    Some(all).filter(|all| !all.is_empty())
}

/// Covers ascending numbers with the fewest clusters. The greedy search can fail, because its longest run may take
/// numbers that the next run needs.
fn fewest_runs(numbers: &[f32], map: CodeMap, most: usize) -> Option<Vec<(f32, f32)>> {
    // For each number: the fewest clusters from here to the end, the length of the first, and its scale.
    let mut best = vec![(0usize, 0usize, 0f32); numbers.len() + 1];
    for first in (0..numbers.len()).rev() {
        let mut found = (best[first + 1].0 + 1, 1, 0.0);
        for length in 2..=(numbers.len() - first).min(256) {
            let count = best[first + length].0 + 1;
            if count < found.0
                && let Some(scale) = scale_of(numbers.get(first..first + length)?, map)
            {
                found = (count, length, scale);
            }
        }
        best[first] = found;
    }
    let mut all = Vec::new();
    let mut at = 0;
    while let Some(first) = numbers.get(at) {
        let (_, length, scale) = *best.get(at)?;
        all.push((*first, scale));
        at += length;
    }
    (1..=most).contains(&all.len()).then_some(all)
}

/// Returns the scale of a cluster that represents all these numbers exactly, from the first to the last.
fn scale_of(numbers: &[f32], map: CodeMap) -> Option<f32> {
    /// Greatest distance, in steps of f32, between the range of decoded numbers and the range of the encoded ones.
    const AWAY: i32 = 6;
    let first = *numbers.first()?;
    let last = *numbers.last()?;
    let about = (last - first) / map.span();
    let some = [numbers.get(1), numbers.get(numbers.len() / 2), numbers.get(numbers.len().wrapping_sub(2))];
    if !some.into_iter().flatten().all(|x| is_near_a_code(map, first, about, *x)) {
        return None;
    }
    let mut scales = (-AWAY..=AWAY).filter_map(|away| {
        let scale = f32::from_bits(about.to_bits().checked_add_signed(away)?);
        (scale.is_finite() && scale > 0.0).then_some(scale)
    });
    scales.find(|scale| numbers.iter().rev().all(|x| code_of(map, first, *scale, *x).is_some()))
}

/// Quickly rejects a number that no code of the cluster represents. Accepted numbers still need an exact check.
fn is_near_a_code(map: CodeMap, offset: f32, scale: f32, x: f32) -> bool {
    let step = f64::from(x.abs().max(offset.abs())) * f64::from(f32::EPSILON) * 2.0 / f64::from(scale);
    let code = (f64::from(x) - f64::from(offset)) / f64::from(scale);
    match map {
        CodeMap::Linear => (code - f64::from((code + 0.5) as i32)).abs() <= 0.002 + step,
        CodeMap::Dynamic => {
            let nearest = maps::UNSIGNED[usize::from(maps::nearest(&maps::UNSIGNED, code as f32))];
            (code - f64::from(nearest)).abs() <= 1e-5 + step
        }
    }
}

fn tables(map: CodeMap, all: &[(f32, f32)]) -> Tables<'static> {
    let mut tables = Tables { scale: [0.0; MAX_CLUSTERS], offset: [0.0; MAX_CLUSTERS], map: map.numbers() };
    for (at, (offset, scale)) in all.iter().enumerate().take(MAX_CLUSTERS) {
        (tables.offset[at], tables.scale[at]) = (*offset, *scale);
    }
    tables
}

impl Codec for Cluster {
    fn id(&self) -> &str {
        "tc.cluster"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        dtype == Dtype::F32
    }

    fn is_lossless(&self) -> bool {
        false
    }

    fn cost(&self) -> Cost {
        Cost { encode: 6.0, decode: 2.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        element_count.div_ceil(2).saturating_add(element_count).saturating_add(8 * MAX_CLUSTERS as u64 + 2)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let finite = chunk.dtype == Dtype::F32 && self.quantize(chunk.data).is_some();
        let clusters = 4 * u64::from(self.clusters);
        finite.then(|| vec![chunk.element_count.div_ceil(2), chunk.element_count, clusters, clusters, 2])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let Clusters { labels, codes, all } = self
            .quantize(chunk.data)
            .filter(|_| chunk.dtype == Dtype::F32)
            .ok_or_else(|| Error::invalid("needs finite f32 within a finite range"))?;
        let packed = labels.chunks(2).map(|pair| pair.iter().rev().fold(0, |byte, label| byte << 4 | label)).collect();
        let (offset, scale): (Vec<f32>, Vec<f32>) = all.into_iter().unzip();
        let options = vec![u8::from(self.edges == Edges::Sample), u8::from(self.map == CodeMap::Dynamic)];
        let stored = [packed, codes, to_bytes(&scale), to_bytes(&offset), options];
        Ok(Encoded { uses_base: false, columns: COLUMNS.into_iter().zip(stored).collect() })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let [packed, codes, scale, offset, options] = columns.exactly(COLUMNS)?;
        let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
        let units = out.len() / 4;
        let clusters = scale.len() / 4;
        if scale.len() % 4 != 0 || !(1..=MAX_CLUSTERS).contains(&clusters) || codes.len() != units || packed.len() != units.div_ceil(2) {
            return bad(
                format!("{} bytes of scales, {} labels, {} codes for {units} elements", scale.len(), packed.len(), codes.len()),
                "cluster 1",
            );
        }
        let map = match options {
            [0 | 1, 0] => CodeMap::Linear,
            [0 | 1, 1] => CodeMap::Dynamic,
            [_, _] => return bad("unknown option".into(), "cluster 1.1"),
            _ => return bad(format!("{} bytes of options", options.len()), "cluster 1"),
        };
        if offset.len() != scale.len()
            || floats(scale).chain(floats(offset)).any(|x| !x.is_finite())
            || floats(scale).any(|x| x.is_sign_negative())
        {
            return bad("scales and offsets do not match, or are not finite".into(), "cluster 1.1");
        }
        let mut labels = Spare::new(units, "labels")?;
        for (pair, byte) in labels.chunks_mut(2).zip(packed) {
            for (at, label) in pair.iter_mut().enumerate() {
                *label = byte >> (4 * at) & 0xf;
            }
        }
        let unused = packed.last().filter(|_| !units.is_multiple_of(2)).map_or(0, |last| last >> 4);
        if unused != 0 || labels.iter().any(|label| usize::from(*label) >= clusters) {
            return bad(format!("a label is not one of {clusters} clusters, or has no element"), "cluster 1.1");
        }
        let all: Vec<(f32, f32)> = floats(offset).zip(floats(scale)).collect();
        kernel::join(&labels, codes, &tables(map, &all), out);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::little_endian_bytes, reason = "elements are little-endian")]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, x) in [(0.5, 0.0), (0.0625, -1.534_120_5), (0.9375, 1.534_120_5), (0.01, -2.326_347_9)] {
            assert!((normal_quantile(p) - x).abs() < 1e-6, "{p}");
        }
    }

    #[test]
    fn numbers_over_all_magnitudes_stay_what_they_were_decoded_to() {
        let spread = |i: i32| (i as f32 * 0.7).sin() * 10f32.powi(i % 37 - 30);
        let data: Vec<u8> = (0..20_000).flat_map(|i| spread(i).to_le_bytes()).collect();
        for edges in [Edges::Normal, Edges::Sample] {
            for map in [CodeMap::Linear, CodeMap::Dynamic] {
                for clusters in [1, 2, 16] {
                    let codec = Cluster { clusters, edges, map };
                    let decode = |data: &[u8]| {
                        let encoded = codec.encode(&Chunk::new(Dtype::F32, 20_000, data)).unwrap().into_bytes();
                        let mut out = vec![0; data.len()];
                        let columns = Columns { dtype: Dtype::F32, element_count: 20_000, columns: &encoded, base: None, partners: &[] };
                        codec.decode(&columns, &mut out).unwrap();
                        out
                    };
                    let once = decode(&data);
                    assert!(decode(&once) == once, "{codec:?}");
                }
            }
        }
    }
}
