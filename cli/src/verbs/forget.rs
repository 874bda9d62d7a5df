//! `tensorcask forget`: says that steps are no longer wanted.

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::Store;

use crate::output::Outcome;
use crate::text::Text;

#[derive(Debug, clap::Args)]
#[command(after_help = "Nothing is deleted: the bytes stay while a newer delta needs them, and until they are collected. All steps are
forgotten in one commit, or none. Forgetting does not disturb a running writer.

Example:
  tensorcask forget runs/a --step 1000 1100")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// The steps
    #[arg(long = "step", value_name = "N", required = true, num_args = 1.., value_delimiter = ',')]
    steps: Vec<u64>,
}

#[derive(Debug, Serialize)]
struct Report {
    forgotten: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    step: u64,
    snapshot: String,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let mut steps = args.steps.clone();
    steps.sort_unstable();
    steps.dedup();
    let mut text = Text::default();
    let mut forgotten = Vec::new();
    for record in store.forget(&steps)? {
        text.line(format!("step {} is forgotten", record.step));
        forgotten.push(Row { step: record.step, snapshot: record.id.to_hex() });
    }
    Outcome::new(&Report { forgotten }, text)
}
