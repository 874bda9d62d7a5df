//! The agent: a process of its own, which takes states out of shared memory and outlives the trainers that put them there.
//!
//! One agent serves a host. Per run, one task encodes from the arenas into the memory tier, and one task per tier uploads to it.
//! Whatever fails is tried again; what cannot be kept is told to the trainer at its next save.

mod encode;
mod inherited;
mod ranks;
mod run;
mod upload;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorcask::{Error, ErrorKind, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::MAX_BLOCKING;
use crate::options::{RunSpec, run_key};
use crate::place::{Lock, Place, remove_file};
use crate::protocol::{Mode, Reply, Request, receive_async, send_async};
use crate::status::AgentStatus;
use run::Run;

/// How an agent works.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// The engine's folder, as [`EngineOptions::folder`](crate::EngineOptions::folder).
    pub folder: Option<PathBuf>,
    /// Ends when no trainer is connected and nothing is left to do for so long; never, if nothing is said.
    pub idle_exit: Option<Duration>,
    /// How long the agent goes on with what waits after it was told to end. What then still waits stays in shared memory.
    pub drain: Duration,
    /// By how much the agent gives way to other processes: 0 to 19.
    pub nice: i32,
    /// Leaves the session of the process that started it, so that it outlives that, and closes what it got open from that, standard streams
    /// excepted. For a process that does nothing else.
    pub detach: bool,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self { folder: None, idle_exit: None, drain: Duration::from_secs(300), nice: 5, detach: false }
    }
}

/// How an agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Another agent serves this folder.
    AnotherRuns,
    /// Nothing waits.
    Drained,
    /// So many states and snapshots still wait in shared memory.
    Waiting(u64),
}

/// Runs an agent until it is told to end: by SIGTERM, SIGINT, a `stop` request, or for lack of work.
pub fn run_agent(options: &AgentOptions) -> Result<Ended> {
    if options.detach {
        inherited::close_inherited();
    }
    let place = Place::open(options.folder.as_deref())?;
    let lock = match Lock::acquire(&place.agent_lock()) {
        Ok(lock) => lock,
        Err(e) if e.kind() == ErrorKind::Conflict => return Ok(Ended::AnotherRuns),
        Err(e) => return Err(e),
    };
    if options.detach {
        // Fails only where it leads a group already, and then no terminal ends it.
        let _ = rustix::process::setsid();
    }
    if let Err(error) = rustix::process::nice(options.nice) {
        tracing::debug!(%error, "the agent's priority stays what it is");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .max_blocking_threads(MAX_BLOCKING)
        .thread_name("tensorcask-agent")
        .enable_all()
        .build();
    let runtime = runtime.map_err(|e| Error::new(ErrorKind::Storage, format!("no runtime: {e}")).source(e))?;
    let ended = runtime.block_on(Agent::serve(place, options));
    // A store that hangs must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(lock);
    ended
}

/// How long a trainer waits until memory that is out of date is gone, before it asks again.
const CLEARING: Duration = Duration::from_secs(10);
/// How long a trainer with other options waits for what was saved with those before.
const LEAVING: Duration = Duration::from_secs(30);

/// A run, and the tasks that work for it.
type Begun = (Arc<Run>, Vec<JoinHandle<()>>);

struct Agent {
    place: Place,
    started: Instant,
    runs: Mutex<BTreeMap<String, Begun>>,
    /// Held while a run is begun: one at a time.
    beginning: tokio::sync::Mutex<()>,
    stop: watch::Sender<bool>,
    /// A trainer needs an agent that does not end.
    hurry: Notify,
}

impl Agent {
    async fn serve(place: Place, options: &AgentOptions) -> Result<Ended> {
        let socket = place.socket();
        let fail = |e: std::io::Error| Error::io(socket.display().to_string(), e);
        // Of an agent that is gone: this one has the lock.
        remove_file(&socket)?;
        let listener = UnixListener::bind(&socket).map_err(fail)?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).map_err(fail)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(fail)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(fail)?;
        let mut hangup = signal(SignalKind::hangup()).map_err(fail)?;
        let agent = Arc::new(Self {
            place,
            started: Instant::now(),
            runs: Mutex::default(),
            beginning: tokio::sync::Mutex::default(),
            stop: watch::Sender::new(false),
            hurry: Notify::new(),
        });
        agent.adopt().await;
        let mut stop = agent.stop.subscribe();
        let mut busy = Instant::now();
        let mut tick = tokio::time::interval(Duration::from_millis(500));
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => _ = tokio::spawn(agent.clone().converse(stream)),
                    Err(error) => {
                        tracing::warn!(%error, "a connection was not accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                // The terminal is gone; the agent is not.
                _ = hangup.recv() => {}
                _ = stop.changed() => break,
                _ = tick.tick() => {
                    agent.clear_quiet();
                    if agent.runs().iter().any(|run| run.is_attached() || !run.is_quiet()) {
                        busy = Instant::now();
                    }
                    if options.idle_exit.is_some_and(|idle| busy.elapsed() >= idle) {
                        break;
                    }
                }
            }
        }
        agent.stop.send_replace(true);
        // Status can still be asked while it drains; nobody can attach.
        let serving = tokio::spawn({
            let agent = agent.clone();
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(agent.clone().converse(stream));
                }
            }
        });
        let waiting = tokio::select! {
            waiting = agent.drain(options.drain) => waiting,
            _ = agent.hurry.notified() => agent.waiting(),
            _ = terminate.recv() => agent.waiting(),
            _ = interrupt.recv() => agent.waiting(),
        };
        agent.clear_quiet();
        serving.abort();
        let _ = std::fs::remove_file(&socket);
        Ok(if waiting == 0 { Ended::Drained } else { Ended::Waiting(waiting) })
    }

    fn runs(&self) -> Vec<Arc<Run>> {
        self.locked().values().map(|(run, _)| run.clone()).collect()
    }

    fn find(&self, key: &str) -> Result<Arc<Run>> {
        let found = self.locked().get(key).map(|(run, _)| run.clone());
        found.ok_or_else(|| Error::not_found("the agent does not know this run; attach first"))
    }

    /// Goes on with runs that an earlier agent left. Their stores are not taken over: a job elsewhere may have them by now.
    async fn adopt(&self) {
        let left = self.place.runs().unwrap_or_default();
        for place in left {
            let spec = std::fs::read(place.spec()).ok().and_then(|json| serde_json::from_slice::<RunSpec>(&json).ok());
            let adopted = async {
                let spec = spec.ok_or_else(|| Error::corrupt("no description of a run"))?;
                let run = self.run(spec, None).await?;
                for rank in run.place.ranks()?.into_iter().filter(|rank| *rank < run.spec.world) {
                    // One that cannot be used is none; its trainer makes another.
                    if let Err(error) = run.adopt(rank) {
                        tracing::warn!(run = run.spec.run, rank, %error, "what an earlier trainer left cannot be used");
                    }
                }
                if run.place.is_over() {
                    run.clear_when_quiet(None);
                }
                Ok::<_, Error>(())
            };
            if let Err(error) = adopted.await {
                tracing::warn!(folder = %place.root().display(), %error, "what an earlier agent left cannot be used");
            }
        }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, Begun>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run of a description; begun, or begun anew if another description was known: not while other ranks than this one go by that.
    async fn run(&self, spec: RunSpec, rank: Option<u32>) -> Result<Arc<Run>> {
        // It becomes the name of a folder.
        if spec.key != run_key(&spec.run) {
            return Err(Error::invalid("the key of a run is not that of its name"));
        }
        let _one_at_a_time = self.beginning.lock().await;
        let known = self.locked().get(&spec.key).map(|(run, _)| run.clone());
        if let Some(run) = known {
            if run.spec == spec {
                return Ok(run);
            }
            if let Some(other) = run.others_attached(rank.unwrap_or(0)).first() {
                let message = format!("all ranks of a run need the same options: rank {other} has another {}", run.spec.difference(&spec));
                return Err(Error::invalid(message).object(&spec.run));
            }
            // What all ranks have is made a snapshot by what it was saved for: another number of ranks could not.
            if run.leaving_for() < LEAVING && run.has_to_encode() {
                return Err(
                    Error::new(ErrorKind::Conflict, "states that were saved with other options are being encoded").object(&spec.run)
                );
            }
            let begun = self.locked().remove(&spec.key);
            for task in begun.map(|(_, tasks)| tasks).unwrap_or_default() {
                // Whatever it was at is done again, but not beside it: nothing counts before it is committed.
                task.abort();
                let _ = task.await;
            }
        }
        let key = spec.key.clone();
        let run = Arc::new(Run::new(spec, &self.place)?);
        let mut tasks = vec![tokio::spawn(encode::encode_loop(run.clone()))];
        tasks.extend((0..run.tiers.len()).map(|tier| tokio::spawn(upload::upload_loop(run.clone(), tier))));
        self.locked().insert(key, (run.clone(), tasks));
        Ok(run)
    }

    /// Waits until nothing is left to do, or for so long; what is left.
    async fn drain(&self, limit: Duration) -> u64 {
        let begun = Instant::now();
        while begun.elapsed() < limit && self.runs().iter().any(|run| !run.is_quiet()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.waiting()
    }

    fn waiting(&self) -> u64 {
        self.runs().iter().filter(|run| !run.is_quiet()).map(|run| run.queue_depth().max(1)).sum()
    }

    /// One connection, to its end.
    async fn converse(self: Arc<Self>, stream: UnixStream) {
        let ours = rustix::process::getuid().as_raw();
        if !stream.peer_cred().is_ok_and(|peer| peer.uid() == ours) {
            tracing::warn!("a process of another user was turned away");
            return;
        }
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::new(read);
        if read.fill_buf().await.is_ok_and(|bytes| bytes.first() == Some(&b'G')) {
            let mut head = Vec::new();
            let _ = read.take(1024).read_until(b'\n', &mut head).await;
            let body = self.status().metrics();
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            let _ = write.write_all(answer.as_bytes()).await;
            return;
        }
        // What this connection has attached: the trainer that holds it is gone when it ends.
        let mut attached: Vec<(Arc<Run>, u32, u64)> = Vec::new();
        loop {
            let reply = match receive_async::<Request>(&mut read).await {
                Ok(None) => break,
                Ok(Some(request)) => {
                    let waits = matches!(request, Request::Wait { .. });
                    let answer = self.answer(request, &mut attached);
                    tokio::pin!(answer);
                    let answered = tokio::select! {
                        biased;
                        answered = &mut answer => answered,
                        // Whoever waits is gone; or has more to say, which comes next.
                        more = read.fill_buf(), if waits => match more {
                            Ok(bytes) if !bytes.is_empty() => answer.await,
                            _ => break,
                        },
                    };
                    answered.unwrap_or_else(|error| Reply::failed(&error))
                }
                Err(error) => {
                    // The stream cannot be followed any more.
                    let _ = send_async(&mut write, &Reply::failed(&error)).await;
                    break;
                }
            };
            if send_async(&mut write, &reply).await.is_err() {
                break;
            }
        }
        attached.iter().for_each(|(run, rank, number)| run.detach(*rank, *number));
    }

    async fn answer(&self, request: Request, attached: &mut Vec<(Arc<Run>, u32, u64)>) -> Result<Reply> {
        match request {
            Request::Attach(request) => {
                let rank = request.rank;
                if *self.stop.borrow() {
                    // What waits does so in shared memory, for the next agent.
                    self.hurry.notify_one();
                    return Err(Error::new(ErrorKind::Conflict, "the agent is about to end"));
                }
                if rank >= request.spec.world {
                    return Err(Error::invalid(format!("rank {rank} of {}", request.spec.world)));
                }
                let run = self.run(request.spec.clone(), Some(rank)).await?;
                let number = run.attach(&request)?;
                attached.retain(|(_, known, _)| *known != rank);
                attached.push((run.clone(), rank, number));
                // Nothing is saved beside memory that is out of date: whoever came next would take it for the same.
                let mut ticks = run.ticks();
                let deadline = tokio::time::Instant::now() + CLEARING;
                while request.mode == Mode::TakeOverAfresh && run.is_out_of_date() {
                    if tokio::time::timeout_at(deadline, ticks.changed()).await.is_err() {
                        return Err(Error::new(ErrorKind::Conflict, "memory that is out of date is still in use"));
                    }
                }
                Ok(Reply::Progress(run.progress(rank)))
            }
            Request::Saved { key, rank, save } => Ok(Reply::Progress(self.find(&key)?.saved(rank, &save))),
            Request::Wait { key, rank, generation, durable, timeout_ms } => {
                let run = self.find(&key)?;
                run.goes_on();
                let mut ticks = run.ticks();
                let deadline = tokio::time::Instant::now() + Duration::from_millis(timeout_ms);
                loop {
                    let progress = run.progress(rank);
                    let over = progress.has_reached(generation, durable) || progress.has_failed(generation);
                    if over || progress.stopped.is_some() {
                        return Ok(Reply::Progress(progress));
                    }
                    if tokio::time::timeout_at(deadline, ticks.changed()).await.is_err() {
                        return Ok(Reply::Progress(progress));
                    }
                }
            }
            Request::Detach { key, rank, clear } => {
                let run = self.find(&key)?;
                attached.retain(|(known, of, number)| {
                    let ours = known.spec.key == key && *of == rank;
                    if ours {
                        known.detach(rank, *number);
                    }
                    !ours
                });
                if clear {
                    run.clear_when_quiet(Some(rank));
                }
                let progress = run.progress(rank);
                self.clear_quiet();
                Ok(Reply::Progress(progress))
            }
            Request::Status {} => Ok(Reply::Status(Box::new(self.status()))),
            Request::Stop {} => {
                self.stop.send_replace(true);
                Ok(Reply::Status(Box::new(self.status())))
            }
        }
    }

    /// Ends runs that are over, and frees their memory.
    fn clear_quiet(&self) {
        self.locked().retain(|_, (run, tasks)| {
            let over = run.is_over();
            if over {
                tasks.iter().for_each(JoinHandle::abort);
                if let Err(error) = run.place.clear() {
                    tracing::warn!(run = run.spec.run, %error, "what a run left in memory could not be removed");
                }
            }
            !over
        });
    }

    fn status(&self) -> AgentStatus {
        let mut runs: Vec<_> = self.runs().iter().map(|run| run.status()).collect();
        runs.sort_by(|a, b| a.run.cmp(&b.run));
        AgentStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            resident_bytes: resident_bytes(),
            draining: *self.stop.borrow(),
            runs,
        }
    }
}

/// Resident memory of this process, from `/proc/self/statm`.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0).saturating_mul(rustix::param::page_size() as u64)
}
