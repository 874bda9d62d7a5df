//! Rounding errors of tensors, and searches for precision settings.

use std::collections::BTreeMap;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorcask::precision::{Setting, StateBudget, search, search_state};
use tensorcask::{Dtype, Result, TensorView};

use crate::buffer::Source;
use crate::errors::raise;
use crate::gradients::{Gradient, Gradients};
use crate::writer::{Lent, Shard};

/// Rounding error of elements against the saved values.
#[pyclass(module = "tensorcask", frozen, get_all)]
#[derive(Clone, Copy)]
pub(crate) struct RoundingReport {
    /// Number of elements with a relative error: those that were finite and not zero.
    elements: u64,
    /// Greatest relative error.
    max_relative: f64,
    /// Mean relative error.
    mean_relative: f64,
    /// Mean squared error of all elements.
    mean_squared: f64,
    /// Number of elements whose sign changed.
    sign_flips: u64,
    /// Root mean square error of Adam's update, relative to the update; None if unknown.
    update_error: Option<f64>,
}

impl RoundingReport {
    pub(crate) fn of(report: &tensorcask::RoundingReport) -> Self {
        Self {
            elements: report.elements,
            max_relative: report.max_relative,
            mean_relative: report.mean_relative(),
            mean_squared: report.mean_squared(),
            sign_flips: report.sign_flips,
            update_error: report.update_error(),
        }
    }
}

#[pymethods]
impl RoundingReport {
    fn __repr__(&self) -> String {
        format!(
            "RoundingReport(elements={}, max_relative={:.3e}, mean_relative={:.3e})",
            self.elements, self.max_relative, self.mean_relative
        )
    }
}

/// Setting that a search found.
#[pyclass(module = "tensorcask", frozen, get_all)]
pub(crate) struct RoundingChoice {
    /// Setting in the form that rules take.
    setting: String,
    /// Bytes of the stored tensor.
    stored_bytes: u64,
    /// Rounding error of the tensor.
    rounding: RoundingReport,
}

#[pymethods]
impl RoundingChoice {
    fn __repr__(&self) -> String {
        format!("RoundingChoice(setting='{}', stored_bytes={})", self.setting, self.stored_bytes)
    }
}

/// Returns the setting with which a tensor takes the fewest bytes, among those for which `evaluate` returns true.
#[pyfunction]
pub(crate) fn search_precision(
    py: Python<'_>,
    dtype: &str,
    shape: Vec<u64>,
    data: &Bound<'_, PyAny>,
    role: String,
    evaluate: &Bound<'_, PyAny>,
) -> PyResult<RoundingChoice> {
    if !evaluate.is_callable() {
        return Err(PyValueError::new_err("evaluate: give a function of a setting and its rounding report"));
    }
    let dtype = Dtype::from_name(dtype).map_err(|e| raise(&e))?;
    let source = Source::new(data)?;
    let evaluate = evaluate.clone().unbind();
    py.detach(|| {
        let mut raised = None;
        let mut accepts = |setting: &Setting, errors: &tensorcask::RoundingReport| {
            let answer = Python::attach(|py| evaluate.bind(py).call1((setting.to_string(), RoundingReport::of(errors)))?.is_truthy());
            // An exception in `evaluate` ends the search.
            answer.unwrap_or_else(|error| {
                raised = Some(error);
                true
            })
        };
        let found = view(dtype, &shape, source.bytes(), role).and_then(|view| search(&view, &mut accepts));
        match raised {
            Some(error) => Err(error),
            None => found.map(RoundingChoice::of).map_err(|e| raise(&e)),
        }
    })
}

/// Rules, settings by tensor, stored and original bytes, errors of the update and of the weights.
type FoundPrecision = (Vec<String>, BTreeMap<String, String>, u64, u64, f64, f64);

/// Returns the settings with which a state takes the fewest bytes within a budget of errors.
#[pyfunction]
pub(crate) fn search_state_precision(
    py: Python<'_>,
    tensors: Vec<Shard<'_>>,
    gradients: Vec<Gradient<'_>>,
    update: f64,
    weights: f64,
) -> PyResult<FoundPrecision> {
    let lent = Lent::new(py, tensors, Vec::new())?;
    let gradients = Gradients::new(gradients)?;
    py.detach(|| {
        let found = lent.views(0).and_then(|(views, _)| search_state(&gradients.attach(views)?, StateBudget { update, weights }));
        let found = found.map_err(|e| raise(&e))?;
        let settings = found.settings.into_iter().map(|(name, setting)| (name, setting.to_string())).collect();
        let errors = found.errors;
        Ok((found.precision.words(), settings, found.stored_bytes, found.tensor_bytes, errors.update, errors.weights))
    })
}

impl RoundingChoice {
    fn of(found: tensorcask::precision::RoundingChoice) -> Self {
        Self { setting: found.setting.to_string(), stored_bytes: found.stored_bytes, rounding: RoundingReport::of(&found.rounding) }
    }
}

fn view<'a>(dtype: Dtype, shape: &[u64], data: &'a [u8], role: String) -> Result<TensorView<'a>> {
    Ok(TensorView::new("tensor", dtype, shape, data)?.with_role(role, "tensor"))
}
