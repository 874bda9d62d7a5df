//! Options and results of the doctor.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::run::peers_option::Peers;
use crate::run::spec::run_key;

/// Options of the doctor: the folder, the states and the peers that it checks.
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
    /// Finding, such as sizes or the message of an error.
    pub found: String,
    /// Advice: the command or setting that mends it; `None` if all is well.
    pub advice: Option<String>,
}

impl Check {
    pub(super) fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { subject: subject.into(), state: CheckState::Ok, found: found.into(), advice: None }
    }

    pub(super) fn warning(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { state: CheckState::Warning, advice: Some(advice.into()), ..Self::ok(subject, found) }
    }

    pub(super) fn failed(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { state: CheckState::Failed, advice: Some(advice.into()), ..Self::ok(subject, found) }
    }
}

impl DoctorPeers {
    pub(super) fn key(&self) -> String {
        run_key(&self.run)
    }
}
