//! Source of the bytes of a cask: an object of its own, or the log entry that holds the cask.

use std::ops::Range;

use bytes::Bytes;

use crate::chain::Link;
use crate::limits::to_usize;
use crate::wire::{CaskRef, LogEntry};
use crate::{Error, Result, Store};

/// Bytes of one cask.
#[derive(Debug, Clone)]
pub(crate) enum CaskSource {
    /// The cask is an object.
    Object { store: Store, path: String },
    /// The cask lies in a log entry that was read.
    Inline { path: String, offset: u64, bytes: Bytes },
}

impl CaskSource {
    /// Source of a cask that is an object.
    pub(crate) fn object(store: &Store, cask: &CaskRef) -> Self {
        Self::Object { store: store.clone(), path: cask.path() }
    }

    /// Source of cask `cask` of a link.
    pub(crate) fn of_link(store: &Store, link: &Link, cask: usize) -> Self {
        let inline = link.inline.as_ref().and_then(|inline| Some((inline.casks.get(cask)?, inline.offsets.get(cask)?)));
        match inline {
            Some((bytes, &offset)) => Self::Inline { path: LogEntry::path_of(link.record.sequence), offset, bytes: bytes.clone() },
            None => Self::object(store, &link.manifest.casks[cask]),
        }
    }

    /// Path of the object that holds the cask.
    pub(crate) fn path(&self) -> &str {
        match self {
            Self::Object { path, .. } | Self::Inline { path, .. } => path,
        }
    }

    /// Whether both are the same cask. A log entry may hold several.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let offset = |source: &Self| match source {
            Self::Object { .. } => None,
            Self::Inline { offset, .. } => Some(*offset),
        };
        self.path() == other.path() && offset(self) == offset(other)
    }

    /// The whole cask, if it was read already.
    pub(crate) fn whole(&self) -> Option<&Bytes> {
        match self {
            Self::Object { .. } => None,
            Self::Inline { bytes, .. } => Some(bytes),
        }
    }

    /// Reads one range of the cask.
    pub(crate) async fn get_range(&self, range: Range<u64>) -> Result<Bytes> {
        match self {
            Self::Object { store, path } => store.objects().get_range(path, range).await,
            Self::Inline { bytes, .. } => slice_of(bytes, &range).map_err(|e| self.locate(e)),
        }
    }

    /// Reads ranges of the cask.
    pub(crate) async fn get_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        match self {
            Self::Object { store, path } => store.objects().get_ranges(path, ranges).await,
            Self::Inline { bytes, .. } => ranges.iter().map(|range| slice_of(bytes, range).map_err(|e| self.locate(e))).collect(),
        }
    }

    /// Names the object in an error whose offset, if any, counts from the beginning of the cask.
    pub(crate) fn locate(&self, error: Error) -> Error {
        match self {
            // An error that names its object has been located before.
            _ if error.object_name().is_some() => error,
            Self::Object { path, .. } => error.object(path),
            Self::Inline { path, offset, .. } => error.within(*offset).object(path),
        }
    }
}

/// Returns a range of a cask that was read whole.
pub(super) fn slice_of(whole: &Bytes, range: &Range<u64>) -> Result<Bytes> {
    let start = to_usize(range.start, "a page")?;
    let end = to_usize(range.end, "a page")?;
    match start <= end && end <= whole.len() {
        true => Ok(whole.slice(start..end)),
        false => Err(Error::corrupt(format!("has {} bytes, but {end} were written: truncated", whole.len())).offset(range.start)),
    }
}
