//! Chains: when to write a base, which snapshots rebuild a step, and how. No I/O. Spec: `spec/chain.md`.

mod apply;
mod content;
mod decision;
mod link;
mod policy;
mod resolve;

pub(crate) use apply::{Aim, decode_recipe};
pub(crate) use content::content_digests;
pub use decision::{Decision, Estimate, Reason};
pub(crate) use link::Link;
pub use policy::Policy;
pub(crate) use resolve::{chain_of, check_link};
