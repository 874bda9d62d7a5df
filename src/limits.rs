//! Limits that a reader checks before it allocates. Spec: `spec/limits.md`. A test compares that table with the
//! defaults.

use crate::{Error, Result};

/// Memory whose lack is an error.
pub(crate) use tensorcask_kernels::memory::{reserve, zeroed};

/// Upper bounds on declared sizes and counts.
///
/// Before a reader allocates memory, it checks every stored length and count against these limits and against the bytes
/// that exist. Raise a limit for unusual data. Writers obey the same limits.
///
/// ```
/// let limits = tensorcask::Limits { max_chain_depth: 16, ..Default::default() };
/// assert!(limits.max_index_bytes > 1 << 20);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of dimensions of a tensor.
    pub max_dimensions: u64,
    /// Maximum bytes of a tensor name, role, param, blob name, codec id or column name.
    pub max_name_bytes: u64,
    /// Maximum number of tensors in a cask or directory.
    pub max_tensors: u64,
    /// Maximum number of shards in a cask or directory.
    pub max_shards: u64,
    /// Maximum number of blobs in a cask.
    pub max_blobs: u64,
    /// Maximum bytes of an index root, and of one index part.
    pub max_index_bytes: u64,
    /// Maximum bytes of one blob.
    pub max_blob_bytes: u64,
    /// Maximum bytes that one call of `read` allocates. `read_into` fills the caller's own buffer, of any size.
    pub max_read_bytes: u64,
    /// Maximum bytes of a directory.
    pub max_directory_bytes: u64,
    /// Maximum bytes of a manifest.
    pub max_manifest_bytes: u64,
    /// Maximum bytes of a log entry or of `store.json`.
    pub max_entry_bytes: u64,
    /// Maximum bytes of a catalog.
    pub max_catalog_bytes: u64,
    /// Maximum number of snapshots in a chain, including the base.
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
    /// Returns `value` if it is within `limit`.
    pub(crate) fn check(value: u64, limit: u64, what: &str) -> Result<u64> {
        if value <= limit {
            return Ok(value);
        }
        Err(Error::limit(format!("{what} is {value}, over the limit of {limit}; if the file is trusted, open it with larger Limits"))
            .clause("limits 2"))
    }
}

/// Converts a file length or offset to an index into memory.
pub(crate) fn to_usize(value: u64, what: &str) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::limit(format!("{what} of {value} bytes does not fit this machine's memory")))
}
