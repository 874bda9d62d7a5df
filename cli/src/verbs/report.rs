//! `tensorcask report`: writes the history of a store as an HTML page.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::maintain::VerifyDepth;
use tensorcask::{Error, ErrorKind, Result};

use crate::atomic::AtomicFile;
use crate::output::{Outcome, code_of};
use crate::progress::Progress;
use crate::report::{self, Bounds, Data};
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The page is one file of about 5 MB that works without a network. It shows snapshots and chains, stored bytes, norms and
changes by layer, NaN and infinities, exponents, rounding errors, and all tensors of the newest step. Norms, changes, NaN and
exponents need snapshots that were saved with statistics. Reads no tensors, except with --verify.

Damaged steps are marked in the page. The page is then written, and the exit code is 3.

Example:
  tensorcask report runs/a -o run.html
  tensorcask report s3://bucket/run42 -o run.html --verify=log
  tensorcask report runs/a --serve"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// HTML file to write; an existing file is replaced
    #[arg(short, long, value_name = "FILE", required_unless_present = "serve")]
    output: Option<PathBuf>,
    /// Serve the page on 127.0.0.1 until Ctrl-C, to follow a job that runs; 0 is any free port
    #[arg(long, value_name = "PORT", num_args = 0..=1, require_equals = true, default_missing_value = "8642", conflicts_with_all = ["output", "verify"])]
    serve: Option<u16>,
    /// Also verify the store, to a depth of `log`, `pages` or `full`, and list the problems
    #[arg(long, value_name = "DEPTH", num_args = 0..=1, require_equals = true, default_missing_value = "full",
        value_parser = ["log", "pages", "full"])]
    verify: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    output: String,
    bytes: u64,
    snapshots: u64,
    /// Live steps that were read.
    steps: u64,
    /// Steps without statistics.
    without_statistics: Vec<u64>,
    damaged: Vec<DamageRow>,
    /// Number of pairs of a tensor and a step with NaN or infinities.
    nonfinite: u64,
    /// Number of problems that --verify found; null without --verify.
    problems: Option<u64>,
}

#[derive(Debug, Serialize)]
struct DamageRow {
    step: u64,
    message: String,
}

pub(crate) fn run(args: &Args, json: bool) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    // Report an empty folder as a missing store.
    store.history().run()?;
    if let Some(port) = args.serve {
        return serve(&store, &args.store, port, json);
    }
    let Some(output) = &args.output else { return Err(Error::invalid("give --output or --serve")) };
    let depth = args.verify.as_deref().map(VerifyDepth::from_name).transpose()?;
    let file = AtomicFile::create(output)?;
    let progress = Progress::start(&store, "reading statistics");
    let data = report::gather(&store, &args.store, depth, Bounds::DEFAULT)?;
    drop(progress);
    let page = report::render(&data)?;
    file.file().write_all(page.as_bytes()).map_err(|e| Error::io(output.display().to_string(), e))?;
    file.commit()?;
    let report = Report::of(&args.store, output, &data, page.len() as u64);
    let is_damaged = !report.damaged.is_empty() || !data.faults.is_empty() || report.problems.is_some_and(|count| count > 0);
    let text = report.describe(&data);
    Ok(Outcome::new(&report, text)?.with_code(if is_damaged { code_of(ErrorKind::Corrupt) } else { 0 }))
}

/// Prints the address of the page, and serves it until the process ends.
fn serve(store: &Store, url: &str, port: u16, json: bool) -> Result<Outcome> {
    let outcome = |address: &str| {
        let mut text = Text::default();
        text.line(format!("{address} shows {url}; Ctrl-C ends it"));
        Outcome::new(&Served { store: url, address }, text)
    };
    report::serve(store, url, port, |address| outcome(address).map(|line| line.print(json)).map(|_| ()))?;
    Outcome::new(&Served { store: url, address: "" }, Text::default())
}

#[derive(Debug, Serialize)]
struct Served<'a> {
    store: &'a str,
    address: &'a str,
}

impl<'a> Report<'a> {
    fn of(store: &'a str, output: &Path, data: &Data, bytes: u64) -> Self {
        let damage = |row: &report::SnapshotRow| row.damage.clone().map(|message| DamageRow { step: row.step, message });
        Self {
            store,
            output: output.display().to_string(),
            bytes,
            snapshots: data.all_snapshots,
            steps: data.live_steps,
            without_statistics: data.snapshots.iter().filter(|row| row.measured == Some(false)).map(|row| row.step).collect(),
            damaged: data.snapshots.iter().filter_map(damage).collect(),
            nonfinite: data.all_nonfinite,
            problems: data.verify.as_ref().map(|verify| verify.all_problems),
        }
    }

    fn describe(&self, data: &Data) -> Text {
        let mut text = Text::default();
        text.line(format!("wrote {} ({}, {})", self.output, human_bytes(self.bytes), counted(self.steps, "step", "steps")));
        for fault in &data.faults {
            text.line(format!("sizes of snapshots are not known: {fault}"));
        }
        for row in &self.damaged {
            text.line(format!("step {} cannot be read: {}", row.step, row.message));
        }
        if let Some(problems) = self.problems.filter(|count| *count > 0) {
            text.line(format!("verify found {}", counted(problems, "problem", "problems")));
        }
        if self.nonfinite > 0 {
            text.line("some tensors have NaN or infinities: `tensorcask stats --where nonfinite` lists them");
        }
        if !self.without_statistics.is_empty() {
            let steps = counted(self.without_statistics.len() as u64, "step has", "steps have");
            text.line(format!("{steps} no statistics: save with --statistics"));
        }
        text
    }
}
