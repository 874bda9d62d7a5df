//! Choice of a setting for each tensor whose precision rule allows several, such as `exp_avg=cluster|blockwise8`.
//!
//! Each setting rounds one chunk, from the middle of the tensor. All codecs that can store the results compete by the
//! score of BitSnap, equation 5: size, speed, and the measured squared error, each relative to the best. The setting of the
//! winner holds for the whole tensor.
//!
//! Invariant: a setting is chosen when a base is saved, and kept for the deltas of this base. Another setting would round
//! numbers that did not change to other numbers, and deltas would be large.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::input::{ChosenSettings, ChunkRef, SaveInput};
use super::layout::LayoutTensor;
use super::rounding::{stored_form, stored_form_alone};
use crate::codec::{Chunk, Objective, ObjectiveSetting, Partner, RoundedForm, best_form};
use crate::precision::{BoundedSetting, Rounded};
use crate::{Error, Result, parallel};

impl ChosenSettings {
    /// Chooses a setting for each tensor of a state that has none yet.
    pub(super) fn choose(&mut self, input: &SaveInput<'_>) -> Result<()> {
        let tensors = || input.layout.tensors.iter().enumerate();
        let is_open = |tensor: &LayoutTensor<'_>| !self.0.contains_key(&tensor.description.name) && !tensor.shards.is_empty();
        let open = tensors().filter(|(_, tensor)| is_open(tensor));
        let open: Vec<(usize, Vec<BoundedSetting>)> =
            open.map(|(number, tensor)| (number, input.alternatives(tensor))).filter(|(_, settings)| settings.len() > 1).collect();
        let of_tensor = |(number, settings): &(usize, Vec<BoundedSetting>)| {
            let name = &input.layout.tensors[*number].description.name;
            Ok((name.clone(), choose(input, *number, settings)?))
        };
        let chosen = parallel::run(|| open.par_iter().map(of_tensor).collect::<Result<Vec<(String, BoundedSetting)>>>())?;
        for (name, BoundedSetting { setting, .. }) in &chosen {
            tracing::info!(tensor = %name, %setting, "chose a precision");
        }
        self.0.extend(chosen);
        Ok(())
    }
}

/// Chooses a setting for the tensor of this number.
fn choose(input: &SaveInput<'_>, number: usize, settings: &[BoundedSetting]) -> Result<BoundedSetting> {
    let first = ChunkRef { tensor: number, shard: 0, chunk: 0, base: None };
    let at = ChunkRef { chunk: input.grid(first)?.chunk_count() / 2, ..first };
    let tensor = input.tensor(at);
    let with_one = |&setting: &BoundedSetting| ChosenSettings(BTreeMap::from([(tensor.description.name.clone(), setting)]));
    let trials: Vec<ChosenSettings> = settings.iter().map(with_one).collect();
    let rounded = trials.iter().map(|settings| stored_form(&SaveInput { settings, ..*input }, at, None));
    let rounded: Vec<Rounded<'_>> = rounded.collect::<Result<_>>()?;
    // A master is stored relative to its model weight.
    let model = input.layout.partner(number, "model", input.view(at).rect());
    let model = model.map(|(number, shard)| ChunkRef { tensor: number, shard, ..at });
    let model_form = model.map(|at| Ok::<_, Error>((input.tensor(at).description.dtype, stored_form_alone(input, at)?))).transpose()?;
    let partner =
        model_form.as_ref().map(|(dtype, form)| Partner { role: "model", dtype: *dtype, data: &form.data, base: None, gradient: None });
    let mut forms = Vec::with_capacity(settings.len());
    for (rounded, bounded) in rounded.iter().zip(settings) {
        let chunk = Chunk { partners: partner.as_slice(), ..input.codec_chunk(at, &rounded.data)? };
        let squares = rounded.errors.as_ref().map_or(0.0, |errors| errors.squares);
        forms.push(RoundedForm { chunk, given: rounded.given.as_ref(), work: bounded.setting.work(), squares });
    }
    let objective = match input.options.objective {
        ObjectiveSetting::Fixed(objective) => objective,
        ObjectiveSetting::Auto => Objective::default(),
    };
    let best = best_form(input.store.registry(), objective, input.assigned_codec(tensor), &forms);
    Ok(settings.get(best).copied().unwrap_or_else(|| input.precision(tensor)))
}
