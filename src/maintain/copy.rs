//! Copies snapshots into another store: casks, directories and manifests byte by byte, commits anew.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::chain::chain_of;
use crate::commit::{
    Age, Appended, DEFAULT_AGE_FLOOR, Log, LogState, Need, SnapshotRecord, Status, live_step, read_manifest, refuse_features,
};
use crate::error::ResultExt;
use crate::store::{Ahead, Created, Listed, Upload};
use crate::wire::STORE_FILE;
use crate::wire::{CaskRef, Event, Id, Manifest};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// What to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOptions {
    /// Only the snapshots of these steps, and their chains; `None` is all live snapshots.
    pub steps: Option<Vec<u64>>,
    /// As [`WriterOptions::age_floor`](crate::WriterOptions::age_floor), for the destination.
    pub age_floor: Duration,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self { steps: None, age_floor: DEFAULT_AGE_FLOOR }
    }
}

/// What was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyReport {
    /// Snapshots committed at the destination now.
    pub snapshots: u64,
    /// Snapshots that were there already.
    pub present: u64,
    /// Objects written.
    pub objects: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Of these, bytes that had been sent ahead.
    pub ahead_bytes: u64,
}

/// Bytes of a cask that are copied at once.
const WINDOW_BYTES: u64 = 8 << 20;

impl Store {
    /// Copies live snapshots and what their chains need into `destination`, which is created, or holds an earlier copy of the
    /// same run. Ids, manifests and casks stay what they are; the log is a new one, with an `added` entry for each snapshot in
    /// the order of the source, then `forgotten` for those that are not live there, then pins. Each cask is checked at the
    /// destination, byte by byte, before it is committed. A copy that was interrupted is resumed by copying again.
    pub async fn copy_to(&self, destination: &Store, options: &CopyOptions) -> Result<CopyReport> {
        let mut copier = Copier::new(self, destination, Id::random()?, options.clone()).await?;
        let (wanted, report) = copier.add_missing(self).await?;
        settle(self, destination, &mut copier.log, copier.writer, &wanted).await?;
        Ok(report)
    }

    /// Makes this an empty store of the same run as `source`, unless it is one already.
    pub async fn create_beside(&self, source: &Store) -> Result<()> {
        open(source, self).await.map(|_| ())
    }

    /// A copier that writes to `destination`, which is created if it is not there, as the writer `id`. It begins with
    /// [`take_over`](Copier::take_over), or goes on in the place of an earlier one with [`go_on_as`](Copier::go_on_as).
    pub async fn copier(&self, destination: &Store, options: CopyOptions, id: Id) -> Result<Copier> {
        Copier::new(self, destination, id, options).await
    }
}

/// Copies the snapshots of a run as they come, as the one writer of its destination.
#[derive(Debug)]
pub struct Copier {
    destination: Store,
    log: Log,
    writer: Id,
    opened: bool,
    options: CopyOptions,
    ahead: Option<Ahead>,
}

impl Copier {
    #[boxed]
    async fn new(source: &Store, destination: &Store, writer: Id, options: CopyOptions) -> Result<Self> {
        let log = open(source, destination).await?;
        Ok(Self { destination: destination.clone(), log, writer, opened: false, options, ahead: None })
    }

    /// The id, which the log of the destination names with each commit.
    pub fn id(&self) -> Id {
        self.writer
    }

    /// The newest live snapshot of the destination, as far as its log has been read.
    pub fn latest(&self) -> Option<&SnapshotRecord> {
        self.log.state().latest()
    }

    /// Has the next copy go on from what was sent ahead, and give up the rest of it.
    pub fn finish_ahead(&mut self, ahead: Option<Ahead>) {
        self.ahead = ahead.filter(|ahead| ahead.destination().url() == self.destination.url());
    }

    /// Adds the live snapshots of `source`, and what their chains need, that the destination has not had yet. What was forgotten or
    /// pinned at the source is not looked at: each store has a retention of its own. `Fenced` once another job writes there.
    pub async fn copy_new(&mut self, source: &Store) -> Result<CopyReport> {
        self.log.refresh().await?;
        let copied = self.add_missing(source).await;
        self.ahead = None;
        Ok(copied?.1)
    }

    #[boxed]
    async fn add_missing(&mut self, source: &Store) -> Result<(Vec<SnapshotRecord>, CopyReport)> {
        let from = Log::load(source).await?;
        let wanted = wanted(source, from.state(), self.log.state(), self.options.steps.as_deref())?;
        let missing: Vec<&SnapshotRecord> = wanted.iter().filter(|record| self.log.state().by_id(record.id).is_none()).collect();
        let mut report = CopyReport { present: (wanted.len() - missing.len()) as u64, ..CopyReport::default() };
        check_order(from.state(), self.log.state(), &missing)?;
        if !missing.is_empty() {
            self.open(None).await?;
        }
        for record in missing {
            self.copy_snapshot(source, from.state(), record, &mut report).await?;
        }
        Ok((wanted, report))
    }

    #[boxed]
    async fn copy_snapshot(&mut self, source: &Store, state: &LogState, record: &SnapshotRecord, report: &mut CopyReport) -> Result<()> {
        let (destination, writer) = (&self.destination.clone(), self.writer);
        let manifest = read_manifest(source, &record.manifest_path(), record.manifest).await?;
        refuse_features(manifest.may_ignore()).in_object(record.manifest_path())?;
        let now = destination.clock_ms().await?;
        let mut oldest_ms = now;
        let age = Age::start();
        for cask in &manifest.casks {
            match present(destination, &cask.path(), cask.bytes).await? {
                Some(found) if destination.verify_cask(cask, record.parent.is_none()).await.is_ok() => {
                    oldest_ms = oldest_ms.min(found.modified_ms)
                }
                _ => {
                    report.ahead_bytes += copy_cask(source, destination, cask, self.ahead.as_ref()).await?;
                    destination.verify_cask(cask, record.parent.is_none()).await.in_object(cask.path())?;
                    report.objects += 1;
                    report.bytes += cask.bytes;
                }
            }
        }
        let directory = format!("directories/{}", manifest.directory);
        let bytes = source.get(&directory, source.limits().max_directory_bytes).await?;
        if present(destination, &directory, bytes.len() as u64).await?.is_none() {
            report.objects += 1;
            report.bytes += bytes.len() as u64;
        }
        destination.put_content_addressed(&directory, bytes).await?;
        // The same bytes, under the name that an `added` entry gives them.
        let bytes = source.get(&record.manifest_path(), source.limits().max_manifest_bytes).await?;
        let path = Manifest::path_of(record.step, record.id);
        match present(destination, &path, bytes.len() as u64).await? {
            Some(found) => oldest_ms = oldest_ms.min(found.modified_ms),
            None => {
                report.objects += 1;
                report.bytes += bytes.len() as u64;
            }
        }
        destination.create_unique(&path, bytes).await?;
        let age = age.older_by(Duration::from_millis(now.saturating_sub(oldest_ms)));
        let mut needs: Vec<Need> = Need::with_manifest(path.clone(), &manifest).collect();
        needs.extend(self.needs_of_chain(source, state, record.parent).await?);
        let mut repaired = false;
        loop {
            let appended = self.log.append_relying_on(&needs, writer, |state| {
                age.check(self.options.age_floor).map_err(|e| {
                    let advice = "; if an earlier copy left it, run `tensorcask gc --apply` on the destination first";
                    Error::new(e.kind(), format!("{}{advice}", e.message())).source(e)
                })?;
                if state.last_writer.is_some_and(|last| last.writer != writer) {
                    return Err(fenced());
                }
                if let Some(parent) = record.parent {
                    chain_of(state, parent, destination.limits().max_chain_depth)?;
                }
                Ok(Event::Added { snapshot: record.id, step: record.step, parent: record.parent, manifest: record.manifest })
            });
            match appended.await.in_object(path.as_str())? {
                Appended::Committed(_) => break,
                Appended::Refused(stale) if stale.replaced || repaired => return Err(stale.error),
                Appended::Refused(stale) => {
                    tracing::warn!(error = %stale.error, "copying again what the destination has lost");
                    self.repair(source, state, record.id, report).await?;
                    repaired = true;
                }
            }
        }
        report.snapshots += 1;
        self.log.write_catalog_if_due().await;
        Ok(())
    }

    /// What the snapshots of a chain need at the destination, which may have compacted some of them.
    #[boxed]
    async fn needs_of_chain(&self, source: &Store, state: &LogState, parent: Option<Id>) -> Result<Vec<Need>> {
        let Some(parent) = parent else { return Ok(Vec::new()) };
        let mut needs = Vec::new();
        for link in chain_of(self.log.state(), parent, self.destination.limits().max_chain_depth)? {
            // The same manifest at the source is nearer.
            let manifest = match state.by_id(link.id).filter(|ours| ours.manifest == link.manifest) {
                Some(ours) => read_manifest(source, &ours.manifest_path(), ours.manifest).await?,
                None => read_manifest(&self.destination, &link.manifest_path(), link.manifest).await?,
            };
            needs.extend(Need::with_manifest(link.manifest_path(), &manifest));
        }
        Ok(needs)
    }

    /// Copies what the destination lacks of a chain, as far as the source has it.
    #[boxed]
    async fn repair(&self, source: &Store, state: &LogState, newest: Id, report: &mut CopyReport) -> Result<()> {
        for link in chain_of(state, newest, source.limits().max_chain_depth)? {
            let manifest = read_manifest(source, &link.manifest_path(), link.manifest).await?;
            for cask in &manifest.casks {
                if present(&self.destination, &cask.path(), cask.bytes).await?.is_none() {
                    copy_cask(source, &self.destination, cask, None).await?;
                    self.destination.verify_cask(cask, link.parent.is_none()).await.in_object(cask.path())?;
                    report.objects += 1;
                    report.bytes += cask.bytes;
                }
            }
            let directory = format!("directories/{}", manifest.directory);
            self.destination.put_content_addressed(&directory, source.get(&directory, source.limits().max_directory_bytes).await?).await?;
            let bytes = source.get(&link.manifest_path(), source.limits().max_manifest_bytes).await?;
            self.destination.create_unique(&Manifest::path_of(link.step, link.id), bytes).await?;
        }
        Ok(())
    }

    /// Who wrote to the destination last, as far as its log has been read.
    pub fn last_writer(&self) -> Option<Id> {
        self.log.state().last_writer.map(|last| last.writer)
    }

    /// Says in the log that this copier writes from now on, once: whoever was writing there is fenced. Who wants to go on after a crash notes
    /// id and [`last_writer`](Self::last_writer) before.
    #[boxed]
    pub async fn take_over(&mut self) -> Result<()> {
        self.open(None).await
    }

    /// As [`take_over`](Self::take_over); `Fenced` if another than `last` has written there since.
    #[boxed]
    pub async fn take_over_from(&mut self, last: Option<Id>) -> Result<()> {
        self.open(Some(last)).await
    }

    /// Goes on in the place of an earlier copier, and takes nothing over: as whichever of these wrote last. `Fenced` if that was another.
    #[boxed]
    pub async fn go_on_as(&mut self, ids: &[Id]) -> Result<()> {
        match self.last_writer() {
            Some(last) if ids.contains(&last) => {
                (self.writer, self.opened) = (last, true);
                Ok(())
            }
            Some(_) => Err(fenced().object(self.destination.url())),
            None => self.open(None).await,
        }
    }

    async fn open(&mut self, only_from: Option<Option<Id>>) -> Result<()> {
        if !self.opened {
            let url = self.destination.url().to_owned();
            let opened = self.log.append(self.writer, |state| match only_from {
                Some(last) if state.last_writer.map(|last| last.writer) != last => Err(fenced().object(&url)),
                _ => Ok(Event::Opened {}),
            });
            opened.await?;
            self.opened = true;
            self.log.write_catalog_if_due().await;
        }
        Ok(())
    }
}

fn fenced() -> Error {
    Error::new(ErrorKind::Fenced, "another job writes to the destination").clause("log 5")
}

/// Snapshots to copy and their chains, by commit. A link that nobody asked for is to be forgotten at the destination, unless the destination
/// had it before.
fn wanted(store: &Store, state: &LogState, destination: &LogState, steps: Option<&[u64]>) -> Result<Vec<SnapshotRecord>> {
    let roots: Vec<&SnapshotRecord> = match steps {
        None => state.live().collect(),
        Some([]) => return Err(Error::invalid("no step to copy")),
        Some(steps) => steps.iter().map(|&step| live_step(state, step).in_object(store.url())).collect::<Result<_>>()?,
    };
    let asked: BTreeSet<Id> = roots.iter().map(|root| root.id).collect();
    let mut wanted: BTreeMap<u64, SnapshotRecord> = BTreeMap::new();
    for root in roots {
        for mut link in chain_of(state, root.id, store.limits().max_chain_depth)? {
            if steps.is_some() && !asked.contains(&link.id) && destination.by_id(link.id).is_none() {
                link.status = Status::Forgotten;
            }
            wanted.entry(link.sequence).or_insert(link);
        }
    }
    Ok(wanted.into_values().collect())
}

/// Opens the destination, or creates it with the run id of the source.
#[boxed]
async fn open(source: &Store, destination: &Store) -> Result<Log> {
    let file = source.read_store_file().await?;
    refuse_features(file.may_ignore())?;
    destination.ensure_root()?;
    match destination.read_store_file().await {
        Ok(found) if found.run == file.run => {}
        Ok(_) => {
            let message = "holds another run; copy into an empty place, or into a copy of the same run";
            return Err(Error::invalid(message).object(destination.url()));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            destination.probe().await?;
            let created = destination.create(STORE_FILE, file.encode()?.into()).await;
            if let Created::Exists = created.map_err(|e| Error::storage(STORE_FILE, e))?
                && destination.read_store_file().await?.run != file.run
            {
                return Err(Error::new(ErrorKind::Conflict, "another store was created here in the meantime").object(destination.url()));
            }
        }
        Err(e) => return Err(e),
    }
    Log::load(destination).await
}

/// What was committed first at the source has to come first at the destination: there, too, the newest commit is the latest.
fn check_order(source: &LogState, destination: &LogState, missing: &[&SnapshotRecord]) -> Result<()> {
    let newest = destination.snapshots().iter().filter_map(|record| source.by_id(record.id)).map(|record| record.sequence).max();
    match missing.iter().find(|record| newest.is_some_and(|newest| record.sequence < newest)) {
        None => Ok(()),
        Some(record) => Err(Error::invalid(format!(
            "step {} was committed before steps that the destination has already, and cannot be added after them; copy into an empty place",
            record.step
        ))),
    }
}

/// Does at the destination what was done at the source: reduces, forgets, pins.
#[boxed]
async fn settle(source: &Store, destination: &Store, log: &mut Log, writer: Id, wanted: &[SnapshotRecord]) -> Result<()> {
    for record in wanted {
        let Some(roles) = &record.roles else { continue };
        if log.state().by_id(record.id).is_none_or(|found| found.roles == record.roles || found.manifest != record.manifest) {
            continue;
        }
        let bytes = source.get(&record.manifest_path(), source.limits().max_manifest_bytes).await?;
        destination.create_unique(&Manifest::path_of_compacted(record.step, record.id, record.manifest), bytes).await?;
        let (snapshot, parent, manifest) = (record.id, record.parent, record.manifest);
        log.append(writer, |_| Ok(Event::Compacted { snapshot, parent, manifest, roles: Some(roles.clone()) })).await?;
        log.write_catalog_if_due().await;
    }
    let dead: BTreeSet<Id> = wanted.iter().filter(|record| record.status != Status::Live).map(|record| record.id).collect();
    let mut forget: Vec<Id> = log.state().live().map(|record| record.id).filter(|id| dead.contains(id)).collect();
    while !forget.is_empty() {
        let rest = forget.split_off(forget.len().min(10_000));
        log.append(writer, |_| Ok(Event::Forgotten { snapshots: forget.clone() })).await?;
        log.write_catalog_if_due().await;
        forget = rest;
    }
    for record in wanted.iter().filter(|record| record.pinned) {
        if log.state().by_id(record.id).is_some_and(|found| !found.pinned) {
            log.append(writer, |_| Ok(Event::Pinned { snapshot: record.id, pinned: true })).await?;
            log.write_catalog_if_due().await;
        }
    }
    Ok(())
}

/// An object of this size, if it is there.
async fn present(store: &Store, path: &str, bytes: u64) -> Result<Option<Listed>> {
    Ok(store.head_if_present(path).await?.filter(|found| found.bytes == bytes))
}

/// Copies a cask, or what has not been sent ahead of it; bytes that had been.
#[boxed]
async fn copy_cask(source: &Store, destination: &Store, cask: &CaskRef, ahead: Option<&Ahead>) -> Result<u64> {
    let path = cask.path();
    let begun = match ahead {
        Some(ahead) => ahead.take(&path).await,
        None => None,
    };
    let (mut upload, mut start, sent) = match begun {
        Some(begun) => (begun.upload, begun.bytes, begun.sent_bytes),
        None => (Upload::new(destination, path.clone(), cask.bytes), 0, 0),
    };
    while start < cask.bytes {
        let end = cask.bytes.min(start + WINDOW_BYTES);
        upload.push(vec![source.get_range(&path, start..end).await?]).await?;
        start = end;
    }
    upload.finish().await?;
    Ok(sent)
}
