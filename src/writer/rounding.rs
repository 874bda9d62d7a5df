//! Rounding: the form in which each chunk will be stored, and the record of its error.
//!
//! Rounding comes after the base chunks are read and before any codec runs. The rounded chunk is what codecs encode,
//! what checksums cover and what the next delta is made against. Without a rounding setting a chunk is stored as the
//! caller gave it.
//!
//! Invariant: a chunk that depends on a partner when it is decoded (a master on its model weight) sees the partner as the partner
//! will be stored, never the caller's original.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tensorcask_kernels::errors::updates;

use super::input::{ChunkRef, SaveInput};
use super::layout::LayoutTensor;
use crate::codec::{Chunk, KMeans, LevelError, Partner};
use crate::precision::{Rounded, Setting, round};
use crate::tensor::is_parameter;
use crate::wire::{ChunkErrors, ErrorsFile, ShardErrors};
use crate::{Dtype, Error, Result, RoundingReport};

/// The stored form of a chunk.
pub(super) fn stored_form<'a>(input: &SaveInput<'a>, at: ChunkRef, base: Option<&[u8]>) -> Result<Rounded<'a>> {
    let tensor = input.tensor(at);
    let precision = input.precision(tensor);
    let original = input.original(at)?;
    if precision.setting == Setting::Lossless {
        return Ok(Rounded::lossless(original));
    }
    let role = tensor.description.role.as_str();
    let partner_of = |role: &str| partner_of(input, at, role);
    // A master is rounded relative to its model weight as the weight will be stored.
    let model = match (precision.setting, partner_of("model")) {
        (Setting::Remainder { .. }, Some((model, at))) if model.description.role != role => {
            Some((model.description.dtype, stored_form_alone(input, at)?))
        }
        _ => None,
    };
    let model =
        model.as_ref().map(|(dtype, rounded)| Partner { role: "model", dtype: *dtype, data: &rounded.data, base: None, gradient: None });
    let partner = model.or(sensitivity(input, at)?);
    let chunk = Chunk { base, partners: partner.as_slice(), ..input.codec_chunk(at, original)? };
    let mut rounded = round(precision, &chunk).map_err(|e| input.locate(at, e))?;
    let is_f32 = |tensor: &LayoutTensor<'_>| tensor.description.dtype == Dtype::F32;
    let first = partner_of("exp_avg").filter(|(first, _)| role == "exp_avg_sq" && is_f32(first) && is_f32(tensor));
    if let (Some(errors), Some((_, first))) = (&mut rounded.errors, first) {
        let stored = stored_form_alone(input, first)?;
        errors.update = updates([input.original(first)?, &stored.data], [original, &rounded.data]);
    }
    let Rounded { data, given, errors } = rounded;
    Ok(Rounded { data: outliving(data, original), given, errors })
}

/// The stored form of a chunk of a tensor that is rounded without a base, and without partners that are stored.
pub(super) fn stored_form_alone<'a>(input: &SaveInput<'a>, at: ChunkRef) -> Result<Rounded<'a>> {
    let original = input.original(at)?;
    let partner = sensitivity(input, at)?;
    let chunk = Chunk { partners: partner.as_slice(), ..input.codec_chunk(at, original)? };
    let Rounded { data, given, errors } = round(input.precision(input.tensor(at)), &chunk).map_err(|e| input.locate(at, e))?;
    Ok(Rounded { data: outliving(data, original), given, errors })
}

/// The bytes without the borrow of a chunk: those that were not rounded are the caller's, which live longer.
fn outliving<'a>(data: Cow<'_, [u8]>, original: &'a [u8]) -> Cow<'a, [u8]> {
    match data {
        Cow::Owned(stored) => Cow::Owned(stored),
        Cow::Borrowed(_) => Cow::Borrowed(original),
    }
}

/// The chunk of another role of the same parameter.
fn partner_of<'a>(input: &SaveInput<'a>, at: ChunkRef, role: &str) -> Option<(&'a LayoutTensor<'a>, ChunkRef)> {
    let (number, shard) = input.layout.partner(at.tensor, role, input.view(at).rect())?;
    Some((&input.layout.tensors[number], ChunkRef { tensor: number, shard, chunk: at.chunk, base: None }))
}

/// The chunk with the sensitivity of a weight, if its setting asks: the gradient that the caller gave, or the second moment in the
/// state. Only rounding reads it, so it is taken as the caller has it.
fn sensitivity<'a>(input: &SaveInput<'a>, at: ChunkRef) -> Result<Option<Partner<'a>>> {
    let tensor = input.tensor(at);
    let Setting::KMeans(KMeans { error: LevelError::Sensitive, .. }) = input.precision(tensor).setting else { return Ok(None) };
    if let Some((dtype, gradient)) = input.view(at).gradient() {
        let elements = input.grid(at)?.elements(at.chunk);
        let byte = |element: u64| dtype.byte_count(element).and_then(|byte| usize::try_from(byte).ok());
        let data = byte(elements.start).zip(byte(elements.end)).and_then(|(start, end)| gradient.get(start..end));
        let data = data.ok_or_else(|| input.locate(at, Error::invalid("the gradient ends before the chunk")))?;
        return Ok(Some(Partner { role: "gradient", dtype, data, base: None, gradient: None }));
    }
    if !is_parameter(&tensor.description.role) {
        return Ok(None);
    }
    // A pair that no name tells may be a guess, which must not change a rounding.
    let second = partner_of(input, at, "exp_avg_sq").filter(|(second, _)| !second.is_paired());
    let Some((second, at)) = second else { return Ok(None) };
    Ok(Some(Partner { role: "exp_avg_sq", dtype: second.description.dtype, data: input.original(at)?, base: None, gradient: None }))
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
