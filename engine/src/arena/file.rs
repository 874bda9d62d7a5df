//! The arena's file in shared memory: its layout, its creation, and access to its words and bytes.
//!
//! ```text
//! page 0        magic, version, slots, bytes of a slot, newest encoded generation, session
//! page 1 + n    slot n: word (state and generation), step, description (offset, size, CRC-32), session, ranks, attempt
//! then          the bytes of slot 0, slot 1, ...: tensors and bitmaps of changed rows, each at a cache line, then the
//!               description
//! ```
//!
//! The pages of the slots become present later: see [`memory`](super::memory).
//!
//! All numbers are 64-bit atomic words in native byte order: the file never leaves the host.

use std::fs::OpenOptions;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tensorcask::{Error, ErrorKind, Result};

use super::memory::ArenaMemory;
use super::slot::{SlotState, SlotWord};
use crate::os::folders::describe_free_space;
use crate::os::shared_memory::SharedMemory;

/// Number of slots that an arena may have.
pub(crate) const SLOTS: RangeInclusive<u32> = 1..=16;

/// Words of page 0, by offset.
pub(crate) mod head {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 8;
    pub(crate) const SLOTS: usize = 16;
    pub(crate) const SLOT_BYTES: usize = 24;
    pub(crate) const ENCODED: usize = 32;
    pub(crate) const SESSION: usize = 40;
}

/// Words of a slot's page, by offset.
pub(crate) mod field {
    pub(crate) const WORD: usize = 0;
    pub(crate) const STEP: usize = 8;
    pub(crate) const DESCRIPTION_AT: usize = 16;
    pub(crate) const DESCRIPTION_BYTES: usize = 24;
    pub(crate) const DESCRIPTION_CRC: usize = 32;
    pub(crate) const SESSION: usize = 40;
    pub(crate) const WORLD: usize = 48;
    pub(crate) const ATTEMPT: usize = 56;
}

/// A mapped arena file.
#[derive(Debug)]
pub(crate) struct ArenaFile {
    path: PathBuf,
    identity: FileIdentity,
    memory: ArenaMemory,
    slots: usize,
    slot_bytes: usize,
}

/// Device and inode of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl ArenaFile {
    /// Creates a file in place of an existing one. Its slots take no memory yet. Its generations follow `generation`.
    /// Fails with `Storage` if the file system has too little free space for all slots.
    pub(crate) fn create(path: &Path, slots: u32, slot_bytes: usize, generation: u64) -> Result<Self> {
        let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
        if !SLOTS.contains(&slots) {
            return Err(Error::invalid(format!("slots={slots}: an arena has {} to {} slots", SLOTS.start(), SLOTS.end())));
        }
        let slot_bytes = slot_bytes.next_multiple_of(PAGE);
        let bytes = (slots as usize).checked_mul(slot_bytes + PAGE).and_then(|bytes| bytes.checked_add(PAGE));
        let bytes = bytes.ok_or_else(|| Error::limit("the arena has more bytes than this machine can address"))?;
        // Created under another name, so that the arena appears complete or not at all.
        let new = path.with_extension("new");
        let _ = std::fs::remove_file(&new);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new).map_err(fail)?;
        let sized = match has_room(path, bytes) {
            true => file.set_len(bytes as u64).map_err(fail),
            false => Err(no_room(path, slots as usize, bytes)),
        };
        let made = sized.and_then(|()| ArenaMemory::map(file, path)).and_then(|mapped| {
            mapped.make_present(0, PAGE * (1 + slots as usize)).map_err(|e| no_room_or(e, path, slots as usize, bytes))?;
            let memory = mapped.shared();
            for (offset, value) in
                [(head::MAGIC, MAGIC), (head::VERSION, VERSION), (head::SLOTS, u64::from(slots)), (head::SLOT_BYTES, slot_bytes as u64)]
            {
                memory.word(offset)?.store(value, Ordering::Relaxed);
            }
            let empty = SlotWord { state: SlotState::Empty, generation }.to_bits();
            (1..=slots as usize)
                .try_for_each(|page| memory.word(PAGE * page + field::WORD).map(|word| word.store(empty, Ordering::Release)))?;
            std::fs::rename(&new, path).map_err(fail)?;
            let identity = identity(&mapped.file().metadata().map_err(fail)?);
            Ok((mapped, identity))
        });
        match made {
            Ok((memory, identity)) => Ok(Self { path: path.to_owned(), identity, memory, slots: slots as usize, slot_bytes }),
            Err(e) => {
                let _ = std::fs::remove_file(&new);
                Err(e)
            }
        }
    }

    /// Maps an existing file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let fail = |e: std::io::Error| Error::io(name.as_str(), e);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(fail)?;
        let meta = file.metadata().map_err(fail)?;
        if !meta.is_file() || meta.uid() != rustix::process::getuid().as_raw() || meta.mode() & 0o077 != 0 {
            return Err(Error::invalid("is not an arena that only this user can access; remove it").object(name));
        }
        if meta.len() < PAGE as u64 {
            return Err(Error::corrupt("is no arena").object(name));
        }
        let mapped = ArenaMemory::map(file, path)?;
        let memory = mapped.shared();
        let read = |offset: usize| memory.word(offset).map(|word| word.load(Ordering::Relaxed));
        let corrupt = |message: &str| Error::corrupt(message).object(name.as_str());
        if memory.len() < PAGE || read(head::MAGIC)? != MAGIC {
            return Err(corrupt("is no arena"));
        }
        match read(head::VERSION)? {
            VERSION => {}
            other => {
                let message = format!(
                    "is an arena of version {other}, and this program knows version {VERSION}. Start the job once more with the version of \
                     tensorcask that saved it"
                );
                return Err(Error::unsupported(message).object(name));
            }
        }
        let slots = u32::try_from(read(head::SLOTS)?).ok().filter(|slots| SLOTS.contains(slots));
        let slots = slots.ok_or_else(|| corrupt("the arena has an invalid number of slots"))? as usize;
        let slot_bytes = usize::try_from(read(head::SLOT_BYTES)?).map_err(|_| corrupt("the arena has an invalid slot size"))?;
        let bytes = slot_bytes.checked_add(PAGE).and_then(|bytes| bytes.checked_mul(slots)).and_then(|bytes| bytes.checked_add(PAGE));
        if bytes != Some(memory.len()) {
            return Err(corrupt("the size of the arena differs from its header"));
        }
        Ok(Self { path: path.to_owned(), identity: identity(&meta), memory: mapped, slots, slot_bytes })
    }

    /// Whether the path still leads to this file. The file of a finished run is removed.
    pub(crate) fn is_in_place(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|found| identity(&found) == self.identity)
    }

    /// The mapped memory.
    pub(crate) fn memory(&self) -> &SharedMemory {
        self.memory.shared()
    }

    /// Number of blocks that the memory becomes present in.
    pub(crate) fn blocks(&self) -> usize {
        self.memory.blocks()
    }

    /// Takes the memory of a block. Fails with `Storage` if there is none.
    pub(crate) fn make_block_present(&self, block: usize) -> Result<()> {
        self.memory.make_block_present(block).map_err(|e| self.no_room_or(e))
    }

    /// Takes the memory of a range. Fails with `Storage` if there is none.
    pub(crate) fn make_present(&self, offset: usize, bytes: usize) -> Result<()> {
        self.memory.make_present(offset, bytes).map_err(|e| self.no_room_or(e))
    }

    /// Copies bytes into a slot that the caller fills. Takes the memory first, if that is not done yet.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.make_present(offset, bytes.len())?;
        self.memory().write(offset, bytes)
    }

    fn no_room_or(&self, error: std::io::Error) -> Error {
        no_room_or(error, &self.path, self.slots, self.memory().len())
    }

    /// The path, for error messages.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Size of a slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Total size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory().len() as u64
    }

    /// Bytes of the file that take memory; 0 if it was removed.
    pub(crate) fn present_bytes(&self) -> u64 {
        std::fs::metadata(&self.path)
            .ok()
            .filter(|found| identity(found) == self.identity)
            .map_or(0, |found| found.blocks().saturating_mul(512))
    }

    /// Whether a state of this size fits into a slot.
    pub(crate) fn fits(&self, bytes: usize) -> bool {
        bytes <= self.slot_bytes
    }

    /// A word of page 0.
    pub(crate) fn head(&self, name: usize) -> Result<&AtomicU64> {
        self.memory().word(name)
    }

    /// A word of a slot's page.
    pub(crate) fn field(&self, slot: usize, name: usize) -> Result<&AtomicU64> {
        self.memory().word(PAGE * (slot + 1) + name)
    }

    /// Offset of the bytes of a slot.
    pub(crate) fn start(&self, slot: usize) -> usize {
        PAGE * (1 + self.slots) + slot * self.slot_bytes
    }
}

fn identity(file: &std::fs::Metadata) -> FileIdentity {
    FileIdentity { device: file.dev(), inode: file.ino() }
}

/// Whether the file system reports at least this much free space.
fn has_room(path: &Path, bytes: usize) -> bool {
    let limited = rustix::fs::statvfs(path.parent().unwrap_or(path)).ok().filter(|found| found.f_blocks > 0);
    limited.is_none_or(|found| found.f_bavail.saturating_mul(found.f_frsize) >= bytes as u64)
}

fn no_room_or(error: std::io::Error, path: &Path, slots: usize, bytes: usize) -> Error {
    match error.kind() {
        std::io::ErrorKind::StorageFull => no_room(path, slots, bytes),
        _ => Error::io(path.display().to_string(), error),
    }
}

fn no_room(path: &Path, slots: usize, bytes: usize) -> Error {
    let free = describe_free_space(path.parent().unwrap_or(path));
    let message = format!("no space: an arena of {slots} slots for this state needs {bytes} bytes of shared memory, and {free}");
    Error::new(ErrorKind::Storage, message).object(path.display().to_string())
}

const PAGE: usize = 4096;
/// "TCARENA" and a number, as one word.
const MAGIC: u64 = 0x5443_4152_454e_4131;
const VERSION: u64 = 3;

#[cfg(test)]
mod tests {
    use super::ArenaFile;

    #[test]
    fn a_file_with_a_wrong_header_or_size_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arena");
        drop(ArenaFile::create(&path, 2, 4096, 0).unwrap());
        let good = std::fs::read(&path).unwrap();
        for (at, byte) in [(0, 0), (8, 9), (16, 200), (24, 1)] {
            let mut bad = good.clone();
            bad[at] ^= byte.max(1);
            std::fs::write(&path, &bad).unwrap();
            assert!(ArenaFile::open(&path).is_err(), "byte {at}");
        }
        for length in [0, 100, 4096, good.len() - 1, good.len() + 1] {
            let mut bad = good.clone();
            bad.resize(length, 0);
            std::fs::write(&path, &bad).unwrap();
            assert!(ArenaFile::open(&path).is_err(), "length {length}");
        }
        std::fs::write(&path, &good).unwrap();
        ArenaFile::open(&path).unwrap();
    }
}
