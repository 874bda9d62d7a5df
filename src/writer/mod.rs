//! Writing: encodes a state against its base, streams the casks to the store, and commits the snapshot.
//!
//! ```text
//! save ── layout ── commit::parent ── estimate ── pipeline ── commit
//!                                                   │
//!   plan, schedule -> base_chunks -> rounding -> changed_rows (check) -> window, unit -> cask_writer
//! ```
//!
//! | module | job |
//! |---|---|
//! | `save` | one save of a whole state: base or delta, attempts |
//! | `ranks`, `host_writer`, `leader_writer`, `receipts` | one save of many ranks: upload by each, or by each host; one commit |
//! | `layout` | names, shards, ties and slots of a state |
//! | `numbered` | weights of the parameters that an optimizer numbers |
//! | `pipeline` | runs the stages and uploads one cask per slot |
//! | `plan`, `schedule` | which chunks are encoded together, and in which order |
//! | `input`, `base_chunks`, `rounding`, `changed_rows`, `window`, `unit`, `cask_writer` | the stages |
//! | `settings` | which precision a tensor gets, if its rule allows several |
//! | `finite` | check for NaN and infinities |
//! | `unchanged` | warning of parameters that stay the same |
//! | `statistics` | statistics of each chunk, for the blob `tc.statistics` |
//! | `adapt` | the precision `auto`: the sample that is measured, the earlier decision |
//! | `pace`, `forecast` | the objective `auto`: measured rates; the choice for each window |
//! | `choices`, `spared` | which codec is tried first, and which chunks do without a base |
//! | `base_cache`, `parent` | where the base of a delta comes from |
//! | `commit` | directory, manifest, log entry |
//!
//! Invariants: nothing exists for readers before the log entry is created. A failed save leaves the store as it was.
//! Maintenance uses `cask_writer`, `schedule`, `unit` and `commit`, never the other way round.

mod adapt;
mod base_cache;
mod base_chunks;
mod cask_writer;
mod changed_rows;
mod choices;
mod commit;
mod estimate;
mod finite;
mod forecast;
mod host_writer;
mod input;
mod layout;
mod leader_writer;
mod merged;
mod numbered;
mod pace;
mod parent;
mod pipeline;
mod plan;
mod ranks;
mod receipts;
mod rounding;
mod save;
mod schedule;
mod settings;
mod spared;
mod statistics;
mod unchanged;
mod unit;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

pub(crate) use cask_writer::{CaskWriter, ChunkPlace, Destination, EncodeOptions, ShardLabel};
pub(crate) use choices::{Choices, ChunkFamily};
pub(crate) use commit::Prepared;
pub use finite::FiniteCheck;
pub(crate) use finite::NonFinite;
pub use host_writer::{HostWriter, RankState};
pub(crate) use layout::slot_of_role;
pub use leader_writer::LeaderWriter;
pub use pace::ObjectiveReport;
use pipeline::SavePipeline;
pub use ranks::{Rank, RankWriter};
pub(crate) use schedule::{Entry, PlannedShard, Unit, Window, schedule};
pub use unchanged::UnchangedTensor;
use unchanged::UnchangedTensors;
pub(crate) use unit::{PartnerLink, Standalone, UnitChunk, UnitResult, encode_unit};

use crate::chain::{Policy, PolicyDecision, PreviousSave, milliseconds};
use crate::codec::{CodecRules, ObjectiveSetting};
use crate::commit::{DEFAULT_AGE_FLOOR, FiniteMarks, Freeing, Log};
use crate::precision::PrecisionDecision;
use crate::wire::{Digest, Id, Leader, SnapshotKind};
use crate::{AheadUploads, Error, ErrorKind, NamePatterns, Precision, Result, Retention, RoleRules, RoundingReport, Store};

/// Metadata of a snapshot.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata {
    /// Values such as loss, learning rate, token count or code commit. They become columns of the catalog. Names that
    /// start with `tc.` are reserved.
    pub user: Map<String, Value>,
    /// Metadata of a file that the state came from (`__metadata__` of safetensors).
    pub file: BTreeMap<String, String>,
}

/// Options of a writer.
#[derive(Debug, Clone, PartialEq)]
pub struct WriterOptions {
    /// When to write a base, and which snapshot deltas are made against.
    pub policy: Policy,
    /// How the base of the next delta is kept between saves.
    pub base_cache: BaseKeeping,
    /// Goal of the choice of codecs: weights of size and speed, or the least time until the save is durable.
    pub objective: ObjectiveSetting,
    /// Codecs that are assigned to tensors. By default the objective chooses the codecs of all tensors.
    pub codecs: CodecRules,
    /// Roles of tensors whose names tell no role, or a wrong one. By default roles are those of [`TensorView::role`](crate::TensorView::role).
    pub roles: RoleRules,
    /// Which tensors are rounded before they are stored, and how far. By default no tensor is rounded. [`Precision::auto`]
    /// is for saves of whole states: a commit of receipts takes the decision from the receipt of the only rank.
    pub precision: Precision,
    /// Step and decision of the newest snapshot with [`Precision::auto`] in another store of the same training. A save decides
    /// by it while this store has no snapshot with a decision. For programs that begin a new store.
    pub earlier_precision: Option<(u64, PrecisionDecision)>,
    /// Whether each chunk is decoded again before it is uploaded.
    pub verify_after_encode: bool,
    /// Whether the snapshot gets statistics of each chunk, which
    /// [`Inspection::statistics`](crate::Inspection::statistics) returns. Off by default.
    pub statistics: bool,
    /// How to treat a state whose parameters or moments hold NaN or infinities. Not checked by default.
    pub check: FiniteCheck,
    /// Steps to keep: after each commit, the writer forgets the others as [`Store::retain`] does. If forgetting fails, the writer
    /// warns, the snapshot stays saved, and the next save tries again. [`Retention::free`] says when their objects are deleted. By default all steps are kept. The writer does not
    /// reduce steps of `keep_weights_every`; [`maintain::apply_retention`](crate::maintain::apply_retention()) does.
    pub retention: Option<Retention>,
    /// Patterns of names of parameters that are not trained, as for [`NamePatterns`]. [`SavedSnapshot::unchanged`] does
    /// not name them.
    pub frozen: Vec<String>,
    /// Whether the first save of this writer is compared with the two newest stored snapshots before it, for
    /// [`SavedSnapshot::unchanged`]. For programs that save once. Reads the indexes of these snapshots, unless their
    /// chains have more than 16 links. Off by default: then a writer remembers its own saves only.
    pub recall: bool,
    /// Page alignment: pages begin at multiples of two to the power of this, 6 to 12.
    pub alignment_exponent: u8,
    /// How to treat a live snapshot of the same step with other content.
    pub existing_step: ExistingStep,
    /// Id that the log names with each commit. Writers with the same id belong to one job and do not fence each other.
    /// By default each writer gets a random id.
    pub id: Option<Id>,
    /// How the writer claims the store.
    pub claim: Claim,
    /// Smallest age floor that garbage collection of this store runs with. A save that takes longer than half of this
    /// time is refused, because garbage collection could take its casks for leftovers.
    pub age_floor: Duration,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            base_cache: BaseKeeping::default(),
            objective: ObjectiveSetting::default(),
            codecs: CodecRules::default(),
            roles: RoleRules::default(),
            precision: Precision::default(),
            earlier_precision: None,
            verify_after_encode: true,
            statistics: false,
            check: FiniteCheck::Off,
            retention: None,
            frozen: vec![],
            recall: false,
            alignment_exponent: 6,
            existing_step: ExistingStep::default(),
            id: None,
            claim: Claim::default(),
            age_floor: DEFAULT_AGE_FLOOR,
        }
    }
}

/// How a save treats a live snapshot of the same step. Saving the same tensors and blobs again is never an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExistingStep {
    /// A save with other content fails with `Conflict`.
    #[default]
    Refuse,
    /// The new snapshot supersedes the old one.
    Replace,
}

/// How a writer keeps the base that the next delta needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BaseKeeping {
    /// In memory, decoded. Takes as much memory as the state.
    #[default]
    Memory,
    /// In memory, encoded. Takes as much memory as a base takes in the store. Each chunk is decoded when a delta needs
    /// it.
    Encoded,
    /// In a private file of this folder, decoded. Takes as much local disk as the state, and twice as much while a base
    /// is saved. If the file cannot be written, the writer warns and reads the base back from the store.
    Disk(std::path::PathBuf),
    /// Not kept. Chunks of the base are read back from the store, one window at a time.
    None,
}

/// How a writer claims a store, which has one writer at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Claim {
    /// For a job that goes on saving. It takes the store over from any other writer, so a job that starts again needs no permission.
    #[default]
    Job,
    /// For one save by hand. Refused with `Conflict` if the last writer is a job.
    Once,
    /// For one save by hand that takes the store over from a job: the next save of that job fails with `Fenced`.
    OnceTakingOver,
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
    /// Whether all parameters and moments are finite, by the rules of [`FiniteCheck`]; `None` without a check and
    /// without statistics.
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

/// Saves snapshots into a store.
///
/// One job writes to a store at a time. A writer with another id that opens the store fences this one: its next save
/// fails with `Fenced`. A failed save leaves the store as it was and the writer usable, unless the error is
/// `OutcomeUnknown`.
///
/// A save that returns `Ok` was confirmed against the store at that moment. If the store was deleted, moved away or
/// replaced by an older copy since the last save, the writer saves a base there. If another job has written to the new
/// store, the save fails with `Fenced`. Objects removed after the confirmation are noticed at the next save, or by
/// `verify`.
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
    pipeline: SavePipeline,
    id: Id,
    log: Log,
    /// Writers that this one replaced. They may reappear in an older copy of the store, and do not count as another
    /// job.
    predecessors: BTreeSet<Id>,
    /// Digest of the last directory that this writer made durable.
    durable_directory: Option<Digest>,
    unchanged: UnchangedTensors,
    frozen: NamePatterns,
    /// Times of the newest save that was committed, for the next snapshot.
    previous: Option<PreviousSave>,
    /// Time of the upload of the last snapshot, if its own manifest could not record it.
    upload_ms: Option<f64>,
    /// Step and start of the save of many ranks that is under way.
    begun: Option<(u64, Instant)>,
    /// Whether this writer measures `previous` by itself.
    measures_saves: bool,
    stopped: Stopped,
    /// Which snapshots are finite, for the retention.
    marks: FiniteMarks,
    freeing: Freeing,
    /// The session that this writer commits for, as leader of many hosts.
    leader: Option<Leader>,
}

/// Message of the commit with unknown outcome that stopped a writer, if any.
#[derive(Debug)]
struct Stopped(Option<String>);

impl Store {
    /// Opens the store for writing. Creates the store if it does not exist.
    pub async fn writer(&self, policy: Policy) -> Result<Writer> {
        self.writer_with(WriterOptions { policy, ..WriterOptions::default() }).await
    }

    /// Opens the store for writing with the given options.
    pub async fn writer_with(&self, options: WriterOptions) -> Result<Writer> {
        commit::open(self, options, None, None).await
    }
}

impl Writer {
    /// Id of this writer, as the log names it with each commit.
    pub fn id(&self) -> Id {
        self.id
    }

    /// Store that this writer saves to.
    pub fn store(&self) -> &Store {
        &self.pipeline.store
    }

    /// Memory that the kept base takes, in bytes; with the hashes of its rows, if they are kept.
    pub fn base_cache_bytes(&self) -> u64 {
        self.pipeline.base.memory_bytes().saturating_add(self.pipeline.changed_rows.memory_bytes())
    }

    /// Sends the casks of the next saves to a second store, too, while they are being written. `None` ends that.
    pub fn send_ahead(&mut self, ahead: Option<AheadUploads>) {
        self.pipeline.ahead = ahead;
    }

    /// Sets the times of an earlier save, which the next snapshots record. From then on, this writer no longer measures
    /// whole saves, nor uploads. For programs that save to a nearer place first, such as the engine.
    pub fn set_previous_save(&mut self, previous: Option<PreviousSave>) {
        (self.previous, self.measures_saves) = (previous, false);
    }

    /// Notes for how long the last committed save stopped the training. The next snapshot records it. Without a note,
    /// readers take the time of the whole save.
    pub fn note_stall(&mut self, stall: Duration) {
        if let Some(previous) = &mut self.previous {
            previous.stall_ms = Some(milliseconds(stall));
        }
    }

    /// Sets how the next saves treat a step that exists.
    pub fn on_existing_step(&mut self, existing_step: ExistingStep) {
        self.pipeline.options.existing_step = existing_step;
    }
}

impl Stopped {
    /// Refuses to go on after a commit with unknown outcome.
    fn check(&self) -> Result<()> {
        match &self.0 {
            None => Ok(()),
            Some(message) => Err(Error::new(ErrorKind::OutcomeUnknown, format!("this writer has stopped: {message}"))),
        }
    }

    /// Stops a writer whose commit has an unknown outcome. A fenced writer is not stopped: each save reads the log again.
    fn after(saved: &Result<SavedSnapshot>) -> Self {
        let error = saved.as_ref().err().filter(|error| error.kind() == ErrorKind::OutcomeUnknown);
        Self(error.map(|error| error.message().to_owned()))
    }
}

fn check_user(metadata: &Metadata) -> Result<()> {
    match metadata.user.keys().find(|key| key.starts_with("tc.")) {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!("user metadata `{}`: names that start with `tc.` are reserved", key.escape_debug()))),
    }
}
