//! Tables of fixed-width columns, 64-byte aligned, read in place. Spec: `spec/index.md`, clause 1.
#![allow(clippy::little_endian_bytes, reason = "columns are little-endian arrays")]

use std::marker::PhantomData;

use bytes::Bytes;

use super::{COLUMN_ALIGNMENT, align_up};
use crate::limits::to_usize;
use crate::{Error, Result};

/// A fixed-width number in a column.
pub(crate) trait Fixed: Copy + PartialEq {
    const WIDTH: usize;
    fn decode(bytes: &[u8]) -> Option<Self>;
    fn encode(self, out: &mut Vec<u8>);
}

macro_rules! fixed {
    ($($type:ty),*) => {$(
        impl Fixed for $type {
            const WIDTH: usize = size_of::<$type>();
            fn decode(bytes: &[u8]) -> Option<Self> {
                bytes.try_into().ok().map(Self::from_le_bytes)
            }
            fn encode(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

fixed!(u8, u16, u32, u64);

/// One column, read in place.
#[derive(Debug, Clone)]
pub(crate) struct Column<T> {
    bytes: Bytes,
    kind: PhantomData<T>,
}

impl<T: Fixed> Column<T> {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len().checked_div(T::WIDTH).unwrap_or(0)
    }

    pub(crate) fn get(&self, row: usize) -> Option<T> {
        let start = row.checked_mul(T::WIDTH)?;
        T::decode(self.bytes.get(start..start.checked_add(T::WIDTH)?)?)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.bytes.chunks_exact(T::WIDTH).filter_map(T::decode)
    }

    /// Returns the values of `rows`; fewer if the column ends earlier.
    pub(crate) fn range(&self, rows: std::ops::Range<usize>) -> impl Iterator<Item = T> + '_ {
        let start = rows.start.saturating_mul(T::WIDTH).min(self.bytes.len());
        let end = rows.end.saturating_mul(T::WIDTH).min(self.bytes.len()).max(start);
        self.bytes.get(start..end).unwrap_or_default().chunks_exact(T::WIDTH).filter_map(T::decode)
    }

    /// The stored bytes: an Arrow buffer on a little-endian machine.
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// Variable-length rows: `rows + 1` offsets into a heap, the layout of Arrow.
#[derive(Debug, Clone)]
pub(crate) struct Heap<T> {
    pub(crate) offsets: Column<u32>,
    pub(crate) values: Column<T>,
}

impl<T: Fixed> Heap<T> {
    pub(crate) fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    pub(crate) fn span(&self, row: usize) -> Option<std::ops::Range<usize>> {
        let start = self.offsets.get(row)? as usize;
        let end = self.offsets.get(row.checked_add(1)?)? as usize;
        Some(start..end)
    }

    pub(crate) fn row(&self, row: usize) -> Option<Vec<T>> {
        Some(self.values.range(self.span(row)?).collect())
    }
}

impl Heap<u8> {
    /// Returns a row of text. UTF-8 was checked when the heap was read.
    pub(crate) fn text(&self, row: usize) -> Option<&str> {
        std::str::from_utf8(self.values.bytes.get(self.span(row)?)?).ok()
    }
}

/// Writes columns in order, each padded to the column alignment.
#[derive(Debug, Default)]
pub(crate) struct ColumnsWriter {
    out: Vec<u8>,
}

impl ColumnsWriter {
    pub(crate) fn column<T: Fixed>(&mut self, values: impl IntoIterator<Item = T>) {
        for value in values {
            value.encode(&mut self.out);
        }
        self.pad();
    }

    /// Writes offsets and values of rows of text or numbers.
    pub(crate) fn heap<T: Fixed>(&mut self, rows: impl Iterator<Item = impl AsRef<[T]>> + Clone) -> Result<()> {
        let mut end = 0usize;
        let mut offsets = vec![0u32];
        for row in rows.clone() {
            end = end.saturating_add(row.as_ref().len());
            // Arrow stores offsets as signed integers.
            let offset =
                i32::try_from(end).map_err(|_| Error::limit("names or shapes of one table exceed 2^31 bytes").clause("index 1.3"))?;
            offsets.push(offset.unsigned_abs());
        }
        self.column(offsets);
        for row in rows {
            for &value in row.as_ref() {
                value.encode(&mut self.out);
            }
        }
        self.pad();
        Ok(())
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.out
    }

    fn pad(&mut self) {
        let padded = self.out.len().next_multiple_of(COLUMN_ALIGNMENT as usize);
        self.out.resize(padded, 0);
    }
}

/// Reads columns in order. Padding must be zero, and no byte may be left.
pub(crate) struct ColumnsReader {
    bytes: Bytes,
    position: usize,
    what: &'static str,
}

impl ColumnsReader {
    pub(crate) fn new(bytes: Bytes, what: &'static str) -> Self {
        Self { bytes, position: 0, what }
    }

    pub(crate) fn column<T: Fixed>(&mut self, rows: u64) -> Result<Column<T>> {
        let short = || Error::corrupt(format!("{} ends early: a column of {rows} rows does not fit", self.what)).clause("index 1.2");
        let bytes = rows.checked_mul(T::WIDTH as u64).ok_or_else(short)?;
        let padded = align_up(bytes, COLUMN_ALIGNMENT).ok_or_else(short)?;
        let bytes = to_usize(bytes, self.what)?;
        let padded = to_usize(padded, self.what)?;
        let start = self.position;
        let end = start.checked_add(bytes).ok_or_else(short)?;
        let next = start.checked_add(padded).ok_or_else(short)?;
        let padding = self.bytes.get(end..next).ok_or_else(short)?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(Error::corrupt(format!("{}: padding after a column is not zero", self.what)).clause("index 1.2"));
        }
        self.position = next;
        Ok(Column { bytes: self.bytes.slice(start..end), kind: PhantomData })
    }

    pub(crate) fn heap<T: Fixed>(&mut self, rows: u64, values: u64) -> Result<Heap<T>> {
        let bad = |message: &str| Error::corrupt(format!("{}: {message}", self.what)).clause("index 1.3");
        let count = rows.checked_add(1).ok_or_else(|| bad("row count overflows"))?;
        if i32::try_from(values).is_err() {
            return Err(bad("a heap exceeds 2^31 values"));
        }
        let what = self.what;
        let offsets: Column<u32> = self.column(count)?;
        let mut previous = 0;
        for (row, offset) in offsets.iter().enumerate() {
            if (row == 0 && offset != 0) || offset < previous {
                return Err(Error::corrupt(format!("{what}: heap offsets do not ascend from zero")).clause("index 1.3"));
            }
            previous = offset;
        }
        if u64::from(previous) != values {
            return Err(Error::corrupt(format!("{what}: heap offsets end at {previous}, not at {values}")).clause("index 1.3"));
        }
        Ok(Heap { offsets, values: self.column(values)? })
    }

    /// Reads a heap of UTF-8 rows of at most `max_bytes` bytes each.
    pub(crate) fn text(&mut self, rows: u64, heap_bytes: u64, max_bytes: u64) -> Result<Heap<u8>> {
        let heap: Heap<u8> = self.heap(rows, heap_bytes)?;
        for row in 0..heap.len() {
            let bytes = heap.span(row).map_or(0, |span| span.len()) as u64;
            crate::Limits::check(bytes, max_bytes, "length of a name")?;
            if heap.text(row).is_none() {
                return Err(Error::corrupt(format!("{}: name {row} is not UTF-8", self.what)).clause("index 1.4"));
            }
        }
        Ok(heap)
    }

    pub(crate) fn finish(self) -> Result<()> {
        if self.position == self.bytes.len() {
            return Ok(());
        }
        let trailing = self.bytes.len().saturating_sub(self.position);
        Err(Error::corrupt(format!("{} has {trailing} trailing bytes", self.what)).clause("index 1.2"))
    }
}
