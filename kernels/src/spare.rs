//! Reuses buffers. Memory that is new to a process costs more than the work of the codecs on it.
//!
//! A lock that another thread holds is never waited for: a forked child may inherit it locked. The buffer is then new, or
//! is freed.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, TryLockError};

use bytes::Bytes;

use crate::memory::{OutOfMemory, zeroed};

/// Total bytes that unused scratch buffers may hold, and the smallest buffer that is kept.
const SCRATCH_BYTES: usize = 48 << 20;
const LEAST_SCRATCH: usize = 4 << 10;

/// Unused scratch buffers.
static SCRATCH: Mutex<Pool> = Mutex::new(Pool { buffers: Vec::new(), bytes: 0 });

/// Unused buffers, and their total size.
struct Pool {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Pool {
    /// Takes a buffer that [fits](fits) `bytes`.
    fn take(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let at = self.buffers.iter().rposition(|buffer| fits(buffer, bytes))?;
        let buffer = self.buffers.swap_remove(at);
        self.bytes = self.bytes.saturating_sub(buffer.capacity());
        Some(buffer)
    }

    /// Keeps a buffer, if the pool then holds at most `most` bytes.
    fn give(&mut self, buffer: Vec<u8>, most: usize) {
        let bytes = self.bytes.saturating_add(buffer.capacity());
        if bytes <= most {
            self.bytes = bytes;
            self.buffers.push(buffer);
        }
    }
}

/// Whether a buffer has room for `bytes`, and for at most twice as many.
pub fn fits(buffer: &Vec<u8>, bytes: usize) -> bool {
    (bytes..=bytes.saturating_mul(2)).contains(&buffer.capacity())
}

fn try_lock(pool: &'static Mutex<Pool>) -> Option<MutexGuard<'static, Pool>> {
    match pool.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(pool)) => Some(pool.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A scratch buffer that becomes reusable when it is dropped.
#[derive(Debug, Default)]
pub struct Spare {
    /// All bytes are initialized, also beyond the length.
    buffer: Vec<u8>,
    length: usize,
}

impl Spare {
    /// Returns a buffer of `bytes` with arbitrary content.
    pub fn new(bytes: usize, what: &str) -> Result<Self, OutOfMemory> {
        let kept = if bytes < LEAST_SCRATCH { None } else { try_lock(&SCRATCH).and_then(|mut pool| pool.take(bytes)) };
        let buffer = match kept {
            Some(buffer) if buffer.len() >= bytes => buffer,
            _ => zeroed(bytes, what)?,
        };
        Ok(Self { buffer, length: bytes })
    }

    /// Returns a buffer with a copy of `data`.
    pub fn copy_of(data: &[u8]) -> Result<Self, OutOfMemory> {
        let mut copy = Self::new(data.len(), "a copy of a chunk")?;
        copy.copy_from_slice(data);
        Ok(copy)
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if self.buffer.len() >= LEAST_SCRATCH
            && let Some(mut pool) = try_lock(&SCRATCH)
        {
            pool.give(std::mem::take(&mut self.buffer), SCRATCH_BYTES);
        }
    }
}

impl Deref for Spare {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(..self.length).unwrap_or_default()
    }
}

impl DerefMut for Spare {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.get_mut(..self.length).unwrap_or_default()
    }
}

/// Bytes of someone else, or bytes in a scratch buffer.
#[derive(Debug)]
pub enum MaybeSpare<'a> {
    Borrowed(&'a [u8]),
    Own(Spare),
}

impl Deref for MaybeSpare<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Own(bytes) => bytes,
        }
    }
}

/// Total bytes that unused output buffers may hold, and the smallest buffer that is kept.
const OUTPUT_BYTES: usize = 16 << 20;
const LEAST_OUTPUT: usize = 32 << 10;

/// Buffers of encoded columns. One thread fills them, and another releases them after they have been stored.
static OUTPUT: Mutex<Pool> = Mutex::new(Pool { buffers: Vec::new(), bytes: 0 });

/// Returns an empty buffer with room for `capacity` bytes.
pub fn output(capacity: usize) -> Vec<u8> {
    if capacity < LEAST_OUTPUT {
        return Vec::with_capacity(capacity);
    }
    let kept = try_lock(&OUTPUT).and_then(|mut pool| pool.take(capacity));
    match kept {
        Some(mut buffer) => {
            buffer.clear();
            buffer
        }
        None => Vec::with_capacity(capacity),
    }
}

/// Makes an output buffer reusable.
pub fn reuse(buffer: Vec<u8>) {
    if buffer.capacity() >= LEAST_OUTPUT
        && let Some(mut pool) = try_lock(&OUTPUT)
    {
        pool.give(buffer, OUTPUT_BYTES);
    }
}

/// Returns a buffer of `bytes` with arbitrary content.
pub fn output_of(bytes: usize, what: &str) -> Result<Vec<u8>, OutOfMemory> {
    let kept = if bytes < LEAST_OUTPUT { None } else { try_lock(&OUTPUT).and_then(|mut pool| pool.take(bytes)) };
    match kept {
        Some(mut buffer) => {
            // Only what the last user left unfilled costs time.
            buffer.resize(bytes, 0);
            Ok(buffer)
        }
        None => zeroed(bytes, what),
    }
}

/// A buffer that becomes reusable when its last reader drops it.
struct Returned(Vec<u8>);

impl AsRef<[u8]> for Returned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Returned {
    fn drop(&mut self) {
        reuse(std::mem::take(&mut self.0));
    }
}

/// Turns an [`output`] buffer into shared bytes.
pub fn into_bytes(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < LEAST_OUTPUT { Bytes::from(buffer) } else { Bytes::from_owner(Returned(buffer)) }
}
