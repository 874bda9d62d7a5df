//! `Snapshot`: describes tensors, and reads slices of tensors into buffers and blobs.

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use tensorcask::interchange::safetensors::{self, Selected};
use tensorcask::{ChunkStatistics, ReadRequest, Slice, SlicePart, TensorChange, blocking};

use crate::buffer::{Target, writable};
use crate::errors::raise;
use crate::precision::RoundingReport;
use crate::table::Statistics;
use crate::wait::until_done;

/// Snapshot, wrapped by the Python package.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Snapshot {
    pub(crate) store: blocking::Store,
    pub(crate) inner: tensorcask::Snapshot,
}

impl Snapshot {
    pub(crate) fn new(store: blocking::Store, inner: tensorcask::Snapshot) -> Self {
        Self { store, inner }
    }
}

/// Places of elements as an array of u64s in the byte order of this machine.
fn places_of<'py>(py: Python<'py>, places: &[u64]) -> PyResult<Bound<'py, PyByteArray>> {
    PyByteArray::new_with(py, places.len().saturating_mul(8), |bytes| {
        bytes.chunks_exact_mut(8).zip(places).for_each(|(bytes, place)| bytes.copy_from_slice(&place.to_ne_bytes()));
        Ok(())
    })
}

/// Name, first index and extent per dimension, and the buffer that receives the slice.
type Request<'py> = (String, Vec<u64>, Vec<u64>, Bound<'py, PyAny>);

#[pymethods]
impl Snapshot {
    #[getter]
    fn step(&self) -> u64 {
        self.inner.step()
    }

    #[getter]
    fn id(&self) -> String {
        self.inner.record().id.to_hex()
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.record().kind().name()
    }

    #[getter]
    fn time_ms(&self) -> u64 {
        self.inner.record().time_ms
    }

    /// Returns the user metadata as JSON.
    #[getter]
    fn user(&self) -> String {
        serde_json::Value::Object(self.inner.user().clone()).to_string()
    }

    /// Returns the metadata of the state as files carry it.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.inner.metadata().into_pyobject(py)
    }

    /// Returns step, kind and stored bytes of each snapshot in the chain, newest first.
    fn chain(&self) -> Vec<(u64, &'static str, u64)> {
        self.inner.inspect().chain().into_iter().map(|link| (link.record.step, link.kind.name(), link.stored_bytes)).collect()
    }

    /// Returns name, dtype, shape, role, param, and the name of the tied tensor for each tensor.
    #[allow(clippy::type_complexity, reason = "a row of a table")]
    fn tensors(&self) -> Vec<(String, &'static str, Vec<u64>, String, String, Option<String>)> {
        let tensors = self.inner.tensors();
        let target = |at: usize| tensors.get(at).map(|tensor| tensor.name.clone());
        let row = |t: &tensorcask::wire::DirectoryTensor| {
            (t.name.clone(), t.dtype.name(), t.shape.clone(), t.role.clone(), t.param.clone(), t.alias_of.and_then(target))
        };
        tensors.iter().map(row).collect()
    }

    /// Reads rectangles into buffers of exactly their sizes.
    fn read_into(&self, py: Python<'_>, requests: Vec<Request<'_>>) -> PyResult<()> {
        with_requests(py, requests, |requests| until_done(&self.store, self.inner.read_many_into(requests)))
    }

    /// Reads rectangles of f32 tensors as bf16.
    fn read_as_bf16_into(&self, py: Python<'_>, requests: Vec<Request<'_>>) -> PyResult<()> {
        with_requests(py, requests, |requests| until_done(&self.store, self.inner.as_bf16().read_many_into(requests)))
    }

    /// Reads the gradient of a rectangle into a buffer, as f32. Returns the name of the moment that stores the gradient, decay and
    /// weight of its rules, the greatest and the mean number of significant bits, and the number of estimated elements.
    #[allow(clippy::type_complexity, reason = "a row of a table")]
    fn gradient_into(&self, py: Python<'_>, request: Request<'_>) -> PyResult<(String, Vec<(f32, f32)>, u32, f64, u64)> {
        with_requests(py, vec![request], |requests| {
            let Some(ReadRequest { name, slice, out }) = requests.into_iter().next() else { return Err(beyond()) };
            let found = until_done(&self.store, self.inner.gradient(name, &slice))?;
            if out.len() != found.tensor.data.len() {
                let message = format!("the buffer has {} bytes, but the gradient has {}", out.len(), found.tensor.data.len());
                return Err(raise(&tensorcask::Error::invalid(message).tensor(name)));
            }
            out.copy_from_slice(&found.tensor.data);
            let rules = found.rules.iter().map(|rule| (rule.decay, rule.weight)).collect();
            Ok((found.moment, rules, found.longest_bits, found.mean_bits, found.estimated_elements))
        })
    }

    /// Turns the tensors of the snapshot `have`, held in these buffers, into those of this snapshot.
    /// With `limit`, also returns for each tensor the places of its changed elements: u64s in native byte order, or `None` if they are
    /// more than this share of all.
    #[pyo3(signature = (have, tensors, limit=None))]
    fn update_into<'py>(
        &self,
        py: Python<'py>,
        have: &Self,
        tensors: Vec<(String, Bound<'_, PyAny>)>,
        limit: Option<f64>,
    ) -> PyResult<Vec<Option<Bound<'py, PyByteArray>>>> {
        let mut targets = Vec::with_capacity(tensors.len());
        for (name, buffer) in &tensors {
            targets.push(Target::new(buffer).map_err(|e| named(py, name, &e))?);
        }
        let names: Vec<String> = tensors.into_iter().map(|(name, _)| name).collect();
        let buffers = writable(&mut targets)?;
        let tensors = names.iter().map(String::as_str).zip(buffers).collect();
        let Some(limit) = limit else {
            py.detach(|| until_done(&self.store, self.inner.update_into(&have.inner, tensors)))?;
            return Ok(Vec::new());
        };
        let changes = py.detach(|| until_done(&self.store, self.inner.update_and_compare(&have.inner, tensors, limit)))?;
        let listed = changes.into_iter().map(|change| match change {
            TensorChange::None => places_of(py, &[]).map(Some),
            TensorChange::Elements(places) => places_of(py, &places).map(Some),
            TensorChange::Whole => Ok(None),
        });
        listed.collect()
    }

    /// Writes tensors, in ascending order of names, as one new safetensors file and syncs it. Returns the size of the
    /// file.
    fn write_safetensors(&self, py: Python<'_>, path: std::path::PathBuf, names: Vec<String>) -> PyResult<u64> {
        let selected: Vec<Selected> = names.into_iter().map(|name| Selected { name, slice: Slice::all() }).collect();
        py.detach(|| {
            let fail = |e| raise(&tensorcask::Error::io(path.display().to_string(), e));
            let file = std::fs::File::options().write(true).create_new(true).open(&path).map_err(fail)?;
            let bytes = until_done(&self.store, safetensors::write(&self.inner, &selected, &mut &file))?;
            file.sync_all().map_err(fail)?;
            Ok(bytes)
        })
    }

    /// Compares the chunk checksums in the chain's indexes with the content digests. Reads no tensor.
    fn check_content(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| until_done(&self.store, self.inner.inspect().check_content()))
    }

    /// Returns name, role, setting and rounding report of the tensors that were rounded. Reads no tensor.
    fn rounding(&self, py: Python<'_>) -> PyResult<Vec<(String, String, String, RoundingReport)>> {
        let found = py.detach(|| until_done(&self.store, self.inner.rounding()))?;
        Ok(found.into_iter().map(|tensor| (tensor.name, tensor.role, tensor.setting, RoundingReport::of(&tensor.total))).collect())
    }

    /// Returns the statistics of the chunks of the snapshot.
    fn stats(&self, py: Python<'_>) -> PyResult<Statistics> {
        py.detach(|| {
            let rows = until_done(&self.store, self.inner.inspect().statistics())?;
            ChunkStatistics::table(&[(self.inner.step(), rows)]).map(|table| Statistics::new(vec![table])).map_err(|e| raise(&e))
        })
    }

    /// Refuses a snapshot with an element whose relative error exceeds `bound`.
    fn check_rounding(&self, py: Python<'_>, bound: f64) -> PyResult<()> {
        py.detach(|| until_done(&self.store, self.inner.check_rounding(bound)))
    }

    /// Decodes and checks all tensors.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| until_done(&self.store, self.inner.verify()))
    }

    /// Returns rank and name of each blob.
    fn blobs(&self, py: Python<'_>) -> PyResult<Vec<(u32, String)>> {
        py.detach(|| until_done(&self.store, self.inner.blobs()))
    }

    /// Returns the bytes of blobs, given by rank and name.
    fn read_blobs<'py>(&self, py: Python<'py>, wanted: Vec<(u32, String)>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let names: Vec<(u32, &str)> = wanted.iter().map(|(rank, name)| (*rank, name.as_str())).collect();
        let found = py.detach(|| until_done(&self.store, self.inner.read_blobs(&names)))?;
        Ok(found.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Returns the bytes of a blob.
    fn read_blob<'py>(&self, py: Python<'py>, rank: u32, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| until_done(&self.store, self.inner.read_blob(rank, name)))?;
        Ok(PyBytes::new(py, &bytes))
    }
}

/// Divides tensors into parts that are read together, in windows of at most so many bytes. Returns number in the list,
/// offset, shape, position in the bytes of the tensor, and size in bytes of each part.
#[pyfunction]
#[allow(clippy::type_complexity, reason = "a row of a table")]
pub(crate) fn windows(
    snapshot: &Snapshot,
    names: Vec<String>,
    most_bytes: u64,
) -> PyResult<Vec<Vec<(usize, Vec<u64>, Vec<u64>, u64, u64)>>> {
    let slices: Vec<(&str, Slice)> = names.iter().map(|name| (name.as_str(), Slice::all())).collect();
    let windows = SlicePart::windows(&snapshot.inner, &slices, most_bytes).map_err(|e| raise(&e))?;
    let row = |part: SlicePart| (part.item, part.rect.offset, part.rect.shape, part.first_byte, part.bytes);
    Ok(windows.into_iter().map(|window| window.into_iter().map(row).collect()).collect())
}

/// Converts requests to names, slices and buffers, for a read without the interpreter lock.
fn with_requests<T: Send>(
    py: Python<'_>,
    requests: Vec<Request<'_>>,
    read: impl FnOnce(Vec<ReadRequest<'_>>) -> PyResult<T> + Send,
) -> PyResult<T> {
    let mut targets = Vec::with_capacity(requests.len());
    let mut wanted = Vec::with_capacity(requests.len());
    for (name, offset, shape, buffer) in requests {
        targets.push(Target::new(&buffer).map_err(|e| named(py, &name, &e))?);
        let ranges = offset.iter().zip(&shape).map(|(&start, &extent)| Ok(start..start.checked_add(extent).ok_or_else(beyond)?));
        wanted.push((name, Slice::ranges(ranges.collect::<PyResult<Vec<_>>>()?)));
    }
    let buffers = writable(&mut targets)?;
    let requests =
        wanted.iter().zip(buffers).map(|((name, slice), out)| ReadRequest { name: name.as_str(), slice: slice.clone(), out }).collect();
    py.detach(|| read(requests))
}

fn beyond() -> PyErr {
    raise(&tensorcask::Error::invalid("a slice beyond 2^64"))
}

/// Adds the name of the tensor to an error.
fn named(py: Python<'_>, name: &str, error: &PyErr) -> PyErr {
    PyErr::from_type(error.get_type(py), format!("tensor `{}`: {}", name.escape_debug(), error.value(py)))
}
