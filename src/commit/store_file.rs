//! Reads `store.json`, the first object that every open reads.

use crate::error::ResultExt;
use crate::store::Store;
use crate::wire::{STORE_FILE, StoreFile};
use crate::{Error, ErrorKind, Result, boxed};

impl Store {
    #[boxed]
    pub(crate) async fn read_store_file(&self) -> Result<StoreFile> {
        let bytes = self.get(STORE_FILE, self.limits().max_entry_bytes).await.map_err(|e| match e.kind() {
            ErrorKind::NotFound => Error::not_found("no store here; the first save creates one").object(self.url()),
            _ => e,
        })?;
        StoreFile::decode(&bytes, self.limits()).in_object(STORE_FILE)
    }
}
