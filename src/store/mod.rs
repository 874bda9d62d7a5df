//! A store: one root in an object store that holds the snapshots of a training run.
//!
//! This module opens URLs and moves bytes. It does not interpret the bytes.

mod ahead;
mod cache;
mod coalesce;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
mod contact;
mod fetch;
mod io;
mod open;
mod probe;
mod upload;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use object_store::ObjectStore;
use object_store::path::Path;

pub use ahead::AheadUploads;
pub(crate) use cache::Caches;
pub(crate) use fetch::concurrently;
pub(crate) use io::{Created, Listed};
pub(crate) use open::FOLDERS;
pub use open::{StoreOptions, absolute_url};
pub use probe::ProbeReport;
pub(crate) use probe::probe;
pub(crate) use upload::{PartBudget, Upload};

use crate::codec::Registry;
use crate::{Error, Limits, Result};

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
}

/// Requests to the object store below one root. Counts requests and bytes.
pub(crate) struct Objects {
    url: String,
    medium: Medium,
    client: OnceLock<Arc<dyn ObjectStore>>,
    root: Path,
    fsync: bool,
    counters: Counters,
}

/// Storage below a store. Decides how errors are interpreted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Medium {
    Memory,
    /// A local folder.
    Local(std::path::PathBuf),
    Remote,
}

#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

/// Requests and bytes of a store and its clones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoCounts {
    /// Number of requests sent, of every kind.
    pub requests: u64,
    /// Number of object bytes received.
    pub bytes_read: u64,
    /// Number of object bytes sent.
    pub bytes_written: u64,
}

impl Store {
    /// Creates a store in any [`ObjectStore`], below `root`. Open local folders by path instead: they need fsync calls
    /// that an `ObjectStore` does not expose.
    pub fn with_object_store(objects: Arc<dyn ObjectStore>, root: Path, options: StoreOptions) -> Self {
        let url = format!("{objects}/{root}");
        assemble(url, Medium::Remote, Some(objects), root, options)
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

    /// Returns the requests and bytes so far.
    pub fn io(&self) -> IoCounts {
        let counters = &self.objects().counters;
        IoCounts {
            requests: counters.requests.load(Ordering::Relaxed),
            bytes_read: counters.bytes_read.load(Ordering::Relaxed),
            bytes_written: counters.bytes_written.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn objects(&self) -> &Objects {
        &self.inner.objects
    }

    pub(crate) fn caches(&self) -> &Caches {
        &self.inner.caches
    }
}

fn assemble(url: String, medium: Medium, client: Option<Arc<dyn ObjectStore>>, root: Path, options: StoreOptions) -> Store {
    let cell = OnceLock::new();
    if let Some(client) = client {
        let _ = cell.set(client);
    }
    let objects = Objects { url, medium, client: cell, root, fsync: options.fsync, counters: Counters::default() };
    let caches = Caches::new(options.index_cache_bytes);
    Store { inner: Arc::new(Inner { objects, options, caches }) }
}

impl Objects {
    pub(crate) fn medium(&self) -> &Medium {
        &self.medium
    }

    fn client(&self) -> Result<&Arc<dyn ObjectStore>> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        match &self.medium {
            // Another process may have created the folder since this handle was opened.
            Medium::Local(folder) if folder.is_dir() => {
                let client = open::local_objects(folder, self.fsync)?;
                Ok(self.client.get_or_init(|| client))
            }
            _ => Err(Error::not_found(format!("no store at {}; the first save creates one", self.url)).object(&self.url)),
        }
    }

    fn path(&self, object: &str) -> Path {
        Path::from_iter(self.root.parts().chain(Path::from(object).parts()))
    }
}

impl Counters {
    fn add(&self, requests: u64, bytes_read: u64, bytes_written: u64) {
        self.requests.fetch_add(requests, Ordering::Relaxed);
        self.bytes_read.fetch_add(bytes_read, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes_written, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("url", &self.url()).finish_non_exhaustive()
    }
}
