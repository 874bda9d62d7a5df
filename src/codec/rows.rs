//! `tc.rows`: a bitmap of changed rows, followed by those rows in another codec.
//!
//! Spec:   spec/codecs/rows.md
//! Input:  rows of the chunk, and either the rows of the base or the numbers of the rows that may differ from the base
//! Output: `rows`: inner codec, bytes of a row, one bit per row; then the columns of the inner codec
//! Errors: `Corrupt` if rows do not fill the chunk, or the changed rows do not decode
//! Cost:   one comparison, then the inner codec on the changed rows
//! Source: Check-N-Run (NSDI 2022): an embedding row changes as a whole or not at all

use tensorcask_kernels::mask;
use tensorcask_kernels::spare::Spare;

use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Ordered, Planes, Raw};
use crate::entropy;
use crate::limits::reserve;
use crate::wire::{Cursor, Put};
use crate::{Dtype, Error, Result};

/// Stores the rows that changed since the parent snapshot.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Rows}};
/// let data: Vec<u8> = (0..64 * 32u32).map(|i| (i * i >> 3) as u8).collect();
/// // Rows 3 and 40 changed; the base itself is not needed.
/// let chunk = Chunk { row_elements: 32, changed_rows: Some(&[3, 40]), ..Chunk::new(Dtype::U8, 64 * 32, &data) };
/// let bytes: usize = Rows.encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 2 * 32 + 20);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Rows;

/// Inner codecs, by number, and whether each takes the base.
const INNER: [(&dyn Codec, bool); 4] = [(&Raw, false), (&Planes, false), (&Planes, true), (&Ordered, true)];
/// Bytes before the row data in the column `rows`: the number of the inner codec, and the bytes of a row.
const HEADER: usize = 5;

/// Changed rows of a chunk, one after another, with the same rows of the base.
struct Changed {
    numbers: Vec<usize>,
    data: Spare,
    base: Option<Spare>,
}

/// Returns the numbers of the changed rows, or `None` if this codec does not pay.
fn changed_rows(chunk: &Chunk<'_>) -> Option<Vec<usize>> {
    let (bytes, count) = chunk.rows()?;
    // For rows of a few units, an element-wise codec is better.
    if bytes < 4 * chunk.dtype.unit_bytes() || count < 2 {
        return None;
    }
    match (chunk.whole_base(), chunk.changed_rows) {
        (Some(base), _) => {
            // A sample of rows shows cheaply whether nearly all rows changed.
            const LOOK: usize = 64;
            let differs = |row: usize| chunk.data.get(row * bytes..(row + 1) * bytes) != base.get(row * bytes..(row + 1) * bytes);
            if count > 4 * LOOK && (0..LOOK).filter(|at| differs(at * count / LOOK)).count() > LOOK * 9 / 10 {
                return None;
            }
            let rows = chunk.data.chunks_exact(bytes).zip(base.chunks_exact(bytes)).enumerate();
            let found: Vec<usize> = rows.filter(|(_, (data, base))| data != base).map(|(number, _)| number).collect();
            (found.len() < count - count / 10).then_some(found)
        }
        (None, Some(rows)) => {
            let found: Vec<usize> = rows.iter().map(|&row| row as usize).collect();
            let in_order = found.is_sorted_by(|a, b| a < b) && found.last().is_none_or(|last| *last < count);
            in_order.then_some(found)
        }
        (None, None) => None,
    }
}

fn gather(from: &[u8], row_bytes: usize, rows: &[usize]) -> Result<Spare> {
    let mut gathered = Spare::new(row_bytes * rows.len(), "changed rows")?;
    for (slot, row) in gathered.chunks_exact_mut(row_bytes.max(1)).zip(rows) {
        slot.copy_from_slice(from.get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default());
    }
    Ok(gathered)
}

fn changed(chunk: &Chunk<'_>) -> Result<Option<Changed>> {
    let (Some(numbers), Some((bytes, _))) = (changed_rows(chunk), chunk.rows()) else { return Ok(None) };
    let data = gather(chunk.data, bytes, &numbers)?;
    let base = chunk.whole_base().map(|base| gather(base, bytes, &numbers)).transpose()?;
    Ok(Some(Changed { numbers, data, base }))
}

/// Returns the changed rows as a chunk of their own.
fn inner<'a>(chunk: &Chunk<'a>, changed: &'a Changed) -> Chunk<'a> {
    let base = changed.base.as_deref();
    Chunk { role: chunk.role, base, ..Chunk::new(chunk.dtype, elements(chunk.dtype, changed.data.len()), &changed.data) }
}

/// Number of elements in `bytes` of whole rows.
fn elements(dtype: Dtype, bytes: usize) -> u64 {
    8 * bytes as u64 / dtype.bits()
}

/// Returns the inner codec that takes the fewest bytes, and the sizes of its columns.
fn best_inner(inner: &Chunk<'_>) -> (&'static dyn Codec, Vec<u64>) {
    let candidates = INNER.iter().filter(|(_, takes_base)| !takes_base || inner.base.is_some());
    let sizes = candidates.filter_map(|&(codec, _)| Some((codec, codec.estimate(inner)?)));
    sizes.min_by_key(|(_, sizes)| sizes.iter().sum::<u64>()).unwrap_or((&Raw, vec![inner.data.len() as u64]))
}

fn bitmap_bytes(rows: usize) -> usize {
    rows.div_ceil(8)
}

/// Content of the column `rows`.
struct Header {
    codec: &'static dyn Codec,
    takes_base: bool,
    row_bytes: usize,
    /// Numbers of the changed rows.
    changed: Vec<usize>,
}

fn parse(column: &[u8], dtype: Dtype, out_bytes: usize) -> Result<Header> {
    let bad = |message: String, clause: &'static str| Error::corrupt(message).clause(clause);
    let mut cursor = Cursor::new(column, "column `rows`");
    let number = cursor.u8()?;
    let row_bytes = cursor.u32()? as usize;
    let &(codec, takes_base) = INNER.get(usize::from(number)).ok_or_else(|| bad(format!("inner codec {number}"), "rows 2"))?;
    if row_bytes == 0 || !out_bytes.is_multiple_of(row_bytes) || elements(dtype, row_bytes) * dtype.bits() != 8 * row_bytes as u64 {
        return Err(bad(format!("rows of {row_bytes} bytes in a chunk of {out_bytes}"), "rows 3"));
    }
    let count = out_bytes / row_bytes;
    let mut bits = Spare::new(bitmap_bytes(count), "changed rows")?;
    entropy::decode(column.get(HEADER..).unwrap_or_default(), &mut bits)?;
    let is_set = |row: &usize| bits.get(row / 8).is_some_and(|byte| byte >> (row % 8) & 1 == 1);
    if (count..8 * bits.len()).any(|row| is_set(&row)) {
        return Err(bad("unused bits of `rows` are not zero".into(), "rows 4"));
    }
    let mut rows = reserve(mask::count_ones(&bits), "changed rows")?;
    rows.extend((0..count).filter(is_set));
    Ok(Header { codec, takes_base, row_bytes, changed: rows })
}

impl Codec for Rows {
    fn id(&self) -> &str {
        "tc.rows"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn cost(&self) -> Cost {
        Cost { encode: 5.0, decode: 4.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let inner = INNER.iter().map(|(codec, _)| codec.max_encoded_bytes(dtype, element_count)).fold(0, u64::max);
        // A row has at least four units.
        inner.saturating_add(entropy::max_encoded_bytes(element_count.div_ceil(8))).saturating_add(HEADER as u64)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let changed = changed(chunk).ok()??;
        let (_, count) = chunk.rows()?;
        let (_, sizes) = best_inner(&inner(chunk, &changed));
        let mut all = vec![(HEADER + 2 + bitmap_bytes(count)) as u64];
        all.extend(sizes);
        Some(all)
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let refuse = || Error::invalid("needs whole rows, and a base of equal length or the rows that changed");
        let changed = changed(chunk)?.ok_or_else(refuse)?;
        let (row_bytes, count) = chunk.rows().ok_or_else(refuse)?;
        let inner = inner(chunk, &changed);
        let (codec, _) = best_inner(&inner);
        let encoded = codec.encode(&inner)?;
        let number = INNER.iter().position(|(known, takes_base)| known.id() == codec.id() && *takes_base == encoded.uses_base);
        let mut rows = Vec::with_capacity(HEADER + 2 + bitmap_bytes(count));
        rows.put_u8(number.unwrap_or_default() as u8);
        rows.put_u32(u32::try_from(row_bytes).map_err(|_| Error::invalid("rows of more than 4 GiB"))?);
        let mut bits = vec![0u8; bitmap_bytes(count)];
        for &row in &changed.numbers {
            if let Some(byte) = bits.get_mut(row / 8) {
                *byte |= 1 << (row % 8);
            }
        }
        entropy::encode(&bits, &mut rows);
        let mut columns = vec![("rows", rows)];
        columns.extend(encoded.columns);
        Ok(Encoded { uses_base: true, columns })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        let fits = |inner: &[&str]| INNER.iter().any(|(codec, _)| codec.check_columns(dtype, inner).is_ok());
        match names.split_first() {
            Some((&"rows", inner)) if fits(inner) => Ok(()),
            _ => Err(Error::corrupt(format!("columns {}", names.join(", "))).clause("codecs 4.1")),
        }
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let Some(((name, rows), inner_columns)) = columns.columns.split_first() else {
            return Err(Error::corrupt("no columns").clause("codecs 4.1"));
        };
        super::are_columns([*name].into_iter(), &["rows"])?;
        let base = columns.base(out.len())?;
        let Header { codec, takes_base, row_bytes, changed } = parse(rows, columns.dtype, out.len())?;
        let mut decoded = Spare::new(changed.len() * row_bytes, "changed rows")?;
        let own_base = takes_base.then(|| gather(base, row_bytes, &changed)).transpose()?;
        let inner = Columns {
            dtype: columns.dtype,
            element_count: elements(columns.dtype, decoded.len()),
            columns: inner_columns,
            base: own_base.as_deref(),
            partners: &[],
        };
        codec.decode(&inner, &mut decoded)?;
        out.copy_from_slice(base);
        for (values, row) in decoded.chunks_exact(row_bytes).zip(&changed) {
            if let Some(slot) = out.get_mut(row * row_bytes..(row + 1) * row_bytes) {
                slot.copy_from_slice(values);
            }
        }
        Ok(())
    }
}
