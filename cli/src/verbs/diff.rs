//! `tensorcask diff`: two steps, tensor by tensor, in bounded memory.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
use tensorcask::blocking::{Snapshot, Store};
use tensorcask::wire::DirectoryTensor;
use tensorcask::{At, Dtype, Error, Result, Slice};

use crate::compare::Difference;
use crate::output::Outcome;
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_shape};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Elements are compared bit by bit. For floats, `ulps` is the largest distance in units in the last place, pairs with
a NaN left out, and `NaN` counts those in B.

Example:
  tensorcask diff runs/a 1000 1001"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// A step, or `latest`
    #[arg(value_parser = parse::at)]
    a: At,
    /// The step to compare with it, or `latest`
    #[arg(value_parser = parse::at)]
    b: At,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    a: u64,
    b: u64,
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

/// Bytes of a tensor that are compared at once.
const WINDOW_BYTES: u64 = 64 << 20;

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let (a, b) = (store.snapshot(args.a)?, store.snapshot(args.b)?);
    let progress = Progress::start(&store, "comparing");
    let mut sides: BTreeMap<String, [Option<DirectoryTensor>; 2]> = BTreeMap::new();
    for (side, snapshot) in [&a, &b].into_iter().enumerate() {
        for tensor in snapshot.tensors() {
            let name = tensor.name.clone();
            sides.entry(name).or_default()[side] = Some(tensor);
        }
    }
    let mut rows = Vec::new();
    for pair in sides.into_values() {
        rows.extend(match pair {
            [Some(old), Some(new)] if old.dtype != new.dtype => Some(Row::without_numbers(new, "retyped")),
            [Some(old), Some(new)] if old.shape != new.shape => Some(Row::without_numbers(new, "reshaped")),
            [Some(_), Some(new)] => Some(Row::of(&compare(&a, &b, &new)?, new)),
            [Some(old), None] => Some(Row::without_numbers(old, "removed")),
            [None, Some(new)] => Some(Row::without_numbers(new, "added")),
            [None, None] => None,
        });
    }
    drop(progress);

    let sum = |of: fn(&Row) -> Option<u64>| rows.iter().filter_map(of).fold(0, u64::saturating_add);
    let (elements, changed, nan_b) = (sum(|row| row.elements), sum(|row| row.changed), sum(|row| row.nan_b));
    let (a, b) = (a.step(), b.step());
    let report = Report { store: &args.store, a, b, elements, changed, changed_share: share(changed, elements), nan_b, tensors: rows };
    let text = report.describe();
    Outcome::new(&report, text)
}

impl Row {
    fn without_numbers(tensor: DirectoryTensor, status: &'static str) -> Self {
        let (dtype, shape) = (tensor.dtype.name(), tensor.shape);
        Self { name: tensor.name, status, dtype, shape, elements: None, changed: None, changed_share: None, max_ulps: None, nan_b: None }
    }

    fn of(found: &Difference, tensor: DirectoryTensor) -> Self {
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
        // A tensor that stayed as it was is of interest only if it is not sound.
        let shown = self.tensors.iter().filter(|row| row.status != "same" || row.nan_b.unwrap_or(0) > 0);
        let cells = shown.map(|row| {
            let (dtype, shape) = (row.dtype.to_owned(), human_shape(&row.shape));
            let (share, ulps, nans) = (percent(row.changed_share), number(row.max_ulps), number(row.nan_b));
            vec![row.name.clone(), row.status.to_owned(), dtype, shape, share, ulps, nans]
        });
        let cells: Vec<Vec<String>> = cells.collect();
        let same = self.tensors.iter().filter(|row| row.status == "same").count();
        let mut text = Text::default();
        if !cells.is_empty() {
            text.table(&["tensor", "status", "dtype", "shape", ">changed", ">ulps", ">NaN"], &cells);
        }
        let share = percent(self.changed_share);
        text.line(format!("step {} to {}: {share} of {} elements changed; {same} tensors are the same", self.a, self.b, self.elements));
        text
    }
}

/// Both tensors, window by window.
fn compare(a: &Snapshot, b: &Snapshot, tensor: &DirectoryTensor) -> Result<Difference> {
    let mut difference = Difference::new(tensor.dtype);
    for ranges in windows(tensor.dtype, &tensor.shape) {
        let elements = ranges.iter().map(|range| range.end - range.start).product();
        let slice = Slice::ranges(ranges);
        let (old, new) = (a.read(&tensor.name, &slice)?, b.read(&tensor.name, &slice)?);
        if old.data.len() != new.data.len() {
            return Err(Error::invalid("two reads of one slice differ in length").tensor(&tensor.name));
        }
        difference.add(tensor.dtype, elements, &old.data, &new.data);
    }
    Ok(difference)
}

/// Boxes of at most about a window, which together cover a tensor, row-major.
fn windows(dtype: Dtype, shape: &[u64]) -> Box<dyn Iterator<Item = Vec<Range<u64>>> + '_> {
    let window_elements = WINDOW_BYTES * 8 / dtype.bits();
    let elements = |extents: &[u64]| extents.iter().fold(1u64, |product, &extent| product.saturating_mul(extent));
    if shape.contains(&0) {
        return Box::new(std::iter::empty());
    }
    // The first dimension of which one index fits; those before it go index by index.
    let cut = (0..shape.len()).find(|&at| elements(&shape[at + 1..]) <= window_elements);
    let Some(cut) = cut else { return Box::new(std::iter::once(vec![])) };
    let step = (window_elements / elements(&shape[cut + 1..])).clamp(1, shape[cut]);
    let per_row = shape[cut].div_ceil(step);
    Box::new((0..elements(&shape[..cut]) * per_row).map(move |window| {
        let (row, start) = (window / per_row, window % per_row * step);
        let before = (0..cut).map(|at| row / elements(&shape[at + 1..cut]) % shape[at]).map(|index| index..index + 1);
        let after = shape[cut + 1..].iter().map(|&extent| 0..extent);
        before.chain(std::iter::once(start..(start + step).min(shape[cut]))).chain(after).collect()
    }))
}

fn share(changed: u64, elements: u64) -> Option<f64> {
    (elements > 0).then(|| changed as f64 / elements as f64)
}

fn percent(share: Option<f64>) -> String {
    match share {
        None => "-".to_owned(),
        Some(share) if share > 0.0 && share < 0.0001 => "<0.01%".to_owned(),
        Some(share) => format!("{:.2}%", share * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_a_tensor_once() {
        let pairs = |ranges: Vec<Range<u64>>| ranges.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>();
        let of = |dtype, shape: &[u64]| windows(dtype, shape).map(pairs).collect::<Vec<_>>();
        let window = WINDOW_BYTES;
        assert_eq!(of(Dtype::F32, &[]), [vec![]], "a scalar");
        assert!(of(Dtype::F32, &[0, 3]).is_empty());
        assert_eq!(of(Dtype::F32, &[10, 20]), [[(0, 10), (0, 20)]]);
        assert_eq!(of(Dtype::U8, &[window + 1]), [[(0, window)], [(window, window + 1)]]);
        assert_eq!(of(Dtype::U8, &[3, window]), [0, 1, 2].map(|row| [(row, row + 1), (0, window)]));
        let long = of(Dtype::U8, &[2, 2, window + 1]);
        let expected = [(0, 0), (0, 1), (1, 0), (1, 1)]
            .into_iter()
            .flat_map(|(a, b)| [(0, window), (window, window + 1)].map(|columns| [(a, a + 1), (b, b + 1), columns]));
        assert_eq!(long, expected.collect::<Vec<_>>());
    }
}
