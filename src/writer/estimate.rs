//! What a delta and a base of a state would take, from a sample of its chunks.

use rayon::prelude::*;

use super::base::Parent;
use super::layout::StateLayout;
use super::save::{Job, Saver, borrowed, chunk_to_encode};
use crate::Result;
use crate::boxed;
use crate::chain::Estimate;
use crate::codec::{Chunk, estimate_chunk};
use crate::parallel;
use crate::precision::Rounded;
use crate::tensor::ChunkGrid;

/// Chunks that are looked at, whatever the size of the state.
const SAMPLES: u64 = 48;

/// Estimates a save from chunks that lie at equal distances in the state: the same for the same bytes.
#[boxed]
pub(super) async fn estimate(saver: &Saver, layout: &StateLayout<'_>, parent: &Parent) -> Result<Estimate> {
    let jobs = sample(layout, parent)?;
    let bases = saver.bases(&jobs, layout, Some(parent)).await?;
    let rounded = jobs.par_iter().zip(&bases).map(|(job, base)| saver.rounded(*job, layout, base.as_deref()));
    let rounded: Vec<Rounded<'_>> = parallel::run(|| rounded.collect::<Result<_>>())?;
    let partners = saver.partners(&jobs, layout, Some(parent)).await?;
    let registry = saver.store.registry();
    let sizes = jobs.par_iter().zip(&rounded).zip(bases.par_iter().zip(&partners)).map(|((job, rounded), (base, partners))| {
        let (partners, given) = (borrowed(partners), rounded.given.as_ref());
        let chunk = chunk_to_encode(&layout.tensors[job.tensor], *job, &rounded.data, None, &partners)?;
        let absolute = estimate_chunk(registry, &chunk, given.filter(|given| !given.encoded.uses_base));
        let rows = saver.changed_rows(*job, layout, Some(parent))?;
        let delta = match (base, rows) {
            (Some(base), _) => estimate_chunk(registry, &Chunk { base: Some(base), ..chunk }, given),
            (None, Some(rows)) => estimate_chunk(registry, &Chunk { changed_rows: Some(&rows), ..chunk }, given),
            (None, None) => absolute,
        };
        Ok([chunk.data.len() as u64, absolute, delta])
    });
    let sizes: Vec<[u64; 3]> = parallel::run(|| sizes.collect::<Result<_>>())?;
    let sum = |column: usize| sizes.iter().map(|row| u128::from(row[column])).sum::<u128>();
    let scale = |bytes: u128| u64::try_from(bytes * u128::from(layout.tensor_bytes) / sum(0).max(1)).unwrap_or(u64::MAX);
    Ok(Estimate { base_bytes: scale(sum(1)), delta_bytes: scale(sum(2)), sampled_chunks: jobs.len() as u64 })
}

fn sample(layout: &StateLayout<'_>, parent: &Parent) -> Result<Vec<Job>> {
    let total: u64 = layout.tensors.iter().flat_map(|tensor| &tensor.shards).map(|view| view.data().len() as u64).sum();
    let (mut jobs, mut position, mut taken) = (Vec::new(), 0u64, 0);
    // The middle of each of so many equal parts.
    let target = |nth: u64| (u128::from(total) * u128::from(2 * nth + 1) / u128::from(2 * SAMPLES)) as u64;
    for (tensor, entry) in layout.tensors.iter().enumerate() {
        for (shard, view) in entry.shards.iter().enumerate() {
            let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
            let mut base = None;
            for chunk in 0..grid.chunk_count() {
                let bytes = grid.bytes(chunk);
                position += bytes.end - bytes.start;
                if taken < SAMPLES && target(taken) < position {
                    let base = *base.get_or_insert_with(|| parent.find(view));
                    jobs.push(Job { tensor, shard, chunk, base });
                    while taken < SAMPLES && target(taken) < position {
                        taken += 1;
                    }
                }
            }
        }
    }
    Ok(jobs)
}
