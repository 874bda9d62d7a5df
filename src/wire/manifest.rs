//! A snapshot's manifest. Spec: `spec/manifest.md`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{COLUMN_ALIGNMENT, Digest, HEADER_BYTES, Id, POSTSCRIPT_BYTES, seal, unique};
use crate::version::FormatVersion;
use crate::{Error, Limits, Result};

const FORMAT: &str = "tensorcask-snapshot";

/// Key under `user` of a manifest where a writer says whether all parameters and moments are finite. Spec: manifest
/// 1.4.1.
pub(crate) const FINITE: &str = "tc.finite";

/// Kind of a snapshot: self-contained or dependent on its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// Self-contained.
    Base,
    /// Needs its parent snapshot.
    Delta,
}

impl SnapshotKind {
    /// Name in JSON and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Delta => "delta",
        }
    }
}

/// Parent snapshot of a delta.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParentRef {
    /// Id of the parent.
    pub snapshot: Id,
    /// Content digest of each role of the parent, as the writer of the delta saw them.
    #[serde(deserialize_with = "unique::map")]
    pub content: BTreeMap<String, Digest>,
}

/// A cask of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaskRef {
    /// Slot of the cask. Each rank has two slots; the slot of role `model` comes first.
    pub slot: u32,
    /// Id of the cask. The object is `casks/<id>.cask`.
    pub id: Id,
    /// Size in bytes.
    pub bytes: u64,
    /// Offset of the index.
    pub index_offset: u64,
    /// Offset of the index root.
    pub root_offset: u64,
    /// SHA-256 over header, index root and postscript.
    pub digest: Digest,
}

impl CaskRef {
    /// Path below the store's root.
    pub fn path(&self) -> String {
        format!("casks/{}.cask", self.id)
    }
}

/// Manifest of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// Id of the snapshot.
    pub id: Id,
    /// Training step.
    pub step: u64,
    /// Kind of the snapshot.
    pub kind: SnapshotKind,
    /// Parent of a delta; `None` for a base.
    pub parent: Option<ParentRef>,
    /// SHA-256 of the directory, which is also its name.
    pub directory: Digest,
    /// Content digest of each role.
    #[serde(deserialize_with = "unique::map")]
    pub content: BTreeMap<String, Digest>,
    /// Casks, ascending by slot.
    pub casks: Vec<CaskRef>,
    /// Size of the decoded tensors in bytes.
    pub tensor_bytes: u64,
    /// Time of writing by the writer's clock, in milliseconds since 1970.
    pub time_ms: u64,
    /// Metadata of the state, as in `__metadata__` of a safetensors file.
    #[serde(deserialize_with = "unique::map")]
    pub metadata: BTreeMap<String, String>,
    /// User metadata of the snapshot, such as loss, learning rate or tokens.
    #[serde(deserialize_with = "unique::object")]
    pub user: Map<String, Value>,
}

impl Manifest {
    /// Creates a manifest of the current version, without casks.
    pub(crate) fn new(id: Id, step: u64, parent: Option<ParentRef>, directory: Digest) -> Self {
        Self {
            format: FORMAT.into(),
            version: FormatVersion::CURRENT.to_string(),
            must_understand: vec![],
            may_ignore: vec![],
            id,
            step,
            kind: if parent.is_some() { SnapshotKind::Delta } else { SnapshotKind::Base },
            parent,
            directory,
            content: BTreeMap::new(),
            casks: vec![],
            tensor_bytes: 0,
            time_ms: 0,
            metadata: BTreeMap::new(),
            user: Map::new(),
        }
    }

    /// Features that a reader may ignore, but a writer may not.
    pub fn may_ignore(&self) -> &[String] {
        &self.may_ignore
    }

    /// Path below the store's root.
    pub fn path(&self) -> String {
        Self::path_of(self.step, self.id)
    }

    /// Path of the manifest of a snapshot, below the store's root.
    pub fn path_of(step: u64, id: Id) -> String {
        format!("snapshots/{step}-{id}.json")
    }

    /// Path of a manifest that replaces the first manifest of a snapshot.
    pub fn path_of_compacted(step: u64, id: Id, digest: Digest) -> String {
        format!("snapshots/{step}-{id}-{digest}.json")
    }

    /// Size of all casks in bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.casks.iter().fold(0, |sum, cask| sum.saturating_add(cask.bytes))
    }

    /// Returns the cask in a slot, if the snapshot has one.
    pub fn cask(&self, slot: u32) -> Option<(usize, &CaskRef)> {
        let at = self.casks.binary_search_by_key(&slot, |c| c.slot).ok()?;
        Some((at, self.casks.get(at)?))
    }

    /// Encodes the manifest. Returns the bytes and their digest.
    pub fn encode(&self) -> Result<(Vec<u8>, Digest)> {
        let bytes = seal::seal(self)?;
        let (_, digest) = seal::open_seal(&bytes, u64::MAX)?;
        Ok((bytes, digest))
    }

    /// Decodes a manifest and returns its digest.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<(Self, Digest)> {
        let (json, digest) = seal::open_seal(bytes, limits.max_manifest_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        let manifest: Self = seal::parse(json)?;
        manifest.check()?;
        Ok((manifest, digest))
    }

    fn check(&self) -> Result<()> {
        let bad = |message: String, clause| Err(Error::corrupt(message).clause(clause));
        if (self.kind == SnapshotKind::Delta) != self.parent.is_some() {
            return bad(format!("kind is {}, which disagrees with its parent", self.kind.name()), "manifest 2.1");
        }
        let slots = self.casks.iter().map(|c| c.slot);
        if slots.clone().zip(slots.skip(1)).any(|(a, b)| a >= b) {
            return bad("slots of casks do not ascend strictly".into(), "manifest 2.2");
        }
        for cask in &self.casks {
            let ordered = HEADER_BYTES <= cask.index_offset
                && cask.index_offset <= cask.root_offset
                && cask.bytes.checked_sub(POSTSCRIPT_BYTES).is_some_and(|end| cask.root_offset <= end)
                && cask.index_offset.is_multiple_of(COLUMN_ALIGNMENT)
                && cask.root_offset.is_multiple_of(COLUMN_ALIGNMENT);
            if !ordered {
                return bad(format!("offsets of cask {} do not fit its {} bytes", cask.id, cask.bytes), "manifest 2.3");
            }
        }
        Ok(())
    }
}
