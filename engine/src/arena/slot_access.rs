//! Exclusive access to one slot of an arena: a trainer fills a claimed slot, the agent reads a taken slot.
//!
//! Dropping a handle undoes the access: a claimed slot is abandoned, and a taken slot is given back.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rayon::prelude::*;
use tensorcask::{Error, ErrorKind, Result};

use super::copy_plan::{CopiedState, CopyPlan};
use super::file::field;
use super::image::{Piece, StoredState};
use super::slot::{Claimable, SlotState, SlotWord, Transition, choose_slot, next_generation, next_to_encode};
use super::{Arena, SlotHeader};

/// A slot that the trainer fills. Dropped before it is published, it is abandoned.
#[derive(Debug)]
pub(crate) struct ClaimedSlot {
    arena: Arc<Arena>,
    slot: usize,
    word: SlotWord,
    /// State that was dropped to free the slot.
    pub dropped: Option<DroppedState>,
    is_published: bool,
}

/// A state that was dropped for a newer one before the agent took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DroppedState {
    pub step: u64,
    pub generation: u64,
}

impl ClaimedSlot {
    /// Claims a slot for the next save; `None` if no slot may be claimed now.
    pub(crate) fn claim(arena: &Arc<Arena>, claimable: Claimable) -> Result<Option<Self>> {
        loop {
            let words = arena.words()?;
            let Some(slot) = choose_slot(&words, claimable) else { return Ok(None) };
            let Some(seen) = words.get(slot).copied() else { return Ok(None) };
            let claim = Transition::Claim { generation: next_generation(&words) };
            if arena.advance(slot, seen, claim)? {
                let step = arena.file().field(slot, field::STEP)?.load(Ordering::Relaxed);
                let dropped = (seen.state == SlotState::Full).then_some(DroppedState { step, generation: seen.generation });
                let Some(word) = seen.after(claim) else { return Ok(None) };
                return Ok(Some(Self { arena: arena.clone(), slot, word, dropped, is_published: false }));
            }
        }
    }

    /// Copies a state into the slot. Fails with `LimitExceeded` if the state or its description does not fit.
    pub(crate) fn fill(self, plan: CopyPlan<'_>, session: u64, attempt: u64) -> Result<FilledSlot> {
        let arena = &*self.arena;
        let start = arena.file().start(self.slot);
        if !arena.file().fits(plan.data_bytes) {
            return Err(too_small(arena, plan.data_bytes));
        }
        let copied = plan.copy(|at, bytes| arena.file().write(start + at, bytes))?;
        // A device writes these bytes later, and cannot report that there is no memory.
        let deferred: Vec<Piece> = copied.deferred().flat_map(Piece::extents).collect();
        deferred.par_iter().try_for_each(|extent| arena.file().make_present(start + extent.at, extent.bytes))?;
        let end = copied.data_bytes.saturating_add(copied.description.len());
        if !arena.file().fits(end) {
            return Err(too_small(arena, end));
        }
        Ok(FilledSlot { claimed: self, copied, session, attempt })
    }
}

impl Drop for ClaimedSlot {
    fn drop(&mut self) {
        if !self.is_published {
            let _ = self.arena.advance(self.slot, self.word, Transition::Abandon);
        }
    }
}

/// A slot that is filled, except for deferred tensors that a device writes.
#[derive(Debug)]
pub(crate) struct FilledSlot {
    claimed: ClaimedSlot,
    copied: CopiedState,
    session: u64,
    attempt: u64,
}

impl FilledSlot {
    /// Buffers for the deferred tensors, in their order. Tensors tied to others have none.
    pub(crate) fn deferred(&mut self) -> Result<Vec<&mut [u8]>> {
        let start = self.claimed.arena.file().start(self.claimed.slot);
        let parts: Vec<_> = self.copied.deferred().map(|piece| (start + piece.at, piece.bytes)).collect();
        self.claimed.arena.file().memory().writable(&parts)
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.claimed.arena
    }

    /// State that was dropped to free the slot.
    pub(crate) fn dropped(&self) -> Option<DroppedState> {
        self.claimed.dropped
    }

    /// Publishes the state as the part of one of `world` ranks; returns its generation.
    pub(crate) fn publish(mut self, step: u64, world: u32) -> Result<u64> {
        let arena = &*self.claimed.arena;
        let slot = self.claimed.slot;
        let at = self.copied.data_bytes;
        let memory = arena.file().memory();
        let start = arena.file().start(slot);
        self.copied.complete(|at, bytes| memory.bytes(start + at, bytes))?;
        let description = &self.copied.description;
        if !arena.file().fits(at.saturating_add(description.len())) {
            return Err(too_small(arena, at.saturating_add(description.len())));
        }
        arena.file().write(start + at, description)?;
        for (name, value) in [
            (field::STEP, step),
            (field::DESCRIPTION_AT, at as u64),
            (field::DESCRIPTION_BYTES, description.len() as u64),
            (field::DESCRIPTION_CRC, u64::from(crc32fast::hash(description))),
            (field::SESSION, self.session),
            (field::ATTEMPT, self.attempt),
            (field::WORLD, u64::from(world)),
        ] {
            arena.file().field(slot, name)?.store(value, Ordering::Relaxed);
        }
        let is_published = arena.advance(slot, self.claimed.word, Transition::Publish)?;
        self.claimed.is_published = is_published;
        match is_published {
            true => Ok(self.claimed.word.generation),
            false => Err(Error::new(ErrorKind::Conflict, "another process changed the arena during this save; the copy is not used")),
        }
    }
}

fn too_small(arena: &Arena, bytes: usize) -> Error {
    Error::limit(format!("the state needs {bytes} bytes, but a slot of the arena has {}", arena.file().slot_bytes()))
}

/// A slot that the agent encodes. Dropped before it is released, it is given back.
#[derive(Debug)]
pub(crate) struct TakenSlot<'a> {
    arena: &'a Arena,
    slot: usize,
    word: SlotWord,
    is_released: bool,
}

impl<'a> TakenSlot<'a> {
    /// Takes the full slot with the lowest generation that `is_wanted` accepts.
    pub(crate) fn take(arena: &'a Arena, is_wanted: impl Fn(&SlotHeader) -> bool) -> Result<Option<Self>> {
        loop {
            let mut words = arena.words()?;
            for (slot, word) in words.iter_mut().enumerate() {
                if !is_wanted(&arena.header(slot, *word)?) {
                    word.state = SlotState::Empty;
                }
            }
            let Some(slot) = next_to_encode(&words) else { return Ok(None) };
            let Some(seen) = words.get(slot).copied() else { return Ok(None) };
            if arena.advance(slot, seen, Transition::Take)? {
                let word = SlotWord { state: SlotState::Encoding, ..seen };
                return Ok(Some(Self { arena, slot, word, is_released: false }));
            }
        }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.word.generation
    }

    /// The step from the header, readable even if the description is damaged.
    pub(crate) fn step(&self) -> Result<u64> {
        Ok(self.arena.file().field(self.slot, field::STEP)?.load(Ordering::Relaxed))
    }

    /// Session of the save.
    pub(crate) fn session(&self) -> Result<u64> {
        Ok(self.arena.header(self.slot, self.word)?.session)
    }

    pub(crate) fn state(&self) -> Result<StoredState<'_>> {
        self.arena.read(self.slot)
    }

    /// Marks the state as encoded, for later agents.
    pub(crate) fn mark_encoded(&self) -> Result<()> {
        self.arena.raise_encoded(self.generation())
    }

    /// Tells the trainer that the agent no longer needs the slot.
    pub(crate) fn release(mut self) -> Result<()> {
        self.is_released = self.arena.advance(self.slot, self.word, Transition::Release)?;
        Ok(())
    }
}

impl Drop for TakenSlot<'_> {
    fn drop(&mut self) {
        if !self.is_released {
            let _ = self.arena.advance(self.slot, self.word, Transition::GiveBack);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tensorcask::{Blob, Dtype, Metadata, Result, TensorView};

    use super::super::copy_plan::CopyPlan;
    use super::super::slot::{SlotState, SlotWord};
    use super::Arena;
    use super::{Claimable, ClaimedSlot, TakenSlot};

    fn arena(folder: &tempfile::TempDir) -> Arc<Arena> {
        Arc::new(Arena::create(&folder.path().join("arena"), 2, 3 << 20, 0).unwrap())
    }

    /// Saves a state that is larger than an extent and has tied tensors and a blob.
    fn save(arena: &Arc<Arena>, step: u64, claimable: Claimable) -> Result<Option<u64>> {
        let large: Vec<u8> = (0..2_500_000u32).map(|i| (i * 7 + step as u32) as u8).collect();
        let tensors = [
            TensorView::new("w", Dtype::U8, &[2_500_000], &large)?,
            TensorView::new("w.tied", Dtype::U8, &[2_500_000], &large)?,
            TensorView::new("empty", Dtype::F32, &[0], &[])?,
        ];
        let blobs = [Blob::new("rng", &b"seed"[..])];
        let Some(claimed) = ClaimedSlot::claim(arena, claimable)? else { return Ok(None) };
        claimed.fill(CopyPlan::new(step, &tensors, &[], &blobs, &Metadata::default())?, 0, 0)?.publish(step, 1).map(Some)
    }

    fn check(arena: &Arena, slot: usize, step: u64) {
        let stored = arena.read(slot).unwrap();
        stored.verify().unwrap();
        let tensors = stored.tensors().unwrap();
        assert_eq!((stored.step(), tensors.len()), (step, 3));
        assert!(tensors[0].data().iter().enumerate().all(|(i, byte)| *byte == (i as u32 * 7 + step as u32) as u8));
        assert_eq!(tensors[0].data().as_ptr(), tensors[1].data().as_ptr(), "tied tensors are copied once");
        assert_eq!(&*stored.blobs()[0].data, b"seed");
    }

    #[test]
    fn a_second_mapping_reads_saved_states() {
        let folder = tempfile::tempdir().unwrap();
        let trainer = arena(&folder);
        assert_eq!(save(&trainer, 10, Claimable::Free).unwrap(), Some(1));
        assert_eq!(save(&trainer, 11, Claimable::Free).unwrap(), Some(2));
        assert_eq!(save(&trainer, 12, Claimable::Free).unwrap(), None, "both slots wait for the agent");
        let agent = Arena::open(&folder.path().join("arena")).unwrap();
        let taken = TakenSlot::take(&agent, |_| true).unwrap().unwrap();
        assert_eq!((taken.generation(), taken.state().unwrap().step()), (1, 10));
        taken.release().unwrap();
        assert_eq!(save(&trainer, 12, Claimable::Free).unwrap(), Some(3));
        check(&agent, 0, 12);
        check(&agent, 1, 11);
        assert_eq!(save(&trainer, 13, Claimable::FreeOrFull).unwrap(), Some(4), "the older full slot is dropped");
        let headers = agent.headers().unwrap();
        assert_eq!(headers.iter().map(|header| (header.step, header.word.generation)).collect::<Vec<_>>(), [(12, 3), (13, 4)]);
        check(&agent, 1, 13);
    }

    #[test]
    fn damaged_bytes_are_detected() {
        let folder = tempfile::tempdir().unwrap();
        let arena = arena(&folder);
        save(&arena, 10, Claimable::Free).unwrap();
        let write = |offset: usize, bytes: &[u8]| arena.file().memory().write(arena.file().start(0) + offset, bytes).unwrap();
        for offset in [0, 1_048_576, 2_499_999] {
            write(offset, &[77]);
            assert!(arena.read(0).unwrap().verify().is_err(), "offset {offset}");
            write(offset, &[(offset as u32 * 7 + 10) as u8]);
            check(&arena, 0, 10);
        }
        write(2_500_096 + 5, b"X");
        assert!(arena.read(0).is_err());
    }

    #[test]
    fn an_arena_is_reset_unless_the_agent_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let arena = arena(&folder);
        save(&arena, 10, Claimable::Free).unwrap();
        save(&arena, 11, Claimable::Free).unwrap();
        let taken = TakenSlot::take(&arena, |_| true).unwrap().unwrap();
        assert!(!arena.reset().unwrap(), "the agent is encoding a state");
        taken.release().unwrap();
        assert!(arena.reset().unwrap());
        assert_eq!((arena.headers().unwrap(), arena.failed().unwrap()), (vec![], vec![]));
        assert_eq!(save(&arena, 12, Claimable::Free).unwrap(), Some(3), "generations continue");
        check(&arena, 0, 12);
    }

    #[test]
    fn a_dropped_claim_is_abandoned_and_a_dropped_take_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let arena = arena(&folder);
        drop(ClaimedSlot::claim(&arena, Claimable::Free).unwrap());
        assert_eq!(arena.words().unwrap()[0], SlotWord { state: SlotState::Empty, generation: 1 });
        save(&arena, 10, Claimable::Free).unwrap();
        drop(TakenSlot::take(&arena, |_| true).unwrap());
        assert_eq!(arena.words().unwrap()[1], SlotWord { state: SlotState::Full, generation: 2 });
        assert!(TakenSlot::take(&arena, |header| header.step != 10).unwrap().is_none());
    }
}
