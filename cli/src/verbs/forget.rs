//! `tensorcask forget`: marks steps as no longer wanted.

use serde::Serialize;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::{CompactOptions, Reduced};
use tensorcask::{Error, Result, Retained, Retention, SnapshotRecord};

use crate::output::Outcome;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "A forgotten step cannot be restored, and forgetting cannot be undone. `forget` deletes no bytes: `gc --apply` deletes them
after a day, if no newer delta needs them. --keep-last and --keep-every always keep pinned steps and the newest step that is
whole; reduced steps do not count as last ones. With both options, a step stays if either option keeps it. --step forgets
all its steps in one commit, or none. You can forget steps while a job saves.

--keep-role does not forget the steps. It reduces them to the tensors of the given roles; the next gc deletes the other
tensors. A step stays whole if a newer step needs its other tensors. `latest` skips reduced steps; restore them by number.

Example:
  tensorcask forget runs/a --step 1000 1100
  tensorcask forget runs/a --keep-last 5 --keep-every 1000
  tensorcask forget runs/a --keep-last 5 --keep-role model"
)]
#[command(group(clap::ArgGroup::new("which").required(true).multiple(true).args(["steps", "keep_last", "keep_every", "keep_weights_every"])))]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Forget these steps
    #[arg(long = "step", value_name = "N", num_args = 1.., value_delimiter = ',', conflicts_with_all = ["keep_last", "keep_every"])]
    steps: Vec<u64>,
    /// Forget all but the last N committed steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_last: Option<u64>,
    /// Keep steps whose number is a multiple of N, and forget the others
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,
    /// Keep the weights (role model) of steps whose number is a multiple of N, and drop their other tensors
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with_all = ["steps", "keep_role", "dry_run"])]
    keep_weights_every: Option<u64>,
    /// Keep the tensors of these roles and forget the others
    #[arg(long, value_name = "ROLE", num_args = 1.., value_delimiter = ',', conflicts_with = "dry_run")]
    keep_role: Vec<String>,
    /// Only list the steps
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    dry_run: bool,
    forgotten: Vec<Row>,
    reduced: Vec<ReducedRow>,
    /// Step that stays only because it is the newest finite one; null if there is none.
    kept_finite: Option<u64>,
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
    let explicit = |forgotten| Retained { forgotten, kept_finite: None };
    let mut reduced = Vec::new();
    let Retained { forgotten: records, kept_finite } = match (steps.is_empty(), args.dry_run) {
        (true, false) => {
            let report = maintain::apply_retention(&store, retention(args), &CompactOptions::default())?;
            reduced = report.reduced;
            report.retained
        }
        (true, true) => store.history().unwanted(retention(args))?,
        (false, false) => explicit(store.forget(&steps)?),
        (false, true) => explicit({
            let live = store.snapshots()?;
            let find = |step: &u64| {
                let found = live.iter().find(|info| info.record.step == *step && !info.record.pinned);
                let found = found.map(|info| info.record.clone());
                found.ok_or_else(|| Error::not_found(format!("the store has no step {step} that is not pinned")))
            };
            steps.iter().map(find).collect::<Result<_>>()?
        }),
    };
    let mut text = Text::default();
    let mut forgotten = Vec::new();
    for record in records {
        text.line(format!("step {} {} forgotten", record.step, if args.dry_run { "would be" } else { "is" }));
        forgotten.push(Row { step: record.step, snapshot: record.id.to_hex() });
    }
    let reduced = describe(reduced, &mut text);
    if forgotten.is_empty() && reduced.is_empty() {
        text.line("nothing to forget");
    }
    let kept_finite = describe_kept(kept_finite, &mut text);
    Outcome::new(&Report { dry_run: args.dry_run, forgotten, reduced, kept_finite }, text)
}

fn retention(args: &Args) -> Retention {
    Retention {
        keep_last: args.keep_last,
        keep_every: args.keep_every,
        keep_weights_every: args.keep_weights_every,
        ..Retention::default()
    }
}

fn reduce(args: &Args, store: &Store, steps: &[u64]) -> Result<Outcome> {
    let options = CompactOptions::default();
    let (kept_finite, made) = match steps {
        [] => {
            let report = maintain::retain_roles(store, retention(args), &args.keep_role, &options)?;
            (report.retained.kept_finite, report.reduced)
        }
        steps => (None, maintain::keep_roles(store, steps, &args.keep_role, &options)?),
    };
    let mut text = Text::default();
    let reduced = describe(made, &mut text);
    if reduced.is_empty() {
        text.line("nothing to reduce");
    }
    let kept_finite = describe_kept(kept_finite, &mut text);
    Outcome::new(&Report { dry_run: false, forgotten: vec![], reduced, kept_finite }, text)
}

/// Names the finite step that stays although the retention alone would not keep it.
fn describe_kept(kept: Option<SnapshotRecord>, text: &mut Text) -> Option<u64> {
    let step = kept?.step;
    text.line(format!("step {step} stays: it is the newest finite step, and a newer step that is kept holds NaN or infinities"));
    Some(step)
}

fn describe(made: Vec<Reduced>, text: &mut Text) -> Vec<ReducedRow> {
    let mut reduced = Vec::new();
    for Reduced { record, stored_bytes_before, stored_bytes, held, .. } in made {
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
        let step = record.step;
        let snapshot = record.id.to_hex();
        let roles = record.roles;
        reduced.push(ReducedRow { step, snapshot, roles, stored_bytes_before, stored_bytes, held });
    }
    reduced
}
