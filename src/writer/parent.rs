//! The parent of a delta: the snapshot that a delta is made against, opened.
//!
//! A parent that cannot be read must not cost the state at hand: the save then writes a base, and says so in the log
//! output.

use crate::chain::Link;
use crate::codec::UNKNOWN_CODEC;
use crate::commit::LogState;
use crate::reader::{ChunkItem, Snapshot};
use crate::wire::{Id, ParentRef};
use crate::{Error, ErrorKind, Result, Store, TensorView, boxed};

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
            Err(error) if Self::is_dispensable(&error) => {
                tracing::warn!(%error, "the parent of the next delta cannot be read; saving a base instead");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        snapshot.chain.links().try_for_each(Link::refuse_unwritable)?;
        Ok(Some(Self { snapshot }))
    }

    /// The base of the parent's chain; `None` if the parent is a base itself.
    pub(super) fn last_base(&self) -> Option<Self> {
        let snapshot = self.snapshot.base_of_chain()?;
        Some(Self { snapshot })
    }

    /// Stored size of the parent's chain, in bytes.
    pub(super) fn chain_bytes(&self) -> u64 {
        self.snapshot.chain.links().map(|link| link.manifest.stored_bytes()).fold(0, u64::saturating_add)
    }

    /// Whether a save may write a base after this error of its parent: the parent is damaged, or beyond the limits of this
    /// writer, or encoded by a codec that this program lacks. A parent of a newer version ends the save instead: this version does
    /// not know what it must not do in such a store.
    pub(crate) fn is_dispensable(error: &Error) -> bool {
        error.is_damage() || error.kind() == ErrorKind::LimitExceeded || error.clause_name() == Some(UNKNOWN_CODEC)
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
            let error = Error::new(e.kind(), format!("the base at step {step} cannot be read back, so no delta can be made: {e}"));
            match e.clause_name() {
                Some(clause) => error.clause(clause).source(e),
                None => error.source(e),
            }
        })
    }
}
