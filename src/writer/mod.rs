//! Writing: takes a state, encodes it against its base, streams casks up, and commits.

mod base;
mod commit;
mod estimate;
mod hints;
mod layout;
mod ranks;
mod save;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use base::BaseCache;
pub(crate) use commit::Prepared;
pub(crate) use layout::{blob_slot, tensor_slot};
pub use ranks::{Rank, RankWriter};
use save::Saver;

use crate::chain::{Decision, Policy};
use crate::codec::Objective;
use crate::commit::{DEFAULT_AGE_FLOOR, Log};
use crate::wire::{Digest, Id, SnapshotKind};
use crate::{Ahead, Error, ErrorKind, ErrorReport, Precision, Result, Store};

/// What a writer says of a snapshot besides its tensors.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    /// Loss, learning rate, tokens, commit of the code; columns of the catalog. Names that start with `tc.` are reserved.
    pub user: Map<String, Value>,
    /// Metadata of the state as a file carries it (`__metadata__` of safetensors).
    pub file: BTreeMap<String, String>,
}

/// How a writer works.
#[derive(Debug, Clone, PartialEq)]
pub struct WriterOptions {
    /// When to write a base, and what deltas are made against.
    pub policy: Policy,
    /// Where the base of the next delta is kept.
    pub base_cache: BaseKeeping,
    /// What codecs are chosen for.
    pub objective: Objective,
    /// Which tensors are rounded before they are stored, and how far. By default none is.
    pub precision: Precision,
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
            objective: Objective::default(),
            precision: Precision::default(),
            verify_after_encode: true,
            alignment_exponent: 6,
            age_floor: DEFAULT_AGE_FLOOR,
        }
    }
}

/// Where the base that the next delta needs is kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BaseKeeping {
    /// In memory, decoded: as many bytes as the state has.
    #[default]
    Memory,
    /// In memory, encoded: as many bytes as a base has in the store; each chunk is decoded when it is needed.
    Encoded,
    /// Decoded, in a file of this folder that no one else sees: as many bytes of local disk as the state has, twice while a
    /// base is saved. A file that cannot be written is a warning: the base is then read back.
    Nvme(std::path::PathBuf),
    /// Nowhere: read back from the store, a few chunks at a time.
    None,
}

/// What a save made.
#[derive(Debug, Clone, PartialEq)]
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
    /// Errors of all that was rounded; none where nothing was.
    pub errors: Option<ErrorReport>,
    /// Why it became a base or a delta.
    pub decision: Decision,
}

/// Saves snapshots into a store.
///
/// One writer at a time: opening another fences this one, which says so at its next save. A failed save leaves the store
/// as it was, and the writer usable, unless the error is `Fenced` or `OutcomeUnknown`.
#[derive(Debug)]
pub struct Writer {
    saver: Saver,
    id: Id,
    log: Log,
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
        &self.saver.store
    }

    /// Bytes of memory that the kept base takes.
    pub fn base_cache_bytes(&self) -> u64 {
        self.saver.base.memory_bytes()
    }

    /// Has the casks of the next saves go to another store, too, while they are being written.
    pub fn send_ahead(&mut self, ahead: Option<Ahead>) {
        self.saver.ahead = ahead;
    }

    fn check_usable(&self) -> Result<()> {
        match &self.stopped {
            None => Ok(()),
            Some((kind, message)) => Err(Error::new(*kind, format!("this writer has stopped: {message}"))),
        }
    }

    /// A writer that was fenced, or whose commit has no known outcome, goes no further.
    fn stop_if_final(&mut self, saved: &Result<Saved>) {
        if let Err(e) = saved
            && matches!(e.kind(), ErrorKind::Fenced | ErrorKind::OutcomeUnknown)
        {
            self.stopped = Some((e.kind(), e.message().to_owned()));
        }
    }
}

fn check_user(metadata: &Metadata) -> Result<()> {
    match metadata.user.keys().find(|key| key.starts_with("tc.")) {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug()))),
    }
}
