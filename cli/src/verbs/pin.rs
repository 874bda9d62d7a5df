//! `tensorcask pin`: pins or unpins a step.

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::Store;

use crate::output::Outcome;
use crate::text::Text;

#[derive(Debug, clap::Args)]
#[command(after_help = "A pinned step cannot be forgotten. You can pin steps while a job saves.

Example:
  tensorcask pin runs/a --step 1000")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Step number
    #[arg(long, value_name = "N")]
    step: u64,
    /// Unpin the step
    #[arg(long)]
    off: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    step: u64,
    snapshot: String,
    pinned: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let record = if args.off { store.unpin(args.step) } else { store.pin(args.step) }?;
    let mut text = Text::default();
    text.line(format!("step {} is {}", record.step, if record.pinned { "pinned" } else { "no longer pinned" }));
    Outcome::new(&Report { step: record.step, snapshot: record.id.to_hex(), pinned: record.pinned }, text)
}
