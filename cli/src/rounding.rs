//! How far rounded tensors are from what was saved, as verbs show it.

use serde::Serialize;
use tensorcask::{RoundingReport, TensorRounding};

/// Errors of one tensor, or of many.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RoundingJson {
    elements: u64,
    max_relative: f64,
    mean_relative: f64,
    mean_squared: f64,
    sign_flips: u64,
    /// Of Adam's update; null where it is not known.
    update: Option<f64>,
}

/// Errors of a tensor of a snapshot.
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

    /// In a line.
    pub(crate) fn line(&self) -> String {
        let [max, mean, _, flips, update] = self.cells();
        let update = if update.is_empty() { update } else { format!(", of the update {update}") };
        format!("relative {mean} on average, {max} at most{update}; {flips} signs changed")
    }

    /// For a table.
    fn cells(&self) -> [String; 5] {
        let number = |x: f64| format!("{x:.2e}");
        let update = self.update.map_or(String::new(), number);
        [number(self.max_relative), number(self.mean_relative), number(self.mean_squared), self.sign_flips.to_string(), update]
    }
}

impl TensorRoundingRow {
    pub(crate) const HEADINGS: [&str; 9] = [
        ">step",
        "tensor",
        "role",
        "setting",
        ">greatest relative error",
        ">mean",
        ">mean squared error",
        ">signs changed",
        ">error of the update",
    ];

    pub(crate) fn of(step: u64, tensor: &TensorRounding) -> Self {
        let TensorRounding { name, role, setting, total, .. } = tensor;
        Self { step, tensor: name.clone(), role: role.clone(), setting: setting.clone(), rounding: RoundingJson::of(total) }
    }

    pub(crate) fn row(&self) -> Vec<String> {
        let names = [self.step.to_string(), self.tensor.clone(), self.role.clone(), self.setting.clone()];
        names.into_iter().chain(self.rounding.cells()).collect()
    }
}
