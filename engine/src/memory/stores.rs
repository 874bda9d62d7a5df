//! The stores in shared memory of a run, numbered by epoch. The store with the highest epoch is in use.

use std::path::{Path, PathBuf};

use tensorcask::maintain::is_interrupted_write;
use tensorcask::wire::Id;
use tensorcask::{Error, Result, SnapshotRecord, Store, StoreOptions};

use crate::os::files::{create_folder, remove_file, remove_folder};
use crate::os::folders::RunFolder;

/// Opens the store of an epoch, which need not exist.
pub(crate) fn open_epoch(folder: &RunFolder, epoch: u64) -> Result<Store> {
    open_memory(&folder.memory(epoch))
}

/// Opens the mirror of the first tier, which need not exist.
pub(crate) fn open_mirror(folder: &RunFolder) -> Result<Store> {
    open_memory(&folder.mirror())
}

/// Opens the copy of another host's mirror, which need not exist.
pub(crate) fn open_replica(folder: &RunFolder, host: u32) -> Result<Store> {
    open_memory(&folder.replica(host))
}

fn open_memory(path: &Path) -> Result<Store> {
    let path = path.to_str().ok_or_else(|| Error::invalid("the path of the engine's folder must be UTF-8"))?;
    // Log entries are never deleted, and memory is small: snapshots stay out of them.
    StoreOptions { fsync: false, inline_bytes: 0, ..StoreOptions::default() }.open(path)
}

/// Removes all stores in memory. The next store gets a new epoch, so that the result of an upload still under way is
/// not applied to it.
pub(crate) fn remove_all_epochs(folder: &RunFolder) -> Result<()> {
    let epochs = folder.epochs()?;
    if let Some(last) = epochs.last() {
        create_folder(&folder.memory(last.saturating_add(1)))?;
    }
    // First the files without which they are no stores: an agent that is killed here leaves no part that passes as one.
    epochs.iter().try_for_each(|epoch| remove_file(&store_file(folder, *epoch)))?;
    epochs.iter().try_for_each(|epoch| remove_folder(&folder.memory(*epoch)))
}

/// Path of the file without which a folder in memory is no store.
pub(crate) fn store_file(folder: &RunFolder, epoch: u64) -> PathBuf {
    folder.memory(epoch).join("store.json")
}

/// Bytes of shared memory that all stores of a run use.
pub(crate) fn memory_bytes(folder: &RunFolder) -> Result<u64> {
    folder.epochs()?.into_iter().map(|epoch| folder_bytes(folder.memory(epoch))).sum()
}

/// Bytes of shared memory that the mirror uses.
pub(crate) fn mirror_bytes(folder: &RunFolder) -> Result<u64> {
    folder_bytes(folder.mirror())
}

/// Bytes of shared memory that the copy of another host's mirror uses.
pub(crate) fn replica_bytes(folder: &RunFolder, host: u32) -> Result<u64> {
    folder_bytes(folder.replica(host))
}

/// Bytes of shared memory that the mirror and the copies of other hosts use.
pub(crate) fn encoded_bytes(folder: &RunFolder) -> Result<u64> {
    let replicas = folder.replicas()?.into_iter().map(|host| folder_bytes(folder.replica(host))).sum::<Result<u64>>()?;
    Ok(mirror_bytes(folder)?.saturating_add(replicas))
}

/// Removes the files of writes that ended with an earlier agent, from the mirror and the copies of other hosts. Nobody may write
/// there meanwhile.
pub(crate) fn remove_interrupted_writes(folder: &RunFolder) -> Result<()> {
    let replicas = folder.replicas()?.into_iter().map(|host| folder.replica(host));
    for (path, _) in replicas.chain([folder.mirror()]).map(files_of).collect::<Result<Vec<_>>>()?.into_iter().flatten() {
        if path.file_name().and_then(|name| name.to_str()).is_some_and(is_interrupted_write) {
            remove_file(&path)?;
        }
    }
    Ok(())
}

/// Bytes of all files in a folder, rounded up to whole pages.
fn folder_bytes(folder: PathBuf) -> Result<u64> {
    Ok(files_of(folder)?.into_iter().map(|(_, bytes)| bytes.next_multiple_of(4096)).fold(0, u64::saturating_add))
}

/// All files in a folder, and their sizes in bytes.
fn files_of(folder: PathBuf) -> Result<Vec<(PathBuf, u64)>> {
    let fail = |path: &Path, e: std::io::Error| Error::io(path.display().to_string(), e);
    let mut files = Vec::new();
    let mut folders = vec![folder];
    while let Some(next) = folders.pop() {
        let entries = match std::fs::read_dir(&next) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries.map_err(|e| fail(&next, e))?,
        };
        for entry in entries {
            let entry = entry.map_err(|e| fail(&next, e))?;
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) => files.push((entry.path(), found.len())),
                // Another process has removed the file since the listing.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(fail(&entry.path(), e)),
            }
        }
    }
    Ok(files)
}

/// The chain of a snapshot, newest first. Records are in commit order.
pub(crate) fn chain_of(records: &[SnapshotRecord], newest: Option<Id>) -> Vec<Id> {
    let mut chain = Vec::new();
    let mut next = newest;
    // A parent is committed before its children.
    for record in records.iter().rev() {
        if Some(record.id) == next {
            chain.push(record.id);
            next = record.parent;
        }
    }
    chain
}

/// Whether an error means that the file system is full.
pub(crate) fn is_full(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if matches!(io, Some(std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        next = error.source();
    }
    false
}
