//! `tensorcask import`, `tensorcask export` and `tensorcask sql`: the verbs that need PyTorch or DuckDB.
//!
//! The command of the Python package runs them by itself. They stand here for the help, and to tell users of the binary.

use std::ffi::OsString;

use tensorcask::{Error, Result};

use crate::output::Outcome;

#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Arguments that the Python package reads
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

impl Args {
    /// Whether `--json` stands among the arguments that are not parsed here.
    pub(crate) fn wants_json(&self) -> bool {
        self.arguments.iter().any(|argument| argument == "--json")
    }
}

/// The error of a verb that this program lacks. `extra` is the extra of the Python package that brings it; `instead` says
/// what this program can do.
pub(crate) fn refuse(verb: &str, extra: &str, instead: &str) -> Result<Outcome> {
    Err(Error::unsupported(format!(
        "`tensorcask {verb}` needs the Python package: run `pip install './python[{extra}]'` in a clone of the repository. {instead}"
    )))
}
