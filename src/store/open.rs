//! Opens a store by URL.

#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
use std::time::Duration;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;

#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
use super::contact::{Cloud, Connector};
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
use super::environment;
#[cfg(feature = "azure")]
use super::environment::IDENTITY_ENDPOINT;
#[cfg(feature = "gcp")]
use super::environment::SERVICE_ACCOUNT;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
use super::guarded::{self, Guarded};
use super::objects::blocking;
use super::root::{LocalRoot, check_is_text};
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
use super::settings::{self, Form};
use super::{Bandwidth, Environment, Medium, Objects, Store, assemble, assemble_renewable};
use crate::codec::Registry;
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
use crate::parse_duration;
use crate::{Error, Limits, Result, boxed};

/// Options for opening a store.
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
    /// Limits that readers enforce.
    pub limits: Limits,
    /// Codecs that readers know and writers choose from.
    pub registry: Registry,
    /// Settings of the object store. They override those of the environment.
    ///
    /// Each cloud has its keys in [`object_store`]: `aws_region`, `aws_endpoint`, `azure_storage_account_name`,
    /// `google_service_account`, `timeout` (of one request, 30 s) and so on. Two keys are our own, with values such as
    /// `500ms`, `30s` or `5m`:
    ///
    /// | key | environment | default | meaning |
    /// |---|---|---|---|
    /// | `contact_timeout` | `TENSORCASK_CONTACT_TIMEOUT` | `5s` | time for which the first request to a server is retried |
    /// | `retry_timeout` | `TENSORCASK_RETRY_TIMEOUT` | 17 retries, 1 to 3 min | time for which each later request is retried; below 5 min |
    ///
    /// A server counts as contacted after its first answer, whatever the status. A wrong endpoint or missing
    /// credentials are therefore reported within seconds, while later requests survive an outage of the storage.
    pub config: BTreeMap<String, String>,
    /// Variables that stand in for the environment of this process; `None` for those of this process.
    pub environment: Option<Environment>,
    /// Whether files and folders on local disk are synced before a save is acknowledged. Without fsync, a power cut
    /// loses acknowledged snapshots.
    pub fsync: bool,
    /// Maximum bytes of cask indexes that the store and its clones cache.
    pub index_cache_bytes: u64,
    /// Maximum bytes of manifest and casks of a snapshot that is saved inside its log entry, as one object. Log entries are
    /// never deleted, so garbage collection cannot free these bytes. 0 saves every snapshot as objects of its own.
    pub inline_bytes: u64,
    /// Limit of bytes per second for casks and other large objects that are uploaded. Stores with clones of one limit share it.
    pub bandwidth: Bandwidth,
}

/// Default of [`StoreOptions::inline_bytes`].
const INLINE_BYTES: u64 = 64 << 10;

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            registry: Registry::default(),
            config: BTreeMap::new(),
            environment: None,
            fsync: true,
            index_cache_bytes: 256 << 20,
            inline_bytes: INLINE_BYTES,
            bandwidth: Bandwidth::default(),
        }
    }
}

impl Store {
    /// Opens a store by URL with default options.
    ///
    /// | URL | storage |
    /// |---|---|
    /// | `s3://bucket/prefix`, `s3a://` | Amazon S3 and servers with its protocol |
    /// | `gs://bucket/prefix` | Google Cloud Storage |
    /// | `az://container/prefix`, `azure://` | Azure; the account is `AZURE_STORAGE_ACCOUNT_NAME` |
    /// | `abfss://container@account.dfs.core.windows.net/prefix`, `abfs://` | Azure |
    /// | `http://host/path`, `https://` | a web server; reading only |
    /// | `file:///path`, or a plain path | a folder |
    /// | `memory://name` | memory of this process, shared by name |
    ///
    /// Sends no request yet and creates nothing. Credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`)
    /// or from the instance.
    pub fn open(url: &str) -> Result<Self> {
        StoreOptions::default().open(url)
    }
}

impl Objects {
    /// Creates the folders of a local store and makes them durable. `object_store` syncs only folders that it creates
    /// itself.
    #[boxed]
    pub(crate) async fn ensure_root(&self) -> Result<()> {
        let Some(root) = self.local_folder().map(ToOwned::to_owned) else { return Ok(()) };
        let fsync = self.fsync;
        let _pending = self.noted("create", "the root folder");
        blocking(self.url.clone(), move || create_folders(&root, fsync)).await?;
        self.client().await.map(|_| ())
    }
}

/// Creates the folders of a local store. With `fsync`, they are durable then.
fn create_folders(root: &std::path::Path, fsync: bool) -> Result<()> {
    let fail = |folder: &std::path::Path, e| Error::io(folder.display().to_string(), e);
    check_is_text(&LocalRoot::new(root).map_err(|e| fail(root, e))?.folder)?;
    let existing = root.ancestors().find(|folder| folder.is_dir()).map(PathBuf::from);
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|name| root.join(name)).collect();
    for folder in &folders {
        std::fs::create_dir_all(folder).map_err(|e| fail(folder, e))?;
    }
    if fsync {
        // Syncs from the new folders up to the first existing one, because the entry of the topmost new folder must
        // last too.
        folders.extend(root.ancestors().take_while(|folder| Some(*folder) != existing.as_deref()).map(PathBuf::from));
        folders.extend(existing);
        for folder in &folders {
            std::fs::File::open(folder).and_then(|opened| opened.sync_all()).map_err(|e| fail(folder, e))?;
        }
    }
    Ok(())
}

/// Folders of a store.
pub(crate) const FOLDERS: &[&str] = &["casks", "directories", "snapshots", "log", "catalog"];

impl StoreOptions {
    /// Opens a store by URL with these options.
    pub fn open(self, url: &str) -> Result<Store> {
        let invalid = |message: String| Error::invalid(message).object(url);
        let Some((scheme, rest)) = split_url(url)? else {
            return self.open_local(url, PathBuf::from(url));
        };
        match scheme {
            "file" => {
                let parsed = parse(url)?;
                let folder = parsed.to_file_path().map_err(|()| invalid("not the URL of a local path; write file:///path".into()))?;
                self.open_local(url, folder)
            }
            "memory" => Ok(assemble(url.to_owned(), Medium::Memory, Some(shared_memory(rest)), Path::default(), self)),
            _ if SCHEMES.contains(&scheme) => {
                let parsed = parse(url)?;
                if parsed.host_str().unwrap_or_default().is_empty() {
                    return Err(invalid(format!("the URL names no bucket, container or host; write `{scheme}://NAME/path`")));
                }
                let client = self.cloud(scheme, url)?;
                // An http URL is itself the root.
                let root = if scheme.starts_with("http") { "" } else { parsed.path() };
                let root = Path::from_url_path(root).map_err(|e| invalid(format!("its path cannot name objects: {e}")))?;
                Ok(assemble_renewable(url.to_owned(), client, root, self))
            }
            _ => Err(invalid(format!(
                "`{scheme}://` is not supported; use s3 (or s3a), gs, az (or azure, abfs, abfss), http, https, file or memory, or a plain path"
            ))),
        }
    }

    /// A client with these options for a store in a cloud.
    pub(super) fn client_of(&self, url: &str) -> Result<Arc<dyn ObjectStore>> {
        match split_url(url)? {
            Some((scheme, _)) => self.cloud(scheme, url),
            None => Err(Error::invalid("a local store has no client").object(url)),
        }
    }

    fn open_local(self, url: &str, folder: PathBuf) -> Result<Store> {
        let folder = std::path::absolute(&folder).map_err(|e| Error::io(url, e))?;
        check_is_text(&folder).map_err(|e| e.object(url))?;
        let store = assemble(url.to_owned(), Medium::Local(folder), None, Path::default(), self);
        store.objects().look_up_soon()?;
        Ok(store)
    }

    #[allow(unused_variables, reason = "depends on the features that are built in")]
    fn cloud(&self, scheme: &str, url: &str) -> Result<Arc<dyn ObjectStore>> {
        match scheme {
            #[cfg(feature = "aws")]
            "s3" | "s3a" => self.aws(url),
            #[cfg(feature = "gcp")]
            "gs" => self.gcp(url),
            #[cfg(feature = "azure")]
            "az" | "azure" | "abfs" | "abfss" => self.azure(url),
            #[cfg(feature = "http")]
            "http" | "https" => {
                let options = object_store::ClientOptions::new().with_allow_http(true);
                let builder = object_store::http::HttpBuilder::new().with_url(url).with_client_options(options);
                let builder = builder.with_retry(self.retry(url)?).with_http_connector(self.connector(Cloud::Web, None, url)?);
                built(url, "", || Ok(Arc::new(builder.build()?)))
            }
            _ => Err(Error::unsupported(format!(
                "this build cannot open `{scheme}://`: build tensorcask with feature aws, gcp, azure or http"
            ))
            .object(url)),
        }
    }

    #[cfg(feature = "aws")]
    fn aws(&self, url: &str) -> Result<Arc<dyn ObjectStore>> {
        use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};
        let settings = settings::all::<Key>(&self.environment(), "AWS_", self.cloud_config(), url)?;
        let has_key = settings.iter().any(|setting| setting.key == Key::AccessKeyId);
        let form = |key: &Key| match key {
            Key::Endpoint | Key::S3Endpoint | Key::StsEndpoint | Key::MetadataEndpoint | Key::ContainerCredentialsFullUri => Form::Url,
            Key::ContainerCredentialsRelativeUri => Form::PathAt("http://169.254.170.2"),
            Key::Region | Key::DefaultRegion => Form::PartOfHost("s3.", ".amazonaws.com"),
            Key::AccessKeyId | Key::SecretAccessKey | Key::Token | Key::Encryption(_) => Form::Header,
            Key::ContainerAuthorizationTokenFile if !has_key => Form::HeaderFile,
            Key::Client(key) => client_form(*key),
            _ => Form::Other,
        };
        settings::check(&settings, form, url)?;
        let names = settings::names(&settings);
        let mut builder = AmazonS3Builder::new().with_url(url);
        for setting in settings {
            builder = builder.with_config(setting.key, setting.value);
        }
        let fallback = builder.get_config_value(&Key::ImdsV1Fallback);
        // Objects are deleted one at a time. Some servers do not have the request that deletes many.
        builder = builder.with_disable_bulk_delete(true).with_retry(self.retry(url)?);
        builder = builder.with_http_connector(self.connector(Cloud::Aws, fallback.as_deref(), url)?);
        built(url, &names, || Ok(Arc::new(builder.build()?)))
    }

    #[cfg(feature = "gcp")]
    fn gcp(&self, url: &str) -> Result<Arc<dyn ObjectStore>> {
        use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey as Key};
        let environment = self.environment();
        let settings = settings::all::<Key>(&environment, "GOOGLE_", self.cloud_config(), url)?;
        let form = |key: &Key| match key {
            Key::BaseUrl => Form::Url,
            Key::BearerToken => Form::Header,
            Key::ServiceAccount | Key::ApplicationCredentials => Form::GoogleKeyFile,
            Key::ServiceAccountKey => Form::GoogleKey,
            Key::Client(key) => client_form(*key),
            _ => Form::Other,
        };
        settings::check(&settings, form, url)?;
        let hosts = ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"];
        settings::check_variables(&environment, &hosts.map(|name| (name, Form::Host)), url)?;
        settings::check_variables(&environment, &[(SERVICE_ACCOUNT, Form::GoogleKeyFile)], url)?;
        let names = settings::names(&settings);
        let mut builder = GoogleCloudStorageBuilder::new().with_url(url);
        if let Some(path) = environment.get(SERVICE_ACCOUNT) {
            builder = builder.with_service_account_path(path);
        }
        for setting in settings {
            builder = builder.with_config(setting.key, setting.value);
        }
        builder = builder.with_retry(self.retry(url)?).with_http_connector(self.connector(Cloud::Gcp, None, url)?);
        built(url, &names, || Ok(Arc::new(builder.build()?)))
    }

    #[cfg(feature = "azure")]
    fn azure(&self, url: &str) -> Result<Arc<dyn ObjectStore>> {
        use object_store::azure::{AzureConfigKey as Key, MicrosoftAzureBuilder};
        let environment = self.environment();
        let settings = settings::all::<Key>(&environment, "AZURE_", self.cloud_config(), url)?;
        let form = |key: &Key| match key {
            Key::Endpoint | Key::MsiEndpoint | Key::AuthorityHost | Key::FabricTokenServiceUrl => Form::Url,
            Key::AccountName => Form::PartOfHost("", ".blob.core.windows.net"),
            Key::AuthorityId => Form::PartOfHost("", ""),
            Key::Token | Key::EncryptionKey | Key::FabricWorkloadHost | Key::FabricSessionToken | Key::FabricClusterIdentifier => {
                Form::Header
            }
            Key::Client(key) => client_form(*key),
            _ => Form::Other,
        };
        settings::check(&settings, form, url)?;
        settings::check_variables(&environment, &[(IDENTITY_ENDPOINT, Form::Url), ("IDENTITY_HEADER", Form::Header)], url)?;
        if settings.iter().any(|setting| setting.key == Key::UseEmulator) {
            settings::check_variables(&environment, &[("AZURITE_BLOB_STORAGE_URL", Form::Url)], url)?;
        }
        let names = settings::names(&settings);
        let mut builder = MicrosoftAzureBuilder::new().with_url(url);
        if let Some(endpoint) = environment.get(IDENTITY_ENDPOINT) {
            builder = builder.with_msi_endpoint(endpoint);
        }
        for setting in settings {
            builder = builder.with_config(setting.key, setting.value);
        }
        builder = builder.with_retry(self.retry(url)?).with_http_connector(self.connector(Cloud::Azure, None, url)?);
        built(url, &names, || Ok(Arc::new(builder.build()?))).map_err(|e| match e.message().contains("Account must be specified") {
            true => Error::invalid(NO_AZURE_ACCOUNT).object(url),
            false => e,
        })
    }
}

/// Builds a client of a server. A panic of `object_store`, now or in a request, becomes an error that names `settings`.
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
fn built(url: &str, settings: &str, build: impl FnOnce() -> object_store::Result<Arc<dyn ObjectStore>>) -> Result<Arc<dyn ObjectStore>> {
    let client = guarded::caught(settings, build).map_err(|e| Error::storage(url, e))?;
    Ok(Arc::new(Guarded::new(client, settings)))
}

/// What a setting of HTTP clients becomes.
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
fn client_form(key: object_store::ClientConfigKey) -> Form {
    use object_store::ClientConfigKey as Key;
    if matches!(key, Key::UserAgent | Key::DefaultContentType) { Form::Header } else { Form::Other }
}

#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
impl StoreOptions {
    /// Returns the settings that are meant for `object_store`.
    #[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
    fn cloud_config(&self) -> impl Iterator<Item = (&String, &String)> {
        self.config.iter().filter(|(key, _)| ![CONTACT_TIMEOUT, RETRY_TIMEOUT].contains(&key.as_str()))
    }

    /// The variables that decide about the store.
    fn environment(&self) -> Cow<'_, Environment> {
        self.environment.as_ref().map_or_else(|| Cow::Owned(Environment::of_process()), Cow::Borrowed)
    }

    fn connector(&self, cloud: Cloud, imdsv1_fallback: Option<&str>, url: &str) -> Result<Connector> {
        let contact_timeout = self.time(CONTACT_TIMEOUT, environment::CONTACT_TIMEOUT, url)?;
        let connector = Connector::new(cloud, contact_timeout.unwrap_or(Duration::from_secs(5)), imdsv1_fallback, url);
        Ok(connector.for_process(self.environment.as_ref()))
    }

    fn retry(&self, url: &str) -> Result<object_store::RetryConfig> {
        // At most 5 s between attempts, so that work goes on soon after an outage. All waits take about a minute: each is
        // random, twice the one before on average. Attempts that nobody answers take time, too, up to the limit of 3 minutes.
        let backoff = object_store::BackoffConfig { max_backoff: Duration::from_secs(5), base: 4.0, ..Default::default() };
        let default = object_store::RetryConfig { backoff, max_retries: 17, ..Default::default() };
        Ok(match self.time(RETRY_TIMEOUT, environment::RETRY_TIMEOUT, url)? {
            // The timeout is the limit, so the number of retries is not.
            Some(retry_timeout) => object_store::RetryConfig { retry_timeout, max_retries: usize::MAX, ..default },
            None => default,
        })
    }

    fn time(&self, key: &str, variable: &str, url: &str) -> Result<Option<Duration>> {
        let environment = self.environment();
        let (name, value) = match (self.config.get(key), environment.get(variable)) {
            (Some(value), _) => (key, value.as_str()),
            (None, Some(value)) => (variable, value),
            (None, None) => return Ok(None),
        };
        parse_duration(value).map(Some).map_err(|e| Error::invalid(format!("`{name}`: {}", e.message())).object(url))
    }
}

#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
const CONTACT_TIMEOUT: &str = "contact_timeout";
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
const RETRY_TIMEOUT: &str = "retry_timeout";

#[cfg(feature = "azure")]
const NO_AZURE_ACCOUNT: &str = "no storage account for Azure: set AZURE_STORAGE_ACCOUNT_NAME (or `azure_storage_account_name` in the config of \
    the store), or write abfss://container@account.dfs.core.windows.net/path";

const SCHEMES: [&str; 11] = ["file", "memory", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "http", "https"];

/// Returns a URL as it is, and a local path from the root on, so that the result names the same store in every working
/// directory. Refuses a text that was meant as a URL, such as `s3:/bucket`.
///
/// ```
/// use tensorcask::absolute_url;
/// assert_eq!(absolute_url("s3://bucket/run")?, "s3://bucket/run");
/// assert!(absolute_url("runs/a")?.ends_with("/runs/a"));
/// assert!(absolute_url("s3:/bucket/run").is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn absolute_url(url: &str) -> Result<String> {
    if split_url(url)?.is_some() {
        return Ok(url.to_owned());
    }
    let path = std::path::absolute(url).map_err(|e| Error::io(url, e))?;
    path.into_os_string().into_string().map_err(|_| Error::invalid("the path of a store must be UTF-8").object(url))
}

/// Splits a URL into its scheme and the rest; `None` for a local path.
fn split_url(url: &str) -> Result<Option<(&str, &str)>> {
    match right_form(url) {
        Some(right) => Err(Error::invalid(format!("write `{right}`, or `./{url}` for a local folder of that name")).object(url)),
        None => Ok(url.split_once("://")),
    }
}

/// Returns the URL that was probably meant, for a malformed URL with a known scheme: `s3:/bucket`, `s3:bucket`,
/// `S3://bucket`.
fn right_form(url: &str) -> Option<String> {
    let (given, rest) = url.split_once(':')?;
    let scheme = SCHEMES.into_iter().find(|scheme| scheme.eq_ignore_ascii_case(given))?;
    if given == scheme && rest.starts_with("//") {
        return None;
    }
    let slashes = if scheme == "file" { "///" } else { "//" };
    Some(format!("{scheme}:{slashes}{}", rest.trim_start_matches('/')))
}

/// Parses a URL and refuses a query or fragment. No object store would see them, so two runs could share a root by
/// mistake.
fn parse(url: &str) -> Result<url::Url> {
    let parsed = url::Url::parse(url).map_err(|e| Error::invalid(format!("not a URL: {e}")).object(url))?;
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(Error::invalid("`?` and `#` in the URL of a store must be written as %3F and %23").object(url));
    }
    Ok(parsed)
}

/// Returns the in-memory store of this name. It lives as long as somebody holds it.
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

#[cfg(test)]
mod tests {
    use super::absolute_url;

    #[test]
    fn a_wrong_url_is_no_local_path() {
        let error = absolute_url("s3:/bucket/run").unwrap_err();
        assert!(error.to_string().contains("write `s3://bucket/run`"), "{error}");
        assert!(absolute_url("runs/a:b").unwrap().ends_with("runs/a:b"));
    }
}
