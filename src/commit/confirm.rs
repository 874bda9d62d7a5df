//! Confirms, right before a commit, that the store still is what the writer remembers. Spec: `spec/log.md`, clause 5.6.
//!
//! A writer may live for days. Meanwhile people delete the folder, move it away, restore a backup over it, or lose
//! single objects. An entry created in such a store would be acknowledged, but no reader would ever find it. A writer
//! therefore checks four things right before it creates the entry:
//!
//! - `store.json` exists and names the same run.
//! - The last entry that the writer knows exists and has the known digest. Entries name the digests of their
//!   predecessors, so this one comparison covers the whole history.
//! - All entries that a reader needs exist, from the newest catalog on.
//! - Every object that the new snapshot needs exists and has the right size.
//!
//! Listings may lag, and catalogs are optional. If this quick check finds something missing, it therefore decides
//! nothing. The log is then opened as a new process would open it, and the result is compared.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::store_file::read_store_file;
use super::{Log, SnapshotRecord};
use crate::error::ResultExt;
use crate::store::{Created, Store};
use crate::wire::STORE_FILE;
use crate::wire::{LogEntry, Manifest};
use crate::{Error, ErrorKind, Result, boxed};

/// Number of requests for objects in flight at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Number of objects above which a listing takes fewer requests than one request per object. A page of a listing holds
/// 1000 objects.
const MAX_HEADS: usize = 1000;
/// Maximum number of times that the end of a log is read again while others write to it.
const MAX_LOOKS: u32 = 8;

/// Object that a commit relies on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Need {
    /// Path below the root of the store.
    pub path: String,
    /// Size in bytes, if known.
    pub bytes: Option<u64>,
}

impl Need {
    /// The directory of a manifest.
    pub(crate) fn directory(manifest: &Manifest) -> Self {
        Self { path: format!("directories/{}", manifest.directory), bytes: None }
    }

    /// Lists the casks and the directory of a manifest, all of them objects.
    pub(crate) fn of(manifest: &Manifest) -> impl Iterator<Item = Self> {
        let directory = Self::directory(manifest);
        let casks = manifest.casks.iter().map(|cask| Self { path: cask.path(), bytes: Some(cask.bytes) });
        casks.chain([directory])
    }

    /// Lists the objects of a committed snapshot: its manifest, casks and directory, or its log entry, of which the size may
    /// be known, and directory.
    pub(crate) fn of_committed(record: &SnapshotRecord, manifest: &Manifest, entry_bytes: Option<u64>) -> Vec<Self> {
        let holder = Self { path: record.manifest_path(), bytes: entry_bytes };
        match record.inline {
            Some(_) => vec![holder, Self::directory(manifest)],
            None => [holder].into_iter().chain(Self::of(manifest)).collect(),
        }
    }
}

/// Result of comparing a store with a log.
#[derive(Debug)]
pub(crate) enum Standing {
    /// The store has the whole log and every object that was checked.
    Same,
    /// The store was changed from outside.
    Stale(Stale),
}

/// Difference between a store and its known log.
#[derive(Debug)]
pub(crate) struct Stale {
    /// Description of the missing or changed object; of kind `Conflict`.
    pub error: Error,
    /// Whether the log itself is gone or replaced. If false, only objects are missing.
    pub replaced: bool,
}

impl Stale {
    fn replaced(what: impl std::fmt::Display, store: &Store) -> Self {
        let message = format!("{what}: the store was deleted, moved or replaced while this process had it open. Nothing was committed");
        Self { error: Error::new(ErrorKind::Conflict, message).object(store.url()).clause("log 5.6"), replaced: true }
    }

    fn missing(object: &str, what: &str) -> Self {
        let message = format!("{object} {what}, but the snapshot needs it: it was removed from the store. Nothing was committed");
        Self { error: Error::new(ErrorKind::Conflict, message).object(object).clause("log 5.6"), replaced: false }
    }
}

impl Log {
    /// Reads the log for a commit. An absent entry below an existing one is an error: the commit would take its number,
    /// and the later entries would no longer fit.
    #[boxed]
    pub(crate) async fn load_whole(store: &Store) -> Result<Self> {
        let mut log = Self::load_part(store).await?;
        log.check_end().await?;
        Ok(log)
    }

    #[boxed]
    pub(super) async fn check_end(&mut self) -> Result<()> {
        for _ in 0..MAX_LOOKS {
            let later = self.entries_after(self.state.sequence).await?;
            let (next, Some(last)) = (self.state.next_sequence()?, later.last()) else { return Ok(()) };
            let before = self.state.sequence;
            if let Standing::Stale(stale) = self.catch_up().await? {
                return Err(stale.error);
            }
            if self.state.sequence == before && before < *last {
                let message = format!(
                    "is missing, although entry {last} is there: a part of the log was deleted. Put it back, or save to a new place"
                );
                return Err(Error::corrupt(message).object(LogEntry::path_of(next)).clause("log 5.8"));
            }
        }
        // Other writers commit faster than this reads. All entries read so far are in order.
        Ok(())
    }

    /// Lists the numbers of the entries after `sequence`.
    async fn entries_after(&self, sequence: u64) -> Result<Vec<u64>> {
        let name = |sequence| LogEntry::path_of(sequence).trim_start_matches("log/").to_owned();
        let names = self.store.objects().names_after("log", &name(sequence)).await?;
        let number = |found: String| found.strip_suffix(".json")?.parse().ok().filter(|&number| name(number) == found);
        Ok(names.into_iter().filter_map(number).collect())
    }

    /// Checks whether the store still has this log and the objects that a commit relies on.
    #[boxed]
    pub(crate) async fn confirm(&mut self, needs: &[Need]) -> Result<Standing> {
        let (whole, missing) = tokio::join!(self.looks_whole(), missing(&self.store, needs));
        if !whole? && let Some(stale) = self.compare_anew().await? {
            return Ok(Standing::Stale(stale));
        }
        Ok(missing?.map_or(Standing::Same, Standing::Stale))
    }

    /// Compares the entry stored under the number of the last known entry.
    pub(super) fn compare_last(&self, found: Option<&Bytes>) -> Result<Option<Stale>> {
        let path = LogEntry::path_of(self.state.sequence);
        let Some(bytes) = found else {
            return Ok(Some(Stale::replaced(format_args!("{path}, the last entry that this process knows, is gone"), &self.store)));
        };
        let (_, digest) = LogEntry::decode(bytes, self.state.sequence, self.store.limits()).in_object(path.as_str())?;
        let differs = self.state.head != Some(digest);
        Ok(differs.then(|| Stale::replaced(format_args!("{path} is not the entry that this process knows"), &self.store)))
    }

    /// Checks in one round trip whether anything seems to be missing.
    async fn looks_whole(&self) -> Result<bool> {
        let last = self.state.sequence;
        let first = self.catalog.as_ref().map_or(0, |(sequence, _)| *sequence);
        let catalog = async {
            match &self.catalog {
                Some((_, path)) => Ok(self.store.objects().head_if_present(path).await?.is_some()),
                None => Ok(true),
            }
        };
        let entry = async { if last == 0 { Ok(None) } else { self.fetch_last().await } };
        let (file, entry, catalog, entries) = tokio::join!(read_store_file(&self.store), entry, catalog, self.entries_after(first));
        match file {
            Ok(file) if file.run == self.store_file.run => {}
            Ok(_) => return Ok(false),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        }
        let entry = entry?;
        if last > 0 && self.compare_last(entry.as_ref())?.is_some() {
            return Ok(false);
        }
        let entries = entries?;
        let in_order = entries.iter().zip(first.saturating_add(1)..).all(|(found, expected)| *found == expected);
        Ok(catalog? && in_order && entries.len() as u64 >= last.saturating_sub(first))
    }

    /// Opens the log as a new process would and returns the difference. If only `store.json` is gone, restores it.
    #[boxed]
    async fn compare_anew(&mut self) -> Result<Option<Stale>> {
        let mut loaded = Self::load_whole(&self.store).await;
        if loaded.as_ref().is_err_and(|e| e.kind() == ErrorKind::NotFound) {
            let last = if self.state.sequence == 0 { None } else { self.fetch_last().await? };
            if self.compare_last(last.as_ref())?.is_some() {
                return Ok(Some(Stale::replaced(format_args!("{STORE_FILE} is gone"), &self.store)));
            }
            tracing::warn!(store = self.store.url(), "store.json was removed; restoring the file");
            let created = self.store.objects().create(STORE_FILE, self.store_file.encode()?.into()).await;
            let (Created::Written | Created::Exists) = created.map_err(|e| Error::storage(STORE_FILE, e))?;
            loaded = Self::load_whole(&self.store).await;
        }
        let fresh = loaded?;
        if fresh.store_file.run != self.store_file.run {
            let what = format!("{STORE_FILE} names run {}, and named run {}", fresh.store_file.run, self.store_file.run);
            return Ok(Some(Stale::replaced(what, &self.store)));
        }
        let (ours, theirs) = (self.state.sequence, fresh.state.sequence);
        let stale = match theirs.cmp(&ours) {
            std::cmp::Ordering::Less => {
                let what = format!("the log ends with entry {theirs}, and ended with entry {ours}");
                Some(Stale::replaced(what, &self.store))
            }
            std::cmp::Ordering::Equal if fresh.state.head == self.state.head => None,
            std::cmp::Ordering::Greater if ours == 0 => None,
            _ => self.compare_last(self.fetch_last().await?.as_ref())?,
        };
        if stale.is_none() {
            self.catalog = fresh.catalog;
        }
        Ok(stale)
    }
}

/// Returns the first of these objects that is missing or has another size.
#[boxed]
async fn missing(store: &Store, needs: &[Need]) -> Result<Option<Stale>> {
    let mut listed: BTreeMap<String, u64> = BTreeMap::new();
    if needs.len() > MAX_HEADS {
        for folder in ["casks", "directories", "snapshots"] {
            listed.extend(store.objects().list(folder).await?.into_iter().map(|found| (found.path, found.bytes)));
        }
    }
    // Requests objects that the listing lacks, because listings may lag.
    let fits = |need: &Need, bytes: u64| need.bytes.is_none_or(|wanted| wanted == bytes);
    let doubtful: Vec<&Need> = needs.iter().filter(|need| listed.get(&need.path).is_none_or(|&bytes| !fits(need, bytes))).collect();
    let paths = doubtful.iter().map(|need| need.path.clone()).collect();
    let sizes = store.objects().sizes(paths, CONCURRENT_REQUESTS).await?;
    Ok(doubtful.into_iter().zip(sizes).find_map(|(need, size)| match size {
        None => Some(Stale::missing(&need.path, "is gone")),
        Some(bytes) if !fits(need, bytes) => {
            Some(Stale::missing(&need.path, &format!("has {bytes} bytes, {} were written", need.bytes.unwrap_or_default())))
        }
        Some(_) => None,
    }))
}
