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

// Ground: the operating system.
mod clock;
mod interruption;
mod runtime;

mod files;

mod lock;

mod folders;

// Raw states in shared memory.
mod slot;

#[allow(unsafe_code, reason = "maps a file that several processes share, and copies past the cache")]
mod memory;

mod row_set;

mod image;

mod row_journal;

mod copy_plan;
mod damaged_copies;

mod arena_memory;

mod arena_file;

mod arena;

mod slot_access;

// Runs, their tiers, and encoded snapshots in shared memory.
mod hosts_option;

mod peers_option;

mod host_notes;

mod run_spec;

mod options;

mod known_tiers;

mod tier_query;

mod memory_stores;

mod row_trust;

mod memory_tier;

mod inline_generation;

// Many hosts.
mod hosts;

mod peers;

mod other_hosts;

// The agent.
mod status;

mod protocol;

mod framing;

mod agent;

// The trainer.
mod agent_process;
mod agreement;
mod connection;
mod continuation;

mod cleaning;
mod saving;
mod session;

mod population;

mod arena_writer;

mod inline_encoder;

mod restored;

mod freshness;

mod restore_request;

mod restore_read;

mod hosts_survey;

mod meeting;

mod earlier_sessions;

mod hosts_memory;

mod beginning;

mod loadable;
mod restore;

mod engine;

mod preemption;

mod snapshot_places;

// Checks for operators.
mod doctor;

pub use agent::{AgentOptions, Ended, run_agent};
pub use agreement::{Agreement, agree};
pub use cleaning::{CleanResult, CleanedRun, Cleaning, clean_runs};
pub use connection::{agent_metrics, agent_status, stop_agent};
pub use copy_plan::Deferred;
pub use doctor::{Check, CheckState, DoctorOptions, DoctorPeers, run_doctor};
pub use engine::Engine;
pub use folders::FOLDER_VARIABLE;
pub use hosts_option::Hosts;
pub use options::{BackPressure, Encode, EngineOptions, OnAgentLoss};
pub use peers::{CertificateFiles, InitTls, init_tls};
pub use peers_option::{PeerTls, Peers};
pub use preemption::{Drained, Preemption, PreemptionOptions};
pub use protocol::{Failure, Until};
pub use restored::{Destination, Elements, Loadable, Part, PassedOver, Restored, RestoredTensor, Source};
pub use saving::{Mapping, Outcome, Saving, Waited};
pub use snapshot_places::{SnapshotPlace, snapshot_places};
pub use status::{
    AgentStatus, HostsStatus, LeaderStatus, LevelStatus, RankStatus, ReplicaStatus, RunStatus, SaveStatus, SlotStatus, TierStatus,
};
