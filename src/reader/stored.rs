//! Places of the bytes of a tensor: in files that can be mapped, in a log entry, or in a form that must be decoded.
//!
//! Reads indexes and no tensor. `view` maps the parts that this module finds, and the Python package maps them itself.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::Snapshot;
use super::cask_source::{CaskSource, slice_of};
use super::open_chain::OpenChain;
use crate::chain::{Rows, ShardPlan, Step, check_decoded};
use crate::codec::{ChunkKind, Raw};
use crate::container::PageEntry;
use crate::limits::to_usize;
use crate::tensor::Rect;
use crate::{Dtype, Error, Result, boxed, parallel};

/// A tensor of a snapshot, with the places of its bytes.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Parts in order of shards, then elements. Together they cover the tensor once. An empty tensor has no parts.
    pub parts: Vec<StoredPart>,
}

/// Consecutive elements of one shard of a tensor, whose bytes are in one place.
#[derive(Debug, Clone)]
pub struct StoredPart {
    /// The shard, as a rectangle of the tensor.
    pub shard: Rect,
    /// Elements of the shard, counted in row-major order.
    pub elements: Range<u64>,
    /// Size in bytes.
    pub bytes: u64,
    /// Place of the bytes.
    pub place: PartPlace,
    pub(super) source: CaskSource,
    /// Name of the tensor that holds the bytes: of a tied tensor, the other one.
    tensor: String,
    pub(super) first_chunk: u64,
    /// The raw chunks of the part, in order; empty if the bytes must be decoded.
    chunks: Vec<RawChunk>,
}

/// Place of the bytes of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PartPlace {
    /// A file of the store holds exactly these bytes, without a gap.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Position of the first byte in the file: a multiple of the element size. At the beginning of a shard, a multiple
        /// of 64.
        first_byte: u64,
    },
    /// The log entry that holds the snapshot has these bytes. The reader has them in memory already, at any alignment.
    LogEntry,
    /// No place holds these bytes as they are: a reader copies them into memory.
    Copy(CopyReason),
}

/// Reason why bytes must be copied into memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyReason {
    /// The chunks are differences to an older snapshot.
    Delta,
    /// The chunks are stored by this codec, which is not `tc.raw`.
    Codec(String),
    /// The chunks are raw, but the store is not a local folder.
    NotLocal,
}

/// A raw chunk: its only page, and the CRC-32 of its decoded bytes.
#[derive(Debug, Clone)]
struct RawChunk {
    page: PageEntry,
    crc: u32,
}

impl StoredTensor {
    /// Returns where tensors of a snapshot are stored, in the order of their names. Reads the indexes of their casks,
    /// and no tensor.
    ///
    /// A name that the snapshot lacks is a `NotFound` error. A chain without all chunks is `Corrupt`.
    ///
    /// ```
    /// use tensorcask::codec::CodecRules;
    /// use tensorcask::{CopyReason, Dtype, Latest, Metadata, PartPlace, StoreOptions, StoredTensor};
    /// use tensorcask::{TensorView, WriterOptions};
    ///
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let url = folder.path().to_str().unwrap();
    /// let store = StoreOptions { inline_bytes: 0, ..Default::default() }.open(url)?;
    /// let raw = CodecRules::parse(["model=tc.raw"])?;
    /// let mut writer = store.writer_with(WriterOptions { codecs: raw, ..Default::default() }).await?;
    /// let state = [
    ///     TensorView::new("model.w", Dtype::U8, &[4, 2], &[1, 2, 3, 4, 5, 6, 7, 8])?,
    ///     TensorView::new("exp_avg.w", Dtype::F32, &[100], &[0; 400])?,
    /// ];
    /// writer.save(1, &state, &[], &Metadata::default()).await?;
    ///
    /// let stored = StoredTensor::list(&store.snapshot(Latest).await?, &["model.w", "exp_avg.w"]).await?;
    /// assert!(matches!(stored[0].parts[0].place, PartPlace::File { first_byte: 64, .. }));
    /// assert_eq!(stored[1].parts[0].place, PartPlace::Copy(CopyReason::Codec("tc.constant".into())));
    /// # Ok::<(), tensorcask::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn list(snapshot: &Snapshot, names: &[&str]) -> Result<Vec<Self>> {
        Places::of(&snapshot.chain).list(names).await
    }

    /// Returns the only part, if it is the whole tensor and a file holds it: this part can be mapped as an array.
    pub fn in_one_file(&self) -> Option<&StoredPart> {
        match self.parts.as_slice() {
            [part] if matches!(part.place, PartPlace::File { .. }) => Some(part),
            _ => None,
        }
    }
}

impl StoredPart {
    /// Compares the bytes of parts, as mapped from their files, with the checksums of pages and chunks. Reads each byte
    /// and copies none. Uses all threads.
    ///
    /// Parts that must be copied are not checked here, because reading them checks them.
    ///
    /// A damaged byte is a `Corrupt` error that names cask, tensor and chunk.
    pub fn check(parts: &[(&Self, &[u8])]) -> Result<()> {
        let mut chunks = Vec::new();
        for &(part, bytes) in parts {
            let mut rest = bytes;
            for (number, chunk) in (part.first_chunk..).zip(&part.chunks) {
                let size = to_usize(chunk.page.range.end - chunk.page.range.start, "a page")?;
                let Some((these, others)) = rest.split_at_checked(size) else {
                    let error = Error::corrupt("the file ends before the page: it is truncated").offset(chunk.page.range.start);
                    return Err(part.locate(error, number));
                };
                chunks.push((part, number, chunk, these));
                rest = others;
            }
            if !rest.is_empty() && !part.chunks.is_empty() {
                return Err(Error::invalid(format!("{} bytes for a part of {}", bytes.len(), part.bytes)));
            }
        }
        parallel::run(|| {
            chunks.into_par_iter().try_for_each(|(part, number, chunk, bytes)| chunk.check(bytes).map_err(|e| part.locate(e, number)))
        })
    }

    /// Returns the number of raw chunks.
    pub(super) fn raw_chunks(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Returns the bytes, if a log entry holds them.
    pub(super) fn of_log_entry(&self) -> Result<Option<bytes::Bytes>> {
        let (Some(whole), Some(first), Some(last)) = (self.source.whole(), self.chunks.first(), self.chunks.last()) else {
            return Ok(None);
        };
        slice_of(whole, &(first.page.range.start..last.page.range.end)).map(Some).map_err(|e| self.locate(e, self.first_chunk))
    }

    /// Adds cask, tensor and chunk to an error.
    fn locate(&self, error: Error, chunk: u64) -> Error {
        self.source.locate(error.tensor(&self.tensor).chunk(chunk))
    }

    /// Appends the part that follows in the same shard, if its bytes follow too. Returns it otherwise.
    fn join(&mut self, next: Self) -> Option<Self> {
        let adjacent = match (self.chunks.last(), next.chunks.first()) {
            (Some(last), Some(first)) => self.source.is(&next.source) && last.page.range.end == first.page.range.start,
            _ => self.place == next.place,
        };
        if !adjacent || self.elements.end != next.elements.start {
            return Some(next);
        }
        self.elements.end = next.elements.end;
        self.bytes += next.bytes;
        self.chunks.extend(next.chunks);
        None
    }
}

impl RawChunk {
    fn check(&self, bytes: &[u8]) -> Result<()> {
        self.page.check(bytes)?;
        check_decoded(bytes, self.crc)
    }
}

/// Finds the places of bytes in the casks of a chain.
struct Places<'c> {
    chain: &'c OpenChain,
    /// Folder of a local store.
    root: Option<&'c Path>,
}

impl<'c> Places<'c> {
    fn of(chain: &'c OpenChain) -> Self {
        Self { chain, root: chain.store.objects().local_folder() }
    }

    #[boxed]
    async fn list(&self, names: &[&str]) -> Result<Vec<StoredTensor>> {
        let directory = &self.chain.newest().directory;
        let mut shards = Vec::new();
        let mut found = Vec::with_capacity(names.len());
        for &name in names {
            let tensor = self.chain.find(name)?;
            let shape = directory.shape(tensor);
            let first = shards.len();
            shards.extend(self.chain.shards_in(tensor, &Rect::whole(&shape))?);
            let stored = StoredTensor { name: name.to_owned(), dtype: directory.dtype(tensor), shape, parts: Vec::new() };
            found.push((stored, first..shards.len()));
        }
        let rows = self.chain.load_plans(&shards).await?;
        let mut tensors = Vec::with_capacity(found.len());
        for (mut stored, numbers) in found {
            for number in numbers {
                stored.parts.extend(self.parts_of(&shards[number], &rows[number])?);
            }
            tensors.push(stored);
        }
        Ok(tensors)
    }

    fn parts_of(&self, plan: &ShardPlan, rows: &Rows) -> Result<Vec<StoredPart>> {
        let mut parts: Vec<StoredPart> = Vec::new();
        for chunk in 0..plan.grid.chunk_count() {
            let (step, crc) = plan.stored(&self.chain.links, rows, chunk, 0)?;
            let next = self.part_of(plan, chunk, step, crc)?;
            let apart = match parts.last_mut() {
                Some(last) => last.join(next),
                None => Some(next),
            };
            parts.extend(apart);
        }
        Ok(parts)
    }

    fn part_of(&self, plan: &ShardPlan, chunk: u64, step: Step, crc: u32) -> Result<StoredPart> {
        let range = plan.grid.bytes(chunk);
        let source = self.chain.source(step.link, step.cask);
        let bytes = range.end - range.start;
        let (place, chunks) = match (self.raw_page(step, bytes), source.whole(), self.root) {
            (Err(reason), ..) => (PartPlace::Copy(reason), Vec::new()),
            (Ok(page), Some(_), _) => (PartPlace::LogEntry, vec![RawChunk { page, crc }]),
            (Ok(page), None, Some(root)) => {
                let place = PartPlace::File { path: root.join(source.path()), first_byte: page.range.start };
                (place, vec![RawChunk { page, crc }])
            }
            (Ok(_), None, None) => (PartPlace::Copy(CopyReason::NotLocal), Vec::new()),
        };
        let shard = plan.rect.clone();
        let elements = plan.grid.elements(chunk);
        let tensor = plan.name.clone();
        Ok(StoredPart { shard, elements, bytes, place, source, tensor, first_chunk: chunk, chunks })
    }

    /// Returns the page of a chunk that is stored as it is. A raw chunk with other pages has a reason, too: reading it
    /// reports the damage.
    fn raw_page(&self, step: Step, bytes: u64) -> std::result::Result<PageEntry, CopyReason> {
        let codec = match (step.entry.kind, step.entry.codec) {
            (ChunkKind::Absolute, Some(codec)) => codec,
            _ => return Err(CopyReason::Delta),
        };
        let is_known = codec.id == Raw::ID && self.chain.store.registry().resolve(&codec).is_ok();
        match <[PageEntry; 1]>::try_from(step.entry.pages) {
            Ok([page]) if is_known && page.column == "values" && page.range.end - page.range.start == bytes => Ok(page),
            _ => Err(CopyReason::Codec(codec.id)),
        }
    }
}
