//! Rounding reports as text and JSON.

use serde::Serialize;
use tensorcask::{RoundingReport, TensorRounding};

/// Rounding report of one or more tensors.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RoundingJson {
    elements: u64,
    max_relative: f64,
    mean_relative: f64,
    mean_squared: f64,
    sign_flips: u64,
    /// Relative error of the update of Adam; null if unknown.
    update: Option<f64>,
}

/// Rounding report of a tensor of a snapshot.
#[derive(Debug, Serialize)]
pub(crate) struct TensorRoundingRow {
    pub step: u64,
    pub tensor: String,
    pub role: String,
    pub setting: String,
    #[serde(flatten)]
    pub rounding: RoundingJson,
}

impl RoundingJson {
    pub(crate) fn of(report: &RoundingReport) -> Self {
        Self {
            elements: report.elements,
            max_relative: report.max_relative,
            mean_relative: report.mean_relative(),
            mean_squared: report.mean_squared(),
            sign_flips: report.sign_flips,
            update: report.update_error(),
        }
    }

    /// Report as one line of text.
    pub(crate) fn line(&self) -> String {
        let [max, mean, _, flips, update] = self.cells();
        let update = if update.is_empty() { update } else { format!(", update {update}") };
        format!("relative error: mean {mean}, max {max}{update}; {flips} signs changed")
    }

    /// Cells of a table row.
    fn cells(&self) -> [String; 5] {
        let number = |x: f64| format!("{x:.2e}");
        let update = self.update.map_or(String::new(), number);
        [number(self.max_relative), number(self.mean_relative), number(self.mean_squared), self.sign_flips.to_string(), update]
    }
}

impl TensorRoundingRow {
    pub(crate) const HEADINGS: [&str; 9] =
        [">step", "tensor", "role", "setting", ">max relative error", ">mean", ">mean squared error", ">signs changed", ">update error"];

    pub(crate) fn of(step: u64, tensor: &TensorRounding) -> Self {
        let TensorRounding { name, role, setting, total, .. } = tensor;
        Self { step, tensor: name.clone(), role: role.clone(), setting: setting.clone(), rounding: RoundingJson::of(total) }
    }

    pub(crate) fn row(&self) -> Vec<String> {
        let names = [self.step.to_string(), self.tensor.clone(), self.role.clone(), self.setting.clone()];
        names.into_iter().chain(self.rounding.cells()).collect()
    }
}
