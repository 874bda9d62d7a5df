//! `tc.raw`: the elements unchanged.
//!
//! Spec: spec/codecs/raw.md
//! Input:  n elements
//! Output: `values`, the chunk's own bytes
//! Errors: `Corrupt` if `values` has another length
//! Cost:   one copy
//! Source: none needed

use tensorcask_kernels::spare;

use super::{Chunk, Codec, Columns, Cost, Encoded};
use crate::{Dtype, Error, Result};

/// Stores the elements unchanged.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Raw}};
/// let chunk = Chunk::new(Dtype::U8, 3, &[1, 2, 3]);
/// assert_eq!(Raw.encode(&chunk)?.columns, [("values", vec![1, 2, 3])]);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Raw;

impl Raw {
    /// Id of the codec.
    pub const ID: &str = "tc.raw";
}

impl Codec for Raw {
    fn id(&self) -> &str {
        Self::ID
    }

    fn cost(&self) -> Cost {
        Cost { encode: 1.0, decode: 1.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        dtype.byte_count(element_count).unwrap_or(u64::MAX)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        Some(vec![chunk.data.len() as u64])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let mut values = spare::output(chunk.data.len());
        values.extend_from_slice(chunk.data);
        Ok(Encoded { uses_base: false, columns: vec![("values", values)] })
    }

    fn check_columns(&self, _: Dtype, names: &[&str]) -> Result<()> {
        super::are_columns(names.iter().copied(), &["values"])
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let [values] = columns.exactly(["values"])?;
        if values.len() != out.len() {
            return Err(Error::corrupt(format!("{} bytes of values for a chunk of {}", values.len(), out.len())).clause("raw 3"));
        }
        out.copy_from_slice(values);
        Ok(())
    }
}
