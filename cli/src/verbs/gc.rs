//! `tensorcask gc`: collects snapshots that no other snapshot needs, and deletes their objects after a waiting time.

use std::time::Duration;

use serde::Serialize;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::{Deletable, GcOptions};
use tensorcask::{Result, SnapshotRecord};

use crate::output::Outcome;
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Garbage collection has two phases. A first run marks forgotten and replaced snapshots that no other snapshot needs as
collected. A later run deletes their objects, and leftovers of failed saves, if nothing has needed them for --age-floor by
the clock of the storage. So the first run frees no space: run it again after a day. You can run it beside writers, readers
and compaction.

A writer refuses to commit a save that began more than half the age floor ago. Writers assume a floor of 24h: do not use a
lower one while a writer runs. If a part of the log or a manifest that it needs is missing or damaged, gc deletes nothing.

Example:
  tensorcask gc runs/a            # only list
  tensorcask gc runs/a --apply"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Collect and delete; without this option, only list the objects
    #[arg(long)]
    apply: bool,
    /// Delete only objects that nothing has needed for this time, such as 30m, 24h or 7d
    #[arg(long, visible_alias = "older-than", value_name = "TIME", default_value = "24h", value_parser = parse::duration)]
    age_floor: Duration,
    /// Also delete directories that no manifest names; stop all writers, compactions and copies first
    #[arg(long)]
    directories: bool,
}

/// Number of steps that the text names.
const MAX_SHOWN: usize = 10;

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    applied: bool,
    collected: Vec<Row>,
    collected_bytes: u64,
    deleted: Vec<Object>,
    freed_bytes: u64,
    waiting: Vec<Object>,
    waiting_bytes: u64,
    held: Vec<Row>,
    held_bytes: u64,
    held_by: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    step: u64,
    snapshot: String,
    status: &'static str,
}

/// Object as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Object {
    object: String,
    bytes: u64,
}

impl Object {
    pub(crate) fn list(objects: &[Deletable]) -> Vec<Self> {
        objects.iter().map(|found| Self { object: found.path.clone(), bytes: found.bytes }).collect()
    }
}

fn rows(records: &[SnapshotRecord]) -> Vec<Row> {
    let row = |record: &SnapshotRecord| Row { step: record.step, snapshot: record.id.to_hex(), status: record.status.name() };
    records.iter().map(row).collect()
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let options = GcOptions { apply: args.apply, age_floor: args.age_floor, directories: args.directories, ..GcOptions::default() };
    let progress = Progress::start(&store, "collecting");
    let found = maintain::gc(&store, &options)?;
    drop(progress);
    let mut text = Text::default();
    let (gives, frees) = if args.apply { ("collected", "freed") } else { ("would collect", "would free") };
    let objects = |objects: &[Deletable]| counted(objects.len() as u64, "object", "objects");
    let snapshots =
        |records: &[SnapshotRecord], of: &str| counted(records.len() as u64, &format!("{of} snapshot"), &format!("{of} snapshots"));
    text.line(format!("{gives} {} ({})", snapshots(&found.collected, "unneeded"), human_bytes(found.collected_bytes)));
    text.line(format!("{frees} {} in {}", human_bytes(found.freed_bytes()), objects(&found.deleted)));
    text.line(format!("younger than the age floor: {} in {}", human_bytes(found.waiting_bytes()), objects(&found.waiting)));
    text.line(format!("still needed by newer deltas: {} in {}", human_bytes(found.held_bytes), snapshots(&found.held, "forgotten")));
    let shown = found.held_by.iter().take(MAX_SHOWN);
    let steps: Vec<String> =
        shown.map(|record| format!("step {} needs them: run `tensorcask compact {} --step {0}`", record.step, args.store)).collect();
    steps.iter().for_each(|line| text.line(line));
    if found.held_by.len() > MAX_SHOWN {
        text.line(format!("{} more steps need them: see `held_by` of --json", found.held_by.len() - MAX_SHOWN));
    }
    if !args.apply {
        text.line("nothing was changed; use --apply to collect and delete");
    }
    let report = Report {
        store: &args.store,
        applied: found.applied,
        collected: rows(&found.collected),
        collected_bytes: found.collected_bytes,
        freed_bytes: found.freed_bytes(),
        deleted: Object::list(&found.deleted),
        waiting_bytes: found.waiting_bytes(),
        waiting: Object::list(&found.waiting),
        held: rows(&found.held),
        held_bytes: found.held_bytes,
        held_by: rows(&found.held_by),
    };
    Outcome::new(&report, text)
}
