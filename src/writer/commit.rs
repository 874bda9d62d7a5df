//! Opens a store for writing, and commits what a save has uploaded.

use super::base::Parent;
use super::hints::Hints;
use super::*;
use crate::chain::{Reason, chain_of};
use crate::commit::{Age, Appended, LogState, Need, Stale, Standing, Summary, now_ms, refuse_features};
use crate::error::ResultExt;
use crate::reader::Snapshot;
use crate::store::Created;
use crate::wire::STORE_FILE;
use crate::wire::{CaskRef, Digest, Event, Manifest, ParentRef, StoreFile};
use crate::{Blob, boxed};

/// Creates the store if it is not there, proves that the storage keeps its promises, and takes over.
#[boxed]
pub(super) async fn open(store: &Store, options: WriterOptions) -> Result<Writer> {
    let id = match options.id {
        Some(id) => id,
        None => Id::random()?,
    };
    let mut log = open_log(store).await?;
    log.append(id, |_| Ok(Event::Opened {})).await?;
    log.write_catalog_if_due().await;
    let predecessors = log.state().writers.clone();
    Ok(Writer { saver: Saver::new(store, options), id, log, predecessors, durable_directory: None, stopped: None })
}

/// Reads the log of a store that is going to be written to; creates `store.json` if it is not there.
#[boxed]
async fn open_log(store: &Store) -> Result<Log> {
    store.ensure_root()?;
    match store.read_store_file().await {
        Ok(found) => {
            // The cheapest proof on each opening: what is there must not be creatable.
            let created = store.create(STORE_FILE, found.encode()?.into()).await.map_err(|e| Error::storage(STORE_FILE, e))?;
            if let Created::Written = created {
                // Either the storage ignores the condition, which the probe finds, or the file was removed between the two requests.
                store.probe().await?;
                tracing::warn!(store = store.url(), "store.json was removed while the store was being opened; it was created again");
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
    Log::load_whole(store).await
}

impl Writer {
    /// What a snapshot of `step` is made against, opened; none for a base.
    #[boxed]
    pub(super) async fn parent(&mut self, step: u64) -> Result<(Option<Parent>, Decision)> {
        let (parent, mut decision) = self.decide(step).await?;
        let Some(id) = parent else { return Ok((None, decision)) };
        let parent = open_parent(&self.saver.store, self.log.state(), id).await?;
        if parent.is_none() {
            decision.reason = Reason::BrokenParent;
        }
        Ok((parent, decision))
    }

    /// What the policy says of a snapshot of `step`, by the log as it is now. In a store that was replaced, nothing is built upon.
    #[boxed]
    pub(super) async fn decide(&mut self, step: u64) -> Result<(Option<Id>, Decision)> {
        let replaced = match self.log.catch_up().await? {
            Standing::Same => false,
            Standing::Stale(stale) => {
                self.begin_anew(&stale.error).await?;
                true
            }
        };
        check_fence(self.log.state(), self.id)?;
        let (parent, mut decision) = self.saver.options.policy.decide(self.log.state(), step, self.saver.store.limits().max_chain_depth);
        if replaced && parent.is_some() {
            decision.reason = Reason::BrokenParent;
        }
        Ok((parent.filter(|_| !replaced), decision))
    }

    /// Goes on in a store that was deleted or replaced since this writer's last commit: creates it if nothing is there, and takes over what is
    /// there if no job that this writer does not know has written to it.
    #[boxed]
    pub(super) async fn begin_anew(&mut self, why: &Error) -> Result<()> {
        tracing::warn!(error = %why, "beginning anew with a base");
        let store = self.saver.store.clone();
        self.saver.base.clear();
        self.saver.hints = Hints::default();
        self.durable_directory = None;
        let mut log = open_log(&store).await?;
        let (id, predecessors) = (self.id, &self.predecessors);
        let opened = log.append(id, |state| match state.last_writer {
            Some(last) if last.writer != id && !predecessors.contains(&last.writer) => Err(Error::new(
                ErrorKind::Fenced,
                format!(
                    "the store was deleted or replaced since this job last saved, and writer {} writes to what is there now (log entry {}). \
                     Stop one of the two jobs; to go on with this one, open the store again",
                    last.writer, last.sequence
                ),
            )
            .object(store.url())
            .clause("log 5.5")),
            _ => Ok(Event::Opened {}),
        });
        opened.await?;
        log.write_catalog_if_due().await;
        self.predecessors.extend(&log.state().writers);
        self.log = log;
        Ok(())
    }

    /// Refuses to replace a live step by another content, unless that was asked for; the snapshot that may be replaced, if there is one.
    #[boxed]
    pub(super) async fn replaceable(
        &self,
        step: u64,
        content: &BTreeMap<String, Digest>,
        blobs: Option<&[&Blob<'_>]>,
    ) -> Result<Option<Id>> {
        let Some(existing) = self.log.state().at_step(step) else { return Ok(None) };
        if self.saver.options.existing_step == ExistingStep::Replace {
            return Ok(Some(existing.id));
        }
        let same = async {
            let snapshot = Snapshot::load(&self.saver.store, self.log.state(), existing.id).await?;
            match blobs {
                Some(blobs) if snapshot.manifest().content == *content => snapshot.has_blobs(blobs).await,
                _ => Ok(false),
            }
        };
        match same.await {
            Ok(true) => Ok(Some(existing.id)),
            Ok(false) => Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "step {step} is saved already, with another content (log entry {}); nothing was committed. Save under another step, or \
                     ask for the step to be replaced: `overwrite=True` in Python, `--replace` on the command line, `ExistingStep::Replace` in Rust",
                    existing.sequence
                ),
            )
            .object(existing.manifest_path())),
            // What nobody can read protects nothing.
            Err(error) if is_damage(&error) => {
                tracing::warn!(step, %error, "the step that was saved before cannot be read; replacing it");
                Ok(Some(existing.id))
            }
            Err(error) => Err(error),
        }
    }

    /// Writes directory and manifest, then commits the entry that makes them exist.
    #[boxed]
    pub(crate) async fn commit(
        &mut self,
        step: u64,
        parent: Option<&Parent>,
        prepared: &Prepared<'_>,
        metadata: &Metadata,
    ) -> Result<Commit> {
        let Prepared { directory, tensor_bytes, content, blobs, decision, age, .. } = prepared;
        let store = self.saver.store.clone();
        let replaceable = self.replaceable(step, content, *blobs).await?;
        let digest = Digest::of(directory);
        let parent_ref =
            parent.map(|parent| ParentRef { snapshot: parent.snapshot.record().id, content: parent.snapshot.manifest().content.clone() });
        let mut manifest = Manifest::new(Id::random()?, step, parent_ref, digest);
        manifest.content = content.clone();
        manifest.casks = prepared.casks.clone();
        manifest.tensor_bytes = *tensor_bytes;
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
            store.put_content_addressed(&format!("directories/{digest}"), directory.clone().into()).await?;
            self.durable_directory = Some(digest);
        }
        store.create_unique(&manifest.path(), bytes.into()).await?;

        let parent_id = manifest.parent.as_ref().map(|parent| parent.snapshot);
        let (writer, limit, floor) = (self.id, store.limits().max_chain_depth, self.saver.options.age_floor);
        let needs = needs_of(&manifest, parent);
        let mut parent_is_lost = false;
        let appended = self
            .log
            .append_relying_on(&needs, writer, |state| {
                check_fence(state, writer)?;
                age.check(floor)?;
                if let Some(now) = state.at_step(step)
                    && Some(now.id) != replaceable
                    && !matches!(self.saver.options.existing_step, ExistingStep::Replace)
                {
                    let message =
                        format!("step {step} was saved by another writer meanwhile; nothing was committed. Save it again to compare");
                    return Err(Error::new(ErrorKind::Conflict, message));
                }
                parent_is_lost = true;
                if let Some(parent) = parent_id {
                    let chain = chain_of(state, parent, limit).map_err(|e| {
                        Error::new(ErrorKind::Conflict, format!("the parent can no longer be built upon: {}", e.message())).source(e)
                    })?;
                    if let Some(link) = chain.iter().find(|link| link.roles.is_some()) {
                        let message = format!("the parent can no longer be built upon: step {} was reduced to some roles", link.step);
                        return Err(Error::new(ErrorKind::Conflict, message));
                    }
                }
                parent_is_lost = false;
                Ok(Event::Added { snapshot: manifest.id, step, parent: parent_id, manifest: manifest_digest })
            })
            .await;
        let sequence = match appended.in_object(manifest.path()) {
            Ok(Appended::Committed(sequence)) => sequence,
            Ok(Appended::Refused(stale)) => {
                // It may be gone, too.
                self.durable_directory = None;
                return Ok(Commit::Stale(stale));
            }
            Err(error) if parent_is_lost => return Ok(Commit::ParentLost(error)),
            Err(error) => return Err(error),
        };
        self.log.note_summary(manifest.id, Summary::of(&manifest));
        self.log.write_catalog_if_due().await;
        tracing::info!(step, snapshot = %manifest.id, kind = manifest.kind.name(), bytes = manifest.stored_bytes(), "committed");
        Ok(Commit::Done(Saved {
            id: manifest.id,
            step,
            kind: manifest.kind,
            parent: parent_id,
            sequence,
            tensor_bytes: manifest.tensor_bytes,
            stored_bytes: manifest.stored_bytes(),
            chunks: prepared.chunks.clone(),
            rounding: prepared.rounding,
            decision: *decision,
        }))
    }
}

/// What became of a commit.
pub(crate) enum Commit {
    Done(Saved),
    /// The store was changed from outside; nothing was committed.
    Stale(Stale),
    /// The parent was given up to garbage collection, or reduced, in the meantime; nothing was committed.
    ParentLost(Error),
}

impl Commit {
    /// The snapshot, or why there is none.
    pub(crate) fn done(self) -> Result<Saved> {
        match self {
            Self::Done(saved) => Ok(saved),
            Self::Stale(Stale { error, .. }) | Self::ParentLost(error) => Err(error),
        }
    }
}

/// The objects that a snapshot needs: its own casks and directory, and all of its parent's chain.
fn needs_of(manifest: &Manifest, parent: Option<&Parent>) -> Vec<Need> {
    let mut needs: Vec<Need> = Need::of(manifest).collect();
    for link in parent.into_iter().flat_map(|parent| parent.snapshot.links()) {
        needs.extend(Need::with_manifest(link.record.manifest_path(), &link.manifest));
    }
    needs.sort_unstable();
    needs.dedup();
    needs
}

/// What a save has made ready to be committed.
pub(crate) struct Prepared<'a> {
    pub directory: Vec<u8>,
    pub tensor_bytes: u64,
    pub casks: Vec<CaskRef>,
    pub content: BTreeMap<String, Digest>,
    /// The blobs, if the committing process has them.
    pub blobs: Option<&'a [&'a Blob<'a>]>,
    pub chunks: BTreeMap<String, u64>,
    /// Errors of all that was rounded.
    pub rounding: Option<crate::RoundingReport>,
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
                format!(
                    "another job took over {at}: writer {} (log entry {}). Stop one of the two jobs; to go on with this one, open the store again",
                    last.writer, last.sequence
                ),
            )
            .clause("log 5"))
        }
        _ => Ok(()),
    }
}
