//! Blocking API for programs without an async runtime. Each call runs the async call to completion.
//!
//! ```
//! use tensorcask::{Dtype, Latest, Metadata, Policy, Slice, TensorView, blocking::Store};
//! let store = Store::open("memory://blocking-example")?;
//! let mut writer = store.writer(Policy::Consecutive)?;
//! for step in 1..=3u8 {
//!     let weights = [step; 12];
//!     let state = [TensorView::new("w", Dtype::U8, &[3, 4], &weights)?];
//!     writer.save(step.into(), &state, &[], &Metadata::default())?;
//! }
//! let snapshot = store.snapshot(Latest)?;
//! assert_eq!(snapshot.read("w", &Slice::rows(1..2))?.data, [3; 4]);
//! snapshot.verify()?;
//! # Ok::<(), tensorcask::Error>(())
//! ```

pub mod maintain;
mod runtime;

use std::future::Future;

use runtime::Runtime;

use crate::interchange::safetensors::{self, Selected};
use crate::wire::{Id, LogEntry, Receipt};
use crate::{
    Bisection, Blob, ExistingStep, Metadata, Policy, Predicate, Result, Retained, Retention, SavedSnapshot, Slice, SnapshotInfo,
    SnapshotRecord, StepSelector, StoreOptions, Tensor, TensorView, WriterOptions,
};

/// Blocking [`Store`](crate::Store). Do not use it in async code, nor in tasks of rayon: a thread that waits for
/// the library may be given another task, which would start a runtime inside of a runtime and panic.
#[derive(Debug, Clone)]
pub struct Store {
    inner: crate::Store,
    runtime: Runtime,
}

/// Blocking [`History`](crate::History).
#[derive(Debug, Clone, Copy)]
pub struct History<'s> {
    store: &'s Store,
}

/// Blocking [`Writer`](crate::Writer).
#[derive(Debug)]
pub struct Writer {
    inner: crate::Writer,
    runtime: Runtime,
}

/// Blocking [`RankWriter`](crate::RankWriter).
#[derive(Debug)]
pub struct RankWriter {
    inner: crate::RankWriter,
    runtime: Runtime,
}

/// Blocking [`Snapshot`](crate::Snapshot). Dereferences to the async snapshot for methods that need no I/O.
#[derive(Debug, Clone)]
pub struct Snapshot {
    inner: crate::Snapshot,
    runtime: Runtime,
}

impl Store {
    /// See [`Store::open`](crate::Store::open).
    pub fn open(url: &str) -> Result<Self> {
        Self::with(StoreOptions::default().open(url)?)
    }

    /// Wraps a store.
    pub fn with(inner: crate::Store) -> Result<Self> {
        Ok(Self { inner, runtime: Runtime::start()? })
    }

    /// Returns the async store inside.
    pub fn inner(&self) -> &crate::Store {
        &self.inner
    }

    /// Runs a future of the async library to completion.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.wait(future)
    }

    /// See [`Store::writer`](crate::Store::writer).
    pub fn writer(&self, policy: Policy) -> Result<Writer> {
        self.writer_with(WriterOptions { policy, ..WriterOptions::default() })
    }

    /// See [`Store::writer_with`](crate::Store::writer_with).
    pub fn writer_with(&self, options: WriterOptions) -> Result<Writer> {
        Ok(Writer { inner: self.block_on(self.inner.writer_with(options))?, runtime: self.runtime.clone() })
    }

    /// See [`Store::snapshot`](crate::Store::snapshot).
    pub fn snapshot(&self, at: impl Into<StepSelector>) -> Result<Snapshot> {
        Ok(Snapshot { inner: self.block_on(self.inner.snapshot(at))?, runtime: self.runtime.clone() })
    }

    /// See [`Store::recover`](crate::Store::recover). Returns the snapshot and the snapshots that were skipped.
    pub fn recover(&self, excluded: &[crate::wire::Id]) -> Result<(Snapshot, Vec<crate::SkippedSnapshot>)> {
        let found = self.block_on(self.inner.recover(excluded))?;
        Ok((Snapshot { inner: found.snapshot, runtime: self.runtime.clone() }, found.skipped))
    }

    /// See [`Store::snapshots`](crate::Store::snapshots).
    pub fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.block_on(self.inner.snapshots())
    }

    /// See [`Store::pin`](crate::Store::pin).
    pub fn pin(&self, step: u64) -> Result<SnapshotRecord> {
        self.block_on(self.inner.pin(step))
    }

    /// See [`Store::unpin`](crate::Store::unpin).
    pub fn unpin(&self, step: u64) -> Result<SnapshotRecord> {
        self.block_on(self.inner.unpin(step))
    }

    /// See [`Store::forget`](crate::Store::forget).
    pub fn forget(&self, steps: &[u64]) -> Result<Vec<SnapshotRecord>> {
        self.block_on(self.inner.forget(steps))
    }

    /// See [`Store::watch`](crate::Store::watch). Wait for the next snapshot with
    /// [`SnapshotWatch::next`](crate::SnapshotWatch::next) on [`block_on`](Self::block_on).
    pub fn watch(&self, after: u64) -> Result<crate::SnapshotWatch> {
        self.block_on(self.inner.watch(after))
    }

    /// See [`Store::rank_writer`](crate::Store::rank_writer).
    pub fn rank_writer(&self, rank: crate::Rank, options: WriterOptions) -> Result<RankWriter> {
        Ok(RankWriter { inner: self.block_on(self.inner.rank_writer(rank, options))?, runtime: self.runtime.clone() })
    }

    /// See [`Store::retain`](crate::Store::retain).
    pub fn retain(&self, retention: Retention) -> Result<Retained> {
        self.block_on(self.inner.retain(retention))
    }

    /// See [`Store::history`](crate::Store::history).
    pub fn history(&self) -> History<'_> {
        History { store: self }
    }
}

impl History<'_> {
    /// See [`History::run`](crate::History::run).
    pub fn run(&self) -> Result<Id> {
        self.store.block_on(self.store.inner.history().run())
    }

    /// See [`History::entries`](crate::History::entries).
    pub fn entries(&self) -> Result<Vec<LogEntry>> {
        self.store.block_on(self.store.inner.history().entries())
    }

    /// See [`History::records`](crate::History::records).
    pub fn records(&self) -> Result<Vec<SnapshotRecord>> {
        self.store.block_on(self.store.inner.history().records())
    }

    /// See [`History::bisect`](crate::History::bisect).
    pub fn bisect(&self, predicate: &Predicate) -> Result<Bisection> {
        self.store.block_on(self.store.inner.history().bisect(predicate))
    }

    /// See [`History::unwanted`](crate::History::unwanted).
    pub fn unwanted(&self, retention: Retention) -> Result<Retained> {
        self.store.block_on(self.store.inner.history().unwanted(retention))
    }
}

impl Writer {
    /// See [`Writer::save`](crate::Writer::save).
    pub fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<SavedSnapshot> {
        self.runtime.wait(self.inner.save(step, tensors, blobs, metadata))
    }

    /// See [`Writer::commit_receipts`](crate::Writer::commit_receipts).
    pub fn commit_receipts(&mut self, step: u64, receipts: &[Receipt], metadata: &Metadata) -> Result<SavedSnapshot> {
        self.runtime.wait(self.inner.commit_receipts(step, receipts, metadata))
    }

    /// See [`Writer::on_existing_step`](crate::Writer::on_existing_step).
    pub fn on_existing_step(&mut self, existing_step: ExistingStep) {
        self.inner.on_existing_step(existing_step);
    }

    /// See [`Writer::base_cache_bytes`](crate::Writer::base_cache_bytes).
    pub fn base_cache_bytes(&self) -> u64 {
        self.inner.base_cache_bytes()
    }
}

impl RankWriter {
    /// See [`RankWriter::save`](crate::RankWriter::save).
    pub fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>]) -> Result<Receipt> {
        self.runtime.wait(self.inner.save(step, tensors, blobs))
    }
}

impl Snapshot {
    /// See [`Snapshot::read`](crate::Snapshot::read).
    pub fn read(&self, name: &str, slice: &Slice) -> Result<Tensor> {
        self.runtime.wait(self.inner.read(name, slice))
    }

    /// See [`Snapshot::read_into`](crate::Snapshot::read_into).
    pub fn read_into(&self, name: &str, slice: &Slice, out: &mut [u8]) -> Result<()> {
        self.runtime.wait(self.inner.read_into(name, slice, out))
    }

    /// See [`Snapshot::gradient`](crate::Snapshot::gradient).
    pub fn gradient(&self, name: &str, slice: &Slice) -> Result<crate::StepGradient> {
        self.runtime.wait(self.inner.gradient(name, slice))
    }

    /// See [`Snapshot::update_into`](crate::Snapshot::update_into).
    pub fn update_into(&self, have: &Self, tensors: Vec<(&str, &mut [u8])>) -> Result<crate::UpdateReport> {
        self.runtime.wait(self.inner.update_into(&have.inner, tensors))
    }

    /// See [`Snapshot::update_and_compare`](crate::Snapshot::update_and_compare).
    pub fn update_and_compare(&self, have: &Self, tensors: Vec<(&str, &mut [u8])>, limit: f64) -> Result<Vec<crate::TensorChange>> {
        self.runtime.wait(self.inner.update_and_compare(&have.inner, tensors, limit))
    }

    /// See [`Snapshot::view`](crate::Snapshot::view).
    pub fn view(&self, name: &str) -> Result<crate::TensorMap> {
        self.runtime.wait(self.inner.view(name))
    }

    /// See [`Snapshot::blobs`](crate::Snapshot::blobs).
    pub fn blobs(&self) -> Result<Vec<(u32, String)>> {
        self.runtime.wait(self.inner.blobs())
    }

    /// See [`Snapshot::read_blobs`](crate::Snapshot::read_blobs).
    pub fn read_blobs(&self, wanted: &[(u32, &str)]) -> Result<Vec<Vec<u8>>> {
        self.runtime.wait(self.inner.read_blobs(wanted))
    }

    /// See [`Snapshot::read_blob`](crate::Snapshot::read_blob).
    pub fn read_blob(&self, rank: u32, name: &str) -> Result<Vec<u8>> {
        self.runtime.wait(self.inner.read_blob(rank, name))
    }

    /// See [`Snapshot::rounding`](crate::Snapshot::rounding).
    pub fn rounding(&self) -> Result<Vec<crate::TensorRounding>> {
        self.runtime.wait(self.inner.rounding())
    }

    /// See [`Inspection::statistics`](crate::Inspection::statistics).
    pub fn statistics(&self) -> Result<Vec<crate::ChunkStatistics>> {
        self.runtime.wait(self.inner.inspect().statistics())
    }

    /// See [`Snapshot::check_rounding`](crate::Snapshot::check_rounding).
    pub fn check_rounding(&self, bound: f64) -> Result<()> {
        self.runtime.wait(self.inner.check_rounding(bound))
    }

    /// See [`Snapshot::verify`](crate::Snapshot::verify).
    pub fn verify(&self) -> Result<()> {
        self.runtime.wait(self.inner.verify())
    }

    /// See [`interchange::safetensors::write`](safetensors::write).
    pub fn write_safetensors(&self, selected: &[Selected], out: &mut (impl std::io::Write + std::io::Seek + Send)) -> Result<u64> {
        self.runtime.wait(safetensors::write(&self.inner, selected, out))
    }
}

impl std::ops::Deref for Snapshot {
    type Target = crate::Snapshot;

    fn deref(&self) -> &crate::Snapshot {
        &self.inner
    }
}
