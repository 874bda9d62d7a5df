//! `tensorcask stats`: shows the statistics that saves added to their snapshots.

use std::path::PathBuf;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{ChunkStatistics, Error, NamePatterns, Result, StepSelector, TensorStatistics};

use crate::atomic::AtomicFile;
use crate::output::{Outcome, UnreadableStep, code_with};
use crate::parse;
use crate::progress::Progress;
use crate::tensor_row::TensorRow;
use crate::text::{Text, counted};

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
    #[arg(long, value_name = "GLOB", value_parser = parse::names)]
    tensor: Option<NamePatterns>,
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
            let Some(row) = TensorStatistics::of(rows).map(|found| TensorRow::of(step, found)) else { continue };
            let is_named = args.tensor.as_ref().is_none_or(|names| names.matches(&row.tensor));
            if is_named && args.filter.is_none_or(|filter| filter.holds(&row)) {
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

impl Filter {
    fn holds(self, row: &TensorRow) -> bool {
        let has = |count: Option<u64>| count.is_some_and(|count| count > 0);
        match self {
            Filter::Nan => has(row.nan),
            Filter::Inf => has(row.infinities()),
            Filter::Nonfinite => has(row.nan) || has(row.infinities()),
            Filter::Subnormal => has(row.subnormal),
            Filter::Zero => row.zero == Some(row.numbers),
            Filter::Unchanged => row.changed == Some(0),
        }
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
