//! Restores and copies through a peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensorcask::maintain::{self, CopyOptions, VerifyOptions};
use tensorcask::{ErrorKind, Slice, StoreOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::support::*;
use crate::peers::certificates::tests::certificates;

#[tokio::test]
async fn a_store_read_from_a_peer_equals_the_original() {
    for with_tls in [false, true] {
        let host = Host::new();
        save_steps(&host, 0, 1..=4).await;
        let made = certificates(&host.tls_folder(), RUN);
        let of = |host: usize| with_tls.then(|| tls(&made.hosts[host]));
        let server = host.serve(of(0)).await;
        let peer = server.peer(of(1));
        peer.answers().await.unwrap();
        let store = peer.store("memory-0");
        assert_newest(&store, 4).await;
        for step in 1..=4 {
            let read = store.snapshot(step).await.unwrap().read("model.w", &Slice::all()).await.unwrap();
            assert!(read.data == state(step));
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
        let scratch = tempfile::tempdir().unwrap();
        let options = StoreOptions { inline_bytes: 0, ..StoreOptions::default() };
        let copied = options.open(scratch.path().join("copy").to_str().unwrap()).unwrap();
        assert_eq!(maintain::copy(&store, &copied, &CopyOptions::default()).await.unwrap().snapshots, 4);
        let ours = files_below(&scratch.path().join("copy"));
        let theirs = files_below(&host.folder.memory(0));
        let casks = |files: Vec<String>| files.into_iter().filter(|file| file.starts_with("casks")).collect::<Vec<_>>();
        for cask in casks(ours.clone()) {
            let read = |root: &std::path::Path| std::fs::read(root.join(&cask)).unwrap();
            assert!(read(&scratch.path().join("copy")) == read(&host.folder.memory(0)), "{cask}");
        }
        assert_eq!(casks(ours), casks(theirs));
    }
}

#[tokio::test]
async fn nothing_is_written_to_a_peer() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let before = files_below(host.folder.root());
    let server = host.serve(None).await;
    let store = server.peer(None).store("memory-0");
    let error = store.writer(tensorcask::Policy::Full).await.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("write to a peer"), "{error}");
    assert!(store.forget(&[1]).await.is_err());
    assert_eq!(files_below(host.folder.root()), before);
}

#[tokio::test]
async fn a_missing_store_is_not_found() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let server = host.serve(None).await;
    let peer = server.peer(None);
    assert_eq!(peer.store("memory-7").history().run().await.unwrap_err().kind(), ErrorKind::NotFound);
    peer.answers().await.unwrap();
    let address = server.address;
    server.stop().await;
    let error = super::support::peer(address, None).answers().await.unwrap_err().to_string();
    assert!(error.contains(&address.to_string()), "{error}");
}

/// A run on 64 hosts: each of the 63 others keeps three connections that are idle, and all ask at once.
#[tokio::test]
async fn sixty_four_hosts_are_served_while_they_keep_idle_connections() {
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let server = host.serve_hosts("127.0.0.1:0".parse().unwrap(), None, 64).await;
    let request = format!("HEAD /{}/memory-0/store.json HTTP/1.1\r\nHost: x\r\nTensorcask-Peers: 1 0.0.0\r\n\r\n", key());
    let mut connections = Vec::new();
    for _ in 0..63 * 3 {
        connections.push(tokio::net::TcpStream::connect(server.address).await.unwrap());
    }
    // Every connection is answered, and stays open; then all are used again.
    for _ in 0..2 {
        let asked = connections.iter_mut().map(|connection| async {
            connection.write_all(request.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                answer.push(connection.read_u8().await.unwrap());
            }
            assert!(answer.starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&answer));
        });
        futures::future::join_all(asked).await;
    }
}

/// Passes connections on to a server, and counts them.
async fn counted(server: std::net::SocketAddr) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            counter.fetch_add(1, Ordering::Relaxed);
            let mut server = tokio::net::TcpStream::connect(server).await.unwrap();
            // The client ends the connection as it likes.
            tokio::spawn(async move { _ = tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    (address, count)
}

/// Agents look at each other several times per second.
#[tokio::test]
async fn looks_at_a_peer_use_the_same_connections_again() {
    const LOOKS: usize = 50;
    let host = Host::new();
    save_steps(&host, 0, 1..=1).await;
    let server = host.serve(None).await;
    let (address, count) = counted(server.address).await;
    let peer = peer(address, None);
    for _ in 0..LOOKS {
        let answers = futures::future::join_all([peer.answers(), peer.answers(), peer.answers()]).await;
        answers.into_iter().for_each(Result::unwrap);
    }
    let count = count.load(Ordering::Relaxed);
    assert!(count < LOOKS / 2, "{count} connections for {LOOKS} looks");
}

/// Whether this machine has IPv6.
async fn has_ipv6() -> bool {
    tokio::net::TcpListener::bind("[::1]:0").await.is_ok()
}

/// A host whose peers have addresses of both kinds listens on `0.0.0.0`.
#[tokio::test]
async fn a_listener_on_all_addresses_serves_peers_with_ipv4_and_ipv6() {
    let host = Host::new();
    save_steps(&host, 0, 1..=2).await;
    let made = certificates(&host.tls_folder(), RUN);
    let server = host.serve_at("0.0.0.0:0".parse().unwrap(), Some(tls(&made.hosts[0]))).await;
    let port = server.address.port();
    let addresses = [Some(format!("127.0.0.1:{port}")), has_ipv6().await.then(|| format!("[::1]:{port}"))];
    for address in addresses.into_iter().flatten() {
        let peer = peer(address.parse().unwrap(), Some(tls(&made.hosts[1])));
        peer.answers().await.unwrap();
        assert_newest(&peer.store("memory-0"), 2).await;
    }
}

#[tokio::test]
async fn a_listener_on_one_ipv6_address_serves_its_peers() {
    if !has_ipv6().await {
        return println!("this machine has no IPv6");
    }
    let host = Host::new();
    save_steps(&host, 0, 1..=2).await;
    let server = host.serve_at("[::1]:0".parse().unwrap(), None).await;
    assert_newest(&server.peer(None).store("memory-0"), 2).await;
}
