//! Requests to a peer, for the HTTP store of `object_store`.
//!
//! A response is bounded before it is read: it must declare its length; a range must be the one that was asked for; and
//! both headers and body have time limits. Every error names the peer and the object.

use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::FutureExt;
use http_body_util::Empty;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_RANGE, DATE, RANGE};
use hyper::{HeaderMap, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use tensorcask::{Error, ErrorKind};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::byte_range::{Asked, Sent, parse_range};
use super::connect::Connector;
use super::tls::{Tls, explain};
use super::version::{self, Spoken};

/// Limits of what a peer may send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResponseLimits {
    /// Time for a connection with its handshake.
    pub connect: Duration,
    /// Time for the headers of a response.
    pub answer: Duration,
    /// Bytes per second that a body must reach, after a first time of `answer`.
    pub least_bytes_per_second: u64,
    /// Size of a listing.
    pub listing_bytes: u64,
    /// Number of attempts after a request that failed.
    pub retries: usize,
}

impl ResponseLimits {
    /// For a reader that has no other place to turn to: an agent whose run begins anew does not answer for a moment.
    pub(crate) fn patient() -> Self {
        Self { retries: 12, ..Self::default() }
    }
}

impl Default for ResponseLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            answer: Duration::from_secs(20),
            least_bytes_per_second: 64 << 10,
            listing_bytes: 16 << 20,
            // The agent tries again later, and says meanwhile why it failed.
            retries: 2,
        }
    }
}

/// Creates the client of one peer.
#[derive(Debug)]
pub(super) struct PeerConnector {
    pub tls: Option<Arc<Tls>>,
    pub limits: ResponseLimits,
}

impl HttpConnector for PeerConnector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(PeerClient::new(self.tls.clone(), self.limits)))
    }
}

/// Clock and round trip of a peer, as its answer to a probe shows them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerFacts {
    /// Time of its clock, in whole seconds.
    pub date: Option<SystemTime>,
    /// Time from the request to the answer, with the connection.
    pub round_trip: Duration,
}

/// Asks a peer for nothing but an answer.
pub(crate) async fn probe_peer(address: &str, key: &str, tls: Option<Arc<Tls>>, limits: ResponseLimits) -> tensorcask::Result<PeerFacts> {
    let url = format!("{}://{address}", if tls.is_some() { "https" } else { "http" });
    let fail = |message: String| Error::new(ErrorKind::Storage, message).object(&url);
    let request = hyper::Request::head(format!("{url}/{key}/mirror/store.json")).body(());
    let (parts, ()) = request.map_err(|e| Error::invalid(format!("not the address of a peer: {e}")).object(&url))?.into_parts();
    let begun = Instant::now();
    let (answer, _) = PeerClient::new(tls, limits).exchange(parts).await.map_err(|error| fail(innermost(&error)))?;
    if !answer.status.is_success() && answer.status != StatusCode::NOT_FOUND {
        return Err(fail(format!("the peer answers {}", answer.status)));
    }
    let date = answer.headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
    Ok(PeerFacts { date, round_trip: begun.elapsed() })
}

#[derive(Debug)]
struct PeerClient {
    client: Client<Connector, Empty<Bytes>>,
    limits: ResponseLimits,
}

impl PeerClient {
    fn new(tls: Option<Arc<Tls>>, limits: ResponseLimits) -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE).pool_max_idle_per_host(MOST_IDLE).http1_max_buf_size(HEAD_BYTES);
        Self { client: builder.build(Connector { tls, timeout: limits.connect }), limits }
    }

    /// Sends a request, and receives the headers of the response from an agent of the same version.
    async fn exchange(&self, mut parts: hyper::http::request::Parts) -> Result<(hyper::http::response::Parts, Incoming), HttpError> {
        let place = Place(format!("{}", parts.uri));
        parts.headers.insert(version::HEADER, version::ours());
        let request = hyper::Request::from_parts(parts, Empty::new());
        let response = match timeout_at(Instant::now() + self.limits.answer, self.client.request(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(place.failed(&error)),
            Err(_) => return Err(place.error(HttpErrorKind::Timeout, format!("no answer within {:?}", self.limits.answer))),
        };
        let (parts, body) = response.into_parts();
        match Spoken::read(&parts.headers) {
            // A response that the HTTP server itself makes, such as 431.
            Spoken::Nothing if parts.status.is_client_error() || parts.status.is_server_error() => {}
            spoken => {
                if let Some(refusal) = spoken.refusal() {
                    return Err(place.error(HttpErrorKind::Unknown, refusal));
                }
            }
        }
        Ok((parts, body))
    }
}

#[async_trait::async_trait]
impl HttpService for PeerClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, _) = request.into_parts();
        let place = Place(format!("{}", parts.uri));
        let expected = match parts.method.as_str() {
            "HEAD" => Expected::Nothing,
            "PROPFIND" => Expected::Listing,
            "GET" => match parse_range(parts.headers.get(RANGE).and_then(|range| range.to_str().ok())) {
                Some(Asked::Whole) => Expected::Object,
                Some(Asked::Part(range)) => Expected::Range(range.start, range.end),
                None => return Err(place.error(HttpErrorKind::Unknown, "only a range with both ends can be read")),
            },
            other => {
                return Err(place.error(HttpErrorKind::Unknown, format!("a peer's snapshots can only be read, not changed by {other}")));
            }
        };
        let (parts, body) = self.exchange(parts).await?;
        if !parts.status.is_success() {
            // The status says enough, and the text would be the peer's.
            return Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(Bytes::new())));
        }
        let bytes = expected.check(parts.status, &parts.headers, body.size_hint().exact(), &self.limits);
        let bytes = bytes.map_err(|message| place.error(HttpErrorKind::Decode, message))?;
        let seconds = bytes.checked_div(self.limits.least_bytes_per_second).unwrap_or(0);
        let limit = self.limits.answer.saturating_add(Duration::from_secs(seconds));
        let body = CheckedBody { body, place, left: bytes, limit, late: Box::pin(sleep_until(Instant::now() + limit)) };
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// The body that a request asks for.
#[derive(Debug, Clone, Copy)]
enum Expected {
    Nothing,
    Listing,
    /// A whole object, of any size: the store compares the size with its limits before it reads the body.
    Object,
    Range(u64, u64),
}

impl Expected {
    /// Returns the length of the body, or says what is wrong with the response.
    fn check(self, status: StatusCode, headers: &HeaderMap, length: Option<u64>, limits: &ResponseLimits) -> Result<u64, String> {
        if let Self::Nothing = self {
            return Ok(0);
        }
        let length = length.ok_or("the response does not declare its length")?;
        match self {
            Self::Range(start, end) => {
                if status != StatusCode::PARTIAL_CONTENT {
                    return Err(format!("the peer answered {status} to a request for a range"));
                }
                let sent = headers.get(CONTENT_RANGE).and_then(|range| Sent::parse(range.to_str().ok()?));
                let sent = sent.ok_or("the response does not declare a valid range")?;
                // A range that ends behind the object is cut.
                if sent.range != (start..end.min(sent.object_bytes)) || sent.range.end.checked_sub(start) != Some(length) {
                    return Err(format!("the peer sent {length} bytes of range {:?}, and {:?} was asked for", sent.range, start..end));
                }
            }
            Self::Listing if length > limits.listing_bytes => {
                return Err(format!("the listing has {length} bytes, over the limit of {}", limits.listing_bytes));
            }
            _ => {}
        }
        Ok(length)
    }
}

/// URL of a request, for errors.
#[derive(Debug, Clone)]
struct Place(String);

impl Place {
    fn error(&self, kind: HttpErrorKind, message: impl fmt::Display) -> HttpError {
        HttpError::new(kind, PeerError(format!("peer {}: {message}", self.0)))
    }

    /// The error of a request that was not answered. A refused certificate will be refused again.
    fn failed(&self, error: &hyper_util::client::legacy::Error) -> HttpError {
        match find_tls_error(error) {
            Some(tls @ rustls::Error::InvalidCertificate(_)) => {
                self.error(HttpErrorKind::Unknown, format!("the certificate of the peer is refused: {}", explain(tls)))
            }
            Some(tls) => self.error(HttpErrorKind::Unknown, explain(tls)),
            None => {
                let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
                self.error(kind, innermost(error))
            }
        }
    }
}

#[derive(Debug)]
struct PeerError(String);

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for PeerError {}

fn find_tls_error<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        // An I/O error has its cause inside, and names the cause of its cause as its source.
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = inner.map(|inner| inner as &(dyn StdError + 'static)).or_else(|| error.source());
    }
    None
}

fn innermost(error: &dyn StdError) -> String {
    let mut current = error;
    while let Some(inner) = current.source() {
        current = inner;
    }
    current.to_string()
}

/// A body of exactly the declared length, within a time limit.
struct CheckedBody {
    body: Incoming,
    place: Place,
    /// Bytes that are still to come.
    left: u64,
    limit: Duration,
    late: Pin<Box<Sleep>>,
}

impl Body for CheckedBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        if self.late.poll_unpin(context).is_ready() {
            let message = format!("the body is too slow: {} bytes have not come within {:?}", self.left, self.limit);
            return Poll::Ready(Some(Err(self.place.error(HttpErrorKind::Timeout, message))));
        }
        let next = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes = match next {
            Some(Ok(frame)) => Some((frame.data_ref().map_or(0, |data| data.len() as u64), frame)),
            Some(Err(error)) => {
                let message = format!("the body ends {} bytes early: {}", self.left, innermost(&error));
                return Poll::Ready(Some(Err(self.place.error(HttpErrorKind::Interrupted, message))));
            }
            None => None,
        };
        match bytes.and_then(|(bytes, frame)| Some((self.left.checked_sub(bytes)?, frame))) {
            Some((left, frame)) => {
                self.left = left;
                Poll::Ready(Some(Ok(frame)))
            }
            None => Poll::Ready(Some(Err(self.place.error(HttpErrorKind::Decode, "the body has another length than declared")))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// Time after which an idle connection is closed.
const IDLE: Duration = Duration::from_secs(15);
/// Connections that stay open between requests. A look at a mirror sends three requests at once: with fewer, each look would begin
/// with a handshake, which costs more than the look.
const MOST_IDLE: usize = 4;
/// Size of the headers of a response.
const HEAD_BYTES: usize = 256 << 10;
