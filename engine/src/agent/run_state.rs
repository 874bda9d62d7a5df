//! The state of a run as a pure state machine: [`RunState::apply`] changes it by an event and returns the actions that
//! follow. No I/O and no clock; the driver in `run` performs the actions.
//!
//! ```text
//! trainers:  Attached, SavedSnapshot, TrainerWaits, SavesEnded, Finished, Detached, Left
//! encoder:   MemoryCleared, MemoryChanged, Encoded, Failed, EncoderProblem
//! uploaders: TierTakenOver, Uploaded, NothingToUpload, UploadFailed, MemoryUnusable, Fenced
//! ```
//!
//! Invariants: a save that is reported as encoded is in memory or in the first tier; a save that is reported as durable
//! is in the first tier; no work waits while its worker sleeps. The test enumerates all interleavings of a trainer, the
//! encoder and an uploader.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use tensorcask::wire::Id;

use super::run_event::{
    Action, ArenaSummary, Attachment, EncodedSave, Event, LostSnapshot, LostSnapshots, RankGeneration, TierOrders, Upload,
};
use super::run_parts::{CommittedSnapshot, MemoryState, MemoryUpload, RankState, TierState};
use super::save_log::{Commit, SaveLog};
use crate::ipc::messages::{AttachMode, Failure, Progress, SaveNote};
use crate::memory::inline_generation::InlineGeneration;
use crate::run::options::Encode;
use crate::run::status::LeaderStatus;

/// The state of a run.
#[derive(Debug, Clone)]
pub(super) struct RunState {
    /// Process that encodes.
    encode: Encode,
    /// Ranks of this host.
    local_ranks: Range<u32>,
    /// For a run on many hosts: whether the others have been told that the ranks of this host save no more.
    end_noted: Option<bool>,
    pub ranks: BTreeMap<u32, RankState>,
    /// Number of starts of the job. States of several ranks are joined only if they were saved in the same session.
    pub session: u64,
    pub memory: MemoryState,
    pub tiers: Vec<TierState>,
    pub saves: SaveLog,
    /// Many hosts: the leader, as last read.
    pub leader: Option<LeaderStatus>,
    /// Many hosts: newest step of this host of which other hosts have copies.
    pub replicated_step: Option<u64>,
    /// Snapshots in memory that cannot be stored, and whose saves are reported as failed.
    pub lost: BTreeSet<Id>,
    /// Reason why the run is stopped: another job has taken the store over.
    pub stopped: Option<String>,
    /// Current problem of the encoder.
    pub problem: Option<String>,
    /// A fault of a task of the agent, until the next upload.
    pub fault: Option<String>,
    /// Whether a trainer may be restoring, so that no snapshot may be removed from memory.
    pub is_restoring: bool,
    /// Whether the run has finished: its memory is freed once the tiers have everything.
    pub is_finished: bool,
}

impl RunState {
    pub(super) fn new(tiers: usize, encode: Encode) -> Self {
        Self {
            encode,
            local_ranks: 0..1,
            end_noted: None,
            ranks: BTreeMap::new(),
            session: 0,
            memory: MemoryState::default(),
            tiers: vec![TierState::default(); tiers],
            saves: SaveLog::default(),
            leader: None,
            replicated_step: None,
            lost: BTreeSet::new(),
            stopped: None,
            problem: None,
            fault: None,
            is_restoring: true,
            is_finished: false,
        }
    }

    /// The same for one of many hosts, with these ranks.
    pub(super) fn of_host(self, local_ranks: Range<u32>) -> Self {
        Self { local_ranks, end_noted: Some(false), ..self }
    }

    /// Changes the state by an event; returns the actions that follow, in order.
    pub(super) fn apply(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Adopted { rank, arena } => self.on_adopted(rank, arena),
            Event::Attached(attachment) => self.on_attached(attachment),
            Event::Detached { rank, attachment } => {
                if let Some(state) = self.ranks.get_mut(&rank).filter(|state| state.attachment == attachment) {
                    state.trainer = None;
                }
                // The trainer may have published a state and died before it reported the state.
                vec![Action::WakeEncoder]
            }
            Event::Left { rank, attachment } => {
                let state = self.ranks.entry(rank).or_default();
                state.has_left |= state.attachment == attachment;
                after_end(self, rank)
            }
            Event::SavedSnapshot { rank, note, queue_depth } => self.on_saved(rank, &note, queue_depth),
            Event::TrainerWaits => {
                self.is_restoring = false;
                // A trainer that encodes may wait until the first tier has older stores in memory.
                let uploads = if self.encode == Encode::Inline { self.wake_uploaders() } else { Vec::new() };
                [vec![Action::WakeEncoder], uploads].concat()
            }
            Event::SavesEnded { rank } => {
                let state = self.ranks.entry(rank).or_default();
                let is_new = !std::mem::replace(&mut state.saves_no_more, true);
                if is_new { after_end(self, rank) } else { Vec::new() }
            }
            Event::LeaderRead(leader) => self.on_leader_read(leader),
            Event::Replicated(saves) => {
                for RankGeneration { rank, generation } in saves.newest {
                    let state = self.ranks.entry(rank).or_default();
                    state.replicated = state.replicated.max(generation);
                    let of_rank = |saves: &[RankGeneration]| -> Vec<u64> {
                        saves.iter().filter(|save| save.rank == rank).map(|save| save.generation).collect()
                    };
                    state.not_replicated = of_rank(&saves.missing);
                    state.replicated_after = of_rank(&saves.unwatched).into_iter().fold(0, u64::max);
                }
                self.replicated_step = Some(saves.step);
                Vec::new()
            }
            Event::EndNoted => {
                self.end_noted = self.end_noted.map(|_| true);
                Vec::new()
            }
            Event::Finished { rank } => {
                self.is_finished = true;
                let Some(rank) = rank else { return vec![Action::MarkFinished] };
                self.ranks.entry(rank).or_default().is_finished = true;
                [vec![Action::MarkFinished], after_end(self, rank)].concat()
            }
            Event::MemoryCleared => {
                // Trainers that are still connected may wait for these.
                let lost = std::mem::take(&mut self.memory).committed;
                if let Some(first) = self.tiers.first_mut() {
                    first.pending = 0;
                }
                [fail_missing(self, lost), vec![Action::DropAhead, Action::NoteSaves], self.wake_uploaders()].concat()
            }
            Event::MemoryChanged(contents) => {
                self.memory.epoch = contents.epoch;
                (self.memory.steps, self.memory.bytes, self.memory.chain_depth) = (contents.steps, contents.bytes, contents.chain_depth);
                Vec::new()
            }
            Event::Encoded(save) => self.on_encoded(save),
            Event::Failed { generations, step, message } => vec![self.fail(&generations, step, &message)],
            Event::EncoderProblem(problem) => {
                let is_new = problem != self.problem;
                self.problem = problem.clone();
                problem.filter(|_| is_new).map(|message| Action::LogProblem { tier: None, message }).into_iter().collect()
            }
            Event::MemoryUnusable { epoch, lost, why } => self.on_memory_unusable(epoch, lost, &why),
            Event::TierTakenOver { tier, orders, latest } => self.on_taken_over(tier, orders, latest),
            Event::Uploaded(upload) => self.on_uploaded(&upload),
            Event::GivenUp { generations, sequence, step, message } => {
                let before = self.memory.committed.len();
                self.memory.committed.retain(|committed| committed.sequence != sequence);
                let removed = before.saturating_sub(self.memory.committed.len()) as u64;
                if let Some(tier) = self.tiers.first_mut() {
                    tier.pending = tier.pending.saturating_sub(removed);
                }
                vec![self.fail(&generations, step, &message)]
            }
            Event::NothingToUpload { tier, sources } => {
                let leads = tier == 0 || self.leads();
                if let Some(tier) = self.tiers.get_mut(tier) {
                    (tier.is_known, tier.problem) = (true, None);
                    if !leads {
                        tier.pending = 0;
                    }
                }
                if tier == 0 { fail_removed(self, &sources) } else { Vec::new() }
            }
            Event::UploadFailed { tier, message } => self.on_upload_failed(tier, message),
            Event::TierSilent { tier, message } => {
                if let Some(tier) = self.tiers.get_mut(tier) {
                    tier.silence = message;
                }
                // The encoder may fill memory further while a tier takes nothing.
                vec![Action::WakeEncoder]
            }
            Event::TaskFailed { message } => {
                self.fault = Some(message.clone());
                vec![Action::LogProblem { tier: None, message }]
            }
            Event::Fenced { orders, why } => {
                // A trainer that has attached since takes the tier over.
                if self.tiers.first().is_some_and(|first| first.orders.count != orders.count) {
                    return Vec::new();
                }
                self.stopped = Some(why.clone());
                vec![Action::LogStopped { why }, Action::DropAhead]
            }
        }
    }

    fn on_leader_read(&mut self, leader: Option<LeaderStatus>) -> Vec<Action> {
        let led = self.leads();
        self.leader = leader;
        if self.leads() && !led {
            // The former leader may have copied any part.
            self.tiers.iter_mut().skip(1).for_each(|tier| tier.is_known = false);
        }
        (1..self.tiers.len()).map(Action::WakeUploader).collect()
    }

    /// Whether this host fills the further tiers: the only host, or the one that leads.
    pub(super) fn leads(&self) -> bool {
        self.end_noted.is_none() || self.leader.as_ref().is_some_and(|leader| leader.is_this_host)
    }

    fn on_adopted(&mut self, rank: u32, arena: Option<ArenaSummary>) -> Vec<Action> {
        let arena = arena.unwrap_or_default();
        self.session = self.session.max(arena.session);
        let state = self.ranks.entry(rank).or_default();
        state.encoded = state.encoded.max(arena.encoded);
        // The last session of the dead trainer. If its successor attaches, that begins another session.
        state.session = arena.session;
        vec![Action::WakeEncoder]
    }

    fn on_attached(&mut self, attachment: Attachment) -> Vec<Action> {
        let Attachment { rank, pid, mode, session, arena, latest } = attachment;
        let mut actions = Vec::new();
        let has_arena = arena.is_some();
        let arena = arena.unwrap_or_default();
        self.session = self.session.max(arena.session).max(session);
        if mode != AttachMode::Continue && !self.may_join(rank) {
            self.session += 1;
            for (other, state) in self.ranks.iter_mut().filter(|(_, state)| state.trainer.is_some()) {
                state.session = self.session;
                actions.push(Action::RaiseSession { rank: *other, session: self.session });
            }
        }
        if has_arena {
            actions.push(Action::RaiseSession { rank, session: self.session });
        }
        let state = self.ranks.entry(rank).or_default();
        state.encoded = state.encoded.max(arena.encoded);
        (state.trainer, state.session, state.is_finished, state.has_left) = (Some(pid), self.session, false, false);
        // A trainer that has announced its end repeats that whenever it waits.
        state.saves_no_more = false;
        if mode != AttachMode::Continue {
            // A new trainer hears only of saves that it may still wait for.
            let durable = state.durable;
            let is_in_arena = |generation: u64| arena.failed.iter().any(|failed| failed.generation == generation);
            state.failures.retain(|failure| failure.generation > durable || is_in_arena(failure.generation));
        }
        for failed in arena.failed {
            if !state.failures.iter().any(|failure| failure.generation == failed.generation) {
                let message = "an earlier agent could not encode this save; the agent's log may tell the reason".to_owned();
                state.add_failure(Failure { step: failed.step, generation: failed.generation, message });
            }
        }
        state.attachment += 1;
        if self.end_noted.is_some() {
            actions.push(Action::NoteEnd { rank, has_ended: false });
        }
        // The first rank decides for all ranks of this host.
        if mode != AttachMode::Continue && rank == self.local_ranks.start {
            if mode == AttachMode::TakeOverAfresh {
                // Arenas of connected ranks are new.
                let absent = self.ranks.iter().filter(|(other, state)| **other != self.local_ranks.start && state.trainer.is_none());
                actions.extend(absent.map(|(other, _)| Action::RemoveArena { rank: *other }));
                self.memory.outdated = Some(latest);
            }
            for tier in &mut self.tiers {
                tier.orders = TierOrders { take_over: true, count: tier.orders.count + 1 };
            }
            actions.push(Action::MarkActive);
            (self.is_restoring, self.is_finished) = (true, false);
            // On many hosts, another start of the job is another session, and this one has ended.
            if self.end_noted.is_none() {
                self.stopped = None;
            }
        }
        actions.push(Action::WakeEncoder);
        actions.extend(self.wake_uploaders());
        actions
    }

    /// Whether a rank that starts belongs to the current session: other ranks are in it, and this one was not in it
    /// before.
    fn may_join(&self, rank: u32) -> bool {
        let is_in = |state: &RankState| state.session == self.session;
        let others = self.ranks.iter().any(|(other, state)| *other != rank && state.trainer.is_some() && is_in(state));
        others && !self.ranks.get(&rank).is_some_and(is_in)
    }

    fn on_saved(&mut self, rank: u32, note: &SaveNote, queue_depth: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        self.is_restoring = false;
        if rank == self.local_ranks.start {
            self.saves.on_saved(note, queue_depth);
        }
        if self.encode == Encode::Inline {
            // The trainer has committed the snapshot in memory itself.
            let state = self.ranks.entry(rank).or_default();
            state.encoded = state.encoded.max(note.generation);
            let InlineGeneration { epoch, sequence } = InlineGeneration::from_generation(note.generation);
            actions.extend(self.commit(CommittedSnapshot { step: note.step, epoch, generations: vec![note.generation], sequence }));
        }
        actions.push(Action::WakeEncoder);
        actions.extend(self.wake_uploaders());
        actions
    }

    fn on_encoded(&mut self, save: EncodedSave) -> Vec<Action> {
        let EncodedSave { step, generations, epoch, sequence, encoding } = save;
        for (rank, generation) in (self.local_ranks.start..).zip(&generations) {
            let state = self.ranks.entry(rank).or_default();
            state.encoded = state.encoded.max(*generation);
        }
        self.problem = None;
        let committed = CommittedSnapshot { step, epoch, generations, sequence };
        self.saves.on_encoded(committed.first_generation(), encoding);
        let mut actions = self.commit(committed);
        actions.extend((!self.tiers.is_empty()).then_some(Action::WakeUploader(0)));
        actions
    }

    /// Queues a snapshot in memory for the first tier. The save fails if its store in memory has been given up in the
    /// meantime.
    fn commit(&mut self, committed: CommittedSnapshot) -> Vec<Action> {
        if self.memory.unusable.contains(&committed.epoch) {
            let why = "it is a delta on a snapshot that cannot be stored; the next save writes a base";
            return vec![self.fail(&committed.by_rank(self.local_ranks.start), committed.step, why)];
        }
        let mut actions = vec![Action::NoteSaves];
        match self.memory.stored_at(&committed) {
            // An upload that was under way has taken it along.
            Some(times) => {
                for RankGeneration { rank, generation } in committed.by_rank(self.local_ranks.start) {
                    let state = self.ranks.entry(rank).or_default();
                    state.durable = state.durable.max(generation);
                }
                actions.extend(self.saves.on_committed(committed.first_generation(), times).map(Action::LogCommit));
                self.saves.last_commit = Some(Commit { step: committed.step, time_ms: times.time_ms });
            }
            None => {
                self.memory.add(committed);
                count_pending(self);
                if let (Some(_), Some(first)) = (self.end_noted, self.tiers.first_mut()) {
                    first.pending += 1;
                }
            }
        }
        actions
    }

    /// Notes that a save failed for good on these ranks.
    fn fail(&mut self, generations: &[RankGeneration], step: u64, why: &str) -> Action {
        self.saves.failed += 1;
        for &RankGeneration { rank, generation } in generations {
            self.ranks.entry(rank).or_default().add_failure(Failure { step, generation, message: why.to_owned() });
            if rank == self.local_ranks.start {
                self.saves.on_failed(generation, why);
            }
        }
        Action::LogFailure { step, message: why.to_owned() }
    }

    fn on_memory_unusable(&mut self, epoch: u64, lost: Option<LostSnapshots>, why: &str) -> Vec<Action> {
        let committed: Vec<CommittedSnapshot> = self.memory.committed.iter().filter(|known| known.epoch == epoch).cloned().collect();
        let first = self.local_ranks.start;
        // Everything, if it is unknown what the tier has.
        let read = lost.as_ref().map_or(0, |lost| lost.read);
        let mut failed: Vec<(Vec<RankGeneration>, u64)> = Vec::new();
        for LostSnapshot { id, sequence, step } in lost.into_iter().flat_map(|lost| lost.snapshots) {
            // An earlier agent may have noted it.
            if !self.lost.insert(id) {
                continue;
            }
            let known = committed.iter().find(|known| known.sequence == sequence).map(|known| known.by_rank(first));
            failed.push((known.unwrap_or_else(|| unknown_saves(self, epoch, sequence)), step));
        }
        while self.lost.len() > MAX_LOST {
            self.lost.pop_first();
        }
        let later = committed.iter().filter(|known| known.sequence > read);
        failed.extend(later.map(|known| (known.by_rank(first), known.step)));
        let mut actions = Vec::new();
        for (generations, step) in failed {
            actions.push(self.fail(&generations, step, why));
        }
        self.memory.unusable.insert(epoch);
        self.memory.committed.retain(|committed| committed.epoch != epoch);
        count_pending(self);
        // An upload that is under way reports nothing now, and may have copied saves of older epochs.
        actions.extend([Action::NoteSaves, Action::WakeEncoder, Action::WakeUploader(0)]);
        actions
    }

    fn on_taken_over(&mut self, tier: usize, orders: TierOrders, latest: Option<Commit>) -> Vec<Action> {
        if let Some(known) = self.tiers.get_mut(tier) {
            // Newer orders stay.
            known.orders.take_over &= known.orders.count != orders.count;
            known.last_step = known.last_step.or(latest.map(|latest| latest.step));
        }
        if let (0, Some(latest)) = (tier, latest) {
            self.saves.last_commit.get_or_insert(latest);
        }
        Vec::new()
    }

    fn on_uploaded(&mut self, upload: &Upload) -> Vec<Action> {
        let mut actions = Vec::new();
        let leads = self.leads();
        if let Some(known) = self.tiers.get_mut(upload.tier) {
            known.is_known = true;
            known.pending = known.pending.saturating_sub(upload.pending_before);
            (known.problem, known.last_step) = (None, upload.step.or(known.last_step));
            if upload.copied > 0 {
                self.fault = None;
            }
            if let (1.., true, Some(next)) = (upload.copied, leads, self.tiers.get_mut(upload.tier + 1)) {
                next.pending += upload.copied;
                actions.push(Action::WakeUploader(upload.tier + 1));
            }
            if upload.tier == 0 && !self.memory.unusable.contains(&upload.epoch) {
                actions.extend(self.on_durable(upload));
            }
            if upload.tier == 0 {
                count_pending(self);
            }
        }
        // There may be room in memory again.
        actions.push(Action::WakeEncoder);
        actions
    }

    /// The first tier has everything that memory had before the upload.
    fn on_durable(&mut self, upload: &Upload) -> Vec<Action> {
        let mut actions = fail_removed(self, &upload.sources);
        let sources = upload.sources.clone();
        let sequence = upload.sequence;
        let times = upload.times;
        self.memory.last_upload = Some(MemoryUpload { sources, sequence, times });
        for (rank, encoded) in &upload.encoded {
            let state = self.ranks.entry(*rank).or_default();
            state.durable = state.durable.max(*encoded);
            if self.encode == Encode::Inline {
                // An agent that has just started knows no saves, but finds their snapshots in memory.
                let generation = InlineGeneration { epoch: upload.epoch, sequence: upload.sequence }.to_generation();
                state.durable = state.durable.max(generation);
                state.encoded = state.encoded.max(state.durable);
            }
        }
        // Older epochs were uploaded first.
        let is_uploaded = |committed: &CommittedSnapshot| (committed.epoch, committed.sequence) <= (upload.epoch, upload.sequence);
        // An upload may have copied a snapshot that was committed in memory after it began. The next one reports it.
        let mut is_news = upload.copied > 0;
        while self.memory.committed.front().is_some_and(is_uploaded) {
            let Some(committed) = self.memory.committed.pop_front() else { break };
            is_news = true;
            actions.extend(self.saves.on_committed(committed.first_generation(), upload.times).map(Action::LogCommit));
            actions.push(Action::NoteSaves);
        }
        self.saves.forget_starts(self.ranks.get(&self.local_ranks.start).map_or(0, |state| state.durable));
        if let (true, Some(step)) = (is_news, upload.step) {
            self.saves.last_commit = Some(Commit { step, time_ms: upload.times.time_ms });
        }
        actions
    }

    fn on_upload_failed(&mut self, tier: usize, message: String) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(known) = self.tiers.get_mut(tier) {
            // A storage that is gone for weeks must not fill the log.
            if known.problem.as_ref() != Some(&message) {
                actions.push(Action::LogProblem { tier: Some(tier), message: message.clone() });
            }
            known.problem = Some(message);
        }
        // The upload may have copied a part, so the number of snapshots that the next tier lacks is unknown.
        if let Some(next) = self.tiers.get_mut(tier + 1) {
            next.is_known = false;
            actions.push(Action::WakeUploader(tier + 1));
        }
        // The encoder removes nothing from memory while uploads fail, and may now continue beyond the usual length of
        // the log.
        actions.push(Action::WakeEncoder);
        actions
    }

    fn wake_uploaders(&self) -> Vec<Action> {
        (0..self.tiers.len()).map(Action::WakeUploader).collect()
    }

    /// Whether a trainer is connected.
    pub(super) fn is_attached(&self) -> bool {
        self.ranks.values().any(|state| state.trainer.is_some())
    }

    /// Number of states that wait to be encoded (`waiting_states`) plus snapshots that wait for the first tier.
    pub(super) fn queue_depth(&self, waiting_states: u64) -> u64 {
        waiting_states + self.tiers.first().map_or(0, |tier| tier.pending)
    }

    /// Whether no work is left. A stopped run has none.
    pub(super) fn is_quiet(&self, waiting_states: u64) -> bool {
        let is_done = || self.tiers.iter().all(|tier| tier.is_known && tier.pending == 0);
        self.stopped.is_some() || (waiting_states == 0 && is_done() && !owes_end(self))
    }

    /// Progress of the saves of a rank.
    pub(super) fn progress(&self, rank: u32, waiting_states: u64) -> Progress {
        let state = self.ranks.get(&rank);
        let tier_problem = self.tiers.iter().find_map(|tier| tier.obstacle().cloned());
        Progress {
            encoded: state.map_or(0, |state| state.encoded),
            replicated: state.map_or(0, |state| state.replicated),
            not_replicated: state.map_or_else(Vec::new, |state| state.not_replicated.clone()),
            replicated_after: state.map_or(0, |state| state.replicated_after),
            durable: state.map_or(0, |state| state.durable),
            failures: state.map_or_else(Vec::new, |state| state.failures.iter().cloned().collect()),
            session: self.session,
            unusable_epoch: self.memory.unusable.last().copied(),
            stopped: self.stopped.clone(),
            problem: self.fault.clone().or(self.problem.clone()).or(tier_problem),
            queue_depth: self.queue_depth(waiting_states),
        }
    }
}

/// Whether this is one of many hosts.
pub(super) fn is_of_many_hosts(run: &RunState) -> bool {
    run.end_noted.is_some()
}

/// Takes over what an earlier agent has encoded: the newest generation of each rank, and the snapshots in memory that the
/// first tier may lack.
pub(super) fn take_encoded(run: &mut RunState, encoded: BTreeMap<u32, u64>, unstored: VecDeque<CommittedSnapshot>) {
    for (rank, encoded) in encoded {
        let state = run.ranks.entry(rank).or_default();
        state.encoded = state.encoded.max(encoded);
    }
    run.memory.committed = unstored;
    count_pending(run);
}

/// The first tier lacks what waits for it in memory. On many hosts, the fate of each step is counted.
fn count_pending(run: &mut RunState) {
    if let (None, Some(first)) = (run.end_noted, run.tiers.first_mut()) {
        first.pending = run.memory.committed.len() as u64;
    }
}

/// The saves of a snapshot of an earlier agent that left no notes about it: any of those that the agent had encoded.
fn unknown_saves(run: &RunState, epoch: u64, sequence: u64) -> Vec<RankGeneration> {
    match run.encode {
        Encode::Inline => {
            let generation = InlineGeneration { epoch, sequence }.to_generation();
            vec![RankGeneration { rank: run.local_ranks.start, generation }]
        }
        Encode::Agent => run.ranks.iter().map(|(rank, state)| RankGeneration { rank: *rank, generation: state.encoded }).collect(),
    }
}

/// Fails the saves whose store in memory was removed before the first tier had it. `sources`: the stores in memory.
fn fail_removed(run: &mut RunState, sources: &BTreeSet<u64>) -> Vec<Action> {
    let removed = run.memory.take_removed(sources);
    count_pending(run);
    fail_missing(run, removed)
}

/// Fails the saves of snapshots that memory no longer has.
pub(super) fn fail_missing(run: &mut RunState, missing: VecDeque<CommittedSnapshot>) -> Vec<Action> {
    let first = run.local_ranks.start;
    let why = "its snapshot was removed from memory before it reached the store";
    missing.into_iter().map(|known| run.fail(&known.by_rank(first), known.step, why)).collect()
}

/// Whether a rank adds to no save any more. On many hosts, a rank whose trainer has left does not come back in its session. A
/// trainer that only lost its connection may come back.
pub(super) fn saves_no_more(run: &RunState, rank: u32) -> bool {
    let is_gone = |state: &RankState| run.end_noted.is_some() && state.trainer.is_none() && state.has_left;
    run.ranks.get(&rank).is_some_and(|state| state.is_finished || state.saves_no_more || is_gone(state))
}

/// A rank may save no more. The states of other ranks that wait for it are dropped.
fn after_end(run: &RunState, rank: u32) -> Vec<Action> {
    let note = (run.end_noted.is_some() && saves_no_more(run, rank)).then_some(Action::NoteEnd { rank, has_ended: true });
    note.into_iter().chain([Action::WakeEncoder]).collect()
}

/// Whether the other hosts are still to be told that the ranks of this host save no more.
pub(super) fn owes_end(run: &RunState) -> bool {
    run.end_noted == Some(false) && run.stopped.is_none() && run.local_ranks.clone().all(|rank| saves_no_more(run, rank))
}

/// Number of lost snapshots to remember.
const MAX_LOST: usize = 4096;

#[cfg(test)]
mod model;

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;
