//! `tc.planes`: byte planes, each entropy-coded on its own; planes of the chunk, or of its XOR with the base.
//!
//! Spec: spec/codecs/planes.md
//! Input:  n units of width w (1, 2, 4, 8 bytes), and n units of the base for an XOR delta
//! Output: w planes of n bytes, coded by spec/entropy.md
//! Errors: `Corrupt` if a plane does not decode to n bytes
//! Cost:   split and merge at memory speed, then the coders; noise is stored raw
//! Source: LMC (byte grouping, run-length, block-adaptive Huffman), ZipNN (only exponents compress)

use tensorcask_kernels::spare::{MaybeSpare, Spare};
use tensorcask_kernels::{bytes, planes};

use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, sample};
use crate::entropy::{self, PlaneBuffer};
use crate::{Dtype, Result};

/// Stores each byte of the elements in a plane of its own.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Planes}};
/// let data: Vec<u8> = (0..20_000u16).flat_map(|i| [i as u8, (i >> 12) as u8]).collect();
/// let chunk = Chunk::new(Dtype::U16, 20_000, &data);
/// let bytes: usize = Planes.encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 20_100);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Planes;

const NAMES: [&str; 8] = ["plane0", "plane1", "plane2", "plane3", "plane4", "plane5", "plane6", "plane7"];

/// Returns whether units are binary floats of 16 bits or more. In such units, the sign bit moves to the end.
fn rotates(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 | Dtype::C64 | Dtype::C128)
}

/// Splits units into planes.
pub(super) fn split(data: &[u8], base: Option<&[u8]>, dtype: Dtype) -> Result<Vec<PlaneBuffer>> {
    let width = dtype.unit_bytes();
    let mut all = (0..width).map(|_| PlaneBuffer::new(data.len() / width, "byte planes")).collect::<Result<Vec<_>>>()?;
    let mut borrowed: Vec<&mut [u8]> = all.iter_mut().map(|plane| &mut **plane).collect();
    planes::split(data, base, rotates(dtype), &mut borrowed);
    Ok(all)
}

/// Decodes planes and merges them into units, block by block, so each block is still in the cache when it is merged.
pub(super) fn decode(codes: &[&[u8]], base: Option<&[u8]>, dtype: Dtype, out: &mut [u8]) -> Result<()> {
    let width = dtype.unit_bytes();
    if let ([code], None) = (codes, base) {
        return entropy::decode(code, out);
    }
    let units = out.len() / width;
    let mut readers = codes.iter().map(|code| entropy::PlaneReader::new(code, units)).collect::<Result<Vec<_>>>()?;
    let mut blocks = readers.iter().filter_map(entropy::PlaneReader::block);
    let block = blocks.next().unwrap_or(USUAL_BLOCK);
    if units == 0 || blocks.any(|other| other != block) {
        let planes = codes.iter().map(|code| entropy::read_plane(code, units, "byte planes")).collect::<Result<Vec<_>>>()?;
        merge(&planes, base, dtype, out);
        return Ok(());
    }
    let mut decoded = Spare::new(block.min(units) * width, "byte planes")?;
    let mut bases = base.map(|base| base.chunks(block * width));
    for out in out.chunks_mut(block * width) {
        let count = out.len() / width;
        let mut planes: [&[u8]; 8] = [&[]; 8];
        for ((reader, room), plane) in readers.iter_mut().zip(decoded.chunks_mut(block.min(units))).zip(&mut planes) {
            *plane = match reader.next(room)? {
                Some(raw) => raw,
                None => room.get(..count).unwrap_or_default(),
            };
        }
        let base = bases.as_mut().and_then(Iterator::next);
        planes::merge(planes.get(..width).unwrap_or_default(), base, rotates(dtype), out);
    }
    Ok(())
}

/// Number of units that are merged at once if no plane has blocks.
const USUAL_BLOCK: usize = 1 << 16;

/// Merges planes into units.
pub(super) fn merge(planes: &[MaybeSpare<'_>], base: Option<&[u8]>, dtype: Dtype, out: &mut [u8]) {
    let planes: Vec<&[u8]> = planes.iter().map(|plane| &**plane).collect();
    if planes.len() == dtype.unit_bytes() {
        planes::merge(&planes, base, rotates(dtype), out);
    }
}

/// Estimates the bytes of each plane from a sample.
fn planes_of(chunk: &Chunk<'_>, base: Option<&[u8]>) -> Vec<u64> {
    let width = chunk.dtype.unit_bytes();
    let units = (chunk.data.len() / width) as u64;
    let base = base.map(|base| sample(base, width));
    match split(&sample(chunk.data, width), base.as_deref(), chunk.dtype) {
        Ok(planes) => planes.iter().map(|plane| entropy::estimate(&bytes::histogram(plane), units)).collect(),
        Err(_) => vec![units; width],
    }
}

/// Returns the smaller estimate, and whether that is the estimate of the XOR delta.
fn better(chunk: &Chunk<'_>) -> (Vec<u64>, bool) {
    let full = planes_of(chunk, None);
    let Some(base) = chunk.base.filter(|base| base.len() == chunk.data.len()) else { return (full, false) };
    let delta = planes_of(chunk, Some(base));
    if delta.iter().sum::<u64>() < full.iter().sum() { (delta, true) } else { (full, false) }
}

impl Codec for Planes {
    fn id(&self) -> &str {
        "tc.planes"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::PerChunk
    }

    fn cost(&self) -> Cost {
        Cost { encode: 4.0, decode: 3.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let width = dtype.unit_bytes() as u64;
        let units = dtype.byte_count(element_count).unwrap_or(u64::MAX) / width;
        entropy::max_encoded_bytes(units).saturating_mul(width)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        Some(better(chunk).0)
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let uses_base = chunk.base.is_some() && better(chunk).1;
        let split = split(chunk.data, chunk.base.filter(|_| uses_base), chunk.dtype)?;
        let columns = NAMES.into_iter().zip(split).map(|(name, plane)| (name, plane.encode())).collect();
        Ok(Encoded { uses_base, columns })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        super::are_columns(names.iter().copied(), NAMES.get(..dtype.unit_bytes()).unwrap_or(&NAMES))
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let width = columns.dtype.unit_bytes();
        let mut codes: Vec<&[u8]> = Vec::with_capacity(width);
        match width {
            1 => codes.extend(columns.exactly([NAMES[0]])?),
            2 => codes.extend(columns.exactly([NAMES[0], NAMES[1]])?),
            4 => codes.extend(columns.exactly([NAMES[0], NAMES[1], NAMES[2], NAMES[3]])?),
            _ => codes.extend(columns.exactly(NAMES)?),
        }
        let base = match columns.base {
            Some(_) => Some(columns.base(out.len())?),
            None => None,
        };
        decode(&codes, base, columns.dtype, out)
    }
}
