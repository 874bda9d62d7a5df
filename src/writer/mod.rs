//! Writing: encodes a state against its base, streams the casks to the store, and commits the snapshot.
//!
//! ```text
//! save ── layout ── commit::parent ── estimate ── pipeline ── commit
//!                                                   │
//!   plan, schedule -> base_chunks -> rounding -> row_check -> window, unit -> cask_writer
//! ```
//!
//! | module | job |
//! |---|---|
//! | `options`, `saved` | options of a writer; metadata and result of a save |
//! | `open` | opens a store for writing |
//! | `save` | one save of a whole state: base or delta, attempts |
//! | `ranks`, `receipts` | one save of many ranks: upload by each, one commit |
//! | `layout` | names, shards, ties and slots of a state |
//! | `numbered` | weights of the parameters that an optimizer numbers |
//! | `pipeline` | runs the stages and uploads one cask per slot |
//! | `plan`, `schedule` | which chunks are encoded together, and in which order |
//! | `input`, `base_chunks`, `rounding`, `row_check`, `window`, `unit`, `cask_writer` | the stages |
//! | `changed_rows` | rows that callers name as changed since the base |
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
//! Maintenance uses `cask_writer`, `schedule`, `unit` and `commit`, and sessions use `ranks`, `parent` and `open`, never the other
//! way round.

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
mod input;
mod layout;
mod merged;
mod numbered;
mod open;
mod options;
mod pace;
mod parent;
mod pipeline;
mod plan;
mod ranks;
mod receipts;
mod rounding;
mod row_check;
mod save;
mod saved;
mod schedule;
mod settings;
mod spared;
mod statistics;
mod unchanged;
mod unit;
mod window;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

pub(crate) use cask_writer::{CaskWriter, ChunkPlace, Destination, EncodeOptions, ShardLabel};
pub(crate) use choices::{Choices, ChunkFamily};
pub(crate) use commit::Prepared;
pub use finite::FiniteCheck;
pub(crate) use finite::NonFinite;
pub(crate) use layout::slot_of_role;
pub(crate) use open::open_as;
pub use options::{BaseKeeping, Claim, ExistingStep, WriterOptions};
pub use pace::ObjectiveReport;
pub(crate) use parent::Parent;
use pipeline::SavePipeline;
pub use ranks::{Rank, RankWriter};
pub(crate) use ranks::{RankPart, Unreadable, decide_for_ranks, open_parent, parts_are_refused};
use saved::check_user;
pub use saved::{Metadata, SavedSnapshot};
pub(crate) use schedule::{Entry, PlannedShard, Unit, Window, schedule};
pub use unchanged::UnchangedTensor;
use unchanged::UnchangedTensors;
pub(crate) use unit::{PartnerLink, Standalone, UnitChunk, UnitResult, encode_unit};

use crate::chain::{PreviousSave, milliseconds};
use crate::commit::{FiniteMarks, Freeing, Log};
use crate::wire::{Digest, Id, Leader};
use crate::{AheadUploads, Error, ErrorKind, NamePatterns, Result, Store};

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
