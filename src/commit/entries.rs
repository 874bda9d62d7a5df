//! The entries of a log as the storage has them now, compared with what a process remembers. Spec: `spec/log.md`, clauses 5.6
//! and 5.8.
//!
//! A listing shows which entries there are. Listings may lag, and so may the views of network file systems: an entry that one
//! of them lacks is requested, and looked for again some time later, before it counts as lost.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Log;
use super::log::KnownEntry;
use crate::store::{concurrently, names_in_pages};
use crate::wire::LogEntry;
use crate::{Error, ErrorKind, Result, boxed};

/// Number of requests in flight at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Number of objects in a page of a listing.
const PAGE_ENTRIES: u64 = 1000;
/// Maximum number of pages that are requested by their beginnings. The last one goes on to the end of the log.
const MAX_PAGES: usize = 1000;
/// Waits before an absent entry is looked for again. Most network file systems remember for a second that a name is absent.
pub(super) const STALE_WAITS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(1100)];

/// Advice for a log of which a part is missing.
pub(super) const PUT_BACK: &str = "Put the log back from a copy of the store while no job saves here, or save each step that is \
    left to a new place with `tensorcask consolidate --step`. Nothing was changed";

/// The entries of a log as the storage has them.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredEntries<'l> {
    log: &'l Log,
}

impl<'l> StoredEntries<'l> {
    /// `log`: what is known of them.
    pub(super) fn new(log: &'l Log) -> Self {
        Self { log }
    }

    /// Looks for an absent entry, which a reader without catalogs needs, and for a changed one after the newest catalog. Looks
    /// again before it reports one, because views of network file systems may lag.
    #[boxed]
    pub(super) async fn find_gap(&self) -> Result<Option<Error>> {
        let mut waits = STALE_WAITS.into_iter();
        loop {
            let Some(found) = self.find_gap_once().await? else { return Ok(None) };
            match waits.next() {
                Some(wait) => tokio::time::sleep(wait).await,
                None => return Ok(Some(found)),
            }
        }
    }

    /// Does the same without looking again.
    #[boxed]
    pub(super) async fn find_gap_once(&self) -> Result<Option<Error>> {
        let listed = self.listed().await?;
        let last = self.log.state.sequence;
        // Listings may lag.
        let next = self.log.state.next_sequence()?;
        let end = if listed.range(next..).next().is_some() { next } else { last };
        let mut unlisted = (1..=end).filter(|sequence| !listed.contains_key(sequence));
        // One batch at a time: a log that is gone needs one answer, and a forged catalog may claim any number of entries.
        loop {
            let batch: Vec<u64> = unlisted.by_ref().take(CONCURRENT_REQUESTS).collect();
            if batch.is_empty() {
                break;
            }
            let paths = batch.iter().map(|sequence| LogEntry::path_of(*sequence)).collect();
            let sizes = self.log.store.objects().sizes(paths, CONCURRENT_REQUESTS).await?;
            if let Some((&sequence, _)) = batch.iter().zip(sizes).find(|(_, size)| size.is_none()) {
                let above = listed.range(sequence..).next_back().map(|(last, _)| format!("entry {last}"));
                return Ok(Some(gap(sequence, &above.unwrap_or_else(|| format!("a catalog of entry {last}")), "log 5.8")));
            }
        }
        // The last entry is read in any case. A file costs nothing to read, and a listing of an object store has sizes.
        let newest = self.log.newest.iter().filter(|(sequence, _)| **sequence < last);
        let changed = newest.map(|(&sequence, known)| self.find_change(sequence, *known, listed.get(&sequence).copied().flatten()));
        Ok(concurrently(CONCURRENT_REQUESTS, changed).await?.into_iter().flatten().next())
    }

    /// Compares an entry with the one that this log knows: by the size in a listing, or by its bytes.
    async fn find_change(&self, sequence: u64, known: KnownEntry, listed_bytes: Option<u64>) -> Result<Option<Error>> {
        let path = LogEntry::path_of(sequence);
        let limits = self.log.store.limits();
        let found = match listed_bytes {
            Some(bytes) if bytes == known.bytes => return Ok(None),
            Some(bytes) => Err(Error::corrupt(format!("has {bytes} bytes, {} were written", known.bytes))),
            None => match self.log.store.objects().get_if_present(&path, limits.max_entry_bytes).await {
                Ok(Some(bytes)) => LogEntry::decode(&bytes, sequence, limits).map(|found| found.1),
                Ok(None) => return Ok(Some(hidden(sequence))),
                Err(e) => Err(e),
            },
        };
        let what = match found {
            Ok(found) if found == known.digest => return Ok(None),
            Ok(_) => "is not the entry that this process knows".to_owned(),
            Err(e) if e.kind().is_damaged_object() => e.message().to_owned(),
            Err(e) => return Err(e.object(path)),
        };
        let message = format!("{what}. Put the entry back as it was written, or save to a new place");
        Ok(Some(Error::corrupt(message).object(path).clause("log 5.6")))
    }

    /// Lists the numbers of all entries, with their sizes where a listing has them.
    pub(super) async fn listed(&self) -> Result<BTreeMap<u64, Option<u64>>> {
        let name = |sequence| LogEntry::path_of(sequence).trim_start_matches("log/").to_owned();
        let pages =
            (0..=self.log.state.sequence / PAGE_ENTRIES).take(MAX_PAGES).map(|page| name(page.saturating_mul(PAGE_ENTRIES))).collect();
        let listed = names_in_pages(self.log.store.objects(), "log", pages, PAGE_ENTRIES as usize).await?;
        let number = |found: &str| found.strip_suffix(".json")?.parse().ok().filter(|&number| name(number) == found);
        Ok(listed.into_iter().filter_map(|(found, bytes)| Some((number(&found)?, bytes))).collect())
    }
}

/// The error of an absent entry below something that says that it was there.
pub(super) fn gap(sequence: u64, above: &str, clause: &'static str) -> Error {
    let message = format!(
        "is missing, although the store has {above}: a part of the log was deleted. {PUT_BACK}. On a network file system, the cause may \
         be a stale cache: mount it again and try again"
    );
    Error::corrupt(message).object(LogEntry::path_of(sequence)).clause(clause)
}

/// The error of an entry that a listing shows and a request does not return.
pub(super) fn hidden(sequence: u64) -> Error {
    let message =
        "is listed, but cannot be read: the storage lags, or a network file system has a stale cache. Try again, or mount it again";
    Error::new(ErrorKind::Storage, message).object(LogEntry::path_of(sequence)).clause("log 5.8")
}
