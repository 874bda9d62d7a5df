//! The asynchronous engine of tensorcask: a save costs the trainer one copy, and a crash loses nothing that memory still holds.
//!
//! [`Engine::save`] copies a state into a pre-faulted arena in shared memory and returns. An *agent*, a process of its own, encodes it
//! into a store in shared memory (the *memory tier*), and copies that to the first tier, a store like any other, and on to further ones.
//! [`Engine::restore`] takes the nearest whole copy: the raw slot, the encoded snapshot in memory, then the tiers. Trainer and agent may
//! both be killed at any moment: what they left in shared memory is checked and used by their successors.
//!
//! It is a crate apart from the library: it needs Linux, processes and unsafe memory maps, none of which a reader of checkpoints should
//! have to build; and it uses the library through its public interface alone. See `docs/src/guides/engine.md` for what survives which
//! failure.

#![cfg(target_os = "linux")]

mod options;
mod place;

mod slot;

#[allow(unsafe_code, reason = "maps a file that several processes share, and copies past the cache")]
mod memory;

mod image;

mod arena;

mod seen;

mod tier;

mod inline;

mod protocol;
mod status;

mod agent;

mod agreement;
mod connection;
mod engine;
mod places;
mod restore;

pub use agent::{AgentOptions, Ended, run_agent};
pub use agreement::{Agreement, agree};
pub use connection::{agent_metrics, agent_status, stop_agent};
pub use engine::{Engine, Mapping, Outcome, Saving, Until, Waited};
pub use image::Deferred;
pub use options::{BackPressure, Encode, EngineOptions, OnAgentLoss};
pub use place::FOLDER_VARIABLE;
pub use places::{SnapshotPlace, places_beside};
pub use protocol::Failure;
pub use restore::{Destination, Elements, Loadable, Part, PassedOver, Restored, RestoredTensor, Source};
pub use status::{AgentStatus, RankStatus, RunStatus, SaveStatus, SlotStatus, TierStatus};

/// Threads of a runtime that read and write files. Each keeps some megabytes of the allocator's, and there would be hundreds.
const MAX_BLOCKING: usize = 16;

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    let elapsed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
