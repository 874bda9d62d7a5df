//! `tensorcask inspect`: describes a snapshot or a cask file from its indexes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::container::{CaskIndex, IndexDecoder, Progress};
use tensorcask::wire::{DirectoryTensor, HEADER_BYTES, Header};
use tensorcask::{Error, Limits, PreviousSave, Result, SaveTimes, StepSelector, StepTimes};

use crate::cask::{self, CaskBlob, CaskTensor};
use crate::decision::DecisionJson;
use crate::hex::{self, Region};
use crate::output::Outcome;
use crate::parse;
use crate::precision::PrecisionJson;
use crate::rounding::TensorRoundingRow;
use crate::text::{Text, human_bytes, human_seconds, human_shape};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Reads the headers and indexes of casks, not their tensors. The casks of a delta hold only changed chunks. `why` is the reason
for a base or a delta. `times` are those of the save, and of the save before it.

Example:
  tensorcask inspect runs/a --step 1000 --tensor model.wte.weight
  tensorcask inspect runs/a/casks/6f0c52d1b4a94b0c8e2d7a915f3e6c08.cask --hex"
)]
pub(crate) struct Args {
    /// Path or URL of a store, or path of a cask file
    #[arg(value_name = "STORE|FILE.cask")]
    object: String,
    /// Step number or `latest`
    #[arg(long, value_name = "N", value_parser = parse::at)]
    step: Option<StepSelector>,
    /// Describe only this tensor
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
    /// Print a hex dump of a cask file that names each byte
    #[arg(long, conflicts_with_all = ["step", "tensor"])]
    hex: bool,
}

#[derive(Debug, Serialize)]
struct FileReport<'a> {
    file: &'a str,
    cask: CaskReport,
}

#[derive(Debug, Serialize)]
struct HexReport<'a> {
    file: &'a str,
    regions: Vec<Region>,
}

#[derive(Debug, Serialize)]
struct StoreReport<'a> {
    store: &'a str,
    step: u64,
    snapshot: String,
    kind: &'static str,
    /// Reason for this kind; null if the writer stored none.
    decision: Option<DecisionJson>,
    /// Profile that `--precision auto` chose, and why; null for other precisions.
    precision: Option<PrecisionJson>,
    /// Times of the save, and of the save before it; null if the writer stored none.
    times: Option<TimesJson>,
    tensors: Vec<TensorRow>,
    /// How far tensors that were rounded are from what was saved.
    rounding: Vec<TensorRoundingRow>,
    casks: Vec<CaskReport>,
}

/// Times in milliseconds, and the time of the save since 1970; null if unknown.
#[derive(Debug, Serialize)]
struct TimesJson {
    written_ms: Option<u64>,
    encode_ms: Option<f64>,
    upload_ms: Option<f64>,
    previous: Option<PreviousJson>,
}

/// Times of the save before, in milliseconds.
#[derive(Debug, Serialize)]
struct PreviousJson {
    step: u64,
    #[serde(flatten)]
    times: StepTimes,
}

impl TimesJson {
    fn of(&SaveTimes { written_ms, encode_ms, upload_ms, previous }: &SaveTimes) -> Self {
        let previous = previous.map(|save| {
            let PreviousSave { step, stall_ms, encode_ms, upload_ms, save_ms } = save;
            PreviousJson { step, times: StepTimes { stall_ms, encode_ms, upload_ms, save_ms } }
        });
        Self { written_ms, encode_ms, upload_ms, previous }
    }
}

/// A tensor of the snapshot, whether its casks hold a part of it or not.
#[derive(Debug, Serialize)]
struct TensorRow {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    role: String,
    param: String,
    alias_of: Option<String>,
}

#[derive(Debug, Serialize)]
struct CaskReport {
    slot: Option<u32>,
    id: String,
    version: String,
    bytes: u64,
    alignment: u64,
    digest: String,
    tensors: Vec<CaskTensor>,
    blobs: Vec<CaskBlob>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let path = Path::new(&args.object);
    if !path.is_file() {
        return match args.hex {
            true => Err(Error::invalid("--hex goes with a cask file").object(&args.object)),
            false => inspect_store(args),
        };
    }
    if args.hex {
        return dump(args, path).map_err(|e| e.object(&args.object));
    }
    if args.step.is_some() {
        return Err(Error::invalid("a cask file has no steps: --step goes with a store").object(&args.object));
    }
    let index = read_index(path).map_err(|e| e.object(&args.object))?;
    let cask = CaskReport::new(&index, None, args.tensor.as_deref())?;
    if let (Some(name), []) = (&args.tensor, cask.tensors.as_slice()) {
        return Err(Error::not_found("the cask holds nothing of this tensor").object(&args.object).tensor(name));
    }
    let mut text = Text::default();
    cask.describe(&mut text);
    Outcome::new(&FileReport { file: &args.object, cask }, text)
}

/// Every byte of a cask file.
fn dump(args: &Args, path: &Path) -> Result<Outcome> {
    let index = read_index(path)?;
    let io = |e| Error::io(path.display().to_string(), e);
    let mut file = File::open(path).map_err(io)?;
    let mut read = |range: Range<u64>| {
        let mut bytes = Vec::new();
        let length = range.end.saturating_sub(range.start);
        file.seek(SeekFrom::Start(range.start)).and_then(|_| Read::by_ref(&mut file).take(length).read_to_end(&mut bytes)).map_err(io)?;
        Ok(bytes)
    };
    let regions = hex::regions(&index, &mut read)?;
    let mut text = Text::default();
    hex::describe(&regions, &mut text);
    Outcome::new(&HexReport { file: &args.object, regions }, text)
}

fn inspect_store(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.object)?;
    let snapshot = store.snapshot(args.step.unwrap_or(StepSelector::Latest))?;
    if let Some(name) = &args.tensor {
        snapshot.tensor(name)?;
    }
    let tensors = snapshot.tensors();
    let row = |tensor: &DirectoryTensor| TensorRow {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name(),
        shape: tensor.shape.clone(),
        role: tensor.role.clone(),
        param: tensor.param.clone(),
        alias_of: tensor.alias_of.and_then(|of| tensors.get(of)).map(|of| of.name.clone()),
    };
    let wanted = tensors.iter().filter(|tensor| args.tensor.as_ref().is_none_or(|name| *name == tensor.name));
    let rows: Vec<TensorRow> = wanted.map(row).collect();
    let mut casks = Vec::new();
    for (slot, index) in store.block_on(snapshot.inspect().indexes())? {
        casks.push(CaskReport::new(&index, Some(slot), args.tensor.as_deref())?);
    }

    let kind = snapshot.record().kind().name();
    let mut text = Text::default();
    text.line(format!("step {}, a {kind}", snapshot.step()));
    let decision = snapshot.inspect().decision().map(|decision| DecisionJson::of(&decision));
    if let Some(decision) = &decision {
        text.line(format!("why: {}", decision.line()));
    }
    let precision = snapshot.inspect().precision().map(|decision| PrecisionJson::of(&decision));
    if let Some(precision) = &precision {
        text.line(format!("precision: {}", precision.line()));
    }
    let times = snapshot.inspect().times();
    if let Some(times) = &times {
        text.line(format!("times: {}", describe_times(times)));
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let alias = row.alias_of.as_ref().map_or(String::new(), |of| format!("tied to {of}"));
            vec![row.name.clone(), row.dtype.to_owned(), human_shape(&row.shape), row.role.clone(), row.param.clone(), alias]
        })
        .collect();
    text.table(&["tensor", "dtype", "shape", "role", "param", ""], &cells);
    let mut rounding = snapshot.rounding()?;
    rounding.retain(|tensor| args.tensor.as_ref().is_none_or(|name| *name == tensor.name));
    let rounding: Vec<TensorRoundingRow> = rounding.iter().map(|tensor| TensorRoundingRow::of(snapshot.step(), tensor)).collect();
    if !rounding.is_empty() {
        text.line("");
        text.table(&TensorRoundingRow::HEADINGS, &rounding.iter().map(TensorRoundingRow::row).collect::<Vec<_>>());
    }
    casks.iter().for_each(|cask| cask.describe(&mut text));
    let snapshot_id = snapshot.record().id.to_hex();
    let store = &args.object;
    let step = snapshot.step();
    let report = StoreReport {
        store,
        step,
        snapshot: snapshot_id,
        kind,
        decision,
        precision,
        times: times.as_ref().map(TimesJson::of),
        tensors: rows,
        rounding,
        casks,
    };
    Outcome::new(&report, text)
}

fn describe_times(times: &SaveTimes) -> String {
    let time = |name: &str, ms: Option<f64>| ms.map(|ms| format!("{name} {}", human_seconds(ms / 1e3)));
    let list = |found: Vec<Option<String>>| found.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let own = list(vec![time("encode", times.encode_ms), time("upload", times.upload_ms)]);
    let previous = times.previous.map(|save| {
        let stages = [time("stall", save.stall_ms), time("encode", save.encode_ms), time("upload", save.upload_ms)];
        format!("step {} before: {}", save.step, list(stages.into_iter().chain([time("in all", save.save_ms)]).collect()))
    });
    [Some(own).filter(|own| !own.is_empty()), previous].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

impl CaskReport {
    fn new(index: &CaskIndex, slot: Option<u32>, tensor: Option<&str>) -> Result<Self> {
        let mut tensors = cask::tensors(index)?;
        tensors.retain(|found| tensor.is_none_or(|name| name == found.name));
        Ok(Self {
            slot,
            id: index.file().id.to_hex(),
            version: index.file().version.to_string(),
            bytes: index.file().bytes,
            alignment: index.file().alignment,
            digest: index.file().digest.to_hex(),
            tensors,
            blobs: cask::blobs(index),
        })
    }

    fn describe(&self, text: &mut Text) {
        let slot = self.slot.map_or(String::new(), |slot| format!(" in slot {slot}"));
        let size = human_bytes(self.bytes);
        text.line("");
        text.line(format!("cask {}{slot}: {size}, version {}, pages aligned to {} bytes", self.id, self.version, self.alignment));
        let rows: Vec<Vec<String>> = self.tensors.iter().map(CaskTensor::row).collect();
        text.table(&cask::HEADINGS, &rows);
        self.blobs.iter().for_each(|blob| text.line(blob.line()));
    }
}

/// Reads the header and the index of a cask file.
fn read_index(path: &Path) -> Result<CaskIndex> {
    let io = |e| Error::io(path.display().to_string(), e);
    let mut file = File::open(path).map_err(io)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    if file_bytes < HEADER_BYTES {
        return Err(Error::corrupt(format!("the cask is truncated: {file_bytes} bytes are fewer than its header")).clause("container 1"));
    }
    let limits = Limits::default();
    let mut read = |range: Range<u64>| {
        let length = range.end.saturating_sub(range.start);
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(range.start)).and_then(|_| Read::by_ref(&mut file).take(length).read_to_end(&mut bytes)).map_err(io)?;
        Ok::<_, Error>(bytes)
    };
    let header = Header::decode(&read(0..HEADER_BYTES)?)?;
    let mut decoder = IndexDecoder::new(header.id, file_bytes, limits);
    let index = loop {
        match decoder.poll()? {
            Progress::Needs(range) => decoder.push(range.start, read(range)?.into())?,
            Progress::Done(index) => break index,
        }
    };
    for (part, range) in index.missing_parts() {
        index.load_part(part, read(range)?.into())?;
    }
    Ok(index)
}
