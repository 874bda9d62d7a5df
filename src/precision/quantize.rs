//! Rounds a chunk by a setting, within an error bound.

use std::borrow::Cow;

use tensorcask_kernels::errors::{Sums, measure};
use tensorcask_kernels::floats::{numbers, to_bytes};
use tensorcask_kernels::loguniform::{Grid, quantize as to_grid};
use tensorcask_kernels::remainder;

use super::{BoundedSetting, Setting};
use crate::codec::{Candidate, Chunk, Encoded};
use crate::limits::zeroed;
use crate::wire::ChunkErrors;
use crate::{Dtype, Result, RoundingReport};

/// A rounded chunk, as stored and as every reader gets it.
#[derive(Debug)]
pub(crate) struct Rounded<'a> {
    pub data: Cow<'a, [u8]>,
    pub given: Option<Candidate>,
    /// Rounding errors; `None` if the chunk was not rounded.
    pub errors: Option<ChunkErrors>,
}

impl<'a> Rounded<'a> {
    pub(crate) fn lossless(data: &'a [u8]) -> Self {
        Self { data: Cow::Borrowed(data), given: None, errors: None }
    }
}

/// Rounds a chunk. With a bound, tries finer settings until the error is within the bound. The partner of role `model`,
/// if present, must be in its stored form.
pub(crate) fn round<'a>(bounded: BoundedSetting, chunk: &Chunk<'a>) -> Result<Rounded<'a>> {
    let mut setting = bounded.setting;
    loop {
        let Some((data, given)) = apply(setting, chunk)? else { return Ok(Rounded::lossless(chunk.data)) };
        let errors = ChunkErrors::new(errors_of(chunk.dtype, chunk.data, &data));
        if bounded.bound.is_none_or(|bound| errors.max_relative <= bound) {
            return Ok(Rounded { data: Cow::Owned(data), given, errors: Some(errors) });
        }
        setting = setting.finer();
    }
}

/// Rounds a chunk as a writer does.
///
/// ```
/// use tensorcask::precision::{BoundedSetting, Setting, round_chunk};
/// use tensorcask::{Dtype, codec::Chunk};
/// let data: Vec<u8> = [1.0f32, 1.1, -3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// let bounded = BoundedSetting { setting: Setting::LogUniform { steps: 4 }, bound: Some(0.1) };
/// let rounded = round_chunk(bounded, &Chunk::new(Dtype::F32, 3, &data))?;
/// assert_ne!(rounded.data, data);
/// assert!(rounded.rounding.is_some_and(|rounding| rounding.max_relative < 0.1));
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn round_chunk<'a>(bounded: BoundedSetting, chunk: &Chunk<'a>) -> Result<RoundedChunk<'a>> {
    let Rounded { data, given, errors } = round(bounded, chunk)?;
    Ok(RoundedChunk {
        data,
        encoded: given.map(|given| given.encoded),
        rounding: errors.map(|errors| RoundingReport::of_chunk(&errors, chunk.element_count)),
    })
}

/// A rounded chunk.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundedChunk<'a> {
    /// Bytes of the chunk, as every reader gets them.
    pub data: Cow<'a, [u8]>,
    /// Encoding by the codec that rounded the chunk, if the setting names a codec.
    pub encoded: Option<Encoded>,
    /// Rounding error; `None` if the chunk was not rounded.
    pub rounding: Option<RoundingReport>,
}

/// Applies a setting to a chunk. Returns `None` if the chunk is not rounded.
fn apply(setting: Setting, chunk: &Chunk<'_>) -> Result<Option<(Vec<u8>, Option<Candidate>)>> {
    if !setting.rounds(chunk.dtype) || chunk.data.is_empty() {
        return Ok(None);
    }
    let mut out = zeroed(chunk.data.len(), "a rounded chunk")?;
    match setting {
        Setting::Lossless | Setting::Remainder { bits: 16.. } => return Ok(None),
        Setting::LogUniform { steps } => to_grid(&Grid::new(steps.trailing_zeros()), chunk.data, &mut out),
        Setting::Remainder { bits } => to_bits(bits, chunk, &mut out)?,
        Setting::Cluster(_) | Setting::KMeans(_) | Setting::Blockwise8 => {
            let Some(codec) = setting.codec() else { return Ok(None) };
            let Some(encoded) = codec.estimate(chunk).map(|_| codec.encode(chunk)).transpose()? else { return Ok(None) };
            let given = Candidate { codec, encoded };
            given.decode(chunk, &mut out)?;
            return Ok(Some((out, Some(given))));
        }
    }
    Ok(Some((out, None)))
}

/// Compares the numbers of a chunk before and after rounding.
fn errors_of(dtype: Dtype, before: &[u8], after: &[u8]) -> Sums {
    if dtype == Dtype::F32 {
        return measure(before, after);
    }
    let [before, after] = [before, after].map(|data| to_bytes(&numbers(dtype.number_format(), data).collect::<Vec<f32>>()));
    measure(&before, &after)
}

/// Keeps `bits` bits of each number beyond its 16-bit rounding.
fn to_bits(bits: u8, chunk: &Chunk<'_>, out: &mut [u8]) -> Result<()> {
    let partner = chunk.partner("model").and_then(|partner| match partner.dtype {
        Dtype::Bf16 => Some((partner.data, false)),
        Dtype::F16 => Some((partner.data, true)),
        _ => None,
    });
    match partner {
        Some((partner, f16)) => remainder::keep_bits(chunk.data, partner, f16, bits, out),
        None => {
            let mut own = zeroed(chunk.data.len() / 2, "roundings")?;
            remainder::round(chunk.data, &mut own);
            remainder::keep_bits(chunk.data, &own, false, bits, out);
        }
    }
    Ok(())
}
