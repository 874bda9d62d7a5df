//! `tensorcask doctor`: what is wrong with a store, and what lies about in it.

use std::time::Duration;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{DoctorOptions, ErrorKind, Result};

use super::gc::Object;
use crate::output::{ErrorJson, Outcome, code_of};
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Looks for broken links from log to casks (`verify` looks into casks), tries whether the storage keeps its promises (with
scratch objects, which it removes), and finds leftovers: objects that nothing names, and files of uploads that ended in the
middle. --apply deletes leftovers older than --age-floor, and nothing else. Ends with 3 if something stored is damaged.

Example:
  tensorcask doctor runs/a"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Delete leftovers; otherwise they are only told
    #[arg(long)]
    apply: bool,
    /// How old leftovers must be: 30m, 24h, 7d; see `gc --help`
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse::duration)]
    age_floor: Duration,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    healthy: bool,
    applied: bool,
    problems: Vec<ErrorJson>,
    probe_rounds: Option<u32>,
    orphans: Vec<Object>,
    young: Vec<Object>,
    staging: Vec<Object>,
    advice: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let progress = Progress::start(&store, "examining");
    let found = store.doctor(&DoctorOptions { apply: args.apply, age_floor: args.age_floor })?;
    drop(progress);
    let mut text = Text::default();
    let mut code = 0;
    for problem in &found.problems {
        text.line(problem.error.to_string());
        code = match problem.error.kind() {
            ErrorKind::Corrupt => code_of(ErrorKind::Corrupt),
            _ => code.max(1),
        };
    }
    if let Some(probe) = found.probe {
        text.line(format!("the storage keeps its promises: one winner in each of {} races", probe.rounds));
    }
    let deletes = if args.apply { "deleted" } else { "would delete" };
    for (what, objects) in [("that nothing names", &found.orphans), ("of uploads that ended in the middle", &found.staging)] {
        for object in objects {
            text.line(format!("{deletes} {} ({}), {what}", object.path, human_bytes(object.bytes)));
        }
    }
    if !found.young.is_empty() {
        text.line(format!("{} objects that nothing names are not old enough to be deleted", found.young.len()));
    }
    for advice in &found.advice {
        text.line(format!("note: {advice}"));
    }
    text.line(if found.is_healthy() { "healthy" } else { "not healthy" });
    let report = Report {
        store: &args.store,
        healthy: found.is_healthy(),
        applied: found.applied,
        problems: found.problems.iter().map(|problem| ErrorJson::of(&problem.error)).collect(),
        probe_rounds: found.probe.map(|probe| probe.rounds),
        orphans: Object::list(&found.orphans),
        young: Object::list(&found.young),
        staging: Object::list(&found.staging),
        advice: found.advice,
    };
    Ok(Outcome::new(&report, text)?.with_code(code))
}
