//! Chains: when to write a base, which snapshots rebuild a step, and in which order. No I/O. Spec: `spec/chain.md`.

mod content;
mod decision;
mod decode;
mod link;
mod parent_choice;
mod policy;
mod recipe;
mod resolve;
mod times;
mod walk;

pub(crate) use content::content_digests;
pub use decision::{DecisionReason, DeltaEstimate, PolicyDecision};
pub(crate) use decode::{Aim, DecodedChunk, check_decoded, decode_recipe};
pub(crate) use link::Link;
pub(crate) use parent_choice::{ParentChoice, ParentSizes};
pub use policy::Policy;
pub(crate) use recipe::{Plans, Recipe, Rows};
pub(crate) use resolve::{chain_of, check_link};
pub use times::{PreviousSave, SaveTimes, StepTimes};
pub(crate) use times::{milliseconds, whole_microseconds};
pub(crate) use walk::{ChunkPlan, ShardPlan, Step};
