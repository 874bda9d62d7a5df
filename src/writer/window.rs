//! Encoding of a window: loads the base chunks and rounded forms of its units, then encodes the units on all cores.

use std::ops::Range;

use rayon::prelude::*;

use super::base_cache::{BaseCache, BaseChunk, NextBase};
use super::base_chunks::base_chunks;
use super::cask_writer::EncodeOptions;
use super::changed_rows::check_changed_rows;
use super::choices::Choices;
use super::input::{ChunkRef, SaveInput};
use super::plan::SavePlan;
use super::rounding::{stored_form, stored_form_alone};
use super::schedule::Window;
use super::unit::{PartnerLink, Standalone, UnitChunk, UnitResult, encode_unit};
use crate::codec::{Chunk, Preferred};
use crate::precision::Rounded;
use crate::{Result, boxed, parallel};

/// A window, encoded and not yet in a cask: the stored form and the result of each chunk, by unit and member.
pub(super) struct EncodedWindow<'a>(Vec<Vec<Option<(Rounded<'a>, UnitResult)>>>);

impl<'a> EncodedWindow<'a> {
    pub(super) fn take(&mut self, unit: usize, member: usize) -> Option<(Rounded<'a>, UnitResult)> {
        self.0.get_mut(unit)?.get_mut(member)?.take()
    }
}

/// Encodes a window. Reads the input and the base cache; changes nothing.
#[boxed]
pub(super) async fn encode_window<'a>(
    input: &SaveInput<'a>,
    cache: &BaseCache,
    options: EncodeOptions,
    next_base: Option<&NextBase>,
    chunks: WindowChunks,
) -> Result<EncodedWindow<'a>> {
    // Encoding a window is long work without an await. A caller that selects on something else, such as Ctrl-C, gets a
    // turn here.
    tokio::task::yield_now().await;
    let registry = input.store.registry();
    let bases: Vec<Option<BaseChunk<'_>>> = base_chunks(input, cache, &chunks.refs).await?;
    let mut rounded: Vec<Rounded<'a>> = chunks.stored_forms(input, &bases)?;
    check_changed_rows(input, &chunks.refs, &rounded, &bases).await?;
    let standalone = match next_base.is_some_and(NextBase::keeps_encoded) {
        true => Standalone::Wanted,
        false => Standalone::NotWanted,
    };
    let encode = |range: &Range<usize>| {
        let changed_rows: Vec<Option<Vec<u64>>> = range
            .clone()
            .map(|index| if bases[index].is_none() { input.changed_rows(chunks.refs[index]) } else { Ok(None) })
            .collect::<Result<_>>()?;
        let mut unit = Vec::with_capacity(range.len());
        for (index, changed_rows) in range.clone().zip(&changed_rows) {
            let (at, form) = (chunks.refs[index], &rounded[index]);
            let chunk =
                Chunk { base: bases[index].as_deref(), changed_rows: changed_rows.as_deref(), ..input.codec_chunk(at, &form.data)? };
            let (partners, is_encoded) = (chunks.partners[index].clone(), chunks.is_encoded[index]);
            let (rounded, preferred) = (form.given.as_ref(), chunks.preferred[index].clone());
            unit.push(UnitChunk { place: input.place(at), chunk, rounded, partners, is_encoded, preferred });
        }
        encode_unit(registry, options, standalone, &unit)
    };
    let results: Vec<Vec<Option<UnitResult>>> = parallel::run(|| chunks.units.par_iter().map(encode).collect::<Result<_>>())?;
    let mut forms = rounded.drain(..);
    let with_form = |results: Vec<Option<UnitResult>>| results.into_iter().map(|result| Some((forms.next()?, result?))).collect();
    Ok(EncodedWindow(results.into_iter().map(with_form).collect()))
}

/// Chunks of a window, unit by unit: the members of each unit, then partners from other units.
pub(super) struct WindowChunks {
    pub refs: Vec<ChunkRef>,
    pub partners: Vec<Vec<PartnerLink>>,
    /// Whether a chunk is encoded, or is only a partner.
    pub is_encoded: Vec<bool>,
    /// Codecs to try first.
    preferred: Vec<Option<Preferred>>,
    /// Chunks of each unit, as positions in the lists above.
    pub units: Vec<Range<usize>>,
}

impl WindowChunks {
    pub(super) fn of(plan: &SavePlan, window: &Window) -> Self {
        let mut all = Self { refs: Vec::new(), partners: Vec::new(), is_encoded: Vec::new(), preferred: Vec::new(), units: Vec::new() };
        for unit in &window.units {
            let start = all.refs.len();
            let mut shards = unit.shards.clone();
            for &shard in &unit.shards {
                let mut links = Vec::new();
                for partner in &plan.shards[shard].partners {
                    let position = shards.iter().position(|&known| known == partner.shard).unwrap_or_else(|| {
                        shards.push(partner.shard);
                        shards.len() - 1
                    });
                    links.push(PartnerLink { role: partner.role, position, base: partner.base });
                }
                all.partners.push(links);
            }
            all.refs.extend(shards.iter().map(|&shard| plan.shards[shard].chunk(unit.chunk)));
            all.partners.resize(all.refs.len(), Vec::new());
            all.is_encoded.extend((0..shards.len()).map(|position| position < unit.shards.len()));
            all.preferred.resize(all.refs.len(), None);
            all.units.push(start..all.refs.len());
        }
        all
    }

    /// Tries first the codecs that were chosen for similar chunks.
    pub(super) fn prefer(mut self, plan: &SavePlan, window: &Window, choices: &mut Choices) -> Self {
        for (unit, range) in window.units.iter().zip(&self.units) {
            for (&shard, index) in unit.shards.iter().zip(range.clone()) {
                self.preferred[index] = choices.next(&plan.shards[shard].family);
            }
        }
        self
    }

    /// The form in which each chunk will be stored, computed on all cores.
    pub(super) fn stored_forms<'a>(&self, input: &SaveInput<'a>, bases: &[Option<BaseChunk<'_>>]) -> Result<Vec<Rounded<'a>>> {
        let forms = self.refs.par_iter().zip(bases).zip(&self.is_encoded).map(|((&at, base), &is_encoded)| match is_encoded {
            true => stored_form(input, at, base.as_deref()),
            false => stored_form_alone(input, at),
        });
        parallel::run(|| forms.collect())
    }
}
