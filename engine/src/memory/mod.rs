//! Encoded snapshots in shared memory.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod stores;

pub(crate) mod tier;

pub(crate) mod inline_generation;

pub(crate) mod places;
