//! Turns a URL into a store.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;

use super::{Medium, Store};
use crate::codec::Registry;
use crate::{Error, Limits, Result};

/// How a store is opened.
///
/// ```
/// use tensorcask::{Limits, StoreOptions};
/// let options = StoreOptions { limits: Limits { max_chain_depth: 8, ..Default::default() }, ..Default::default() };
/// let store = options.open("memory://small-chains")?;
/// assert_eq!(store.limits().max_chain_depth, 8);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// What readers accept.
    pub limits: Limits,
    /// Codecs that readers know and writers choose from.
    pub registry: Registry,
    /// Settings of the object store (`aws_region`, `azure_storage_account_name`, ...), which override the environment's.
    pub config: BTreeMap<String, String>,
    /// Whether files and folders on local disk reach the disk before a save is acknowledged. Without it a power cut loses
    /// acknowledged snapshots.
    pub fsync: bool,
    /// Bytes of cask indexes that the store and its clones remember, at most.
    pub index_cache_bytes: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            registry: Registry::default(),
            config: BTreeMap::new(),
            fsync: true,
            index_cache_bytes: 256 << 20,
        }
    }
}

impl Store {
    /// Opens a store by URL with default options: `s3://bucket/prefix`, `gs://`, `az://container/prefix`, `http(s)://`
    /// (reading only), `file:///path`, a plain path, or `memory://name` (shared within the process).
    ///
    /// Nothing is read or created yet. Credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
    pub fn open(url: &str) -> Result<Self> {
        StoreOptions::default().open(url)
    }

    /// Creates the folders of a local store, and makes them durable: object stores sync only folders that they make themselves.
    pub(crate) fn ensure_root(&self) -> Result<()> {
        let Medium::Local(root) = self.medium() else { return Ok(()) };
        let fail = |folder: &std::path::Path, e| Error::io(folder.display().to_string(), e);
        let existing = root.ancestors().find(|folder| folder.is_dir()).map(PathBuf::from);
        let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|name| root.join(name)).collect();
        for folder in &folders {
            std::fs::create_dir_all(folder).map_err(|e| fail(folder, e))?;
        }
        if self.inner.options.fsync {
            // From the new ones up to the folder that was there before, whose entry of the first new one must last too.
            folders.extend(root.ancestors().take_while(|folder| Some(*folder) != existing.as_deref()).map(PathBuf::from));
            folders.extend(existing);
            for folder in &folders {
                std::fs::File::open(folder).and_then(|opened| opened.sync_all()).map_err(|e| fail(folder, e))?;
            }
        }
        self.objects().map(|_| ())
    }
}

/// The folders of a store.
pub(crate) const FOLDERS: &[&str] = &["casks", "directories", "snapshots", "log", "catalog"];

impl StoreOptions {
    /// Opens a store by URL with these options.
    pub fn open(self, url: &str) -> Result<Store> {
        let invalid = |message: String| Error::invalid(message).object(url);
        let Some((scheme, rest)) = url.split_once("://") else {
            return self.open_local(url, PathBuf::from(url));
        };
        match scheme {
            "file" => {
                let parsed = parse(url)?;
                let folder = parsed.to_file_path().map_err(|()| invalid("not the URL of a local path; write file:///path".into()))?;
                self.open_local(url, folder)
            }
            "memory" => Ok(Store::assemble(url.to_owned(), Medium::Memory, Some(shared_memory(rest)), Path::default(), self)),
            "s3" | "s3a" | "gs" | "az" | "azure" | "abfs" | "abfss" | "http" | "https" => {
                let parsed = parse(url)?;
                let objects = self.cloud(scheme, url)?;
                // For http the whole URL is the root already.
                let root = if scheme.starts_with("http") { "" } else { parsed.path() };
                let root = Path::from_url_path(root).map_err(|e| invalid(format!("its path cannot name objects: {e}")))?;
                Ok(Store::assemble(url.to_owned(), Medium::Remote, Some(objects), root, self))
            }
            _ => Err(invalid(format!("`{scheme}://` is not supported; use s3, gs, az, http, https, file or memory, or a plain path"))),
        }
    }

    fn open_local(self, url: &str, folder: PathBuf) -> Result<Store> {
        let folder = std::path::absolute(&folder).map_err(|e| Error::io(url, e))?;
        let objects = match folder.is_dir() {
            true => Some(local_objects(&folder, self.fsync)?),
            false => None,
        };
        Ok(Store::assemble(url.to_owned(), Medium::Local(folder), objects, Path::default(), self))
    }

    #[allow(unused_variables, clippy::needless_return, reason = "depends on the features that are built in")]
    fn cloud(&self, scheme: &str, url: &str) -> Result<Arc<dyn ObjectStore>> {
        let fail = |e: object_store::Error| Error::storage(url, e);
        match scheme {
            #[cfg(feature = "aws")]
            "s3" | "s3a" => {
                let mut builder = object_store::aws::AmazonS3Builder::from_env().with_url(url);
                for (key, value) in &self.config {
                    builder = builder.with_config(config_key(key, url)?, value);
                }
                return Ok(Arc::new(builder.build().map_err(fail)?));
            }
            #[cfg(feature = "gcp")]
            "gs" => {
                let mut builder = object_store::gcp::GoogleCloudStorageBuilder::from_env().with_url(url);
                for (key, value) in &self.config {
                    builder = builder.with_config(config_key(key, url)?, value);
                }
                return Ok(Arc::new(builder.build().map_err(fail)?));
            }
            #[cfg(feature = "azure")]
            "az" | "azure" | "abfs" | "abfss" => {
                let mut builder = object_store::azure::MicrosoftAzureBuilder::from_env().with_url(url);
                for (key, value) in &self.config {
                    builder = builder.with_config(config_key(key, url)?, value);
                }
                return Ok(Arc::new(builder.build().map_err(fail)?));
            }
            #[cfg(feature = "http")]
            "http" | "https" => {
                let options = object_store::ClientOptions::new().with_allow_http(true);
                let builder = object_store::http::HttpBuilder::new().with_url(url).with_client_options(options);
                return Ok(Arc::new(builder.build().map_err(fail)?));
            }
            _ => Err(Error::unsupported(format!(
                "this build cannot open `{scheme}://`: build tensorcask with feature aws, gcp, azure or http"
            ))
            .object(url)),
        }
    }
}

#[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
fn config_key<K: std::str::FromStr>(key: &str, url: &str) -> Result<K> {
    key.parse().map_err(|_| Error::invalid(format!("`{}` is not a setting of this kind of store", key.escape_debug())).object(url))
}

/// A URL without query and fragment, which no object store would see: two runs must not share a root by mistake.
fn parse(url: &str) -> Result<url::Url> {
    let parsed = url::Url::parse(url).map_err(|e| Error::invalid(format!("not a URL: {e}")).object(url))?;
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(Error::invalid("`?` and `#` in the URL of a store must be written as %3F and %23").object(url));
    }
    Ok(parsed)
}

pub(super) fn local_objects(folder: &std::path::Path, fsync: bool) -> Result<Arc<dyn ObjectStore>> {
    let local = LocalFileSystem::new_with_prefix(folder).map_err(|e| Error::storage(folder.display().to_string(), e))?;
    Ok(Arc::new(local.with_fsync(fsync)))
}

/// One in-memory store per name, for as long as somebody holds it.
fn shared_memory(name: &str) -> Arc<dyn ObjectStore> {
    static STORES: LazyLock<std::sync::Mutex<BTreeMap<String, std::sync::Weak<InMemory>>>> = LazyLock::new(Default::default);
    if name.is_empty() {
        return Arc::new(InMemory::new());
    }
    let mut stores = STORES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(store) = stores.get(name).and_then(std::sync::Weak::upgrade) {
        return store;
    }
    let store = Arc::new(InMemory::new());
    stores.insert(name.to_owned(), Arc::downgrade(&store));
    store
}
