//! The state that the next delta is made against: kept in memory, or read back.

use std::collections::HashMap;

use super::BaseKeeping;
use crate::reader::{ChunkItem, Snapshot};
use crate::tensor::Rect;
use crate::wire::Id;
use crate::{Error, Result, TensorView};

/// Name of the tensor and position of the shard.
pub(super) type ShardKey = (String, Rect);

/// A decoded shard, with the CRC-32 of each chunk: memory may be damaged while it waits.
#[derive(Debug)]
pub(super) struct KeptShard {
    pub bytes: Vec<u8>,
    pub crcs: Vec<u32>,
}

/// Decoded shards of one snapshot.
#[derive(Debug, Default)]
pub(super) struct BaseCache {
    keeping: BaseKeeping,
    snapshot: Option<Id>,
    shards: HashMap<ShardKey, KeptShard>,
}

impl BaseCache {
    pub(super) fn new(keeping: BaseKeeping) -> Self {
        Self { keeping, ..Self::default() }
    }

    /// A shard of `snapshot`, if it is kept.
    pub(super) fn get(&self, snapshot: Id, key: &ShardKey) -> Option<&KeptShard> {
        if self.snapshot == Some(snapshot) { self.shards.get(key) } else { None }
    }

    /// Whether shards of a new snapshot are to be kept.
    pub(super) fn keeps(&self) -> bool {
        self.keeping == BaseKeeping::Memory
    }

    /// Drops a shard that is not needed again, so that old and new base together take little more than one.
    pub(super) fn release(&mut self, key: &ShardKey) {
        self.shards.remove(key);
    }

    /// Forgets everything: the next delta reads its base back.
    pub(super) fn clear(&mut self) {
        self.snapshot = None;
        self.shards = HashMap::new();
    }

    /// Replaces what is kept. Called only when the snapshot is known to be committed.
    pub(super) fn promote(&mut self, snapshot: Id, shards: HashMap<ShardKey, KeptShard>) {
        self.snapshot = Some(snapshot);
        self.shards = shards;
    }
}

/// The parent of the snapshot that is being saved.
#[derive(Debug)]
pub(super) struct Parent {
    pub snapshot: Snapshot,
}

impl Parent {
    /// The tensor, if the parent has this very shard, of this type and global shape; only then a delta can be made.
    pub(super) fn find(&self, view: &TensorView<'_>) -> Option<usize> {
        let directory = &self.snapshot.newest().directory;
        let tensor = directory.find(view.name())?;
        let same = directory.dtype(tensor) == view.dtype() && directory.shape(tensor) == view.shape();
        directory.find_shard(tensor, view.rect()).filter(|_| same).map(|_| tensor)
    }

    /// Reads chunks back from the store.
    pub(super) async fn read(&self, wanted: Vec<ChunkItem<'_>>) -> Result<()> {
        self.snapshot.read_chunks(wanted).await.map_err(|e| {
            let step = self.snapshot.step();
            Error::new(e.kind(), format!("the base at step {step} cannot be read back, so no delta can be made: {e}")).source(e)
        })
    }
}
