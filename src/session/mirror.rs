//! A mirror: a part of a store's objects at another place, at the same paths and with the same bytes.
//!
//! In a session of many hosts (spec log 8), each host keeps a mirror in memory. A host writes the casks and receipts of
//! its ranks there first, and uploads them from there. It copies what all hosts read: log, manifests and directories.
//! The mirrors of all hosts together hold everything that a reader needs, so a lost host can be restored without the
//! store.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;

use super::exchange::SessionExchange;
use super::log::SessionLog;
use crate::chain::chain_of;
use crate::commit::{CATALOG_INTERVAL, Catalog, LogState, ManifestPlace, SnapshotRecord, read_manifest, read_manifest_bytes};
use crate::error::ResultExt;
use crate::maintain::{CopyFailure, copy_checked_cask, present};
use crate::reader::CaskSource;
use crate::wire::{
    CaskRef, Directory, Id, Manifest, PARENT_OBJECT, RankRange, Receipt, STORE_FILE, SessionMessage, SessionName, SessionStep, SharedParent,
};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// A part of a store in memory, for some ranks of a session of many hosts.
///
/// One task follows the log with one mirror; another may save, describe parents, upload and prune with another mirror of the same
/// place.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::session::{Mirror, SessionLog};
/// use tensorcask::{Policy, Store};
/// let (store, memory) = (Store::open("memory://mirror-example")?, Store::open("memory://mirror-example-memory")?);
/// store.writer(Policy::Full).await?;
/// let mut mirror = Mirror::new(&store, &memory);
/// mirror.follow(&SessionLog::open(&store).await?).await?;
/// assert_eq!(SessionLog::open(&memory).await?.sequence(), 1);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Mirror {
    pub(super) store: Store,
    pub(super) memory: Store,
    /// Last log entry that the mirror has; `None` before it was looked up.
    last_entry: Option<u64>,
    /// First log entry that the mirror has; `None` before it was looked up.
    first_entry: Option<u64>,
    /// Links of the chains that the mirror describes: those of the newest snapshot, and of the parents of steps in the mirror.
    /// With the log entry that holds the snapshot, if it is inline.
    links: BTreeMap<Id, Option<u64>>,
    /// Whether `store` is the store itself. The mirror of another host proves nothing against this mirror.
    pub(super) is_of_store: bool,
}

impl Mirror {
    /// Number of log entries up to which [`shorten_log`](Self::shorten_log) removes nothing.
    pub const KEPT_ENTRIES: u64 = 3 * CATALOG_INTERVAL;

    /// Mirrors `store` in `memory`. Sends no request.
    pub fn new(store: &Store, memory: &Store) -> Self {
        let store = store.clone();
        let memory = memory.clone();
        Self { store, memory, last_entry: None, first_entry: None, links: BTreeMap::new(), is_of_store: true }
    }

    /// The place of the mirror.
    pub fn memory(&self) -> &Store {
        &self.memory
    }

    /// Copies the entries of the log that the mirror lacks. Copies manifests and directories of the newest snapshot, of the
    /// parents of steps in the mirror, and of the chains of both. Empties a mirror of another store first.
    #[boxed]
    pub async fn follow(&mut self, log: &SessionLog) -> Result<()> {
        let state = log.state();
        let start = match self.last_entry {
            Some(_) => None,
            None => Some(self.begin(state).await?),
        };
        // Described before the log names them: the store may stop answering in between.
        let mut links = BTreeMap::new();
        for record in needed_links(state, &parents_in(&self.memory, None).await?, self.store.limits().max_chain_depth)? {
            let place = record.manifest_place();
            if !self.links.contains_key(&record.id) || self.manifest_in_memory(&place).await?.is_none() {
                match self.copy_link(&place).await {
                    Ok(()) => {}
                    // No other snapshot may wait for one that cannot be read. Another mirror may lack it because it needs it no more.
                    Err(error) if error.kind().is_damaged_object() || (self.is_of_store && error.kind() == ErrorKind::NotFound) => {
                        tracing::warn!(%error, "a snapshot is damaged; the mirror does not describe it");
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            links.insert(record.id, place.inline_in);
        }
        self.links = links;
        let last = match (&start, self.last_entry) {
            (Some(start), _) => self.copy_catalog(start.last).await?,
            (None, last) => last.unwrap_or(0),
        };
        self.copy_entries(last, state.sequence).await?;
        if let Some(start) = start {
            if let Some(file) = start.unwritten {
                self.memory.objects().put_whole(STORE_FILE, Bytes::from(file.encode()?).into()).await?;
            }
            self.repair_log(state).await?;
        }
        self.last_entry = Some(last.max(state.sequence));
        Ok(())
    }

    /// Copies what the mirror lacks of a snapshot: manifests and directories of its chain (`links`, newest first), and the log up to
    /// the entry that adds it. Call it before a save against this snapshot: the store may stop answering, and other hosts copy a
    /// step only from a mirror that describes its parent. Leaves a log alone that [`follow`](Self::follow) has not begun.
    #[boxed]
    pub async fn describe(&self, links: &[SnapshotRecord]) -> Result<()> {
        for place in links.iter().map(SnapshotRecord::manifest_place) {
            // An inline manifest is in the log entry.
            if place.inline_in.is_none() && self.memory.objects().head_if_present(&place.path).await?.is_none() {
                self.copy_link(&place).await?;
            }
        }
        match links.first() {
            Some(newest) => self.copy_log_up_to(newest.sequence).await,
            None => Ok(()),
        }
    }

    /// Copies log entries that a mirror lacks from another mirror, with manifests and directories as in
    /// [`follow`](Self::follow); returns whether there were any. A host uses this while the store does not answer.
    #[boxed]
    pub async fn learn(from: &Store, memory: &Store) -> Result<bool> {
        let ours = SessionLog::open(memory).await?;
        let theirs = SessionLog::open(from).await?;
        let is_ahead = theirs.sequence() > ours.sequence() && memory.history().run().await? == from.history().run().await?;
        if is_ahead {
            Self { is_of_store: false, ..Self::new(from, memory) }.follow(&theirs).await?;
        }
        Ok(is_ahead)
    }

    /// Copies the newest catalog of the store, and removes older log entries except the last 64 before it, if there are more than
    /// [`KEPT_ENTRIES`](Self::KEPT_ENTRIES). Call it after [`follow`](Self::follow), and only while no reader needs the log as
    /// of an earlier entry.
    #[boxed]
    pub async fn shorten_log(&mut self) -> Result<()> {
        let last = self.last_entry.unwrap_or(0);
        let first = match self.first_entry {
            Some(first) => first,
            None => {
                let names = self.memory.objects().names_after("log", "").await?;
                names.first().and_then(|name| sequence_of_entry(name)).unwrap_or(last)
            }
        };
        self.first_entry = Some(first);
        if last.saturating_sub(first) < Self::KEPT_ENTRIES {
            return Ok(());
        }
        let newest = Catalog::list(&self.store).await?.into_iter().next();
        let Some((sequence, path)) = newest.and_then(|path| Some((Catalog::sequence_of(&path)?, path))) else { return Ok(()) };
        if sequence > last || sequence.saturating_sub(CATALOG_INTERVAL) <= first {
            return Ok(());
        }
        let bytes = Catalog::read_bytes(&self.store, &path).await?;
        self.memory.objects().put_content_addressed(&path, bytes).await?;
        // Readers that follow the log from the mirror may be a little behind.
        let first_kept = sequence.saturating_sub(CATALOG_INTERVAL);
        // The entry of an inline snapshot holds its manifest and casks.
        let inline: BTreeSet<u64> = self.links.values().copied().flatten().collect();
        for name in self.memory.objects().names_after("log", "").await? {
            if sequence_of_entry(&name).is_some_and(|entry| entry < first_kept && !inline.contains(&entry)) {
                self.memory.objects().delete(&format!("log/{name}")).await?;
            }
        }
        self.first_entry = Some(first_kept);
        for found in self.memory.objects().list("catalog").await?.into_iter().filter(|found| found.path != path) {
            self.memory.objects().delete(&found.path).await?;
        }
        Ok(())
    }

    /// Copies manifest and directory of a snapshot. Replaces those that are damaged.
    #[boxed]
    async fn copy_link(&self, place: &ManifestPlace) -> Result<()> {
        let objects = self.memory.objects();
        // `store` may be the mirror of a host that needs this link no more.
        let manifest = match self.manifest_in_memory(place).await? {
            Some(manifest) => manifest,
            None => {
                let (manifest, bytes) = read_manifest_bytes(&self.store, place).await?;
                // Before the directory, see `prune`. The log entry has the manifest of an inline snapshot.
                if place.inline_in.is_none() {
                    objects.put_content_addressed(&place.path, bytes).await?;
                }
                manifest
            }
        };
        let directory = format!("directories/{}", manifest.directory);
        let max_bytes = self.store.limits().max_directory_bytes;
        let is_here = match objects.get_if_present(&directory, max_bytes).await {
            Err(e) if e.kind() == ErrorKind::LimitExceeded => false,
            found => found?.is_some_and(|bytes| Directory::check_digest(&bytes, manifest.directory).is_ok()),
        };
        if !is_here {
            let bytes = self.store.objects().get(&directory, max_bytes).await?;
            Directory::check_digest(&bytes, manifest.directory).in_object(directory.as_str())?;
            objects.put_content_addressed(&directory, bytes).await?;
        }
        Ok(())
    }

    /// Manifest of a snapshot in the mirror; `None` if it is absent or damaged.
    async fn manifest_in_memory(&self, place: &ManifestPlace) -> Result<Option<Manifest>> {
        match read_manifest(&self.memory, place).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(e) if e.kind().is_damaged_object() => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Steps of a session of which the mirror has the receipts of all these ranks.
    #[boxed]
    pub async fn steps(&self, session: SessionName, ranks: Range<u32>) -> Result<Vec<SessionStep>> {
        let found = SessionExchange::new(&self.memory, session).survey(None).await?.steps;
        Ok(found.into_iter().filter(|(_, present)| present.has_all(ranks.clone())).map(|(at, _)| at).collect())
    }

    /// Uploads the casks of a step, every byte checked, and then the receipts. Objects that the store has are not sent again.
    /// Returns the bytes that were sent. Fails with `Corrupt` if the mirror does not have all of the step.
    #[boxed]
    pub async fn upload(&self, session: SessionName, at: SessionStep) -> Result<u64> {
        let exchange = SessionExchange::new(&self.memory, session);
        let ranks = exchange.survey(None).await?.steps.remove(&at);
        let lost = |error: Error| match error.kind() {
            ErrorKind::NotFound => Error::corrupt(format!("memory has lost a part of step {}: {error}", at.step)).source(error),
            _ => error,
        };
        let ranks =
            ranks.ok_or_else(|| Error::corrupt(format!("memory has lost the receipts of step {}", at.step)).object(session.folder()))?;
        let receipts = exchange.receipts(at, &ranks).await?;
        let mut sent = 0u64;
        for receipt in &receipts {
            for cask in &receipt.casks {
                if present(&self.store, &cask.path(), cask.bytes).await?.is_some() {
                    continue;
                }
                let from = CaskSource::object(&self.memory, cask);
                copy_checked_cask(&from, &self.store, cask, receipt.parent.is_none()).await.map_err(|failure| match failure {
                    CopyFailure::Source(error) => lost(error),
                    CopyFailure::Destination(error) => error,
                })?;
                sent = sent.saturating_add(cask.bytes);
            }
        }
        SessionExchange::new(&self.store, session).put_receipts(&receipts).await?;
        Ok(sent)
    }

    /// Fixes the parent of a step in the store, if the host saved the step while the store did not answer. Fails with
    /// `Conflict` if other hosts made their deltas against another snapshot.
    #[boxed]
    pub async fn agree_on_parent(&self, session: SessionName, at: SessionStep) -> Result<()> {
        let Some(ours) = SessionExchange::new(&self.memory, session).parent(at).await? else { return Ok(()) };
        let fixed = SessionExchange::new(&self.store, session).fix_parent(at, ours).await?;
        // Whole chunks agree with any parent, and a host that wrote whole chunks may have been first.
        if fixed == ours || fixed.is_none() || self.writes_whole(session, at).await? {
            return Ok(());
        }
        let message = format!("step {} was saved without the store, and other hosts made their deltas against another snapshot", at.step);
        Err(Error::new(ErrorKind::Conflict, message))
    }

    /// Whether the parts of a step in both mirrors can form one snapshot: they have the same parent, or this one holds whole
    /// chunks. `None` if the other mirror does not have the step yet.
    #[boxed]
    pub async fn fits(&self, other: &Store, session: SessionName, at: SessionStep) -> Result<Option<bool>> {
        let Some(ours) = SessionExchange::new(&self.memory, session).parent(at).await?.flatten() else { return Ok(Some(true)) };
        let theirs = SessionExchange::new(other, session);
        // Until the receipts are there, the other host may change its parent.
        if theirs.ranks(at).await?.is_empty() {
            return Ok(None);
        }
        Ok(match theirs.parent(at).await? {
            None => None,
            Some(None) => Some(true),
            Some(Some(theirs)) => Some(theirs == ours || self.writes_whole(session, at).await?),
        })
    }

    /// Whether all receipts of a step in the mirror are of whole chunks.
    async fn writes_whole(&self, session: SessionName, at: SessionStep) -> Result<bool> {
        let exchange = SessionExchange::new(&self.memory, session);
        let ranks = exchange.ranks(at).await?;
        Ok(exchange.receipts(at, &ranks).await?.iter().all(|receipt| receipt.parent.is_none()))
    }

    /// Removes what nothing needs any more. Needed are the newest snapshot of the log, `keep` and newer steps of the session, their
    /// parents, and the chains of all these. Steps of other sessions are needed until this one has committed a snapshot: the job
    /// may resume from them if it fails before. No save into the mirror may be under way.
    #[boxed]
    pub async fn prune(&self, session: SessionName, keep: SessionStep) -> Result<()> {
        let objects = self.memory.objects();
        // Directories before manifests, and both before the log: `follow` copies a manifest first, then its directory, and then the
        // log entry that names the snapshot.
        let mut listed = Vec::new();
        for folder in ["directories", "snapshots", "receipts", "casks"] {
            listed.extend(objects.list(folder).await?.into_iter().map(|found| found.path));
        }
        let mut needed = BTreeSet::new();
        let log = match SessionLog::open_to_end(&self.memory).await {
            Ok(log) if log.sequence() > 0 => log,
            // The log is still being copied.
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.is_damage() => {
                tracing::error!(%error, "the log in memory is damaged; nothing is removed, because it is not known what is needed");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let kept = Kept { session, from: keep, has_committed: log.has_committed(session.session) };
        let known: BTreeSet<String> = log.state().snapshots().iter().map(SnapshotRecord::manifest_path).collect();
        // The log does not name this snapshot yet, so its directory is not known.
        if listed.iter().any(|path| path.starts_with("snapshots/") && !known.contains(path)) {
            needed.extend(listed.iter().filter(|path| !path.starts_with("receipts/") && !path.starts_with("casks/")).cloned());
        }
        let parents = parents_in(&self.memory, Some(kept)).await?;
        if let Some(parent) = parents.iter().find(|parent| log.state().by_id(**parent).is_none()) {
            tracing::warn!(%parent, "the log in memory does not have the parent of a step yet; nothing is removed");
            return Ok(());
        }
        for record in needed_links(log.state(), &parents, self.memory.limits().max_chain_depth)? {
            let place = record.manifest_place();
            // Without its manifest, nothing of a link can be read.
            if place.inline_in.is_none() && objects.head_if_present(&place.path).await?.is_none() {
                continue;
            }
            let Some(manifest) = self.manifest_in_memory(&place).await? else {
                tracing::error!(object = place.path, "a manifest is damaged in memory; no cask is removed, because its own are not known");
                // The log entry has the casks of an inline snapshot.
                let may_be_its_own =
                    |path: &&String| path.starts_with("directories/") || (place.inline_in.is_none() && path.starts_with("casks/"));
                needed.extend(listed.iter().filter(may_be_its_own).cloned());
                needed.insert(place.path);
                continue;
            };
            needed.extend(manifest.casks.iter().map(CaskRef::path));
            needed.extend([format!("directories/{}", manifest.directory), place.path]);
        }
        for path in listed.iter().filter(|path| path.starts_with("receipts/") && kept.has(path)) {
            if let Some(ranks) = path.rsplit('/').next().and_then(RankRange::from_object) {
                let bytes = objects.get(path, self.memory.limits().max_manifest_bytes).await?;
                match Receipt::decode_all(&bytes, ranks, self.memory.limits()) {
                    Ok(receipts) => needed.extend(receipts.iter().flat_map(|receipt| &receipt.casks).map(CaskRef::path)),
                    Err(error) => tracing::error!(object = path, %error, "a receipt is damaged in memory; its step is lost"),
                }
            }
            needed.insert(path.clone());
        }
        for path in listed.iter().filter(|path| !needed.contains(*path)) {
            objects.delete(path).await?;
        }
        Ok(())
    }
}

/// The steps that pruning keeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    session: SessionName,
    from: SessionStep,
    has_committed: bool,
}

impl Kept {
    /// Whether an object of the receipts belongs to such a step.
    fn has(&self, path: &str) -> bool {
        let folder = self.session.folder();
        match path.strip_prefix(&folder).and_then(|rest| rest.strip_prefix('/')).and_then(|rest| rest.split_once('/')) {
            Some((step, _)) => SessionStep::from_folder(step).is_some_and(|step| step >= self.from),
            None => !self.has_committed,
        }
    }
}

/// Parents of steps in a mirror: of all, or of those that pruning keeps.
pub(super) async fn parents_in(memory: &Store, of: Option<Kept>) -> Result<BTreeSet<Id>> {
    let objects = memory.objects();
    let mut parents = BTreeSet::new();
    for found in objects.list("receipts").await? {
        if found.path.rsplit('/').next() != Some(PARENT_OBJECT) || of.is_some_and(|kept| !kept.has(&found.path)) {
            continue;
        }
        // Pruning may have removed it since the listing.
        let Some(bytes) = objects.get_if_present(&found.path, memory.limits().max_entry_bytes).await? else { continue };
        match SharedParent::decode(&bytes, memory.limits()) {
            Ok(shared) => parents.extend(shared.parent),
            Err(error) => tracing::error!(object = found.path, %error, "the parent of a step is damaged in memory; the step is lost"),
        }
    }
    Ok(parents)
}

/// The newest snapshot of the log, these parents, and the chains of all. A parent that the log does not have, or has no more, is
/// left out: no step can be read with it.
pub(super) fn needed_links(state: &LogState, parents: &BTreeSet<Id>, max_depth: u64) -> Result<Vec<SnapshotRecord>> {
    let mut links = match state.latest() {
        Some(latest) => chain_of(state, latest.id, max_depth)?,
        None => Vec::new(),
    };
    for parent in parents {
        let chain = chain_of(state, *parent, max_depth).unwrap_or_default();
        let known: BTreeSet<Id> = links.iter().map(|link| link.id).collect();
        links.extend(chain.into_iter().filter(|link| !known.contains(&link.id)));
    }
    Ok(links)
}

/// Number of a log entry, from the last part of its path.
pub(super) fn sequence_of_entry(name: &str) -> Option<u64> {
    name.strip_suffix(".json")?.parse().ok()
}

/// Deletes all objects of a store in memory.
pub(super) async fn clear(memory: &Store) -> Result<()> {
    for found in memory.objects().list("").await? {
        memory.objects().delete(&found.path).await?;
    }
    Ok(())
}
