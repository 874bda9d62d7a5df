//! A real S3 server behind a proxy that breaks connections, in every way and at every request of a save and a restore.
//! `bash tests/servers/run moto -- cargo test --workspace --test it fault_proxy`, and `bash tests/run`, start the server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::is_thorough;
use tensorcask::maintain::{self, CopyOptions, DoctorOptions, GcOptions, VerifyOptions};
use tensorcask::wire::Event;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, Rank, Slice, Store, StoreOptions, TensorView, Writer, WriterOptions};
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
}

const WAYS: [Way; 7] = [Way::Fin, Way::FinAfter, Way::Reset, Way::ResetAfter, Way::Status500, Way::Status409, Way::Hang];

/// Requests that the proxy answers itself, with a refusal.
#[derive(Debug, Clone, Copy)]
struct Refusal {
    /// Beginning of the request line, and a part of it.
    method: &'static str,
    path: &'static str,
    status: &'static str,
    code: &'static str,
}

/// Forwards one request per connection; the request whose number is in `at` is broken.
struct Proxy {
    address: String,
    refusals: std::sync::Mutex<Vec<Refusal>>,
    refused: AtomicU64,
    seen: AtomicU64,
    at: AtomicU64,
    way: std::sync::Mutex<Way>,
}

impl Proxy {
    async fn start(upstream: String) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let refusals = std::sync::Mutex::default();
        let way = std::sync::Mutex::new(Way::Fin);
        let seen = AtomicU64::new(0);
        let refused = AtomicU64::new(0);
        let proxy = Arc::new(Self { address, refusals, refused, seen, at: AtomicU64::new(u64::MAX), way });
        let shared = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = shared.clone();
                let upstream = upstream.clone();
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
        let line = String::from_utf8_lossy(request.split(|byte| *byte == b'\r').next().unwrap_or_default()).into_owned();
        let refuses = |refusal: &&Refusal| line.starts_with(refusal.method) && line.contains(refusal.path);
        let refusal = self.refusals.lock().unwrap().iter().find(refuses).copied();
        if let Some(Refusal { status, code, .. }) = refusal {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return client.write_all(respond(status, code).as_bytes()).await;
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
    let commits = added.len() as u64;
    let told = outcome.told;
    assert!(commits <= step + told && once.len() as u64 == step, "{way:?}: {commits} commits of {step} steps, {told} told");
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean(), "{way:?}");
    outcome
}

/// Bucket and endpoint of the S3 server, if one runs.
fn server() -> Option<(String, String)> {
    let found = std::env::var("TENSORCASK_TEST_STORE").ok().filter(|bucket| bucket.starts_with("s3://"));
    let (Some(bucket), Ok(endpoint)) = (found, std::env::var("AWS_ENDPOINT")) else {
        eprintln!("NOT RUN: the fault proxy needs an S3 server; use `bash tests/servers/run`");
        return None;
    };
    Some((bucket, endpoint))
}

/// A proxy, and options and URLs of stores behind it.
async fn refusing(refusals: Vec<Refusal>) -> Option<(Arc<Proxy>, impl Fn(&str) -> Store)> {
    let (bucket, endpoint) = server()?;
    let proxy = Proxy::start(endpoint.trim_start_matches("http://").to_owned()).await;
    *proxy.refusals.lock().unwrap() = refusals;
    let config = BTreeMap::from([("aws_endpoint".to_owned(), proxy.address.clone()), ("retry_timeout".to_owned(), "1s".to_owned())]);
    let id = tensorcask::wire::Id::random().unwrap();
    let open = move |name: &str| {
        let options = StoreOptions { config: config.clone(), inline_bytes: 0, ..StoreOptions::default() };
        options.open(&format!("{bucket}/refusing/{id}/{name}")).unwrap()
    };
    Some((proxy, open))
}

/// A trainer may save without the permission to delete: one rank, many ranks, and copies to an archive.
#[tokio::test(flavor = "multi_thread")]
async fn saves_of_ranks_and_copies_need_no_permission_to_delete() {
    let denied = |method, path| Refusal { method, path, status: "403 Forbidden", code: "AccessDenied" };
    let Some((proxy, open)) = refusing(vec![denied("DELETE", ""), denied("POST", "?delete")]).await else { return };
    let store = open("run");
    let archive = open("archive");
    let mut writer = store.writer(Policy::Intermittent { every: 2 }).await.unwrap();
    let of_probe = proxy.refused.load(Ordering::SeqCst);
    assert!(of_probe > 0, "the probe of a new store removes its scratch objects if it may");
    for step in 1..=3 {
        let mut receipts = Vec::new();
        let parent = writer.next_parent(step).await.unwrap();
        for rank in 0..2 {
            let name = format!("w{rank}");
            let data = state(step + u64::from(rank));
            let mut ranks = store.rank_writer(Rank { rank, world: 2, attempt: 0 }, WriterOptions::default()).await.unwrap();
            receipts.push(ranks.save_on(step, parent, &[TensorView::new(&name, Dtype::U8, &[8000], &data).unwrap()], &[]).await.unwrap());
        }
        writer.commit_receipts(step, &receipts, &Metadata::default()).await.unwrap();
    }
    assert_eq!(proxy.refused.load(Ordering::SeqCst), of_probe, "a commit deletes nothing");
    maintain::copy(&store, &archive, &CopyOptions::default()).await.unwrap();
    for store in [store, archive] {
        assert_eq!(store.snapshot(3).await.unwrap().read("w1", &Slice::all()).await.unwrap().data, state(4));
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
}

/// A server that refuses the commit has not committed. The error tells the code of the server, and the writer goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_commit_tells_the_code_and_is_no_unknown_outcome() {
    let Some((proxy, open)) = refusing(vec![]).await else { return };
    let store = open("run");
    let mut writer = store.writer(Policy::Full).await.unwrap();
    save(&mut writer, 1).await.unwrap();
    for (status, code) in [("400 Bad Request", "ExpiredToken"), ("403 Forbidden", "AccessDenied"), ("507 Insufficient Storage", "Full")] {
        *proxy.refusals.lock().unwrap() = vec![Refusal { method: "PUT", path: "/log/", status, code }];
        let error = save(&mut writer, 2).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
        assert!(error.to_string().contains(code) && error.to_string().contains("nothing was committed"), "{error}");
    }
    // A server that fails may have committed nevertheless. The cause is told, too.
    let status = "500 Internal Server Error";
    let code = "InternalError";
    *proxy.refusals.lock().unwrap() = vec![Refusal { method: "PUT", path: "/log/", status, code }];
    let error = save(&mut writer, 2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    assert!(error.to_string().contains(code), "{error}");
    let stopped = save(&mut writer, 2).await.unwrap_err();
    assert!(stopped.to_string().contains(code), "{stopped}");
    proxy.refusals.lock().unwrap().clear();
    let mut writer = store.writer(Policy::Full).await.unwrap();
    save(&mut writer, 2).await.unwrap();
    assert_eq!(store.snapshots().await.unwrap().len(), 2);
}

/// Some servers answer *Not Implemented* to the request that deletes many objects at once.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_needs_the_request_that_deletes_many_objects() {
    let bulk = Refusal { method: "POST", path: "?delete", status: "501 Not Implemented", code: "NotImplemented" };
    let Some((proxy, open)) = refusing(vec![bulk]).await else { return };
    let store = open("run");
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
    let Some((bucket, endpoint)) = server() else { return };
    let upstream = endpoint.trim_start_matches("http://");
    // All ways at once: the waits before retries, and those of requests that hang, overlap.
    let outcomes = futures::future::join_all(WAYS.map(|way| break_requests(way, &bucket, upstream))).await;
    for (way, Outcome { broken, told }) in WAYS.iter().zip(outcomes) {
        assert!(broken > 6, "{way:?}: only {broken} requests were broken");
        eprintln!("{way:?}: {broken} requests broken, {told} of them told");
    }
}
