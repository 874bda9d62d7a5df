//! Options of an agent, and how it ended.

use std::path::PathBuf;
use std::time::Duration;

/// Options of an agent.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// The engine's folder, as [`EngineOptions::folder`](crate::EngineOptions::folder).
    pub folder: Option<PathBuf>,
    /// Time without a trainer and without work after which the agent ends; `None` means never.
    pub idle_exit: Option<Duration>,
    /// Time after which work that makes no progress, such as uploads to a store that is gone, counts as no work. Its states stay in
    /// shared memory.
    pub abandon_after: Duration,
    /// Time for which the agent continues its work after it was told to stop. Unfinished work stays in shared memory.
    pub drain: Duration,
    /// Niceness of the process, 0 to 19. Higher values leave more CPU time to other processes.
    pub nice: i32,
    /// Whether to leave the session of the parent process, so that the agent outlives it, and to close inherited file
    /// descriptors except the standard streams. Only for a process that does nothing else.
    pub detach: bool,
}

impl Default for AgentOptions {
    fn default() -> Self {
        let abandon_after = Duration::from_secs(24 * 3600);
        let drain = Duration::from_secs(300);
        Self { folder: None, idle_exit: None, abandon_after, drain, nice: 5, detach: false }
    }
}

/// How an agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Another agent serves this folder.
    AnotherRuns,
    /// All work is finished.
    Drained,
    /// This number of states and snapshots still waits in shared memory.
    Waiting(u64),
}
