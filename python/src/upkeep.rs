//! Maintenance of a store: garbage collection, compaction, copies, retention. Returns reports as dicts; the Python
//! package turns them into dataclasses.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorcask::maintain::{
    self, CompactOptions, CopyOptions, Deletable, ForkOptions, GcOptions, RetentionReport, TimeEstimate, TimeOverrides,
};
use tensorcask::{Free, Retention, SaveTimes, SnapshotRecord, StepSelector, blocking};

use crate::errors::raise;
use crate::store::Store;
use crate::wait::until_done;
use crate::writer::poisoned;

/// Parses a time such as `24h`.
#[pyfunction]
pub(crate) fn parse_duration(text: &str) -> PyResult<Duration> {
    tensorcask::parse_duration(text).map_err(|e| raise(&e))
}

/// Collects garbage, or reports what would be collected.
#[pyfunction]
#[pyo3(signature = (store, age_floor, apply, directories))]
pub(crate) fn gc<'py>(py: Python<'py>, store: &Store, age_floor: Duration, apply: bool, directories: bool) -> PyResult<Bound<'py, PyDict>> {
    let options = GcOptions { apply, age_floor, directories, ..GcOptions::default() };
    let store = &store.inner;
    let found = py.detach(|| until_done(store, maintain::gc(store.inner(), &options)))?;
    let steps = |records: &[SnapshotRecord]| records.iter().map(|record| record.step).collect::<Vec<u64>>();
    let objects = |objects: &[Deletable]| objects.iter().map(|found| (found.path.clone(), found.bytes)).collect::<Vec<_>>();
    let report = PyDict::new(py);
    report.set_item("applied", found.applied)?;
    report.set_item("collected", steps(&found.collected))?;
    report.set_item("collected_bytes", found.collected_bytes)?;
    report.set_item("deleted", objects(&found.deleted))?;
    report.set_item("freed_bytes", found.freed_bytes())?;
    report.set_item("waiting", objects(&found.waiting))?;
    report.set_item("waiting_bytes", found.waiting_bytes())?;
    report.set_item("held", steps(&found.held))?;
    report.set_item("held_bytes", found.held_bytes)?;
    report.set_item("held_by", steps(&found.held_by))?;
    Ok(report)
}

/// Compacts the chain of a step, or of the newest step, into a base.
#[pyfunction]
#[pyo3(signature = (store, step=None))]
pub(crate) fn compact<'py>(py: Python<'py>, store: &Store, step: Option<u64>) -> PyResult<Bound<'py, PyDict>> {
    let at = step.map_or(StepSelector::Latest, StepSelector::Step);
    let store = &store.inner;
    let made = py.detach(|| until_done(store, maintain::compact(store.inner(), at, &CompactOptions::default())))?;
    let report = PyDict::new(py);
    report.set_item("step", made.record.step)?;
    report.set_item("id", made.record.id.to_hex())?;
    report.set_item("changed", made.sequence.is_some())?;
    report.set_item("links", made.links)?;
    report.set_item("chain_bytes", made.chain_bytes)?;
    report.set_item("stored_bytes", made.stored_bytes)?;
    Ok(report)
}

/// Copies all live snapshots, or those of some steps, to another store.
#[pyfunction]
#[pyo3(signature = (store, destination, steps=None, take_over=false))]
pub(crate) fn copy_to<'py>(
    py: Python<'py>,
    store: &Store,
    destination: &Store,
    steps: Option<Vec<u64>>,
    take_over: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let options = CopyOptions { steps, take_over, ..CopyOptions::default() };
    let store = &store.inner;
    let destination = &destination.inner;
    let copied = py.detach(|| until_done(store, maintain::copy(store.inner(), destination.inner(), &options)))?;
    let report = PyDict::new(py);
    report.set_item("snapshots", copied.snapshots)?;
    report.set_item("present", copied.present)?;
    report.set_item("forgotten", copied.forgotten)?;
    report.set_item("objects", copied.objects)?;
    report.set_item("bytes", copied.bytes)?;
    Ok(report)
}

/// Begins a new run with one step of another; returns the step.
#[pyfunction]
#[pyo3(signature = (store, destination, step=None, share=true))]
pub(crate) fn fork(py: Python<'_>, store: &Store, destination: &Store, step: Option<u64>, share: bool) -> PyResult<u64> {
    let options = ForkOptions { step, share, ..ForkOptions::default() };
    let store = &store.inner;
    let destination = &destination.inner;
    let (step, _) = py.detach(|| until_done(store, maintain::fork(store.inner(), destination.inner(), &options)))?;
    Ok(step)
}

/// `keep_last`, `keep_every`, `keep_weights_every` and `free`.
pub(crate) type RetentionArguments = (Option<u64>, Option<u64>, Option<u64>, String);

pub(crate) fn retention_of((keep_last, keep_every, keep_weights_every, free): RetentionArguments) -> PyResult<Retention> {
    let free = Free::from_name(&free).map_err(|error| raise(&error))?;
    Ok(Retention { keep_last, keep_every, keep_weights_every, free })
}

/// Applies a retention after each save. Keeps the log between the calls.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Retainer {
    store: blocking::Store,
    inner: Mutex<maintain::Retainer>,
}

#[pymethods]
impl Retainer {
    /// Sends no request.
    #[new]
    fn new(store: &Store) -> Self {
        let inner = maintain::Retainer::new(store.inner.inner(), Retention::default(), CompactOptions::default());
        Self { store: store.inner.clone(), inner: Mutex::new(inner) }
    }

    /// Looks at the store before the first save, so that what an earlier process has forgotten is freed with it.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let mut retainer = self.inner.lock().map_err(|_| poisoned())?;
            until_done(&self.store, retainer.begin())
        })
    }

    /// Forgets the live steps that the numbers do not keep, and reduces steps to their weights.
    fn apply(&self, py: Python<'_>, retention: RetentionArguments) -> PyResult<(Vec<u64>, Option<u64>)> {
        let retention = retention_of(retention)?;
        py.detach(|| {
            let mut retainer = self.inner.lock().map_err(|_| poisoned())?;
            retainer.set_retention(retention);
            until_done(&self.store, retainer.apply()).map(|report| steps_of(&report))
        })
    }
}

/// Forgotten steps, and the step that stays only because the kept steps may hold NaN.
pub(crate) fn steps_of(report: &RetentionReport) -> (Vec<u64>, Option<u64>) {
    let forgotten = report.retained.forgotten.iter().map(|record| record.step).collect();
    (forgotten, report.retained.kept_finite.as_ref().map(|record| record.step))
}

/// Times that the user gives for advice: stall, restore, step and `torch.save`.
type Given = (Option<Duration>, Option<Duration>, Option<Duration>, Option<Duration>);

/// Advises how often to save and how many steps to keep. Measures the time of a restore if asked to.
#[pyfunction]
pub(crate) fn advise<'py>(
    py: Python<'py>,
    store: &Store,
    mtbf: Duration,
    given: Given,
    measure_restore: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let (stall, restore, step, torch_save) = given;
    let given = TimeOverrides { stall, restore, step, torch_save };
    let store = &store.inner;
    let work = async {
        let mut times = maintain::measure(&store.inner().snapshots().await?, given)?;
        if measure_restore {
            times.restore = maintain::measured_restore(store.inner()).await?;
        }
        maintain::advise(times, mtbf)
    };
    let found = py.detach(|| until_done(store, work))?;
    let times = found.times;
    let known = [
        ("stall", Some(times.stall)),
        ("save", Some(times.save)),
        ("stage", Some(times.stage)),
        ("restore", Some(times.restore)),
        ("step", times.step),
        ("torch_save", Some(times.torch_save)),
    ];
    let of_times: BTreeMap<&str, Option<(f64, &str, String)>> = known
        .into_iter()
        .map(|(name, time)| (name, time.map(|TimeEstimate { seconds, origin, how }| (seconds, origin.name(), how))))
        .collect();
    let report = PyDict::new(py);
    report.set_item("mtbf_s", found.mtbf_s)?;
    report.set_item("interval_s", found.interval_s)?;
    report.set_item("interval_steps", found.interval_steps)?;
    report.set_item("limited_by_saves", found.is_limited_by_saves)?;
    report.set_item("lost_share", found.lost_share)?;
    report.set_item("torch_save_lost_share", found.torch_lost_share)?;
    report.set_item("keep_last", found.keep_last)?;
    report.set_item("keep_every", found.keep_every)?;
    report.set_item("times", of_times)?;
    Ok(report)
}

/// Stall, encoding, upload and whole save in milliseconds, by step; `None` for unknown times.
type Times = BTreeMap<u64, (Option<f64>, Option<f64>, Option<f64>, Option<f64>)>;

/// Returns the times of saves by step, from step and user metadata (JSON) of snapshots in the order of their commits.
#[pyfunction]
pub(crate) fn times_of_saves(snapshots: Vec<(u64, String)>) -> Times {
    let parsed: Vec<(u64, serde_json::Map<String, serde_json::Value>)> =
        snapshots.iter().filter_map(|(step, user)| Some((*step, serde_json::from_str(user).ok()?))).collect();
    let found = SaveTimes::by_step(parsed.iter().map(|(step, user)| (*step, user)));
    found.into_iter().map(|(step, times)| (step, (times.stall_ms, times.encode_ms, times.upload_ms, times.save_ms))).collect()
}
