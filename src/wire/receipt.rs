//! What one rank reports of a save, for the coordinator to commit. Spec: `spec/manifest.md`, clause 6.

use serde::{Deserialize, Serialize};

use super::{CaskRef, ParentRef, seal};
use crate::version::FormatVersion;
use crate::{Dtype, Error, Limits, Result};

const FORMAT: &str = "tensorcask-receipt";

/// A shard of a receipt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptShard {
    /// Where it lies in its tensor.
    pub offset: Vec<u64>,
    /// Its shape.
    pub shape: Vec<u64>,
    /// CRC-32 of each decoded chunk, as 8 hexadecimal digits.
    pub crcs: String,
}

/// A tensor of a receipt, with the rank's shards of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptTensor {
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: String,
    /// The global shape.
    pub shape: Vec<u64>,
    /// What it is to training.
    pub role: String,
    /// The parameter it belongs to.
    pub param: String,
    /// The tensor that it is tied to, which alone is stored.
    pub alias_of: Option<String>,
    /// The slot of the cask that holds the shards.
    pub slot: u32,
    /// The shards, by position.
    pub shards: Vec<ReceiptShard>,
}

/// What one rank has uploaded of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// The step.
    pub step: u64,
    /// Which attempt to save the step: receipts of several attempts are never mixed.
    pub attempt: u64,
    /// The rank.
    pub rank: u32,
    /// All ranks.
    pub world: u32,
    /// What its delta chunks are made against; none if they are all absolute.
    pub parent: Option<ParentRef>,
    /// Its casks: paths (by id), sizes, digests.
    pub casks: Vec<CaskRef>,
    /// Its tensors, by name.
    pub tensors: Vec<ReceiptTensor>,
}

/// Which save a receipt belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankSave {
    pub step: u64,
    pub attempt: u64,
    pub rank: u32,
    pub world: u32,
}

impl Receipt {
    pub(crate) fn new(save: RankSave, parent: Option<ParentRef>, casks: Vec<CaskRef>, tensors: Vec<ReceiptTensor>) -> Self {
        let RankSave { step, attempt, rank, world } = save;
        let version = FormatVersion::CURRENT.to_string();
        Self {
            format: FORMAT.into(),
            version,
            must_understand: vec![],
            may_ignore: vec![],
            step,
            attempt,
            rank,
            world,
            parent,
            casks,
            tensors,
        }
    }

    /// Path of a receipt below the store's root.
    pub fn path_of(step: u64, attempt: u64, rank: u32) -> String {
        format!("receipts/{step}-{attempt}/{rank}.json")
    }

    /// The stored form.
    pub fn encode(&self) -> Result<Vec<u8>> {
        seal::seal(self)
    }

    /// From the stored form.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let (json, _) = seal::open_seal(bytes, limits.max_manifest_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        seal::parse(json)
    }
}

impl ReceiptTensor {
    /// The element type.
    pub fn dtype(&self) -> Result<Dtype> {
        Dtype::from_name(&self.dtype).map_err(|e| e.tensor(&self.name))
    }
}

impl ReceiptShard {
    pub(crate) fn crcs_to_text(crcs: &[u32]) -> String {
        crcs.iter().map(|crc| format!("{crc:08x}")).collect()
    }

    pub(crate) fn crcs(&self) -> Result<Vec<u32>> {
        let bad = || Error::corrupt("checksums of a shard in a receipt are not 8 hexadecimal digits each").clause("manifest 6");
        if !self.crcs.is_ascii() || !self.crcs.len().is_multiple_of(8) {
            return Err(bad());
        }
        self.crcs
            .as_bytes()
            .chunks_exact(8)
            .map(|digits| u32::from_str_radix(std::str::from_utf8(digits).map_err(|_| bad())?, 16).map_err(|_| bad()))
            .collect()
    }
}
