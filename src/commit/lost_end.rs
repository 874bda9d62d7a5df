//! Looks for snapshots that were saved after everything that a log names: a sign that entries at its end were lost.
//! Spec: `spec/log.md`, clause 7.3.

use super::LogState;
use crate::error::ResultExt;
use crate::store::{Listed, Store, concurrently};
use crate::wire::{LogEntry, Manifest, snapshot_of};
use crate::{Error, ErrorKind, Result, boxed};

/// Number of manifests that are read at once.
const CONCURRENT_REQUESTS: usize = 16;

/// A manifest that the log has never named.
#[derive(Debug)]
pub(crate) struct UnnamedManifest {
    pub path: String,
    pub manifest: Manifest,
    /// Whether the log has named the snapshot itself, with another manifest: this one is of a compaction or a reduction.
    pub is_of_known: bool,
}

/// Manifests that the log has never named, although they were made after everything that it names and all their casks are
/// there. A save or a compaction that failed at its commit leaves one. Several of snapshots that the log does not name mean
/// that the log is an older copy, or that entries at its end were lost.
#[boxed]
pub(crate) async fn newer_than_log(store: &Store, state: &LogState, manifests: &[Listed]) -> Result<Vec<UnnamedManifest>> {
    let is_current = |path: &str, id| state.by_id(id).is_some_and(|record| record.manifest_path() == path);
    let is_unnamed = |listed: &&Listed| snapshot_of(&listed.path).is_some_and(|id| !is_current(&listed.path, id));
    let unnamed: Vec<&Listed> = manifests.iter().filter(is_unnamed).collect();
    if unnamed.is_empty() {
        return Ok(Vec::new());
    }
    let mut newest_ms = state.snapshots().iter().map(|record| record.time_ms).max().unwrap_or(0);
    if let Some(last) = state.last_writer {
        newest_ms = newest_ms.max(time_of(store, last.sequence).await?);
    }
    // An entry may have named an earlier manifest of a snapshot, and the state has the last one only.
    let last_ms = if state.sequence == 0 { 0 } else { time_of(store, state.sequence).await? };
    let read = |listed: Listed| async move {
        match store.objects().get_if_present(&listed.path, store.limits().max_manifest_bytes).await {
            Ok(None) => Ok(None),
            Ok(Some(bytes)) => match Manifest::decode(&bytes, store.limits()) {
                Ok((manifest, _)) => Ok(Some((listed, manifest))),
                // A newer version may have saved what this one cannot read.
                Err(e) if e.kind() == ErrorKind::Unsupported && listed.modified_ms >= newest_ms => Err(e.object(listed.path)),
                // Damage in an object that nothing names concerns nobody.
                Err(_) => Ok(None),
            },
            Err(e) if e.kind().is_damaged_object() => Ok(None),
            Err(e) => Err(e),
        }
    };
    let found = concurrently(CONCURRENT_REQUESTS, unnamed.into_iter().cloned().map(read)).await?;
    let mut newer = Vec::new();
    for (listed, manifest) in found.into_iter().flatten() {
        let is_of_known = state.by_id(manifest.id).is_some();
        if manifest.time_ms < if is_of_known { last_ms } else { newest_ms } {
            continue;
        }
        let sizes = store.objects().sizes(manifest.casks.iter().map(|cask| cask.path()).collect(), CONCURRENT_REQUESTS).await?;
        if manifest.casks.iter().zip(sizes).all(|(cask, size)| size == Some(cask.bytes)) {
            newer.push(UnnamedManifest { path: listed.path, manifest, is_of_known });
        }
    }
    Ok(newer)
}

/// Looks for snapshots that were saved after everything that the log names, and that it never names.
#[boxed]
pub(crate) async fn find_lost_end(store: &Store, state: &LogState, manifests: &[Listed]) -> Result<Option<Error>> {
    let is_unknown = |listed: &&Listed| snapshot_of(&listed.path).is_some_and(|id| state.by_id(id).is_none());
    let unknown: Vec<Listed> = manifests.iter().filter(is_unknown).cloned().collect();
    Ok(lost_end(&newer_than_log(store, state, &unknown).await?))
}

/// Time at which an entry was written, by the clock of its writer.
async fn time_of(store: &Store, sequence: u64) -> Result<u64> {
    let path = LogEntry::path_of(sequence);
    let bytes = store.objects().get(&path, store.limits().max_entry_bytes).await?;
    Ok(LogEntry::decode(&bytes, sequence, store.limits()).in_object(path)?.0.time_ms)
}

/// The error for manifests that are newer than the log; `None` for those that a failed save may have left.
pub(crate) fn lost_end(newer: &[UnnamedManifest]) -> Option<Error> {
    let newer: Vec<&UnnamedManifest> = newer.iter().filter(|newer| !newer.is_of_known).collect();
    let [first, .., last] = newer.as_slice() else { return None };
    let message = format!(
        "the log never names it, nor {} other manifests up to {}, although they are newer than the last step that it names: the log is \
         an older copy, or entries at its end were lost. Put them back from a copy of the store. If all these saves have failed, save one \
         more step first",
        newer.len() - 1,
        last.path
    );
    Some(Error::corrupt(message).object(&first.path).clause("log 7.3"))
}
