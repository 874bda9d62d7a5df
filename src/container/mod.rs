//! The container without I/O: pages in, ordered bytes out; bytes in, *needs these ranges* or an index out.
//!
//! Spec: `spec/container.md`, `spec/index.md`.
#![deny(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

mod decoder;
mod encoder;
mod page;
mod tables;

pub use decoder::{CaskIndex, ChunkEntry, IndexDecoder, PageEntry, Progress};
pub use encoder::{CaskEncoder, CaskReceipt};
pub(crate) use page::{PlaceOfPage, padding_is_zero};
