//! The chunk grid. Chunk boundaries follow from dtype and shard shape alone. Spec: `spec/container.md`, clause 6.

use std::ops::Range;

use super::{Dtype, element_count};
use crate::{Error, Result};

/// Chunk boundaries of a shard.
///
/// Positions are implicit, so the chunks of two snapshots line up, and so do those of tensors of one parameter.
///
/// ```
/// use tensorcask::{ChunkGrid, Dtype};
/// let grid = ChunkGrid::new(Dtype::Bf16, &[1000, 768])?;
/// assert_eq!(grid.chunk_elements(), 341 * 768);
/// assert_eq!(grid.chunk_count(), 3);
/// assert_eq!(grid.elements(2), 2 * 341 * 768..768_000);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkGrid {
    dtype: Dtype,
    element_count: u64,
    chunk_elements: u64,
    row_elements: u64,
}

/// Greatest number of elements in a chunk.
const MAX_CHUNK_ELEMENTS: u64 = 1 << 18;

impl ChunkGrid {
    /// Creates the grid of a shard of `shape`.
    pub fn new(dtype: Dtype, shape: &[u64]) -> Result<Self> {
        let too_large = || Error::limit(format!("shape {shape:?} of {dtype} is beyond 2^64 bytes")).clause("container 6");
        let element_count = element_count(shape).ok_or_else(too_large)?;
        dtype.byte_count(element_count).ok_or_else(too_large)?;
        let row = shape.last().copied().unwrap_or(1);
        // A chunk of a packed type must start on a byte; a multiple of 8 elements always does.
        let unit = match dtype.is_packed() {
            true => row.saturating_mul(8 / gcd(row.max(1), 8)),
            false => row,
        };
        let chunk_elements = match unit {
            1..=MAX_CHUNK_ELEMENTS => MAX_CHUNK_ELEMENTS / unit * unit,
            _ => MAX_CHUNK_ELEMENTS,
        };
        let row_elements = if unit <= MAX_CHUNK_ELEMENTS { row } else { 0 };
        Ok(Self { dtype, element_count, chunk_elements, row_elements })
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements in the shard.
    pub fn element_count(&self) -> u64 {
        self.element_count
    }

    /// Number of elements in every chunk but the last.
    pub fn chunk_elements(&self) -> u64 {
        self.chunk_elements
    }

    /// Number of elements in a row, that is, in the last dimension; 0 if rows are longer than chunks. Every chunk holds
    /// whole rows.
    pub fn row_elements(&self) -> u64 {
        self.row_elements
    }

    /// Number of chunks; 0 for an empty shard.
    pub fn chunk_count(&self) -> u64 {
        self.element_count.div_ceil(self.chunk_elements)
    }

    /// Elements of chunk `chunk`, in the row-major order of the shard.
    pub fn elements(&self, chunk: u64) -> Range<u64> {
        let start = chunk.saturating_mul(self.chunk_elements).min(self.element_count);
        start..start.saturating_add(self.chunk_elements).min(self.element_count)
    }

    /// Bytes of chunk `chunk` in the data of the shard.
    pub fn bytes(&self, chunk: u64) -> Range<u64> {
        let elements = self.elements(chunk);
        // By construction, chunks start on a byte and the total fits u64.
        let at = |element: u64| self.dtype.byte_count(element).unwrap_or(u64::MAX);
        at(elements.start)..at(elements.end)
    }

    /// Chunks that hold the given elements.
    pub fn chunks_of(&self, elements: Range<u64>) -> Range<u64> {
        if elements.is_empty() {
            return 0..0;
        }
        elements.start / self.chunk_elements..elements.end.div_ceil(self.chunk_elements).min(self.chunk_count())
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_follow_the_rule() {
        let per_chunk = |dtype, shape: &[u64]| ChunkGrid::new(dtype, shape).map(|g| (g.chunk_elements(), g.chunk_count())).ok();
        let full = 1 << 18;
        assert_eq!(per_chunk(Dtype::F32, &[]), Some((full, 1)), "a scalar is one chunk");
        assert_eq!(per_chunk(Dtype::F32, &[0, 7]), Some((full / 7 * 7, 0)), "an empty tensor has none");
        assert_eq!(per_chunk(Dtype::F32, &[7, 0]), Some((full, 0)));
        assert_eq!(per_chunk(Dtype::F32, &[3, full]), Some((full, 3)));
        assert_eq!(per_chunk(Dtype::F32, &[2, full + 1]), Some((full, 3)), "rows longer than a chunk are cut");
        assert_eq!(per_chunk(Dtype::F32, &[1000, 3000]), Some((261_000, 12)));
        // 8 rows of 3 elements of 4 bits: 24 elements, 12 bytes.
        assert_eq!(per_chunk(Dtype::Int4, &[1 << 20, 3]), Some((full / 24 * 24, 13)));
        assert_eq!(per_chunk(Dtype::F32, &[u64::MAX, 2]), None);
    }

    #[test]
    fn chunks_of_a_range_cover_it() -> Result<()> {
        let grid = ChunkGrid::new(Dtype::F32, &[1000, 3000])?;
        assert_eq!(grid.chunks_of(0..1), 0..1);
        assert_eq!(grid.chunks_of(260_999..261_001), 0..2);
        assert_eq!(grid.chunks_of(2_999_999..3_000_000), 11..12);
        assert_eq!(grid.chunks_of(5..5), 0..0);
        assert_eq!(grid.bytes(11), 4 * 11 * 261_000..12_000_000);
        Ok(())
    }
}
