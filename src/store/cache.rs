//! What a store's handle remembers: directories and indexes, both named by their digests.

use std::sync::Arc;

use super::Store;
use crate::container::CaskIndex;
use crate::wire::{CaskRef, Digest, Directory};

/// Directories kept, at most.
const MAX_DIRECTORIES: usize = 16;

/// Directories and indexes that were read lately.
#[derive(Debug, Default)]
pub(super) struct Caches {
    directories: std::sync::Mutex<Vec<(Digest, Arc<Directory>)>>,
    indexes: std::sync::Mutex<Indexes>,
}

/// Indexes of casks, the one used last at the end.
#[derive(Debug, Default)]
struct Indexes {
    kept: Vec<(Digest, u64, Arc<CaskIndex>)>,
    bytes: u64,
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Store {
    /// The directory of a digest, if it was read lately.
    pub(crate) fn cached_directory(&self, digest: Digest) -> Option<Arc<Directory>> {
        let cache = lock(&self.inner.caches.directories);
        cache.iter().find(|(known, _)| *known == digest).map(|(_, directory)| directory.clone())
    }

    pub(crate) fn cache_directory(&self, digest: Digest, directory: Arc<Directory>) {
        let mut cache = lock(&self.inner.caches.directories);
        cache.retain(|(known, _)| *known != digest);
        if cache.len() >= MAX_DIRECTORIES {
            cache.remove(0);
        }
        cache.push((digest, directory));
    }

    /// The index of a cask, if it was read lately. Its digest is that of header, index root and postscript; parts are checked
    /// against the root.
    pub(crate) fn cached_index(&self, cask: &CaskRef) -> Option<Arc<CaskIndex>> {
        let mut cache = lock(&self.inner.caches.indexes);
        let at = cache.kept.iter().position(|(digest, ..)| *digest == cask.digest)?;
        let found = cache.kept.remove(at);
        let index = found.2.clone();
        cache.kept.push(found);
        let same = index.id() == cask.id
            && index.file_bytes() == cask.bytes
            && index.index_offset() == cask.index_offset
            && index.root_offset() == cask.root_offset;
        same.then_some(index)
    }

    /// Keeps an index; the oldest go, so that all together take no more than the options allow.
    pub(crate) fn cache_index(&self, cask: &CaskRef, index: Arc<CaskIndex>) {
        let limit = self.inner.options.index_cache_bytes;
        // As if all parts were loaded: they may be, later.
        let bytes = cask.bytes.saturating_sub(cask.index_offset);
        if bytes > limit {
            return;
        }
        let mut cache = lock(&self.inner.caches.indexes);
        if let Some(at) = cache.kept.iter().position(|(digest, ..)| *digest == cask.digest) {
            let (_, old, _) = cache.kept.remove(at);
            cache.bytes -= old;
        }
        let mut gone = 0;
        while cache.bytes + bytes > limit {
            let Some((_, old, _)) = cache.kept.get(gone) else { break };
            cache.bytes -= *old;
            gone += 1;
        }
        cache.kept.drain(..gone);
        cache.bytes += bytes;
        cache.kept.push((cask.digest, bytes, index));
    }
}
