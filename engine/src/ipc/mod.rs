//! Trainer and agent talk: messages, their framing, and the process of the agent.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod messages;

pub(crate) mod framing;

pub(crate) mod agent_process;

pub(crate) mod connection;
