//! The data in a report, as the scripts of the page read them.

use serde::Serialize;
use tensorcask::StepTimes;

use crate::rounding::RoundingJson;

/// Limits of a report. The page states them.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Bounds {
    /// Newest snapshots that are listed and whose statistics are read.
    pub snapshots: usize,
    /// Columns of the charts of roles and layers.
    pub steps: usize,
    /// Rows of the heat maps: layers, or runs of neighbouring layers.
    pub layers: usize,
    /// Roles with charts of their own.
    pub roles: usize,
    /// Rows of the table of tensors.
    pub tensors: usize,
    /// Rows of the tables of non-finite tensors, of rounding and of problems.
    pub rows: usize,
    /// Characters of a name.
    pub name: usize,
}

impl Bounds {
    pub(crate) const DEFAULT: Self = Self { snapshots: 2000, steps: 300, layers: 100, roles: 12, tensors: 20_000, rows: 1000, name: 400 };

    /// A name of at most `self.name` characters.
    pub(crate) fn name(&self, name: &str) -> String {
        match name.char_indices().nth(self.name) {
            None => name.to_owned(),
            Some((end, _)) => format!("{}…", name.get(..end).unwrap_or_default()),
        }
    }
}

/// The data of a report.
#[derive(Debug, Serialize)]
pub(crate) struct Data {
    pub store: String,
    pub version: &'static str,
    pub bounds: Bounds,
    /// Number of snapshots in the log, whatever their status.
    pub all_snapshots: u64,
    /// Newest snapshots in the order of their commits.
    pub snapshots: Vec<SnapshotRow>,
    /// Number of live steps that were read; some charts show only a part of them.
    pub live_steps: u64,
    /// Steps in the charts of roles and layers, ascending.
    pub steps: Vec<u64>,
    pub layers: Vec<String>,
    /// Number of layers before neighbours were put together.
    pub all_layers: u64,
    pub roles: Vec<Role>,
    /// Lower ends of the ranges of the exponent histograms; null for the first.
    pub exponents: Vec<Option<i32>>,
    /// Step whose tensors are listed.
    pub tensors_of: Option<u64>,
    pub tensors: Vec<TensorRow>,
    pub all_tensors: u64,
    pub nonfinite: Vec<NonfiniteRow>,
    pub all_nonfinite: u64,
    pub rounding: Vec<RoundingRow>,
    pub all_rounding: u64,
    /// Problems of the store as a whole.
    pub faults: Vec<String>,
    pub verify: Option<Verification>,
}

/// A snapshot in the log.
#[derive(Debug, Serialize)]
pub(crate) struct SnapshotRow {
    pub step: u64,
    pub snapshot: String,
    pub kind: &'static str,
    pub status: &'static str,
    pub pinned: bool,
    pub time: String,
    pub time_ms: u64,
    /// Step of the parent of a delta.
    pub parent: Option<u64>,
    /// Number of snapshots between this one and its base, and the base itself.
    pub depth: u64,
    pub tensor_bytes: Option<u64>,
    pub stored_bytes: Option<u64>,
    pub ratio: Option<f64>,
    #[serde(flatten)]
    pub times: StepTimes,
    /// Whether the snapshot has statistics; null if it was not read.
    pub measured: Option<bool>,
    pub nan: Option<u64>,
    pub positive_infinity: Option<u64>,
    pub negative_infinity: Option<u64>,
    pub damage: Option<String>,
}

/// The charts of a role. The outer lists have one entry for each step of [`Data::steps`].
#[derive(Debug, Default, Serialize)]
pub(crate) struct Role {
    pub name: String,
    pub tensor_bytes: Vec<Option<u64>>,
    pub stored_bytes: Vec<Option<u64>>,
    pub norm: Vec<Option<f64>>,
    pub update: Vec<Option<f64>>,
    /// Sampled elements in each range of exponents.
    pub exponents: Vec<Option<[u64; 16]>>,
    pub rounding: Vec<Option<RoundingJson>>,
    /// One list for each step, with one entry for each layer.
    pub layer_norm: Vec<Vec<Option<f64>>>,
    pub layer_update: Vec<Vec<Option<f64>>>,
    pub layer_nonfinite: Vec<Vec<u64>>,
}

/// A tensor of the newest step that can be read. The numbers are those of its newest step with statistics.
#[derive(Debug, Serialize)]
pub(crate) struct TensorRow {
    pub name: String,
    pub role: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub stored_bytes: u64,
    /// Step of the numbers.
    pub step: Option<u64>,
    /// Number of numbers, which the counts cover: a complex element has two.
    pub numbers: Option<u64>,
    pub nan: Option<u64>,
    pub positive_infinity: Option<u64>,
    pub negative_infinity: Option<u64>,
    pub zero: Option<u64>,
    pub min: Option<f64>,
    pub max: Option<f64>,
    pub norm: Option<f64>,
    pub changed: Option<u64>,
    pub update: Option<f64>,
    /// First step with a NaN or an infinity.
    pub first_nonfinite: Option<u64>,
}

/// A tensor with NaN or infinities at a step.
#[derive(Debug, Serialize)]
pub(crate) struct NonfiniteRow {
    pub step: u64,
    pub tensor: String,
    pub role: String,
    pub nan: u64,
    pub positive_infinity: u64,
    pub negative_infinity: u64,
}

/// Rounding errors of a role at a step.
#[derive(Debug, Serialize)]
pub(crate) struct RoundingRow {
    pub step: u64,
    pub role: String,
    #[serde(flatten)]
    pub rounding: RoundingJson,
}

/// Result of `--verify`.
#[derive(Debug, Serialize)]
pub(crate) struct Verification {
    pub depth: &'static str,
    pub casks: u64,
    pub chunks: u64,
    pub all_problems: u64,
    pub problems: Vec<ProblemRow>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ProblemRow {
    pub step: Option<u64>,
    pub object: String,
    pub tensor: String,
    pub message: String,
}
