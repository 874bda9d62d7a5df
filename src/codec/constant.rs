//! `tc.constant`: one value for all elements.
//!
//! Spec: spec/codecs/constant.md
//! Input:  n elements whose units (an element, half a complex number, a byte of packed elements) are equal bit for bit
//! Output: `values`, one unit
//! Errors: `Corrupt` if `values` is not one unit
//! Cost:   one pass, no allocation
//! Source: none needed

use super::{Chunk, Codec, Columns, Cost, Encoded};
use crate::{Dtype, Error, Result};

/// Stores one value for a chunk whose elements are all equal, such as fresh optimizer state.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Constant}};
/// let chunk = Chunk::new(Dtype::Bf16, 3, &[1, 2, 1, 2, 1, 2]);
/// assert_eq!(Constant.encode(&chunk)?.columns, [("values", vec![1, 2])]);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Constant;

impl Codec for Constant {
    fn id(&self) -> &str {
        "tc.constant"
    }

    fn cost(&self) -> Cost {
        Cost { encode: 0.5, decode: 0.5 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, _element_count: u64) -> u64 {
        dtype.unit_bytes() as u64
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let unit = chunk.dtype.unit_bytes();
        let first = chunk.data.get(..unit)?;
        chunk.data.chunks_exact(unit).all(|other| other == first).then(|| vec![unit as u64])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        if self.estimate(chunk).is_none() {
            return Err(Error::invalid("needs equal elements"));
        }
        let first = chunk.data.get(..chunk.dtype.unit_bytes());
        let first = first.ok_or_else(|| Error::invalid("an empty chunk has no constant"))?;
        Ok(Encoded { uses_base: false, columns: vec![("values", first.to_vec())] })
    }

    fn check_columns(&self, _: Dtype, names: &[&str]) -> Result<()> {
        super::are_columns(names.iter().copied(), &["values"])
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let [value] = columns.exactly(["values"])?;
        let unit = columns.dtype.unit_bytes();
        if value.len() != unit || !out.len().is_multiple_of(unit) {
            return Err(
                Error::corrupt(format!("{} bytes of values; a unit of {} has {unit}", value.len(), columns.dtype)).clause("constant 3")
            );
        }
        for slot in out.chunks_exact_mut(unit) {
            slot.copy_from_slice(value);
        }
        Ok(())
    }
}
