//! An agent process that this process has started. A thread waits for its end, so that it does not stay a zombie of a trainer that
//! runs for weeks.

use std::process::{Child, ExitStatus};
use std::sync::{Arc, OnceLock};

/// An agent process that this process has started.
#[derive(Debug, Clone)]
pub(crate) struct AgentProcess {
    ended: Arc<OnceLock<ExitStatus>>,
}

impl AgentProcess {
    /// Waits for the end of the process in a thread of its own.
    pub(crate) fn watch(mut child: Child) -> std::io::Result<Self> {
        let ended = Arc::new(OnceLock::new());
        let known = ended.clone();
        std::thread::Builder::new().name("tensorcask-reaper".to_owned()).stack_size(STACK_BYTES).spawn(move || {
            if let Ok(status) = child.wait() {
                let _ = known.set(status);
            }
        })?;
        Ok(Self { ended })
    }

    /// How the process has ended; `None` while it runs.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.ended.get().copied()
    }
}

/// The thread only waits.
const STACK_BYTES: usize = 64 << 10;
