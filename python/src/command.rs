//! Runs the command line inside of Python.

use std::ffi::OsString;

use pyo3::prelude::*;

use crate::logging;

/// Runs the command line. The first argument is the program's name. Returns the exit code. Prints to the stdout and
/// stderr of the process; later warnings go to stderr, too. Does not check for signals: the caller must give SIGINT its
/// default action.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    logging::show_on_stderr();
    py.detach(|| tensorcask_cli::run(arguments))
}
