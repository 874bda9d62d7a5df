//! The arena of a rank: one or more slots in shared memory, each with a raw state.
//!
//! Trainer and agent both map the arena and follow the protocol of [`slot`]. `file` has
//! the layout.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod slot;

pub(crate) mod image;

pub(crate) mod memory;

pub(crate) mod file;

pub(crate) mod copy_plan;

pub(crate) mod slot_access;

pub(crate) mod population;

use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use tensorcask::{Error, Result};

use file::{ArenaFile, field, head};
use image::StoredState;
use slot::{SlotState, SlotWord, Transition};

/// Header of a slot that holds a complete state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotHeader {
    pub word: SlotWord,
    pub step: u64,
    /// Session (start of the job) in which the state was saved.
    pub session: u64,
    /// How often the job had returned to an older step in that session. States of several ranks belong together if
    /// step, session and attempt are equal.
    pub attempt: u64,
    /// Number of ranks of the job.
    pub world: u32,
}

/// Word of a slot, and its header if the state is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotView {
    pub word: SlotWord,
    pub header: Option<SlotHeader>,
}

/// A mapped arena.
#[derive(Debug)]
pub(crate) struct Arena {
    file: ArenaFile,
}

impl Arena {
    /// Creates an arena in place of an existing one. Its slots take no memory yet. Its generations follow `generation`.
    pub(crate) fn create(path: &Path, slots: u32, slot_bytes: usize, generation: u64) -> Result<Self> {
        ArenaFile::create(path, slots, slot_bytes, generation).map(|file| Self { file })
    }

    /// Maps an existing arena.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        ArenaFile::open(path).map(|file| Self { file })
    }

    pub(crate) fn file(&self) -> &ArenaFile {
        &self.file
    }

    /// State and generation of each slot.
    pub(crate) fn words(&self) -> Result<Vec<SlotWord>> {
        let word = |slot| {
            let bits = self.file.field(slot, field::WORD)?.load(Ordering::Acquire);
            SlotWord::from_bits(bits).ok_or_else(|| Error::corrupt(format!("slot {slot} has an invalid state")).object(self.file.name()))
        };
        (0..self.file.slots()).map(word).collect()
    }

    /// Word and header of each slot.
    pub(crate) fn views(&self) -> Result<Vec<SlotView>> {
        let view = |(slot, mut word): (usize, SlotWord)| loop {
            let header = self.header(slot, word)?;
            // The header belongs to this word only if the word is unchanged afterwards.
            fence(Ordering::Acquire);
            match self.words()?.get(slot) {
                Some(now) if *now != word => word = *now,
                _ => return Ok(SlotView { word, header: word.state.is_complete().then_some(header) }),
            }
        };
        self.words()?.into_iter().enumerate().map(view).collect()
    }

    /// Headers of all slots with a complete state.
    pub(crate) fn headers(&self) -> Result<Vec<SlotHeader>> {
        Ok(self.views()?.into_iter().filter_map(|view| view.header).collect())
    }

    /// Reads the header of a slot whose word was seen before.
    pub(crate) fn header(&self, slot: usize, word: SlotWord) -> Result<SlotHeader> {
        let load = |name| self.file.field(slot, name).map(|word| word.load(Ordering::Relaxed));
        let world = u32::try_from(load(field::WORLD)?).unwrap_or(u32::MAX);
        Ok(SlotHeader { word, step: load(field::STEP)?, session: load(field::SESSION)?, attempt: load(field::ATTEMPT)?, world })
    }

    /// Whether a state waits for the agent.
    pub(crate) fn has_full_slot(&self) -> bool {
        self.words().is_ok_and(|words| words.iter().any(|word| word.state == SlotState::Full))
    }

    /// Makes a transition if the slot's word is still `seen`. Returns whether it did.
    pub(crate) fn advance(&self, slot: usize, seen: SlotWord, transition: Transition) -> Result<bool> {
        let Some(next) = seen.after(transition) else {
            return Err(Error::invalid(format!("slot {slot} is {}: the protocol forbids {transition:?}", seen.state.name())));
        };
        let word = self.file.field(slot, field::WORD)?;
        Ok(word.compare_exchange(seen.to_bits(), next.to_bits(), Ordering::AcqRel, Ordering::Acquire).is_ok())
    }

    /// Empties slots whose word is none of the protocol; returns their number. Other slots keep their states. Only the trainer that
    /// holds the rank's lock may call this, before it attaches to the agent.
    pub(crate) fn drop_damaged_slots(&self) -> Result<u64> {
        let words = (0..self.file.slots()).map(|slot| Ok((slot, self.file.field(slot, field::WORD)?))).collect::<Result<Vec<_>>>()?;
        let newest = words.iter().filter_map(|(_, word)| SlotWord::from_bits(word.load(Ordering::Acquire)));
        let newest = newest.map(|word| word.generation).max().unwrap_or(0).max(self.encoded()?);
        let mut damaged = 0;
        for (_, word) in words {
            let bits = word.load(Ordering::Acquire);
            if SlotWord::from_bits(bits).is_none() {
                let empty = SlotWord { state: SlotState::Empty, generation: newest }.to_bits();
                damaged += u64::from(word.compare_exchange(bits, empty, Ordering::AcqRel, Ordering::Acquire).is_ok());
            }
        }
        Ok(damaged)
    }

    /// Abandons incomplete copies of a trainer that died; returns their number. Only the trainer that holds the rank's
    /// lock may call this.
    pub(crate) fn abandon_incomplete(&self) -> Result<u64> {
        self.advance_all(SlotState::Filling, |_| Transition::Abandon)
    }

    /// Releases the slots that a dead agent had encoded, and gives back those that it was encoding. Only the agent that
    /// holds the folder's lock may call this.
    pub(crate) fn give_back_taken(&self) -> Result<u64> {
        let encoded = self.encoded()?;
        let transition = |word: SlotWord| if word.generation <= encoded { Transition::Release } else { Transition::GiveBack };
        self.advance_all(SlotState::Encoding, transition)
    }

    fn advance_all(&self, from: SlotState, transition: impl Fn(SlotWord) -> Transition) -> Result<u64> {
        let mut advanced = 0;
        for (slot, word) in self.words()?.into_iter().enumerate().filter(|(_, word)| word.state == from) {
            advanced += u64::from(self.advance(slot, word, transition(word))?);
        }
        Ok(advanced)
    }

    /// Discards complete states by step; returns the words that their slots had. Keeps a state that the agent is encoding.
    pub(crate) fn discard(&self, is_unwanted: impl Fn(u64) -> bool) -> Result<Vec<SlotWord>> {
        let mut discarded = Vec::new();
        for (slot, SlotView { word, header }) in self.views()?.into_iter().enumerate() {
            let claim = Transition::Claim { generation: word.generation };
            let unwanted = header.is_some_and(|header| is_unwanted(header.step)) && word.state != SlotState::Encoding;
            if unwanted && self.advance(slot, word, claim)? {
                let filling = SlotWord { state: SlotState::Filling, ..word };
                if self.advance(slot, filling, Transition::Abandon)? {
                    discarded.push(word);
                }
            }
        }
        Ok(discarded)
    }

    /// Discards all states, so that the arena can serve as a new one. Returns `false` if the agent is encoding one of
    /// them: the arena cannot be used again then.
    pub(crate) fn reset(&self) -> Result<bool> {
        self.discard(|_| true)?;
        Ok(self.words()?.iter().all(|word| word.state == SlotState::Empty))
    }

    /// Decodes the complete state in a slot, without comparing checksums.
    pub(crate) fn read(&self, slot: usize) -> Result<StoredState<'_>> {
        let load = |name| self.file.field(slot, name).map(|word| word.load(Ordering::Relaxed));
        let number = |name| load(name).map(|number| usize::try_from(number).unwrap_or(usize::MAX));
        let at = number(field::DESCRIPTION_AT)?;
        let bytes = number(field::DESCRIPTION_BYTES)?;
        let wrong = |message: String| Error::corrupt(message).object(self.file.name());
        if at.checked_add(bytes).is_none_or(|end| end > self.file.slot_bytes()) {
            return Err(wrong(format!("the description of slot {slot} lies outside of the slot")));
        }
        let start = self.file.start(slot);
        let json = self.file.memory().bytes(start + at, bytes)?;
        if u64::from(crc32fast::hash(json)) != load(field::DESCRIPTION_CRC)? {
            return Err(wrong(format!("checksum mismatch in the description of slot {slot}")));
        }
        let stored = StoredState::decode(json, self.file.memory().bytes(start, at)?).map_err(|e| e.object(self.file.name()))?;
        match stored.step() == load(field::STEP)? {
            true => Ok(stored),
            false => Err(wrong(format!("the description of slot {slot} belongs to another step"))),
        }
    }

    /// States that the agent released without encoding them: saves that failed for good.
    pub(crate) fn failed(&self) -> Result<Vec<SlotHeader>> {
        let encoded = self.encoded()?;
        let failed = |header: &SlotHeader| header.word.state == SlotState::Released && header.word.generation > encoded;
        Ok(self.headers()?.into_iter().filter(failed).collect())
    }

    /// Session of new saves.
    pub(crate) fn session(&self) -> Result<u64> {
        Ok(self.file.head(head::SESSION)?.load(Ordering::Acquire))
    }

    /// Raises the session of new saves; never lowers it.
    pub(crate) fn raise_session(&self, session: u64) -> Result<()> {
        self.file.head(head::SESSION)?.fetch_max(session, Ordering::AcqRel);
        Ok(())
    }

    /// Newest generation that the agent has encoded.
    pub(crate) fn encoded(&self) -> Result<u64> {
        Ok(self.file.head(head::ENCODED)?.load(Ordering::Acquire))
    }

    /// Raises the newest encoded generation; never lowers it.
    pub(crate) fn raise_encoded(&self, generation: u64) -> Result<()> {
        self.file.head(head::ENCODED)?.fetch_max(generation, Ordering::AcqRel);
        Ok(())
    }
}
