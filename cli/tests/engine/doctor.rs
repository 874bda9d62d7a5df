//! `tensorcask agent doctor`, as a program, on this machine.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tensorcask_engine::{InitTls, init_tls};

use super::host::*;

/// A doctor on one host of a run of two.
struct Doctor {
    host: Host,
    words: Vec<String>,
}

impl Doctor {
    fn alone() -> Self {
        Self { host: Host::new(), words: Vec::new() }
    }

    fn of_two(number: usize, ports: &[u16], tls: Option<&Path>, wait: &str) -> Self {
        let peers: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let mut words = ["--run", "s3://bucket/run42", "--peers", &peers.join(","), "--host", &number.to_string(), "--wait", wait]
            .map(str::to_owned)
            .to_vec();
        words.extend(tls.into_iter().flat_map(|folder| ["--tls".to_owned(), folder.to_str().unwrap().to_owned()]));
        words.extend(["--listen".to_owned(), peers[number].clone()]);
        Self { host: Host::new(), words }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
        command.args(["agent", "doctor", "--json", "--folder"]).arg(self.host.engine_folder()).args(&self.words);
        command
    }

    fn start(&self) -> Child {
        self.command().stdout(Stdio::piped()).spawn().unwrap()
    }

    fn run(&self) -> (i32, Vec<Value>) {
        finish(self.start())
    }
}

/// Exit code and checks.
fn finish(child: Child) -> (i32, Vec<Value>) {
    let output = child.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap().clone();
    let failed = checks.iter().any(|check| check["state"] == "failed");
    assert_eq!((report["ok"].as_bool().unwrap(), output.status.code().unwrap()), (!failed, i32::from(failed)));
    assert!(checks.iter().all(|check| (check["state"] == "ok") == check["advice"].is_null()), "{checks:#?}");
    (output.status.code().unwrap(), checks)
}

fn check<'c>(checks: &'c [Value], subject: &str) -> (&'c str, &'c str) {
    let found = checks.iter().find(|check| check["subject"] == subject).unwrap_or_else(|| panic!("{subject}: {checks:#?}"));
    (found["state"].as_str().unwrap(), found["found"].as_str().unwrap())
}

/// Ports that are free now.
fn ports() -> Vec<u16> {
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

#[test]
fn a_host_alone() {
    let doctor = Doctor::alone();
    let (code, checks) = doctor.run();
    assert_eq!(code, 0);
    for subject in ["folder", "shared memory", "cgroup", "ulimit -n", "ulimit -l"] {
        check(&checks, subject);
    }
    let wants = |bytes: &str| Doctor { host: Host::new(), words: vec!["--state-bytes".into(), bytes.into()] };
    let (code, checks) = wants("1000000000000000").run();
    assert_eq!((code, check(&checks, "shared memory").0), (1, "failed"));
    // A limit of this process, as a job script would set it.
    let mut limited = Command::new("bash");
    let program = env!("CARGO_BIN_EXE_tensorcask");
    limited.args(["-c", "ulimit -n 256; exec \"$0\" agent doctor --json --folder \"$1\"", program]).arg(doctor.host.engine_folder());
    let (code, checks) = finish(limited.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!((code, check(&checks, "ulimit -n")), (0, ("warning", "256 open files (hard limit 256)")));
    // Text, for people.
    let text = Command::new(program).args(["agent", "doctor", "--folder"]).arg(doctor.host.engine_folder()).output().unwrap();
    assert!(String::from_utf8(text.stdout).unwrap().contains("shared memory: "));
    // Others may enter the folder.
    std::fs::set_permissions(doctor.host.engine_folder(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (code, checks) = doctor.run();
    assert_eq!((code, check(&checks, "folder").0), (1, "failed"));
}

#[test]
fn two_hosts_look_at_each_other() {
    let scratch = tempfile::tempdir().unwrap();
    let ports = ports();
    let make = |name: &str, run: &str| {
        let folder = scratch.path().join(name);
        let options = InitTls { run: run.to_owned(), hosts: 2, valid: Duration::from_secs(30 * 24 * 3600) };
        init_tls(&folder, &options).unwrap();
        folder
    };
    let tls = make("tls", "s3://bucket/run42");
    let doctors = [0, 1].map(|number| Doctor::of_two(number, &ports, Some(&tls), "20s"));
    for (number, (code, checks)) in doctors.each_ref().map(Doctor::start).map(finish).into_iter().enumerate() {
        assert_eq!(code, 0, "{checks:#?}");
        assert_eq!(check(&checks, "certificates").0, "ok");
        let (state, found) = check(&checks, &format!("peer {}", 1 - number));
        assert!(state == "ok" && found.contains("with the same time"), "{found}");
    }

    // Nobody answers.
    let (code, checks) = Doctor::of_two(0, &ports, Some(&tls), "0s").run();
    let (state, found) = check(&checks, "peer 1");
    assert!(code == 1 && state == "failed" && found.contains(&ports[1].to_string()), "{found}");

    // Certificates of another run, of another host, without a key of their own, and none.
    let certificates = |folder: &Path| {
        let (code, checks) = Doctor::of_two(0, &ports, Some(folder), "0s").run();
        let failed = checks.iter().find(|check| check["subject"] == "certificates" && check["state"] == "failed");
        assert_eq!(code, 1);
        failed.unwrap_or_else(|| panic!("{checks:#?}"))["found"].as_str().unwrap().to_owned()
    };
    assert!(certificates(&make("other", "s3://bucket/other")).contains("another run"));
    assert!(certificates(&scratch.path().join("nothing")).contains("nothing"));
    let swapped = make("swapped", "s3://bucket/run42");
    std::fs::copy(swapped.join("host-1-key.pem"), swapped.join("host-0-key.pem")).unwrap();
    let found = certificates(&swapped);
    assert!(found.contains("cannot be used"), "{found}");
    std::fs::copy(swapped.join("host-1.pem"), swapped.join("host-0.pem")).unwrap();
    let found = certificates(&swapped);
    assert!(found.contains("does not name host 0"), "{found}");

    // Certificates that are about to expire.
    let folder = scratch.path().join("short");
    init_tls(&folder, &InitTls { run: "s3://bucket/run42".into(), hosts: 2, valid: Duration::from_secs(3 * 24 * 3600) }).unwrap();
    let (_, checks) = Doctor::of_two(0, &ports, Some(&folder), "0s").run();
    let (state, found) = check(&checks, "certificates");
    assert!(state == "warning" && found.contains("within 7 days"), "{found}");
}

#[test]
fn a_port_that_something_else_has() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().port();
    let answering = std::thread::spawn(move || {
        for stream in listener.incoming().take(1).flatten() {
            use std::io::{Read, Write};
            let mut stream = stream;
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    let (code, checks) = Doctor::of_two(0, &[taken, ports()[0]], None, "0s").run();
    let (state, found) = check(&checks, "port");
    assert!(code == 1 && state == "failed" && found.contains("no agent"), "{found}");
    answering.join().unwrap();
}
