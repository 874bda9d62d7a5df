//! The receipt of one rank's upload, for the coordinator to commit. Spec: `spec/manifest.md`, clause 6.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::session::{RankRange, SessionName};
use super::{CaskRef, ParentRef, seal};
use crate::version::FormatVersion;
use crate::{Dtype, Error, Limits, Result};

const FORMAT: &str = "tensorcask-receipt";

/// A shard of a receipt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptShard {
    /// Offset of the shard in its tensor.
    pub offset: Vec<u64>,
    /// Shape of the shard.
    pub shape: Vec<u64>,
    /// CRC-32 of each decoded chunk, 8 hexadecimal digits per chunk.
    pub crcs: String,
}

/// A tensor of a receipt, with this rank's shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptTensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Role in training.
    pub role: String,
    /// Parameter that the tensor belongs to.
    pub param: String,
    /// Name of the stored tensor that this tensor is tied to; `None` for a stored tensor.
    pub alias_of: Option<String>,
    /// Slot of the cask that holds the shards.
    pub slot: u32,
    /// Shards, by position.
    pub shards: Vec<ReceiptShard>,
}

/// Receipt of one rank: everything it uploaded for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// Training step.
    pub step: u64,
    /// Attempt to save the step. Receipts of different attempts are never combined.
    pub attempt: u64,
    /// Rank of the writer.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Parent of the delta chunks; `None` if all chunks are absolute.
    pub parent: Option<ParentRef>,
    /// Uploaded casks.
    pub casks: Vec<CaskRef>,
    /// Tensors, by name.
    pub tensors: Vec<ReceiptTensor>,
    /// Whether all parameters and moments of this rank are finite; `None` without a check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finite: Option<bool>,
    /// Time of encoding this rank's part, in microseconds; `None` if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode_us: Option<u64>,
    /// Time for which the rank waited for uploads beyond that, in microseconds; `None` if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_us: Option<u64>,
    /// The session that the receipt belongs to, if the ranks are on many hosts with a leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionName>,
    /// Values for the manifest's `user`, from one rank of a session.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub user: Map<String, Value>,
    /// Values for the manifest's `metadata`, from one rank of a session.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// Identity of the save that a receipt belongs to.
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
            finite: None,
            session: None,
            user: Map::new(),
            metadata: BTreeMap::new(),
            encode_us: None,
            upload_us: None,
        }
    }

    /// Path of a receipt below the store's root.
    pub fn path_of(step: u64, attempt: u64, rank: u32) -> String {
        format!("receipts/{step}-{attempt}/{rank}.json")
    }

    /// Encodes the receipt.
    pub fn encode(&self) -> Result<Vec<u8>> {
        seal::seal(self)
    }

    /// Decodes a receipt.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let (json, _) = seal::open_seal(bytes, limits.max_manifest_bytes)?;
        Self::parse(json)
    }

    /// Decodes the receipts of consecutive ranks, which follow each other in one object.
    pub(crate) fn decode_all(bytes: &[u8], ranks: RankRange, limits: &Limits) -> Result<Vec<Self>> {
        let mut receipts = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let (json, _, read) = seal::open_first_seal(rest, limits.max_manifest_bytes)?;
            receipts.push(Self::parse(json)?);
            rest = rest.get(read..).unwrap_or_default();
        }
        if !receipts.iter().map(|receipt| receipt.rank).eq(ranks.first..=ranks.last) {
            return Err(
                Error::corrupt(format!("has other receipts than those of ranks {} to {}", ranks.first, ranks.last)).clause("manifest 6.2")
            );
        }
        Ok(receipts)
    }

    fn parse(json: &[u8]) -> Result<Self> {
        seal::check_preamble(json, FORMAT)?;
        seal::parse(json)
    }
}

impl ReceiptTensor {
    /// Returns the element type.
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
