//! Rounding errors of a snapshot, from the blobs that its writer added.

use std::collections::BTreeMap;

use super::Snapshot;
use crate::precision::ChunkRounding;
use crate::tensor::ChunkGrid;
use crate::wire::{ErrorsFile, ShardErrors};
use crate::{Error, Result, RoundingReport, TensorRounding, boxed};

impl Snapshot {
    /// Returns the rounding errors of the tensors that were saved with reduced precision, ordered by name. Empty if
    /// nothing was rounded. Reads no tensor bytes.
    ///
    /// ```
    /// use tensorcask::{Dtype, Metadata, Policy, Precision, TensorView, WriterOptions, blocking::Store};
    /// let store = Store::open("memory://rounding-example")?;
    /// let options = WriterOptions { precision: Precision::near(), policy: Policy::Full, ..WriterOptions::default() };
    /// let values: Vec<u8> = (1..1000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
    /// let state = [TensorView::new("optim.exp_avg.w", Dtype::F32, &[999], &values)?];
    /// store.writer_with(options)?.save(1, &state, &[], &Metadata::default())?;
    /// let errors = store.snapshot(1)?.rounding()?;
    /// assert_eq!((errors[0].name.as_str(), errors[0].setting.as_str()), ("optim.exp_avg.w", "loguniform:16"));
    /// assert!(errors[0].total.max_relative < 0.022);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub async fn rounding(&self) -> Result<Vec<TensorRounding>> {
        let directory = &self.chain.newest().directory;
        let mut tensors: BTreeMap<String, TensorRounding> = BTreeMap::new();
        for shard in shard_errors(self).await? {
            let Some(number) = directory.find(&shard.tensor) else { continue };
            let dtype = directory.dtype(number);
            let role = directory.role(number);
            let found = tensors.entry(shard.tensor.clone()).or_insert_with(|| TensorRounding {
                name: shard.tensor.clone(),
                role: role.to_owned(),
                setting: shard.setting.clone(),
                total: RoundingReport::default(),
                chunks: vec![],
            });
            let bad = |e: Error| e.tensor(&shard.tensor).clause("errors 2");
            let grid = ChunkGrid::new(dtype, &shard.shape).map_err(bad)?;
            for chunk in &shard.chunks {
                if chunk.chunk >= grid.chunk_count() {
                    return Err(bad(Error::corrupt(format!("errors of chunk {} of {}", chunk.chunk, grid.chunk_count()))));
                }
                let elements = grid.elements(chunk.chunk);
                let report = RoundingReport::of_chunk(chunk, elements.end.saturating_sub(elements.start));
                found.total = found.total.and(report);
                found.chunks.push(ChunkRounding { offset: shard.offset.clone(), chunk: chunk.chunk, report });
            }
        }
        Ok(tensors.into_values().collect())
    }

    /// Refuses a snapshot with a rounded tensor whose relative error exceeds `bound`.
    pub async fn check_rounding(&self, bound: f64) -> Result<()> {
        match self.rounding().await?.into_iter().find(|tensor| tensor.total.max_relative > bound) {
            None => Ok(()),
            Some(TensorRounding { name, setting, total, .. }) => Err(Error::invalid(format!(
                "step {} was saved with {setting}: its greatest relative error is {:.2e}, above the bound of {bound}; use another step or a higher bound",
                self.step(),
                total.max_relative
            ))
            .tensor(name)),
        }
    }
}

/// Reads the error reports that the ranks wrote for their shards.
#[boxed]
pub(crate) async fn shard_errors(snapshot: &Snapshot) -> Result<Vec<ShardErrors>> {
    let mut shards = Vec::new();
    for (rank, name) in snapshot.blobs().await?.into_iter().filter(|(_, name)| name == ErrorsFile::BLOB) {
        let bytes = snapshot.read_blob(rank, &name).await?;
        let file = ErrorsFile::decode(&bytes, snapshot.chain.store.limits());
        shards.extend(file.map_err(|e| e.object(format!("blob `{name}` of rank {rank}, step {}", snapshot.step())))?.shards);
    }
    Ok(shards)
}
