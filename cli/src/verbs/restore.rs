//! `tensorcask restore`: writes a snapshot, or a part of it, to a safetensors file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use globset::GlobBuilder;
use serde::Serialize;
use tensorcask::blocking::{Snapshot, Store};
use tensorcask::interchange::safetensors::Selected;
use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, Slice, StepSelector};

use crate::atomic::AtomicFile;
use crate::output::{Outcome, complain};
use crate::parse::{self, SliceArg};
use crate::progress::Progress;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The output file appears whole or not at all. With --tensor or --slice it holds only the selected tensors. A slice keeps
the name of its tensor. `restore` reads only the needed chunks. A chunk is a run of rows, so a slice of columns reads the
whole tensor. The tensors have the same bytes as the saved tensors; the header of the file may have another order.

Example:
  tensorcask restore runs/a --step 1000 -o rows.safetensors --slice 'model.wte.weight[0:128]'"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Step number or `latest`
    #[arg(long, value_name = "N", default_value = "latest", value_parser = parse::at)]
    step: StepSelector,
    /// Output file, replaced if it exists; its folder must exist
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Restore tensors whose names match; `*` matches any characters
    #[arg(long, value_name = "GLOB")]
    tensor: Vec<String>,
    /// Restore part of a tensor: one range per leading dimension; a or b may be left out
    #[arg(long, value_name = "NAME[a:b,c:d]", value_parser = parse::slice)]
    slice: Vec<SliceArg>,
    /// Write every blob to `DIR/RANK-NAME`; characters other than letters, digits, `.`, `-` and `_` become %XX
    #[arg(long, value_name = "DIR")]
    blobs: Option<PathBuf>,
    /// Fail if the newest step is damaged, instead of restoring the newest intact step. A step given by number never
    /// falls back
    #[arg(long)]
    strict: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    step: u64,
    snapshot: String,
    output: String,
    tensors: usize,
    bytes: u64,
    blobs: usize,
    chunks_read: u64,
    chunks_needed: u64,
    pages_read: u64,
    page_bytes_read: u64,
    requests: u64,
    bytes_read: u64,
    seconds: f64,
    skipped: Vec<Skipped>,
}

/// Newer step that is damaged.
#[derive(Debug, Serialize)]
struct Skipped {
    step: u64,
    snapshot: String,
    object: Option<String>,
    message: String,
}

impl Skipped {
    fn new(step: u64, snapshot: Id, error: &Error) -> Self {
        let object = error.object_name().map(str::to_owned);
        Self { step, snapshot: snapshot.to_hex(), object, message: error.to_string() }
    }
}

/// Number of times that a restore begins again because a job frees the step that is read.
const MOST_FREED: u32 = 16;

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let begun = Instant::now();
    let store = Store::open(&args.store)?;
    let progress = Progress::start(&store, "restoring");
    let fall_back = args.step == StepSelector::Latest && !args.strict;
    let mut skipped: Vec<Skipped> = Vec::new();
    let mut excluded: Vec<Id> = Vec::new();
    let mut first_error = None;
    let mut freed = 0;
    let mut report = loop {
        let snapshot = if fall_back {
            let (snapshot, passed) = match store.recover(&excluded) {
                Ok(found) => found,
                // No step is left. The error of the newest step is the most useful.
                Err(error) => return Err(first_error.unwrap_or(error)),
            };
            excluded.extend(passed.iter().map(|passed| passed.snapshot));
            skipped.extend(passed.iter().map(|passed| Skipped::new(passed.step, passed.snapshot, &passed.error)));
            snapshot
        } else {
            store.snapshot(args.step)?
        };
        let whole = args.tensor.is_empty() && args.slice.is_empty();
        progress.expect(|| whole.then(|| snapshot.inspect().chain().iter().map(|link| link.stored_bytes).fold(0, u64::saturating_add)));
        match restore(args, &snapshot) {
            // The index of the step is intact, its pages are damaged.
            Err(error) if fall_back && error.kind() == ErrorKind::Corrupt => {
                let id = snapshot.record().id;
                skipped.push(Skipped::new(snapshot.step(), id, &error));
                excluded.push(id);
                first_error.get_or_insert(error);
            }
            // A job has forgotten and freed the step meanwhile. There is a newer one.
            Err(error) if fall_back && error.is_given_up() && freed < MOST_FREED => freed += 1,
            other => break other?,
        }
    };
    drop(progress);

    let io = store.inner().io();
    (report.requests, report.bytes_read, report.seconds) = (io.requests, io.bytes_read, begun.elapsed().as_secs_f64());
    report.skipped = skipped;
    for skipped in &report.skipped {
        complain(&format!("warning: step {} cannot be rebuilt, restored step {} instead: {}", skipped.step, report.step, skipped.message));
    }
    let mut text = Text::default();
    text.fields(&[
        ("step", report.step.to_string()),
        ("output", report.output.clone()),
        ("tensors", format!("{} ({})", report.tensors, human_bytes(report.bytes))),
        ("blobs", report.blobs.to_string()),
        ("chunks", format!("{} read, {} needed", report.chunks_read, report.chunks_needed)),
        ("read", format!("{} in {} requests", human_bytes(io.bytes_read), io.requests)),
        ("seconds", format!("{:.2}", report.seconds)),
    ]);
    Outcome::new(&report, text)
}

/// Writes the output of one snapshot. The file appears whole or not at all.
fn restore(args: &Args, snapshot: &Snapshot) -> Result<Report> {
    let selected = select(args, snapshot)?;
    let mut chunks_needed = 0u64;
    for Selected { name, slice } in &selected {
        chunks_needed = chunks_needed.saturating_add(snapshot.inspect().chunks_of(name, slice)?);
    }
    let output = AtomicFile::create(&args.output)?;
    let bytes = snapshot.write_safetensors(&selected, &mut output.file())?;
    let blobs = match &args.blobs {
        Some(folder) => write_blobs(snapshot, folder)?,
        None => 0,
    };
    // Commit last: if the output file exists, the blobs exist, too.
    output.commit()?;
    let counts = snapshot.inspect().read_counts();
    Ok(Report {
        step: snapshot.step(),
        snapshot: snapshot.record().id.to_hex(),
        output: args.output.display().to_string(),
        tensors: selected.len(),
        bytes,
        blobs,
        chunks_read: counts.chunks,
        chunks_needed,
        pages_read: counts.pages,
        page_bytes_read: counts.page_bytes,
        requests: 0,
        bytes_read: 0,
        seconds: 0.0,
        skipped: Vec::new(),
    })
}

/// Selected tensors and slices, ascending by name.
fn select(args: &Args, snapshot: &Snapshot) -> Result<Vec<Selected>> {
    let tensors = snapshot.tensors();
    let everything = args.tensor.is_empty() && args.slice.is_empty();
    let mut selected: BTreeMap<String, Slice> = BTreeMap::new();
    if everything {
        selected.extend(tensors.iter().map(|tensor| (tensor.name.clone(), Slice::all())));
    }
    for pattern in &args.tensor {
        let glob = GlobBuilder::new(pattern).build().map_err(|e| Error::invalid(format!("--tensor: {e}")))?.compile_matcher();
        let matching = tensors.iter().filter(|tensor| glob.is_match(&tensor.name)).map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
        if matching.is_empty() {
            return Err(Error::not_found(format!("step {} has no tensor that matches `{pattern}`", snapshot.step())));
        }
        selected.extend(matching.into_iter().map(|name| (name, Slice::all())));
    }
    for slice in &args.slice {
        let tensor = snapshot.tensor(&slice.name)?;
        if selected.insert(tensor.name.clone(), slice.ranges.of(&tensor.shape)).is_some() {
            return Err(Error::invalid("the tensor is selected twice; a file holds one slice per tensor").tensor(tensor.name));
        }
    }
    Ok(selected.into_iter().map(|(name, slice)| Selected { name, slice }).collect())
}

fn write_blobs(snapshot: &Snapshot, folder: &Path) -> Result<usize> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder.display().to_string(), e))?;
    let blobs = snapshot.blobs()?;
    let names: Vec<(u32, &str)> = blobs.iter().map(|(rank, name)| (*rank, name.as_str())).collect();
    for some in names.chunks(BLOBS_AT_ONCE) {
        for ((rank, name), bytes) in some.iter().zip(snapshot.read_blobs(some)?) {
            let file = AtomicFile::create(&folder.join(file_name(*rank, name)))?;
            std::io::Write::write_all(&mut file.file(), &bytes).map_err(|e| Error::io(folder.display().to_string(), e).tensor(*name))?;
            file.commit()?;
        }
    }
    Ok(blobs.len())
}

/// Number of blobs that are read together.
const BLOBS_AT_ONCE: usize = 256;

/// File name of a blob. Unusual characters become `%XX`, and the rank comes first, so the name is never a path.
fn file_name(rank: u32, name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'.' | b'_' | b'-' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    format!("{rank}-{}", name.bytes().map(escape).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_paths() {
        assert_eq!(file_name(0, "rng_state-1.bin"), "0-rng_state-1.bin");
        assert_eq!(file_name(3, "../../x"), "3-..%2F..%2Fx");
        assert_eq!(file_name(0, ".."), "0-..");
        assert_eq!(file_name(0, "c:\\é\0%"), "0-c%3A%5C%C3%A9%00%25");
    }
}
