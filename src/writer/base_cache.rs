//! The base cache: the state that the next delta is made against, kept in memory or on local disk.
//!
//! During a save, [`NextBase`] collects the stored form of the state beside the [`BaseCache`] of the save before. Once
//! the snapshot is committed, [`BaseCache::promote`] replaces the one by the other. [`BaseKeeping`] decides the form:
//! decoded, encoded or in a file. A chunk that is not in the cache, or is damaged there, is read back from the store.
//!
//! A chunk of the new state takes over the memory of the same chunk of the old base ([`BaseCache::take`]), unless another
//! unit may still need that. Memory that is new to a process costs more than the copy.
//!
//! Invariants: the cache holds shards of one committed snapshot only. Each chunk is returned only if its CRC-32 is that
//! of the save.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rayon::prelude::*;
use tensorcask_kernels::spare::{MaybeSpare, Spare, fits};

use super::BaseKeeping;
use crate::codec::{Columns, EncodedChunk, Registry, decode};
use crate::limits::{reserve, to_usize};
use crate::tensor::{ChunkGrid, Rect};
use crate::wire::Id;
use crate::{Error, Result, TensorView, parallel};

/// Name of the tensor and rectangle of the shard.
pub(super) type ShardKey = (String, Rect);

/// Key of the shard that a view holds.
pub(super) fn key_of(view: &TensorView<'_>) -> ShardKey {
    (view.name().to_owned(), view.rect().clone())
}

/// A chunk of the base, with its CRC-32, which catches damage to memory or disk between two saves.
#[derive(Debug)]
struct KeptChunk {
    form: Form,
    crc: u32,
}

#[derive(Debug)]
enum Form {
    /// Decoded bytes.
    Decoded(Vec<u8>),
    /// A chunk that decodes without a base and without partners.
    Encoded(EncodedChunk),
    /// Decoded bytes in a file, from `offset` on.
    File { file: Arc<PrivateFile>, offset: u64 },
    /// Dropped: the save under way needs the chunk no more.
    Dropped,
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
    /// Chunks of each shard.
    shards: HashMap<ShardKey, Vec<KeptChunk>>,
}

impl BaseCache {
    /// Returns a chunk of the base, if it is kept and its checksum is that of the save.
    pub(super) fn chunk(&self, at: &CachedChunk<'_>, registry: &Registry) -> Option<BaseChunk<'_>> {
        if self.snapshot != Some(at.snapshot) {
            return None;
        }
        let kept = self.kept(at.key, at.chunk)?;
        let problem = match kept.read(at, registry).transpose()? {
            Ok(bytes) if crc32fast::hash(&bytes) == kept.crc => return Some(bytes),
            Ok(_) => Error::corrupt("its checksum differs"),
            Err(e) => e,
        };
        tracing::warn!(tensor = at.key.0, chunk = at.chunk, error = %problem, "the kept base is damaged; reading it back from the store");
        None
    }

    /// CRC-32 of a chunk of the base, if the chunk is kept.
    pub(super) fn crc(&self, snapshot: Id, key: &ShardKey, chunk: u64) -> Option<u32> {
        let kept = self.kept(key, chunk).filter(|_| self.snapshot == Some(snapshot))?;
        Some(kept.crc)
    }

    fn kept(&self, key: &ShardKey, chunk: u64) -> Option<&KeptChunk> {
        self.shards.get(key)?.get(usize::try_from(chunk).ok()?)
    }

    /// Drops a chunk that this save needs no more, and returns its memory, if it was decoded. Old and new base together
    /// then take little more memory than one.
    pub(super) fn take(&mut self, key: &ShardKey, chunk: u64) -> Option<Vec<u8>> {
        let kept = self.shards.get_mut(key)?.get_mut(usize::try_from(chunk).ok()?)?;
        match std::mem::replace(&mut kept.form, Form::Dropped) {
            Form::Decoded(bytes) => Some(bytes),
            Form::Encoded(_) | Form::File { .. } | Form::Dropped => None,
        }
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
        self.shards.values().flatten().map(KeptChunk::memory_bytes).fold(0, u64::saturating_add)
    }
}

impl KeptChunk {
    /// Returns the decoded chunk; `None` if it was dropped.
    fn read(&self, at: &CachedChunk<'_>, registry: &Registry) -> Result<Option<BaseChunk<'_>>> {
        let range = at.grid.bytes(at.chunk);
        let length = to_usize(range.end.saturating_sub(range.start), "a chunk")?;
        let missing = || Error::invalid("the cache does not hold it");
        match &self.form {
            Form::Dropped => Ok(None),
            Form::Decoded(bytes) if bytes.len() == length => Ok(Some(BaseChunk::Borrowed(bytes))),
            Form::Decoded(_) => Err(missing()),
            Form::Encoded(chunk) => {
                let codec = registry.resolve(chunk.codec.as_ref().ok_or_else(missing)?)?;
                let columns: Vec<(&str, bytes::Bytes)> = chunk.columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
                let elements = at.grid.elements(at.chunk);
                let element_count = elements.end.saturating_sub(elements.start);
                let mut out = Spare::new(length, "a base chunk")?;
                let input = Columns { dtype: at.grid.dtype(), element_count, columns: &columns, base: None, partners: &[] };
                decode(codec.as_ref(), &input, &mut out)?;
                Ok(Some(BaseChunk::Own(out)))
            }
            Form::File { file, offset } => {
                let mut out = Spare::new(length, "a base chunk")?;
                let read = file.with(*offset, |file| file.read_exact(&mut out));
                read.map_err(|e| Error::io("the base on local disk", e))?;
                Ok(Some(BaseChunk::Own(out)))
            }
        }
    }

    fn memory_bytes(&self) -> u64 {
        let content = match &self.form {
            Form::Decoded(bytes) => bytes.capacity() as u64,
            Form::Encoded(chunk) => chunk.columns.iter().map(|(_, bytes)| bytes.len() as u64).sum(),
            Form::File { .. } | Form::Dropped => 0,
        };
        content.saturating_add(size_of::<Self>() as u64)
    }
}

/// A chunk of the state that is being saved.
pub(super) struct NextChunk<'a> {
    pub key: ShardKey,
    /// Index of the chunk in the grid of the shard.
    pub chunk: u64,
    /// Stored form.
    pub data: Cow<'a, [u8]>,
    /// The form that decodes alone, if [`NextBase::keeps_encoded`].
    pub encoded: Option<EncodedChunk>,
    pub crc: u32,
    /// Memory to use again.
    pub memory: Option<Vec<u8>>,
}

/// Collects the state that is being saved, as the base of the next delta.
#[derive(Debug)]
pub(super) struct NextBase {
    keeping: BaseKeeping,
    shards: HashMap<ShardKey, Vec<KeptChunk>>,
    /// File of the chunks, and the bytes written to it.
    file: Option<(Arc<PrivateFile>, u64)>,
    /// Whether writing to local disk failed; nothing is kept then.
    failed: bool,
}

impl NextBase {
    pub(super) fn new(keeping: BaseKeeping) -> Self {
        Self { keeping, shards: HashMap::new(), file: None, failed: false }
    }

    /// Whether [`add`](Self::add) needs the encoded form of each chunk.
    pub(super) fn keeps_encoded(&self) -> bool {
        self.keeping == BaseKeeping::Encoded
    }

    /// Adds the next chunks of shards, each shard's in order.
    pub(super) fn add(&mut self, chunks: Vec<NextChunk<'_>>) -> Result<()> {
        let in_memory = |chunk: NextChunk<'_>| {
            let form = Form::Decoded(copy_into(chunk.memory, &chunk.data)?);
            Ok((chunk.key, chunk.chunk, KeptChunk { form, crc: chunk.crc }))
        };
        let encoded = |chunk: NextChunk<'_>| {
            let mut encoded = chunk.encoded?;
            // The buffers of columns are larger than their content; a copy of the content frees them.
            for (_, bytes) in &mut encoded.columns {
                *bytes = bytes::Bytes::copy_from_slice(bytes);
            }
            Some((chunk.key, chunk.chunk, KeptChunk { form: Form::Encoded(encoded), crc: chunk.crc }))
        };
        let kept: Vec<(ShardKey, u64, KeptChunk)> = match &self.keeping {
            BaseKeeping::None => return Ok(()),
            BaseKeeping::Disk(_) if self.failed => return Ok(()),
            BaseKeeping::Memory => parallel::run(|| chunks.into_par_iter().map(in_memory).collect::<Result<_>>())?,
            BaseKeeping::Encoded => chunks.into_iter().filter_map(encoded).collect(),
            BaseKeeping::Disk(folder) => match write_chunks(&mut self.file, folder, chunks) {
                Ok(kept) => kept,
                Err(error) => {
                    // A failed cache must not fail the save.
                    tracing::warn!(%error, "the base cannot be kept on local disk; the next delta reads it back from the store");
                    (self.failed, self.file) = (true, None);
                    self.shards.clear();
                    return Ok(());
                }
            },
        };
        for (key, index, chunk) in kept {
            // A chunk must not stand at the place of another one. A shard that is not whole is read back from the store.
            match self.shards.entry(key) {
                Entry::Vacant(shard) if index == 0 => drop(shard.insert(vec![chunk])),
                Entry::Vacant(_) => {}
                Entry::Occupied(mut shard) if shard.get().len() as u64 == index => shard.get_mut().push(chunk),
                Entry::Occupied(shard) => drop(shard.remove()),
            }
        }
        Ok(())
    }
}

/// Copies data into `memory`, or into new memory if that does not [fit](fits).
fn copy_into(memory: Option<Vec<u8>>, data: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = match memory {
        Some(memory) if fits(&memory, data.len()) => memory,
        _ => reserve(data.len(), "the next base")?,
    };
    bytes.clear();
    bytes.extend_from_slice(data);
    Ok(bytes)
}

fn write_chunks(
    file: &mut Option<(Arc<PrivateFile>, u64)>,
    folder: &Path,
    chunks: Vec<NextChunk<'_>>,
) -> Result<Vec<(ShardKey, u64, KeptChunk)>> {
    if file.is_none() {
        *file = Some((Arc::new(PrivateFile::create(folder)?), 0));
    }
    let Some((file, end)) = file else { return Err(Error::invalid("the base has no file")) };
    let write = |chunk: NextChunk<'_>| {
        let offset = *end;
        let bytes = &chunk.data;
        file.with(offset, |file| file.write_all(bytes)).map_err(|e| Error::io(folder.display().to_string(), e))?;
        *end = offset.saturating_add(bytes.len() as u64);
        Ok((chunk.key, chunk.chunk, KeptChunk { form: Form::File { file: file.clone(), offset }, crc: chunk.crc }))
    };
    chunks.into_iter().map(write).collect()
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::{BaseCache, CachedChunk, NextBase, NextChunk, ShardKey};
    use crate::codec::Registry;
    use crate::tensor::{ChunkGrid, Rect};
    use crate::wire::Id;
    use crate::writer::BaseKeeping;
    use crate::{Dtype, Result};

    fn next_chunk(key: &ShardKey, chunk: u64, content: u8, memory: Option<Vec<u8>>) -> NextChunk<'static> {
        let data = vec![content; 8];
        NextChunk { key: key.clone(), chunk, crc: crc32fast::hash(&data), data: Cow::Owned(data), encoded: None, memory }
    }

    #[test]
    fn a_new_chunk_takes_the_memory_of_its_base_chunk() -> Result<()> {
        let key = ("weight".to_owned(), Rect::whole(&[4]));
        let snapshot = Id::random()?;
        let at = CachedChunk { snapshot, key: &key, grid: ChunkGrid::new(Dtype::Bf16, &[4])?, chunk: 0 };
        let registry = Registry::default();
        let mut cache = BaseCache::default();
        let mut first = NextBase::new(BaseKeeping::Memory);
        first.add(vec![next_chunk(&key, 0, 1, None)])?;
        cache.promote(snapshot, first);
        assert_eq!(cache.chunk(&at, &registry).as_deref(), Some(&[1; 8][..]));

        let memory = cache.take(&key, 0);
        let address = memory.as_ref().map(|bytes| bytes.as_ptr());
        assert!(address.is_some());
        // The checksum stays known; the bytes come from the store from now on.
        assert_eq!(cache.crc(snapshot, &key, 0), Some(crc32fast::hash(&[1; 8])));
        assert!(cache.chunk(&at, &registry).is_none());
        assert!(cache.take(&key, 0).is_none());

        let mut second = NextBase::new(BaseKeeping::Memory);
        second.add(vec![next_chunk(&key, 0, 2, memory)])?;
        cache.promote(snapshot, second);
        let found = cache.chunk(&at, &registry);
        assert_eq!(found.as_deref(), Some(&[2; 8][..]));
        assert_eq!(found.as_deref().map(<[u8]>::as_ptr), address);
        Ok(())
    }

    #[test]
    fn a_shard_that_lacks_a_chunk_is_not_kept() -> Result<()> {
        let [gap, whole] = ["gap", "whole"].map(|name| (name.to_owned(), Rect::whole(&[4])));
        let snapshot = Id::random()?;
        let mut next = NextBase::new(BaseKeeping::Memory);
        next.add(vec![next_chunk(&gap, 0, 1, None), next_chunk(&gap, 2, 3, None), next_chunk(&whole, 0, 1, None)])?;
        next.add(vec![next_chunk(&gap, 3, 4, None), next_chunk(&whole, 1, 2, None)])?;
        let mut cache = BaseCache::default();
        cache.promote(snapshot, next);
        assert!((0..4).all(|chunk| cache.crc(snapshot, &gap, chunk).is_none()));
        assert_eq!(cache.crc(snapshot, &whole, 1), Some(crc32fast::hash(&[2; 8])));
        Ok(())
    }
}
