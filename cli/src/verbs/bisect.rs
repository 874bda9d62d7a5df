//! `tensorcask bisect`: finds the first step whose statistics satisfy a condition.

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{Bisection, ChunkStatistics, MatchedStep, MatchedTensor, NamePatterns, Predicate, Result};

use crate::output::{Outcome, UnreadableStep, code_with};
use crate::progress::Progress;
use crate::tensor_row::TensorRow;
use crate::text::{Text, counted};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "PREDICATE compares columns with numbers: COLUMN, one of > >= < <= = !=, NUMBER; joined by `and` and `or`. `and` binds
tighter. Columns of a tensor: nan, positive_infinity, negative_infinity, zero, subnormal, min, max, sum, sum_squares, elements;
inf and nonfinite (sums of counts); norm (root of sum_squares); and changed, change_squares, change_norm, change_ulps since the
parent of a delta.

`bisect` reads the statistics of each step in ascending order and stops at the first step with a tensor that matches. Steps that
are damaged, have no statistics, or whose statistics do not decide PREDICATE are named: one of them may match earlier.

Example:
  tensorcask bisect runs/a --first 'nan > 0'
  tensorcask bisect runs/a --first 'norm > 1e4 or nonfinite > 0' --tensor 'layers.*'"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Condition on the statistics of a tensor, such as `nan > 0`
    #[arg(long, value_name = "PREDICATE", value_parser = predicate)]
    first: Predicate,
    /// Only tensors whose name matches
    #[arg(long, value_name = "GLOB", value_parser = crate::parse::names)]
    tensor: Option<NamePatterns>,
}

fn predicate(text: &str) -> Result<Predicate, String> {
    Predicate::parse(text).map_err(|e| e.message().to_owned())
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    /// Predicate as it was understood.
    predicate: String,
    /// First step that matches; null if no step does.
    first: Option<First>,
    /// Last step before `first` whose statistics were read and do not match.
    last_good: Option<u64>,
    /// Steps whose statistics were read.
    examined: u64,
    /// Whether no step was left out.
    certain: bool,
    /// Steps that lack statistics that decide the predicate.
    without_statistics: Vec<u64>,
    /// Steps that are damaged, or whose statistics are.
    unreadable: Vec<UnreadableStep>,
}

#[derive(Debug, Serialize)]
struct First {
    step: u64,
    snapshot: String,
    tensors: Vec<Match>,
}

#[derive(Debug, Serialize)]
struct Match {
    #[serde(flatten)]
    row: TensorRow,
    /// First chunk that matches on its own.
    first_chunk: Option<Chunk>,
}

/// Place of a chunk.
#[derive(Debug, Serialize)]
struct Chunk {
    shard_offset: Vec<u64>,
    shard_shape: Vec<u64>,
    chunk: u64,
    elements: u64,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let predicate = match &args.tensor {
        Some(names) => args.first.clone().of_tensors(names.clone()),
        None => args.first.clone(),
    };
    let progress = Progress::start(&store, "reading statistics");
    let found = store.history().bisect(&predicate)?;
    drop(progress);
    let certain = found.is_certain();
    let Bisection { first, last_good, examined, unmeasured, skipped } = found;
    let report = Report {
        store: &args.store,
        predicate: predicate.to_string(),
        first: first.map(First::of),
        last_good,
        examined,
        certain,
        without_statistics: unmeasured,
        unreadable: skipped.iter().map(|skipped| UnreadableStep::of(skipped.step, &skipped.error)).collect(),
    };
    let code = skipped.iter().fold(0, |code, skipped| code_with(code, &skipped.error));
    let text = report.describe();
    Ok(Outcome::new(&report, text)?.with_code(code))
}

impl First {
    fn of(found: MatchedStep) -> Self {
        let MatchedStep { step, snapshot, tensors } = found;
        Self { step, snapshot: snapshot.to_hex(), tensors: tensors.into_iter().map(|tensor| Match::of(step, tensor)).collect() }
    }
}

impl Match {
    fn of(step: u64, found: MatchedTensor) -> Self {
        let MatchedTensor { statistics, first_chunk } = found;
        let place = |ChunkStatistics { shard, chunk, elements, .. }: ChunkStatistics| Chunk {
            shard_offset: shard.offset,
            shard_shape: shard.shape,
            chunk,
            elements,
        };
        Self { row: TensorRow::of(step, statistics), first_chunk: first_chunk.map(place) }
    }

    fn cells(&self) -> Vec<String> {
        let mut cells = self.row.cells();
        cells.push(self.first_chunk.as_ref().map_or(String::new(), |chunk| match chunk.shard_offset.iter().all(|&start| start == 0) {
            true => chunk.chunk.to_string(),
            false => format!("{} of the shard at {:?}", chunk.chunk, chunk.shard_offset),
        }));
        cells
    }
}

impl Report<'_> {
    fn describe(&self) -> Text {
        let mut text = Text::default();
        match &self.first {
            None => text.line(format!("no match for {} in the statistics of {}", self.predicate, counted(self.examined, "step", "steps"))),
            Some(first) => {
                text.line(format!("step {} is the first with {}", first.step, self.predicate));
                let headings: Vec<&str> = TensorRow::HEADINGS.into_iter().chain(["first chunk"]).collect();
                text.table(&headings, &first.tensors.iter().map(Match::cells).collect::<Vec<_>>());
            }
        }
        match (self.last_good, &self.first) {
            (Some(step), Some(_)) => text.line(format!("last good step: {step}")),
            (None, Some(_)) => text.line("no earlier step is known to be good"),
            (_, None) => {}
        }
        let named = |steps: &[u64]| {
            let shown: Vec<String> = steps.iter().take(MAX_NAMED).map(u64::to_string).collect();
            let more = if steps.len() > MAX_NAMED { ", ..." } else { "" };
            format!("{} ({}{more})", counted(steps.len() as u64, "step", "steps"), shown.join(", "))
        };
        if !self.without_statistics.is_empty() {
            text.line(format!("not known for {}: no statistics that decide it; save with --statistics", named(&self.without_statistics)));
        }
        if !self.unreadable.is_empty() {
            let steps: Vec<u64> = self.unreadable.iter().map(UnreadableStep::step).collect();
            text.line(format!("not known for {}: damaged; run `tensorcask verify` to find all damage", named(&steps)));
        }
        text
    }
}

/// Maximum number of steps that a line names.
const MAX_NAMED: usize = 10;
