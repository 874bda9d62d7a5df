//! Opens a store for writing, and commits what a save has uploaded.

use super::base::Parent;
use super::layout::StateLayout;
use super::save::Written;
use super::*;
use crate::chain::chain_of;
use crate::commit::{Age, LogState, Summary, now_ms, refuse_features};
use crate::error::ResultExt;
use crate::reader::{STORE_FILE, Snapshot};
use crate::store::Created;
use crate::wire::{Digest, Event, Manifest, ParentRef, StoreFile};

/// Creates the store if it is not there, proves that the storage keeps its promises, and takes over.
pub(super) async fn open(store: &Store, options: WriterOptions) -> Result<Writer> {
    store.ensure_root()?;
    match store.read_store_file().await {
        Ok(found) => {
            // The cheapest proof on each opening: what is there must not be creatable.
            let bytes = found.encode()?;
            match store.create(STORE_FILE, bytes.into()).await {
                Ok(Created::Exists) => {}
                Ok(Created::Written) => {
                    return Err(Error::new(ErrorKind::UnsafeStore, "store.json could be created again: the storage ignores put-if-absent")
                        .object(store.url())
                        .clause("log 5"));
                }
                Err(e) => return Err(Error::storage(STORE_FILE, e)),
            }
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            store.probe().await?;
            let bytes = StoreFile::new(Id::random()?).encode()?;
            // Another writer may have been faster; its file is as good.
            store.create(STORE_FILE, bytes.into()).await.map_err(|e| Error::storage(STORE_FILE, e))?;
            store.read_store_file().await?;
        }
        Err(e) => return Err(e),
    }
    let mut log = Log::load(store).await?;
    let id = Id::random()?;
    log.append(id, |_| Ok(Event::Opened {})).await?;
    log.write_catalog_if_due().await;
    let base = BaseCache::new(options.base_cache);
    Ok(Writer { store: store.clone(), options, id, log, base, durable_directory: None, stopped: None })
}

impl Writer {
    /// What the next snapshot is made against, opened; none for a base. A parent that cannot be read is no reason to lose
    /// the snapshot at hand: it becomes a base, loudly.
    pub(super) async fn parent(&mut self) -> Result<Option<Parent>> {
        self.log.refresh().await?;
        check_fence(self.log.state(), self.id)?;
        let Some(id) = self.options.policy.parent(self.log.state(), self.store.limits().max_chain_depth) else { return Ok(None) };
        let snapshot = match Snapshot::load(&self.store, self.log.state(), id).await {
            Ok(snapshot) => snapshot,
            Err(error) if is_damage(&error) => {
                tracing::warn!(%error, "the snapshot that the next delta needs cannot be read; saving a base instead");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        refuse_features(snapshot.manifest().may_ignore())?;
        if snapshot.newest().directory.features().may_ignore != 0 {
            return Err(Error::unsupported("the store uses a directory with features that this version cannot write; upgrade tensorcask")
                .clause("README 4"));
        }
        Ok(Some(Parent { snapshot }))
    }

    /// Whether the next delta will be made against the snapshot that is being saved.
    pub(super) fn becomes_base(&self, is_base: bool) -> bool {
        match self.options.policy {
            Policy::Full => false,
            Policy::Consecutive => true,
            Policy::OneShot => is_base,
            Policy::Intermittent { every } => is_base && every > 1,
        }
    }

    /// Writes directory and manifest, then commits the entry that makes them exist.
    pub(super) async fn commit(
        &mut self,
        step: u64,
        layout: &StateLayout<'_>,
        parent: Option<&Parent>,
        written: &Written,
        metadata: &Metadata,
        age: Age,
    ) -> Result<Saved> {
        let directory = layout.directory()?;
        let digest = Digest::of(&directory);
        let parent_ref =
            parent.map(|parent| ParentRef { snapshot: parent.snapshot.record().id, content: parent.snapshot.manifest().content.clone() });
        let mut manifest = Manifest::new(Id::random()?, step, parent_ref, digest);
        manifest.content = written.content.clone();
        manifest.casks = written.casks.clone();
        manifest.tensor_bytes = layout.tensor_bytes;
        manifest.time_ms = now_ms();
        manifest.metadata = metadata.file.clone();
        manifest.user = metadata.user.clone();

        let (bytes, manifest_digest) = manifest.encode()?;
        // What readers would refuse (a limit, user metadata nested too deep) must not be committed.
        Manifest::decode(&bytes, self.store.limits())
            .map_err(|e| Error::invalid(format!("the manifest would not be readable: {}", e.message())).source(e))?;
        if self.durable_directory != Some(digest) {
            self.store.put_content_addressed(&format!("directories/{digest}"), directory.into()).await?;
            self.durable_directory = Some(digest);
        }
        self.store.create_unique(&manifest.path(), bytes.into()).await?;

        let parent_id = manifest.parent.as_ref().map(|parent| parent.snapshot);
        let (writer, limit, floor) = (self.id, self.store.limits().max_chain_depth, self.options.age_floor);
        let sequence = self
            .log
            .append(writer, |state| {
                check_fence(state, writer)?;
                age.check(floor)?;
                if let Some(parent) = parent_id {
                    chain_of(state, parent, limit).map_err(|e| {
                        Error::new(ErrorKind::Conflict, format!("the parent can no longer be built upon: {}", e.message())).source(e)
                    })?;
                }
                Ok(Event::Added { snapshot: manifest.id, step, parent: parent_id, manifest: manifest_digest })
            })
            .await
            .in_object(manifest.path())?;
        self.log.note_summary(manifest.id, Summary::of(&manifest));
        self.log.write_catalog_if_due().await;
        tracing::info!(step, snapshot = %manifest.id, kind = manifest.kind.name(), bytes = manifest.stored_bytes(), "committed");
        Ok(Saved {
            id: manifest.id,
            step,
            kind: manifest.kind,
            parent: parent_id,
            sequence,
            tensor_bytes: manifest.tensor_bytes,
            stored_bytes: manifest.stored_bytes(),
            chunks: written.chunks.clone(),
        })
    }
}

/// Whether an error says that stored objects are unusable, and not that the storage fails now.
pub(super) fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::LimitExceeded | ErrorKind::Unsupported)
}

/// A writer is fenced by another's `opened` or `added` after its own, and by nothing else.
fn check_fence(state: &LogState, writer: Id) -> Result<()> {
    match state.last_writer {
        Some(last) if last.writer != writer => {
            let at = state.newest_step().map_or("before any step".to_owned(), |step| format!("at step {step}"));
            Err(Error::new(
                ErrorKind::Fenced,
                format!("another job took over {at} (log entry {}); this one must stop writing", last.sequence),
            )
            .clause("log 5"))
        }
        _ => Ok(()),
    }
}
