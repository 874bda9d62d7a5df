//! Variables of the environment that decide about a store: its endpoint, region, credentials, proxy, and trusted certificates.
//!
//! A process that works for another one, such as an agent, opens a store with the variables of that process instead of its own.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Variables of the environment that decide about stores. Its debug output has no values, because they are secrets.
///
/// ```
/// use tensorcask::{Environment, StoreOptions};
/// let environment = Environment::from_iter([("AWS_REGION".to_owned(), "eu-central-1".to_owned())]);
/// let options = StoreOptions { environment: Some(environment), ..StoreOptions::default() };
/// assert!(!format!("{options:?}").contains("eu-central-1"));
/// ```
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The variables of this process. Files are named from the root on, so that they are the same in every working directory.
    pub fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        let ours = std::env::vars_os().filter_map(text).filter(|(name, _)| decides(name));
        ours.map(|(name, value)| (name.clone(), with_absolute_path(&name, value))).collect()
    }

    #[cfg(any(feature = "aws", feature = "gcp", feature = "azure", feature = "http"))]
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The variables whose names begin with `prefix`, with their values.
    #[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
    pub(super) fn starting_with<'e>(&'e self, prefix: &'e str) -> impl Iterator<Item = (&'e str, &'e str)> {
        let all = self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        all.filter(move |(name, _)| name.starts_with(prefix))
    }

    /// The same variables without credentials, proxies and certificates, to compare two environments: with other ones, the store is
    /// the same.
    #[must_use]
    pub fn without_credentials(&self) -> Self {
        self.0.iter().filter(|(name, _)| !is_credential(name) && !is_way(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> Self {
        Self(variables.into_iter().collect())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Whether a setting of a store, or a variable, is a credential that is renewed while its store stays the same.
///
/// ```
/// use tensorcask::is_credential;
/// assert!(is_credential("AWS_SESSION_TOKEN") && is_credential("aws_secret_access_key"));
/// assert!(!is_credential("AWS_REGION") && !is_credential("aws_endpoint"));
/// ```
pub fn is_credential(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let words = ["access_key", "token", "secret", "account_key", "sas_key", "master_key", "password", "service_account"];
    words.into_iter().any(|word| name.contains(word))
}

/// Names the file of a setting from the root on. Other values stay as they are.
///
/// ```
/// use tensorcask::with_absolute_path;
/// assert_eq!(with_absolute_path("aws_region", "eu".to_owned()), "eu");
/// assert!(with_absolute_path("google_application_credentials", "key.json".to_owned()).ends_with("/key.json"));
/// ```
pub fn with_absolute_path(name: &str, value: String) -> String {
    const FILES: [&str; 10] = [
        "ssl_cert_file",
        "aws_web_identity_token_file",
        "aws_container_authorization_token_file",
        "google_service_account",
        "google_service_account_path",
        "google_application_credentials",
        "service_account",
        "application_credentials",
        "azure_federated_token_file",
        "federated_token_file",
    ];
    let is_list = name == CERTIFICATE_FOLDERS;
    if value.is_empty() || !(is_list || FILES.iter().any(|file| name.eq_ignore_ascii_case(file))) {
        return value;
    }
    let absolute = match is_list {
        true => std::env::split_paths(&value)
            .map(std::path::absolute)
            .collect::<Result<Vec<_>, _>>()
            .ok()
            .and_then(|paths| std::env::join_paths(paths).ok()),
        false => std::path::absolute(&value).ok().map(std::path::PathBuf::into_os_string),
    };
    absolute.and_then(|path| path.into_string().ok()).unwrap_or(value)
}

/// Whether a variable decides about a store.
fn decides(name: &str) -> bool {
    #[cfg(feature = "aws")]
    if name.starts_with("AWS_") {
        return name.to_ascii_lowercase().parse::<object_store::aws::AmazonS3ConfigKey>().is_ok();
    }
    #[cfg(feature = "gcp")]
    if name.starts_with("GOOGLE_") {
        return name.to_ascii_lowercase().parse::<object_store::gcp::GoogleConfigKey>().is_ok();
    }
    #[cfg(feature = "azure")]
    if name.starts_with("AZURE_") {
        return name.to_ascii_lowercase().parse::<object_store::azure::AzureConfigKey>().is_ok();
    }
    [SERVICE_ACCOUNT, IDENTITY_ENDPOINT, CONTACT_TIMEOUT, RETRY_TIMEOUT].contains(&name) || is_way(name)
}

/// Whether a variable decides how a server is reached, and not which one.
fn is_way(name: &str) -> bool {
    PROXIES.as_flattened().contains(&name) || [CERTIFICATE_FILE, CERTIFICATE_FOLDERS].contains(&name)
}

/// A file with certificates of authorities, and a list of folders with such files.
pub(super) const CERTIFICATE_FILE: &str = "SSL_CERT_FILE";
pub(super) const CERTIFICATE_FOLDERS: &str = "SSL_CERT_DIR";

/// A file with the credentials of a service account of Google.
pub(super) const SERVICE_ACCOUNT: &str = "SERVICE_ACCOUNT";
/// The service that gives the identity of a machine of Azure.
pub(super) const IDENTITY_ENDPOINT: &str = "IDENTITY_ENDPOINT";
pub(super) const CONTACT_TIMEOUT: &str = "TENSORCASK_CONTACT_TIMEOUT";
pub(super) const RETRY_TIMEOUT: &str = "TENSORCASK_RETRY_TIMEOUT";
/// Variables of proxies: for `https://`, for `http://`, for both, and servers without a proxy. Of two names, the first wins.
pub(super) const PROXIES: [[&str; 2]; 4] =
    [["HTTPS_PROXY", "https_proxy"], ["HTTP_PROXY", "http_proxy"], ["ALL_PROXY", "all_proxy"], ["NO_PROXY", "no_proxy"]];
