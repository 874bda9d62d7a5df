//! Blocking [`crate::maintain`].

use super::Store;
pub use crate::maintain::{
    Advice, CompactOptions, Compacted, CopyOptions, CopyReport, Deletable, DoctorOptions, DoctorReport, ForkOptions, GcOptions, GcReport,
    Origin, ProbeReport, Problem, Reduced, RetentionReport, RunTimes, TimeEstimate, TimeOverrides, VerifyDepth, VerifyOptions,
    VerifyReport, advise, measure,
};
use crate::{Result, Retention, SavedSnapshot, StepSelector, maintain};

/// See [`maintain::verify`](maintain::verify()).
pub fn verify(store: &Store, options: &VerifyOptions) -> Result<VerifyReport> {
    store.block_on(maintain::verify(store.inner(), options))
}

/// See [`maintain::doctor`](maintain::doctor()).
pub fn doctor(store: &Store, options: &DoctorOptions) -> Result<DoctorReport> {
    store.block_on(maintain::doctor(store.inner(), options))
}

/// See [`maintain::probe`](maintain::probe()).
pub fn probe(store: &Store) -> Result<ProbeReport> {
    store.block_on(maintain::probe(store.inner()))
}

/// See [`maintain::probe_pair`](maintain::probe_pair()).
pub fn probe_pair(store: &Store, second: &Store) -> Result<ProbeReport> {
    store.block_on(maintain::probe_pair(store.inner(), second.inner()))
}

/// See [`maintain::gc`](maintain::gc()).
pub fn gc(store: &Store, options: &GcOptions) -> Result<GcReport> {
    store.block_on(maintain::gc(store.inner(), options))
}

/// See [`maintain::compact`](maintain::compact()).
pub fn compact(store: &Store, at: impl Into<StepSelector>, options: &CompactOptions) -> Result<Compacted> {
    store.block_on(maintain::compact(store.inner(), at, options))
}

/// See [`maintain::keep_roles`](maintain::keep_roles()).
pub fn keep_roles(store: &Store, steps: &[u64], roles: &[String], options: &CompactOptions) -> Result<Vec<Reduced>> {
    store.block_on(maintain::keep_roles(store.inner(), steps, roles, options))
}

/// See [`maintain::retain_roles`](maintain::retain_roles()).
pub fn retain_roles(store: &Store, retention: Retention, roles: &[String], options: &CompactOptions) -> Result<RetentionReport> {
    store.block_on(maintain::retain_roles(store.inner(), retention, roles, options))
}

/// See [`maintain::apply_retention`](maintain::apply_retention()).
pub fn apply_retention(store: &Store, retention: Retention, options: &CompactOptions) -> Result<RetentionReport> {
    store.block_on(maintain::apply_retention(store.inner(), retention, options))
}

/// See [`maintain::copy`](maintain::copy()).
pub fn copy(source: &Store, destination: &Store, options: &CopyOptions) -> Result<CopyReport> {
    source.block_on(maintain::copy(source.inner(), destination.inner(), options))
}

/// See [`maintain::fork`](maintain::fork()).
pub fn fork(source: &Store, destination: &Store, options: &ForkOptions) -> Result<(u64, CopyReport)> {
    source.block_on(maintain::fork(source.inner(), destination.inner(), options))
}

/// See [`maintain::measured_restore`](maintain::measured_restore()).
pub fn measured_restore(store: &Store) -> Result<TimeEstimate> {
    store.block_on(maintain::measured_restore(store.inner()))
}

/// See [`maintain::consolidate`](maintain::consolidate()).
pub fn consolidate(source: &Store, destination: &Store, at: impl Into<StepSelector>, options: &CompactOptions) -> Result<SavedSnapshot> {
    source.block_on(maintain::consolidate(source.inner(), destination.inner(), at, options))
}
