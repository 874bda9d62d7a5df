//! The command line, inside of Python.

use std::ffi::OsString;

use pyo3::prelude::*;

use crate::logging;

/// Runs the command line on arguments, of which the first is the program's name; returns the exit code. Prints to the stdout and stderr of the
/// process, and from then on warnings go to stderr. Does not look for signals: the caller gives SIGINT its default action.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    logging::show_on_stderr();
    py.detach(|| tensorcask_cli::run(arguments))
}
