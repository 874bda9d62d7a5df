//! `agent doctor`: looks at everything on a host that an agent needs, and says what to do about what is wrong.
//!
//! | module | looks at |
//! |---|---|
//! | `local` | the engine's folder, shared memory, limits of the process and of its cgroup |
//! | `network` | certificates, ports, clocks and versions of the peers |

mod local;
mod network;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use tensorcask::Result;

use crate::folders::EngineFolder;
use crate::peers_option::Peers;
use crate::run_spec::{RunSpec, run_key};
use crate::runtime;

/// What to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoctorOptions {
    /// Folder of the engine; `None` for the default.
    pub folder: Option<PathBuf>,
    /// Bytes of the states of all ranks on this host, if they are known.
    pub state_bytes: Option<u64>,
    /// Peers to look at; `None` to take those of the runs that an agent has in the folder.
    pub peers: Option<DoctorPeers>,
    /// Time to wait for peers that do not answer. If no agent runs here, the doctor answers other hosts in its place meanwhile.
    pub wait: Duration,
}

/// The peers of a run, as the engine would get them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoctorPeers {
    /// Name of the run: [`EngineOptions::run`](crate::EngineOptions::run), or the URL of its store.
    pub run: String,
    /// Number of this host.
    pub host: u32,
    /// The option of the engine.
    pub peers: Peers,
}

/// State of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// Nothing to do.
    Ok,
    /// Works, but may fail later.
    Warning,
    /// The engine will not work.
    Failed,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Subject, such as `shared memory` or `peer 3`.
    pub subject: String,
    /// Outcome.
    pub state: CheckState,
    /// What was found.
    pub found: String,
    /// What to do; `None` if all is well.
    pub advice: Option<String>,
}

impl Check {
    fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { subject: subject.into(), state: CheckState::Ok, found: found.into(), advice: None }
    }

    fn warning(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { state: CheckState::Warning, advice: Some(advice.into()), ..Self::ok(subject, found) }
    }

    fn failed(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { state: CheckState::Failed, advice: Some(advice.into()), ..Self::ok(subject, found) }
    }
}

/// Looks at this host and at its peers. A failed check is no error.
///
/// ```
/// # let scratch = tempfile::tempdir().unwrap();
/// use tensorcask_engine::{DoctorOptions, run_doctor};
/// let folder = Some(scratch.path().join("engine"));
/// let checks = run_doctor(&DoctorOptions { folder, state_bytes: None, peers: None, wait: std::time::Duration::ZERO })?;
/// assert!(checks.iter().any(|check| check.subject == "shared memory"));
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn run_doctor(options: &DoctorOptions) -> Result<Vec<Check>> {
    let mut checks = local::check(options);
    let peers = match &options.peers {
        Some(given) => vec![given.clone()],
        None => peers_of_runs(options),
    };
    let runtime = runtime::build("tensorcask-doctor", 2)?;
    for peers in peers {
        checks.extend(runtime.block_on(network::check(&peers, options)));
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(checks)
}

/// Peers of the runs that an agent has in the folder.
fn peers_of_runs(options: &DoctorOptions) -> Vec<DoctorPeers> {
    let Some(folder) = EngineFolder::find(options.folder.as_deref()) else { return Vec::new() };
    let specs = folder.runs().unwrap_or_default().into_iter().filter_map(|run| RunSpec::read(&run));
    let peers = specs.filter_map(|spec| Some(DoctorPeers { host: spec.hosts?.position(), peers: spec.peers?, run: spec.run }));
    peers.collect()
}

impl DoctorPeers {
    fn key(&self) -> String {
        run_key(&self.run)
    }
}
