//! The last bytes of a cask. Spec: `spec/container.md`, clause 3.

use super::{COLUMN_ALIGNMENT, Cursor, HEADER_BYTES, Id, Put};
use crate::version::{Features, FormatVersion};
use crate::{Error, Result};

/// Size of a postscript in bytes.
pub const POSTSCRIPT_BYTES: u64 = 96;

const MAGIC: [u8; 8] = *b"tck-end\n";
const COVERED_BYTES: usize = 80;

/// Postscript of a cask: the position of the index, and the format version and features of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Postscript {
    /// Offset of the index root, which ends where the postscript begins.
    pub root_offset: u64,
    /// CRC-32 of the index root, over the cask's id, the offset and the bytes.
    pub root_crc: u32,
    /// Format version of the file.
    pub version: FormatVersion,
    /// Feature bits of the file.
    pub features: Features,
    /// Base-2 logarithm of the page alignment: 6 to 12.
    pub alignment_exponent: u8,
}

impl Postscript {
    /// Encodes the postscript of cask `id`.
    pub fn encode(&self, id: Id) -> Vec<u8> {
        let mut out = Vec::with_capacity(POSTSCRIPT_BYTES as usize);
        out.put_u64(self.root_offset);
        out.put_u32(self.root_crc);
        out.put_u16(self.version.major);
        out.put_u16(self.version.minor);
        out.put_u64(self.features.must_understand);
        out.put_u64(self.features.may_ignore);
        out.put_u8(self.alignment_exponent);
        out.resize(COVERED_BYTES, 0);
        out.put_u32(Self::crc(id, &out));
        out.put_u32(0);
        out.put(&MAGIC);
        out
    }

    /// Decodes a postscript. `file_bytes` is the size of the cask.
    pub fn decode(bytes: &[u8], id: Id, file_bytes: u64) -> Result<Self> {
        let mut cursor = Cursor::new(bytes, "cask postscript");
        let covered = cursor.take(COVERED_BYTES)?;
        let crc = cursor.u32()?;
        let reserved = cursor.zeros(4);
        if cursor.array()? != MAGIC {
            return Err(Error::corrupt("the file does not end with a postscript: it is truncated or not a cask").clause("container 3.1"));
        }
        cursor.finish()?;
        if crc != Self::crc(id, covered) {
            return Err(Error::corrupt("postscript checksum mismatch").clause("container 3.2"));
        }
        reserved.map_err(|e| e.clause("container 3.5"))?;

        let mut cursor = Cursor::new(covered, "cask postscript");
        let root_offset = cursor.u64()?;
        let root_crc = cursor.u32()?;
        let version = FormatVersion { major: cursor.u16()?, minor: cursor.u16()? };
        let features = Features { must_understand: cursor.u64()?, may_ignore: cursor.u64()? };
        let alignment_exponent = cursor.u8()?;
        // A newer version could change the meaning of every other field.
        version.check()?;
        features.check_readable()?;
        cursor.zeros(47).map_err(|e| e.clause("container 3.5"))?;
        cursor.finish()?;
        if !(6..=12).contains(&alignment_exponent) {
            return Err(Error::corrupt(format!("alignment exponent {alignment_exponent} is not in 6..=12")).clause("container 3.3"));
        }
        let postscript_offset = file_bytes.checked_sub(POSTSCRIPT_BYTES);
        if root_offset < HEADER_BYTES
            || !root_offset.is_multiple_of(COLUMN_ALIGNMENT)
            || postscript_offset.is_none_or(|end| root_offset > end)
        {
            return Err(
                Error::corrupt(format!("index root at {root_offset} does not fit a file of {file_bytes} bytes")).clause("container 3.4")
            );
        }
        Ok(Self { root_offset, root_crc, version, features, alignment_exponent })
    }

    fn crc(id: Id, covered: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&id.0);
        hasher.update(covered);
        hasher.finalize()
    }
}
