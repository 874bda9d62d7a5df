//! `tensorcask copy`: copies snapshots into another store.

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::CopyOptions;

use crate::output::Outcome;
use crate::parse;
use crate::progress::{Progress, stored_bytes};
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Snapshots keep their ids, manifests and casks, byte for byte. The copy gets a new log of the same run. `copy` leaves out
forgotten snapshots that no copied snapshot needs. It checks every cask at the destination before it commits the snapshot.
Run the command again to resume an interrupted copy, or to add new snapshots to an earlier copy. A step that was saved at the
destination, or is pinned there, is never replaced: such a copy fails with `conflict`. To share the work among n machines,
run --shard 0/n to --shard n-1/n, which copy casks and commit nothing, and then the same command without --shard.

Example:
  tensorcask copy runs/a s3://bucket/run42"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    source: String,
    /// Path or URL of the copy: empty, or an earlier copy
    destination: String,
    /// Copy only these steps and the snapshots that they need
    #[arg(long = "step", value_name = "N", num_args = 1.., value_delimiter = ',')]
    steps: Vec<u64>,
    /// Copy part i of n of the casks, with i from 0, and commit nothing
    #[arg(long, value_name = "I/N", value_parser = parse::part)]
    shard: Option<(u64, u64)>,
    /// Take the destination over from a job that saves to it: the next save of that job fails with `fenced`
    #[arg(long)]
    take_over: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    source: &'a str,
    destination: &'a str,
    shard: Option<String>,
    snapshots: u64,
    present: u64,
    forgotten: u64,
    objects: u64,
    bytes: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let source = Store::open(&args.source)?;
    let destination = Store::open(&args.destination)?;
    let progress = Progress::start(&source, "copying");
    progress.expect(|| stored_bytes(&source, &args.steps));
    let steps = Some(args.steps.clone()).filter(|steps| !steps.is_empty());
    let copied = maintain::copy(
        &source,
        &destination,
        &CopyOptions { steps, shard: args.shard, take_over: args.take_over, ..CopyOptions::default() },
    )?;
    drop(progress);
    let mut text = Text::default();
    text.line(format!(
        "copied {} ({} in {}); already present: {}",
        counted(copied.snapshots, "snapshot", "snapshots"),
        human_bytes(copied.bytes),
        counted(copied.objects, "object", "objects"),
        copied.present
    ));
    if copied.forgotten > 0 {
        text.line(format!(
            "forgotten at the destination, which never takes a step back: {}; copy into an empty place to have them",
            counted(copied.forgotten, "snapshot", "snapshots")
        ));
    }
    let report = Report {
        source: &args.source,
        destination: &args.destination,
        shard: args.shard.map(|(part, of)| format!("{part}/{of}")),
        snapshots: copied.snapshots,
        present: copied.present,
        forgotten: copied.forgotten,
        objects: copied.objects,
        bytes: copied.bytes,
    };
    Outcome::new(&report, text)
}
