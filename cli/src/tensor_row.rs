//! Statistics of a tensor at a step, as `stats` and `bisect` show them.

use serde::Serialize;
use tensorcask::TensorStatistics;

use crate::text::{percent, share};

/// Statistics of a tensor at a step. Numbers are null for types that are not measured.
#[derive(Debug, Serialize)]
pub(crate) struct TensorRow {
    pub step: u64,
    pub tensor: String,
    pub role: String,
    pub dtype: &'static str,
    pub elements: u64,
    /// Number of numbers, which the counts cover: a complex element has two.
    pub numbers: u64,
    pub nan: Option<u64>,
    pub positive_infinity: Option<u64>,
    pub negative_infinity: Option<u64>,
    pub zero: Option<u64>,
    pub subnormal: Option<u64>,
    pub min: Option<f64>,
    pub max: Option<f64>,
    pub sum: Option<f64>,
    pub sum_squares: Option<f64>,
    pub exponents: Option<[u64; 16]>,
    pub reference_step: Option<u64>,
    pub changed: Option<u64>,
    pub change_squares: Option<f64>,
    pub change_ulps: Option<u64>,
}

impl TensorRow {
    pub(crate) const HEADINGS: [&str; 12] =
        [">step", "tensor", "role", ">elements", ">nan", ">inf", ">zero", ">min", ">max", ">norm", ">changed", ">change norm"];

    pub(crate) fn of(step: u64, found: TensorStatistics) -> Self {
        let numbers = found.numbers();
        let TensorStatistics { tensor, role, dtype, elements, values, change, reference_step } = found;
        Self {
            step,
            tensor,
            role,
            dtype: dtype.name(),
            elements,
            numbers,
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
            reference_step,
            changed: change.map(|change| change.changed),
            change_squares: change.and_then(|change| change.squares),
            change_ulps: change.map(|change| change.ulps),
        }
    }

    /// Number of infinities of either sign.
    pub(crate) fn infinities(&self) -> Option<u64> {
        Some(self.positive_infinity?.saturating_add(self.negative_infinity?))
    }

    pub(crate) fn cells(&self) -> Vec<String> {
        let count = |count: Option<u64>| count.map_or(String::new(), |count| count.to_string());
        let number = |number: Option<f64>| number.map_or(String::new(), |number| format!("{number:.4e}"));
        let part = |part: Option<u64>| part.map_or(String::new(), |part| percent(share(part, self.numbers)));
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
