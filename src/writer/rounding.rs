//! Rounding: the form in which each chunk will be stored, and the record of its error.
//!
//! Rounding comes after the base chunks are read and before any codec runs. The rounded chunk is what codecs encode,
//! what checksums cover and what the next delta is made against. Without a rounding setting a chunk is stored as the
//! caller gave it.
//!
//! Invariant: a chunk that depends on a partner (a master on its model weight) sees the partner as the partner will be
//! stored, never the caller's original.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::input::{ChunkRef, SaveInput};
use crate::codec::{Chunk, Partner};
use crate::kernels::errors::updates;
use crate::precision::{Rounded, Setting, round};
use crate::wire::{ChunkErrors, ErrorsFile, ShardErrors};
use crate::{Dtype, Result, RoundingReport};

/// The stored form of a chunk.
pub(super) fn stored_form<'a>(input: &SaveInput<'a>, at: ChunkRef, base: Option<&[u8]>) -> Result<Rounded<'a>> {
    let tensor = input.tensor(at);
    let precision = input.precision(tensor);
    let original = input.original(at)?;
    if precision.setting == Setting::Lossless {
        return Ok(Rounded::lossless(original));
    }
    let role = tensor.description.role.as_str();
    let partner_of = |role: &str| {
        let (number, shard) = input.layout.partner(at.tensor, role, input.view(at).rect())?;
        Some((&input.layout.tensors[number], ChunkRef { tensor: number, shard, chunk: at.chunk, base: None }))
    };
    // A master is rounded relative to its model weight as the weight will be stored.
    let model = match (precision.setting, partner_of("model")) {
        (Setting::Remainder { .. }, Some((model, at))) if model.description.role != role => {
            Some((model.description.dtype, stored_form_alone(input, at)?))
        }
        _ => None,
    };
    let model = model.as_ref().map(|(dtype, rounded)| Partner { role: "model", dtype: *dtype, data: &rounded.data, base: None });
    let chunk = Chunk { base, partners: model.as_slice(), ..input.codec_chunk(at, original)? };
    let mut rounded = round(precision, &chunk).map_err(|e| input.locate(at, e))?;
    let first = partner_of("exp_avg").filter(|(first, _)| role == "exp_avg_sq" && first.description.dtype == Dtype::F32);
    if let (Some(errors), Some((_, first))) = (&mut rounded.errors, first) {
        let stored = stored_form_alone(input, first)?;
        errors.update = updates([input.original(first)?, &stored.data], [original, &rounded.data]);
    }
    let Rounded { data, given, errors } = rounded;
    // The borrow of `chunk` ends here; the caller's bytes live longer.
    let data = match data {
        Cow::Owned(stored) => Cow::Owned(stored),
        Cow::Borrowed(_) => Cow::Borrowed(original),
    };
    Ok(Rounded { data, given, errors })
}

/// The stored form of a chunk of a tensor that is rounded without a base and without partners.
pub(super) fn stored_form_alone<'a>(input: &SaveInput<'a>, at: ChunkRef) -> Result<Rounded<'a>> {
    let chunk = input.codec_chunk(at, input.original(at)?)?;
    round(input.precision(input.tensor(at)), &chunk).map_err(|e| input.locate(at, e))
}

/// Rounding errors of one save.
#[derive(Debug, Default)]
pub(super) struct RoundingRecord {
    /// Errors of the rounded shards that no cask holds yet, by tensor and shard.
    shards: BTreeMap<(usize, usize), ShardErrors>,
    /// Sum over all rounded chunks; `None` while nothing was rounded.
    pub total: Option<RoundingReport>,
}

impl RoundingRecord {
    /// Records the rounding error of a chunk. The chunks of a shard come in order.
    pub(super) fn record(&mut self, input: &SaveInput<'_>, at: ChunkRef, errors: Option<ChunkErrors>) -> Result<()> {
        let Some(errors) = errors else { return Ok(()) };
        let shard = self.shards.entry((at.tensor, at.shard)).or_insert_with(|| {
            let (view, rect) = (input.view(at), input.view(at).rect());
            let setting = input.precision(input.tensor(at)).setting.to_string();
            ShardErrors { tensor: view.name().to_owned(), offset: rect.offset.clone(), shape: rect.shape.clone(), setting, chunks: vec![] }
        });
        shard.chunks.push(ChunkErrors { chunk: at.chunk, ..errors });
        let elements = input.grid(at)?.elements(at.chunk);
        let report = RoundingReport::of_chunk(&errors, elements.end.saturating_sub(elements.start));
        self.total = Some(self.total.unwrap_or_default().and(report));
        Ok(())
    }

    /// Content of the blob that stores the errors so far; `None` if nothing was rounded.
    pub(super) fn take_blob(&mut self) -> Result<Option<Vec<u8>>> {
        if self.shards.is_empty() {
            return Ok(None);
        }
        let mut shards: Vec<ShardErrors> = std::mem::take(&mut self.shards).into_values().collect();
        shards.sort_by(|a, b| (&a.tensor, &a.offset, &a.shape).cmp(&(&b.tensor, &b.offset, &b.shape)));
        ErrorsFile::new(shards).encode().map(Some)
    }
}
