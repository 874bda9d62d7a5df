//! Measures how two runs of elements differ, in terms that decide how well a codec compresses the difference: flipped
//! bits, entropy of bytes, distance of floats, changed rows.
//!
//! A *plane* holds one byte of every element, lowest byte first. A complex number has two parts in the same planes.
//! Elements smaller than a byte are a plane of their own. The entropy of a plane is of order 0: bits per byte for a
//! coder that knows only the frequency of each value.

use serde::Serialize;
use tensorcask::Dtype;

use crate::compare::{each_element, float_of};
use crate::text::share;

type Histogram = [u64; 256];

/// Counts of one tensor, or of several tensors of one type.
#[derive(Debug, Clone)]
pub(crate) struct Analysis {
    dtype: Dtype,
    elements: u64,
    changed: u64,
    /// Histograms by plane: bytes of the second run, and of the XOR of both runs.
    full: Vec<Histogram>,
    xor: Vec<Histogram>,
    /// Histogram of the distances of ordered integers, in bins of powers of two: 0, 1, 2 to 3, 4 to 7, ...
    ulps: [u64; 65],
    /// Number of pairs without a distance, because one side is a NaN.
    nan_pairs: u64,
    row_length: Option<u64>,
    rows: u64,
    rows_changed: u64,
    /// State of the current row: elements seen so far, and whether one of them changed.
    in_row: u64,
    row_changed: bool,
}

/// Reported form of an analysis. A share of zero elements is `None`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    pub elements: u64,
    pub changed: u64,
    pub changed_share: Option<f64>,
    /// Number of rows (runs of the last dimension); `None` for tensors of fewer than two dimensions.
    pub rows: Option<u64>,
    pub rows_changed: Option<u64>,
    pub rows_changed_share: Option<f64>,
    /// Bits per element at the order-0 entropy of the planes of the second run; `bits_xor` is the same for the XOR of
    /// both runs.
    pub bits_full: f64,
    pub bits_xor: f64,
    /// Bits per byte of each plane, lowest byte first.
    pub planes_full: Vec<f64>,
    pub planes_xor: Vec<f64>,
    /// Share of elements in which each bit flipped, lowest bit first.
    pub flips: Vec<f64>,
    /// Histogram of the distances of floats; `None` for other types.
    pub ulps: Option<Vec<Bin>>,
    pub nan_pairs: u64,
}

/// Number of elements that moved by `from` to `to` representable numbers.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Bin {
    pub from: u64,
    pub to: u64,
    pub elements: u64,
}

impl Analysis {
    /// Creates an empty analysis for tensors of one type. Rows are counted only with a shape.
    pub(crate) fn new(dtype: Dtype, shape: &[u64]) -> Self {
        let planes = dtype.unit_bytes();
        Self {
            dtype,
            elements: 0,
            changed: 0,
            full: vec![[0; 256]; planes],
            xor: vec![[0; 256]; planes],
            ulps: [0; 65],
            nan_pairs: 0,
            row_length: shape.last().copied().filter(|length| shape.len() > 1 && *length > 0),
            rows: 0,
            rows_changed: 0,
            in_row: 0,
            row_changed: false,
        }
    }

    /// Adds the next `elements` elements, row-major and little-endian. Both runs must have the same length.
    pub(crate) fn add(&mut self, elements: u64, a: &[u8], b: &[u8]) {
        let float = float_of(self.dtype);
        self.elements += elements;
        each_element(self.dtype, elements, a, b, |parts| {
            let mut changed = false;
            for &(old, new) in parts {
                let flipped = old ^ new;
                for (plane, (full, xor)) in self.full.iter_mut().zip(&mut self.xor).enumerate() {
                    full[(new >> (8 * plane) & 0xff) as usize] += 1;
                    xor[(flipped >> (8 * plane) & 0xff) as usize] += 1;
                }
                changed |= flipped != 0;
                match float.map(|float| (float.ordered(old), float.ordered(new))) {
                    Some((Some(old), Some(new))) => self.ulps[(u64::BITS - old.abs_diff(new).leading_zeros()) as usize] += 1,
                    Some(_) => self.nan_pairs += 1,
                    None => {}
                }
            }
            self.changed += u64::from(changed);
            self.row_changed |= changed;
            self.in_row += 1;
            if Some(self.in_row) == self.row_length {
                self.rows += 1;
                self.rows_changed += u64::from(self.row_changed);
                (self.in_row, self.row_changed) = (0, false);
            }
        });
    }

    /// Adds another tensor of the same type.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.elements += other.elements;
        self.changed += other.changed;
        self.nan_pairs += other.nan_pairs;
        self.rows += other.rows;
        self.rows_changed += other.rows_changed;
        self.row_length = self.row_length.or(other.row_length);
        let planes = self.full.iter_mut().chain(&mut self.xor).zip(other.full.iter().chain(&other.xor));
        for (sum, n) in planes.flat_map(|(ours, theirs)| ours.iter_mut().zip(theirs)).chain(self.ulps.iter_mut().zip(&other.ulps)) {
            *sum += n;
        }
    }

    pub(crate) fn changed(&self) -> u64 {
        self.changed
    }

    pub(crate) fn elements(&self) -> u64 {
        self.elements
    }

    pub(crate) fn figures(&self) -> Figures {
        let planes_full: Vec<f64> = self.full.iter().map(entropy).collect();
        let planes_xor: Vec<f64> = self.xor.iter().map(entropy).collect();
        // A complex number has two parts in the same planes.
        let parts = if matches!(self.dtype, Dtype::C64 | Dtype::C128) { 2.0 } else { 1.0 };
        let rows = |count: u64| self.row_length.map(|_| count);
        Figures {
            elements: self.elements,
            changed: self.changed,
            changed_share: share(self.changed, self.elements),
            rows: rows(self.rows),
            rows_changed: rows(self.rows_changed),
            rows_changed_share: share(self.rows_changed, self.rows),
            bits_full: parts * planes_full.iter().sum::<f64>(),
            bits_xor: parts * planes_xor.iter().sum::<f64>(),
            planes_full,
            planes_xor,
            flips: self.flips(),
            ulps: float_of(self.dtype).map(|_| self.bins()),
            nan_pairs: self.nan_pairs,
        }
    }

    /// Share of elements in which each bit flipped, from the planes of the XOR.
    fn flips(&self) -> Vec<f64> {
        let bits = self.dtype.bits().min(8 * self.xor.len() as u64) as usize;
        let flipped = |bit: usize| -> u64 {
            let values = self.xor.get(bit / 8).into_iter().flatten().enumerate();
            values.filter(|(value, _)| value >> (bit % 8) & 1 == 1).map(|(_, n)| n).sum()
        };
        let seen = self.xor.first().map_or(0, |plane| plane.iter().sum());
        (0..bits).map(|bit| share(flipped(bit), seen).unwrap_or(0.0)).collect()
    }

    /// Bins up to the last that is not empty.
    fn bins(&self) -> Vec<Bin> {
        let used = self.ulps.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
        let bounds = |bits: usize| match bits {
            0 => (0, 0),
            bits => (1 << (bits - 1), u64::MAX >> (64 - bits)),
        };
        let bin = |(bits, &elements): (usize, &u64)| {
            let (from, to) = bounds(bits);
            Bin { from, to, elements }
        };
        self.ulps.iter().take(used).enumerate().map(bin).collect()
    }
}

/// Order-0 entropy in bits per symbol.
fn entropy(histogram: &Histogram) -> f64 {
    let total = histogram.iter().sum::<u64>() as f64;
    let bits = |&n: &u64| n as f64 / total * (total / n as f64).log2();
    histogram.iter().filter(|n| **n > 0).map(bits).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn analyzed(dtype: Dtype, shape: &[u64], a: &[u8], b: &[u8]) -> Figures {
        let mut analysis = Analysis::new(dtype, shape);
        analysis.add(shape.iter().product(), a, b);
        analysis.figures()
    }

    #[test]
    fn bits_distances_and_rows_of_floats() {
        // bf16, three rows of two: 1.0 stays, 1.0 moves by 1 and by 5; both zeros are the same number; a NaN has no
        // distance.
        let bytes = |bits: [u16; 6]| bits.iter().flat_map(|bits| [*bits as u8, (*bits >> 8) as u8]).collect::<Vec<u8>>();
        let a = bytes([0x3f80, 0x3f80, 0x3f80, 0x0000, 0x4000, 0x4000]);
        let b = bytes([0x3f81, 0x3f85, 0x7fc0, 0x8000, 0x4000, 0x4000]);
        let found = analyzed(Dtype::Bf16, &[3, 2], &a, &b);
        assert_eq!((found.elements, found.changed, found.rows, found.rows_changed), (6, 4, Some(3), Some(2)));
        let bins: Vec<_> = found.ulps.iter().flatten().map(|bin| (bin.from, bin.to, bin.elements)).collect();
        assert_eq!(bins, [(0, 0, 3), (1, 1, 1), (2, 3, 0), (4, 7, 1)]);
        assert_eq!(found.nan_pairs, 1);
        let sixth = 1.0 / 6.0;
        let of_bits = |set: &[usize]| (0..16).map(|bit| set.iter().filter(|&&at| at == bit).count() as f64 * sixth).collect::<Vec<_>>();
        // 0x0001, 0x0005, 0x4040, 0x8000
        assert_eq!(found.flips, of_bits(&[0, 0, 2, 6, 14, 15]));
    }

    #[test]
    fn entropies_of_known_planes() {
        // The low byte takes 16 values equally often, the high byte 2; against zeros the exclusive or is the same.
        let b: Vec<u8> = (0..256u32).flat_map(|i| [(i % 16) as u8, (i / 16 % 2) as u8]).collect();
        let found = analyzed(Dtype::U16, &[256], &[0; 512], &b);
        assert_eq!((found.planes_full.as_slice(), found.bits_xor, found.rows), (&[4.0, 1.0][..], 5.0, None));
        assert!(found.ulps.is_none());
        let same = analyzed(Dtype::U16, &[256], &b, &b);
        assert_eq!((same.bits_full, same.bits_xor, same.changed), (5.0, 0.0, 0));
        let empty = analyzed(Dtype::F32, &[0, 4], &[], &[]);
        assert_eq!((empty.changed_share, empty.bits_full, empty.rows), (None, 0.0, Some(0)));
    }

    #[test]
    fn packed_and_complex_elements() {
        // int4: elements 1, 2, 3; the second flips its lowest bit.
        let found = analyzed(Dtype::Int4, &[3], &[0x21, 0x03], &[0x31, 0x03]);
        assert_eq!((found.changed, found.flips.len()), (1, 4));
        assert_eq!(found.flips[0], 1.0 / 3.0);
        // One complex number whose imaginary part moves by 3: one element, two distances.
        let found = analyzed(Dtype::C64, &[1], &[0; 8], &[0, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!((found.elements, found.changed, found.flips[0]), (1, 1, 0.5));
        assert_eq!(found.ulps.iter().flatten().map(|bin| bin.elements).collect::<Vec<_>>(), [1, 0, 1]);
    }

    #[test]
    fn totals_are_those_of_one_tensor() {
        let data: Vec<u8> = (0..64u8).collect();
        let other: Vec<u8> = data.iter().map(|byte| byte ^ (byte & 1)).collect();
        let whole = analyzed(Dtype::Bf16, &[8, 4], &data, &other);
        let mut total = Analysis::new(Dtype::Bf16, &[]);
        for at in [0, 32] {
            let mut half = Analysis::new(Dtype::Bf16, &[4, 4]);
            // In two windows that do not end with a row.
            half.add(6, &data[at..at + 12], &other[at..at + 12]);
            half.add(10, &data[at + 12..at + 32], &other[at + 12..at + 32]);
            total.merge(&half);
        }
        assert_eq!(serde_json::to_string(&total.figures()).ok(), serde_json::to_string(&whole).ok());
    }
}
