//! Output to stdout and stderr: one report per run, as text or JSON, without raw control characters.

use std::fmt::Write as _;
use std::io::Write as _;

use serde::Serialize;
use tensorcask::{Error, ErrorKind, Result};

use crate::text::{Text, printable};

/// Report of a verb, and its exit code.
#[derive(Debug)]
pub(crate) struct Outcome {
    json: String,
    text: Text,
    code: u8,
}

impl Outcome {
    pub(crate) fn new(report: &impl Serialize, text: Text) -> Result<Self> {
        let json = serde_json::to_string(report).map_err(|e| Error::invalid(format!("cannot write the report as JSON: {e}")))?;
        Ok(Self { json, text, code: 0 })
    }

    pub(crate) fn with_code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// Prints the report and returns the exit code.
    pub(crate) fn print(&self, json: bool) -> u8 {
        let printed = if json { print_line(&self.json) } else { print_raw(self.text.as_str()) };
        match printed {
            // A closed pipe is not an error: `tensorcask log | head` closes it.
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => complain(&format!("error: stdout: {e}")).max(self.code),
            _ => self.code,
        }
    }
}

/// Prints an error and returns the exit code.
pub(crate) fn print_error(error: &Error, json: bool) -> u8 {
    if json {
        let report = ErrorReport { error: ErrorJson::of(error) };
        let _ = print_line(&serde_json::to_string(&report).unwrap_or_default());
    }
    complain(&format!("error: {error}"));
    code_of(error.kind())
}

/// Prints the JSON of a usage error. clap prints the text.
pub(crate) fn print_usage_error(text: &str) {
    let message = text.trim().trim_start_matches("error: ").to_owned();
    let error = ErrorJson { kind: "usage", message, object: None, tensor: None, clause: None };
    let _ = print_line(&serde_json::to_string(&ErrorReport { error }).unwrap_or_default());
}

/// Prints a line on stderr. Returns 1, the exit code of an error.
pub(crate) fn complain(line: &str) -> u8 {
    let _ = writeln!(std::io::stderr(), "{}", printable(line));
    1
}

/// Exit code of an error.
pub(crate) fn code_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Corrupt => 3,
        ErrorKind::NotFound => 10,
        ErrorKind::Conflict | ErrorKind::Fenced => 11,
        _ => 1,
    }
}

/// Returns the exit code of a report that leaves out damaged steps, after one more of them. The code of corruption takes
/// precedence.
pub(crate) fn code_with(code: u8, left_out: &Error) -> u8 {
    if code == code_of(ErrorKind::Corrupt) { code } else { code_of(left_out.kind()) }
}

/// A step that a report leaves out because it is damaged.
#[derive(Debug, Serialize)]
pub(crate) struct UnreadableStep {
    step: u64,
    #[serde(flatten)]
    error: ErrorJson,
}

impl UnreadableStep {
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    pub(crate) fn of(step: u64, error: &Error) -> Self {
        Self { step, error: ErrorJson::of(error) }
    }
}

#[derive(Debug, Serialize)]
struct ErrorReport {
    error: ErrorJson,
}

/// Error as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorJson {
    kind: &'static str,
    message: String,
    object: Option<String>,
    tensor: Option<String>,
    clause: Option<&'static str>,
}

impl ErrorJson {
    pub(crate) fn of(error: &Error) -> Self {
        Self {
            kind: error.kind().name(),
            message: error.message().to_owned(),
            object: error.object_name().map(str::to_owned),
            tensor: error.tensor_name().map(str::to_owned),
            clause: error.clause_name(),
        }
    }
}

/// Escapes the characters in JSON that a terminal may interpret. They occur only in strings.
fn printable_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if (c.is_ascii() && c != '\u{7f}') || c.escape_debug().len() == 1 {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

fn print_line(json: &str) -> std::io::Result<()> {
    print_raw(&format!("{}\n", printable_json(json)))
}

fn print_raw(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_safe_to_show() {
        let json = serde_json::to_string("é\u{9b}\u{7f}\u{202e}\u{e0001}\u{1b}").unwrap_or_default();
        assert_eq!(printable_json(&json), "\"é\\u009b\\u007f\\u202e\\udb40\\udc01\\u001b\"");
    }

    #[test]
    fn exit_codes() {
        use ErrorKind::*;
        let codes = [Corrupt, NotFound, Conflict, Fenced, InvalidArgument, Storage, OutcomeUnknown].map(code_of);
        assert_eq!(codes, [3, 10, 11, 11, 1, 1, 1]);
    }
}
