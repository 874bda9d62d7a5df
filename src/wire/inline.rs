//! A snapshot inside its log entry: after the sealed part, the manifest and then the casks. Spec: `spec/log.md`,
//! clause 3.7.
//!
//! A small save is one object this way. The digest of the entry covers only its sealed part, so damage to a manifest or a
//! cask here concerns one snapshot and not the log.

use std::ops::Range;

use bytes::Bytes;

use super::{CaskRef, Digest, Event, LogEntry, Manifest};
use crate::{Error, Limits, Result};

/// Manifest and casks that a log entry holds.
#[derive(Debug, Clone)]
pub struct InlineSnapshot {
    /// The manifest.
    pub manifest: Manifest,
    /// Stored form of the manifest.
    pub manifest_bytes: Bytes,
    /// Bytes of each cask, in the order of the manifest. Not checked yet.
    pub casks: Vec<Bytes>,
    /// Offset in the entry of each cask.
    pub offsets: Vec<u64>,
    /// Size of the entry in bytes.
    pub entry_bytes: u64,
}

impl InlineSnapshot {
    /// Concatenates manifest and casks: the bytes that follow the sealed part of the entry.
    pub fn encode<'a>(manifest: &[u8], casks: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
        let mut bytes = manifest.to_vec();
        casks.into_iter().for_each(|cask| bytes.extend_from_slice(cask));
        bytes
    }

    /// Decodes the manifest that entry `sequence` holds, and returns its stored form. Compares the manifest with its digest
    /// in the log.
    pub fn decode_manifest(entry: &Bytes, sequence: u64, digest: Digest, limits: &Limits) -> Result<(Manifest, Bytes)> {
        let (manifest, range) = find_manifest(entry, sequence, digest, limits)?;
        Ok((manifest, entry.slice(range)))
    }

    /// Decodes the manifest and finds the casks that entry `sequence` holds. Compares the manifest with its digest in the
    /// log.
    pub fn decode(entry: &Bytes, sequence: u64, digest: Digest, limits: &Limits) -> Result<Self> {
        let (manifest, range) = find_manifest(entry, sequence, digest, limits)?;
        let manifest_bytes = entry.slice(range.clone());
        let mut casks = Vec::new();
        let mut offsets = Vec::new();
        let mut end = range.end;
        for cask in &manifest.casks {
            let range = range_of(cask, end).filter(|range| range.end <= entry.len());
            let Some(range) = range else {
                let message = format!("ends at {}, in the middle of cask {}: truncated", entry.len(), cask.id);
                return Err(bad(message).offset(end as u64));
            };
            // A copy is aligned in memory as a cask that was read alone.
            casks.push(Bytes::copy_from_slice(entry.get(range.clone()).unwrap_or_default()));
            offsets.push(range.start as u64);
            end = range.end;
        }
        if end != entry.len() {
            return Err(bad(format!("has {} bytes, but its last cask ends at {end}", entry.len())).offset(end as u64));
        }
        Ok(Self { manifest, manifest_bytes, casks, offsets, entry_bytes: entry.len() as u64 })
    }
}

/// Decodes the manifest of an entry. Also returns the byte range of the manifest in the entry.
fn find_manifest(entry: &Bytes, sequence: u64, digest: Digest, limits: &Limits) -> Result<(Manifest, Range<usize>)> {
    let (head, _, start) = LogEntry::decode_head(entry, sequence, limits)?;
    let Event::Added { inline: Some(bytes), .. } = head.event else {
        return Err(bad("does not hold a snapshot".to_owned()));
    };
    let end = usize::try_from(bytes).ok().and_then(|bytes| start.checked_add(bytes)).filter(|end| *end <= entry.len());
    let Some(end) = end else {
        return Err(bad(format!("ends at {}, in the middle of the manifest: truncated", entry.len())).offset(start as u64));
    };
    let decoded = Manifest::decode(entry.get(start..end).unwrap_or_default(), limits);
    let (manifest, found) = decoded.map_err(|e| e.offset(start as u64))?;
    if found != digest {
        let error = Error::corrupt("does not hold the manifest that the log names: replaced or swapped").clause("manifest 1");
        return Err(error.offset(start as u64));
    }
    Ok((manifest, start..end))
}

fn range_of(cask: &CaskRef, start: usize) -> Option<Range<usize>> {
    Some(start..start.checked_add(usize::try_from(cask.bytes).ok()?)?)
}

fn bad(message: String) -> Error {
    Error::corrupt(message).clause("log 3.7")
}
