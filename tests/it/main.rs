//! All tests of the library's interface, in one program. Every further program would link and optimise the library
//! again.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::little_endian_bytes,
    reason = "tests"
)]

mod adaptive;
mod ahead;
mod auto_precision;
mod bisect;
mod chains;
#[cfg(unix)]
mod changing_tensors;
mod codec_rules;
mod codecs;
mod commits;
mod common;
mod copies;
mod corruption;
mod crash;
mod damaged_mirrors;
#[cfg(feature = "aws")]
mod fault_proxy;
mod faults;
mod floors;
mod forks;
mod freeing;
mod gradients;
mod guards;
mod incomplete;
mod inline;
mod maintenance;
mod mirrors;
mod narrow;
mod newer;
mod numbered;
#[cfg(all(feature = "aws", feature = "azure"))]
mod object_stores;
mod objective;
mod opening;
mod partners;
mod precision;
mod precision_choice;
mod ranks;
mod replaced;
#[cfg(target_os = "linux")]
mod roots;
mod roundtrip;
mod rows;
mod sensitivity;
mod sessions;
mod spared_bases;
mod spec;
mod statistics;
#[cfg(target_os = "linux")]
mod storage;
mod views;
mod work;
