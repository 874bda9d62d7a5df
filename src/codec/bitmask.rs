//! `tc.bitmask`: a packed mask of changed units, followed by the new values of those units.
//!
//! Spec: spec/codecs/bitmask.md
//! Input:  n units of width w (1, 2, 4, 8 bytes) and n units of the base
//! Output: mask ceil(n/8) bytes, least significant bit first; values w * popcount(mask) bytes
//! Errors: `Corrupt` if mask, popcount and values disagree; `InvalidArgument` without a base
//! Cost:   one pass over both inputs; kernels: mask
//! Source: BitSnap (arXiv 2511.12376), algorithm 1 and equation 2. This codec compares bits, because floating-point
//!         subtraction has no exact inverse

use tensorcask_kernels::mask;

use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, sample};
use crate::{Dtype, Error, Result};

/// Stores which elements changed since the parent snapshot, and their new values.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Bitmask}};
/// let chunk = Chunk { base: Some(&[1, 2, 3]), ..Chunk::new(Dtype::U8, 3, &[1, 9, 3]) };
/// assert_eq!(Bitmask.encode(&chunk)?.columns, [("mask", vec![0b010]), ("values", vec![9])]);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Bitmask;

impl Codec for Bitmask {
    fn id(&self) -> &str {
        "tc.bitmask"
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn cost(&self) -> Cost {
        Cost { encode: 2.0, decode: 2.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        let bytes = dtype.byte_count(element_count).unwrap_or(u64::MAX);
        bytes.saturating_add((bytes / dtype.unit_bytes() as u64).div_ceil(8))
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let base = chunk.base.filter(|base| base.len() == chunk.data.len())?;
        let width = chunk.dtype.unit_bytes();
        let data = sample(chunk.data, width);
        let changed = mask::count_changed(width, &sample(base, width), &data) as u64;
        let sampled = (data.len() / width) as u64;
        let units = (chunk.data.len() / width) as u64;
        Some(vec![units.div_ceil(8), changed.saturating_mul(units).div_ceil(sampled.max(1)).saturating_mul(width as u64)])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let base = chunk.base.filter(|base| base.len() == chunk.data.len());
        let base = base.ok_or_else(|| Error::invalid("needs a base chunk of equal length"))?;
        let (bits, values) = mask::pack(chunk.dtype.unit_bytes(), base, chunk.data);
        Ok(Encoded { uses_base: true, columns: vec![("mask", bits), ("values", values)] })
    }

    fn check_columns(&self, _: Dtype, names: &[&str]) -> Result<()> {
        super::are_columns(names.iter().copied(), &["mask", "values"])
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let [bits, values] = columns.exactly(["mask", "values"])?;
        let base = columns.base(out.len())?;
        let width = columns.dtype.unit_bytes();
        let units = out.len() / width;
        let bad = |message: String| Err(Error::corrupt(message).clause("bitmask 3"));
        if bits.len() != units.div_ceil(8) {
            return bad(format!("a mask of {} bytes for {units} units", bits.len()));
        }
        if !units.is_multiple_of(8) && bits.last().is_some_and(|last| last >> (units % 8) != 0) {
            return bad("unused bits of the mask are not zero".into());
        }
        let changed = mask::count_ones(bits);
        if changed * width != values.len() {
            return bad(format!("{changed} bits set, but {} bytes of values of width {width}", values.len()));
        }
        mask::expand(width, base, bits, values, out);
        Ok(())
    }
}
