//! Writes a cask front to back: accepts chunks in order, returns bytes in order.

use bytes::Bytes;

use super::PlaceOfPage;
use crate::codec::{ChunkKind, CodecRef, EncodedChunk, Raw};
use crate::tensor::ChunkGrid;
use crate::tensor::Rect;
use crate::version::{Features, FormatVersion};
use crate::wire::index::{BlobRow, PART_CHUNKS, PartRow, RootContent, index_crc};
use crate::wire::part::{ChunkRow, PageRow, encode_part, place_page};
use crate::wire::{COLUMN_ALIGNMENT, CaskRef, Digest, HEADER_BYTES, Header, Id, Postscript, ShardRow, TensorRow, align_up};
use crate::{Dtype, Error, Limits, Result};

/// Receipt of a finished cask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaskReceipt {
    /// Id of the cask.
    pub id: Id,
    /// Size in bytes.
    pub bytes: u64,
    /// Offset of the index.
    pub index_offset: u64,
    /// Offset of the index root.
    pub root_offset: u64,
    /// SHA-256 over header, index root and postscript.
    pub digest: Digest,
}

impl CaskReceipt {
    /// Converts the receipt to the manifest's form.
    pub(crate) fn in_slot(&self, slot: u32) -> CaskRef {
        let &Self { id, bytes, index_offset, root_offset, digest } = self;
        CaskRef { slot, id, bytes, index_offset, root_offset, digest }
    }
}

/// Encodes one cask.
///
/// Call order: for each tensor, by ascending name, [`tensor`](Self::tensor). For each shard of the tensor, by ascending
/// position, [`shard`](Self::shard), then one [`chunk`](Self::chunk) per chunk of the grid. Then blobs by rank and
/// name, and finally [`finish`](Self::finish).
///
/// Take the bytes with [`take_output`](Self::take_output) whenever enough are waiting. A shard whose chunks are all
/// unchanged is left out of the cask.
#[derive(Debug)]
pub struct CaskEncoder {
    id: Id,
    limits: Limits,
    alignment_exponent: u8,
    output: Vec<Bytes>,
    position: u64,
    root: RootContent,
    parts: Vec<Vec<u8>>,
    chunks: Vec<ChunkRow>,
    pages: Vec<PageRow>,
    part_pages_offset: u64,
    tensor: Option<TensorRow>,
    open: Option<OpenShard>,
    blobs_begun: bool,
}

/// The shard that accepts chunks now.
#[derive(Debug)]
struct OpenShard {
    rect: Rect,
    grid: ChunkGrid,
    /// Chunks so far; they enter the index only when one of them is stored.
    rows: Vec<ChunkRow>,
    chunk_count: u64,
    registered: bool,
    raw_before: bool,
}

impl CaskEncoder {
    /// The default alignment of pages: 64 bytes.
    pub const DEFAULT_ALIGNMENT_EXPONENT: u8 = 6;

    /// Creates a cask with the given id. Pages begin at multiples of 2^`alignment_exponent` (6 to 12).
    pub fn new(id: Id, alignment_exponent: u8) -> Result<Self> {
        if !(6..=12).contains(&alignment_exponent) {
            return Err(Error::invalid(format!("alignment exponent {alignment_exponent} is not in 6..=12")));
        }
        let header = Header { id }.encode();
        Ok(Self {
            id,
            limits: Limits::default(),
            alignment_exponent,
            output: vec![header.into()],
            position: HEADER_BYTES,
            root: RootContent::default(),
            parts: Vec::new(),
            chunks: Vec::new(),
            pages: Vec::new(),
            part_pages_offset: HEADER_BYTES,
            tensor: None,
            open: None,
            blobs_begun: false,
        })
    }

    /// Rejects content that readers with these limits would reject.
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Id of the cask.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Begins a tensor.
    pub fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Result<()> {
        self.close_shard()?;
        let last = self.tensor.as_ref().or(self.root.tensors.last());
        Limits::check(name.len() as u64, self.limits.max_name_bytes, "length of the name").map_err(|e| e.tensor(name))?;
        Limits::check(shape.len() as u64, self.limits.max_dimensions, "number of dimensions").map_err(|e| e.tensor(name))?;
        ChunkGrid::new(dtype, shape).map_err(|e| e.tensor(name))?;
        if self.blobs_begun || last.is_some_and(|last| last.name.as_str() >= name) {
            return Err(Error::invalid("tensors must come by strictly ascending name, and before blobs").tensor(name));
        }
        self.tensor = Some(TensorRow { name: name.to_owned(), dtype, shape: shape.to_vec() });
        Ok(())
    }

    /// Begins a shard of the current tensor.
    pub fn shard(&mut self, rect: &Rect) -> Result<()> {
        self.close_shard()?;
        let tensor = self.tensor.as_ref().ok_or_else(|| Error::invalid("`shard` was called before `tensor`"))?;
        if !rect.fits(&tensor.shape) {
            return Err(Error::invalid("the shard does not fit the tensor's shape").tensor(&tensor.name));
        }
        let grid = ChunkGrid::new(tensor.dtype, &rect.shape)?;
        let open = OpenShard { rect: rect.clone(), grid, rows: vec![], chunk_count: 0, registered: false, raw_before: false };
        let empty = grid.chunk_count() == 0;
        self.open = Some(open);
        // An empty shard has no chunk that could be unchanged, so it enters the index at once.
        if empty { self.register_shard() } else { Ok(()) }
    }

    /// Adds the next chunk of the current shard.
    pub fn chunk(&mut self, chunk: EncodedChunk) -> Result<()> {
        let open = self.open.as_mut().ok_or_else(|| Error::invalid("`chunk` was called before `shard`"))?;
        let number = open.chunk_count;
        if number >= open.grid.chunk_count() {
            return Err(Error::invalid(format!("more chunks than the {} of the grid", open.grid.chunk_count())));
        }
        open.chunk_count = number.saturating_add(1);
        if (chunk.kind == ChunkKind::Unchanged) != chunk.codec.is_none() || (chunk.codec.is_none() && !chunk.columns.is_empty()) {
            return Err(Error::invalid("an unchanged chunk has no codec and no columns; any other has a codec"));
        }
        let Some(codec) = chunk.codec else {
            open.raw_before = false;
            let row = ChunkRow { kind: ChunkKind::Unchanged, codec: 0, page_count: 0, crc: chunk.crc };
            if open.registered {
                self.chunks.push(row)
            } else {
                open.rows.push(row)
            }
            return Ok(());
        };
        if !open.registered {
            self.register_shard()?;
        }
        let raw = chunk.kind == ChunkKind::Absolute && codec.id == Raw::ID;
        let codec = dictionary_index(&mut self.root.codecs, &codec, &self.limits, "codec")?;
        let page_count = u8::try_from(chunk.columns.len())
            .map_err(|_| Error::limit(format!("{} columns in one chunk, more than 255", chunk.columns.len())))?;
        for (nth, (name, bytes)) in chunk.columns.into_iter().enumerate() {
            let continues_raw = raw && nth == 0 && self.open.as_ref().is_some_and(|open| open.raw_before);
            let offset = self.pad_to_page(continues_raw)?;
            let column = dictionary_index(&mut self.root.columns, &name, &self.limits, "column")?;
            let place = PlaceOfPage {
                cask: self.id,
                shard: self.root.shards.len().saturating_sub(1) as u64,
                chunk: number,
                column: u64::from(column),
                offset,
            };
            let length = u32::try_from(bytes.len()).map_err(|_| Error::limit("a page is 4 GiB or larger"))?;
            self.pages.push(PageRow { column, bytes: length, crc: place.crc(&bytes) });
            self.emit(bytes)?;
        }
        self.chunks.push(ChunkRow { kind: chunk.kind, codec, page_count, crc: chunk.crc });
        if let Some(open) = self.open.as_mut() {
            open.raw_before = raw;
        }
        Ok(())
    }

    /// Adds a blob.
    pub fn blob(&mut self, rank: u32, name: &str, bytes: Bytes) -> Result<()> {
        self.begin_blobs()?;
        Limits::check(name.len() as u64, self.limits.max_name_bytes, "length of the name").map_err(|e| e.tensor(name))?;
        Limits::check(bytes.len() as u64, self.limits.max_blob_bytes, "size of the blob").map_err(|e| e.tensor(name))?;
        if self.root.blobs.last().is_some_and(|last| (last.rank, last.name.as_str()) >= (rank, name)) {
            return Err(Error::invalid("blobs must come by strictly ascending rank and name").tensor(name));
        }
        let offset = self.pad_to_page(false)?;
        let row = self.root.blobs.len() as u64;
        let place = PlaceOfPage { cask: self.id, shard: row, chunk: 0, column: PlaceOfPage::BLOB, offset };
        self.root.blobs.push(BlobRow { rank, name: name.to_owned(), bytes: bytes.len() as u64, crc: place.crc(&bytes) });
        self.emit(bytes)
    }

    /// Returns whether every chunk so far is unchanged and there is no blob.
    pub fn is_empty(&self) -> bool {
        self.root.shards.is_empty() && self.root.blobs.is_empty()
    }

    /// Number of bytes waiting in the output.
    pub fn output_bytes(&self) -> usize {
        self.output.iter().map(Bytes::len).fold(0, usize::saturating_add)
    }

    /// Takes the bytes that are ready, in file order.
    pub fn take_output(&mut self) -> Vec<Bytes> {
        std::mem::take(&mut self.output)
    }

    /// Writes index and postscript. Returns the last bytes and the receipt.
    pub fn finish(mut self) -> Result<(Vec<Bytes>, CaskReceipt)> {
        self.begin_blobs()?;
        let index_offset = self.pad_to(COLUMN_ALIGNMENT)?;
        for (i, part) in std::mem::take(&mut self.parts).into_iter().enumerate() {
            Limits::check(part.len() as u64, self.limits.max_index_bytes, "size of an index part")?;
            let crc = index_crc(self.id, self.position, &part);
            if let Some(row) = self.root.parts.get_mut(i) {
                row.crc = crc;
            }
            self.emit(part.into())?;
        }
        let root_offset = self.position;
        let (root, root_crc) = self.root.encode(self.id, root_offset)?;
        Limits::check(root.len() as u64, self.limits.max_index_bytes, "size of the index root")?;
        Limits::check(self.root.tensors.len() as u64, self.limits.max_tensors, "number of tensors")?;
        Limits::check(self.root.shards.len() as u64, self.limits.max_shards, "number of shards")?;
        Limits::check(self.root.blobs.len() as u64, self.limits.max_blobs, "number of blobs")?;
        let postscript = Postscript {
            root_offset,
            root_crc,
            version: FormatVersion::CURRENT,
            features: Features::default(),
            alignment_exponent: self.alignment_exponent,
        }
        .encode(self.id);
        let header = Header { id: self.id }.encode();
        let digest = Digest::of_parts([header.as_slice(), &root, &postscript]);
        self.emit(root.into())?;
        self.emit(postscript.into())?;
        let receipt = CaskReceipt { id: self.id, bytes: self.position, index_offset, root_offset, digest };
        Ok((self.output, receipt))
    }

    /// Enters the open shard into the tables, and its tensor if this is the tensor's first shard.
    fn register_shard(&mut self) -> Result<()> {
        let tensor_known = match (&self.tensor, self.root.tensors.last()) {
            (Some(tensor), Some(last)) => tensor.name == last.name,
            _ => false,
        };
        if let (false, Some(tensor)) = (tensor_known, &self.tensor) {
            self.root.tensors.push(tensor.clone());
        }
        let tensor = u32::try_from(self.root.tensors.len().saturating_sub(1)).map_err(|_| Error::limit("more than 2^32 tensors"))?;
        let Some(open) = self.open.as_mut() else { return Ok(()) };
        let last = self.root.shards.last();
        if last.is_some_and(|last| last.tensor == tensor && last.rect >= open.rect) {
            return Err(Error::invalid("shards of a tensor must come by strictly ascending position"));
        }
        self.root.shards.push(ShardRow { tensor, rect: open.rect.clone() });
        self.chunks.append(&mut open.rows);
        open.registered = true;
        Ok(())
    }

    /// Checks that the open shard has all its chunks, and closes the index part if it is full.
    fn close_shard(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.chunk_count != open.grid.chunk_count() {
            return Err(Error::invalid(format!("{} of {} chunks given", open.chunk_count, open.grid.chunk_count())));
        }
        if self.chunks.len() as u64 >= PART_CHUNKS {
            self.close_part();
        }
        Ok(())
    }

    fn close_part(&mut self) {
        self.parts.push(encode_part(&self.chunks, &self.pages));
        self.root.parts.push(PartRow { pages_offset: self.part_pages_offset, page_count: self.pages.len() as u64, crc: 0 });
        self.chunks.clear();
        self.pages.clear();
        self.part_pages_offset = self.position;
    }

    fn begin_blobs(&mut self) -> Result<()> {
        if self.blobs_begun {
            return Ok(());
        }
        self.close_shard()?;
        if !self.chunks.is_empty() {
            self.close_part();
        }
        self.root.blobs_offset = self.position;
        self.blobs_begun = true;
        Ok(())
    }

    fn pad_to_page(&mut self, continues_raw: bool) -> Result<u64> {
        let alignment = 1u64.checked_shl(u32::from(self.alignment_exponent)).unwrap_or(COLUMN_ALIGNMENT);
        match place_page(self.position, continues_raw, alignment) {
            Some(offset) if offset == self.position => Ok(offset),
            _ => self.pad_to(alignment),
        }
    }

    fn pad_to(&mut self, alignment: u64) -> Result<u64> {
        static ZEROS: [u8; 4096] = [0; 4096];
        let target = align_up(self.position, alignment).ok_or_else(|| Error::limit("the cask is larger than 2^64 bytes"))?;
        let padding = target.saturating_sub(self.position) as usize;
        self.emit(Bytes::from_static(ZEROS.get(..padding).unwrap_or_default()))?;
        Ok(self.position)
    }

    fn emit(&mut self, bytes: Bytes) -> Result<()> {
        let end = self.position.checked_add(bytes.len() as u64);
        self.position = end.ok_or_else(|| Error::limit("the cask is larger than 2^64 bytes"))?;
        if !bytes.is_empty() {
            self.output.push(bytes);
        }
        Ok(())
    }
}

/// A dictionary entry whose name readers accept only once.
trait DictionaryName {
    fn name(&self) -> &str;
}

impl DictionaryName for CodecRef {
    fn name(&self) -> &str {
        &self.id
    }
}

impl DictionaryName for String {
    fn name(&self) -> &str {
        self
    }
}

/// Returns the dictionary row of `item`, and adds `item` if it is new.
fn dictionary_index<T: DictionaryName + Clone + PartialEq>(dictionary: &mut Vec<T>, item: &T, limits: &Limits, what: &str) -> Result<u8> {
    let row = match dictionary.iter().position(|known| known.name() == item.name()) {
        Some(row) if dictionary.get(row) == Some(item) => row,
        Some(_) => return Err(Error::invalid(format!("{what} `{}` has two versions in one cask", item.name()))),
        None => {
            if item.name().is_empty() {
                return Err(Error::invalid(format!("the name of a {what} is empty")));
            }
            Limits::check(item.name().len() as u64, limits.max_name_bytes, "length of the name")?;
            dictionary.push(item.clone());
            dictionary.len().saturating_sub(1)
        }
    };
    // Readers accept 255 names at most.
    u8::try_from(row).ok().filter(|&row| row < 255).ok_or_else(|| Error::limit(format!("more than 255 {what} names in one cask")))
}
