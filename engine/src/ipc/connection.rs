//! The client side of the agent's socket, and the start of an agent process.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::socket::UnixCredentials;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::process::{Pid, Signal, kill_process};
use tensorcask::{Error, ErrorKind, Result};

use super::agent_process::AgentProcess;
use super::framing::{receive, send};
use super::messages::{Reply, Request};
use crate::os::folders::EngineFolder;
use crate::os::interruption::{INTERVAL, Interruption};
use crate::run::status::AgentStatus;

/// A connection to the agent.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: BufReader<UnixStream>,
    /// Number of replies that have not been read yet.
    unread: usize,
}

impl Connection {
    /// Process id of the agent. Fails if the agent runs in another PID namespace, where this process cannot name it.
    pub(crate) fn agent_pid(&self) -> std::io::Result<Pid> {
        Pid::from_raw(peer_of(self.stream.get_ref())?.pid()).ok_or_else(|| {
            let message = "the agent runs in another PID namespace, as in another container, so its process has no number here";
            std::io::Error::new(std::io::ErrorKind::Unsupported, message)
        })
    }

    /// Connects to a listening agent.
    pub(crate) fn open(folder: &EngineFolder) -> std::io::Result<Self> {
        let stream = UnixStream::connect(folder.socket())?;
        if peer_of(&stream)?.uid() != rustix::process::getuid().as_raw() {
            return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, "the agent's socket belongs to another user's process"));
        }
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream), unread: 0 })
    }

    /// Receives the reply to the last request. The error is one of the connection.
    pub(crate) fn reply_by(&mut self, deadline: Instant, interruption: &Interruption) -> std::io::Result<Answer> {
        while self.unread > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            self.stream.get_ref().set_read_timeout(Some(left.clamp(Duration::from_millis(1), INTERVAL)))?;
            match self.stream.fill_buf().map(|_| ()) {
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                    if let Err(error) = interruption.check() {
                        return Ok(Answer::Interrupted(error));
                    }
                    if left.is_zero() {
                        return Ok(Answer::Silence);
                    }
                    continue;
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                other => other?,
            }
            self.stream.get_ref().set_read_timeout(Some(REPLY_TIMEOUT))?;
            let reply = receive(&mut self.stream)?;
            self.unread -= 1;
            if self.unread == 0 {
                return Ok(Answer::Reply(reply));
            }
        }
        Ok(Answer::Silence)
    }

    /// Sends a request that waits for `wait` at most, and receives its reply. The outer error is one of the connection.
    pub(crate) fn request(&mut self, request: &Request, wait: Duration) -> std::io::Result<Result<Reply>> {
        self.notify(request)?;
        self.stream.get_ref().set_read_timeout(Some(wait.saturating_add(REPLY_TIMEOUT)))?;
        loop {
            let reply = receive(&mut self.stream)?;
            self.unread -= 1;
            if self.unread == 0 {
                return Ok(reply);
            }
        }
    }

    /// Sends a request; [`poll_replies`](Self::poll_replies) receives its reply.
    pub(crate) fn notify(&mut self, request: &Request) -> std::io::Result<()> {
        send(self.stream.get_mut(), request)?;
        self.unread += 1;
        Ok(())
    }

    /// Whether all replies have been received.
    pub(crate) fn is_idle(&self) -> bool {
        self.unread == 0
    }

    /// Receives all replies that have arrived, without waiting; returns the newest.
    pub(crate) fn poll_replies(&mut self) -> std::io::Result<Option<Result<Reply>>> {
        let mut newest = None;
        while self.unread > 0 {
            self.stream.get_ref().set_nonblocking(true)?;
            let has = self.stream.fill_buf().map(|_| ());
            self.stream.get_ref().set_nonblocking(false)?;
            match has {
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                other => other?,
            }
            self.stream.get_ref().set_read_timeout(Some(REPLY_TIMEOUT))?;
            newest = Some(receive(&mut self.stream)?);
            self.unread -= 1;
        }
        Ok(newest)
    }
}

/// Outcome of a request.
pub(crate) enum Answer {
    Reply(Result<Reply>),
    /// No reply has come in time. It may still come.
    Silence,
    /// The caller was interrupted.
    Interrupted(Error),
}

/// Command that starts an agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentCommand {
    command: Vec<String>,
    idle_exit: Duration,
}

impl AgentCommand {
    pub(crate) fn new(command: &[String], idle_exit: Duration) -> Self {
        let named = || std::env::var(PROGRAM_VARIABLE).ok().filter(|program| !program.is_empty());
        let command = match command {
            [] => vec![named().unwrap_or_else(|| "tensorcask".to_owned()), "agent".to_owned()],
            words => words.to_vec(),
        };
        Self { command, idle_exit }
    }

    /// Connects to the agent; starts one if none listens.
    pub(crate) fn connect(&self, folder: &EngineFolder, interruption: &Interruption) -> Result<(Connection, Option<AgentProcess>)> {
        if let Ok(connection) = Connection::open(folder) {
            return Ok((connection, None));
        }
        let mut child = self.start(folder)?;
        let begun = Instant::now();
        loop {
            match Connection::open(folder) {
                Ok(connection) => return Ok((connection, Some(child))),
                // Another agent may have taken the lock and not listen yet.
                Err(e) if begun.elapsed() > START_TIMEOUT => {
                    let message = format!("cannot connect to the agent: {e}{}", log_tail(&folder.agent_log()));
                    return Err(Error::new(ErrorKind::Storage, message).object(folder.socket().display().to_string()));
                }
                Err(_) => {}
            }
            interruption.check()?;
            match child.ended() {
                Some(status) if !status.success() => {
                    let message = format!("the agent ended immediately with {status}{}", log_tail(&folder.agent_log()));
                    return Err(Error::new(ErrorKind::Storage, message).object(self.command.join(" ")));
                }
                // Another agent has the lock. It is about to listen, or about to end.
                Some(_) => {
                    std::thread::sleep(Duration::from_millis(100));
                    child = self.start(folder)?;
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn start(&self, folder: &EngineFolder) -> Result<AgentProcess> {
        let log_name = folder.agent_log();
        let fail = |e: std::io::Error| Error::io(log_name.display().to_string(), e);
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&log_name).map_err(fail)?;
        let both = log.try_clone().map_err(fail)?;
        let Some((program, arguments)) = self.command.split_first() else {
            return Err(Error::invalid("the option `agent` names no program"));
        };
        let mut command = Command::new(program);
        command.args(arguments).arg("--folder").arg(folder.root()).arg("--detach");
        command.arg("--idle-exit").arg(format!("{}s", self.idle_exit.as_secs().max(1)));
        // The agent must not keep a file system busy that a user may want to unmount.
        command.current_dir("/").stdin(Stdio::null()).stdout(log).stderr(both);
        // It trusts what the system trusts, and for each run what that run's variables name.
        command.env_remove("SSL_CERT_FILE").env_remove("SSL_CERT_DIR");
        if std::env::var_os(PURGE_DELAY_VARIABLE).is_none() {
            command.env(PURGE_DELAY_VARIABLE, PURGE_DELAY_MS);
        }
        let child = command.spawn().map_err(|e| {
            let message = format!(
                "the agent could not be started: {e}. Install the `tensorcask` command (pip install ./python, in a clone of the repository), set \
                 {PROGRAM_VARIABLE} to its path, or start `tensorcask agent` yourself"
            );
            Error::new(ErrorKind::NotFound, message).object(program.as_str()).source(e)
        })?;
        AgentProcess::watch(child).map_err(fail)
    }
}

/// The process at the other end. Not by rustix 1.1, whose type cannot hold the 0 of a process in another PID namespace.
fn peer_of(stream: &UnixStream) -> std::io::Result<UnixCredentials> {
    Ok(nix::sys::socket::getsockopt(stream, PeerCredentials)?)
}

/// After so many milliseconds, the allocator of the agent returns memory that is free. With its default of a second, an agent that
/// encodes often would keep the buffers of a whole save; with 0, encoding takes half as long again.
const PURGE_DELAY_VARIABLE: &str = "MIMALLOC_PURGE_DELAY";
const PURGE_DELAY_MS: &str = "50";

/// Formats the last lines of a log, to append to an error message.
fn log_tail(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = std::fs::File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(500)))?;
        let mut bytes = Vec::new();
        file.take(500).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    match read() {
        Ok(words) if !words.is_empty() => format!("; its log ends with: {words}"),
        _ => String::new(),
    }
}

/// Sends a request to the agent of a folder, and receives its reply.
fn request(folder: Option<&Path>, request: &Request) -> Result<Reply> {
    connect(folder)?.request(request, Duration::ZERO).map_err(|e| Error::io("the agent's socket", e))?
}

fn request_status(folder: Option<&Path>, asked: &Request) -> Result<AgentStatus> {
    match request(folder, asked)? {
        Reply::Status(status) => Ok(*status),
        other => Err(unexpected(other)),
    }
}

/// The error that a reply reports, or that it is a reply to another request.
fn unexpected(reply: Reply) -> Error {
    reply.progress().err().unwrap_or_else(|| Error::corrupt("the agent sent a reply to another request"))
}

fn connect(folder: Option<&Path>) -> Result<Connection> {
    let none = || Error::not_found("no agent runs here. A trainer starts one, or run `tensorcask agent`");
    let found = EngineFolder::find(folder).ok_or_else(none)?;
    Connection::open(&found).map_err(|e| none().object(found.socket().display().to_string()).source(e))
}

/// Reports the status of the agent of a folder, or of the default folder.
pub fn agent_status(folder: Option<&Path>) -> Result<AgentStatus> {
    request_status(folder, &Request::Status {})
}

/// Tells the agent to finish its work and to end. Returns its status before that; for an agent of another version, only
/// the process id.
pub fn stop_agent(folder: Option<&Path>) -> Result<AgentStatus> {
    match request_status(folder, &Request::Stop {}) {
        Err(e) if e.kind() == ErrorKind::Unsupported => {
            // Every version understands the signal.
            let fail = |e: std::io::Error| Error::io("the agent's process", e);
            let agent = connect(folder)?.agent_pid().map_err(fail)?;
            kill_process(agent, Signal::TERM).map_err(|e| fail(e.into()))?;
            Ok(AgentStatus { pid: agent.as_raw_nonzero().get().unsigned_abs(), draining: true, ..AgentStatus::default() })
        }
        answer => answer,
    }
}

/// Tells the agent of a folder to remove the memory of a run.
pub(crate) fn remove_run(folder: &EngineFolder, key: &str) -> Result<()> {
    let mut agent = Connection::open(folder).map_err(|e| Error::io(folder.socket().display().to_string(), e))?;
    let reply = agent.request(&Request::Remove { key: key.to_owned() }, Duration::ZERO);
    match reply.map_err(|e| Error::io("the agent's socket", e))?? {
        Reply::Status(_) => Ok(()),
        other => Err(unexpected(other)),
    }
}

/// Reports the metrics of the agent of a folder, in the text format of OpenMetrics.
pub fn agent_metrics(folder: Option<&Path>) -> Result<String> {
    match request(folder, &Request::Metrics {})? {
        Reply::Metrics { text } => Ok(text),
        other => Err(unexpected(other)),
    }
}

/// Environment variable that names the agent's program.
const PROGRAM_VARIABLE: &str = "TENSORCASK_AGENT";
/// Time within which a new agent must listen.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time within which a reply must arrive, in addition to the wait that the request asks for.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
