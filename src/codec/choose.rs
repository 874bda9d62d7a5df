//! Picks the codec of a chunk: the fewest stored bytes, never more than raw.

use bytes::Bytes;

use super::{Chunk, ChunkKind, Codec, CodecRef, Columns, Encoded, EncodedChunk, Raw, Registry};
use crate::limits::zeroed;
use crate::{Error, ErrorKind, Result};

/// Bytes that a page of `bytes` costs in a cask: padded to the alignment, with its row in the index.
fn page_cost(bytes: u64) -> u64 {
    bytes.next_multiple_of(64).saturating_add(9)
}

/// Encodes a chunk with the lossless codec that stores it in the fewest bytes; of equals, the cheapest to decode, then
/// the first by id. A chunk equal to its base takes no page.
pub(crate) fn encode_chunk(registry: &Registry, chunk: &Chunk<'_>, verify: bool) -> Result<EncodedChunk> {
    let crc = crc32fast::hash(chunk.data);
    if let Some(base) = chunk.base.filter(|base| *base == chunk.data) {
        if verify && crc32fast::hash(base) != crc {
            return Err(changed("an unchanged chunk"));
        }
        return Ok(EncodedChunk { kind: ChunkKind::Unchanged, codec: None, columns: vec![], crc });
    }
    let cost = |pages: &[u64]| pages.iter().fold(0u64, |sum, &bytes| sum.saturating_add(page_cost(bytes)));
    let mut best: Option<(u64, f32, &dyn Codec)> = None;
    for codec in registry.iter().filter(|codec| codec.is_lossless()) {
        let Some(pages) = codec.estimate(chunk) else { continue };
        let (bytes, decode) = (cost(&pages), codec.cost().decode);
        if best.is_none_or(|(least, cheapest, _)| bytes < least || (bytes == least && decode < cheapest)) {
            best = Some((bytes, decode, codec.as_ref()));
        }
    }
    let raw_bytes = cost(&[chunk.data.len() as u64]);
    let (codec, encoded) = match best {
        Some((bytes, _, codec)) if bytes <= raw_bytes && codec.id() != Raw::ID => {
            let encoded = codec.encode(chunk)?;
            let pages: Vec<u64> = encoded.columns.iter().map(|(_, bytes)| bytes.len() as u64).collect();
            // An estimate may have been too good.
            if cost(&pages) <= raw_bytes { (codec, encoded) } else { (&Raw as &dyn Codec, Raw.encode(chunk)?) }
        }
        _ => (&Raw as &dyn Codec, Raw.encode(chunk)?),
    };
    let Encoded { uses_base, columns } = encoded;
    let columns: Vec<(String, Bytes)> = columns.into_iter().map(|(name, bytes)| (name.to_owned(), bytes.into())).collect();
    let kind = if uses_base { ChunkKind::Delta } else { ChunkKind::Absolute };
    if verify {
        check_decodes(codec, chunk, &columns, kind, crc)?;
    }
    Ok(EncodedChunk { kind, codec: Some(CodecRef { id: codec.id().to_owned(), version: codec.version() }), columns, crc })
}

/// What goes up is what decodes back: the bytes whose checksum is stored, as a reader would decode them.
fn check_decodes(codec: &dyn Codec, chunk: &Chunk<'_>, columns: &[(String, Bytes)], kind: ChunkKind, crc: u32) -> Result<()> {
    if !codec.base_use().allows(kind) {
        return Err(Error::invalid(format!(
            "codec `{}` made a chunk that is {}, against its stated use of bases",
            codec.id(),
            kind.name()
        )));
    }
    let mut decoded = zeroed(chunk.data.len(), "verification")?;
    let columns: Vec<(&str, Bytes)> = columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    let base = chunk.base.filter(|_| kind == ChunkKind::Delta);
    let input = Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base };
    codec.decode(&input, &mut decoded)?;
    if crc32fast::hash(&decoded) == crc { Ok(()) } else { Err(changed(&format!("what codec `{}` encoded", codec.id()))) }
}

fn changed(what: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "{what} does not decode to the bytes that were given; nothing was committed. The tensor changed during the save, or memory or codec are faulty"
        ),
    )
}

/// Stored bytes of a chunk, as far as a quick look can tell: of its best lossless codec, and never more than raw.
pub(crate) fn estimate_chunk(registry: &Registry, chunk: &Chunk<'_>) -> u64 {
    if chunk.base.is_some_and(|base| base == chunk.data) {
        return 0;
    }
    let cost = |pages: &[u64]| pages.iter().fold(0u64, |sum, &bytes| sum.saturating_add(page_cost(bytes)));
    let raw = cost(&[chunk.data.len() as u64]);
    let codecs = registry.iter().filter(|codec| codec.is_lossless());
    codecs.filter_map(|codec| Some(cost(&codec.estimate(chunk)?))).fold(raw, u64::min)
}
