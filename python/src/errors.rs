//! Exceptions: `tensorcask.Error`, with one subclass for each kind.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use tensorcask::ErrorKind;

create_exception!(
    tensorcask,
    Error,
    PyException,
    "An error of a store: what happened, and to which object.\n\nAttributes: kind, message, object, tensor, chunk, offset, clause."
);

macro_rules! kinds {
    ($($kind:ident $name:ident $doc:literal;)*) => {
        $(create_exception!(tensorcask, $name, Error, $doc);)*

        fn class_of(kind: ErrorKind, message: String) -> PyErr {
            match kind {
                ErrorKind::Template => Python::attach(|py| match template_error(py) {
                    Ok(class) => PyErr::from_type(class, (message,)),
                    Err(error) => error,
                }),
                $(ErrorKind::$kind => $name::new_err(message),)*
                _ => Error::new_err(message),
            }
        }

        pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
            module.add("Error", module.py().get_type::<Error>())?;
            $(module.add(stringify!($name), module.py().get_type::<$name>())?;)*
            module.add("TemplateError", template_error(module.py())?)
        }
    };
}

kinds! {
    Corrupt CorruptionError "Stored bytes differ from the bytes that were written: damaged, swapped, truncated or forged.";
    NotFound NotFoundError "The requested store, snapshot, step, tensor or blob does not exist.";
    Conflict ConflictError
        "The step exists with other content, or another writer changed the store first.\n\nTo replace a step, pass `overwrite=True`.";
    Fenced FencedError
        "Another job took over this store; this writer must stop.\n\nTo continue with this job, save through a new `tensorcask.Store(url)`.";
    OutcomeUnknown OutcomeUnknownError "A commit was sent, and its result cannot be known; open the store again before the next save.";
    InvalidArgument InvalidArgumentError "An argument cannot be stored or read.";
    Unsupported UnsupportedError "The stored data is well-formed, but this version or build cannot handle it.";
    LimitExceeded LimitExceededError "A declared size or count is beyond the limits of a reader.";
    UnsafeStore UnsafeStoreError "The storage does not give the guarantees that commits need (put if absent, links, fsync).";
    Storage StorageError "The storage failed: no space, no permission, no network.";
}

/// `TemplateError`: an `InvalidArgumentError`, and also a `ValueError`.
fn template_error(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let make = || {
        let bases = PyTuple::new(py, [py.get_type::<InvalidArgumentError>(), py.get_type::<PyValueError>()])?;
        let facts = PyDict::new(py);
        facts.set_item("__module__", "tensorcask")?;
        facts.set_item("__doc__", TEMPLATE_ERROR)?;
        Ok(py.get_type::<PyType>().call1(("TemplateError", bases, facts))?.cast_into::<PyType>()?.unbind())
    };
    CLASS.get_or_try_init(py, make).map(|class| class.bind(py).clone())
}

const TEMPLATE_ERROR: &str =
    "A stored step cannot fill the tensors of `out`: names, shapes or types differ. The step exists, so this is no first start.";

/// Returns the exception for an error of the library.
pub(crate) fn raise(error: &tensorcask::Error) -> PyErr {
    let exception = class_of(error.kind(), error.to_string());
    Python::attach(|py| {
        let value = exception.value(py);
        let set = || -> PyResult<()> {
            value.setattr("kind", error.kind().name())?;
            value.setattr("message", error.message())?;
            value.setattr("object", error.object_name())?;
            value.setattr("tensor", error.tensor_name())?;
            value.setattr("chunk", error.chunk_number())?;
            value.setattr("offset", error.byte_offset())?;
            value.setattr("clause", error.clause_name())
        };
        // A failure is ignored, because the text of the exception already has all attributes.
        let _ = set();
    });
    exception
}
