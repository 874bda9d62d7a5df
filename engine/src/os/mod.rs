//! The operating system: time, waits, files, locks, folders and shared memory.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod clock;

pub(crate) mod interruption;

pub(crate) mod runtime;

pub(crate) mod files;

pub(crate) mod lock;

pub(crate) mod folders;

#[allow(unsafe_code, reason = "maps a file that several processes share, and copies past the cache")]
pub(crate) mod shared_memory;
