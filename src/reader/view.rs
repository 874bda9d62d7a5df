//! Maps tensors of local stores into memory, without copying the chunks that are stored raw.

use std::collections::HashMap;
use std::path::PathBuf;

use bytes::Bytes;

use super::Snapshot;
use super::cask_source::slice_of;
use super::execute::ChunkItem;
use super::open_chain::OpenChain;
use super::stored::{PartPlace, StoredPart, StoredTensor};
use crate::limits::{to_usize, zeroed};
use crate::store::map_file;
use crate::{ChunkGrid, Dtype, Limits, Result, boxed};

/// A tensor in memory, in parts: mapped from files where its chunks are stored raw, copied where they are not.
///
/// The maps stay valid as long as a `Bytes` of them lives, also after the files are deleted. A store never overwrites a
/// cask. Another program that truncates a mapped file ends this process with a signal.
#[derive(Debug, Clone)]
pub struct TensorMap {
    /// Element type.
    pub dtype: Dtype,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Parts in order of shards, then elements. Together they cover the tensor once. An empty tensor has no parts.
    pub parts: Vec<TensorPart>,
}

/// Bytes of a part of a tensor.
#[derive(Debug, Clone)]
pub struct TensorPart {
    /// Elements of the part, and where the store has them.
    pub stored: StoredPart,
    /// The elements in row-major order, little-endian; packed, if an element has fewer than 8 bits.
    pub bytes: Bytes,
}

impl Snapshot {
    /// Maps a tensor. Chunks that a file of a local store holds raw are mapped from there, also from the files of older
    /// snapshots, and adjacent chunks are one part. All other chunks are decoded into memory;
    /// [`StoredPart::place`] has the reason. Compares all checksums.
    ///
    /// A damaged chunk is a `Corrupt` error that names tensor and chunk. Copied chunks of more than `max_read_bytes`
    /// are a `LimitExceeded` error.
    ///
    /// ```
    /// use tensorcask::blocking::Store;
    /// use tensorcask::{Dtype, Latest, Metadata, PartPlace, Policy, StoreOptions, TensorView};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let url = folder.path().to_str().unwrap();
    /// let store = Store::with(StoreOptions { inline_bytes: 0, ..Default::default() }.open(url)?)?;
    /// let state = [TensorView::new("w", Dtype::U8, &[3], &[7, 1, 9])?];
    /// store.writer(Policy::Full)?.save(1, &state, &[], &Metadata::default())?;
    ///
    /// let map = store.snapshot(Latest)?.view("w")?;
    /// assert!(matches!(map.parts[0].stored.place, PartPlace::File { .. }));
    /// assert_eq!(map.copied_bytes(), 0);
    /// assert_eq!(map.contiguous().unwrap(), [7, 1, 9][..]);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub async fn view(&self, name: &str) -> Result<TensorMap> {
        let tensor = self.chain.find(name)?;
        let tensor = self.chain.newest().directory.alias_of(tensor).unwrap_or(tensor);
        let mut stored = StoredTensor::list(self, &[name]).await?;
        let parts = stored.pop().map(|stored| stored.parts).unwrap_or_default();
        let directory = &self.chain.newest().directory;
        let dtype = directory.dtype(tensor);
        let shape = directory.shape(tensor);
        let reader = PartReader { chain: &self.chain, tensor, dtype };
        let parts = reader.read(parts).await.map_err(|e| e.tensor(name))?;
        Ok(TensorMap { dtype, shape, parts })
    }
}

impl TensorMap {
    /// Returns all bytes of the tensor, if they are one after the other in memory: the tensor is empty or has one part.
    /// The part may have been copied, see [`copied_bytes`](Self::copied_bytes).
    pub fn contiguous(&self) -> Option<Bytes> {
        match self.parts.as_slice() {
            [] => Some(Bytes::new()),
            [part] => Some(part.bytes.clone()),
            _ => None,
        }
    }

    /// Returns the number of bytes that were copied into memory.
    pub fn copied_bytes(&self) -> u64 {
        self.parts.iter().map(|part| &part.stored).filter(|part| matches!(part.place, PartPlace::Copy(_))).map(|part| part.bytes).sum()
    }
}

/// Maps and decodes parts of one tensor, numbered as in the newest directory.
struct PartReader<'c> {
    chain: &'c OpenChain,
    tensor: usize,
    dtype: Dtype,
}

impl PartReader<'_> {
    #[boxed]
    async fn read(&self, parts: Vec<StoredPart>) -> Result<Vec<TensorPart>> {
        let mut files: HashMap<PathBuf, Bytes> = HashMap::new();
        let mut found: Vec<Option<Bytes>> = Vec::with_capacity(parts.len());
        for part in &parts {
            found.push(match &part.place {
                PartPlace::File { path, first_byte } => {
                    let whole = match files.get(path) {
                        Some(whole) => whole,
                        None => files.entry(path.clone()).or_insert(map_file(path)?),
                    };
                    let range = *first_byte..first_byte.saturating_add(part.bytes);
                    Some(slice_of(whole, &range).map_err(|e| part.source.locate(e))?)
                }
                PartPlace::LogEntry => part.of_log_entry()?,
                PartPlace::Copy(_) => None,
            });
        }
        let mapped = parts.iter().zip(&found).filter_map(|(part, bytes)| Some((part, bytes.as_deref()?)));
        let mapped: Vec<(&StoredPart, &[u8])> = mapped.collect();
        StoredPart::check(&mapped)?;
        let chunks: u64 = mapped.iter().map(|(part, _)| part.raw_chunks()).sum();
        self.chain.count(chunks, chunks, mapped.iter().map(|(part, _)| part.bytes).sum());

        let missing = parts.iter().zip(&found).filter(|(_, bytes)| bytes.is_none()).map(|(part, _)| part);
        let mut copied = self.decode(missing.collect()).await?.into_iter();
        let bytes = found.into_iter().map(|bytes| bytes.or_else(|| copied.next()));
        Ok(parts.into_iter().zip(bytes).filter_map(|(stored, bytes)| Some(TensorPart { stored, bytes: bytes? })).collect())
    }

    /// Decodes parts into memory.
    async fn decode(&self, parts: Vec<&StoredPart>) -> Result<Vec<Bytes>> {
        let bytes = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        Limits::check(bytes, self.chain.store.limits().max_read_bytes, "size of the chunks to copy")?;
        let buffers = parts.iter().map(|part| Ok(zeroed(to_usize(part.bytes, "a tensor")?, "a tensor")?));
        let mut buffers: Vec<Vec<u8>> = buffers.collect::<Result<_>>()?;
        let mut items = Vec::new();
        for (part, buffer) in parts.iter().zip(&mut buffers) {
            let grid = ChunkGrid::new(self.dtype, &part.shard.shape)?;
            let mut rest: &mut [u8] = buffer;
            for chunk in grid.chunks_of(part.elements.clone()) {
                let range = grid.bytes(chunk);
                let (out, others) = rest.split_at_mut(to_usize(range.end - range.start, "a chunk")?);
                rest = others;
                items.push(ChunkItem { tensor: self.tensor, rect: part.shard.clone(), chunk, out });
            }
        }
        self.chain.read_chunks(items).await?;
        Ok(buffers.into_iter().map(Bytes::from).collect())
    }
}
