//! The agent works for a run with the settings and credentials of its trainer, not with those of whoever started the agent.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use tensorcask::{Claim, WriterOptions};
use tensorcask_engine::agent_status;

use super::host::*;

/// A server that knows no object, and refuses to store any. It notes the access key of each request.
struct Server {
    endpoint: String,
    keys: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start() -> Self {
        Self::start_with("http", answer)
    }

    /// A server for TLS, and its certificate. No system trusts it.
    fn start_with_tls() -> (Self, String) {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap());
        let server = Self::start_with("https", move |stream, keys| {
            let session = rustls::ServerConnection::new(config.clone()).unwrap();
            answer(&mut rustls::StreamOwned::new(session, stream), keys);
        });
        (server, made.cert.pem())
    }

    fn start_with(scheme: &str, serve: impl Fn(&mut TcpStream, &Mutex<Vec<String>>) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("{scheme}://{}", listener.local_addr().unwrap());
        let keys = Arc::new(Mutex::new(Vec::new()));
        let noted = keys.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                serve(&mut stream.unwrap(), &noted);
            }
        });
        Self { endpoint, keys }
    }

    fn keys(&self) -> Vec<String> {
        self.keys.lock().unwrap().clone()
    }

    fn forget(&self) {
        self.keys.lock().unwrap().clear();
    }
}

fn answer(stream: &mut (impl Read + Write), keys: &Mutex<Vec<String>>) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    if let Some(key) = head.split("Credential=").nth(1).and_then(|rest| rest.split('/').next()) {
        keys.lock().unwrap().push(key.to_owned());
    }
    let is_listing = head.starts_with("GET") && head.contains("list-type=2");
    let (status, body) = match head.split(' ').next() {
        Some("GET") if is_listing => ("200 OK", "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
        Some("GET") => ("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>"),
        Some("HEAD") => ("404 Not Found", ""),
        _ => ("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"),
    };
    let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
}

/// Variables of a process that saves to a server.
fn variables<'a>(server: &'a Server, key: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("AWS_ENDPOINT", &server.endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "eu-central-1"),
        ("AWS_ACCESS_KEY_ID", key),
        ("AWS_SECRET_ACCESS_KEY", "secret-of-the-test"),
        ("TEST_STORE", "s3://bucket/run"),
    ]
}

#[test]
fn the_agent_uses_the_environment_of_each_trainer() {
    let host = Host::new();
    let other = Server::start();
    let own = Server::start();
    let mut agent = host.start_agent_with(&variables(&other, "OTHER"));
    let trainer = |key: &str| {
        let words = variables(&own, key).into_iter().chain([("TEST_STEPS", "1")]).collect::<Vec<_>>();
        let mut trainer = host.trainer(&words);
        while trainer.says().unwrap()[0] != "done" {}
        trainer
    };
    let mut first = trainer("FIRST");
    first.kill();
    own.forget();
    // The trainer is gone, so these requests are the agent's.
    until("the agent asks the trainer's server", || own.keys().iter().any(|key| key == "FIRST"));
    // The next start of the job has other credentials, and the agent lives on.
    let mut second = trainer("SECOND");
    second.kill();
    own.forget();
    until("the agent has the renewed credentials", || own.keys().iter().any(|key| key == "SECOND"));
    own.forget();
    until("the agent goes on", || !own.keys().is_empty());
    assert!(own.keys().iter().all(|key| key == "SECOND"), "{:?}", own.keys());
    assert!(other.keys().is_empty(), "{:?}", other.keys());
    // Secrets are in files of this user alone.
    let runs = std::fs::read_dir(host.engine_folder()).unwrap().map(|entry| entry.unwrap().path().join("run.json"));
    let description = runs.into_iter().find(|path| path.exists()).unwrap();
    assert!(std::fs::read_to_string(&description).unwrap().contains("secret-of-the-test"));
    let mode = std::os::unix::fs::PermissionsExt::mode(&description.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert!(!host.agent_log().contains("secret-of-the-test"));
    host.kill_agent();
    agent.wait().unwrap();
}

/// As in a pod whose containers share memory and no processes: neither process has a number where the other is.
#[test]
fn a_trainer_and_an_agent_in_two_containers_work_together() {
    let container = |program: &std::ffi::OsStr| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child"]).arg(program);
        command
    };
    let host = Host::new();
    let alone = host.agent_command(&[]);
    let mut agent = container(alone.get_program()).args(alone.get_args()).spawn().unwrap();
    until("the agent listens", || agent_status(Some(&host.engine_folder())).is_ok());
    let trainer = |steps: &str| {
        let command = container(std::env::current_exe().unwrap().as_os_str());
        host.trainer_by(command, &[("TEST_STEPS", steps), ("TEST_WAIT", "1")])
    };
    let mut first = trainer("2");
    assert_eq!(first.expect("restored"), ["0", "nothing", "0"]);
    while first.says().unwrap()[0] != "done" {}
    first.kill();
    until("the agent has lost the trainer", || host.status().runs[0].ranks[0].trainer.is_none());
    let mut second = trainer("3");
    let restored = second.expect("restored");
    assert!(restored[0] == "2" && restored[1].starts_with("memory"), "{restored:?}");
    while second.says().unwrap()[0] != "done" {}
    until("all steps are in the store", || host.stored_steps() == [1, 2, 3]);
    // A process that cannot be looked for may still run.
    second.kill();
    agent.kill().unwrap();
    agent.wait().unwrap();
    let by_hand = WriterOptions { claim: Claim::Once, ..WriterOptions::default() };
    let refused = host.store().writer_with(by_hand).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("a process in another container"), "{refused}");
}

/// A proxy gets each request for `http://` as it is, so the server above can stand in for one.
#[test]
fn the_agent_uses_the_proxy_of_each_run_and_none_of_its_own() {
    let host = Host::new();
    let [agents, first, second, store] = [(); 4].map(|()| Server::start());
    let mut agent = host.start_agent_with(&[("HTTP_PROXY", &agents.endpoint), ("all_proxy", &agents.endpoint)]);
    let run = |key: &'static str, proxy: &[(&str, &str)]| {
        let url = format!("s3://bucket/{key}");
        let words = variables(&store, key).into_iter().chain([("TEST_STEPS", "1"), ("TEST_STORE", &*url)]).chain(proxy.iter().copied());
        let mut trainer = host.trainer(&words.collect::<Vec<_>>());
        while trainer.says().unwrap()[0] != "done" {}
        trainer.kill();
    };
    run("FIRST", &[("http_proxy", &first.endpoint)]);
    run("SECOND", &[("ALL_PROXY", &second.endpoint), ("HTTPS_PROXY", &agents.endpoint)]);
    run("EXCEPTED", &[("HTTP_PROXY", &first.endpoint), ("NO_PROXY", "example.com, 127.0.0.1")]);
    run("DIRECT", &[]);
    let all = [(&first, &["FIRST"][..]), (&second, &["SECOND"]), (&store, &["EXCEPTED", "DIRECT"])];
    // The trainers are gone, so these requests are the agent's.
    all.iter().for_each(|(server, _)| server.forget());
    for (server, keys) in all {
        keys.iter().for_each(|key| until(key, || server.keys().iter().any(|found| found == key)));
        assert!(server.keys().iter().all(|found| keys.contains(&found.as_str())), "{keys:?}: {:?}", server.keys());
    }
    assert!(agents.keys().is_empty(), "{:?}", agents.keys());
    // The next start of a run has another proxy, and the agent lives on.
    run("FIRST", &[("HTTP_PROXY", &second.endpoint)]);
    first.forget();
    second.forget();
    until("the agent has the renewed proxy", || second.keys().iter().any(|key| key == "FIRST"));
    first.forget();
    second.forget();
    until("the agent goes on", || second.keys().iter().any(|key| key == "FIRST"));
    assert!(first.keys().is_empty(), "{:?}", first.keys());
    host.kill_agent();
    agent.wait().unwrap();
}

/// A server of a company, whose certificate the trainer's environment names. The agent was started by a process without it.
#[test]
fn the_agent_trusts_the_certificates_of_each_run() {
    let host = Host::new();
    let mut agent = host.start_agent_with(&[]);
    let (server, certificate) = Server::start_with_tls();
    let folder = host.stores.path().join("certificates");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("company.pem"), certificate).unwrap();
    let file = folder.join("company.pem");
    let trusted = [("SSL_CERT_FILE", file.to_str().unwrap()), ("SSL_CERT_DIR", folder.to_str().unwrap())];
    for (run, variable) in ["FILE", "FOLDER"].into_iter().zip(trusted) {
        let url = format!("s3://bucket/{run}");
        let words = variables(&server, run).into_iter().chain([("TEST_STEPS", "1"), ("TEST_STORE", &*url), variable]).collect::<Vec<_>>();
        let mut trainer = host.trainer(&words);
        while trainer.says().unwrap()[0] != "done" {}
        trainer.kill();
        server.forget();
        // The trainer is gone, so these requests are the agent's.
        until("the agent reaches the trainer's server", || server.keys().iter().any(|key| key == run));
    }
    host.kill_agent();
    agent.wait().unwrap();
}
