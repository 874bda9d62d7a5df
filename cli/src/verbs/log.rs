//! `tensorcask log`: lists the commits.

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::Store;

use crate::commits::commits;
use crate::output::Outcome;
use crate::text::Text;
use crate::time::{human_time, rfc3339};

#[derive(Debug, clap::Args)]
#[command(after_help = "Checks each entry against the previous one. Times come from the clocks of the writers.

Example:
  tensorcask log runs/a")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    entries: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    sequence: u64,
    time: String,
    kind: &'static str,
    writer: String,
    what: String,
    steps: Vec<u64>,
    snapshots: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let mut rows = Vec::new();
    let mut cells = Vec::new();
    for commit in commits(&store.history().entries()?) {
        cells.push(vec![
            commit.sequence.to_string(),
            human_time(commit.time_ms),
            commit.kind.to_owned(),
            commit.writer.chars().take(8).collect(),
            commit.what.clone(),
        ]);
        rows.push(Row {
            sequence: commit.sequence,
            time: rfc3339(commit.time_ms),
            kind: commit.kind,
            writer: commit.writer,
            what: commit.what,
            steps: commit.steps,
            snapshots: commit.snapshots,
        });
    }
    let mut text = Text::default();
    text.table(&[">entry", "time", "kind", "writer", "what"], &cells);
    Outcome::new(&Report { store: &args.store, entries: rows }, text)
}
