//! The snapshots of a peer as an `ObjectStore` that can be read, and not written.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{
    BackoffConfig, CopyOptions, Error as ObjectError, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as ObjectResult, RetryConfig,
};
use tensorcask::{Error, ErrorKind, Result, Store, StoreOptions};

use super::http_client::{PeerConnector, ResponseLimits};
use super::resource::Resource;
use super::tls::Tls;
use super::union::Place;

/// The snapshots that a peer serves, for one run.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    objects: Arc<PeerObjects>,
}

impl Peer {
    /// Sends no request. `address` is `name:port`; `key` is the key of the run.
    pub(crate) fn open(address: &str, key: &str, tls: Option<Arc<Tls>>, limits: ResponseLimits) -> Result<Self> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{address}");
        let backoff =
            BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: Duration::from_secs(1), ..BackoffConfig::default() };
        let retry = RetryConfig { backoff, max_retries: limits.retries, retry_timeout: limits.answer };
        let built = HttpBuilder::new().with_url(&url).with_retry(retry).with_http_connector(PeerConnector { tls, limits }).build();
        let inner = built.map_err(|e| Error::invalid(format!("not the address of a peer: {e}")).object(&url))?;
        Ok(Self { objects: Arc::new(PeerObjects { place: PeerPlace { url, key: key.to_owned() }, inner }) })
    }

    pub(crate) fn url(&self) -> &str {
        &self.objects.place.url
    }

    /// A store of the peer: `mirror`, or a replica. Sends no request.
    pub(crate) fn store(&self, folder: &str) -> Store {
        let root = Path::from(format!("{}/{folder}", self.objects.place.key));
        Store::with_object_store(self.objects.clone(), root, StoreOptions::default())
    }

    /// A store of the peer as a place of a union.
    pub(crate) fn place(&self, folder: &str) -> Place {
        Arc::new(PrefixStore::new(self.objects.clone() as Place, format!("{}/{folder}", self.objects.place.key)))
    }

    /// Whether the peer answers, whatever it has.
    pub(crate) async fn answers(&self) -> Result<()> {
        let object = format!("{}/mirror/{STORE_FILE}", self.objects.place.key);
        match self.objects.get_opts(&Path::from(object), GetOptions { head: true, ..GetOptions::default() }).await {
            Ok(_) | Err(ObjectError::NotFound { .. }) => Ok(()),
            Err(e) => Err(Error::new(ErrorKind::Storage, e.to_string()).object(self.url()).source(e)),
        }
    }
}

/// File that every store has.
const STORE_FILE: &str = "store.json";

/// The objects of a peer, for one run.
#[derive(Debug)]
struct PeerObjects {
    place: PeerPlace,
    inner: HttpStore,
}

impl PeerObjects {
    fn refuse<T>(&self, operation: &str) -> ObjectResult<T> {
        Err(ObjectError::NotImplemented { operation: operation.to_owned(), implementer: self.to_string() })
    }
}

/// A peer and a run.
#[derive(Debug, Clone)]
struct PeerPlace {
    url: String,
    key: String,
}

impl PeerPlace {
    /// Checks a name in a listing: it must be one that stores have, at the place that was asked for.
    fn check(&self, asked: Option<&Path>, found: &Path) -> ObjectResult<()> {
        let is_below = asked.is_none_or(|asked| found.prefix_match(asked).is_some());
        if is_below && Resource::parse(&format!("/{found}"), &self.key).is_some() {
            return Ok(());
        }
        let asked = asked.map_or("", Path::as_ref);
        let message = format!("peer {}: the listing of `{asked}` names something else: `{}`", self.url, found.as_ref().escape_debug());
        Err(ObjectError::Generic { store: "peer", source: message.into() })
    }
}

impl fmt::Display for PeerObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place.url)
    }
}

#[async_trait]
impl ObjectStore for PeerObjects {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> ObjectResult<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, ObjectResult<ObjectMeta>> {
        let asked = prefix.cloned();
        let place = self.place.clone();
        let check = move |meta: ObjectMeta| futures::future::ready(place.check(asked.as_ref(), &meta.location).map(|()| meta));
        self.inner.list(prefix).and_then(check).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> ObjectResult<ListResult> {
        let listed = self.inner.list_with_delimiter(prefix).await?;
        let objects = listed.objects.iter().map(|meta| &meta.location);
        objects.chain(&listed.common_prefixes).try_for_each(|path| self.place.check(prefix, path))?;
        Ok(listed)
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> ObjectResult<PutResult> {
        self.refuse("a write to a peer")
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> ObjectResult<Box<dyn MultipartUpload>> {
        self.refuse("a write to a peer")
    }

    fn delete_stream(&self, _: BoxStream<'static, ObjectResult<Path>>) -> BoxStream<'static, ObjectResult<Path>> {
        let refused = self.refuse("a deletion on a peer");
        futures::stream::once(futures::future::ready(refused)).boxed()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> ObjectResult<()> {
        self.refuse("a copy on a peer")
    }
}
