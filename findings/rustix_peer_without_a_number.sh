#!/usr/bin/env bash
# rustix 1.1.6: `socket_peercred` cannot say who is at the other end of a Unix socket if that process is in another PID namespace.
#
# The kernel then reports process 0, and the user and group as always. The type of `UCred::pid` cannot hold 0, and its value 0 is the
# mark of an `Err`: a call that succeeds comes back as the error number 0, "Success", and the user id is lost with it. One would
# expect a `pid` that may be absent; nix 0.31.3, asked for the same, reports 0 beside the user id. Whoever checks the user of a peer
# refuses everyone in another container, with a message that names no cause.
# Installs both crates at these versions from crates.io. Needs cargo and unprivileged user namespaces.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/src"
cat >"$scratch/Cargo.toml" <<'TOML'
[package]
name = "peer"
version = "0.0.0"
edition = "2021"

[dependencies]
rustix = { version = "=1.1.6", features = ["net", "process"] }
nix = { version = "=0.31.3", features = ["socket"] }

[workspace]
TOML
cat >"$scratch/src/main.rs" <<'RUST'
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::net::sockopt::socket_peercred;

/// Connects to a socket, and formats the answers of rustix and of nix to: who is the peer?
fn report(socket: &str) -> String {
    let stream = UnixStream::connect(socket).unwrap();
    let rustix = match socket_peercred(&stream) {
        Ok(peer) => format!("user {}", peer.uid.as_raw()),
        Err(error) => format!("error number {} ({error})", error.raw_os_error()),
    };
    let nix = getsockopt(&stream, PeerCredentials).unwrap();
    format!("rustix: {rustix}; nix: process {}, user {}", nix.pid(), nix.uid())
}

fn main() {
    if let Some(socket) = std::env::args().nth(1) {
        println!("{}", report(&socket));
        return;
    }
    let _listener = UnixListener::bind("socket").unwrap();
    let same = report("socket");
    let me = std::env::current_exe().unwrap();
    let other = Command::new("unshare").args(["--user", "--map-root-user", "--pid", "--fork"]).arg(me).arg("socket").output().unwrap();
    let other = String::from_utf8_lossy(&other.stdout).trim().to_owned();
    println!("same namespace:  {same}\nother namespace: {other}");
    assert!(same.starts_with("rustix: user ") && !same.contains("process 0"));
    assert_eq!(other, "rustix: error number 0 (Success (os error 0)); nix: process 0, user 0");
}
RUST
cd "$scratch"
CARGO_TARGET_DIR=$scratch/target cargo run --quiet
