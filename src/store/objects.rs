//! Requests to the object store below the root of a store. `io` and `fetch` add the operations.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::pending::{Pending, PendingRequest, PendingRequests};
use super::root::{LocalRoot, local_objects};
use super::work::WorkCounters;
use crate::{Error, ErrorKind, Result};

/// How long the opening of a store waits for its file system.
const LOOK_UP: Duration = Duration::from_secs(2);

/// Requests to the object store below one root. Counts requests and bytes.
pub(crate) struct Objects {
    pub(super) url: String,
    pub(crate) medium: Medium,
    opened: Arc<OnceLock<Opened>>,
    /// Held while the path of a local store is resolved, also by a thread that nobody waits for any more. So a file system that
    /// hangs takes one thread for each store.
    looking: Arc<Semaphore>,
    pub(super) root: Path,
    pub(super) fsync: bool,
    pub(super) counters: Counters,
    pub(super) work: WorkCounters,
    pending: Arc<PendingRequests>,
}

/// The storage behind a store, once its path is resolved.
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
        let opened = Arc::new(OnceLock::new());
        if let Some(client) = client {
            let _ = opened.set(Opened { client, root: None });
        }
        Self {
            url,
            medium,
            opened,
            looking: Arc::new(Semaphore::new(1)),
            root,
            fsync,
            counters: Counters::default(),
            work: WorkCounters::default(),
            pending: Arc::default(),
        }
    }

    /// Resolves the path of a local store, if its folder exists and its file system answers soon. Otherwise a request does so later.
    pub(super) fn look_up_soon(&self) -> Result<()> {
        let Ok(permit) = self.looking.clone().try_acquire_owned() else { return Ok(()) };
        let Some(look_up) = self.look_up(permit) else { return Ok(()) };
        let (tell, told) = mpsc::channel();
        let started = std::thread::Builder::new().name("tensorcask-look-up".to_owned()).spawn(move || tell.send(look_up()));
        match started.ok().and_then(|_| told.recv_timeout(LOOK_UP).ok()) {
            Some(Err(e)) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Storage) => Err(e),
            _ => Ok(()),
        }
    }

    /// Work that resolves the path of a local store and keeps what it found; `None` for other storage.
    fn look_up(&self, permit: OwnedSemaphorePermit) -> Option<impl FnOnce() -> Result<()> + Send + use<>> {
        let Medium::Local(given) = &self.medium else { return None };
        let given = given.clone();
        let url = self.url.clone();
        let fsync = self.fsync;
        let opened = self.opened.clone();
        Some(move || {
            let _permit = permit;
            let found = Opened::of_folder(&given, &url, fsync)?;
            opened.get_or_init(|| found);
            Ok(())
        })
    }

    /// The client that requests go to. Resolves the path of a local store if that was not done before, on a thread that may wait:
    /// a file system that hangs keeps no caller from giving up.
    pub(super) async fn client(&self) -> Result<&Arc<dyn ObjectStore>> {
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.client);
        }
        let _pending = self.noted("look up", "the root folder");
        let permit = self.looking.clone().acquire_owned().await.map_err(|_| missing(&self.url))?;
        if self.opened.get().is_none() {
            let Some(look_up) = self.look_up(permit) else { return Err(missing(&self.url)) };
            blocking(self.url.clone(), look_up).await?;
        }
        self.opened.get().map(|opened| &opened.client).ok_or_else(|| missing(&self.url))
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

    /// Folder of a local store: the one that its path led to when it was opened, or the path itself before that.
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
