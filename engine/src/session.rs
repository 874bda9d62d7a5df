//! A trainer's session with the agent: attaching, requests, and the progress that the agent reports.
//!
//! If the agent dies, the session starts another one, unless [`OnAgentLoss::Fail`] is set. The new agent finds all
//! states in shared memory, so no request needs to be repeated except the last one.

use std::collections::BTreeMap;
use std::process::Child;
use std::time::{Duration, Instant};

use tensorcask::wire::Id;
use tensorcask::{Error, ErrorKind, Result};

use crate::connection::{AgentCommand, Connection};
use crate::folders::EngineFolder;
use crate::options::{EngineOptions, OnAgentLoss};
use crate::protocol::{Attach, AttachMode, Progress, Reply, Request, SaveNote, Until};
use crate::run_spec::RunSpec;

/// A session with the agent.
#[derive(Debug)]
pub(crate) struct Session {
    pub spec: RunSpec,
    rank: u32,
    agent: AgentLink,
    on_agent_loss: OnAgentLoss,
    interruption: Interruption,
    /// Last progress that the agent reported.
    progress: Progress,
    /// Generation of the last save, or of the newest state that a predecessor left; 0 if there is none.
    last_save: u64,
    /// Whether memory was out of date when the session began, and still is.
    is_stale: bool,
    /// Whether there is memory, and no store that answered has anything newer.
    pub trusts_memory: bool,
    /// Newest snapshot of each tier, by URL, if memory was out of date.
    latest: BTreeMap<String, Option<Id>>,
    /// Whether this trainer saves no more.
    pub saves_no_more: bool,
}

impl Session {
    pub(crate) fn new(spec: RunSpec, folder: EngineFolder, options: &EngineOptions) -> Self {
        let command = AgentCommand::new(&options.agent, options.agent_idle_exit);
        Self {
            spec,
            rank: options.rank,
            agent: AgentLink { command, folder, connection: None, child: None },
            on_agent_loss: options.on_agent_loss,
            interruption: Interruption(None),
            progress: Progress::default(),
            last_save: 0,
            is_stale: false,
            trusts_memory: false,
            latest: BTreeMap::new(),
            saves_no_more: false,
        }
    }

    /// Sets a check that can end a wait with an error.
    pub(crate) fn set_interruption(&mut self, check: impl FnMut() -> Result<()> + Send + Sync + 'static) {
        self.interruption = Interruption(Some(Box::new(check)));
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
        let request = Request::Attach(Box::new(Attach {
            spec: self.spec.clone(),
            rank: self.rank,
            pid: std::process::id(),
            mode,
            trusts_memory: self.trusts_memory,
            session: self.progress.session,
            latest: self.latest.clone(),
        }));
        let (begun, mut attempts) = (Instant::now(), 0);
        loop {
            let error = match self.agent.request(&request, Duration::ZERO) {
                Ok(progress) => {
                    self.progress.session = progress.session;
                    return Ok(progress);
                }
                Err(e) => e,
            };
            self.agent.connection = None;
            attempts += 1;
            let may_retry = match error.kind() {
                // The agent uploads its last snapshots and ends. The next attempt starts another agent.
                ErrorKind::Conflict => begun.elapsed() < DRAIN_TIMEOUT,
                ErrorKind::Storage => attempts < 3,
                _ => false,
            };
            if !may_retry {
                return Err(error);
            }
            if attempts == 1 {
                tracing::warn!(run = self.spec.run, %error, "cannot attach to the agent; trying again");
            }
            self.interruption.check()?;
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Reports a save to the agent.
    pub(crate) fn notify_saved(&mut self, save: SaveNote) -> Result<()> {
        self.notify(Request::SavedSnapshot { key: self.spec.key.clone(), rank: self.rank, save })
    }

    /// Waits until a save has reached a stage or failed; returns the progress, which may be unchanged after the
    /// timeout.
    pub(crate) fn wait(&mut self, generation: u64, until: Until, timeout: Duration) -> Result<Progress> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).min(MAX_WAIT_MS);
        self.request(self.wait_request(generation, until, timeout_ms))
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
            let progress = self.request(self.wait_request(0, Until::Encoded, 0))?;
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
        let (key, rank) = (self.spec.key.clone(), self.rank);
        let (durable, replicated) = (until == Until::Durable, until == Until::Replicated);
        Request::Wait { key, rank, generation, durable, replicated, timeout_ms, is_last: self.saves_no_more }
    }

    /// Sends a request about the attached run and receives the reply. Attaches again if the agent is gone or does not
    /// know the run.
    fn request(&mut self, request: Request) -> Result<Progress> {
        let wait = match &request {
            Request::Wait { timeout_ms, .. } => Duration::from_millis(*timeout_ms),
            _ => Duration::ZERO,
        };
        match self.agent.request_connected(&request, wait) {
            Some(Err(e)) if e.kind() == ErrorKind::NotFound => self.reconnect(&request, wait, e),
            Some(answer) => self.on_reply(answer?),
            None => self.reconnect(&request, wait, agent_is_gone()),
        }
    }

    /// Sends a request about the attached run without waiting for its reply.
    fn notify(&mut self, request: Request) -> Result<()> {
        match self.agent.connection.as_mut().map(|connection| connection.notify(&request)) {
            Some(Ok(())) => self.poll_replies(),
            _ => {
                self.agent.connection = None;
                self.reconnect(&request, Duration::ZERO, agent_is_gone()).map(|_| ())
            }
        }
    }

    /// Attaches to another agent, if allowed, and repeats the request.
    fn reconnect(&mut self, request: &Request, wait: Duration, lost: Error) -> Result<Progress> {
        if self.on_agent_loss == OnAgentLoss::Fail {
            return Err(lost);
        }
        tracing::warn!(run = self.spec.run, "the agent is gone; starting another");
        self.attach(AttachMode::Continue)?;
        let progress = self.agent.request(request, wait)?;
        self.on_reply(progress)
    }

    /// Stores the reported progress. Fails with `Fenced` if another job has taken the store over.
    fn on_reply(&mut self, progress: Progress) -> Result<Progress> {
        self.progress = progress.clone();
        // The agent removes stale memory before it encodes a save.
        self.is_stale &= self.last_save == 0 || progress.encoded < self.last_save;
        match &progress.stopped {
            None => Ok(progress),
            Some(why) => Err(Error::new(ErrorKind::Fenced, format!("this run was stopped: {why}"))),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let request = Request::Detach { key: self.spec.key.clone(), rank: self.rank, clear: false };
        let _ = self.agent.request_connected(&request, Duration::ZERO);
        self.agent.reap();
    }
}

/// The connection to the agent, and its process if this process started it.
#[derive(Debug)]
struct AgentLink {
    command: AgentCommand,
    folder: EngineFolder,
    connection: Option<Connection>,
    child: Option<Child>,
}

impl AgentLink {
    /// Sends a request; connects first if necessary.
    fn request(&mut self, request: &Request, wait: Duration) -> Result<Progress> {
        if self.connection.is_none() {
            self.reap();
            let (connection, child) = self.command.connect(&self.folder)?;
            self.connection = Some(connection);
            self.child = child.or(self.child.take());
        }
        self.request_connected(request, wait).unwrap_or_else(|| Err(agent_is_gone()))
    }

    /// Sends a request over the existing connection; `None` if the connection is broken.
    fn request_connected(&mut self, request: &Request, wait: Duration) -> Option<Result<Progress>> {
        match self.connection.as_mut()?.request(request, wait) {
            Ok(reply) => Some(reply.and_then(Reply::progress)),
            Err(error) => {
                tracing::debug!(%error, "the connection to the agent is broken");
                self.connection = None;
                None
            }
        }
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
            Err(error) => error.to_string(),
        };
        tracing::debug!(error, "the connection to the agent is closed");
        self.connection = None;
        None
    }

    /// Waits for an agent process that this process started and that has ended, so that it does not stay a zombie.
    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && !matches!(child.try_wait(), Ok(None))
        {
            self.child = None;
        }
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

/// A check that can end a wait.
struct Interruption(Option<Box<dyn FnMut() -> Result<()> + Send + Sync>>);

impl Interruption {
    fn check(&mut self) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |check| check())
    }
}

impl std::fmt::Debug for Interruption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Interruption({})", self.0.is_some())
    }
}

/// Interval between looks at the arena while all slots are taken.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Interval between requests to the agent during such a wait.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which a trainer waits for an agent that is about to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait of one request.
const MAX_WAIT_MS: u64 = 24 * 3600 * 1000;
