//! Checksums that bind a page to its place. Spec: `spec/container.md`, clause 5.

use crate::wire::{Id, Put};
use crate::{Error, Result};

/// Place of a page in a cask. Part of the page's checksum, so that a page from another place fails the check too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlaceOfPage {
    pub cask: Id,
    /// Row in the shard table; for a blob, row in the blob table.
    pub shard: u64,
    /// Number of the chunk in the shard; 0 for a blob.
    pub chunk: u64,
    /// Row in the dictionary of column names; `BLOB` for a blob.
    pub column: u64,
    /// Offset in the cask.
    pub offset: u64,
}

impl PlaceOfPage {
    /// Column value that marks a blob.
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
        Err(Error::corrupt("page checksum mismatch: the bytes are damaged or belong to another page")
            .offset(self.offset)
            .clause("container 5.2"))
    }
}

/// Checks that the padding between pages is zero.
pub(crate) fn padding_is_zero(bytes: &[u8], offset: u64) -> Result<()> {
    match bytes.iter().position(|&byte| byte != 0) {
        None => Ok(()),
        Some(at) => Err(Error::corrupt("padding is not zero").offset(offset.saturating_add(at as u64)).clause("container 4.3")),
    }
}
