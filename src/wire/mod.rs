//! Byte layouts: one struct per table of `spec/`, the only place that knows byte order.
//!
//! Nothing here does I/O. Decoders take bytes that are wholly there, check them against [`Limits`](crate::Limits) and
//! against each other before allocating, and reject trailing bytes.
#![deny(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

pub(crate) mod columns;
mod cursor;
mod directory;
mod entry;
mod errors;
mod header;
mod ids;
pub(crate) mod index;
mod layout;
mod manifest;
pub(crate) mod part;
mod postscript;
mod receipt;
mod seal;
mod slots;
mod store_file;
mod tree;
mod unique;

pub use directory::{Directory, DirectoryShard, DirectoryTensor};
pub use entry::{Event, LogEntry};
pub use header::{HEADER_BYTES, Header};
pub use ids::{Digest, Id};
pub use manifest::{CaskRef, Manifest, ParentRef, SnapshotKind};
pub use postscript::{POSTSCRIPT_BYTES, Postscript};
pub use receipt::{Receipt, ReceiptShard, ReceiptTensor};
pub use store_file::StoreFile;
pub use tree::{Tree, TreeKey, TreeNode};

pub(crate) use cursor::{Cursor, Put};
pub(crate) use errors::{ChunkErrors, ErrorsFile, ShardErrors};
pub(crate) use layout::{ShardRow, TensorRow};
pub(crate) use receipt::RankSave;
pub(crate) use slots::{MAX_RANK, blob_slot, tensor_slot};
pub(crate) use store_file::STORE_FILE;

/// Alignment of index columns, in bytes: an Arrow buffer's.
pub(crate) const COLUMN_ALIGNMENT: u64 = 64;

/// `value` rounded up to a multiple of `alignment` (a power of two), or `None` beyond u64.
pub(crate) fn align_up(value: u64, alignment: u64) -> Option<u64> {
    value.checked_next_multiple_of(alignment)
}
