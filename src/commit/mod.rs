//! The log: commits, fencing of writers, and the state of a store. Spec: `spec/log.md`.

mod age;
mod catalog;
mod collect;
mod confirm;
mod entries;
mod exchange;
mod finite_marks;
mod history;
mod known_log;
mod leadership;
mod log;
mod manifest;
mod owner;
mod rank_set;
mod receipt_proof;
mod retention;
mod retention_rule;
mod session_exchange;
mod session_log;
mod state;
mod store_file;
mod whole_log;

pub(crate) use age::{Age, DEFAULT_AGE_FLOOR};
pub(crate) use catalog::{CATALOG_INTERVAL, Catalog};
pub(crate) use collect::{Freeing, is_root, unneeded};
pub(crate) use confirm::{Need, Stale, Standing};
pub use exchange::{RankExchange, RankOffer};
pub(crate) use finite_marks::FiniteMarks;
use finite_marks::LastGood;
pub use history::History;
pub use known_log::{ContinuedSession, KnownLog};
pub use leadership::{AttemptStart, LeaderRefusal, LeaderState, Leadership};
pub(crate) use log::{Appended, Log, MOST_LOOKS, load_from, refuse_features, replace_from};
pub(crate) use manifest::{read_inline, read_manifest, read_manifest_bytes};
pub(crate) use owner::Owner;
pub use rank_set::RankSet;
pub use receipt_proof::{MAX_RECEIPT_PROOF_BYTES, ReceiptProof, receipt_proof_path};
pub use retention::Retained;
pub(crate) use retention::{forget_among, forget_unwanted, live_step};
pub(crate) use retention_rule::Decision;
pub use retention_rule::{Free, Retention};
pub use session_exchange::{SessionExchange, SessionSurvey};
pub use session_log::SessionLog;
pub(crate) use state::{LastWriter, LogState, ManifestPlace, Summary};
pub use state::{SnapshotRecord, SnapshotStatus};
pub(crate) use store_file::{check_root, has_store, read_store_file};
pub(crate) use whole_log::{Contents, check_log_ends, load_complete_log, load_log, refuse_lost_log, store_file_of, without_store_file};

/// Returns milliseconds since 1970 by this machine's clock, or 0 for an earlier time.
pub(crate) fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |elapsed| elapsed.as_millis() as u64)
}
