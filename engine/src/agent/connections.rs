//! Connections of the agent: receives requests and replies to them.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tensorcask::{Error, ErrorKind, Result};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, watch};

use super::attached_rank::AttachedRank;
use super::metrics::metrics;
use super::registry::{Credentials, Registry};
use super::run::Run;
use super::run_event::Event;
use crate::ipc::framing::{receive_async, send_async};
use crate::ipc::messages::{Attach, AttachMode, Progress, Reply, Request, Until};
use crate::run::status::AgentStatus;

/// The parts of the agent that its connections share.
pub(super) struct Agent {
    pub registry: Registry,
    /// Whether the agent was told to stop.
    pub stop: watch::Sender<bool>,
    /// A trainer waits for this agent to end, so that it can start another.
    pub hurry: Notify,
}

/// The process at the other end of a connection.
struct Trainer {
    pid: u32,
    attached: Vec<AttachedRank>,
}

impl Agent {
    pub(super) fn new(registry: Registry) -> Self {
        Self { registry, stop: watch::Sender::new(false), hurry: Notify::new() }
    }

    fn status(&self) -> AgentStatus {
        AgentStatus { draining: *self.stop.borrow(), ..self.registry.status() }
    }

    /// Serves one connection until it ends. Then detaches the trainers that it had attached.
    pub(super) async fn serve_connection(self: Arc<Self>, stream: UnixStream) {
        let ours = rustix::process::getuid().as_raw();
        let Some(peer) = stream.peer_cred().ok().filter(|peer| peer.uid() == ours) else {
            tracing::warn!("refused a connection from a process of another user");
            return;
        };
        // As this process numbers it: a trainer in a container may have another number there.
        let pid = peer.pid().map_or(0, i32::unsigned_abs);
        let (read, write) = stream.into_split();
        let mut read = BufReader::new(read);
        if read.fill_buf().await.is_ok_and(|bytes| bytes.first() == Some(&b'G')) {
            self.serve_metrics(read, write).await;
            return;
        }
        let mut trainer = Trainer { pid, attached: Vec::new() };
        self.serve_requests(read, write, &mut trainer).await;
        for lost in trainer.attached {
            lost.detach();
            tokio::spawn(lost.leave_with_lock());
        }
    }

    /// Answers requests for the metrics over HTTP.
    async fn serve_metrics(&self, read: BufReader<OwnedReadHalf>, write: OwnedWriteHalf) {
        let service = service_fn(|_| async {
            let text = metrics(self.status(), &self.registry.committed_saves)?;
            Ok::<_, Error>(Response::builder().header(CONTENT_TYPE, OPEN_METRICS).body(Full::<Bytes>::from(text)).unwrap_or_default())
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).keep_alive(false);
        // Errors of a connection are the client's.
        let _ = http.serve_connection(TokioIo::new(tokio::io::join(read, write)), service).await;
    }

    async fn serve_requests(&self, mut read: BufReader<OwnedReadHalf>, mut write: OwnedWriteHalf, trainer: &mut Trainer) {
        loop {
            let reply = match receive_async::<Request>(&mut read).await {
                Ok(None) => return,
                Ok(Some(request)) => {
                    let is_wait = matches!(request, Request::Wait { .. });
                    let answer = self.answer(request, trainer);
                    tokio::pin!(answer);
                    let answered = tokio::select! {
                        biased;
                        answered = &mut answer => answered,
                        // The waiting trainer is gone, or has sent its next request.
                        more = read.fill_buf(), if is_wait => match more {
                            Ok(bytes) if !bytes.is_empty() => answer.await,
                            _ => return,
                        },
                    };
                    answered.unwrap_or_else(|error| Reply::failed(&error))
                }
                Err(error) => {
                    // After an invalid message, the stream has no known position.
                    let _ = send_async(&mut write, &Reply::failed(&error)).await;
                    return;
                }
            };
            if send_async(&mut write, &reply).await.is_err() {
                return;
            }
        }
    }

    async fn answer(&self, request: Request, trainer: &mut Trainer) -> Result<Reply> {
        match request {
            Request::Attach(request) => self.attach(&request, trainer).await.map(Reply::Progress),
            Request::SavedSnapshot { key, rank, save } => {
                let run = self.registry.find(&key)?;
                let queue_depth = run.read(|state, arenas| state.queue_depth(arenas.waiting_states()));
                run.apply(Event::SavedSnapshot { rank, note: save, queue_depth });
                Ok(Reply::Progress(run.progress(rank)))
            }
            Request::Wait { key, rank, generation, durable, replicated, timeout_ms, is_last } => {
                let run = self.registry.find(&key)?;
                if is_last {
                    run.apply(Event::SavesEnded { rank });
                }
                let until = match (durable, replicated) {
                    (true, _) => Until::Durable,
                    (false, true) => Until::Replicated,
                    (false, false) => Until::Encoded,
                };
                Ok(Reply::Progress(wait(&run, rank, generation, until, Duration::from_millis(timeout_ms)).await))
            }
            Request::Detach { key, rank, clear } => {
                let run = self.registry.find(&key)?;
                trainer.attached.retain(|known| {
                    let is_detached = known.run.spec.key == key && known.rank == rank;
                    if is_detached {
                        known.detach();
                        known.leave();
                    }
                    !is_detached
                });
                if clear {
                    run.apply(Event::Finished { rank: Some(rank) });
                }
                let progress = run.progress(rank);
                self.registry.clear_finished();
                Ok(Reply::Progress(progress))
            }
            Request::Metrics {} => metrics(self.status(), &self.registry.committed_saves).map(|text| Reply::Metrics { text }),
            Request::Remove { key } => {
                self.registry.remove(&key).await?;
                Ok(Reply::Status(Box::new(self.status())))
            }
            Request::Status {} => Ok(Reply::Status(Box::new(self.status()))),
            Request::Stop {} => {
                self.stop.send_replace(true);
                Ok(Reply::Status(Box::new(self.status())))
            }
        }
    }

    async fn attach(&self, request: &Attach, trainer: &mut Trainer) -> Result<Progress> {
        let rank = request.rank;
        if *self.stop.borrow() {
            // Unfinished work waits in shared memory for the next agent.
            self.hurry.notify_one();
            return Err(Error::new(ErrorKind::Conflict, "the agent is about to end"));
        }
        if !request.spec.local_ranks().contains(&rank) {
            return Err(Error::invalid(format!("rank {rank} of {} does not exist on this host", request.spec.world)));
        }
        let is_new = request.mode != AttachMode::Continue || request.has_new_credentials;
        let credentials = if is_new { Credentials::New } else { Credentials::Known };
        let run = self.registry.start(request.spec.clone(), rank, credentials).await?;
        let attachment = run.attach(request, trainer.pid)?;
        trainer.attached.retain(|known| known.rank != rank);
        trainer.attached.push(AttachedRank { run: run.clone(), rank, attachment });
        // Out-of-date memory must be gone before the trainer saves, because a later process could not tell it from new
        // memory.
        let mut changes = run.changes();
        let deadline = tokio::time::Instant::now() + CLEAR_TIMEOUT;
        while request.mode == AttachMode::TakeOverAfresh && run.is_outdated() {
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                return Err(Error::new(ErrorKind::Conflict, "out-of-date memory is still in use"));
            }
        }
        Ok(run.progress(rank))
    }
}

/// Waits until a save has reached a level or failed, or the run was stopped, or the timeout has passed.
async fn wait(run: &Run, rank: u32, generation: u64, until: Until, timeout: Duration) -> Progress {
    if run.read(|state, _| state.is_restoring) {
        run.apply(Event::TrainerWaits);
    }
    let mut changes = run.changes();
    let deadline = tokio::time::Instant::now() + timeout;
    loop {
        let progress = run.progress(rank);
        let is_over = progress.has_reached(generation, until) || progress.has_failed(generation) || progress.stopped.is_some();
        if is_over || tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
            return progress;
        }
    }
}

/// Type of the text of the metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Time for which a trainer waits until out-of-date memory is removed.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);
