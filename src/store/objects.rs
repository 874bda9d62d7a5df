//! Requests to the object store below the root of a store. `io` and `fetch` add the operations.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStore;
use object_store::path::Path;

use super::pending::{Pending, PendingRequest, PendingRequests};
use super::root::{LocalRoot, local_objects};
use super::work::WorkCounters;
use crate::{Error, ErrorKind, Result};

/// Requests to the object store below one root. Counts requests and bytes.
pub(crate) struct Objects {
    pub(super) url: String,
    pub(crate) medium: Medium,
    opened: OnceLock<Opened>,
    pub(super) root: Path,
    pub(super) fsync: bool,
    pub(super) counters: Counters,
    pub(super) work: WorkCounters,
    pending: Arc<PendingRequests>,
}

/// What requests go to.
struct Opened {
    client: Arc<dyn ObjectStore>,
    /// Folder of a local store.
    root: Option<Arc<LocalRoot>>,
}

/// Storage below a store. Decides how errors are interpreted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Medium {
    Memory,
    /// A local folder, by the path that the caller gave. Requests go to [`Objects::local_folder`].
    Local(PathBuf),
    Remote,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) bytes_written: AtomicU64,
}

impl Opened {
    fn of_folder(given: &std::path::Path, url: &str, fsync: bool) -> Result<Self> {
        let fail = |e| Error::io(url, e);
        // Another process may create the folder later. A folder that cannot be looked up may well be there: a job that took it for a
        // missing store would begin from its first step.
        match std::fs::metadata(given) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                let message = "no folder lies at the path of the store; remove what lies there, or give another path";
                let cause = io::Error::from(io::ErrorKind::NotADirectory);
                return Err(Error::new(ErrorKind::Storage, message).object(url).source(cause));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(missing(url)),
            Err(e) => return Err(fail(e)),
        }
        let root = LocalRoot::new(given).map_err(fail)?;
        let client = local_objects(&root.folder, fsync)?;
        Ok(Self { client, root: Some(Arc::new(root)) })
    }
}

fn missing(url: &str) -> Error {
    Error::not_found(format!("no store at {url}; the first save creates one")).object(url)
}

impl Objects {
    /// Serves the objects below `root`. `client` is `None` for a local folder.
    pub(super) fn new(url: String, medium: Medium, client: Option<Arc<dyn ObjectStore>>, root: Path, fsync: bool) -> Self {
        let opened = OnceLock::new();
        if let Some(client) = client {
            let _ = opened.set(Opened { client, root: None });
        }
        Self { url, medium, opened, root, fsync, counters: Counters::default(), work: WorkCounters::default(), pending: Arc::default() }
    }

    /// The client that requests go to. The first request resolves the path of a local store, on a thread that may wait: a file
    /// system that hangs keeps no caller from giving up.
    pub(super) async fn client(&self) -> Result<&Arc<dyn ObjectStore>> {
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.client);
        }
        let Medium::Local(given) = &self.medium else { return Err(missing(&self.url)) };
        let _pending = self.noted("look up", "the root folder");
        let given = given.clone();
        let url = self.url.clone();
        let fsync = self.fsync;
        let opened = blocking(self.url.clone(), move || Opened::of_folder(&given, &url, fsync)).await?;
        Ok(&self.opened.get_or_init(|| opened).client)
    }

    /// Folder of a local store, from which on there are no links; `None` on other storage. `NotFound` if there is no folder.
    pub(super) async fn folder(&self) -> Result<Option<PathBuf>> {
        let _ = self.client().await?;
        Ok(self.local_folder().map(ToOwned::to_owned))
    }

    /// Folder of a local store that has been found, as it was then.
    pub(super) fn local_root(&self) -> Option<&Arc<LocalRoot>> {
        self.opened.get()?.root.as_ref()
    }

    /// Counts a request that sends these bytes, and notes it as pending until the result is dropped.
    #[must_use]
    pub(super) fn request(&self, operation: &'static str, object: &str, bytes_written: u64) -> Pending {
        self.counters.add(1, 0, bytes_written);
        self.noted(operation, object)
    }

    /// Notes a step that is no request to count, such as a look at a file before it is read.
    #[must_use]
    pub(super) fn noted(&self, operation: &'static str, object: &str) -> Pending {
        self.pending.begin(operation, object)
    }

    pub(super) fn oldest_request(&self) -> Option<PendingRequest> {
        self.pending.oldest()
    }

    /// Folder of a local store: the one that its path led to at the first request, or the path itself before that.
    pub(crate) fn local_folder(&self) -> Option<&std::path::Path> {
        match (&self.medium, self.local_root()) {
            (Medium::Local(_), Some(root)) => Some(&root.folder),
            (Medium::Local(given), None) => Some(given),
            _ => None,
        }
    }

    pub(super) fn path(&self, object: &str) -> Path {
        Path::from_iter(self.root.parts().chain(Path::from(object).parts()))
    }
}

impl Counters {
    pub(super) fn add(&self, requests: u64, bytes_read: u64, bytes_written: u64) {
        self.requests.fetch_add(requests, Ordering::Relaxed);
        self.bytes_read.fetch_add(bytes_read, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes_written, Ordering::Relaxed);
    }
}

/// Outcome of a put-if-absent.
#[derive(Debug)]
pub(crate) enum Created {
    /// The object was written and is durable.
    Written,
    /// An object of that name already exists, or a lost answer made it look so.
    Exists,
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Path below the store's root.
    pub path: String,
    pub bytes: u64,
    /// Last write, in milliseconds since 1970, by the clock of the storage.
    pub modified_ms: u64,
}

/// Runs at most `limit` futures at once. Returns their values in order, or the first error.
pub(crate) async fn concurrently<T, F: Future<Output = Result<T>>>(limit: usize, futures: impl IntoIterator<Item = F>) -> Result<Vec<T>> {
    // Collects the futures first: a lazily mapped stream would carry its closure through every await.
    let futures: Vec<F> = futures.into_iter().collect();
    futures::stream::iter(futures).buffered(limit).try_collect().await
}

/// Runs work on local files on a thread that may wait. One hop to such a thread takes longer than most requests.
pub(super) async fn blocking<T: Send + 'static>(object: String, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(Error::new(ErrorKind::Storage, format!("a task for local files ended early: {e}")).object(object)))
}
