//! The part of one host in the commits of many, as a pure state machine: [`HostProtocol::apply`] changes it by an event
//! and returns the actions that follow. No thread, no clock, no I/O.
//!
//! ```text
//! Copied ─> FixParent ─> ParentFixed ─> Upload ─> Uploaded ─> (leader) Survey ─> Surveyed ─> Commit ─> Committed
//!                                                     └─────> (others) ReadLog ─> LogRead ─> Durable or GiveUp
//! ```
//!
//! A follower whose step is not committed for some time looks whether all receipts of the step are there. If they are,
//! the leader does not do its work, and the follower opens the log with the next term.
//!
//! Invariants: a step is reported as durable only if the log has it, and as given up only if the log can never admit it.
//! Which host leads follows from the log alone. The simulation checks both, and that no complete step waits for ever.

use std::collections::{BTreeMap, BTreeSet};

use tensorcask::wire::{Id, Leader};

use super::event::{Action, Event, LogView, Request, StepKey, SurveyedStep};
use super::patience::Patience;

/// The fixed properties of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostOptions {
    pub session: Id,
    /// Position of this host among those that may take over: 0 tries first.
    pub position: u32,
    /// Shortest time without a commit after which a host looks for the cause.
    pub patience_ms: u64,
    /// Writer id under which an earlier agent of this host has led, or tried to.
    pub led_as: Option<Id>,
}

/// What a host knows of its session.
#[derive(Debug, Clone)]
pub(crate) struct HostProtocol {
    options: HostOptions,
    patience: Patience,
    now_ms: u64,
    view: LogView,
    role: Role,
    /// If this host begins the session: the last log entry when the job started.
    begins: Option<u64>,
    /// Whether the log has named this session, or can never do so.
    has_begun: bool,
    is_ended: bool,
    steps: BTreeMap<StepKey, Stage>,
    /// The step that is being encoded and uploaded.
    uploading: Option<StepKey>,
    /// Complete steps whose receipts make no snapshot.
    impossible: BTreeSet<StepKey>,
    under_way: BTreeSet<Request>,
    /// Time of the last change in the log, or of the first upload after it.
    progress_ms: u64,
    /// The complete step that this host has seen wait, and since when.
    seen_waiting: Option<(StepKey, u64)>,
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
    pub(crate) fn new(options: HostOptions) -> Self {
        Self {
            patience: Patience::new(options.patience_ms),
            options,
            now_ms: 0,
            view: LogView::default(),
            role: Role::Follower,
            begins: None,
            has_begun: false,
            is_ended: false,
            steps: BTreeMap::new(),
            uploading: None,
            impossible: BTreeSet::new(),
            under_way: BTreeSet::new(),
            progress_ms: 0,
            seen_waiting: None,
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
                self.begins = Some(known);
                actions.extend(self.begin());
            }
            Event::Rejoin => {
                actions.extend(self.request(Request::ReadLog, Action::ReadLog));
                actions.extend(self.request(Request::Survey, Action::Survey));
            }
            Event::Copied(key) => _ = self.steps.entry(key).or_insert(Stage::Copied),
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
            }
            Event::Surveyed(found) => self.on_surveyed(&found, &mut actions),
            Event::Opened { leader, view } => {
                self.under_way.remove(&Request::Append);
                self.role = Role::Leader(leader);
                self.follow(view, &mut actions);
                if let Some(leading) = self.view.leadership.of(self.options.session) {
                    self.options.led_as = Some(leading.writer);
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
                actions.extend(self.survey_if_leading());
            }
            Event::Unseated => {
                self.under_way.remove(&Request::Append);
                self.role = Role::Follower;
            }
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

    /// The session has ended: another one has the store.
    #[cfg(test)]
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Sends a request, unless one of its kind is under way.
    fn request(&mut self, request: Request, action: Action) -> Option<Action> {
        self.under_way.insert(request).then_some(action)
    }

    /// Opens the log for the session, if this host is to do so and has not.
    fn begin(&mut self) -> Option<Action> {
        let known = self.begins.filter(|_| !self.has_begun)?;
        let leader = Leader { session: self.options.session, after: known, attempt: 0, term: 1 };
        self.request(Request::Append, Action::Open { leader })
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

    fn on_uploaded(&mut self, key: StepKey) {
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
        if view.leadership != self.view.leadership {
            self.progress_ms = self.now_ms;
            self.seen_waiting = None;
        }
        self.view = view;
        let Some(leading) = self.view.leadership.of(self.options.session).cloned() else {
            if self.has_begun {
                self.end(actions);
            }
            return;
        };
        self.has_begun = true;
        if self.role != Role::Leader(leading.leader) {
            self.role = Role::Follower;
        }
        let newest = leading.newest.map(|step| StepKey { attempt: leading.leader.attempt, step });
        let is_passed = |key: &StepKey| key.attempt < leading.leader.attempt || newest.is_some_and(|newest| *key <= newest);
        let passed: Vec<(StepKey, Stage)> =
            self.steps.iter().filter(|(key, _)| is_passed(key)).map(|(key, stage)| (*key, *stage)).collect();
        for (key, stage) in passed {
            self.steps.remove(&key);
            match (self.view.committed.contains(&key), stage) {
                (true, Stage::Uploaded { since_ms }) => {
                    self.patience.note(self.now_ms.saturating_sub(since_ms));
                    actions.push(Action::Durable(key));
                }
                (true, Stage::Copied) => actions.push(Action::Durable(key)),
                (false, _) => actions.push(Action::GiveUp(key)),
            }
        }
        self.impossible.retain(|key| !is_passed(key));
    }

    fn end(&mut self, actions: &mut Vec<Action>) {
        self.steps.clear();
        actions.push(Action::Stop);
        (self.is_ended, self.role) = (true, Role::Follower);
    }

    fn on_surveyed(&mut self, found: &[SurveyedStep], actions: &mut Vec<Action>) {
        self.under_way.remove(&Request::Survey);
        // Steps that an earlier agent of this host uploaded.
        let uploaded: Vec<StepKey> = found.iter().filter(|step| step.has_ours && self.is_open(step.key)).map(|step| step.key).collect();
        for key in uploaded {
            self.steps.entry(key).or_insert(Stage::Uploaded { since_ms: self.now_ms });
        }
        let ready = found.iter().filter(|step| step.is_complete && self.is_open(step.key)).map(|step| step.key);
        let Some(key) = ready.min() else {
            self.seen_waiting = None;
            return;
        };
        let Some(leading) = self.view.leadership.of(self.options.session).cloned() else { return };
        let takeover = Leader { attempt: key.attempt, term: leading.leader.term.saturating_add(1), ..leading.leader };
        let open = Action::Open { leader: takeover };
        match self.role {
            Role::Leader(leader) if leader.attempt == key.attempt => {
                actions.extend(self.request(Request::Append, Action::Commit { leader, key }));
            }
            // The job has returned to an older step: the same leader opens the log for the next attempt.
            Role::Leader(_) => actions.extend(self.request(Request::Append, open)),
            Role::Follower => {
                let since_ms = match self.seen_waiting {
                    Some((seen, since_ms)) if seen == key => since_ms,
                    _ => self.now_ms,
                };
                self.seen_waiting = Some((key, since_ms));
                let wait_ms = self.patience.wait_ms().saturating_mul(u64::from(self.options.position));
                if self.led_before() || self.now_ms.saturating_sub(since_ms) >= wait_ms {
                    actions.extend(self.request(Request::Append, open));
                }
            }
        }
    }

    /// Whether the log may still admit a step.
    fn is_open(&self, key: StepKey) -> bool {
        let Some(leading) = self.view.leadership.of(self.options.session) else { return false };
        let newest = leading.newest.filter(|_| key.attempt == leading.leader.attempt);
        key.attempt >= leading.leader.attempt && newest.is_none_or(|newest| newest < key.step) && !self.impossible.contains(&key)
    }

    /// Whether an earlier agent of this host leads: nobody else need be waited for.
    fn led_before(&self) -> bool {
        let leading = self.view.leadership.of(self.options.session);
        !self.leads() && leading.is_some_and(|leading| self.options.led_as == Some(leading.writer))
    }

    fn on_tick(&mut self, actions: &mut Vec<Action>) {
        actions.extend(self.begin());
        if self.leads() {
            // Another host may have taken over.
            actions.extend(self.survey_if_leading());
        } else if self.is_waiting() {
            let is_late = self.now_ms.saturating_sub(self.progress_ms) >= self.patience.wait_ms();
            if self.led_before() || is_late {
                actions.extend(self.request(Request::Survey, Action::Survey));
            }
        }
        if self.is_waiting() {
            actions.extend(self.request(Request::ReadLog, Action::ReadLog));
        }
    }
}
