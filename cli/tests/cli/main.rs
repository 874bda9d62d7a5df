//! The command line, run as a program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod advise;
mod differences;
mod faults;
mod gradients;
mod guards;
mod place;
mod report;
mod reports;
mod states;
mod statistics;
mod upkeep;
