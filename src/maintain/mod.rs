//! Maintenance of a store: verification, advice, compaction, reduction, consolidation, copies, garbage collection and
//! examination. Each task is a function of a store and options.
//!
//! Each task is safe beside running writers and readers: it commits by the same log, and never fences a writer of the
//! store that it maintains. Copies and consolidation take over their destination.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
//! use tensorcask::maintain::{self, CompactOptions, GcOptions, VerifyOptions};
//! use tensorcask::{Dtype, Metadata, Policy, Store, TensorView};
//! let store = Store::open("memory://maintain-example")?;
//! let mut writer = store.writer(Policy::Consecutive).await?;
//! for step in 1..=3 {
//!     writer.save(step, &[TensorView::new("w", Dtype::U8, &[2], &[1, 2])?], &[], &Metadata::default()).await?;
//! }
//! assert_eq!(maintain::compact(&store, 3, &CompactOptions::default()).await?.links, 3);
//! assert!(maintain::gc(&store, &GcOptions::default()).await?.deleted.is_empty());
//! assert!(maintain::verify(&store, &VerifyOptions::default()).await?.is_clean());
//! # Ok(()) }
//! ```
//!
//! Maintenance uses the reader and, for new casks, the writer's `cask_writer`; neither uses maintenance.
//!
//! | module | job |
//! |---|---|
//! | `compact`, `reduce`, `consolidate` | new casks for a snapshot: folded chain, fewer roles, no shards |
//! | `rewrite` | reads shards through the chain and writes them into casks; used by those three |
//! | `retainer` | forgets and reduces steps, after each save or once |
//! | `copy`, `copier`, `copy_plan` | snapshots in another store |
//! | `fork` | a new run that begins with a step of another one |
//! | `cask_check`, `cask_copy` | checks the bytes of one cask; copies one cask |
//! | `gc`, `mark` | deletes objects that no state of the log needs |
//! | `verify` | compares every object, page and chunk with its checksum |
//! | `advise`, `interval` | how often to save, and how many saves to keep |
//! | `doctor` | examines a store and finds leftovers |

mod advise;
mod cask_check;
mod cask_copy;
mod compact;
mod consolidate;
mod copier;
mod copy;
mod copy_plan;
mod doctor;
mod fork;
mod gc;
mod interval;
mod mark;
mod reduce;
mod retainer;
mod rewrite;
mod verify;

pub use advise::{Advice, Origin, RunTimes, TimeEstimate, TimeOverrides, advise, measure, measured_restore};
pub(crate) use cask_copy::{CopyFailure, copy_checked_cask, present};
pub use compact::{Compacted, compact};
pub use consolidate::consolidate;
pub use copier::Copier;
pub use copy::{copy, create_for_run_of};
pub use copy_plan::{CopyOptions, CopyReport};
pub use doctor::{DoctorOptions, DoctorReport, doctor, is_interrupted_write};
pub use fork::{ForkOptions, fork};
pub use gc::{Deletable, GcOptions, GcReport, gc};
pub use interval::{daly_interval, lost_share, young_interval};
pub use reduce::{Reduced, keep_roles};
pub use retainer::{Retainer, RetentionReport, apply_retention, retain_roles};
pub use rewrite::CompactOptions;
pub(crate) use verify::verify_cask;
pub use verify::{Problem, VerifyDepth, VerifyOptions, VerifyReport, verify};

pub use crate::store::ProbeReport;

/// Races creates on scratch objects. Refuses a storage on which a name can be created twice, because two writers could
/// then overwrite each other's commits there.
pub async fn probe(store: &crate::Store) -> crate::Result<ProbeReport> {
    crate::store::probe(store.objects()).await
}

/// Races creates on scratch objects between two ways to one storage, such as the mounts of two hosts or two servers before one
/// bucket. Refuses them if a name can be created through both, or if one does not show what was written through the other.
///
/// The two need no store. The folder of the first is made for the test, if it is missing.
pub async fn probe_pair(store: &crate::Store, second: &crate::Store) -> crate::Result<ProbeReport> {
    crate::store::probe_pair(store.objects(), second.objects()).await
}
