//! Shared memory, and the only unsafe code of the crate: a mapped file, atomic words in it, and copies past the cache.
//!
//! Two processes map one file. Who may touch which bytes, and when, is the protocol of [`slot`](crate::slot); here are the
//! means. No reference to shared bytes is given out without its bounds having been checked.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use memmap2::{Advice, MmapRaw};
use tensorcask::{Error, Result};

/// Bytes of a line of the cache: what is copied past the cache begins at multiples of this.
pub(crate) const LINE: usize = 64;

/// A file, mapped to be read and written by several processes.
#[derive(Debug)]
pub(crate) struct Shared {
    map: MmapRaw,
}

impl Shared {
    /// Maps a whole file. It must not be cut while it is mapped: who owns the folder it lies in could, and would kill this process.
    pub(crate) fn map(file: &File, name: &Path) -> Result<Self> {
        let map = MmapRaw::map_raw(file).map_err(|e| Error::io(name.display().to_string(), e))?;
        Ok(Self { map })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Makes pages present, large ones where the system offers them, so that no copy waits for a page fault. What the kernel does
    /// not know is no error.
    pub(crate) fn prefault(&self) {
        for advice in [Advice::HugePage, Advice::PopulateWrite] {
            if let Err(error) = self.map.advise(advice) {
                tracing::debug!(?advice, %error, "memory advice not taken");
            }
        }
    }

    /// An atomic word at a multiple of eight bytes.
    pub(crate) fn word(&self, offset: usize) -> Result<&AtomicU64> {
        if !offset.is_multiple_of(8) || offset.checked_add(8).is_none_or(|end| end > self.len()) {
            return Err(Error::corrupt("a word outside of the arena"));
        }
        // SAFETY: the word lies within the map, which lives as long as `self`, and is aligned: maps begin at pages. Atomics may be
        // shared between processes; both sides reach these bytes through atomics only.
        Ok(unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) })
    }

    /// Bytes that no process writes while the reference lives: by the protocol, those of a slot that the reader holds.
    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Result<&[u8]> {
        self.check(offset, length)?;
        // SAFETY: in bounds. The protocol keeps writers away while a reader holds the slot; a process that broke it could make these
        // bytes change, as with every mapped file: they are plain bytes, for which any value is valid, and are compared with
        // checksums before they count.
        Ok(unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset), length) })
    }

    /// Copies bytes into the map, past the cache where it can: what is written here is not read again soon by this process.
    ///
    /// The caller is the only writer of these bytes: by the protocol, it is filling the slot, and each part of it is copied by one thread.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: in bounds; the source is a reference of Rust's, so it cannot overlap with a slot that is being filled, of which no
        // references exist.
        unsafe { stream(self.map.as_mut_ptr().add(offset), bytes) };
        Ok(())
    }

    /// Bytes to be written by somebody else, a device: place and number of each, which must not overlap.
    ///
    /// The caller is the only writer of these bytes: by the protocol, it is filling the slot, and nobody reads it meanwhile. It asks for them
    /// once at a time.
    #[allow(clippy::mut_from_ref, reason = "shared memory: the protocol says who may write")]
    pub(crate) fn writable(&self, parts: &[(usize, usize)]) -> Result<Vec<&mut [u8]>> {
        let mut order = parts.to_vec();
        order.sort_unstable();
        if order.iter().zip(order.iter().skip(1)).any(|(a, b)| a.0.saturating_add(a.1) > b.0) {
            return Err(Error::invalid("parts of the arena overlap"));
        }
        let part = |&(offset, length): &(usize, usize)| {
            self.check(offset, length)?;
            // SAFETY: in bounds; no two of these overlap, and nobody else has references to bytes of a slot that is being filled.
            Ok(unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(offset), length) })
        };
        parts.iter().map(part).collect()
    }

    /// Where it begins, and its bytes: for a device that has to be told of memory.
    pub(crate) fn span(&self) -> (*const u8, usize) {
        (self.map.as_ptr(), self.map.len())
    }

    fn check(&self, offset: usize, length: usize) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Error::corrupt("bytes outside of the arena")),
        }
    }
}

/// Copies `source` to `target`, with stores that leave the cache alone where the processor has them.
///
/// # Safety
///
/// `target` is valid for writes of `source.len()` bytes, and does not overlap `source`.
unsafe fn stream(target: *mut u8, source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if source.len() >= STREAM_FROM && is_x86_feature_detected!("avx2") {
        // The part before the first line of the cache.
        let head = target.align_offset(LINE).min(source.len());
        let (first, rest) = source.split_at(head);
        // SAFETY: as the caller promises, for the two parts of the target; the second begins at a line.
        unsafe {
            std::ptr::copy_nonoverlapping(first.as_ptr(), target, first.len());
            stream_avx2(target.add(head), rest);
        }
        return;
    }
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
}

/// Shorter copies go through the cache.
#[cfg(target_arch = "x86_64")]
const STREAM_FROM: usize = 4096;

/// # Safety
///
/// As [`stream`]; `target` is aligned to [`LINE`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(target: *mut u8, source: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    let (lines, rest) = source.as_chunks::<LINE>();
    for (at, line) in lines.iter().enumerate() {
        let from = line.as_ptr();
        // SAFETY: both halves lie within the line and, at the same place, within the target, which is aligned to lines.
        unsafe {
            let to = target.add(at * LINE);
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(LINE / 2).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), low);
            _mm256_stream_si256(to.add(LINE / 2).cast::<__m256i>(), high);
        }
    }
    // SAFETY: the end of the source, at the same place in the target.
    unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), target.add(source.len() - rest.len()), rest.len()) };
    // These stores are not ordered with others: whoever reads the slot's state afterwards must see them.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    fn shared(bytes: u64) -> Shared {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        Shared::map(file.as_file(), file.path()).unwrap()
    }

    #[test]
    fn copies_of_every_alignment_arrive_and_touch_nothing_else() {
        let source: Vec<u8> = (0..20_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        for offset in [0, 1, 31, 63, 64, 65, 4095] {
            for length in [0, 1, 63, 64, 4095, 4096, 4097, 4159, 12_345] {
                let shared = shared(32 << 10);
                shared.write(offset, &source[7..7 + length]).unwrap();
                let all = shared.bytes(0, shared.len()).unwrap();
                assert_eq!(&all[offset..offset + length], &source[7..7 + length], "offset {offset}, length {length}");
                assert!(all[..offset].iter().chain(&all[offset + length..]).all(|byte| *byte == 0), "offset {offset}, length {length}");
            }
        }
    }

    #[test]
    fn nothing_outside_is_reached() {
        let shared = shared(4096);
        assert!(shared.bytes(4096, 1).is_err() && shared.bytes(1, usize::MAX).is_err() && shared.write(4095, &[0, 0]).is_err());
        assert!(shared.word(4).is_err() && shared.word(4096).is_err() && shared.word(usize::MAX - 7).is_err());
        shared.word(4088).unwrap().store(7, Ordering::Release);
        assert_eq!(shared.bytes(4088, 8).unwrap().iter().map(|byte| u64::from(*byte)).sum::<u64>(), 7);
    }
}
