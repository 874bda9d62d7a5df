//! Base chunks: the chunks of the parent that codecs encode a delta against.
//!
//! This stage runs before encoding, for a window of chunks. A base chunk comes from the [`BaseCache`], or is read back
//! from the store when the cache does not have it. A base that no codec is likely to use is withheld: neither read nor
//! decoded.

use rayon::prelude::*;
use tensorcask_kernels::spare::Spare;

use super::base_cache::{BaseCache, BaseChunk, CachedChunk, key_of};
use super::input::{ChunkRef, SaveInput};
use crate::reader::{ChunkItem, chunk_crcs};
use crate::{Error, Result, boxed, parallel};

/// The base of each chunk, from the cache or the store. `None` for a chunk that the parent does not have, for a chunk
/// outside the cache whose changed rows are known and can be checked, and for a withheld base.
pub(super) async fn base_chunks<'b>(
    input: &SaveInput<'_>,
    cache: &'b BaseCache,
    chunks: &[ChunkRef],
    is_withheld: &[bool],
) -> Result<Vec<Option<BaseChunk<'b>>>> {
    let Some(parent) = input.parent else { return Ok(chunks.iter().map(|_| None).collect()) };
    let snapshot = parent.snapshot.record().id;
    let cached = |(&at, &is_withheld): (&ChunkRef, &bool)| {
        at.base.filter(|_| !is_withheld)?;
        let view = input.view(at);
        let key = key_of(view);
        let grid = input.grid(at).ok()?;
        cache.chunk(&CachedChunk { snapshot, key: &key, grid, chunk: at.chunk }, input.store.registry())
    };
    let mut bases: Vec<Option<BaseChunk<'b>>> = parallel::run(|| chunks.par_iter().zip(is_withheld).map(cached).collect());
    let mut items = Vec::new();
    for ((&at, base), &is_withheld) in chunks.iter().zip(&mut bases).zip(is_withheld) {
        let (Some(tensor), None, false) = (at.base, &base, is_withheld) else { continue };
        // Codecs need no base for a chunk whose changed rows are known.
        if input.checkable_rows(at)?.is_some() {
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

/// CRC-32 of the bases of chunks, without reading the bases. `None` for a chunk that the parent does not have.
#[boxed]
pub(super) async fn base_crcs(input: &SaveInput<'_>, cache: &BaseCache, chunks: &[ChunkRef]) -> Result<Vec<Option<u32>>> {
    let Some(parent) = input.parent else { return Ok(vec![None; chunks.len()]) };
    let snapshot = parent.snapshot.record().id;
    let mut crcs: Vec<Option<u32>> = chunks.iter().map(|&at| cache.crc(snapshot, &key_of(input.view(at)), at.chunk)).collect();
    let missing =
        |(at, crc): (&ChunkRef, &Option<u32>)| Some((at.base.filter(|_| crc.is_none())?, input.view(*at).rect().clone(), at.chunk));
    let places: Vec<_> = chunks.iter().zip(&crcs).filter_map(missing).collect();
    if !places.is_empty() {
        let mut found = chunk_crcs(&parent.snapshot.chain, &places).await?.into_iter();
        for (at, crc) in chunks.iter().zip(&mut crcs).filter(|(at, crc)| at.base.is_some() && crc.is_none()) {
            *crc = Some(found.next().ok_or_else(|| input.locate(*at, Error::invalid("a checksum is missing")))?);
        }
    }
    Ok(crcs)
}
