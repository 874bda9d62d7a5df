//! Bounded reading and writing of little-endian fields.
#![allow(clippy::little_endian_bytes, reason = "the one place that turns bytes into numbers")]

use crate::{Error, Result};

/// Reads fields from a byte slice, never past its end.
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, rest) = self
            .rest
            .split_at_checked(count)
            .ok_or_else(|| Error::corrupt(format!("{} ends early: {count} bytes wanted, {} left", self.what, self.rest.len())))?;
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads bytes that must be zero.
    pub(crate) fn zeros(&mut self, count: usize) -> Result<()> {
        if self.take(count)?.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        Err(Error::corrupt(format!("{}: reserved or padding bytes are not zero", self.what)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn finish(self) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(Error::corrupt(format!("{} has {} trailing bytes", self.what, self.rest.len())))
    }
}

/// Appends little-endian fields.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl Put for crc32fast::Hasher {
    fn put(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }
}
