//! `tensorcask ls`: the live snapshots.

use serde::Serialize;
use serde_json::{Map, Value};
use tensorcask::Result;
use tensorcask::blocking::Store;

use crate::output::Outcome;
use crate::text::{Text, human_bytes, human_ratio, ratio};
use crate::time::{human_time, rfc3339};

#[derive(Debug, clap::Args)]
#[command(after_help = "The order is that of the commits; the last is what `latest` means. The ratio is tensor bytes to stored bytes.

Example:
  tensorcask ls s3://bucket/run42")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    snapshots: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    step: u64,
    snapshot: String,
    sequence: u64,
    kind: &'static str,
    parent: Option<String>,
    time: String,
    tensor_bytes: u64,
    stored_bytes: u64,
    ratio: Option<f64>,
    pinned: bool,
    /// Roles that it was reduced to; null: all.
    roles: Option<Vec<String>>,
    user: Map<String, Value>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    // An empty folder is no store.
    store.run()?;
    let mut rows = Vec::new();
    let mut cells = Vec::new();
    for info in store.snapshots()? {
        let record = &info.record;
        let ratio = ratio(info.tensor_bytes, info.stored_bytes);
        let user: Vec<String> = info.user.iter().map(|(key, value)| format!("{key}={value}")).collect();
        cells.push(vec![
            record.step.to_string(),
            record.kind().name().to_owned(),
            human_time(record.time_ms),
            human_bytes(info.tensor_bytes),
            human_bytes(info.stored_bytes),
            human_ratio(ratio),
            if record.pinned { "pinned" } else { "" }.to_owned(),
            record.roles.as_deref().unwrap_or_default().join(", "),
            user.join(" "),
        ]);
        rows.push(Row {
            step: record.step,
            snapshot: record.id.to_hex(),
            sequence: record.sequence,
            kind: record.kind().name(),
            parent: record.parent.map(|parent| parent.to_hex()),
            time: rfc3339(record.time_ms),
            tensor_bytes: info.tensor_bytes,
            stored_bytes: info.stored_bytes,
            ratio,
            pinned: record.pinned,
            roles: record.roles.clone(),
            user: info.user,
        });
    }
    let mut text = Text::default();
    match cells.as_slice() {
        [] => text.line("no snapshots"),
        _ => text.table(&[">step", "kind", "time", ">tensors", ">stored", ">ratio", "pin", "only", "user"], &cells),
    }
    Outcome::new(&Report { store: &args.store, snapshots: rows }, text)
}
