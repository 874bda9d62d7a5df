//! The estimate of the adaptive policy: stored size of a state as a base and as a delta, from a sample of its chunks.
//!
//! The sample is the same for the same state, so two runs over the same bytes decide alike.

use std::borrow::Cow;

use rayon::prelude::*;

use super::base_cache::BaseCache;
use super::base_chunks::{PartnerChunk, base_chunks, partner_chunks};
use super::input::{ChunkRef, SaveInput};
use super::rounding::stored_forms;
use crate::chain::DeltaEstimate;
use crate::codec::{Chunk, Partner, estimate_chunk};
use crate::tensor::ChunkGrid;
use crate::{Result, boxed, parallel};

/// Largest number of chunks in the sample, however large the state is.
const SAMPLES: u64 = 48;

/// Estimates the stored size of a state from chunks at equal distances.
#[boxed]
pub(super) async fn estimate(input: &SaveInput<'_>, cache: &BaseCache) -> Result<DeltaEstimate> {
    let chunks = sample(input)?;
    let bases: Vec<Option<Cow<'_, [u8]>>> = base_chunks(input, cache, &chunks).await?;
    let rounded = stored_forms(input, &chunks, &bases)?;
    let partners = partner_chunks(input, cache, &chunks).await?;
    let registry = input.store.registry();
    let sizes = chunks.par_iter().zip(&rounded).zip(bases.par_iter().zip(&partners)).map(|((&at, rounded), (base, partners))| {
        let partners: Vec<Partner<'_>> = partners.iter().map(PartnerChunk::as_partner).collect();
        let chunk = Chunk { partners: &partners, ..input.codec_chunk(at, &rounded.data)? };
        let given = rounded.given.as_ref();
        let absolute = estimate_chunk(registry, &chunk, given.filter(|given| !given.encoded.uses_base));
        let changed_rows = input.changed_rows(at)?;
        let delta = match (base, changed_rows) {
            (Some(base), _) => estimate_chunk(registry, &Chunk { base: Some(base), ..chunk }, given),
            (None, Some(rows)) => estimate_chunk(registry, &Chunk { changed_rows: Some(&rows), ..chunk }, given),
            (None, None) => absolute,
        };
        Ok(ChunkSizes { decoded: chunk.data.len() as u64, absolute, delta })
    });
    let sizes: Vec<ChunkSizes> = parallel::run(|| sizes.collect::<Result<_>>())?;
    let sum = |bytes: fn(&ChunkSizes) -> u64| sizes.iter().map(|sizes| u128::from(bytes(sizes))).sum::<u128>();
    let decoded = sum(|sizes| sizes.decoded).max(1);
    let scale = |bytes: u128| u64::try_from(bytes * u128::from(input.layout.tensor_bytes) / decoded).unwrap_or(u64::MAX);
    Ok(DeltaEstimate {
        base_bytes: scale(sum(|sizes| sizes.absolute)),
        delta_bytes: scale(sum(|sizes| sizes.delta)),
        sampled_chunks: chunks.len() as u64,
    })
}

/// Sizes of a chunk, in bytes.
struct ChunkSizes {
    decoded: u64,
    /// Stored without a base.
    absolute: u64,
    /// Stored as a delta.
    delta: u64,
}

/// Chunks at equal distances in the state: those that hold the middle of each of [`SAMPLES`] equal parts.
fn sample(input: &SaveInput<'_>) -> Result<Vec<ChunkRef>> {
    let tensors = &input.layout.tensors;
    let total: u64 = tensors.iter().flat_map(|tensor| &tensor.shards).map(|view| view.data().len() as u64).sum();
    let (mut chunks, mut position, mut taken) = (Vec::new(), 0u64, 0);
    let target = |nth: u64| (u128::from(total) * u128::from(2 * nth + 1) / u128::from(2 * SAMPLES)) as u64;
    for (tensor, entry) in tensors.iter().enumerate() {
        for (shard, view) in entry.shards.iter().enumerate() {
            let grid = ChunkGrid::new(view.dtype(), &view.rect().shape)?;
            let mut base = None;
            for chunk in 0..grid.chunk_count() {
                let bytes = grid.bytes(chunk);
                position += bytes.end - bytes.start;
                if taken < SAMPLES && target(taken) < position {
                    let base = *base.get_or_insert_with(|| input.parent.and_then(|parent| parent.find(view)));
                    chunks.push(ChunkRef { tensor, shard, chunk, base });
                    while taken < SAMPLES && target(taken) < position {
                        taken += 1;
                    }
                }
            }
        }
    }
    Ok(chunks)
}
