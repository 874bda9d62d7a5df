//! Confirms, right before a commit, that the store still is what the writer remembers. Spec: `spec/log.md`, clause 5.6.
//!
//! A writer may live for days. Meanwhile people delete the folder, move it away, restore a backup over it, or lose
//! single objects. An entry created in such a store would be acknowledged, but no reader would ever find it. A writer
//! trusts nothing that it remembers. Right before it creates the entry, it checks:
//!
//! - The URL still leads to the folder that was opened (`store/root.rs`).
//! - `store.json` exists and is the same.
//! - The last entry that the writer knows exists and has the known digest. Entries name the digests of their
//!   predecessors, so this one comparison covers the whole history.
//! - All entries up to that one exist, from the first on. Those after the newest catalog have the size that the writer knows
//!   and, on a local disk, the digest.
//! - Every object that the new snapshot needs exists and is intact: directories, manifests and log entries byte by byte,
//!   because many snapshots share them and they are small; casks by their size.
//!
//! Listings may lag. An entry that a listing lacks is therefore requested. If the log seems to be another one, it is opened
//! as a new process would open it, and the result is compared.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::entries::{STALE_WAITS, StoredEntries, gap, hidden};
use super::store_file::{check_root, read_store_file};
use super::{Log, ManifestPlace, SnapshotRecord};
use crate::error::ResultExt;
use crate::store::{Created, Store, concurrently};
use crate::wire::STORE_FILE;
use crate::wire::{Digest, Directory, InlineSnapshot, LogEntry, Manifest};
use crate::{Error, ErrorKind, Limits, Result, boxed};

/// Number of requests for objects in flight at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Number of objects above which a listing takes fewer requests than one request per object. A page of a listing holds
/// 1000 objects.
const MAX_HEADS: usize = 1000;
/// Maximum number of times that the end of a log is read again while others write to it.
const MAX_LOOKS: u32 = 8;
/// Size of a directory up to which its bytes are compared before each commit; a larger one is compared by size.
const MAX_COMPARED_BYTES: u64 = 16 << 20;
/// Object that a commit relies on.
#[derive(Debug, Clone)]
pub(crate) struct Need {
    /// Path below the root of the store.
    path: String,
    proof: Proof,
}

/// Property of an object by which a commit knows that it is intact.
#[derive(Debug, Clone)]
enum Proof {
    /// The size in bytes.
    Size(u64),
    /// The digest of a directory.
    Directory(Digest),
    /// The digest of a manifest.
    Manifest(Digest),
    /// Manifest and casks that a log entry holds.
    Inline { sequence: u64, manifest: Digest, casks: Vec<Bytes> },
    /// The digest of a manifest in a log entry.
    InlineManifest { sequence: u64, manifest: Digest },
}

impl Need {
    /// A directory. `bytes` is its size, if known.
    pub(crate) fn directory(digest: Digest, bytes: Option<u64>) -> Self {
        let proof = match bytes {
            Some(bytes) if bytes > MAX_COMPARED_BYTES => Proof::Size(bytes),
            _ => Proof::Directory(digest),
        };
        Self { path: format!("directories/{digest}"), proof }
    }

    /// A manifest that is an object.
    pub(crate) fn manifest(path: String, digest: Digest) -> Self {
        Self { path, proof: Proof::Manifest(digest) }
    }

    /// Lists the casks of a manifest, all of them objects.
    pub(crate) fn casks(manifest: &Manifest) -> impl Iterator<Item = Self> {
        manifest.casks.iter().map(|cask| Self { path: cask.path(), proof: Proof::Size(cask.bytes) })
    }

    /// Lists the objects of a committed snapshot except its directory: its manifest and casks, or its log entry. `inline`: what
    /// the entry holds, if it was read.
    pub(crate) fn of_committed(record: &SnapshotRecord, manifest: &Manifest, inline: Option<&InlineSnapshot>) -> Vec<Self> {
        let ManifestPlace { path, digest, inline_in } = record.manifest_place();
        match (inline_in, inline) {
            (Some(sequence), Some(inline)) => {
                vec![Self { path, proof: Proof::Inline { sequence, manifest: digest, casks: inline.casks.clone() } }]
            }
            (Some(sequence), None) => vec![Self { path, proof: Proof::InlineManifest { sequence, manifest: digest } }],
            (None, _) => [Self::manifest(path, digest)].into_iter().chain(Self::casks(manifest)).collect(),
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
        let message = format!("{object} {what}, but the snapshot needs it. Nothing was committed");
        Self { error: Error::new(ErrorKind::Conflict, message).object(object).clause("log 5.6"), replaced: false }
    }
}

impl Log {
    /// Reads the log for a commit. An absent entry below an existing one is an error: the commit would take its number,
    /// and the later entries would no longer fit. Or a reader that uses no catalog would not get to the new entry.
    #[boxed]
    pub(crate) async fn load_whole(store: &Store) -> Result<Self> {
        let mut log = Self::load_part(store).await?;
        log.read_to_end().await?;
        let gap = StoredEntries::new(&log).find_gap().await?;
        gap.map_or(Ok(log), Err)
    }

    /// Reads what others have committed, until the storage lists no later entry.
    #[boxed]
    pub(super) async fn read_to_end(&mut self) -> Result<()> {
        let mut waits = STALE_WAITS.into_iter();
        for _ in 0..MAX_LOOKS {
            let later = StoredEntries::new(self).listed().await?.split_off(&self.state.next_sequence()?);
            let (next, Some((last, _))) = (self.state.next_sequence()?, later.last_key_value()) else { return Ok(()) };
            let before = self.state.sequence;
            if let Standing::Stale(stale) = self.catch_up().await? {
                return Err(stale.error);
            }
            if self.state.sequence == before && before < *last {
                match waits.next() {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None if later.contains_key(&next) => return Err(hidden(next)),
                    None => return Err(gap(next, &format!("entry {last}"), "log 5.8")),
                }
            }
        }
        // Other writers commit faster than this reads. All entries read so far are in order.
        Ok(())
    }

    /// Checks whether the store still has this log and the objects that a commit relies on.
    #[boxed]
    pub(crate) async fn confirm(&mut self, needs: &[Need]) -> Result<Standing> {
        check_root(&self.store, self.looks_same()).await?;
        let entries = StoredEntries::new(self);
        let (same, gap, missing) = tokio::join!(self.looks_same(), entries.find_gap_once(), missing(&self.store, needs));
        if !same? || gap?.is_some() {
            if let Some(stale) = self.compare_anew().await? {
                return Ok(Standing::Stale(stale));
            }
            if let Some(gap) = StoredEntries::new(self).find_gap().await? {
                return Err(gap);
            }
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

    /// Checks in one round trip whether `store.json` and the last known entry seem to be the same.
    async fn looks_same(&self) -> Result<bool> {
        let last = self.state.sequence;
        let entry = async { if last == 0 { Ok(None) } else { self.fetch_last().await } };
        let (file, entry) = tokio::join!(read_store_file(&self.store), entry);
        match file {
            Ok(file) if file == self.store_file => {}
            Ok(_) => return Ok(false),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        }
        let entry = entry?;
        Ok(last == 0 || self.compare_last(entry.as_ref())?.is_none())
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
            self.store_file = fresh.store_file;
        }
        Ok(stale)
    }
}

/// Returns the first of these objects that is missing or damaged.
#[boxed]
async fn missing(store: &Store, needs: &[Need]) -> Result<Option<Stale>> {
    // The first need of an object counts: its writer knows most of it.
    let needs: BTreeMap<&str, &Proof> = needs.iter().rev().map(|need| (need.path.as_str(), &need.proof)).collect();
    let mut listed: BTreeMap<String, u64> = BTreeMap::new();
    if needs.len() > MAX_HEADS {
        listed.extend(store.objects().list("casks").await?.into_iter().map(|found| (found.path, found.bytes)));
    }
    let (mut by_size, mut by_content) = (Vec::new(), Vec::new());
    for (&path, &proof) in &needs {
        match proof {
            // Requests objects that the listing lacks, because listings may lag.
            Proof::Size(bytes) if listed.get(path) == Some(bytes) => {}
            Proof::Size(bytes) => by_size.push((path, *bytes)),
            _ => by_content.push((path, proof)),
        }
    }
    let compare = |(path, proof): (&str, &Proof)| {
        let (store, path, proof) = (store.clone(), path.to_owned(), proof.clone());
        async move { proof.compare(&store, &path).await }
    };
    let paths = by_size.iter().map(|(path, _)| (*path).to_owned()).collect();
    let (sizes, compared) = tokio::join!(
        store.objects().sizes(paths, CONCURRENT_REQUESTS),
        concurrently(CONCURRENT_REQUESTS, by_content.into_iter().map(compare))
    );
    let of_size = |((path, bytes), found): ((&str, u64), Option<u64>)| match found {
        None => Some(Stale::missing(path, "is gone")),
        Some(found) if found != bytes => Some(Stale::missing(path, &format!("has {found} bytes, {bytes} were written"))),
        Some(_) => None,
    };
    let of_size = by_size.into_iter().zip(sizes?).find_map(of_size);
    Ok(compared?.into_iter().flatten().next().or(of_size))
}

impl Proof {
    /// Reads an object and compares it; returns what is wrong with it.
    #[boxed]
    async fn compare(&self, store: &Store, path: &str) -> Result<Option<Stale>> {
        let limits = store.limits();
        let max_bytes = match self {
            Self::Size(bytes) => *bytes,
            Self::Directory(_) => limits.max_directory_bytes,
            Self::Manifest(_) => limits.max_manifest_bytes,
            Self::Inline { .. } | Self::InlineManifest { .. } => limits.max_entry_bytes,
        };
        let found = match store.objects().get_if_present(path, max_bytes).await {
            Ok(Some(bytes)) => self.check(&bytes, limits),
            Ok(None) => return Ok(Some(Stale::missing(path, "is gone"))),
            Err(e) => Err(e),
        };
        match found {
            Ok(()) => Ok(None),
            Err(e) if e.kind().is_damaged_object() => Ok(Some(Stale::missing(path, &format!("is damaged ({})", e.message())))),
            Err(e) => Err(e),
        }
    }

    fn check(&self, bytes: &Bytes, limits: &Limits) -> Result<()> {
        let other = || Err(Error::corrupt("holds other bytes than were written"));
        match self {
            Self::Size(size) if bytes.len() as u64 == *size => Ok(()),
            Self::Size(_) => other(),
            Self::Directory(digest) => Directory::check_digest(bytes, *digest),
            Self::Manifest(digest) => match Manifest::decode(bytes, limits)?.1 == *digest {
                true => Ok(()),
                false => other(),
            },
            Self::Inline { sequence, manifest, casks } => {
                match InlineSnapshot::decode(bytes, *sequence, *manifest, limits)?.casks == *casks {
                    true => Ok(()),
                    false => other(),
                }
            }
            Self::InlineManifest { sequence, manifest } => InlineSnapshot::decode_manifest(bytes, *sequence, *manifest, limits).map(|_| ()),
        }
    }
}
