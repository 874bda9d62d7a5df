//! Byte layouts: one struct per table of `spec/`. Byte order is known here and in the kernels only.
//!
//! This module does no I/O. A decoder needs all bytes of its table. Before allocating, it checks the bytes against
//! [`Limits`](crate::Limits) and against each other. Trailing bytes are an error.
#![deny(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

pub(crate) mod columns;
mod cursor;
mod directory;
mod entry;
mod errors;
pub(crate) mod facts;
mod header;
mod ids;
pub(crate) mod index;
mod inline;
mod layout;
mod manifest;
mod names;
pub(crate) mod parquet_pages;
pub(crate) mod part;
mod postscript;
mod receipt;
mod seal;
mod session;
mod slots;
mod statistics;
mod store_file;
mod tree;
mod unique;

pub use directory::{Directory, DirectoryShard, DirectoryTensor};
pub use entry::{Event, Job, Leader, LogEntry};
pub use facts::fact_of;
pub use header::{HEADER_BYTES, Header};
pub use ids::{Digest, Id};
pub use inline::InlineSnapshot;
pub(crate) use manifest::FINITE;
pub use manifest::{CaskRef, Manifest, ParentRef, SnapshotKind};
pub use postscript::{POSTSCRIPT_BYTES, Postscript};
pub use receipt::{Receipt, ReceiptShard, ReceiptTensor};
pub use session::{RankRange, SessionName, SessionStep};
pub use statistics::ChunkStatistics;
pub use store_file::StoreFile;
pub use tree::{Tree, TreeKey, TreeNode};

pub(crate) use cursor::{Cursor, Put};
pub(crate) use errors::{ChunkErrors, ErrorsFile, ShardErrors};
pub(crate) use layout::{ShardRow, TensorRow};
pub(crate) use names::{catalog_of, is_object, is_round, snapshot_of};
pub(crate) use receipt::RankSave;
pub(crate) use session::{
    ENDED_FOLDER, PARENT_OBJECT, RankStart, RanksEnded, SessionBeginning, SessionMessage, SharedParent, beginning_path, ended_path,
    lasting_folders, start_path,
};
pub(crate) use slots::{MAX_RANK, blob_slot, rank_of_slot, role_slot, slots_of_rank, tensor_slot};
pub(crate) use store_file::STORE_FILE;

/// Alignment of index columns in bytes, the alignment of Arrow buffers.
pub(crate) const COLUMN_ALIGNMENT: u64 = 64;

/// Returns whether a writer added the blob of this name itself, such as a rounding report. Such a blob is no part of the
/// state.
///
/// ```
/// assert!(tensorcask::is_writers_blob(tensorcask::ChunkStatistics::BLOB));
/// assert!(!tensorcask::is_writers_blob("tokenizer.json"));
/// ```
pub fn is_writers_blob(name: &str) -> bool {
    [ErrorsFile::BLOB, ChunkStatistics::BLOB].contains(&name)
}

/// Rounds `value` up to a multiple of `alignment`, a power of two. Returns `None` beyond u64.
pub(crate) fn align_up(value: u64, alignment: u64) -> Option<u64> {
    value.checked_next_multiple_of(alignment)
}
