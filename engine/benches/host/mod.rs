//! A host of a benchmark of the engine: folder in shared memory, store, agent.
#![allow(dead_code, unreachable_pub, reason = "each benchmark uses a part of this")]

use std::path::PathBuf;
use std::time::Duration;

use tensorcask::TensorView;
use tensorcask_engine::{AgentStatus, EngineOptions, RunStatus, agent_status, stop_agent};

use crate::common::{Memcpy, Owned, fail, median};

pub const LONG: Duration = Duration::from_secs(600);

/// Folder and store of an engine.
pub struct Host {
    pub memory: tempfile::TempDir,
    disk: tempfile::TempDir,
}

impl Host {
    pub fn new(folder: Option<&str>) -> Self {
        let disk = match folder {
            Some(folder) => tempfile::tempdir_in(folder).unwrap(),
            None => tempfile::tempdir().unwrap(),
        };
        Self { memory: tempfile::tempdir_in("/dev/shm").unwrap(), disk }
    }

    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            folder: Some(self.memory.path().join("engine")),
            agent: vec![program().to_str().unwrap().to_owned(), "agent".to_owned()],
            ..EngineOptions::new(self.disk.path().join("store").to_str().unwrap())
        }
    }

    pub fn agent(&self) -> AgentStatus {
        agent_status(Some(&self.memory.path().join("engine"))).unwrap()
    }

    pub fn status(&self) -> (RunStatus, u64) {
        let mut status = self.agent();
        (status.runs.remove(0), status.resident_bytes)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let folder = self.memory.path().join("engine");
        let _ = stop_agent(Some(&folder));
        while folder.join("agent.sock").exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

pub fn program() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let found = here.ancestors().skip(1).take(2).map(|folder| folder.join("tensorcask")).find(|path| path.is_file());
    found.unwrap_or_else(|| fail("the command line is not built: cargo build --release --workspace"))
}

pub fn views(state: &[Owned]) -> Vec<TensorView<'_>> {
    state.iter().map(|tensor| TensorView::new(tensor.name.as_str(), tensor.dtype, &tensor.shape, &tensor.data).unwrap()).collect()
}

pub fn copy_seconds(state: &[Owned], memcpy: &mut Memcpy) -> f64 {
    median((0..3).map(|_| memcpy.seconds(state.iter().map(|tensor| tensor.data.as_slice()))).collect())
}
