//! The parent of a delta: the snapshot that a delta is made against, opened.
//!
//! A parent that cannot be read must not cost the state at hand: the save then writes a base, and says so in the log
//! output.

use crate::commit::{LogState, refuse_features};
use crate::reader::{ChunkItem, Snapshot};
use crate::wire::{Id, ParentRef};
use crate::{Error, Result, Store, TensorView, boxed};

/// The parent of the snapshot that is being saved.
#[derive(Debug)]
pub(crate) struct Parent {
    pub snapshot: Snapshot,
}

impl Parent {
    /// Opens a snapshot as a parent; `None`, with a warning, if it is damaged. Refuses a snapshot with features that
    /// this version cannot write.
    #[boxed]
    pub(super) async fn open(store: &Store, state: &LogState, id: Id) -> Result<Option<Self>> {
        let snapshot = match Snapshot::load(store, state, id).await {
            Ok(snapshot) => snapshot,
            Err(error) if error.is_damage() => {
                tracing::warn!(%error, "the parent of the next delta cannot be read; saving a base instead");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        refuse_features(snapshot.manifest().may_ignore())?;
        if snapshot.chain.newest().directory.features().may_ignore != 0 {
            return Err(Error::unsupported("the store uses a directory with features that this version cannot write; upgrade tensorcask")
                .clause("README 4"));
        }
        Ok(Some(Self { snapshot }))
    }

    /// Id and content digests, by which manifests and receipts name a parent.
    pub(super) fn reference(&self) -> ParentRef {
        ParentRef { snapshot: self.snapshot.record().id, content: self.snapshot.manifest().content.clone() }
    }

    /// Number of the tensor in the parent's directory, if the parent has this shard with the same dtype and global
    /// shape. Only then is a delta possible.
    pub(super) fn find(&self, view: &TensorView<'_>) -> Option<usize> {
        let directory = &self.snapshot.chain.newest().directory;
        let tensor = directory.find(view.name())?;
        let same = directory.dtype(tensor) == view.dtype() && directory.shape(tensor) == view.shape();
        directory.find_shard(tensor, view.rect()).filter(|_| same).map(|_| tensor)
    }

    /// Reads chunks back from the store.
    #[boxed]
    pub(super) async fn read<'i>(&'i self, chunks: Vec<ChunkItem<'i>>) -> Result<()> {
        self.snapshot.chain.read_chunks(chunks).await.map_err(|e| {
            let step = self.snapshot.step();
            Error::new(e.kind(), format!("the base at step {step} cannot be read back, so no delta can be made: {e}")).source(e)
        })
    }
}
