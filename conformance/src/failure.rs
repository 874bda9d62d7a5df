//! Failures of a command.

use std::io::Write;

/// The sentence that tells the person who ran the command why it failed.
pub(crate) type Failure = Box<dyn std::error::Error>;

/// Writes a line to stderr. A closed stderr is no failure.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
