//! `tensorcask log`: lists the commits.

use std::collections::HashMap;

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::Store;
use tensorcask::wire::{Event, Id};

use crate::output::Outcome;
use crate::text::Text;
use crate::time::{human_time, rfc3339};

#[derive(Debug, clap::Args)]
#[command(after_help = "Checks each entry against the previous one. Times come from the clocks of the writers.

Example:
  tensorcask log runs/a")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    entries: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    sequence: u64,
    time: String,
    kind: &'static str,
    writer: String,
    what: String,
    steps: Vec<u64>,
    snapshots: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let mut step_of: HashMap<Id, u64> = HashMap::new();
    let mut rows = Vec::new();
    let mut cells = Vec::new();
    for entry in store.history().entries()? {
        if let Event::Added { snapshot, step, .. } = &entry.event {
            step_of.insert(*snapshot, *step);
        }
        let ids = match &entry.event {
            Event::Added { snapshot, .. } | Event::Pinned { snapshot, .. } | Event::Compacted { snapshot, .. } => vec![*snapshot],
            Event::Forgotten { snapshots } | Event::Collecting { snapshots } => snapshots.clone(),
            _ => vec![],
        };
        let steps: Vec<u64> = ids.iter().filter_map(|id| step_of.get(id)).copied().collect();
        let what = describe(&entry.event, &steps, &step_of);
        let writer = entry.writer.to_hex();
        cells.push(vec![
            entry.sequence.to_string(),
            human_time(entry.time_ms),
            entry.event.name().to_owned(),
            writer.chars().take(8).collect(),
            what.clone(),
        ]);
        rows.push(Row {
            sequence: entry.sequence,
            time: rfc3339(entry.time_ms),
            kind: entry.event.name(),
            writer,
            what,
            steps,
            snapshots: ids.iter().map(Id::to_hex).collect(),
        });
    }
    let mut text = Text::default();
    text.table(&[">entry", "time", "kind", "writer", "what"], &cells);
    Outcome::new(&Report { store: &args.store, entries: rows }, text)
}

fn describe(event: &Event, steps: &[u64], step_of: &HashMap<Id, u64>) -> String {
    let numbers: Vec<String> = steps.iter().map(u64::to_string).collect();
    let steps = numbers.join(", ");
    let were = match numbers.len() {
        1 => format!("step {steps} was"),
        _ => format!("steps {steps} were"),
    };
    match event {
        Event::Opened {} => "opened for writing".to_owned(),
        Event::Added { parent: None, .. } => format!("step {steps}, a base"),
        Event::Added { parent: Some(parent), .. } => match step_of.get(parent) {
            Some(parent) => format!("step {steps}, a delta on step {parent}"),
            None => format!("step {steps}, a delta"),
        },
        Event::Forgotten { .. } => format!("{were} forgotten"),
        Event::Pinned { pinned: true, .. } => format!("step {steps} was pinned"),
        Event::Pinned { pinned: false, .. } => format!("step {steps} was unpinned"),
        Event::Compacted { roles: Some(roles), .. } => format!("step {steps} was reduced to {}", roles.join(", ")),
        Event::Compacted { parent: None, .. } => format!("step {steps} became a base"),
        Event::Compacted { parent: Some(_), .. } => format!("step {steps} was rewritten"),
        Event::Collecting { .. } => format!("{were} collected; gc deletes the bytes later"),
        Event::Upgraded { must_understand, may_ignore } => {
            format!("readers must support [{}], writers also [{}]", must_understand.join(", "), may_ignore.join(", "))
        }
        other => other.name().to_owned(),
    }
}
