//! One save: decides between base and delta, runs the pipeline, and commits.
//!
//! A save tries again, with a base, if the store changed under it or if its parent turns out to be damaged. A failed
//! save leaves the store as it was. The work is elsewhere: `pipeline` encodes and uploads, `commit` commits.

use std::time::Instant;

use super::commit::{Commit, Prepared};
use super::layout::StateLayout;
use super::parent::Parent;
use super::unchanged::ChunkCrcs;
use super::{Metadata, SavedSnapshot, Stopped, Writer, check_user};
use crate::chain::{DecisionReason, DeltaEstimate, ParentChoice, Policy, PolicyDecision, PreviousSave, SaveTimes, milliseconds};
use crate::codec::ObjectiveSetting;
use crate::commit::Age;
use crate::precision::PrecisionDecision;
use crate::{Blob, Error, ErrorKind, Result, TensorView, boxed};

/// Number of attempts of one save, if the store keeps changing from outside.
const ATTEMPTS: u32 = 3;

/// A snapshot to save, as the caller gave it.
struct Request<'a> {
    step: u64,
    layout: &'a StateLayout<'a>,
    metadata: &'a Metadata,
}

impl Writer {
    /// Saves a state: all its tensors (or all shards of them), its blobs, and metadata.
    ///
    /// Encoding runs on rayon's pool, called from this task; uploads run in parallel to it on a multi-threaded runtime.
    /// When this returns `Ok`, the snapshot is durable. Memory beyond the state: the base (unless
    /// [`BaseKeeping::None`](crate::BaseKeeping::None)), a window with its base chunks and upload parts (16 MiB and
    /// four parts for each pair of threads, at most 256 MiB and 32), the begun part of each cask (up to 8 MiB), and one blob.
    pub async fn save(&mut self, step: u64, tensors: &[TensorView<'_>], blobs: &[Blob<'_>], metadata: &Metadata) -> Result<SavedSnapshot> {
        let begun = Instant::now();
        self.stopped.check()?;
        check_user(metadata)?;
        let mut layout = StateLayout::new(tensors, blobs, &self.pipeline.options.roles, self.pipeline.store.limits())?;
        let saved = self.save_layout(step, &mut layout, metadata).await;
        if saved.is_ok() && self.measures_saves {
            let save_ms = Some(milliseconds(begun.elapsed()));
            self.previous = Some(PreviousSave { step, save_ms, upload_ms: self.upload_ms, ..PreviousSave::default() });
        }
        self.stopped = Stopped::after(&saved);
        saved
    }

    #[boxed]
    async fn save_layout(&mut self, step: u64, layout: &mut StateLayout<'_>, metadata: &Metadata) -> Result<SavedSnapshot> {
        self.pipeline.changed_rows.add(layout);
        let mut refusal: Option<Error> = None;
        for _ in 0..ATTEMPTS {
            let (mut parent, mut decision) = self.parent(step).await?;
            if refusal.is_some() && parent.is_some() {
                (parent, decision.reason) = (None, DecisionReason::BrokenParent);
            }
            self.pipeline.pair_numbered(step, layout, parent.as_ref()).await;
            let request = &Request { step, layout, metadata };
            let adapted = self.pipeline.adapt(&mut self.log, step, layout).await?;
            self.reconsider_delta(request, &mut parent, &mut decision).await?;
            let outcome = self.attempt(request, parent.as_ref(), decision, adapted).await;
            // After an unknown outcome, nothing is deleted.
            let may_be_committed = match &outcome {
                Ok(commit) => matches!(commit, Commit::Done(_)),
                Err(error) => error.kind() == ErrorKind::OutcomeUnknown,
            };
            if !may_be_committed {
                self.pipeline.discard_casks().await;
            }
            let error = match outcome {
                Ok(Commit::Done(saved)) => return Ok(*saved),
                Ok(Commit::Stale(stale)) if stale.replaced => {
                    self.restart_in_replaced_store(&stale.error).await?;
                    stale.error
                }
                Ok(Commit::Stale(stale)) => stale.error,
                Ok(Commit::ParentLost(error)) => error,
                Err(error) if parent.is_some() && Parent::is_dispensable(&error) => error,
                Err(error) => {
                    if self.pipeline.keeps_state(parent.as_ref()) {
                        // The failed attempt may have dropped chunks of the old base.
                        self.pipeline.base.clear();
                    }
                    return Err(error);
                }
            };
            self.pipeline.base.clear();
            tracing::warn!(%error, "saving a base instead");
            refusal = Some(error);
        }
        let cause = refusal.unwrap_or_else(|| Error::invalid("no attempt was made"));
        let message = format!("the store changed during each of {ATTEMPTS} attempts to save step {step}: {}", cause.message());
        Err(Error::new(ErrorKind::Conflict, message).object(self.pipeline.store.url()).source(cause))
    }

    /// Chooses the better parent of a delta by estimated sizes. Gives up a delta that would save too little, make the chain
    /// too large or take too long, or whose parent cannot be read. Only the adaptive policy estimates.
    #[boxed]
    async fn reconsider_delta(&mut self, request: &Request<'_>, parent: &mut Option<Parent>, decision: &mut PolicyDecision) -> Result<()> {
        let &Request { step, layout, .. } = request;
        if self.pipeline.options.policy != Policy::Adaptive {
            return Ok(());
        }
        let Some(previous) = parent.take() else { return Ok(()) };
        self.pipeline.choose_settings(step, layout, Some(&previous))?;
        let (found, choice) = match self.pipeline.choose_parent(step, layout, &previous).await {
            Ok(chosen) => chosen,
            Err(error) if Parent::is_dispensable(&error) => {
                tracing::warn!(%error, "no delta can be made; saving a base instead");
                decision.reason = DecisionReason::BrokenParent;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        decision.estimate = Some(found);
        let (better, delta_bytes) = match choice {
            ParentChoice::Base(reason) => {
                decision.reason = reason;
                return Ok(());
            }
            ParentChoice::Previous => (Some(previous), found.delta_bytes),
            ParentChoice::LastBase => (previous.last_base(), found.last_base_delta_bytes.unwrap_or(found.delta_bytes)),
        };
        let is_auto = self.pipeline.options.objective == ObjectiveSetting::Auto;
        let estimate = DeltaEstimate { delta_bytes, ..found };
        if is_auto && self.pipeline.pace.prefers_base(layout.tensor_bytes, &estimate) {
            decision.reason = DecisionReason::SlowDelta;
        } else {
            (*parent, decision.reason) = (better, DecisionReason::SmallDelta);
        }
        Ok(())
    }

    /// Encodes, uploads, and tries to commit.
    #[boxed]
    async fn attempt(
        &mut self,
        request: &Request<'_>,
        parent: Option<&Parent>,
        decision: PolicyDecision,
        precision: Option<PrecisionDecision>,
    ) -> Result<Commit> {
        let &Request { step, layout, metadata } = request;
        let age = Age::start();
        let uploaded = self.pipeline.write_casks(step, layout, parent).await?;
        let next_rows = self.pipeline.next_rows(layout, parent)?;
        let directory = layout.directory()?;
        let prepared = Prepared {
            content: uploaded.content(&directory, &self.pipeline.store)?,
            directory,
            casks: uploaded.casks,
            tensor_bytes: layout.tensor_bytes,
            blobs: Some(&layout.blobs),
            chunk_counts: uploaded.chunk_counts,
            rounding: uploaded.rounding.total,
            finite: uploaded.finite,
            decision,
            precision,
            times: SaveTimes { upload_ms: uploaded.times.upload_ms.filter(|_| self.measures_saves), ..uploaded.times },
            age,
        };
        let mut committed = self.commit(step, parent, &prepared, uploaded.unpublished, metadata).await?;
        if let Commit::Done(saved) = &mut committed {
            saved.objective = uploaded.objective;
            let tensors = layout.tensors.iter().zip(&uploaded.crcs);
            let tensors: Vec<ChunkCrcs<'_>> = tensors.map(|(tensor, crcs)| ChunkCrcs { tensor: &tensor.description, crcs }).collect();
            let earlier = self.pipeline.options.recall.then_some((&self.pipeline.store, self.log.state()));
            saved.unchanged = self.unchanged.find(earlier, step, &tensors, &self.frozen).await;
            if let Some(next_base) = uploaded.next_base {
                self.pipeline.base.promote(saved.id, next_base);
            }
            if let Some(next_rows) = next_rows {
                self.pipeline.changed_rows.restart(saved.id, next_rows);
            }
        }
        Ok(committed)
    }
}
