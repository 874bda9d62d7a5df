//! Peers: the agents of one run on other hosts. Each serves the encoded snapshots in its memory read-only over HTTPS, and
//! copies those of other hosts.
//!
//! ```text
//! host n: mirror/ ── serve ──── HTTPS, mutual TLS ────> peer_objects ─> Replica ─> replica-<n>/ :host n + jump
//!                                                       (ObjectStore)   (checks every byte)
//! ```
//!
//! A peer is authenticated by its certificate: it is signed by the authority of the run, and names the run. Still, nothing
//! that a peer sends is trusted before it is verified: lengths and ranges in `http_client`, names in `peer_objects`,
//! contents by the library, as for any store, and whose they are by `receipt_proof`.
//!
//! | module | job |
//! |---|---|
//! | `placement`, `replica_board` | which hosts copy which hosts; what is copied, and who answers |
//! | `resource`, `byte_range` | what a request names; parsed without I/O |
//! | `folder_access`, `listing` | opens and lists files below the run's folder, without following links |
//! | `handshakes`, `connection_waits` | connections that have not shown a certificate yet, and those that wait for a place |
//! | `certificates` | makes certificates |
//! | `tls` | certificates from files, checks of the other side |
//! | `signature`, `receipt_proof` | who has saved a step: signatures of receipts |
//! | `serve` | the server |
//! | `http_client`, `connect`, `peer_objects` | the client, an `ObjectStore` that reads |
//! | `version` | handshake of versions |
//! | `union` | several places with parts of a store as one store |
//! | `other_hosts` | the agents of a run's other hosts, as a rank reads from them |
//!
//! Reads use WebDAV's `PROPFIND` for listings, because the HTTP store of `object_store` does.
//!
//! Modules are declared from the ground up: a module imports only from modules declared before it.

mod byte_range;
mod connection_waits;
mod handshakes;
mod placement;
mod resource;
mod tls;
mod union;
mod version;

mod certificates;
mod connect;
mod folder_access;
mod replica_board;
mod signature;

mod http_client;
mod listing;
mod receipt_proof;

mod peer_objects;
mod serve;

pub(crate) mod other_hosts;

pub use certificates::{CertificateFiles, InitTls, init_tls};
pub(crate) use http_client::{ResponseLimits, probe_peer};
pub(crate) use peer_objects::Peer;
pub(crate) use placement::Placement;
pub(crate) use receipt_proof::{CheckedPlace, signed_receipts};
pub(crate) use replica_board::{Pulled, ReplicaBoard};
pub(crate) use resource::MEETING;
pub(crate) use serve::{MOST_LISTED, PeerServer};
pub(crate) use tls::Tls;
pub(crate) use union::{ListedPlace, Place, union_store};

/// Hosts that may be gone at once and still be replaced as holders.
pub(crate) const TOLERATED_LOSSES: u32 = 2;

#[cfg(test)]
mod tests;
