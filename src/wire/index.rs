//! The index root of a cask: all tables except those of chunks and pages. Spec: `spec/index.md`, clause 2.

use std::ops::Range;

use bytes::Bytes;

use super::columns::{Column, ColumnsReader, ColumnsWriter, Heap};
use super::layout::{Layout, LayoutCounts};
use super::{COLUMN_ALIGNMENT, Cursor, HEADER_BYTES, Id, Put, ShardRow, TensorRow, align_up};
use crate::limits::reserve;
use crate::tensor::ChunkGrid;
use crate::version::Features;
use crate::{Error, Limits, Result};

/// Codec id and version in the dictionary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodecRef {
    /// Id, such as `tc.raw`.
    pub id: String,
    /// Version of the codec's format.
    pub version: u16,
}

/// Row of the blob table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlobRow {
    pub rank: u32,
    pub name: String,
    pub bytes: u64,
    pub crc: u32,
}

/// Row of the part table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartRow {
    pub pages_offset: u64,
    pub page_count: u64,
    pub crc: u32,
}

/// Content of an index root to be encoded.
#[derive(Debug, Default)]
pub(crate) struct RootContent {
    pub tensors: Vec<TensorRow>,
    pub shards: Vec<ShardRow>,
    pub codecs: Vec<CodecRef>,
    pub columns: Vec<String>,
    pub blobs: Vec<BlobRow>,
    pub blobs_offset: u64,
    pub parts: Vec<PartRow>,
}

/// Index part in the root's table: the chunks and pages of consecutive shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartInfo {
    pub shards: Range<usize>,
    pub chunk_count: u64,
    pub pages_offset: u64,
    pub page_count: u64,
    pub crc: u32,
    /// Byte range of the part in the file.
    pub range: Range<u64>,
}

/// A decoded index root.
#[derive(Debug, Clone)]
pub(crate) struct IndexRoot {
    pub layout: Layout,
    pub codecs: Vec<CodecRef>,
    pub columns: Vec<String>,
    pub blob_ranks: Column<u32>,
    pub blob_names: Heap<u8>,
    pub blob_bytes: Column<u64>,
    pub blob_crcs: Column<u32>,
    pub blob_offsets: Vec<u64>,
    pub blobs_offset: u64,
    /// Offset of the first part; pages and blobs end here.
    pub index_offset: u64,
    pub parts: Vec<PartInfo>,
}

const HEAD_BYTES: usize = 128;

/// Number of chunks at which a part is closed, after the current shard.
pub(crate) const PART_CHUNKS: u64 = 1024;

impl RootContent {
    /// Encodes the index root for position `root_offset`. Returns the bytes and their checksum.
    pub(crate) fn encode(&self, id: Id, root_offset: u64) -> Result<(Vec<u8>, u32)> {
        let text_bytes = |rows: &mut dyn Iterator<Item = usize>| rows.fold(0u64, |sum, n| sum.saturating_add(n as u64));
        let counts = Layout::counts(&self.tensors, &self.shards);
        let mut head = Vec::with_capacity(HEAD_BYTES);
        for count in [
            counts.tensors,
            counts.name_bytes,
            counts.dimensions,
            counts.shards,
            self.codecs.len() as u64,
            text_bytes(&mut self.codecs.iter().map(|c| c.id.len())),
            self.columns.len() as u64,
            text_bytes(&mut self.columns.iter().map(String::len)),
            self.blobs.len() as u64,
            text_bytes(&mut self.blobs.iter().map(|b| b.name.len())),
            self.blobs_offset,
            self.parts.len() as u64,
            0, // extensions
        ] {
            head.put_u64(count);
        }
        head.resize(HEAD_BYTES, 0);
        let mut out = ColumnsWriter::default();
        out.column(head);
        Layout::encode(&self.tensors, &self.shards, &mut out)?;
        out.heap(self.codecs.iter().map(|c| c.id.as_bytes()))?;
        out.column(self.codecs.iter().map(|c| c.version));
        out.heap(self.columns.iter().map(String::as_bytes))?;
        out.column(self.blobs.iter().map(|b| b.rank));
        out.heap(self.blobs.iter().map(|b| b.name.as_bytes()))?;
        out.column(self.blobs.iter().map(|b| b.bytes));
        out.column(self.blobs.iter().map(|b| b.crc));
        out.column(self.parts.iter().map(|p| p.pages_offset));
        out.column(self.parts.iter().map(|p| p.page_count));
        out.column(self.parts.iter().map(|p| p.crc));
        out.column::<u8>([]); // extension features
        out.column::<u64>([]); // extension lengths
        let bytes = out.finish();
        let crc = index_crc(id, root_offset, &bytes);
        Ok((bytes, crc))
    }
}

impl IndexRoot {
    /// Decodes an index root whose checksum has been compared. `alignment` is the page alignment.
    pub(crate) fn decode(bytes: Bytes, root_offset: u64, alignment: u64, features: Features, limits: &Limits) -> Result<Self> {
        Limits::check(bytes.len() as u64, limits.max_index_bytes, "size of the index root")?;
        let mut reader = ColumnsReader::new(bytes, "index root");
        let head: Column<u8> = reader.column(HEAD_BYTES as u64)?;
        let mut head = Cursor::new(head.bytes(), "index head");
        let layout = LayoutCounts { tensors: head.u64()?, name_bytes: head.u64()?, dimensions: head.u64()?, shards: head.u64()? };
        let codec_count = head.u64()?;
        let codec_bytes = head.u64()?;
        let column_count = head.u64()?;
        let column_bytes = head.u64()?;
        let blob_count = head.u64()?;
        let blob_name_bytes = head.u64()?;
        let blobs_offset = head.u64()?;
        let part_count = head.u64()?;
        let extension_count = head.u64()?;
        head.zeros(24).map_err(|e| e.clause("index 2.1"))?;

        let layout = Layout::decode(layout, &mut reader, limits)?;
        let codecs = dictionary(&mut reader, codec_count, codec_bytes, limits, "codec")?;
        let versions: Column<u16> = reader.column(codec_count)?;
        let codecs = codecs.into_iter().zip(versions.iter()).map(|(id, version)| CodecRef { id, version }).collect();
        let columns = dictionary(&mut reader, column_count, column_bytes, limits, "column")?;

        Limits::check(blob_count, limits.max_blobs, "number of blobs")?;
        let blob_ranks: Column<u32> = reader.column(blob_count)?;
        let blob_names = reader.text(blob_count, blob_name_bytes, limits.max_name_bytes)?;
        let blob_bytes: Column<u64> = reader.column(blob_count)?;
        let blob_crcs: Column<u32> = reader.column(blob_count)?;
        let part_offsets: Column<u64> = reader.column(part_count)?;
        let part_pages: Column<u64> = reader.column(part_count)?;
        let part_crcs: Column<u32> = reader.column(part_count)?;
        let extension_features: Column<u8> = reader.column(extension_count)?;
        let extension_bytes: Column<u64> = reader.column(extension_count)?;
        skip_extensions(&mut reader, &extension_features, &extension_bytes, features)?;
        reader.finish()?;

        for shard in 0..layout.tensor_count() {
            if layout.shards_of(shard).is_empty() {
                return Err(Error::corrupt("the tensor has no shard").tensor(layout.name(shard)).clause("index 3.5"));
            }
        }
        let (blob_offsets, index_offset) = place_blobs(&blob_ranks, &blob_names, &blob_bytes, blobs_offset, alignment)?;

        let mut parts = part_shards(&layout)?;
        if parts.len() as u64 != part_count {
            return Err(Error::corrupt(format!("{part_count} parts are stored, but the shards need {}", parts.len())).clause("index 4.1"));
        }
        if parts.is_empty() && blobs_offset != HEADER_BYTES {
            return Err(Error::corrupt(format!("blobs begin at {blobs_offset}; without pages they must begin at {HEADER_BYTES}"))
                .clause("index 4.4"));
        }
        let mut position = index_offset;
        for (i, part) in parts.iter_mut().enumerate() {
            part.pages_offset = part_offsets.get(i).unwrap_or_default();
            part.page_count = part_pages.get(i).unwrap_or_default();
            part.crc = part_crcs.get(i).unwrap_or_default();
            let bytes = part_bytes(part.chunk_count, part.page_count)
                .ok_or_else(|| Error::corrupt(format!("part {i} is beyond 2^64 bytes")).clause("index 4.2"))?;
            Limits::check(bytes, limits.max_index_bytes, "size of an index part")?;
            let end = position
                .checked_add(bytes)
                .filter(|&end| end <= root_offset)
                .ok_or_else(|| Error::corrupt(format!("part {i} does not fit before the root")).clause("index 4.2"))?;
            part.range = position..end;
            position = end;
        }
        if position != root_offset {
            return Err(Error::corrupt(format!("parts end at {position}, but the root begins at {root_offset}")).clause("index 4.2"));
        }
        Ok(Self { layout, codecs, columns, blob_ranks, blob_names, blob_bytes, blob_crcs, blob_offsets, blobs_offset, index_offset, parts })
    }

    /// Returns the part that describes a shard; `None` for an empty shard after the last part.
    pub(crate) fn part_of(&self, shard: usize) -> Option<usize> {
        let part = self.parts.partition_point(|part| part.shards.end <= shard);
        self.parts.get(part).filter(|info| info.shards.contains(&shard)).map(|_| part)
    }
}

/// Computes the CRC-32 of an index root or part: over the cask's id, the offset, and the bytes.
pub(crate) fn index_crc(id: Id, offset: u64, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.put(&id.0);
    hasher.put_u64(offset);
    hasher.put(bytes);
    hasher.finalize()
}

/// Assigns shards to parts: consecutive shards share a part until they hold [`PART_CHUNKS`] chunks. Empty shards at the
/// end of the table, after a closed part, belong to no part.
pub(crate) fn part_shards(layout: &Layout) -> Result<Vec<PartInfo>> {
    let mut parts = Vec::new();
    let mut open = PartInfo { shards: 0..0, chunk_count: 0, pages_offset: 0, page_count: 0, crc: 0, range: 0..0 };
    for shard in 0..layout.shard_count() {
        let chunks = ChunkGrid::new(layout.dtype(layout.tensor_of(shard)), &layout.rect(shard).shape)?.chunk_count();
        open.chunk_count = open.chunk_count.saturating_add(chunks);
        open.shards.end = shard.saturating_add(1);
        if open.chunk_count >= PART_CHUNKS {
            let next = PartInfo { shards: open.shards.end..open.shards.end, chunk_count: 0, ..open.clone() };
            parts.push(std::mem::replace(&mut open, next));
        }
    }
    if open.chunk_count > 0 {
        parts.push(open);
    }
    Ok(parts)
}

/// Returns the size of a part in bytes, or `None` beyond u64.
fn part_bytes(chunks: u64, pages: u64) -> Option<u64> {
    let column = |rows: u64, width: u64| align_up(rows.checked_mul(width)?, COLUMN_ALIGNMENT);
    [column(chunks, 1), column(chunks, 1), column(chunks, 1), column(chunks, 4), column(pages, 1), column(pages, 4), column(pages, 4)]
        .into_iter()
        .try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

/// Reads a dictionary of distinct names, whose indexes are one byte wide.
fn dictionary(reader: &mut ColumnsReader, count: u64, heap_bytes: u64, limits: &Limits, what: &str) -> Result<Vec<String>> {
    let heap = reader.text(count, heap_bytes, limits.max_name_bytes)?;
    if count > 255 {
        return Err(Error::corrupt(format!("{count} {what} names, more than 255")).clause("index 2.3"));
    }
    let mut names: Vec<String> = reserve(heap.len(), "dictionary")?;
    for row in 0..heap.len() {
        let name = heap.text(row).unwrap_or_default().to_owned();
        if name.is_empty() || names.contains(&name) {
            return Err(Error::corrupt(format!("{what} name `{name}` is empty or a duplicate")).clause("index 2.3"));
        }
        names.push(name);
    }
    Ok(names)
}

/// Returns the offset of each blob, and the start of the index after the last blob, rounded up to the column alignment.
fn place_blobs(ranks: &Column<u32>, names: &Heap<u8>, lengths: &Column<u64>, blobs_offset: u64, alignment: u64) -> Result<(Vec<u64>, u64)> {
    let mut offsets = reserve(lengths.len(), "blobs")?;
    let mut end = blobs_offset;
    let mut previous = None;
    for blob in 0..lengths.len() {
        let name = names.text(blob).unwrap_or_default();
        let key = (ranks.get(blob).unwrap_or_default(), name);
        if previous.is_some_and(|previous| previous >= key) {
            return Err(Error::corrupt("blobs do not ascend strictly by rank and name").tensor(name).clause("index 2.4"));
        }
        previous = Some(key);
        let beyond = || Error::corrupt("a blob is beyond 2^64 bytes").tensor(name).clause("index 2.4");
        let start = align_up(end, alignment).ok_or_else(beyond)?;
        end = start.checked_add(lengths.get(blob).unwrap_or_default()).ok_or_else(beyond)?;
        offsets.push(start);
    }
    let end = align_up(end, COLUMN_ALIGNMENT).ok_or_else(|| Error::corrupt("blobs end beyond 2^64 bytes").clause("index 2.4"))?;
    Ok((offsets, end))
}

/// Skips the data of features that may be ignored.
fn skip_extensions(reader: &mut ColumnsReader, ids: &Column<u8>, lengths: &Column<u64>, features: Features) -> Result<()> {
    let mut previous = None;
    for (feature, length) in ids.iter().zip(lengths.iter()) {
        let declared = features.may_ignore.checked_shr(u32::from(feature)).is_some_and(|bits| bits & 1 == 1);
        if !declared || previous.is_some_and(|previous| previous >= feature) {
            return Err(
                Error::corrupt(format!("extension {feature} is out of order or not declared in the postscript")).clause("index 2.5")
            );
        }
        previous = Some(feature);
        reader.column::<u8>(length)?;
    }
    Ok(())
}
