//! Reuses buffers within threads. Memory that is new to a process costs more than the work of the codecs on it.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::Result;
use crate::limits::reserve;

/// Maximum number of buffers that a thread keeps, and the size of the largest that is kept.
const MOST: usize = 12;
const LARGEST: usize = 4 << 20;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer that returns to its thread's reserve when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Spare(Vec<u8>);

impl Spare {
    /// Returns a buffer of `bytes` with arbitrary content.
    pub(crate) fn new(bytes: usize, what: &str) -> Result<Self> {
        let found = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            let fits = spare.iter().position(|buffer| buffer.capacity() >= bytes)?;
            Some(spare.swap_remove(fits))
        });
        let mut buffer = match found {
            Ok(Some(buffer)) => buffer,
            _ => reserve(bytes, what)?,
        };
        buffer.resize(bytes, 0);
        Ok(Self(buffer))
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        // A thread that is ending keeps no buffers.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MOST && (1..=LARGEST).contains(&buffer.capacity()) {
                spare.push(buffer);
            }
        });
    }
}

impl Deref for Spare {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Spare {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

/// Total bytes that unused output buffers may hold, and the smallest buffer that is kept.
const OUTPUT_BYTES: usize = 32 << 20;
const LEAST_OUTPUT: usize = 32 << 10;

/// Buffers of encoded columns. One thread fills them, and another releases them after they have been stored.
static OUTPUT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn outputs() -> MutexGuard<'static, Vec<Vec<u8>>> {
    OUTPUT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns an empty buffer with room for `capacity` bytes.
pub(crate) fn output(capacity: usize) -> Vec<u8> {
    if capacity < LEAST_OUTPUT {
        return Vec::with_capacity(capacity);
    }
    let mut outputs = outputs();
    match outputs.iter().position(|buffer| (capacity..=2 * capacity).contains(&buffer.capacity())) {
        Some(at) => outputs.swap_remove(at),
        None => {
            drop(outputs);
            Vec::with_capacity(capacity)
        }
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
        let mut buffer = std::mem::take(&mut self.0);
        buffer.clear();
        let mut outputs = outputs();
        let kept: usize = outputs.iter().map(Vec::capacity).sum();
        if kept.saturating_add(buffer.capacity()) <= OUTPUT_BYTES {
            outputs.push(buffer);
        }
    }
}

/// Turns an [`output`] buffer into shared bytes.
pub(crate) fn into_bytes(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < LEAST_OUTPUT { Bytes::from(buffer) } else { Bytes::from_owner(Returned(buffer)) }
}
