//! Statistics of a snapshot, from the blobs that its writer added.

use super::{Inspection, Snapshot};
use crate::{ChunkStatistics, Error, Result, boxed};

impl Inspection<'_> {
    /// Returns the statistics of each chunk, ordered by tensor, shard and chunk. Empty if the snapshot was saved without
    /// statistics. Reads no tensor bytes.
    ///
    /// ```
    /// use tensorcask::{Dtype, Metadata, TensorView, WriterOptions, blocking::Store};
    /// let store = Store::open("memory://statistics-example")?;
    /// let values: Vec<u8> = [1.5, f32::NAN, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
    /// let state = [TensorView::new("w", Dtype::F32, &[3], &values)?];
    /// let options = WriterOptions { statistics: true, ..WriterOptions::default() };
    /// store.writer_with(options)?.save(1, &state, &[], &Metadata::default())?;
    /// let found = store.snapshot(1)?.statistics()?;
    /// let values = found[0].values.unwrap();
    /// assert_eq!((values.nan, values.min, values.sum), (1, Some(-2.0), Some(-0.5)));
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    #[boxed]
    pub async fn statistics(&self) -> Result<Vec<ChunkStatistics>> {
        let snapshot = self.snapshot;
        let directory = &snapshot.chain.newest().directory;
        let limits = snapshot.chain.store.limits();
        let mut rows = Vec::new();
        for (rank, name) in snapshot.blobs().await?.into_iter().filter(|(_, name)| name == ChunkStatistics::BLOB) {
            let bytes = snapshot.read_blob(rank, &name).await.map_err(|e| unreadable(snapshot, rank, e))?;
            let found = ChunkStatistics::decode(bytes.into(), limits).map_err(|e| unreadable(snapshot, rank, e))?;
            rows.extend(found.into_iter().filter(|row| directory.find(&row.tensor).is_some()));
        }
        rows.sort_by(|a, b| a.key().cmp(&b.key()));
        Ok(rows)
    }
}

/// The error of a damaged blob of statistics. Names the blob unless the error names an object already.
fn unreadable(snapshot: &Snapshot, rank: u32, error: Error) -> Error {
    if !error.is_unreadable() {
        return error;
    }
    let step = snapshot.step();
    let message = format!(
        "the statistics of step {step} cannot be read: {}. The tensors of the step are not affected: `tensorcask verify` checks them. \
         Only a new save brings statistics back",
        error.message()
    );
    let blob = || format!("blob `{}` of rank {rank}, step {step}", ChunkStatistics::BLOB);
    let object = error.object_name().map_or_else(blob, str::to_owned);
    let mut located = Error::new(error.kind(), message).object(object);
    if let Some(tensor) = error.tensor_name() {
        located = located.tensor(tensor);
    }
    if let Some(clause) = error.clause_name() {
        located = located.clause(clause);
    }
    located.source(error)
}
