//! A run as the agent knows it: its arenas, how far each save has come, and what there is to do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tensorcask::wire::Id;
use tensorcask::{Ahead, Error, Result, Saved, SnapshotRecord, Status, Store};
use tokio::sync::{Notify, watch};

use super::ranks::{Held, Next, next};
use crate::arena::{Arena, Kept};
use crate::inline;
use crate::now_ms;
use crate::options::RunSpec;
use crate::place::{Place, RunPlace, remove_file, replace_file};
use crate::protocol::{Attach, Failure, Mode, Progress, SaveNote};
use crate::slot::{State, Word};
use crate::status::{RankStatus, RunStatus, SaveStatus, SlotStatus, TierStatus};
use crate::tier::{Sent, memory_bytes};

/// Saves that a status tells of.
const SAVES: usize = 64;
/// Failures that a trainer is told of.
const FAILURES: usize = 16;

/// A run.
#[derive(Debug)]
pub(super) struct Run {
    pub spec: RunSpec,
    pub place: RunPlace,
    pub tiers: Vec<Store>,
    pub cap: u64,
    facts: Mutex<Facts>,
    /// There may be something to encode, and something to upload to each tier.
    pub encode: Notify,
    pub upload: Vec<Notify>,
    /// Ticks whenever something a trainer may wait for has happened.
    tick: watch::Sender<u64>,
    /// When a trainer first came with other options.
    leaves: OnceLock<Instant>,
}

/// What changes.
#[derive(Debug, Default)]
struct Facts {
    ranks: BTreeMap<u32, Member>,
    /// The start of the job, counted over its restarts: states of several ranks are joined if they were saved in the same one.
    session: u64,
    /// The memory tier is out of date: it goes before anything is encoded. The newest snapshot of each tier, by URL, when that was found.
    afresh: Option<BTreeMap<String, Option<Id>>>,
    memory: MemoryFacts,
    tiers: Vec<TierFacts>,
    failed: u64,
    stopped: Option<String>,
    problem: Option<String>,
    saves: VecDeque<SaveStatus>,
    /// When the calls of those saves began.
    begun_ms: BTreeMap<u64, u64>,
    /// Step and time of the newest commit in the first tier.
    last_commit: Option<(u64, u64)>,
    /// What of the last snapshot went to the first tier while it was being encoded.
    ahead: Option<Ahead>,
    /// A trainer restores, or may: nothing in memory is given up.
    restoring: bool,
    /// The run is over: its memory goes once the tiers have everything.
    clear: bool,
}

/// A rank. Its generations are its own: it may have been killed, or have skipped a save, where others were not.
#[derive(Debug, Default)]
struct Member {
    arena: Option<Arc<Arena>>,
    trainer: Option<u32>,
    /// Counts attachments, so that the end of an old connection does not detach a new one.
    attached: u64,
    /// The last session that its trainer was in.
    session: u64,
    /// Its trainer has said that it saves no more.
    is_over: bool,
    encoded: u64,
    durable: u64,
    failures: VecDeque<Failure>,
}

impl Facts {
    /// A snapshot is in memory, and is to go to the first tier; one that came into a store whose damage was found meanwhile will not.
    fn commit(&mut self, committed: Committed, step: u64) {
        if self.memory.damaged.contains(&committed.epoch) {
            self.fail(&committed.by_rank(), step, "was saved in encoded memory that is damaged");
            return;
        }
        self.memory.committed.push_back(committed);
        if let Some(tier) = self.tiers.first_mut() {
            tier.pending += 1;
        }
    }

    /// A save failed for good: these generations of ranks.
    fn fail(&mut self, generations: &[(u32, u64)], step: u64, why: &str) {
        tracing::error!(step, why, "a save failed");
        self.failed += 1;
        for &(rank, generation) in generations {
            let member = self.ranks.entry(rank).or_default();
            member.fail(Failure { step, generation, message: why.to_owned() });
            if let (0, Some(save)) = (rank, self.saves.iter_mut().rfind(|save| save.generation == generation)) {
                save.error = Some(why.to_owned());
            }
        }
    }

    /// Whether a rank that begins belongs to the session that is under way: others are in it, and this one was not before.
    fn may_join(&self, rank: u32) -> bool {
        let is_in = |member: &Member| member.session == self.session;
        let others = self.ranks.iter().any(|(other, member)| *other != rank && member.trainer.is_some() && is_in(member));
        others && !self.ranks.get(&rank).is_some_and(is_in)
    }
}

impl Member {
    fn fail(&mut self, failure: Failure) {
        self.failures.push_back(failure);
        while self.failures.len() > FAILURES {
            self.failures.pop_front();
        }
    }
}

#[derive(Debug, Default, Clone)]
pub(super) struct MemoryFacts {
    pub epoch: u64,
    pub steps: Vec<u64>,
    pub bytes: u64,
    pub chain_depth: u64,
    /// Snapshots by commit that the next tier may not have yet.
    pub committed: VecDeque<Committed>,
    /// The next tier has everything up to this log entry.
    pub uploaded: u64,
    /// Epochs that cannot be uploaded any more.
    pub damaged: BTreeSet<u64>,
}

/// A snapshot in memory.
#[derive(Debug, Clone)]
pub(super) struct Committed {
    pub epoch: u64,
    /// Of each rank.
    pub generations: Vec<u64>,
    pub sequence: u64,
}

impl Committed {
    fn by_rank(&self) -> Vec<(u32, u64)> {
        (0..).zip(self.generations.iter().copied()).collect()
    }
}

/// What an upload did.
#[derive(Debug, Clone)]
pub(super) struct Uploaded {
    /// What each rank had in memory before it.
    pub encoded: BTreeMap<u32, u64>,
    /// Of the store in memory that it came from.
    pub epoch: u64,
    /// The last log entry of the source, before the upload.
    pub sequence: u64,
    /// The step of that entry.
    pub step: Option<u64>,
    /// Snapshots that were known to be missing before.
    pub pending_before: u64,
    /// Snapshots that came now.
    pub copied: u64,
    /// Bytes of them that had been sent while they were being encoded.
    pub ahead_bytes: u64,
    pub upload_ms: f64,
}

#[derive(Debug, Default)]
struct TierFacts {
    /// It had all that its source had, once: since then, `pending` tells.
    known: bool,
    orders: Orders,
    last_step: Option<u64>,
    pending: u64,
    problem: Option<String>,
}

/// What trainers want of a tier.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Orders {
    /// That it is taken over, whoever writes there.
    pub take_over: bool,
    /// How often they have wanted that.
    pub count: u64,
}

impl Run {
    pub(super) fn new(spec: RunSpec, place: &Place) -> Result<Self> {
        let run = place.run(&spec.key);
        run.create()?;
        let json = serde_json::to_vec(&spec).map_err(|e| Error::invalid(format!("a run: {e}")))?;
        replace_file(&run.spec(), &json)?;
        let tiers = spec.stores()?;
        let cap = spec.cap(place)?;
        let facts = Facts { tiers: tiers.iter().map(|_| TierFacts::default()).collect(), restoring: true, ..Facts::default() };
        let upload = tiers.iter().map(|_| Notify::new()).collect();
        Ok(Self {
            place: run,
            tiers,
            cap,
            facts: Mutex::new(facts),
            encode: Notify::new(),
            upload,
            tick: watch::Sender::new(0),
            leaves: OnceLock::new(),
            spec,
        })
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes something, and wakes whoever waits for it.
    fn change<T>(&self, change: impl FnOnce(&mut Facts) -> T) -> T {
        let result = change(&mut self.facts());
        self.tick.send_modify(|tick| *tick += 1);
        result
    }

    /// A rank whose trainer is gone, or not back yet: what it left in its arena.
    pub(super) fn adopt(&self, rank: u32) -> Result<()> {
        self.change(|facts| {
            let arena = self.enter(facts, rank)?;
            let session = arena.map_or(Ok(0), |arena| arena.session())?;
            facts.session = facts.session.max(session);
            // The last that its trainer was in: if it comes back, it begins another.
            facts.ranks.entry(rank).or_default().session = session;
            Ok::<_, Error>(())
        })?;
        self.encode.notify_one();
        Ok(())
    }

    /// A trainer begins, or goes on; its attachment's number.
    pub(super) fn attach(&self, request: &Attach) -> Result<u64> {
        let Attach { rank, mode, .. } = *request;
        let attached = self.change(|facts| -> Result<u64> {
            let arena = self.enter(facts, rank)?;
            let left = arena.as_ref().map_or(Ok(0), |arena| arena.session())?;
            facts.session = facts.session.max(left).max(request.session);
            if mode != Mode::GoOn && !facts.may_join(rank) {
                facts.session += 1;
                let session = facts.session;
                for member in facts.ranks.values_mut().filter(|member| member.trainer.is_some()) {
                    member.session = session;
                    member.arena.as_ref().map_or(Ok(()), |arena| arena.set_session(session))?;
                }
            }
            let session = facts.session;
            arena.as_ref().map_or(Ok(()), |arena| arena.set_session(session))?;
            let given_up = arena.map_or_else(|| Ok(Vec::new()), |arena| arena.given_up())?;
            let member = facts.ranks.entry(rank).or_default();
            (member.trainer, member.session, member.is_over) = (Some(request.pid), session, false);
            if mode != Mode::GoOn {
                // A new trainer is told of what it may still wait for alone.
                let durable = member.durable;
                let is_given_up = |generation: u64| given_up.iter().any(|kept| kept.word.generation == generation);
                member.failures.retain(|failure| failure.generation > durable || is_given_up(failure.generation));
            }
            for Kept { word, step, .. } in given_up {
                let generation = word.generation;
                if !member.failures.iter().any(|failure| failure.generation == generation) {
                    let message = "an agent that is gone could not encode it; its log may say why".to_owned();
                    member.fail(Failure { step, generation, message });
                }
            }
            member.attached += 1;
            let attached = member.attached;
            // One rank speaks for all.
            if mode != Mode::GoOn && rank == 0 {
                if mode == Mode::TakeOverAfresh {
                    // Those of ranks that are here already are new.
                    for (other, member) in facts.ranks.iter_mut().filter(|(other, member)| **other != 0 && member.trainer.is_none()) {
                        remove_file(&self.place.rank(*other).arena())?;
                        member.arena = None;
                    }
                }
                for tier in &mut facts.tiers {
                    tier.orders = Orders { take_over: true, count: tier.orders.count + 1 };
                }
                self.place.set_over(false)?;
                (facts.stopped, facts.restoring, facts.clear) = (None, true, false);
                if mode == Mode::TakeOverAfresh {
                    facts.afresh = Some(request.latest.clone());
                }
            }
            Ok(attached)
        })?;
        self.encode.notify_one();
        self.upload.iter().for_each(Notify::notify_one);
        Ok(attached)
    }

    /// Opens the arena of a rank, if it has one.
    fn enter(&self, facts: &mut Facts, rank: u32) -> Result<Option<Arc<Arena>>> {
        let path = self.place.rank(rank).arena();
        let arena = match path.exists() {
            true => Some(Arc::new(Arena::open(&path)?)),
            false => None,
        };
        let member = facts.ranks.entry(rank).or_default();
        if let Some(arena) = &arena {
            // The first to open the arena since this agent began: what is being encoded was being encoded by another, who is gone.
            if member.arena.is_none() {
                arena.give_back_taken()?;
            }
            member.encoded = member.encoded.max(arena.encoded()?);
        }
        member.arena.clone_from(&arena);
        Ok(arena)
    }

    /// For how long a trainer with other options has waited.
    pub(super) fn leaving_for(&self) -> Duration {
        self.leaves.get_or_init(Instant::now).elapsed()
    }

    /// A trainer's connection has ended.
    pub(super) fn detach(&self, rank: u32, attached: u64) {
        self.change(|facts| {
            if let Some(member) = facts.ranks.get_mut(&rank).filter(|member| member.attached == attached) {
                member.trainer = None;
            }
        });
        // It may have died before it told of a state that it had published.
        self.encode.notify_one();
    }

    /// A save was published.
    pub(super) fn saved(&self, rank: u32, note: &SaveNote) -> Progress {
        let queue_depth = self.queue_depth();
        self.change(|facts| {
            facts.restoring = false;
            if self.spec.inline {
                // It is in memory already.
                let member = facts.ranks.entry(rank).or_default();
                member.encoded = member.encoded.max(note.generation);
                let (epoch, sequence) = (inline::epoch(note.generation), inline::entry(note.generation));
                facts.commit(Committed { epoch, generations: vec![note.generation], sequence }, note.step);
            }
            if rank == 0 {
                facts.begun_ms.insert(note.generation, note.time_ms);
                facts.saves.push_back(SaveStatus {
                    step: note.step,
                    generation: note.generation,
                    stall_ms: note.stall_ms,
                    copy_ms: note.copy_ms,
                    bytes_in: note.bytes,
                    queue_depth,
                    ..SaveStatus::default()
                });
                while facts.saves.len() > SAVES {
                    facts.saves.pop_front();
                }
            }
        });
        self.encode.notify_one();
        self.upload.iter().for_each(Notify::notify_one);
        self.progress(rank)
    }

    /// How far the saves of a rank have come.
    pub(super) fn progress(&self, rank: u32) -> Progress {
        let queue_depth = self.queue_depth();
        let facts = self.facts();
        let tiers = facts.tiers.iter().find_map(|tier| tier.problem.clone());
        let member = facts.ranks.get(&rank);
        Progress {
            encoded: member.map_or(0, |member| member.encoded),
            durable: member.map_or(0, |member| member.durable),
            failures: member.map_or_else(Vec::new, |member| member.failures.iter().cloned().collect()),
            session: facts.session,
            damaged_epoch: facts.memory.damaged.last().copied(),
            stopped: facts.stopped.clone(),
            problem: facts.problem.clone().or(tiers),
            queue_depth,
        }
    }

    pub(super) fn ticks(&self) -> watch::Receiver<u64> {
        self.tick.subscribe()
    }

    /// The arenas of all ranks, by rank; none while one is missing.
    pub(super) fn arenas(&self) -> Option<Vec<Arc<Arena>>> {
        let facts = self.facts();
        (0..self.spec.world).map(|rank| facts.ranks.get(&rank)?.arena.clone()).collect()
    }

    /// Ranks that have no arena yet, while another has a state that waits for theirs.
    pub(super) fn missing_ranks(&self) -> Vec<u32> {
        let facts = self.facts();
        let waits = |member: &Member| member.arena.as_ref().is_some_and(|arena| arena.has_waiting());
        if !facts.ranks.values().any(waits) {
            return Vec::new();
        }
        (0..self.spec.world).filter(|rank| facts.ranks.get(rank).is_none_or(|member| member.arena.is_none())).collect()
    }

    /// Ranks whose trainers are connected, but for one.
    pub(super) fn others_attached(&self, rank: u32) -> Vec<u32> {
        self.facts().ranks.iter().filter(|(other, member)| **other != rank && member.trainer.is_some()).map(|(other, _)| *other).collect()
    }

    /// What each rank has in memory.
    pub(super) fn encoded_by_rank(&self) -> BTreeMap<u32, u64> {
        self.facts().ranks.iter().map(|(rank, member)| (*rank, member.encoded)).collect()
    }

    /// The memory tier that was out of date is gone.
    pub(super) fn is_fresh(&self) {
        self.change(|facts| {
            (facts.afresh, facts.memory, facts.ahead) = (None, MemoryFacts::default(), None);
            if let Some(first) = facts.tiers.first_mut() {
                first.pending = 0;
            }
        });
        self.upload.iter().for_each(Notify::notify_one);
    }

    /// Whether the memory tier is out of date, and still there.
    pub(super) fn is_out_of_date(&self) -> bool {
        self.facts().afresh.is_some()
    }

    /// The newest snapshot of each tier when the memory tier was found to be out of date.
    pub(super) fn found_instead(&self) -> Option<BTreeMap<String, Option<Id>>> {
        self.facts().afresh.clone()
    }

    /// What all ranks have, once all are known, and what to do with it.
    pub(super) fn next(&self, arenas: &[Arc<Arena>]) -> Result<Next> {
        let (session, over) = {
            let facts = self.facts();
            let over: BTreeSet<u32> = facts.ranks.iter().filter(|(_, member)| member.is_over).map(|(rank, _)| *rank).collect();
            (facts.session, over)
        };
        let held = |(rank, arena): (u32, &Arc<Arena>)| {
            let kept = arena.kept()?.into_iter().filter_map(|(_, kept)| kept).collect();
            Ok(Held { kept, encoded: arena.encoded()?, is_over: over.contains(&rank) })
        };
        Ok(next(&(0..).zip(arenas).map(held).collect::<Result<Vec<_>>>()?, session))
    }

    /// Whether a state that all ranks have still waits to be encoded.
    pub(super) fn has_to_encode(&self) -> bool {
        if self.stopped() || self.is_out_of_date() || self.spec.inline {
            return false;
        }
        let Some(arenas) = self.arenas() else { return false };
        let encodes = |arena: &Arc<Arena>| arena.words().is_ok_and(|words| words.iter().any(|word| word.state == State::Encoding));
        matches!(self.next(&arenas), Ok(Next::Encode(_))) || arenas.iter().any(encodes)
    }

    /// What the copier of a tier has to do.
    pub(super) fn orders(&self, tier: usize) -> Orders {
        self.facts().tiers.get(tier).map_or_else(Orders::default, |tier| tier.orders)
    }

    /// The tier was taken over, as these orders said, which others may have followed; its newest snapshot.
    pub(super) fn taken_over(&self, tier: usize, orders: Orders, latest: Option<&SnapshotRecord>) {
        self.change(|facts| {
            if let Some(known) = facts.tiers.get_mut(tier) {
                known.orders.take_over &= known.orders.count != orders.count;
                known.last_step = known.last_step.or(latest.map(|latest| latest.step));
            }
            if let (0, Some(latest)) = (tier, latest) {
                facts.last_commit.get_or_insert((latest.step, latest.time_ms));
            }
        });
    }

    pub(super) fn stopped(&self) -> bool {
        self.facts().stopped.is_some()
    }

    /// A trainer waits for saves: it restores no more, and old snapshots may go for new ones.
    pub(super) fn goes_on(&self) {
        if self.is_restoring() {
            self.change(|facts| facts.restoring = false);
            self.encode.notify_one();
        }
    }

    pub(super) fn is_restoring(&self) -> bool {
        self.facts().restoring
    }

    pub(super) fn memory(&self) -> MemoryFacts {
        self.facts().memory.clone()
    }

    /// What of memory may go, while this epoch is written to.
    pub(super) fn sent(&self, epoch: u64) -> Sent {
        let facts = self.facts();
        let uploaded = if facts.memory.epoch == epoch { facts.memory.uploaded } else { 0 };
        Sent { uploaded, damaged: facts.memory.damaged.clone() }
    }

    pub(super) fn set_memory(&self, change: impl FnOnce(&mut MemoryFacts)) {
        self.change(|facts| change(&mut facts.memory));
    }

    /// A save is encoded in memory; its generation on each rank.
    pub(super) fn encoded(&self, step: u64, generations: Vec<u64>, epoch: u64, saved: &Saved, encode_ms: f64, ahead: Option<Ahead>) {
        self.change(|facts| {
            facts.ahead = ahead;
            for (rank, generation) in (0..).zip(&generations) {
                let member = facts.ranks.entry(rank).or_default();
                member.encoded = member.encoded.max(*generation);
            }
            facts.problem = None;
            let generation = generations.first().copied().unwrap_or(0);
            facts.commit(Committed { epoch, generations, sequence: saved.sequence }, step);
            if let Some(save) = facts.saves.iter_mut().rfind(|save| save.generation == generation) {
                (save.encode_ms, save.bytes_out) = (Some(encode_ms), Some(saved.stored_bytes));
                save.kind = Some(saved.kind.name().to_owned());
            }
        });
        if let Some(first) = self.upload.first() {
            first.notify_one();
        }
    }

    /// The first tier, if it has all there is and takes what comes: a snapshot may go there while it is being encoded. If it is behind, what it
    /// lacks goes first.
    pub(super) fn sends_ahead(&self) -> Option<&Store> {
        let facts = self.facts();
        let takes = |tier: &&TierFacts| tier.known && !tier.orders.take_over && tier.pending == 0 && tier.problem.is_none();
        facts.tiers.first().filter(takes).filter(|_| facts.stopped.is_none())?;
        self.tiers.first()
    }

    /// What went ahead to a tier.
    pub(super) fn take_ahead(&self, tier: usize) -> Option<Ahead> {
        if tier == 0 { self.facts().ahead.take() } else { None }
    }

    /// A save failed for good: these generations of ranks.
    pub(super) fn failed(&self, generations: &[(u32, u64)], step: u64, error: &Error) {
        self.change(|facts| facts.fail(generations, step, &error.to_string()));
    }

    /// What is in memory and not yet in the first tier cannot get there: these steps, by log entry; what was committed to that epoch, if
    /// that cannot be told any more. Another store takes its place.
    pub(super) fn memory_is_damaged(&self, epoch: u64, lost: Option<&[(u64, u64)]>, error: &Error) {
        let committed: Vec<Committed> = self.memory().committed.into_iter().filter(|committed| committed.epoch == epoch).collect();
        let step_of = |generation: u64| self.facts().saves.iter().rfind(|save| save.generation == generation).map_or(0, |save| save.step);
        let lost: Vec<(Vec<(u32, u64)>, u64)> = match lost {
            Some(lost) => {
                let of = |&(sequence, step): &(u64, u64)| match committed.iter().find(|committed| committed.sequence == sequence) {
                    Some(known) => (known.by_rank(), step),
                    // Of an agent before this one.
                    None => (self.encoded_by_rank().into_iter().collect(), step),
                };
                lost.iter().map(of).collect()
            }
            None => committed.iter().map(|known| (known.by_rank(), step_of(known.generations.first().copied().unwrap_or(0)))).collect(),
        };
        for (generations, step) in lost {
            let message = format!("was damaged in memory before it was in the store: {}", error.message());
            self.failed(&generations, step, &Error::corrupt(message));
        }
        self.change(|facts| {
            facts.memory.damaged.insert(epoch);
            facts.memory.committed.retain(|committed| committed.epoch != epoch);
            let pending = facts.memory.committed.len() as u64;
            if let Some(tier) = facts.tiers.first_mut() {
                tier.pending = pending;
            }
        });
        self.encode.notify_one();
    }

    /// Something does not work at the moment.
    pub(super) fn problem(&self, problem: Option<String>) {
        if self.facts().problem == problem {
            return;
        }
        if let Some(problem) = &problem {
            tracing::warn!(run = self.spec.run, problem, "trying again");
        }
        self.change(|facts| facts.problem = problem);
    }

    /// Another job has the store: this run writes no more. Not if a trainer has ordered something else since; whether it was stopped.
    pub(super) fn stop(&self, why: String, orders: Orders) -> bool {
        self.change(|facts| {
            if facts.tiers.first().is_some_and(|first| first.orders.count != orders.count) {
                return false;
            }
            tracing::error!(run = self.spec.run, why, "this run was given up");
            (facts.stopped, facts.ahead) = (Some(why), None);
            true
        })
    }

    pub(super) fn tier_problem(&self, tier: usize, problem: Option<String>) {
        if let Some(problem) = &problem {
            tracing::warn!(run = self.spec.run, tier, problem, "trying again");
        }
        self.change(|facts| {
            if let Some(tier) = facts.tiers.get_mut(tier) {
                tier.problem = problem;
            }
        });
        // Encoding may have waited for it.
        self.encode.notify_one();
    }

    /// Whether the first tier takes what comes.
    pub(super) fn uploads_go_on(&self) -> bool {
        !self.stopped() && self.facts().tiers.first().is_some_and(|tier| tier.problem.is_none())
    }

    /// A tier has all snapshots that its source had.
    pub(super) fn uploaded(&self, tier: usize, done: &Uploaded) {
        let Uploaded { copied, sequence: uploaded, .. } = *done;
        self.change(|facts| {
            let Some(known) = facts.tiers.get_mut(tier) else { return };
            known.known = true;
            known.pending = known.pending.saturating_sub(done.pending_before);
            (known.problem, known.last_step) = (None, done.step.or(known.last_step));
            if let (1.., Some(next)) = (copied, facts.tiers.get_mut(tier + 1)) {
                next.pending += copied;
            }
            if tier != 0 || done.epoch != facts.memory.epoch || facts.memory.damaged.contains(&done.epoch) {
                return;
            }
            facts.memory.uploaded = uploaded;
            for (rank, encoded) in &done.encoded {
                let member = facts.ranks.entry(*rank).or_default();
                member.durable = member.durable.max(*encoded);
                if self.spec.inline {
                    // An agent that has just begun knows of no saves, but sees them in memory.
                    member.durable = member.durable.max(inline::generation(done.epoch, uploaded));
                    member.encoded = member.encoded.max(member.durable);
                }
            }
            // All epochs before the newest went up, too.
            let is_up = |committed: &&Committed| (committed.epoch, committed.sequence) <= (done.epoch, uploaded);
            while let Some(committed) = facts.memory.committed.front().filter(is_up).cloned() {
                facts.memory.committed.pop_front();
                let generation = committed.generations.first().copied().unwrap_or(0);
                let begun = facts.begun_ms.remove(&generation);
                let Some(save) = facts.saves.iter_mut().rfind(|save| save.generation == generation) else { continue };
                save.upload_ms = Some(done.upload_ms);
                save.ahead_bytes = Some(done.ahead_bytes);
                save.commit_ms = begun.map(|begun| now_ms().saturating_sub(begun) as f64);
                tracing::info!(
                    run = self.spec.run,
                    step = save.step,
                    generation,
                    stall_ms = save.stall_ms,
                    copy_ms = save.copy_ms,
                    encode_ms = save.encode_ms,
                    upload_ms = save.upload_ms,
                    commit_ms = save.commit_ms,
                    bytes_in = save.bytes_in,
                    bytes_out = save.bytes_out,
                    ahead_bytes = save.ahead_bytes,
                    "committed"
                );
            }
            // Saves that never came to memory.
            let durable = facts.ranks.get(&0).map_or(0, |member| member.durable);
            facts.begun_ms.retain(|generation, _| *generation > durable);
            if let (1.., Some(step)) = (copied, done.step) {
                facts.last_commit = Some((step, now_ms()));
            }
        });
        match self.upload.get(tier + 1) {
            Some(next) if copied > 0 => next.notify_one(),
            _ => {}
        }
        // There may be room again.
        self.encode.notify_one();
    }

    /// What is in memory that the trainer itself writes.
    pub(super) fn note_inline(&self, epoch: u64, records: &[SnapshotRecord]) -> Result<()> {
        let bytes = memory_bytes(&self.place)?;
        let live = records.iter().filter(|record| record.status == Status::Live);
        let steps = live.map(|record| record.step).collect();
        self.set_memory(|facts| (facts.epoch, facts.steps, facts.bytes) = (epoch, steps, bytes));
        Ok(())
    }

    /// There is nothing that a tier could lack.
    pub(super) fn nothing_to_upload(&self, tier: usize) {
        if let Some(tier) = self.facts().tiers.get_mut(tier) {
            (tier.known, tier.problem) = (true, None);
        }
    }

    /// An upload to a tier ended with an error: what it has done, and what the tier after it lacks, is not known.
    pub(super) fn upload_failed(&self, tier: usize) {
        self.change(|facts| {
            if let Some(next) = facts.tiers.get_mut(tier + 1) {
                next.known = false;
            }
        });
        if let Some(next) = self.upload.get(tier + 1) {
            next.notify_one();
        }
    }

    pub(super) fn pending(&self, tier: usize) -> u64 {
        self.facts().tiers.get(tier).map_or(0, |tier| tier.pending)
    }

    /// States that wait to be encoded, and snapshots that wait for the first tier.
    pub(super) fn queue_depth(&self) -> u64 {
        let facts = self.facts();
        let waiting = facts
            .ranks
            .values()
            .filter_map(|member| member.arena.as_ref()?.words().ok())
            .map(|words| words.iter().filter(|word| matches!(word.state, State::Full | State::Encoding)).count() as u64);
        waiting.max().unwrap_or(0) + facts.tiers.first().map_or(0, |tier| tier.pending)
    }

    /// Whether a trainer is connected.
    pub(super) fn is_attached(&self) -> bool {
        self.facts().ranks.values().any(|member| member.trainer.is_some())
    }

    /// Whether anything lies in memory that no tier may have: whole states, or what is encoded.
    pub(super) fn holds_states(&self) -> bool {
        let facts = self.facts();
        let is_whole = |arena: &Arc<Arena>| arena.words().is_ok_and(|words| words.iter().any(|word| word.state.is_whole()));
        facts.ranks.values().any(|member| member.arena.as_ref().is_some_and(is_whole))
    }

    /// Removes what ranks left that the job does not have any more; what they had in common with others is encoded, or lost.
    pub(super) fn remove_former_ranks(&self) {
        for rank in self.place.ranks().unwrap_or_default().into_iter().filter(|rank| *rank >= self.spec.world) {
            if let Err(error) = remove_file(&self.place.rank(rank).arena()) {
                tracing::warn!(run = self.spec.run, rank, %error, "the arena of a rank that is no more could not be removed");
            }
        }
    }

    /// Whether nothing is left to do; a run that was given up has nothing.
    pub(super) fn is_quiet(&self) -> bool {
        self.stopped() || (self.queue_depth() == 0 && self.facts().tiers.iter().all(|tier| tier.known && tier.pending == 0))
    }

    /// The run is over for its trainer. An agent after this one finds that out, too.
    pub(super) fn clear_when_quiet(&self, rank: Option<u32>) {
        if let Some(rank) = rank {
            self.change(|facts| facts.ranks.entry(rank).or_default().is_over = true);
            self.encode.notify_one();
        }
        if let Err(error) = self.place.set_over(true) {
            tracing::warn!(run = self.spec.run, %error, "that the run is over could not be noted");
        }
        self.change(|facts| facts.clear = true);
    }

    /// Whether its memory can go.
    pub(super) fn is_over(&self) -> bool {
        let clear = self.facts().clear;
        clear && !self.is_attached() && self.is_quiet()
    }

    pub(super) fn status(&self) -> RunStatus {
        let queue_depth = self.queue_depth();
        let facts = self.facts();
        let slots = |arena: &Arena| {
            let slot =
                |(word, kept): (Word, Option<Kept>)| SlotStatus { state: word.state.name().to_owned(), step: kept.map(|kept| kept.step) };
            arena.kept().map_or_else(|_| Vec::new(), |all| all.into_iter().map(slot).collect())
        };
        let rank = |(rank, member): (&u32, &Member)| RankStatus {
            rank: *rank,
            trainer: member.trainer,
            arena_bytes: member.arena.as_ref().map_or(0, |arena| arena.bytes()),
            slots: member.arena.as_ref().map_or_else(Vec::new, |arena| slots(arena)),
        };
        let tier = |(url, tier): (&String, &TierFacts)| TierStatus {
            url: url.clone(),
            last_step: tier.last_step,
            pending: tier.pending,
            problem: tier.problem.clone(),
        };
        RunStatus {
            run: self.spec.run.clone(),
            key: self.spec.key.clone(),
            tiers: self.spec.tiers.iter().zip(&facts.tiers).map(tier).collect(),
            ranks: facts.ranks.iter().map(rank).collect(),
            queue_depth,
            last_commit_step: facts.last_commit.map(|(step, _)| step),
            seconds_since_commit: facts.last_commit.map(|(_, at)| now_ms().saturating_sub(at) as f64 / 1e3),
            chain_depth: facts.memory.chain_depth,
            failed_saves: facts.failed,
            memory_steps: facts.memory.steps.clone(),
            memory_bytes: facts.memory.bytes,
            memory_cap_bytes: self.cap,
            problem: facts.problem.clone(),
            stopped: facts.stopped.clone(),
            saves: facts.saves.iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::EngineOptions;

    #[test]
    fn what_came_of_earlier_orders_does_not_count_once_a_trainer_has_come() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::open(Some(&folder.path().join("e"))).unwrap();
        let spec = EngineOptions::new(folder.path().join("run").to_str().unwrap()).spec().unwrap();
        let run = Run::new(spec.clone(), &place).unwrap();
        let earlier = run.orders(0);
        run.attach(&Attach { spec, rank: 0, pid: 1, mode: Mode::TakeOver, session: 0, latest: BTreeMap::new() }).unwrap();
        assert!(!run.stop("fenced".into(), earlier) && !run.stopped());
        run.taken_over(0, earlier, None);
        let orders = run.orders(0);
        assert!(orders.take_over, "the trainer's order stands");
        run.taken_over(0, orders, None);
        assert!(!run.orders(0).take_over);
        assert!(run.stop("fenced".into(), orders) && run.stopped());
    }
}
