//! Metadata that a save takes, and the description of the snapshot that it returns.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{ObjectiveReport, UnchangedTensor};
use crate::chain::PolicyDecision;
use crate::precision::PrecisionDecision;
use crate::wire::{Id, SnapshotKind};
use crate::{Error, Result, RoundingReport};

/// Metadata of a snapshot.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    /// Values such as loss, learning rate, token count or code commit. They become columns of the catalog. Names that
    /// start with `tc.` are reserved.
    pub user: Map<String, Value>,
    /// Metadata of a file that the state came from (`__metadata__` of safetensors).
    pub file: BTreeMap<String, String>,
}

/// A saved snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedSnapshot {
    /// Id of the snapshot.
    pub id: Id,
    /// Training step.
    pub step: u64,
    /// Base or delta.
    pub kind: SnapshotKind,
    /// Id of the parent; `None` for a base.
    pub parent: Option<Id>,
    /// Number of the log entry that committed the snapshot.
    pub sequence: u64,
    /// Size of the decoded tensors, in bytes.
    pub tensor_bytes: u64,
    /// Size of the casks, in bytes.
    pub stored_bytes: u64,
    /// Number of chunks by codec id, or `unchanged`.
    pub chunks: BTreeMap<String, u64>,
    /// Rounding errors of all tensors; `None` if nothing was rounded.
    pub rounding: Option<RoundingReport>,
    /// Whether all parameters and moments are finite, by the rules of [`FiniteCheck`](crate::FiniteCheck); `None` without a
    /// check and without statistics.
    pub finite: Option<bool>,
    /// Trained parameters whose content is that of the last two saves of this writer, or more. A parameter with a
    /// moment in the state is trained. In a state without moments, these are all parameters, or none. A coordinator
    /// finds them from the receipts of all ranks.
    pub unchanged: Vec<UnchangedTensor>,
    /// Why the snapshot became a base or a delta.
    pub decision: PolicyDecision,
    /// Profile that the precision `auto` chose, and why; `None` for other precisions.
    pub precision: Option<PrecisionDecision>,
    /// Measurements and choices of the objective `auto`; `None` for other objectives.
    pub objective: Option<ObjectiveReport>,
}

pub(super) fn check_user(metadata: &Metadata) -> Result<()> {
    match metadata.user.keys().find(|key| key.starts_with("tc.")) {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug()))),
    }
}
