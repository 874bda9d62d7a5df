//! Base chunks: the chunks of the parent that codecs encode a delta against.
//!
//! This stage runs before encoding, for a window of chunks. A base chunk comes from the [`BaseCache`], or is read back
//! from the store when the cache does not have it.

use rayon::prelude::*;

use super::base_cache::{BaseCache, BaseChunk, CachedChunk, key_of};
use super::input::{ChunkRef, SaveInput};
use crate::reader::ChunkItem;
use crate::spare::Spare;
use crate::{Result, parallel};

/// The base of each chunk, from the cache or the store. `None` for a chunk that the parent does not have, and for a
/// chunk outside the cache whose changed rows are known.
pub(super) async fn base_chunks<'b>(
    input: &SaveInput<'_>,
    cache: &'b BaseCache,
    chunks: &[ChunkRef],
) -> Result<Vec<Option<BaseChunk<'b>>>> {
    let Some(parent) = input.parent else { return Ok(chunks.iter().map(|_| None).collect()) };
    let snapshot = parent.snapshot.record().id;
    let cached = |&at: &ChunkRef| {
        at.base?;
        let view = input.view(at);
        let key = key_of(view);
        let grid = input.grid(at).ok()?;
        cache.chunk(&CachedChunk { snapshot, key: &key, grid, chunk: at.chunk }, input.store.registry())
    };
    let mut bases: Vec<Option<BaseChunk<'b>>> = parallel::run(|| chunks.par_iter().map(cached).collect());
    let mut items = Vec::new();
    for (&at, base) in chunks.iter().zip(&mut bases) {
        let (Some(tensor), None) = (at.base, &base) else { continue };
        // Codecs need no base for a chunk whose changed rows are known.
        if input.changed_rows(at)?.is_some() {
            continue;
        }
        let buffer = Spare::new(input.original(at)?.len(), "a base chunk")?;
        let BaseChunk::Own(out) = base.insert(BaseChunk::Own(buffer)) else { continue };
        items.push(ChunkItem { tensor, rect: input.view(at).rect().clone(), chunk: at.chunk, out });
    }
    if !items.is_empty() {
        parent.read(items).await?;
    }
    Ok(bases)
}
