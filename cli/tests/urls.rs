//! URLs of stores, run as a program: wrong forms, missing credentials, and servers that do not answer. All servers are
//! on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

/// A port of loopback on which nothing listens.
fn refused() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Answers each connection by a function of its number and the head of its request; `None` closes the connection.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(answer: impl Fn(usize, &str) -> Option<String> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let lines = BufReader::new(connection.try_clone().unwrap()).lines().map_while(Result::ok);
                let head = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
                let number = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(head.clone());
                    seen.len()
                };
                if let Some(answer) = answer(number, &head) {
                    // A client that has gone does not read the answer.
                    let _ = connection.write_all(answer.as_bytes());
                }
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn response(status: &str, body: &str) -> Option<String> {
    Some(format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len()))
}

/// Runs the program with these variables and no others, in an empty folder, which must stay empty.
fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
    command.args(arguments).env_clear().envs(variables.iter().copied()).env("HOME", folder.path()).current_dir(folder.path());
    let output = command.output().unwrap();
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "{arguments:?} created something");
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The message of a command that fails with code 1.
fn failure(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let output = run(arguments, variables);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", stderr(&output));
    stderr(&output)
}

const INPUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/step-1000.safetensors");

#[test]
fn a_scheme_without_its_slashes_is_no_local_folder() {
    for (given, right) in [
        ("s3:/bucket/run", "s3://bucket/run"),
        ("s3:bucket/run", "s3://bucket/run"),
        ("S3://bucket/run", "s3://bucket/run"),
        ("S3:/bucket/run", "s3://bucket/run"),
        ("s3a:/bucket/run", "s3a://bucket/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
        ("az:/container/run", "az://container/run"),
        ("azure:/container/run", "azure://container/run"),
        ("abfs:/container/run", "abfs://container/run"),
        ("abfss:/container@account/run", "abfss://container@account/run"),
        ("http:/host/run", "http://host/run"),
        ("Https:/host/run", "https://host/run"),
        ("file:/tmp/run", "file:///tmp/run"),
        ("FILE:///tmp/run", "file:///tmp/run"),
        ("memory:/run", "memory://run"),
    ] {
        let message = failure(&["save", given, "--step", "1", INPUT], &[]);
        assert!(message.contains(&format!("write `{right}`")), "{given}: {message}");
    }
    assert!(failure(&["ls", "s3:///bucket/run"], &[]).contains("write `s3://NAME/path`"));
    assert!(failure(&["ls", "ftp://host/run"], &[]).contains("abfss"), "says which schemes there are");
}

#[test]
fn a_path_with_a_colon_is_a_local_folder() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a:b", "s3.old:/run", "./s3:/bucket", "notes:s3:/x"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
        let output = command.args(["save", name, "--step", "1", INPUT]).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        assert!(Path::new(&folder.path().join(name)).join("log").is_dir(), "{name}");
    }
}

#[test]
fn without_credentials_the_error_says_what_to_set() {
    let refused = refused();
    let metadata = format!("http://{refused}");
    let token = format!("http://{refused}/token");
    let environment: [(&str, &str); 5] = [
        ("AWS_METADATA_ENDPOINT", &metadata),
        ("GCE_METADATA_HOST", &refused),
        ("GCE_METADATA_IP", &refused),
        ("IDENTITY_ENDPOINT", &token),
        ("TENSORCASK_CONTACT_TIMEOUT", "200ms"),
    ];
    for (url, names) in [
        ("s3://bucket/run", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "aws configure"]),
        ("s3a://bucket/run", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ROLE_ARN", "AWS_CONTAINER_CREDENTIALS_"]),
        (
            "gs://bucket/run",
            [
                "GOOGLE_APPLICATION_CREDENTIALS",
                "gcloud auth application-default login",
                "GOOGLE_SERVICE_ACCOUNT",
                "application_default_credentials.json",
            ],
        ),
        (
            "abfss://container@account.dfs.core.windows.net/run",
            ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_SECRET", "az login"],
        ),
    ] {
        for arguments in [vec!["ls", url], vec!["save", url, "--step", "1", INPUT]] {
            let message = failure(&arguments, &environment);
            names.iter().for_each(|name| assert!(message.contains(name), "{url}: {name} in {message}"));
            assert!(message.contains("metadata service of the instance did not answer within 100ms"), "{message}");
            assert!(!message.contains(&refused), "the address of the metadata service helps nobody: {message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
    assert!(failure(&["ls", "az://container/run"], &environment).contains("AZURE_STORAGE_ACCOUNT_NAME"));
}

#[test]
fn a_machine_without_a_role_has_no_credentials() {
    let imds = Server::start(|_, head| if head.starts_with("PUT") { response("200 OK", "token") } else { response("404 Not Found", "") });
    let endpoint = format!("http://{}", imds.address);
    let message = failure(&["ls", "s3://bucket/run"], &[("AWS_METADATA_ENDPOINT", &endpoint)]);
    assert!(message.contains("AWS_ACCESS_KEY_ID") && message.contains("answered 404"), "{message}");
    assert_eq!(imds.requests().len(), 2, "asked for a token and for a role, once");
}

#[test]
fn a_metadata_service_that_forbids_has_no_credentials() {
    let imds = Server::start(|_, _| response("403 Forbidden", ""));
    let endpoint = format!("http://{}", imds.address);
    let variables = [("AWS_METADATA_ENDPOINT", &*endpoint), ("AWS_IMDSV1_FALLBACK", "false")];
    for count in [1, 2] {
        let message = failure(&["ls", "s3://bucket/run"], &variables[..count]);
        assert!(message.contains("no credentials for S3: set AWS_ACCESS_KEY_ID") && message.contains("answered 403"), "{message}");
    }
    assert_eq!(imds.requests().len(), 2);
    let variables = [("AWS_METADATA_ENDPOINT", &*endpoint), ("AWS_IMDSV1_FALLBACK", "true")];
    failure(&["ls", "s3://bucket/run"], &variables);
    assert_eq!(imds.requests().iter().filter(|head| head.starts_with("GET")).count(), 1, "the older protocol is tried");
}

#[test]
fn an_endpoint_without_tls_has_to_be_allowed() {
    let mut variables = server_at("http://127.0.0.1:9");
    variables.retain(|(name, _)| *name != "AWS_ALLOW_HTTP");
    let message = failure(&["ls", "s3://bucket/run"], &variables);
    assert!(message.contains("set AWS_ALLOW_HTTP=true, or `aws_allow_http`"), "{message}");
    assert!(!message.contains("contact_timeout"), "waiting cannot help: {message}");
}

#[test]
fn credentials_of_the_instance_are_used() {
    let imds = Server::start(|_, head| match head {
        _ if head.starts_with("PUT") => response("200 OK", "token"),
        _ if head.contains("security-credentials/ ") => response("200 OK", "role"),
        _ => response(
            "200 OK",
            r#"{"AccessKeyId": "instance-key", "SecretAccessKey": "secret", "Token": "session", "Expiration": "2099-01-01T00:00:00Z"}"#,
        ),
    });
    let storage = Server::start(|_, head| match head.contains("list-type=2") {
        true => response("200 OK", "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"),
        false => response("404 Not Found", ""),
    });
    let metadata = format!("http://{}", imds.address);
    let endpoint = format!("http://{}", storage.address);
    let variables = [("AWS_METADATA_ENDPOINT", &*metadata), ("AWS_ENDPOINT", &*endpoint), ("AWS_ALLOW_HTTP", "true")];
    let output = run(&["ls", "s3://bucket/run"], &variables);
    assert_eq!(output.status.code(), Some(10), "no store there: {}", stderr(&output));
    assert_eq!(imds.requests().len(), 3);
    assert!(storage.requests().iter().all(|head| head.contains("Credential=instance-key")), "{:?}", storage.requests());
}

/// Variables of an S3 server on loopback.
fn server_at(endpoint: &str) -> Vec<(&str, &str)> {
    vec![("AWS_ENDPOINT", endpoint), ("AWS_ALLOW_HTTP", "true"), ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")]
}

#[test]
fn an_endpoint_that_never_answers_is_given_up() {
    let silent = Server::start(|_, _| None);
    let endpoint = format!("http://{}", silent.address);
    let mut variables = server_at(&endpoint);
    variables.push(("TENSORCASK_CONTACT_TIMEOUT", "0s"));
    let message = failure(&["ls", "s3://bucket/run"], &variables);
    assert!(message.contains(&format!("no answer from {} after 1 attempt", silent.address)), "{message}");
    assert!(message.contains("TENSORCASK_CONTACT_TIMEOUT"), "says how to wait longer: {message}");
    let first = silent.requests().len();

    *variables.last_mut().unwrap() = ("TENSORCASK_CONTACT_TIMEOUT", "400ms");
    let message = failure(&["ls", "s3://bucket/run"], &variables);
    assert!(message.contains("(now 400ms)"), "{message}");
    let attempts = silent.requests().len() - first;
    assert!(message.contains(&format!("after {attempts} attempt")), "{attempts} were seen: {message}");

    let refused = refused();
    let endpoint = format!("http://{refused}");
    let message = failure(&["save", "s3://bucket/run", "--step", "1", INPUT], &server_at(&endpoint));
    assert!(message.contains(&format!("no answer from {refused} after")), "{message}");
    assert!(message.contains("(now 5s)") && message.contains("refused"), "the default: {message}");

    let mut variables = server_at(&endpoint);
    variables.push(("TENSORCASK_CONTACT_TIMEOUT", "soon"));
    assert!(failure(&["ls", "s3://bucket/run"], &variables).contains("such as 30s"));
}

#[test]
fn a_server_that_answered_is_retried() {
    // Answers that it is busy, then closes a connection, then knows of no object. No contact timeout: patience is for
    // known servers.
    let busy = Server::start(|number, head| match number {
        1 | 2 => response("503 Slow Down", ""),
        3 => None,
        _ if head.contains("list-type=2") => {
            response("200 OK", "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>")
        }
        _ => response("404 Not Found", ""),
    });
    let endpoint = format!("http://{}", busy.address);
    let mut variables = server_at(&endpoint);
    variables.push(("TENSORCASK_CONTACT_TIMEOUT", "0s"));
    let output = run(&["ls", "s3://bucket/run"], &variables);
    assert_eq!(output.status.code(), Some(10), "{}", stderr(&output));
    assert!(busy.requests().len() >= 4, "{:?}", busy.requests());
}

/// Whether the error of a store at an endpoint says that the store does not answer.
fn is_unanswered(address: &str) -> bool {
    let settings = [
        ("aws_endpoint", format!("http://{address}")),
        ("aws_allow_http", "true".to_owned()),
        ("aws_region", "us-east-1".to_owned()),
        ("aws_access_key_id", "key".to_owned()),
        ("aws_secret_access_key", "secret".to_owned()),
        ("contact_timeout", "100ms".to_owned()),
        ("retry_timeout", "100ms".to_owned()),
    ];
    let config = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let options = tensorcask::StoreOptions { config, ..tensorcask::StoreOptions::default() };
    let store = tensorcask::blocking::Store::with(options.open("s3://bucket/run").unwrap()).unwrap();
    let error = store.snapshots().unwrap_err();
    assert_eq!(error.kind(), tensorcask::ErrorKind::Storage, "{error}");
    error.is_unanswered()
}

#[test]
fn a_refusal_is_an_answer_and_silence_is_none() {
    assert!(is_unanswered(&refused()));
    assert!(is_unanswered(&Server::start(|_, _| None).address), "closed connections");
    let cases = [
        ("500 Internal Server Error", "", true),
        ("503 Service Unavailable", "", true),
        ("429 Too Many Requests", "", true),
        ("400 Bad Request", "", false),
        ("401 Unauthorized", "", false),
        ("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>", false),
        ("404 Not Found", "<Error><Code>NoSuchBucket</Code></Error>", false),
    ];
    for (status, body, expected) in cases {
        let server = Server::start(move |_, _| response(status, body));
        assert_eq!(is_unanswered(&server.address), expected, "{status}");
    }
}

#[test]
fn a_setting_that_can_be_no_url_or_header_is_refused_by_name() {
    let key = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let s3 = "s3://bucket/run";
    let gs = "gs://bucket/run";
    let azure = "abfss://container@account.dfs.core.windows.net/run";
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "token\n").unwrap();
    for (url, name, value) in [
        (s3, "AWS_ENDPOINT_URL", "localhost:9000"),
        (s3, "AWS_ENDPOINT_URL_S3", ""),
        (s3, "AWS_ENDPOINT", "http://local host:9000"),
        (s3, "AWS_REGION", "us east 1"),
        (s3, "AWS_SESSION_TOKEN", "line\nbreak"),
        (s3, "AWS_ACCESS_KEY_ID", "k\u{e9}y"),
        (s3, "AWS_SECRET_ACCESS_KEY", "secret\n"),
        (gs, "GOOGLE_BASE_URL", "localhost:4443"),
        (gs, "GOOGLE_BEARER_TOKEN", "token\n"),
        (gs, "GCE_METADATA_HOST", "a host"),
        (azure, "AZURE_STORAGE_ENDPOINT", "localhost:10000"),
        (azure, "AZURE_STORAGE_TOKEN", "to\nken"),
        (azure, "AZURE_AUTHORITY_HOST", "login.example.com"),
        (azure, "IDENTITY_ENDPOINT", "/token"),
        (azure, "IDENTITY_HEADER", "a\nb"),
    ] {
        let mut variables = key.to_vec();
        variables.retain(|(known, _)| *known != name);
        variables.push((name, value));
        for arguments in [vec!["ls", url], vec!["save", url, "--step", "1", INPUT]] {
            let message = failure(&arguments, &variables);
            assert!(message.contains("invalid_argument") && message.contains(&format!("`{name}`")), "{message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
    let variables = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/credentials"),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.to_str().unwrap()),
    ];
    let message = failure(&["ls", s3], &variables);
    assert!(message.contains("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") && message.contains("line breaks"), "{message}");
}

#[test]
fn a_setting_in_the_config_is_refused_by_name() {
    for (name, value) in [("aws_endpoint", "localhost:9000"), ("endpoint_url", "\"http://host\""), ("token", "a\nb")] {
        let config = [(name.to_owned(), value.to_owned())].into();
        let options = tensorcask::StoreOptions { config, ..tensorcask::StoreOptions::default() };
        let error = options.open("s3://bucket/run").unwrap_err();
        assert_eq!(error.kind(), tensorcask::ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(&format!("`{name}`")), "{error}");
    }
}

#[test]
fn a_refusal_has_the_code_and_the_variables_and_no_xml() {
    let refusal = |code: &str, words: &str| {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{words}</Message><Resource>{}</Resource></Error>",
            "x".repeat(400)
        )
    };
    for (status, code, names) in [
        ("403 Forbidden", "InvalidAccessKeyId", &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"][..]),
        ("403 Forbidden", "SignatureDoesNotMatch", &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        ("403 Forbidden", "AccessDenied", &["AWS_ACCESS_KEY_ID", "s3:GetObject"]),
        ("400 Bad Request", "ExpiredToken", &["AWS_SESSION_TOKEN"]),
        ("400 Bad Request", "AuthorizationHeaderMalformed", &["AWS_REGION"]),
    ] {
        let body = refusal(code, "The server says no.");
        let server = Server::start(move |_, _| response(status, &body));
        let endpoint = format!("http://{}", server.address);
        let message = failure(&["ls", "s3://bucket/run"], &server_at(&endpoint));
        assert!(message.contains(&format!("{code}: The server says no")) && !message.contains('<'), "{message}");
        names.iter().for_each(|name| assert!(message.contains(name), "{code}: {message}"));
        assert!(!message.contains("xxx"), "{message}");
    }
}

#[test]
fn an_operation_that_a_server_does_not_have_is_not_repeated() {
    let body = "<Error><Code>NotImplemented</Code><Message>No such operation.</Message></Error>";
    let server = Server::start(move |_, _| response("501 Not Implemented", body));
    let endpoint = format!("http://{}", server.address);
    let message = failure(&["ls", "s3://bucket/run"], &server_at(&endpoint));
    assert!(message.contains("does not have this operation") && message.contains("NotImplemented: No such operation"), "{message}");
    assert!(server.requests().len() < 8, "{:?}", server.requests());
}

#[cfg(unix)]
#[test]
fn a_root_that_is_no_text_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
    std::fs::create_dir(&odd).unwrap();
    std::os::unix::fs::symlink(&odd, folder.path().join("link")).unwrap();
    for (place, name) in [(folder.path(), "link"), (odd.as_path(), "run")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tensorcask"));
        let output = command.args(["save", name, "--step", "1", INPUT]).current_dir(place).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains("UTF-8"), "{}", stderr(&output));
        assert_eq!(std::fs::read_dir(&odd).unwrap().count(), 0, "nothing is created");
    }
}
