//! Serves the page of a report on loopback, to follow a job that runs.
//!
//! A request compares the list of snapshots with that of the last page, and builds the page again if it changed. One page
//! is built at a time and kept; the same page is not sent twice to a browser that has it. The browser asks again by
//! itself, because of the header `Refresh`: the page has no script that sends requests.
//!
//! Only programs of this machine reach the server. A name server could lead a page of another site here, so a request
//! for another host is refused.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tensorcask::blocking::Store;
use tensorcask::{Error, Result, SnapshotRecord};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::{Bounds, gather, render};

/// Number of connections at once; others wait.
const CONNECTIONS: usize = 16;
/// Time in which a client must have sent its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Seconds after which a browser loads the page again.
const REFRESH: &str = "10";

/// Serves the report of a store until the process ends. Port 0 is any free port. Calls `ready` with the address of the
/// page as soon as it can be opened.
pub(crate) fn serve(store: &Store, url: &str, port: u16, ready: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let pages = Arc::new(Pages { store: store.clone(), url: url.to_owned(), started, kept: Mutex::default() });
    store.block_on(async {
        let asked = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let fail = |e| Error::io(format!("http://{asked}"), e);
        let listener = TcpListener::bind(asked).await.map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        ready(&format!("http://{address}"))?;
        let free = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let Ok(permit) = free.clone().acquire_owned().await else { return Ok(()) };
            let Ok((stream, _)) = listener.accept().await else {
                // A client that is gone already is no reason to end. While files run out, every attempt fails at once.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let pages = pages.clone();
            tokio::spawn(async move {
                let _permit = permit;
                let service = service_fn(|request| answer(request, address.port(), pages.clone()));
                let mut http = http1::Builder::new();
                let http = http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT).keep_alive(false);
                // Errors of a connection are the client's.
                let _ = http.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    })
}

async fn answer(request: Request<Incoming>, port: u16, pages: Arc<Pages>) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if ![format!("127.0.0.1:{port}"), format!("localhost:{port}")].iter().any(|own| own == host) {
        return Ok(text(StatusCode::FORBIDDEN, "this server answers to 127.0.0.1 and localhost only\n"));
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n"));
    }
    if request.uri().path() != "/" {
        return Ok(text(StatusCode::NOT_FOUND, "the report is at /\n"));
    }
    let known = request.headers().get(header::IF_NONE_MATCH).cloned();
    let found = tokio::task::spawn_blocking(move || pages.current()).await;
    let mut response = match found {
        Ok(Ok(page)) if known.is_some_and(|known| known.as_bytes() == page.tag.as_bytes()) => {
            tagged(StatusCode::NOT_MODIFIED, Bytes::new(), &page.tag)
        }
        Ok(Ok(page)) => tagged(StatusCode::OK, page.bytes, &page.tag),
        Ok(Err(error)) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}\n")),
        Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "the report could not be built\n"),
    };
    response.headers_mut().insert("refresh", HeaderValue::from_static(REFRESH));
    Ok(response)
}

fn text(status: StatusCode, message: &str) -> Response<Full<Bytes>> {
    respond(status, Bytes::copy_from_slice(message.as_bytes()), "text/plain; charset=utf-8")
}

fn tagged(status: StatusCode, page: Bytes, tag: &str) -> Response<Full<Bytes>> {
    let mut response = respond(status, page, "text/html; charset=utf-8");
    if let Ok(tag) = HeaderValue::from_str(tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

fn respond(status: StatusCode, body: Bytes, kind: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Builds pages, and keeps the last one.
struct Pages {
    store: Store,
    url: String,
    /// Start of the server, in milliseconds since 1970. Tags of two servers on one port differ.
    started: u128,
    kept: Mutex<Option<(Vec<SnapshotRecord>, Page)>>,
}

/// A page, and the tag by which a browser recognises it.
#[derive(Clone)]
struct Page {
    bytes: Bytes,
    number: u64,
    tag: String,
}

impl Pages {
    /// Returns the page of the store as it is now. Blocks.
    fn current(&self) -> Result<Page> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let records = self.store.history().records()?;
        let number = match kept.as_ref() {
            Some((seen, page)) if *seen == records => return Ok(page.clone()),
            Some((_, page)) => page.number.saturating_add(1),
            None => 1,
        };
        let bytes = render(&gather(&self.store, &self.url, None, Bounds::DEFAULT)?)?.into();
        let page = Page { bytes, number, tag: format!("\"{}-{number}\"", self.started) };
        *kept = Some((records, page.clone()));
        Ok(page)
    }
}
