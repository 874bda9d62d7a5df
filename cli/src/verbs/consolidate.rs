//! `tensorcask consolidate`: writes one snapshot, with its shards merged, into a new store.

use serde::Serialize;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::CompactOptions;
use tensorcask::{Result, StepSelector};

use crate::output::Outcome;
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(after_help = "Joins the shards of all ranks into whole tensors. Two casks hold all tensors. DST must be empty or must not exist.

Example:
  tensorcask consolidate s3://bucket/run42 archive/run42-step-9000 --step 9000")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Path or URL of the new store
    destination: String,
    /// Step number or `latest`
    #[arg(long, value_name = "N", default_value = "latest", value_parser = parse::at)]
    step: StepSelector,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    destination: &'a str,
    step: u64,
    snapshot: String,
    tensor_bytes: u64,
    stored_bytes: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let destination = Store::open(&args.destination)?;
    let progress = Progress::start(&store, "consolidating");
    let saved = maintain::consolidate(&store, &destination, args.step, &CompactOptions::default())?;
    drop(progress);
    let mut text = Text::default();
    text.line(format!(
        "step {} in {}: {} of tensors in {}",
        saved.step,
        args.destination,
        human_bytes(saved.tensor_bytes),
        human_bytes(saved.stored_bytes)
    ));
    let report = Report {
        store: &args.store,
        destination: &args.destination,
        step: saved.step,
        snapshot: saved.id.to_hex(),
        tensor_bytes: saved.tensor_bytes,
        stored_bytes: saved.stored_bytes,
    };
    Outcome::new(&report, text)
}
