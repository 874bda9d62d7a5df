//! `tensorcask forget`: says that steps are no longer wanted.

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{CompactOptions, Error, Reduced, Result, Retention};

use crate::output::Outcome;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Nothing is deleted: the bytes stay while a newer delta needs them, and until `gc --apply` collects them. Pinned steps
and the newest step are kept by --keep-last and --keep-every; with both, a step stays that either of them keeps. All steps of
--step are forgotten in one commit, or none. Forgetting does not disturb a running writer.

With --keep-role, steps are not forgotten but reduced to the tensors of some roles: the bytes of the others go with the next gc. A step
whose optimizer state a newer step needs stays whole. A reduced step is restored by its number, never as `latest`.

Example:
  tensorcask forget runs/a --step 1000 1100
  tensorcask forget runs/a --keep-last 5 --keep-every 1000
  tensorcask forget runs/a --keep-last 5 --keep-role model"
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
    /// Keep the tensors of these roles of the steps that would be forgotten
    #[arg(long, value_name = "ROLE", num_args = 1.., value_delimiter = ',', conflicts_with = "dry_run")]
    keep_role: Vec<String>,
    /// Only tell which
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    dry_run: bool,
    forgotten: Vec<Row>,
    reduced: Vec<ReducedRow>,
}

#[derive(Debug, Serialize)]
struct ReducedRow {
    step: u64,
    snapshot: String,
    roles: Option<Vec<String>>,
    stored_bytes_before: u64,
    stored_bytes: u64,
    held: Option<String>,
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
    if !args.keep_role.is_empty() {
        return reduce(args, &store, &steps);
    }
    let records = match (steps.is_empty(), args.dry_run) {
        (true, dry_run) => store.retain(retention(args), !dry_run)?,
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
    Outcome::new(&Report { dry_run: args.dry_run, forgotten, reduced: vec![] }, text)
}

fn retention(args: &Args) -> Retention {
    Retention { keep_last: args.keep_last, keep_every: args.keep_every }
}

fn reduce(args: &Args, store: &Store, steps: &[u64]) -> Result<Outcome> {
    let options = CompactOptions::default();
    let made = match steps {
        [] => store.retain_roles(retention(args), &args.keep_role, &options)?,
        steps => store.keep_roles(steps, &args.keep_role, &options)?,
    };
    let mut text = Text::default();
    let mut reduced = Vec::new();
    for Reduced { record, stored_bytes_before, stored_bytes, held } in made {
        text.line(match (&held, &record.roles) {
            (Some(reason), _) => format!("step {} stays as it is: {reason}", record.step),
            (None, roles) => format!(
                "step {} keeps {}: {} of {}",
                record.step,
                roles.as_deref().unwrap_or_default().join(", "),
                human_bytes(stored_bytes),
                human_bytes(stored_bytes_before)
            ),
        });
        let (step, snapshot, roles) = (record.step, record.id.to_hex(), record.roles);
        reduced.push(ReducedRow { step, snapshot, roles, stored_bytes_before, stored_bytes, held });
    }
    if reduced.is_empty() {
        text.line("nothing to reduce");
    }
    Outcome::new(&Report { dry_run: false, forgotten: vec![], reduced }, text)
}
