//! `tensorcask log`: lists the commits.

use std::collections::BTreeMap;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{Result, SaveTimes, SnapshotInfo, StepTimes, Survey};

use crate::commits::commits;
use crate::output::{Outcome, complain};
use crate::text::{Text, human_seconds};
use crate::time::{human_time, rfc3339};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Checks each entry against the previous one. If an entry is missing, names it and exits with 3. Times come from the clocks of the writers. `save` is the time from
the call of a save to its commit, and the stall of the training. The next save of the same process records both. Until then, `save`
shows the times of encoding and upload.

Example:
  tensorcask log runs/a"
)]
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
    /// Times of the save that made a live snapshot, as far as they were recorded; null for other entries.
    times: Option<StepTimes>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let commits = commits(&store.history().entries()?);
    let times = times(&store);
    let mut rows = Vec::new();
    let mut cells = Vec::new();
    for commit in commits {
        let of_save = commit.snapshots.iter().filter(|_| commit.kind == "added").find_map(|id| times.get(id).copied());
        cells.push(vec![
            commit.sequence.to_string(),
            human_time(commit.time_ms),
            commit.kind.to_owned(),
            commit.writer.chars().take(8).collect(),
            of_save.map_or(String::new(), describe),
            commit.what.clone(),
        ]);
        rows.push(Row {
            sequence: commit.sequence,
            time: rfc3339(commit.time_ms),
            kind: commit.kind,
            writer: commit.writer,
            what: commit.what,
            steps: commit.steps,
            snapshots: commit.snapshots,
            times: of_save,
        });
    }
    let mut text = Text::default();
    text.table(&[">entry", "time", "kind", "writer", "save", "what"], &cells);
    Outcome::new(&Report { store: &args.store, entries: rows }, text)
}

/// Time of a whole save, or of its parts if nobody measured the whole, and its stall.
fn describe(times: StepTimes) -> String {
    let StepTimes { stall_ms, encode_ms, upload_ms, save_ms } = times;
    let time = |name: &str, ms: Option<f64>| ms.map(|ms| format!("{name}{}", human_seconds(ms / 1e3)));
    let parts = match save_ms {
        Some(_) => vec![time("", save_ms), time("stall ", stall_ms)],
        None => vec![time("stall ", stall_ms), time("encode ", encode_ms), time("upload ", upload_ms)],
    };
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Times of the saves of live snapshots, by id. Snapshots whose manifests cannot be read have none.
fn times(store: &Store) -> BTreeMap<String, StepTimes> {
    let readable = store.block_on(store.inner().history().readable()).map_err(|error| vec![error]);
    let (infos, errors) = match readable {
        Ok(Survey { found, skipped }) => (found, skipped.into_iter().map(|skipped| skipped.error).collect()),
        Err(errors) => (vec![], errors),
    };
    for error in errors {
        complain(&format!("warning: the time of a save cannot be read: {error}"));
    }
    let infos: Vec<SnapshotInfo> = infos.into_iter().map(|(_, info)| info).collect();
    let of_steps = SaveTimes::by_step(infos.iter().map(|info| (info.record.step, &info.user)));
    infos.iter().filter_map(|info| Some((info.record.id.to_hex(), *of_steps.get(&info.record.step)?))).collect()
}
