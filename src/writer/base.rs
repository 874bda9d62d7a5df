//! The state that the next delta is made against: kept decoded, encoded or in a file, or read back.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::BaseKeeping;
use crate::codec::{Columns, EncodedChunk, Registry};
use crate::limits::{reserve, to_usize, zeroed};
use crate::reader::{ChunkItem, Snapshot};
use crate::tensor::ChunkGrid;
use crate::tensor::Rect;
use crate::wire::Id;
use crate::{Error, Result, TensorView, boxed};

/// Name of the tensor and position of the shard.
pub(super) type ShardKey = (String, Rect);

/// A shard of the base, with the CRC-32 of each chunk: memory and disks may be damaged while it waits.
#[derive(Debug)]
struct KeptShard {
    form: Form,
    crcs: Vec<u32>,
}

#[derive(Debug)]
enum Form {
    Decoded(Vec<u8>),
    /// Absolute chunks.
    Encoded(Vec<EncodedChunk>),
    File {
        file: Arc<PrivateFile>,
        offset: u64,
    },
}

/// A file that nobody else sees: it has no name where the system allows that, and goes with its last user in any case.
#[derive(Debug)]
struct PrivateFile {
    file: Mutex<File>,
    /// Its name, where it could not be unlinked while it is open.
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

/// Which chunk of the base is wanted.
pub(super) struct Wanted<'a> {
    pub snapshot: Id,
    pub key: &'a ShardKey,
    pub grid: ChunkGrid,
    pub chunk: u64,
}

/// Shards of one snapshot, kept.
#[derive(Debug, Default)]
pub(super) struct BaseCache {
    snapshot: Option<Id>,
    shards: HashMap<ShardKey, KeptShard>,
}

impl BaseCache {
    /// A chunk of the base, if it is kept and has the checksum that it had when it was saved.
    pub(super) fn chunk(&self, wanted: &Wanted<'_>, registry: &Registry) -> Option<Cow<'_, [u8]>> {
        if self.snapshot != Some(wanted.snapshot) {
            return None;
        }
        let shard = self.shards.get(wanted.key)?;
        let crc = *shard.crcs.get(usize::try_from(wanted.chunk).ok()?)?;
        let problem = match shard.read(wanted, registry) {
            Ok(bytes) if crc32fast::hash(&bytes) == crc => return Some(bytes),
            Ok(_) => Error::corrupt("its checksum differs"),
            Err(e) => e,
        };
        tracing::warn!(tensor = wanted.key.0, chunk = wanted.chunk, error = %problem, "the kept base is damaged; reading it back from the store");
        None
    }

    /// Drops a shard that is not needed again, so that old and new base together take little more than one.
    pub(super) fn release(&mut self, key: &ShardKey) {
        self.shards.remove(key);
    }

    /// Forgets everything: the next delta reads its base back.
    pub(super) fn clear(&mut self) {
        self.snapshot = None;
        self.shards = HashMap::new();
    }

    /// Replaces what is kept. Called only when the snapshot is known to be committed.
    pub(super) fn promote(&mut self, snapshot: Id, next: NextBase) {
        self.snapshot = Some(snapshot);
        self.shards = if next.failed { HashMap::new() } else { next.shards };
    }

    /// Bytes of memory that the shards take.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.shards.values().map(KeptShard::memory_bytes).fold(0, u64::saturating_add)
    }
}

impl KeptShard {
    fn read(&self, wanted: &Wanted<'_>, registry: &Registry) -> Result<Cow<'_, [u8]>> {
        let range = wanted.grid.bytes(wanted.chunk);
        let length = to_usize(range.end.saturating_sub(range.start), "a chunk")?;
        let missing = || Error::invalid("is not there");
        match &self.form {
            Form::Decoded(bytes) => {
                let start = to_usize(range.start, "a shard")?;
                Ok(Cow::Borrowed(bytes.get(start..start.saturating_add(length)).ok_or_else(missing)?))
            }
            Form::Encoded(chunks) => {
                let chunk = usize::try_from(wanted.chunk).ok().and_then(|at| chunks.get(at)).ok_or_else(missing)?;
                let codec = registry.resolve(chunk.codec.as_ref().ok_or_else(missing)?)?;
                let columns: Vec<(&str, bytes::Bytes)> = chunk.columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
                let elements = wanted.grid.elements(wanted.chunk);
                let element_count = elements.end.saturating_sub(elements.start);
                let mut out = zeroed(length, "a base chunk")?;
                let input = Columns { dtype: wanted.grid.dtype(), element_count, columns: &columns, base: None, partners: &[] };
                crate::codec::decode(codec.as_ref(), &input, &mut out)?;
                Ok(Cow::Owned(out))
            }
            Form::File { file, offset } => {
                let mut out = zeroed(length, "a base chunk")?;
                let read = file.with(offset.saturating_add(range.start), |file| file.read_exact(&mut out));
                read.map_err(|e| Error::io("the base on local disk", e))?;
                Ok(Cow::Owned(out))
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

/// The state that is being saved, as the base of deltas to come.
#[derive(Debug)]
pub(super) struct NextBase {
    keeping: BaseKeeping,
    shards: HashMap<ShardKey, KeptShard>,
    /// Chunks of the shard at hand.
    chunks: Vec<EncodedChunk>,
    bytes: Vec<u8>,
    file: Option<(Arc<PrivateFile>, u64)>,
    failed: bool,
}

impl NextBase {
    pub(super) fn new(keeping: BaseKeeping) -> Self {
        Self { keeping, shards: HashMap::new(), chunks: Vec::new(), bytes: Vec::new(), file: None, failed: false }
    }

    /// Whether [`chunk`](Self::chunk) wants the encoded form of each chunk.
    pub(super) fn wants_encoded(&self) -> bool {
        self.keeping == BaseKeeping::Encoded
    }

    /// The next chunk of a shard of so many bytes: as it was stored, and absolute, if that is wanted.
    pub(super) fn chunk(&mut self, shard_bytes: usize, data: &[u8], encoded: Option<EncodedChunk>) -> Result<()> {
        if let Some(mut chunk) = encoded {
            // Buffers of columns have room for more than they hold, and are wanted for the next.
            for (_, bytes) in &mut chunk.columns {
                *bytes = bytes::Bytes::copy_from_slice(bytes);
            }
            self.chunks.push(chunk);
        }
        let keeps_bytes = match self.keeping {
            BaseKeeping::Memory => true,
            BaseKeeping::Nvme(_) => !self.failed,
            BaseKeeping::None | BaseKeeping::Encoded => false,
        };
        if keeps_bytes {
            if self.bytes.is_empty() {
                self.bytes = reserve(shard_bytes, "the next base")?;
            }
            self.bytes.extend_from_slice(data);
        }
        Ok(())
    }

    /// All chunks of a shard have come.
    pub(super) fn shard(&mut self, view: &TensorView<'_>, crcs: Vec<u32>) {
        let key = (view.name().to_owned(), view.rect().clone());
        let bytes = std::mem::take(&mut self.bytes);
        let form = match &self.keeping {
            BaseKeeping::None => return,
            BaseKeeping::Memory => Form::Decoded(bytes),
            BaseKeeping::Encoded => Form::Encoded(std::mem::take(&mut self.chunks)),
            BaseKeeping::Nvme(_) if self.failed => return,
            BaseKeeping::Nvme(folder) => match write_shard(&mut self.file, folder, &bytes) {
                Ok(form) => form,
                Err(error) => {
                    // A save does not fail because a cache did.
                    tracing::warn!(%error, "the next base cannot be kept on local disk; the next delta reads it back from the store");
                    (self.failed, self.file) = (true, None);
                    self.shards.clear();
                    return;
                }
            },
        };
        self.shards.insert(key, KeptShard { form, crcs });
    }
}

fn write_shard(file: &mut Option<(Arc<PrivateFile>, u64)>, folder: &Path, bytes: &[u8]) -> Result<Form> {
    if file.is_none() {
        *file = Some((Arc::new(PrivateFile::create(folder)?), 0));
    }
    let Some((file, end)) = file else { return Err(Error::invalid("no file")) };
    file.with(*end, |file| file.write_all(bytes)).map_err(|e| Error::io(folder.display().to_string(), e))?;
    let offset = *end;
    *end = end.saturating_add(bytes.len() as u64);
    Ok(Form::File { file: file.clone(), offset })
}

/// The parent of the snapshot that is being saved.
#[derive(Debug)]
pub(crate) struct Parent {
    pub snapshot: Snapshot,
}

impl Parent {
    /// The tensor, if the parent has this very shard, of this type and global shape; only then a delta can be made.
    pub(super) fn find(&self, view: &TensorView<'_>) -> Option<usize> {
        let directory = &self.snapshot.newest().directory;
        let tensor = directory.find(view.name())?;
        let same = directory.dtype(tensor) == view.dtype() && directory.shape(tensor) == view.shape();
        directory.find_shard(tensor, view.rect()).filter(|_| same).map(|_| tensor)
    }

    /// Reads chunks back from the store.
    #[boxed]
    pub(super) async fn read<'i>(&'i self, wanted: Vec<ChunkItem<'i>>) -> Result<()> {
        self.snapshot.read_chunks(wanted).await.map_err(|e| {
            let step = self.snapshot.step();
            Error::new(e.kind(), format!("the base at step {step} cannot be read back, so no delta can be made: {e}")).source(e)
        })
    }
}
