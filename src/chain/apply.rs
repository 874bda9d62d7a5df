//! Rebuilds a chunk: the absolute chunk, then each delta on the result before.

use bytes::Bytes;

use crate::codec::{ChunkKind, Columns, Registry};
use crate::limits::zeroed;
use crate::plan::read::Step;
use crate::{Dtype, Error, Result};

/// Decodes `steps`, newest first, with the pages of each, into `out`; compares with the CRC of the decoded bytes.
pub(crate) fn decode_steps(
    registry: &Registry,
    dtype: Dtype,
    element_count: u64,
    steps: &[(&Step, &[Bytes])],
    expected_crc: u32,
    out: &mut [u8],
) -> Result<()> {
    let mut scratch = match steps.len() {
        0 | 1 => Vec::new(),
        _ => zeroed(out.len(), "a chunk")?,
    };
    for (newer, (step, pages)) in steps.iter().enumerate().rev() {
        let codec = step.entry.codec.as_ref().ok_or_else(|| Error::corrupt("a stored chunk without a codec"))?;
        let codec = registry.resolve(codec)?;
        let oldest = newer + 1 == steps.len();
        if !codec.base_use().allows(step.entry.kind) || oldest != (step.entry.kind == ChunkKind::Absolute) {
            return Err(Error::corrupt(format!("a chunk of codec `{}` that is {}", codec.id(), step.entry.kind.name())).clause("codecs 3"));
        }
        let columns: Vec<(&str, Bytes)> =
            step.entry.pages.iter().zip(*pages).map(|(page, bytes)| (page.column.as_str(), bytes.clone())).collect();
        // The newest is decoded into `out`, the one before into the other buffer, and so on.
        let (target, base): (&mut [u8], &[u8]) = if newer % 2 == 0 { (&mut *out, &scratch) } else { (&mut scratch, &*out) };
        let input = Columns { dtype, element_count, columns: &columns, base: (!oldest).then_some(base) };
        codec.decode(&input, target)?;
    }
    if crc32fast::hash(out) == expected_crc {
        return Ok(());
    }
    Err(Error::corrupt("decoded bytes do not have the checksum that they had when they were saved").clause("chain 3.4"))
}
