//! `tensorcask stats`: shows the statistics that saves added to their snapshots.

use std::path::PathBuf;

use globset::GlobMatcher;
use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{ChangeStatistics, ChunkStatistics, Error, Result, StepSelector, ValueStatistics};

use crate::atomic::AtomicFile;
use crate::output::{Outcome, UnreadableStep, code_with};
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, counted, percent, share};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Only snapshots that were saved with statistics have rows: `tensorcask save --statistics`, `statistics=True` in Python. The
table has one row for each tensor and step. --parquet writes one row for each chunk.

`changed` and `change norm` refer to the parent of a delta. They are empty if the save did not load all bases of the tensor.

If a step is damaged, `stats` names the step and leaves it out.

Example:
  tensorcask stats runs/a --where nan
  tensorcask stats runs/a --step latest --tensor 'layers.*' --parquet stats.parquet"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Step number or `latest` [default: all steps]
    #[arg(long, value_name = "N", value_parser = parse::at)]
    step: Option<StepSelector>,
    /// Only tensors whose name matches
    #[arg(long, value_name = "GLOB", value_parser = parse::glob)]
    tensor: Option<GlobMatcher>,
    /// Only tensors with NaN, with infinities, with either (nonfinite), with subnormal elements, with nothing but zeros, or without
    /// a change since the parent
    #[arg(long = "where", value_name = "WHAT")]
    filter: Option<Filter>,
    /// Parquet file for the rows of the chunks of these tensors
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
}

/// Property of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Filter {
    Nan,
    Inf,
    Nonfinite,
    Subnormal,
    Zero,
    Unchanged,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    /// Steps that were looked at.
    steps: u64,
    /// Steps without statistics.
    without_statistics: Vec<u64>,
    /// Steps that are left out because they or their statistics are damaged.
    unreadable: Vec<UnreadableStep>,
    tensors: Vec<TensorRow>,
    /// File with the rows of the chunks; null without --parquet.
    parquet: Option<String>,
}

/// Statistics of a tensor at a step. Numbers are null for types that are not measured.
#[derive(Debug, Serialize)]
struct TensorRow {
    step: u64,
    tensor: String,
    role: String,
    dtype: &'static str,
    elements: u64,
    nan: Option<u64>,
    positive_infinity: Option<u64>,
    negative_infinity: Option<u64>,
    zero: Option<u64>,
    subnormal: Option<u64>,
    min: Option<f64>,
    max: Option<f64>,
    sum: Option<f64>,
    sum_squares: Option<f64>,
    exponents: Option<[u64; 16]>,
    reference_step: Option<u64>,
    changed: Option<u64>,
    change_squares: Option<f64>,
    change_ulps: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    // Report an empty folder as a missing store.
    store.history().run()?;
    let progress = Progress::start(&store, "reading statistics");
    let mut report =
        Report { store: &args.store, steps: 0, without_statistics: vec![], unreadable: vec![], tensors: vec![], parquet: None };
    let mut code = 0;
    let found = match args.step {
        Some(step) => vec![read(&store, step)?],
        None => {
            let survey = store.block_on(store.inner().history().survey(None, |snapshot| async move { Measured::of(&snapshot).await }))?;
            for skipped in &survey.skipped {
                code = code_with(code, &skipped.error);
                report.unreadable.push(UnreadableStep::of(skipped.step, &skipped.error));
            }
            survey.found
        }
    };
    let mut chunks: Vec<(u64, Vec<ChunkStatistics>)> = Vec::new();
    for (step, Measured { rows, has_tensors }) in found {
        report.steps += 1;
        if rows.is_empty() && has_tensors {
            report.without_statistics.push(step);
        }
        let mut wanted = Vec::new();
        for rows in rows.chunk_by(|a, b| a.tensor == b.tensor) {
            let Some(row) = TensorRow::of(step, rows) else { continue };
            let is_named = args.tensor.as_ref().is_none_or(|names| names.is_match(&row.tensor));
            if is_named && args.filter.is_none_or(|filter| row.is(filter)) {
                if args.parquet.is_some() {
                    wanted.extend_from_slice(rows);
                }
                report.tensors.push(row);
            }
        }
        chunks.push((step, wanted));
    }
    drop(progress);
    if let Some(path) = &args.parquet {
        let file = AtomicFile::create(path)?;
        let bytes = ChunkStatistics::parquet(&chunks)?;
        std::io::Write::write_all(&mut file.file(), &bytes).map_err(|e| Error::io(path.display().to_string(), e))?;
        file.commit()?;
        report.parquet = Some(path.display().to_string());
    }
    let text = report.describe();
    Ok(Outcome::new(&report, text)?.with_code(code))
}

/// Statistics of a snapshot.
struct Measured {
    rows: Vec<ChunkStatistics>,
    has_tensors: bool,
}

impl Measured {
    async fn of(snapshot: &tensorcask::Snapshot) -> Result<Self> {
        Ok(Self { rows: snapshot.inspect().statistics().await?, has_tensors: !snapshot.tensors().is_empty() })
    }
}

/// Reads the statistics of a step. Unlike a survey, fails if they are damaged.
fn read(store: &Store, step: StepSelector) -> Result<(u64, Measured)> {
    let snapshot = store.block_on(store.inner().snapshot(step))?;
    Ok((snapshot.step(), store.block_on(Measured::of(&snapshot))?))
}

impl TensorRow {
    const HEADINGS: [&str; 12] =
        [">step", "tensor", "role", ">elements", ">nan", ">inf", ">zero", ">min", ">max", ">norm", ">changed", ">change norm"];

    /// Adds up the chunks of a tensor; `None` without chunks.
    fn of(step: u64, chunks: &[ChunkStatistics]) -> Option<Self> {
        let first = chunks.first()?;
        let values: Option<ValueStatistics> = chunks.iter().map(|chunk| chunk.values).reduce(|a, b| Some(a?.and(b?)))?;
        let change: Option<ChangeStatistics> = chunks.iter().map(|chunk| chunk.change).reduce(|a, b| Some(a?.and(b?)))?;
        Some(Self {
            step,
            tensor: first.tensor.clone(),
            role: first.role.clone(),
            dtype: first.dtype.name(),
            elements: chunks.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.elements)),
            nan: values.map(|values| values.nan),
            positive_infinity: values.map(|values| values.positive_infinity),
            negative_infinity: values.map(|values| values.negative_infinity),
            zero: values.map(|values| values.zero),
            subnormal: values.map(|values| values.subnormal),
            min: values.and_then(|values| values.min),
            max: values.and_then(|values| values.max),
            sum: values.and_then(|values| values.sum),
            sum_squares: values.and_then(|values| values.squares),
            exponents: values.map(|values| values.exponents),
            reference_step: change.and(first.reference_step),
            changed: change.map(|change| change.changed),
            change_squares: change.and_then(|change| change.squares),
            change_ulps: change.map(|change| change.ulps),
        })
    }

    fn infinities(&self) -> Option<u64> {
        Some(self.positive_infinity?.saturating_add(self.negative_infinity?))
    }

    fn is(&self, filter: Filter) -> bool {
        let has = |count: Option<u64>| count.is_some_and(|count| count > 0);
        match filter {
            Filter::Nan => has(self.nan),
            Filter::Inf => has(self.infinities()),
            Filter::Nonfinite => has(self.nan) || has(self.infinities()),
            Filter::Subnormal => has(self.subnormal),
            Filter::Zero => self.zero == Some(self.elements),
            Filter::Unchanged => self.changed == Some(0),
        }
    }

    fn cells(&self) -> Vec<String> {
        let count = |count: Option<u64>| count.map_or(String::new(), |count| count.to_string());
        let number = |number: Option<f64>| number.map_or(String::new(), |number| format!("{number:.4e}"));
        let part = |part: Option<u64>| part.map_or(String::new(), |part| percent(share(part, self.elements)));
        vec![
            self.step.to_string(),
            self.tensor.clone(),
            self.role.clone(),
            self.elements.to_string(),
            count(self.nan),
            count(self.infinities()),
            part(self.zero),
            number(self.min),
            number(self.max),
            number(self.sum_squares.map(f64::sqrt)),
            part(self.changed),
            number(self.change_squares.map(f64::sqrt)),
        ]
    }
}

impl Report<'_> {
    fn describe(&self) -> Text {
        let mut text = Text::default();
        match self.tensors.as_slice() {
            [] => text.line(format!("no such tensors in {}", counted(self.steps, "step", "steps"))),
            rows => text.table(&TensorRow::HEADINGS, &rows.iter().map(TensorRow::cells).collect::<Vec<_>>()),
        }
        if !self.without_statistics.is_empty() {
            let steps = counted(self.without_statistics.len() as u64, "step has", "steps have");
            text.line(format!("{steps} no statistics: save with --statistics"));
        }
        if !self.unreadable.is_empty() {
            let steps = counted(self.unreadable.len() as u64, "step is", "steps are");
            text.line(format!("{steps} damaged and left out: run `tensorcask verify` to find all damage"));
        }
        if let Some(path) = &self.parquet {
            text.line(format!("wrote {path}"));
        }
        text
    }
}
