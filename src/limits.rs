//! What a reader accepts before it allocates. Spec: `spec/limits.md`, whose table a test compares with the defaults.

use crate::{Error, Result};

/// Upper bounds on declared sizes and counts.
///
/// Every length and count read from a store is checked against these, and against the bytes really there,
/// before memory is asked for. Raise a limit for unusual data; writers obey the same limits.
///
/// ```
/// let limits = tensorcask::Limits { max_chain_depth: 16, ..Default::default() };
/// assert!(limits.max_index_bytes > 1 << 20);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Dimensions of a tensor.
    pub max_dimensions: u64,
    /// Bytes of a tensor name, role, param, blob name, codec id or column name.
    pub max_name_bytes: u64,
    /// Tensors in a cask or directory.
    pub max_tensors: u64,
    /// Shards in a cask or directory.
    pub max_shards: u64,
    /// Blobs in a cask.
    pub max_blobs: u64,
    /// Bytes of an index root, and of one index part.
    pub max_index_bytes: u64,
    /// Bytes of one blob.
    pub max_blob_bytes: u64,
    /// Bytes that one call of `read` allocates; `read_into` fills the caller's own buffer, of any size.
    pub max_read_bytes: u64,
    /// Bytes of a directory.
    pub max_directory_bytes: u64,
    /// Bytes of a manifest.
    pub max_manifest_bytes: u64,
    /// Bytes of a log entry or of `store.json`.
    pub max_entry_bytes: u64,
    /// Bytes of a catalog.
    pub max_catalog_bytes: u64,
    /// Snapshots in a chain, the base included.
    pub max_chain_depth: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_dimensions: 64,
            max_name_bytes: 4096,
            max_tensors: 1 << 24,
            max_shards: 1 << 26,
            max_blobs: 1 << 20,
            max_index_bytes: 1 << 30,
            max_blob_bytes: 1 << 32,
            max_read_bytes: 1 << 37,
            max_directory_bytes: 1 << 30,
            max_manifest_bytes: 1 << 26,
            max_entry_bytes: 1 << 20,
            max_catalog_bytes: 1 << 30,
            max_chain_depth: 1024,
        }
    }
}

impl Limits {
    /// `value`, if it is within `limit`.
    pub(crate) fn check(value: u64, limit: u64, what: &str) -> Result<u64> {
        if value <= limit {
            return Ok(value);
        }
        Err(Error::limit(format!("{what} is {value}, over the limit of {limit}; if the file is trusted, open it with larger Limits"))
            .clause("limits 2"))
    }
}

/// An empty vector with room for `count` items, or an error instead of an abort.
pub(crate) fn reserve<T>(count: usize, what: &str) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(count).map_err(|e| Error::limit(format!("no memory for {count} items of {what}")).source(e))?;
    Ok(vec)
}

/// A zeroed buffer of `bytes`, or an error instead of an abort.
pub(crate) fn zeroed(bytes: usize, what: &str) -> Result<Vec<u8>> {
    let mut vec = reserve(bytes, what)?;
    vec.resize(bytes, 0);
    Ok(vec)
}

/// A file length or offset as an index into memory.
pub(crate) fn to_usize(value: u64, what: &str) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::limit(format!("{what} of {value} bytes does not fit this machine's memory")))
}
