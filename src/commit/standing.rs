//! Result of comparing a store with the log that a process remembers. Spec: `spec/log.md`, clause 5.6.

use crate::store::Store;
use crate::{Error, ErrorKind};

/// Result of comparing a store with a log.
#[derive(Debug)]
pub(crate) enum Standing {
    /// The store has the whole log and every object that was checked.
    Same,
    /// The store was changed from outside.
    Stale(Stale),
}

/// Difference between a store and its known log.
#[derive(Debug)]
pub(crate) struct Stale {
    /// Description of the missing or changed object; of kind `Conflict`.
    pub error: Error,
    /// Whether the log itself is gone or replaced. If false, only objects are missing.
    pub replaced: bool,
}

impl Stale {
    pub(super) fn replaced(what: impl std::fmt::Display, store: &Store) -> Self {
        let message = format!("{what}: the store was deleted, moved or replaced while this process had it open. Nothing was committed");
        Self { error: Error::new(ErrorKind::Conflict, message).object(store.url()).clause("log 5.6"), replaced: true }
    }

    pub(super) fn missing(object: &str, what: &str) -> Self {
        let message = format!("{object} {what}, but the snapshot needs it. Nothing was committed");
        Self { error: Error::new(ErrorKind::Conflict, message).object(object).clause("log 5.6"), replaced: false }
    }
}
