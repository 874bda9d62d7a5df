//! One part of an index: the chunk and page tables of consecutive shards. Spec: `spec/index.md`, clause 4.

use bytes::Bytes;

use super::align_up;
use super::columns::{Column, ColumnsReader, ColumnsWriter};
use super::index::{IndexRoot, PartInfo};
use crate::limits::reserve;
use crate::tensor::ChunkGrid;
use crate::{Error, Result};

/// Storage kind of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ChunkKind {
    /// Same content as in the parent snapshot; no bytes stored.
    Unchanged = 0,
    /// Stored in full; decodes without a base.
    Absolute = 1,
    /// Stored as a delta; decodes with the same chunk of the parent snapshot.
    Delta = 2,
}

impl ChunkKind {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Unchanged),
            1 => Some(Self::Absolute),
            2 => Some(Self::Delta),
            _ => None,
        }
    }

    /// Name in listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unchanged => "unchanged",
            Self::Absolute => "absolute",
            Self::Delta => "delta",
        }
    }
}

/// Row of the chunk table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkRow {
    pub kind: ChunkKind,
    pub codec: u8,
    pub page_count: u8,
    pub crc: u32,
}

/// Row of the page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageRow {
    pub column: u8,
    pub bytes: u32,
    pub crc: u32,
}

pub(crate) fn encode_part(chunks: &[ChunkRow], pages: &[PageRow]) -> Vec<u8> {
    let mut out = ColumnsWriter::default();
    out.column(chunks.iter().map(|c| c.kind as u8));
    out.column(chunks.iter().map(|c| c.codec));
    out.column(chunks.iter().map(|c| c.page_count));
    out.column(chunks.iter().map(|c| c.crc));
    out.column(pages.iter().map(|p| p.column));
    out.column(pages.iter().map(|p| p.bytes));
    out.column(pages.iter().map(|p| p.crc));
    out.finish()
}

/// Returns the offset of the next page: the next aligned byte after the previous page. A raw chunk that follows a raw
/// chunk of the same shard begins without a gap.
pub(crate) fn place_page(end: u64, continues_raw: bool, alignment: u64) -> Option<u64> {
    if continues_raw { Some(end) } else { align_up(end, alignment) }
}

/// A decoded part.
#[derive(Debug, Clone)]
pub(crate) struct IndexPart {
    pub first_shard: usize,
    /// First chunk row of each shard; one entry more than shards.
    pub shard_chunks: Vec<u32>,
    pub kinds: Column<u8>,
    pub codecs: Column<u8>,
    pub crcs: Column<u32>,
    /// First page row of each chunk; one entry more than chunks.
    pub chunk_pages: Vec<u32>,
    pub page_columns: Column<u8>,
    pub page_bytes: Column<u32>,
    pub page_crcs: Column<u32>,
    pub page_offsets: Vec<u64>,
    /// End of the last page in the file.
    pub pages_end: u64,
}

impl IndexPart {
    /// Decodes a part whose checksum has been compared.
    pub(crate) fn decode(bytes: Bytes, root: &IndexRoot, info: &PartInfo, alignment: u64, raw_codec: Option<u8>) -> Result<Self> {
        let bad = |message: String| Error::corrupt(format!("index part at {}: {message}", info.range.start)).clause("index 4.3");
        let mut reader = ColumnsReader::new(bytes, "index part");
        let kinds: Column<u8> = reader.column(info.chunk_count)?;
        let codecs: Column<u8> = reader.column(info.chunk_count)?;
        let page_counts: Column<u8> = reader.column(info.chunk_count)?;
        let crcs: Column<u32> = reader.column(info.chunk_count)?;
        let page_columns: Column<u8> = reader.column(info.page_count)?;
        let page_bytes: Column<u32> = reader.column(info.page_count)?;
        let page_crcs: Column<u32> = reader.column(info.page_count)?;
        reader.finish()?;

        let mut shard_chunks = reserve(info.shards.len().saturating_add(1), "shards")?;
        let mut chunk_end = 0u32;
        shard_chunks.push(0);
        for shard in info.shards.clone() {
            let layout = &root.layout;
            let count = ChunkGrid::new(layout.dtype(layout.tensor_of(shard)), &layout.rect(shard).shape)?.chunk_count();
            chunk_end = u32::try_from(count)
                .ok()
                .and_then(|count| chunk_end.checked_add(count))
                .ok_or_else(|| Error::limit("chunks of one part exceed 2^32").clause("limits 2"))?;
            shard_chunks.push(chunk_end);
        }

        let mut chunk_pages = reserve(kinds.len().saturating_add(1), "chunks")?;
        let mut page_offsets = reserve(page_bytes.len(), "pages")?;
        let mut end = info.pages_offset;
        let mut page = 0usize;
        let mut shard_starts = shard_chunks.iter().copied().peekable();
        let mut raw_before = false;
        chunk_pages.push(0);
        for (chunk, ((kind, codec), page_count)) in kinds.iter().zip(codecs.iter()).zip(page_counts.iter()).enumerate() {
            let chunk_kind = ChunkKind::from_code(kind).ok_or_else(|| bad(format!("chunk row {chunk} has kind {kind}")))?;
            match chunk_kind {
                ChunkKind::Unchanged if codec != 0 || page_count != 0 => {
                    return Err(bad(format!("chunk row {chunk} is unchanged, yet has a codec or pages")));
                }
                ChunkKind::Absolute | ChunkKind::Delta if usize::from(codec) >= root.codecs.len() => {
                    return Err(bad(format!("chunk row {chunk} has codec {codec}, which the dictionary lacks")));
                }
                _ => {}
            }
            let mut first_of_shard = false;
            while shard_starts.next_if(|&start| start as usize <= chunk).is_some() {
                first_of_shard = true;
            }
            let raw = chunk_kind == ChunkKind::Absolute && raw_codec == Some(codec);
            for nth in 0..page_count {
                let (Some(column), Some(bytes)) = (page_columns.get(page), page_bytes.get(page)) else {
                    return Err(bad(format!("chunk row {chunk} has more pages than the part")));
                };
                if usize::from(column) >= root.columns.len() {
                    return Err(bad(format!("page row {page} has column {column}, which the dictionary lacks")));
                }
                let continues_raw = raw && raw_before && !first_of_shard && nth == 0;
                let beyond = || bad(format!("page row {page} does not fit before the index"));
                let start = place_page(end, continues_raw, alignment).ok_or_else(beyond)?;
                end = start.checked_add(u64::from(bytes)).filter(|&end| end <= root.blobs_offset).ok_or_else(beyond)?;
                page_offsets.push(start);
                page = page.saturating_add(1);
            }
            raw_before = raw;
            chunk_pages.push(u32::try_from(page).map_err(|_| Error::limit("pages of one part exceed 2^32").clause("limits 2"))?);
        }
        if page != page_bytes.len() {
            return Err(bad(format!("{} page rows belong to no chunk", page_bytes.len().saturating_sub(page))));
        }
        Ok(Self {
            first_shard: info.shards.start,
            shard_chunks,
            kinds,
            codecs,
            crcs,
            chunk_pages,
            page_columns,
            page_bytes,
            page_crcs,
            page_offsets,
            pages_end: end,
        })
    }

    /// Chunk rows of a shard in this part.
    pub(crate) fn chunks_of(&self, shard: usize) -> std::ops::Range<usize> {
        let at = |i: usize| self.shard_chunks.get(i).copied().unwrap_or_default() as usize;
        let row = shard.saturating_sub(self.first_shard);
        at(row)..at(row.saturating_add(1))
    }

    pub(crate) fn pages_of(&self, chunk: usize) -> std::ops::Range<usize> {
        let at = |i: usize| self.chunk_pages.get(i).copied().unwrap_or_default() as usize;
        at(chunk)..at(chunk.saturating_add(1))
    }

    pub(crate) fn kind(&self, chunk: usize) -> ChunkKind {
        self.kinds.get(chunk).and_then(ChunkKind::from_code).unwrap_or(ChunkKind::Unchanged)
    }
}
