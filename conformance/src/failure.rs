//! Failures of a command.

use std::io::Write;

/// A sentence that tells the user why a command failed.
pub(crate) type Failure = Box<dyn std::error::Error>;

/// Writes a line to stderr. Ignores a closed stderr.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
