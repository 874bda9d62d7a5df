//! One module per verb: its arguments and its work.

mod advise;
#[cfg(all(feature = "engine", target_os = "linux"))]
mod agent;
mod analyze;
mod bisect;
mod chain;
mod compact;
mod consolidate;
mod copy;
mod diff;
mod doctor;
mod forget;
mod fork;
mod gc;
mod gradient;
mod inspect;
mod log;
mod ls;
#[cfg(feature = "manual")]
mod manual;
mod package;
mod pin;
#[cfg(feature = "report")]
mod report;
mod restore;
mod save;
mod stat;
mod stats;
mod verify;

use clap::{Command, Subcommand};
use tensorcask::Result;

use crate::output::Outcome;

/// Verb of the command line.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Save safetensors files, or a sharded model with its index, as a snapshot
    Save(save::Args),
    /// Restore a snapshot, or some of its tensors and slices, into a safetensors file
    Restore(restore::Args),
    /// Read the gradient of a step, where the chunks of the step store it
    Gradient(gradient::Args),
    /// Check the log, every stored byte and every decoded chunk
    Verify(verify::Args),
    /// List the snapshots that can be restored
    Ls(ls::Args),
    /// List the snapshots from which a step is rebuilt, newest first
    Chain(chain::Args),
    /// List every commit of the store
    Log(log::Args),
    /// Describe a snapshot or a cask file without reading tensors
    Inspect(inspect::Args),
    /// Compare two steps tensor by tensor
    Diff(diff::Args),
    /// Measure how two states differ: flipped bits, entropy, float distances and rows, as a table, JSON or a picture
    Analyze(analyze::Args),
    /// Show totals of the store by codec and by role, without reading tensors
    Stat(stat::Args),
    /// Show statistics of tensors, such as NaN, extremes and norms, without reading tensors
    Stats(stats::Args),
    /// Find the first step whose statistics satisfy a condition, such as `nan > 0`, without reading tensors
    Bisect(bisect::Args),
    /// Write the history of a store as an HTML page that opens in any browser
    #[cfg(feature = "report")]
    Report(report::Args),
    /// Advise how often to save and how many steps to keep, from the times of the saves
    Advise(advise::Args),
    /// Pin a step so that it cannot be forgotten, or unpin it
    Pin(pin::Args),
    /// Forget steps, or some of their roles; gc deletes them later
    Forget(forget::Args),
    /// Rewrite the chain of a step as one base with the same content
    Compact(compact::Args),
    /// Collect unneeded snapshots, and delete objects that have been unneeded long enough
    Gc(gc::Args),
    /// Copy snapshots into another store
    Copy(copy::Args),
    /// Begin a new run with one step of another, without a copy where the storage can share it
    Fork(fork::Args),
    /// Write one step into a new store, with the shards of all ranks merged
    Consolidate(consolidate::Args),
    /// Save a checkpoint of another format: torch.save, DCP, sharded safetensors, slime (Python package only)
    Import(package::Args),
    /// Write a snapshot in another format: torch.save, DCP, sharded safetensors (Python package only)
    Export(package::Args),
    /// Query snapshots, tensors, chunks, statistics and the log with SQL (Python package only)
    Sql(package::Args),
    /// Find broken links, unsafe storage and leftovers
    Doctor(doctor::Args),
    /// Run the agent of the asynchronous engine, or show its status
    #[cfg(all(feature = "engine", target_os = "linux"))]
    Agent(agent::Args),
    /// Print a script that completes commands in a shell
    #[cfg(feature = "manual")]
    Completions(manual::CompletionsArgs),
    /// Write man pages for this command and its verbs
    #[cfg(feature = "manual")]
    Man(manual::ManArgs),
}

impl Verb {
    /// Checks combinations of arguments that clap cannot check.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Self::Save(args) => args.check(),
            Self::Analyze(args) => args.check(),
            _ => Ok(()),
        }
    }

    /// Whether `--json` stands where only the verb can tell.
    pub(crate) fn wants_json(&self) -> bool {
        matches!(self, Self::Import(args) | Self::Export(args) | Self::Sql(args) if args.wants_json())
    }

    /// Runs the verb. `command` describes the whole command line.
    #[cfg_attr(
        not(all(feature = "engine", feature = "manual", target_os = "linux")),
        allow(unused_variables, reason = "only the verb agent prints while it runs, and only manuals need the command")
    )]
    pub(crate) fn run(self, json: bool, command: fn() -> Command) -> Result<Outcome> {
        match self {
            Self::Save(args) => save::run(args),
            Self::Restore(args) => restore::run(&args),
            Self::Gradient(args) => gradient::run(&args),
            Self::Verify(args) => verify::run(&args),
            Self::Ls(args) => ls::run(&args),
            Self::Chain(args) => chain::run(&args),
            Self::Log(args) => log::run(&args),
            Self::Inspect(args) => inspect::run(&args),
            Self::Diff(args) => diff::run(&args),
            Self::Analyze(args) => analyze::run(&args),
            Self::Stat(args) => stat::run(&args),
            Self::Stats(args) => stats::run(&args),
            Self::Bisect(args) => bisect::run(&args),
            #[cfg(feature = "report")]
            Self::Report(args) => report::run(&args, json),
            Self::Advise(args) => advise::run(&args),
            Self::Pin(args) => pin::run(&args),
            Self::Forget(args) => forget::run(&args),
            Self::Compact(args) => compact::run(&args),
            Self::Gc(args) => gc::run(&args),
            Self::Copy(args) => copy::run(&args),
            Self::Fork(args) => fork::run(&args),
            Self::Consolidate(args) => consolidate::run(&args),
            Self::Import(_) => package::refuse("import", "torch", "For safetensors files, use `tensorcask save`"),
            Self::Export(_) => package::refuse("export", "torch", "For safetensors files, use `tensorcask restore`"),
            Self::Sql(_) => package::refuse("sql", "sql", "`tensorcask stats --parquet FILE` writes a table for other tools"),
            Self::Doctor(args) => doctor::run(&args),
            #[cfg(all(feature = "engine", target_os = "linux"))]
            Self::Agent(args) => agent::run(&args, json),
            #[cfg(feature = "manual")]
            Self::Completions(args) => manual::completions(&args, command()),
            #[cfg(feature = "manual")]
            Self::Man(args) => manual::man(&args, command()),
        }
    }
}
