//! Turns a panic of the storage library into an error.
//!
//! `object_store` panics on some settings and paths that it cannot use. [`settings`](super::settings) refuses those that are
//! known; this wrapper catches the rest, so that a panic of a dependency never ends a training run.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use crate::error::Advice;

/// Runs a part of `object_store` that may panic. `settings` names the settings that the error asks to check.
pub(super) fn caught<T>(settings: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(failure(settings, &*panic)))
}

/// An object store that fails instead of panicking.
#[derive(Debug)]
pub(super) struct Guarded {
    inner: Arc<dyn ObjectStore>,
    settings: Arc<str>,
}

impl Guarded {
    /// `settings` names the settings that errors ask to check.
    pub(super) fn new(inner: Arc<dyn ObjectStore>, settings: &str) -> Self {
        Self { inner, settings: settings.into() }
    }

    async fn caught<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        AssertUnwindSafe(request).catch_unwind().await.unwrap_or_else(|panic| Err(failure(&self.settings, &*panic)))
    }

    fn caught_stream<T: Send + 'static>(&self, open: impl FnOnce() -> BoxStream<'static, Result<T>>) -> BoxStream<'static, Result<T>> {
        match caught(&self.settings, || Ok(open())) {
            Ok(stream) => guarded_stream(&self.settings, stream),
            Err(e) => futures::stream::once(std::future::ready(Err(e))).boxed(),
        }
    }
}

fn guarded_stream<T: Send + 'static>(settings: &Arc<str>, stream: BoxStream<'static, Result<T>>) -> BoxStream<'static, Result<T>> {
    let settings = settings.clone();
    let caught = AssertUnwindSafe(stream).catch_unwind();
    caught.map(move |item| item.unwrap_or_else(|panic| Err(failure(&settings, &*panic)))).boxed()
}

fn failure(settings: &str, panic: &(dyn Any + Send)) -> object_store::Error {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    let check = if settings.is_empty() { String::new() } else { format!(". Check the settings {settings}") };
    let sentence = format!("the storage library failed on a request ({text}){check}");
    object_store::Error::Generic { store: "tensorcask", source: Box::new(Advice { sentence, is_answer: true }) }
}

impl fmt::Display for Guarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait::async_trait]
impl ObjectStore for Guarded {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.caught(self.inner.put_opts(location, payload, options)).await
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.caught(self.inner.put_multipart_opts(location, options)).await?;
        Ok(Box::new(GuardedUpload { inner, settings: self.settings.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let mut found = self.caught(self.inner.get_opts(location, options)).await?;
        if let GetResultPayload::Stream(stream) = found.payload {
            found.payload = GetResultPayload::Stream(guarded_stream(&self.settings, stream));
        }
        Ok(found)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.caught(self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.caught_stream(|| self.inner.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.caught_stream(|| self.inner.list(prefix))
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.caught_stream(|| self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.caught(self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.caught(self.inner.copy_opts(from, to, options)).await
    }
}

/// Upload of an object in parts that fails instead of panicking.
#[derive(Debug)]
struct GuardedUpload {
    inner: Box<dyn MultipartUpload>,
    settings: Arc<str>,
}

#[async_trait::async_trait]
impl MultipartUpload for GuardedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let settings = self.settings.clone();
        let sent = caught(&settings, || Ok(self.inner.put_part(data)));
        async move { AssertUnwindSafe(sent?).catch_unwind().await.unwrap_or_else(|panic| Err(failure(&settings, &*panic))) }.boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let completed = AssertUnwindSafe(self.inner.complete()).catch_unwind().await;
        completed.unwrap_or_else(|panic| Err(failure(&self.settings, &*panic)))
    }

    async fn abort(&mut self) -> Result<()> {
        let aborted = AssertUnwindSafe(self.inner.abort()).catch_unwind().await;
        aborted.unwrap_or_else(|panic| Err(failure(&self.settings, &*panic)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;

    use super::{Guarded, caught};

    #[tokio::test]
    async fn requests_pass_and_panics_become_errors() {
        let store = Guarded::new(Arc::new(InMemory::new()), "AWS_ENDPOINT_URL");
        store.put(&Path::from("a"), "b".into()).await.unwrap();
        assert_eq!(store.get(&Path::from("a")).await.unwrap().bytes().await.unwrap(), "b");
        let failed = store.caught::<()>(async { if true { panic!("no URL") } else { Ok(()) } }).await.unwrap_err();
        let built = caught::<()>("", || panic!("{}", "built")).unwrap_err();
        let failed = crate::Error::storage("log", failed);
        assert!(failed.message().contains("no URL") && failed.message().contains("AWS_ENDPOINT_URL"), "{failed}");
        assert!(crate::Error::storage("log", built).message().contains("built"));
    }
}
