//! Encoding of a window: loads the base chunks and rounded forms of its units, then encodes the units on all cores.
//! Bases that no codec is likely to use are not loaded.

use std::collections::BTreeSet;
use std::ops::Range;

use rayon::prelude::*;

use super::base_cache::{BaseCache, BaseChunk, NextBase};
use super::base_chunks::{base_chunks, base_crcs};
use super::cask_writer::EncodeOptions;
use super::choices::Choices;
use super::input::{ChunkRef, SaveInput};
use super::plan::SavePlan;
use super::rounding::{stored_form, stored_form_alone};
use super::row_check::check_changed_rows;
use super::schedule::Window;
use super::unit::{PartnerLink, Standalone, UnitChunk, UnitResult, encode_unit};
use crate::codec::{ChosenBy, Chunk, Preferred, Trial};
use crate::precision::{Rounded, Setting};
use crate::{Result, boxed, parallel};

/// A window, encoded and not yet in a cask: the stored form and the result of each chunk, by unit and member.
pub(super) struct EncodedWindow<'a>(Vec<Vec<Option<(Rounded<'a>, UnitResult)>>>);

impl<'a> EncodedWindow<'a> {
    pub(super) fn take(&mut self, unit: usize, member: usize) -> Option<(Rounded<'a>, UnitResult)> {
        self.0.get_mut(unit)?.get_mut(member)?.take()
    }
}

/// Encodes a window. Reads the input and the base cache; changes nothing.
///
/// First without the bases that no codec is likely to use. A unit that turns out to need them is encoded again with all
/// bases.
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
    let mut bases: Vec<Option<BaseChunk<'_>>> = base_chunks(input, cache, &chunks.refs, &chunks.is_withheld).await?;
    let mut rounded: Vec<Rounded<'a>> = chunks.stored_forms(input, &bases)?;
    check_changed_rows(input, &chunks.refs, &rounded, &bases).await?;
    let standalone = match next_base.is_some_and(NextBase::keeps_encoded) {
        true => Standalone::Wanted,
        false => Standalone::NotWanted,
    };
    let encode = |range: &Range<usize>, bases: &[Option<BaseChunk<'_>>]| {
        let changed_rows: Vec<Option<Vec<u64>>> = range
            .clone()
            .map(|index| if bases[index].is_none() { input.checkable_rows(chunks.refs[index]) } else { Ok(None) })
            .collect::<Result<_>>()?;
        let mut unit = Vec::with_capacity(range.len());
        for (index, changed_rows) in range.clone().zip(&changed_rows) {
            let at = chunks.refs[index];
            let form = &rounded[index];
            let chunk =
                Chunk { base: bases[index].as_deref(), changed_rows: changed_rows.as_deref(), ..input.codec_chunk(at, &form.data)? };
            let partners = chunks.partners[index].clone();
            let is_encoded = chunks.is_encoded[index];
            let rounded = form.given.as_ref();
            let trial = chunks.trials[index].clone();
            let assigned = input.assigned_codec(input.tensor(at));
            unit.push(UnitChunk { place: input.place(at), chunk, rounded, assigned, partners, is_encoded, trial });
        }
        encode_unit(input.store.registry(), options, standalone, &unit)
    };
    let first = || chunks.units.par_iter().map(|unit| encode(unit, &bases)).collect::<Result<_>>();
    let mut results: Vec<Vec<Option<UnitResult>>> = parallel::run(first)?;
    let again = chunks.units_to_encode_again(input, cache, &results).await?;
    if !again.is_empty() {
        let mut is_withheld = vec![true; bases.len()];
        for index in again.iter().flat_map(|&unit| chunks.units[unit].clone()) {
            is_withheld[index] = !chunks.is_withheld[index];
        }
        let missing = base_chunks(input, cache, &chunks.refs, &is_withheld).await?;
        for (base, found) in bases.iter_mut().zip(missing).filter(|(_, found)| found.is_some()) {
            *base = found;
        }
        let second = || again.par_iter().map(|&unit| encode(&chunks.units[unit], &bases)).collect::<Result<Vec<_>>>();
        for (unit, result) in again.iter().zip(parallel::run(second)?) {
            results[*unit] = result;
        }
    }
    let mut forms = rounded.drain(..);
    let with_form = |results: Vec<Option<UnitResult>>| results.into_iter().map(|result| Some((forms.next()?, result?))).collect();
    Ok(EncodedWindow(results.into_iter().map(with_form).collect()))
}

/// Chunks of a window, unit by unit: the members of each unit, then partners from other units.
#[derive(Default)]
pub(super) struct WindowChunks {
    pub refs: Vec<ChunkRef>,
    pub partners: Vec<Vec<PartnerLink>>,
    /// Whether a chunk is encoded, or is only a partner.
    pub is_encoded: Vec<bool>,
    /// Codecs to try.
    trials: Vec<Trial>,
    /// Whether no codec is likely to use the base of a chunk.
    pub is_withheld: Vec<bool>,
    /// Chunks of each unit, as positions in the lists above.
    pub units: Vec<Range<usize>>,
}

impl WindowChunks {
    pub(super) fn of(plan: &SavePlan, window: &Window) -> Self {
        let mut all = Self::default();
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
                    links.push(PartnerLink { role: partner.role, position, base: partner.base, is_hint: partner.is_hint });
                }
                all.partners.push(links);
            }
            all.refs.extend(shards.iter().map(|&shard| plan.shards[shard].chunk(unit.chunk)));
            all.partners.resize(all.refs.len(), Vec::new());
            all.is_encoded.extend((0..shards.len()).map(|position| position < unit.shards.len()));
            all.trials.resize(all.refs.len(), Trial::All);
            all.is_withheld.resize(all.refs.len(), false);
            all.units.push(start..all.refs.len());
        }
        all
    }

    /// Tries first the codecs that were chosen for similar chunks, and withholds the bases that these codecs do not use.
    pub(super) fn prefer(mut self, input: &SaveInput<'_>, plan: &SavePlan, window: &Window, choices: &mut Choices) -> Result<Self> {
        let registry = input.store.registry();
        choices.spare_bases();
        for (unit, range) in window.units.iter().zip(&self.units) {
            self.is_withheld[range.clone()].fill(true);
            for (&shard, index) in unit.shards.iter().zip(range.clone()) {
                let at = self.refs[index];
                let family = &plan.shards[shard].family;
                self.trials[index] = choices.next(family);
                // Rounding may depend on the base. Changed rows make a base unnecessary already.
                let is_free = input.precision(input.tensor(at)).setting == Setting::Lossless && input.changed_rows(at)?.is_none();
                let preferred = match &self.trials[index] {
                    _ if input.assigned_codec(input.tensor(at)).is_some() => None,
                    Trial::One(preferred) if is_free && !choices.expects_unchanged(family) => Some(preferred),
                    _ => None,
                };
                let codec = preferred.and_then(|preferred| registry.get(&preferred.codec));
                if preferred.is_some_and(|preferred| !preferred.uses_bases()) {
                    continue;
                }
                self.is_withheld[index] = false;
                let dtype = input.tensor(at).description.dtype;
                let role = &input.tensor(at).description.role;
                for link in self.partners[index].iter().filter(|link| link.base) {
                    let is_needed = codec.is_none_or(|codec| {
                        let used = if link.is_hint { codec.hints(dtype, role) } else { codec.needs(role) };
                        used.iter().any(|need| need.role == link.role && need.base)
                    });
                    self.is_withheld[range.start + link.position] &= !is_needed;
                }
            }
            // A base that another chunk of the unit needs is loaded in any case.
            for (&shard, index) in unit.shards.iter().zip(range.clone()).filter(|(_, index)| !self.is_withheld[*index]) {
                let role = &input.tensor(self.refs[index]).description.role;
                let needs_no_other =
                    |delta: &Preferred| registry.get(&delta.codec).is_some_and(|codec| !codec.needs(role).iter().any(|need| need.base));
                if let (Trial::One(_), Some(delta)) =
                    (&self.trials[index], choices.spared_delta(&plan.shards[shard].family).filter(needs_no_other))
                {
                    self.trials[index] = Trial::One(delta);
                }
            }
        }
        Ok(self)
    }

    /// Units that are to be encoded again with the bases that were withheld: a preferred codec failed, or a chunk seems
    /// to equal its base. Equal checksums alone prove nothing; the second time, bytes are compared.
    async fn units_to_encode_again(
        &self,
        input: &SaveInput<'_>,
        cache: &BaseCache,
        results: &[Vec<Option<UnitResult>>],
    ) -> Result<Vec<usize>> {
        let mut again = BTreeSet::new();
        let mut chunks = Vec::new();
        let mut encoded = Vec::new();
        for (number, (range, unit)) in self.units.iter().zip(results).enumerate() {
            for (index, result) in range.clone().zip(unit) {
                let Some(UnitResult { chosen, .. }) = result else { continue };
                let has_base = |index: usize| self.refs[index].base.is_some() && self.is_withheld[index];
                let partners = self.partners[index].iter().filter(|link| link.base);
                let lacks_base = has_base(index) || partners.map(|link| range.start + link.position).any(has_base);
                if lacks_base && chosen.by == ChosenBy::Fallback {
                    again.insert(number);
                } else if has_base(index) {
                    chunks.push(self.refs[index]);
                    encoded.push((number, chosen.encoded.crc));
                }
            }
        }
        let bases = base_crcs(input, cache, &chunks).await?;
        again.extend(encoded.into_iter().zip(bases).filter(|((_, crc), base)| *base == Some(*crc)).map(|((number, _), _)| number));
        Ok(again.into_iter().collect())
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
