//! Stores training checkpoints as small deltas, with a checksum for every byte and atomic commits on any storage.
//!
//! A [`Store`] holds the snapshots of one run, on local disk or in an object store. A [`Writer`] saves states: a *base*
//! now and then, and small *deltas* in between. A [`Snapshot`] returns a state, a tensor, or a slice of a tensor. It
//! reads only the chunks that it needs from each link of the chain. The byte layouts are described in the project's
//! `spec/`.
//!
//! The whole cycle:
//!
//! ```
//! use tensorcask::blocking::{Store, maintain};
//! use tensorcask::{Blob, Dtype, Latest, Metadata, Policy, Slice, TensorView};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let url = folder.path().join("run42");
//! # let url = url.to_str().unwrap();
//! let store = Store::open(url)?; // or s3://bucket/run42, gs://, az://
//! let mut writer = store.writer(Policy::Intermittent { every: 8 })?;
//!
//! // Train: every step changes a few weights.
//! let mut weights = vec![0u8; 4 * 1000 * 16];
//! for step in 0..3u64 {
//!     weights[step as usize * 4] = 1;
//!     let state = [TensorView::new("model.w", Dtype::F32, &[1000, 16], &weights)?];
//!     let blobs = [Blob::new("rng", &b"generator state"[..])];
//!     let saved = writer.save(step, &state, &blobs, &Metadata::default())?;
//!     println!("step {step}: a {} of {} bytes", saved.kind.name(), saved.stored_bytes);
//! }
//!
//! // Recover: the newest step, or ten rows of it.
//! let snapshot = store.snapshot(Latest)?;
//! assert_eq!(snapshot.step(), 2);
//! assert_eq!(snapshot.read("model.w", &Slice::all())?.data, weights);
//! assert_eq!(snapshot.read("model.w", &Slice::rows(10..20))?.shape, [10, 16]);
//! assert!(maintain::verify(&store, &maintain::VerifyOptions::default())?.is_clean());
//! # Ok::<(), tensorcask::Error>(())
//! ```

// Modules are ordered by floor: each imports only from modules declared above it (tests/it/floors.rs). See
// ARCHITECTURE.md.

// Ground: no I/O, no format.
mod error;
mod limits;

mod byte_size;
mod duration;
pub mod parallel;
mod version;

mod tensor;

// Format: bytes only, no I/O.
pub mod wire;

mod entropy;

pub mod codec;

pub mod precision;

pub mod container;

// Store: requests, and the commit log.
mod store;

mod commit;

// State: the snapshots, chunks and ranges that rebuild a tensor.
mod chain;

// Reading and writing of snapshots.
mod reader;

mod writer;

// Maintenance.
pub mod maintain;

// Sessions of many hosts.
pub mod session;

// Import, export and the blocking API.
pub mod interchange;

pub mod blocking;

// Contract tests for other implementations. They may use any floor, and no floor uses them.
pub mod testing;

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub fn with_scalar_kernels<T>(run: impl FnOnce() -> T) -> T {
    tensorcask_kernels::with_scalar(run)
}

/// Encodes the rows of a statistics blob, which may be any rows.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub fn encode_statistics(rows: &[ChunkStatistics]) -> Result<Vec<u8>> {
    ChunkStatistics::encode(rows)
}

/// Decodes a statistics blob.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub fn decode_statistics(bytes: bytes::Bytes, limits: &Limits) -> Result<Vec<ChunkStatistics>> {
    ChunkStatistics::decode(bytes, limits)
}

/// Makes an async function return a boxed future. A caller then holds a pointer, so the body is compiled once here and
/// not again inside each caller, including callers in other crates.
pub(crate) use async_recursion::async_recursion as boxed;

pub use byte_size::human_bytes;
pub use chain::{DecisionReason, DeltaEstimate, Policy, PolicyDecision, PreviousSave, SaveTimes, StepTimes};
pub use commit::{Free, History, Retained, Retention, SnapshotRecord, SnapshotStatus};
pub use duration::parse_duration;
pub use error::{Error, ErrorKind, Result};
pub use limits::Limits;
pub use precision::{Precision, PrecisionDecision, RoundingReport, TensorRounding};
pub use reader::{
    Bf16View, Bisection, CopyReason, Inspection, Latest, LinkInfo, MatchedStep, MatchedTensor, PartPlace, Predicate, ReadCounts,
    ReadRequest, RecoveredSnapshot, SkippedSnapshot, SlicePart, Snapshot, SnapshotInfo, SnapshotWatch, StepGradient, StepSelector,
    StoreTables, StoredPart, StoredTensor, Survey, TensorChange, TensorMap, TensorPart, TensorStatistics, UpdateReport,
};
pub use store::{
    AheadUploads, Bandwidth, Environment, IoCounts, PendingRequest, Store, StoreOptions, absolute_url, is_credential, with_absolute_path,
};
pub use tensor::{Blob, ChunkGrid, Dtype, NamePatterns, Rect, RoleAndParam, RoleRules, Slice, Tensor, TensorView, infer_role};
pub use tensorcask_kernels::statistics::{ChangeStatistics, ValueStatistics};
pub use version::{Features, FormatVersion};
pub use wire::{ChunkStatistics, fact_of, is_writers_blob};
pub use writer::{
    BaseKeeping, Claim, ExistingStep, FiniteCheck, Metadata, ObjectiveReport, Rank, RankWriter, SavedSnapshot, UnchangedTensor, Writer,
    WriterOptions,
};
