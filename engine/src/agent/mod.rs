//! The agent: a background process that encodes and uploads the states in shared memory. It outlives the trainers.
//!
//! One agent serves a host. Each run has one task that encodes from the arenas into the memory tier, and one task per
//! tier that uploads. Failed work is retried. A save that cannot succeed is reported to the trainer at its next save.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

mod encoding_attempts;
mod inherited;
mod judgements;

mod options;

mod retry;

mod step_selection;

mod save_log;

mod run_event;

mod metrics;

mod run_parts;

mod run_state;

mod noted_saves;

mod rank_arenas;

mod wakes;

mod run;

mod attached_rank;

mod copied_steps;
mod copy_report;

mod peer_tasks;
mod report;

mod encoder_queue;

mod storage_watch;

mod encode;

mod upload_source;

mod takeover;

mod undecided_saves;

mod upload;

mod host_work;

mod first_host;

mod copy_watch;

mod host_upload;

mod host_encode;

mod host_commit;

mod host_tasks;

mod registry;

mod connections;

mod process;

pub use options::{AgentOptions, Ended};
pub use process::run_agent;
