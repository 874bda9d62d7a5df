//! The work of a host in a run on many hosts: its protocol, and the steps that it has uploaded.
//!
//! The encoder and the committer of the host share this. Both apply events; the committer performs the actions that
//! concern the log, and reports the fate of steps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::run::Run;
use super::run_event::{Event as RunEvent, RankGeneration, Upload};
use super::save_log::UploadTimes;
use crate::clock::now_ms;
use crate::hosts::{Action, Event, HostOptions, HostProtocol, StepKey};
use crate::hosts_option::HostsSpec;

/// The work of a host.
#[derive(Debug)]
pub(super) struct HostWork {
    pub run: Arc<Run>,
    pub hosts: HostsSpec,
    shared: Mutex<Shared>,
    /// Actions for the committer.
    actions: UnboundedSender<Action>,
    started: Instant,
}

#[derive(Debug)]
struct Shared {
    protocol: HostProtocol,
    /// Uploaded steps of which the fate is not known.
    uploaded: BTreeMap<StepKey, UploadedStep>,
    /// Fates that were known before the upload was reported.
    early: BTreeMap<StepKey, Fate>,
}

/// A step that this host has uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UploadedStep {
    /// Number of the save among those of this agent.
    pub sequence: u64,
    pub generations: Vec<RankGeneration>,
    pub uploaded_ms: u64,
}

/// Fate of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Durable,
    GivenUp,
}

impl HostWork {
    pub(super) fn new(run: Arc<Run>, hosts: HostsSpec, options: HostOptions, actions: UnboundedSender<Action>) -> Self {
        let protocol = HostProtocol::new(options);
        let shared = Mutex::new(Shared { protocol, uploaded: BTreeMap::new(), early: BTreeMap::new() });
        Self { run, hosts, shared, actions, started: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds since the agent began with this run.
    pub(super) fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Applies an event of the protocol. The committer performs the actions.
    pub(super) fn apply(&self, event: Event) {
        let actions = self.lock().protocol.apply(event);
        for action in actions {
            // Fails only if the committer has ended, together with this run.
            let _ = self.actions.send(action);
        }
    }

    /// Reports an uploaded step to the run and to the protocol.
    pub(super) fn note_uploaded(&self, key: StepKey, step: UploadedStep) {
        let early = {
            let mut shared = self.lock();
            let early = shared.early.remove(&key);
            if early.is_none() {
                shared.uploaded.insert(key, step.clone());
            }
            early
        };
        if let Some(fate) = early {
            self.report(key, Some(step), fate);
        }
        self.apply(Event::Uploaded(key));
    }

    /// Reports the fate of a step of this host.
    pub(super) fn decide(&self, key: StepKey, fate: Fate) {
        let (known, is_last) = {
            let mut shared = self.lock();
            let known = shared.uploaded.remove(&key);
            if known.is_none() {
                shared.early.insert(key, fate);
                // Only the step that is being uploaded can still be reported.
                while shared.early.len() > MAX_EARLY {
                    shared.early.pop_first();
                }
            }
            (known, shared.protocol.waiting() == 0)
        };
        if known.is_some() || (is_last && fate == Fate::Durable) {
            self.report(key, known, fate);
        }
    }

    /// `step`: `None` for a step of an earlier agent, after which nothing waits.
    fn report(&self, key: StepKey, step: Option<UploadedStep>, fate: Fate) {
        match (fate, step) {
            (Fate::Durable, step) => {
                let encoded = match &step {
                    Some(step) => step.generations.iter().map(|known| (known.rank, known.generation)).collect(),
                    None => self.run.read(|state, _| state.ranks.iter().map(|(rank, state)| (*rank, state.encoded)).collect()),
                };
                let upload_ms = step.as_ref().map_or(0, |step| now_ms().saturating_sub(step.uploaded_ms)) as f64;
                self.run.apply(RunEvent::Uploaded(Upload {
                    tier: 0,
                    encoded,
                    epoch: 0,
                    sequence: step.as_ref().map_or(0, |step| step.sequence),
                    step: Some(key.step),
                    pending_before: u64::from(step.is_some()),
                    copied: 1,
                    times: UploadTimes { upload_ms, ahead_bytes: 0, time_ms: now_ms() },
                }));
            }
            (Fate::GivenUp, Some(UploadedStep { sequence, generations, .. })) => {
                let message = "another rank has not saved this step, and all ranks have saved a newer one".to_owned();
                self.run.apply(RunEvent::GivenUp { generations, sequence, step: key.step, message });
            }
            (Fate::GivenUp, None) => {}
        }
    }
}

/// Number of fates to remember until their steps are uploaded.
const MAX_EARLY: usize = 64;
