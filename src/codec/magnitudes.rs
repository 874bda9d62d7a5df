//! `tc.magnitudes`: exponents with the three bits after them, relative to a prediction from row and column means. All
//! other bits are stored apart.
//!
//! Spec:   spec/codecs/magnitudes.md
//! Input:  n units of bf16 or f32
//! Output: terms of rows and columns, if they pay; differences of magnitudes, signs, the next four bits and the other
//!         byte planes, each coded by spec/entropy.md
//! Errors: `Corrupt` if terms do not fit n elements, a plane does not decode, or a magnitude is above 2047
//! Cost:   the cost of `tc.planes` with more symbols in use, and two passes over the magnitudes of a matrix
//! Source: ours: row and column means predict the logarithm of a number. By Benford's law, the first bits of a mantissa
//!         are not noise, so they compress together with the exponent

use std::borrow::Cow;

use tensorcask_kernels::bytes;
use tensorcask_kernels::magnitudes as kernel;
use tensorcask_kernels::spare::{MaybeSpare, Spare};

use super::terms::{LEAST, mean, term};
use super::{Chunk, Codec, Columns, Cost, Encoded, sample};
use crate::entropy::{self, Histogram, PlaneBuffer};
use crate::limits::reserve;
use crate::{Dtype, Error, Result};

/// Stores floats by their logarithms in eighths of an octave, and the remaining bits apart. Takes fewer bytes than
/// `tc.planes` for weights and moments.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Magnitudes, Planes}};
/// let matrix = (0..256 * 64).map(|i| 1.09f32.powi(i / 64 * 7 % 90) * 1.3f32.powi(i % 64 * 5 % 31));
/// let data: Vec<u8> = matrix.flat_map(|x| [x.to_le_bytes()[2], x.to_le_bytes()[3]]).collect();
/// let chunk = Chunk { row_elements: 64, ..Chunk::new(Dtype::Bf16, 256 * 64, &data) };
/// let bytes = |codec: &dyn Codec| codec.encode(&chunk).map(|e| e.columns.iter().map(|(_, c)| c.len()).sum::<usize>());
/// assert!(bytes(&Magnitudes)? * 3 < bytes(&Planes)? * 2);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Magnitudes;

const NAMES: [&str; 8] = ["rows", "columns", "magnitudes", "escapes", "signs", "fractions", "plane0", "plane1"];

/// Returns the column names for units of this type.
fn names(dtype: Dtype) -> Result<&'static [&'static str]> {
    match dtype {
        Dtype::Bf16 => Ok(NAMES.first_chunk::<6>().map_or(&NAMES, |names| names)),
        Dtype::F32 => Ok(&NAMES),
        _ => Err(Error::corrupt(format!("chunks of {dtype}")).clause("magnitudes 1")),
    }
}

/// Units split into their parts.
struct Split<'a> {
    /// Upper 16 bits of each unit.
    tops: MaybeSpare<'a>,
    /// Remaining bytes, plane by plane.
    rest: Vec<PlaneBuffer>,
}

impl<'a> Split<'a> {
    fn of(data: &'a [u8], dtype: Dtype) -> Result<Self> {
        if dtype == Dtype::Bf16 {
            return Ok(Self { tops: MaybeSpare::Borrowed(data), rest: vec![] });
        }
        let mut tops = Spare::new(data.len() / 2, "upper halves")?;
        let mut plane0 = PlaneBuffer::new(data.len() / 4, "byte planes")?;
        let mut plane1 = PlaneBuffer::new(data.len() / 4, "byte planes")?;
        kernel::split(data, &mut tops, &mut plane0, &mut plane1);
        Ok(Self { tops: MaybeSpare::Own(tops), rest: vec![plane0, plane1] })
    }

    fn units(&self) -> usize {
        self.tops.len() / 2
    }

    /// Returns the tops of each row of `columns` units.
    fn rows(&self, columns: usize) -> impl Iterator<Item = &[u8]> + Clone {
        self.tops.chunks(2 * columns.max(1))
    }

    /// Packs signs and fractions.
    fn packed(&self) -> Result<(PlaneBuffer, PlaneBuffer)> {
        let mut signs = PlaneBuffer::new(self.units().div_ceil(8), "signs")?;
        let mut fractions = PlaneBuffer::new(self.units().div_ceil(2), "fractions")?;
        kernel::pack(&self.tops, &mut signs, &mut fractions);
        Ok((signs, fractions))
    }
}

/// Terms that predict magnitudes: each prediction is the sum of the mean, a row term and a column term.
#[derive(Debug)]
struct Terms {
    /// Mean of all nonzero magnitudes.
    center: i16,
    /// One term per row; empty if rows have no terms.
    rows: Vec<i8>,
    /// One term per column; zeros if columns have no terms.
    columns: Vec<i8>,
}

/// Kinds of terms that a chunk stores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Shape {
    rows: bool,
    columns: bool,
}

impl Shape {
    const BOTH: Self = Self { rows: true, columns: true };
    const ONE: [Self; 2] = [Self { rows: true, columns: false }, Self { rows: false, columns: true }];
}

/// Returns the terms of columns that are not stored.
fn zeros(count: usize) -> Result<Vec<i8>> {
    let mut zeros = reserve(count, "terms")?;
    zeros.resize(count, 0);
    Ok(zeros)
}

impl Terms {
    /// Fits terms to rows of `columns` units, given by their tops.
    fn fit<'a>(shape: Shape, rows: impl Iterator<Item = &'a [u8]> + Clone, columns: usize) -> Result<Self> {
        let mut terms = Self { center: 0, rows: vec![], columns: zeros(columns)? };
        let mut total = 0i64;
        let mut used = 0i64;
        if shape.columns {
            let mut sums: Vec<u32> = reserve(columns, "sums of columns")?;
            sums.resize(columns, 0);
            let mut counts = sums.clone();
            for tops in rows.clone() {
                kernel::add_to_columns(tops, &mut sums, &mut counts);
            }
            for (&sum, &count) in sums.iter().zip(&counts) {
                total += i64::from(sum);
                used += i64::from(count);
            }
            for ((column, &sum), &count) in terms.columns.iter_mut().zip(&sums).zip(&counts) {
                if count > 0 {
                    *column = term(mean(i64::from(sum), i64::from(count)) - mean(total, used));
                }
            }
        } else {
            for tops in rows.clone() {
                let (sum, count) = kernel::sum_of_row(&terms.columns, tops);
                total += sum;
                used += i64::from(count);
            }
        }
        terms.center = mean(total, used).clamp(0, i64::from(kernel::MOST)) as i16;
        if shape.rows {
            terms.rows = rows.map(|tops| terms.of_row(tops)).collect();
        }
        Ok(terms)
    }

    /// Returns the term of a row, given the terms of the columns.
    fn of_row(&self, tops: &[u8]) -> i8 {
        let (sum, count) = kernel::sum_of_row(&self.columns, tops);
        if count == 0 { 0 } else { term(mean(sum, i64::from(count)) - i64::from(self.center)) }
    }

    /// Writes the symbols of a row in their full range. The symbol of the predicted magnitude is [`MIDDLE`].
    fn symbols_of_row(&self, row: i8, tops: &[u8], symbols: &mut [u8]) {
        kernel::to_symbols(self.center + i16::from(row) - i16::from(MIDDLE), &self.columns, tops, symbols);
    }
}

const MIDDLE: u8 = 128;

/// Restricts symbols to a range that pays, renumbers that range from 1, and returns the range's first symbol. However
/// rare a symbol is, a Huffman code spends at least 2^-11 of its space on that symbol.
fn narrow(symbols: &mut [u8]) -> u8 {
    let histogram = entropy::count_about(symbols);
    let least = 1 + symbols.len() as u32 / 4096;
    let kept = |symbol: &u8| *symbol > 0 && histogram.get(usize::from(*symbol)).is_some_and(|&n| n >= least);
    let first = (0..=255).find(kept).unwrap_or(1);
    let last = (0..=255).rfind(kept).unwrap_or(1);
    kernel::narrow(symbols, first, last);
    first
}

/// Returns the number of rows and columns, if the chunk is a matrix large enough for terms to pay.
fn matrix(chunk: &Chunk<'_>) -> Option<(usize, usize)> {
    let (bytes, rows) = chunk.rows()?;
    let columns = bytes / chunk.dtype.unit_bytes();
    (rows >= LEAST && columns >= LEAST).then_some((rows, columns))
}

/// Returns the low bytes, then the high bytes, of the magnitudes that have no symbol.
fn escaped<'a>(symbols: &[u8], rows: impl Iterator<Item = &'a [u8]>, columns: usize) -> Vec<u8> {
    let mut lows = Vec::new();
    let mut highs = Vec::new();
    for (symbols, tops) in symbols.chunks(columns.max(1)).zip(rows) {
        kernel::for_each_escape(symbols, |at| {
            let magnitude = kernel::magnitudes(tops.get(2 * at..2 * at + 2).unwrap_or_default()).next().unwrap_or(0);
            lows.push(magnitude as u8);
            highs.push((magnitude >> 8) as u8);
        });
    }
    lows.append(&mut highs);
    lows
}

/// Estimates the bytes of symbols and escapes for `units` elements. Column terms are fitted to other rows than those of
/// the estimate, so the estimate is not biased by the fit.
fn judge<'a>(
    shape: Shape,
    fitted: impl Iterator<Item = &'a [u8]> + Clone,
    judged: impl Iterator<Item = &'a [u8]> + Clone,
    columns: usize,
    units: u64,
) -> Result<[u64; 2]> {
    let terms = Terms::fit(Shape { rows: false, ..shape }, fitted, columns)?;
    let mut symbols = Vec::new();
    for tops in judged.clone() {
        let row = if shape.rows { terms.of_row(tops) } else { 0 };
        let at = symbols.len();
        symbols.resize(at + tops.len() / 2, 0);
        terms.symbols_of_row(row, tops, symbols.get_mut(at..).unwrap_or_default());
    }
    narrow(&mut symbols);
    let escaped = escaped(&symbols, judged, columns);
    let all_escaped = (escaped.len() as u64).saturating_mul(units) / (symbols.len() as u64).max(1);
    let of = |plane: &[u8], units: u64| entropy::estimate(&bytes::histogram(plane) as &Histogram, units);
    Ok([of(&symbols, units), if escaped.is_empty() { 0 } else { of(&escaped, all_escaped) }])
}

/// Elements that represent a chunk: the middle of some rows of a matrix.
fn some_of<'a>(chunk: &Chunk<'a>) -> Cow<'a, [u8]> {
    let width = chunk.dtype.unit_bytes();
    let Some((rows, columns)) = matrix(chunk) else { return sample(chunk.data, width) };
    let some = columns.min(WIDEST);
    let count = (SAMPLE / some).clamp(LEAST, rows);
    let mut sampled = Vec::with_capacity(count * some * width);
    for at in 0..count {
        let start = (at * rows / count * columns + (columns - some) / 2) * width;
        sampled.extend_from_slice(chunk.data.get(start..start + some * width).unwrap_or_default());
    }
    Cow::Owned(sampled)
}

/// Number of elements in a sample of a matrix.
const SAMPLE: usize = 8192;
/// Greatest number of columns in a sample.
const WIDEST: usize = SAMPLE / LEAST;

/// Chooses the terms that pay, and estimates the bytes of the first four columns, from a sample.
fn plan(chunk: &Chunk<'_>, split: &Split<'_>) -> Result<(Shape, [u64; 4])> {
    let units = (chunk.data.len() / chunk.dtype.unit_bytes()) as u64;
    let matrix = matrix(chunk);
    let (rows, columns) = matrix.unwrap_or_default();
    let some = if matrix.is_some() { columns.min(WIDEST) } else { split.units() };
    let with = |shape: Shape| -> Result<(Shape, [u64; 4])> {
        let [symbols, escapes] = match matrix {
            Some(_) => judge(shape, split.rows(some).step_by(2), split.rows(some).skip(1).step_by(2), some, units)?,
            None => judge(shape, split.rows(some), split.rows(some), some, units)?,
        };
        Ok((shape, [2 + if shape.rows { rows as u64 } else { 0 }, if shape.columns { columns as u64 } else { 0 }, symbols, escapes]))
    };
    let mut found = vec![with(Shape::default())?];
    if matrix.is_some() {
        found.push(with(Shape::BOTH)?);
        // If both kinds of terms together do not shrink the coded symbols, one kind alone will not either.
        let coded = |(_, [.., symbols, escapes]): &(Shape, [u64; 4])| symbols + escapes;
        if coded(&found[1]) < coded(&found[0]) {
            found.extend(Shape::ONE.into_iter().map(with).collect::<Result<Vec<_>>>()?);
        }
    }
    Ok(found.into_iter().min_by_key(|(_, sizes)| sizes.iter().sum::<u64>()).unwrap_or_default())
}

/// Estimates the bytes of each column.
fn estimate(chunk: &Chunk<'_>) -> Result<Vec<u64>> {
    let names = names(chunk.dtype)?;
    let units = (chunk.data.len() / chunk.dtype.unit_bytes()) as u64;
    let sampled = some_of(chunk);
    let split = Split::of(&sampled, chunk.dtype)?;
    let mut sizes = plan(chunk, &split)?.1.to_vec();
    let (signs, fractions) = split.packed()?;
    let of = |plane: &[u8], symbols: u64| entropy::estimate(&bytes::histogram(plane) as &Histogram, symbols);
    sizes.extend([of(&signs, units.div_ceil(8)), of(&fractions, units.div_ceil(2))]);
    sizes.extend(split.rest.iter().map(|plane| of(plane, units)));
    sizes.truncate(names.len());
    Ok(sizes)
}

/// Chooses the terms that pay.
fn choose_shape(chunk: &Chunk<'_>) -> Result<Shape> {
    // Without rows there are no terms.
    if matrix(chunk).is_none() {
        return Ok(Shape::default());
    }
    Ok(plan(chunk, &Split::of(&some_of(chunk), chunk.dtype)?)?.0)
}

fn bad(clause: &'static str, message: String) -> Error {
    Error::corrupt(message).clause(clause)
}

impl Codec for Magnitudes {
    fn id(&self) -> &str {
        "tc.magnitudes"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        names(dtype).is_ok()
    }

    fn cost(&self) -> Cost {
        Cost { encode: 9.0, decode: 7.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        // Six planes at most: symbols, escapes, two for signs and fractions, two for other bytes. Then one term per row
        // and per column: at most one more than elements.
        let planes = entropy::max_encoded_bytes(element_count).saturating_mul(6);
        planes.saturating_add(element_count).saturating_add(64)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        estimate(chunk).ok()
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let names = names(chunk.dtype)?;
        let shape = choose_shape(chunk)?;
        let split = Split::of(chunk.data, chunk.dtype)?;
        let columns = matrix(chunk).map_or(split.units(), |(_, columns)| columns);
        let terms = Terms::fit(shape, split.rows(columns), columns)?;
        let mut symbols = Spare::new(split.units(), "symbols")?;
        for (at, (symbols, tops)) in symbols.chunks_mut(columns.max(1)).zip(split.rows(columns)).enumerate() {
            terms.symbols_of_row(terms.rows.get(at).copied().unwrap_or(0), tops, symbols);
        }
        let floor = terms.center - i16::from(MIDDLE) + i16::from(narrow(&mut symbols)) - 1;
        let escaped = escaped(&symbols, split.rows(columns), columns);
        let (signs, fractions) = split.packed()?;
        let mut rows = vec![floor as u8, (floor >> 8) as u8];
        rows.extend(terms.rows.iter().map(|&term| term as u8));
        let stored = terms.columns.iter().take(if shape.columns { columns } else { 0 });
        let mut coded = vec![rows, stored.map(|&term| term as u8).collect()];
        coded.extend([entropy::coded(&symbols), entropy::coded(&escaped)]);
        coded.extend([signs, fractions].into_iter().chain(split.rest).map(PlaneBuffer::encode));
        Ok(Encoded { uses_base: false, columns: names.iter().copied().zip(coded).collect() })
    }

    fn check_columns(&self, dtype: Dtype, found: &[&str]) -> Result<()> {
        super::are_columns(found.iter().copied(), names(dtype)?)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        super::are_columns(columns.columns.iter().map(|(name, _)| *name), names(columns.dtype)?)?;
        let [(_, rows), (_, terms), (_, symbols), (_, escapes), (_, signs), (_, fractions), rest @ ..] = columns.columns else {
            return Err(bad("codecs 4.1", "too few columns".into()));
        };
        let units = out.len() / columns.dtype.unit_bytes();
        let Some((&[low, high], rows)) = rows.split_first_chunk::<2>() else {
            return Err(bad("magnitudes 2", "no floor".into()));
        };
        let floor = (u16::from(high) << 8 | u16::from(low)) as i16;
        let width = match (rows.len(), terms.len()) {
            (0, 0) => Some(units),
            (0, columns) => units.is_multiple_of(columns).then_some(columns),
            (rows, 0) => units.is_multiple_of(rows).then(|| units / rows),
            (rows, columns) => (rows.checked_mul(columns) == Some(units)).then_some(columns),
        };
        let width = width.ok_or_else(|| {
            let rows = rows.len();
            let columns = terms.len();
            bad("magnitudes 2.1", format!("terms of {rows} rows and {columns} columns for {units} elements"))
        })?;
        let mut by_column = zeros(width)?;
        for (slot, &term) in by_column.iter_mut().zip(terms.iter()) {
            *slot = term as i8;
        }

        let signs = entropy::read_plane(signs, units.div_ceil(8), "signs")?;
        let fractions = entropy::read_plane(fractions, units.div_ceil(2), "fractions")?;
        let beyond = |last: Option<&u8>, bits: usize| last.is_some_and(|last| bits > 0 && last >> bits != 0);
        if beyond(signs.last(), units % 8) || beyond(fractions.last(), units % 2 * 4) {
            return Err(bad("magnitudes 4", "bits beyond the last element are set".into()));
        }
        let mut others = Spare::new(units, "signs and fractions")?;
        kernel::unpack(&signs, &fractions, &mut others);

        let symbols = entropy::read_plane(symbols, units, "symbols")?;
        let rest = rest.iter().map(|(_, code)| entropy::read_plane(code, units, "byte planes")).collect::<Result<Vec<_>>>()?;
        let decode_tops = |tops: &mut [u8]| {
            let parts = symbols.chunks(width.max(1)).zip(others.chunks(width.max(1))).zip(tops.chunks_mut(2 * width.max(1)));
            for (at, ((symbols, others), tops)) in parts.enumerate() {
                // A wrapped sum is rejected as well: it is not a valid magnitude.
                let row = floor.wrapping_add(i16::from(rows.get(at).map_or(0, |&term| term as i8)));
                if !kernel::to_tops(row, &by_column, symbols, others, tops) {
                    return Err(bad("magnitudes 3", format!("an element of row {at} has a magnitude that is not 0 to {}", kernel::MOST)));
                }
            }
            put_escapes(escapes, &symbols, tops)
        };
        match rest.as_slice() {
            [plane0, plane1] => {
                let mut tops = Spare::new(2 * units, "upper halves")?;
                decode_tops(&mut tops)?;
                kernel::merge(&tops, plane0, plane1, out);
                Ok(())
            }
            _ => decode_tops(out),
        }
    }
}

/// Writes the magnitudes of the elements without a symbol.
fn put_escapes(code: &[u8], symbols: &[u8], tops: &mut [u8]) -> Result<()> {
    let count = kernel::count_escapes(symbols);
    let both = entropy::read_plane(code, 2 * count, "escapes")?;
    let (lows, highs) = both.split_at(count);
    if let Some((low, high)) = lows.iter().zip(highs).find(|(_, high)| **high > (kernel::MOST >> 8) as u8) {
        return Err(bad("magnitudes 3.1", format!("an escape of {}", u16::from(*high) << 8 | u16::from(*low))));
    }
    let mut escapes = lows.iter().zip(highs);
    kernel::for_each_escape(symbols, |at| {
        if let (Some((&low, &high)), Some([by_low, by_high])) = (escapes.next(), tops.get_mut(2 * at..2 * at + 2)) {
            *by_low |= low << 4;
            *by_high |= high << 4 | low >> 4;
        }
    });
    Ok(())
}

#[cfg(test)]
#[allow(clippy::little_endian_bytes, reason = "elements are little-endian")]
mod tests {
    use super::*;

    fn round_trip(dtype: Dtype, row_elements: u64, data: &[u8]) -> Vec<usize> {
        let elements = (data.len() / dtype.unit_bytes()) as u64;
        let chunk = Chunk { row_elements, ..Chunk::new(dtype, elements, data) };
        let encoded = Magnitudes.encode(&chunk).unwrap();
        let stored = encoded.into_bytes();
        let mut out = vec![0; data.len()];
        let input = Columns { dtype, element_count: elements, columns: &stored, base: None, partners: &[] };
        Magnitudes.decode(&input, &mut out).unwrap();
        assert!(out == data);
        stored.iter().map(|(_, bytes)| bytes.len()).collect()
    }

    #[test]
    fn every_unit_of_16_bits_comes_back_with_and_without_rows() {
        let data: Vec<u8> = (0..=u16::MAX).flat_map(|unit| unit.wrapping_mul(40_503).to_le_bytes()).collect();
        for row_elements in [0, 1, 16, 256, 4096, 65536] {
            round_trip(Dtype::Bf16, row_elements, &data);
        }
        round_trip(Dtype::Bf16, 0, &data[..2 * 65_533]);
        round_trip(Dtype::Bf16, 0, &data[..2]);
        round_trip(Dtype::F32, 64, &data);
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
        round_trip(Dtype::F32, 50, &data);
    }

    #[test]
    fn terms_are_stored_only_where_they_pay() {
        let noise = |i: usize| 1.0 + (i.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 65_536.0;
        let rows = |row: usize, _: usize| (row * 7 % 30) as f32 / 2.0;
        let columns = |_: usize, column: usize| (column * 11 % 25) as f32 / 3.0;
        let both = |row: usize, column: usize| rows(row, 0) + columns(0, column);
        let neither = |_: usize, _: usize| 0.0;
        let sizes = |exponent: &dyn Fn(usize, usize) -> f32| {
            let value = |i: usize| noise(i) * exponent(i / 64, i % 64).exp2();
            let data: Vec<u8> = (0..256 * 64).flat_map(|i| value(i).to_le_bytes()).collect();
            round_trip(Dtype::F32, 64, &data)[..2].to_vec()
        };
        assert_eq!(sizes(&neither), [2, 0]);
        assert_eq!(sizes(&rows), [2 + 256, 0]);
        assert_eq!(sizes(&columns), [2, 64]);
        assert_eq!(sizes(&both), [2 + 256, 64]);
    }
}
