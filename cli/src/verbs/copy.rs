//! `tensorcask copy`: copies snapshots into another store.

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::CopyOptions;

use crate::output::Outcome;
use crate::progress::{Progress, stored_bytes};
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Snapshots keep their ids, manifests and casks, byte for byte. The copy gets a new log of the same run. `copy` leaves out
forgotten snapshots that no copied snapshot needs. It checks every cask at the destination before it commits the snapshot.
Run the command again to resume an interrupted copy, or to add new snapshots to an earlier copy.

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
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    source: &'a str,
    destination: &'a str,
    snapshots: u64,
    present: u64,
    objects: u64,
    bytes: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let (source, destination) = (Store::open(&args.source)?, Store::open(&args.destination)?);
    let progress = Progress::start(&source, "copying");
    progress.expect(|| stored_bytes(&source, &args.steps));
    let steps = Some(args.steps.clone()).filter(|steps| !steps.is_empty());
    let copied = maintain::copy(&source, &destination, &CopyOptions { steps, ..CopyOptions::default() })?;
    drop(progress);
    let mut text = Text::default();
    text.line(format!(
        "copied {} ({} in {}); already present: {}",
        counted(copied.snapshots, "snapshot", "snapshots"),
        human_bytes(copied.bytes),
        counted(copied.objects, "object", "objects"),
        copied.present
    ));
    let report = Report {
        source: &args.source,
        destination: &args.destination,
        snapshots: copied.snapshots,
        present: copied.present,
        objects: copied.objects,
        bytes: copied.bytes,
    };
    Outcome::new(&report, text)
}
