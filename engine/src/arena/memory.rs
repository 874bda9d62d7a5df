//! The memory of an arena file, which becomes present block by block.
//!
//! A new file in shared memory has no pages yet. Taking and zeroing them costs several times as much as the copy of
//! a state. So creating an arena takes none. A [`Population`](super::population::Population) makes all blocks present
//! in the background, and a save makes those present that it is about to write.
//!
//! Making a block present changes no byte, so any process may do it at any moment, whoever holds the slot. If it is
//! done twice, or a process dies in the middle, nothing is lost but time.
//!
//! Why not `pwrite`, which zeroes nothing? The kernel admits one writer of a file at a time, so copy threads would wait
//! for each other.
//!
//! Invariant: no byte is written through the map unless its block is present. A write to a page that the system cannot
//! provide would kill the process; making the block present fails with an error instead.

use std::fs::File;
use std::io::Result;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;

use crate::os::shared_memory::SharedMemory;

/// A mapped file and the blocks of it that are present.
#[derive(Debug)]
pub(crate) struct ArenaMemory {
    file: File,
    shared: SharedMemory,
    /// Whether this process has made each block present.
    present: Vec<AtomicBool>,
}

impl ArenaMemory {
    /// Maps a whole file.
    pub(crate) fn map(file: File, name: &Path) -> tensorcask::Result<Self> {
        let shared = SharedMemory::map(&file, name)?;
        shared.prefer_huge_pages();
        let present = (0..shared.len().div_ceil(BLOCK_BYTES)).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { file, shared, present })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn shared(&self) -> &SharedMemory {
        &self.shared
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.present.len()
    }

    /// Makes all blocks of a range present. Fails with `StorageFull` if there is no memory for them.
    pub(crate) fn make_present(&self, offset: usize, bytes: usize) -> Result<()> {
        let end = offset.saturating_add(bytes).min(self.shared.len());
        (offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)).try_for_each(|block| self.make_block_present(block))
    }

    /// Makes a block present.
    pub(crate) fn make_block_present(&self, block: usize) -> Result<()> {
        let Some(present) = self.present.get(block) else { return Ok(()) };
        if present.load(Ordering::Relaxed) {
            return Ok(());
        }
        let offset = block * BLOCK_BYTES;
        let bytes = BLOCK_BYTES.min(self.shared.len().saturating_sub(offset));
        if let Err(error) = self.shared.populate(offset, bytes) {
            // The kernel is older than this advice, or has no memory. Allocating tells which.
            tracing::trace!(%error, "cannot populate shared memory");
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset as u64, bytes as u64)?;
        }
        present.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// Size of a block. Small enough that its pages are still in the cache when they are written right after being zeroed.
const BLOCK_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::{ArenaMemory, BLOCK_BYTES};

    fn memory(bytes: usize) -> ArenaMemory {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file.as_file().set_len(bytes as u64).unwrap();
        ArenaMemory::map(file.reopen().unwrap(), file.path()).unwrap()
    }

    fn present_bytes(memory: &ArenaMemory) -> u64 {
        memory.file().metadata().unwrap().blocks() * 512
    }

    #[test]
    fn only_the_blocks_of_a_range_become_present() {
        let memory = memory(10 * BLOCK_BYTES + 5000);
        assert_eq!((memory.blocks(), present_bytes(&memory)), (11, 0));
        memory.make_present(3 * BLOCK_BYTES - 1, 2).unwrap();
        assert_eq!(present_bytes(&memory), 2 * BLOCK_BYTES as u64);
        memory.make_present(0, 0).unwrap();
        memory.make_present(10 * BLOCK_BYTES + 4999, 1).unwrap();
        assert_eq!(present_bytes(&memory), 2 * BLOCK_BYTES as u64 + 8192);
        memory.make_present(0, usize::MAX).unwrap();
        assert_eq!(present_bytes(&memory), 10 * BLOCK_BYTES as u64 + 8192);
    }

    #[test]
    fn making_memory_present_changes_no_byte() {
        let memory = memory(2 * BLOCK_BYTES);
        memory.make_present(0, 100).unwrap();
        memory.shared().write(50, b"state").unwrap();
        let second = ArenaMemory::map(memory.file().try_clone().unwrap(), std::path::Path::new("second")).unwrap();
        second.make_present(0, 2 * BLOCK_BYTES).unwrap();
        assert_eq!(memory.shared().bytes(50, 6).unwrap(), b"state\0");
    }
}
