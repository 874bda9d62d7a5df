//! `Writer` and `RankWriter`: save states from borrowed buffers.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::{Map, Value};
use tensorcask::interchange::safetensors::Files;
use tensorcask::wire::{Id, Receipt};
use tensorcask::{BaseKeeping, Blob, Dtype, Error, ExistingStep, Limits, Metadata, Rect, Result, TensorView, blocking};

use crate::buffer::Source;
use crate::errors::raise;
use crate::gradients::{Gradient, Gradients};
use crate::precision::RoundingReport;
use crate::wait::until_done;

/// Saves states into a store.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Writer {
    store: blocking::Store,
    inner: Mutex<tensorcask::Writer>,
}

/// Saves one rank's part of states.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct RankWriter {
    store: blocking::Store,
    inner: Mutex<tensorcask::RankWriter>,
}

/// Result of a save.
#[pyclass(module = "tensorcask", frozen, get_all)]
pub(crate) struct Saved {
    /// Id of the snapshot.
    id: String,
    /// Training step.
    step: u64,
    /// `base` or `delta`.
    kind: &'static str,
    /// Id of the snapshot that a delta needs; None for a base.
    parent: Option<String>,
    /// Number of the log entry that committed it.
    sequence: u64,
    /// Bytes of the decoded tensors.
    tensor_bytes: u64,
    /// Bytes in the store.
    stored_bytes: u64,
    /// Number of chunks per codec, with `unchanged` as one more key.
    chunks: BTreeMap<String, u64>,
    /// Rounding error of all rounded tensors; None if nothing was rounded, or if ranks saved together.
    rounding: Option<RoundingReport>,
    /// Why the snapshot became a base or a delta, such as `small_delta`.
    reason: &'static str,
    /// Profile that the precision `auto` chose; None for other precisions.
    precision: Option<&'static str>,
    /// Why, such as `rising`; None for other precisions.
    precision_reason: Option<&'static str>,
    /// Measurements and choices of the objective `auto`, as a line; None for other objectives.
    objective: Option<String>,
    /// Whether all parameters and moments are finite; None without a check.
    finite: Option<bool>,
    /// Trained parameters that did not change in the last saves, and the step since when.
    unchanged: Vec<(String, u64)>,
}

/// Name, dtype, global shape, first index and extent per dimension, bytes.
pub(crate) type Shard<'py> = (String, String, Vec<u64>, Vec<u64>, Vec<u64>, Bound<'py, PyAny>);
/// Name and bytes.
pub(crate) type NamedBytes<'py> = (String, Bound<'py, PyAny>);
/// Rows that may have changed, by tensor; `None`: they are not known, but later saves will name them.
pub(crate) type ChangedRows = BTreeMap<String, Option<Vec<u64>>>;

impl Writer {
    pub(crate) fn new(store: blocking::Store, inner: tensorcask::Writer) -> Self {
        Self { store, inner: Mutex::new(inner) }
    }

    /// Returns the writer, with the choice for existing steps set.
    fn to_save(&self, overwrite: bool) -> PyResult<MutexGuard<'_, tensorcask::Writer>> {
        let mut writer = self.inner.lock().map_err(|_| poisoned())?;
        writer.on_existing_step(if overwrite { ExistingStep::Replace } else { ExistingStep::Refuse });
        Ok(writer)
    }
}

#[pymethods]
impl Writer {
    /// Saves a state. `user` is JSON. `changed_rows` lists, for some tensors, the rows that may have changed since the
    /// last save; None if only later saves will name them. `overwrite` replaces a live step with other content. `gradients` are
    /// of tensors or parameters by name, with dtype, shape and bytes.
    #[pyo3(signature = (step, tensors, blobs, user, metadata, changed_rows=BTreeMap::new(), overwrite=false, gradients=Vec::new()))]
    #[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
    fn save(
        &self,
        py: Python<'_>,
        step: u64,
        tensors: Vec<Shard<'_>>,
        blobs: Vec<NamedBytes<'_>>,
        user: &str,
        metadata: BTreeMap<String, String>,
        changed_rows: ChangedRows,
        overwrite: bool,
        gradients: Vec<Gradient<'_>>,
    ) -> PyResult<Saved> {
        let lent = Lent::new(py, tensors, blobs)?;
        let gradients = Gradients::new(gradients)?;
        let metadata = metadata_of(user, metadata)?;
        py.detach(|| {
            let (views, blobs) = lent.views(0).map_err(|e| raise(&e))?;
            let mut views = gradients.attach(views).map_err(|e| raise(&e))?;
            name_changed_rows(&mut views, &changed_rows).map_err(|e| raise(&e))?;
            let mut writer = self.to_save(overwrite)?;
            until_done(&self.store, writer.save(step, &views, &blobs, &metadata)).map(Saved::of)
        })
    }

    /// Saves the state in a group of safetensors files, and blobs. `user` is JSON.
    #[pyo3(signature = (step, files, user, blobs=Vec::new(), overwrite=false))]
    fn save_safetensors(
        &self,
        py: Python<'_>,
        step: u64,
        files: Vec<std::path::PathBuf>,
        user: &str,
        blobs: Vec<NamedBytes<'_>>,
        overwrite: bool,
    ) -> PyResult<Saved> {
        let lent = Lent::new(py, Vec::new(), blobs)?;
        let mut metadata = metadata_of(user, BTreeMap::new())?;
        py.detach(|| {
            let files = Files::open(&files).map_err(|e| raise(&e))?;
            metadata.file = files.metadata().map_err(|e| raise(&e))?;
            let views = files.tensors().map_err(|e| raise(&e))?;
            let (_, blobs) = lent.views(0).map_err(|e| raise(&e))?;
            let mut writer = self.to_save(overwrite)?;
            until_done(&self.store, writer.save(step, &views, &blobs, &metadata)).map(Saved::of)
        })
    }

    /// Returns the id of the snapshot that the deltas of all ranks refer to, chosen by the policy.
    #[pyo3(signature = (step, overwrite=false))]
    fn next_parent(&self, py: Python<'_>, step: u64, overwrite: bool) -> PyResult<Option<String>> {
        py.detach(|| {
            let mut writer = self.to_save(overwrite)?;
            Ok(until_done(&self.store, writer.next_parent(step))?.map(|id| id.to_hex()))
        })
    }

    /// Commits the parts that all ranks have uploaded.
    #[pyo3(signature = (step, receipts, user, metadata, overwrite=false))]
    fn commit(
        &self,
        py: Python<'_>,
        step: u64,
        receipts: Vec<Vec<u8>>,
        user: &str,
        metadata: BTreeMap<String, String>,
        overwrite: bool,
    ) -> PyResult<Saved> {
        let limits = Limits::default();
        let receipts: Vec<Receipt> =
            receipts.iter().map(|bytes| Receipt::decode(bytes, &limits)).collect::<Result<_>>().map_err(|e| raise(&e))?;
        let metadata = metadata_of(user, metadata)?;
        py.detach(|| {
            let mut writer = self.to_save(overwrite)?;
            until_done(&self.store, writer.commit_receipts(step, &receipts, &metadata)).map(Saved::of)
        })
    }

    /// Notes for how many seconds the last committed save stopped the training.
    fn note_stall(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let stall = Duration::try_from_secs_f64(seconds).map_err(|e| PyValueError::new_err(format!("stall={seconds}: {e}")))?;
        py.detach(|| {
            self.inner.lock().map_err(|_| poisoned())?.note_stall(stall);
            Ok(())
        })
    }

    /// Returns the memory of the cached base, in bytes.
    fn base_cache_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| Ok(self.inner.lock().map_err(|_| poisoned())?.base_cache_bytes()))
    }
}

impl RankWriter {
    pub(crate) fn new(store: blocking::Store, inner: tensorcask::RankWriter) -> Self {
        Self { store, inner: Mutex::new(inner) }
    }
}

#[pymethods]
impl RankWriter {
    /// Uploads this rank's part against the parent that the coordinator chose. Returns the receipt. `changed_rows` lists,
    /// for some tensors, the rows that may have changed since this rank last uploaded them.
    #[pyo3(signature = (rank, step, parent, tensors, blobs, changed_rows=BTreeMap::new()))]
    #[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
    fn save<'py>(
        &self,
        py: Python<'py>,
        rank: u32,
        step: u64,
        parent: Option<&str>,
        tensors: Vec<Shard<'_>>,
        blobs: Vec<NamedBytes<'_>>,
        changed_rows: ChangedRows,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let lent = Lent::new(py, tensors, blobs)?;
        let parent = parent.map(Id::from_hex).transpose().map_err(|e| raise(&e))?;
        let receipt = py.detach(|| {
            let (mut views, blobs) = lent.views(rank).map_err(|e| raise(&e))?;
            name_changed_rows(&mut views, &changed_rows).map_err(|e| raise(&e))?;
            let mut writer = self.inner.lock().map_err(|_| poisoned())?;
            let receipt = until_done(&self.store, writer.save_on(step, parent, &views, &blobs))?;
            receipt.encode().map_err(|e| raise(&e))
        })?;
        Ok(PyBytes::new(py, &receipt))
    }
}

/// Names the changed rows of tensors, and of all shards of them.
pub(crate) fn name_changed_rows(views: &mut [TensorView<'_>], changed_rows: &ChangedRows) -> Result<()> {
    for (name, rows) in changed_rows {
        let mut found = false;
        for view in views.iter_mut().filter(|view| view.name() == name) {
            let named = view.clone().with_row_hashes();
            *view = rows.as_ref().map_or(Ok(named.clone()), |rows| named.with_changed_rows(rows))?;
            found = true;
        }
        if !found {
            return Err(Error::not_found("changed_rows: the state has no tensor of this name").tensor(name));
        }
    }
    Ok(())
}

impl Saved {
    fn of(saved: tensorcask::SavedSnapshot) -> Self {
        Self {
            id: saved.id.to_hex(),
            step: saved.step,
            kind: saved.kind.name(),
            parent: saved.parent.map(|id| id.to_hex()),
            sequence: saved.sequence,
            tensor_bytes: saved.tensor_bytes,
            stored_bytes: saved.stored_bytes,
            chunks: saved.chunks,
            rounding: saved.rounding.as_ref().map(RoundingReport::of),
            reason: saved.decision.reason.name(),
            precision: saved.precision.as_ref().map(|decision| decision.profile.name()),
            precision_reason: saved.precision.as_ref().map(|decision| decision.reason.name()),
            objective: saved.objective.map(|report| report.to_string()),
            finite: saved.finite,
            unchanged: saved.unchanged.into_iter().map(|found| (found.tensor, found.since_step)).collect(),
        }
    }
}

#[pymethods]
impl Saved {
    /// Returns the bytes of the tensors divided by the bytes in the store.
    #[getter]
    fn ratio(&self) -> f64 {
        self.tensor_bytes as f64 / self.stored_bytes.max(1) as f64
    }

    fn __repr__(&self) -> String {
        format!("Saved(step={}, kind='{}', stored_bytes={}, tensor_bytes={})", self.step, self.kind, self.stored_bytes, self.tensor_bytes)
    }
}

/// Buffers of a save, borrowed until the save ends.
pub(crate) struct Lent {
    tensors: Vec<(String, Dtype, Vec<u64>, Rect, Source)>,
    blobs: Vec<(String, Source)>,
}

impl Lent {
    pub(crate) fn new(py: Python<'_>, tensors: Vec<Shard<'_>>, blobs: Vec<NamedBytes<'_>>) -> PyResult<Self> {
        let source = |name: &str, buffer: &Bound<'_, PyAny>| {
            Source::new(buffer).map_err(|e| PyErr::from_type(e.get_type(py), format!("`{}`: {}", name.escape_debug(), e.value(py))))
        };
        let mut lent = Self { tensors: Vec::with_capacity(tensors.len()), blobs: Vec::with_capacity(blobs.len()) };
        for (name, dtype, shape, offset, extent, buffer) in tensors {
            let dtype = Dtype::from_name(&dtype).map_err(|e| raise(&e.tensor(name.as_str())))?;
            let buffer = source(&name, &buffer)?;
            lent.tensors.push((name, dtype, shape, Rect { offset, shape: extent }, buffer));
        }
        for (name, buffer) in blobs {
            let buffer = source(&name, &buffer)?;
            lent.blobs.push((name, buffer));
        }
        Ok(lent)
    }

    pub(crate) fn views(&self, rank: u32) -> Result<(Vec<TensorView<'_>>, Vec<Blob<'_>>)> {
        let mut views = Vec::with_capacity(self.tensors.len());
        for (name, dtype, shape, rect, source) in &self.tensors {
            views.push(TensorView::shard(name.as_str(), *dtype, shape, rect.clone(), source.bytes())?);
        }
        let blobs = self.blobs.iter().map(|(name, source)| Blob { rank, name: name.clone(), data: source.bytes().into() });
        Ok((views, blobs.collect()))
    }
}

pub(crate) fn metadata_of(user: &str, file: BTreeMap<String, String>) -> PyResult<Metadata> {
    let user: Map<String, Value> = serde_json::from_str(user).map_err(|e| raise(&Error::invalid(format!("user metadata: {e}"))))?;
    Ok(Metadata { user, file })
}

/// Parses the location of the cached base: `memory`, `encoded`, `none`, or a folder on local disk as `disk:PATH`.
pub(crate) fn keeping(text: &str) -> PyResult<BaseKeeping> {
    match (text, text.strip_prefix("disk:")) {
        ("memory", _) => Ok(BaseKeeping::Memory),
        ("encoded", _) => Ok(BaseKeeping::Encoded),
        ("none", _) => Ok(BaseKeeping::None),
        (_, Some(folder)) if !folder.is_empty() => Ok(BaseKeeping::Disk(folder.into())),
        _ => Err(PyValueError::new_err(format!("base_cache `{text}`: use memory, encoded, none or disk:FOLDER"))),
    }
}

pub(crate) fn poisoned() -> PyErr {
    raise(&Error::new(tensorcask::ErrorKind::Storage, "an earlier save ended in a crash; open the store again"))
}
