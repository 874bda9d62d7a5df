//! `tensorcask save`: a state, held in safetensors files, becomes a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Map, Value};
use tensorcask::blocking::Store;
use tensorcask::codec::Objective;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{BaseKeeping, Blob, Error, ExistingStep, Metadata, Policy, Precision, Result, Saved, TensorView, WriterOptions};

use crate::decision::DecisionJson;
use crate::output::{Outcome, complain};
use crate::parse::{self, RoleRule};
use crate::progress::Progress;
use crate::rounding::RoundingJson;
use crate::text::{Text, human_bytes, human_ratio, ratio};

#[derive(Debug, clap::Args)]
#[command(after_help = "All files together are one state: a tensor name that stands in two of them is an error. The store is created
if it is not there. Saving takes the store over: a job that was writing to it is told so, and stops.

Example:
  tensorcask save runs/a --step 1000 --policy intermittent --every 8 --user loss=2.31 model.safetensors optimizer.safetensors
  tensorcask save runs/a --step 2000 --precision near --precision 'exp_avg_sq=loguniform:8<=0.05' state.safetensors")]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// The training step
    #[arg(long, value_name = "N")]
    step: u64,
    /// When to write a whole base; otherwise a delta is written, against the first base (one_shot), the last snapshot
    /// (consecutive) or the last base (intermittent, adaptive; the latter writes a base when a delta would save little)
    #[arg(long, default_value = "adaptive", value_parser = ["adaptive", "full", "one_shot", "consecutive", "intermittent"])]
    policy: String,
    /// Snapshots from one base to the next, for `intermittent` [default: 8]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// A fact about the step: a number, true, false, or else text
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::user)]
    user: Vec<(String, Value)>,
    /// A file to keep as opaque bytes beside the tensors
    #[arg(long, value_name = "NAME=FILE", value_parser = parse::blob)]
    blob: Vec<(String, String)>,
    /// What codecs are chosen for: smallest, balanced, fastest, or three weights of size, speed and precision
    #[arg(long, value_name = "NAME|W1,W2,W3", default_value = "balanced", value_parser = parse::objective)]
    objective: Objective,
    /// How exactly tensors are stored: lossless, near, compact, or PATTERN=SETTING, with a role or a glob of names, and one of loguniform:STEPS,
    /// remainder:BITS, cluster, kmeans, blockwise8, lossless; `<=X` behind it bounds the relative error. May be given again: the last that
    /// fits a tensor counts
    #[arg(long, value_name = "PROFILE|PATTERN=SETTING", value_parser = parse::precision)]
    precision: Vec<String>,
    /// What tensors with such names are to training (model, master, exp_avg, ...), instead of what their names tell, and of which parameter:
    /// all that is kept of one parameter is stored together. A `*` in PARAM stands for what that of the glob stands for, as in
    /// 'fp32copy.*=master:*'; the last that fits counts
    #[arg(long, value_name = "GLOB=ROLE[:PARAM]", value_parser = parse::role)]
    role: Vec<RoleRule>,
    /// Replace the step if it is saved already with another content; without this, that is an error
    #[arg(long)]
    replace: bool,
    /// Do not decode each chunk again before it is stored
    #[arg(long)]
    no_verify_after_encode: bool,
    /// The state: safetensors files, or `*.index.json` of a sharded model
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
    /// Of what was rounded.
    rounding: Option<RoundingJson>,
    seconds: f64,
}

impl Args {
    pub(crate) fn check(&self) -> Result<(), String> {
        Policy::from_name(&self.policy, self.every).map_err(|e| e.message().to_owned())?;
        let mut seen = BTreeSet::new();
        let names = self.user.iter().map(|(key, _)| ("--user", key)).chain(self.blob.iter().map(|(name, _)| ("--blob", name)));
        let mut twice = names.filter(|name| !seen.insert(*name));
        twice.next().map_or(Ok(()), |(what, name)| Err(format!("{what} `{}` is given twice", name.escape_debug())))
    }
}

pub(crate) fn run(args: Args) -> Result<Outcome> {
    let begun = Instant::now();
    // All that can be wrong with the input is found before a store is created or taken over.
    let files = Files::open(&args.files)?;
    let tensors = files.tensors()?.into_iter().map(|tensor| {
        let given = args.role.iter().rev().find_map(|rule| rule.give(tensor.name(), tensor.param()));
        match given {
            Some((role, param)) => tensor.with_role(role, param),
            None => tensor,
        }
    });
    let tensors: Vec<TensorView<'_>> = tensors.collect();
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
        // This process saves once: a base in memory would serve nobody.
        base_cache: BaseKeeping::None,
        objective: args.objective,
        precision: Precision::parse(args.precision.iter().map(String::as_str))?,
        verify_after_encode: !args.no_verify_after_encode,
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
        seconds: begun.elapsed().as_secs_f64(),
    };
    let text = describe(&report);
    Outcome::new(&report, text)
}

/// The step of a delta's parent. The snapshot is committed: not to know this is no failure.
fn parent_step(store: &Store, saved: &Saved) -> Option<u64> {
    saved.parent?;
    match store.snapshot(saved.step) {
        Ok(snapshot) if snapshot.record().id == saved.id => snapshot.chain().get(1).map(|parent| parent.record.step),
        Ok(_) => None,
        Err(e) => {
            complain(&format!("warning: the step is saved, but it could not be opened to show its parent: {e}"));
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
    let mut text = Text::default();
    text.fields(&[
        ("step", report.step.to_string()),
        ("kind", kind),
        ("why", report.decision.line()),
        ("tensors", human_bytes(report.tensor_bytes)),
        ("stored", format!("{} ({} with metadata)", human_bytes(report.stored_bytes), human_bytes(report.written_bytes))),
        ("ratio", human_ratio(report.ratio)),
        ("chunks", chunks.join(", ")),
        ("rounding", rounding),
        ("seconds", format!("{:.2}", report.seconds)),
    ]);
    text
}
