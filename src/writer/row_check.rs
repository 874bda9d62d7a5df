//! Check of the rows that callers name as changed, before anything is encoded from them.

use tensorcask_kernels::row_hash::row_hash;

use super::base_cache::BaseChunk;
use super::input::{ChunkRef, SaveInput};
use crate::codec::Chunk;
use crate::precision::Rounded;
use crate::reader::chunk_crcs;
use crate::{Error, Result, TensorView, boxed};

/// Refuses changed rows that leave out a row which did change. Compares with the base chunk if it is there, else with the
/// hashes of rows or the checksums of chunks in which no row changed.
#[boxed]
pub(super) async fn check_changed_rows(
    input: &SaveInput<'_>,
    chunks: &[ChunkRef],
    rounded: &[Rounded<'_>],
    bases: &[Option<BaseChunk<'_>>],
) -> Result<()> {
    let mut unchanged = Vec::new();
    for ((&at, rounded), base) in chunks.iter().zip(rounded).zip(bases) {
        let Some(tensor) = at.base else { continue };
        match base {
            Some(base) => {
                let Some(rows) = input.changed_rows(at)? else { continue };
                let chunk = Chunk { base: Some(base), ..input.codec_chunk(at, &rounded.data)? };
                let Some((row_bytes, _)) = chunk.rows() else { continue };
                let pairs = chunk.data.chunks_exact(row_bytes).zip(base.chunks_exact(row_bytes)).zip(0u64..);
                let mut changed = pairs.filter(|((ours, theirs), _)| ours != theirs).map(|(_, row)| row);
                if let Some(row) = changed.find(|row| rows.binary_search(row).is_err()) {
                    return Err(left_out(&format!("row {row}"), input.view(at), at.chunk));
                }
            }
            None => {
                let Some(rows) = input.checkable_rows(at)? else { continue };
                let hashes = input.row_hashes(at)?;
                let (Some(hashes), Some((row_bytes, _))) = (hashes, input.codec_chunk(at, &rounded.data)?.rows()) else {
                    unchanged.push((at, rounded, (tensor, input.view(at).rect().clone(), at.chunk)));
                    continue;
                };
                let mut pairs = rounded.data.chunks_exact(row_bytes).zip(hashes).zip(0u64..);
                let differs = |(row, hash): (&[u8], &u32)| row_hash(row) != *hash;
                if let Some((_, row)) = pairs.find(|(pair, row)| rows.binary_search(row).is_err() && differs(*pair)) {
                    return Err(left_out(&format!("row {row}"), input.view(at), at.chunk));
                }
            }
        }
    }
    let (Some(parent), false) = (input.parent, unchanged.is_empty()) else { return Ok(()) };
    let places: Vec<_> = unchanged.iter().map(|(_, _, place)| place.clone()).collect();
    let crcs = chunk_crcs(&parent.snapshot.chain, &places).await?;
    for ((at, rounded, _), crc) in unchanged.into_iter().zip(crcs) {
        if crc32fast::hash(&rounded.data) != crc {
            return Err(left_out("a row", input.view(at), at.chunk));
        }
    }
    Ok(())
}

fn left_out(row: &str, view: &TensorView<'_>, chunk: u64) -> Error {
    let message =
        format!("{row} of this chunk changed since the parent, but `changed_rows` leaves it out; give all rows that changed, or none");
    Error::invalid(message).tensor(view.name()).chunk(chunk)
}
