//! The estimate of the adaptive policy: stored size of a state as a base and as a delta, from a sample of its chunks. The
//! chunks of a parent that the base cache does not keep are read back from the store.
//!
//! The sample is the same for the same state.

use rayon::prelude::*;

use super::base_cache::{BaseCache, BaseChunk};
use super::base_chunks::base_chunks;
use super::input::SaveInput;
use super::layout::StateLayout;
use super::parent::Parent;
use super::pipeline::SavePipeline;
use super::plan::{SavePlan, SaveShard};
use super::schedule::{Unit, Window};
use super::unit::PartnerLink;
use super::window::WindowChunks;
use crate::chain::{DeltaEstimate, ParentChoice, ParentSizes};
use crate::codec::{Candidate, Chunk, Partner, estimate_chunk};
use crate::{Result, boxed, parallel};

/// Largest number of chunks in the sample, however large the state is.
const SAMPLES: u64 = 48;

/// Forms of a state whose sizes are estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forms {
    /// A base, and a delta.
    Both,
    /// A delta. The estimate of the base is 0.
    Delta,
}

/// Estimates the stored size of a state from chunks at equal distances.
#[boxed]
pub(super) async fn estimate(input: &SaveInput<'_>, cache: &BaseCache, forms: Forms) -> Result<DeltaEstimate> {
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
        let of_base = || estimate(&chunk, given.filter(|given| !given.encoded.uses_base));
        let absolute = if forms == Forms::Both { of_base() } else { 0 };
        let delta = match (&bases[index], input.checkable_rows(at)?) {
            (Some(base), _) => estimate(&Chunk { base: Some(base), ..chunk }, given),
            (None, Some(rows)) => estimate(&Chunk { changed_rows: Some(&rows), ..chunk }, given),
            (None, None) if forms == Forms::Both => absolute,
            (None, None) => of_base(),
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
        last_base_delta_bytes: None,
        sampled_chunks: sizes.len() as u64,
    })
}

impl SavePipeline {
    /// Chooses the form of a state: a delta against the previous snapshot or its last base, or a base.
    #[boxed]
    pub(super) async fn choose_parent(
        &self,
        step: u64,
        layout: &StateLayout<'_>,
        previous: &Parent,
    ) -> Result<(DeltaEstimate, ParentChoice)> {
        let mut found = estimate(&self.input(step, layout, Some(previous)), &self.base, Forms::Both).await?;
        let of_previous = ParentSizes { chain_bytes: previous.chain_bytes(), delta_bytes: found.delta_bytes };
        let last_base = previous.last_base().filter(|_| !ParentChoice::is_clear(found.base_bytes, of_previous));
        let of_last_base = match &last_base {
            Some(last_base) => {
                let delta = estimate(&self.input(step, layout, Some(last_base)), &self.base, Forms::Delta).await?;
                found.last_base_delta_bytes = Some(delta.delta_bytes);
                Some(ParentSizes { chain_bytes: last_base.chain_bytes(), delta_bytes: delta.delta_bytes })
            }
            None => None,
        };
        Ok((found, ParentChoice::of(found.base_bytes, of_previous, of_last_base)))
    }
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
    let mut window = Window::default();
    let mut position = 0u64;
    let mut taken = 0;
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
