//! Proofs that receipts are those that their host has saved. They exist between the hosts of a session only, beside receipts in
//! mirrors and replicas. A store has none: see `spec/manifest.md`, clause 6.2.

use std::fmt::Debug;

use crate::Result;
use crate::wire::{Digest, RankRange, SessionName, SessionStep};

/// Makes and checks proofs of receipts, for example signatures.
pub trait ReceiptProof: Debug + Send + Sync {
    /// Makes the proof of receipts that this host publishes. `receipts`: the bytes of the object.
    fn prove(&self, receipts: &[u8]) -> Result<Vec<u8>>;

    /// Checks receipts of these ranks that another host has sent. `proof`: `None` if there is none. Fails with `Corrupt` if they
    /// are not those that the host with these ranks has published.
    fn check(&self, ranks: RankRange, receipts: &[u8], proof: Option<&[u8]>) -> Result<()>;
}

/// Path of the proof of an object with receipts. Another object has another proof.
pub(super) fn proof_path(session: SessionName, at: SessionStep, receipts: &[u8]) -> String {
    format!("{}/{}/{}.proof", session.folder(), at.folder(), Digest::of(receipts))
}

/// Size of the largest proof.
pub(super) const MAX_PROOF_BYTES: u64 = 64 << 10;
