//! Writing: takes a state, encodes it against its base, streams casks up, and commits.

mod base;
mod commit;
mod estimate;
mod hints;
mod layout;
mod ranks;
mod save;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Map, Value};

use base::BaseCache;
pub(crate) use commit::Prepared;
pub use ranks::{Rank, RankWriter};
use save::Saver;

use crate::chain::{Decision, Policy};
use crate::codec::Objective;
use crate::commit::{DEFAULT_AGE_FLOOR, Log};
use crate::wire::{Digest, Id, SnapshotKind};
use crate::{Ahead, Error, ErrorKind, Precision, Result, RoundingReport, Store};

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
    /// What happens when a live step is saved again with another content.
    pub existing_step: ExistingStep,
    /// Id that the log names with each commit. Writers with the same id are one job: they do not fence each other. By default each writer
    /// has an id of its own.
    pub id: Option<Id>,
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
            existing_step: ExistingStep::default(),
            id: None,
            age_floor: DEFAULT_AGE_FLOOR,
        }
    }
}

/// What a save does about a live snapshot of the same step. Saving the same tensors and blobs again is never an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExistingStep {
    /// A save with another content fails with `Conflict`.
    #[default]
    Refuse,
    /// The new snapshot supersedes the old one.
    Replace,
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
    pub rounding: Option<RoundingReport>,
    /// Why it became a base or a delta.
    pub decision: Decision,
}

/// Saves snapshots into a store.
///
/// One job at a time: a writer of another id that opens the store fences this one, which says so at its next save. A failed save leaves the
/// store as it was, and the writer usable, unless the error is `OutcomeUnknown`.
///
/// A save that returns `Ok` was confirmed against the store as it is at that moment. If the store was deleted, moved away or replaced by an
/// older copy since the last save, the writer begins anew with a base. If another job wrote to what lies there now, the save fails with
/// `Fenced`. Objects that are removed after that confirmation are not noticed until the next save, or `verify`.
///
/// ```
/// use tensorcask::{Dtype, Metadata, Policy, TensorView, blocking::Store};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("run");
/// # let url = path.to_str().unwrap();
/// let mut writer = Store::open(url)?.writer(Policy::Consecutive)?;
/// let state = [TensorView::new("w", Dtype::U8, &[4], &[1, 2, 3, 4])?];
/// writer.save(1, &state, &[], &Metadata::default())?;
/// std::fs::remove_dir_all(url).unwrap();
/// assert_eq!(writer.save(2, &state, &[], &Metadata::default())?.kind.name(), "base");
/// assert_eq!(Store::open(url)?.snapshot(2)?.read("w", &tensorcask::Slice::all())?.data, [1, 2, 3, 4]);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug)]
pub struct Writer {
    saver: Saver,
    id: Id,
    log: Log,
    /// Writers whose place this one took; they may come back with an older copy of the store, and are no other job.
    predecessors: BTreeSet<Id>,
    /// The directory that this writer itself has made durable.
    durable_directory: Option<Digest>,
    /// Why this writer may not go on: the outcome of a commit is not known.
    stopped: Option<String>,
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

    /// What the next saves do about a step that exists.
    pub fn on_existing_step(&mut self, existing_step: ExistingStep) {
        self.saver.options.existing_step = existing_step;
    }

    fn check_usable(&self) -> Result<()> {
        match &self.stopped {
            None => Ok(()),
            Some(message) => Err(Error::new(ErrorKind::OutcomeUnknown, format!("this writer has stopped: {message}"))),
        }
    }

    /// A writer whose commit has no known outcome goes no further. A fenced one asks the log again at each save.
    fn stop_if_final(&mut self, saved: &Result<Saved>) {
        if let Err(e) = saved
            && e.kind() == ErrorKind::OutcomeUnknown
        {
            self.stopped = Some(e.message().to_owned());
        }
    }
}

fn check_user(metadata: &Metadata) -> Result<()> {
    match metadata.user.keys().find(|key| key.starts_with("tc.")) {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug()))),
    }
}
