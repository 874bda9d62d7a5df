//! The copier: adds the snapshots of a run to a destination, as the one writer there.
//!
//! Casks, directories and manifests are copied byte by byte; the log of the destination is its own. Each snapshot is
//! committed after all its objects are there; a small one is part of the entry that commits it. The agent of the engine
//! keeps a copier for each further store; [`copy`](super::copy()) runs one once.
//!
//! Invariants: casks, manifests and directories are verified before the entry that names or holds them is committed; a
//! cask that is an object is verified at the destination. Snapshots are added in the order of the source. A copy that was
//! interrupted is resumed by copying again.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::cask_copy::{copy_cask, create_fresh, fresh_since, present};
use super::copy_plan::{CopyOptions, CopyPlan, CopyReport, check_links, lost_link, snapshots_to_copy};
use super::verify::verify_cask;
use crate::chain::chain_of;
use crate::commit::{
    Age, Appended, LastWriter, Log, LogState, Need, Owner, SnapshotRecord, changed_log, check_root, has_store, load_log, read_inline,
    read_manifest, read_manifest_bytes, read_store_file, refuse_features, refuse_lost_log, store_file_of, without_store_file,
};
use crate::error::ResultExt;
use crate::reader::CaskSource;
use crate::store::{AheadUploads, Created, probe, saves_inline};
use crate::wire::{CaskRef, Digest, Directory, Event, Id, InlineSnapshot, Job, Manifest, STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, Limits, Result, Store, boxed};

/// Copies the snapshots of a run into a destination as they come. Writes there as one writer with an id.
#[derive(Debug)]
pub struct Copier {
    destination: Store,
    /// Log of the destination.
    pub(super) log: Log,
    pub(super) writer: Id,
    /// Whether the log names this writer as the one that writes now.
    opened: bool,
    /// The last writer when the copy began, if it may not take over from a job that has come since.
    begun_after: Option<Option<LastWriter>>,
    options: CopyOptions,
    /// The job that goes on copying, if one does.
    job: Job,
    /// Casks that were sent to the destination before their snapshot was committed.
    ahead: Option<AheadUploads>,
    /// Whether the destination takes casks without a transfer where the storage can do so.
    pub(super) shares: bool,
    /// Whether a live step of the destination that the source has never had is replaced: a job that goes on from an older step saves
    /// its steps anew. Otherwise such a copy is refused.
    pub(super) replaces: bool,
}

impl Copier {
    /// Opens a copier that writes to `destination` as the writer `id`. Creates the destination if it does not exist.
    /// Call [`take_over`](Self::take_over) next, or [`go_on_as`](Self::go_on_as) to continue the work of an earlier
    /// copier.
    #[boxed]
    pub async fn open(source: &Store, destination: &Store, writer: Id, options: CopyOptions) -> Result<Self> {
        let log = open_destination(source, destination).await?;
        Ok(Self::of_log(destination, log, writer, options))
    }

    pub(super) fn of_log(destination: &Store, log: Log, writer: Id, options: CopyOptions) -> Self {
        Self {
            destination: destination.clone(),
            log,
            writer,
            opened: false,
            begun_after: None,
            options,
            job: Job::here(),
            ahead: None,
            shares: false,
            replaces: true,
        }
    }

    /// Id of this copier, as the log of the destination names it with each commit.
    pub fn id(&self) -> Id {
        self.writer
    }

    /// Newest live snapshot of the destination, as far as its log has been read.
    pub fn latest(&self) -> Option<&SnapshotRecord> {
        self.log.state().latest()
    }

    /// Names the process of this host for which this one copies, in the entries of later copies: neither of both alone ends the job.
    /// `None`: this process copies for itself.
    pub fn set_trainer(&mut self, trainer: Option<u32>) {
        self.job = trainer.map_or_else(Job::here, Job::of_trainer);
        if self.log.job.is_some() {
            self.log.job = Some(self.job.clone());
        }
    }

    /// Makes the next copy continue casks that were sent ahead. Casks that it does not need are given up.
    pub fn finish_ahead(&mut self, ahead: Option<AheadUploads>) {
        self.ahead = ahead.filter(|ahead| ahead.destination().url() == self.destination.url());
    }

    /// Adds the live snapshots of `source`, and their chains, that the destination has never had. Ignores whether the
    /// source has forgotten or pinned them: each store has a retention of its own. Fails with `Fenced` once another job
    /// writes to the destination.
    pub async fn copy_new(&mut self, source: &Store) -> Result<CopyReport> {
        self.log.refresh().await?;
        let copied = self.add_missing(source).await;
        self.ahead = None;
        Ok(copied?.1)
    }

    /// Whether the destination has collected or reduced a snapshot that another one needs, which [`copy_new`](Self::copy_new)
    /// would add. Such a snapshot can never be added.
    pub async fn lacks_parents_of(&mut self, source: &Store) -> Result<bool> {
        self.log.refresh().await?;
        let from = load_log(source).await?;
        let there = self.log.state();
        let wanted = snapshots_to_copy(source, from.state(), there, self.options.steps.as_deref())?;
        Ok(wanted.iter().any(|record| there.by_id(record.id).is_none() && lost_link(record, from.state(), there).is_some()))
    }

    /// Copies the snapshots that the destination does not have. Also returns what was to be copied.
    #[boxed]
    pub(super) async fn add_missing(&mut self, source: &Store) -> Result<(CopyPlan, CopyReport)> {
        let mut report = CopyReport::default();
        let mut added: BTreeMap<Id, SnapshotRecord> = BTreeMap::new();
        let mut begun_again = 0;
        let mut looks = 0;
        'plan: loop {
            let from = load_log(source).await?;
            let mut plan = self.plan(source, from.state())?;
            if !plan.missing.is_empty() {
                // Another copier may have added snapshots before this one fenced it.
                self.open_log(None).await?;
                plan = self.plan(source, from.state())?;
            }
            let there = plan.report();
            report.present = there.present.saturating_sub(report.snapshots);
            report.forgotten = there.forgotten;
            for record in &plan.missing {
                match self.copy_snapshot(source, from.state(), record, &mut report).await {
                    Err(error) if error.is_damage() && changed_log(source, from.state(), record.id).await?.is_some() => {
                        looks += 1;
                        if begun_again == MOST_PLANS || looks == MOST_LOOKS {
                            let message = format!(
                                "gave up or compacted step {} while it was copied, and others before; nothing is damaged. Copy again, let \
                                 the source keep more steps, or name a step to copy that it keeps",
                                record.step
                            );
                            return Err(Error::new(ErrorKind::Conflict, message).object(source.url()).source(error));
                        }
                        tracing::warn!(step = record.step, %error, "the source gave up or compacted the step during the copy; looking at the source again");
                        begun_again += 1;
                        continue 'plan;
                    }
                    copied => copied?,
                }
                begun_again = 0;
                added.insert(record.id, record.clone());
            }
            plan.note_added(&added);
            return Ok((plan, report));
        }
    }

    fn plan(&self, source: &Store, from: &LogState) -> Result<CopyPlan> {
        let there = self.log.state();
        let plan = CopyPlan::new(source, from, there, self.options.steps.as_deref())?;
        if !self.replaces {
            plan.missing.iter().try_for_each(|record| refuse_to_replace(record, from, there))?;
        }
        Ok(plan)
    }

    /// Copies part i of n of the casks that the destination lacks, each checked there. Commits nothing.
    #[boxed]
    pub(super) async fn copy_shard(&mut self, source: &Store, part: u64, of: u64) -> Result<CopyReport> {
        if part >= of {
            return Err(Error::invalid(format!("shard {part}/{of}: the first number is below the second")));
        }
        let from = load_log(source).await?;
        let plan = self.plan(source, from.state())?;
        let mut report = plan.report();
        let destination = self.destination.clone();
        let since_ms = fresh_since(destination.objects().clock_ms().await?, self.options.age_floor);
        for record in &plan.missing {
            let stored = StoredSnapshot::read(source, record).await?;
            if stored.fits_inline(&destination) {
                continue;
            }
            for (cask, from) in stored.manifest.casks.iter().zip(&stored.casks) {
                // Ids are random.
                let number = cask.id.0.iter().take(4).fold(0u64, |number, byte| number << 8 | u64::from(*byte));
                if number % of == part {
                    self.copy_checked(from, cask, record.parent.is_none(), since_ms, &mut report).await?;
                }
            }
        }
        Ok(report)
    }

    /// Copies a cask, unless the destination has one from `since_ms` or later; every byte is checked there. A cask that the storage
    /// shares is not read. Returns the time of the cask that was there.
    async fn copy_checked(
        &self,
        from: &CaskSource,
        cask: &CaskRef,
        is_base: bool,
        since_ms: u64,
        report: &mut CopyReport,
    ) -> Result<Option<u64>> {
        let (destination, to) = (&self.destination, CaskSource::object(&self.destination, cask));
        match present(destination, &cask.path(), cask.bytes).await?.filter(|found| found.modified_ms >= since_ms) {
            Some(found) if verify_cask(&to, cask, is_base, destination.limits()).await.is_ok() => return Ok(Some(found.modified_ms)),
            _ => {}
        }
        if let (true, CaskSource::Object { store, path }) = (self.shares, from)
            && destination.objects().share(store.objects(), path, cask.bytes).await?
        {
            report.shared_objects += 1;
            report.shared_bytes += cask.bytes;
            return Ok(None);
        }
        report.ahead_bytes += copy_cask(from, destination, cask, self.ahead.as_ref()).await?;
        verify_cask(&to, cask, is_base, destination.limits()).await?;
        report.objects += 1;
        report.bytes += cask.bytes;
        Ok(None)
    }

    #[boxed]
    async fn copy_snapshot(&mut self, source: &Store, state: &LogState, record: &SnapshotRecord, report: &mut CopyReport) -> Result<()> {
        let destination = &self.destination.clone();
        let writer = self.writer;
        let stored = StoredSnapshot::read(source, record).await?;
        let StoredSnapshot { manifest, manifest_bytes, .. } = &stored;
        refuse_features(manifest.may_ignore()).in_object(record.manifest_path())?;
        let age = Age::start();
        let now = destination.objects().clock_ms().await?;
        let mut oldest_ms = now;
        let since_ms = fresh_since(now, self.options.age_floor);
        let is_base = record.parent.is_none();
        let payload = match stored.fits_inline(destination) {
            true => Some(stored.payload(is_base, destination.limits()).await?),
            false => None,
        };
        for (cask, from) in manifest.casks.iter().zip(&stored.casks).filter(|_| payload.is_none()) {
            let found_ms = self.copy_checked(from, cask, is_base, since_ms, report).await?;
            oldest_ms = found_ms.map_or(oldest_ms, |found_ms| oldest_ms.min(found_ms));
        }
        let (directory, bytes) = read_directory_bytes(source, manifest.directory).await?;
        if present(destination, &directory, bytes.len() as u64).await?.is_none() {
            report.objects += 1;
            report.bytes += bytes.len() as u64;
        }
        let mut needs = vec![Need::directory(manifest.directory, Some(bytes.len() as u64))];
        destination.objects().put_content_addressed(&directory, bytes).await?;
        let path = Manifest::path_of(record.step, record.id);
        if payload.is_none() {
            // A compacted manifest keeps its bytes, but gets the name that an `added` entry refers to.
            let found = create_fresh(destination, &path, manifest_bytes.clone(), since_ms).await.map_err(|error| match error.kind() {
                ErrorKind::Corrupt | ErrorKind::LimitExceeded => {
                    let message = "an interrupted copy has left another manifest here, from before the snapshot was compacted at the source; \
                                   copy again once `tensorcask gc --apply` has removed it from the destination";
                    Error::corrupt(message).object(path.as_str()).source(error)
                }
                _ => error,
            })?;
            match found {
                Some(found) => oldest_ms = oldest_ms.min(found.modified_ms),
                None => {
                    report.objects += 1;
                    report.bytes += manifest_bytes.len() as u64;
                }
            }
            needs.push(Need::manifest(path.clone(), record.manifest));
            needs.extend(Need::casks(manifest));
        }
        let inline = payload.as_ref().map(|_| manifest_bytes.len() as u64);
        let age = age.older_by(Duration::from_millis(now.saturating_sub(oldest_ms)));
        needs.extend(self.needs_of_chain(source, state, record.parent).await?);
        let mut repaired = false;
        let replaces = self.replaces;
        loop {
            let appended = self.log.append_relying_on(&needs, payload.as_deref(), writer, |there| {
                let advice = "if an earlier copy left it, run `tensorcask gc --apply` on the destination first";
                age.check_leftover(self.options.age_floor, advice)?;
                if there.last_writer.is_some_and(|last| last.writer != writer) {
                    return Err(fenced());
                }
                if let Some(parent) = record.parent {
                    chain_of(there, parent, destination.limits().max_chain_depth)?;
                }
                check_links(record, state, there)?;
                if !replaces {
                    refuse_to_replace(record, state, there)?;
                }
                let snapshot = record.id;
                let step = record.step;
                let parent = record.parent;
                let manifest = record.manifest;
                Ok(Event::Added { snapshot, step, parent, manifest, inline, roles: record.roles.clone() })
            });
            match appended.await.in_object(path.as_str())? {
                Appended::Committed(_) => break,
                Appended::Refused(stale) if stale.replaced || repaired => return Err(stale.error),
                Appended::Refused(stale) => {
                    tracing::warn!(error = %stale.error, "the destination has lost objects; copying them again");
                    self.repair(source, state, record, inline.is_some(), report).await?;
                    repaired = true;
                }
            }
        }
        report.snapshots += 1;
        if let Some(payload) = &payload {
            // The log entry holds the snapshot.
            report.objects += 1;
            report.bytes += payload.len() as u64;
        }
        self.log.write_catalog_if_due().await;
        Ok(())
    }

    /// Objects that the chain of a snapshot needs at the destination. The destination may have compacted some links.
    #[boxed]
    async fn needs_of_chain(&self, source: &Store, state: &LogState, parent: Option<Id>) -> Result<Vec<Need>> {
        let Some(parent) = parent else { return Ok(Vec::new()) };
        let mut needs = Vec::new();
        for link in chain_of(self.log.state(), parent, self.destination.limits().max_chain_depth)? {
            // The source may have the same manifest, and is cheaper to read.
            let manifest = match state.by_id(link.id).filter(|ours| ours.manifest == link.manifest) {
                Some(ours) => read_manifest(source, &ours.manifest_place()).await?,
                None => read_manifest(&self.destination, &link.manifest_place()).await?,
            };
            needs.push(Need::directory(manifest.directory, None));
            needs.extend(Need::of_committed(&link, &manifest, None));
        }
        Ok(needs)
    }

    /// Copies the objects of a chain that the destination lacks. `is_inline` says whether the entry of the newest link
    /// will hold it.
    #[boxed]
    async fn repair(
        &self,
        source: &Store,
        state: &LogState,
        newest: &SnapshotRecord,
        is_inline: bool,
        report: &mut CopyReport,
    ) -> Result<()> {
        for link in chain_of(state, newest.id, source.limits().max_chain_depth)? {
            let stored = StoredSnapshot::read(source, &link).await?;
            let StoredSnapshot { manifest, manifest_bytes, .. } = &stored;
            let is_inline = self.log.state().by_id(link.id).map_or(is_inline, |theirs| theirs.inline.is_some());
            for (cask, from) in manifest.casks.iter().zip(&stored.casks).filter(|_| !is_inline) {
                if present(&self.destination, &cask.path(), cask.bytes).await?.is_none() {
                    copy_cask(from, &self.destination, cask, None).await?;
                    let to = CaskSource::object(&self.destination, cask);
                    verify_cask(&to, cask, link.parent.is_none(), self.destination.limits()).await?;
                    report.objects += 1;
                    report.bytes += cask.bytes;
                }
            }
            let (directory, bytes) = read_directory_bytes(source, manifest.directory).await?;
            self.destination.objects().put_content_addressed(&directory, bytes).await?;
            if !is_inline {
                self.destination.objects().create_unique(&Manifest::path_of(link.step, link.id), manifest_bytes.clone()).await?;
            }
        }
        Ok(())
    }

    /// Id of the last writer of the destination, as far as its log has been read.
    pub fn last_writer(&self) -> Option<Id> {
        self.log.state().last_writer.map(|last| last.writer)
    }

    /// Commits `opened` to the log of the destination, once. This fences any other writer there. To be able to continue
    /// after a crash, note the id and [`last_writer`](Self::last_writer) before.
    #[boxed]
    pub async fn take_over(&mut self) -> Result<()> {
        self.log.job = Some(self.job.clone());
        self.open_log(None).await
    }

    /// Like [`take_over`](Self::take_over). Fails with `Fenced` if a writer other than `last` has written to the
    /// destination since.
    #[boxed]
    pub async fn take_over_from(&mut self, last: Option<Id>) -> Result<()> {
        self.log.job = Some(self.job.clone());
        self.open_log(Some(last)).await
    }

    /// Continues the work of an earlier copier under its id: the one of `ids` that wrote last. Fences nobody. Fails
    /// with `Fenced` if the last writer is another.
    #[boxed]
    pub async fn go_on_as(&mut self, ids: &[Id]) -> Result<()> {
        self.log.job = Some(self.job.clone());
        match self.last_writer() {
            Some(last) if ids.contains(&last) => {
                (self.writer, self.opened) = (last, true);
                Ok(())
            }
            Some(_) => Err(fenced().object(self.destination.url())),
            None => self.open_log(None).await,
        }
    }

    /// Fails if a job saves to the destination, and makes the copy fail if one has come once it commits.
    pub(super) async fn refuse_owned(&mut self) -> Result<()> {
        if let Some(owner) = Owner::of(&self.log).await? {
            return Err(owner.refusal(&self.destination));
        }
        self.begun_after = Some(self.log.state().last_writer);
        Ok(())
    }

    async fn open_log(&mut self, only_from: Option<Option<Id>>) -> Result<()> {
        if !self.opened {
            let url = self.destination.url().to_owned();
            let begun_after = self.begun_after;
            let opened = self.log.append(self.writer, |state| match only_from {
                Some(last) if state.last_writer.map(|last| last.writer) != last => Err(fenced().object(&url)),
                _ if begun_after.is_some_and(|seen| state.has_new_job(seen)) => Err(fenced().object(&url)),
                _ => Ok(Event::Opened { leader: None }),
            });
            opened.await?;
            self.opened = true;
            self.log.write_catalog_if_due().await;
        }
        Ok(())
    }
}

/// Manifest and casks of a snapshot to copy.
struct StoredSnapshot {
    manifest: Manifest,
    manifest_bytes: Bytes,
    /// Sources of the casks, in the order of the manifest.
    casks: Vec<CaskSource>,
}

impl StoredSnapshot {
    #[boxed]
    async fn read(store: &Store, record: &SnapshotRecord) -> Result<Self> {
        let place = record.manifest_place();
        if let Some(sequence) = place.inline_in {
            let InlineSnapshot { manifest, manifest_bytes, casks, offsets, .. } = read_inline(store, &place, sequence, None).await?;
            let source = |(bytes, offset)| CaskSource::Inline { path: place.path.clone(), offset, bytes };
            return Ok(Self { manifest, manifest_bytes, casks: casks.into_iter().zip(offsets).map(source).collect() });
        }
        let (manifest, manifest_bytes) = read_manifest_bytes(store, &place).await?;
        let casks = manifest.casks.iter().map(|cask| CaskSource::object(store, cask)).collect();
        Ok(Self { manifest, manifest_bytes, casks })
    }

    /// Whether the destination gets the snapshot within its log entry.
    fn fits_inline(&self, destination: &Store) -> bool {
        saves_inline(destination, (self.manifest_bytes.len() as u64).saturating_add(self.manifest.stored_bytes()))
    }

    /// The snapshot as a log entry holds it, every byte checked.
    #[boxed]
    async fn payload(&self, is_base: bool, limits: &Limits) -> Result<Vec<u8>> {
        let mut casks = Vec::with_capacity(self.casks.len());
        for (cask, from) in self.manifest.casks.iter().zip(&self.casks) {
            let bytes = from.get_range(0..cask.bytes).await?;
            let read = CaskSource::Inline { path: from.path().to_owned(), offset: 0, bytes: bytes.clone() };
            verify_cask(&read, cask, is_base, limits).await?;
            casks.push(bytes);
        }
        Ok(InlineSnapshot::encode(&self.manifest_bytes, casks.iter().map(|cask| cask.as_ref())))
    }
}

/// Number of times in a row that a copy looks at a source again whose steps go away or are compacted.
const MOST_PLANS: u32 = 16;
/// Number of times in all. A copy ends, however fast the source changes.
const MOST_LOOKS: u32 = 1000;

/// Fails if a snapshot would take the place of a step that was saved at the destination, or is pinned there.
fn refuse_to_replace(record: &SnapshotRecord, source: &LogState, there: &LogState) -> Result<()> {
    let Some(found) = there.at_step(record.step).filter(|found| found.id != record.id) else { return Ok(()) };
    let why = match source.by_id(found.id) {
        None => "is saved at the destination, too, and the source has never had that snapshot. Forget it there (`tensorcask forget`)",
        // A pin stays with the step (log 4.1).
        Some(_) if found.pinned && source.at_step(record.step).is_none_or(|live| !live.pinned) => {
            "is pinned at the destination, there or by an earlier copy. Unpin it there (`tensorcask pin --off`)"
        }
        Some(_) => return Ok(()),
    };
    let message = format!("step {} {why} to replace it, or copy to another place", record.step);
    Err(Error::new(ErrorKind::Conflict, message).object(found.manifest_path()))
}

fn fenced() -> Error {
    Error::new(ErrorKind::Fenced, "another job writes to the destination; stop one of the two jobs").clause("log 5")
}

/// Path and bytes of a directory, checked.
async fn read_directory_bytes(store: &Store, digest: Digest) -> Result<(String, Bytes)> {
    let path = format!("directories/{digest}");
    let bytes = store.objects().get(&path, store.limits().max_directory_bytes).await?;
    Directory::check_digest(&bytes, digest).in_object(path.as_str())?;
    Ok((path, bytes))
}

/// Opens the destination, or creates it with the run id of the source.
#[boxed]
pub(super) async fn open_destination(source: &Store, destination: &Store) -> Result<Log> {
    open_of_run(destination, source_file(source).await?).await
}

/// `store.json` of a source.
pub(super) async fn source_file(source: &Store) -> Result<StoreFile> {
    let file = store_file_of(source).await.map_err(|e| e.object(source.url()))?;
    refuse_features(file.may_ignore())?;
    Ok(file)
}

/// Opens a store of the run in `file`, or creates it.
#[boxed]
pub(super) async fn open_of_run(destination: &Store, file: StoreFile) -> Result<Log> {
    check_root(destination, has_store(destination, Some(file.run))).await?;
    destination.objects().ensure_root().await?;
    match read_store_file(destination).await {
        Ok(found) if found.run == file.run => {}
        Ok(_) => {
            let message = "the destination holds another run; copy into an empty place, or into a copy of the same run";
            return Err(Error::invalid(message).object(destination.url()));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            // Another log begun here would go on in the one that is left (log 4.8).
            without_store_file(destination).await?.map_or(Ok(()), Err)?;
            probe(destination.objects()).await?;
            let created = destination.objects().create(STORE_FILE, file.encode()?.into()).await;
            if let Created::Exists = created.map_err(|e| Error::storage(STORE_FILE, e))?
                && read_store_file(destination).await?.run != file.run
            {
                return Err(Error::new(ErrorKind::Conflict, "another store was created at the destination in the meantime")
                    .object(destination.url()));
            }
        }
        Err(e) => return Err(e),
    }
    // In a log with a gap, the last writer before the gap would look like the last writer of all.
    let log = Log::load_whole(destination).await?;
    refuse_lost_log(&log).await?;
    Ok(log)
}
