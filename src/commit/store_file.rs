//! Reads `store.json`, the first object that every open reads.

use crate::error::ResultExt;
use crate::store::{RootChange, Store};
use crate::wire::{Id, STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, Result, boxed};

/// Refuses to write to a store whose path leads to another folder than when it was opened, or to another file system on which
/// the store is not there. `is_there` looks for the store that the caller knows.
pub(crate) async fn check_root(store: &Store, is_there: impl Future<Output = Result<bool>> + Send) -> Result<()> {
    let Some(change) = RootChange::of(store.objects()).await? else { return Ok(()) };
    let is_there = matches!(change, RootChange::Mounted(_)) && is_there.await?;
    change.judge(store.objects(), is_there).map_or(Ok(()), Err)
}

/// Whether a store is there, of this run if one is known.
#[boxed]
pub(crate) async fn has_store(store: &Store, run: Option<Id>) -> Result<bool> {
    match read_store_file(store).await {
        Ok(found) => Ok(run.is_none_or(|run| run == found.run)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[boxed]
pub(crate) async fn read_store_file(store: &Store) -> Result<StoreFile> {
    let bytes = store.objects().get(STORE_FILE, store.limits().max_entry_bytes).await.map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::not_found("no store here; the first save creates one").object(store.url()),
        _ => e,
    })?;
    StoreFile::decode(&bytes, store.limits()).in_object(STORE_FILE)
}
