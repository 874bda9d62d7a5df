//! Requests and connections that a server or a client refuses.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::sync::Arc;

use std::path::Path;

use tensorcask::{Bandwidth, Error, ErrorKind};
use tokio::io::AsyncReadExt;

use super::support::*;
use crate::peers::certificates::CertificateFiles;
use crate::peers::certificates::tests::{certificates, expired};
use crate::peers::http_client::ResponseLimits;
use crate::peers::peer_objects::Peer;
use crate::peers::serve::PeerServer;
use crate::peers::tls::{Tls, certificate_name};
use crate::run::peers_option::PeerTls;
use crate::run::spec::run_key;

/// Sends raw bytes and returns the answer.
fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

async fn ask(address: SocketAddr, method: &str, path: &str, headers: &str) -> String {
    ask_as("1 0.0.0", address, method, path, headers).await
}

/// Asks as an agent of another version.
async fn ask_as(version: &str, address: SocketAddr, method: &str, path: &str, headers: &str) -> String {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTensorcask-Peers: {version}\r\n{headers}\r\n");
    tokio::task::spawn_blocking(move || raw(address, request.as_bytes())).await.unwrap()
}

#[tokio::test]
async fn only_objects_of_this_run_are_served() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let root = host.folder.root();
    let memory = host.folder.memory(0);
    std::fs::write(root.join("run.json"), "secret").unwrap();
    symlink(root.join("run.json"), memory.join("log/link.json")).unwrap();
    symlink("/etc", memory.join("etc")).unwrap();
    symlink(&memory, root.join("memory-9")).unwrap();
    let server = host.serve(None).await;
    let address = server.address;
    let key = key();
    let get = |path: &str| {
        let path = path.replace("KEY", &key);
        async move { ask(address, "GET", &path, "").await }
    };
    assert!(get("/KEY/memory-0/store.json").await.starts_with("HTTP/1.1 200"));
    for path in [
        "/KEY/run.json",
        "/KEY/memory-0/../run.json",
        "/KEY/memory-0/%2e%2e/run.json",
        "/KEY/memory-0/log/link.json",
        "/KEY/memory-0/etc/passwd",
        "/KEY/memory-9/store.json",
        "/other/memory-0/store.json",
        "/",
        "/KEY",
        "/KEY/memory-0",
        "/KEY/memory-0/log",
        "/KEY/memory-0//store.json",
        "//etc/passwd",
        "/etc/passwd",
        "http://evil/etc/passwd",
    ] {
        let answer = get(path).await;
        assert!(answer.starts_with("HTTP/1.1 404") && !answer.contains("secret"), "{path}: {answer}");
    }
    for method in ["PUT", "DELETE", "POST", "COPY", "MKCOL", "OPTIONS"] {
        let answer = ask(address, method, &format!("/{key}/memory-0/store.json"), "").await;
        assert!(answer.starts_with("HTTP/1.1 405"), "{method}: {answer}");
    }
    let list = |path: String, depth: &'static str| async move { ask(address, "PROPFIND", &path, depth).await };
    let listed = list(format!("/{key}"), "Depth: 1\r\n").await;
    assert!(listed.contains("memory-0") && !listed.contains("memory-9") && !listed.contains("run.json"), "{listed}");
    let listed = list(format!("/{key}/memory-0"), "Depth: infinity\r\n").await;
    assert!(listed.contains("store.json") && !listed.contains("link.json") && !listed.contains("/etc"), "{listed}");
    assert!(list(format!("/{key}"), "Depth: infinity\r\n").await.starts_with("HTTP/1.1 403"));
    assert!(list(format!("/{key}/memory-0"), "").await.starts_with("HTTP/1.1 403"));
    assert!(memory.join("store.json").exists());
}

#[tokio::test]
async fn ranges_and_large_requests() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let server = host.serve(None).await;
    let address = server.address;
    let path = format!("/{}/memory-0/store.json", key());
    let bytes = std::fs::read(host.folder.memory(0).join("store.json")).unwrap();
    let part = ask(address, "GET", &path, "Range: bytes=2-5\r\n").await;
    assert!(
        part.starts_with("HTTP/1.1 206") && part.ends_with(&format!("\r\n\r\n{}", std::str::from_utf8(&bytes[2..6]).unwrap())),
        "{part}"
    );
    let last = ask(address, "GET", &path, &format!("Range: bytes=2-{}\r\n", bytes.len() + 100)).await;
    assert!(last.contains(&format!("content-range: bytes 2-{}/{}", bytes.len() - 1, bytes.len())), "{last}");
    for wrong in ["bytes=9999999-99999999", "bytes=0-1,3-4", "bytes=-3", "bytes=5-2", "lines=0-1"] {
        assert!(ask(address, "GET", &path, &format!("Range: {wrong}\r\n")).await.starts_with("HTTP/1.1 416"), "{wrong}");
    }
    let many: String = (0..100).map(|n| format!("X-{n}: 1\r\n")).collect();
    assert!(ask(address, "GET", &path, &many).await.starts_with("HTTP/1.1 431"));
    let large = format!("X: {}\r\n", "a".repeat(100_000));
    let answer = ask(address, "GET", &path, &large).await;
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(ask(address, "GET", &format!("/{}", "a".repeat(100_000)), "").await.lines().next().is_none_or(|line| line.contains(" 4")));
    // The server still answers.
    assert!(ask(address, "GET", &path, "").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn without_certificates_only_this_machine_is_served() {
    let host = Host::new();
    let bound = PeerServer::bind("0.0.0.0:0".parse().unwrap(), host.folder.root().to_owned(), &key(), None, Bandwidth::default(), 1).await;
    assert!(bound.unwrap_err().to_string().contains("this machine only"));
}

/// Reads from a server that has one set of certificates with another; returns the error.
async fn refused(host: &Host, server: Arc<Tls>, client: Option<Arc<Tls>>) -> Error {
    let server = host.serve(Some(server)).await;
    let peer = match client {
        Some(client) => server.peer(Some(client)),
        None => Peer::open(&server.address.to_string(), &key(), None, ResponseLimits::default()).unwrap(),
    };
    peer.store("memory-0").history().run().await.unwrap_err()
}

#[tokio::test]
async fn certificates_that_are_missing_foreign_or_expired_are_refused() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let folder = |name: &str| host.scratch.path().join(name);
    let ours = certificates(&folder("ours"), RUN);
    let good = || tls(&ours.hosts[0]);

    // A client without TLS.
    assert_eq!(refused(&host, good(), None).await.kind(), ErrorKind::Storage);
    // A client with TLS and no certificate.
    let server = host.serve(Some(good())).await;
    let error = connect_without_certificate(server.address, &ours.hosts[0].ca).await;
    assert!(error.contains("CertificateRequired"), "{error}");

    // Another authority for a run of the same name.
    let foreign = certificates(&folder("foreign"), RUN);
    let error = refused(&host, good(), Some(tls(&foreign.hosts[1]))).await.to_string();
    assert!(error.contains("signed by another authority"), "{error}");
    let error = refused(&host, tls(&foreign.hosts[1]), Some(good())).await.to_string();
    assert!(error.contains("certificate of the peer is refused: it is signed by another authority"), "{error}");
    assert!(error.contains("127.0.0.1") && error.contains("store.json"), "peer and object are named: {error}");

    // Another run under the same authority.
    let other = other_run(&folder("ours"), &ours);
    // The client takes the certificate for one of our run.
    let error = refused(&host, good(), Some(Arc::new(Tls::open_unchecked(&other, &key())))).await.to_string();
    assert!(error.contains("refuses the certificate of this host: it is of another run"), "{error}");
    let other = Arc::new(Tls::open(&other, &run_key("other")).unwrap());
    let error = refused(&host, other.clone(), Some(good())).await.to_string();
    assert!(error.contains("certificate of the peer is refused: it is of another run"), "{error}");
    let error = refused(&host, good(), Some(other)).await.to_string();
    assert!(error.contains("certificate of the peer is refused: it is of another run"), "{error}");
    let error = Tls::open(&ours.hosts[0], &run_key("other")).unwrap_err().to_string();
    assert!(error.contains("host-0.pem") && error.contains("it is of another run"), "{error}");
}

/// Certificates of another run, signed by the same authority.
fn other_run(folder: &Path, ours: &CertificateFiles) -> PeerTls {
    let other = folder.parent().unwrap().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(&ours.ca_key, other.join("ca-key.pem")).unwrap();
    certificates(&other, "other").hosts.remove(0)
}

/// Connects as a client that trusts the authority, but shows no certificate; returns the error.
async fn connect_without_certificate(address: SocketAddr, ca: &Path) -> String {
    use rustls::pki_types::pem::PemObject;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(rustls::pki_types::CertificateDer::from_pem_file(ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
    let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    let name = certificate_name(&key()).try_into().unwrap();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    match tokio_rustls::TlsConnector::from(config).connect(name, stream).await {
        // In TLS 1.3 the client hears of it when it reads.
        Ok(mut stream) => stream.read_u8().await.unwrap_err().to_string(),
        Err(error) => error.to_string(),
    }
}

#[tokio::test]
async fn certificates_expire_and_are_renewed_while_both_sides_run() {
    let host = Host::new();
    save_steps(&host, 0, 1..=2).await;
    let folder = host.tls_folder();
    let made = certificates(&folder, RUN);
    let ours = tls(&made.hosts[0]);
    let theirs = tls(&made.hosts[1]);
    let server = host.serve(Some(ours.clone())).await;
    assert_newest(&server.peer(Some(theirs.clone())).store("memory-0"), 2).await;
    let first = ours.server();

    // New files of the same authority, one host after the other.
    certificates(&folder, RUN);
    assert!(!Arc::ptr_eq(&first, &ours.server()), "the files are read again");
    assert_newest(&server.peer(Some(theirs.clone())).store("memory-0"), 2).await;

    // Files that cannot be used are reported, and the previous ones stay.
    let second = ours.server();
    std::fs::write(&made.hosts[0].certificate, "half a certif").unwrap();
    assert!(Arc::ptr_eq(&second, &ours.server()));
    assert_newest(&server.peer(Some(theirs.clone())).store("memory-0"), 2).await;

    // A new agent with expired files says so.
    expired(&folder, RUN);
    let error = Tls::open(&made.hosts[1], &key()).unwrap_err().to_string();
    assert!(error.contains("it has expired") && error.contains("init-tls"), "{error}");
    certificates(&folder, RUN);
    assert_newest(&server.peer(Some(tls(&made.hosts[1]))).store("memory-0"), 2).await;
}

/// Expired certificates on the other side: that side has not noticed, because its own clock is behind.
#[tokio::test]
async fn an_expired_certificate_is_refused_by_both_sides() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let made = certificates(&host.tls_folder(), RUN);
    let good = tls(&made.hosts[0]);
    expired(&host.tls_folder(), RUN);
    let late = Arc::new(Tls::open_unchecked(&made.hosts[1], &key()));
    let error = refused(&host, good.clone(), Some(late.clone())).await.to_string();
    assert!(error.contains("the peer refuses the certificate of this host: it has expired"), "{error}");
    let error = refused(&host, late, Some(good)).await.to_string();
    assert!(error.contains("the certificate of the peer is refused: it has expired"), "{error}");
}

/// Strangers open many connections, send half a handshake or nothing, and keep them open.
#[tokio::test]
async fn strangers_cannot_keep_peers_out() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let made = certificates(&host.tls_folder(), RUN);
    let server = host.serve(Some(tls(&made.hosts[0]))).await;
    let mut strangers = Vec::new();
    for number in 0..300 {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        if number % 2 == 0 {
            // A record of a handshake that announces more bytes than come.
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, &[22, 3, 1, 1, 0, 1]).await;
        }
        strangers.push(stream);
    }
    // Several peers at once, and each needs a connection of its own.
    let peers = (0..8).map(|_| server.peer(Some(tls(&made.hosts[1]))));
    let read = futures::future::join_all(peers.map(|peer| async move { assert_newest(&peer.store("memory-0"), 1).await }));
    read.await;
    // The server closes the oldest ones; nobody else did.
    assert_eq!(strangers[0].read(&mut [0; 8]).await.unwrap_or(0), 0);
    drop(strangers);
}

/// Agents of two versions name both, and exchange nothing.
#[tokio::test]
async fn another_version_is_refused_by_both_sides() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let server = host.serve(None).await;
    let path = format!("/{}/memory-0/store.json", key());
    let answer = ask_as("2 9.9.9", server.address, "GET", &path, "").await;
    let ours = format!("tensorcask-peers: 1 {}", env!("CARGO_PKG_VERSION"));
    assert!(answer.starts_with("HTTP/1.1 426") && answer.contains(&ours), "{answer}");

    // A server of the other version, and one that is no agent.
    for (header, reason) in [("Tensorcask-Peers: 2 9.9.9\r\n", "version 2 of the protocol of agents (tensorcask 9.9.9)"), ("", "no agent")]
    {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answering = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let answer = format!("HTTP/1.1 200 OK\r\n{header}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}");
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer.as_bytes()).await;
            }
        });
        let error = peer(address, None).store("memory-0").history().run().await.unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains(&address.to_string()), "{error}");
        answering.abort();
    }
}
