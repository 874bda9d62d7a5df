//! A real S3 server behind a proxy that breaks connections, in every way and at every request of a save and a restore.
//! `bash tests/servers/run moto -- cargo test --workspace --test it fault_proxy`, and `bash tests/run`, start the server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::is_thorough;
use tensorcask::maintain::{self, DoctorOptions, GcOptions, VerifyOptions};
use tensorcask::wire::Event;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, Slice, Store, StoreOptions, TensorView, Writer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Clean close, before or after the server saw the request.
    Fin,
    FinAfter,
    /// Reset, before or after the server saw the request.
    Reset,
    ResetAfter,
    Status500,
    Status409,
    /// No answer; the connection stays open until the client gives up.
    Hang,
    /// A server that cannot delete many objects with one request answers 501 to it.
    NoBulkDelete,
}

const WAYS: [Way; 7] = [Way::Fin, Way::FinAfter, Way::Reset, Way::ResetAfter, Way::Status500, Way::Status409, Way::Hang];

/// Forwards one request per connection; the request whose number is in `at` is broken.
struct Proxy {
    address: String,
    seen: AtomicU64,
    at: AtomicU64,
    /// Number of requests to delete many objects that were refused.
    refused: AtomicU64,
    way: std::sync::Mutex<Way>,
}

impl Proxy {
    async fn start(upstream: String) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (seen, at, refused) = (AtomicU64::new(0), AtomicU64::new(u64::MAX), AtomicU64::new(0));
        let proxy = Arc::new(Self { address, seen, at, refused, way: std::sync::Mutex::new(Way::Fin) });
        let shared = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (shared, upstream) = (shared.clone(), upstream.clone());
                tokio::spawn(async move {
                    // Errors are expected here: the test breaks the client's connection.
                    let _ = shared.serve(client, &upstream).await;
                });
            }
        });
        proxy
    }

    /// Breaks request number `at` from now on.
    fn aim(&self, way: Way, at: u64) {
        *self.way.lock().unwrap() = way;
        self.seen.store(0, Ordering::SeqCst);
        self.at.store(at, Ordering::SeqCst);
    }

    async fn serve(&self, mut client: TcpStream, upstream: &str) -> std::io::Result<()> {
        let request = read_request(&mut client).await?;
        let broken = self.seen.fetch_add(1, Ordering::SeqCst) == self.at.load(Ordering::SeqCst);
        let way = *self.way.lock().unwrap();
        let respond = |status: &str, code: &str| {
            let body = format!("<Error><Code>{code}</Code><Message>made up</Message></Error>");
            format!(
                "HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            )
        };
        if way == Way::NoBulkDelete && request.starts_with(b"POST") && request.windows(7).take(1000).any(|window| window == b"?delete") {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return client.write_all(respond("501 Not Implemented", "NotImplemented").as_bytes()).await;
        }
        match (broken, way) {
            (true, Way::Fin) => return Ok(()),
            (true, Way::Reset) => return reset(&client),
            (true, Way::Hang) => {
                // The request was read whole: nothing comes but the end.
                let _end: usize = client.read(&mut [0]).await?;
                return Ok(());
            }
            (true, Way::Status500) => return client.write_all(respond("500 Internal Server Error", "InternalError").as_bytes()).await,
            // Servers answer this status only to writes.
            (true, Way::Status409) if request.starts_with(b"PUT") => {
                return client.write_all(respond("409 Conflict", "ConditionalRequestConflict").as_bytes()).await;
            }
            _ => {}
        }
        let mut server = TcpStream::connect(upstream).await?;
        server.write_all(&request).await?;
        let mut response = Vec::new();
        server.read_to_end(&mut response).await?;
        match (broken, way) {
            (true, Way::FinAfter) => Ok(()),
            (true, Way::ResetAfter) => reset(&client),
            _ => client.write_all(&response).await,
        }
    }
}

#[allow(deprecated, reason = "a linger of zero never blocks, which the deprecation is about")]
fn reset(client: &TcpStream) -> std::io::Result<()> {
    client.set_linger(Some(Duration::ZERO))
}

/// Reads a whole request and sets `Connection: close`.
async fn read_request(client: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let mut piece = [0; 16 << 10];
        let count = client.read(&mut piece).await?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&piece[..count]);
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let header = |name: &str| head.lines().find_map(|line| line.split_once(':').filter(|(n, _)| n.eq_ignore_ascii_case(name)));
        let length: usize = header("content-length").map_or(0, |(_, value)| value.trim().parse().unwrap());
        while bytes.len() < end + 4 + length {
            let count = client.read(&mut piece).await?;
            if count == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            bytes.extend_from_slice(&piece[..count]);
        }
        let mut lines: Vec<&str> = head.split("\r\n").filter(|line| !line.to_ascii_lowercase().starts_with("connection:")).collect();
        lines.push("Connection: close");
        return Ok([lines.join("\r\n").as_bytes(), b"\r\n\r\n", &bytes[end + 4..]].concat());
    }
}

fn state(step: u64) -> Vec<u8> {
    let mut data: Vec<u8> = (0..8000usize).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    data[(step % 8000) as usize] ^= 0xff;
    data
}

async fn save(writer: &mut Writer, step: u64) -> tensorcask::Result<()> {
    let data = state(step);
    writer.save(step, &[TensorView::new("w", Dtype::U8, &[8000], &data)?], &[], &Metadata::default()).await.map(|_| ())
}

fn honest(error: &tensorcask::Error, what: &str) {
    assert!(matches!(error.kind(), ErrorKind::Storage | ErrorKind::OutcomeUnknown), "{what}: {error}");
}

/// Number of requests that were broken, and number of those that a save or a restore reported.
#[derive(Default)]
struct Outcome {
    broken: u64,
    told: u64,
}

/// Breaks requests in one way, each in a save and a restore of its own, in a store of its own.
async fn break_requests(way: Way, bucket: &str, upstream: &str) -> Outcome {
    let proxy = Proxy::start(upstream.to_owned()).await;
    let mut config = BTreeMap::from([("aws_endpoint".to_owned(), proxy.address.clone())]);
    if way == Way::Hang {
        config.insert("timeout".to_owned(), "4s".to_owned());
    }
    let url = format!("{bucket}/proxy/{}", tensorcask::wire::Id::random().unwrap());
    let open = || StoreOptions { config: config.clone(), ..StoreOptions::default() }.open(&url).unwrap();
    let mut writer = open().writer(Policy::Intermittent { every: 8 }).await.unwrap();
    let mut outcome = Outcome::default();
    // The first requests are all different. Of the many log entries of an opening, some are enough.
    let (all_below, then_every) = if is_thorough() { (u64::MAX, 1) } else { (6, 16) };
    let mut step = 0;
    for at in (0..).filter(|&at: &u64| at < all_below || (at + way as u64).is_multiple_of(then_every)) {
        step += 1;
        let what = format!("{way:?} at request {at}, step {step}");
        proxy.aim(way, at);
        if let Err(e) = save(&mut writer, step).await {
            honest(&e, &what);
            outcome.told += 1;
            if e.kind() == ErrorKind::OutcomeUnknown {
                writer = open().writer(Policy::Intermittent { every: 8 }).await.unwrap();
            }
            save(&mut writer, step).await.unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        let restore = async || open().snapshot(step).await?.read("w", &Slice::all()).await;
        let read = match restore().await {
            Ok(read) => read,
            Err(e) => {
                honest(&e, &what);
                outcome.told += 1;
                restore().await.unwrap_or_else(|e| panic!("{what}: {e}"))
            }
        };
        assert!(read.data == state(step), "{what}");
        if proxy.seen.load(Ordering::SeqCst) <= at {
            break;
        }
        outcome.broken += 1;
    }
    let store = Store::open(&url).unwrap();
    let added: Vec<u64> = store
        .history()
        .entries()
        .await
        .unwrap()
        .into_iter()
        .filter_map(|entry| if let Event::Added { step, .. } = entry.event { Some(step) } else { None })
        .collect();
    let mut once = added.clone();
    once.dedup();
    // Only a save that was reported as failed, but was stored, is committed again.
    let (commits, told) = (added.len() as u64, outcome.told);
    assert!(commits <= step + told && once.len() as u64 == step, "{way:?}: {commits} commits of {step} steps, {told} told");
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean(), "{way:?}");
    outcome
}

/// Bucket and address of the S3 server.
fn server() -> Option<(String, String)> {
    let found = std::env::var("TENSORCASK_TEST_STORE").ok().filter(|bucket| bucket.starts_with("s3://"));
    let (Some(bucket), Ok(endpoint)) = (found, std::env::var("AWS_ENDPOINT")) else {
        eprintln!("NOT RUN: the fault proxy needs an S3 server; use `bash tests/servers/run`");
        return None;
    };
    Some((bucket, endpoint.trim_start_matches("http://").to_owned()))
}

/// Some servers answer *Not Implemented* to the request that deletes many objects at once.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_needs_the_request_that_deletes_many_objects() {
    let Some((bucket, upstream)) = server() else { return };
    let proxy = Proxy::start(upstream).await;
    proxy.aim(Way::NoBulkDelete, u64::MAX);
    let config = BTreeMap::from([("aws_endpoint".to_owned(), proxy.address.clone())]);
    let url = format!("{bucket}/proxy/{}", tensorcask::wire::Id::random().unwrap());
    let store = StoreOptions { config, ..StoreOptions::default() }.open(&url).unwrap();
    let mut writer = store.writer(Policy::Full).await.unwrap();
    for step in [1, 2] {
        save(&mut writer, step).await.unwrap();
    }
    store.forget(&[1]).await.unwrap();
    let collect = GcOptions { apply: true, age_floor: Duration::ZERO, ..GcOptions::default() };
    maintain::gc(&store, &collect).await.unwrap();
    assert!(maintain::doctor(&store, &DoctorOptions::default()).await.unwrap().is_healthy());
    assert_eq!(store.snapshot(2).await.unwrap().read("w", &Slice::all()).await.unwrap().data, state(2));
    assert_eq!(proxy.refused.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_is_no_conflict_and_no_loss() {
    let Some((bucket, upstream)) = server() else { return };
    // All ways at once: the waits before retries, and those of requests that hang, overlap.
    let outcomes = futures::future::join_all(WAYS.map(|way| break_requests(way, &bucket, &upstream))).await;
    for (way, Outcome { broken, told }) in WAYS.iter().zip(outcomes) {
        assert!(broken > 6, "{way:?}: only {broken} requests were broken");
        eprintln!("{way:?}: {broken} requests broken, {told} of them told");
    }
}
