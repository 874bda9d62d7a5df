//! First contact with a server: gives up early on a server that has never answered, and on a bucket that does not exist.
//!
//! `object_store` retries a request for three minutes. That is right during training, when the storage may be away for
//! a moment. It is wrong for the first request, which usually fails because of a typing error, a missing credential or
//! a closed port.
//!
//! All requests therefore go through [`Connector`], which remembers the servers that have answered. A request to any
//! other server is retried for `contact_timeout` (5 s); then the error lists what was tried. `object_store` does not
//! retry that error, because of its kind. Once a server has answered, with any status, `object_store` alone decides
//! about retries.
//!
//! A request that fails for longer than 5 s is reported every 10 s while it is repeated, so that nobody waits in silence.
//! *Not Implemented* (501) is final: an operation that a server does not have is not there a minute later either.
//!
//! An answer that refuses a request is XML or JSON of many lines. It is replaced by its code, its message, and the settings
//! to check.
//!
//! The time limit of an upload grows with the bytes in flight ([`upload_pace`](super::upload_pace)).
//!
//! Requests for instance credentials (EC2, GCE, Azure VM) are recognized by the headers that the metadata services
//! require. `object_store` sends these requests if nothing else is configured, so their failure means that there are no
//! credentials.
//!
//! A server answers 404 for an object that does not exist and for a bucket that does not exist. The error code in the
//! answer tells them apart. A missing bucket is an error of the storage: if it counted as a missing object, a reader would
//! report an empty store for a mistyped URL.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use object_store::client::{HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector};
use object_store::{ClientConfigKey, ClientOptions};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Environment;
use super::certificates::Certificates;
use super::proxies::Proxies;
use super::upload_pace::UploadPace;
use crate::error::Advice;

/// Kind of service behind a URL. Decides which settings an error suggests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cloud {
    #[cfg(feature = "aws")]
    Aws,
    #[cfg(feature = "gcp")]
    Gcp,
    #[cfg(feature = "azure")]
    Azure,
    #[cfg(feature = "http")]
    Web,
}

/// Creates clients that give up early on servers that have never answered.
#[derive(Debug)]
pub(super) struct Connector {
    contacts: Arc<Contacts>,
    /// Proxies of the process that the store is opened for; `None` for those of this process.
    proxies: Option<Proxies>,
    certificates: Certificates,
}

impl Connector {
    /// `imdsv1_fallback` is the setting of that name of `object_store`. `url` is the URL of the store.
    pub(super) fn new(cloud: Cloud, contact_timeout: Duration, imdsv1_fallback: Option<&str>, url: &str) -> Self {
        let imdsv1_fallback = imdsv1_fallback.is_some_and(|value| ["1", "true", "on", "yes", "y"].contains(&value.to_lowercase().as_str()));
        let store_url = url.to_owned();
        let contacts = Contacts {
            cloud,
            contact_timeout,
            imdsv1_fallback,
            store_url,
            servers: Mutex::default(),
            repeated: Mutex::default(),
            uploads: Mutex::default(),
        };
        Self { contacts: Arc::new(contacts), proxies: None, certificates: Certificates::default() }
    }

    /// Sends requests as the process with these variables does: by its proxies, and by none of this process. Trusts its certificates.
    pub(super) fn for_process(self, environment: Option<&Environment>) -> Self {
        let certificates = environment.map(Certificates::of).unwrap_or_default();
        Self { proxies: environment.map(Proxies::of), certificates, ..self }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut options = self.certificates.applied_to(options.clone());
        if self.contacts.contact_timeout < CONNECT_TIMEOUT {
            options = options.with_connect_timeout(self.contacts.contact_timeout.max(FIRST_PAUSE));
        }
        let inner = self.client(&options)?;
        let request_timeout = options.get_config_value(&ClientConfigKey::Timeout).and_then(|value| humantime::parse_duration(&value).ok());
        let uploads = match request_timeout {
            Some(_) => self.client(&options.with_timeout_disabled())?,
            None => inner.clone(),
        };
        Ok(HttpClient::new(Client { inner, uploads, request_timeout, contacts: self.contacts.clone() }))
    }
}

impl Connector {
    /// A client of `reqwest`. A client has one proxy, so there are two of them if the proxies for `http` and `https` differ.
    fn client(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let connect = |options: &ClientOptions| ReqwestConnector::default().connect(options);
        let Some(Proxies { http, https }) = &self.proxies else { return connect(options) };
        let for_https = connect(&https.applied_to(options))?;
        if http == https {
            return Ok(for_https);
        }
        Ok(HttpClient::new(ByScheme { for_http: connect(&http.applied_to(options))?, for_https }))
    }
}

/// A client for each scheme of URLs.
#[derive(Debug)]
struct ByScheme {
    for_http: HttpClient,
    for_https: HttpClient,
}

#[async_trait::async_trait]
impl HttpService for ByScheme {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let client = if request.uri().scheme_str() == Some("http") { &self.for_http } else { &self.for_https };
        client.execute(request).await
    }
}

/// Servers that the clients of one store have sent requests to.
#[derive(Debug)]
struct Contacts {
    cloud: Cloud,
    contact_timeout: Duration,
    /// Whether `object_store` asks EC2's metadata service again without a token after a 403.
    imdsv1_fallback: bool,
    store_url: String,
    servers: Mutex<BTreeMap<String, Server>>,
    repeated: Mutex<Repeated>,
    uploads: Mutex<UploadPace>,
}

/// Requests that have failed and may be repeated.
#[derive(Debug, Default)]
struct Repeated {
    /// First and last failure of a request, by method and path.
    failures: BTreeMap<String, (Instant, Instant)>,
    last_warning: Option<Instant>,
}

impl Repeated {
    /// Notes a failure. Returns for how long the request has failed, if a warning is due.
    fn note_failure(&mut self, request: &str) -> Option<Duration> {
        let now = Instant::now();
        if self.failures.len() >= MAX_REPEATED {
            self.failures.clear();
        }
        let (first, last) = self.failures.entry(request.to_owned()).or_insert((now, now));
        // The failures of an earlier, abandoned request do not count.
        if now.duration_since(*last) > FORGOTTEN {
            *first = now;
        }
        *last = now;
        let failing = now.duration_since(*first);
        let is_due = failing >= QUIET && self.last_warning.is_none_or(|last| now.duration_since(last) >= WARNING_INTERVAL);
        is_due.then(|| {
            self.last_warning = Some(now);
            failing
        })
    }

    fn note_success(&mut self, request: &str) {
        if !self.failures.is_empty() {
            self.failures.remove(request);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Answers,
    /// A server that has answered before and fails now.
    Fails,
}

impl Contacts {
    fn servers(&self) -> MutexGuard<'_, BTreeMap<String, Server>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_answered(&self, server: &str) -> bool {
        self.servers().contains_key(server)
    }

    fn note_answer(&self, server: &str) {
        // Every request comes here: the key is copied for the first answer only.
        let mut servers = self.servers();
        match servers.get_mut(server) {
            Some(known) => *known = Server::Answers,
            None => _ = servers.insert(server.to_owned(), Server::Answers),
        }
    }

    fn note_failure(&self, server: &str, error: &HttpError) {
        if self.servers().insert(server.to_owned(), Server::Fails) == Some(Server::Answers) {
            tracing::warn!(server, error = %innermost(error), "the server has stopped answering; its requests are retried");
        }
    }

    fn repeated(&self) -> MutexGuard<'_, Repeated> {
        self.repeated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Warns of a request that has failed for some time.
    fn note_outcome(&self, server: &str, request: &str, outcome: &Result<HttpResponse, HttpError>) {
        let cause = match outcome {
            Ok(response) if is_repeated(response.status().as_u16()) => response.status().to_string(),
            Ok(_) => return self.repeated().note_success(request),
            Err(error) => innermost(error).to_string(),
        };
        if let Some(failing) = self.repeated().note_failure(request) {
            let seconds = failing.as_secs();
            tracing::warn!(server, request, cause, "a request has failed for {seconds} s; it is being repeated");
        }
    }

    /// Returns the time limit for a first request. Google has a second address for its metadata service, so each gets
    /// half.
    fn budget(&self, is_metadata: bool) -> Duration {
        if is_metadata { self.contact_timeout / 2 } else { self.contact_timeout }
    }

    fn no_contact(&self, server: &str, attempts: u32, began: Instant, cause: &dyn std::error::Error) -> String {
        let seconds = began.elapsed().as_secs_f64();
        let attempts = if attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") };
        format!(
            "no answer from {server} after {attempts} in {seconds:.1} s ({}). Check the URL, the endpoint and the network; to wait longer, \
             set `contact_timeout` (now {:?}) in the config of the store, or TENSORCASK_CONTACT_TIMEOUT",
            innermost(cause),
            self.contact_timeout
        )
    }

    /// Returns the sentence for a bucket or container that does not exist.
    fn no_bucket(&self, server: &str) -> String {
        let what = self.cloud.bucket_word();
        let name = bucket_of(&self.store_url).unwrap_or_default();
        format!(
            "{what} `{name}` does not exist at {server}. Create it, or check the URL {}; tensorcask creates the store, not the {what}",
            self.store_url
        )
    }
}

#[derive(Debug)]
struct Client {
    inner: HttpClient,
    /// The same client without a time limit for a whole request.
    uploads: HttpClient,
    request_timeout: Option<Duration>,
    contacts: Arc<Contacts>,
}

#[async_trait::async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let server = request.uri().authority().map_or_else(String::new, |authority| authority.as_str().to_owned());
        let is_metadata = METADATA_HEADERS.iter().any(|header| request.headers().contains_key(*header));
        let has_fallback = self.contacts.imdsv1_fallback && request.method().as_str() == "PUT";
        let endpoint = format!("{}://{server}", request.uri().scheme_str().unwrap_or("https"));
        // Without the query, which may hold a secret.
        let name = format!("{} {}", request.method(), request.uri().path());
        let response = match self.contacts.has_answered(&server) {
            false => self.first_call(request, &server, is_metadata).await,
            true => self.send(request).await.inspect_err(|e| self.contacts.note_failure(&server, e)),
        };
        if !is_metadata {
            self.contacts.note_outcome(&server, &name, &response);
        }
        let response = response?;
        self.contacts.note_answer(&server);
        let status = response.status().as_u16();
        if is_metadata && (REFUSALS.contains(&status) || (status == 403 && !has_fallback)) {
            return Err(self.no_credentials(&format!("answered {}", response.status())));
        }
        match status {
            404 if !is_metadata => self.not_found(response, &endpoint).await,
            400 | 401 | 403 | 405 | NOT_IMPLEMENTED if !is_metadata => self.refused(response, &endpoint, &name).await,
            _ => Ok(response),
        }
    }
}

impl Client {
    /// Sends a request. An upload has as much time as the bytes in flight need.
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let bytes = request.body().content_length() as u64;
        let (Some(base), true) = (self.request_timeout, bytes >= MIN_PACED_BYTES) else { return self.inner.execute(request).await };
        let began = Instant::now();
        let mut upload = PacedUpload::begin(&self.contacts.uploads, bytes);
        let mut sent = std::pin::pin!(self.uploads.execute(request));
        loop {
            let limit = upload.limit(base);
            match timeout_at(began + limit, &mut sent).await {
                Ok(outcome) => {
                    if outcome.is_ok() {
                        upload.done(began.elapsed());
                    }
                    return outcome;
                }
                // More uploads may have begun, or ended slowly, in the meantime.
                Err(_) if upload.limit(base) > limit => {}
                Err(late) => {
                    upload.timed_out(began.elapsed());
                    return Err(HttpError::new(HttpErrorKind::Timeout, late));
                }
            }
        }
    }

    async fn first_call(&self, request: HttpRequest, server: &str, is_metadata: bool) -> Result<HttpResponse, HttpError> {
        let began = Instant::now();
        let budget = self.contacts.budget(is_metadata);
        let is_repeatable = request.method().is_safe() || is_metadata;
        let mut attempts = 0;
        let mut pause = FIRST_PAUSE;
        loop {
            attempts += 1;
            let sent = self.send(request.clone());
            // A metadata answer is short, so waiting for it has the same time limit as connecting.
            let outcome = match is_metadata {
                true => timeout(budget.saturating_sub(began.elapsed()).max(FIRST_PAUSE), sent)
                    .await
                    .unwrap_or_else(|late| Err(HttpError::new(HttpErrorKind::Timeout, late))),
                false => sent.await,
            };
            let error = match outcome {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            if request.uri().scheme_str() == Some("http") && innermost(&error).to_string().contains(SCHEME_REFUSED) {
                return Err(give_up(self.contacts.cloud.http_refused(server)));
            }
            let may_repeat = match error.kind() {
                HttpErrorKind::Connect | HttpErrorKind::Request => true,
                HttpErrorKind::Timeout | HttpErrorKind::Interrupted => is_repeatable,
                _ => false,
            };
            if !may_repeat || began.elapsed() >= budget {
                return Err(match is_metadata {
                    true => self.no_credentials(&format!("did not answer within {budget:?}")),
                    false => no_answer(self.contacts.no_contact(server, attempts, began, &error)),
                });
            }
            if attempts == 1 && !is_metadata {
                tracing::warn!(server, error = %innermost(&error), "no answer yet; trying again for {budget:?}");
            }
            sleep(pause.min(budget.saturating_sub(began.elapsed()))).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Returns the response, or an error if it says that the bucket does not exist. An answer to HEAD has no body; only
    /// Azure names the code in a header too.
    async fn not_found(&self, response: HttpResponse, endpoint: &str) -> Result<HttpResponse, HttpError> {
        let Some(code) = self.contacts.cloud.missing_bucket_code() else { return Ok(response) };
        let (parts, body) = response.into_parts();
        // The status is the answer; a body that breaks off changes nothing.
        let body = body.bytes().await.unwrap_or_default();
        let header = parts.headers.get(AZURE_ERROR_CODE).map(|value| value.as_bytes());
        let element = format!("<Code>{code}</Code>");
        if header == Some(code.as_bytes()) || body.windows(element.len()).any(|window| window == element.as_bytes()) {
            return Err(give_up(self.contacts.no_bucket(endpoint)));
        }
        Ok(HttpResponse::from_parts(parts, body.into()))
    }

    /// Returns an answer that refuses a request, with a short text that says what to check.
    async fn refused(&self, response: HttpResponse, endpoint: &str, request: &str) -> Result<HttpResponse, HttpError> {
        let (parts, body) = response.into_parts();
        let body = body.bytes().await.unwrap_or_default();
        let body = String::from_utf8_lossy(&body);
        let code = element(&body, "Code").or_else(|| parts.headers.get(AZURE_ERROR_CODE)?.to_str().ok()).unwrap_or_default();
        let message = element(&body, "Message").unwrap_or(if code.is_empty() { &body } else { "" });
        let words: Vec<String> = [code, message].into_iter().filter(|text| !text.trim().is_empty()).map(shortened).collect();
        let said = words.join(": ");
        let status = parts.status.as_u16();
        if status == NOT_IMPLEMENTED {
            let said = if said.is_empty() { said } else { format!(" ({said})") };
            let sentence = format!("{endpoint} does not have this operation: it answered {} to {request}{said}", parts.status);
            return Err(give_up(sentence));
        }
        let advice = self.contacts.cloud.advice(status, code);
        let text = [said.as_str(), advice].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(". ");
        Ok(HttpResponse::from_parts(parts, bytes::Bytes::from(text).into()))
    }

    fn no_credentials(&self, metadata: &str) -> HttpError {
        give_up(format!("{}{metadata}", self.contacts.cloud.missing_credentials()))
    }
}

/// An upload that is under way. Dropping it ends its part of the bytes in flight.
struct PacedUpload<'a> {
    pace: &'a Mutex<UploadPace>,
    bytes: u64,
    sent_before: u64,
    /// Most bytes that were in flight at once, as far as it was looked at.
    most_in_flight: u64,
}

impl<'a> PacedUpload<'a> {
    fn begin(pace: &'a Mutex<UploadPace>, bytes: u64) -> Self {
        let sent_before = lock(pace).begin(bytes);
        Self { pace, bytes, sent_before, most_in_flight: 0 }
    }

    fn limit(&mut self, base: Duration) -> Duration {
        let pace = lock(self.pace);
        self.most_in_flight = self.most_in_flight.max(pace.bytes_in_flight());
        pace.limit(base, self.most_in_flight)
    }

    fn done(&self, time: Duration) {
        lock(self.pace).done(self.bytes, self.sent_before, time);
    }

    fn timed_out(&self, time: Duration) {
        lock(self.pace).timed_out(self.most_in_flight, time);
    }
}

impl Drop for PacedUpload<'_> {
    fn drop(&mut self) {
        lock(self.pace).end(self.bytes);
    }
}

fn lock(pace: &Mutex<UploadPace>) -> MutexGuard<'_, UploadPace> {
    pace.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Text of the first element of this name in an answer.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
}

/// The first line of a text, without markup that would fill the screen.
fn shortened(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default().trim_end_matches('.');
    line.chars().take(MAX_SAID).collect()
}

/// Whether `object_store` repeats a request after this status.
fn is_repeated(status: u16) -> bool {
    status == 429 || status == 408 || (status >= 500 && status != NOT_IMPLEMENTED)
}

impl Cloud {
    /// Says what to check after a refusal; empty if the answer says it all.
    #[allow(unreachable_patterns, unused_variables, reason = "depends on the features that are built in")]
    fn advice(self, status: u16, code: &str) -> &'static str {
        let is_denied = matches!(status, 401 | 403);
        match self {
            #[cfg(feature = "aws")]
            Self::Aws => match code {
                "InvalidAccessKeyId" | "SignatureDoesNotMatch" => "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired" => {
                    "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN: credentials with a session token end after some hours"
                }
                "RequestTimeTooSkewed" => "Set the clock of this machine",
                "AuthorizationHeaderMalformed" | "PermanentRedirect" | "IllegalLocationConstraintException" => "Check AWS_REGION",
                _ if is_denied => {
                    "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what this key may do in the bucket: s3:ListBucket, \
                     s3:GetObject, s3:PutObject and s3:DeleteObject"
                }
                _ => "",
            },
            #[cfg(feature = "gcp")]
            Self::Gcp if is_denied => {
                "Check GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, and what the account may do in the bucket"
            }
            #[cfg(feature = "gcp")]
            Self::Gcp => "The server needs the XML interface of Google Cloud Storage, which most emulators do not have",
            #[cfg(feature = "azure")]
            Self::Azure if is_denied => {
                "Check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, and what they may do in the container"
            }
            _ => "",
        }
    }

    fn bucket_word(self) -> &'static str {
        match self {
            #[cfg(feature = "azure")]
            Self::Azure => "container",
            _ => "bucket",
        }
    }

    /// Returns the error code for a bucket that does not exist; `None` for a web server, which has no buckets.
    fn missing_bucket_code(self) -> Option<&'static str> {
        match self {
            #[cfg(feature = "aws")]
            Self::Aws => Some("NoSuchBucket"),
            #[cfg(feature = "gcp")]
            Self::Gcp => Some("NoSuchBucket"),
            #[cfg(feature = "azure")]
            Self::Azure => Some("ContainerNotFound"),
            #[cfg(feature = "http")]
            Self::Web => None,
        }
    }

    /// Returns the list of credentials that were tried. The text ends where the metadata service's answer follows.
    fn missing_credentials(self) -> &'static str {
        match self {
            #[cfg(feature = "aws")]
            Self::Aws => AWS_CREDENTIALS,
            #[cfg(feature = "gcp")]
            Self::Gcp => GCP_CREDENTIALS,
            #[cfg(feature = "azure")]
            Self::Azure => AZURE_CREDENTIALS,
            #[cfg(feature = "http")]
            Self::Web => "the server ",
        }
    }

    fn http_refused(self, server: &str) -> String {
        let allow = match self {
            #[cfg(feature = "aws")]
            Self::Aws => "set AWS_ALLOW_HTTP=true, or `aws_allow_http`",
            #[cfg(feature = "gcp")]
            Self::Gcp => "set GOOGLE_ALLOW_HTTP=true, or `google_allow_http`",
            #[cfg(feature = "azure")]
            Self::Azure => "set AZURE_ALLOW_HTTP=true, or `azure_allow_http`",
            #[cfg(feature = "http")]
            Self::Web => "set `allow_http`",
        };
        format!(
            "the endpoint http://{server} is not encrypted, so no request was sent. Use https://, or {allow} to `true` in the config of \
             the store"
        )
    }
}

/// Returns an error that `object_store` does not retry.
fn give_up(sentence: String) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Advice { sentence, is_answer: true })
}

/// The same for a server that has not answered.
fn no_answer(sentence: String) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Advice { sentence, is_answer: false })
}

/// Returns the bucket or container in the URL of a store: the host, or the user in `abfss://container@account`.
fn bucket_of(url: &str) -> Option<String> {
    let parsed = url::Url::parse(url).ok()?;
    match parsed.username() {
        "" => parsed.host_str().map(str::to_owned),
        container => Some(container.to_owned()),
    }
}

fn innermost(error: &dyn std::error::Error) -> &dyn fmt::Display {
    let mut current = error;
    while let Some(inner) = current.source() {
        current = inner;
    }
    current
}

/// Status of a server that does not have an operation.
const NOT_IMPLEMENTED: u16 = 501;

/// Time for which a failing request is repeated without a word, and the time from one warning to the next.
const QUIET: Duration = Duration::from_secs(5);
const WARNING_INTERVAL: Duration = Duration::from_secs(10);
/// A request that has not failed for this long was given up.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Limit on the number of failing requests that are remembered.
const MAX_REPEATED: usize = 1000;

/// Uploads below this size have the time limit of other requests.
const MIN_PACED_BYTES: u64 = 256 << 10;

/// Limit on the characters of a server's message in an error.
const MAX_SAID: usize = 200;

/// Message of `reqwest` for a URL with `http://` if only `https://` is allowed.
const SCHEME_REFUSED: &str = "scheme is not allowed";

/// Default connect timeout of `object_store`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Headers that the metadata services of Amazon, Google and Azure require. No other request has them.
const METADATA_HEADERS: [&str; 4] = ["x-aws-ec2-metadata-token-ttl-seconds", "x-aws-ec2-metadata-token", "metadata-flavor", "metadata"];

/// Header in which Azure repeats the error code of the body.
const AZURE_ERROR_CODE: &str = "x-ms-error-code";

/// Statuses by which a metadata service says that this machine has no identity. 403 says so too, unless
/// `object_store` then tries the older protocol of EC2.
const REFUSALS: [u16; 3] = [400, 401, 404];

#[cfg(feature = "aws")]
const AWS_CREDENTIALS: &str = "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (a profile of ~/.aws is not read: \
    run `eval \"$(aws configure export-credentials --format env)\"`), or AWS_SKIP_SIGNATURE=true for a public bucket; also looked for \
    AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN and for AWS_CONTAINER_CREDENTIALS_*, and the metadata service of the instance ";

#[cfg(feature = "gcp")]
const GCP_CREDENTIALS: &str = "no credentials for Google Cloud Storage: set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT to a \
    key file, or run `gcloud auth application-default login`, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket; also looked for \
    GOOGLE_SERVICE_ACCOUNT_KEY and ~/.config/gcloud/application_default_credentials.json, and the metadata service of the instance ";

#[cfg(feature = "azure")]
const AZURE_CREDENTIALS: &str = "no credentials for Azure: set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or \
    AZURE_USE_AZURE_CLI=true after `az login`, or AZURE_SKIP_SIGNATURE=true for a public container; also looked for \
    AZURE_STORAGE_TOKEN, and AZURE_CLIENT_ID and AZURE_TENANT_ID with AZURE_CLIENT_SECRET or AZURE_FEDERATED_TOKEN_FILE, and the \
    metadata service of the instance ";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{advance, pause};

    use super::{Repeated, element, shortened};

    #[tokio::test]
    async fn a_request_that_fails_for_long_is_reported_now_and_then() {
        pause();
        let mut repeated = Repeated::default();
        let mut fail_after = async |seconds: u64| {
            advance(Duration::from_secs(seconds)).await;
            repeated.note_failure("PUT /bucket/log").map(|failing| failing.as_secs())
        };
        assert_eq!([fail_after(0).await, fail_after(4).await, fail_after(2).await], [None, None, Some(6)]);
        assert_eq!([fail_after(5).await, fail_after(5).await], [None, Some(16)]);
        // Another request of the same name, much later.
        assert_eq!([fail_after(61).await, fail_after(6).await], [None, Some(6)]);
        repeated.note_success("PUT /bucket/log");
        assert!(repeated.failures.is_empty());
    }

    #[test]
    fn an_answer_is_shortened() {
        let xml = "<?xml version=\"1.0\"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied.\nMore</Message></Error>";
        assert_eq!((element(xml, "Code"), element(xml, "Message").map(shortened)), (Some("AccessDenied"), Some("Access Denied".into())));
        assert_eq!((element("<Code>", "Code"), shortened(&"x".repeat(1000)).len()), (None, 200));
    }
}
