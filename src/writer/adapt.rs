//! The precision `auto`: measures a sample of the state at hand, and finds the decision that the newest earlier snapshot
//! records. [`PrecisionDecision`] has the rule.
//!
//! The sample is at most [`SAMPLES`] chunks of the weights, and as many of the second moments with their first moments: those
//! that hold the middles of equal parts. So it depends on names, types and shapes alone, and takes the same time for any
//! state that is large. The weights are the masters, or the model's own weights in a state without masters.

use std::cmp::Reverse;

use rayon::prelude::*;
use tensorcask_kernels::errors::updates;
use tensorcask_kernels::sketch::Sketch;

use super::input::{ChunkRef, SaveInput};
use super::layout::StateLayout;
use super::pipeline::SavePipeline;
use super::rounding::{stored_form, stored_form_alone};
use crate::commit::Log;
use crate::precision::{PrecisionDecision, Profile, SampledErrors, StateSample};
use crate::tensor::ChunkGrid;
use crate::wire::Id;
use crate::{Dtype, Precision, Result, boxed, parallel};

/// Largest number of chunks in the sample of the weights, and in that of the moments.
const SAMPLES: u64 = 32;
/// Number of earlier snapshots that are asked for a decision. A snapshot that was saved with another precision has none.
const MOST_EARLIER: usize = 8;

impl SavePipeline {
    /// Sets the precision of the next save: the one of the options, or with `auto` what the state and the decision of an
    /// earlier snapshot demand. Returns the decision; `None` without `auto`.
    #[boxed]
    pub(super) async fn adapt(&mut self, log: &mut Log, step: u64, layout: &StateLayout<'_>) -> Result<Option<PrecisionDecision>> {
        if !self.options.precision.is_auto() {
            return Ok(None);
        }
        let earlier = match earlier_decision(log, step).await? {
            None => self.options.earlier_precision.clone().filter(|(earlier, _)| *earlier < step),
            found => found,
        };
        let profiles = [Profile::Near, Profile::Compact].map(|profile| self.options.precision.with_profile(profile));
        let sample = sample_of(&self.input(step, layout, None), &profiles)?;
        let decision = PrecisionDecision::decide(earlier.as_ref().map(|(step, decision)| (*step, decision)), step, sample.as_ref());
        tracing::info!(step, "precision auto: {decision}");
        self.set_precision(self.options.precision.with_profile(decision.profile));
        Ok(Some(decision))
    }
}

/// Step and decision of the newest snapshot before `step` that records one.
pub(super) async fn earlier_decision(log: &mut Log, step: u64) -> Result<Option<(u64, PrecisionDecision)>> {
    let mut earlier: Vec<(u64, Id)> =
        log.state().live().filter(|record| record.step < step).map(|record| (record.step, record.id)).collect();
    earlier.sort_by_key(|(step, _)| Reverse(*step));
    for (step, id) in earlier.into_iter().take(MOST_EARLIER) {
        // A damaged manifest says nothing.
        let _damaged = log.summarise(Some(&[id])).await?;
        let summary = log.state().by_id(id).and_then(|record| record.summary.as_ref());
        if let Some(decision) = summary.and_then(|summary| PrecisionDecision::of(&summary.user)) {
            return Ok(Some((step, decision)));
        }
    }
    Ok(None)
}

/// Measures a sample of a state, as it is and as `near` and `compact` would store it. `None` without finite weights.
fn sample_of(input: &SaveInput<'_>, profiles: &[Precision; 2]) -> Result<Option<StateSample>> {
    let tensors = || input.layout.tensors.iter().zip(0usize..).filter(|(tensor, _)| !tensor.shards.is_empty());
    let is_master = |dtype: Dtype, role: &str| role == "master" && dtype == Dtype::F32;
    let has_masters = tensors().any(|(tensor, _)| is_master(tensor.description.dtype, &tensor.description.role));
    let is_weight = |dtype: Dtype, role: &str| match has_masters {
        true => is_master(dtype, role),
        false => role == "model" && Sketch::reads(dtype.number_format()),
    };
    let numbers = |wanted: &dyn Fn(Dtype, &str) -> bool| -> Vec<usize> {
        tensors().filter(|(tensor, _)| wanted(tensor.description.dtype, &tensor.description.role)).map(|(_, number)| number).collect()
    };
    let weights = numbers(&is_weight);
    let moments = numbers(&|dtype, role| role == "exp_avg_sq" && dtype == Dtype::F32);
    let inputs = profiles.each_ref().map(|precision| SaveInput { precision, ..*input });
    let chunks = sample(input, &weights)?;
    let of_weights = || chunks.par_iter().enumerate().map(|(number, &at)| weights_of(&inputs, at, number as u64));
    let of_weights: Vec<SampledChunk> = parallel::run(|| of_weights().collect::<Result<_>>())?;
    let all = of_weights.iter().fold(SampledChunk::EMPTY, |all, chunk| all.and(chunk));
    if chunks.is_empty() || !all.weights.squares.is_finite() {
        return Ok(None);
    }
    let chunks = sample(input, &moments)?;
    let of_moments = || chunks.par_iter().map(|&at| updates_of(&inputs, at));
    let of_moments: Vec<[[f64; 2]; 2]> = parallel::run(|| of_moments().collect::<Result<_>>())?;
    let errors = |profile: usize| {
        let [error, size] = of_moments.iter().fold([0.0; 2], |[error, size], chunk| [error + chunk[profile][0], size + chunk[profile][1]]);
        let update = (size > 0.0 && error.is_finite()).then(|| (error / size).sqrt());
        SampledErrors { weight_squares: all.squares[profile], update }
    };
    Ok(Some(StateSample { layout: checksum(input, &weights), weights: all.weights, near: errors(0), compact: errors(1) }))
}

/// A chunk of the weights: its sketch, and the sums of squared rounding errors of both profiles.
struct SampledChunk {
    weights: Sketch,
    squares: [f64; 2],
}

impl SampledChunk {
    const EMPTY: Self = Self { weights: Sketch::EMPTY, squares: [0.0; 2] };

    fn and(self, other: &Self) -> Self {
        let squares = [self.squares[0] + other.squares[0], self.squares[1] + other.squares[1]];
        Self { weights: self.weights.and(&other.weights), squares }
    }
}

fn weights_of(inputs: &[SaveInput<'_>; 2], at: ChunkRef, number: u64) -> Result<SampledChunk> {
    let [near, _] = inputs;
    let original = near.original(at)?;
    let dtype = near.tensor(at).description.dtype;
    let mut chunk = SampledChunk::EMPTY;
    chunk.weights.add(number, dtype.number_format(), original);
    for (input, squares) in inputs.iter().zip(&mut chunk.squares) {
        *squares = stored_form(input, at, None)?.errors.map_or(0.0, |errors| errors.squares);
    }
    Ok(chunk)
}

/// Sums of squared errors of Adam's update, and of squared updates, for both profiles. Zeros without a first moment.
fn updates_of(inputs: &[SaveInput<'_>; 2], second: ChunkRef) -> Result<[[f64; 2]; 2]> {
    let mut sums = [[0.0; 2]; 2];
    let [near, _] = inputs;
    let partner = near.layout.partner(second.tensor, "exp_avg", near.view(second).rect());
    let Some((tensor, shard)) = partner else { return Ok(sums) };
    let first = ChunkRef { tensor, shard, ..second };
    if near.tensor(first).description.dtype != Dtype::F32 {
        return Ok(sums);
    }
    for (input, sums) in inputs.iter().zip(&mut sums) {
        let stored = [stored_form_alone(input, first)?.data, stored_form_alone(input, second)?.data];
        *sums = updates([input.original(first)?, &stored[0]], [input.original(second)?, &stored[1]]);
    }
    Ok(sums)
}

/// The chunks of these tensors that hold the middle of each of [`SAMPLES`] equal parts.
fn sample(input: &SaveInput<'_>, tensors: &[usize]) -> Result<Vec<ChunkRef>> {
    let mut grids: Vec<(ChunkRef, ChunkGrid)> = Vec::new();
    for &tensor in tensors {
        for shard in 0..input.layout.tensors[tensor].shards.len() {
            let first = ChunkRef { tensor, shard, chunk: 0, base: None };
            grids.push((first, input.grid(first)?));
        }
    }
    let bytes_of = |grid: &ChunkGrid, chunk: u64| {
        let range = grid.bytes(chunk);
        range.end.saturating_sub(range.start)
    };
    let chunks = || grids.iter().flat_map(|(first, grid)| (0..grid.chunk_count()).map(move |chunk| (first, grid, chunk)));
    let total: u64 = chunks().map(|(_, grid, chunk)| bytes_of(grid, chunk)).fold(0, u64::saturating_add);
    let middle = |nth: u64| (u128::from(total) * u128::from(2 * nth + 1) / u128::from(2 * SAMPLES)) as u64;
    let mut found = Vec::new();
    let mut position = 0u64;
    let mut taken = 0;
    for (first, grid, chunk) in chunks() {
        position = position.saturating_add(bytes_of(grid, chunk));
        if taken < SAMPLES && middle(taken) < position {
            found.push(ChunkRef { chunk, ..*first });
            while taken < SAMPLES && middle(taken) < position {
                taken += 1;
            }
        }
    }
    Ok(found)
}

/// Checksum of the names, types, shapes and shards of these tensors.
fn checksum(input: &SaveInput<'_>, tensors: &[usize]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for tensor in tensors.iter().filter_map(|&tensor| input.layout.tensors.get(tensor)) {
        let shards: Vec<_> = tensor.shards.iter().map(|view| view.rect()).collect();
        let description = &tensor.description;
        hasher.update(format!("{} {} {:?} {shards:?}\n", description.name, description.dtype.name(), description.shape).as_bytes());
    }
    hasher.finalize()
}
