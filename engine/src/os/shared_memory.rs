//! Shared memory: a mapped file, atomic words in it, and copies that bypass the cache.
//!
//! This file holds the unsafe code of the arena. Two processes map one file; the protocol in [`slot`](crate::arena::slot) says
//! which of them may access which bytes, and when. Every access checks its bounds first.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use memmap2::{Advice, MmapRaw};
use tensorcask::{Error, Result};

/// Size of a cache line in bytes. Copies that bypass the cache begin at multiples of this size.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// A mapped file that several processes read and write.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    map: MmapRaw,
}

impl SharedMemory {
    /// Maps a whole file. Nobody may truncate the file while it is mapped: an access beyond its end kills this process.
    /// Only the owner of the folder could truncate it.
    pub(crate) fn map(file: &File, name: &Path) -> Result<Self> {
        let map = MmapRaw::map_raw(file).map_err(|e| Error::io(name.display().to_string(), e))?;
        // A forked child, such as a data loader, would keep the memory after this process has freed it.
        if let Err(error) = map.advise(Advice::DontFork) {
            tracing::debug!(%error, "forked processes keep shared memory");
        }
        Ok(Self { map })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Asks for huge pages. A kernel that does not offer them is no error.
    pub(crate) fn prefer_huge_pages(&self) {
        if let Err(error) = self.map.advise(Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for shared memory");
        }
    }

    /// Makes the pages of a range present and writable. Changes no byte. Fails where a write would kill this process,
    /// and in kernels before 5.14.
    pub(crate) fn populate(&self, offset: usize, length: usize) -> std::io::Result<()> {
        self.check(offset, length).map_err(std::io::Error::other)?;
        self.map.advise_range(Advice::PopulateWrite, offset, length)
    }

    /// An atomic word at a multiple of eight bytes.
    pub(crate) fn word(&self, offset: usize) -> Result<&AtomicU64> {
        if !offset.is_multiple_of(8) || offset.checked_add(8).is_none_or(|end| end > self.len()) {
            return Err(Error::corrupt("a word lies outside of the arena"));
        }
        // SAFETY: the word lies within the map, which lives as long as `self`. It is aligned, because maps begin at
        // page boundaries. Processes may share atomics; both sides access these bytes only through atomics.
        Ok(unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) })
    }

    /// Borrows bytes of a slot that the caller holds: the protocol keeps writers away while the reference lives.
    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Result<&[u8]> {
        self.check(offset, length)?;
        // SAFETY: in bounds. The protocol keeps writers away while a reader holds the slot. As with every mapped file,
        // a process that breaks the protocol could change the bytes. They are plain bytes, valid with any value, and
        // verified by checksums.
        Ok(unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset), length) })
    }

    /// Copies bytes into the map. Bypasses the cache where possible, because this process does not read the bytes again
    /// soon.
    ///
    /// The caller must be the only writer of these bytes: it is filling the slot, and one thread copies each part. The
    /// pages must be present: if the system has no memory for one, this process is killed.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: in bounds. The source is a Rust reference, so it cannot overlap a slot that is being filled: no
        // references to such a slot exist.
        unsafe { stream(self.map.as_mut_ptr().add(offset), bytes) };
        Ok(())
    }

    /// Borrows parts (offset and length) for a device that writes into them. Parts must not overlap.
    ///
    /// The caller must be the only writer of these bytes: it is filling the slot, and nobody reads the slot. It must
    /// drop the borrows before it calls this again.
    #[allow(clippy::mut_from_ref, reason = "shared memory: the slot protocol grants the exclusive access")]
    pub(crate) fn writable(&self, parts: &[(usize, usize)]) -> Result<Vec<&mut [u8]>> {
        let mut order = parts.to_vec();
        order.sort_unstable();
        if order.iter().zip(order.iter().skip(1)).any(|(a, b)| a.0.saturating_add(a.1) > b.0) {
            return Err(Error::invalid("parts of the arena overlap"));
        }
        let part = |&(offset, length): &(usize, usize)| {
            self.check(offset, length)?;
            // SAFETY: in bounds. The parts do not overlap, and no other references to a slot that is being filled
            // exist.
            Ok(unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(offset), length) })
        };
        parts.iter().map(part).collect()
    }

    /// Address and length of the map, to register the memory with a device.
    pub(crate) fn span(&self) -> (*const u8, usize) {
        (self.map.as_ptr(), self.map.len())
    }

    fn check(&self, offset: usize, length: usize) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Error::corrupt("a range lies outside of the arena")),
        }
    }
}

/// Copies `source` to `target`, with stores that bypass the cache if the processor has them.
///
/// # Safety
///
/// `target` must be valid for writes of `source.len()` bytes and must not overlap `source`.
unsafe fn stream(target: *mut u8, source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if source.len() >= STREAM_FROM && is_x86_feature_detected!("avx2") {
        // The part before the first cache line.
        let head = target.align_offset(CACHE_LINE_BYTES).min(source.len());
        let (first, rest) = source.split_at(head);
        // SAFETY: the caller guarantees both parts of the target; the second part begins at a cache line.
        unsafe {
            std::ptr::copy_nonoverlapping(first.as_ptr(), target, first.len());
            stream_avx2(target.add(head), rest);
        }
        return;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
}

/// Length in bytes from which copies bypass the cache.
#[cfg(target_arch = "x86_64")]
const STREAM_FROM: usize = 4096;

/// # Safety
///
/// As for [`stream`]. `target` must be aligned to [`CACHE_LINE_BYTES`], and the processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(target: *mut u8, source: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    let (lines, rest) = source.as_chunks::<CACHE_LINE_BYTES>();
    for (at, line) in lines.iter().enumerate() {
        let from = line.as_ptr();
        // SAFETY: both halves lie within the line and, at the same offset, within the target, which is aligned to cache
        // lines.
        unsafe {
            let to = target.add(at * CACHE_LINE_BYTES);
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(CACHE_LINE_BYTES / 2).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), low);
            _mm256_stream_si256(to.add(CACHE_LINE_BYTES / 2).cast::<__m256i>(), high);
        }
    }
    // SAFETY: the end of the source goes to the same offset of the target.
    unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), target.add(source.len() - rest.len()), rest.len()) };
    // These stores are not ordered with later ones. The fence makes them visible before the slot's state changes.
    #[allow(unused_unsafe, reason = "an unsafe function in the oldest compilers that build this")]
    // SAFETY: every x86-64 processor has this instruction.
    unsafe {
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::SharedMemory;

    fn shared(bytes: u64) -> SharedMemory {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        SharedMemory::map(file.as_file(), file.path()).unwrap()
    }

    #[test]
    fn copies_of_every_alignment_change_exactly_their_range() {
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
    fn a_forked_process_does_not_inherit_the_memory() {
        let shared = shared(64 << 10);
        let address = format!("{:x}-", shared.span().0 as usize);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let flags = maps.split(&address).nth(1).and_then(|ours| ours.lines().find(|line| line.starts_with("VmFlags:"))).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }

    #[test]
    fn accesses_outside_of_the_map_fail() {
        let shared = shared(4096);
        assert!(shared.bytes(4096, 1).is_err() && shared.bytes(1, usize::MAX).is_err() && shared.write(4095, &[0, 0]).is_err());
        assert!(shared.word(4).is_err() && shared.word(4096).is_err() && shared.word(usize::MAX - 7).is_err());
        shared.word(4088).unwrap().store(7, Ordering::Release);
        assert_eq!(shared.bytes(4088, 8).unwrap().iter().map(|byte| u64::from(*byte)).sum::<u64>(), 7);
    }
}
