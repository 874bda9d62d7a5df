//! The container format without I/O. The encoder turns pages into ordered bytes. The decoder turns bytes into an index,
//! and requests the byte ranges it still needs.
//!
//! Spec: `spec/container.md`, `spec/index.md`.
#![deny(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

mod decoder;
mod encoder;
mod page;
mod tables;

pub use decoder::{BlobEntry, CaskFile, CaskIndex, ChunkEntry, IndexDecoder, PageEntry, Progress, TensorEntry};
pub use encoder::{CaskEncoder, CaskReceipt};
pub(crate) use page::{PlaceOfPage, padding_is_zero};
pub use tables::IndexTables;
