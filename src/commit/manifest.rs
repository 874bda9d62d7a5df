//! Reads manifests, and the snapshots that log entries hold.

use bytes::Bytes;

use super::ManifestPlace;
use crate::error::ResultExt;
use crate::store::Store;
use crate::wire::{Digest, InlineSnapshot, Manifest};
use crate::{Error, ErrorKind, Limits, Result, boxed};

/// Reads a manifest and compares it with the digest in the log.
#[boxed]
pub(crate) async fn read_manifest(store: &Store, place: &ManifestPlace) -> Result<Manifest> {
    Ok(read_manifest_bytes(store, place).await?.0)
}

/// Reads a manifest and its stored form.
#[boxed]
pub(crate) async fn read_manifest_bytes(store: &Store, place: &ManifestPlace) -> Result<(Manifest, Bytes)> {
    if let Some(sequence) = place.inline_in {
        let entry = read_entry(store, place).await?;
        return InlineSnapshot::decode_manifest(&entry, sequence, place.digest, store.limits()).in_object(&place.path);
    }
    let bytes = store.objects().get(&place.path, store.limits().max_manifest_bytes).await;
    let bytes = bytes.map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::corrupt("the manifest of a committed snapshot is missing").object(&place.path).clause("manifest 1"),
        _ => e,
    })?;
    Ok((decode(&bytes, place.digest, store.limits()).in_object(&place.path)?, bytes))
}

fn decode(bytes: &[u8], expected: Digest, limits: &Limits) -> Result<Manifest> {
    let (manifest, found) = Manifest::decode(bytes, limits)?;
    match found == expected {
        true => Ok(manifest),
        false => Err(Error::corrupt("is not the manifest that the log names: replaced or swapped").clause("manifest 1")),
    }
}

/// Reads manifest and casks of a snapshot that log entry `sequence` holds. `known` is the entry, if it was read already.
#[boxed]
pub(crate) async fn read_inline(store: &Store, place: &ManifestPlace, sequence: u64, known: Option<Bytes>) -> Result<InlineSnapshot> {
    let entry = match known {
        Some(entry) => entry,
        None => read_entry(store, place).await?,
    };
    InlineSnapshot::decode(&entry, sequence, place.digest, store.limits()).in_object(&place.path)
}

#[boxed]
async fn read_entry(store: &Store, place: &ManifestPlace) -> Result<Bytes> {
    store.objects().get(&place.path, store.limits().max_entry_bytes).await.map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::corrupt("the log entry of a committed snapshot is missing").object(&place.path).clause("log 3.1"),
        _ => e,
    })
}
