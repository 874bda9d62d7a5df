//! A restore: what memory, peers and tiers have, the step that all ranks agree on, and the reading of it.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod agreement;

pub(crate) mod damaged_copies;

pub(crate) mod restored;

pub(crate) mod freshness;

pub(crate) mod request;

pub(crate) mod read;

pub(crate) mod hosts_survey;

pub(crate) mod earlier_sessions;

pub(crate) mod hosts_memory;

pub(crate) mod search;

pub(crate) mod loadable;
