//! Tests of the engine with real processes: trainers and agents are killed, stores become unavailable, memory runs out.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::little_endian_bytes, reason = "tests")]

mod agents;
mod arenas;
mod cleaning;
mod comebacks;
mod damage;
mod deferred;
mod doctor;
mod environments;
mod faults;
mod guards;
mod hangs;
mod histories;
mod host;
mod hosts;
mod kills;
mod lost_stores;
mod many_hosts;
mod memory;
mod next_agents;
mod outages;
mod preemption;
mod ranks;
mod rows;
mod tiers;
