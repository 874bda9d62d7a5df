//! Entropy coding of byte planes, shared by codecs. Spec: `spec/entropy.md`.
//!
//! A *plane* is a sequence of symbols (bytes) of known length. It is coded in blocks. Each block uses the coder that
//! stores it in the fewest bytes: raw, constant, runs or Huffman. A block may also be split into a mask of its most
//! frequent symbol and the other symbols; both parts are blocks again. A block may reuse the table of an earlier block.

mod histogram;
mod huffman;
mod plane;
mod raw;
mod runs;
mod table;

pub(crate) use histogram::{Histogram, count_about, entropy_bits};
pub(crate) use plane::{PlaneReader, coded, decode, encode, estimate, max_encoded_bytes};
pub(crate) use raw::{PlaneBuffer, read_plane};
