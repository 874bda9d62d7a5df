//! The first step of a run whose statistics satisfy a predicate.
//!
//! [`History::bisect`] scans the steps in ascending order and stops at the first match. A binary search would read fewer
//! steps, but it is right only if every step after the first match matches too. A NaN can vanish: weights are restored, or
//! a tensor is saved no longer. Norms go up and down. Statistics are small, so the scan is affordable, and it is right for
//! every predicate.
//!
//! Invariant: a step counts as good only if the statistics of all its tensors were read and decide the predicate. Memory
//! is bounded by the statistics of [`CONCURRENT_SNAPSHOTS`] steps.

use super::predicate::Predicate;
use super::survey::CONCURRENT_SNAPSHOTS;
use super::{SkippedSnapshot, Snapshot, TensorStatistics};
use crate::commit::{History, SnapshotRecord, load_log};
use crate::store::concurrently;
use crate::tensor::element_count;
use crate::wire::Id;
use crate::{ChunkStatistics, Error, Result, boxed};

/// Result of [`History::bisect`].
#[derive(Debug)]
pub struct Bisection {
    /// First step with a tensor that matches, if one was found.
    pub first: Option<MatchedStep>,
    /// Last step before it that was measured and does not match.
    pub last_good: Option<u64>,
    /// Number of steps whose statistics were read.
    pub examined: u64,
    /// Steps before the match that may match as well: they have no statistics, or not those that the predicate needs.
    /// Ascending.
    pub unmeasured: Vec<u64>,
    /// Steps before the match that are damaged, or whose statistics are. Ascending.
    pub skipped: Vec<SkippedSnapshot>,
}

impl Bisection {
    /// Whether the result holds for all steps. Otherwise, an earlier step without readable statistics may match as well.
    pub fn is_certain(&self) -> bool {
        self.unmeasured.is_empty() && self.skipped.is_empty()
    }
}

/// A step with tensors that match.
#[derive(Debug, Clone, PartialEq)]
pub struct MatchedStep {
    /// The step.
    pub step: u64,
    /// Id of the snapshot.
    pub snapshot: Id,
    /// Tensors that match, by name.
    pub tensors: Vec<MatchedTensor>,
}

/// A tensor that matches.
#[derive(Debug, Clone, PartialEq)]
pub struct MatchedTensor {
    /// Statistics of the whole tensor, or of the part that was measured. Of a tied tensor, under the name that the
    /// predicate asks for.
    pub statistics: TensorStatistics,
    /// First chunk that matches on its own, under the name of the stored tensor; `None` if only the whole tensor does.
    pub first_chunk: Option<ChunkStatistics>,
}

impl History<'_> {
    /// Finds the first live step, by number, with a tensor for which `predicate` holds. Reads statistics only, no tensor
    /// bytes, and no step after the first match.
    ///
    /// Steps without statistics and damaged steps are reported, never taken for good steps. Fails with `NotFound` if the
    /// predicate is restricted to tensors that no step has.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> tensorcask::Result<()> {
    /// use tensorcask::{Dtype, Metadata, Policy, Predicate, Store, TensorView, WriterOptions};
    /// let store = Store::open("memory://bisect-example")?;
    /// let options = WriterOptions { policy: Policy::Full, statistics: true, ..WriterOptions::default() };
    /// let mut writer = store.writer_with(options).await?;
    /// for (step, value) in [(1, 0.5f32), (2, 0.25), (3, f32::NAN), (4, f32::NAN)] {
    ///     let bytes = value.to_le_bytes();
    ///     let state = [TensorView::new("w", Dtype::F32, &[], &bytes)?];
    ///     writer.save(step, &state, &[], &Metadata::default()).await?;
    /// }
    /// let found = store.history().bisect(&Predicate::parse("nan > 0")?).await?;
    /// assert_eq!((found.first.unwrap().step, found.last_good), (3, Some(2)));
    /// # Ok(()) }
    /// ```
    pub async fn bisect(&self, predicate: &Predicate) -> Result<Bisection> {
        let log = load_log(self.store).await?;
        let state = log.state();
        if state.sequence == 0 {
            // Reports an empty folder as a missing store.
            self.run().await?;
        }
        let mut records: Vec<&SnapshotRecord> = state.live().collect();
        records.sort_unstable_by_key(|record| record.step);
        let mut found = Bisection { first: None, last_good: None, examined: 0, unmeasured: vec![], skipped: vec![] };
        let mut has_tensors = false;
        for some in records.chunks(CONCURRENT_SNAPSHOTS) {
            let examine = |record: &SnapshotRecord| {
                let id = record.id;
                async move {
                    let examined = async { Examined::of(&Snapshot::load(self.store, state, id).await?, predicate).await };
                    match examined.await {
                        Err(error) if !error.is_unreadable() => Err(error),
                        result => Ok(result),
                    }
                }
            };
            let results: Vec<Result<Examined>> = concurrently(CONCURRENT_SNAPSHOTS, some.iter().copied().map(examine)).await?;
            for (record, result) in some.iter().zip(results) {
                let step = record.step;
                let examined = match result {
                    Ok(examined) => examined,
                    Err(error) => {
                        tracing::warn!(step, %error, "this step cannot be read; it is left out");
                        found.skipped.push(SkippedSnapshot { step, snapshot: record.id, error });
                        continue;
                    }
                };
                has_tensors |= examined.has_tensors;
                found.examined += u64::from(examined.has_rows);
                if !examined.matches.is_empty() {
                    found.first = Some(MatchedStep { step, snapshot: record.id, tensors: examined.matches });
                    return Ok(found);
                }
                match examined.is_decided {
                    true => found.last_good = Some(step),
                    false => found.unmeasured.push(step),
                }
            }
        }
        if !has_tensors && found.skipped.is_empty() && !records.is_empty() {
            return Err(Error::not_found("no step has a tensor that matches the pattern; `tensorcask inspect` lists tensors")
                .object(self.store.url()));
        }
        Ok(found)
    }
}

/// Result of a predicate for the statistics of a step.
struct Examined {
    matches: Vec<MatchedTensor>,
    /// Whether the statistics of all tensors decide the predicate.
    is_decided: bool,
    /// Whether the step has tensors that the predicate looks at.
    has_tensors: bool,
    has_rows: bool,
}

impl Examined {
    #[boxed]
    async fn of(snapshot: &Snapshot, predicate: &Predicate) -> Result<Self> {
        let rows = snapshot.inspect().statistics().await?;
        let mut examined = Self { matches: vec![], is_decided: true, has_tensors: false, has_rows: !rows.is_empty() };
        let directory = &snapshot.chain.newest().directory;
        for tensor in (0..directory.len()).filter(|&tensor| predicate.is_about(directory.name(tensor))) {
            examined.has_tensors = true;
            let name = directory.name(directory.alias_of(tensor).unwrap_or(tensor));
            if directory.alias_of(tensor).is_some() && predicate.is_about(name) {
                // The stored tensor is examined under its own name.
                continue;
            }
            // Rows ascend by tensor.
            let start = rows.partition_point(|row| row.tensor.as_str() < name);
            let end = rows.partition_point(|row| row.tensor.as_str() <= name);
            let chunks = rows.get(start..end).unwrap_or_default();
            let elements = element_count(&directory.shape(tensor)).unwrap_or(u64::MAX);
            let Some(statistics) = TensorStatistics::of(chunks) else {
                examined.is_decided &= elements == 0;
                continue;
            };
            // A rank may have saved its shards without statistics.
            let holds = match statistics.elements == elements {
                true => predicate.holds(&statistics),
                false => predicate.holds_with_part(&statistics, elements),
            };
            examined.is_decided &= holds.is_some();
            if holds == Some(true) {
                let matches = |chunk: &&ChunkStatistics| {
                    let alone = TensorStatistics::of(std::slice::from_ref(*chunk));
                    alone.is_some_and(|alone| predicate.holds(&alone) == Some(true))
                };
                let first_chunk = chunks.iter().find(matches).cloned();
                let statistics = TensorStatistics { tensor: directory.name(tensor).to_owned(), ..statistics };
                examined.matches.push(MatchedTensor { statistics, first_chunk });
            }
        }
        Ok(examined)
    }
}
