//! Base chunks and partner chunks: the other data that codecs may use for a chunk.
//!
//! Both stages run before encoding, for a window of chunks. A base chunk comes from the [`BaseCache`], or is read back
//! from the store when the cache does not have it. Partner chunks come from the state that is being saved, in their
//! stored form.

use std::borrow::Cow;

use rayon::prelude::*;

use super::base_cache::{BaseCache, CachedChunk, key_of};
use super::input::{ChunkRef, SaveInput};
use super::rounding::stored_form_alone;
use crate::codec::Partner;
use crate::limits::zeroed;
use crate::precision::Setting;
use crate::reader::ChunkItem;
use crate::{Dtype, Result, boxed, parallel};

/// Chunk of another tensor of the same parameter, and its base.
pub(super) struct PartnerChunk<'a> {
    role: &'static str,
    dtype: Dtype,
    data: Cow<'a, [u8]>,
    base: Option<Cow<'a, [u8]>>,
}

impl PartnerChunk<'_> {
    /// The partner, as codecs take it.
    pub(super) fn as_partner(&self) -> Partner<'_> {
        Partner { role: self.role, dtype: self.dtype, data: &self.data, base: self.base.as_deref() }
    }
}

/// The base of each chunk, from the cache or the store. `None` for a chunk that the parent does not have, and for a
/// chunk outside the cache whose changed rows are known.
pub(super) async fn base_chunks<'b>(
    input: &SaveInput<'_>,
    cache: &'b BaseCache,
    chunks: &[ChunkRef],
) -> Result<Vec<Option<Cow<'b, [u8]>>>> {
    let Some(parent) = input.parent else { return Ok(chunks.iter().map(|_| None).collect()) };
    let snapshot = parent.snapshot.record().id;
    let cached = |&at: &ChunkRef| {
        at.base?;
        let view = input.view(at);
        let key = key_of(view);
        let grid = input.grid(at).ok()?;
        cache.chunk(&CachedChunk { snapshot, key: &key, grid, chunk: at.chunk }, input.store.registry())
    };
    let mut bases: Vec<Option<Cow<'b, [u8]>>> = parallel::run(|| chunks.par_iter().map(cached).collect());
    let mut items = Vec::new();
    for (&at, base) in chunks.iter().zip(&mut bases) {
        let (Some(tensor), None) = (at.base, &base) else { continue };
        // Codecs need no base for a chunk whose changed rows are known.
        if input.changed_rows(at)?.is_some() {
            continue;
        }
        let buffer = zeroed(input.original(at)?.len(), "a base chunk")?;
        let Cow::Owned(out) = base.insert(Cow::Owned(buffer)) else { continue };
        items.push(ChunkItem { tensor, rect: input.view(at).rect().clone(), chunk: at.chunk, out });
    }
    if !items.is_empty() {
        parent.read(items).await?;
    }
    Ok(bases)
}

/// The partners of each chunk that some codec may use and the state has.
#[boxed]
pub(super) async fn partner_chunks<'a>(
    input: &SaveInput<'a>,
    cache: &'a BaseCache,
    chunks: &[ChunkRef],
) -> Result<Vec<Vec<PartnerChunk<'a>>>> {
    let mut partners_of: Vec<Vec<PartnerChunk<'a>>> = Vec::with_capacity(chunks.len());
    // Partners whose base is needed, too: position of the chunk, position of the partner in its list, and the partner's
    // chunk.
    let mut with_base = Vec::new();
    for (position, &at) in chunks.iter().enumerate() {
        let mut partners = Vec::new();
        for need in input.store.registry().partner_roles(&input.tensor(at).description.role) {
            let Some((tensor, shard)) = input.layout.partner(at.tensor, need.role, input.view(at).rect()) else { continue };
            let partner = ChunkRef { tensor, shard, chunk: at.chunk, base: None };
            let is_rounded = input.precision(input.tensor(partner)).setting != Setting::Lossless;
            if is_rounded && need.base {
                // A prediction from rounded moments saves too little to be worth its time.
                continue;
            }
            let base = match (need.base, at.base, input.parent) {
                (true, Some(own), Some(parent)) => {
                    let found = parent.find(input.view(partner));
                    found.filter(|_| parent.snapshot.chain.newest().directory.partner(own, need.role) == found)
                }
                _ => None,
            };
            let partner = ChunkRef { base, ..partner };
            if base.is_some() {
                with_base.push((position, partners.len(), partner));
            }
            let data = if is_rounded { stored_form_alone(input, partner)?.data } else { Cow::Borrowed(input.original(partner)?) };
            partners.push(PartnerChunk { role: need.role, dtype: input.tensor(partner).description.dtype, data, base: None });
        }
        partners_of.push(partners);
    }
    let chunks: Vec<ChunkRef> = with_base.iter().map(|(_, _, partner)| *partner).collect();
    for ((position, place, _), base) in with_base.into_iter().zip(base_chunks(input, cache, &chunks).await?) {
        if let Some(partner) = partners_of.get_mut(position).and_then(|partners| partners.get_mut(place)) {
            partner.base = base;
        }
    }
    Ok(partners_of)
}
