//! Encoding in the trainer's process, directly into the memory tier.

use std::time::Instant;

use tensorcask::{ErrorKind, Result, SavedSnapshot, Store};
use tokio::runtime::Runtime;

use crate::arena_writer::StateView;
use crate::folders::RunFolder;
use crate::inline_generation::InlineGeneration;
use crate::memory_stores::is_full;
use crate::memory_tier::{MemoryTier, UploadState, Uploads};
use crate::options::BackPressure;
use crate::protocol::Progress;
use crate::run_spec::RunSpec;
use crate::saving::SavedState;
use crate::session::{Pause, Session};

/// The memory tier of a trainer that encodes by itself.
#[derive(Debug)]
pub(crate) struct InlineEncoder {
    tier: MemoryTier,
    keep: u32,
    cap: u64,
    back_pressure: BackPressure,
}

impl InlineEncoder {
    pub(crate) async fn open(run: &RunFolder, tiers: &[Store], spec: &RunSpec, cap: u64, back_pressure: BackPressure) -> Result<Self> {
        let tier = MemoryTier::open(run, tiers, spec.writer_options()?, 1).await?;
        Ok(Self { tier, keep: spec.keep, cap, back_pressure })
    }

    /// Generation of the last snapshot in memory; 0 if there is none.
    pub(crate) async fn last_generation(&self) -> Result<u64> {
        let (epoch, sequence) = (self.tier.epoch(), self.tier.last_sequence().await?);
        Ok(if sequence > 0 { InlineGeneration { epoch, sequence }.to_generation() } else { 0 })
    }

    /// Encodes a state; `None` if the save is skipped.
    pub(crate) fn save(&mut self, runtime: &Runtime, session: &mut Session, state: &StateView<'_>) -> Result<Option<SavedState>> {
        let (mut pause, mut may_have_room, mut was_damaged) = (Pause::new(), true, false);
        let (saved, time) = loop {
            if may_have_room {
                let begun = Instant::now();
                match runtime.block_on(self.try_save(session.progress(), state)) {
                    Ok(Some(saved)) => break (saved, begun.elapsed()),
                    Ok(None) => {}
                    Err(e) if e.kind() == ErrorKind::Corrupt && !was_damaged => {
                        tracing::error!(error = %e, "encoded memory is damaged; creating another store, which begins with a base");
                        runtime.block_on(self.tier.begin_epoch())?;
                        was_damaged = true;
                        continue;
                    }
                    Err(e) if is_full(&e) => {
                        let was_empty = runtime.block_on(self.tier.last_sequence())? == 0;
                        let uploads = self.upload_state(session.progress());
                        match runtime.block_on(self.tier.start_over(&uploads))? {
                            // Nothing could be removed for this state.
                            true if was_empty => return Err(e),
                            true => continue,
                            false => {}
                        }
                    }
                    Err(e) => return Err(e),
                }
            }
            // No policy can drop an encoded snapshot, because deltas need it.
            if self.back_pressure != BackPressure::Wait {
                return Ok(None);
            }
            may_have_room = session.pause(&mut pause)?;
        };
        let bytes = state.tensors.iter().map(|tensor| tensor.data().len() as u64).sum();
        let generation = InlineGeneration { epoch: self.tier.epoch(), sequence: saved.sequence }.to_generation();
        Ok(Some(SavedState { generation, time, bytes, dropped_step: None }))
    }

    /// Encodes a state, if there is room.
    async fn try_save(&mut self, progress: &Progress, state: &StateView<'_>) -> Result<Option<SavedSnapshot>> {
        if !self.make_room(progress).await? {
            return Ok(None);
        }
        self.tier.save(state.step, state.tensors, state.blobs, state.metadata).await.map(Some)
    }

    async fn make_room(&mut self, progress: &Progress) -> Result<bool> {
        if progress.unusable_epoch == Some(self.tier.epoch()) {
            self.tier.begin_epoch().await?;
        }
        let uploads = if progress.problem.is_none() { Uploads::Working } else { Uploads::Failing };
        self.tier.make_room(self.keep, self.cap, &self.upload_state(progress), uploads).await
    }

    fn upload_state(&self, progress: &Progress) -> UploadState {
        UploadState {
            uploaded: InlineGeneration::sequence_in(progress.durable, self.tier.epoch()),
            unusable: progress.unusable_epoch.into_iter().collect(),
        }
    }
}
