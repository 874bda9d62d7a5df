//! Reads a snapshot, its tensors, and slices of them.
//!
//! | module | job |
//! |---|---|
//! | `snapshot` | an opened snapshot, its tensors and slices |
//! | `open` | chooses the snapshot to open, and lists snapshots |
//! | `open_chain` | the opened chain: manifests, directories, indexes |
//! | `cask_source` | the bytes of a cask: an object, or a part of a log entry |
//! | `execute` | fetches and decodes chunks through an opened chain |
//! | `gradient` | gradients of a step, from the chunks that store them |
//! | `narrow` | reads f32 as bf16 |
//! | `stored`, `view` | places of the bytes of a tensor; maps raw chunks of local files |
//! | `windows` | divides a state into parts that are read one after the other |
//! | `since`, `changes` | updates a state to another snapshot, and tells what changed |
//! | `content`, `rounding`, `blobs`, `inspect` | digests and verification, rounding errors, blobs, and how a snapshot is stored |
//! | `tables`, `survey` | tensors and chunks as Arrow tables; the same read of many snapshots |
//! | `tensor_statistics` | statistics of whole tensors |
//! | `bisect`, `predicate` | first step whose statistics satisfy a condition |
//! | `recover`, `watch` | newest step that can be rebuilt; new snapshots as they are committed |

mod bisect;
mod blobs;
mod cask_source;
mod changes;
mod content;
mod execute;
mod gradient;
mod inspect;
mod narrow;
mod open;
mod open_chain;
mod predicate;
mod recover;
mod rounding;
mod since;
mod snapshot;
mod statistics;
mod stored;
mod survey;
mod tables;
mod tensor_statistics;
mod view;
mod watch;
mod windows;

pub use bisect::{Bisection, MatchedStep, MatchedTensor};
pub(crate) use blobs::has_blobs;
pub(crate) use cask_source::CaskSource;
pub use changes::TensorChange;
pub(crate) use content::{check_content, chunk_crcs, tensor_crcs, verify_counting};
pub(crate) use execute::{ChunkItem, ReadItem};
pub use gradient::StepGradient;
pub use inspect::{Inspection, LinkInfo, ReadCounts};
pub use narrow::Bf16View;
pub use open::{Latest, SnapshotInfo, StepSelector};
pub(crate) use open_chain::{read_directory, read_index, read_whole_index};
pub use predicate::Predicate;
pub use recover::{RecoveredSnapshot, SkippedSnapshot};
pub(crate) use rounding::shard_errors;
pub use since::UpdateReport;
pub use snapshot::{ReadRequest, Snapshot};
pub use stored::{CopyReason, PartPlace, StoredPart, StoredTensor};
pub use survey::Survey;
pub use tables::StoreTables;
pub use tensor_statistics::TensorStatistics;
pub use view::{TensorMap, TensorPart};
pub use watch::SnapshotWatch;
pub use windows::SlicePart;
