//! `tensorcask fork`: begins a new run with one step of another.

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::ForkOptions;

use crate::output::Outcome;
use crate::progress::{Progress, stored_bytes};
use crate::text::{Text, counted, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The fork is a run of its own: it begins with that step and the base of its chain. Saves into the fork are deltas on it.
The fork needs nothing of the source afterwards, whatever the source forgets, collects or loses.
On one file system, both stores share the files by hard links, which take no space. In one bucket, the storage copies the objects itself.
Otherwise, and with --copy, all bytes are transferred and checked. Run the command again to resume an interrupted fork.

Example:
  tensorcask fork runs/a runs/a-lower-rate --step 3000"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    source: String,
    /// Path or URL of the new store
    destination: String,
    /// Step to begin with [default: the latest]
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Transfer and check all bytes, and share no file with the source
    #[arg(long)]
    copy: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    source: &'a str,
    destination: &'a str,
    step: u64,
    snapshots: u64,
    objects: u64,
    bytes: u64,
    shared_objects: u64,
    shared_bytes: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let source = Store::open(&args.source)?;
    let destination = Store::open(&args.destination)?;
    let progress = Progress::start(&source, "forking");
    progress.expect(|| stored_bytes(&source, args.step.as_slice()));
    let (step, copied) =
        maintain::fork(&source, &destination, &ForkOptions { step: args.step, share: !args.copy, ..ForkOptions::default() })?;
    drop(progress);
    let mut text = Text::default();
    text.line(format!(
        "forked step {step}: {}; {} transferred, {} shared with the source or copied by the storage",
        counted(copied.snapshots, "snapshot", "snapshots"),
        human_bytes(copied.bytes),
        human_bytes(copied.shared_bytes)
    ));
    let report = Report {
        source: &args.source,
        destination: &args.destination,
        step,
        snapshots: copied.snapshots,
        objects: copied.objects,
        bytes: copied.bytes,
        shared_objects: copied.shared_objects,
        shared_bytes: copied.shared_bytes,
    };
    Outcome::new(&report, text)
}
