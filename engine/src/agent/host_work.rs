//! The work of a host in a run on many hosts: its protocol, and the steps that it has uploaded.
//!
//! The encoder and the committer of the host share this. Both apply events; the committer performs the actions that
//! concern the log, and reports the fate of steps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorcask::wire::SessionStep;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

use super::copied_steps::CopiedSteps;
use super::run::Run;
use super::run_event::{Event as RunEvent, RankGeneration, ReplicatedSaves, Upload};
use super::save_log::UploadTimes;
use super::undecided_saves::UndecidedSaves;
use crate::hosts::{Action, Event, HostOptions, HostProtocol, LogView};
use crate::os::clock::now_ms;
use crate::run::host_notes::HostNotes;
use crate::run::hosts_option::HostsSpec;

/// The work of a host.
#[derive(Debug)]
pub(super) struct HostWork {
    pub run: Arc<Run>,
    pub hosts: HostsSpec,
    shared: Mutex<Shared>,
    /// Actions for the committer.
    actions: UnboundedSender<Action>,
    started: Instant,
    pub contact: StoreContact,
}

#[derive(Debug)]
struct Shared {
    protocol: HostProtocol,
    /// Uploaded steps of which the fate is not known.
    uploaded: BTreeMap<SessionStep, UploadedStep>,
    /// Steps that this agent has encoded and not uploaded.
    encoded: BTreeSet<SessionStep>,
    /// Known fates of steps. A fate may be known before the upload is reported.
    fates: BTreeMap<SessionStep, Fate>,
    /// Encoded steps, and which of them other hosts have copied, if they shall.
    copied: CopiedSteps,
    /// Newest step of the session that is committed or given up. Pruning keeps it and all newer steps.
    decided: Option<SessionStep>,
    /// Last report of copies.
    reported: Option<ReplicatedSaves>,
    /// Encoded steps of which the fate is not reported, also those of earlier agents, and the newest durable step.
    undecided: UndecidedSaves,
    /// Steps that cannot be uploaded, ever.
    unstorable: BTreeSet<SessionStep>,
}

/// A step that this host has uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UploadedStep {
    /// Number of the save among those of this agent, from 1; 0 for a save of an earlier agent.
    pub sequence: u64,
    pub generations: Vec<RankGeneration>,
    /// Begin of the upload, in milliseconds since 1970.
    pub begun_ms: u64,
}

/// Fate of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    Durable,
    /// Given up, and why.
    GivenUp(String),
}

impl HostWork {
    pub(super) fn new(run: Arc<Run>, hosts: HostsSpec, options: HostOptions, actions: UnboundedSender<Action>) -> Self {
        let protocol = HostProtocol::new(options, 0);
        let shared = Mutex::new(Shared {
            protocol,
            uploaded: BTreeMap::new(),
            encoded: BTreeSet::new(),
            fates: BTreeMap::new(),
            copied: CopiedSteps::default(),
            decided: None,
            reported: None,
            undecided: UndecidedSaves::read(&run.folder, hosts.session),
            unstorable: BTreeSet::new(),
        });
        Self { run, hosts, shared, actions, started: Instant::now(), contact: StoreContact::default() }
    }

    /// Whether the session goes on without the store.
    pub(super) fn is_without_store(&self) -> bool {
        !self.contact.is_accepted() && HostNotes::read(&self.run.folder, self.hosts.session).is_without_store()
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

    /// Whether the fate of a step is in the log, as far as this host has read the log.
    pub(super) fn has_passed(&self, key: SessionStep) -> bool {
        self.lock().protocol.has_passed(key)
    }

    pub(super) fn set_decided(&self, decided: SessionStep) {
        self.lock().decided = Some(decided);
    }

    /// The newest step that is committed or given up.
    pub(super) fn decided(&self) -> Option<SessionStep> {
        self.lock().decided
    }

    /// Notes that this agent has encoded a step, which will be uploaded. Call it before the slots of the step are released.
    pub(super) fn note_encoded(&self, key: SessionStep, generations: &[RankGeneration]) {
        let mut shared = self.lock();
        shared.undecided.insert(key, generations.to_vec());
        shared.encoded.insert(key);
        shared.copied.add(key, generations.to_vec());
    }

    /// Also awaits copies of the steps that an earlier agent encoded.
    pub(super) fn await_copies_of_earlier(&self) {
        let newest = self.run.read(|_, arenas| {
            let ranks = self.run.spec.local_ranks();
            let of = |rank| Some(RankGeneration { rank, generation: arenas.get(rank)?.encoded().unwrap_or(0) });
            ranks.filter_map(of).collect::<Vec<_>>()
        });
        let mut shared = self.lock();
        let earlier = shared.undecided.steps().clone();
        shared.copied.add_earlier(earlier, &newest);
    }

    /// Steps that wait for copies, oldest first. Leaves out those that are committed or given up.
    pub(super) fn awaited_copies(&self) -> Vec<SessionStep> {
        let shared = self.lock();
        shared.copied.awaited(shared.decided).collect()
    }

    /// Notes the steps that enough hosts have copied, and reports what is new.
    pub(super) fn report_copies(&self, copied: &[SessionStep]) {
        let report = {
            let mut shared = self.lock();
            copied.iter().for_each(|key| shared.copied.note_copied(*key));
            let report = shared.copied.report().filter(|report| shared.reported.as_ref() != Some(report));
            if report.is_some() {
                shared.reported.clone_from(&report);
            }
            report
        };
        if let Some(report) = report {
            self.run.apply(RunEvent::Replicated(report));
        }
    }

    /// Whether a step is committed or given up, or a newer one of the session is.
    pub(super) fn is_decided(&self, key: SessionStep) -> bool {
        self.lock().decided.is_some_and(|decided| decided >= key)
    }

    /// Reports an uploaded step to the run and to the protocol.
    pub(super) fn note_uploaded(&self, key: SessionStep, step: UploadedStep) {
        // The notes tell which saves of an earlier agent have this step.
        if step.sequence > 0 {
            let known = {
                let mut shared = self.lock();
                shared.encoded.remove(&key);
                let known = shared.fates.get(&key).cloned();
                if known.is_none() {
                    shared.uploaded.insert(key, step.clone());
                }
                known
            };
            if let Some(fate) = known {
                self.report(key, step, fate);
            }
        }
        self.apply(Event::Uploaded(key));
    }

    /// Reports the fate of a step of this host.
    pub(super) fn decide(&self, key: SessionStep, fate: Fate) {
        let (uploaded, waits) = {
            let mut shared = self.lock();
            shared.fates.insert(key, fate.clone());
            while shared.fates.len() > MAX_FATES {
                shared.fates.pop_first();
            }
            (shared.uploaded.remove(&key), shared.encoded.contains(&key))
        };
        match uploaded {
            Some(step) => self.report(key, step, fate),
            // Reported after the upload.
            None if waits => {}
            // An earlier agent uploaded the step.
            None => report_found(self, key, fate),
        }
    }

    /// Reports the steps of an earlier agent whose fate is in the log, unless the protocol will do so.
    pub(super) fn report_earlier(&self, view: &LogView) {
        let earlier: Vec<SessionStep> = {
            let shared = self.lock();
            let is_known =
                |key: &SessionStep| shared.uploaded.contains_key(key) || shared.encoded.contains(key) || shared.protocol.awaits(*key);
            let passed = shared.undecided.undecided().filter(|key| view.has_passed(self.hosts.session, *key));
            passed.filter(|key| !is_known(key)).collect()
        };
        for key in earlier {
            let given_up = || Fate::GivenUp("not all ranks saved this step, or their parts of it made no snapshot".to_owned());
            report_found(self, key, if view.committed.contains(&key) { Fate::Durable } else { given_up() });
        }
    }

    fn report(&self, key: SessionStep, step: UploadedStep, fate: Fate) {
        let is_durable = fate == Fate::Durable;
        report(&self.run, key, step, fate);
        let mut shared = self.lock();
        shared.copied.forget(key);
        match is_durable {
            true => shared.undecided.note_durable(key),
            false => shared.undecided.remove(key),
        }
    }

    /// The saves of an encoded step of which the fate may not be reported yet.
    pub(super) fn undecided_saves(&self, key: SessionStep) -> Option<Vec<RankGeneration>> {
        self.lock().undecided.steps().get(&key).cloned()
    }

    /// Notes that the uploader has given a step up, which the log may never decide about.
    pub(super) fn note_unstorable(&self, key: SessionStep) {
        let mut shared = self.lock();
        shared.copied.forget(key);
        shared.undecided.remove(key);
        shared.unstorable.insert(key);
        while shared.unstorable.len() > MAX_FATES {
            shared.unstorable.pop_first();
        }
    }

    /// Whether a step in the mirror waits for its commit.
    pub(super) fn waits_for_commit(&self, key: SessionStep) -> bool {
        let shared = self.lock();
        shared.decided.is_none_or(|decided| key > decided) && !shared.unstorable.contains(&key)
    }
}

/// Answers of the store to the committer of a host.
#[derive(Debug)]
pub(super) struct StoreContact {
    /// Whether the store may be used for the session: it answered when the session began, or has accepted the session since.
    accepted: watch::Sender<bool>,
    answered: Mutex<Option<Instant>>,
}

impl Default for StoreContact {
    fn default() -> Self {
        Self { accepted: watch::Sender::new(false), answered: Mutex::new(None) }
    }
}

impl StoreContact {
    /// Notes that the store may be used for the session.
    pub(super) fn accept(&self) {
        self.accepted.send_replace(true);
    }

    fn is_accepted(&self) -> bool {
        *self.accepted.borrow()
    }

    /// Waits until the store may be used for the session.
    pub(super) async fn accepted(&self) {
        // Fails only if this work has ended.
        let _ = self.accepted.subscribe().wait_for(|accepted| *accepted).await;
    }

    /// Notes that the store has answered.
    pub(super) fn note_answer(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether the last answer of the store is at least as old as `limit`.
    pub(super) fn is_silent(&self, limit: Duration) -> bool {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|answered| answered.elapsed() >= limit)
    }

    /// Whether the store has answered after `since`.
    pub(super) fn has_answered_since(&self, since: Instant) -> bool {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|answered| answered > since)
    }
}

/// Whether all ranks of this host have an arena.
pub(super) fn has_arenas(run: &Run) -> bool {
    run.read(|_, arenas| arenas.all(run.spec.local_ranks())).is_some()
}

/// Reports the fate of a step that an earlier agent uploaded.
fn report_found(work: &HostWork, key: SessionStep, fate: Fate) {
    if let Some(generations) = work.undecided_saves(key) {
        work.report(key, UploadedStep { sequence: 0, generations, begun_ms: now_ms() }, fate);
    }
}

/// Reports the fate of a step.
fn report(run: &Run, key: SessionStep, step: UploadedStep, fate: Fate) {
    let UploadedStep { sequence, generations, begun_ms } = step;
    match fate {
        Fate::Durable => run.apply(RunEvent::Uploaded(Upload {
            tier: 0,
            encoded: generations.iter().map(|known| (known.rank, known.generation)).collect(),
            epoch: 0,
            sources: BTreeSet::from([0]),
            sequence,
            step: Some(key.step),
            pending_before: u64::from(sequence > 0),
            copied: 1,
            times: UploadTimes { upload_ms: now_ms().saturating_sub(begun_ms) as f64, ahead_bytes: 0, time_ms: now_ms() },
        })),
        Fate::GivenUp(message) => run.apply(RunEvent::GivenUp { generations, sequence, step: key.step, message }),
    }
}

/// Number of fates to remember. More steps than that never wait for their upload.
const MAX_FATES: usize = 10_000;
