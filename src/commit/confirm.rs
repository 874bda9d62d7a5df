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

use bytes::Bytes;

use super::entries::{STALE_WAITS, StoredEntries, gap, hidden};
use super::need::missing;
use super::store_file::{check_root, read_store_file};
use super::{Log, Need, Stale, Standing};
use crate::error::ResultExt;
use crate::store::{Created, Store};
use crate::wire::{LogEntry, STORE_FILE};
use crate::{Error, ErrorKind, Result, boxed};

/// Maximum number of times that the end of a log is read again while others write to it.
const MAX_LOOKS: u32 = 8;

impl Log {
    /// Reads the log for a commit. An absent entry below an existing one is an error: the commit would take its number,
    /// and the later entries would no longer fit. Or a reader that uses no catalog would not get to the new entry.
    #[boxed]
    pub(crate) async fn load_whole(store: &Store) -> Result<Self> {
        let mut log = Self::load_part(store).await?;
        log.read_to_end().await?;
        log.refuse_gap().await?;
        Ok(log)
    }

    /// Fails if an entry is absent. If one has come back after a while, reads those that came with it.
    #[boxed]
    pub(super) async fn refuse_gap(&mut self) -> Result<()> {
        if StoredEntries::new(self).find_gap_once().await?.is_none() {
            return Ok(());
        }
        match StoredEntries::new(self).find_gap().await? {
            Some(gap) => Err(gap),
            None => self.read_to_end().await,
        }
    }

    /// Reads what others have committed, until the storage lists no later entry.
    #[boxed]
    pub(crate) async fn read_to_end(&mut self) -> Result<()> {
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
        let ours = self.state.sequence;
        let theirs = fresh.state.sequence;
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
