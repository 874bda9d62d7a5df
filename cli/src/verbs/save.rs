//! `tensorcask save`: saves the state in safetensors files as a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Map, Value};
use tensorcask::blocking::Store;
use tensorcask::codec::{CodecRules, ObjectiveSetting};
use tensorcask::interchange::safetensors::Files;
use tensorcask::{
    BaseKeeping, Blob, Claim, Error, ExistingStep, FiniteCheck, Metadata, ObjectiveReport, Policy, Precision, Result, RoleRules,
    SavedSnapshot, WriterOptions,
};

use crate::decision::DecisionJson;
use crate::output::{Outcome, complain};
use crate::parse;
use crate::precision::PrecisionJson;
use crate::progress::Progress;
use crate::rounding::RoundingJson;
use crate::text::{Text, human_bytes, human_ratio, ratio};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "All files together are one state; a tensor name in two files is an error. `save` creates the store if it does not exist, but
not the bucket. If a job saves to this store, `save` is refused: it would end that job.

`stored` is the size of the encoded tensors and blobs, in parentheses with directory, manifest and log entry (`stored_bytes`
and `written_bytes` in JSON). `rounding` is `none (lossless)` unless --precision rounds tensors.

Example:
  tensorcask save runs/a --step 1000 --policy intermittent --every 8 --user loss=2.31 model.safetensors optimizer.safetensors
  tensorcask save runs/a --step 2000 --precision near --precision 'exp_avg_sq=loguniform:8<=0.05' state.safetensors"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Training step
    #[arg(long, value_name = "N")]
    step: u64,
    /// Policy for bases and deltas. `full` writes only bases. The other policies write deltas against the first base (one_shot),
    /// the previous snapshot (consecutive), the last base (intermittent) or the better of these two (adaptive). `adaptive`
    /// writes a base when a delta would save little, or when the chain would be larger than 3 bases
    #[arg(long, default_value = "adaptive", value_parser = ["adaptive", "full", "one_shot", "consecutive", "intermittent"])]
    policy: String,
    /// Number of snapshots from one base to the next, for `intermittent` [default: 8]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// Metadata of the step: a number, true, false, or text
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::user)]
    user: Vec<(String, Value)>,
    /// File to store as opaque bytes with the tensors
    #[arg(long, value_name = "NAME=FILE", value_parser = parse::blob)]
    blob: Vec<(String, String)>,
    /// Goal for choosing codecs: smallest, balanced, fastest, or three weights for size, speed and precision; or auto,
    /// which measures encoding and uploading and makes the save durable as early as possible
    #[arg(long, value_name = "NAME|W1,W2,W3", default_value = "balanced", value_parser = parse::objective)]
    objective: ObjectiveSetting,
    /// Codec of matching tensors, such as tc.bitmask, instead of the choice by the objective. PATTERN is a role or a glob of
    /// names. A chunk that this codec cannot encode, such as a chunk of a base for tc.bitmask, gets another codec.
    /// Repeatable; the last match wins
    #[arg(long, value_name = "PATTERN=CODEC", value_parser = parse::codec)]
    codec: Vec<String>,
    /// Precision of stored tensors: a profile (lossless, near, compact), auto, which chooses one of them by measured errors and
    /// the stage of the training, or PATTERN=SETTING. PATTERN is a role or a glob of names. SETTING is loguniform:STEPS,
    /// remainder:BITS, cluster, kmeans, blockwise8 or lossless; append `<=X` to bound the relative error. Of several settings,
    /// as in A|B, the weights of --objective choose one for each tensor. Repeatable; the last match wins
    #[arg(long, value_name = "PROFILE|PATTERN=SETTING", value_parser = parse::precision)]
    precision: Vec<String>,
    /// Role (model, master, exp_avg, ...) and parameter of matching tensors, instead of those guessed from the names.
    /// The tensors of one parameter are stored together. A `*` in PARAM is replaced by the match of the `*` in GLOB, as
    /// in 'fp32copy.*=master:*'. Repeatable; the last match wins
    #[arg(long, value_name = "GLOB=ROLE[:PARAM]", value_parser = parse::role)]
    role: Vec<String>,
    /// Replace an existing step with other content; without this option that is an error
    #[arg(long)]
    replace: bool,
    /// Take the store over from a job that saves to it: the next save of that job fails with `fenced`
    #[arg(long)]
    take_over: bool,
    /// Add statistics of each chunk (NaN, extremes, sums, exponents) to the snapshot; `tensorcask stats` shows them
    #[arg(long)]
    statistics: bool,
    /// Check parameters and moments for NaN and infinities: `finite` refuses such a state, `tag` saves and marks it
    #[arg(long, value_name = "CHECK", value_parser = ["finite", "tag"])]
    check: Option<String>,
    /// Parameters that are not trained: no warning if they stay the same. Repeatable
    #[arg(long, value_name = "GLOB", value_parser = parse::frozen)]
    frozen: Vec<String>,
    /// Do not decode and check each chunk before storing it
    #[arg(long)]
    no_verify_after_encode: bool,
    /// Safetensors files, or the `*.index.json` of a sharded model
    #[arg(required = true, value_name = "FILE.safetensors")]
    files: Vec<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    step: u64,
    snapshot: String,
    sequence: u64,
    kind: &'static str,
    parent_step: Option<u64>,
    tensor_bytes: u64,
    /// Bytes of casks: encoded tensors and blobs.
    stored_bytes: u64,
    /// Bytes of everything that the save wrote: casks, directory, manifest, log entry and, now and then, a catalog.
    written_bytes: u64,
    /// `tensor_bytes` over `stored_bytes`.
    ratio: Option<f64>,
    chunks: BTreeMap<String, u64>,
    decision: DecisionJson,
    /// Rounding report; null if nothing was rounded.
    rounding: Option<RoundingJson>,
    /// Profile that `--precision auto` chose, and why; null for other precisions.
    precision: Option<PrecisionJson>,
    /// Measurements and choices of `--objective auto`; null for other objectives.
    objective: Option<ObjectiveJson>,
    /// Whether all parameters and moments are finite; null without a check.
    finite: Option<bool>,
    /// Trained parameters with the content of at least the last two steps before.
    unchanged: Vec<Unchanged>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Unchanged {
    tensor: String,
    since_step: u64,
}

#[derive(Debug, Serialize)]
struct ObjectiveJson {
    /// Number of windows by objective.
    windows: BTreeMap<String, u64>,
    encode_bytes_per_second: Option<f64>,
    upload_bytes_per_second: Option<f64>,
    #[serde(skip)]
    line: String,
}

impl ObjectiveJson {
    fn of(report: ObjectiveReport) -> Self {
        let line = format!("auto: {report}");
        let ObjectiveReport { windows, encode_bytes_per_second, upload_bytes_per_second } = report;
        Self { windows, encode_bytes_per_second, upload_bytes_per_second, line }
    }
}

impl Args {
    pub(crate) fn check(&self) -> Result<(), String> {
        Policy::from_name(&self.policy, self.every).map_err(|e| e.message().to_owned())?;
        let mut seen = BTreeSet::new();
        let names = self.user.iter().map(|(key, _)| ("--user", key)).chain(self.blob.iter().map(|(name, _)| ("--blob", name)));
        let mut twice = names.filter(|name| !seen.insert(*name));
        twice.next().map_or(Ok(()), |(what, name)| Err(format!("{what} `{}` was given twice", name.escape_debug())))
    }
}

pub(crate) fn run(args: Args) -> Result<Outcome> {
    let begun = Instant::now();
    // Check the whole input before creating or taking over a store.
    let files = Files::open(&args.files)?;
    let tensors = files.tensors()?;
    let blobs = args.blob.iter().map(|(name, path)| {
        let bytes = std::fs::read(path).map_err(|e| Error::io(path.as_str(), e))?;
        Ok(Blob::new(name.as_str(), bytes))
    });
    let blobs: Vec<Blob<'_>> = blobs.collect::<Result<_>>()?;
    let metadata = Metadata { user: Map::from_iter(args.user), file: files.metadata()? };

    let store = Store::open(&args.store)?;
    let progress = Progress::start(&store, "saving");
    let mut writer = store.writer_with(WriterOptions {
        policy: Policy::from_name(&args.policy, args.every)?,
        // This process saves once and needs no base in memory.
        base_cache: BaseKeeping::None,
        objective: args.objective,
        codecs: CodecRules::parse(args.codec.iter().map(String::as_str))?,
        roles: RoleRules::parse(args.role.iter().map(String::as_str))?,
        precision: Precision::parse(args.precision.iter().map(String::as_str))?,
        verify_after_encode: !args.no_verify_after_encode,
        statistics: args.statistics,
        check: args.check.as_deref().map_or(Ok(FiniteCheck::Off), FiniteCheck::from_name)?,
        frozen: args.frozen,
        recall: true,
        claim: if args.take_over { Claim::OnceTakingOver } else { Claim::Once },
        existing_step: if args.replace { ExistingStep::Replace } else { ExistingStep::Refuse },
        ..WriterOptions::default()
    })?;
    let before = store.inner().io().bytes_written;
    let saved = writer.save(args.step, &tensors, &blobs, &metadata)?;
    let written_bytes = store.inner().io().bytes_written.saturating_sub(before);
    drop(progress);

    let report = Report {
        step: saved.step,
        snapshot: saved.id.to_hex(),
        sequence: saved.sequence,
        kind: saved.kind.name(),
        parent_step: parent_step(&store, &saved),
        tensor_bytes: saved.tensor_bytes,
        stored_bytes: saved.stored_bytes,
        written_bytes,
        ratio: ratio(saved.tensor_bytes, saved.stored_bytes),
        chunks: saved.chunks,
        decision: DecisionJson::of(&saved.decision),
        rounding: saved.rounding.as_ref().map(RoundingJson::of),
        precision: saved.precision.as_ref().map(PrecisionJson::of),
        objective: saved.objective.map(ObjectiveJson::of),
        finite: saved.finite,
        unchanged: saved.unchanged.into_iter().map(|found| Unchanged { tensor: found.tensor, since_step: found.since_step }).collect(),
        seconds: begun.elapsed().as_secs_f64(),
    };
    let text = describe(&report);
    Outcome::new(&report, text)
}

/// Step of the parent of a delta. The snapshot is committed already, so a failure here is only a warning.
fn parent_step(store: &Store, saved: &SavedSnapshot) -> Option<u64> {
    saved.parent?;
    match store.snapshot(saved.step) {
        Ok(snapshot) if snapshot.record().id == saved.id => snapshot.inspect().chain().get(1).map(|parent| parent.record.step),
        Ok(_) => None,
        Err(e) => {
            complain(&format!("warning: the step was saved, but opening it to show its parent failed: {e}"));
            None
        }
    }
}

fn describe(report: &Report) -> Text {
    let kind = match report.parent_step {
        Some(parent) => format!("{} on step {parent}", report.kind),
        None => report.kind.to_owned(),
    };
    let chunks: Vec<String> = report.chunks.iter().map(|(codec, count)| format!("{codec} {count}")).collect();
    let rounding = report.rounding.as_ref().map_or_else(|| "none (lossless)".to_owned(), RoundingJson::line);
    let finite = match report.finite {
        None => "not known",
        Some(true) => "yes",
        Some(false) => "no: NaN or infinities in parameters or moments",
    };
    let mut text = Text::default();
    let mut fields = vec![
        ("step", report.step.to_string()),
        ("kind", kind),
        ("why", report.decision.line()),
        ("tensors", human_bytes(report.tensor_bytes)),
        ("stored", format!("{} ({} with metadata)", human_bytes(report.stored_bytes), human_bytes(report.written_bytes))),
        ("ratio", human_ratio(report.ratio)),
        ("chunks", chunks.join(", ")),
        ("rounding", rounding),
        ("finite", finite.to_owned()),
    ];
    fields.extend(report.precision.as_ref().map(|precision| ("precision", precision.line().to_owned())));
    fields.extend(report.objective.as_ref().map(|objective| ("objective", objective.line.clone())));
    fields.push(("seconds", format!("{:.2}", report.seconds)));
    text.fields(&fields);
    text
}
