//! Objects that a commit relies on, and how a commit knows that they are intact. Spec: `spec/log.md`, clause 5.6.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{ManifestPlace, SnapshotRecord, Stale};
use crate::store::{Store, concurrently};
use crate::wire::{Digest, Directory, InlineSnapshot, Manifest};
use crate::{Error, Limits, Result, boxed};

/// Number of requests for objects in flight at once.
const CONCURRENT_REQUESTS: usize = 32;
/// Number of objects above which a listing takes fewer requests than one request per object. A page of a listing holds
/// 1000 objects.
const MAX_HEADS: usize = 1000;
/// Size of a directory up to which its bytes are compared before each commit; a larger one is compared by size.
const MAX_COMPARED_BYTES: u64 = 16 << 20;

/// Object that a commit relies on.
#[derive(Debug, Clone)]
pub(crate) struct Need {
    /// Path below the root of the store.
    path: String,
    proof: Proof,
}

/// Property of an object by which a commit knows that it is intact.
#[derive(Debug, Clone)]
enum Proof {
    /// The size in bytes.
    Size(u64),
    /// The digest of a directory.
    Directory(Digest),
    /// The digest of a manifest.
    Manifest(Digest),
    /// Manifest and casks that a log entry holds.
    Inline { sequence: u64, manifest: Digest, casks: Vec<Bytes> },
    /// The digest of a manifest in a log entry.
    InlineManifest { sequence: u64, manifest: Digest },
}

impl Need {
    /// A directory. `bytes` is its size, if known.
    pub(crate) fn directory(digest: Digest, bytes: Option<u64>) -> Self {
        let proof = match bytes {
            Some(bytes) if bytes > MAX_COMPARED_BYTES => Proof::Size(bytes),
            _ => Proof::Directory(digest),
        };
        Self { path: format!("directories/{digest}"), proof }
    }

    /// A manifest that is an object.
    pub(crate) fn manifest(path: String, digest: Digest) -> Self {
        Self { path, proof: Proof::Manifest(digest) }
    }

    /// Lists the casks of a manifest, all of them objects.
    pub(crate) fn casks(manifest: &Manifest) -> impl Iterator<Item = Self> {
        manifest.casks.iter().map(|cask| Self { path: cask.path(), proof: Proof::Size(cask.bytes) })
    }

    /// Lists the objects of a committed snapshot except its directory: its manifest and casks, or its log entry. `inline`: what
    /// the entry holds, if it was read.
    pub(crate) fn of_committed(record: &SnapshotRecord, manifest: &Manifest, inline: Option<&InlineSnapshot>) -> Vec<Self> {
        let ManifestPlace { path, digest, inline_in } = record.manifest_place();
        match (inline_in, inline) {
            (Some(sequence), Some(inline)) => {
                vec![Self { path, proof: Proof::Inline { sequence, manifest: digest, casks: inline.casks.clone() } }]
            }
            (Some(sequence), None) => vec![Self { path, proof: Proof::InlineManifest { sequence, manifest: digest } }],
            (None, _) => [Self::manifest(path, digest)].into_iter().chain(Self::casks(manifest)).collect(),
        }
    }
}

/// Returns the first of these objects that is missing or damaged.
#[boxed]
pub(super) async fn missing(store: &Store, needs: &[Need]) -> Result<Option<Stale>> {
    // The first need of an object counts: its writer knows most of it.
    let needs: BTreeMap<&str, &Proof> = needs.iter().rev().map(|need| (need.path.as_str(), &need.proof)).collect();
    let mut listed: BTreeMap<String, u64> = BTreeMap::new();
    if needs.len() > MAX_HEADS {
        listed.extend(store.objects().list("casks").await?.into_iter().map(|found| (found.path, found.bytes)));
    }
    let mut by_size = Vec::new();
    let mut by_content = Vec::new();
    for (&path, &proof) in &needs {
        match proof {
            // Requests objects that the listing lacks, because listings may lag.
            Proof::Size(bytes) if listed.get(path) == Some(bytes) => {}
            Proof::Size(bytes) => by_size.push((path, *bytes)),
            _ => by_content.push((path, proof)),
        }
    }
    let compare = |(path, proof): (&str, &Proof)| {
        let store = store.clone();
        let path = path.to_owned();
        let proof = proof.clone();
        async move { proof.compare(&store, &path).await }
    };
    let paths = by_size.iter().map(|(path, _)| (*path).to_owned()).collect();
    let (sizes, compared) = tokio::join!(
        store.objects().sizes(paths, CONCURRENT_REQUESTS),
        concurrently(CONCURRENT_REQUESTS, by_content.into_iter().map(compare))
    );
    let of_size = |((path, bytes), found): ((&str, u64), Option<u64>)| match found {
        None => Some(Stale::missing(path, "is gone")),
        Some(found) if found != bytes => Some(Stale::missing(path, &format!("has {found} bytes, {bytes} were written"))),
        Some(_) => None,
    };
    let of_size = by_size.into_iter().zip(sizes?).find_map(of_size);
    Ok(compared?.into_iter().flatten().next().or(of_size))
}

impl Proof {
    /// Reads an object and compares it; returns what is wrong with it.
    #[boxed]
    async fn compare(&self, store: &Store, path: &str) -> Result<Option<Stale>> {
        let limits = store.limits();
        let max_bytes = match self {
            Self::Size(bytes) => *bytes,
            Self::Directory(_) => limits.max_directory_bytes,
            Self::Manifest(_) => limits.max_manifest_bytes,
            Self::Inline { .. } | Self::InlineManifest { .. } => limits.max_entry_bytes,
        };
        let found = match store.objects().get_if_present(path, max_bytes).await {
            Ok(Some(bytes)) => self.check(&bytes, limits),
            Ok(None) => return Ok(Some(Stale::missing(path, "is gone"))),
            Err(e) => Err(e),
        };
        match found {
            Ok(()) => Ok(None),
            Err(e) if e.kind().is_damaged_object() => Ok(Some(Stale::missing(path, &format!("is damaged ({})", e.message())))),
            Err(e) => Err(e),
        }
    }

    fn check(&self, bytes: &Bytes, limits: &Limits) -> Result<()> {
        let other = || Err(Error::corrupt("holds other bytes than were written"));
        match self {
            Self::Size(size) if bytes.len() as u64 == *size => Ok(()),
            Self::Size(_) => other(),
            Self::Directory(digest) => Directory::check_digest(bytes, *digest),
            Self::Manifest(digest) => match Manifest::decode(bytes, limits)?.1 == *digest {
                true => Ok(()),
                false => other(),
            },
            Self::Inline { sequence, manifest, casks } => {
                match InlineSnapshot::decode(bytes, *sequence, *manifest, limits)?.casks == *casks {
                    true => Ok(()),
                    false => other(),
                }
            }
            Self::InlineManifest { sequence, manifest } => InlineSnapshot::decode_manifest(bytes, *sequence, *manifest, limits).map(|_| ()),
        }
    }
}
