//! The code against `spec/`: its tables, its clauses and its test vectors.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    clippy::little_endian_bytes,
    clippy::missing_docs_in_private_items,
    missing_docs,
    reason = "tests"
)]

mod casks;
mod codecs;
mod directories;
mod entropy;
mod fixed;
mod pages;
mod positions;
mod sealed;
mod vectors;
