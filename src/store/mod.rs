//! A store: one root in an object store that holds the snapshots of a training run.
//!
//! This module opens URLs and moves bytes. It does not interpret the bytes.

mod ahead;
mod bandwidth;
mod cache;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
mod certificates;
mod coalesce;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
mod contact;
mod environment;
mod fetch;
mod guarded;
mod hard_links;
mod io;
mod local;
mod local_file;
mod objects;
mod open;
mod pages;
mod pending;
mod probe;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
mod proxies;
mod renewable;
mod root;
mod root_change;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
#[cfg_attr(not(all(feature = "aws", feature = "gcp", feature = "azure")), allow(dead_code, reason = "each kind of store uses some of it"))]
mod settings;
mod share;
mod tee;
mod upload;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
mod upload_pace;
mod work;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use object_store::ObjectStore;
use object_store::path::Path;

pub use ahead::AheadUploads;
pub use bandwidth::Bandwidth;
pub(crate) use cache::Caches;
pub use environment::{Environment, is_credential, with_absolute_path};
pub(crate) use io::{objects_after, remove_staged_file, staged_files};
pub(crate) use local_file::map_file;
pub(crate) use objects::{Created, Listed, Medium, Objects, concurrently};
pub use open::{StoreOptions, absolute_url};
pub(crate) use pages::names_in_pages;
pub use pending::PendingRequest;
pub use probe::ProbeReport;
pub(crate) use probe::{probe, probe_pair, probe_without_store};
pub(crate) use root_change::RootChange;
pub(crate) use upload::{PartBudget, Upload};
pub(crate) use work::Work;

use self::renewable::Renewable;
use crate::codec::Registry;
use crate::{Limits, Result};

/// A store of snapshots. Cheap to clone; clones share caches.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use tensorcask::{Dtype, Latest, Metadata, Policy, Slice, Store, TensorView};
/// let store = Store::open("memory://run-42")?;
/// let mut writer = store.writer(Policy::Consecutive).await?;
/// let weights = [1u8; 64];
/// let state = [TensorView::new("w", Dtype::F32, &[4, 4], &weights)?];
/// writer.save(100, &state, &[], &Metadata::default()).await?;
/// let snapshot = store.snapshot(Latest).await?;
/// assert_eq!(snapshot.read("w", &Slice::rows(1..2)).await?.data, [1; 16]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    objects: Objects,
    options: StoreOptions,
    caches: Caches,
    /// The client, if its credentials can be renewed.
    renewable: Option<Arc<Renewable>>,
}

/// Requests, bytes and work of a store and its clones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoCounts {
    /// Number of requests sent, of every kind.
    pub requests: u64,
    /// Number of object bytes received.
    pub bytes_read: u64,
    /// Number of object bytes sent.
    pub bytes_written: u64,
    /// Work that operations have planned: bytes of saves, verifications and compactions, objects that garbage
    /// collection deletes. Equals `work_done` while no such operation runs. If operations of several kinds run at once,
    /// the sum has no unit: do not compare across operations.
    pub work_planned: u64,
    /// Work that was done, or given up after a failure.
    pub work_done: u64,
}

impl Store {
    /// Creates a store in any [`ObjectStore`], below `root`. Open local folders by path instead: they need fsync calls
    /// that an `ObjectStore` does not expose.
    pub fn with_object_store(objects: Arc<dyn ObjectStore>, root: Path, options: StoreOptions) -> Self {
        let url = format!("{objects}/{root}");
        assemble(url, Medium::Remote, Some(objects), root, options)
    }

    /// Sends all later requests of this store and its clones with the settings and credentials of these options. Its URL stays the
    /// same. Does nothing for a store that needs no credentials: a folder, memory, or an [`ObjectStore`] of the caller.
    pub fn renew(&self, options: &StoreOptions) -> Result<()> {
        match &self.inner.renewable {
            Some(renewable) => {
                renewable.renew(options.client_of(self.url())?);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns the URL that the store was opened with.
    pub fn url(&self) -> &str {
        &self.objects().url
    }

    /// Returns the limits that readers enforce.
    pub fn limits(&self) -> &Limits {
        &self.inner.options.limits
    }

    /// Returns the codecs that readers know and writers choose from.
    pub fn registry(&self) -> &Registry {
        &self.inner.options.registry
    }

    /// Returns the requests, bytes and work so far.
    pub fn io(&self) -> IoCounts {
        let counters = &self.objects().counters;
        let work = &self.objects().work;
        // In this order: what is done was planned before.
        let work_done = work.done.load(Ordering::Acquire);
        IoCounts {
            requests: counters.requests.load(Ordering::Relaxed),
            bytes_read: counters.bytes_read.load(Ordering::Relaxed),
            bytes_written: counters.bytes_written.load(Ordering::Relaxed),
            work_planned: work.planned.load(Ordering::Relaxed),
            work_done,
        }
    }

    /// Returns the oldest request that the storage has not answered yet. A storage that hangs never answers it.
    pub fn oldest_request(&self) -> Option<PendingRequest> {
        self.objects().oldest_request()
    }

    pub(crate) fn objects(&self) -> &Objects {
        &self.inner.objects
    }

    pub(crate) fn caches(&self) -> &Caches {
        &self.inner.caches
    }
}

/// Returns whether a store saves a snapshot inside its log entry, if manifest and casks take this many bytes.
pub(crate) fn saves_inline(store: &Store, bytes: u64) -> bool {
    /// Room for the sealed part of an entry.
    const HEAD_BYTES: u64 = 4096;
    bytes <= store.inner.options.inline_bytes.min(store.limits().max_entry_bytes.saturating_sub(HEAD_BYTES))
}

/// Builds a store with a client whose credentials can be renewed.
fn assemble_renewable(url: String, client: Arc<dyn ObjectStore>, root: Path, options: StoreOptions) -> Store {
    let renewable = Arc::new(Renewable::new(client));
    let objects = Objects::new(url, Medium::Remote, Some(renewable.clone()), root, options.fsync);
    let caches = Caches::new(options.index_cache_bytes);
    Store { inner: Arc::new(Inner { objects, options, caches, renewable: Some(renewable) }) }
}

fn assemble(url: String, medium: Medium, client: Option<Arc<dyn ObjectStore>>, root: Path, options: StoreOptions) -> Store {
    let objects = Objects::new(url, medium, client, root, options.fsync);
    let caches = Caches::new(options.index_cache_bytes);
    Store { inner: Arc::new(Inner { objects, options, caches, renewable: None }) }
}

/// A local store whose writes go to `client`.
#[cfg(test)]
pub(crate) fn local_with(folder: &std::path::Path, client: Arc<dyn ObjectStore>) -> Store {
    let url = folder.display().to_string();
    assemble(url, Medium::Local(folder.to_owned()), Some(client), Path::default(), StoreOptions::default())
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("url", &self.objects().url).finish_non_exhaustive()
    }
}
