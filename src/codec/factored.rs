//! `tc.factored`: byte planes of a matrix, with exponents stored relative to a prediction from row and column means.
//!
//! Spec:   spec/codecs/factored.md
//! Input:  n = rows x columns units of bf16 or f32
//! Output: one term per row and per column; the differences of exponents and the other byte planes, coded by
//!         spec/entropy.md
//! Errors: `Corrupt` if rows and columns do not make n elements, or a plane does not decode to n bytes
//! Cost:   the cost of `tc.planes`, and two passes over the exponents
//! Source: ours: predict an exponent as the sum of a row term and a column term. Adafactor (arXiv 1804.04235) observed
//!         that second moments are nearly of rank one

use tensorcask_kernels::spare::{MaybeSpare, Spare};
use tensorcask_kernels::{bytes, factored as kernel};

use super::planes;
use super::terms::{LEAST, mean, term};
use super::{Chunk, Codec, Columns, Cost, Encoded};
use crate::entropy::{self, Histogram, PlaneBuffer};
use crate::limits::reserve;
use crate::{Dtype, Error, Result};

/// Stores matrices whose magnitudes follow their rows and columns, such as optimizer moments.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Factored, Planes}};
/// let matrix = (0..256 * 64).map(|i| 2f32.powi(i / 64 % 9) * 4f32.powi(i % 64 % 7));
/// let data: Vec<u8> = matrix.flat_map(f32::to_le_bytes).collect();
/// let chunk = Chunk { row_elements: 64, ..Chunk::new(Dtype::F32, 256 * 64, &data) };
/// let bytes = |codec: &dyn Codec| codec.encode(&chunk).map(|e| e.columns.iter().map(|(_, c)| c.len()).sum::<usize>());
/// assert!(bytes(&Factored)? * 5 < bytes(&Planes)?);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Factored;

/// Returns the column names for units of this type.
fn names(dtype: Dtype) -> Result<&'static [&'static str]> {
    match dtype {
        Dtype::Bf16 => Ok(&["rows", "columns", "exponents", "plane0"]),
        Dtype::F32 => Ok(&["rows", "columns", "exponents", "plane0", "plane1", "plane2"]),
        _ => Err(Error::corrupt(format!("chunks of {dtype}")).clause("factored 1")),
    }
}

/// Terms that predict exponents: each prediction is the sum of a row term and a column term, in quarters.
struct Terms {
    /// Mean of all nonzero exponents.
    center: u8,
    rows: Vec<i8>,
    columns: Vec<i8>,
}

impl Terms {
    /// Fits terms to a matrix of exponents, given by its rows.
    fn fit<'a>(rows: impl Iterator<Item = &'a [u8]> + Clone, columns: usize) -> Result<Self> {
        let mut sums: Vec<u32> = reserve(columns, "terms of columns")?;
        sums.resize(columns, 0);
        let mut counts = sums.clone();
        for row in rows.clone() {
            kernel::add_to_columns(row, &mut sums, &mut counts);
        }
        let total = |values: &[u32]| values.iter().map(|&n| i64::from(n)).sum::<i64>();
        let center = mean(total(&sums), total(&counts)).clamp(0, 255);
        let of_column = |(&sum, &count): (&u32, &u32)| match count {
            0 => 0,
            _ => term(mean(4 * i64::from(sum), i64::from(count)) - 4 * center),
        };
        let columns: Vec<i8> = sums.iter().zip(&counts).map(of_column).collect();
        let rows = rows.map(|row| Self::of_row(center, &columns, row)).collect();
        Ok(Self { center: center as u8, rows, columns })
    }

    /// Returns the term of a row, given the terms of the columns.
    fn of_row(center: i64, columns: &[i8], row: &[u8]) -> i8 {
        let mut sum = 0i32;
        let mut count = 0i32;
        for (&exponent, &column) in row.iter().zip(columns) {
            let used = i32::from(exponent != 0);
            sum = sum.wrapping_add(used * (4 * i32::from(exponent) - i32::from(column)));
            count = count.wrapping_add(used);
        }
        if count == 0 { 0 } else { term(mean(i64::from(sum), i64::from(count)) - 4 * center) }
    }
}

/// Returns the addend for a column's term. The sum divided by four is the prediction, rounded to the nearest integer.
fn offset(center: u8, row: i8) -> i16 {
    4 * i16::from(center) + i16::from(row) + 2
}

/// Returns the number of rows and columns, if the chunk is a matrix large enough for this codec to pay.
fn matrix(chunk: &Chunk<'_>) -> Option<(usize, usize)> {
    names(chunk.dtype).ok()?;
    let (bytes, rows) = chunk.rows()?;
    let columns = bytes / chunk.dtype.unit_bytes();
    (rows >= LEAST && columns >= LEAST).then_some((rows, columns))
}

impl Codec for Factored {
    fn id(&self) -> &str {
        "tc.factored"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        names(dtype).is_ok()
    }

    fn cost(&self) -> Cost {
        Cost { encode: 5.5, decode: 4.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let planes = entropy::max_encoded_bytes(element_count).saturating_mul(dtype.unit_bytes() as u64);
        // One term per row and per column: at most one more than the number of elements.
        planes.saturating_add(element_count).saturating_add(2)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        const SAMPLE: usize = 8192;
        let (rows, columns) = matrix(chunk)?;
        let width = chunk.dtype.unit_bytes();
        let sampled = (SAMPLE / columns).clamp(LEAST, rows);
        let mut planes: Vec<Vec<u8>> = vec![Vec::new(); width];
        for at in 0..sampled {
            let start = at * rows / sampled * columns * width;
            let split = planes::split(chunk.data.get(start..start + columns * width)?, None, chunk.dtype).ok()?;
            for (all, plane) in planes.iter_mut().zip(&split) {
                all.extend_from_slice(plane);
            }
        }
        let exponents = planes.pop()?;
        let all_rows = || exponents.chunks(columns);
        // Fit column terms to every other row. The estimate uses the remaining rows, so it is not biased by the fit.
        let terms = Terms::fit(all_rows().step_by(2), columns).ok()?;
        let mut judged = Vec::new();
        for row in all_rows().skip(1).step_by(2) {
            let at = judged.len();
            judged.extend_from_slice(row);
            let term = Terms::of_row(i64::from(terms.center), &terms.columns, row);
            kernel::to_symbols(offset(terms.center, term), &terms.columns, judged.get_mut(at..)?);
        }
        let units = (rows * columns) as u64;
        let of = |plane: &[u8]| -> u64 { entropy::estimate(&bytes::histogram(plane) as &Histogram, units) };
        let mut sizes = vec![rows as u64 + 1, columns as u64, of(&judged)];
        sizes.extend(planes.iter().map(|plane| of(plane)));
        Some(sizes)
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let (_, columns) = matrix(chunk).ok_or_else(|| Error::invalid("needs rows and columns of bf16 or f32"))?;
        let mut planes = planes::split(chunk.data, None, chunk.dtype)?;
        let mut exponents = planes.pop().ok_or_else(|| Error::invalid("units without bytes"))?;
        let terms = Terms::fit(exponents.chunks(columns), columns)?;
        for (row, &term) in exponents.chunks_mut(columns).zip(&terms.rows) {
            kernel::to_symbols(offset(terms.center, term), &terms.columns, row);
        }
        let mut rows = vec![terms.center];
        rows.extend(terms.rows.iter().map(|&term| term as u8));
        let mut coded = vec![rows, terms.columns.iter().map(|&term| term as u8).collect()];
        coded.extend(std::iter::once(exponents).chain(planes).map(PlaneBuffer::encode));
        Ok(Encoded { uses_base: false, columns: names(chunk.dtype)?.iter().copied().zip(coded).collect() })
    }

    fn check_columns(&self, dtype: Dtype, found: &[&str]) -> Result<()> {
        super::are_columns(found.iter().copied(), names(dtype)?)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let names = names(columns.dtype)?;
        super::are_columns(columns.columns.iter().map(|(name, _)| *name), names)?;
        let [(_, rows), (_, terms), (_, exponents), planes @ ..] = columns.columns else {
            return Err(Error::corrupt("too few columns").clause("codecs 4.1"));
        };
        let units = out.len() / columns.dtype.unit_bytes();
        let bad = |message: String| Error::corrupt(message).clause("factored 2");
        let (&center, rows) = rows.split_first().ok_or_else(|| bad("no terms of rows".into()))?;
        if rows.len().checked_mul(terms.len()) != Some(units) {
            return Err(bad(format!("{} rows and {} columns for {units} elements", rows.len(), terms.len())));
        }
        let mut planes = planes.iter().map(|(_, code)| entropy::read_plane(code, units, "byte planes")).collect::<Result<Vec<_>>>()?;
        let mut last = Spare::new(units, "exponents")?;
        entropy::decode(exponents, &mut last)?;
        let mut by_column: Vec<i8> = reserve(terms.len(), "terms of columns")?;
        by_column.extend(terms.iter().map(|&term| term as i8));
        for (row, &term) in last.chunks_mut(by_column.len().max(1)).zip(rows) {
            kernel::to_exponents(offset(center, term as i8), &by_column, row);
        }
        planes.push(MaybeSpare::Own(last));
        planes::merge(&planes, None, columns.dtype, out);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::little_endian_bytes, reason = "elements are little-endian")]
mod tests {
    use super::*;

    fn round_trip(rows: u64, columns: u64, data: &[u8]) -> usize {
        let chunk = Chunk { row_elements: columns, ..Chunk::new(Dtype::F32, rows * columns, data) };
        let encoded = Factored.encode(&chunk).unwrap();
        let stored = encoded.into_bytes();
        let mut out = vec![0; data.len()];
        let input = Columns { dtype: Dtype::F32, element_count: rows * columns, columns: &stored, base: None, partners: &[] };
        Factored.decode(&input, &mut out).unwrap();
        assert!(out == data);
        stored.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    #[test]
    fn rows_of_zeros_and_of_all_magnitudes_come_back() {
        let value = |row: usize, column: usize| match (row % 5, column % 7) {
            (0, _) => 0.0,
            (_, 0) => f32::NAN,
            (r, 1) => -f32::MIN_POSITIVE / 2f32.powi(r as i32),
            (r, c) => 2f32.powi((r * c * 9) as i32 - 100) * (1.0 + (row * column) as f32 / 1e4),
        };
        let data: Vec<u8> = (0..40 * 50).flat_map(|i| value(i / 50, i % 50).to_le_bytes()).collect();
        round_trip(40, 50, &data);
    }

    #[test]
    fn what_is_of_rank_one_takes_no_exponents() {
        let value = |row: usize, column: usize| 2f32.powi((row * 7 % 30) as i32) * 2f32.powi((column * 11 % 25) as i32);
        let data: Vec<u8> = (0..256 * 64).flat_map(|i| value(i / 64, i % 64).to_le_bytes()).collect();
        assert!(round_trip(256, 64, &data) < 256 + 64 + 64);
    }
}
