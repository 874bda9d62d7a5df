//! The first bytes of a cask. Spec: `spec/container.md`, clause 2.

use super::{Cursor, Id, Put};
use crate::{Error, Result};

/// Size of a header in bytes.
pub const HEADER_BYTES: u64 = 32;

const MAGIC: [u8; 8] = *b"\x89TCK\r\n\x1a\n";

/// Header of a cask: names the file, and detects damage by text-mode transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Id of the cask. Every checksum in the file depends on the id.
    pub id: Id,
}

impl Header {
    /// Encodes the header.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES as usize);
        out.put(&MAGIC);
        out.put(&self.id.0);
        out.put_u32(0);
        out.put_u32(crc32fast::hash(&out));
        out
    }

    /// Decodes a header.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut cursor = Cursor::new(bytes, "cask header");
        if cursor.array()? != MAGIC {
            return Err(
                Error::corrupt("not a cask: the magic bytes differ (a text-mode transfer damages them too)").clause("container 2.1")
            );
        }
        let id = Id(cursor.array()?);
        let reserved = cursor.zeros(4);
        let crc = cursor.u32()?;
        cursor.finish()?;
        let covered = bytes.get(..bytes.len().saturating_sub(4)).unwrap_or_default();
        if crc != crc32fast::hash(covered) {
            return Err(Error::corrupt("header checksum mismatch").clause("container 2.2"));
        }
        reserved.map_err(|e| e.clause("container 2.3"))?;
        Ok(Self { id })
    }
}
