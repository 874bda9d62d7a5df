//! The log in a mirror: where it begins, the entries that are copied, and the repair of a damaged one.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::log::SessionLog;
use super::mirror::{Mirror, clear, sequence_of_entry};
use crate::commit::{CATALOG_INTERVAL, Catalog, LogState, find_lost_end, read_store_file};
use crate::error::ResultExt;
use crate::store::concurrently;
use crate::wire::{LogEntry, STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, Result, Store, boxed};

/// Number of entries that are copied at once.
const CONCURRENT_REQUESTS: usize = 16;

/// State of a mirror before it follows a log.
pub(super) struct MirrorStart {
    /// Last log entry; 0 if there is none.
    pub last: u64,
    /// Content of `store.json`, if the mirror has no readable one. Written once the log is there: a store without its log looks
    /// like an empty one.
    pub unwritten: Option<StoreFile>,
}

impl Mirror {
    /// Prepares the mirror. Empties a mirror of another run.
    #[boxed]
    pub(super) async fn begin(&self, state: &LogState) -> Result<MirrorStart> {
        let file = read_store_file(&self.store).await?;
        self.memory.objects().ensure_root().await?;
        let mut unwritten = None;
        match read_store_file(&self.memory).await {
            Ok(found) if found.run == file.run => {}
            Ok(_) if self.is_of_store => {
                clear(&self.memory).await?;
                unwritten = Some(file.clone());
            }
            Ok(_) => return Err(Error::new(ErrorKind::Conflict, "the mirror belongs to another run").object(STORE_FILE)),
            // All objects but the log have names that no other run uses.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) && self.is_of_store => {
                self.remove_other_log(state).await?;
                unwritten = Some(file.clone());
            }
            Err(e) => return Err(e),
        }
        let last = last_entry(&self.memory).await?;
        if last <= state.sequence {
            return Ok(MirrorStart { last, unwritten });
        }
        // Another task may have copied newer entries since `state` was read.
        if !self.is_of_store {
            return Ok(MirrorStart { last, unwritten });
        }
        let manifests = self.store.objects().list("snapshots").await?;
        let log = SessionLog::open_complete(&self.store).await?;
        if log.sequence() >= last {
            return Ok(MirrorStart { last, unwritten });
        }
        // The store is an older copy of itself, unless it has lost the end of its log: then memory may have the only one.
        find_lost_end(&self.store, log.state(), &manifests).await?.map_or(Ok(()), Err)?;
        clear(&self.memory).await?;
        Ok(MirrorStart { last: 0, unwritten: Some(file) })
    }

    /// Removes the log of a mirror that does not tell its run, unless it is the log of the store.
    async fn remove_other_log(&self, state: &LogState) -> Result<()> {
        let objects = self.memory.objects();
        if last_entry(&self.memory).await? > 0 {
            // Memory may have the only log that is left.
            SessionLog::open_complete(&self.store).await?;
        }
        // Their names have the digests of their bytes.
        let of_store: BTreeSet<String> = Catalog::list(&self.store).await?.into_iter().collect();
        for found in objects.list("catalog").await?.into_iter().filter(|found| !of_store.contains(&found.path)) {
            objects.delete(&found.path).await?;
        }
        // Each entry has the digest of the entry before.
        let (path, max_bytes) =
            (LogEntry::path_of(last_entry(&self.memory).await?.min(state.sequence)), self.store.limits().max_entry_bytes);
        let ours = match objects.get_if_present(&path, max_bytes).await {
            Err(e) if e.kind() == ErrorKind::LimitExceeded => None,
            found => found?,
        };
        if ours.is_none() || ours != self.store.objects().get_if_present(&path, max_bytes).await? {
            for found in objects.list("log").await? {
                objects.delete(&found.path).await?;
            }
        }
        Ok(())
    }

    /// Enters a long log by its newest catalog; returns the last entry that need not be copied.
    pub(super) async fn copy_catalog(&self, last: u64) -> Result<u64> {
        let newest = Catalog::list(&self.store).await?.into_iter().next();
        let Some((sequence, path)) = newest.and_then(|path| Some((Catalog::sequence_of(&path)?, path))) else { return Ok(last) };
        if sequence <= last {
            return Ok(last);
        }
        // A gap hides the entries after it from a reader that uses no catalog. Copying some entries more avoids it, if there are
        // such entries: the log of another mirror may be shortened.
        let next = LogEntry::path_of(last.saturating_add(1));
        if last > 0 && sequence - last <= Self::KEPT_ENTRIES && self.store.objects().head_if_present(&next).await?.is_some() {
            return Ok(last);
        }
        let bytes = Catalog::read_bytes(&self.store, &path).await?;
        self.memory.objects().put_content_addressed(&path, bytes).await?;
        Ok(sequence.saturating_sub(1))
    }

    /// Copies the last entries up to this one, if the mirror has the entries before them.
    pub(super) async fn copy_log_up_to(&self, sequence: u64) -> Result<()> {
        let last = last_entry(&self.memory).await?;
        if last == 0 || last >= sequence || sequence - last > CATALOG_INTERVAL {
            return Ok(());
        }
        let ours = match read_store_file(&self.memory).await {
            Ok(file) => file.run,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => return Ok(()),
            Err(e) => return Err(e),
        };
        match read_store_file(&self.store).await?.run == ours {
            true => self.copy_entries(last, sequence).await,
            false => Ok(()),
        }
    }

    /// Copies the entries after `last` up to `end`, in order: an interrupted copy leaves no gap.
    #[boxed]
    pub(super) async fn copy_entries(&self, last: u64, end: u64) -> Result<()> {
        let from = self.store.objects();
        let max_bytes = self.store.limits().max_entry_bytes;
        let read = |sequence: u64| async move { from.get(&LogEntry::path_of(sequence), max_bytes).await };
        let mut next = last.saturating_add(1);
        while next <= end {
            let batch = next..=end.min(next.saturating_add(CONCURRENT_REQUESTS as u64));
            let entries = concurrently(CONCURRENT_REQUESTS, batch.clone().map(read)).await?;
            for (sequence, bytes) in batch.zip(entries) {
                put_entry(&self.memory, sequence, bytes).await?;
                next = sequence.saturating_add(1);
            }
        }
        Ok(())
    }

    /// Copies the log again if a reader of the mirror would not come to the last entry.
    #[boxed]
    pub(super) async fn repair_log(&self, state: &LogState) -> Result<()> {
        match SessionLog::open(&self.memory).await {
            Ok(log) if log.sequence() >= state.sequence => return Ok(()),
            Ok(log) => tracing::warn!(entry = log.sequence(), "the log in memory has a gap; copying it again"),
            Err(error) if error.is_damage() || error.kind().is_damaged_object() => {
                tracing::warn!(%error, "the log in memory is damaged; copying it again")
            }
            Err(error) => return Err(error),
        }
        let last = self.copy_catalog(0).await?;
        self.copy_entries(last, state.sequence).await
    }
}

/// Last log entry of a mirror; 0 if there is none.
async fn last_entry(memory: &Store) -> Result<u64> {
    let names = memory.objects().names_after("log", "").await?;
    // An entry that is being written has a temporary name.
    Ok(names.iter().rev().find_map(|name| sequence_of_entry(name)).unwrap_or(0))
}

/// Creates an entry. An entry that exists and is damaged is replaced.
async fn put_entry(memory: &Store, sequence: u64, bytes: Bytes) -> Result<()> {
    let path = LogEntry::path_of(sequence);
    let limits = memory.limits();
    let error = match memory.objects().create_unique(&path, bytes.clone()).await {
        Err(e) if e.kind().is_damaged_object() => e,
        created => return created,
    };
    LogEntry::decode(&bytes, sequence, limits).in_object(path.as_str())?;
    match memory.objects().get_if_present(&path, limits.max_entry_bytes).await {
        Ok(Some(found)) if LogEntry::decode(&found, sequence, limits).is_ok() => return Err(error),
        Err(e) if e.kind() != ErrorKind::LimitExceeded => return Err(e),
        _ => {}
    }
    tracing::warn!(object = path, "a log entry is damaged in memory; copying it again");
    memory.objects().put_whole(&path, bytes.into()).await
}
