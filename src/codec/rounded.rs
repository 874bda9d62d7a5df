//! `tc.rounded`: f32 as bf16 roundings, followed by the bits that the roundings lack.
//!
//! Spec:   spec/codecs/rounded.md
//! Input:  n units of f32
//! Output: byte planes of the roundings; byte planes of the remainders, rounding mode and exceptions
//! Errors: `Corrupt` if a plane does not decode to n bytes, or exceptions are out of order
//! Cost:   the cost of `tc.planes` for bf16, and one more pass
//! Source: ours: store the bf16 rounding and the remainder in separate columns, so a reader of bf16 skips the
//!         remainders

use tensorcask_kernels::spare::Spare;
use tensorcask_kernels::{bytes, remainder as kernel};

use super::remainder::{decode_beyond, encode_beyond, estimate_beyond, max_beyond_bytes};
use super::{Chunk, Codec, Columns, Cost, Encoded, planes};
use crate::entropy;
use crate::{Dtype, Error, Result};

/// Stores f32 so that readers of bf16 need only two of the five columns, about a third of the bytes.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Rounded}};
/// let data: Vec<u8> = (1..1000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
/// let encoded = Rounded.encode(&Chunk::new(Dtype::F32, 999, &data))?;
/// let names: Vec<&str> = encoded.columns.iter().map(|(name, _)| *name).collect();
/// assert_eq!(names, ["rounded0", "rounded1", "low", "high", "rounding"]);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Rounded;

impl Rounded {
    /// Id of the codec.
    pub const ID: &str = "tc.rounded";
    /// Columns of the roundings.
    pub(crate) const ROUNDINGS: [&str; 2] = ["rounded0", "rounded1"];

    /// Rounds each f32 to the nearest bf16, as this codec does.
    pub(crate) fn round(data: &[u8], out: &mut [u8]) {
        kernel::round(data, out);
    }

    /// Fills `out` with the bf16 roundings of a chunk. `columns` needs only the columns of the roundings.
    pub(crate) fn decode_roundings(columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        decode_roundings(columns.exactly(Self::ROUNDINGS)?, out)
    }
}

const COLUMNS: [&str; 5] = ["rounded0", "rounded1", "low", "high", "rounding"];

/// Roles that readers may want in bf16.
const ROLES: [&str; 3] = ["model", "master", "ema"];

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("roundings of {dtype}")).clause("rounded 1")),
    }
}

fn round(data: &[u8]) -> Result<Spare> {
    let mut rounded = Spare::new(data.len() / 2, "roundings")?;
    kernel::round(data, &mut rounded);
    Ok(rounded)
}

/// Fills `out` with bf16 from the columns `rounded0` and `rounded1`.
fn decode_roundings(codes: [&[u8]; 2], out: &mut [u8]) -> Result<()> {
    planes::decode(&codes, None, Dtype::Bf16, out)
}

impl Codec for Rounded {
    fn id(&self) -> &str {
        Self::ID
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        dtype == Dtype::F32 && ROLES.contains(&role)
    }

    fn cost(&self) -> Cost {
        Cost { encode: 3.5, decode: 2.5 }
    }

    fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
        entropy::max_encoded_bytes(element_count).saturating_mul(2).saturating_add(max_beyond_bytes(element_count))
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        if chunk.dtype != Dtype::F32 || !ROLES.contains(&chunk.role) {
            return None;
        }
        let data = super::sample(chunk.data, 4);
        let rounded = round(&data).ok()?;
        let units = (chunk.data.len() / 4) as u64;
        let beyond = estimate_beyond(&data, &rounded, false, units).ok()?;
        let planes = planes::split(&rounded, None, Dtype::Bf16).ok()?;
        let mut sizes: Vec<u64> = planes.iter().map(|plane| entropy::estimate(&bytes::histogram(plane), units)).collect();
        sizes.extend(beyond);
        Some(sizes)
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        if chunk.dtype != Dtype::F32 {
            return Err(Error::invalid(format!("needs f32, not {}", chunk.dtype)));
        }
        let rounded = round(chunk.data)?;
        let mut codes = Vec::with_capacity(COLUMNS.len());
        for plane in planes::split(&rounded, None, Dtype::Bf16)? {
            codes.push(plane.encode());
        }
        codes.extend(encode_beyond(chunk.data, &rounded, false)?);
        Ok(Encoded { uses_base: false, columns: COLUMNS.into_iter().zip(codes).collect() })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        super::are_columns(names.iter().copied(), &COLUMNS)
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let [first, second, low, high, rounding] = columns.exactly(COLUMNS)?;
        let mut rounded = Spare::new(out.len() / 2, "roundings")?;
        decode_roundings([first, second], &mut rounded)?;
        decode_beyond([low, high, rounding], &rounded, false, out)?;
        // A reader of bf16 decodes only the roundings, which the checksum of the chunk does not cover. So check them
        // here.
        if *round(out)? != *rounded {
            return Err(Error::corrupt("a rounding is not the nearest of its element").clause("rounded 4"));
        }
        Ok(())
    }
}
