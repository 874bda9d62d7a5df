//! `tensorcask chain`: lists the snapshots from which a step is rebuilt.

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{Result, StepSelector};

use crate::output::Outcome;
use crate::parse;
use crate::text::{Text, counted, human_bytes};
use crate::time::{human_time, rfc3339};

#[derive(Debug, clap::Args)]
#[command(after_help = "A base is self-contained. A delta needs the snapshot on the next line.

Example:
  tensorcask chain runs/a --step 1200")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Step number or `latest`
    #[arg(long, value_name = "N", default_value = "latest", value_parser = parse::at)]
    step: StepSelector,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    step: u64,
    snapshot: String,
    stored_bytes: u64,
    links: Vec<LinkRow>,
}

#[derive(Debug, Serialize)]
struct LinkRow {
    step: u64,
    snapshot: String,
    kind: &'static str,
    status: &'static str,
    pinned: bool,
    time: String,
    stored_bytes: u64,
    casks: usize,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let snapshot = store.snapshot(args.step)?;
    let mut links = Vec::new();
    let mut cells = Vec::new();
    for link in snapshot.inspect().chain() {
        cells.push(vec![
            link.record.step.to_string(),
            link.kind.name().to_owned(),
            link.record.status.name().to_owned(),
            human_time(link.record.time_ms),
            human_bytes(link.stored_bytes),
            link.casks.to_string(),
        ]);
        links.push(LinkRow {
            step: link.record.step,
            snapshot: link.record.id.to_hex(),
            kind: link.kind.name(),
            status: link.record.status.name(),
            pinned: link.record.pinned,
            time: rfc3339(link.record.time_ms),
            stored_bytes: link.stored_bytes,
            casks: link.casks,
        });
    }
    let stored_bytes = links.iter().map(|link| link.stored_bytes).fold(0, u64::saturating_add);
    let mut text = Text::default();
    text.table(&[">step", "kind", "status", "time", ">stored", ">casks"], &cells);
    text.line(format!("{} in {}", human_bytes(stored_bytes), counted(links.len() as u64, "snapshot", "snapshots")));
    Outcome::new(&Report { store: &args.store, step: snapshot.step(), snapshot: snapshot.record().id.to_hex(), stored_bytes, links }, text)
}
