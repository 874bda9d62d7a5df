//! `tensorcask doctor`: finds broken links, unsafe storage and leftovers.

use std::time::Duration;

use serde::Serialize;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::DoctorOptions;
use tensorcask::{ErrorKind, Result};

use super::gc::Object;
use crate::output::{ErrorJson, Outcome, code_of};
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Checks the links from the log to the casks; `verify` also checks the content of casks. Tests with scratch objects whether
the storage supports atomic commits; where there is no store, this test is all it does. Finds leftovers: objects that no snapshot
references, and files of interrupted uploads. --apply deletes leftovers older than --age-floor, and nothing else. Exits with 3 if stored data is damaged.
--second tests whether two ways to one storage, such as two mounts of a network file system, agree about who created an object.

Example:
  tensorcask doctor runs/a"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Delete leftovers; without this option they are only listed
    #[arg(long)]
    apply: bool,
    /// Minimum age of leftovers to delete, such as 30m, 24h or 7d; see `gc --help`
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse::duration)]
    age_floor: Duration,
    /// The same place by another path or URL, such as the mount of another host: races creates between the two
    #[arg(long, value_name = "STORE")]
    second: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    has_store: bool,
    healthy: bool,
    applied: bool,
    problems: Vec<ErrorJson>,
    probe_rounds: Option<u32>,
    second_rounds: Option<u32>,
    orphans: Vec<Object>,
    young: Vec<Object>,
    staging: Vec<Object>,
    advice: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let second = args.second.as_deref().map(Store::open).transpose()?;
    let progress = Progress::start(&store, "examining");
    let found = maintain::doctor(&store, &DoctorOptions { apply: args.apply, age_floor: args.age_floor })?;
    let pair = second.map(|second| maintain::probe_pair(&store, &second));
    drop(progress);
    let mut text = Text::default();
    let mut code = 0;
    if !found.has_store {
        text.line(format!("no store at {}; the first save creates one", args.store));
        code = code_of(ErrorKind::NotFound);
    }
    for problem in &found.problems {
        text.line(problem.error.to_string());
        code = match problem.error.kind() {
            ErrorKind::Corrupt => code_of(ErrorKind::Corrupt),
            _ if !found.has_store => 1,
            _ => code.max(1),
        };
    }
    if let Some(probe) = found.probe {
        text.line(format!("the storage is safe: exactly one writer won each of {} races", probe.rounds));
    }
    match (&args.second, &pair) {
        (Some(second), Some(Ok(probe))) => {
            text.line(format!("it is safe together with {second}: exactly one writer won each of {} races, and both saw it", probe.rounds))
        }
        (Some(second), Some(Err(error))) => {
            let what = if error.kind() == ErrorKind::UnsafeStore { "it is not safe" } else { "it could not be tested" };
            text.line(format!("{what} together with {second}: {error}"));
            code = if code == code_of(ErrorKind::Corrupt) { code } else { 1 };
        }
        _ => {}
    }
    let deletes = if args.apply { "deleted" } else { "would delete" };
    for (what, objects) in [("unreferenced", &found.orphans), ("interrupted upload", &found.staging)] {
        for object in objects {
            text.line(format!("{deletes} {} ({}), {what}", object.path, human_bytes(object.bytes)));
        }
    }
    if !found.young.is_empty() {
        let young = counted(found.young.len() as u64, "unreferenced object", "unreferenced objects");
        text.line(format!("kept {young}, younger than --age-floor"));
    }
    for advice in &found.advice {
        text.line(format!("note: {advice}"));
    }
    let is_pair_fine = !matches!(pair, Some(Err(_)));
    text.line(match (found.has_store, found.problems.is_empty()) {
        (true, true) if is_pair_fine => "healthy",
        (true, _) => "not healthy",
        (false, true) if is_pair_fine => "a store can be created here",
        (false, true) => "a store can be created here, and used in one of the two ways",
        (false, false) => "no store can be created here",
    });
    let pair_problem = pair.as_ref().and_then(|pair| pair.as_ref().err()).map(ErrorJson::of);
    let report = Report {
        store: &args.store,
        has_store: found.has_store,
        healthy: found.is_healthy() && is_pair_fine,
        applied: found.applied,
        problems: found.problems.iter().map(|problem| ErrorJson::of(&problem.error)).chain(pair_problem).collect(),
        probe_rounds: found.probe.map(|probe| probe.rounds),
        second_rounds: pair.and_then(Result::ok).map(|probe| probe.rounds),
        orphans: Object::list(&found.orphans),
        young: Object::list(&found.young),
        staging: Object::list(&found.staging),
        advice: found.advice,
    };
    Ok(Outcome::new(&report, text)?.with_code(code))
}
