//! Buffers that threads use again: memory that is new to a process costs more than what codecs do with it.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use crate::Result;
use crate::limits::reserve;

/// Buffers that a thread keeps, and the largest that it keeps.
const MOST: usize = 12;
const LARGEST: usize = 4 << 20;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer that goes back when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Spare(Vec<u8>);

impl Spare {
    /// A buffer of so many bytes, of any values.
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
        // A thread that ends keeps nothing.
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
