//! Exceptions: `tensorcask.Error`, with one subclass for each kind.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use tensorcask::ErrorKind;

create_exception!(
    tensorcask,
    Error,
    PyException,
    "What went wrong in a store, and where.\n\nAttributes: kind, message, object, tensor, chunk, offset, clause."
);

macro_rules! kinds {
    ($($kind:ident $name:ident $doc:literal;)*) => {
        $(create_exception!(tensorcask, $name, Error, $doc);)*

        fn class_of(kind: ErrorKind, message: String) -> PyErr {
            match kind {
                $(ErrorKind::$kind => $name::new_err(message),)*
                _ => Error::new_err(message),
            }
        }

        pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
            module.add("Error", module.py().get_type::<Error>())?;
            $(module.add(stringify!($name), module.py().get_type::<$name>())?;)*
            Ok(())
        }
    };
}

kinds! {
    Corrupt CorruptionError "Stored bytes are not what was written: damaged, swapped, truncated or forged.";
    NotFound NotFoundError "The store, snapshot, step, tensor or blob that was asked for does not exist.";
    Conflict ConflictError "Another writer changed the store first; reading it again and retrying may succeed.";
    Fenced FencedError "Another job took over this store; this writer must stop.";
    OutcomeUnknown OutcomeUnknownError "A commit was sent and its result cannot be known; reopen the store before going on.";
    InvalidArgument InvalidArgumentError "Something was passed that cannot be stored or read.";
    Unsupported UnsupportedError "Well-formed, but this version or build cannot handle it.";
    LimitExceeded LimitExceededError "A declared size or count is beyond the limits of a reader.";
    UnsafeStore UnsafeStoreError "The storage does not keep the promises that commits need.";
    Storage StorageError "The storage failed: no space, no permission, no network.";
}

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
