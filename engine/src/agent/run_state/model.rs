//! A model of an agent and what is around it: a trainer, the encoder, an uploader, memory, a tier, and a job on another host.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::super::run_event::{Action, ArenaSummary, Event, TierOrders, Upload};
use super::super::run_parts::CommittedSnapshot;
use super::RunState;
use crate::ipc::messages::Failure;
use crate::run::options::Encode;

/// Events that may happen in a run of the model, at any point and in any combination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Saves of the trainer.
    pub saves: u64,
    /// Deaths of the trainer.
    pub trainer_deaths: u8,
    /// Deaths of the agent.
    pub agent_deaths: u8,
    /// Attempts to encode that fail and are retried.
    pub encoder_errors: u8,
    /// Saves that fail for good.
    pub final_errors: u8,
    /// Uploads that fail before or after copying.
    pub upload_errors: u8,
    /// Times that a job on another host takes the tier over and saves a step.
    pub other_jobs: u8,
    /// Times that the store in memory is damaged or removed.
    pub memory_losses: u8,
    /// Times that a new store in memory replaces one of which the tier has everything.
    pub new_stores: u8,
}

/// Order in which the encoder releases a slot and reports the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    /// Both at once, under the lock of the run.
    WithReport,
    /// The slot first. This is wrong: in between, the agent seems to have no work.
    BeforeReport,
}

/// State of a slot, without the details of the slot protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    Full,
    Encoding,
    Released,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trainer {
    Gone,
    Idle {
        attachment: u64,
    },
    /// A state is published and not reported yet.
    Published {
        attachment: u64,
        generation: u64,
    },
    /// The trainer is dead, and the agent has not noticed yet.
    Dead {
        attachment: u64,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Encoder {
    Asleep,
    Begin,
    /// Out-of-date memory has been removed.
    Cleared,
    Select,
    Taken {
        generation: u64,
    },
    /// The snapshot is committed in memory and not reported yet.
    Committed {
        generation: u64,
        epoch: u64,
        sequence: u64,
    },
    /// As `Committed`, but the slot is released already.
    Released {
        generation: u64,
        epoch: u64,
        sequence: u64,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Uploader {
    Asleep,
    Begin,
    ReadEncoded { orders: TierOrders },
    FindSource { orders: TierOrders, encoded: u64 },
    Open { orders: TierOrders, encoded: u64, epoch: u64 },
    Copy { orders: TierOrders, encoded: u64, epoch: u64 },
    CopyMore { orders: TierOrders, encoded: u64, epoch: u64, pending_before: u64 },
    Report { upload: Upload },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writer {
    Nobody,
    ThisRun,
    OtherJob,
}

/// A step of a process: changes the model.
pub(super) type Step<'s> = &'s dyn Fn(&mut Model);

/// Everything in the model.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub state: RunState,
    pub release: Release,
    pub limits: Limits,
    pub trainer: Trainer,
    pub encoder: Encoder,
    pub uploader: Uploader,
    /// Wake-ups that have not been consumed.
    pub encoder_is_woken: bool,
    pub uploader_is_woken: bool,
    /// Slot of each generation, from 1. The model has enough slots for all saves.
    pub arena: Vec<Slot>,
    /// Newest generation that is marked as encoded in the arena.
    pub arena_encoded: u64,
    /// Generations in memory, in commit order; `None` if there is no store yet.
    pub memory: Option<Vec<u64>>,
    pub epoch: u64,
    pub tier: BTreeSet<u64>,
    pub writer: Writer,
    /// Whether this agent has the tier open for writing.
    pub has_copier: bool,
    /// Whether the tier's newest snapshot was saved by another job.
    pub is_outdated: bool,
    /// Generations that were given up because memory was out of date.
    pub given_up: BTreeSet<u64>,
    /// Damaged stores in memory, by epoch, and their generations.
    pub damaged: BTreeMap<u64, Vec<u64>>,
    /// Generations that were in a store in memory that was removed.
    pub removed: BTreeSet<u64>,
    /// Saves that failed for good.
    pub failed: BTreeSet<u64>,
    pub notes: Notes,
}

/// The notes about saves that an agent leaves to the next one, as in `saves.json`.
#[derive(Debug, Clone, Default)]
pub(super) struct Notes {
    pub encoded: BTreeMap<u32, u64>,
    pub unstored: VecDeque<CommittedSnapshot>,
    pub failures: VecDeque<Failure>,
}

impl Model {
    pub(super) fn new(limits: Limits, release: Release) -> Self {
        Self {
            state: RunState::new(1, Encode::Agent),
            release,
            limits,
            trainer: Trainer::Gone,
            encoder: Encoder::Begin,
            uploader: Uploader::Begin,
            encoder_is_woken: false,
            uploader_is_woken: false,
            arena: Vec::new(),
            arena_encoded: 0,
            memory: None,
            epoch: 0,
            tier: BTreeSet::new(),
            writer: Writer::Nobody,
            has_copier: false,
            is_outdated: false,
            given_up: BTreeSet::new(),
            damaged: BTreeMap::new(),
            removed: BTreeSet::new(),
            failed: BTreeSet::new(),
            notes: Notes::default(),
        }
    }

    pub(super) fn apply(&mut self, event: Event) {
        let actions = self.state.apply(event);
        if actions.iter().any(|action| matches!(action, Action::NoteSaves | Action::LogFailure { .. })) {
            let encoded = self.state.ranks.iter().map(|(rank, state)| (*rank, state.encoded)).collect();
            let failures = self.state.ranks.get(&0).map(|rank| rank.failures.clone()).unwrap_or_default();
            self.notes = Notes { encoded, unstored: self.state.memory.committed.clone(), failures };
        }
        for action in actions {
            match action {
                Action::WakeEncoder => self.encoder_is_woken = true,
                Action::WakeUploader(_) => self.uploader_is_woken = true,
                _ => {}
            }
        }
    }

    pub(super) fn slot(&mut self, generation: u64) -> &mut Slot {
        &mut self.arena[generation as usize - 1]
    }

    pub(super) fn arena_summary(&self) -> Option<ArenaSummary> {
        let summary = ArenaSummary { session: self.state.session, encoded: self.arena_encoded, failed: Vec::new() };
        (!self.arena.is_empty()).then_some(summary)
    }

    pub(super) fn waiting_states(&self) -> u64 {
        self.arena.iter().filter(|slot| **slot != Slot::Released).count() as u64
    }

    /// Checks what trainers and the main loop of the agent would see now.
    pub(super) fn check(&self) {
        let progress = self.state.progress(0, self.waiting_states());
        let memory = self.memory.clone().unwrap_or_default();
        for generation in 1..=self.arena.len() as u64 {
            let is_lost = progress.has_failed(generation) || self.given_up.contains(&generation);
            let is_stored = self.tier.contains(&generation);
            let is_in_memory = memory.contains(&generation);
            // The uploader finds damage later, and removal at its next upload.
            let is_damaged = self.damaged.values().flatten().chain(&self.removed).any(|known| *known == generation);
            if progress.durable >= generation {
                assert!(is_stored || is_lost, "generation {generation} counts as durable: {self:#?}");
            }
            if progress.encoded >= generation {
                assert!(is_stored || is_in_memory || is_damaged || is_lost, "generation {generation} counts as encoded: {self:#?}");
            }
            if progress.has_failed(generation) {
                let may_fail = is_damaged || self.failed.contains(&generation) || self.given_up.contains(&generation);
                assert!(may_fail, "generation {generation} counts as failed: {self:#?}");
            }
            // States that the trainer published and has not reported yet keep the run busy, too.
            if self.state.stopped.is_none() && self.state.memory.outdated.is_none() && self.state.is_quiet(self.waiting_states()) {
                assert!(is_stored || is_lost, "the agent has no work, but the tier lacks generation {generation}: {self:#?}");
            }
        }
    }

    /// Checks a state in which encoder and uploader sleep and nobody wakes them.
    pub(super) fn check_asleep(&self) {
        if self.state.stopped.is_some() || matches!(self.trainer, Trainer::Published { .. } | Trainer::Dead { .. }) {
            return;
        }
        assert!(self.state.memory.outdated.is_none(), "out-of-date memory stays: {self:#?}");
        assert_eq!(self.waiting_states(), 0, "a state waits, but the encoder sleeps: {self:#?}");
        let lacking: Vec<u64> = self.memory.iter().flatten().filter(|generation| !self.tier.contains(generation)).copied().collect();
        assert!(lacking.is_empty(), "the tier lacks {lacking:?}, but the uploader sleeps: {self:#?}");
        assert!(self.state.is_quiet(0), "all work is done, but the run counts as busy: {self:#?}");
    }

    pub(super) fn is_asleep(&self) -> bool {
        (&self.encoder, &self.uploader) == (&Encoder::Asleep, &Uploader::Asleep) && !self.encoder_is_woken && !self.uploader_is_woken
    }

    pub(super) fn fingerprint(&self) -> u64 {
        struct Hashed(DefaultHasher);
        impl Write for Hashed {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                text.hash(&mut self.0);
                Ok(())
            }
        }
        let mut hashed = Hashed(DefaultHasher::new());
        // Everything except the log of saves, which only serves reports.
        let state = &self.state;
        write!(hashed, "{:?}{:?}{:?}", state.ranks, state.memory, state.tiers).unwrap();
        write!(hashed, "{:?}{:?}{}{}", state.stopped, state.problem, state.session, state.is_restoring).unwrap();
        write!(hashed, "{:?}{:?}{:?}{:?}", self.limits, self.trainer, self.encoder, self.uploader).unwrap();
        write!(hashed, "{:?}{:?}{:?}{:?}{:?}", self.arena, self.memory, self.tier, self.writer, self.given_up).unwrap();
        (self.encoder_is_woken, self.uploader_is_woken, self.has_copier, self.is_outdated).hash(&mut hashed.0);
        write!(hashed, "{:?}{:?}{:?}{:?}", self.damaged, self.removed, self.failed, self.notes).unwrap();
        (self.arena_encoded, self.epoch).hash(&mut hashed.0);
        hashed.0.finish()
    }
}
