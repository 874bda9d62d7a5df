//! The part of one host in the commits of many, as a pure state machine: [`HostProtocol::apply`] changes it by an event
//! and returns the actions that follow. No thread, no clock, no I/O.
//!
//! ```text
//! Begin ─> (host 0) Open ─> Opened
//! Copied ─> FixParent ─> ParentFixed ─> Upload ─> Uploaded ─> (leader) Survey ─> Surveyed ─> Commit ─> Committed
//!                                                     └─────> (others) ReadLog ─> LogRead ─> Durable or GiveUp
//! ```
//!
//! A follower whose step is not committed for some time looks whether all receipts of the step are there. If they are,
//! the leader does not do its work, and the follower opens the log with the next term. If nobody has begun the session, the
//! host begins it. A leader that finds receipts that make no snapshot opens the log again, above their step: all hosts then
//! give the step up. It does the same with a step that a rank will never save, because the rank has ended.
//!
//! Invariants: a step is reported as durable only if the log has it, and as given up only if the log can never admit it.
//! Which host leads follows from the log alone. The simulation checks the reports, that the log admits each entry, and
//! that no complete step of a host waits for ever.

use std::collections::{BTreeMap, BTreeSet};

use tensorcask::session::LeaderRefusal;
use tensorcask::wire::{Id, Leader, SessionStep};

use super::event::{Action, Event, LogView, Request, SurveyedStep, is_passed};
use super::takeover_timeout::TakeoverTimeout;

/// The fixed properties of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostOptions {
    pub session: Id,
    /// The last log entry when the job started, if this host knows it.
    pub after: Option<u64>,
    /// Position of this host among those that may take over: 0 tries first.
    pub position: u32,
    /// Shortest time without a commit after which a host looks for the cause.
    pub patience_ms: u64,
    /// Writer id under which an earlier agent of this host has led, or tried to.
    pub previous_writer: Option<Id>,
}

/// State of one host in its session, and the rules by which events change it.
#[derive(Debug, Clone)]
pub(crate) struct HostProtocol {
    options: HostOptions,
    timeout: TakeoverTimeout,
    now_ms: u64,
    view: LogView,
    role: Role,
    /// Whether the log has named this session, or can never do so.
    has_begun: bool,
    is_ended: bool,
    /// Whether steps that an earlier agent uploaded are still to be found.
    is_rejoining: bool,
    steps: BTreeMap<SessionStep, Stage>,
    /// The step that is being encoded and uploaded.
    uploading: Option<SessionStep>,
    /// Steps that make no snapshot: the receipts do not fit together, or a rank without one has ended.
    impossible: BTreeSet<SessionStep>,
    under_way: BTreeSet<Request>,
    /// Time of the last change in the log, or of the first upload after it.
    progress_ms: u64,
    /// The complete or impossible step that this host has seen wait, and since when.
    oldest_complete: Option<(SessionStep, u64)>,
    /// Time of the first copy.
    copied_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Follower,
    Leader(Leader),
}

/// Stage of a step of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Copied,
    /// The receipts of this host are in the store since this time.
    Uploaded {
        since_ms: u64,
    },
}

impl HostProtocol {
    /// `now_ms`: the clock that ticks have.
    pub(crate) fn new(options: HostOptions, now_ms: u64) -> Self {
        Self {
            timeout: TakeoverTimeout::new(options.patience_ms),
            options,
            now_ms,
            view: LogView::default(),
            role: Role::Follower,
            has_begun: false,
            is_ended: false,
            is_rejoining: false,
            steps: BTreeMap::new(),
            uploading: None,
            impossible: BTreeSet::new(),
            under_way: BTreeSet::new(),
            progress_ms: now_ms,
            oldest_complete: None,
            copied_ms: None,
        }
    }

    /// Changes the state by an event; returns the actions that follow, in order.
    pub(crate) fn apply(&mut self, event: Event) -> Vec<Action> {
        if self.is_ended {
            return Vec::new();
        }
        let mut actions = Vec::new();
        match event {
            Event::Begin { known } => {
                self.options.after = Some(known);
                actions.extend(self.begin());
            }
            Event::Rejoin => {
                self.is_rejoining = true;
                actions.extend(self.request(Request::ReadLog, Action::ReadLog));
            }
            Event::Copied(key) => {
                self.copied_ms.get_or_insert(self.now_ms);
                self.steps.entry(key).or_insert(Stage::Copied);
            }
            Event::ParentFixed { key, parent } => actions.push(Action::Upload { key, parent }),
            Event::Uploaded(key) => {
                self.on_uploaded(key);
                actions.extend(self.survey_if_leading());
            }
            Event::Dropped(key) => {
                self.uploading = self.uploading.filter(|uploading| *uploading != key);
                self.steps.remove(&key);
            }
            Event::LogRead(view) => {
                self.under_way.remove(&Request::ReadLog);
                self.follow(view, &mut actions);
                if self.is_rejoining && !self.is_ended && self.has_begun {
                    actions.extend(self.request(Request::Survey, Action::Survey));
                }
            }
            Event::Surveyed(found) => self.on_surveyed(&found, &mut actions),
            Event::Opened { leader, view } => {
                self.under_way.remove(&Request::Append);
                self.role = Role::Leader(leader);
                self.follow(view, &mut actions);
                if let Some(leading) = self.view.leadership.of(self.options.session) {
                    self.options.previous_writer = Some(leading.writer);
                }
                actions.extend(self.survey_if_leading());
            }
            Event::Committed(view) => {
                self.under_way.remove(&Request::Append);
                self.follow(view, &mut actions);
                actions.extend(self.survey_if_leading());
            }
            Event::Refused(view) => {
                self.under_way.remove(&Request::Append);
                // If the session cannot begin, it has ended.
                self.has_begun = true;
                self.follow(view, &mut actions);
                actions.extend(self.survey_if_leading());
            }
            Event::Impossible(key) => {
                self.under_way.remove(&Request::Append);
                self.impossible.insert(key);
                if self.leads() && self.is_open(key) {
                    let open = self.next_leader(key).map(|leader| Action::Open { leader });
                    actions.extend(open.and_then(|open| self.request(Request::Append, open)));
                }
            }
            Event::Unseated => {
                self.under_way.remove(&Request::Append);
                self.role = Role::Follower;
            }
            Event::NotAccepted => self.end(&mut actions),
            Event::Failed(request) => _ = self.under_way.remove(&request),
            Event::Tick { now_ms } => {
                self.now_ms = now_ms;
                self.on_tick(&mut actions);
            }
        }
        if !self.is_ended {
            actions.extend(self.next_upload());
        }
        actions
    }

    /// Whether this host leads, as far as it knows.
    pub(crate) fn leads(&self) -> bool {
        matches!(self.role, Role::Leader(_))
    }

    /// Whether the log has a step, or can no longer admit it, as far as this host knows.
    pub(crate) fn has_passed(&self, key: SessionStep) -> bool {
        self.view.has_passed(self.options.session, key)
    }

    /// Whether an action will tell the fate of a step.
    pub(crate) fn awaits(&self, key: SessionStep) -> bool {
        self.steps.contains_key(&key)
    }

    /// The session has ended: another one has the store.
    #[cfg(test)]
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Sends a request, unless one of its kind is under way.
    fn request(&mut self, request: Request, action: Action) -> Option<Action> {
        self.under_way.insert(request).then_some(action)
    }

    /// Opens the log for the session: at once on the first host, later on another one, if nobody has done so.
    fn begin(&mut self) -> Option<Action> {
        let wait_ms = self.timeout.wait_ms().saturating_mul(u64::from(self.options.position));
        let is_due = |copied_ms: u64| self.now_ms.saturating_sub(copied_ms) >= wait_ms;
        if self.has_begun || !(self.options.position == 0 || self.copied_ms.is_some_and(is_due)) {
            return None;
        }
        let leader = self.first_leader()?;
        self.request(Request::Append, Action::Open { leader })
    }

    /// The leader that begins the session.
    fn first_leader(&self) -> Option<Leader> {
        Some(Leader { session: self.options.session, after: self.options.after?, attempt: 0, term: 1, above: None })
    }

    /// The leader that takes over to commit a step, or to give it up.
    fn next_leader(&self, key: SessionStep) -> Option<Leader> {
        let now = self.view.leadership.of(self.options.session)?.leader;
        let above = self.impossible.contains(&key).then_some(key.step);
        Some(Leader { attempt: key.attempt, term: now.term.saturating_add(1), above, ..now })
    }

    /// Begins with the oldest state that is not uploaded, one at a time.
    fn next_upload(&mut self) -> Option<Action> {
        if self.uploading.is_some() {
            return None;
        }
        let (key, _) = self.steps.iter().find(|(_, stage)| **stage == Stage::Copied)?;
        self.uploading = Some(*key);
        Some(Action::FixParent(*key))
    }

    fn on_uploaded(&mut self, key: SessionStep) {
        self.uploading = self.uploading.filter(|uploading| *uploading != key);
        if !self.is_waiting() {
            self.progress_ms = self.now_ms;
        }
        // The step may have been given up meanwhile.
        if let Some(stage) = self.steps.get_mut(&key) {
            *stage = Stage::Uploaded { since_ms: self.now_ms };
        }
    }

    /// Whether a step of this host waits for its commit.
    fn is_waiting(&self) -> bool {
        self.steps.values().any(|stage| matches!(stage, Stage::Uploaded { .. }))
    }

    fn survey_if_leading(&mut self) -> Option<Action> {
        if self.is_ended || !self.leads() || !self.is_waiting() || self.under_way.contains(&Request::Append) {
            return None;
        }
        self.request(Request::Survey, Action::Survey)
    }

    /// Follows the log: steps of this host become durable or hopeless, and the leader may have changed.
    fn follow(&mut self, view: LogView, actions: &mut Vec<Action>) {
        // Answers may arrive in another order than that of the log.
        if view.sequence >= self.view.sequence {
            if view.leadership != self.view.leadership {
                self.progress_ms = self.now_ms;
                self.oldest_complete = None;
            }
            self.view = view;
        }
        let Some(leading) = self.view.leadership.of(self.options.session).cloned() else {
            let first = self.first_leader().map(|first| self.view.leadership.may_open(first));
            if self.has_begun || first == Some(Err(LeaderRefusal::Ended)) {
                self.end(actions);
            }
            return;
        };
        self.has_begun = true;
        if self.role != Role::Leader(leading.leader) {
            self.role = Role::Follower;
        }
        let passed: Vec<(SessionStep, Stage)> =
            self.steps.iter().filter(|(key, _)| is_passed(&leading, **key)).map(|(key, stage)| (*key, *stage)).collect();
        for (key, stage) in passed {
            self.steps.remove(&key);
            match (self.view.committed.contains(&key), stage) {
                (true, Stage::Uploaded { since_ms }) => {
                    self.timeout.note(self.now_ms.saturating_sub(since_ms));
                    actions.push(Action::Durable(key));
                }
                (true, Stage::Copied) => actions.push(Action::Durable(key)),
                (false, _) => actions.push(Action::GiveUp(key)),
            }
        }
        self.impossible.retain(|key| !is_passed(&leading, *key));
    }

    fn end(&mut self, actions: &mut Vec<Action>) {
        self.steps.clear();
        actions.push(Action::Stop);
        (self.is_ended, self.role) = (true, Role::Follower);
    }

    fn on_surveyed(&mut self, found: &[SurveyedStep], actions: &mut Vec<Action>) {
        self.under_way.remove(&Request::Survey);
        if self.view.leadership.of(self.options.session).is_some() {
            self.is_rejoining = false;
        }
        // Steps that an earlier agent of this host uploaded.
        let uploaded: Vec<SessionStep> = found.iter().filter(|step| step.has_ours && self.is_open(step.key)).map(|step| step.key).collect();
        for key in uploaded {
            self.steps.entry(key).or_insert(Stage::Uploaded { since_ms: self.now_ms });
        }
        let mut open: Vec<&SurveyedStep> = found.iter().filter(|step| self.is_open(step.key)).collect();
        open.sort_by_key(|step| step.key);
        // Giving a step up gives up all older ones, so it waits for those that may still become complete.
        let pending = open.iter().find(|step| !step.is_complete && !step.is_hopeless).map(|step| step.key);
        let is_ready = |step: &&&SurveyedStep| step.is_complete || (step.is_hopeless && pending.is_none_or(|pending| step.key < pending));
        let Some(ready) = open.iter().find(is_ready) else {
            self.oldest_complete = None;
            return;
        };
        // Hopeless steps that follow each other are given up together.
        let is_alike = |step: &&&SurveyedStep| !step.is_complete && step.is_hopeless && step.key.attempt == ready.key.attempt;
        let hopeless = open.iter().take_while(is_alike).map(|step| step.key);
        let key = if ready.is_complete { ready.key } else { hopeless.clone().last().unwrap_or(ready.key) };
        if !ready.is_complete {
            self.impossible.extend(hopeless);
        }
        let Some(leader) = self.next_leader(key) else { return };
        let open = Action::Open { leader };
        match self.role {
            Role::Leader(leader) if leader.attempt == key.attempt && !self.impossible.contains(&key) => {
                actions.extend(self.request(Request::Append, Action::Commit { leader, key }));
            }
            // The job has returned to an older step, or this step is to be given up: the same leader opens the log again.
            Role::Leader(_) => actions.extend(self.request(Request::Append, open)),
            Role::Follower => {
                let since_ms = match self.oldest_complete {
                    Some((seen, since_ms)) if seen == ready.key => since_ms,
                    _ => self.now_ms,
                };
                self.oldest_complete = Some((ready.key, since_ms));
                // The hosts that have a hopeless step may be any, and the leader may have ended.
                let turn = if ready.is_complete { self.options.position } else { self.options.position % HOPELESS_TURNS };
                let wait_ms = self.timeout.wait_ms().saturating_mul(u64::from(turn));
                if self.was_leader() || self.now_ms.saturating_sub(since_ms) >= wait_ms {
                    actions.extend(self.request(Request::Append, open));
                }
            }
        }
    }

    /// Whether the log may still admit a step.
    fn is_open(&self, key: SessionStep) -> bool {
        self.view.leadership.of(self.options.session).is_some_and(|leading| !is_passed(leading, key))
    }

    /// Whether an earlier agent of this host leads: nobody else need be waited for.
    fn was_leader(&self) -> bool {
        let leading = self.view.leadership.of(self.options.session);
        !self.leads() && leading.is_some_and(|leading| self.options.previous_writer == Some(leading.writer))
    }

    fn on_tick(&mut self, actions: &mut Vec<Action>) {
        actions.extend(self.begin());
        if self.leads() {
            // Another host may have taken over.
            actions.extend(self.survey_if_leading());
        } else if self.is_waiting() {
            let is_late = self.now_ms.saturating_sub(self.progress_ms) >= self.timeout.wait_ms();
            if self.was_leader() || is_late {
                actions.extend(self.request(Request::Survey, Action::Survey));
            }
        }
        if self.is_waiting() || self.is_rejoining {
            actions.extend(self.request(Request::ReadLog, Action::ReadLog));
        }
    }
}

/// Number of turns in which hosts try to give a hopeless step up. Two hosts at once do no harm.
const HOPELESS_TURNS: u32 = 4;

/// Uploaded steps that wait for their commit.
#[cfg(test)]
pub(crate) fn waiting(protocol: &HostProtocol) -> impl Iterator<Item = SessionStep> {
    protocol.steps.iter().filter(|(_, stage)| matches!(stage, Stage::Uploaded { .. })).map(|(key, _)| *key)
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;
