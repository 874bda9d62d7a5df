//! The base cache: the state that the next delta is made against, kept in memory or on local disk.
//!
//! During a save, [`NextBase`] collects the stored form of the state beside the [`BaseCache`] of the save before. Once
//! the snapshot is committed, [`BaseCache::promote`] replaces the one by the other. [`BaseKeeping`] decides the form:
//! decoded, encoded or in a file. A chunk that is not in the cache, or is damaged there, is read back from the store.
//!
//! Invariants: the cache holds shards of one committed snapshot only. Each chunk is returned only if its CRC-32 is that
//! of the save.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::BaseKeeping;
use super::input::ChunkRef;
use crate::codec::{Columns, EncodedChunk, Registry, decode};
use crate::limits::{reserve, to_usize};
use crate::spare::{MaybeSpare, Spare};
use crate::tensor::{ChunkGrid, Rect};
use crate::wire::Id;
use crate::{Error, Result, TensorView};

/// Name of the tensor and rectangle of the shard.
pub(super) type ShardKey = (String, Rect);

/// Key of the shard that a view holds.
pub(super) fn key_of(view: &TensorView<'_>) -> ShardKey {
    (view.name().to_owned(), view.rect().clone())
}

/// A shard of the base, with the CRC-32 of each chunk. The checksums catch damage to memory or disk between two saves.
#[derive(Debug)]
struct KeptShard {
    form: Form,
    crcs: Vec<u32>,
}

#[derive(Debug)]
enum Form {
    /// Decoded bytes.
    Decoded(Vec<u8>),
    /// Chunks that decode without a base and without partners.
    Encoded(Vec<EncodedChunk>),
    /// Decoded bytes in a file, from `offset` on.
    File { file: Arc<PrivateFile>, offset: u64 },
}

/// A file of this process alone. It is unlinked at once if the system allows that, else when its last user drops it.
#[derive(Debug)]
struct PrivateFile {
    file: Mutex<File>,
    /// Path of the file, if it could not be unlinked while open.
    path: Option<PathBuf>,
}

impl PrivateFile {
    fn create(folder: &Path) -> Result<Self> {
        let path = folder.join(format!("tensorcask-base-{}", Id::random()?));
        let fail = |e| Error::io(path.display().to_string(), e);
        std::fs::create_dir_all(folder).map_err(fail)?;
        let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(fail)?;
        let unlinked = std::fs::remove_file(&path).is_ok();
        Ok(Self { file: Mutex::new(file), path: (!unlinked).then_some(path) })
    }

    fn with<T>(&self, offset: u64, run: impl FnOnce(&mut File) -> std::io::Result<T>) -> std::io::Result<T> {
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))?;
        run(&mut file)
    }
}

impl Drop for PrivateFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Names a chunk of the base.
pub(super) struct CachedChunk<'a> {
    pub snapshot: Id,
    pub key: &'a ShardKey,
    /// Grid of the shard.
    pub grid: ChunkGrid,
    /// Index of the chunk in the grid.
    pub chunk: u64,
}

/// A chunk of the base: kept in memory, or decoded or read for this save.
pub(super) type BaseChunk<'a> = MaybeSpare<'a>;

/// Kept shards of one committed snapshot.
#[derive(Debug, Default)]
pub(super) struct BaseCache {
    snapshot: Option<Id>,
    shards: HashMap<ShardKey, KeptShard>,
}

impl BaseCache {
    /// Returns a chunk of the base, if it is kept and its checksum is that of the save.
    pub(super) fn chunk(&self, at: &CachedChunk<'_>, registry: &Registry) -> Option<BaseChunk<'_>> {
        if self.snapshot != Some(at.snapshot) {
            return None;
        }
        let shard = self.shards.get(at.key)?;
        let crc = *shard.crcs.get(usize::try_from(at.chunk).ok()?)?;
        let problem = match shard.read(at, registry) {
            Ok(bytes) if crc32fast::hash(&bytes) == crc => return Some(bytes),
            Ok(_) => Error::corrupt("its checksum differs"),
            Err(e) => e,
        };
        tracing::warn!(tensor = at.key.0, chunk = at.chunk, error = %problem, "the kept base is damaged; reading it back from the store");
        None
    }

    /// CRC-32 of a chunk of the base, if the chunk is kept.
    pub(super) fn crc(&self, snapshot: Id, key: &ShardKey, chunk: u64) -> Option<u32> {
        let shard = self.shards.get(key).filter(|_| self.snapshot == Some(snapshot))?;
        shard.crcs.get(usize::try_from(chunk).ok()?).copied()
    }

    /// Drops a shard that this save needs no more. Old and new base together then take little more memory than one.
    pub(super) fn release(&mut self, key: &ShardKey) {
        self.shards.remove(key);
    }

    /// Drops all shards. The next delta reads its base back from the store.
    pub(super) fn clear(&mut self) {
        self.snapshot = None;
        self.shards = HashMap::new();
    }

    /// Replaces the shards by those of a snapshot that is known to be committed.
    pub(super) fn promote(&mut self, snapshot: Id, next: NextBase) {
        self.snapshot = Some(snapshot);
        self.shards = if next.failed { HashMap::new() } else { next.shards };
    }

    /// Memory that the shards take, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.shards.values().map(KeptShard::memory_bytes).fold(0, u64::saturating_add)
    }
}

impl KeptShard {
    fn read(&self, at: &CachedChunk<'_>, registry: &Registry) -> Result<BaseChunk<'_>> {
        let range = at.grid.bytes(at.chunk);
        let length = to_usize(range.end.saturating_sub(range.start), "a chunk")?;
        let missing = || Error::invalid("the cache does not hold it");
        match &self.form {
            Form::Decoded(bytes) => {
                let start = to_usize(range.start, "a shard")?;
                Ok(BaseChunk::Borrowed(bytes.get(start..start.saturating_add(length)).ok_or_else(missing)?))
            }
            Form::Encoded(chunks) => {
                let chunk = usize::try_from(at.chunk).ok().and_then(|at| chunks.get(at)).ok_or_else(missing)?;
                let codec = registry.resolve(chunk.codec.as_ref().ok_or_else(missing)?)?;
                let columns: Vec<(&str, bytes::Bytes)> = chunk.columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
                let elements = at.grid.elements(at.chunk);
                let element_count = elements.end.saturating_sub(elements.start);
                let mut out = Spare::new(length, "a base chunk")?;
                let input = Columns { dtype: at.grid.dtype(), element_count, columns: &columns, base: None, partners: &[] };
                decode(codec.as_ref(), &input, &mut out)?;
                Ok(BaseChunk::Own(out))
            }
            Form::File { file, offset } => {
                let mut out = Spare::new(length, "a base chunk")?;
                let read = file.with(offset.saturating_add(range.start), |file| file.read_exact(&mut out));
                read.map_err(|e| Error::io("the base on local disk", e))?;
                Ok(BaseChunk::Own(out))
            }
        }
    }

    fn memory_bytes(&self) -> u64 {
        let crcs = self.crcs.len() as u64 * 4;
        crcs + match &self.form {
            Form::Decoded(bytes) => bytes.capacity() as u64,
            Form::Encoded(chunks) => chunks.iter().flat_map(|chunk| &chunk.columns).map(|(_, bytes)| bytes.len() as u64).sum(),
            Form::File { .. } => 0,
        }
    }
}

/// A shard that is being added: its chunks so far.
#[derive(Debug, Default)]
struct OpenShard {
    encoded: Vec<EncodedChunk>,
    decoded: Vec<u8>,
}

/// Collects the state that is being saved, as the base of the next delta.
#[derive(Debug)]
pub(super) struct NextBase {
    keeping: BaseKeeping,
    shards: HashMap<ShardKey, KeptShard>,
    /// Shards that are being added, by tensor and shard in the layout.
    open: HashMap<(usize, usize), OpenShard>,
    /// File of the shards, and the bytes written to it.
    file: Option<(Arc<PrivateFile>, u64)>,
    /// Whether writing to local disk failed; nothing is kept then.
    failed: bool,
}

impl NextBase {
    pub(super) fn new(keeping: BaseKeeping) -> Self {
        Self { keeping, shards: HashMap::new(), open: HashMap::new(), file: None, failed: false }
    }

    /// Whether [`add_chunk`](Self::add_chunk) needs the encoded form of each chunk.
    pub(super) fn keeps_encoded(&self) -> bool {
        self.keeping == BaseKeeping::Encoded
    }

    /// Adds the next chunk of a shard: its stored form, and the form that decodes alone if
    /// [`keeps_encoded`](Self::keeps_encoded).
    pub(super) fn add_chunk(&mut self, at: ChunkRef, view: &TensorView<'_>, data: &[u8], encoded: Option<EncodedChunk>) -> Result<()> {
        let shard = self.open.entry((at.tensor, at.shard)).or_default();
        if let Some(mut chunk) = encoded {
            // The buffers of columns are larger than their content; a copy of the content frees them.
            for (_, bytes) in &mut chunk.columns {
                *bytes = bytes::Bytes::copy_from_slice(bytes);
            }
            shard.encoded.push(chunk);
        }
        let keeps_bytes = match self.keeping {
            BaseKeeping::Memory => true,
            BaseKeeping::Disk(_) => !self.failed,
            BaseKeeping::None | BaseKeeping::Encoded => false,
        };
        if keeps_bytes {
            if shard.decoded.is_empty() {
                shard.decoded = reserve(view.data().len(), "the next base")?;
            }
            shard.decoded.extend_from_slice(data);
        }
        Ok(())
    }

    /// Ends a shard after its last chunk.
    pub(super) fn finish_shard(&mut self, at: ChunkRef, view: &TensorView<'_>, crcs: Vec<u32>) {
        let OpenShard { encoded, decoded: bytes } = self.open.remove(&(at.tensor, at.shard)).unwrap_or_default();
        let form = match &self.keeping {
            BaseKeeping::None => return,
            BaseKeeping::Memory => Form::Decoded(bytes),
            BaseKeeping::Encoded => Form::Encoded(encoded),
            BaseKeeping::Disk(_) if self.failed => return,
            BaseKeeping::Disk(folder) => match write_shard(&mut self.file, folder, &bytes) {
                Ok(form) => form,
                Err(error) => {
                    // A failed cache must not fail the save.
                    tracing::warn!(%error, "the base cannot be kept on local disk; the next delta reads it back from the store");
                    (self.failed, self.file) = (true, None);
                    self.shards.clear();
                    return;
                }
            },
        };
        self.shards.insert(key_of(view), KeptShard { form, crcs });
    }
}

fn write_shard(file: &mut Option<(Arc<PrivateFile>, u64)>, folder: &Path, bytes: &[u8]) -> Result<Form> {
    if file.is_none() {
        *file = Some((Arc::new(PrivateFile::create(folder)?), 0));
    }
    let Some((file, end)) = file else { return Err(Error::invalid("the base has no file")) };
    file.with(*end, |file| file.write_all(bytes)).map_err(|e| Error::io(folder.display().to_string(), e))?;
    let offset = *end;
    *end = end.saturating_add(bytes.len() as u64);
    Ok(Form::File { file: file.clone(), offset })
}
