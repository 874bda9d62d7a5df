//! The runs of an agent: finds, starts, adopts and ends them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use tensorcask::{Error, ErrorKind, Result};
use tokio::task::{JoinError, JoinHandle};

use super::attached_rank::{leave_with_locks, note_earlier_ends};
use super::encode::encode_loop;
use super::encoder_queue::has_work;
use super::encoding_attempts::forget_attempts;
use super::host_tasks::spawn_host_tasks;
use super::metrics::SaveHistograms;
use super::peer_tasks::spawn_peer_tasks;
use super::report::status_of;
use super::run::Run;
use super::run_event::Event;
use super::storage_watch::storage_watch_loop;
use super::upload::upload_loop;
use crate::os::folders::{EngineFolder, RunFolder};
use crate::run::spec::{RunSpec, run_key};
use crate::run::status::AgentStatus;

/// The runs of an agent.
pub(super) struct Registry {
    folder: EngineFolder,
    started: Instant,
    runs: Mutex<BTreeMap<String, ActiveRun>>,
    /// Saves of all runs that this agent has committed.
    pub committed_saves: SaveHistograms,
    /// Held while a run starts, so that runs start one after the other.
    starting: tokio::sync::Mutex<()>,
}

/// A run, and the tasks that work for it.
struct ActiveRun {
    run: Arc<Run>,
    /// Tasks that never end by themselves.
    tasks: Vec<JoinHandle<()>>,
    /// Tasks that end once they have nothing more to watch.
    watches: Vec<JoinHandle<()>>,
}

impl ActiveRun {
    /// Ends all tasks. Aborted work is repeated, because only commits count.
    async fn end(self) {
        for task in self.tasks.into_iter().chain(self.watches) {
            task.abort();
            let _ = task.await;
        }
    }

    /// The message of a task that has panicked; `None` if none has.
    fn fault(&mut self) -> Option<String> {
        while let Some(at) = self.tasks.iter().position(JoinHandle::is_finished) {
            let ended = self.tasks.remove(at).now_or_never();
            if let Some(panic) = ended.and_then(Result::err).filter(JoinError::is_panic).map(JoinError::into_panic) {
                let said = panic.downcast_ref::<String>().cloned();
                let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
                return Some(said.unwrap_or_else(|| "it said nothing".to_owned()));
            }
        }
        None
    }
}

impl Registry {
    pub(super) fn new(folder: EngineFolder) -> Self {
        Self {
            folder,
            started: Instant::now(),
            runs: Mutex::default(),
            committed_saves: SaveHistograms::default(),
            starting: tokio::sync::Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ActiveRun>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All runs.
    pub(super) fn runs(&self) -> Vec<Arc<Run>> {
        self.lock().values().map(|active| active.run.clone()).collect()
    }

    /// The run with this key.
    pub(super) fn find(&self, key: &str) -> Result<Arc<Run>> {
        let found = self.lock().get(key).map(|active| active.run.clone());
        found.ok_or_else(|| Error::not_found("the agent does not know this run; attach first"))
    }

    /// Adopts the runs that an earlier agent left. Does not take their stores over, because another job may own them by
    /// now.
    pub(super) async fn adopt_all(&self) {
        for folder in self.folder.runs().unwrap_or_default() {
            if let Err(error) = self.adopt(&folder).await {
                tracing::warn!(folder = %folder.root().display(), %error, "cannot adopt the run of an earlier agent");
            }
        }
    }

    async fn adopt(&self, folder: &RunFolder) -> Result<()> {
        let spec = RunSpec::read(folder).ok_or_else(|| Error::corrupt("the folder has no valid description of a run"))?;
        let run = self.start(spec, 0, Credentials::New).await?;
        for rank in run.folder.ranks()?.into_iter().filter(|rank| run.spec.local_ranks().contains(rank)) {
            // The trainer of the rank replaces an arena that cannot be used.
            if let Err(error) = run.adopt(rank) {
                tracing::warn!(run = run.spec.run, rank, %error, "cannot use the arena of an earlier trainer");
            }
        }
        if run.folder.is_finished() {
            run.apply(Event::Finished { rank: None });
        }
        let running = note_earlier_ends(&run);
        let watch = tokio::spawn(leave_with_locks(running));
        match self.lock().get_mut(&run.spec.key) {
            Some(active) => active.watches.push(watch),
            None => watch.abort(),
        }
        Ok(())
    }

    /// Finds the run of a description for one of its ranks, or starts it. A run with the same key but other options is
    /// replaced, unless other ranks are connected to it. A run with other credentials gets these if they are new.
    pub(super) async fn start(&self, spec: RunSpec, rank: u32, credentials: Credentials) -> Result<Arc<Run>> {
        // The key becomes a folder name.
        if spec.key != run_key(&spec.run) {
            return Err(Error::invalid("the key of a run does not match its name"));
        }
        let _one_at_a_time = self.starting.lock().await;
        let known = self.lock().get(&spec.key).map(|active| active.run.clone());
        if let Some(run) = known {
            if run.spec.is_same_run(&spec) {
                if credentials == Credentials::New {
                    run.renew(&spec)?;
                }
                return Ok(run);
            }
            check_replaceable(&run, &spec, rank)?;
            // The tasks must end before the new ones begin.
            let replaced = self.lock().remove(&spec.key);
            if let Some(replaced) = replaced {
                replaced.end().await;
                forget_attempts(&run.folder);
            }
        }
        let key = spec.key.clone();
        let run = Arc::new(Run::new(spec, &self.folder, self.committed_saves.clone())?);
        let mut tasks: Vec<JoinHandle<()>> = match run.spec.hosts.clone() {
            Some(hosts) => spawn_host_tasks(&run, hosts)?,
            None => {
                let uploads = (0..run.tiers.len()).map(|tier| tokio::spawn(upload_loop(run.clone(), tier)));
                [tokio::spawn(encode_loop(run.clone()))].into_iter().chain(uploads).collect()
            }
        };
        tasks.extend((0..run.tiers.len()).map(|tier| tokio::spawn(storage_watch_loop(run.clone(), tier))));
        tasks.extend(spawn_peer_tasks(&run));
        self.lock().insert(key, ActiveRun { run: run.clone(), tasks, watches: Vec::new() });
        Ok(run)
    }

    /// Ends finished runs and frees their memory.
    pub(super) fn clear_finished(&self) {
        self.lock().retain(|_, ActiveRun { run, tasks, watches }| {
            let is_done = run.is_done();
            if is_done {
                tasks.iter().chain(watches.iter()).for_each(JoinHandle::abort);
                if let Err(error) = run.folder.clear() {
                    tracing::warn!(run = run.spec.run, %error, "cannot remove the memory of a finished run");
                }
            }
            !is_done
        });
    }

    /// Begins runs anew that have a task which ended by a fault of the agent. Their trainers connect again.
    pub(super) async fn restart_failed(&self) {
        let mut failed = Vec::new();
        self.lock().retain(|_, active| match active.fault() {
            None => true,
            Some(said) => {
                failed.push((active.run.clone(), said, std::mem::take(&mut active.tasks)));
                active.watches.iter().for_each(JoinHandle::abort);
                false
            }
        });
        for (run, said, tasks) in failed {
            ActiveRun { run: run.clone(), tasks, watches: Vec::new() }.end().await;
            let message = format!("a task of the agent failed, and was started again: {said}. Please report this");
            tracing::error!(run = run.spec.run, message);
            if let Err(error) = self.adopt(&run.folder).await {
                tracing::error!(run = run.spec.run, %error, "the run cannot be started again");
                continue;
            }
            if let Ok(again) = self.find(&run.spec.key) {
                again.apply(Event::TaskFailed { message });
            }
        }
    }

    /// Whether a trainer is connected, or work is left that has made progress within this time.
    pub(super) fn is_busy(&self, abandon_after: Duration) -> bool {
        self.runs().iter().any(|run| run.read(|state, _| state.is_attached()) || works(run, abandon_after))
    }

    /// Removes the memory of a run that no process trains, whatever waits in it.
    pub(super) async fn remove(&self, key: &str) -> Result<()> {
        let _one_at_a_time = self.starting.lock().await;
        let run = self.find(key)?;
        if run.read(|state, _| state.is_attached()) || run.spec.local_ranks().any(|rank| run.has_process(rank)) {
            return Err(Error::new(ErrorKind::Conflict, "the run is being trained").object(&run.spec.run));
        }
        let removed = self.lock().remove(key);
        if let Some(removed) = removed {
            removed.end().await;
        }
        run.folder.clear()
    }

    /// Forgets attempts to encode that this agent gives up because it was told to end.
    pub(super) fn forget_attempts(&self) {
        self.runs().iter().for_each(|run| forget_attempts(&run.folder));
    }

    /// Waits until no work is left that makes progress, or for this time; returns the number of states and snapshots that still wait.
    pub(super) async fn drain(&self, limit: Duration, abandon_after: Duration) -> u64 {
        let begun = Instant::now();
        while begun.elapsed() < limit && self.runs().iter().any(|run| works(run, abandon_after)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.waiting()
    }

    /// Number of states and snapshots that wait.
    pub(super) fn waiting(&self) -> u64 {
        let depth = |run: &Arc<Run>| run.read(|state, arenas| state.queue_depth(arenas.waiting_states())).max(1);
        self.runs().iter().filter(|run| !run.is_quiet()).map(depth).sum()
    }

    /// The status report of the agent.
    pub(super) fn status(&self) -> AgentStatus {
        let mut runs: Vec<_> = self.runs().iter().map(|run| status_of(run)).collect();
        runs.sort_by(|a, b| a.run.cmp(&b.run));
        AgentStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            resident_bytes: own_memory("VmRSS:"),
            private_bytes: own_memory("RssAnon:"),
            draining: false,
            runs,
        }
    }
}

/// Whether work is left that has made progress within this time.
fn works(run: &Run, abandon_after: Duration) -> bool {
    !run.is_quiet() && run.time_without_progress() < abandon_after
}

/// Whether the credentials in a description are newer than those that the agent knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Credentials {
    /// A trainer starts, or has renewed them.
    New,
    /// A trainer connects again, with those that it has had since it started.
    Known,
}

/// Checks whether a run may be replaced by one with other options.
fn check_replaceable(run: &Run, spec: &RunSpec, rank: u32) -> Result<()> {
    let other = run.read(|state, _| {
        let connected = state.ranks.iter().filter(|(other, state)| **other != rank && state.trainer.is_some());
        connected.map(|(other, _)| *other).next()
    });
    if let Some(other) = other {
        let message = format!("all ranks of a run need the same options: rank {other} has another {}", run.spec.difference(spec));
        return Err(Error::invalid(message).object(&spec.run));
    }
    // States that all ranks have saved must be encoded with the old options: another number of ranks cannot do so.
    if run.wakes.note_next_start() < REPLACE_TIMEOUT && has_work(run) {
        return Err(Error::new(ErrorKind::Conflict, "states that were saved with other options are being encoded").object(&spec.run));
    }
    Ok(())
}

/// A number of bytes from `/proc/self/status`; 0 if it is not there.
fn own_memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    let kib: Option<u64> = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Time for which a trainer with other options waits for states that were saved with the old options.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::super::run_event::{Event, TierOrders};
    use super::super::run_state::saves_no_more;
    use super::Registry;
    use crate::os::files::replace_file;
    use crate::os::folders::EngineFolder;
    use crate::os::lock::Lock;
    use crate::run::host_notes::HostNotes;
    use crate::run::hosts_option::Hosts;
    use crate::run::options::EngineOptions;

    /// The last rank of a host may finish as soon as the agent accepts connections. The run must know by then that the other ranks
    /// have ended: otherwise it is cleared before it has told the other hosts, which wait for these ranks forever.
    #[test]
    fn an_adopted_run_knows_at_once_which_ranks_have_ended() {
        let place = tempfile::tempdir().unwrap();
        let folder = EngineFolder::open(Some(&place.path().join("engine"))).unwrap();
        let store = place.path().join("store").to_str().unwrap().to_owned();
        let spec = EngineOptions { world: 4, hosts: Some(Hosts::new("first", 0..2)), ..EngineOptions::new(store) }.spec().unwrap();
        let session = spec.hosts.as_ref().unwrap().session;
        let run = folder.run(&spec.key);
        run.create().unwrap();
        replace_file(&run.spec(), &serde_json::to_vec(&spec).unwrap()).unwrap();
        (0..2).for_each(|rank| HostNotes::start_rank(&run, session, rank, 0, None).unwrap());
        HostNotes::note_end(&run, session, 0, true).unwrap();
        // The trainer of rank 1 is gone without a note: nobody holds its lock.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let registry = Registry::new(folder);
        // The runtime does not run, so no other task has begun.
        assert!(matches!(pin!(registry.adopt_all()).poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(())));
        let run = registry.find(&spec.key).unwrap();
        assert_eq!(run.read(|state, _| [0, 1].map(|rank| saves_no_more(state, rank))), [true, true]);
    }

    #[tokio::test]
    async fn a_task_that_panics_is_started_again_and_reported() {
        let place = tempfile::tempdir().unwrap();
        let folder = EngineFolder::open(Some(&place.path().join("engine"))).unwrap();
        let spec = EngineOptions::new(place.path().join("store").to_str().unwrap()).spec().unwrap();
        let registry = Registry::new(folder);
        let run = registry.start(spec, 0, super::Credentials::New).await.unwrap();
        registry.restart_failed().await;
        assert!(std::sync::Arc::ptr_eq(&run, &registry.find(&run.spec.key).unwrap()), "no task has failed");
        let failing = tokio::spawn(async { std::panic::panic_any("index out of bounds".to_owned()) });
        while !failing.is_finished() {
            tokio::task::yield_now().await;
        }
        registry.lock().get_mut(&run.spec.key).unwrap().tasks.push(failing);
        registry.restart_failed().await;
        let again = registry.find(&run.spec.key).unwrap();
        assert!(!std::sync::Arc::ptr_eq(&run, &again));
        let problem = again.progress(0).problem.unwrap();
        assert!(problem.contains("index out of bounds") && problem.contains("started again"), "{problem}");
        assert!(registry.lock().get(&run.spec.key).unwrap().tasks.iter().all(|task| !task.is_finished()));
    }

    /// After the agent was replaced, one trainer may finish before another one has connected again. The folder of the run holds the
    /// memory of that other trainer.
    #[test]
    fn the_memory_of_a_run_stays_while_a_trainer_runs_that_has_not_connected() {
        let place = tempfile::tempdir().unwrap();
        let folder = EngineFolder::open(Some(&place.path().join("engine"))).unwrap();
        let store = place.path().join("store").to_str().unwrap().to_owned();
        let spec = EngineOptions { world: 2, ..EngineOptions::new(store) }.spec().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let registry = Registry::new(folder);
        let run = runtime.block_on(registry.start(spec, 0, super::Credentials::New)).unwrap();
        let [_first, second] = [0, 1].map(|rank| {
            let rank = run.folder.rank(rank);
            rank.create().unwrap();
            Lock::acquire(&rank.lock()).unwrap()
        });
        // No save waits: the run is stopped.
        run.apply(Event::Fenced { orders: TierOrders::default(), why: "a test".into() });
        run.apply(Event::Finished { rank: Some(0) });
        registry.clear_finished();
        assert!(run.folder.spec().exists() && registry.find(&run.spec.key).is_ok());
        // The trainer that has finished still holds its lock while the agent answers it.
        drop(second);
        registry.clear_finished();
        assert!(!run.folder.spec().exists() && registry.find(&run.spec.key).is_err());
    }
}
