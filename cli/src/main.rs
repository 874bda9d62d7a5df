//! `tensorcask`: the command line of the checkpoint store. One module per verb; results on stdout, all else on stderr.

mod analysis;
mod atomic;
mod cask;
mod chart;
mod compare;
mod decision;
mod hex;
mod output;
mod pair;
mod parse;
mod progress;
mod rounding;
mod text;
mod time;
mod verbs;
mod warnings;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use verbs::Verb;

/// Windows of chunks are allocated and dropped all the time. The system's allocator gives such blocks back to the kernel
/// each time, and taking fresh pages costs more than reading and decoding: a restore took three times as long.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Small, fast, verifiable checkpoints of models in training.
#[derive(Debug, Parser)]
#[command(name = "tensorcask", version, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,

    /// One JSON object on stdout instead of text, for errors too
    #[arg(long, global = true)]
    json: bool,
}

const AFTER_HELP: &str = "\
STORE is a path or a URL: file://, s3://bucket/run, gs://, az://, http(s):// (reading only).
Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*).

Exit codes: 0 ok, 1 error, 2 usage, 3 corruption, 10 not found, 11 conflict.

Example:
  tensorcask save runs/a --step 1000 model.safetensors
  tensorcask restore runs/a -o model.safetensors";

fn main() -> ExitCode {
    warnings::install();
    let arguments: Vec<_> = std::env::args_os().collect();
    let json = output::wants_json();
    let parsed = Cli::try_parse_from(arguments).and_then(|cli| match cli.verb.check() {
        Ok(()) => Ok(cli),
        Err(message) => Err(Cli::command().error(clap::error::ErrorKind::ArgumentConflict, message)),
    });
    let code = match parsed {
        Ok(cli) => match cli.verb.run() {
            Ok(outcome) => outcome.print(cli.json),
            Err(e) => output::print_error(&e, cli.json),
        },
        Err(e) => {
            if json && e.use_stderr() {
                output::print_usage_error(&e.to_string());
            }
            // A closed pipe has no reader to tell.
            let _ = e.print();
            u8::try_from(e.exit_code()).unwrap_or(1)
        }
    };
    ExitCode::from(code)
}
