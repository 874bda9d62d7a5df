//! Changed rows: the rows that callers name as changed, summed up since the base of the next delta.
//!
//! A caller of a save may name the rows of a tensor that changed since the save before. From these rows codecs make a
//! delta without reading the base. A row that is left out would make a snapshot that cannot be rebuilt, so
//! [`check_changed_rows`] compares what callers say with base chunks or checksums before anything is encoded.

use std::collections::HashMap;

use super::base_cache::{BaseChunk, ShardKey, key_of};
use super::input::{ChunkRef, SaveInput};
use super::layout::StateLayout;
use crate::codec::Chunk;
use crate::precision::Rounded;
use crate::reader::chunk_crcs;
use crate::tensor::ChunkGrid;
use crate::wire::Id;
use crate::{Error, Result, TensorView, boxed};

/// For each shard of a committed snapshot, the rows that changed since. A shard is missing once a save did not name its
/// rows.
#[derive(Debug, Default)]
pub(super) struct ChangedRows {
    since: Option<Id>,
    rows: HashMap<ShardKey, Vec<u64>>,
}

impl ChangedRows {
    /// Adds the rows that the caller names for a state that is about to be saved. They count even if the save fails.
    pub(super) fn add(&mut self, layout: &StateLayout<'_>) {
        if self.since.is_none() {
            return;
        }
        let mut before = std::mem::take(&mut self.rows);
        for view in layout.tensors.iter().flat_map(|tensor| &tensor.shards) {
            let key = key_of(view);
            if let (Some(mut rows), Some(new)) = (before.remove(&key), view.changed_rows()) {
                rows.extend_from_slice(new);
                rows.sort_unstable();
                rows.dedup();
                self.rows.insert(key, rows);
            }
        }
    }

    /// Starts again from a committed snapshot of this state.
    pub(super) fn restart(&mut self, snapshot: Id, layout: &StateLayout<'_>) {
        let views = layout.tensors.iter().flat_map(|tensor| &tensor.shards);
        self.rows = views.map(|view| (key_of(view), Vec::new())).collect();
        self.since = Some(snapshot);
    }

    /// Rows of a chunk, as codecs number them, that may differ from a snapshot. `None` if they are not known, or if the
    /// chunk does not hold whole rows of whole bytes.
    pub(super) fn of_chunk(&self, snapshot: Id, view: &TensorView<'_>, chunk: u64) -> Result<Option<Vec<u64>>> {
        if self.since != Some(snapshot) {
            return Ok(None);
        }
        let Some(changed) = self.rows.get(&key_of(view)) else { return Ok(None) };
        let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
        let (row, elements) = (grid.row_elements(), grid.elements(chunk));
        if row == 0 || row.checked_mul(view.dtype().bits()).is_none_or(|bits| !bits.is_multiple_of(8)) {
            return Ok(None);
        }
        // Elements per index of the first dimension; 1 if there is no other dimension.
        let each = view.rect().shape.iter().skip(1).product::<u64>().max(1);
        let first = changed.partition_point(|index| index.saturating_add(1).saturating_mul(each) <= elements.start);
        let mut rows = Vec::new();
        for index in changed.iter().skip(first).take_while(|index| index.saturating_mul(each) < elements.end) {
            let start = index.saturating_mul(each).max(elements.start);
            let end = index.saturating_add(1).saturating_mul(each).min(elements.end);
            rows.extend((start - elements.start) / row..(end - elements.start).div_ceil(row));
        }
        rows.dedup();
        Ok(Some(rows))
    }
}

/// Refuses changed rows that leave out a row which did change. Compares with the base chunk if it is there, else
/// compares the checksums of chunks in which no row changed.
#[boxed]
pub(super) async fn check_changed_rows(
    input: &SaveInput<'_>,
    chunks: &[ChunkRef],
    rounded: &[Rounded<'_>],
    bases: &[Option<BaseChunk<'_>>],
) -> Result<()> {
    let mut unchanged = Vec::new();
    for ((&at, rounded), base) in chunks.iter().zip(rounded).zip(bases) {
        let Some(tensor) = at.base else { continue };
        let Some(rows) = input.changed_rows(at)? else { continue };
        match base {
            Some(base) => {
                let chunk = Chunk { base: Some(base), ..input.codec_chunk(at, &rounded.data)? };
                let Some((row_bytes, _)) = chunk.rows() else { continue };
                let pairs = chunk.data.chunks_exact(row_bytes).zip(base.chunks_exact(row_bytes)).zip(0u64..);
                let mut changed = pairs.filter(|((ours, theirs), _)| ours != theirs).map(|(_, row)| row);
                if let Some(row) = changed.find(|row| rows.binary_search(row).is_err()) {
                    return Err(left_out(&format!("row {row}"), input.view(at), at.chunk));
                }
            }
            None if rows.is_empty() => unchanged.push((at, rounded, (tensor, input.view(at).rect().clone(), at.chunk))),
            None => {}
        }
    }
    let (Some(parent), false) = (input.parent, unchanged.is_empty()) else { return Ok(()) };
    let places: Vec<_> = unchanged.iter().map(|(_, _, place)| place.clone()).collect();
    let crcs = chunk_crcs(&parent.snapshot.chain, &places).await?;
    for ((at, rounded, _), crc) in unchanged.into_iter().zip(crcs) {
        if crc32fast::hash(&rounded.data) != crc {
            return Err(left_out("a row", input.view(at), at.chunk));
        }
    }
    Ok(())
}

fn left_out(row: &str, view: &TensorView<'_>, chunk: u64) -> Error {
    let message =
        format!("{row} of this chunk changed since the parent, but `changed_rows` leaves it out; give all rows that changed, or none");
    Error::invalid(message).tensor(view.name()).chunk(chunk)
}
