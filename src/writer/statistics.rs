//! Statistics of the chunks of a save.
//!
//! A chunk is measured in the stored form, directly after it was encoded, when its bytes are in cache. Its change since
//! the base is measured only if the base is in memory for the codecs: statistics never load a base.

use std::collections::BTreeMap;

use tensorcask_kernels::statistics::{ChangeStatistics, ValueStatistics, changes, values};

use super::input::{ChunkRef, SaveInput};
use crate::codec::{Chunk, ChunkKind};
use crate::wire::ChunkStatistics;
use crate::{Error, Limits, Result};

/// Statistics of a chunk, without its place.
#[derive(Debug)]
pub(crate) struct Measured {
    elements: u64,
    values: Option<ValueStatistics>,
    change: Option<ChangeStatistics>,
}

impl Measured {
    /// Counts, extremes and sums; `None` for types that are not measured.
    pub(crate) fn values(&self) -> Option<&ValueStatistics> {
        self.values.as_ref()
    }

    /// Measures a chunk that was encoded as `kind`. Its data must be the decoded bytes.
    pub(crate) fn of(chunk: &Chunk<'_>, kind: ChunkKind) -> Self {
        let change = match (kind, chunk.base) {
            (ChunkKind::Unchanged, _) => Some(ChangeStatistics { changed: 0, squares: Some(0.0), ulps: 0 }),
            (_, Some(base)) => chunk.dtype.measured_format().map(|format| changes(format, base, chunk.data)),
            (_, None) => None,
        };
        Self { elements: chunk.element_count, values: chunk.dtype.measured_format().map(|format| values(format, chunk.data)), change }
    }
}

/// Statistics of one save.
#[derive(Debug, Default)]
pub(super) struct StatisticsRecord {
    /// Chunks that no cask describes yet, by tensor, shard and chunk.
    chunks: BTreeMap<[u64; 3], ChunkStatistics>,
}

impl StatisticsRecord {
    pub(super) fn record(&mut self, input: &SaveInput<'_>, at: ChunkRef, measured: Measured) -> Result<()> {
        let Measured { elements, values, change } = measured;
        let view = input.view(at);
        let description = &input.tensor(at).description;
        let row = ChunkStatistics {
            tensor: description.name.clone(),
            role: description.role.clone(),
            dtype: view.dtype(),
            shard: view.rect().clone(),
            chunk: at.chunk,
            elements,
            values,
            change,
            reference_step: change.and(input.parent).map(|parent| parent.snapshot.step()),
        };
        match self.chunks.insert([at.tensor as u64, at.shard as u64, at.chunk], row) {
            None => Ok(()),
            Some(_) => Err(input.locate(at, Error::invalid("a chunk was measured twice"))),
        }
    }

    /// Content of the blob that stores the statistics so far; `None` if nothing was measured.
    pub(super) fn take_blob(&mut self, limits: &Limits) -> Result<Option<Vec<u8>>> {
        if self.chunks.is_empty() {
            return Ok(None);
        }
        let mut rows: Vec<ChunkStatistics> = std::mem::take(&mut self.chunks).into_values().collect();
        rows.sort_by(|a, b| a.key().cmp(&b.key()));
        let bytes = ChunkStatistics::encode(&rows)?;
        Limits::check(bytes.len() as u64, limits.max_blob_bytes, "size of the statistics")?;
        Ok(Some(bytes))
    }
}
