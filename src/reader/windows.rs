//! Windows: parts of tensors that are read one after the other, so that a reader of a whole state needs little memory.

use super::Snapshot;
use crate::wire::DirectoryTensor;
use crate::{ChunkGrid, Error, Rect, Result, Slice, parallel};

/// Decoded bytes of a window with two threads. More threads get larger windows. A single larger part exceeds this limit.
const WINDOW_BYTES: u64 = 64 << 20;

/// Elements of a part of a large tensor: a few parts, one for each tensor of a parameter, fill a window.
const PART_ELEMENTS: u64 = 1 << 22;

/// Largest number of parts of a slice. A directory may claim any size.
const MAX_PARTS: u64 = 1 << 16;

/// Consecutive rows of a slice of a tensor, to be read at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlicePart {
    /// Number of the slice in the list that was divided.
    pub item: usize,
    /// The rows, as a rectangle of the tensor.
    pub rect: Rect,
    /// Position in the bytes of the slice.
    pub first_byte: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl SlicePart {
    /// The rows, as a slice of the tensor.
    pub fn slice(&self) -> Slice {
        let ranges = self.rect.offset.iter().zip(&self.rect.shape).map(|(&offset, &extent)| offset..offset.saturating_add(extent));
        Slice::ranges(ranges.collect::<Vec<_>>())
    }

    /// Divides slices of tensors of a snapshot into windows of at most `most_bytes`, and at most what keeps all threads busy. Sends no
    /// request.
    ///
    /// Windows hold parameter after parameter, because the codecs of the tensors of a parameter need each other: in
    /// another order, many chunks are decoded several times.
    pub fn windows(snapshot: &Snapshot, slices: &[(&str, Slice)], most_bytes: u64) -> Result<Vec<Vec<Self>>> {
        let mut parts = Vec::new();
        for (item, (name, slice)) in slices.iter().enumerate() {
            let tensor = snapshot.tensor(name)?;
            let rect = slice.of(&tensor.shape).map_err(|e| e.tensor(*name))?;
            let bytes = rect.element_count().and_then(|count| tensor.dtype.byte_count(count));
            let bytes = bytes.ok_or_else(|| Error::limit("a slice beyond 2^64 bytes").tensor(*name))?;
            let of_tensor = parts_of(item, &tensor, &rect, bytes);
            parts.extend(of_tensor.into_iter().map(|part| ((tensor.param.clone(), tensor.shape.clone()), part)));
        }
        let first_row = |part: &Self| part.rect.offset.first().copied().unwrap_or(0);
        parts.sort_by(|(a_key, a), (b_key, b)| (a_key, first_row(a)).cmp(&(b_key, first_row(b))));
        let most = parallel::window_bytes(WINDOW_BYTES).min(most_bytes);
        let mut windows: Vec<Vec<Self>> = Vec::new();
        let mut window_bytes = u64::MAX;
        for (_, part) in parts {
            if window_bytes.saturating_add(part.bytes) > most {
                windows.push(Vec::new());
                window_bytes = 0;
            }
            window_bytes = window_bytes.saturating_add(part.bytes);
            if let Some(window) = windows.last_mut() {
                window.push(part);
            }
        }
        Ok(windows)
    }
}

/// Divides a large rectangle into consecutive ranges of its first dimension, at the same rows for all tensors of a
/// shape. Each has about [`PART_ELEMENTS`] and, if the rows allow it, is a multiple of a chunk.
fn parts_of(item: usize, tensor: &DirectoryTensor, rect: &Rect, bytes: u64) -> Vec<SlicePart> {
    let whole = SlicePart { item, rect: rect.clone(), first_byte: 0, bytes };
    let (Some(&first), Some(&rows)) = (rect.offset.first(), rect.shape.first()) else { return vec![whole] };
    if rect.element_count().is_none_or(|count| count <= PART_ELEMENTS) || tensor.dtype.is_packed() {
        return vec![whole];
    }
    let row_elements = rect.shape[1..].iter().product::<u64>().max(1);
    let row_bytes = (bytes / rows).max(1);
    let chunk_rows = ChunkGrid::new(tensor.dtype, &tensor.shape).map_or(1, |grid| (grid.chunk_elements() / row_elements).max(1));
    let step = (PART_ELEMENTS / row_elements / chunk_rows * chunk_rows).max(1).max(rows.div_ceil(MAX_PARTS));
    let mut parts = Vec::new();
    let mut row = 0;
    while row < rows {
        // Parts begin on rows that are multiples of a chunk in the whole tensor.
        let next = ((first + row) / step * step + step - first).min(rows);
        let mut part = SlicePart { first_byte: row * row_bytes, bytes: (next - row) * row_bytes, ..whole.clone() };
        if let (Some(offset), Some(extent)) = (part.rect.offset.first_mut(), part.rect.shape.first_mut()) {
            (*offset, *extent) = (first + row, next - row);
        }
        parts.push(part);
        row = next;
    }
    parts
}
