//! `tensorcask`: the command line of the checkpoint store. One module per verb. Results go to stdout, everything else
//! to stderr.
//!
//! This is a library because two programs run it: the binary `tensorcask`, and the command of the same name in the
//! Python package.

mod analysis;
mod atomic;
mod cask;
mod chart;
mod commits;
mod compare;
mod decision;
mod hex;
mod output;
mod pair;
mod parse;
mod precision;
mod progress;
#[cfg(feature = "report")]
mod report;
mod rounding;
mod tensor_row;
mod text;
mod time;
mod verbs;
mod warnings;

use std::ffi::OsString;

use clap::{CommandFactory, Parser};

pub use commits::{Commit, commits};
use verbs::Verb;
pub use warnings::{install as show_warnings, line_of, show as show_warning};

/// Stores training checkpoints: small deltas, every byte checked, every commit atomic
#[derive(Debug, Parser)]
#[command(name = "tensorcask", version, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,

    /// Print one JSON object on stdout instead of text, also for errors
    #[arg(long, global = true)]
    json: bool,
}

const AFTER_HELP: &str = "\
STORE is a path or a URL:
  runs/a, file:///path                            folder
  s3://bucket/run, s3a://                         Amazon S3 and compatible servers
  gs://bucket/run                                 Google Cloud Storage
  az://container/run, azure://                    Azure; account in AZURE_STORAGE_ACCOUNT_NAME
  abfss://container@account.dfs.core.windows.net/run, abfs://   Azure
  http://host/run, https://                       web server, reading only

Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*) or from the instance. The first request to a server is
retried for TENSORCASK_CONTACT_TIMEOUT (5s), later requests for TENSORCASK_RETRY_TIMEOUT (3m) each.

Exit codes: 0 ok, 1 error, 2 usage, 3 corruption, 10 not found, 11 conflict.

Example:
  tensorcask save runs/a --step 1000 model.safetensors
  tensorcask restore runs/a -o model.safetensors";

/// Runs one command to its end and returns its exit code. The first argument is the program's name.
///
/// Prints to the stdout and stderr of the process. Warnings are shown by [`show_warnings`], or by a subscriber of the caller.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // Even if the other arguments cannot be read.
    let json = arguments.iter().any(|argument| argument == "--json");
    let parsed = Cli::try_parse_from(arguments).and_then(|cli| match cli.verb.check() {
        Ok(()) => Ok(cli),
        Err(message) => Err(Cli::command().error(clap::error::ErrorKind::ArgumentConflict, message)),
    });
    match parsed {
        Ok(Cli { verb, json }) => {
            let json = json || verb.wants_json();
            match verb.run(json, Cli::command) {
                Ok(outcome) => outcome.print(json),
                Err(e) => output::print_error(&e, json),
            }
        }
        Err(e) => {
            if json && e.use_stderr() {
                output::print_usage_error(&e.to_string());
            }
            // A closed pipe has no reader to tell.
            let _ = e.print();
            u8::try_from(e.exit_code()).unwrap_or(1)
        }
    }
}
