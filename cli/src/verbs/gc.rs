//! `tensorcask gc`: gives up what nothing needs, and deletes what has been without need for long enough.

use std::time::Duration;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{Deletable, GcOptions, Result, SnapshotRecord};

use crate::output::Outcome;
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Two phases. Forgotten and superseded snapshots that no other needs are given up in the log at once; their objects, and
leftovers of saves that failed, are deleted when nothing has needed them for --age-floor, by the clock of the storage. So a
first run frees nothing of what it gives up: run it again later. Safe beside writers, readers and compaction.

A writer refuses to commit what it began more than half the floor ago. Writers assume 24 h: do not go below it while any
runs. Nothing is deleted while a manifest that is needed cannot be read.

Example:
  tensorcask gc runs/a            # only tell
  tensorcask gc runs/a --apply"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Do it; otherwise it is only told
    #[arg(long)]
    apply: bool,
    /// How long nothing must have needed an object: 30m, 24h, 7d
    #[arg(long, visible_alias = "older-than", value_name = "TIME", default_value = "24h", value_parser = parse::duration)]
    age_floor: Duration,
    /// Directories that nothing names too; no writer, compaction or copy may run meanwhile
    #[arg(long)]
    directories: bool,
}

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
}

#[derive(Debug, Serialize)]
struct Row {
    step: u64,
    snapshot: String,
    status: &'static str,
}

/// An object in JSON.
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
    let found = store.gc(&options)?;
    drop(progress);
    let mut text = Text::default();
    let (gives, frees) = if args.apply { ("gave up", "freed") } else { ("would give up", "would free") };
    text.line(format!("{gives} {} snapshots ({}) that nothing needs", found.collected.len(), human_bytes(found.collected_bytes)));
    text.line(format!("{frees} {} in {} objects", human_bytes(found.freed_bytes()), found.deleted.len()));
    text.line(format!("{} in {} objects wait for the age floor", human_bytes(found.waiting_bytes()), found.waiting.len()));
    text.line(format!("{} in {} unwanted snapshots are held by chains of others", human_bytes(found.held_bytes), found.held.len()));
    if !found.held.is_empty() {
        text.line("`tensorcask compact` turns a step into a base, and lets go of its chain");
    }
    if !args.apply {
        text.line("nothing was done; --apply does it");
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
    };
    Outcome::new(&report, text)
}
