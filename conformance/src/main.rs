//! Conformance cases for tensorcask files and stores: a runner for any reader, a generator, and our own reader.

// Each module imports only from modules declared above it.
mod failure;
mod files;
mod verdict;

mod generate;

mod case;
mod read;
mod run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use failure::complain;

/// Folder of the cases in a checkout.
const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cases");

/// List of released cases in a checkout.
const RELEASED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/released.txt");

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// The folder of the cases
    #[arg(long, global = true, default_value = CASES)]
    cases: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Give every case to a reader, and compare what it says; TAP on stdout
    Run {
        /// The command line of the reader; `{path}` stands for the file or folder. Split at spaces, except in quotes
        #[arg(long)]
        reader: String,
        /// Only cases whose name contains this
        #[arg(long, default_value = "")]
        only: String,
        /// Seconds that a reader has for one case
        #[arg(long, default_value_t = 60)]
        timeout: u64,
        /// Also write the results to this file, in the XML of JUnit
        #[arg(long)]
        junit: Option<PathBuf>,
    },
    /// Write all cases anew
    Generate {
        /// Write nothing; fail if a file differs, is missing, or is not a case's, or if a case is not as it was released
        #[arg(long)]
        check: bool,
        /// Then list the cases that are new as released with this version of the spec
        #[arg(long, conflicts_with = "check")]
        release: Option<String>,
    },
    /// Write the input of a case that is not kept with it, because it is too large
    Make {
        /// The case, as `run` names it
        case: String,
        /// The folder of the store, which must not exist
        folder: PathBuf,
    },
    /// The reader of this project, for `run`: a cask file, or the folder of a store
    Read {
        /// The file or folder
        path: PathBuf,
    },
}

fn main() -> ExitCode {
    let Arguments { cases, command } = Arguments::parse();
    let done = match command {
        Command::Run { reader, only, timeout, junit } => run::run(&cases, &reader, &only, Duration::from_secs(timeout), junit.as_deref()),
        Command::Generate { check: true, .. } => generate::check(&cases, Path::new(RELEASED)),
        Command::Generate { release, .. } => generate::write(&cases)
            .and_then(|()| release.map_or(Ok(()), |version| generate::release(Path::new(RELEASED), &version)))
            .map(|()| true),
        Command::Make { case, folder } => generate::make(&case, &folder).map(|()| true),
        Command::Read { path } => read::read(&path),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            complain(&failure.to_string());
            ExitCode::from(2)
        }
    }
}
