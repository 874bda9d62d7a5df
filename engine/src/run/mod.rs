//! A run: its options, its description on this host, its tiers, and its status.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

pub(crate) mod hosts_option;

pub(crate) mod peers_option;

pub(crate) mod host_notes;

pub(crate) mod spec;

pub(crate) mod options;

pub(crate) mod known_tiers;

pub(crate) mod tier_query;

pub(crate) mod status;
