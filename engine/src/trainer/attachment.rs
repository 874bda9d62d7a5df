//! How a trainer is attached to the agent: requests, and the progress that the agent reports.
//!
//! If the agent dies, the trainer starts another one, unless [`OnAgentLoss::Fail`] is set. The new agent finds all
//! states in shared memory, so no request needs to be repeated except the last one.

use std::collections::BTreeMap;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result, with_absolute_path};

use crate::ipc::agent_process::AgentProcess;
use crate::ipc::connection::{AgentCommand, Answer, Connection, REPLY_TIMEOUT};
use crate::ipc::messages::{Attach, AttachMode, Progress, Reply, Request, SaveNote, Until};
use crate::os::folders::EngineFolder;
use crate::os::interruption::Interruption;
use crate::run::options::{EngineOptions, OnAgentLoss};
use crate::run::spec::{RunSpec, environment_of};

/// A trainer's attachment to the agent.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub spec: RunSpec,
    rank: u32,
    agent: AgentLink,
    on_agent_loss: OnAgentLoss,
    interruption: Interruption,
    /// While it is set, no save waits for a slot.
    is_ending: Arc<AtomicBool>,
    /// Last progress that the agent reported.
    progress: Progress,
    /// Generation of the last save, or of the newest state that a predecessor left; 0 if there is none.
    last_save: u64,
    /// Whether memory was out of date when the job began, and still is.
    is_stale: bool,
    /// Whether there is memory, and no store that answered has anything newer.
    pub trusts_memory: bool,
    /// Newest snapshot of each tier, by URL, if memory was out of date.
    latest: BTreeMap<String, Option<Id>>,
    /// Whether this trainer saves no more.
    pub saves_no_more: bool,
    /// Whether the credentials were renewed since this process attached.
    has_new_credentials: bool,
}

impl Attachment {
    pub(crate) fn new(spec: RunSpec, folder: EngineFolder, options: &EngineOptions, interruption: Interruption) -> Self {
        let command = AgentCommand::new(&options.agent, options.agent_idle_exit);
        Self {
            spec,
            rank: options.rank,
            agent: AgentLink { command, folder, connection: None, process: None, owes_wait: false, deaths: Deaths::default() },
            on_agent_loss: options.on_agent_loss,
            interruption,
            is_ending: Arc::default(),
            progress: Progress::default(),
            last_save: 0,
            is_stale: false,
            trusts_memory: false,
            latest: BTreeMap::new(),
            saves_no_more: false,
            has_new_credentials: false,
        }
    }

    /// Sets a check that can end a wait with an error.
    pub(crate) fn set_interruption(&mut self, check: impl FnMut() -> Result<()> + Send + Sync + 'static) {
        self.interruption = Interruption::new(check);
    }

    pub(crate) fn interruption(&self) -> &Interruption {
        &self.interruption
    }

    /// Sets a flag. While it is set, no save waits for a slot.
    pub(crate) fn set_ending(&mut self, is_ending: Arc<AtomicBool>) {
        self.is_ending = is_ending;
    }

    /// Whether this process is about to end, so that no save may wait for a slot.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    pub(crate) fn last_save(&self) -> u64 {
        self.last_save
    }

    pub(crate) fn set_last_save(&mut self, generation: u64) {
        self.last_save = generation;
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// Declares that memory is out of date. `latest`: the newest snapshot of each tier.
    pub(crate) fn mark_stale(&mut self, latest: BTreeMap<String, Option<Id>>) {
        (self.is_stale, self.latest) = (true, latest);
    }

    /// Declares that stale memory has been removed. The agent may still have to remove it when it answers ranks other
    /// than 0.
    pub(crate) fn memory_was_cleared(&mut self) {
        self.is_stale &= self.rank > 0;
    }

    /// Attaches to the agent, and starts one if necessary. Waits for an agent that is about to end.
    pub(crate) fn attach(&mut self, mode: AttachMode) -> Result<Progress> {
        self.attach_by(mode, None)
    }

    /// The same, but fails if the agent has not answered by `deadline`.
    fn attach_by(&mut self, mode: AttachMode, deadline: Option<Instant>) -> Result<Progress> {
        let request = Request::Attach(Box::new(Attach {
            spec: self.spec.clone(),
            rank: self.rank,
            mode,
            trusts_memory: self.trusts_memory,
            has_new_credentials: self.has_new_credentials,
            session: self.progress.session,
            latest: self.latest.clone(),
        }));
        let begun = Instant::now();
        let mut attempts = 0;
        loop {
            let error = match self.agent.request(&request, reply_by(Duration::ZERO, deadline), &self.interruption) {
                Ok(progress) => {
                    self.has_new_credentials = false;
                    self.progress.session = progress.session;
                    return Ok(progress);
                }
                Err(e) => e,
            };
            self.agent.connection = None;
            // Ends the attempts if the caller was interrupted.
            self.interruption.check()?;
            attempts += 1;
            let may_retry = match error.kind() {
                // The agent uploads its last snapshots and ends. The next attempt starts another agent.
                ErrorKind::Conflict => begun.elapsed() < DRAIN_TIMEOUT,
                ErrorKind::Storage => attempts < 3,
                _ => false,
            };
            if !may_retry || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(error);
            }
            if attempts == 1 {
                tracing::warn!(run = self.spec.run, %error, "cannot attach to the agent; trying again");
            }
            self.interruption.sleep(Duration::from_millis(200))?;
        }
    }

    /// Opens the tiers with renewed settings: those of the environment as it is now, and these. Tells the agent.
    pub(crate) fn renew(&mut self, config: &BTreeMap<String, String>) -> Result<()> {
        let before = self.spec.clone();
        for (name, value) in config {
            self.spec.config.insert(name.clone(), with_absolute_path(name, value.clone()));
        }
        self.spec.environment = Some(environment_of(&self.spec.tiers));
        if !self.spec.is_same_run(&before) {
            let message = format!("only credentials can be renewed: {} has changed", self.spec.difference(&before));
            self.spec = before;
            return Err(Error::invalid(message));
        }
        self.has_new_credentials = true;
        self.attach(AttachMode::Continue).map(|_| ())
    }

    /// Reports a save to the agent.
    pub(crate) fn notify_saved(&mut self, save: SaveNote) -> Result<()> {
        self.notify(Request::SavedSnapshot { key: self.spec.key.clone(), rank: self.rank, save })
    }

    /// Waits until a save has reached a stage or failed; returns the progress, which may be unchanged after the
    /// timeout. An agent that does not answer in time is a problem of the progress, and no error.
    pub(crate) fn wait(&mut self, generation: u64, until: Until, timeout: Duration) -> Result<Progress> {
        let timeout = timeout.min(MAX_WAIT);
        let end = Instant::now() + timeout;
        let deadline = Instant::now() + timeout + ANSWER_TIME;
        loop {
            if self.agent.owes_wait && self.agent.connection.as_ref().is_some_and(|connection| !connection.is_idle()) {
                // The agent answers one request after the other.
                match self.agent.receive(deadline, &self.interruption) {
                    Some(Answer::Silence) => return Ok(self.silent_progress()),
                    Some(Answer::Interrupted(error)) => return Err(error),
                    _ => {}
                }
            }
            self.agent.owes_wait = false;
            let left = end.saturating_duration_since(Instant::now());
            let request = self.wait_request(generation, until, u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            let error = match self.agent.request_connected(&request, deadline, &self.interruption) {
                Some(Answer::Silence) => {
                    self.agent.owes_wait = true;
                    return Ok(self.silent_progress());
                }
                Some(answer) => match progress_of(answer) {
                    Ok(progress) => return self.on_reply(progress),
                    Err(error) if error.kind() == ErrorKind::NotFound => error,
                    Err(error) => return Err(error),
                },
                None => agent_is_gone(),
            };
            if self.on_agent_loss == OnAgentLoss::Fail {
                return Err(error);
            }
            tracing::warn!(run = self.spec.run, "the agent is gone; starting another");
            match self.attach_by(AttachMode::Continue, Some(deadline)) {
                Ok(progress) => _ = self.on_reply(progress)?,
                Err(error) if error.kind() == ErrorKind::Storage && Instant::now() >= deadline => {
                    let problem = self.agent.describe_deaths().unwrap_or_else(|| error.message().to_owned());
                    self.progress.problem = Some(problem);
                    return Ok(self.progress.clone());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Asks the agent for the progress now.
    pub(crate) fn refresh(&mut self) -> Result<Progress> {
        self.request(self.wait_request(0, Until::Encoded, 0))
    }

    /// The last progress, with the problem that the agent does not answer.
    fn silent_progress(&self) -> Progress {
        let process = self.agent.connection.as_ref().and_then(|connection| connection.agent_pid().ok());
        let process = process.map_or_else(String::new, |pid| format!(" (process {})", pid.as_raw_nonzero()));
        let problem = format!("the agent{process} does not answer; it may be stopped, or wait for a storage that hangs");
        Progress { problem: Some(problem), ..self.progress.clone() }
    }

    /// Tells the agent that the run has finished and its memory can be freed.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.request(Request::Detach { key: self.spec.key.clone(), rank: self.rank, clear: true }).map(|_| ())
    }

    /// Tells the agent that this trainer waits for memory, so that it may remove old snapshots. Does nothing while the
    /// agent still owes a reply.
    pub(crate) fn notify_waiting(&mut self) -> Result<()> {
        match self.agent.connection.as_ref().is_none_or(Connection::is_idle) {
            true => self.notify(self.wait_request(0, Until::Encoded, 0)),
            false => Ok(()),
        }
    }

    /// Sleeps for a moment during a wait for the agent. About once per second, also requests the progress; returns
    /// whether it did. Fails if the caller was interrupted or another job has taken the store over.
    pub(crate) fn pause(&mut self, pause: &mut Pause) -> Result<bool> {
        let is_due = pause.last_request.elapsed() >= REQUEST_INTERVAL;
        if is_due {
            let progress = self.wait(0, Until::Encoded, Duration::ZERO)?;
            if progress.problem.is_some() && progress.problem != pause.reported_problem {
                tracing::warn!(run = self.spec.run, problem = progress.problem, "a save waits for shared memory");
                pause.reported_problem = progress.problem;
            }
            pause.last_request = Instant::now();
        }
        self.interruption.check()?;
        std::thread::sleep(POLL_INTERVAL);
        Ok(is_due)
    }

    /// Receives progress that has arrived, without waiting. A lost agent shows only at the next request.
    pub(crate) fn poll_replies(&mut self) -> Result<()> {
        match self.agent.poll_replies() {
            Some(progress) => self.on_reply(progress).map(|_| ()),
            None => Ok(()),
        }
    }

    fn wait_request(&self, generation: u64, until: Until, timeout_ms: u64) -> Request {
        let key = self.spec.key.clone();
        let rank = self.rank;
        let durable = until == Until::Durable;
        let replicated = until == Until::Replicated;
        Request::Wait { key, rank, generation, durable, replicated, timeout_ms, is_last: self.saves_no_more }
    }

    /// Sends a request about the attached run and receives the reply. Attaches again if the agent is gone or does not
    /// know the run.
    fn request(&mut self, request: Request) -> Result<Progress> {
        let answer = self.agent.request_connected(&request, reply_by(Duration::ZERO, None), &self.interruption);
        match answer.map(progress_of) {
            Some(Err(e)) if e.kind() == ErrorKind::NotFound => self.reconnect(&request, e),
            Some(answer) => self.on_reply(answer?),
            None => self.reconnect(&request, agent_is_gone()),
        }
    }

    /// Sends a request about the attached run without waiting for its reply.
    fn notify(&mut self, request: Request) -> Result<()> {
        match self.agent.connection.as_mut().map(|connection| connection.notify(&request)) {
            Some(Ok(())) => self.poll_replies(),
            _ => {
                self.agent.connection = None;
                self.reconnect(&request, agent_is_gone()).map(|_| ())
            }
        }
    }

    /// Attaches to another agent, if allowed, and repeats the request.
    fn reconnect(&mut self, request: &Request, lost: Error) -> Result<Progress> {
        if self.on_agent_loss == OnAgentLoss::Fail {
            return Err(lost);
        }
        tracing::warn!(run = self.spec.run, "the agent is gone; starting another");
        self.attach(AttachMode::Continue)?;
        let progress = self.agent.request(request, reply_by(Duration::ZERO, None), &self.interruption)?;
        self.on_reply(progress)
    }

    /// Stores the reported progress. Fails with `Fenced` if another job has taken the store over.
    fn on_reply(&mut self, progress: Progress) -> Result<Progress> {
        if progress.encoded.max(progress.durable) > self.progress.encoded.max(self.progress.durable) {
            self.agent.deaths = Deaths::default();
        }
        let problem = progress.problem.clone().or_else(|| self.agent.describe_deaths());
        let progress = Progress { problem, ..progress };
        self.progress = progress.clone();
        // The agent removes stale memory before it encodes a save.
        self.is_stale &= self.last_save == 0 || progress.encoded < self.last_save;
        match &progress.stopped {
            None => Ok(progress),
            Some(why) => Err(Error::new(ErrorKind::Fenced, format!("this run was stopped: {why}"))),
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let request = Request::Detach { key: self.spec.key.clone(), rank: self.rank, clear: false };
        // An agent that hangs sees the end of the connection later.
        let _ = self.agent.request_connected(&request, Instant::now() + GOODBYE, &Interruption::default());
    }
}

/// Deadline of a reply to a request that waits for `wait` at most.
fn reply_by(wait: Duration, deadline: Option<Instant>) -> Instant {
    let latest = Instant::now() + wait + REPLY_TIMEOUT;
    deadline.map_or(latest, |deadline| deadline.min(latest))
}

/// The progress that a reply tells.
fn progress_of(answer: Answer) -> Result<Progress> {
    match answer {
        Answer::Reply(reply) => reply.and_then(Reply::progress),
        Answer::Silence => Err(Error::new(ErrorKind::Storage, "the agent does not answer")),
        Answer::Interrupted(error) => Err(error),
    }
}

/// The connection to the agent, and its process if this process started it.
#[derive(Debug)]
struct AgentLink {
    command: AgentCommand,
    folder: EngineFolder,
    connection: Option<Connection>,
    process: Option<AgentProcess>,
    /// Whether the agent has not answered a wait yet, although its time is over.
    owes_wait: bool,
    deaths: Deaths,
}

/// Agents that have ended while this process was connected, since the last save that one has encoded.
#[derive(Debug, Clone, Default)]
struct Deaths {
    count: u32,
    last: Option<Instant>,
    /// How the last one has ended that this process had started.
    ended: Option<ExitStatus>,
}

impl AgentLink {
    /// Sends a request; connects first if necessary. If several agents have died, waits before it starts another one.
    fn request(&mut self, request: &Request, deadline: Instant, interruption: &Interruption) -> Result<Progress> {
        if self.connection.is_none() {
            let pause = self.deaths.pause();
            interruption.sleep(pause.min(deadline.saturating_duration_since(Instant::now())))?;
            let (connection, process) = self.command.connect(&self.folder, interruption)?;
            (self.connection, self.owes_wait) = (Some(connection), false);
            if process.is_some() {
                let before = std::mem::replace(&mut self.process, process);
                self.deaths.ended = before.as_ref().and_then(AgentProcess::ended);
            }
        }
        let answer = self.request_connected(request, deadline, interruption);
        if matches!(answer, Some(Answer::Silence)) {
            self.connection = None;
        }
        answer.map_or_else(|| Err(agent_is_gone()), progress_of)
    }

    /// Sends a request over the existing connection; `None` if the connection is broken.
    fn request_connected(&mut self, request: &Request, deadline: Instant, interruption: &Interruption) -> Option<Answer> {
        let sent = self.connection.as_mut()?.notify(request);
        match sent {
            Ok(()) => self.receive(deadline, interruption),
            Err(error) => {
                self.lose(&error);
                None
            }
        }
    }

    /// Receives the reply to the last request; `None` if the connection is broken.
    fn receive(&mut self, deadline: Instant, interruption: &Interruption) -> Option<Answer> {
        match self.connection.as_mut()?.reply_by(deadline, interruption) {
            Ok(answer) => Some(answer),
            Err(error) => {
                self.lose(&error);
                None
            }
        }
    }

    /// Notes that the connection is broken.
    fn lose(&mut self, error: &std::io::Error) {
        tracing::debug!(%error, "the connection to the agent is broken");
        (self.connection, self.owes_wait) = (None, false);
        self.deaths = Deaths { count: self.deaths.count.saturating_add(1), last: Some(Instant::now()), ended: None };
    }

    /// The problem that agents die one after the other; `None` if at most one has died.
    fn describe_deaths(&self) -> Option<String> {
        if self.deaths.count < 2 {
            return None;
        }
        let ended = self.deaths.ended.map_or_else(String::new, |status| format!(", the last one with {status}"));
        Some(format!(
            "{} agents have ended before they had encoded a save{ended}; the system may lack memory. See {}",
            self.deaths.count,
            self.folder.agent_log().display()
        ))
    }

    /// The newest progress that has arrived. Closes the connection after an error.
    fn poll_replies(&mut self) -> Option<Progress> {
        let error = match self.connection.as_mut()?.poll_replies() {
            Ok(None) => return None,
            Ok(Some(reply)) => match reply.and_then(Reply::progress) {
                Ok(progress) => return Some(progress),
                // For example, an agent that does not know the run.
                Err(error) => error.to_string(),
            },
            Err(error) => {
                self.lose(&error);
                return None;
            }
        };
        tracing::debug!(error, "the connection to the agent is closed");
        self.connection = None;
        None
    }
}

impl Deaths {
    /// Time to wait before another agent is started.
    fn pause(&self) -> Duration {
        let doublings = self.count.saturating_sub(2).min(8);
        let pause = if self.count < 2 { Duration::ZERO } else { FIRST_PAUSE * 2u32.pow(doublings) };
        pause.min(LONGEST_PAUSE).saturating_sub(self.last.map_or(Duration::ZERO, |last| last.elapsed()))
    }
}

fn agent_is_gone() -> Error {
    Error::new(ErrorKind::Storage, "the agent is gone")
}

/// State of a wait for the agent.
pub(crate) struct Pause {
    last_request: Instant,
    reported_problem: Option<String>,
}

impl Pause {
    pub(crate) fn new() -> Self {
        Self { last_request: Instant::now(), reported_problem: None }
    }
}

/// Interval between looks at the arena while all slots are taken.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Interval between requests to the agent during such a wait.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which a trainer waits for an agent that is about to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the agent to answer, in addition to the time that a wait asks for.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Time for the agent to take note of the end of a trainer.
const GOODBYE: Duration = Duration::from_secs(5);
/// Time before another agent is started after two have died. It doubles with each death.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Longest wait of one request.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);
