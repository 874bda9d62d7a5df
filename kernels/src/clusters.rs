//! Clusters of f32, each with a scale and an offset. Spec: spec/codecs/cluster.md.

use super::floats::{floats, unit};

/// Greatest number of clusters.
pub const MAX_CLUSTERS: usize = 16;

super::for_every_level! {
    /// Counts, for each number, the edges at or below the number.
    pub fn labels / labels_at(edges: &[f32], data: &[u8], out: &mut [u8]) = labels_any;
}

super::for_every_level! {
    /// Computes `offset + scale * map[code]` for each element, with the scale and offset of the element's label.
    pub fn join / join_at(labels: &[u8], codes: &[u8], tables: &Tables<'_>, out: &mut [u8]) = join_any;
}

super::for_every_level! {
    /// Returns the nearest code of each number on a linear map. Each cluster's offset must be its least number.
    pub fn linear_codes / linear_codes_at(labels: &[u8], data: &[u8], tables: &Tables<'_>, out: &mut [u8]) = linear_codes_any;
}

/// Scale and offset of each label, and the map from codes to numbers.
#[derive(Debug, Clone)]
pub struct Tables<'a> {
    pub scale: [f32; MAX_CLUSTERS],
    pub offset: [f32; MAX_CLUSTERS],
    pub map: &'a [f32; 256],
}

/// Returns the number that a code of a cluster represents.
#[inline(always)]
pub fn number(scale: f32, offset: f32, mapped: f32) -> f32 {
    let product = scale * mapped;
    offset + product
}

/// Number of elements in one vectorised step.
const LANES: usize = 16;

#[inline(always)]
fn labels_any(edges: &[f32], data: &[u8], out: &mut [u8]) {
    // Compare with all edges at once. Missing edges are NaN, so no number is at or above them.
    let mut all = [f32::NAN; MAX_CLUSTERS - 1];
    for (slot, edge) in all.iter_mut().zip(edges) {
        *slot = *edge;
    }
    for (data, out) in data.chunks(LANES * 4).zip(out.chunks_mut(LANES)) {
        let mut numbers = [0f32; LANES];
        let mut counts = [0u32; LANES];
        for (number, x) in numbers.iter_mut().zip(floats(data)) {
            *number = x;
        }
        for edge in all {
            for (count, x) in counts.iter_mut().zip(numbers) {
                *count += u32::from(x >= edge);
            }
        }
        for (label, count) in out.iter_mut().zip(counts) {
            *label = count as u8;
        }
    }
}

#[inline(always)]
fn linear_codes_any(labels: &[u8], data: &[u8], tables: &Tables<'_>, out: &mut [u8]) {
    let inverse: [f32; MAX_CLUSTERS] = std::array::from_fn(|at| if tables.scale[at] > 0.0 { 1.0 / tables.scale[at] } else { 0.0 });
    for ((x, &label), out) in floats(data).zip(labels).zip(out) {
        let at = usize::from(label) % MAX_CLUSTERS;
        *out = ((x - tables.offset[at]) * inverse[at] + 0.5).clamp(0.0, 255.0) as u8;
    }
}

#[inline(always)]
fn join_any(labels: &[u8], codes: &[u8], tables: &Tables<'_>, out: &mut [u8]) {
    for ((&label, &code), out) in labels.iter().zip(codes).zip(out.as_chunks_mut::<4>().0) {
        let at = usize::from(label) % MAX_CLUSTERS;
        *out = unit(number(tables.scale[at], tables.offset[at], tables.map[usize::from(code)]));
    }
}

/// Returns the least and the greatest number of each label. For an unused label, the least exceeds the greatest.
pub fn ranges(labels: &[u8], data: &[u8]) -> [(f32, f32); MAX_CLUSTERS] {
    // Use several tables, so that one number does not wait for the previous one.
    const TABLES: usize = 8;
    let mut found = [[(f32::INFINITY, f32::NEG_INFINITY); MAX_CLUSTERS]; TABLES];
    for (data, labels) in data.chunks(TABLES * 4).zip(labels.chunks(TABLES)) {
        for ((x, &label), table) in floats(data).zip(labels).zip(&mut found) {
            let (least, greatest) = &mut table[usize::from(label) % MAX_CLUSTERS];
            *least = if x < *least { x } else { *least };
            *greatest = if x > *greatest { x } else { *greatest };
        }
    }
    std::array::from_fn(|at| {
        let all = found.iter().map(|table| table[at]);
        all.fold((f32::INFINITY, f32::NEG_INFINITY), |a, b| (a.0.min(b.0), a.1.max(b.1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::floats::to_bytes;

    #[test]
    fn all_levels_agree() {
        let numbers: Vec<f32> = (0..2051).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let data = to_bytes(&numbers);
        let map: [f32; 256] = std::array::from_fn(|k| k as f32);
        let edges = [-2.0, -0.5, 0.25, 1.0];
        let mut expected = vec![0; numbers.len()];
        labels_at(Level::Scalar, &edges, &data, &mut expected);
        for (x, &label) in numbers.iter().zip(&expected) {
            assert_eq!(usize::from(label), edges.iter().filter(|edge| *edge <= x).count());
        }
        let mut tables = Tables { scale: [0.0; MAX_CLUSTERS], offset: [0.0; MAX_CLUSTERS], map: &map };
        for (at, (least, greatest)) in ranges(&expected, &data).into_iter().enumerate().take(5) {
            (tables.offset[at], tables.scale[at]) = (least, (greatest - least) / 255.0);
        }
        let mut codes = vec![0; numbers.len()];
        linear_codes_at(Level::Scalar, &expected, &data, &tables, &mut codes);
        let mut joined = vec![0; data.len()];
        join_at(Level::Scalar, &expected, &codes, &tables, &mut joined);
        for (x, y) in numbers.iter().zip(floats(&joined)) {
            assert!((x - y).abs() < 0.01);
        }
        for level in Level::available() {
            let mut labels = vec![0; numbers.len()];
            let mut other_codes = vec![0; numbers.len()];
            let mut out = vec![0; data.len()];
            labels_at(level, &edges, &data, &mut labels);
            linear_codes_at(level, &labels, &data, &tables, &mut other_codes);
            join_at(level, &labels, &other_codes, &tables, &mut out);
            assert!(labels == expected && other_codes == codes && out == joined, "{level:?}");
        }
    }
}
