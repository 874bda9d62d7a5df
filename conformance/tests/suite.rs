//! The cases in the repository are what the generator writes, and our own reader passes all of them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tensorcask-conformance");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_cases_are_what_the_generator_writes() {
    let output = run(&["generate", "--check"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn our_own_reader_passes() {
    let output = run(&["run", "--reader", &format!("'{PROGRAM}' read {{path}}")]);
    let stdout = text(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", text(&output.stderr));
    assert!(stdout.trim_end().ends_with(" passed, 0 failed"), "{stdout}");
}

#[test]
fn failures_are_in_the_junit_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("junit.xml");
    // `echo` answers no case.
    let output = run(&["run", "--reader", "echo {path}", "--only", "valid/container", "--junit", file.to_str().unwrap()]);
    let stdout = text(&output.stdout);
    let xml = std::fs::read_to_string(&file).unwrap();
    let failed = stdout.matches("not ok ").count();
    assert!(failed > 0 && !output.status.success(), "{stdout}");
    assert!(xml.contains(&format!("failures=\"{failed}\"")) && xml.matches("<failure ").count() == failed, "{xml}");
}

/// Each invalid case is rejected for its own fault, not for another that slipped in.
#[test]
fn rejections_name_the_clause_of_the_case() {
    let cases = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/cases/invalid"));
    let mut count = 0;
    let mut wrong = Vec::new();
    for area in std::fs::read_dir(cases).unwrap() {
        for case in std::fs::read_dir(area.unwrap().path()).unwrap() {
            let case = case.unwrap().path();
            let description: toml::Table = std::fs::read_to_string(case.join("case.toml")).unwrap().parse().unwrap();
            let clause = description["clause"].as_str().unwrap();
            let mut input = ["input.cask", "input"].map(|name| case.join(name)).into_iter().find(|path| path.exists());
            let folder = tempfile::tempdir().unwrap();
            if description.contains_key("made") {
                let name = case.strip_prefix(cases.parent().unwrap()).unwrap();
                input = Some(folder.path().join("input"));
                assert!(run(&["make", name.to_str().unwrap(), input.as_ref().unwrap().to_str().unwrap()]).status.success());
            }
            let input = input.unwrap();
            let output = run(&["read", input.to_str().unwrap()]);
            let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let named = said["clause"].as_str().unwrap_or("none");
            // A clause includes its sub-clauses; an id that is none is found by the parser of JSON.
            let exact = clause == named || clause.strip_prefix(named).is_some_and(|rest| rest.starts_with('.'));
            if !exact && (clause, named) != ("README 1.9", "log 1.3") {
                wrong.push(format!("{}: {clause}, but: {said}", case.display()));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 250, "{count}");
}

/// A runner that passes everything would be worse than none.
#[test]
fn wrong_readers_fail() {
    for reader in ["true {path}", "false {path}", "echo '{}' {path}", "/nonexistent {path}"] {
        let output = run(&["run", "--reader", reader, "--only", "container/"]);
        assert!(!output.status.success(), "{reader}: {}", text(&output.stdout));
    }
    let output = run(&["run", "--timeout", "1", "--only", "container/empty", "--reader", "tail -f {path}"]);
    assert!(text(&output.stdout).contains("no answer after 1 s"), "{}", text(&output.stdout));
}
