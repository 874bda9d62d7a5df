//! Gradients that a caller lends beside a state.

use pyo3::prelude::*;
use tensorcask::{Dtype, Error, Result, TensorView};

use crate::buffer::Source;
use crate::errors::raise;

/// Name of a tensor or parameter, dtype, shape, bytes.
pub(crate) type Gradient<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);

/// Gradients, borrowed until the call ends.
pub(crate) struct Gradients(Vec<(String, Dtype, Vec<u64>, Source)>);

impl Gradients {
    pub(crate) fn new(gradients: Vec<Gradient<'_>>) -> PyResult<Self> {
        let lent = gradients.into_iter().map(|(name, dtype, shape, buffer)| {
            let dtype = Dtype::from_name(&dtype).map_err(|e| raise(&e.tensor(name.as_str())))?;
            Ok((name, dtype, shape, Source::new(&buffer)?))
        });
        lent.collect::<PyResult<_>>().map(Self)
    }

    /// Gives each gradient to the tensor of its name, or to the weights of the parameter of its name.
    pub(crate) fn attach<'a>(&'a self, mut views: Vec<TensorView<'a>>) -> Result<Vec<TensorView<'a>>> {
        for (name, dtype, shape, source) in &self.0 {
            let is_weight = |view: &TensorView<'_>| view.param() == name && matches!(view.role(), "model" | "master");
            let mut found = false;
            for view in views.iter_mut().filter(|view| view.name() == name || is_weight(view)) {
                if view.shape() != shape {
                    let message = format!("gradients: shape {shape:?}, but the tensor has shape {:?}", view.shape());
                    return Err(Error::invalid(message).tensor(view.name()));
                }
                *view = view.clone().with_gradient(*dtype, source.bytes())?;
                found = true;
            }
            if !found {
                return Err(Error::not_found("gradients: the state has no tensor and no parameter of this name").tensor(name));
            }
        }
        Ok(views)
    }
}
