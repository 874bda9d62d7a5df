//! Rows that changed since the base of the next delta, gathered from what the caller says at each save.

use std::collections::HashMap;

use super::base::ShardKey;
use super::layout::StateLayout;
use crate::tensor::ChunkGrid;
use crate::wire::Id;
use crate::{Result, TensorView};

/// For each shard of a committed snapshot, the rows that changed since; none where some save did not say.
#[derive(Debug, Default)]
pub(super) struct Hints {
    since: Option<Id>,
    rows: HashMap<ShardKey, Option<Vec<u64>>>,
}

fn key_of(view: &TensorView<'_>) -> ShardKey {
    (view.name().to_owned(), view.rect().clone())
}

impl Hints {
    /// Adds what the caller says of a state that is about to be saved, whatever becomes of the save.
    pub(super) fn note(&mut self, layout: &StateLayout<'_>) {
        if self.since.is_none() {
            return;
        }
        let mut before = std::mem::take(&mut self.rows);
        for view in layout.tensors.iter().flat_map(|tensor| &tensor.shards) {
            let key = key_of(view);
            if let (Some(Some(mut rows)), Some(new)) = (before.remove(&key), view.changed_rows()) {
                rows.extend_from_slice(new);
                rows.sort_unstable();
                rows.dedup();
                self.rows.insert(key, Some(rows));
            }
        }
    }

    /// Starts again from a committed snapshot of this state.
    pub(super) fn start(&mut self, snapshot: Id, layout: &StateLayout<'_>) {
        let views = layout.tensors.iter().flat_map(|tensor| &tensor.shards);
        self.rows = views.map(|view| (key_of(view), Some(Vec::new()))).collect();
        self.since = Some(snapshot);
    }

    /// Rows of a chunk, as codecs number them, that may differ from a snapshot; none where that is not known, or where the chunk does not
    /// hold whole rows of whole bytes.
    pub(super) fn of_chunk(&self, snapshot: Id, view: &TensorView<'_>, chunk: u64) -> Result<Option<Vec<u64>>> {
        if self.since != Some(snapshot) {
            return Ok(None);
        }
        let Some(Some(changed)) = self.rows.get(&key_of(view)) else { return Ok(None) };
        let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
        let (row, elements) = (grid.row_elements(), grid.elements(chunk));
        if row == 0 || row.checked_mul(view.dtype().bits()).is_none_or(|bits| !bits.is_multiple_of(8)) {
            return Ok(None);
        }
        // Elements of an index of the first dimension: of one dimension, the whole is a row.
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
