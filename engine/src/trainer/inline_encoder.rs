//! Encoding in the trainer's process, directly into the memory tier.

use std::time::Instant;

use tensorcask::{ErrorKind, Result, SavedSnapshot, Store, TensorView};
use tokio::runtime::Runtime;

use super::arena_writer::StateView;
use super::attachment::{Attachment, Pause};
use super::saving::SavedState;
use crate::arena::copy_plan::shards_of;
use crate::ipc::messages::Progress;
use crate::memory::inline_generation::InlineGeneration;
use crate::memory::stores::is_full;
use crate::memory::tier::{MemoryTier, UploadState, Uploads};
use crate::os::folders::RunFolder;
use crate::rows::journal::{RowClaim, RowJournal};
use crate::rows::set::with_rows;
use crate::rows::trust::{RowTrust, SaveOfRank};
use crate::run::options::BackPressure;
use crate::run::spec::RunSpec;

/// The memory tier of a trainer that encodes by itself.
#[derive(Debug)]
pub(crate) struct InlineEncoder {
    tier: MemoryTier,
    keep: u32,
    cap: u64,
    back_pressure: BackPressure,
    rows: RowJournal,
    trust: RowTrust,
    /// Newest generation that this process has encoded; 0 before the first.
    encoded: u64,
}

impl InlineEncoder {
    pub(crate) async fn open(run: &RunFolder, tiers: &[Store], spec: &RunSpec, cap: u64, back_pressure: BackPressure) -> Result<Self> {
        let tier = MemoryTier::open(run, tiers, spec.writer_options()?, 1).await?;
        let rows = RowJournal::default();
        let trust = RowTrust::default();
        Ok(Self { tier, keep: spec.keep, cap, back_pressure, rows, trust, encoded: 0 })
    }

    /// Generation of the last snapshot in memory; 0 if there is none.
    pub(crate) async fn last_generation(&self) -> Result<u64> {
        let epoch = self.tier.epoch();
        let sequence = self.tier.last_sequence().await?;
        Ok(if sequence > 0 { InlineGeneration { epoch, sequence }.to_generation() } else { 0 })
    }

    /// Continues with generations above one that an agent may have given to a state: begins a new epoch if necessary.
    pub(crate) async fn begin_after(&mut self, generation: u64) -> Result<()> {
        while self.last_generation().await?.max(self.first_generation()) < generation {
            self.tier.begin_epoch().await?;
        }
        Ok(())
    }

    /// The number before the first generation of this epoch. All generations of older epochs are lower.
    fn first_generation(&self) -> u64 {
        InlineGeneration { epoch: self.tier.epoch(), sequence: 0 }.to_generation()
    }

    /// Notes the changed rows of a save that begins.
    pub(crate) fn note_rows(&mut self, tensors: &[TensorView<'_>]) {
        self.rows.note(shards_of(tensors, &[]));
    }

    /// Encodes a state; `None` if the save is skipped.
    pub(crate) fn save(&mut self, runtime: &Runtime, attachment: &mut Attachment, state: &StateView<'_>) -> Result<Option<SavedState>> {
        let mut pause = Pause::new();
        let mut may_have_room = true;
        let mut was_damaged = false;
        let tensors = self.tensors_with_rows(state)?;
        let state = &StateView { tensors: &tensors, ..*state };
        let (saved, time) = loop {
            if may_have_room {
                let begun = Instant::now();
                match runtime.block_on(self.try_save(attachment.progress(), state)) {
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
                        let uploads = self.upload_state(attachment.progress());
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
            if self.back_pressure != BackPressure::Wait || attachment.is_ending() {
                return Ok(None);
            }
            may_have_room = attachment.pause(&mut pause)?;
        };
        let bytes = state.tensors.iter().map(|tensor| tensor.data().len() as u64).sum();
        let generation = InlineGeneration { epoch: self.tier.epoch(), sequence: saved.sequence }.to_generation();
        self.encoded = generation;
        self.rows.on_saved(generation);
        Ok(Some(SavedState { generation, time, bytes, dropped: None }))
    }

    /// The tensors of a state, with the rows that changed since the last state that was encoded. Saves that were skipped had
    /// rows, too.
    fn tensors_with_rows<'a>(&mut self, state: &StateView<'a>) -> Result<Vec<TensorView<'a>>> {
        let claims = self.rows.claims(shards_of(state.tensors, &[]), self.encoded);
        let name_rows = |(view, claim): (&TensorView<'a>, &RowClaim)| {
            let view = view.clone().without_changed_rows();
            match claim {
                RowClaim::Since { save, rows } if self.trust.accepts(0, self.next_save(), *save) => with_rows(view, rows.bytes()),
                _ => Ok(view),
            }
        };
        state.tensors.iter().zip(&claims).map(name_rows).collect()
    }

    /// The save that is under way. This process is a session of its own, and its generation is not known before.
    fn next_save(&self) -> SaveOfRank {
        SaveOfRank { session: 0, generation: u64::MAX }
    }

    /// Encodes a state, if there is room.
    async fn try_save(&mut self, progress: &Progress, state: &StateView<'_>) -> Result<Option<SavedSnapshot>> {
        if !self.make_room(progress).await? {
            return Ok(None);
        }
        let encoded = self.tier.save(state.step, state.tensors, state.blobs, state.metadata).await?;
        let generation = InlineGeneration { epoch: self.tier.epoch(), sequence: encoded.saved.sequence }.to_generation();
        self.trust.on_encoded(&[SaveOfRank { generation, ..self.next_save() }], &encoded.left_out);
        Ok(Some(encoded.saved))
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
            has_older: progress.durable >= self.first_generation(),
            uploaded: InlineGeneration::sequence_in(progress.durable, self.tier.epoch()),
            unusable: progress.unusable_epoch.into_iter().collect(),
        }
    }
}
