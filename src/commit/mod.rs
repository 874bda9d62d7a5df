//! The log: commits, fencing of writers, and the state of a store. Spec: `spec/log.md`.

mod age;
mod catalog;
mod collect;
mod confirm;
mod entries;
mod finite_marks;
mod history;
mod known_log;
mod leadership;
mod log;
mod lost_end;
mod manifest;
mod need;
mod owner;
mod retention;
mod retention_rule;
mod standing;
mod state;
mod store_file;
mod whole_log;

pub(crate) use age::{Age, DEFAULT_AGE_FLOOR, now_ms};
pub(crate) use catalog::{CATALOG_INTERVAL, Catalog};
pub(crate) use collect::{Freeing, is_root, unneeded};
pub(crate) use finite_marks::FiniteMarks;
pub use history::History;
pub use known_log::{ContinuedSession, KnownLog};
pub use leadership::{AttemptStart, LeaderRefusal, LeaderState, Leadership};
pub(crate) use log::{Appended, Log, MOST_LOOKS, load_from, refuse_features, replace_from};
pub(crate) use lost_end::{UnnamedManifest, find_lost_end, lost_end, newer_than_log};
pub(crate) use manifest::{read_inline, read_manifest, read_manifest_bytes};
pub(crate) use need::Need;
pub(crate) use owner::Owner;
pub use retention::Retained;
pub(crate) use retention::{decide_retention, forget_among, forget_unwanted, live_step};
pub(crate) use retention_rule::Decision;
pub use retention_rule::{Free, Retention};
pub(crate) use standing::{Stale, Standing};
pub(crate) use state::{LastWriter, LogState, ManifestPlace, Summary};
pub use state::{SnapshotRecord, SnapshotStatus};
pub(crate) use store_file::{check_root, has_store, read_store_file};
pub(crate) use whole_log::{
    Contents, changed_log, check_log_ends, load_complete_log, load_log, refuse_lost_log, store_file_of, without_store_file,
};
