//! One run on many hosts: each host uploads the states of its ranks, and one leader commits. Spec: `spec/log.md`,
//! clause 8, and `spec/manifest.md`, clause 6.
//!
//! `protocol` is the part of one host as a pure state machine. `simulation` runs many of them, with a store that loses
//! answers, crashes, partitions, slow hosts and clocks that disagree.

mod event;
mod takeover_timeout;

mod protocol;

#[cfg(test)]
mod simulated_setup;

#[cfg(test)]
mod simulated_store;

#[cfg(test)]
mod simulated_host;

#[cfg(test)]
mod simulated_cluster;

#[cfg(test)]
mod simulated_driver;

#[cfg(test)]
mod simulation;

pub(crate) use event::{Action, Event, LogView, Request, SurveyedStep};
pub(crate) use protocol::{HostOptions, HostProtocol};
