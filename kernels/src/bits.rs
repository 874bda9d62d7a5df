//! Bit streams, least significant bit first.

/// Writes bits into a buffer of the caller, which must be 8 bytes longer than the stream.
#[derive(Debug)]
pub struct BitWriter<'a> {
    out: &'a mut [u8],
    at: usize,
    bits: u64,
    count: u32,
}

impl<'a> BitWriter<'a> {
    pub fn new(out: &'a mut [u8]) -> Self {
        Self { out, at: 0, bits: 0, count: 0 }
    }

    /// Appends the low `count` bits, at most 56. All higher bits must be zero.
    #[inline(always)]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the stream is defined byte by byte, and this is its order")]
    pub fn put(&mut self, bits: u64, count: u32) {
        self.bits |= bits << (self.count & 7);
        self.count = self.count.wrapping_add(count);
        if let Some(word) = self.out.get_mut(self.at..self.at.wrapping_add(8)) {
            word.copy_from_slice(&self.bits.to_le_bytes());
        }
        self.at = self.at.wrapping_add((self.count / 8) as usize);
        // The shift is below 64: `count` was below 8, and at most 56 bits were added.
        self.bits >>= self.count & 56;
        self.count &= 7;
    }

    /// Returns the number of bytes written. Unused bits of the last byte are zero.
    pub fn finish(self) -> usize {
        self.at + usize::from(self.count > 0)
    }
}

/// Appends bits to a vector.
#[derive(Debug, Default)]
pub struct BitAppender {
    out: Vec<u8>,
    at: usize,
    bits: u64,
    count: u32,
}

impl BitAppender {
    /// Makes room for so many more bits. The caller expects to append as many `times` times.
    pub fn reserve(&mut self, bits: usize, times: usize) {
        // Up to 7 bits are still waiting for their byte, and each store has 8 bytes.
        let bytes = self.at + bits.div_ceil(8) + 8;
        if bytes > self.out.capacity() {
            let expected = (bits / 7).saturating_mul(times).saturating_add(64);
            match self.out.is_empty() {
                true => self.out = crate::spare::output(expected),
                false => self.out.reserve(expected),
            }
        }
        if bytes > self.out.len() {
            self.out.resize(bytes, 0);
        }
    }

    /// Appends the low `count` bits, at most 56. All higher bits must be zero. There must be room for them.
    #[inline(always)]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the stream is defined byte by byte, and this is its order")]
    pub fn put(&mut self, bits: u64, count: u32) {
        self.bits |= bits << (self.count & 7);
        if let Some(word) = self.out.get_mut(self.at..self.at.wrapping_add(8)) {
            word.copy_from_slice(&self.bits.to_le_bytes());
        }
        self.advance(count);
    }

    /// Appends many numbers like [`Self::put`], without checks.
    ///
    /// # Safety
    /// [`Self::reserve`] made room for the counts of all numbers, and nothing was appended since.
    #[inline(always)]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the stream is defined byte by byte, and this is its order")]
    pub unsafe fn append(&mut self, numbers: impl Iterator<Item = (u64, u32)>) {
        let start = self.out.as_mut_ptr();
        let mut local = Self { out: Vec::new(), ..*self };
        for (bits, count) in numbers {
            local.bits |= bits << (local.count & 7);
            // SAFETY: `at` has moved by an eighth of the bits at most, and there are 8 bytes behind the room for all of
            // them.
            unsafe { start.add(local.at).cast::<[u8; 8]>().write_unaligned(local.bits.to_le_bytes()) };
            local.advance(count);
        }
        (self.at, self.bits, self.count) = (local.at, local.bits, local.count);
    }

    #[inline(always)]
    fn advance(&mut self, count: u32) {
        self.count = self.count.wrapping_add(count);
        self.at = self.at.wrapping_add((self.count / 8) as usize);
        // The shift is below 64: the count was below 8, and at most 56 bits were added.
        self.bits >>= self.count & 56;
        self.count &= 7;
    }

    /// Returns the stream. Unused bits of the last byte are zero.
    pub fn finish(mut self) -> Vec<u8> {
        self.out.truncate(self.at + usize::from(self.count > 0));
        self.out
    }
}

/// Moves the bytes of a word whose bit in `mask` is set to its lower end, in their order.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "bmi2")]
pub(crate) fn pick_bytes(word: u64, mask: u8) -> u64 {
    use std::arch::x86_64::{_pdep_u64, _pext_u64};
    _pext_u64(word, _pdep_u64(u64::from(mask), 0x0101_0101_0101_0101).wrapping_mul(0xff))
}

/// Replaces the bytes of `filler` whose bit in `mask` is set by the lowest bytes of a word, in their order.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "bmi2")]
pub(crate) fn place_bytes(word: u64, mask: u8, filler: u64) -> u64 {
    use std::arch::x86_64::_pdep_u64;
    let bytes = _pdep_u64(u64::from(mask), 0x0101_0101_0101_0101).wrapping_mul(0xff);
    _pdep_u64(word, bytes) | (filler & !bytes)
}

/// Reads bits.
#[derive(Debug)]
pub struct BitReader<'a> {
    bytes: &'a [u8],
    /// Number of bits read.
    at: usize,
}

impl<'a> BitReader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns at least the next 56 bits; zeros past the end.
    #[inline(always)]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the stream is defined byte by byte, and this is its order")]
    pub fn peek(&self) -> u64 {
        let word = match self.bytes.get(self.at / 8..).and_then(|rest| rest.first_chunk::<8>()) {
            Some(word) => u64::from_le_bytes(*word),
            None => self.bytes.get(self.at / 8..).unwrap_or_default().iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)),
        };
        word >> (self.at % 8)
    }

    /// Advances by `count` bits, at most 56.
    #[inline(always)]
    pub fn skip(&mut self, count: u32) {
        self.at = self.at.wrapping_add(count as usize);
    }

    /// Calls `act` with at least the next 56 bits for each item, and advances by the bits that it returns, at most 56.
    #[inline(always)]
    #[allow(clippy::little_endian_bytes, reason = "a kernel: the stream is defined byte by byte, and this is its order")]
    pub fn take<T>(&mut self, items: impl ExactSizeIterator<Item = T>, mut act: impl FnMut(u64, T) -> u32) {
        let count = items.len();
        let mut at = self.at;
        if self.bytes.len().saturating_sub(at / 8) / 8 > count {
            for item in items.take(count) {
                // SAFETY: each of `count` items advances by 7 bytes at most, and there were more than 8 times as many bytes
                // as items, and 8 more.
                let word = unsafe { self.bytes.as_ptr().add(at / 8).cast::<[u8; 8]>().read_unaligned() };
                at = at.wrapping_add(act(u64::from_le_bytes(word) >> (at % 8), item).min(56) as usize);
            }
            self.at = at;
        } else {
            for item in items {
                let used = act(self.peek(), item);
                self.skip(used);
            }
        }
    }

    /// Returns whether all bytes are read and the unused bits of the last byte are zero.
    pub fn is_at_end(&self) -> bool {
        let rest = if self.at.is_multiple_of(8) { 0 } else { self.bytes.get(self.at / 8).map_or(0, |last| last >> (self.at % 8)) };
        self.at.div_ceil(8) == self.bytes.len() && rest == 0
    }
}
