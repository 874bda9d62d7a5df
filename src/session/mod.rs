//! Sessions of many hosts: one training job whose ranks run on several machines and save one snapshot together.
//!
//! A *session* is one start of such a job. The hosts talk through the store, or through their own copies of its objects. They
//! need no other service.
//!
//! 1. Ranks *offer* the steps that they can load, and agree on the step to begin with.
//! 2. Each host uploads the casks of its ranks, and publishes a *receipt* for each rank: the shards, their checksums, and the
//!    casks that hold them.
//! 3. One host, the *leader*, commits a step once there is a receipt of each rank. The log decides who leads, so two hosts that
//!    both believe to lead do no harm.
//! 4. To save faster than the store, a host writes to a *mirror* first: its part of the store, in its own memory. It uploads
//!    from there.
//! 5. Another host keeps a *replica* of that mirror, so that no step is lost with a host. A host that replaces a lost one
//!    *refills* its mirror from the others.
//!
//! Only parts of encoded snapshots move between hosts: casks, receipts, manifests and log entries. No host sends tensors.
//! `tensorcask-engine` runs all this in the background. Programs that save from one process, or gather the receipts of their
//! ranks themselves, need none of it: see [`Writer`](crate::Writer) and [`RankWriter`](crate::RankWriter). Spec:
//! `spec/log.md`, clause 8, and `spec/manifest.md`, clauses 6 and 7.
//!
//! | module | job |
//! |---|---|
//! | `offers` | steps that each rank can load; receipts of a job without sessions |
//! | `exchange` | messages of the hosts of one session: beginning, parent of each step, receipts, ends |
//! | `receipt_proof` | proofs that receipts come from a host of the session |
//! | `rank_set` | sets of ranks, as ranges |
//! | `log` | the log, as hosts follow it that wait for the leader |
//! | `host_writer` | uploads the casks and receipts of the ranks of one host |
//! | `leader_writer` | commits the steps of a session |
//! | `mirror`, `mirror_log` | a part of a store in the memory of one host; the log in it |
//! | `replica` | a checked copy of a mirror's own part, on another host |
//! | `refill` | the way back, for a host that was replaced |
//! | `held` | steps that a mirror holds completely |
//!
//! The rules of leadership are pure logic and lie below, in `commit::leadership` and `commit::known_log`. Every writer obeys
//! them.

mod exchange;
mod held;
mod host_writer;
mod leader_writer;
mod log;
mod mirror;
mod mirror_log;
mod offers;
mod rank_set;
mod receipt_proof;
mod refill;
mod replica;

pub use exchange::{SessionExchange, SessionSurvey};
pub use held::held_steps;
pub use host_writer::{HostWriter, RankState};
pub use leader_writer::LeaderWriter;
pub use log::SessionLog;
pub use mirror::Mirror;
pub use offers::{RankExchange, RankOffer};
pub use rank_set::RankSet;
pub use receipt_proof::{MAX_RECEIPT_PROOF_BYTES, ReceiptProof, receipt_proof_path};
pub use refill::{Refill, WantedCask};
pub use replica::{Replica, ReplicaReport};

pub use crate::commit::{AttemptStart, ContinuedSession, KnownLog, LeaderRefusal, LeaderState, Leadership};
