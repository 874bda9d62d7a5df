//! A peer that lies: wrong bytes, wrong lengths, endless and slow bodies, other snapshots, wrong listings. A copy from
//! it ends in an error, and whatever was committed is right.
//!
//! The server here speaks HTTP by itself, so that it can break every rule.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tensorcask::maintain::{self, CopyOptions};
use tensorcask::{Error, Latest, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::support::*;
use crate::peers::folder_access::{Depth, list};
use crate::peers::listing::multistatus;
use crate::peers::peer_objects::Peer;
use crate::peers::resource::Resource;

/// How a server lies about objects whose path contains `object`.
#[derive(Clone)]
pub(super) struct Lie {
    pub object: &'static str,
    pub kind: Kind,
}

#[derive(Clone)]
pub(super) enum Kind {
    FlippedByte,
    /// Declares more bytes than it sends.
    Truncated,
    /// Declares fewer bytes than were asked for, and sends those.
    Short,
    /// Sends without end, with chunked encoding.
    Endless,
    /// Declares a huge length and sends without end.
    Huge,
    /// Ignores the range and sends the whole object.
    Whole,
    /// Declares a range that overflows.
    Overflow,
    /// Sends a byte, and then nothing.
    Slow,
    /// Sends headers without end.
    EndlessHeaders,
    Redirect,
    /// Sends the object of the same kind from another store.
    OtherStore(PathBuf),
    /// Sends the object of the same name from the folder of another step of the same session.
    OtherStep(u64),
    /// Answers with these bytes instead of a listing.
    Listing(Arc<Vec<u8>>),
}

/// A server that serves a folder and lies.
pub(super) struct Hostile {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Hostile {
    pub(super) async fn start(root: &Path, lie: Lie) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let root = root.to_owned();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let root = root.clone();
                let lie = lie.clone();
                connections.spawn(async move {
                    // The client closes connections as it likes.
                    let _ = converse(stream, &root, &lie).await;
                });
            }
        });
        Self { address, task }
    }

    pub(super) fn peer(&self) -> Peer {
        Peer::open(&self.address.to_string(), &key(), None, impatient()).unwrap()
    }
}

/// Answers the requests of a connection.
async fn converse(mut stream: TcpStream, root: &Path, lie: &Lie) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        while !buffer.ends_with(b"\r\n\r\n") {
            let byte = stream.read_u8().await?;
            buffer.push(byte);
        }
        let head = String::from_utf8_lossy(&buffer).into_owned();
        buffer.clear();
        let mut words = head.split(' ');
        let method = words.next().unwrap().to_owned();
        let path = words.next().unwrap().to_owned();
        let range = head.lines().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        respond(&mut stream, root, lie, &method, &path, range.as_deref()).await?;
    }
}

async fn respond(stream: &mut TcpStream, root: &Path, lie: &Lie, method: &str, path: &str, range: Option<&str>) -> std::io::Result<()> {
    let lie = Some(&lie.kind).filter(|_| path.contains(lie.object) && method != "HEAD");
    let resource = Resource::parse(path, &key()).unwrap();
    let file = resource.names().iter().fold(root.to_owned(), |folder, name| folder.join(name));
    let mut body = match (method, lie) {
        ("PROPFIND", Some(Kind::Listing(bytes))) => bytes.to_vec(),
        ("PROPFIND", _) => match list(root, &resource, if resource.is_in_store() { Depth::All } else { Depth::One }, 1000) {
            Ok(entries) => multistatus(&key(), resource, entries).into_bytes(),
            Err(_) => return stream.write_all(b"HTTP/1.1 404 Not Found\r\nTensorcask-Peers: 1 0.0.0\r\nContent-Length: 0\r\n\r\n").await,
        },
        (_, Some(Kind::OtherStore(other))) => std::fs::read(sibling(other, &file)).unwrap(),
        (_, Some(Kind::OtherStep(step))) => {
            let folder = file.parent().unwrap();
            let name = format!("{:020}-{step:020}", 0);
            std::fs::read(folder.with_file_name(name).join(file.file_name().unwrap())).unwrap()
        }
        _ => match std::fs::read(&file) {
            Ok(bytes) => bytes,
            Err(_) => return stream.write_all(b"HTTP/1.1 404 Not Found\r\nTensorcask-Peers: 1 0.0.0\r\nContent-Length: 0\r\n\r\n").await,
        },
    };
    if let Some(Kind::FlippedByte) = lie {
        let middle = body.len() / 2;
        body[middle] ^= 1;
    }
    let size = body.len();
    let mut status = "200 OK";
    let mut headers = "Tensorcask-Peers: 1 0.0.0\r\nETag: \"1\"\r\nLast-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\n".to_owned();
    if let (Some((first, last)), false) = (range.and_then(|range| range.split_once('-')), matches!(lie, Some(Kind::Whole))) {
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.trim().parse().unwrap());
        let end = size.min(last + 1);
        body = body.get(first.min(end)..end).unwrap().to_vec();
        status = "206 Partial Content";
        let last = match lie {
            Some(Kind::Overflow) => u64::MAX,
            _ => end as u64 - 1,
        };
        headers += &format!("Content-Range: bytes {first}-{last}/{size}\r\n");
    }
    let mut length = body.len();
    match lie {
        Some(Kind::Truncated) => drop(body.pop()),
        Some(Kind::Short) => {
            body.pop();
            length = body.len();
        }
        Some(Kind::Redirect) => (status, headers) = ("302 Found", format!("Location: http://127.0.0.1:9/{}\r\n", key())),
        Some(Kind::Slow) => body.truncate(1),
        _ => {}
    }
    if method == "HEAD" {
        body.clear();
    }
    let start = format!("HTTP/1.1 {status}\r\n{headers}");
    match lie {
        Some(Kind::Endless) => {
            stream.write_all(format!("{start}Transfer-Encoding: chunked\r\n\r\n").as_bytes()).await?;
            loop {
                stream.write_all(format!("10000\r\n{}\r\n", "x".repeat(0x10000)).as_bytes()).await?;
            }
        }
        Some(Kind::Huge) => {
            stream.write_all(format!("{start}Content-Length: {}\r\n\r\n", u64::MAX / 2).as_bytes()).await?;
            loop {
                stream.write_all(&[b'x'; 0x10000]).await?;
            }
        }
        Some(Kind::EndlessHeaders) => {
            stream.write_all(start.as_bytes()).await?;
            loop {
                stream.write_all(format!("X: {}\r\n", "x".repeat(1000)).as_bytes()).await?;
            }
        }
        _ => {}
    }
    stream.write_all(format!("{start}Content-Length: {length}\r\n\r\n").as_bytes()).await?;
    stream.write_all(&body).await?;
    match lie {
        // Closes the connection.
        Some(Kind::Truncated) => Err(std::io::ErrorKind::BrokenPipe.into()),
        Some(Kind::Slow) => stream.read_u8().await.map(|_| ()),
        _ => Ok(()),
    }
}

/// The file of another store that takes the place of this one: of the same name, or the last of the same kind.
fn sibling(other: &Path, file: &Path) -> PathBuf {
    let names = files_below(other);
    let name = file.file_name().unwrap().to_str().unwrap();
    let folder = ["casks", "snapshots", "log", "directories", "receipts"]
        .into_iter()
        .find(|folder| file.components().any(|part| part.as_os_str() == *folder));
    let of_kind = || names.iter().filter(|path| path.starts_with(folder.unwrap()));
    other.join(of_kind().find(|path| path.ends_with(name)).or_else(|| of_kind().max()).unwrap())
}

/// Copies from a hostile peer twice; returns the error of the second attempt. Whatever was committed is right, and a copy from
/// an honest peer completes the destination.
async fn copy_from(host: &Host, lie: Lie) -> Error {
    let hostile = Hostile::start(host.folder.root(), lie).await;
    let scratch = tempfile::tempdir().unwrap();
    let destination = Store::open(scratch.path().join("copy").to_str().unwrap()).unwrap();
    let source = hostile.peer().store("memory-0");
    let first = maintain::copy(&source, &destination, &CopyOptions::default()).await;
    let second = maintain::copy(&source, &destination, &CopyOptions::default()).await;
    if let Ok(snapshot) = destination.snapshot(Latest).await {
        assert_newest(&destination, snapshot.step()).await;
    }
    let honest = host.serve(None).await;
    maintain::copy(&honest.peer(None).store("memory-0"), &destination, &CopyOptions::default()).await.unwrap();
    assert_newest(&destination, 3).await;
    assert!(maintain::verify(&destination, &Default::default()).await.unwrap().is_clean());
    first.and(second).unwrap_err()
}

#[tokio::test]
async fn a_lie_about_any_object_is_an_error() {
    let host = Host::new();
    let other = Host::new();
    save_steps(&host, 0, 1..=3).await;
    save_steps(&other, 0, 1..=2).await;
    let other = other.folder.memory(0);
    let kinds = || {
        [
            ("flipped byte", Kind::FlippedByte),
            ("truncated", Kind::Truncated),
            ("short", Kind::Short),
            ("endless", Kind::Endless),
            ("huge", Kind::Huge),
            ("slow", Kind::Slow),
            ("endless headers", Kind::EndlessHeaders),
            ("redirect", Kind::Redirect),
            ("other store", Kind::OtherStore(other.clone())),
        ]
    };
    for object in ["/casks/", "/snapshots/", "/log/", "/directories/"] {
        for (name, kind) in kinds() {
            // A directory is named by its content: both stores have the same.
            let is_same = object == "/directories/" && name == "other store";
            if is_same || (object != "/casks/" && ["slow", "huge", "endless headers", "redirect", "short"].contains(&name)) {
                continue;
            }
            let error = copy_from(&host, Lie { object, kind }).await.to_string();
            let named = ["casks", "snapshots", "log", "directories"].iter().any(|folder| error.contains(folder));
            assert!(named, "{object} {name}: {error}");
        }
    }
    for (name, kind) in [("whole", Kind::Whole), ("overflow", Kind::Overflow)] {
        let error = copy_from(&host, Lie { object: "/casks/", kind }).await.to_string();
        assert!(error.contains("casks") && error.contains("127.0.0.1"), "{name}: {error}");
    }
}

/// A store of another run in place of the whole store: nothing of it is copied.
#[tokio::test]
async fn another_run_is_refused() {
    let host = Host::new();
    let other = Host::new();
    save_steps(&host, 0, 1..=3).await;
    save_steps(&other, 0, 1..=5).await;
    let scratch = tempfile::tempdir().unwrap();
    let destination = Store::open(scratch.path().join("copy").to_str().unwrap()).unwrap();
    let server = host.serve(None).await;
    let hostile = other.serve(None).await;
    maintain::copy(&server.peer(None).store("memory-0"), &destination, &CopyOptions::default()).await.unwrap();
    let error = maintain::copy(&hostile.peer(None).store("memory-0"), &destination, &CopyOptions::default()).await.unwrap_err();
    assert!(error.to_string().contains("another run"), "{error}");
    assert_newest(&destination, 3).await;
}

#[tokio::test]
async fn a_listing_that_names_something_else_is_refused() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let entry = |path: &str| {
        format!(
            "<?xml version=\"1.0\"?><multistatus xmlns=\"DAV:\"><response><href>{path}</href><propstat><prop><getlastmodified>Thu, 01 Jan 1970 \
             00:00:00 GMT</getlastmodified><getcontentlength>1</getcontentlength><resourcetype/></prop><status>HTTP/1.1 200 \
             OK</status></propstat></response></multistatus>"
        )
    };
    let key = key();
    for path in [
        format!("/etc/{}", "passwd".repeat(20)),
        format!("/{key}/rank-0/the-arena-of-a-rank"),
        format!("/{key}/memory-1/store.json"),
        format!("/{key}/memory-0/catalog/A"),
    ] {
        let lie = Lie { object: "catalog", kind: Kind::Listing(Arc::new(entry(&path).into_bytes())) };
        let hostile = Hostile::start(host.folder.root(), lie).await;
        let error = hostile.peer().store("memory-0").snapshots().await.expect_err(&path).to_string();
        assert!(error.contains("names something else") && error.contains(&hostile.address.to_string()), "{path}: {error}");
    }
}

/// Whatever a listing contains, reading it ends, with an error or with what the store has.
#[test]
fn any_listing_is_survived() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let host = Host::new();
    runtime.block_on(save_steps(&host, 0, 1..=1));
    let folder = Resource::parse(&format!("/{}/memory-0", key()), &key()).unwrap();
    let entries = list(host.folder.root(), &folder, Depth::All, 1000).unwrap();
    let valid = multistatus(&key(), folder, entries).into_bytes();
    let edits = proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(200) });
    let listings = prop_oneof![
        edits.prop_map(move |edits| {
            let mut bytes = valid.clone();
            for (at, length, byte) in edits {
                let at = at.index(bytes.len());
                let end = (at + length.index(40)).min(bytes.len());
                bytes.splice(at..end, [byte]);
            }
            bytes
        }),
        proptest::collection::vec(any::<u8>(), 0..400),
    ];
    runner
        .run(&listings, |bytes| {
            runtime.block_on(async {
                let lie = Lie { object: "/memory-0", kind: Kind::Listing(Arc::new(bytes)) };
                let hostile = Hostile::start(host.folder.root(), lie).await;
                if let Ok(snapshots) = hostile.peer().store("memory-0").snapshots().await {
                    prop_assert!(snapshots.len() <= 1);
                }
                Ok(())
            })
        })
        .unwrap();
}
