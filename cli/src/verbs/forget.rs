//! `tensorcask forget`: says that steps are no longer wanted.

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{Error, Result, Retention};

use crate::output::Outcome;
use crate::text::Text;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Nothing is deleted: the bytes stay while a newer delta needs them, and until `gc --apply` collects them. Pinned steps
and the newest step are kept by --keep-last and --keep-every; with both, a step stays that either of them keeps. All steps of
--step are forgotten in one commit, or none. Forgetting does not disturb a running writer.

Example:
  tensorcask forget runs/a --step 1000 1100
  tensorcask forget runs/a --keep-last 5 --keep-every 1000"
)]
#[command(group(clap::ArgGroup::new("which").required(true).multiple(true).args(["steps", "keep_last", "keep_every"])))]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// These steps
    #[arg(long = "step", value_name = "N", num_args = 1.., value_delimiter = ',', conflicts_with_all = ["keep_last", "keep_every"])]
    steps: Vec<u64>,
    /// All but the last N steps, by commit
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_last: Option<u64>,
    /// All but the steps that are multiples of N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,
    /// Only tell which
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    dry_run: bool,
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
    let records = match (steps.is_empty(), args.dry_run) {
        (true, dry_run) => store.retain(Retention { keep_last: args.keep_last, keep_every: args.keep_every }, !dry_run)?,
        (false, false) => store.forget(&steps)?,
        (false, true) => {
            let live = store.snapshots()?;
            let find = |step: &u64| {
                let found = live.iter().find(|info| info.record.step == *step && !info.record.pinned);
                let found = found.map(|info| info.record.clone());
                found.ok_or_else(|| Error::not_found(format!("the store has no step {step} that is not pinned")))
            };
            steps.iter().map(find).collect::<Result<_>>()?
        }
    };
    let mut text = Text::default();
    let mut forgotten = Vec::new();
    for record in records {
        text.line(format!("step {} {} forgotten", record.step, if args.dry_run { "would be" } else { "is" }));
        forgotten.push(Row { step: record.step, snapshot: record.id.to_hex() });
    }
    if forgotten.is_empty() {
        text.line("nothing to forget");
    }
    Outcome::new(&Report { dry_run: args.dry_run, forgotten }, text)
}
