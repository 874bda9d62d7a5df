//! Changed rows: the rows that callers name as changed, summed up since the base of the next delta.
//!
//! A caller of a save may name the rows of a tensor that changed since the save before. From these rows codecs make a
//! delta without reading the base. A row that is left out would make a snapshot that cannot be rebuilt, so
//! `row_check` compares what callers say before anything is encoded: with the base chunk; or with the
//! hash of each row, which the writer keeps if it keeps no base and the caller asks for hashes; or with the checksum of a chunk in
//! which no row changed. A chunk for which none of these is at hand is encoded against its base, as if no rows were named.

use std::collections::HashMap;

use rayon::prelude::*;
use tensorcask_kernels::row_hash::row_hash;

use super::base_cache::{ShardKey, key_of};
use super::layout::{LayoutTensor, StateLayout};
use crate::tensor::ChunkGrid;
use crate::wire::Id;
use crate::{Result, TensorView, parallel};

/// Smallest row, in bytes, of which a hash is kept. Hashes then take at most an eighth of the tensor.
const LEAST_HASHED_ROW: usize = 32;

/// For each shard of a committed snapshot, the rows that changed since. A shard is missing once a save did not name its
/// rows.
#[derive(Debug, Default)]
pub(super) struct ChangedRows {
    since: Option<Id>,
    shards: HashMap<ShardKey, ShardRows>,
}

#[derive(Debug, Default)]
struct ShardRows {
    /// Indices of the rows that changed, ascending.
    changed: Vec<u64>,
    /// Hash of each row of the snapshot, by chunk; no chunks if they are not kept.
    hashes: Vec<Vec<u32>>,
}

/// Shards of a state that is being saved, for [`ChangedRows::restart`] once the state is a committed snapshot.
#[derive(Debug)]
pub(super) struct NextRows(HashMap<ShardKey, ShardRows>);

impl NextRows {
    /// Shards of a state. `keeps_hashes` chooses tensors of which each row gets a hash, if the caller asks for hashes.
    pub(super) fn of(layout: &StateLayout<'_>, keeps_hashes: impl Fn(&LayoutTensor<'_>) -> bool) -> Result<Self> {
        let mut shards = HashMap::new();
        for tensor in &layout.tensors {
            let keeps_hashes = keeps_hashes(tensor);
            for view in &tensor.shards {
                let hashes = if keeps_hashes && view.has_row_hashes() { row_hashes(view)? } else { Vec::new() };
                shards.insert(key_of(view), ShardRows { changed: Vec::new(), hashes });
            }
        }
        Ok(Self(shards))
    }
}

impl ChangedRows {
    /// Adds the rows that the caller names for a state that is about to be saved. They count even if the save fails.
    pub(super) fn add(&mut self, layout: &StateLayout<'_>) {
        if self.since.is_none() {
            return;
        }
        let mut before = std::mem::take(&mut self.shards);
        for view in layout.tensors.iter().flat_map(|tensor| &tensor.shards) {
            let key = key_of(view);
            if let (Some(mut rows), Some(new)) = (before.remove(&key), view.changed_rows()) {
                rows.changed.extend_from_slice(new);
                rows.changed.sort_unstable();
                rows.changed.dedup();
                self.shards.insert(key, rows);
            }
        }
    }

    /// Starts again from a committed snapshot.
    pub(super) fn restart(&mut self, snapshot: Id, next: NextRows) {
        (self.since, self.shards) = (Some(snapshot), next.0);
    }

    /// Forgets the snapshot. The next delta is made as if no rows were named.
    pub(super) fn clear(&mut self) {
        (self.since, self.shards) = (None, HashMap::new());
    }

    /// Memory that the hashes take, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.shards.values().flat_map(|shard| &shard.hashes).map(|chunk| chunk.len() as u64 * 4).sum()
    }

    /// Hashes of the rows of a chunk of a snapshot, as codecs number the rows; `None` if they are not kept.
    pub(super) fn hashes(&self, snapshot: Id, view: &TensorView<'_>, chunk: u64) -> Option<&[u32]> {
        let shard = self.shards.get(&key_of(view)).filter(|_| self.since == Some(snapshot))?;
        Some(shard.hashes.get(usize::try_from(chunk).ok()?)?)
    }

    /// Rows of a chunk, as codecs number them, that may differ from a snapshot. `None` if they are not known, or if the
    /// chunk does not hold whole rows of whole bytes.
    pub(super) fn of_chunk(&self, snapshot: Id, view: &TensorView<'_>, chunk: u64) -> Result<Option<Vec<u64>>> {
        if self.since != Some(snapshot) {
            return Ok(None);
        }
        let Some(ShardRows { changed, .. }) = self.shards.get(&key_of(view)) else { return Ok(None) };
        let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
        let row = grid.row_elements();
        let elements = grid.elements(chunk);
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

/// Hash of each row of a shard, by chunk. No chunks if the rows are small, or are not of whole bytes.
fn row_hashes(view: &TensorView<'_>) -> Result<Vec<Vec<u32>>> {
    let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
    let bits = grid.row_elements().saturating_mul(view.dtype().bits());
    let row_bytes = usize::try_from(bits / 8).unwrap_or(usize::MAX);
    if !bits.is_multiple_of(8) || row_bytes < LEAST_HASHED_ROW {
        return Ok(Vec::new());
    }
    let of_chunk = |chunk| {
        let range = grid.bytes(chunk);
        let bytes = view.data().get(range.start as usize..range.end as usize).unwrap_or_default();
        bytes.chunks_exact(row_bytes).map(row_hash).collect()
    };
    Ok(parallel::run(|| (0..grid.chunk_count()).into_par_iter().map(of_chunk).collect()))
}
