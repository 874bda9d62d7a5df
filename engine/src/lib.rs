//! Asynchronous checkpoints for tensorcask: a save stops the trainer for one copy, and a crash loses no save that
//! memory still holds.
//!
//! [`Engine::save`] copies a state into an arena in shared memory and returns. A background process, the *agent*,
//! encodes the state into a store in shared memory (the *memory tier*), uploads the snapshot to the first tier, and
//! copies it to further tiers. [`Engine::restore`] reads the nearest complete copy: the raw slot of the arena, the
//! encoded snapshot in memory, or a tier. Trainer and agent may be killed at any moment. Their successors check and use
//! the contents of shared memory.
//!
//! This is a separate crate, because it needs Linux, processes and unsafe memory maps, and readers of checkpoints
//! should not have to build these. It uses only the public interface of the library. See `docs/src/guides/engine.md` for the
//! failures that each kind of copy survives.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

#![cfg(target_os = "linux")]

mod os;

mod rows;

mod arena;

mod run;

mod memory;

mod hosts;

mod peers;

mod ipc;

mod restore;

mod agent;

mod trainer;

mod doctor;

pub use agent::{AgentOptions, Ended, run_agent};
pub use arena::copy_plan::Deferred;
pub use doctor::cleaning::{CleanResult, CleanedRun, Cleaning, clean_runs};
pub use doctor::{Check, CheckState, DoctorOptions, DoctorPeers, run_doctor};
pub use ipc::connection::{agent_metrics, agent_status, stop_agent};
pub use ipc::messages::{Failure, Until};
pub use memory::places::{SnapshotPlace, snapshot_places};
pub use os::folders::FOLDER_VARIABLE;
pub use peers::{CertificateFiles, InitTls, init_tls};
pub use restore::agreement::{Agreement, agree};
pub use restore::restored::{Destination, Elements, Loadable, Part, PassedOver, Restored, RestoredTensor, Source};
pub use run::hosts_option::Hosts;
pub use run::options::{BackPressure, Encode, EngineOptions, OnAgentLoss};
pub use run::peers_option::{PeerTls, Peers};
pub use run::status::{
    AgentStatus, HostsStatus, LeaderStatus, LevelStatus, RankStatus, ReplicaStatus, RunStatus, SaveStatus, SlotStatus, TierStatus,
};
pub use trainer::engine::Engine;
pub use trainer::preemption::{Drained, Preemption, PreemptionOptions};
pub use trainer::saving::{Mapping, Outcome, Saving, Waited};
