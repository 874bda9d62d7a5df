//! The arena: a file in shared memory with two or more slots, each of which holds a raw state.
//!
//! ```text
//! page 0        magic, version, slots, bytes of a slot, newest generation that is encoded, session
//! page 1 + n    slot n: word (state and generation), step, place, size and CRC-32 of the description, session, ranks, attempt
//! then          the bytes of slot 0, slot 1, ...: tensors, each at a line of the cache, then the description
//! ```
//!
//! All numbers are 64-bit atomic words in the order of this machine: the file never leaves the host.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::FallocateFlags;
use tensorcask::{Error, ErrorKind, Result};

use crate::image::{Copied, Plan, Stored};
use crate::memory::Shared;
use crate::place::free_space;
use crate::slot::{Move, State, Word, choose, next_generation, next_to_encode};

const PAGE: usize = 4096;
/// "TCARENA" and a number, as one word.
const MAGIC: u64 = 0x5443_4152_454e_4131;
const VERSION: u64 = 3;
/// Slots of an arena.
pub(crate) const SLOTS: std::ops::RangeInclusive<u32> = 2..=16;

/// Words of page 0.
mod head {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 8;
    pub(super) const SLOTS: usize = 16;
    pub(super) const SLOT_BYTES: usize = 24;
    pub(super) const ENCODED: usize = 32;
    pub(super) const SESSION: usize = 40;
}

/// Words of a slot's page.
mod field {
    pub(super) const WORD: usize = 0;
    pub(super) const STEP: usize = 8;
    pub(super) const DESCRIPTION_AT: usize = 16;
    pub(super) const DESCRIPTION_BYTES: usize = 24;
    pub(super) const DESCRIPTION_CRC: usize = 32;
    pub(super) const SESSION: usize = 40;
    pub(super) const WORLD: usize = 48;
    pub(super) const ATTEMPT: usize = 56;
}

/// What a whole slot says of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kept {
    pub word: Word,
    pub step: u64,
    /// The start of the job that it was saved in.
    pub session: u64,
    /// How often the job had returned to an older step in that: states of several ranks belong together if step, session and attempt are the
    /// same.
    pub attempt: u64,
    /// How many ranks that had.
    pub world: u32,
}

/// A mapped arena.
#[derive(Debug)]
pub(crate) struct Arena {
    path: PathBuf,
    /// Device and number of the file.
    file: (u64, u64),
    shared: Shared,
    slots: usize,
    slot_bytes: usize,
}

impl Arena {
    /// Creates an arena in place of whatever is there, with all its memory present. Its generations follow `generation`.
    pub(crate) fn create(path: &Path, slots: u32, slot_bytes: usize, generation: u64) -> Result<Self> {
        let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
        if !SLOTS.contains(&slots) {
            return Err(Error::invalid(format!("{slots} slots: an arena has {} to {}", SLOTS.start(), SLOTS.end())));
        }
        let slot_bytes = slot_bytes.next_multiple_of(PAGE);
        let bytes = (slots as usize).checked_mul(slot_bytes + PAGE).and_then(|bytes| bytes.checked_add(PAGE));
        let bytes = bytes.ok_or_else(|| Error::limit("an arena of more bytes than this machine can address"))?;
        // The arena appears whole or not at all.
        let new = path.with_extension("new");
        let _ = std::fs::remove_file(&new);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new).map_err(fail)?;
        // Pages first: large ones come only of a mapping that asks for them.
        let sized = match has_room(path, bytes) {
            true => file.set_len(bytes as u64).map_err(fail),
            false => Err(no_room(path, slots, bytes)),
        };
        let made = sized.and_then(|()| Shared::map(&file, path)).and_then(|shared| {
            shared.prefault();
            reserve(&file, path, slots, bytes)?;
            for (offset, value) in
                [(head::MAGIC, MAGIC), (head::VERSION, VERSION), (head::SLOTS, u64::from(slots)), (head::SLOT_BYTES, slot_bytes as u64)]
            {
                shared.word(offset)?.store(value, Ordering::Relaxed);
            }
            let empty = Word { state: State::Empty, generation }.to_bits();
            (1..=slots as usize)
                .try_for_each(|page| shared.word(PAGE * page + field::WORD).map(|word| word.store(empty, Ordering::Release)))?;
            std::fs::rename(&new, path).map_err(fail)?;
            Ok((shared, identity(&file.metadata().map_err(fail)?)))
        });
        match made {
            Ok((shared, file)) => Ok(Self { path: path.to_owned(), file, shared, slots: slots as usize, slot_bytes }),
            Err(e) => {
                let _ = std::fs::remove_file(&new);
                Err(e)
            }
        }
    }

    /// Maps the arena that is there.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let fail = |e: std::io::Error| Error::io(name.as_str(), e);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(fail)?;
        let meta = file.metadata().map_err(fail)?;
        if !meta.is_file() || meta.uid() != rustix::process::getuid().as_raw() || meta.mode() & 0o077 != 0 {
            return Err(Error::invalid("is not an arena of this user alone; remove it").object(name));
        }
        let shared = Shared::map(&file, path)?;
        let read = |offset: usize| shared.word(offset).map(|word| word.load(Ordering::Relaxed));
        let corrupt = |message: &str| Error::corrupt(message).object(name.as_str());
        if shared.len() < PAGE || read(head::MAGIC)? != MAGIC {
            return Err(corrupt("is no arena"));
        }
        match read(head::VERSION)? {
            VERSION => {}
            other => return Err(Error::unsupported(format!("is an arena of version {other}; remove it")).object(name)),
        }
        let slots = u32::try_from(read(head::SLOTS)?).ok().filter(|slots| SLOTS.contains(slots));
        let slots = slots.ok_or_else(|| corrupt("an arena with an impossible number of slots"))? as usize;
        let slot_bytes = usize::try_from(read(head::SLOT_BYTES)?).map_err(|_| corrupt("an arena with impossible slots"))?;
        let bytes = slot_bytes.checked_add(PAGE).and_then(|bytes| bytes.checked_mul(slots)).and_then(|bytes| bytes.checked_add(PAGE));
        if bytes != Some(shared.len()) {
            return Err(corrupt("the size of the arena is not what it says"));
        }
        Ok(Self { path: path.to_owned(), file: identity(&meta), shared, slots, slot_bytes })
    }

    /// Whether the file is still the one that others find: a run that is over takes it away.
    pub(crate) fn is_in_place(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|found| identity(&found) == self.file)
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.shared.len() as u64
    }

    /// Whether a description of so many bytes fits behind the data.
    pub(crate) fn holds(&self, bytes: usize) -> bool {
        bytes <= self.slot_bytes
    }

    /// Where it is mapped, and its bytes.
    pub(crate) fn span(&self) -> (*const u8, usize) {
        self.shared.span()
    }

    /// State and generation of each slot.
    pub(crate) fn words(&self) -> Result<Vec<Word>> {
        let word = |slot| {
            let bits = self.field(slot, field::WORD)?.load(Ordering::Acquire);
            Word::from_bits(bits).ok_or_else(|| Error::corrupt(format!("the state of slot {slot}")).object(self.path.display().to_string()))
        };
        (0..self.slots).map(word).collect()
    }

    /// The word of each slot, and what it says of its state if that is whole.
    pub(crate) fn kept(&self) -> Result<Vec<(Word, Option<Kept>)>> {
        let kept = |(slot, mut word): (usize, Word)| loop {
            let kept = self.kept_in(slot, word)?;
            // What was read is of this word, if that is still the same.
            fence(Ordering::Acquire);
            match self.words()?.get(slot) {
                Some(now) if *now != word => word = *now,
                _ => return Ok((word, word.state.is_whole().then_some(kept))),
            }
        };
        self.words()?.into_iter().enumerate().map(kept).collect()
    }

    pub(crate) fn kept_in(&self, slot: usize, word: Word) -> Result<Kept> {
        let load = |name| self.field(slot, name).map(|word| word.load(Ordering::Relaxed));
        let world = u32::try_from(load(field::WORLD)?).unwrap_or(u32::MAX);
        Ok(Kept { word, step: load(field::STEP)?, session: load(field::SESSION)?, attempt: load(field::ATTEMPT)?, world })
    }

    /// Whether a state waits for the agent.
    pub(crate) fn has_waiting(&self) -> bool {
        self.words().is_ok_and(|words| words.iter().any(|word| word.state == State::Full))
    }

    /// Makes a move, if the slot still is as it was seen.
    pub(crate) fn advance(&self, slot: usize, seen: Word, step: Move) -> Result<bool> {
        let Some(next) = seen.after(step) else {
            return Err(Error::invalid(format!("slot {slot} is {}: {step:?} is no move of the protocol", seen.state.name())));
        };
        let word = self.field(slot, field::WORD)?;
        Ok(word.compare_exchange(seen.to_bits(), next.to_bits(), Ordering::AcqRel, Ordering::Acquire).is_ok())
    }

    /// Claims a slot for the next save, if one is free; with `drop`, also one that the agent has not begun with.
    pub(crate) fn claim(self: &Arc<Self>, drop: bool) -> Result<Option<Claimed>> {
        loop {
            let words = self.words()?;
            let Some(slot) = choose(&words, drop) else { return Ok(None) };
            let Some(seen) = words.get(slot).copied() else { return Ok(None) };
            let step = Move::Claim { generation: next_generation(&words) };
            if self.advance(slot, seen, step)? {
                let dropped = (seen.state == State::Full).then_some(self.field(slot, field::STEP)?.load(Ordering::Relaxed));
                let Some(word) = seen.after(step) else { return Ok(None) };
                return Ok(Some(Claimed { arena: self.clone(), slot, word, dropped, done: false }));
            }
        }
    }

    /// Abandons what a trainer that died left torn. Only the trainer that holds the arena's lock may.
    pub(crate) fn abandon_torn(&self) -> Result<u64> {
        self.move_all(State::Filling, |_| Move::Abandon)
    }

    /// Gives back what an agent that died was encoding, or releases what it had encoded. Only the agent that holds the folder's lock may.
    pub(crate) fn give_back_taken(&self) -> Result<u64> {
        let encoded = self.encoded()?;
        self.move_all(State::Encoding, |word| if word.generation <= encoded { Move::Release } else { Move::GiveBack })
    }

    fn move_all(&self, from: State, step: impl Fn(Word) -> Move) -> Result<u64> {
        let mut moved = 0;
        for (slot, word) in self.words()?.into_iter().enumerate().filter(|(_, word)| word.state == from) {
            moved += u64::from(self.advance(slot, word, step(word))?);
        }
        Ok(moved)
    }

    /// Gives up whole states by their steps; how many. One that the agent is encoding stays.
    pub(crate) fn discard(&self, unwanted: impl Fn(u64) -> bool) -> Result<u64> {
        let mut discarded = 0;
        for (slot, (word, kept)) in self.kept()?.into_iter().enumerate() {
            let claim = Move::Claim { generation: word.generation };
            if kept.is_some_and(|kept| unwanted(kept.step)) && word.state != State::Encoding && self.advance(slot, word, claim)? {
                let filling = Word { state: State::Filling, ..word };
                discarded += u64::from(self.advance(slot, filling, Move::Abandon)?);
            }
        }
        Ok(discarded)
    }

    /// Takes the oldest full slot that `wanted` accepts, to encode it.
    pub(crate) fn take(&self, wanted: impl Fn(&Kept) -> bool) -> Result<Option<Taken<'_>>> {
        loop {
            let mut words = self.words()?;
            for (slot, word) in words.iter_mut().enumerate() {
                if !wanted(&self.kept_in(slot, *word)?) {
                    word.state = State::Empty;
                }
            }
            let Some(slot) = next_to_encode(&words) else { return Ok(None) };
            let Some(seen) = words.get(slot).copied() else { return Ok(None) };
            if self.advance(slot, seen, Move::Take)? {
                let word = Word { state: State::Encoding, ..seen };
                return Ok(Some(Taken { arena: self, slot, word, done: false }));
            }
        }
    }

    /// The state in a slot that is whole, whose checksums have not been compared yet.
    pub(crate) fn read(&self, slot: usize) -> Result<Stored<'_>> {
        let load = |name| self.field(slot, name).map(|word| word.load(Ordering::Relaxed));
        let number = |name| Ok(usize::try_from(load(name)?).unwrap_or(usize::MAX));
        let (at, bytes) = (number(field::DESCRIPTION_AT)?, number(field::DESCRIPTION_BYTES)?);
        let wrong = |message: String| Error::corrupt(message).object(self.path.display().to_string());
        if at.checked_add(bytes).is_none_or(|end| end > self.slot_bytes) {
            return Err(wrong(format!("slot {slot}: its description lies outside of it")));
        }
        let start = self.start(slot);
        let json = self.shared.bytes(start + at, bytes)?;
        if u64::from(crc32fast::hash(json)) != load(field::DESCRIPTION_CRC)? {
            return Err(wrong(format!("slot {slot}: the checksum of its description differs")));
        }
        let stored = Stored::decode(json, self.shared.bytes(start, at)?).map_err(|e| e.object(self.path.display().to_string()))?;
        match stored.step() == load(field::STEP)? {
            true => Ok(stored),
            false => Err(wrong(format!("slot {slot}: its description is of another step"))),
        }
    }

    /// States that the agent has released and not encoded: those that failed for good.
    pub(crate) fn given_up(&self) -> Result<Vec<Kept>> {
        let encoded = self.encoded()?;
        let failed = |kept: &Kept| kept.word.state == State::Released && kept.word.generation > encoded;
        Ok(self.kept()?.into_iter().filter_map(|(_, kept)| kept).filter(failed).collect())
    }

    /// The session that saves belong to.
    pub(crate) fn session(&self) -> Result<u64> {
        Ok(self.shared.word(head::SESSION)?.load(Ordering::Acquire))
    }

    /// From here on, saves belong to this session, or a later one.
    pub(crate) fn set_session(&self, session: u64) -> Result<()> {
        self.shared.word(head::SESSION)?.fetch_max(session, Ordering::AcqRel);
        Ok(())
    }

    /// The newest generation that the agent has encoded.
    pub(crate) fn encoded(&self) -> Result<u64> {
        Ok(self.shared.word(head::ENCODED)?.load(Ordering::Acquire))
    }

    pub(crate) fn set_encoded(&self, generation: u64) -> Result<()> {
        self.shared.word(head::ENCODED)?.fetch_max(generation, Ordering::AcqRel);
        Ok(())
    }

    fn field(&self, slot: usize, name: usize) -> Result<&std::sync::atomic::AtomicU64> {
        self.shared.word(PAGE * (slot + 1) + name)
    }

    /// Where the bytes of a slot begin.
    fn start(&self, slot: usize) -> usize {
        PAGE * (1 + self.slots) + slot * self.slot_bytes
    }
}

fn identity(file: &std::fs::Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// A slot that is being filled; abandoned when it is dropped unpublished.
#[derive(Debug)]
pub(crate) struct Claimed {
    arena: Arc<Arena>,
    slot: usize,
    word: Word,
    /// The step that was given up for it.
    pub dropped: Option<u64>,
    done: bool,
}

impl Claimed {
    /// Copies a state. `LimitExceeded` where it, or its description, does not fit.
    pub(crate) fn fill(self, plan: Plan<'_>, session: u64, attempt: u64) -> Result<Filled> {
        let arena = &*self.arena;
        let start = arena.start(self.slot);
        if !arena.holds(plan.data_bytes) {
            return Err(too_small(arena, plan.data_bytes));
        }
        let copied = plan.copy(|at, bytes| arena.shared.write(start + at, bytes))?;
        let end = copied.data_bytes.saturating_add(copied.description.len());
        if !arena.holds(end) {
            return Err(too_small(arena, end));
        }
        Ok(Filled { claimed: self, copied, session, attempt })
    }
}

/// A slot that has been filled, but for what a device writes into it.
#[derive(Debug)]
pub(crate) struct Filled {
    claimed: Claimed,
    copied: Copied,
    session: u64,
    attempt: u64,
}

impl Filled {
    /// Where tensors go that come later, in their order, those that are tied to others left out.
    pub(crate) fn deferred(&mut self) -> Result<Vec<&mut [u8]>> {
        let start = self.claimed.arena.start(self.claimed.slot);
        let parts: Vec<_> = self.copied.deferred().map(|(at, bytes)| (start + at, bytes)).collect();
        self.claimed.arena.shared.writable(&parts)
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.claimed.arena
    }

    /// The step that was given up for this one.
    pub(crate) fn dropped(&self) -> Option<u64> {
        self.claimed.dropped
    }

    /// Publishes the state of one of `world` ranks; its generation.
    pub(crate) fn publish(mut self, step: u64, world: u32) -> Result<u64> {
        let (arena, slot, at) = (&*self.claimed.arena, self.claimed.slot, self.copied.data_bytes);
        let start = arena.start(slot);
        self.copied.complete(|at, bytes| arena.shared.bytes(start + at, bytes))?;
        let description = &self.copied.description;
        if !arena.holds(at.saturating_add(description.len())) {
            return Err(too_small(arena, at.saturating_add(description.len())));
        }
        arena.shared.write(start + at, description)?;
        for (name, value) in [
            (field::STEP, step),
            (field::DESCRIPTION_AT, at as u64),
            (field::DESCRIPTION_BYTES, description.len() as u64),
            (field::DESCRIPTION_CRC, u64::from(crc32fast::hash(description))),
            (field::SESSION, self.session),
            (field::ATTEMPT, self.attempt),
            (field::WORLD, u64::from(world)),
        ] {
            arena.field(slot, name)?.store(value, Ordering::Relaxed);
        }
        let done = arena.advance(slot, self.claimed.word, Move::Publish)?;
        self.claimed.done = done;
        match done {
            true => Ok(self.claimed.word.generation),
            false => Err(Error::new(ErrorKind::Conflict, "another process wrote to the arena while a state was copied into it")),
        }
    }
}

fn too_small(arena: &Arena, bytes: usize) -> Error {
    Error::limit(format!("the state takes {bytes} bytes, a slot of the arena has {}", arena.slot_bytes))
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if !self.done {
            // What stays behind is torn, and known to be.
            let _ = self.arena.advance(self.slot, self.word, Move::Abandon);
        }
    }
}

/// A slot that is being encoded; given back when it is dropped unreleased.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    arena: &'a Arena,
    slot: usize,
    word: Word,
    done: bool,
}

impl Taken<'_> {
    pub(crate) fn generation(&self) -> u64 {
        self.word.generation
    }

    /// The step, which can be told of a state that cannot be read, too.
    pub(crate) fn step(&self) -> Result<u64> {
        Ok(self.arena.field(self.slot, field::STEP)?.load(Ordering::Relaxed))
    }

    pub(crate) fn state(&self) -> Result<Stored<'_>> {
        self.arena.read(self.slot)
    }

    /// The agent needs the slot no more.
    pub(crate) fn release(mut self) -> Result<()> {
        self.done = self.arena.advance(self.slot, self.word, Move::Release)?;
        Ok(())
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.done {
            let _ = self.arena.advance(self.slot, self.word, Move::GiveBack);
        }
    }
}

/// Whether the file system says that it has so many bytes.
fn has_room(path: &Path, bytes: usize) -> bool {
    let limited = rustix::fs::statvfs(path.parent().unwrap_or(path)).ok().filter(|found| found.f_blocks > 0);
    limited.is_none_or(|found| found.f_bavail.saturating_mul(found.f_frsize) >= bytes as u64)
}

/// Takes the memory of the file now, so that no copy finds none later.
fn reserve(file: &File, path: &Path, slots: u32, bytes: usize) -> Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes as u64) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::NOSPC) => {
            let _ = file.set_len(0);
            Err(no_room(path, slots, bytes))
        }
        Err(e) => Err(Error::io(path.display().to_string(), e.into())),
    }
}

fn no_room(path: &Path, slots: u32, bytes: usize) -> Error {
    let free = free_space(path.parent().unwrap_or(path));
    let message = format!("no space: an arena of {slots} slots for this state needs {bytes} bytes of shared memory, and {free}");
    Error::new(ErrorKind::Storage, message).object(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use tensorcask::{Blob, Dtype, Metadata, TensorView};

    use super::*;

    fn arena(folder: &tempfile::TempDir) -> Arc<Arena> {
        Arc::new(Arena::create(&folder.path().join("arena"), 2, 3 << 20, 0).unwrap())
    }

    /// A state of a step, larger than an extent, with tied tensors and a blob.
    fn save(arena: &Arc<Arena>, step: u64, drop: bool) -> Result<Option<u64>> {
        let large: Vec<u8> = (0..2_500_000u32).map(|i| (i * 7 + step as u32) as u8).collect();
        let tensors = [
            TensorView::new("w", Dtype::U8, &[2_500_000], &large)?,
            TensorView::new("w.tied", Dtype::U8, &[2_500_000], &large)?,
            TensorView::new("empty", Dtype::F32, &[0], &[])?,
        ];
        let blobs = [Blob::new("rng", &b"seed"[..])];
        let Some(claimed) = arena.claim(drop)? else { return Ok(None) };
        claimed.fill(Plan::new(step, &tensors, &[], &blobs, &Metadata::default())?, 0, 0)?.publish(step, 1).map(Some)
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
    fn what_is_saved_is_read_by_another_mapping() {
        let folder = tempfile::tempdir().unwrap();
        let trainer = arena(&folder);
        assert_eq!(save(&trainer, 10, false).unwrap(), Some(1));
        assert_eq!(save(&trainer, 11, false).unwrap(), Some(2));
        assert_eq!(save(&trainer, 12, false).unwrap(), None, "both slots wait for the agent");
        let agent = Arena::open(&folder.path().join("arena")).unwrap();
        let taken = agent.take(|_| true).unwrap().unwrap();
        assert_eq!((taken.generation(), taken.state().unwrap().step()), (1, 10));
        taken.release().unwrap();
        assert_eq!(save(&trainer, 12, false).unwrap(), Some(3));
        check(&agent, 0, 12);
        check(&agent, 1, 11);
        assert_eq!(save(&trainer, 13, true).unwrap(), Some(4), "the oldest that the agent has not begun with is dropped");
        let kept = agent.kept().unwrap().into_iter().map(|(_, kept)| kept.unwrap());
        assert_eq!(kept.map(|kept| (kept.step, kept.word.generation)).collect::<Vec<_>>(), [(12, 3), (13, 4)]);
        check(&agent, 1, 13);
    }

    #[test]
    fn damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let arena = arena(&folder);
        save(&arena, 10, false).unwrap();
        for offset in [0, 1_048_576, 2_499_999] {
            arena.shared.write(arena.start(0) + offset, &[77]).unwrap();
            assert!(arena.read(0).unwrap().verify().is_err(), "offset {offset}");
            arena.shared.write(arena.start(0) + offset, &[(offset as u32 * 7 + 10) as u8]).unwrap();
            check(&arena, 0, 10);
        }
        arena.shared.write(arena.start(0) + 2_500_096 + 5, b"X").unwrap();
        assert!(arena.read(0).is_err());
    }

    #[test]
    fn a_dropped_claim_is_abandoned_and_a_dropped_take_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let arena = arena(&folder);
        drop(arena.claim(false).unwrap());
        assert_eq!(arena.words().unwrap()[0], Word { state: State::Empty, generation: 1 });
        save(&arena, 10, false).unwrap();
        drop(arena.take(|_| true).unwrap());
        assert_eq!(arena.words().unwrap()[1], Word { state: State::Full, generation: 2 });
        assert!(arena.take(|kept| kept.step != 10).unwrap().is_none());
    }

    #[test]
    fn what_is_no_arena_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("arena");
        drop(Arena::create(&path, 2, 4096, 0).unwrap());
        let good = std::fs::read(&path).unwrap();
        for (at, byte) in [(0, 0), (8, 9), (16, 200), (24, 1)] {
            let mut bad = good.clone();
            bad[at] ^= byte.max(1);
            std::fs::write(&path, &bad).unwrap();
            assert!(Arena::open(&path).is_err(), "byte {at}");
        }
        for length in [0, 100, 4096, good.len() - 1, good.len() + 1] {
            let mut bad = good.clone();
            bad.resize(length, 0);
            std::fs::write(&path, &bad).unwrap();
            assert!(Arena::open(&path).is_err(), "length {length}");
        }
        std::fs::write(&path, &good).unwrap();
        Arena::open(&path).unwrap();
    }
}
