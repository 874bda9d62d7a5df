//! A chunk that was encoded while it was rounded.

use std::sync::Arc;

use bytes::Bytes;

use super::{Chunk, Codec, Columns, Encoded, decode};
use crate::Result;

/// Encoding by the codec that rounded the chunk. The encoding competes with the lossless codecs, because the codec that
/// rounded a chunk often stores the result in the fewest bytes.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub codec: Arc<dyn Codec>,
    pub encoded: Encoded,
}

impl Candidate {
    /// Decodes the columns into `out`, which must have the chunk's size.
    pub(crate) fn decode(&self, chunk: &Chunk<'_>, out: &mut [u8]) -> Result<()> {
        let column = |(name, bytes): &(&'static str, Vec<u8>)| (*name, Bytes::copy_from_slice(bytes));
        let columns: Vec<(&str, Bytes)> = self.encoded.columns.iter().map(column).collect();
        let base = chunk.base.filter(|_| self.encoded.uses_base);
        let input = Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base, partners: &[] };
        decode(self.codec.as_ref(), &input, out)
    }
}
