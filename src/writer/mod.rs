//! Writing: takes a state, encodes it against its base, streams casks up, and commits.

mod base;
mod commit;
mod layout;
mod save;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use base::BaseCache;
pub(crate) use layout::blob_slot;

use crate::chain::Policy;
use crate::commit::{DEFAULT_AGE_FLOOR, Log};
use crate::wire::{Digest, Id, SnapshotKind};
use crate::{Error, ErrorKind, Result, Store};

/// What a writer says of a snapshot besides its tensors.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    /// Loss, learning rate, tokens, commit of the code; columns of the catalog. Names that start with `tc.` are reserved.
    pub user: Map<String, Value>,
    /// Metadata of the state as a file carries it (`__metadata__` of safetensors).
    pub file: BTreeMap<String, String>,
}

/// How a writer works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterOptions {
    /// When to write a base, and what deltas are made against.
    pub policy: Policy,
    /// Where the base of the next delta is kept.
    pub base_cache: BaseKeeping,
    /// Whether each chunk is decoded again before it goes up.
    pub verify_after_encode: bool,
    /// Pages begin at multiples of two to the power of this: 6 to 12.
    pub alignment_exponent: u8,
    /// The least age floor that garbage collection of this store is run with: a save that takes longer than half of it is
    /// refused, because its casks could be taken for leftovers.
    pub age_floor: Duration,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            base_cache: BaseKeeping::default(),
            verify_after_encode: true,
            alignment_exponent: 6,
            age_floor: DEFAULT_AGE_FLOOR,
        }
    }
}

/// Where the base that the next delta needs is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BaseKeeping {
    /// In memory, decoded: as many bytes as the state has.
    #[default]
    Memory,
    /// Nowhere: read back from the store, a few chunks at a time.
    None,
}

/// What a save made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The snapshot's id.
    pub id: Id,
    /// The step.
    pub step: u64,
    /// Whether it stands alone.
    pub kind: SnapshotKind,
    /// The snapshot that it needs, if it is a delta.
    pub parent: Option<Id>,
    /// Number of the log entry that committed it.
    pub sequence: u64,
    /// Bytes of the tensors.
    pub tensor_bytes: u64,
    /// Bytes of the casks.
    pub stored_bytes: u64,
    /// Chunks by what became of them: codec id, or `unchanged`.
    pub chunks: BTreeMap<String, u64>,
}

/// Saves snapshots into a store.
///
/// One writer at a time: opening another fences this one, which says so at its next save. A failed save leaves the store
/// as it was, and the writer usable, unless the error is `Fenced` or `OutcomeUnknown`.
#[derive(Debug)]
pub struct Writer {
    store: Store,
    options: WriterOptions,
    id: Id,
    log: Log,
    base: BaseCache,
    /// The directory that this writer itself has made durable.
    durable_directory: Option<Digest>,
    /// Why this writer may not go on.
    stopped: Option<(ErrorKind, String)>,
}

impl Store {
    /// Opens the store for writing, and creates it if it is not there.
    pub async fn writer(&self, policy: Policy) -> Result<Writer> {
        self.writer_with(WriterOptions { policy, ..WriterOptions::default() }).await
    }

    /// Opens the store for writing with these options.
    pub async fn writer_with(&self, options: WriterOptions) -> Result<Writer> {
        commit::open(self, options).await
    }
}

impl Writer {
    /// The id, which the log names with each of its commits.
    pub fn id(&self) -> Id {
        self.id
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn check_usable(&self) -> Result<()> {
        match &self.stopped {
            None => Ok(()),
            Some((kind, message)) => Err(Error::new(*kind, format!("this writer has stopped: {message}"))),
        }
    }
}
