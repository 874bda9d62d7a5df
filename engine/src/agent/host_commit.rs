//! The committer of a host in a run on many hosts: reads the log, lists receipts, and commits if this host leads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::session::{LeaderWriter, Mirror, RankSet, SessionExchange, SessionLog, SessionSurvey};
use tensorcask::wire::{Id, Leader, SessionName, SessionStep};
use tensorcask::{Error, ErrorKind, Result, Store, WriterOptions};
use tokio::sync::mpsc::UnboundedReceiver;

use super::host_work::{Fate, HostWork, has_arenas};
use super::peer_tasks::remove_former_replicas;
use super::run_event::Event as RunEvent;
use crate::hosts::{Action, Event, LogView, Request, SurveyedStep};
use crate::restore::earlier_sessions::remove_passed;
use crate::run::host_notes::HostNotes;
use crate::run::status::LeaderStatus;

/// Commits, or waits for commits, until the agent ends.
pub(super) async fn host_commit_loop(work: Arc<HostWork>, memory: Store, mut actions: UnboundedReceiver<Action>) {
    let Some(store) = work.run.tiers.first().cloned() else { return };
    let mut committer = Committer {
        work: work.clone(),
        mirror: Mirror::new(&store, &memory),
        followed: None,
        follow_after: None,
        store,
        log: None,
        exchange: None,
        writer: None,
        receipts: BTreeMap::new(),
        reasons: BTreeMap::new(),
        has_begun: false,
        are_ranks_noted: false,
        refusal: None,
        accept_after: None,
        leader: None,
        led_as: HostNotes::read(&work.run.folder, work.hosts.session).led_as,
        has_rejoined: false,
    };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            action = actions.recv() => match action {
                Some(action) => committer.perform(action).await,
                None => return,
            },
            _ = tick.tick() => committer.tick().await,
        }
        committer.follow().await;
    }
}

/// Performs the actions of a host that concern the log.
struct Committer {
    work: Arc<HostWork>,
    mirror: Mirror,
    /// Last log entry that the mirror has.
    followed: Option<u64>,
    /// Time of the next attempt to copy the log into the mirror, after a failure.
    follow_after: Option<Instant>,
    store: Store,
    log: Option<SessionLog>,
    exchange: Option<SessionExchange>,
    /// The writer that this host leads with.
    writer: Option<LeaderWriter>,
    /// Ranks with a receipt, by step, as last listed.
    receipts: BTreeMap<SessionStep, RankSet>,
    /// Why steps cannot be committed.
    reasons: BTreeMap<SessionStep, String>,
    /// Whether the protocol knows where the session begins.
    has_begun: bool,
    /// Whether all ranks of this host have started, and are noted in the store.
    are_ranks_noted: bool,
    /// Why the store does not accept the session.
    refusal: Option<String>,
    /// Time of the next attempt to have the session accepted, after a failure.
    accept_after: Option<Instant>,
    /// The leader, as last reported.
    leader: Option<LeaderStatus>,
    /// Last writer id under which this host has opened the log, or tried to.
    led_as: Option<Id>,
    /// Whether the protocol was told to look for steps that an earlier agent uploaded.
    has_rejoined: bool,
}

impl Committer {
    async fn tick(&mut self) {
        if !self.has_begun || !self.are_ranks_noted {
            self.begin().await;
        }
        // An earlier agent may have uploaded what is in the arenas.
        if !self.has_rejoined && has_arenas(&self.work.run) {
            self.has_rejoined = true;
            self.work.apply(Event::Rejoin);
        }
        self.work.apply(Event::Tick { now_ms: self.work.elapsed_ms() });
    }

    /// Tells the protocol where the session begins. A session that began without the store must be accepted first.
    async fn begin(&mut self) {
        let notes = HostNotes::read(&self.work.run.folder, self.work.hosts.session);
        let is_waiting = self.accept_after.is_some_and(|after| Instant::now() < after);
        let Some(after) = notes.after.filter(|_| !is_waiting && self.refusal.is_none()) else { return };
        match accept(&self.work, &self.store, &notes, after).await {
            Ok(()) => {
                self.are_ranks_noted = notes.started.len() >= self.work.hosts.ranks as usize;
                if !std::mem::replace(&mut self.has_begun, true) {
                    self.work.contact.accept();
                    self.work.apply(Event::Begin { known: after });
                }
            }
            Err(error) if is_refusal(&error) => {
                self.refusal = Some(error.to_string());
                self.work.apply(Event::NotAccepted);
            }
            Err(error) => {
                self.work.run.apply(RunEvent::UploadFailed { tier: 0, message: format!("the session goes on in memory: {error}") });
                self.accept_after = Some(Instant::now() + ACCEPT_RETRY);
            }
        }
    }

    async fn perform(&mut self, action: Action) {
        let work = self.work.clone();
        match action {
            // The encoder does both.
            Action::FixParent(_) | Action::Upload { .. } => {}
            Action::ReadLog => match self.read_log().await {
                Ok(view) => {
                    work.report_earlier(&view);
                    work.apply(Event::LogRead(view));
                }
                Err(error) => self.fail(Request::ReadLog, &error),
            },
            Action::Survey => match self.survey().await {
                Ok(found) => {
                    work.contact.note_answer();
                    work.apply(Event::Surveyed(found));
                }
                Err(error) => self.fail(Request::Survey, &error),
            },
            Action::Open { leader } => {
                let opened = self.open(leader).await;
                self.after_append(opened, |view| Event::Opened { leader, view }).await;
            }
            Action::Commit { leader, key } => self.commit(leader, key).await,
            Action::Durable(key) => work.decide(key, Fate::Durable),
            Action::GiveUp(key) => {
                let why = self.reason(key).await;
                work.decide(key, Fate::GivenUp(why));
            }
            Action::Stop => {
                let orders = work.run.read(|state, _| state.tiers.first().map(|tier| tier.orders)).unwrap_or_default();
                let taken = || "another job, or another start of this job, has taken the store over".to_owned();
                let why = self.refusal.clone().unwrap_or_else(taken);
                work.run.apply(RunEvent::Fenced { orders, why });
            }
        }
    }

    /// Reports the outcome of an entry.
    async fn after_append(&mut self, appended: Result<()>, done: impl FnOnce(LogView) -> Event) {
        let error = match appended {
            Ok(()) => match self.read_log().await {
                Ok(view) => return self.work.apply(done(view)),
                // The entry is in the log, as the next reading shows.
                Err(error) => error,
            },
            Err(error) if is_refusal(&error) => match self.read_log().await {
                Ok(view) => return self.work.apply(Event::Refused(view)),
                Err(error) => error,
            },
            Err(error) => error,
        };
        self.fail(Request::Append, &error);
    }

    fn fail(&self, request: Request, error: &Error) {
        // Before the first leader, there is no store.
        if error.kind() != ErrorKind::NotFound {
            self.work.run.apply(RunEvent::UploadFailed { tier: 0, message: error.to_string() });
        }
        self.work.apply(Event::Failed(request));
    }

    async fn read_log(&mut self) -> Result<LogView> {
        let session = self.work.hosts.session;
        let log = match &mut self.log {
            Some(log) => {
                if let Err(error) = log.refresh().await {
                    self.log = None;
                    return Err(error);
                }
                log
            }
            None => self.log.insert(SessionLog::open(&self.store).await?),
        };
        self.work.contact.note_answer();
        let view = LogView::new(log.sequence(), log.leadership(), session, log.records());
        let led_as = self.led_as;
        let leader = log.leadership().of(session).map(|leading| LeaderStatus {
            writer: leading.writer.to_string(),
            is_this_host: led_as == Some(leading.writer),
            term: leading.leader.term,
            attempt: leading.leader.attempt,
        });
        if self.leader != leader {
            self.leader = leader.clone();
            self.work.run.apply(RunEvent::LeaderRead(leader));
        }
        Ok(view)
    }

    /// Copies new entries of the log into the mirror. The protocol knows them already, so a slow store delays no report.
    async fn follow(&mut self) {
        let Some(log) = &self.log else { return };
        if self.followed == Some(log.sequence()) || self.follow_after.is_some_and(|after| Instant::now() < after) {
            return;
        }
        if let Err(error) = self.mirror.follow(log).await {
            tracing::warn!(run = self.work.run.spec.run, %error, "the log cannot be copied into memory; trying again");
            self.follow_after = Some(Instant::now() + FOLLOW_RETRY);
            return;
        }
        (self.followed, self.follow_after) = (Some(log.sequence()), None);
        let leading = log.leadership().of(self.work.hosts.session);
        if log.has_committed(self.work.hosts.session) {
            // Every rank has saved in this session, so none still restores from what is removed here.
            let first = leading.and_then(|leading| leading.attempts.first());
            let trimmed = self.mirror.shorten_log().await.and_then(|()| {
                remove_former_replicas(&self.work.run)?;
                first.map_or(Ok(()), |first| remove_passed(&self.work.run.folder, self.work.hosts.session, first.since))
            });
            if let Err(error) = trimmed {
                tracing::warn!(run = self.work.run.spec.run, %error, "memory of earlier sessions cannot be removed; trying again");
            }
        }
        if let Some((attempt, step)) = leading.and_then(|leading| Some((leading.leader.attempt, leading.newest?))) {
            self.work.set_decided(SessionStep { attempt, step });
        }
    }

    async fn exchange(&mut self) -> Result<&SessionExchange> {
        if self.exchange.is_none() {
            let session = SessionName { run: self.store.history().run().await?, session: self.work.hosts.session };
            self.exchange = Some(SessionExchange::new(&self.store, session));
        }
        self.exchange.as_ref().ok_or_else(|| Error::invalid("the session was not opened"))
    }

    async fn survey(&mut self) -> Result<Vec<SurveyedStep>> {
        let session = self.work.hosts.session;
        let spec = self.work.run.spec.clone();
        let leading = self.log.as_ref().and_then(|log| log.leadership().of(session));
        let after = leading.and_then(|leading| Some(SessionStep { attempt: leading.leader.attempt, step: leading.newest? }));
        let exchange = self.exchange().await?;
        let mut found = exchange.survey(after).await?;
        let ended = found.ended.clone();
        let is_hopeless = |found: &SessionSurvey, at: SessionStep| found.is_hopeless(at, &ended, spec.world);
        if found.steps.keys().any(|at| is_hopeless(&found, *at)) {
            // A listing is not of one moment: a rank may have uploaded a receipt after its page was read, and then ended.
            found = exchange.survey(after).await?;
        }
        let step = |(at, ranks): (&SessionStep, &RankSet)| SurveyedStep {
            key: *at,
            is_complete: ranks.has_all(0..spec.world),
            has_ours: ranks.has_all(spec.local_ranks()),
            is_hopeless: is_hopeless(&found, *at),
        };
        let steps = found.steps.iter().map(step).collect();
        self.receipts = found.steps;
        Ok(steps)
    }

    /// Why a step was given up.
    async fn reason(&mut self, key: SessionStep) -> String {
        if let Some(why) = self.reasons.remove(&key) {
            return why;
        }
        let world = self.work.run.spec.world;
        let missing = match self.missing(key, world).await {
            Ok(missing) => missing,
            Err(error) => {
                tracing::debug!(%error, "cannot list the receipts of a step that was given up");
                RankSet::default()
            }
        };
        match missing.is_empty() {
            true => "the parts that the ranks saved make no snapshot; the agent of the leading host logs why".to_owned(),
            false => format!("rank {missing} did not save step {}, and the job has ended or saved a newer step", key.step),
        }
    }

    /// Ranks without a receipt of a step.
    async fn missing(&mut self, at: SessionStep, world: u32) -> Result<RankSet> {
        Ok(self.exchange().await?.ranks(at).await?.missing(0..world))
    }

    async fn open(&mut self, leader: Leader) -> Result<()> {
        let id = Id::random()?;
        let run = self.work.run.clone();
        // Noted first: a later agent of this host then knows that the leader was this host.
        if !HostNotes::update_current(&run.folder, self.work.hosts.session, |notes| notes.led_as = Some(id))? {
            return Err(Error::invalid("the job has started again on this host, with another session"));
        }
        (self.writer, self.led_as) = (None, Some(id));
        let options = WriterOptions { id: Some(id), retention: run.spec.retention, ..run.spec.writer_options()? };
        let known = HostNotes::read(&run.folder, self.work.hosts.session).known;
        let opened = match &known {
            Some(known) => LeaderWriter::open_known(&self.store, leader, known, options).await,
            None => LeaderWriter::open(&self.store, leader, options).await,
        };
        if let Err(error) = &opened
            && error.kind() == ErrorKind::Fenced
            && known.is_some()
        {
            self.refusal = Some(error.to_string());
        }
        self.writer = Some(opened?);
        Ok(())
    }

    async fn commit(&mut self, leader: Leader, key: SessionStep) {
        let ranks = self.receipts.get(&key).cloned().unwrap_or_default();
        let receipts = match self.exchange().await {
            Ok(exchange) => exchange.receipts(key, &ranks).await,
            Err(error) => Err(error),
        };
        let receipts = match receipts {
            Ok(receipts) => receipts,
            Err(error) if error.kind() == ErrorKind::Corrupt => return self.is_impossible(key, &error),
            Err(error) => return self.fail(Request::Append, &error),
        };
        let Some(writer) = self.writer.as_mut().filter(|writer| writer.leader() == leader) else {
            return self.work.apply(Event::Unseated);
        };
        let committed = writer.commit(key.step, &receipts).await.map(|_| ());
        match committed {
            Err(error) if error.is_too_late() => self.is_impossible(key, &error),
            // The receipts do not fit together.
            Err(error)
                if !is_refusal(&error)
                    && !matches!(error.kind(), ErrorKind::Storage | ErrorKind::UnsafeStore | ErrorKind::OutcomeUnknown) =>
            {
                self.is_impossible(key, &error);
            }
            Err(error) if error.kind() == ErrorKind::OutcomeUnknown => {
                // This writer has stopped.
                self.writer = None;
                self.work.apply(Event::Unseated);
            }
            Err(error) if is_refusal(&error) => match self.read_log().await {
                // The log would admit the step, so the receipts or the parent are at fault.
                Ok(view) if may_add(&view, leader, key) => self.is_impossible(key, &error),
                Ok(view) => self.work.apply(Event::Refused(view)),
                Err(error) => self.fail(Request::Append, &error),
            },
            other => self.after_append(other, Event::Committed).await,
        }
    }

    fn is_impossible(&mut self, key: SessionStep, error: &Error) {
        let message = format!("step {} cannot be committed: {error}", key.step);
        self.reasons.insert(key, message.clone());
        while self.reasons.len() > MAX_REASONS {
            self.reasons.pop_first();
        }
        self.work.run.apply(RunEvent::UploadFailed { tier: 0, message });
        self.work.apply(Event::Impossible(key));
    }
}

/// Has the store accept a session: notes the ranks that could not be noted when they started. Fails with `Fenced` or
/// `Conflict` if the session must end.
async fn accept(work: &HostWork, store: &Store, notes: &HostNotes, after: u64) -> Result<()> {
    let session = work.hosts.session;
    let unaccepted = notes.known.as_ref().filter(|_| !notes.is_accepted);
    if unaccepted.is_none() && notes.unnoted.is_empty() {
        return Ok(());
    }
    if let Some(known) = unaccepted {
        let of_store = |error: Error| error.object(store.url());
        // Also tells whether there is a store: none is made here.
        known.check_run(store.history().run().await?).map_err(of_store)?;
        let log = SessionLog::open(store).await?;
        if log.leadership().of(session).is_none() {
            known.check_log(log.sequence(), log.leadership()).map_err(of_store)?;
        }
        if SessionExchange::begin(store, session, after).await? != after {
            let message = "hosts of this start of the job have begun after different entries of the log";
            return Err(of_store(Error::new(ErrorKind::Conflict, message).clause("manifest 6.4")));
        }
    }
    for (rank, process) in &notes.unnoted {
        SessionExchange::start_rank(store, session, *rank, *process).await?;
    }
    let noted = |now: &mut HostNotes| {
        now.unnoted.retain(|rank, _| !notes.unnoted.contains_key(rank));
        now.is_accepted = true;
    };
    HostNotes::update_current(&work.run.folder, session, noted).map(|_| ())
}

/// Whether the log, or the store as it is now, does not admit an entry.
fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Conflict)
}

fn may_add(view: &LogView, leader: Leader, key: SessionStep) -> bool {
    let leading = view.leadership.of(leader.session);
    leading.is_some_and(|leading| view.leadership.may_add(leading.writer, leader, key.step).is_ok())
}

/// Number of steps that cannot be committed, to remember until they are given up.
const MAX_REASONS: usize = 16;

/// Interval of looking at the log and at receipts, while a step waits.
const TICK: Duration = Duration::from_millis(200);
/// Time between attempts to have a session accepted that began without the store.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);
/// Time between attempts to copy the log into the mirror.
const FOLLOW_RETRY: Duration = Duration::from_secs(5);
