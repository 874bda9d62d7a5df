//! Object store that injects the faults of real object stores where a test asks for them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, UploadPart,
};

/// Kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Put of a new object that must not exist.
    Create,
    /// Put that may overwrite.
    Put,
    /// Start of a multipart upload.
    StartMultipart,
    /// Upload of one part.
    Part,
    /// Completion of a multipart upload.
    Complete,
    /// Get of an object or a range of it.
    Get,
    /// Get of an object's size.
    Head,
    /// A listing.
    List,
    /// Removal of an object.
    Delete,
}

/// Fault that a request meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    None,
    /// Success after a delay.
    Slow(Duration),
    /// Failure before anything is applied; the error gives no reason.
    FailBefore,
    /// Failure before anything is applied, with this HTTP status (429, 503), after all retries of the client.
    Status(u16),
    /// Success on the server, but the answer is lost.
    LostAnswer,
    /// Successful create whose first answer is lost; the client's own retry finds the object and answers *already
    /// exists*.
    LostThenExists,
    /// Failed create or put that answers *already exists*: the server saw a race that nobody won (S3's 409).
    FalseConflict,
    /// Create that ignores its condition: an existing object is overwritten, and the answer is success.
    IgnoreCondition,
    /// Put or part of which half of the bytes are stored; the answer is an error.
    Torn,
    /// Get that returns one byte less than it should.
    ShortAnswer,
    /// Get that does not see an existing object.
    Stale,
    /// Listing in another order.
    Reordered,
    /// Listing that lacks every second object, including the last.
    Truncated,
}

impl Fault {
    /// Returns the faults that a request can meet in a store that keeps its guarantees. These are all but
    /// [`Fault::IgnoreCondition`], and only the lost and torn writes that fit the kind of request.
    pub fn of(operation: Operation) -> &'static [Self] {
        use Fault::{FailBefore, FalseConflict, LostAnswer, LostThenExists, Reordered, ShortAnswer, Slow, Stale, Status, Torn, Truncated};
        const WAIT: Duration = Duration::from_secs(7);
        match operation {
            Operation::Create => &[Slow(WAIT), FailBefore, Status(429), Status(503), LostAnswer, LostThenExists, FalseConflict],
            Operation::Put => &[Slow(WAIT), FailBefore, Status(429), Status(500), LostAnswer, FalseConflict, Torn],
            Operation::Part => &[Slow(WAIT), FailBefore, Status(503), LostAnswer, Torn],
            Operation::StartMultipart | Operation::Complete | Operation::Delete => &[Slow(WAIT), FailBefore, Status(500), LostAnswer],
            Operation::Get => &[Slow(WAIT), FailBefore, Status(429), Status(500), ShortAnswer, Stale],
            Operation::Head => &[Slow(WAIT), FailBefore, Status(429), Stale],
            Operation::List => &[Slow(WAIT), FailBefore, Status(503), Reordered, Truncated],
        }
    }
}

type Decide = dyn Fn(Operation, &Path) -> Fault + Send + Sync;

/// Wraps an object store. A function chooses the fault of each request.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
/// use std::sync::Arc;
/// use tensorcask::{ErrorKind, Policy, Store, StoreOptions, testing::fault::{Fault, FaultStore, Operation}};
/// let broken = FaultStore::new(Arc::new(object_store::memory::InMemory::new()), |operation, _| match operation {
///     Operation::Create => Fault::IgnoreCondition,
///     _ => Fault::None,
/// });
/// let store = Store::with_object_store(Arc::new(broken), Default::default(), StoreOptions::default());
/// assert_eq!(store.writer(Policy::Full).await.unwrap_err().kind(), ErrorKind::UnsafeStore);
/// # Ok(()) }
/// ```
pub struct FaultStore {
    inner: Arc<dyn ObjectStore>,
    decide: Arc<Decide>,
}

impl FaultStore {
    /// Wraps `inner`. About `per_mille` of a thousand requests meet a fault of [`Fault::of`], drawn from `seed`.
    pub fn seeded(inner: Arc<dyn ObjectStore>, seed: u64, per_mille: u64) -> Self {
        let count = AtomicU64::new(0);
        Self::new(inner, move |operation, _| {
            // SplitMix64 of the seed and the request number.
            let mut x = seed.wrapping_add(count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            for factor in [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
                x = (x ^ (x >> 30)).wrapping_mul(factor);
            }
            x ^= x >> 31;
            let faults = Fault::of(operation);
            match faults.get((x >> 32) as usize % faults.len()) {
                Some(fault) if x % 1000 < per_mille => *fault,
                _ => Fault::None,
            }
        })
    }

    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn ObjectStore>, decide: impl Fn(Operation, &Path) -> Fault + Send + Sync + 'static) -> Self {
        Self { inner, decide: Arc::new(decide) }
    }
}

impl fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultStore({:?})", self.inner)
    }
}

impl fmt::Display for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultStore({})", self.inner)
    }
}

fn unclear() -> object_store::Error {
    object_store::Error::Generic { store: "FaultStore", source: "connection reset".into() }
}

/// Applies the part of a fault that comes before the request: a delay, or an error instead of the request.
async fn before(fault: Fault) -> object_store::Result<()> {
    match fault {
        Fault::Slow(delay) => {
            tokio::time::sleep(delay).await;
            Ok(())
        }
        Fault::FailBefore => Err(unclear()),
        Fault::Status(code) => {
            Err(object_store::Error::Generic { store: "FaultStore", source: format!("status {code} after all retries").into() })
        }
        _ => Ok(()),
    }
}

/// Returns the first half of a payload.
fn half(payload: &PutPayload) -> PutPayload {
    let mut bytes = payload.iter().fold(Vec::new(), |mut all, piece| {
        all.extend_from_slice(piece);
        all
    });
    bytes.truncate(bytes.len() / 2);
    bytes.into()
}

/// An upload whose parts and completion meet faults, too.
struct FaultUpload {
    inner: Box<dyn MultipartUpload>,
    decide: Arc<Decide>,
    location: Path,
}

impl fmt::Debug for FaultUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultUpload({})", self.location)
    }
}

#[async_trait::async_trait]
impl MultipartUpload for FaultUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let fault = (self.decide)(Operation::Part, &self.location);
        let data = if fault == Fault::Torn { half(&data) } else { data };
        let sent = match fault {
            Fault::FailBefore | Fault::Status(_) => None,
            _ => Some(self.inner.put_part(data)),
        };
        Box::pin(async move {
            before(fault).await?;
            if let Some(sent) = sent {
                sent.await?;
            }
            if matches!(fault, Fault::LostAnswer | Fault::Torn) { Err(unclear()) } else { Ok(()) }
        })
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        let fault = (self.decide)(Operation::Complete, &self.location);
        before(fault).await?;
        let result = self.inner.complete().await?;
        if fault == Fault::LostAnswer { Err(unclear()) } else { Ok(result) }
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        self.inner.abort().await
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, mut opts: PutOptions) -> object_store::Result<PutResult> {
        let operation = if opts.mode == PutMode::Create { Operation::Create } else { Operation::Put };
        let fault = (self.decide)(operation, location);
        let exists = |why: &str| Err(object_store::Error::AlreadyExists { path: location.to_string(), source: why.into() });
        before(fault).await?;
        match fault {
            Fault::FalseConflict => return exists("a conflicting request"),
            Fault::IgnoreCondition => opts.mode = PutMode::Overwrite,
            _ => {}
        }
        let payload = if fault == Fault::Torn { half(&payload) } else { payload };
        let result = self.inner.put_opts(location, payload, opts).await?;
        match fault {
            Fault::LostAnswer | Fault::Torn => Err(unclear()),
            Fault::LostThenExists => exists("the retry found it"),
            _ => Ok(result),
        }
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> object_store::Result<Box<dyn MultipartUpload>> {
        let fault = (self.decide)(Operation::StartMultipart, location);
        before(fault).await?;
        let inner = self.inner.put_multipart_opts(location, opts).await?;
        match fault {
            Fault::LostAnswer => Err(unclear()),
            _ => Ok(Box::new(FaultUpload { inner, decide: self.decide.clone(), location: location.clone() })),
        }
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        let fault = (self.decide)(if options.head { Operation::Head } else { Operation::Get }, location);
        before(fault).await?;
        if fault == Fault::Stale {
            return Err(object_store::Error::NotFound { path: location.to_string(), source: "not seen yet".into() });
        }
        let mut result = self.inner.get_opts(location, options).await?;
        if fault == Fault::ShortAnswer {
            let (meta, range, attributes, extensions) =
                (result.meta.clone(), result.range.clone(), result.attributes.clone(), result.extensions.clone());
            let bytes = result.bytes().await?;
            let short: Bytes = bytes.slice(..bytes.len().saturating_sub(1));
            let payload = GetResultPayload::Stream(Box::pin(futures::stream::once(async { Ok(short) })));
            result = GetResult { payload, meta, range, attributes, extensions };
        }
        Ok(result)
    }

    fn delete_stream(&self, locations: BoxStream<'static, object_store::Result<Path>>) -> BoxStream<'static, object_store::Result<Path>> {
        let inner = self.inner.clone();
        let decide = self.decide.clone();
        let delete = move |location: object_store::Result<Path>| {
            let inner = inner.clone();
            let decide = decide.clone();
            async move {
                let location = location?;
                let fault = decide(Operation::Delete, &location);
                before(fault).await?;
                inner.delete(&location).await?;
                if fault == Fault::LostAnswer { Err(unclear()) } else { Ok(location) }
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let fault = (self.decide)(Operation::List, prefix.unwrap_or(&Path::default()));
        let inner = self.inner.list(prefix);
        let listed = async move {
            before(fault).await?;
            let mut found: Vec<ObjectMeta> = inner.try_collect().await?;
            match fault {
                Fault::Reordered => found.reverse(),
                Fault::Truncated => {
                    let mut keep = found.len().is_multiple_of(2);
                    found.retain(|_| {
                        keep = !keep;
                        !keep
                    });
                }
                _ => {}
            }
            Ok::<_, object_store::Error>(futures::stream::iter(found.into_iter().map(Ok)))
        };
        futures::stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
