//! `tensorcask report`: its outcome. `tests/browser/` tests the page.
#![cfg(feature = "report")]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use crate::place::{Place, command, conforms, one_object, stdout, training_file};

#[test]
fn a_report_is_written_even_if_a_step_is_damaged() {
    let place = Place::with_training();
    let report = place.json("report @run -o @run.html");
    conforms("report", &report);
    assert_eq!((&report["steps"], &report["without_statistics"][0]), (&3.into(), &1000.into()));
    assert!(std::fs::read_to_string(place.path("run.html")).unwrap().contains("Content-Security-Policy"));
    assert!(stdout(&place.run("report @run -o @run.html")).contains("--statistics"));

    std::fs::remove_file(place.damage()).unwrap();
    let damaged = place.run("report @run -o @run.html --json");
    assert_eq!(damaged.status.code(), Some(3));
    let report = one_object(&damaged);
    conforms("report", &report);
    assert_eq!(report["damaged"][0]["step"], 1000);
    assert_eq!(place.error("report @nowhere -o @x.html").0, 10);
}

/// Sends a request to a server and returns head and body of the answer.
fn ask(address: &str, lines: &str) -> (String, String) {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "{}\r\n\r\n", lines.replace('\n', "\r\n").replace("SELF", address)).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.to_owned())
}

#[test]
fn a_served_report_follows_the_store() {
    let place = Place::with_training();
    let url = place.path("run").display().to_string();
    let mut server = command().args(["report", &url, "--serve=0", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let told: serde_json::Value = serde_json::from_str(&line).unwrap();
    conforms("report served", &told);
    let address = told["address"].as_str().unwrap().strip_prefix("http://").unwrap();

    let (head, body) = ask(address, "GET / HTTP/1.1\nHost: SELF");
    assert!(head.starts_with("http/1.1 200") && head.contains("refresh: 10") && body.contains("Content-Security-Policy"), "{head}");
    let tag_of = |head: &str| head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned();
    let tag = tag_of(&head);
    let again = ask(address, &format!("GET / HTTP/1.1\nHost: SELF\nIf-None-Match: {tag}"));
    assert!(again.0.starts_with("http/1.1 304") && again.1.is_empty(), "{}", again.0);

    conforms("save", &place.json(&format!("save @run --step 2000 {}", training_file(1010).display())));
    let (head, body) = ask(address, &format!("GET / HTTP/1.1\nHost: SELF\nIf-None-Match: {tag}"));
    assert!(head.starts_with("http/1.1 200") && tag_of(&head) != tag && body.contains("\"step\":2000"), "{head}");

    let refused =
        [("GET / HTTP/1.1\nHost: example.com", "403"), ("GET /x HTTP/1.1\nHost: SELF", "404"), ("POST / HTTP/1.1\nHost: SELF", "405")];
    for (request, status) in refused {
        assert!(ask(address, request).0.starts_with(&format!("http/1.1 {status}")), "{request}");
    }
    // A damaged log is shown as an error, and the server goes on.
    let entry = place.path("run/log/00000000000000000002.json");
    let whole = std::fs::read(&entry).unwrap();
    std::fs::write(&entry, b"damaged").unwrap();
    assert!(ask(address, "GET / HTTP/1.1\nHost: SELF").0.starts_with("http/1.1 500"));
    std::fs::write(&entry, whole).unwrap();
    assert!(ask(address, "HEAD / HTTP/1.1\nHost: SELF").0.starts_with("http/1.1 200"));
    server.kill().unwrap();
    server.wait().unwrap();
}
