//! `tensorcask ls`: lists the live snapshots.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Map, Value};
use tensorcask::Result;
use tensorcask::blocking::Store;
use tensorcask::wire::Id;

use crate::output::Outcome;
use crate::text::{Text, human_bytes, human_ratio, ratio};
use crate::time::{human_time, rfc3339};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Lists snapshots in commit order. The last one is `latest`. The ratio is tensor bytes over stored bytes. If the engine
uses the store, or with --tier, the list shows all places that hold a snapshot: memory and tiers.

Example:
  tensorcask ls s3://bucket/run42"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Path or URL of another tier of the run to include
    #[arg(long, value_name = "STORE")]
    tier: Vec<String>,
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
    /// Roles to which the snapshot was reduced; null means all.
    roles: Option<Vec<String>>,
    /// Places that hold the snapshot: the store, memory of this host, further tiers.
    places: Vec<String>,
    user: Map<String, Value>,
}

/// Names of places and their snapshots.
type Places = Vec<(String, BTreeSet<Id>)>;

#[cfg(all(feature = "engine", target_os = "linux"))]
fn places_beside(store: &Store, args: &Args) -> Result<Places> {
    let found = store.block_on(tensorcask_engine::snapshot_places(None, &args.store, &args.tier))?;
    Ok(found.into_iter().map(|place| (place.name, place.snapshots.unwrap_or_default())).collect())
}

#[cfg(not(all(feature = "engine", target_os = "linux")))]
fn places_beside(_: &Store, args: &Args) -> Result<Places> {
    let ids = |url: &String| Ok((url.clone(), Store::open(url)?.snapshots()?.iter().map(|info| info.record.id).collect()));
    args.tier.iter().map(ids).collect()
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    // Report an empty folder as a missing store.
    store.history().run()?;
    let beside = places_beside(&store, args)?;
    let mut rows = Vec::new();
    let mut cells = Vec::new();
    for info in store.snapshots()? {
        let record = &info.record;
        let ratio = ratio(info.tensor_bytes, info.stored_bytes);
        // `stat` shows the reserved facts.
        let facts = info.user.iter().filter(|(key, _)| !key.starts_with("tc."));
        let user: Vec<String> = facts.map(|(key, value)| format!("{key}={value}")).collect();
        let elsewhere = beside.iter().filter(|(_, snapshots)| snapshots.contains(&record.id)).map(|(name, _)| name.clone());
        let places: Vec<String> = std::iter::once(args.store.clone()).chain(elsewhere).collect();
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
            places.join(", "),
        ]);
        if beside.is_empty() {
            cells.last_mut().map(Vec::pop);
        }
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
            places,
            user: info.user,
        });
    }
    let mut text = Text::default();
    match cells.as_slice() {
        [] => text.line("no snapshots"),
        _ => {
            let headings = [">step", "kind", "time", ">tensors", ">stored", ">ratio", "pin", "only", "user", "places"];
            text.table(headings.get(..headings.len() - usize::from(beside.is_empty())).unwrap_or_default(), &cells);
        }
    }
    Outcome::new(&Report { store: &args.store, snapshots: rows }, text)
}
