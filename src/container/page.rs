//! Checksums that bind a page to its place. Spec: `spec/container.md`, clause 5.

use crate::wire::{Id, Put};
use crate::{Error, Result};

/// Where a page belongs; part of its checksum, so that a page from elsewhere fails too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlaceOfPage {
    pub cask: Id,
    /// Row in the shard table; for a blob, its row in the blob table.
    pub shard: u64,
    /// Number of the chunk in the shard.
    pub chunk: u64,
    /// Row in the dictionary of column names; `BLOB` for a blob.
    pub column: u64,
    /// Byte in the cask.
    pub offset: u64,
}

impl PlaceOfPage {
    /// Stands for the column where the page is a blob.
    pub(crate) const BLOB: u64 = u64::MAX;

    pub(crate) fn crc(&self, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.put(&self.cask.0);
        hasher.put_u64(self.shard);
        hasher.put_u64(self.chunk);
        hasher.put_u64(self.column);
        hasher.put_u64(self.offset);
        hasher.put(bytes);
        hasher.finalize()
    }

    pub(crate) fn check(&self, bytes: &[u8], crc: u32) -> Result<()> {
        if self.crc(bytes) == crc {
            return Ok(());
        }
        Err(Error::corrupt("page checksum mismatch: the bytes are damaged, or belong elsewhere")
            .offset(self.offset)
            .clause("container 5.2"))
    }
}

/// Whether bytes between pages are what they must be.
pub(crate) fn padding_is_zero(bytes: &[u8], offset: u64) -> Result<()> {
    match bytes.iter().position(|&byte| byte != 0) {
        None => Ok(()),
        Some(at) => Err(Error::corrupt("padding is not zero").offset(offset.saturating_add(at as u64)).clause("container 4.3")),
    }
}
