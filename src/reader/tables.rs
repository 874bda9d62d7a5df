//! Tensors, chunks and statistics of many snapshots as Arrow tables, for SQL. One table per snapshot.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder, UInt64Builder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema};

use super::{Snapshot, Survey};
use crate::codec::ChunkKind;
use crate::commit::History;
use crate::tensor::{ChunkGrid, Rect, element_count};
use crate::wire::Directory;
use crate::{ChunkStatistics, Error, Limits, Result, boxed};

/// Limit on the number of chunks in shards that no cask of the snapshot holds. A directory alone could claim any size.
const MAX_CHUNKS_WITHOUT_CASK: u64 = 1 << 22;

/// View of many snapshots as tables. [`History::tables`] returns it.
#[derive(Debug, Clone, Copy)]
pub struct StoreTables<'s> {
    history: History<'s>,
}

impl<'s> History<'s> {
    /// Returns a view of the live snapshots as Arrow tables. Sends no request.
    pub fn tables(self) -> StoreTables<'s> {
        StoreTables { history: self }
    }
}

impl StoreTables<'_> {
    /// Returns tables with a row for each tensor of each live snapshot, or of the live snapshots of `steps`: `step`,
    /// `tensor`, `role`, `param`, `dtype`, `shape`, `alias_of`, `elements`, `bytes`, `stored_bytes`, `chunks`.
    ///
    /// `stored_bytes` counts the pages that the snapshot itself added. The bytes of tied tensors count once, in the row
    /// of `alias_of`. Leaves out damaged snapshots, see [`History::survey`]. Reads indexes and no tensor bytes. The first
    /// table has no rows, so that there is always a schema.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
    /// let store = Store::open("memory://tables-example")?;
    /// let state = [TensorView::new("w", Dtype::U8, &[2], &[1, 2])?];
    /// store.writer(Policy::Full).await?.save(1, &state, &[], &Metadata::default()).await?;
    /// let tables = store.history().tables().tensors(None).await?;
    /// assert_eq!(tables.iter().map(|table| table.num_rows()).collect::<Vec<_>>(), [0, 1]);
    /// # Ok(()) }
    /// ```
    pub async fn tensors(&self, steps: Option<&[u64]>) -> Result<Vec<RecordBatch>> {
        let found = self.history.survey(steps, |snapshot| async move { tensor_table(&snapshot).await }).await?;
        Ok(with_schema(TensorColumns::default().finish()?, found))
    }

    /// Returns tables with a row for each chunk of each tensor: `step`, `tensor`, `role`, `dtype`, `shard_offset`,
    /// `shard_shape`, `chunk`, `elements`, `kind`, `codec`, `bytes`, `stored_bytes`. In other respects like
    /// [`tensors`](Self::tensors).
    ///
    /// `kind` is `absolute`, `delta` or `unchanged`. An unchanged chunk has no codec and no stored bytes.
    pub async fn chunks(&self, steps: Option<&[u64]>) -> Result<Vec<RecordBatch>> {
        let found = self.history.survey(steps, |snapshot| async move { chunk_table(&snapshot).await }).await?;
        Ok(with_schema(ChunkColumns::default().finish()?, found))
    }

    /// Returns the statistics of each chunk as tables with the columns of [`ChunkStatistics::table`]. Snapshots without
    /// statistics have no rows. In other respects like [`tensors`](Self::tensors).
    pub async fn statistics(&self, steps: Option<&[u64]>) -> Result<Vec<RecordBatch>> {
        let of_snapshot = |snapshot: Snapshot| async move {
            let rows = snapshot.inspect().statistics().await?;
            ChunkStatistics::table(&[(snapshot.step(), rows)])
        };
        let found = self.history.survey(steps, of_snapshot).await?;
        Ok(with_schema(ChunkStatistics::table(&[])?, found))
    }
}

fn with_schema(empty: RecordBatch, found: Survey<RecordBatch>) -> Vec<RecordBatch> {
    std::iter::once(empty).chain(found.found.into_iter().map(|(_, table)| table)).collect()
}

#[boxed]
async fn tensor_table(snapshot: &Snapshot) -> Result<RecordBatch> {
    let directory = &snapshot.chain.newest().directory;
    let mut totals = vec![Totals::default(); directory.len()];
    let add = |chunk: &Chunk<'_>| {
        if let Some(total) = totals.get_mut(chunk.tensor) {
            total.bytes = total.bytes.saturating_add(chunk.bytes);
            total.stored_bytes = total.stored_bytes.saturating_add(chunk.stored_bytes);
            total.chunks += 1;
        }
    };
    visit_chunks(snapshot, add).await?;
    let mut columns = TensorColumns::default();
    for (tensor, total) in totals.iter().enumerate() {
        columns.push(snapshot.step(), directory, tensor, total);
    }
    columns.finish()
}

#[boxed]
async fn chunk_table(snapshot: &Snapshot) -> Result<RecordBatch> {
    let directory = &snapshot.chain.newest().directory;
    let mut columns = ChunkColumns::default();
    visit_chunks(snapshot, |chunk| columns.push(snapshot.step(), directory, chunk)).await?;
    columns.finish()
}

/// Calls `visit` for each chunk of each tensor that is no alias.
async fn visit_chunks(snapshot: &Snapshot, mut visit: impl FnMut(&Chunk<'_>)) -> Result<()> {
    snapshot.inspect().indexes().await?;
    let link = snapshot.chain.newest();
    let directory = &link.directory;
    let mut without_cask: u64 = 0;
    for tensor in (0..directory.len()).filter(|&tensor| directory.alias_of(tensor).is_none()) {
        for shard in directory.shards_of(tensor) {
            let shard = directory.shard(shard);
            let grid = ChunkGrid::new(directory.dtype(tensor), &shard.rect.shape).map_err(|e| e.tensor(directory.name(tensor)))?;
            let index = link.manifest.cask(shard.slot).and_then(|(cask, _)| link.index(cask));
            let stored = index.and_then(|index| Some((index, index.find_shard(directory.name(tensor), &shard.rect)?)));
            if stored.is_none() {
                without_cask = without_cask.saturating_add(grid.chunk_count());
                Limits::check(without_cask, MAX_CHUNKS_WITHOUT_CASK, "number of unchanged chunks")?;
            }
            for chunk in 0..grid.chunk_count() {
                let entry = stored.map(|(index, shard)| index.chunk(shard, chunk)).transpose()?;
                visit(&Chunk {
                    tensor,
                    shard: &shard.rect,
                    chunk,
                    elements: length(&grid.elements(chunk)),
                    kind: entry.as_ref().map_or(ChunkKind::Unchanged, |entry| entry.kind),
                    codec: entry.as_ref().and_then(|entry| Some(entry.codec.as_ref()?.id.as_str())),
                    bytes: length(&grid.bytes(chunk)),
                    stored_bytes: entry.iter().flat_map(|entry| &entry.pages).map(|page| length(&page.range)).sum(),
                });
            }
        }
    }
    Ok(())
}

/// Chunk of a tensor, as this snapshot stores it.
struct Chunk<'a> {
    tensor: usize,
    shard: &'a Rect,
    chunk: u64,
    elements: u64,
    kind: ChunkKind,
    codec: Option<&'a str>,
    bytes: u64,
    stored_bytes: u64,
}

/// Sums over the chunks of a tensor.
#[derive(Debug, Clone, Default)]
struct Totals {
    bytes: u64,
    stored_bytes: u64,
    chunks: u64,
}

#[derive(Default)]
struct TensorColumns {
    step: UInt64Builder,
    tensor: StringBuilder,
    role: StringBuilder,
    param: StringBuilder,
    dtype: StringBuilder,
    shape: Numbers,
    alias_of: StringBuilder,
    elements: UInt64Builder,
    bytes: UInt64Builder,
    stored_bytes: UInt64Builder,
    chunks: UInt64Builder,
}

impl TensorColumns {
    fn push(&mut self, step: u64, directory: &Directory, tensor: usize, total: &Totals) {
        let shape = directory.shape(tensor);
        self.step.append_value(step);
        self.tensor.append_value(directory.name(tensor));
        self.role.append_value(directory.role(tensor));
        self.param.append_value(directory.param(tensor));
        self.dtype.append_value(directory.dtype(tensor).name());
        self.shape.push(&shape);
        self.alias_of.append_option(directory.alias_of(tensor).map(|of| directory.name(of)));
        self.elements.append_value(element_count(&shape).unwrap_or(u64::MAX));
        self.bytes.append_value(total.bytes);
        self.stored_bytes.append_value(total.stored_bytes);
        self.chunks.append_value(total.chunks);
    }

    fn finish(mut self) -> Result<RecordBatch> {
        batch([
            ("step", Arc::new(self.step.finish())),
            ("tensor", Arc::new(self.tensor.finish())),
            ("role", Arc::new(self.role.finish())),
            ("param", Arc::new(self.param.finish())),
            ("dtype", Arc::new(self.dtype.finish())),
            ("shape", self.shape.finish()),
            ("alias_of", Arc::new(self.alias_of.finish())),
            ("elements", Arc::new(self.elements.finish())),
            ("bytes", Arc::new(self.bytes.finish())),
            ("stored_bytes", Arc::new(self.stored_bytes.finish())),
            ("chunks", Arc::new(self.chunks.finish())),
        ])
    }
}

#[derive(Default)]
struct ChunkColumns {
    step: UInt64Builder,
    tensor: StringBuilder,
    role: StringBuilder,
    dtype: StringBuilder,
    shard_offset: Numbers,
    shard_shape: Numbers,
    chunk: UInt64Builder,
    elements: UInt64Builder,
    kind: StringBuilder,
    codec: StringBuilder,
    bytes: UInt64Builder,
    stored_bytes: UInt64Builder,
}

impl ChunkColumns {
    fn push(&mut self, step: u64, directory: &Directory, chunk: &Chunk<'_>) {
        self.step.append_value(step);
        self.tensor.append_value(directory.name(chunk.tensor));
        self.role.append_value(directory.role(chunk.tensor));
        self.dtype.append_value(directory.dtype(chunk.tensor).name());
        self.shard_offset.push(&chunk.shard.offset);
        self.shard_shape.push(&chunk.shard.shape);
        self.chunk.append_value(chunk.chunk);
        self.elements.append_value(chunk.elements);
        self.kind.append_value(chunk.kind.name());
        self.codec.append_option(chunk.codec);
        self.bytes.append_value(chunk.bytes);
        self.stored_bytes.append_value(chunk.stored_bytes);
    }

    fn finish(mut self) -> Result<RecordBatch> {
        batch([
            ("step", Arc::new(self.step.finish())),
            ("tensor", Arc::new(self.tensor.finish())),
            ("role", Arc::new(self.role.finish())),
            ("dtype", Arc::new(self.dtype.finish())),
            ("shard_offset", self.shard_offset.finish()),
            ("shard_shape", self.shard_shape.finish()),
            ("chunk", Arc::new(self.chunk.finish())),
            ("elements", Arc::new(self.elements.finish())),
            ("kind", Arc::new(self.kind.finish())),
            ("codec", Arc::new(self.codec.finish())),
            ("bytes", Arc::new(self.bytes.finish())),
            ("stored_bytes", Arc::new(self.stored_bytes.finish())),
        ])
    }
}

/// Column of lists of numbers.
struct Numbers(ListBuilder<UInt64Builder>);

impl Default for Numbers {
    fn default() -> Self {
        Self(ListBuilder::new(UInt64Builder::new()).with_field(Field::new("item", DataType::UInt64, false)))
    }
}

impl Numbers {
    fn push(&mut self, numbers: &[u64]) {
        self.0.values().append_slice(numbers);
        self.0.append(true);
    }

    fn finish(&mut self) -> ArrayRef {
        Arc::new(self.0.finish())
    }
}

fn batch<const N: usize>(columns: [(&str, ArrayRef); N]) -> Result<RecordBatch> {
    // The same for every snapshot, whether its columns have nulls or not.
    let is_nullable = |name: &str| matches!(name, "alias_of" | "codec");
    let fields: Vec<Field> =
        columns.iter().map(|(name, column)| Field::new(*name, column.data_type().clone(), is_nullable(name))).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns.into_iter().map(|(_, column)| column).collect())
        .map_err(|e| Error::limit(format!("the snapshot is too large for a table: {e}")))
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}
