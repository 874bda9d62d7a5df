//! An object store that ends the process at a chosen write.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, UploadPart,
};

/// Number of the write, counted from 0, and whether it is done when the process ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct When {
    pub(crate) write: u64,
    pub(crate) after: bool,
}

#[derive(Debug)]
struct Fuse {
    kill: Option<When>,
    writes: AtomicU64,
}

impl Fuse {
    /// Counts a write. Ends the process if it must end before this write. Otherwise returns the number for `after`.
    fn before(&self) -> u64 {
        let number = self.writes.fetch_add(1, Ordering::SeqCst);
        if self.kill.is_some_and(|kill| !kill.after && kill.write == number) {
            std::process::abort();
        }
        number
    }

    fn after(&self, number: u64) {
        if self.kill.is_some_and(|kill| kill.after && kill.write == number) {
            std::process::abort();
        }
    }
}

#[derive(Debug)]
pub(crate) struct CrashStore {
    inner: Arc<dyn ObjectStore>,
    fuse: Arc<Fuse>,
}

impl CrashStore {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, kill: Option<When>) -> Self {
        Self { inner, fuse: Arc::new(Fuse { kill, writes: AtomicU64::new(0) }) }
    }
}

impl fmt::Display for CrashStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CrashStore({})", self.inner)
    }
}

#[derive(Debug)]
struct CrashUpload {
    inner: Box<dyn MultipartUpload>,
    fuse: Arc<Fuse>,
}

#[async_trait::async_trait]
impl MultipartUpload for CrashUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let part = self.inner.put_part(data);
        let fuse = self.fuse.clone();
        Box::pin(async move {
            let number = fuse.before();
            let result = part.await;
            fuse.after(number);
            result
        })
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        let number = self.fuse.before();
        let result = self.inner.complete().await;
        self.fuse.after(number);
        result
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        self.inner.abort().await
    }
}

#[async_trait::async_trait]
impl ObjectStore for CrashStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> object_store::Result<PutResult> {
        let number = self.fuse.before();
        let result = self.inner.put_opts(location, payload, opts).await;
        self.fuse.after(number);
        result
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> object_store::Result<Box<dyn MultipartUpload>> {
        let number = self.fuse.before();
        let inner = self.inner.put_multipart_opts(location, opts).await?;
        self.fuse.after(number);
        Ok(Box::new(CrashUpload { inner, fuse: self.fuse.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, object_store::Result<Path>>) -> BoxStream<'static, object_store::Result<Path>> {
        let inner = self.inner.clone();
        let fuse = self.fuse.clone();
        let delete = move |location: object_store::Result<Path>| {
            let inner = inner.clone();
            let fuse = fuse.clone();
            async move {
                let number = fuse.before();
                let one = futures::stream::once(async { location }).boxed();
                let result = inner.delete_stream(one).collect::<Vec<_>>().await;
                fuse.after(number);
                futures::stream::iter(result)
            }
        };
        locations.then(delete).flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        let number = self.fuse.before();
        let result = self.inner.copy_opts(from, to, options).await;
        self.fuse.after(number);
        result
    }
}
