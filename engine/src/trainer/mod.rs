//! The trainer: saves, the beginning and the end of a job.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod continuation;

pub(crate) mod attachment;

pub(crate) mod saving;

pub(crate) mod arena_writer;

pub(crate) mod inline_encoder;

pub(crate) mod meeting;

pub(crate) mod beginning;

pub(crate) mod engine;

pub(crate) mod preemption;
