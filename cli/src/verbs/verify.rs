//! `tensorcask verify`: checks a store.

use std::time::Instant;

use serde::Serialize;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::{Problem, VerifyDepth, VerifyOptions, VerifyReport};
use tensorcask::{ErrorKind, Result, RoundingReport};

use crate::output::{ErrorJson, Outcome, code_of};
use crate::parse;
use crate::progress::Progress;
use crate::rounding::RoundingJson;
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(after_help = "Depths:
  log    check log entries, catalogs, manifests and directories, and that every cask exists with its size
  pages  also check every byte of every cask
  full   also decode every chunk of every snapshot and compare its checksum

Exits with 3 if stored data is damaged, and with 1 if there are only other problems: an unknown codec, or an
exceeded --max-error. To share the work among n machines, run --shard 0/n to --shard n-1/n.

Example:
  tensorcask verify s3://bucket/run42 --depth pages --shard 0/8")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Check only this step and the snapshots that it needs
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Depth of the check
    #[arg(long, default_value = "full", value_parser = ["log", "pages", "full"])]
    depth: String,
    /// Check part i of n of the casks and snapshots, with i from 0; every part checks the log
    #[arg(long, value_name = "I/N", value_parser = parse::part)]
    shard: Option<(u64, u64)>,
    /// Report a problem if a tensor was rounded by a larger relative error
    #[arg(long, value_name = "X")]
    max_error: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    clean: bool,
    depth: &'static str,
    step: Option<u64>,
    shard: Option<String>,
    entries: u64,
    snapshots: u64,
    casks: u64,
    cask_bytes: u64,
    chunks: u64,
    /// Rounding report over all checked snapshots.
    rounding: Option<RoundingJson>,
    problems: Vec<ProblemRow>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct ProblemRow {
    step: Option<u64>,
    /// All checked steps that need the damaged object.
    steps: Vec<u64>,
    #[serde(flatten)]
    error: ErrorJson,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let begun = Instant::now();
    let store = Store::open(&args.store)?;
    let options = VerifyOptions { depth: VerifyDepth::from_name(&args.depth)?, step: args.step, shard: args.shard };
    let progress = Progress::start(&store, "verifying");
    let mut found = maintain::verify(&store, &options)?;
    drop(progress);
    let rounding = receipts(&store, args, &mut found)?;

    let mut text = Text::default();
    let mut problems = Vec::new();
    let mut code = 0;
    for problem in &found.problems {
        text.line(format!("{}{}", of_steps(&problem.steps), problem.error));
        // The exit code of corruption takes precedence: a script must not miss it.
        code = match problem.error.kind() {
            ErrorKind::Corrupt => code_of(ErrorKind::Corrupt),
            _ => code.max(1),
        };
        problems.push(ProblemRow { step: problem.step, steps: problem.steps.clone(), error: ErrorJson::of(&problem.error) });
    }
    let verdict = match found.problems.len() {
        0 => "ok".to_owned(),
        count => counted(count as u64, "problem", "problems"),
    };
    text.line(format!(
        "{verdict}: {}, {}, {} ({}), {} {}",
        counted(found.entries, "log entry", "log entries"),
        counted(found.snapshots, "snapshot", "snapshots"),
        counted(found.casks, "cask", "casks"),
        human_bytes(found.cask_bytes),
        counted(found.chunks, "chunk", "chunks"),
        // A chunk that was read is not always one that could be decoded.
        if found.is_clean() { "decoded" } else { "read" }
    ));
    if let Some(rounding) = &rounding {
        text.line(format!("rounded tensors: {}", RoundingJson::of(rounding).line()));
    }
    let report = Report {
        clean: found.is_clean(),
        depth: options.depth.name(),
        step: options.step,
        shard: options.shard.map(|(part, of)| format!("{part}/{of}")),
        entries: found.entries,
        snapshots: found.snapshots,
        casks: found.casks,
        cask_bytes: found.cask_bytes,
        chunks: found.chunks,
        rounding: rounding.as_ref().map(RoundingJson::of),
        problems,
        seconds: begun.elapsed().as_secs_f64(),
    };
    Ok(Outcome::new(&report, text)?.with_code(code))
}

/// Names the steps of a problem in a line of text.
fn of_steps(steps: &[u64]) -> String {
    match steps {
        [] => String::new(),
        [step] => format!("step {step}: "),
        _ => {
            let shown: Vec<String> = steps.iter().take(MAX_SHOWN).map(u64::to_string).collect();
            let more =
                steps.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0).map_or(String::new(), |more| format!(" and {more} more"));
            format!("steps {}{more}: ", shown.join(", "))
        }
    }
}

/// Number of steps that a line of text names.
const MAX_SHOWN: usize = 20;

/// Sums up the rounding reports of the snapshots. A report above the bound, or an unreadable one, is a problem.
fn receipts(store: &Store, args: &Args, found: &mut VerifyReport) -> Result<Option<RoundingReport>> {
    let Ok(snapshots) = store.snapshots() else { return Ok(None) };
    let mut total: Option<RoundingReport> = None;
    for step in snapshots.iter().map(|info| info.record.step).filter(|step| args.step.is_none_or(|only| only == *step)) {
        // A snapshot that cannot be opened is reported already.
        let Ok(snapshot) = store.snapshot(step) else { continue };
        let problem = match (snapshot.rounding(), args.max_error) {
            (Ok(tensors), bound) => {
                total = tensors.iter().fold(total, |sum, tensor| Some(sum.unwrap_or_default().and(tensor.total)));
                bound.and_then(|bound| snapshot.check_rounding(bound).err())
            }
            (Err(error), _) if found.is_clean() => Some(error),
            (Err(_), _) => None,
        };
        found.problems.extend(problem.map(|error| Problem { step: Some(step), steps: vec![step], error }));
    }
    Ok(total)
}
