//! Decodes the index of a cask: requests byte ranges, accepts bytes, returns the index.

use std::ops::Range;
use std::sync::OnceLock;

use bytes::Bytes;

use super::PlaceOfPage;
use crate::codec::{ChunkKind, CodecRef, Raw};
use crate::limits::to_usize;
use crate::tensor::ChunkGrid;
use crate::tensor::Rect;
use crate::version::{Features, FormatVersion};
use crate::wire::index::{IndexRoot, PartInfo, index_crc};
use crate::wire::part::IndexPart;
use crate::wire::{Digest, HEADER_BYTES, Header, Id, POSTSCRIPT_BYTES, Postscript};
use crate::{Dtype, Error, Limits, Result};

/// Step of a decoder that does no I/O: a request for bytes, or the value.
#[derive(Debug)]
pub enum Progress<T> {
    /// Byte range of the file to read and push.
    Needs(Range<u64>),
    /// The decoded value.
    Done(T),
}

/// Decodes the index of one cask, from the end of the file backwards.
///
/// ```
/// use tensorcask::{Limits, container::{CaskEncoder, IndexDecoder, Progress}, wire::Id};
/// let (bytes, receipt) = CaskEncoder::new(Id([7; 16]), 6)?.finish()?;
/// let file: Vec<u8> = bytes.concat();
/// let mut decoder = IndexDecoder::new(receipt.id, receipt.bytes, Limits::default());
/// let index = loop {
///     match decoder.poll()? {
///         Progress::Needs(range) => {
///             let bytes = file[range.start as usize..range.end as usize].to_vec();
///             decoder.push(range.start, bytes.into())?;
///         }
///         Progress::Done(index) => break index,
///     }
/// };
/// assert_eq!((index.tensor_count(), index.file().digest), (0, receipt.digest));
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug)]
pub struct IndexDecoder {
    id: Id,
    file_bytes: u64,
    limits: Limits,
    tail_offset: u64,
    tail: Bytes,
}

/// Length of the first read at the end of a file whose index position is unknown.
const FIRST_TAIL_BYTES: u64 = 64 << 10;

impl IndexDecoder {
    /// Creates a decoder for a cask of known id (from its header or manifest) and size.
    pub fn new(id: Id, file_bytes: u64, limits: Limits) -> Self {
        Self { id, file_bytes, limits, tail_offset: file_bytes, tail: Bytes::new() }
    }

    /// Accepts bytes that end where the earlier bytes begin. The first bytes must end at the end of the file.
    pub fn push(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        if offset.checked_add(bytes.len() as u64) != Some(self.tail_offset) {
            return Err(Error::invalid(format!(
                "{} bytes at {offset} do not end at {}, where the known bytes begin",
                bytes.len(),
                self.tail_offset
            )));
        }
        self.tail = if self.tail.is_empty() { bytes } else { [bytes, self.tail.clone()].concat().into() };
        self.tail_offset = offset;
        Ok(())
    }

    /// Returns the index, or the byte range needed next.
    pub fn poll(&mut self) -> Result<Progress<CaskIndex>> {
        let Some(postscript_offset) = self.file_bytes.checked_sub(POSTSCRIPT_BYTES).filter(|&at| at >= HEADER_BYTES) else {
            return Err(Error::corrupt(format!("{} bytes are too few for a cask: truncated", self.file_bytes)).clause("container 1"));
        };
        if self.tail_offset > postscript_offset {
            return Ok(Progress::Needs(self.file_bytes.saturating_sub(FIRST_TAIL_BYTES)..self.tail_offset));
        }
        let postscript_bytes = self.slice(postscript_offset..self.file_bytes)?;
        let postscript = Postscript::decode(&postscript_bytes, self.id, self.file_bytes)?;
        let root_range = postscript.root_offset..postscript_offset;
        if self.tail_offset > root_range.start {
            let length = root_range.end.saturating_sub(root_range.start);
            Limits::check(length, self.limits.max_index_bytes, "size of the index root")?;
            return Ok(Progress::Needs(root_range.start..self.tail_offset));
        }
        let root_bytes = self.slice(root_range)?;
        if index_crc(self.id, postscript.root_offset, &root_bytes) != postscript.root_crc {
            return Err(Error::corrupt("index checksum mismatch").offset(postscript.root_offset).clause("container 3.6"));
        }
        let header = Header { id: self.id }.encode();
        let digest = Digest::of_parts([header.as_slice(), &root_bytes, &postscript_bytes]);
        let alignment = 1u64.checked_shl(u32::from(postscript.alignment_exponent)).unwrap_or(64);
        let root = IndexRoot::decode(root_bytes, postscript.root_offset, alignment, postscript.features, &self.limits)?;
        let index = CaskIndex {
            file: CaskFile {
                id: self.id,
                bytes: self.file_bytes,
                version: postscript.version,
                features: postscript.features,
                alignment,
                index_offset: root.index_offset,
                root_offset: postscript.root_offset,
                digest,
            },
            parts: root.parts.iter().map(|_| OnceLock::new()).collect(),
            root,
        };
        for (i, part) in index.root.parts.iter().enumerate() {
            if part.range.start >= self.tail_offset {
                index.load_part(i, self.slice(part.range.clone())?)?;
            }
        }
        Ok(Progress::Done(index))
    }

    fn slice(&self, range: Range<u64>) -> Result<Bytes> {
        let bad = || Error::corrupt(format!("bytes {}..{} are missing: truncated", range.start, range.end));
        let start = to_usize(range.start.checked_sub(self.tail_offset).ok_or_else(bad)?, "an index")?;
        let end = to_usize(range.end.checked_sub(self.tail_offset).ok_or_else(bad)?, "an index")?;
        if start > end || end > self.tail.len() {
            return Err(bad());
        }
        Ok(self.tail.slice(start..end))
    }
}

/// The decoded index of a cask. Parts, which describe chunks and pages, may still have to be loaded.
#[derive(Debug)]
pub struct CaskIndex {
    file: CaskFile,
    pub(super) root: IndexRoot,
    pub(super) parts: Vec<OnceLock<IndexPart>>,
}

/// Facts of the file that holds a cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaskFile {
    /// Id of the cask.
    pub id: Id,
    /// Size in bytes.
    pub bytes: u64,
    /// Format version.
    pub version: FormatVersion,
    /// Feature bits.
    pub features: Features,
    /// Page alignment in bytes.
    pub alignment: u64,
    /// Offset of the index.
    pub index_offset: u64,
    /// Offset of the index root.
    pub root_offset: u64,
    /// SHA-256 over header, index root and postscript.
    pub digest: Digest,
}

/// A tensor with a shard in a cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry<'a> {
    /// Name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Global shape.
    pub shape: Vec<u64>,
}

/// A blob of a cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobEntry<'a> {
    /// Rank that saved the blob.
    pub rank: u32,
    /// Name.
    pub name: &'a str,
    /// Page that holds the bytes.
    pub page: PageEntry,
}

/// A chunk of a cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkEntry {
    /// Storage kind.
    pub kind: ChunkKind,
    /// Codec; `None` for an unchanged chunk.
    pub codec: Option<CodecRef>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
    /// Pages, one per column.
    pub pages: Vec<PageEntry>,
}

/// A page of a cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageEntry {
    /// Name of the column.
    pub column: String,
    /// Byte range in the file.
    pub range: Range<u64>,
    /// Stored checksum, over the page's place and bytes.
    pub crc: u32,
    pub(crate) place: PlaceOfPage,
}

impl PageEntry {
    /// Compares the checksum of `bytes` with the stored checksum.
    pub fn check(&self, bytes: &[u8]) -> Result<()> {
        if bytes.len() as u64 != self.range.end.saturating_sub(self.range.start) {
            return Err(Error::corrupt(format!("{} bytes read for page {:?}", bytes.len(), self.range)).offset(self.range.start));
        }
        self.place.check(bytes, self.crc)
    }
}

impl CaskIndex {
    /// Facts of the file.
    pub fn file(&self) -> &CaskFile {
        &self.file
    }

    /// Codecs named by the cask.
    pub fn codecs(&self) -> &[CodecRef] {
        &self.root.codecs
    }

    /// Number of tensors with a shard in this cask.
    pub fn tensor_count(&self) -> usize {
        self.root.layout.tensor_count()
    }

    /// Number of shards in this cask.
    pub fn shard_count(&self) -> usize {
        self.root.layout.shard_count()
    }

    /// Name, element type and global shape of a tensor.
    pub fn tensor(&self, tensor: usize) -> TensorEntry<'_> {
        let layout = &self.root.layout;
        TensorEntry { name: layout.name(tensor), dtype: layout.dtype(tensor), shape: layout.shape(tensor) }
    }

    /// Shards of a tensor.
    pub fn shards_of(&self, tensor: usize) -> Range<usize> {
        self.root.layout.shards_of(tensor)
    }

    /// Tensor of a shard.
    pub fn tensor_of(&self, shard: usize) -> usize {
        self.root.layout.tensor_of(shard)
    }

    /// Rectangle of a shard in its tensor.
    pub fn rect(&self, shard: usize) -> Rect {
        self.root.layout.rect(shard)
    }

    /// Chunk grid of a shard.
    pub fn grid(&self, shard: usize) -> Result<ChunkGrid> {
        ChunkGrid::new(self.root.layout.dtype(self.tensor_of(shard)), &self.rect(shard).shape)
    }

    /// Returns the shard of a tensor that covers exactly `rect`, if the cask holds one.
    pub fn find_shard(&self, name: &str, rect: &Rect) -> Option<usize> {
        self.root.layout.find_shard(self.root.layout.find(name)?, rect)
    }

    /// Returns the number and byte range of the index part that describes a shard, unless that part is loaded.
    pub fn missing_part(&self, shard: usize) -> Option<(usize, Range<u64>)> {
        let part = self.root.part_of(shard)?;
        if self.parts.get(part)?.get().is_some() {
            return None;
        }
        Some((part, self.root.parts.get(part)?.range.clone()))
    }

    /// Returns all parts that are not loaded yet.
    pub fn missing_parts(&self) -> Vec<(usize, Range<u64>)> {
        let unloaded = |i: &usize| self.parts.get(*i).is_some_and(|part| part.get().is_none());
        self.root.parts.iter().enumerate().filter(|(i, _)| unloaded(i)).map(|(i, info)| (i, info.range.clone())).collect()
    }

    /// Decodes a part from its bytes and keeps the part.
    pub fn load_part(&self, part: usize, bytes: Bytes) -> Result<()> {
        let (Some(info), Some(slot)) = (self.root.parts.get(part), self.parts.get(part)) else {
            return Err(Error::invalid(format!("the index has no part {part}")));
        };
        let at = |e: Error| e.offset(info.range.start);
        if bytes.len() as u64 != info.range.end.saturating_sub(info.range.start)
            || index_crc(self.file.id, info.range.start, &bytes) != info.crc
        {
            return Err(at(Error::corrupt("checksum mismatch of an index part").clause("index 4.2")));
        }
        let raw = self.root.codecs.iter().position(|codec| codec.id == Raw::ID).and_then(|raw| u8::try_from(raw).ok());
        let decoded = IndexPart::decode(bytes, &self.root, info, self.file.alignment, raw).map_err(at)?;
        self.check_part(part, info, &decoded)?;
        // If a concurrent loader was faster, it decoded the same bytes.
        let _ = slot.set(decoded);
        Ok(())
    }

    /// Returns chunk `chunk` of shard `shard`.
    pub fn chunk(&self, shard: usize, chunk: u64) -> Result<ChunkEntry> {
        let name = || self.root.layout.name(self.tensor_of(shard));
        let part = self.root.part_of(shard).and_then(|part| self.parts.get(part)?.get());
        let part = part.ok_or_else(|| Error::invalid("the index part of the chunk is not loaded").tensor(name()))?;
        let rows = part.chunks_of(shard);
        let row = usize::try_from(chunk).ok().and_then(|chunk| rows.start.checked_add(chunk)).filter(|row| *row < rows.end);
        let row = row.ok_or_else(|| Error::invalid("the shard has no chunk of this number").tensor(name()).chunk(chunk))?;
        let kind = part.kind(row);
        let codec = match kind {
            ChunkKind::Unchanged => None,
            _ => self.root.codecs.get(usize::from(part.codecs.get(row).unwrap_or_default())).cloned(),
        };
        let pages = part
            .pages_of(row)
            .map(|page| {
                let column = part.page_columns.get(page).unwrap_or_default();
                let offset = part.page_offsets.get(page).copied().unwrap_or_default();
                let bytes = u64::from(part.page_bytes.get(page).unwrap_or_default());
                PageEntry {
                    column: self.root.columns.get(usize::from(column)).cloned().unwrap_or_default(),
                    range: offset..offset.saturating_add(bytes),
                    crc: part.page_crcs.get(page).unwrap_or_default(),
                    place: PlaceOfPage { cask: self.file.id, shard: shard as u64, chunk, column: u64::from(column), offset },
                }
            })
            .collect();
        Ok(ChunkEntry { kind, codec, crc: part.crcs.get(row).unwrap_or_default(), pages })
    }

    /// Rank, name and page of each blob.
    pub fn blobs(&self) -> impl Iterator<Item = BlobEntry<'_>> {
        self.root.blob_offsets.iter().enumerate().map(|(row, &offset)| {
            let bytes = self.root.blob_bytes.get(row).unwrap_or_default();
            let page = PageEntry {
                column: String::new(),
                range: offset..offset.saturating_add(bytes),
                crc: self.root.blob_crcs.get(row).unwrap_or_default(),
                place: PlaceOfPage { cask: self.file.id, shard: row as u64, chunk: 0, column: PlaceOfPage::BLOB, offset },
            };
            let name = self.root.blob_names.text(row).unwrap_or_default();
            BlobEntry { rank: self.root.blob_ranks.get(row).unwrap_or_default(), name, page }
        })
    }

    /// Checks that a part's pages begin where the previous part's pages end, and that the last part ends where blobs
    /// begin.
    fn check_part(&self, part: usize, info: &PartInfo, decoded: &IndexPart) -> Result<()> {
        let next = match part.checked_add(1).and_then(|next| self.root.parts.get(next)) {
            Some(next) => next.pages_offset,
            None => self.root.blobs_offset,
        };
        let first_begins = part > 0 || info.pages_offset == HEADER_BYTES;
        if !first_begins || decoded.pages_end != next {
            return Err(
                Error::corrupt(format!("pages of part {part} do not end where the pages of the next part begin")).clause("index 4.4")
            );
        }
        Ok(())
    }
}
