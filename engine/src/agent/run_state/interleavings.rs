//! Enumerates all interleavings of a trainer, the encoder, an uploader and a job on another host, with faults at every
//! point.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::super::run_event::{Attachment, EncodedSave, Event, MemoryContents, RankGeneration, TierOrders, Upload};
use super::super::save_log::{Encoding, UploadTimes};
use super::model::{Encoder, Limits, Model, Notes, Release, Slot, Step, Trainer, Uploader, Writer};
use super::{RunState, take_encoded};
use crate::ipc::messages::{AttachMode, SaveNote};
use crate::run::options::Encode;

impl Model {
    fn successors(&self) -> Vec<Model> {
        let mut after = Vec::new();
        let mut go = |step: Step<'_>| {
            let mut next = self.clone();
            step(&mut next);
            after.push(next);
        };
        self.trainer_steps(&mut go);
        self.encoder_steps(&mut go);
        self.uploader_steps(&mut go);
        if self.limits.other_jobs > 0 {
            go(&|m| {
                m.limits.other_jobs -= 1;
                (m.writer, m.is_outdated) = (Writer::OtherJob, true);
            });
        }
        if self.limits.agent_deaths > 0 {
            go(&|m| m.restart_agent());
        }
        if self.limits.memory_losses > 0 && self.memory.is_some() {
            // The encoder notices at its next save, and creates another store.
            go(&|m| {
                m.limits.memory_losses -= 1;
                let damaged = m.memory.take().unwrap_or_default();
                m.damaged.insert(m.epoch, damaged);
                m.epoch += 1;
            });
        }
        after
    }

    /// The agent dies and another one adopts the run. The trainer loses its connection.
    fn restart_agent(&mut self) {
        self.limits.agent_deaths -= 1;
        self.state = RunState::new(1, Encode::Agent);
        let Notes { encoded, unstored, failures } = self.notes.clone();
        self.state.ranks.entry(0).or_default().failures = failures;
        take_encoded(&mut self.state, encoded, unstored);
        (self.encoder, self.uploader) = (Encoder::Begin, Uploader::Begin);
        (self.encoder_is_woken, self.uploader_is_woken, self.has_copier) = (false, false, false);
        for generation in 1..=self.arena.len() as u64 {
            let is_encoded = generation <= self.arena_encoded;
            if *self.slot(generation) == Slot::Encoding {
                *self.slot(generation) = if is_encoded { Slot::Released } else { Slot::Full };
            }
        }
        let arena = self.arena_summary();
        self.apply(Event::Adopted { rank: 0, arena });
        self.trainer = match self.trainer {
            Trainer::Gone | Trainer::Dead { .. } => Trainer::Gone,
            Trainer::Idle { .. } => self.attach(AttachMode::Continue),
            // The trainer attaches again and repeats its report.
            Trainer::Published { generation, .. } => match self.attach(AttachMode::Continue) {
                Trainer::Idle { attachment } => Trainer::Published { attachment, generation },
                other => other,
            },
        };
    }

    fn attach(&mut self, mode: AttachMode) -> Trainer {
        let latest = BTreeMap::new();
        let arena = self.arena_summary();
        self.apply(Event::Attached(Attachment { rank: 0, pid: 1, mode, session: 0, arena, latest }));
        Trainer::Idle { attachment: self.state.ranks[&0].attachment }
    }

    fn trainer_steps(&self, go: &mut dyn FnMut(Step<'_>)) {
        match self.trainer {
            // A trainer that finds memory out of date removes its arena.
            Trainer::Gone => go(&|m| {
                let is_outdated = std::mem::take(&mut m.is_outdated);
                if is_outdated {
                    m.given_up.extend(1..=m.arena.len() as u64);
                    m.arena.iter_mut().for_each(|slot| *slot = Slot::Released);
                }
                m.trainer = m.attach(if is_outdated { AttachMode::TakeOverAfresh } else { AttachMode::TakeOver });
            }),
            Trainer::Idle { attachment } => {
                // After an attachment, out-of-date memory is removed before the trainer saves.
                if (self.arena.len() as u64) < self.limits.saves && self.state.memory.outdated.is_none() {
                    go(&|m| {
                        m.arena.push(Slot::Full);
                        m.trainer = Trainer::Published { attachment, generation: m.arena.len() as u64 };
                    });
                }
            }
            Trainer::Published { attachment, generation } => go(&|m| {
                let queue_depth = m.state.queue_depth(m.waiting_states());
                let time_ms = 0;
                let note = SaveNote { step: generation, generation, stall_ms: 0.0, copy_ms: 0.0, bytes: 1, time_ms };
                m.apply(Event::SavedSnapshot { rank: 0, note, queue_depth });
                m.trainer = Trainer::Idle { attachment };
            }),
            Trainer::Dead { attachment } => go(&|m| {
                m.apply(Event::Detached { rank: 0, attachment });
                m.trainer = Trainer::Gone;
            }),
        }
        if let (Trainer::Idle { attachment } | Trainer::Published { attachment, .. }, 1..) = (self.trainer, self.limits.trainer_deaths) {
            go(&|m| {
                m.limits.trainer_deaths -= 1;
                m.trainer = Trainer::Dead { attachment };
            });
        }
    }

    fn encoder_steps(&self, go: &mut dyn FnMut(Step<'_>)) {
        match self.encoder {
            Encoder::Asleep if self.encoder_is_woken => go(&|m| (m.encoder, m.encoder_is_woken) = (Encoder::Begin, false)),
            Encoder::Asleep => {}
            Encoder::Begin if self.state.memory.outdated.is_some() => go(&|m| {
                m.given_up.extend(m.memory.take().unwrap_or_default());
                m.epoch += 1;
                m.encoder = Encoder::Cleared;
            }),
            Encoder::Begin => {
                go(&|m| m.open_memory());
                // The tier has become one of another run.
                if self.limits.memory_losses > 0 && self.state.stopped.is_none() && self.memory.is_some() {
                    go(&|m| {
                        m.limits.memory_losses -= 1;
                        m.removed.extend(m.memory.take().unwrap_or_default());
                        m.epoch += 1;
                        m.open_memory();
                    });
                }
            }
            Encoder::Cleared => go(&|m| {
                m.apply(Event::MemoryCleared);
                m.open_memory();
            }),
            // Memory is full, and the tier has all of it.
            Encoder::Select if self.limits.new_stores > 0 && self.is_uploaded() => go(&|m| {
                m.limits.new_stores -= 1;
                m.memory = Some(Vec::new());
                m.epoch += 1;
                m.note_memory();
            }),
            Encoder::Select => go(&|m| match m.arena.iter().position(|slot| *slot == Slot::Full) {
                Some(at) if m.state.stopped.is_none() => {
                    m.arena[at] = Slot::Encoding;
                    m.encoder = Encoder::Taken { generation: at as u64 + 1 };
                }
                _ => {
                    m.apply(Event::EncoderProblem(None));
                    m.encoder = Encoder::Asleep;
                }
            }),
            Encoder::Taken { generation } if self.state.memory.outdated.is_some() => go(&|m| {
                m.give_back(generation);
                m.encoder = Encoder::Asleep;
            }),
            Encoder::Taken { generation } => {
                go(&|m| match &mut m.memory {
                    Some(memory) => {
                        memory.push(generation);
                        m.encoder = Encoder::Committed { generation, epoch: m.epoch, sequence: memory.len() as u64 };
                    }
                    // Memory is damaged.
                    None => {
                        m.give_back(generation);
                        m.open_memory();
                    }
                });
                if self.limits.encoder_errors > 0 {
                    go(&|m| {
                        m.limits.encoder_errors -= 1;
                        m.give_back(generation);
                        m.apply(Event::EncoderProblem(Some("error".into())));
                        m.encoder = Encoder::Begin;
                    });
                }
                if self.limits.final_errors > 0 {
                    go(&|m| {
                        m.limits.final_errors -= 1;
                        m.failed.insert(generation);
                        *m.slot(generation) = Slot::Released;
                        let generations = vec![RankGeneration { rank: 0, generation }];
                        m.apply(Event::Failed { generations, step: generation, message: "error".into() });
                        m.encoder = Encoder::Select;
                    });
                }
            }
            Encoder::Committed { generation, epoch, sequence } if self.release == Release::BeforeReport => go(&|m| {
                m.arena_encoded = m.arena_encoded.max(generation);
                *m.slot(generation) = Slot::Released;
                m.encoder = Encoder::Released { generation, epoch, sequence };
            }),
            Encoder::Committed { generation, epoch, sequence } | Encoder::Released { generation, epoch, sequence } => go(&|m| {
                let encoding = Encoding { encode_ms: 0.0, stored_bytes: 1, kind: "base".into() };
                m.apply(Event::Encoded(EncodedSave { step: generation, generations: vec![generation], epoch, sequence, encoding }));
                m.arena_encoded = m.arena_encoded.max(generation);
                *m.slot(generation) = Slot::Released;
                m.note_memory();
                m.encoder = Encoder::Select;
            }),
        }
    }

    /// Whether the encoder may remove everything from memory.
    fn is_uploaded(&self) -> bool {
        let uploaded = self.state.memory.upload_state(self.epoch).uploaded;
        self.memory.as_ref().is_some_and(|memory| !memory.is_empty() && memory.len() as u64 <= uploaded)
    }

    fn give_back(&mut self, generation: u64) {
        // A trainer that found memory out of date has removed the arena in the meantime.
        if !self.given_up.contains(&generation) {
            *self.slot(generation) = Slot::Full;
        }
    }

    fn open_memory(&mut self) {
        if self.state.stopped.is_some() {
            self.encoder = Encoder::Asleep;
            return;
        }
        if self.memory.is_none() {
            self.memory = Some(Vec::new());
        }
        self.note_memory();
        // The encoder wakes the uploaders when it has opened the memory tier.
        self.uploader_is_woken = true;
        self.encoder = Encoder::Select;
    }

    fn note_memory(&mut self) {
        let steps = self.memory.clone().unwrap_or_default();
        self.apply(Event::MemoryChanged(MemoryContents { epoch: self.epoch, steps, bytes: 0, chain_depth: 0 }));
    }

    fn uploader_steps(&self, go: &mut dyn FnMut(Step<'_>)) {
        match self.uploader {
            Uploader::Asleep if self.uploader_is_woken => go(&|m| (m.uploader, m.uploader_is_woken) = (Uploader::Begin, false)),
            Uploader::Asleep => {}
            Uploader::Begin => go(&|m| {
                let orders = m.state.tiers[0].orders;
                let is_idle = m.state.stopped.is_some() || m.state.memory.outdated.is_some();
                m.uploader = if is_idle { Uploader::Asleep } else { Uploader::ReadEncoded { orders } };
            }),
            Uploader::ReadEncoded { orders } => go(&|m| {
                let encoded = m.state.ranks.get(&0).map_or(0, |rank| rank.encoded);
                m.uploader = Uploader::FindSource { orders, encoded };
            }),
            Uploader::FindSource { orders, encoded } => go(&|m| {
                let epoch = m.epoch;
                for epoch in m.damaged.keys().copied().filter(|epoch| !m.state.memory.unusable.contains(epoch)).collect::<Vec<_>>() {
                    m.apply(Event::MemoryUnusable { epoch, lost: None, why: "damage".into() });
                }
                m.uploader = match m.memory {
                    Some(_) => Uploader::Open { orders, encoded, epoch },
                    None => {
                        m.apply(Event::NothingToUpload { tier: 0, sources: BTreeSet::new() });
                        Uploader::Asleep
                    }
                };
            }),
            Uploader::Open { orders, encoded, epoch } => go(&|m| {
                if orders.take_over || !m.has_copier {
                    match (orders.take_over, m.writer) {
                        (true, _) | (false, Writer::Nobody) => m.writer = Writer::ThisRun,
                        (false, Writer::ThisRun) => {}
                        (false, Writer::OtherJob) => return m.fence(orders),
                    }
                    m.has_copier = true;
                    m.apply(Event::TierTakenOver { tier: 0, orders, latest: None });
                }
                m.uploader = Uploader::Copy { orders, encoded, epoch };
            }),
            Uploader::Copy { orders, encoded, epoch } => {
                go(&|m| {
                    let pending_before = m.state.tiers[0].pending;
                    m.uploader = Uploader::CopyMore { orders, encoded, epoch, pending_before };
                });
                if self.limits.upload_errors > 0 {
                    go(&|m| {
                        m.limits.upload_errors -= 1;
                        m.fail_upload();
                    });
                }
            }
            Uploader::CopyMore { orders, encoded, epoch, pending_before } => go(&|m| {
                // The store in memory was removed in the meantime.
                let Some(memory) = m.memory.clone().filter(|_| epoch == m.epoch) else { return m.fail_upload() };
                if m.writer != Writer::ThisRun {
                    return m.fence(orders);
                }
                let copied = memory.iter().filter(|generation| m.tier.insert(**generation)).count() as u64;
                let times = UploadTimes { upload_ms: 0.0, ahead_bytes: 0, time_ms: 0 };
                let sequence = memory.len() as u64;
                let encoded = BTreeMap::from([(0, encoded)]);
                let step = memory.last().copied();
                let sources = BTreeSet::from([epoch]);
                let upload = Upload { tier: 0, encoded, epoch, sources, sequence, step, pending_before, copied, times };
                m.uploader = Uploader::Report { upload };
            }),
            Uploader::Report { .. } => {
                go(&|m| {
                    if let Uploader::Report { upload } = std::mem::replace(&mut m.uploader, Uploader::Asleep) {
                        m.apply(Event::Uploaded(upload));
                    }
                });
                if self.limits.upload_errors > 0 {
                    go(&|m| {
                        m.limits.upload_errors -= 1;
                        m.fail_upload();
                    });
                }
            }
        }
    }

    fn fail_upload(&mut self) {
        self.has_copier = false;
        self.apply(Event::UploadFailed { tier: 0, message: "error".into() });
        self.uploader = Uploader::Begin;
    }

    fn fence(&mut self, orders: TierOrders) {
        self.has_copier = false;
        self.apply(Event::Fenced { orders, why: "another job".into() });
        self.uploader = if self.state.stopped.is_some() { Uploader::Asleep } else { Uploader::Begin };
    }
}

/// Visits all reachable states; returns their number.
fn explore(limits: Limits, release: Release) -> usize {
    let first = Model::new(limits, release);
    let mut known = HashSet::from([first.fingerprint()]);
    let mut open = vec![first];
    while let Some(model) = open.pop() {
        model.check();
        if model.is_asleep() {
            model.check_asleep();
        }
        open.extend(model.successors().into_iter().filter(|next| known.insert(next.fingerprint())));
    }
    known.len()
}

const TWO_SAVES: Limits = Limits {
    saves: 2,
    trainer_deaths: 0,
    agent_deaths: 0,
    encoder_errors: 0,
    final_errors: 0,
    upload_errors: 0,
    other_jobs: 0,
    memory_losses: 0,
    new_stores: 0,
};
const ONE_SAVE: Limits = Limits { saves: 1, ..TWO_SAVES };

#[test]
fn no_interleaving_loses_a_save_or_leaves_work_undone() {
    let is_thorough = std::env::var_os("TENSORCASK_THOROUGH").is_some();
    for limits in [
        Limits { encoder_errors: 1, ..TWO_SAVES },
        Limits { final_errors: 1, ..TWO_SAVES },
        Limits { upload_errors: 1, ..TWO_SAVES },
        Limits { trainer_deaths: 1, agent_deaths: 1, ..ONE_SAVE },
        // With two saves, these alone are more states than all others.
        Limits { agent_deaths: 1, memory_losses: 1, ..if is_thorough { TWO_SAVES } else { ONE_SAVE } },
        Limits { agent_deaths: 1, new_stores: 1, ..TWO_SAVES },
        Limits { memory_losses: 1, new_stores: 1, ..TWO_SAVES },
        Limits { trainer_deaths: 1, upload_errors: 1, ..ONE_SAVE },
        Limits { trainer_deaths: 1, other_jobs: 1, ..ONE_SAVE },
    ] {
        let states = explore(limits, Release::WithReport);
        println!("{limits:?}: {states} states");
        assert!(states > 500, "{limits:?}: {states} states");
    }
}

/// Shows that the model detects a wrong order of steps.
#[test]
#[should_panic(expected = "the agent has no work, but the tier lacks generation")]
fn a_slot_released_before_the_report_is_detected() {
    explore(TWO_SAVES, Release::BeforeReport);
}
