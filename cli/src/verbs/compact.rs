//! `tensorcask compact`: rewrites the chain of a step as one base.

use serde::Serialize;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::CompactOptions;
use tensorcask::{Result, StepSelector};

use crate::output::Outcome;
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The step becomes a base that needs no other snapshot. It keeps its id and its content. Deltas on it stay valid. A later
`forget` and `gc` delete the old casks. You can compact while a job saves.

Example:
  tensorcask compact runs/a --step 1200"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Step numbers or `latest`
    #[arg(long, value_name = "N", default_value = "latest", num_args = 1.., value_delimiter = ',', value_parser = parse::at)]
    step: Vec<StepSelector>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    compacted: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    step: u64,
    snapshot: String,
    changed: bool,
    links: usize,
    chain_bytes: u64,
    stored_bytes: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let progress = Progress::start(&store, "compacting");
    let mut text = Text::default();
    let mut compacted = Vec::new();
    for &at in &args.step {
        let made = maintain::compact(&store, at, &CompactOptions::default())?;
        text.line(match made.sequence {
            None => format!("step {} is a base already ({})", made.record.step, human_bytes(made.stored_bytes)),
            Some(_) => format!(
                "step {}: {} snapshots of {} folded into a base of {}",
                made.record.step,
                made.links,
                human_bytes(made.chain_bytes),
                human_bytes(made.stored_bytes)
            ),
        });
        compacted.push(Row {
            step: made.record.step,
            snapshot: made.record.id.to_hex(),
            changed: made.sequence.is_some(),
            links: made.links,
            chain_bytes: made.chain_bytes,
            stored_bytes: made.stored_bytes,
        });
    }
    drop(progress);
    Outcome::new(&Report { store: &args.store, compacted }, text)
}
