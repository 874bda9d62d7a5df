//! Sums of statistics over the tensors of a role, or of a role in a layer.

use tensorcask::{ChangeStatistics, ChunkStatistics, RoundingReport, ValueStatistics};

use super::layers::Layers;

/// Statistics of a tensor: the sum over its chunks. Numbers are `None` as in `tensorcask stats`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorTotal {
    /// Number of numbers, which the counts cover: a complex element has two.
    pub numbers: u64,
    pub values: Option<ValueStatistics>,
    pub change: Option<ChangeStatistics>,
}

impl TensorTotal {
    pub(crate) fn of(chunks: &[ChunkStatistics]) -> Self {
        Self {
            numbers: chunks.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.numbers())),
            values: chunks.iter().map(|chunk| chunk.values).reduce(|a, b| Some(a?.and(b?))).flatten(),
            change: chunks.iter().map(|chunk| chunk.change).reduce(|a, b| Some(a?.and(b?))).flatten(),
        }
    }

    pub(crate) fn norm(&self) -> Option<f64> {
        Some(self.values?.squares?.sqrt())
    }

    /// Norm of the change over the norm.
    pub(crate) fn update(&self) -> Option<f64> {
        ratio(self.change?.squares?, self.values?.squares?)
    }
}

/// Sums over tensors.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sums {
    /// Sum of squares, if any tensor is measured.
    squares: Option<f64>,
    /// Sums of squares of the change and of the values, over the tensors whose change is known.
    changed: Option<[f64; 2]>,
    pub nonfinite: u64,
}

impl Sums {
    pub(crate) fn add(&mut self, total: &TensorTotal) {
        let Some(values) = total.values else { return };
        self.nonfinite = self.nonfinite.saturating_add(nonfinite(&values));
        let Some(squares) = values.squares else { return };
        self.squares = Some(self.squares.unwrap_or(0.0) + squares);
        if let Some(change) = total.change.and_then(|change| change.squares) {
            let [changes, all] = self.changed.unwrap_or_default();
            self.changed = Some([changes + change, all + squares]);
        }
    }

    pub(crate) fn norm(&self) -> Option<f64> {
        self.squares.map(|squares| short(squares.sqrt()))
    }

    pub(crate) fn update(&self) -> Option<f64> {
        let [change, all] = self.changed?;
        ratio(change, all).map(short)
    }
}

/// A role at a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct RoleTotal {
    pub tensor_bytes: u64,
    pub stored_bytes: u64,
    pub sums: Sums,
    pub exponents: Option<[u64; 16]>,
    pub rounding: Option<RoundingReport>,
    /// One entry for each row of the heat maps; empty without statistics.
    pub layers: Vec<Sums>,
}

impl RoleTotal {
    pub(crate) fn add(&mut self, total: &TensorTotal, row: usize, layers: &Layers) {
        self.sums.add(total);
        self.layers.resize(layers.rows(), Sums::default());
        if let Some(layer) = self.layers.get_mut(row) {
            layer.add(total);
        }
        if let Some(values) = total.values {
            let exponents = self.exponents.get_or_insert_default();
            for (all, more) in exponents.iter_mut().zip(values.exponents) {
                *all = all.saturating_add(more);
            }
        }
    }
}

/// Number of NaN and infinities.
pub(crate) fn nonfinite(values: &ValueStatistics) -> u64 {
    values.nan.saturating_add(values.positive_infinity).saturating_add(values.negative_infinity)
}

fn ratio(change: f64, all: f64) -> Option<f64> {
    (all > 0.0).then(|| (change / all).sqrt())
}

/// Rounds to six digits: charts show no more, and the page is half as large.
fn short(number: f64) -> f64 {
    format!("{number:.5e}").parse().unwrap_or(number)
}
