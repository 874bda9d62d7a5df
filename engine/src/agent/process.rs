//! The process of an agent: its start, its main loop, its signals and its end.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcask::{Error, ErrorKind, Result};
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::connections::Agent;
use super::inherited::close_inherited;
use super::options::{AgentOptions, Ended};
use super::registry::Registry;
use crate::os::files::remove_file;
use crate::os::folders::EngineFolder;
use crate::os::lock::Lock;
use crate::os::runtime;

/// Runs an agent until SIGTERM, SIGINT, a `stop` request, or the end of its idle time.
pub fn run_agent(options: &AgentOptions) -> Result<Ended> {
    if options.detach {
        close_inherited();
        use_all_processors();
    }
    raise_file_limit();
    let folder = EngineFolder::open(options.folder.as_deref())?;
    let lock = match Lock::acquire(&folder.agent_lock()) {
        Ok(lock) => lock,
        Err(e) if e.kind() == ErrorKind::Conflict => return Ok(Ended::AnotherRuns),
        Err(e) => return Err(e),
    };
    if options.detach {
        // Fails only for the leader of a process group, which no terminal ends anyway.
        let _ = rustix::process::setsid();
    }
    if let Err(error) = rustix::process::nice(options.nice) {
        tracing::debug!(%error, "cannot change the priority of the agent");
    }
    let runtime = runtime::build("tensorcask-agent", 4)?;
    let ended = runtime.block_on(serve(folder, options));
    // A store that hangs must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(lock);
    ended
}

/// Runs on all processors that this machine or container has. The trainer that started this process may be bound to the few of its
/// rank. Call this before other threads begin.
fn use_all_processors() {
    let mut all = rustix::thread::CpuSet::new();
    (0..rustix::thread::CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &all) {
        tracing::debug!(%error, "the agent keeps the processors of the process that started it");
    }
}

/// Takes as many open files as the system allows: each host of a large run keeps some connections.
fn raise_file_limit() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised) {
        tracing::debug!(%error, "cannot raise the number of open files");
    }
}

async fn serve(folder: EngineFolder, options: &AgentOptions) -> Result<Ended> {
    let socket = folder.socket();
    let fail = |e: std::io::Error| Error::io(socket.display().to_string(), e);
    // The socket of an earlier agent, which is gone: this agent has the lock.
    remove_file(&socket)?;
    let listener = UnixListener::bind(&socket).map_err(fail)?;
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).map_err(fail)?;
    let mut signals = Signals::new().map_err(fail)?;
    let agent = Arc::new(Agent::new(Registry::new(folder)));
    agent.registry.adopt_all().await;
    serve_until_stopped(&agent, &listener, &mut signals, options).await;
    agent.stop.send_replace(true);
    // Serves status requests while it drains, but no new attachments.
    let serving = tokio::spawn({
        let agent = agent.clone();
        async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(agent.clone().serve_connection(stream));
            }
        }
    });
    let waiting = tokio::select! {
        waiting = agent.registry.drain(options.drain, options.abandon_after) => waiting,
        _ = agent.hurry.notified() => agent.registry.waiting(),
        () = signals.stop() => agent.registry.waiting(),
    };
    agent.registry.clear_finished();
    agent.registry.forget_attempts();
    serving.abort();
    let _ = std::fs::remove_file(&socket);
    Ok(if waiting == 0 { Ended::Drained } else { Ended::Waiting(waiting) })
}

/// Serves connections until a signal, a `stop` request, or the end of the idle time.
async fn serve_until_stopped(agent: &Arc<Agent>, listener: &UnixListener, signals: &mut Signals, options: &AgentOptions) {
    let mut stop = agent.stop.subscribe();
    let mut last_busy = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(500));
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => _ = tokio::spawn(agent.clone().serve_connection(stream)),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            () = signals.stop() => break,
            _ = stop.changed() => break,
            _ = tick.tick() => {
                agent.registry.clear_finished();
                agent.registry.restart_failed().await;
                if agent.registry.is_busy(options.abandon_after) {
                    last_busy = Instant::now();
                }
                if options.idle_exit.is_some_and(|idle| last_busy.elapsed() >= idle) {
                    break;
                }
            }
        }
    }
}

/// The signals of an agent.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for SIGTERM or SIGINT. Ignores SIGHUP, because an agent outlives its terminal.
    async fn stop(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => {}
            }
        }
    }
}
