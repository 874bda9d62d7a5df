//! `Store`: opens snapshots and writers, lists and verifies.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorcask::blocking;
use tensorcask::codec::{CodecRules, ObjectiveSetting};
use tensorcask::maintain::{self, VerifyDepth, VerifyOptions};
use tensorcask::wire::Id;
use tensorcask::{
    Claim, FiniteCheck, NamePatterns, Policy, Precision, Predicate, Rank, RoleRules, StepSelector, StoreOptions, WriterOptions,
};

use crate::errors::raise;
use crate::snapshot::Snapshot;
use crate::table::{Catalog, Chunks, Commits, Statistics, Tensors};
use crate::wait::until_done;
use crate::writer::{self, RankWriter, Writer};

/// Store, wrapped by the Python package.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Store {
    pub(crate) inner: blocking::Store,
}

/// Step, id, and error of a skipped snapshot.
type PassedOver = (u64, String, String);

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (url, config=None, fsync=true))]
    fn new(url: &str, config: Option<BTreeMap<String, String>>, fsync: bool) -> PyResult<Self> {
        let options = StoreOptions { config: config.unwrap_or_default(), fsync, ..StoreOptions::default() };
        let inner = options.open(url).and_then(blocking::Store::with).map_err(|e| raise(&e))?;
        Ok(Self { inner })
    }

    #[getter]
    fn url(&self) -> &str {
        self.inner.inner().url()
    }

    /// Returns requests, bytes read and bytes written so far.
    fn io(&self) -> (u64, u64, u64) {
        let io = self.inner.inner().io();
        (io.requests, io.bytes_read, io.bytes_written)
    }

    /// Opens the snapshot of a step, or the newest snapshot.
    #[pyo3(signature = (step=None))]
    fn snapshot(&self, py: Python<'_>, step: Option<u64>) -> PyResult<Snapshot> {
        let at = step.map_or(StepSelector::Latest, StepSelector::Step);
        let store = &self.inner;
        let found = py.detach(|| until_done(store, store.inner().snapshot(at)))?;
        Ok(Snapshot::new(store.clone(), found))
    }

    /// Opens the newest snapshot that can be rebuilt. Also returns the newer snapshots that cannot: step, id, error.
    fn recover(&self, py: Python<'_>, excluded: Vec<String>) -> PyResult<(Snapshot, Vec<PassedOver>)> {
        let excluded: Vec<Id> = excluded.iter().map(|id| Id::from_hex(id)).collect::<Result<_, _>>().map_err(|e| raise(&e))?;
        let store = &self.inner;
        let found = py.detach(|| until_done(store, store.inner().recover(&excluded)))?;
        let skipped = found.skipped.iter().map(|passed| (passed.step, passed.snapshot.to_hex(), passed.error.to_string())).collect();
        Ok((Snapshot::new(store.clone(), found.snapshot), skipped))
    }

    /// Returns a dict for each live snapshot, with `user` as JSON.
    fn snapshots<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let store = &self.inner;
        let found = py.detach(|| until_done(store, store.inner().snapshots()))?;
        let row = |info: tensorcask::SnapshotInfo| {
            let row = PyDict::new(py);
            row.set_item("step", info.record.step)?;
            row.set_item("id", info.record.id.to_hex())?;
            row.set_item("kind", info.record.kind().name())?;
            row.set_item("parent", info.record.parent.map(|id| id.to_hex()))?;
            row.set_item("sequence", info.record.sequence)?;
            row.set_item("pinned", info.record.pinned)?;
            row.set_item("time_ms", info.record.time_ms)?;
            row.set_item("tensor_bytes", info.tensor_bytes)?;
            row.set_item("stored_bytes", info.stored_bytes)?;
            row.set_item("user", serde_json::Value::Object(info.user).to_string())?;
            Ok(row)
        };
        found.into_iter().map(row).collect()
    }

    /// Returns the table of all snapshots.
    fn catalog(&self, py: Python<'_>) -> PyResult<Catalog> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().history().catalog())).map(|table| Catalog::new(vec![table]))
    }

    /// Returns the statistics of the chunks of all live steps, or of some steps. Leaves out damaged steps.
    #[pyo3(signature = (steps=None))]
    fn stats(&self, py: Python<'_>, steps: Option<Vec<u64>>) -> PyResult<Statistics> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().history().tables().statistics(steps.as_deref()))).map(Statistics::new)
    }

    /// Finds the first live step with a tensor for which a predicate on its statistics holds.
    #[pyo3(signature = (predicate, tensor=None))]
    fn bisect<'py>(&self, py: Python<'py>, predicate: &str, tensor: Option<&str>) -> PyResult<Bound<'py, PyDict>> {
        let parsed = Predicate::parse(predicate).and_then(|parsed| match tensor {
            Some(names) => Ok(parsed.of_tensors(NamePatterns::parse([names])?)),
            None => Ok(parsed),
        });
        let store = &self.inner;
        let predicate = parsed.map_err(|e| raise(&e))?;
        let found = py.detach(|| until_done(store, store.inner().history().bisect(&predicate)))?;
        let report = PyDict::new(py);
        let matches = found.first.iter().flat_map(|first| &first.tensors).map(|found| {
            let chunk = found.first_chunk.as_ref().map(|row| (row.shard.offset.clone(), row.shard.shape.clone(), row.chunk));
            (found.statistics.tensor.clone(), chunk)
        });
        report.set_item("step", found.first.as_ref().map(|first| first.step))?;
        report.set_item("tensors", matches.collect::<Vec<_>>())?;
        report.set_item("last_good", found.last_good)?;
        report.set_item("examined", found.examined)?;
        report.set_item("without_statistics", found.unmeasured)?;
        report.set_item("damaged", found.skipped.iter().map(|skipped| skipped.step).collect::<Vec<_>>())?;
        Ok(report)
    }

    /// Returns the tensors of all live steps, or of some steps. Leaves out damaged steps.
    #[pyo3(signature = (steps=None))]
    fn tensors(&self, py: Python<'_>, steps: Option<Vec<u64>>) -> PyResult<Tensors> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().history().tables().tensors(steps.as_deref()))).map(Tensors::new)
    }

    /// Returns the chunks of all live steps, or of some steps, as they are stored. Leaves out damaged steps.
    #[pyo3(signature = (steps=None))]
    fn chunks(&self, py: Python<'_>, steps: Option<Vec<u64>>) -> PyResult<Chunks> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().history().tables().chunks(steps.as_deref()))).map(Chunks::new)
    }

    /// Returns the entries of the log.
    fn log(&self, py: Python<'_>) -> PyResult<Commits> {
        let store = &self.inner;
        let entries = py.detach(|| until_done(store, store.inner().history().entries()))?;
        Commits::of(&tensorcask_cli::commits(&entries))
    }

    /// Verifies the store. Returns the counts, and step, object, message and all steps of each problem.
    #[pyo3(signature = (depth, step=None))]
    fn verify<'py>(&self, py: Python<'py>, depth: &str, step: Option<u64>) -> PyResult<Bound<'py, PyDict>> {
        let options = VerifyOptions { depth: VerifyDepth::from_name(depth).map_err(|e| raise(&e))?, step, shard: None };
        let store = &self.inner;
        let report = py.detach(|| until_done(store, maintain::verify(store.inner(), &options)))?;
        let row = |problem: &maintain::Problem| {
            (problem.step, problem.error.object_name().map(str::to_owned), problem.error.to_string(), problem.steps.clone())
        };
        let problems: Vec<_> = report.problems.iter().map(row).collect();
        let facts = PyDict::new(py);
        facts.set_item("entries", report.entries)?;
        facts.set_item("snapshots", report.snapshots)?;
        facts.set_item("casks", report.casks)?;
        facts.set_item("chunks", report.chunks)?;
        facts.set_item("problems", problems)?;
        Ok(facts)
    }

    /// Protects a step.
    fn pin(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().pin(step))).map(|_| ())
    }

    /// Ends the protection of a step.
    fn unpin(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().unpin(step))).map(|_| ())
    }

    /// Marks steps as no longer wanted.
    fn forget(&self, py: Python<'_>, steps: Vec<u64>) -> PyResult<()> {
        let store = &self.inner;
        py.detach(|| until_done(store, store.inner().forget(&steps))).map(|_| ())
    }

    /// Opens the store for writing. Creates the store if it does not exist.
    #[pyo3(signature = (
        policy, every=None, base_cache="memory", verify_after_encode=true, objective="balanced", precision=vec![],
        statistics=false, check=None, frozen=vec![], codecs=vec![], roles=vec![], claim="job"
    ))]
    #[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
    fn writer(
        &self,
        py: Python<'_>,
        policy: &str,
        every: Option<u64>,
        base_cache: &str,
        verify_after_encode: bool,
        objective: &str,
        precision: Vec<String>,
        statistics: bool,
        check: Option<&str>,
        frozen: Vec<String>,
        codecs: Vec<String>,
        roles: Vec<String>,
        claim: &str,
    ) -> PyResult<Writer> {
        let mut options =
            options(policy, every, base_cache, verify_after_encode, objective, &precision, statistics, check, frozen, &codecs, &roles)?;
        options.claim = match claim {
            "job" => Claim::Job,
            "once" => Claim::Once,
            "once_taking_over" => Claim::OnceTakingOver,
            other => return Err(PyValueError::new_err(format!("claim {other:?}: use 'job', 'once' or 'once_taking_over'"))),
        };
        let store = &self.inner;
        let inner = py.detach(|| until_done(store, store.inner().writer_with(options)))?;
        Ok(Writer::new(store.clone(), inner))
    }

    /// Opens the store for the saves of one rank.
    #[pyo3(signature = (
        rank, world, policy, every=None, base_cache="memory", verify_after_encode=true, objective="balanced", precision=vec![],
        statistics=false, check=None, frozen=vec![], codecs=vec![], roles=vec![]
    ))]
    #[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
    fn rank_writer(
        &self,
        py: Python<'_>,
        rank: u32,
        world: u32,
        policy: &str,
        every: Option<u64>,
        base_cache: &str,
        verify_after_encode: bool,
        objective: &str,
        precision: Vec<String>,
        statistics: bool,
        check: Option<&str>,
        frozen: Vec<String>,
        codecs: Vec<String>,
        roles: Vec<String>,
    ) -> PyResult<RankWriter> {
        let options =
            options(policy, every, base_cache, verify_after_encode, objective, &precision, statistics, check, frozen, &codecs, &roles)?;
        let store = &self.inner;
        let rank = Rank { rank, world, attempt: 0 };
        let inner = py.detach(|| until_done(store, store.inner().rank_writer(rank, options)))?;
        Ok(RankWriter::new(store.clone(), inner))
    }
}

/// Returns a URL as it is, and a local path from the root on. Refuses a text that was meant as a URL.
#[pyfunction]
pub(crate) fn absolute_url(url: &str) -> PyResult<String> {
    tensorcask::absolute_url(url).map_err(|e| raise(&e))
}

/// Job id that the log names with every commit of this process. A pickled store carries the id to another process.
static JOB: OnceLock<Id> = OnceLock::new();

/// Job id of a process that joins no other job. It exists from the import of the package on, so that a child that is
/// forked before the first save has the id of its parent.
static OWN_JOB: OnceLock<Id> = OnceLock::new();

/// Creates the job id of this process. The import of the package calls this.
pub(crate) fn start_job() -> PyResult<Id> {
    let new = Id::random().map_err(|e| raise(&e))?;
    Ok(*OWN_JOB.get_or_init(|| new))
}

/// Returns the job id of this process.
#[pyfunction]
pub(crate) fn job_id() -> PyResult<String> {
    Ok(job()?.to_hex())
}

/// Makes this process part of the job of another process. Has no effect once this process has used its own id.
#[pyfunction]
pub(crate) fn join_job(id: &str) -> PyResult<()> {
    let id = Id::from_hex(id).map_err(|e| raise(&e))?;
    JOB.get_or_init(|| id);
    Ok(())
}

fn job() -> PyResult<Id> {
    let own = start_job()?;
    Ok(*JOB.get_or_init(|| own))
}

#[allow(clippy::too_many_arguments, reason = "as in Python, where they have names")]
fn options(
    policy: &str,
    every: Option<u64>,
    base_cache: &str,
    verify_after_encode: bool,
    objective: &str,
    precision: &[String],
    statistics: bool,
    check: Option<&str>,
    frozen: Vec<String>,
    codecs: &[String],
    roles: &[String],
) -> PyResult<WriterOptions> {
    Ok(WriterOptions {
        policy: Policy::from_name(policy, every).map_err(|e| raise(&e))?,
        base_cache: writer::keeping(base_cache)?,
        id: Some(job()?),
        verify_after_encode,
        statistics,
        objective: ObjectiveSetting::from_name(objective).map_err(|e| raise(&e))?,
        frozen,
        check: check.map_or(Ok(FiniteCheck::Off), FiniteCheck::from_name).map_err(|e| raise(&e))?,
        codecs: CodecRules::parse(codecs.iter().map(String::as_str)).map_err(|e| raise(&e))?,
        roles: RoleRules::parse(roles.iter().map(String::as_str)).map_err(|e| raise(&e))?,
        precision: Precision::parse(precision.iter().map(String::as_str)).map_err(|e| raise(&e))?,
        ..WriterOptions::default()
    })
}
