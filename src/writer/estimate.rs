//! The estimate of the adaptive policy: stored size of a state as a base and as a delta, from a sample of its chunks.
//!
//! The sample is the same for the same state.

use rayon::prelude::*;

use super::base_cache::{BaseCache, BaseChunk};
use super::base_chunks::base_chunks;
use super::input::SaveInput;
use super::plan::{SavePlan, SaveShard};
use super::schedule::{Unit, Window};
use super::unit::PartnerLink;
use super::window::WindowChunks;
use crate::chain::DeltaEstimate;
use crate::codec::{Candidate, Chunk, Partner, estimate_chunk};
use crate::{Result, boxed, parallel};

/// Largest number of chunks in the sample, however large the state is.
const SAMPLES: u64 = 48;

/// Estimates the stored size of a state from chunks at equal distances.
#[boxed]
pub(super) async fn estimate(input: &SaveInput<'_>, cache: &BaseCache) -> Result<DeltaEstimate> {
    let plan = SavePlan::new(input)?;
    let window = sample(&plan);
    let chunks = WindowChunks::of(&plan, &window);
    let bases: Vec<Option<BaseChunk<'_>>> = base_chunks(input, cache, &chunks.refs, &chunks.is_withheld).await?;
    let rounded = chunks.stored_forms(input, &bases)?;
    let registry = input.store.registry();
    let sizes_of = |index: usize, first: usize| {
        let at = chunks.refs[index];
        let partner = |link: &PartnerLink| {
            let position = first + link.position;
            let base = bases[position].as_deref().filter(|_| link.base);
            let dtype = input.tensor(chunks.refs[position]).description.dtype;
            Partner { role: link.role, dtype, data: &rounded[position].data, base, gradient: None }
        };
        let partners: Vec<Partner<'_>> = chunks.partners[index].iter().map(partner).collect();
        let chunk = Chunk { partners: &partners, ..input.codec_chunk(at, &rounded[index].data)? };
        let given = rounded[index].given.as_ref();
        let assigned = input.assigned_codec(input.tensor(at));
        let estimate = |chunk: &Chunk<'_>, given: Option<&Candidate>| estimate_chunk(registry, chunk, given, assigned);
        let absolute = estimate(&chunk, given.filter(|given| !given.encoded.uses_base));
        let delta = match (&bases[index], input.checkable_rows(at)?) {
            (Some(base), _) => estimate(&Chunk { base: Some(base), ..chunk }, given),
            (None, Some(rows)) => estimate(&Chunk { changed_rows: Some(&rows), ..chunk }, given),
            (None, None) => absolute,
        };
        Ok(ChunkSizes { decoded: chunk.data.len() as u64, absolute, delta })
    };
    let encoded = chunks.units.par_iter().flat_map_iter(|unit| {
        let first = unit.start;
        unit.clone().filter(|&index| chunks.is_encoded[index]).map(move |index| (index, first))
    });
    let sizes: Vec<ChunkSizes> = parallel::run(|| encoded.map(|(index, first)| sizes_of(index, first)).collect::<Result<_>>())?;
    let sum = |bytes: fn(&ChunkSizes) -> u64| sizes.iter().map(|sizes| u128::from(bytes(sizes))).sum::<u128>();
    let decoded = sum(|sizes| sizes.decoded).max(1);
    let scale = |bytes: u128| u64::try_from(bytes * u128::from(input.layout.tensor_bytes) / decoded).unwrap_or(u64::MAX);
    Ok(DeltaEstimate {
        base_bytes: scale(sum(|sizes| sizes.absolute)),
        delta_bytes: scale(sum(|sizes| sizes.delta)),
        sampled_chunks: sizes.len() as u64,
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

/// Chunks at equal distances in the state: those that hold the middle of each of [`SAMPLES`] equal parts. Chunks of one
/// unit stay together.
fn sample(plan: &SavePlan) -> Window {
    let bytes_of = |shard: &SaveShard, chunk: u64| {
        let range = shard.grid.bytes(chunk);
        range.end.saturating_sub(range.start)
    };
    let units = || plan.windows.iter().flat_map(|window| &window.units);
    let total: u64 = units().flat_map(|unit| unit.shards.iter().map(|&shard| bytes_of(&plan.shards[shard], unit.chunk))).sum();
    let (mut window, mut position, mut taken) = (Window::default(), 0u64, 0);
    let target = |nth: u64| (u128::from(total) * u128::from(2 * nth + 1) / u128::from(2 * SAMPLES)) as u64;
    for unit in units() {
        let mut shards = Vec::new();
        for &shard in &unit.shards {
            position += bytes_of(&plan.shards[shard], unit.chunk);
            if taken < SAMPLES && target(taken) < position {
                shards.push(shard);
                while taken < SAMPLES && target(taken) < position {
                    taken += 1;
                }
            }
        }
        if !shards.is_empty() {
            window.units.push(Unit { shards, chunk: unit.chunk });
        }
    }
    window
}
