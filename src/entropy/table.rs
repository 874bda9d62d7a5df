//! The form of symbol tables in a block. Spec: spec/entropy.md 4.

use crate::{Error, Result};

/// Returns the first and the last symbol in use.
pub(super) fn span(used: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
    Some(((0..256).find(|&s| used(s))?, (0..256).rev().find(|&s| used(s))?))
}

/// A cursor over the bytes of a plane. Every read is checked.
pub(super) struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8]> {
        match self.rest.split_at_checked(count) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(Error::corrupt(format!("{what} of {count} bytes, with {} left", self.rest.len())).clause("entropy 2")),
        }
    }

    pub(super) fn byte(&mut self, what: &str) -> Result<u8> {
        Ok(self.take(1, what)?.first().copied().unwrap_or_default())
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        let mut value = 0u32;
        for &byte in self.take(4, what)?.iter().rev() {
            value = value << 8 | u32::from(byte);
        }
        Ok(value)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.rest.len()
    }
}
