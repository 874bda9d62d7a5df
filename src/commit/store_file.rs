//! Reads `store.json`, the first object that every open reads.

use crate::error::ResultExt;
use crate::store::Store;
use crate::wire::{STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, Result, boxed};

#[boxed]
pub(crate) async fn read_store_file(store: &Store) -> Result<StoreFile> {
    let bytes = store.objects().get(STORE_FILE, store.limits().max_entry_bytes).await.map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::not_found("no store here; the first save creates one").object(store.url()),
        _ => e,
    })?;
    StoreFile::decode(&bytes, store.limits()).in_object(STORE_FILE)
}
