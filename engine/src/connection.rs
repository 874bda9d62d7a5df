//! The trainer's side of the agent's socket, and the start of an agent.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tensorcask::{Error, ErrorKind, Result};

use crate::place::Place;
use crate::protocol::{Reply, Request, receive, send};
use crate::status::AgentStatus;

/// Names the agent's program, where it is set.
const PROGRAM_VARIABLE: &str = "TENSORCASK_AGENT";
/// How long a new agent may take to listen.
const START: Duration = Duration::from_secs(20);
/// How long an answer may take, besides what the request itself waits for.
const ANSWER: Duration = Duration::from_secs(20);

/// A connection to the agent.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: BufReader<UnixStream>,
    /// Replies that have not been read yet.
    unread: usize,
}

impl Connection {
    /// The agent's process.
    fn agent(&self) -> std::io::Result<Pid> {
        Ok(rustix::net::sockopt::socket_peercred(self.stream.get_ref())?.pid)
    }

    /// Connects to the agent that listens.
    pub(crate) fn open(place: &Place) -> std::io::Result<Self> {
        let stream = UnixStream::connect(place.socket())?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        if peer.uid != rustix::process::getuid() {
            return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, "the agent's socket belongs to another user's process"));
        }
        stream.set_write_timeout(Some(ANSWER))?;
        Ok(Self { stream: BufReader::new(stream), unread: 0 })
    }

    /// Sends a request that waits for `wait` at most; its reply, or an error of the connection.
    pub(crate) fn ask(&mut self, request: &Request, wait: Duration) -> std::io::Result<Result<Reply>> {
        self.tell(request)?;
        self.stream.get_ref().set_read_timeout(Some(wait.saturating_add(ANSWER)))?;
        loop {
            let reply = receive(&mut self.stream)?;
            self.unread -= 1;
            if self.unread == 0 {
                return Ok(reply);
            }
        }
    }

    /// Sends a request whose reply is read later.
    pub(crate) fn tell(&mut self, request: &Request) -> std::io::Result<()> {
        send(self.stream.get_mut(), request)?;
        self.unread += 1;
        Ok(())
    }

    /// Whether all that was told has been answered, as far as [`news`](Self::news) has seen.
    pub(crate) fn has_answered(&self) -> bool {
        self.unread == 0
    }

    /// The newest reply that has come so far; waits for none.
    pub(crate) fn news(&mut self) -> std::io::Result<Option<Result<Reply>>> {
        let mut newest = None;
        while self.unread > 0 {
            self.stream.get_ref().set_nonblocking(true)?;
            let has = self.stream.fill_buf().map(|_| ());
            self.stream.get_ref().set_nonblocking(false)?;
            match has {
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                other => other?,
            }
            self.stream.get_ref().set_read_timeout(Some(ANSWER))?;
            newest = Some(receive(&mut self.stream)?);
            self.unread -= 1;
        }
        Ok(newest)
    }
}

/// How a trainer starts an agent.
#[derive(Debug, Clone)]
pub(crate) struct Starter {
    command: Vec<String>,
    idle_exit: Duration,
}

impl Starter {
    pub(crate) fn new(command: &[String], idle_exit: Duration) -> Self {
        let named = || std::env::var(PROGRAM_VARIABLE).ok().filter(|program| !program.is_empty());
        let command = match command {
            [] => vec![named().unwrap_or_else(|| "tensorcask".to_owned()), "agent".to_owned()],
            words => words.to_vec(),
        };
        Self { command, idle_exit }
    }

    /// Connects to the agent; starts one where none listens. The child, if one was started, is to be reaped.
    pub(crate) fn connect(&self, place: &Place) -> Result<(Connection, Option<Child>)> {
        if let Ok(connection) = Connection::open(place) {
            return Ok((connection, None));
        }
        let mut child = self.start(place)?;
        let begun = Instant::now();
        loop {
            match Connection::open(place) {
                Ok(connection) => return Ok((connection, Some(child))),
                // Another agent may have been faster, and is not listening yet.
                Err(e) if begun.elapsed() > START => {
                    let message = format!("the agent does not answer: {e}{}", last_words(&place.agent_log()));
                    return Err(Error::new(ErrorKind::Storage, message).object(place.socket().display().to_string()));
                }
                Err(_) => {}
            }
            match child.try_wait() {
                Ok(Some(status)) if !status.success() => {
                    let message = format!("the agent ended at once, with {status}{}", last_words(&place.agent_log()));
                    return Err(Error::new(ErrorKind::Storage, message).object(self.command.join(" ")));
                }
                // Another had the folder: it is about to listen, or was about to end.
                Ok(Some(_)) => {
                    std::thread::sleep(Duration::from_millis(100));
                    child = self.start(place)?;
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn start(&self, place: &Place) -> Result<Child> {
        let log_name = place.agent_log();
        let fail = |e: std::io::Error| Error::io(log_name.display().to_string(), e);
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&log_name).map_err(fail)?;
        let both = log.try_clone().map_err(fail)?;
        let Some((program, arguments)) = self.command.split_first() else { return Err(Error::invalid("no program for the agent")) };
        let mut command = Command::new(program);
        command.args(arguments).arg("--folder").arg(place.root()).arg("--detach");
        command.arg("--idle-exit").arg(format!("{}s", self.idle_exit.as_secs().max(1)));
        // Not in a folder that somebody may want to unmount.
        command.current_dir("/").stdin(Stdio::null()).stdout(log).stderr(both);
        command.spawn().map_err(|e| {
            let message = format!(
                "the agent could not be started: {e}; install the `tensorcask` command (pip install tensorcask), or name it in \
                 {PROGRAM_VARIABLE}, or start `tensorcask agent`"
            );
            Error::new(ErrorKind::NotFound, message).object(program.as_str()).source(e)
        })
    }
}

/// The end of a log, as the end of a sentence.
fn last_words(log: &Path) -> String {
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

/// Asks the agent of a folder.
fn ask(folder: Option<&Path>, request: &Request) -> Result<AgentStatus> {
    let reply = connect(folder)?.ask(request, Duration::ZERO).map_err(|e| Error::io("the agent's socket", e))??;
    match reply {
        Reply::Status(status) => Ok(*status),
        other => other.progress().and(Err(Error::corrupt("the agent answered another question"))),
    }
}

fn connect(folder: Option<&Path>) -> Result<Connection> {
    let none = || Error::not_found("no agent runs here; a trainer starts one, or `tensorcask agent`");
    let place = Place::find(folder).ok_or_else(none)?;
    Connection::open(&place).map_err(|e| none().object(place.socket().display().to_string()).source(e))
}

/// How the agent of a folder, or of the usual one, is doing.
pub fn agent_status(folder: Option<&Path>) -> Result<AgentStatus> {
    ask(folder, &Request::Status {})
}

/// Tells the agent to finish what waits, and to end. Gives its status as it was; of an agent of another version, the process id alone.
pub fn stop_agent(folder: Option<&Path>) -> Result<AgentStatus> {
    match ask(folder, &Request::Stop {}) {
        Err(e) if e.kind() == ErrorKind::Unsupported => {
            // A signal says the same in every version.
            let fail = |e: std::io::Error| Error::io("the agent's process", e);
            let agent = connect(folder)?.agent().map_err(fail)?;
            kill_process(agent, Signal::TERM).map_err(|e| fail(e.into()))?;
            Ok(AgentStatus { pid: agent.as_raw_nonzero().get().unsigned_abs(), draining: true, ..AgentStatus::default() })
        }
        answer => answer,
    }
}

/// The agent's metrics, as Prometheus gets them from the socket by HTTP.
pub fn agent_metrics(folder: Option<&Path>) -> Result<String> {
    let fail = |e: std::io::Error| Error::io("the agent's socket", e);
    let mut connection = connect(folder)?;
    let stream = connection.stream.get_mut();
    stream.set_read_timeout(Some(ANSWER)).and_then(|()| stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: agent\r\n\r\n")).map_err(fail)?;
    let mut answer = String::new();
    connection.stream.read_to_string(&mut answer).map_err(fail)?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    body.ok_or_else(|| Error::corrupt("the agent's answer is no HTTP"))
}
