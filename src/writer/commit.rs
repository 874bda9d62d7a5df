//! Opens a store for writing, and commits what a save has uploaded.

use super::base::Parent;
use super::*;
use crate::boxed;
use crate::chain::{Reason, chain_of};
use crate::commit::{Age, LogState, Summary, now_ms, refuse_features};
use crate::error::ResultExt;
use crate::reader::{STORE_FILE, Snapshot};
use crate::store::Created;
use crate::wire::{CaskRef, Digest, Event, Manifest, ParentRef, StoreFile};

/// Creates the store if it is not there, proves that the storage keeps its promises, and takes over.
#[boxed]
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
            let bytes = bytes::Bytes::from(bytes);
            for attempt in 0..3 {
                // Another writer may have been faster; its file is as good. Or a server saw a race that nobody won.
                store.create(STORE_FILE, bytes.clone()).await.map_err(|e| Error::storage(STORE_FILE, e))?;
                match store.read_store_file().await {
                    Err(e) if e.kind() == ErrorKind::NotFound && attempt < 2 => {}
                    found => {
                        found?;
                        break;
                    }
                }
            }
        }
        Err(e) => return Err(e),
    }
    let mut log = Log::load(store).await?;
    let id = Id::random()?;
    log.append(id, |_| Ok(Event::Opened {})).await?;
    log.write_catalog_if_due().await;
    Ok(Writer { saver: Saver::new(store, options), id, log, durable_directory: None, stopped: None })
}

impl Writer {
    /// What a snapshot of `step` is made against, opened; none for a base.
    #[boxed]
    pub(super) async fn parent(&mut self, step: u64) -> Result<(Option<Parent>, Decision)> {
        self.log.refresh().await?;
        check_fence(self.log.state(), self.id)?;
        let store = &self.saver.store;
        let (parent, mut decision) = self.saver.options.policy.decide(self.log.state(), step, store.limits().max_chain_depth);
        let Some(id) = parent else { return Ok((None, decision)) };
        let parent = open_parent(store, self.log.state(), id).await?;
        if parent.is_none() {
            decision.reason = Reason::BrokenParent;
        }
        Ok((parent, decision))
    }

    /// Writes directory and manifest, then commits the entry that makes them exist.
    #[boxed]
    pub(crate) async fn commit(&mut self, step: u64, parent: Option<&Parent>, prepared: Prepared, metadata: &Metadata) -> Result<Saved> {
        let Prepared { directory, tensor_bytes, casks, content, chunks, errors, decision, age } = prepared;
        let store = self.saver.store.clone();
        let digest = Digest::of(&directory);
        let parent_ref =
            parent.map(|parent| ParentRef { snapshot: parent.snapshot.record().id, content: parent.snapshot.manifest().content.clone() });
        let mut manifest = Manifest::new(Id::random()?, step, parent_ref, digest);
        manifest.content = content;
        manifest.casks = casks;
        manifest.tensor_bytes = tensor_bytes;
        manifest.time_ms = now_ms();
        manifest.metadata = metadata.file.clone();
        manifest.user = metadata.user.clone();
        if self.saver.options.policy == Policy::Adaptive {
            let value = serde_json::to_value(decision).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
            manifest.user.insert(Decision::KEY.to_owned(), value);
        }

        let (bytes, manifest_digest) = manifest.encode()?;
        // What readers would refuse (a limit, user metadata nested too deep) must not be committed.
        Manifest::decode(&bytes, store.limits())
            .map_err(|e| Error::invalid(format!("the manifest would not be readable: {}", e.message())).source(e))?;
        if self.durable_directory != Some(digest) {
            store.put_content_addressed(&format!("directories/{digest}"), directory.into()).await?;
            self.durable_directory = Some(digest);
        }
        store.create_unique(&manifest.path(), bytes.into()).await?;

        let parent_id = manifest.parent.as_ref().map(|parent| parent.snapshot);
        let (writer, limit, floor) = (self.id, store.limits().max_chain_depth, self.saver.options.age_floor);
        let sequence = self
            .log
            .append(writer, |state| {
                check_fence(state, writer)?;
                age.check(floor)?;
                if let Some(parent) = parent_id {
                    let chain = chain_of(state, parent, limit).map_err(|e| {
                        Error::new(ErrorKind::Conflict, format!("the parent can no longer be built upon: {}", e.message())).source(e)
                    })?;
                    if let Some(link) = chain.iter().find(|link| link.roles.is_some()) {
                        let message = format!("the parent can no longer be built upon: step {} was reduced to some roles", link.step);
                        return Err(Error::new(ErrorKind::Conflict, message));
                    }
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
            chunks,
            errors,
            decision,
        })
    }
}

/// What a save has made ready to be committed.
pub(crate) struct Prepared {
    pub directory: Vec<u8>,
    pub tensor_bytes: u64,
    pub casks: Vec<CaskRef>,
    pub content: BTreeMap<String, Digest>,
    pub chunks: BTreeMap<String, u64>,
    /// Errors of all that was rounded.
    pub errors: Option<crate::ErrorReport>,
    pub decision: Decision,
    /// Of the oldest of the casks.
    pub age: Age,
}

/// The parent of a delta, opened. One that cannot be read is no reason to lose the snapshot at hand: none, loudly.
#[boxed]
pub(super) async fn open_parent(store: &Store, state: &LogState, id: Id) -> Result<Option<Parent>> {
    let snapshot = match Snapshot::load(store, state, id).await {
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

/// Whether an error says that stored objects are unusable, and not that the storage fails now.
pub(super) fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::LimitExceeded | ErrorKind::Unsupported)
}

/// A writer is fenced by another's `opened` or `added` after its own, and by nothing else.
pub(super) fn check_fence(state: &LogState, writer: Id) -> Result<()> {
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
