//! Maintenance of a store: compaction, reduction, consolidation, copies, garbage collection and examination.
//!
//! Each task is safe beside running writers and readers: it commits by the same log, and never fences a writer of the
//! store that it maintains. Copies and consolidation take over their destination. Maintenance uses the reader and, for
//! new casks, the writer's `cask_writer`; neither uses maintenance.
//!
//! | module | job |
//! |---|---|
//! | `compact`, `reduce`, `consolidate` | new casks for a snapshot: folded chain, fewer roles, no shards |
//! | `rewrite` | reads shards through the chain and writes them into casks; used by those three |
//! | `copy`, `copier` | snapshots in another store |
//! | `gc`, `mark` | deletes objects that no state of the log needs |
//! | `doctor` | examines a store and finds leftovers |

mod compact;
mod consolidate;
mod copier;
mod copy;
mod doctor;
mod gc;
mod mark;
mod reduce;
mod rewrite;

pub use compact::{CompactOptions, Compacted};
pub use copier::Copier;
pub use copy::{CopyOptions, CopyReport};
pub use doctor::{DoctorOptions, DoctorReport};
pub use gc::{Deletable, GcOptions, GcReport};
pub use reduce::Reduced;
