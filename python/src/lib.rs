//! `tensorcask._native`: the parts of the Python package that need Rust.
//!
//! The Python package flattens states and knows frameworks. This crate moves bytes between Python's buffers and the
//! library, without the interpreter lock, and knows no framework.

mod buffer;
mod codec;
mod command;
mod elements;
#[cfg(target_os = "linux")]
mod engine;
mod errors;
mod gradients;
mod logging;
mod precision;
#[cfg(target_os = "linux")]
mod room;
mod snapshot;
mod store;
mod stored;
mod table;
mod tree;
mod upkeep;
mod wait;
mod writer;

use pyo3::prelude::*;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    logging::install();
    store::start_job()?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<store::Store>()?;
    module.add_function(wrap_pyfunction!(store::absolute_url, module)?)?;
    module.add_function(wrap_pyfunction!(store::job_id, module)?)?;
    module.add_function(wrap_pyfunction!(store::join_job, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::parse_duration, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::gc, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::compact, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::copy_to, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::fork, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::advise, module)?)?;
    module.add_function(wrap_pyfunction!(upkeep::times_of_saves, module)?)?;
    module.add_function(wrap_pyfunction!(command::run_command, module)?)?;
    module.add_class::<snapshot::Snapshot>()?;
    module.add_function(wrap_pyfunction!(snapshot::windows, module)?)?;
    module.add_class::<stored::StoredTensors>()?;
    module.add_function(wrap_pyfunction!(stored::stored_tensors, module)?)?;
    module.add_class::<writer::Writer>()?;
    module.add_class::<writer::RankWriter>()?;
    module.add_class::<writer::Saved>()?;
    module.add_class::<upkeep::Retainer>()?;
    #[cfg(target_os = "linux")]
    engine::add(module)?;
    module.add_class::<precision::RoundingReport>()?;
    module.add_class::<precision::RoundingChoice>()?;
    module.add_class::<table::Catalog>()?;
    module.add_class::<table::Statistics>()?;
    module.add_class::<table::Tensors>()?;
    module.add_class::<table::Chunks>()?;
    module.add_class::<table::Commits>()?;
    module.add_class::<codec::Coder>()?;
    module.add_class::<codec::Encoded>()?;
    module.add_function(wrap_pyfunction!(codec::codecs, module)?)?;
    module.add_function(wrap_pyfunction!(buffer::copy_all, module)?)?;
    module.add_function(wrap_pyfunction!(elements::dtypes, module)?)?;
    module.add_function(wrap_pyfunction!(elements::pack, module)?)?;
    module.add_function(wrap_pyfunction!(elements::unpack, module)?)?;
    module.add_function(wrap_pyfunction!(elements::matching, module)?)?;
    module.add_function(wrap_pyfunction!(precision::search_precision, module)?)?;
    module.add_function(wrap_pyfunction!(precision::search_state_precision, module)?)?;
    module.add_function(wrap_pyfunction!(tree::encode_tree, module)?)?;
    module.add_function(wrap_pyfunction!(tree::decode_tree, module)?)?;
    errors::add(module)
}
