//! Proofs that receipts are those that their host has saved. They exist between the hosts of a session only, beside receipts in
//! mirrors and replicas. A store has none: see `spec/manifest.md`, clause 6.2.

use std::fmt::Debug;

use crate::Result;
use crate::wire::{Digest, RankRange};

/// Makes and checks proofs of receipts, for example signatures.
pub trait ReceiptProof: Debug + Send + Sync {
    /// Makes the proof of receipts that this host publishes. `receipts`: the bytes of the object.
    fn prove(&self, receipts: &[u8]) -> Result<Vec<u8>>;

    /// Checks receipts of these ranks that another host has sent. `proof`: `None` if there is none. Fails with `Corrupt` if they
    /// are not those that the host with these ranks has published.
    fn check(&self, ranks: RankRange, receipts: &[u8], proof: Option<&[u8]>) -> Result<()>;
}

/// Path of the proof of an object with receipts. Another object has another proof. `path`: of the object; `receipts`: its bytes.
pub fn receipt_proof_path(path: &str, receipts: &[u8]) -> String {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    format!("{folder}/{}.proof", Digest::of(receipts))
}

/// Size of the largest proof: a signature and a few certificates.
pub const MAX_RECEIPT_PROOF_BYTES: u64 = 64 << 10;
