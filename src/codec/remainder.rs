//! `tc.remainder`: an f32 master weight as the bits that its 16-bit model weight lacks.
//!
//! Spec:   spec/codecs/remainder.md
//! Input:  n units of f32, and n units of bf16 or f16 of the partner of role `model`
//! Output: low and high bytes of the differences, n bytes each, coded by spec/entropy.md; rounding mode and exceptions
//! Errors: `Corrupt` if a plane does not decode to n bytes, or exceptions are out of order
//! Cost:   one pass at memory speed; with a bf16 partner, both planes are noise and stored raw
//! Source: ours: the model weight is the rounded master, so no bit is stored twice. Kahan-compensated and split-float
//!         optimizers keep the same pair of 16-bit weight and remainder

use tensorcask_kernels::{bytes, remainder};

use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Need, Partner, sample};
use crate::entropy::{self, PlaneBuffer};
use crate::wire::{Cursor, Put};
use crate::{Dtype, Error, Result};

/// Stores the bits of a master weight that its model weight lacks.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Partner, Remainder}};
/// let masters: Vec<f32> = (1..1000).map(|i| 1.0 / i as f32).collect();
/// let data: Vec<u8> = masters.iter().flat_map(|w| w.to_le_bytes()).collect();
/// let model: Vec<u8> = masters.iter().flat_map(|&w| half::bf16::from_f32(w).to_le_bytes()).collect();
/// let partners = [Partner { role: "model", dtype: Dtype::Bf16, data: &model, base: None, gradient: None }];
/// let chunk = Chunk { role: "master", partners: &partners, ..Chunk::new(Dtype::F32, 999, &data) };
/// let bytes: usize = Remainder.encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 2 * 999 + 20, "half of the bits are in the model weight");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Remainder;

const NEEDS: &[Need] = &[Need::now("model")];
const COLUMNS: [&str; 3] = ["low", "high", "rounding"];

/// Mode of a model weight rounded to the nearest: differences have either sign.
const NEAREST: u8 = 0;
/// Mode of a truncated model weight: differences are never negative.
const TRUNCATED: u8 = 1;
/// Size of an exception: the position and the bits of an f32.
const EXCEPTION_BYTES: usize = 8;

/// Returns whether the partner is f16, or `None` if it is neither f16 nor bf16.
fn is_f16(partner: &Partner<'_>) -> Option<bool> {
    match partner.dtype {
        Dtype::Bf16 => Some(false),
        Dtype::F16 => Some(true),
        _ => None,
    }
}

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("a remainder of {dtype}")).clause("remainder 1")),
    }
}

/// Splits differences into the low and the high plane.
fn split(data: &[u8], partner: &[u8], f16: bool) -> Result<[PlaneBuffer; 2]> {
    let units = data.len() / 4;
    let mut planes = [PlaneBuffer::new(units, "differences")?, PlaneBuffer::new(units, "differences")?];
    let [low, high] = &mut planes;
    remainder::split(data, partner, f16, low, high);
    Ok(planes)
}

/// Returns the units that a mode does not restore.
fn exceptions(data: &[u8], partner: &[u8], f16: bool, mode: u8, [low, high]: &[PlaneBuffer; 2]) -> Vec<usize> {
    // A stretch that fits the cache.
    const UNITS: usize = 4096;
    let mut decoded = vec![0; 4 * UNITS.min(low.len())];
    let mut found = Vec::new();
    let stretches = data.chunks(4 * UNITS).zip(partner.chunks(2 * UNITS)).zip(low.chunks(UNITS).zip(high.chunks(UNITS)));
    for (at, ((data, partner), (low, high))) in stretches.enumerate() {
        let Some(decoded) = decoded.get_mut(..data.len()) else { continue };
        remainder::join(partner, f16, mode == TRUNCATED, low, high, decoded);
        if decoded != data {
            let units = decoded.as_chunks::<4>().0.iter().zip(data.as_chunks::<4>().0).enumerate();
            found.extend(units.filter(|(_, (ours, theirs))| ours != theirs).map(|(unit, _)| at * UNITS + unit));
        }
    }
    found
}

/// Returns the mode with fewer exceptions, and its exceptions.
fn best_mode(data: &[u8], partner: &[u8], f16: bool, planes: &[PlaneBuffer; 2]) -> (u8, Vec<usize>) {
    let nearest = exceptions(data, partner, f16, NEAREST, planes);
    // A few exceptions are mere ties, which do not justify a try of the other mode.
    if nearest.len() * 1024 <= data.len() {
        return (NEAREST, nearest);
    }
    let truncated = exceptions(data, partner, f16, TRUNCATED, planes);
    if truncated.len() < nearest.len() { (TRUNCATED, truncated) } else { (NEAREST, nearest) }
}

/// Encodes the bits of f32 beyond their 16-bit roundings: the columns `low`, `high` and `rounding`.
pub(super) fn encode_beyond(data: &[u8], partner: &[u8], f16: bool) -> Result<[Vec<u8>; 3]> {
    let planes = split(data, partner, f16)?;
    let (mode, odd) = best_mode(data, partner, f16, &planes);
    let mut rounding = vec![mode];
    for unit in odd {
        rounding.put_u32(unit as u32);
        rounding.extend_from_slice(data.get(4 * unit..4 * unit + 4).unwrap_or_default());
    }
    let [low, high] = planes.map(PlaneBuffer::encode);
    Ok([low, high, rounding])
}

/// Inverts [`encode_beyond`].
pub(super) fn decode_beyond([low, high, rounding]: [&[u8]; 3], partner: &[u8], f16: bool, out: &mut [u8]) -> Result<()> {
    let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
    let Some((&mode, exceptions)) = rounding.split_first().filter(|(mode, _)| **mode <= TRUNCATED) else {
        return bad("the rounding mode is missing or unknown".into(), "remainder 3");
    };
    let (exceptions, rest) = exceptions.as_chunks::<EXCEPTION_BYTES>();
    if !rest.is_empty() || exceptions.len() > out.len() / 4 {
        return bad(format!("{} bytes of exceptions", rounding.len() - 1), "remainder 4");
    }
    let units = out.len() / 4;
    let low = entropy::read_plane(low, units, "differences")?;
    let high = entropy::read_plane(high, units, "differences")?;
    remainder::join(partner, f16, mode == TRUNCATED, &low, &high, out);
    let mut before = None;
    for exception in exceptions {
        let (position, bits) = exception.split_at(4);
        let unit = Cursor::new(position, "an exception").u32()? as usize;
        let place = out.get_mut(unit.saturating_mul(4)..unit.saturating_mul(4).saturating_add(4));
        let Some(place) = place.filter(|_| before.is_none_or(|before| before < unit)) else {
            return bad(format!("an exception at element {unit} of {units}, out of order or beyond"), "remainder 4");
        };
        place.copy_from_slice(bits);
        before = Some(unit);
    }
    Ok(())
}

/// Greatest number of bytes that the columns of [`encode_beyond`] can take.
pub(super) fn max_beyond_bytes(element_count: u64) -> u64 {
    let exceptions = element_count.saturating_mul(EXCEPTION_BYTES as u64);
    entropy::max_encoded_bytes(element_count).saturating_mul(2).saturating_add(exceptions).saturating_add(1)
}

/// Estimates the column sizes of [`encode_beyond`] for `units` elements, from a sample of f32 and their roundings.
pub(super) fn estimate_beyond(data: &[u8], partner: &[u8], f16: bool, units: u64) -> Result<[u64; 3]> {
    let planes = split(data, partner, f16)?;
    let odd = best_mode(data, partner, f16, &planes).1.len() as u64;
    let odd = odd.saturating_mul(units) / (data.len() as u64 / 4).max(1);
    let [low, high] = planes.map(|plane| entropy::estimate(&bytes::histogram(&plane), units));
    Ok([low, high, odd.saturating_mul(EXCEPTION_BYTES as u64).saturating_add(1)])
}

impl Codec for Remainder {
    fn id(&self) -> &str {
        "tc.remainder"
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        dtype == Dtype::F32 && role == "master"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Never
    }

    fn needs(&self, role: &str) -> &'static [Need] {
        if role == "master" { NEEDS } else { &[] }
    }

    fn is_standalone(&self) -> bool {
        false
    }

    fn cost(&self) -> Cost {
        Cost { encode: 2.5, decode: 2.0 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        max_beyond_bytes(element_count)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        if chunk.dtype != Dtype::F32 || chunk.role != "master" {
            return None;
        }
        let partner = chunk.partner("model")?;
        let f16 = is_f16(partner)?;
        if partner.data.len() != chunk.data.len() / 2 {
            return None;
        }
        let units = (chunk.data.len() / 4) as u64;
        Some(estimate_beyond(&sample(chunk.data, 4), &sample(partner.data, 2), f16, units).ok()?.into())
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let partner = chunk.partner("model").filter(|_| chunk.dtype == Dtype::F32);
        let partner = partner.ok_or_else(|| Error::invalid("needs f32, and the chunk of role `model`"))?;
        let f16 = is_f16(partner).ok_or_else(|| Error::invalid("needs a chunk of role `model` of bf16 or f16"))?;
        let columns = COLUMNS.into_iter().zip(encode_beyond(chunk.data, partner.data, f16)?).collect();
        Ok(Encoded { uses_base: false, columns })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let stored = columns.exactly(COLUMNS)?;
        check_dtype(columns.dtype)?;
        let partner = columns.partner("model")?;
        let beyond = || Error::corrupt(format!("a remainder beyond {}", partner.dtype)).clause("remainder 1");
        decode_beyond(stored, partner.data, is_f16(partner).ok_or_else(beyond)?, out)
    }
}
