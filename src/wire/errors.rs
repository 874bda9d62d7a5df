//! The blob `tc.errors`: the rounding error of each stored chunk. Spec: `spec/errors.md`.

use serde::{Deserialize, Serialize};
use tensorcask_kernels::errors::Sums;

use super::seal;
use crate::tensor::Rect;
use crate::version::FormatVersion;
use crate::{Error, Limits, Result};

const FORMAT: &str = "tensorcask-errors";

/// Rounding error of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "Numbers", into = "Numbers")]
pub(crate) struct ChunkErrors {
    /// Number of the chunk in its shard.
    pub chunk: u64,
    /// Number of elements that are finite and not zero.
    pub elements: u64,
    /// Greatest relative error.
    pub max_relative: f64,
    /// Sum of relative errors.
    pub relative: f64,
    /// Sum of squared errors.
    pub squares: f64,
    /// Number of elements whose sign changed.
    pub sign_flips: u64,
    /// Sum of squared errors of the Adam update, and sum of squared updates.
    pub update: [f64; 2],
}

type Numbers = (u64, u64, f64, f64, f64, u64, f64, f64);

impl From<Numbers> for ChunkErrors {
    fn from((chunk, elements, max_relative, relative, squares, sign_flips, error, size): Numbers) -> Self {
        Self { chunk, elements, max_relative, relative, squares, sign_flips, update: [error, size] }
    }
}

impl From<ChunkErrors> for Numbers {
    fn from(of: ChunkErrors) -> Self {
        (of.chunk, of.elements, of.max_relative, of.relative, of.squares, of.sign_flips, of.update[0], of.update[1])
    }
}

impl ChunkErrors {
    pub(crate) fn new(sums: Sums) -> Self {
        let Sums { elements, max_relative, relative, squares, flips } = sums;
        Self { chunk: 0, elements, max_relative, relative, squares, sign_flips: flips, update: [0.0; 2] }
    }

    fn is_sane(&self) -> bool {
        let numbers = [self.max_relative, self.relative, self.squares, self.update[0], self.update[1]];
        numbers.iter().all(|x| x.is_finite() && *x >= 0.0)
    }
}

/// Rounding errors of a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardErrors {
    pub tensor: String,
    pub offset: Vec<u64>,
    pub shape: Vec<u64>,
    pub setting: String,
    pub chunks: Vec<ChunkErrors>,
}

impl ShardErrors {
    pub(crate) fn rect(&self) -> Rect {
        Rect { offset: self.offset.clone(), shape: self.shape.clone() }
    }
}

/// Content of the blob.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ErrorsFile {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    pub shards: Vec<ShardErrors>,
}

impl ErrorsFile {
    /// Name of the blob.
    pub(crate) const BLOB: &str = "tc.errors";

    /// Creates the content from shards in ascending order.
    pub(crate) fn new(shards: Vec<ShardErrors>) -> Self {
        let version = FormatVersion::CURRENT.to_string();
        Self { format: FORMAT.into(), version, must_understand: vec![], may_ignore: vec![], shards }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        seal::seal(self)
    }

    pub(crate) fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let (json, _) = seal::open_seal(bytes, limits.max_blob_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        let file: Self = seal::parse(json)?;
        let key = |shard: &ShardErrors| (shard.tensor.clone(), shard.offset.clone(), shard.shape.clone());
        let ascend = file.shards.is_sorted_by(|a, b| key(a) < key(b));
        let chunks_ascend = file.shards.iter().all(|shard| shard.chunks.is_sorted_by(|a, b| a.chunk < b.chunk));
        if !ascend || !chunks_ascend {
            return Err(Error::corrupt("shards or chunks are not in order").clause("errors 1"));
        }
        match file.shards.iter().find(|shard| !shard.chunks.iter().all(ChunkErrors::is_sane)) {
            Some(shard) => Err(Error::corrupt("a rounding error is negative or not a number").tensor(&shard.tensor).clause("errors 3.3")),
            None => Ok(file),
        }
    }
}
