//! The commit side of a writer: commits the casks that a save or the ranks have uploaded.
//!
//! A commit writes small casks, directory and manifest, all at once, and then the log entry. Creating the entry is the
//! commit; before it nothing exists for readers, so the order of the other objects does not matter. If casks and manifest
//! are small enough, the entry holds them, and the commit is one object.
//!
//! Invariants: a writer that another job fenced commits nothing. A commit is confirmed against the store as it is at
//! that moment: the log and all objects that the snapshot needs must be there. After an unknown outcome nothing is
//! deleted and the writer stops.

use std::collections::BTreeMap;
use std::time::Instant;

use super::open::{open_log, refused};
use super::parent::Parent;
use super::pipeline::publish;
use super::{ExistingStep, Metadata, SavedSnapshot, Writer};
use crate::chain::{DecisionReason, Link, PolicyDecision, SaveTimes, chain_of, milliseconds};
use crate::commit::{Age, Appended, Freeing, LogState, Need, Retention, Stale, Standing, Summary, forget_unwanted, now_ms};
use crate::error::ResultExt;
use crate::precision::PrecisionDecision;
use crate::reader::{Snapshot, has_blobs};
use crate::store::{Upload, saves_inline};
use crate::wire::{CaskRef, Digest, Event, FINITE, Id, InlineSnapshot, Manifest};
use crate::{Blob, Error, ErrorKind, Result, RoundingReport, boxed};

impl Writer {
    /// Opens the parent of a snapshot of `step`; `None` for a base.
    #[boxed]
    pub(super) async fn parent(&mut self, step: u64) -> Result<(Option<Parent>, PolicyDecision)> {
        let (parent, mut decision) = self.decide(step).await?;
        let Some(id) = parent else { return Ok((None, decision)) };
        let parent = Parent::open(&self.pipeline.store, self.log.state(), id).await?;
        if parent.is_none() {
            decision.reason = DecisionReason::BrokenParent;
        }
        Ok((parent, decision))
    }

    /// Parent of a snapshot of `step`, by the policy and the current log. In a store that was replaced, the snapshot
    /// becomes a base.
    #[boxed]
    pub(super) async fn decide(&mut self, step: u64) -> Result<(Option<Id>, PolicyDecision)> {
        let replaced = match self.log.catch_up().await? {
            Standing::Same => false,
            Standing::Stale(stale) => {
                self.restart_in_replaced_store(&stale.error).await?;
                true
            }
        };
        check_fence(self.log.state(), self.id)?;
        let (parent, mut decision) =
            self.pipeline.options.policy.decide(self.log.state(), step, self.pipeline.store.limits().max_chain_depth);
        if replaced && parent.is_some() {
            decision.reason = DecisionReason::BrokenParent;
        }
        Ok((parent.filter(|_| !replaced), decision))
    }

    /// Continues in a store that was deleted or replaced since the last commit of this writer. Creates the store if it
    /// is gone. Takes over an older copy, unless a job unknown to this writer has written to it.
    #[boxed]
    pub(super) async fn restart_in_replaced_store(&mut self, why: &Error) -> Result<()> {
        if self.leader.is_some() {
            // Other hosts have their receipts and the session in the store that is gone.
            return Err(Error::new(ErrorKind::Fenced, format!("{}. Start the job again", why.message())).clause("log 8"));
        }
        let store = self.pipeline.store.clone();
        self.log.refuse_lost_below_snapshots().await?;
        tracing::warn!(error = %why, "the store was replaced; the next snapshot is a base");
        self.pipeline.base.clear();
        self.pipeline.changed_rows.clear();
        self.durable_directory = None;
        let frees = self.pipeline.options.retention.is_some_and(Retention::frees);
        let manifests = if frees { store.objects().list("snapshots").await? } else { Vec::new() };
        let mut log = open_log(&store, Some(self.log.store_file.run)).await?;
        self.freeing = if frees { Freeing::begin(&store, log.state(), &manifests).await } else { Freeing::default() };
        log.job.clone_from(&self.log.job);
        let id = self.id;
        let predecessors = &self.predecessors;
        let opened = log.append(id, |state| match state.last_writer {
            Some(last) if last.writer != id && !predecessors.contains(&last.writer) => Err(Error::new(
                ErrorKind::Fenced,
                format!(
                    "the store was deleted or replaced since this job last saved, and writer {} writes to the new store (log entry {}). \
                     Stop one of the two jobs. To continue with this one, open the store again (in Python: `tensorcask.Store(url)`) and \
                     save through it",
                    last.writer, last.sequence
                ),
            )
            .object(store.url())
            .clause("log 5.5")),
            _ => Ok(Event::Opened { leader: None }),
        });
        opened.await?;
        log.write_catalog_if_due().await;
        self.predecessors.extend(&log.state().writers);
        self.log = log;
        Ok(())
    }

    /// Returns the live snapshot of the step, if it may be replaced. Refuses a snapshot with other content, unless
    /// the options allow that.
    #[boxed]
    pub(super) async fn replaceable(
        &self,
        step: u64,
        content: &BTreeMap<String, Digest>,
        blobs: Option<&[&Blob<'_>]>,
    ) -> Result<Option<Id>> {
        let Some(existing) = self.log.state().at_step(step) else { return Ok(None) };
        let is_replaced = self.pipeline.options.existing_step == ExistingStep::Replace;
        // A session cannot leave out a step; the pin moves to the snapshot that replaces it.
        if is_replaced && (!existing.pinned || self.leader.is_some()) {
            return Ok(Some(existing.id));
        }
        let same = async {
            let snapshot = Snapshot::load(&self.pipeline.store, self.log.state(), existing.id).await?;
            snapshot.chain.links().try_for_each(Link::refuse_unwritable)?;
            match blobs {
                Some(blobs) if snapshot.manifest().content == *content => has_blobs(&snapshot, blobs).await,
                _ => Ok(false),
            }
        };
        match same.await {
            Ok(true) => Ok(Some(existing.id)),
            Ok(false) if is_replaced => Err(Error::new(
                ErrorKind::Conflict,
                format!("step {step} is pinned, and the store has it with other content; unpin it first (`tensorcask pin --off`) to replace it"),
            )
            .object(existing.manifest_path())),
            Ok(false) => Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "step {step} is saved already, with other content (log entry {}); nothing was committed. Save under another step, or \
                     ask for the step to be replaced: `overwrite=True` in Python, `--replace` on the command line, `ExistingStep::Replace` in Rust",
                    existing.sequence
                ),
            )
            .object(existing.manifest_path())),
            // A damaged snapshot is not worth keeping.
            Err(error) if error.is_damage() => {
                tracing::warn!(step, %error, "the saved snapshot of this step cannot be read; replacing it");
                Ok(Some(existing.id))
            }
            Err(error) if error.kind().is_unreadable() => Err(Error::new(
                error.kind(),
                format!(
                    "step {step} is saved already (log entry {}), and this version cannot read it: {}. Nothing was committed. Save under \
                     another step, upgrade tensorcask, or ask for the step to be replaced: `overwrite=True` in Python, `--replace` on the \
                     command line, `ExistingStep::Replace` in Rust",
                    existing.sequence,
                    error.message()
                ),
            )
            .object(existing.manifest_path())
            .source(error)),
            Err(error) => Err(error),
        }
    }

    /// Writes the unpublished casks, the directory and the manifest, all at once. Then commits the entry that makes them
    /// exist. The entry of a small snapshot holds casks and manifest itself.
    #[boxed]
    pub(crate) async fn commit(
        &mut self,
        step: u64,
        parent: Option<&Parent>,
        prepared: &Prepared<'_>,
        mut unpublished: Vec<Upload>,
        metadata: &Metadata,
    ) -> Result<Commit> {
        let Prepared { directory, tensor_bytes, content, blobs, finite, decision, age, .. } = prepared;
        let store = self.pipeline.store.clone();
        let replaceable = self.replaceable(step, content, *blobs).await?;
        let was_pinned = self.log.state().at_step(step).is_some_and(|found| found.pinned);
        let digest = Digest::of(directory);
        let parent_ref = parent.map(Parent::reference);
        let mut manifest = Manifest::new(Id::random()?, step, parent_ref, digest);
        manifest.content = content.clone();
        manifest.casks = prepared.casks.clone();
        manifest.tensor_bytes = *tensor_bytes;
        manifest.time_ms = now_ms();
        manifest.metadata = metadata.file.clone();
        manifest.user = metadata.user.clone();
        let value = serde_json::to_value(decision).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
        manifest.user.insert(PolicyDecision::KEY.to_owned(), value);
        if let Some(precision) = &prepared.precision {
            manifest.user.insert(PrecisionDecision::KEY.to_owned(), precision.to_value()?);
        }
        manifest.user.extend(finite.map(|finite| (FINITE.to_owned(), finite.into())));
        let mut times = SaveTimes { written_ms: Some(manifest.time_ms), previous: self.previous, ..prepared.times };
        if !unpublished.is_empty() {
            // These casks are uploaded with the manifest, so the next snapshot records the time.
            times.upload_ms = None;
        }
        let insert_times = |manifest: &mut Manifest, times: SaveTimes| -> Result<()> {
            let value = serde_json::to_value(times).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))?;
            manifest.user.insert(SaveTimes::KEY.to_owned(), value);
            Ok(())
        };
        insert_times(&mut manifest, times)?;

        let (mut bytes, mut manifest_digest) = manifest.encode()?;
        // Readers must accept the manifest: it may exceed a limit, or user metadata may be nested too deep.
        Manifest::decode(&bytes, store.limits())
            .map_err(|e| Error::invalid(format!("the manifest would not be readable: {}", e.message())).source(e))?;
        let is_durable = self.durable_directory == Some(digest);
        let write_directory = async {
            match is_durable {
                true => Ok(()),
                false => store.objects().put_content_addressed(&format!("directories/{digest}"), directory.clone().into()).await,
            }
        };
        let fits = saves_inline(&store, (bytes.len() as u64).saturating_add(manifest.stored_bytes()));
        // Casks that were published before the commit stay objects.
        let inline = (fits && unpublished.len() == manifest.casks.len()).then_some(bytes.len() as u64);
        let mut payload = None;
        let begun = Instant::now();
        match inline {
            Some(_) => {
                let casks: Vec<Vec<u8>> = unpublished.into_iter().map(|upload| upload.into_bytes().concat()).collect();
                payload = Some(InlineSnapshot::encode(&bytes, casks.iter().map(Vec::as_slice)));
                write_directory.await?;
            }
            None => {
                if self.previous.is_none() && prepared.times.upload_ms.is_some() && !unpublished.is_empty() {
                    // Perhaps the only save of this writer, so its own manifest has to record the time.
                    publish(std::mem::take(&mut unpublished)).await?;
                    times.upload_ms = prepared.times.upload_ms.map(|ms| ms + milliseconds(begun.elapsed()));
                    insert_times(&mut manifest, times)?;
                    (bytes, manifest_digest) = manifest.encode()?;
                }
                let path = manifest.path();
                let written = tokio::join!(publish(unpublished), write_directory, store.objects().create_unique(&path, bytes.into()));
                let ((), (), ()) = (written.0?, written.1?, written.2?);
            }
        }
        self.durable_directory = Some(digest);
        let mut uploading = begun.elapsed();

        let parent_id = manifest.parent.as_ref().map(|parent| parent.snapshot);
        let writer = self.id;
        let limit = store.limits().max_chain_depth;
        let floor = self.pipeline.options.age_floor;
        let leader = self.leader;
        let needs = needs_of(&manifest, manifest_digest, directory.len() as u64, inline.is_some(), parent);
        let mut parent_is_lost = false;
        let begun = Instant::now();
        let appended = self
            .log
            .append_relying_on(&needs, payload.as_deref(), writer, |state| {
                if let Some(Err(refusal)) = leader.map(|leader| state.leadership.may_add(writer, leader, step)) {
                    return Err(refused(refusal));
                }
                check_fence(state, writer)?;
                age.check(floor)?;
                if let Some(now) = state.at_step(step) {
                    let is_other = Some(now.id) != replaceable;
                    let may_replace = matches!(self.pipeline.options.existing_step, ExistingStep::Replace);
                    let is_newly_pinned = may_replace && now.pinned && (is_other || !was_pinned) && leader.is_none();
                    if is_newly_pinned || (is_other && !may_replace) {
                        let what = if is_newly_pinned { "pinned" } else { "saved by another writer" };
                        let message = format!("step {step} was {what} meanwhile; nothing was committed. Save it again to compare");
                        return Err(Error::new(ErrorKind::Conflict, message).object(now.manifest_path()));
                    }
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
                Ok(Event::Added { snapshot: manifest.id, step, parent: parent_id, manifest: manifest_digest, inline, roles: None })
            })
            .await;
        let sequence = match appended.in_object(manifest.path()) {
            Ok(Appended::Committed(sequence)) => sequence,
            Ok(Appended::Refused(stale)) => {
                // The directory may be gone, too.
                self.durable_directory = None;
                return Ok(Commit::Stale(stale));
            }
            Err(error) if parent_is_lost => return Ok(Commit::ParentLost(error)),
            Err(error) => return Err(error),
        };
        if inline.is_some() {
            // The entry holds the casks.
            uploading = uploading.saturating_add(begun.elapsed());
        }
        self.upload_ms = prepared.times.upload_ms.filter(|_| times.upload_ms.is_none()).map(|ms| ms + milliseconds(uploading));
        self.log.note_summary(manifest.id, Summary::of(&manifest));
        self.log.write_catalog_if_due().await;
        self.retain().await;
        tracing::info!(step, snapshot = %manifest.id, kind = manifest.kind.name(), bytes = manifest.stored_bytes(), "committed");
        Ok(Commit::Done(Box::new(SavedSnapshot {
            id: manifest.id,
            step,
            kind: manifest.kind,
            parent: parent_id,
            sequence,
            tensor_bytes: manifest.tensor_bytes,
            stored_bytes: manifest.stored_bytes(),
            chunks: prepared.chunk_counts.clone(),
            rounding: prepared.rounding,
            finite: prepared.finite,
            unchanged: vec![],
            decision: *decision,
            precision: prepared.precision.clone(),
            objective: None,
        })))
    }

    /// Forgets the steps that the options do not keep, and frees what was forgotten before. A snapshot is committed already, so a
    /// failure is a warning.
    async fn retain(&mut self) {
        let Some(retention) = self.pipeline.options.retention else { return };
        if let Err(error) = forget_unwanted(&mut self.log, retention, &mut self.marks).await {
            tracing::warn!(%error, "the step is saved, but older steps could not be forgotten; the next save tries again");
            return;
        }
        // Hosts may encode deltas whose parents are forgotten before they are committed.
        if !retention.frees() || self.leader.is_some() {
            return;
        }
        match self.freeing.free(&mut self.log).await {
            Ok(freed) => freed.iter().for_each(|record| tracing::info!(step = record.step, "freed")),
            Err(error) => tracing::warn!(%error, "the step is saved, but older steps could not be given up; the next save tries again"),
        }
    }
}

/// Outcome of a commit.
pub(crate) enum Commit {
    /// The snapshot is committed.
    Done(Box<SavedSnapshot>),
    /// The store was changed from outside; nothing was committed.
    Stale(Stale),
    /// The parent was collected or reduced in the meantime; nothing was committed.
    ParentLost(Error),
}

impl Commit {
    /// The snapshot, or the error that kept it from being committed.
    pub(crate) fn done(self) -> Result<SavedSnapshot> {
        match self {
            Self::Done(saved) => Ok(*saved),
            Self::Stale(Stale { error, .. }) | Self::ParentLost(error) => Err(error),
        }
    }
}

/// Objects that a snapshot needs: its own manifest, casks and directory, and those of the parent's chain.
fn needs_of(manifest: &Manifest, digest: Digest, directory_bytes: u64, is_inline: bool, parent: Option<&Parent>) -> Vec<Need> {
    let mut needs = vec![Need::directory(manifest.directory, Some(directory_bytes))];
    if !is_inline {
        needs.push(Need::manifest(manifest.path(), digest));
        needs.extend(Need::casks(manifest));
    }
    for link in parent.into_iter().flat_map(|parent| parent.snapshot.chain.links()) {
        needs.push(Need::directory(link.manifest.directory, None));
        needs.extend(Need::of_committed(&link.record, &link.manifest, link.inline.as_ref()));
    }
    needs
}

/// A snapshot whose casks are uploaded, ready to be committed.
pub(crate) struct Prepared<'a> {
    /// Stored form of the directory.
    pub directory: Vec<u8>,
    /// Decoded size of the tensors, in bytes.
    pub tensor_bytes: u64,
    pub casks: Vec<CaskRef>,
    /// Content digests by role.
    pub content: BTreeMap<String, Digest>,
    /// Blobs of the snapshot, if the committing process has them.
    pub blobs: Option<&'a [&'a Blob<'a>]>,
    /// Number of chunks by codec id, or `unchanged`.
    pub chunk_counts: BTreeMap<String, u64>,
    /// Rounding errors; `None` if nothing was rounded.
    pub rounding: Option<RoundingReport>,
    /// Whether all parameters and moments are finite; `None` without a check.
    pub finite: Option<bool>,
    pub decision: PolicyDecision,
    /// Decision of the precision `auto`.
    pub precision: Option<PrecisionDecision>,
    /// Times of encoding and upload, if they were measured.
    pub times: SaveTimes,
    /// Age of the oldest cask.
    pub age: Age,
}

/// Refuses to go on if another writer has committed `opened` or `added` after this one. Nothing else fences a writer.
pub(super) fn check_fence(state: &LogState, writer: Id) -> Result<()> {
    match state.last_writer {
        Some(last) if last.writer != writer => {
            let at = state.newest_step().map_or("before any step".to_owned(), |step| format!("at step {step}"));
            Err(Error::new(
                ErrorKind::Fenced,
                format!(
                    "another job took over {at}: writer {} (log entry {}). Stop one of the two jobs. To continue with this one, open \
                     the store again (in Python: `tensorcask.Store(url)`) and save through it",
                    last.writer, last.sequence
                ),
            )
            .clause("log 5"))
        }
        _ => Ok(()),
    }
}
