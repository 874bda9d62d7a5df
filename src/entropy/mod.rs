//! Entropy coding of byte planes, shared by codecs. Spec: `spec/entropy.md`.
//!
//! A *plane* is a run of symbols (bytes) of known number. It is coded block by block; each block picks the coder that
//! stores it in the fewest bytes: raw, constant, runs, Huffman or rANS. Tables pass from block to block while they fit.

mod histogram;
mod huffman;
mod plane;
mod rans;
mod runs;
mod table;

pub(crate) use histogram::{Histogram, count_about, entropy_bits};
pub(crate) use plane::{PlaneReader, coded, decode, encode, estimate, max_encoded_bytes};
