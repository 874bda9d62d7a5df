//! A run: applies events to its [`RunState`] and performs the resulting actions.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorcask::{AheadUploads, Bandwidth, Result, Store};
use tokio::sync::watch;

use super::judgements::{Judgement, Judgements};
use super::metrics::SaveHistograms;
use super::noted_saves::{note_saves, take_noted_saves};
use super::rank_arenas::RankArenas;
use super::run_event::{Action, Attachment, Event};
use super::run_parts::TierState;
use super::run_state::RunState;
use super::wakes::Wakes;
use crate::arena::slot_access::TakenSlot;
use crate::ipc::messages::{Attach, Progress};
use crate::os::folders::{EngineFolder, RunFolder};
use crate::os::lock::is_held;
use crate::peers::ReplicaBoard;
use crate::run::host_notes::HostNotes;
use crate::run::options::Encode;
use crate::run::spec::RunSpec;

/// A run, shared by its connections, its encoder and its uploaders.
#[derive(Debug)]
pub(super) struct Run {
    pub spec: RunSpec,
    pub folder: RunFolder,
    pub tiers: Vec<Store>,
    /// Many hosts: the first tier, for the encoder.
    pub encoder_store: Option<Store>,
    /// Bytes of shared memory that encoded snapshots may use.
    pub cap: u64,
    /// Limit of the bytes that this host sends for the run: uploads to all tiers, and replicas.
    pub bandwidth: Bandwidth,
    shared: Mutex<Shared>,
    pub wakes: Wakes,
    /// Counts the events, for requests that wait for a change.
    changes: watch::Sender<u64>,
    replicas: Mutex<ReplicaBoard>,
    /// Time of the last progress.
    progressed: Mutex<Instant>,
    committed_saves: SaveHistograms,
}

/// The part of a run behind its lock.
#[derive(Debug)]
struct Shared {
    state: RunState,
    arenas: RankArenas,
    judgements: Judgements,
    /// Whether the notes about the saves for later agents are out of date.
    has_stale_notes: bool,
    /// Part of the last snapshot that was sent to the first tier while it was being encoded.
    ahead: Option<AheadUploads>,
}

impl Run {
    pub(super) fn new(spec: RunSpec, folder: &EngineFolder, committed_saves: SaveHistograms) -> Result<Self> {
        let run = folder.run(&spec.key);
        run.create()?;
        spec.write(&run)?;
        let bandwidth = Bandwidth::new(spec.peers.as_ref().and_then(|peers| peers.bandwidth));
        let tiers = spec.stores_within(&bandwidth)?;
        let encoder_store = spec.hosts.as_ref().map(|_| spec.store_for_encoder()).transpose()?;
        let cap = spec.cap(folder)?;
        let encode = if spec.inline { Encode::Inline } else { Encode::Agent };
        let state = RunState::new(tiers.len(), encode);
        let mut state = if spec.hosts.is_some() { state.of_host(spec.local_ranks()) } else { state };
        let lost = take_noted_saves(&run, &mut state);
        let run = Self {
            folder: run,
            cap,
            bandwidth,
            shared: Mutex::new(Shared {
                state,
                arenas: RankArenas::default(),
                judgements: Judgements::default(),
                has_stale_notes: !lost.is_empty(),
                ahead: None,
            }),
            wakes: Wakes::new(tiers.len()),
            tiers,
            encoder_store,
            changes: watch::Sender::new(0),
            replicas: Mutex::default(),
            progressed: Mutex::new(Instant::now()),
            committed_saves,
            spec,
        };
        lost.into_iter().try_for_each(|action| run.perform(&mut run.lock(), action))?;
        Ok(run)
    }

    /// Sends all later requests to the tiers with the credentials of another description of this run.
    pub(super) fn renew(&self, spec: &RunSpec) -> Result<()> {
        spec.renew(&self.tiers, self.encoder_store.as_ref())?;
        spec.write(&self.folder)?;
        // Work that was refused is tried again at once.
        self.wakes.wake_uploaders();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// State of the copies of other hosts.
    pub(super) fn replicas(&self) -> MutexGuard<'_, ReplicaBoard> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since a trainer attached or saved, or a save got further.
    pub(super) fn time_without_progress(&self) -> Duration {
        self.progressed.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// Reads the state and the arenas.
    pub(super) fn read<T>(&self, read: impl FnOnce(&RunState, &RankArenas) -> T) -> T {
        let shared = self.lock();
        read(&shared.state, &shared.arenas)
    }

    /// Applies an event and performs its actions.
    pub(super) fn apply(&self, event: Event) {
        if let Err(error) = self.apply_locked(&mut self.lock(), event) {
            tracing::warn!(run = self.spec.run, %error, "a change of the run's files failed");
        }
    }

    /// Performs all actions; returns the first error.
    fn apply_locked(&self, shared: &mut Shared, event: Event) -> Result<()> {
        if event.is_progress() {
            *self.progressed.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        match event {
            Event::SavedSnapshot { .. } => shared.judgements.clear(),
            Event::MemoryCleared => shared.judgements.on_memory_cleared(),
            _ => {}
        }
        let actions = shared.state.apply(event);
        // Once for all changes of the event.
        shared.has_stale_notes |= actions.iter().any(|action| match action {
            Action::LogFailure { .. } => true,
            // On many hosts, the notes hold failures only.
            Action::NoteSaves => self.spec.hosts.is_none(),
            _ => false,
        });
        if shared.has_stale_notes {
            match note_saves(&self.folder, &shared.state) {
                Ok(()) => shared.has_stale_notes = false,
                // A full file system must not stop the work. The next event tries again.
                Err(error) => {
                    tracing::warn!(run = self.spec.run, %error, "a later agent will not know which saves have failed or wait for the store");
                }
            }
        }
        let performed = actions.into_iter().map(|action| self.perform(shared, action)).fold(Ok(()), Result::and);
        self.changes.send_modify(|changes| *changes += 1);
        performed
    }

    fn perform(&self, shared: &mut Shared, action: Action) -> Result<()> {
        let run = &self.spec.run;
        match action {
            Action::WakeEncoder => self.wakes.wake_encoder(),
            Action::WakeUploader(tier) => self.wakes.wake_uploader(tier),
            Action::RaiseSession { rank, session } => {
                return shared.arenas.get(rank).map_or(Ok(()), |arena| arena.raise_session(session));
            }
            Action::RemoveArena { rank } => return shared.arenas.remove(&self.folder, rank),
            Action::MarkActive => return self.folder.mark_active(),
            Action::MarkFinished => return self.folder.mark_finished(),
            Action::NoteEnd { rank, has_ended } => {
                let Some(hosts) = &self.spec.hosts else { return Ok(()) };
                return HostNotes::note_end(&self.folder, hosts.session, rank, has_ended);
            }
            // Noted already.
            Action::NoteSaves => {}
            Action::DropAhead => shared.ahead = None,
            Action::LogCommit(save) => {
                self.committed_saves.observe(run, &save);
                tracing::info!(
                    run,
                    step = save.step,
                    generation = save.generation,
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
            Action::LogFailure { step, message } => tracing::error!(run, step, message, "a save failed"),
            Action::LogProblem { tier, message } => tracing::warn!(run, tier, problem = message, "trying again"),
            Action::LogStopped { why } => tracing::error!(run, why, "this run was stopped"),
        }
        Ok(())
    }

    /// Maps the arena of a rank whose trainer is not connected.
    pub(super) fn adopt(&self, rank: u32) -> Result<()> {
        let mut shared = self.lock();
        let arena = shared.arenas.open(&self.folder, rank)?;
        self.apply_locked(&mut shared, Event::Adopted { rank, arena })
    }

    /// Attaches a trainer, a process of this number (0 in another PID namespace); returns the number of the attachment.
    pub(super) fn attach(&self, request: &Attach, pid: u32) -> Result<u64> {
        let Attach { rank, mode, session, .. } = *request;
        let mut shared = self.lock();
        if let Some(judgement) = Judgement::of(request).filter(|_| self.spec.hosts.is_none()) {
            let Shared { state, judgements, .. } = &mut *shared;
            let is_connected = |rank: u32| state.ranks.get(&rank).is_some_and(|state| state.trainer.is_some());
            judgements.add(rank, judgement, self.spec.local_ranks().start, is_connected)?;
        }
        let arena = shared.arenas.open(&self.folder, rank)?;
        let event = Event::Attached(Attachment { rank, pid, mode, session, arena, latest: request.latest.clone() });
        let attached = self.apply_locked(&mut shared, event);
        let attachment = shared.state.ranks.get(&rank).map_or(0, |state| state.attachment);
        if attached.is_err() {
            // The trainer hears of an error and does not count as connected.
            self.apply_locked(&mut shared, Event::Detached { rank, attachment })?;
        }
        attached.map(|()| attachment)
    }

    /// Releases slots and applies the event that reports them, under one lock: otherwise the run would seem to have no work
    /// in between.
    pub(super) fn release_and_apply(&self, slots: Vec<TakenSlot<'_>>, event: Event) -> Result<()> {
        let mut shared = self.lock();
        let Event::Encoded(_) = event else {
            slots.into_iter().try_for_each(TakenSlot::release)?;
            return self.apply_locked(&mut shared, event);
        };
        // The event notes the save for later agents, before the slots show that it is encoded. All slots are marked before one is
        // released: a later agent then releases the others instead of waiting for all ranks.
        let applied = self.apply_locked(&mut shared, event);
        slots.iter().try_for_each(TakenSlot::mark_encoded)?;
        slots.into_iter().try_for_each(TakenSlot::release)?;
        applied
    }

    /// Changes after each event.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Progress of the saves of a rank.
    pub(super) fn progress(&self, rank: u32) -> Progress {
        let mut progress = self.read(|state, arenas| state.progress(rank, arenas.waiting_states()));
        if progress.problem.is_none() {
            progress.problem = self.replicas().copies_problem.clone();
        }
        progress
    }

    /// Whether another job has taken the store over.
    pub(super) fn is_stopped(&self) -> bool {
        self.read(|state, _| state.stopped.is_some())
    }

    /// Whether memory is out of date and not removed yet.
    pub(super) fn is_outdated(&self) -> bool {
        self.read(|state, _| state.memory.outdated.is_some())
    }

    /// Process id of the first trainer that is connected.
    pub(super) fn trainer(&self) -> Option<u32> {
        self.read(|state, _| state.ranks.values().find_map(|rank| rank.trainer))
    }

    /// Whether no work is left.
    pub(super) fn is_quiet(&self) -> bool {
        self.read(|state, arenas| state.is_quiet(arenas.waiting_states()))
    }

    /// Whether the run has finished and its memory can be freed. A trainer of this host that has not finished and still runs may
    /// connect, so the memory is kept for it.
    pub(super) fn is_done(&self) -> bool {
        let is_over = self.read(|state, arenas| state.is_finished && !state.is_attached() && state.is_quiet(arenas.waiting_states()));
        let may_connect = |rank: u32| {
            let has_finished = self.read(|state, _| state.ranks.get(&rank).is_some_and(|state| state.is_finished));
            !has_finished && self.has_process(rank)
        };
        is_over && !self.spec.local_ranks().any(may_connect)
    }

    /// Whether a process trains a rank. It need not be connected.
    pub(super) fn has_process(&self, rank: u32) -> bool {
        is_held(&self.folder.rank(rank).lock())
    }

    /// The first tier, if a snapshot may be sent there while it is being encoded: the tier has everything else and
    /// accepts uploads.
    pub(super) fn ahead_destination(&self) -> Option<&Store> {
        let is_ready = |state: &RunState| state.stopped.is_none() && state.tiers.first().is_some_and(TierState::is_up_to_date);
        self.tiers.first().filter(|_| self.read(|state, _| is_ready(state)))
    }

    /// Keeps the part of the last snapshot that was sent ahead to the first tier.
    pub(super) fn set_ahead(&self, ahead: Option<AheadUploads>) {
        self.lock().ahead = ahead;
    }

    /// Takes the part of the last snapshot that was sent ahead to the first tier.
    pub(super) fn take_ahead(&self) -> Option<AheadUploads> {
        self.lock().ahead.take()
    }
}
