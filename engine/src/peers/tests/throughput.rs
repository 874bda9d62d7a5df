//! Throughput of a replica against a plain TLS copy of the same bytes. Run by hand:
//! `cargo test --release -p tensorcask-engine --lib throughput -- --ignored --nocapture`

use std::sync::Arc;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::session::*;
use super::support::*;
use crate::peers::certificates::tests::certificates;
use crate::peers::tls::Tls;

/// Bytes of a row: four ranks of 64 MiB that hardly compress.
const ROW_BYTES: usize = 64 << 20;
const ROUNDS: usize = 5;

/// Copies files over one TLS connection into a folder; returns the seconds.
async fn plain_copy(files: Vec<std::path::PathBuf>, to: &std::path::Path, server: Arc<Tls>, client: Arc<Tls>) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(server.server());
    let sent = files.clone();
    let sending = tokio::spawn(async move {
        let mut stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
        for file in sent {
            tokio::io::copy_buf(&mut tokio::io::BufReader::with_capacity(1 << 20, tokio::fs::File::open(file).await.unwrap()), &mut stream)
                .await
                .unwrap();
        }
        stream.shutdown().await.unwrap();
    });
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = TlsConnector::from(client.client()).connect(client.name(), stream).await.unwrap();
    let begun = Instant::now();
    let mut buffer = vec![0; 1 << 20];
    for (number, file) in files.iter().enumerate() {
        let mut left = std::fs::metadata(file).unwrap().len() as usize;
        let mut out = tokio::fs::File::create(to.join(number.to_string())).await.unwrap();
        while left > 0 {
            let room = left.min(buffer.len());
            let read = stream.read(&mut buffer[..room]).await.unwrap();
            assert!(read > 0);
            out.write_all(&buffer[..read]).await.unwrap();
            left -= read;
        }
        out.flush().await.unwrap();
    }
    let seconds = begun.elapsed().as_secs_f64();
    sending.await.unwrap();
    seconds
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement that asserts nothing; run by hand, see above"]
async fn throughput() {
    let mut job = Job::begin().await;
    job.commit_noise(1, ROW_BYTES).await;
    let made = certificates(&job.scratch.path().join("tls"), RUN);
    let ours = tls(&made.hosts[0]);
    let theirs = tls(&made.hosts[1]);
    let server = job.hosts[0].host.serve(Some(ours.clone())).await;
    let mirror = job.hosts[0].host.folder.mirror();
    let files: Vec<_> = files_below(&mirror).into_iter().filter(|file| file.starts_with("casks")).map(|file| mirror.join(file)).collect();
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let plain = plain_copy(files.clone(), scratch.path(), ours.clone(), theirs.clone()).await;
        let _ = std::fs::remove_dir_all(job.hosts[1].host.folder.replica(0));
        let mut replica = job.replica(&server.peer(Some(theirs.clone())), 1);
        let begun = Instant::now();
        let report = replica.pull().await.unwrap();
        let seconds = begun.elapsed().as_secs_f64();
        assert!(report.problem.is_none(), "{:?}", report.problem);
        let rate = |seconds: f64| report.bytes as f64 / seconds / 1e6;
        println!("{} MB: replica {:.0} MB/s, plain TLS copy {:.0} MB/s", report.bytes / 1_000_000, rate(seconds), rate(plain));
        ratios.push(plain / seconds);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.2}", ratios[ROUNDS / 2]);
}
