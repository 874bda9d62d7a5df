//! Runs a reader on each case and compares its report with the expected result.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};
use serde_json::Value;

use crate::case::{Case, Description, load_all, parse};
use crate::failure::Failure;
use crate::verdict::Expect;

/// Outcome of running a reader.
struct Answer {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// Runs all cases. Returns whether all passed.
pub(crate) fn run(cases: &Path, reader: &str, only: &str, timeout: Duration, junit: Option<&Path>) -> Result<bool, Failure> {
    let words = split(reader)?;
    if !words.iter().any(|word| word.contains("{path}")) {
        return Err("the command line of the reader lacks {path}".into());
    }
    let made = tempfile::tempdir()?;
    let cases: Vec<Case> = load_all(cases, only, made.path())?;
    if cases.is_empty() {
        return Err("there are no such cases".into());
    }
    // Runs one reader per core, and reports the results in the order of the cases.
    let next = AtomicUsize::new(0);
    let (sender, answers) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let sender = sender.clone();
            let next = &next;
            let words = &words;
            let cases = &cases;
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(at) else { break };
                    let begun = Instant::now();
                    let answer = ask(words, case, timeout).map_err(|e| e.to_string());
                    // Cannot fail: the receiver lives longer than the threads.
                    let _ = sender.send((at, answer, begun.elapsed()));
                }
            });
        }
    });
    drop(sender);
    let mut answers: Vec<_> = answers.into_iter().collect();
    answers.sort_by_key(|(at, ..)| *at);
    let mut out = std::io::stdout().lock();
    writeln!(out, "1..{}", cases.len())?;
    let mut failed = 0;
    let mut suite = TestSuite::new("tensorcask conformance");
    for ((number, case), (_, answer, took)) in (1..).zip(&cases).zip(answers) {
        let answer = answer?;
        let verdict = match &answer {
            Some(answer) => judge(case, answer),
            None => Err(format!("no answer after {} s", timeout.as_secs())),
        };
        suite.add_test_case(junit_case(case, took, verdict.as_ref().err()));
        match verdict {
            Ok(()) => writeln!(out, "ok {number} - {}", case.name)?,
            Err(message) => {
                failed += 1;
                writeln!(out, "not ok {number} - {}", case.name)?;
                writeln!(out, "# {message}")?;
                writeln!(out, "# {}: {} ({:.1} s)", case.description.clause, case.description.why, took.as_secs_f64())?;
                let stderr = answer.map(|answer| answer.stderr).unwrap_or_default();
                for line in String::from_utf8_lossy(&stderr).lines().take(20) {
                    writeln!(out, "# stderr: {}", line.escape_debug())?;
                }
            }
        }
    }
    if let Some(junit) = junit {
        let mut report = Report::new("tensorcask conformance");
        report.add_test_suite(suite);
        std::fs::write(junit, report.to_string().map_err(|e| e.to_string())?)?;
    }
    writeln!(out, "{} passed, {failed} failed", cases.len() - failed)?;
    Ok(failed == 0)
}

fn junit_case(case: &Case, took: Duration, failure: Option<&String>) -> TestCase {
    let (class, name) = case.name.rsplit_once('/').unwrap_or(("", &case.name));
    let status = failure.map_or_else(TestCaseStatus::success, |message| {
        let Description { clause, why, .. } = &case.description;
        let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
        status.set_message(message).set_description(format!("{clause}: {why}"));
        status
    });
    let mut found = TestCase::new(name, status);
    found.set_classname(class).set_time(took);
    found
}

/// Runs the reader on one case. Returns `None` on a timeout.
fn ask(words: &[String], case: &Case, timeout: Duration) -> Result<Option<Answer>, Failure> {
    let path = case.input.to_str().ok_or("a path that is not UTF-8")?;
    let mut words = words.iter().map(|word| word.replace("{path}", path));
    let program = words.next().ok_or("an empty command line")?;
    let mut command = Command::new(&program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("{program}: {e}"))?;
    // Reads both pipes while the reader runs. Otherwise the reader could block forever.
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > timeout {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let collect = |thread: std::thread::JoinHandle<Vec<u8>>| thread.join().map_err(|_| "the output could not be read");
    Ok(Some(Answer { status, stdout: collect(stdout)?, stderr: collect(stderr)? }))
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // Ignores the error: the bytes read before it are judged.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Checks an answer. Returns the reason if it is wrong.
fn judge(case: &Case, answer: &Answer) -> Result<(), String> {
    let said: Option<Value> = parse(&answer.stdout).ok();
    let (accepted, said) = match (answer.status.code(), said) {
        (Some(0), Some(said)) => (true, said),
        (Some(1), Some(said)) => (false, said),
        (Some(code @ (0 | 1)), None) => return Err(format!("exit status {code}, but its output is not one JSON value: taken for a crash")),
        _ => return Err(format!("crashed: {}", answer.status)),
    };
    match (case.description.expect, accepted) {
        (Expect::Accept | Expect::Either, true) => match &case.expected {
            Some(expected) => first_difference("", expected, &said).map_or(Ok(()), Err),
            None => Err("the case lacks expected.json".into()),
        },
        (Expect::Reject | Expect::Either, false) => {
            let wanted = case.description.kind.as_deref().unwrap_or_default();
            match said.get("kind").and_then(Value::as_str) {
                Some(kind) if kind == wanted => Ok(()),
                Some(kind) => Err(format!("rejected as `{}`, not as `{wanted}`: {said}", kind.escape_debug())),
                None => Err("rejected without a `kind`".into()),
            }
        }
        (Expect::Accept, false) => Err(format!("rejected: {said}")),
        (Expect::Reject, true) => Err("accepted".into()),
    }
}

/// Returns the first place where two values differ.
fn first_difference(at: &str, expected: &Value, found: &Value) -> Option<String> {
    match (expected, found) {
        (Value::Object(wanted), Value::Object(there)) => {
            let missing = wanted.keys().find(|key| !there.contains_key(*key)).map(|key| format!("{at}/{key} is missing"));
            let surplus = || there.keys().find(|key| !wanted.contains_key(*key)).map(|key| format!("{at}/{key} should not be there"));
            let differs = || wanted.iter().find_map(|(key, value)| first_difference(&format!("{at}/{key}"), value, there.get(key)?));
            missing.or_else(surplus).or_else(differs)
        }
        (Value::Array(wanted), Value::Array(there)) if wanted.len() == there.len() => {
            wanted.iter().zip(there).enumerate().find_map(|(i, (wanted, there))| first_difference(&format!("{at}/{i}"), wanted, there))
        }
        _ if expected == found => None,
        _ => Some(format!("{at}: expected {expected}, found {found}")),
    }
}

/// Splits a command line into words at spaces, except between quotes.
fn split(line: &str) -> Result<Vec<String>, Failure> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".into());
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use serde_json::json;

    #[test]
    fn command_lines_are_split_at_spaces_outside_quotes() {
        assert_eq!(split("a 'b c'  \"d\"e ''").unwrap(), ["a", "b c", "de", ""]);
        assert!(split("a 'b").is_err());
    }

    #[test]
    fn differences_are_found_where_they_are() {
        let expected = json!({ "a": [1, { "b": 2 }] });
        assert_eq!(first_difference("", &expected, &expected), None);
        assert_eq!(first_difference("", &expected, &json!({ "a": [1, { "b": 3 }] })).unwrap(), "/a/1/b: expected 2, found 3");
        assert_eq!(first_difference("", &expected, &json!({})).unwrap(), "/a is missing");
        assert_eq!(first_difference("", &expected, &json!({ "a": [1, { "b": 2, "c": 0 }] })).unwrap(), "/a/1/c should not be there");
    }
}
