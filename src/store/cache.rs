//! Cache of a store handle: directories and indexes, both keyed by digest.

use std::sync::Arc;

use crate::container::CaskIndex;
use crate::wire::{CaskRef, Digest, Directory};

/// Maximum number of cached directories.
const MAX_DIRECTORIES: usize = 16;

/// Directories and indexes that were read recently.
#[derive(Debug)]
pub(crate) struct Caches {
    max_index_bytes: u64,
    directories: std::sync::Mutex<Vec<(Digest, Arc<Directory>)>>,
    indexes: std::sync::Mutex<Indexes>,
}

/// Cask indexes, the most recently used last.
#[derive(Debug, Default)]
struct Indexes {
    kept: Vec<(Digest, u64, Arc<CaskIndex>)>,
    bytes: u64,
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Caches {
    /// Creates empty caches. The indexes take at most `max_index_bytes`.
    pub(super) fn new(max_index_bytes: u64) -> Self {
        Self { max_index_bytes, directories: std::sync::Mutex::default(), indexes: std::sync::Mutex::default() }
    }

    /// Returns the directory with this digest, if it is in the cache.
    pub(crate) fn directory(&self, digest: Digest) -> Option<Arc<Directory>> {
        let cache = lock(&self.directories);
        cache.iter().find(|(known, _)| *known == digest).map(|(_, directory)| directory.clone())
    }

    /// Caches a directory. Evicts the oldest directory if the cache is full.
    pub(crate) fn keep_directory(&self, digest: Digest, directory: Arc<Directory>) {
        let mut cache = lock(&self.directories);
        cache.retain(|(known, _)| *known != digest);
        if cache.len() >= MAX_DIRECTORIES {
            cache.remove(0);
        }
        cache.push((digest, directory));
    }

    /// Returns the index of a cask, if it is in the cache. The digest covers header, index root and postscript; index
    /// parts are checked against the root.
    pub(crate) fn index(&self, cask: &CaskRef) -> Option<Arc<CaskIndex>> {
        let mut cache = lock(&self.indexes);
        let at = cache.kept.iter().position(|(digest, ..)| *digest == cask.digest)?;
        let found = cache.kept.remove(at);
        let index = found.2.clone();
        cache.kept.push(found);
        let file = index.file();
        let same = (file.id, file.bytes) == (cask.id, cask.bytes)
            && (file.index_offset, file.root_offset) == (cask.index_offset, cask.root_offset);
        same.then_some(index)
    }

    /// Caches an index. Evicts the least recently used indexes to stay within the limit.
    pub(crate) fn keep_index(&self, cask: &CaskRef, index: Arc<CaskIndex>) {
        // Counts all index parts, because any of them may be loaded later.
        let bytes = cask.bytes.saturating_sub(cask.index_offset);
        if bytes > self.max_index_bytes {
            return;
        }
        let mut cache = lock(&self.indexes);
        if let Some(at) = cache.kept.iter().position(|(digest, ..)| *digest == cask.digest) {
            let (_, old, _) = cache.kept.remove(at);
            cache.bytes -= old;
        }
        let mut gone = 0;
        while cache.bytes + bytes > self.max_index_bytes {
            let Some((_, old, _)) = cache.kept.get(gone) else { break };
            cache.bytes -= *old;
            gone += 1;
        }
        cache.kept.drain(..gone);
        cache.bytes += bytes;
        cache.kept.push((cask.digest, bytes, index));
    }
}
