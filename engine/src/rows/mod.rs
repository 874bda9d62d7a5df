//! Rows that changed since a save: their sets, their journal in the trainer, and the encoder's trust in them.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod set;

pub(crate) mod journal;

pub(crate) mod trust;
