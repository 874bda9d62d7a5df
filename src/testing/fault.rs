//! An object store that fails as real ones do, where the test wants it to.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

/// A request that is about to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Put of a new object that must not exist.
    Create,
    /// Put that may overwrite.
    Put,
    /// Start of a multipart upload.
    StartMultipart,
    /// Get of an object or a range of it.
    Get,
}

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It goes through.
    None,
    /// Nothing is applied; the answer is an error that says nothing.
    FailBefore,
    /// It is applied; the answer is lost.
    LostAnswer,
    /// It is applied; the client's own retry then finds its object and answers *already exists*.
    LostThenExists,
    /// The condition of a create is ignored: an existing object is overwritten, and the answer is success.
    IgnoreCondition,
    /// A get answers with one byte less than it should.
    ShortAnswer,
}

type Decide = dyn Fn(Operation, &Path) -> Fault + Send + Sync;

/// Wraps an object store; a function decides the fate of each request.
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
    decide: Box<Decide>,
}

impl FaultStore {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn ObjectStore>, decide: impl Fn(Operation, &Path) -> Fault + Send + Sync + 'static) -> Self {
        Self { inner, decide: Box::new(decide) }
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

#[async_trait::async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, mut opts: PutOptions) -> object_store::Result<PutResult> {
        let operation = if opts.mode == PutMode::Create { Operation::Create } else { Operation::Put };
        let fault = (self.decide)(operation, location);
        match fault {
            Fault::FailBefore => return Err(unclear()),
            Fault::IgnoreCondition => opts.mode = PutMode::Overwrite,
            _ => {}
        }
        let result = self.inner.put_opts(location, payload, opts).await?;
        match fault {
            Fault::LostAnswer => Err(unclear()),
            Fault::LostThenExists => {
                Err(object_store::Error::AlreadyExists { path: location.to_string(), source: "the retry found it".into() })
            }
            _ => Ok(result),
        }
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> object_store::Result<Box<dyn MultipartUpload>> {
        match (self.decide)(Operation::StartMultipart, location) {
            Fault::FailBefore => Err(unclear()),
            _ => self.inner.put_multipart_opts(location, opts).await,
        }
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        let fault = (self.decide)(Operation::Get, location);
        if fault == Fault::FailBefore {
            return Err(unclear());
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
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
