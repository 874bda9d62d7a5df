//! The server: gives the objects of this host's stores in memory, and of its replicas, to the other agents of the run.
//!
//! Read-only. Bounded in connections, sizes of requests, listings, idle time, and bytes per second.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::io::Errno;
use tensorcask::{Bandwidth, Error, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::byte_range::{Asked, Sent, parse_range};
use super::connection_waits::ConnectionWaits;
use super::folder_access::{Depth, list, open_file};
use super::handshakes::Handshakes;
use super::listing::multistatus;
use super::resource::Resource;
use super::tls::{Tls, explain};
use super::version::{self, Spoken};

/// A server for the peers of one run. Dropping the future of `serve` closes all connections.
#[derive(Debug)]
pub(crate) struct PeerServer {
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    served: Arc<Served>,
    limits: Limits,
    waits: Arc<ConnectionWaits>,
}

/// Limits that grow with the number of hosts.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Peers' connections at once; others wait.
    connections: usize,
    /// Connections at once that have not shown a certificate, or that wait.
    handshakes: usize,
}

impl Limits {
    fn for_hosts(hosts: usize) -> Self {
        let of_peers = hosts.saturating_mul(CONNECTIONS_OF_PEER);
        Self { connections: LEAST_CONNECTIONS.saturating_add(of_peers), handshakes: LEAST_CONNECTIONS.saturating_add(of_peers) }
    }
}

/// Contents of the server.
#[derive(Debug)]
struct Served {
    /// Folder of the run.
    root: PathBuf,
    /// Key of the run.
    key: String,
    bandwidth: Bandwidth,
    /// Bytes of objects that were sent.
    sent_bytes: AtomicU64,
}

impl PeerServer {
    /// Listens on an address. Without certificates, it must be an address of this machine. `hosts`: number of hosts of the run.
    pub(crate) async fn bind(
        listen: SocketAddr,
        root: PathBuf,
        key: &str,
        tls: Option<Arc<Tls>>,
        bandwidth: Bandwidth,
        hosts: usize,
    ) -> Result<Self> {
        if tls.is_none() && !listen.ip().is_loopback() {
            return Err(Error::invalid("without certificates, an agent serves this machine only").object(listen.to_string()));
        }
        let listener = listen_on(listen).await.map_err(|e| Error::io(listen.to_string(), e))?;
        let served = Served { root, key: key.to_owned(), bandwidth, sent_bytes: AtomicU64::new(0) };
        let limits = Limits::for_hosts(hosts);
        Ok(Self { listener, tls, served: Arc::new(served), limits, waits: Arc::new(ConnectionWaits::new(limits.connections)) })
    }

    /// The connections that wait for others to end.
    pub(crate) fn waits(&self) -> Arc<ConnectionWaits> {
        self.waits.clone()
    }

    /// The address, with the port that was chosen for port 0.
    #[cfg(test)]
    pub(super) fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::io("the server for peers", e))
    }

    /// Serves peers until the future is dropped.
    pub(crate) async fn serve(self) {
        let Limits { connections, handshakes } = self.limits;
        let free = Arc::new(Semaphore::new(connections));
        let handshakes = Handshakes::new(handshakes);
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection of a peer");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let served = self.served.clone();
            let tls = self.tls.clone();
            let free = free.clone();
            let waits = self.waits.clone();
            handshakes.begin(peer.ip(), |place| {
                connections.spawn(async move {
                    let _ = stream.set_nodelay(true);
                    let stream: Box<dyn Connection> = match tls {
                        None => Box::new(stream),
                        Some(tls) => match accept_tls(stream, &tls, peer).await {
                            Some(stream) => Box::new(stream),
                            None => return,
                        },
                    };
                    // A peer that waits for others counts as a handshake meanwhile, so that those who wait are few, too.
                    let Ok(Ok(_permit)) = tokio::time::timeout(IDLE, waits.noted(free.acquire_owned())).await else {
                        return tracing::warn!(%peer, "a connection of a peer was closed, because it waited too long for others to end");
                    };
                    drop(place);
                    serve_connection(stream, served).await;
                })
            });
        }
    }
}

/// Listens on an address. `0.0.0.0` stands for all addresses of this host, those of IPv6 included: peers may have such addresses.
async fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    if address.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED) {
        match listen_on_all(address.port()) {
            Ok(listener) => return Ok(listener),
            Err(error) => tracing::debug!(%error, "no IPv6 here; listening on IPv4 alone"),
        }
    }
    TcpListener::bind(address).await
}

/// Listens on all addresses of both protocols, also where the system gives IPv6 sockets IPv6 alone (`net.ipv6.bindv6only`).
fn listen_on_all(port: u16) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    socket.set_reuseaddr(true)?;
    rustix::net::sockopt::set_ipv6_v6only(&socket, false)?;
    socket.bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    socket.listen(BACKLOG)
}

/// A connection of a peer, with or without TLS.
trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// Performs the handshake. A client without a valid certificate is refused.
async fn accept_tls(stream: TcpStream, tls: &Tls, peer: SocketAddr) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    let accepted = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(tls.server()).accept(stream).into_fallible()).await;
    match accepted {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err((error, mut stream))) => {
            let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map_or_else(|| error.to_string(), explain);
            tracing::warn!(%peer, reason, "a peer was refused, because its certificate or its TLS is not accepted");
            // Closing at once would reset the connection, and the client might not read why it is refused.
            let _ = stream.shutdown().await;
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, discard(&mut stream)).await;
            None
        }
        Err(_) => None,
    }
}

/// Reads a little, until the other side closes.
async fn discard(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    for _ in 0..16 {
        if stream.read(&mut buffer).await.unwrap_or(0) == 0 {
            return;
        }
    }
}

async fn serve_connection(stream: Box<dyn Connection>, served: Arc<Served>) {
    let progress = Arc::new(AtomicU64::new(0));
    let service = service_fn(|request| {
        let served = served.clone();
        let progress = progress.clone();
        async move {
            progress.fetch_add(1, Ordering::Relaxed);
            let mut response = match Spoken::read(request.headers()) {
                Spoken::Ours => answer(request, served, progress).await,
                _ => refuse(StatusCode::UPGRADE_REQUIRED),
            };
            response.headers_mut().insert(version::HEADER, version::ours());
            Ok::<_, Infallible>(response)
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(HEAD_BYTES).max_headers(MOST_HEADERS);
    tokio::select! {
        // Errors of a connection are the client's.
        _ = http.serve_connection(TokioIo::new(stream), service) => {}
        () = stalled(&progress) => {}
    }
}

/// Returns once nothing has happened on a connection for `IDLE`: no request came, and no byte of a response was taken.
async fn stalled(progress: &AtomicU64) {
    let mut last = None;
    loop {
        let now = progress.load(Ordering::Relaxed);
        if last == Some(now) {
            return;
        }
        last = Some(now);
        tokio::time::sleep(IDLE).await;
    }
}

type ResponseBody = http_body_util::combinators::UnsyncBoxBody<Bytes, std::io::Error>;

async fn answer(request: Request<Incoming>, served: Arc<Served>, progress: Arc<AtomicU64>) -> Response<ResponseBody> {
    let Some(resource) = Resource::parse(request.uri().path(), &served.key) else { return refuse(StatusCode::NOT_FOUND) };
    let headers = request.headers();
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    match request.method() {
        &Method::GET | &Method::HEAD => {
            let asked = match headers.contains_key(header::RANGE) {
                true => text(header::RANGE).and_then(|range| parse_range(Some(range))),
                false => parse_range(None),
            };
            let Some(asked) = asked else { return refuse(StatusCode::RANGE_NOT_SATISFIABLE) };
            let root = served.root.clone();
            let opened = blocking(move || open_file(&root, &resource)).await;
            let opened = match opened {
                Ok(opened) => opened,
                Err(status) => return refuse(status),
            };
            let Some(range) = asked.within(opened.facts.bytes) else { return refuse(StatusCode::RANGE_NOT_SATISFIABLE) };
            let sent = Sent { range, object_bytes: opened.facts.bytes };
            let mut response = match request.method() {
                &Method::HEAD => Response::new(empty()),
                _ => Response::new(file_body(opened.file, sent.range.clone(), served, progress)),
            };
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(sent.range.end.saturating_sub(sent.range.start)));
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
            insert(headers, header::ETAG, &opened.facts.tag());
            insert(headers, header::LAST_MODIFIED, &httpdate::fmt_http_date(opened.facts.modified));
            if asked != Asked::Whole {
                insert(headers, header::CONTENT_RANGE, &sent.to_header());
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            }
            response
        }
        method if method.as_str() == "PROPFIND" => {
            let depth = match headers.get("depth").map(HeaderValue::as_bytes) {
                Some(b"1") => Depth::One,
                Some(b"infinity") if resource.is_in_store() => Depth::All,
                _ => return refuse(StatusCode::FORBIDDEN),
            };
            let root = served.root.clone();
            let key = served.key.clone();
            match blocking(move || list(&root, &resource, depth, MOST_LISTED).map(|entries| multistatus(&key, resource, entries))).await {
                Ok(document) => {
                    served.bandwidth.wait_for(document.len() as u64).await;
                    let mut response = Response::new(Full::from(document).map_err(|never| match never {}).boxed_unsync());
                    *response.status_mut() = StatusCode::MULTI_STATUS;
                    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/xml; charset=utf-8"));
                    response
                }
                Err(status) => refuse(status),
            }
        }
        _ => refuse(StatusCode::METHOD_NOT_ALLOWED),
    }
}

fn insert(headers: &mut header::HeaderMap, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn empty() -> ResponseBody {
    Full::new(Bytes::new()).map_err(|never| match never {}).boxed_unsync()
}

fn refuse(status: StatusCode) -> Response<ResponseBody> {
    let mut response = Response::new(empty());
    *response.status_mut() = status;
    response
}

/// Runs file operations on a thread that may wait.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> rustix::io::Result<T> + Send + 'static) -> Result<T, StatusCode> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(done)) => Ok(done),
        // A link is not found: it is not served. A folder is no object.
        Ok(Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::MLINK | Errno::ISDIR)) => Err(StatusCode::NOT_FOUND),
        Ok(Err(Errno::OVERFLOW)) => Err(StatusCode::INSUFFICIENT_STORAGE),
        Ok(Err(error)) => {
            tracing::warn!(%error, "a file cannot be served to a peer");
            Err(StatusCode::INTERNAL_SERVER_ERROR)
        }
        Err(_) => Err(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// Streams a range of a file. If the file became shorter, the body ends with an error, and the connection with it.
fn file_body(file: std::fs::File, range: std::ops::Range<u64>, served: Arc<Served>, progress: Arc<AtomicU64>) -> ResponseBody {
    let frames: BoxStream<'static, std::io::Result<Frame<Bytes>>> = futures::stream::try_unfold((file, range), move |(file, range)| {
        let served = served.clone();
        let progress = progress.clone();
        async move {
            let bytes = range.end.saturating_sub(range.start).min(PIECE_BYTES);
            if bytes == 0 {
                return Ok(None);
            }
            served.bandwidth.wait_for(bytes).await;
            let start = range.start;
            let read = tokio::task::spawn_blocking(move || read_piece(&file, start, bytes).map(|piece| (file, piece)));
            let (file, piece) = read.await.map_err(std::io::Error::other)??;
            progress.fetch_add(1, Ordering::Relaxed);
            served.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
            Ok(Some((Frame::data(piece), (file, start.saturating_add(bytes)..range.end))))
        }
    })
    .boxed();
    StreamBody::new(frames).boxed_unsync()
}

fn read_piece(file: &std::fs::File, start: u64, bytes: u64) -> std::io::Result<Bytes> {
    let mut piece = vec![0; usize::try_from(bytes).map_err(std::io::Error::other)?];
    file.read_exact_at(&mut piece, start)?;
    Ok(piece.into())
}

/// Connections for which there is always room: those of a small run, of `agent doctor`, and of strangers.
const LEAST_CONNECTIONS: usize = 64;
/// Connections that a peer may keep: each of its tasks has a client with idle connections.
const CONNECTIONS_OF_PEER: usize = 16;
/// Connections that the system keeps until they are accepted.
const BACKLOG: u32 = 1024;
/// Time limit of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Time for a refused client to read why it is refused.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time without any progress after which a connection is closed.
const IDLE: Duration = Duration::from_secs(30);
/// Size of the headers of a request.
const HEAD_BYTES: usize = 16 << 10;
const MOST_HEADERS: usize = 32;
/// Entries of a listing.
pub(crate) const MOST_LISTED: usize = 20_000;
/// Bytes that are read from a file at once.
const PIECE_BYTES: u64 = 256 << 10;
