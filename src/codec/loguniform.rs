//! `tc.loguniform`: numbers of a logarithmic grid, as codes relative to a prediction from row and column means, or from
//! the base.
//!
//! Spec:   spec/codecs/loguniform.md
//! Input:  n f32, nearly all on a grid of 1 to 128 steps per octave
//! Output: one term per row and per column; differences of codes and packed signs, coded by spec/entropy.md; escapes
//! Errors: `Corrupt` if terms, planes or escapes do not fit, or a code is outside the grid
//! Cost:   three passes and one plane; no transcendental function
//! Source: ours: a grid of equal ratios bounds the relative error of every number. Row and column means predict the
//!         logarithm, and so does the base

use tensorcask_kernels::bytes;
use tensorcask_kernels::loguniform::{self as kernel, ESCAPE, Grid, MAX_LOG2};
use tensorcask_kernels::spare::Spare;

use super::terms::{LEAST, mean, term};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, sample};
use crate::entropy::{self, Histogram};
use crate::limits::reserve;
use crate::{Dtype, Error, Result};

/// Stores numbers of a logarithmic grid, without loss. [`Setting::LogUniform`] rounds numbers to the grid beforehand.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, LogUniform}};
/// let data: Vec<u8> = (0..4096).flat_map(|i| 2f32.powi(i % 5).to_le_bytes()).collect();
/// let bytes: usize = LogUniform.encode(&Chunk::new(Dtype::F32, 4096, &data))?.columns.iter().map(|(_, c)| c.len()).sum();
/// assert!(bytes < 4096 / 2);
/// # Ok::<(), tensorcask::Error>(())
/// ```
///
/// [`Setting::LogUniform`]: crate::precision::Setting::LogUniform
#[derive(Debug, Clone, Copy, Default)]
pub struct LogUniform;

const COLUMNS: [&str; 6] = ["grid", "rows", "columns", "codes", "signs", "escapes"];

/// One number in this many may be off the grid.
const FEW: usize = 32;

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("a grid for {dtype}")).clause("loguniform 1")),
    }
}

/// Returns the coarsest grid that contains nearly all numbers of a sample, if any.
fn grid_of(data: &[u8]) -> Option<u32> {
    const GLANCE: usize = 64;
    let mut needs = [0usize; MAX_LOG2 as usize + 1];
    let mut seen = 0;
    let mut off = 0;
    for needed in sample(data, 4).as_chunks::<4>().0.iter().filter_map(|unit| kernel::coarsest(*unit)) {
        seen += 1;
        match needed.and_then(|log2| needs.get_mut(log2 as usize)) {
            Some(count) => *count += 1,
            None => off += 1,
        }
        if seen == GLANCE && off > GLANCE / 2 {
            return None;
        }
    }
    if seen == 0 || off > seen / FEW {
        return None;
    }
    let mut beyond = off;
    let mut log2 = MAX_LOG2;
    while log2 > 0 && beyond + needs.get(log2 as usize)? <= seen / FEW {
        beyond += needs.get(log2 as usize)?;
        log2 -= 1;
    }
    Some(log2)
}

/// Terms that predict codes: each prediction is the sum of a row term and a column term, in quarters of an octave.
struct Terms {
    /// Mean of all codes, in octaves.
    center: u8,
    rows: Vec<i8>,
    /// Column terms; empty if only rows have terms.
    columns: Vec<i8>,
}

impl Terms {
    /// Fits terms to codes in rows of `columns` elements.
    fn fit<'a>(grid: &Grid, rows: impl Iterator<Item = &'a [i16]> + Clone, columns: usize, by_column: bool) -> Self {
        let steps = 1i64 << grid.log2();
        let mut sums = vec![0i64; columns];
        let mut counts = vec![0i64; columns];
        for row in rows.clone() {
            for ((&code, sum), count) in row.iter().zip(&mut sums).zip(&mut counts) {
                *sum += i64::from(code.max(0));
                *count += i64::from(code >= 0);
            }
        }
        let (sum, count) = (sums.iter().sum::<i64>(), counts.iter().sum::<i64>());
        let center = mean(sum, count * steps).clamp(0, 255);
        let of_column = |(&sum, &count): (&i64, &i64)| match count {
            0 => 0,
            _ => term(mean(4 * sum, count * steps) - 4 * center),
        };
        let columns: Vec<i8> = if by_column { sums.iter().zip(&counts).map(of_column).collect() } else { vec![] };
        let rows = rows.map(|row| Self::of_row(grid, center, &columns, row)).collect();
        Self { center: center as u8, rows, columns }
    }

    /// Returns the term of a row, given the terms of the columns.
    fn of_row(grid: &Grid, center: i64, columns: &[i8], row: &[i16]) -> i8 {
        let mut sum = 0i64;
        let mut terms = 0i64;
        let mut count = 0i64;
        for &code in row {
            sum += i64::from(code.max(0));
            count += i64::from(code >= 0);
        }
        for (&code, &term) in row.iter().zip(columns) {
            terms += if code >= 0 { i64::from(term) } else { 0 };
        }
        let steps = 1i64 << grid.log2();
        if count == 0 { 0 } else { term(mean(4 * sum - terms * steps, count * steps) - 4 * center) }
    }

    /// Writes the predicted code of every element of a chunk.
    fn expect(center: u8, rows: &[i8], columns: &[i8], grid: &Grid, out: &mut [i16]) {
        let width = out.len() / rows.len().max(1);
        for (row, &term) in out.chunks_mut(width.max(1)).zip(rows) {
            kernel::expected_of_row(grid, 4 * i32::from(center) + i32::from(term), columns, row);
        }
    }
}

/// Returns rows and columns of the terms. A chunk that is not a matrix counts as one row without column terms.
fn shape(chunk: &Chunk<'_>) -> (usize, usize, bool) {
    let matrix = chunk.rows().map(|(bytes, rows)| (rows, bytes / 4)).filter(|(rows, columns)| *rows >= LEAST && *columns >= LEAST);
    matrix.map_or((1, chunk.data.len() / 4, false), |(rows, columns)| (rows, columns, true))
}

fn int16s(count: usize) -> Result<Vec<i16>> {
    let mut values = reserve(count, "codes")?;
    values.resize(count, 0);
    Ok(values)
}

/// Grid, storage kind and sizes, chosen from a sample of a chunk.
struct Plan {
    log2: u32,
    /// Whether the base predicts the codes.
    delta: bool,
    /// Estimated bytes of each column.
    sizes: Vec<u64>,
}

fn plan(chunk: &Chunk<'_>) -> Option<Plan> {
    if chunk.dtype != Dtype::F32 || chunk.data.is_empty() {
        return None;
    }
    let log2 = grid_of(chunk.data)?;
    let grid = Grid::new(log2);
    let (rows, columns, is_matrix) = shape(chunk);
    let absolute = absolute_sizes(chunk, &grid, rows, columns, is_matrix)?;
    let Some(base) = chunk.whole_base() else { return Some(Plan { log2, delta: false, sizes: absolute }) };
    let mut found = Found::default();
    let data = sample(chunk.data, 4);
    let base = sample(base, 4);
    let mut near = int16s(data.len() / 4).ok()?;
    kernel::expected(&grid, &base, &mut near);
    found.add(&grid, &data, Some(&base), &near)?;
    let delta = found.sizes(chunk.element_count, 0, 0);
    let is_less = delta.iter().sum::<u64>() < absolute.iter().sum::<u64>();
    Some(Plan { log2, delta: is_less, sizes: if is_less { delta } else { absolute } })
}

/// Histograms of sampled symbols.
struct Found {
    symbols: Histogram,
    signs: Histogram,
    seen: u64,
}

impl Default for Found {
    fn default() -> Self {
        Self { symbols: [0; 256], signs: [0; 256], seen: 0 }
    }
}

impl Found {
    fn add(&mut self, grid: &Grid, data: &[u8], base: Option<&[u8]>, expected: &[i16]) -> Option<()> {
        let units = data.len() / 4;
        let mut codes = int16s(units).ok()?;
        kernel::codes(grid, data, &mut codes);
        let mut symbols = Spare::new(units, "symbols").ok()?;
        let mut signs = Spare::new(units.div_ceil(8), "signs").ok()?;
        kernel::symbols(&codes, expected, &mut symbols);
        kernel::signs(&symbols, data, base, &mut signs);
        for (histogram, plane) in [(&mut self.symbols, &symbols), (&mut self.signs, &signs)] {
            for (sum, count) in histogram.iter_mut().zip(bytes::histogram(plane)) {
                *sum += count;
            }
        }
        self.seen += units as u64;
        Some(())
    }

    fn sizes(&self, units: u64, rows: u64, columns: u64) -> Vec<u64> {
        let escapes = u64::from(self.symbols[usize::from(ESCAPE)]).saturating_mul(units) / self.seen.max(1);
        let of = |histogram: &Histogram, units: u64| entropy::estimate(histogram, units);
        vec![1, rows, columns, of(&self.symbols, units), of(&self.signs, units.div_ceil(8)), escapes.saturating_mul(4)]
    }
}

fn absolute_sizes(chunk: &Chunk<'_>, grid: &Grid, rows: usize, columns: usize, is_matrix: bool) -> Option<Vec<u64>> {
    const SAMPLE: usize = 16_384;
    let mut found = Found::default();
    if !is_matrix {
        let data = sample(chunk.data, 4);
        let mut codes = int16s(data.len() / 4).ok()?;
        kernel::codes(grid, &data, &mut codes);
        let terms = Terms::fit(grid, std::iter::once(codes.as_slice()), codes.len(), false);
        Terms::expect(terms.center, &terms.rows, &[], grid, &mut codes);
        found.add(grid, &data, None, &codes)?;
        return Some(found.sizes(chunk.element_count, 2, 0));
    }
    let sampled = (SAMPLE / columns).clamp(LEAST, rows);
    let row_of = |at: usize| {
        let start = at * rows / sampled * columns * 4;
        chunk.data.get(start..start + columns * 4)
    };
    // Fit column terms to every other row. The estimate uses the remaining rows, so it is not biased by the fit.
    let mut fitted = int16s(sampled.div_ceil(2) * columns).ok()?;
    for (at, codes) in fitted.chunks_mut(columns).enumerate() {
        kernel::codes(grid, row_of(2 * at)?, codes);
    }
    let terms = Terms::fit(grid, fitted.chunks(columns), columns, true);
    let mut codes = int16s(columns).ok()?;
    let mut near = int16s(columns).ok()?;
    for at in (1..sampled).step_by(2) {
        let data = row_of(at)?;
        kernel::codes(grid, data, &mut codes);
        let row = Terms::of_row(grid, i64::from(terms.center), &terms.columns, &codes);
        Terms::expect(terms.center, &[row], &terms.columns, grid, &mut near);
        found.add(grid, data, None, &near)?;
    }
    Some(found.sizes(chunk.element_count, rows as u64 + 1, columns as u64))
}

impl Codec for LogUniform {
    fn id(&self) -> &str {
        "tc.loguniform"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        dtype == Dtype::F32
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::PerChunk
    }

    fn cost(&self) -> Cost {
        Cost { encode: 5.0, decode: 3.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        let planes = entropy::max_encoded_bytes(element_count).saturating_add(entropy::max_encoded_bytes(element_count.div_ceil(8)));
        // Upper bound for terms and escapes.
        planes.saturating_add(element_count.saturating_mul(5)).saturating_add(3)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        plan(chunk).map(|plan| plan.sizes)
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let plan = plan(chunk).ok_or_else(|| Error::invalid("needs f32 that lie on a logarithmic grid"))?;
        let grid = Grid::new(plan.log2);
        let base = chunk.whole_base().filter(|_| plan.delta);
        let units = chunk.data.len() / 4;
        let mut codes = int16s(units)?;
        let mut near = int16s(units)?;
        kernel::codes(&grid, chunk.data, &mut codes);
        let mut rows = vec![];
        let mut columns = vec![];
        match base {
            Some(base) => kernel::expected(&grid, base, &mut near),
            None => {
                let (_, width, by_column) = shape(chunk);
                let terms = Terms::fit(&grid, codes.chunks(width.max(1)), width, by_column);
                Terms::expect(terms.center, &terms.rows, &terms.columns, &grid, &mut near);
                rows.push(terms.center);
                rows.extend(terms.rows.iter().map(|&term| term as u8));
                columns.extend(terms.columns.iter().map(|&term| term as u8));
            }
        }
        let mut symbols = Spare::new(units, "symbols")?;
        let mut signs = Spare::new(units.div_ceil(8), "signs")?;
        kernel::symbols(&codes, &near, &mut symbols);
        kernel::signs(&symbols, chunk.data, base, &mut signs);
        let mut escapes = Vec::new();
        for (symbol, unit) in symbols.iter().zip(chunk.data.as_chunks::<4>().0) {
            if *symbol == ESCAPE {
                escapes.extend_from_slice(unit);
            }
        }
        let coded = |plane: &[u8]| entropy::coded(plane);
        let stored = [vec![plan.log2 as u8], rows, columns, coded(&symbols), coded(&signs), escapes];
        Ok(Encoded { uses_base: base.is_some(), columns: COLUMNS.into_iter().zip(stored).collect() })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let [grid, rows, terms, codes, signs, escapes] = columns.exactly(COLUMNS)?;
        let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
        let &[log2] = grid else { return bad(format!("a grid of {} bytes, not one", grid.len()), "loguniform 1") };
        if u32::from(log2) > MAX_LOG2 {
            return bad(format!("a grid of 2^{log2} steps"), "loguniform 1");
        }
        let grid = Grid::new(u32::from(log2));
        let units = out.len() / 4;
        let mut near = int16s(units)?;
        let base = columns.base.map(|_| columns.base(out.len())).transpose()?;
        match base {
            Some(_) if !rows.is_empty() || !terms.is_empty() => return bad("terms in a delta".into(), "loguniform 3"),
            Some(base) => kernel::expected(&grid, base, &mut near),
            None => {
                let Some((&center, rows)) = rows.split_first() else { return bad("no terms of rows".into(), "loguniform 3") };
                let fits = match terms.len() {
                    0 => !rows.is_empty() && units.is_multiple_of(rows.len()),
                    columns => rows.len().checked_mul(columns) == Some(units),
                };
                if !fits {
                    return bad(format!("{} rows and {} columns for {units} elements", rows.len(), terms.len()), "loguniform 3");
                }
                let signed = |terms: &[u8]| -> Result<Vec<i8>> {
                    let mut all = reserve(terms.len(), "terms")?;
                    all.extend(terms.iter().map(|&term| term as i8));
                    Ok(all)
                };
                Terms::expect(center, &signed(rows)?, &signed(terms)?, &grid, &mut near);
            }
        }
        let mut symbols = Spare::new(units, "symbols")?;
        let mut bits = Spare::new(units.div_ceil(8), "signs")?;
        entropy::decode(codes, &mut symbols)?;
        entropy::decode(signs, &mut bits)?;
        if !kernel::numbers(&grid, &symbols, &near, out) {
            return bad("a code is outside the grid".into(), "loguniform 4");
        }
        let unused = bits.last().filter(|_| !units.is_multiple_of(8)).map_or(0, |last| last >> (units % 8));
        if !kernel::put_signs(&symbols, &bits, base, out) || unused != 0 {
            return bad("a sign belongs to an escape or to no element".into(), "loguniform 5");
        }
        let (escapes, rest) = escapes.as_chunks::<4>();
        let mut escapes = escapes.iter();
        for (unit, _) in out.as_chunks_mut::<4>().0.iter_mut().zip(symbols.iter()).filter(|(_, symbol)| **symbol == ESCAPE) {
            let Some(bits) = escapes.next() else { return bad("fewer escapes than escape symbols".into(), "loguniform 6") };
            *unit = *bits;
        }
        match escapes.next().is_none() && rest.is_empty() {
            true => Ok(()),
            false => bad("more escapes than escape symbols, or a truncated escape".into(), "loguniform 6"),
        }
    }
}
