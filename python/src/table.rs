//! Exposes tables as Arrow streams, which DuckDB, polars, pandas and pyarrow read without a copy.

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{RecordBatch, RecordBatchIterator};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

macro_rules! table {
    ($(#[$doc:meta])* $name:ident of $rows:literal) => {
        $(#[$doc])*
        #[pyclass(module = "tensorcask", frozen)]
        pub(crate) struct $name {
            batch: RecordBatch,
        }

        impl $name {
            pub(crate) fn new(batch: RecordBatch) -> Self {
                Self { batch }
            }
        }

        #[pymethods]
        impl $name {
            /// Returns the names of the columns.
            #[getter]
            fn column_names(&self) -> Vec<String> {
                self.batch.schema().fields().iter().map(|field| field.name().clone()).collect()
            }

            fn __len__(&self) -> usize {
                self.batch.num_rows()
            }

            fn __repr__(&self) -> String {
                format!("{}({} {}, {} columns)", stringify!($name), self.batch.num_rows(), $rows, self.batch.num_columns())
            }

            #[pyo3(signature = (requested_schema=None))]
            fn __arrow_c_stream__<'py>(&self, py: Python<'py>, requested_schema: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyCapsule>> {
                // A consumer that wants other types casts them. The protocol allows to ignore the requested schema.
                drop(requested_schema);
                let batches = RecordBatchIterator::new([Ok(self.batch.clone())], self.batch.schema());
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
