//! Exposes tables as Arrow streams, which DuckDB, polars, pandas and pyarrow read without a copy.

use std::sync::Arc;

use arrow_array::builder::{ListBuilder, UInt64Builder};
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{ArrayRef, RecordBatch, RecordBatchIterator, StringArray, UInt64Array};
use arrow_schema::{Schema, SchemaRef};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use tensorcask_cli::Commit;

use crate::errors::raise;

macro_rules! table {
    ($(#[$doc:meta])* $name:ident of $rows:literal) => {
        $(#[$doc])*
        #[pyclass(module = "tensorcask", frozen)]
        pub(crate) struct $name {
            /// Batches of one schema; at least one.
            batches: Vec<RecordBatch>,
        }

        impl $name {
            /// Joins batches of one schema. There must be one, even if it is empty.
            pub(crate) fn new(batches: Vec<RecordBatch>) -> Self {
                Self { batches }
            }

            fn schema(&self) -> SchemaRef {
                self.batches.first().map_or_else(|| Arc::new(Schema::empty()), RecordBatch::schema)
            }
        }

        #[pymethods]
        impl $name {
            /// Returns the names of the columns.
            #[getter]
            fn column_names(&self) -> Vec<String> {
                self.schema().fields().iter().map(|field| field.name().clone()).collect()
            }

            fn __len__(&self) -> usize {
                self.batches.iter().map(RecordBatch::num_rows).sum()
            }

            fn __repr__(&self) -> String {
                format!("{}({} {}, {} columns)", stringify!($name), self.__len__(), $rows, self.schema().fields().len())
            }

            #[pyo3(signature = (requested_schema=None))]
            fn __arrow_c_stream__<'py>(&self, py: Python<'py>, requested_schema: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyCapsule>> {
                // A consumer that wants other types casts them. The protocol allows to ignore the requested schema.
                drop(requested_schema);
                let batches = RecordBatchIterator::new(self.batches.clone().into_iter().map(Ok), self.schema());
                PyCapsule::new_with_value(py, FFI_ArrowArrayStream::new(Box::new(batches)), c"arrow_array_stream")
            }
        }
    };
}

table! {
    /// A table of snapshots. Pass it to `duckdb.from_arrow`, `polars.DataFrame`, `pyarrow.table` or any other reader of
    /// Arrow.
    Catalog of "snapshots"
}

table! {
    /// A table of statistics: one row for each chunk of each step. Any reader of Arrow takes it, like a catalog.
    Statistics of "chunks"
}

table! {
    /// A table of tensors: one row for each tensor of each step. Any reader of Arrow takes it, like a catalog.
    Tensors of "tensors"
}

table! {
    /// A table of chunks as they are stored: one row for each chunk of each step. Any reader of Arrow takes it, like a
    /// catalog.
    Chunks of "chunks"
}

table! {
    /// A table of log entries. Any reader of Arrow takes it, like a catalog.
    Commits of "entries"
}

impl Commits {
    pub(crate) fn of(commits: &[Commit]) -> PyResult<Self> {
        let numbers = |number: fn(&Commit) -> u64| -> ArrayRef { Arc::new(UInt64Array::from_iter_values(commits.iter().map(number))) };
        let texts = |text: fn(&Commit) -> &str| -> ArrayRef { Arc::new(StringArray::from_iter_values(commits.iter().map(text))) };
        let mut steps = ListBuilder::new(UInt64Builder::new());
        for commit in commits {
            steps.values().append_slice(&commit.steps);
            steps.append(true);
        }
        let steps: ArrayRef = Arc::new(steps.finish());
        let columns = [
            ("sequence", numbers(|commit| commit.sequence)),
            ("time_ms", numbers(|commit| commit.time_ms)),
            ("kind", texts(|commit| commit.kind)),
            ("what", texts(|commit| &commit.what)),
            ("writer", texts(|commit| &commit.writer)),
            ("steps", steps),
        ];
        let batch = RecordBatch::try_from_iter(columns);
        batch
            .map(|batch| Self::new(vec![batch]))
            .map_err(|e| raise(&tensorcask::Error::limit(format!("the log is too large for a table: {e}"))))
    }
}
