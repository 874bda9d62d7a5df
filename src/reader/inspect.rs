//! How a snapshot is stored: its chain, its casks, its chunks, and how much of them was read.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Snapshot;
use super::content::check_content;
use super::execute::chunk_count;
use crate::chain::{Link, PolicyDecision, SaveTimes};
use crate::commit::SnapshotRecord;
use crate::container::CaskIndex;
use crate::precision::PrecisionDecision;
use crate::wire::SnapshotKind;
use crate::{Result, Slice};

/// View of how a snapshot is stored. [`Snapshot::inspect`] returns it.
///
/// ```
/// use tensorcask::{Dtype, Latest, Metadata, Policy, Slice, TensorView, blocking::Store};
/// let store = Store::open("memory://inspect-example")?;
/// let mut writer = store.writer(Policy::Consecutive)?;
/// for step in [1u8, 2] {
///     writer.save(step.into(), &[TensorView::new("w", Dtype::U8, &[4], &[step; 4])?], &[], &Metadata::default())?;
/// }
/// let snapshot = store.snapshot(Latest)?;
/// assert_eq!(snapshot.inspect().chain().len(), 2);
/// assert_eq!(snapshot.inspect().chunks_of("w", &Slice::all())?, 1);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Inspection<'s> {
    pub(super) snapshot: &'s Snapshot,
}

/// Counts of the tensor data that a snapshot has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadCounts {
    /// Number of chunks rebuilt.
    pub chunks: u64,
    /// Number of pages read for these chunks, over all links of the chain.
    pub pages: u64,
    /// Number of bytes in these pages.
    pub page_bytes: u64,
}

/// A snapshot of a chain, as shown in listings.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkInfo {
    /// Record of the snapshot in the log.
    pub record: SnapshotRecord,
    /// Whether the snapshot is a base or a delta.
    pub kind: SnapshotKind,
    /// Bytes of its casks.
    pub stored_bytes: u64,
    /// Number of its casks.
    pub casks: usize,
}

impl Snapshot {
    /// Returns a view of how the snapshot is stored. Sends no request.
    pub fn inspect(&self) -> Inspection<'_> {
        Inspection { snapshot: self }
    }
}

impl Inspection<'_> {
    /// Returns why the adaptive policy chose a base or a delta. `None` if another policy saved the snapshot.
    pub fn decision(&self) -> Option<PolicyDecision> {
        serde_json::from_value(self.snapshot.user().get(PolicyDecision::KEY)?.clone()).ok()
    }

    /// Returns which profile the precision `auto` chose, and why. `None` if the snapshot was saved with another precision.
    pub fn precision(&self) -> Option<PrecisionDecision> {
        PrecisionDecision::of(self.snapshot.user())
    }

    /// Returns how long the save took, as far as the snapshot records it. Its `previous` is about an earlier save.
    pub fn times(&self) -> Option<SaveTimes> {
        SaveTimes::of(self.snapshot.user())
    }

    /// Returns the chain, newest first.
    pub fn chain(&self) -> Vec<LinkInfo> {
        self.snapshot
            .chain
            .links
            .iter()
            .map(|link| {
                let Link { record, manifest, .. } = link.as_ref();
                LinkInfo { record: record.clone(), kind: manifest.kind, stored_bytes: manifest.stored_bytes(), casks: manifest.casks.len() }
            })
            .collect()
    }

    /// Returns the number of chunks that a slice touches. Each takes at most one request.
    pub fn chunks_of(&self, name: &str, slice: &Slice) -> Result<u64> {
        let tensor = self.snapshot.chain.find(name)?;
        let rect = slice.of(&self.snapshot.chain.newest().directory.shape(tensor)).map_err(|e| e.tensor(name))?;
        chunk_count(&self.snapshot.chain.newest().directory, tensor, &rect)
    }

    /// Returns how much tensor data this snapshot and its clones have read.
    pub fn read_counts(&self) -> ReadCounts {
        ReadCounts {
            chunks: self.snapshot.chain.counts.chunks.load(Ordering::Relaxed),
            pages: self.snapshot.chain.counts.pages.load(Ordering::Relaxed),
            page_bytes: self.snapshot.chain.counts.page_bytes.load(Ordering::Relaxed),
        }
    }

    /// Returns the slot and the index of each cask that the snapshot wrote. Reads no tensor bytes.
    pub async fn indexes(&self) -> Result<Vec<(u32, Arc<CaskIndex>)>> {
        let link = self.snapshot.chain.newest();
        let all: Vec<(usize, usize)> = (0..link.manifest.casks.len()).map(|cask| (0, cask)).collect();
        self.snapshot.chain.load_indexes(&all).await?;
        self.snapshot.chain.load_all_parts(0).await?;
        Ok(link.manifest.casks.iter().enumerate().filter_map(|(at, cask)| Some((cask.slot, link.index(at)?.clone()))).collect())
    }

    /// Compares the chunk checksums in the chain's indexes with the content digests in the manifest. Reads no page.
    pub async fn check_content(&self) -> Result<()> {
        check_content(&self.snapshot.chain).await
    }
}
