//! `tensorcask diff`: compares two steps tensor by tensor, in bounded memory.

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::{Result, StepSelector};

use crate::compare::Difference;
use crate::output::Outcome;
use crate::pair::{Described, Pair};
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_shape, percent, share};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Compares elements bit by bit. For floats, `ulps` is the largest distance in units in the last place, without pairs that
contain a NaN. `NaN` is the number of NaNs in B. If a step was saved twice, `diff` compares its newest
snapshot; the last line names the ids of both snapshots.

Example:
  tensorcask diff runs/a 1000 1001"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Step number or `latest`
    #[arg(value_parser = parse::at)]
    a: StepSelector,
    /// Step to compare with A: a number or `latest`
    #[arg(value_parser = parse::at)]
    b: StepSelector,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    a: u64,
    b: u64,
    /// Id of the compared snapshot of step `a`. A step that was saved again has a new snapshot.
    a_snapshot: String,
    b_snapshot: String,
    elements: u64,
    changed: u64,
    changed_share: Option<f64>,
    nan_b: u64,
    tensors: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    status: &'static str,
    dtype: &'static str,
    shape: Vec<u64>,
    elements: Option<u64>,
    changed: Option<u64>,
    changed_share: Option<f64>,
    max_ulps: Option<u64>,
    nan_b: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let a = store.snapshot(args.a)?;
    let b = store.snapshot(args.b)?;
    let progress = Progress::start(&store, "comparing");
    let pair = Pair::Snapshots([&a, &b]);
    let mut rows = Vec::new();
    for (tensor, status) in pair.tensors() {
        rows.push(match status {
            Some(status) => Row::without_numbers(tensor, status),
            None => {
                let mut found = Difference::new(tensor.dtype);
                pair.each_window(&tensor, |elements, old, new| found.add(tensor.dtype, elements, old, new))?;
                Row::of(&found, tensor)
            }
        });
    }
    drop(progress);

    let sum = |of: fn(&Row) -> Option<u64>| rows.iter().filter_map(of).fold(0, u64::saturating_add);
    let elements = sum(|row| row.elements);
    let changed = sum(|row| row.changed);
    let nan_b = sum(|row| row.nan_b);
    let report = Report {
        store: &args.store,
        a: a.step(),
        b: b.step(),
        a_snapshot: a.record().id.to_hex(),
        b_snapshot: b.record().id.to_hex(),
        elements,
        changed,
        changed_share: share(changed, elements),
        nan_b,
        tensors: rows,
    };
    let text = report.describe();
    Outcome::new(&report, text)
}

impl Row {
    fn without_numbers(tensor: Described, status: &'static str) -> Self {
        let dtype = tensor.dtype.name();
        let shape = tensor.shape;
        Self { name: tensor.name, status, dtype, shape, elements: None, changed: None, changed_share: None, max_ulps: None, nan_b: None }
    }

    fn of(found: &Difference, tensor: Described) -> Self {
        Self {
            elements: Some(found.elements),
            changed: Some(found.changed),
            changed_share: share(found.changed, found.elements),
            max_ulps: found.max_ulps,
            nan_b: found.nans,
            ..Self::without_numbers(tensor, if found.changed == 0 { "same" } else { "changed" })
        }
    }
}

impl Report<'_> {
    fn describe(&self) -> Text {
        let number = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
        // Show an unchanged tensor only if it contains NaNs.
        let shown = self.tensors.iter().filter(|row| row.status != "same" || row.nan_b.unwrap_or(0) > 0);
        let cells = shown.map(|row| {
            let dtype = row.dtype.to_owned();
            let shape = human_shape(&row.shape);
            let share = percent(row.changed_share);
            let ulps = number(row.max_ulps);
            let nans = number(row.nan_b);
            vec![row.name.clone(), row.status.to_owned(), dtype, shape, share, ulps, nans]
        });
        let cells: Vec<Vec<String>> = cells.collect();
        let same = self.tensors.iter().filter(|row| row.status == "same").count();
        let mut text = Text::default();
        if !cells.is_empty() {
            text.table(&["tensor", "status", "dtype", "shape", ">changed", ">ulps", ">NaN"], &cells);
        }
        let share = percent(self.changed_share);
        let side = |step: u64, snapshot: &str| format!("step {step} (snapshot {snapshot:.8})");
        let a = side(self.a, &self.a_snapshot);
        let b = side(self.b, &self.b_snapshot);
        text.line(format!("{a} to {b}: {share} of {} elements changed; {same} tensors are the same", self.elements));
        text
    }
}
