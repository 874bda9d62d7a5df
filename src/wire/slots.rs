//! Cask slots: the numbers that distinguish the casks of a snapshot. Spec: `spec/manifest.md`, clause 5.
//!
//! Each rank has two slots. Tensors of role `model` are in the first slot; all other tensors and the blobs are in the
//! second. A reader of weights therefore opens one cask per rank.

const MODEL_SLOT: u32 = 0;
const OTHER_SLOT: u32 = 1;

/// Highest rank whose slots fit in 32 bits.
pub(crate) const MAX_RANK: u32 = (u32::MAX - 1) / 2;

/// Slot of a rank's blobs.
pub(crate) fn blob_slot(rank: u32) -> u32 {
    rank.saturating_mul(2).saturating_add(OTHER_SLOT)
}

/// Slot of a rank's tensors of one role.
pub(crate) fn tensor_slot(rank: u32, role: &str) -> u32 {
    rank.saturating_mul(2).saturating_add(if role == "model" { MODEL_SLOT } else { OTHER_SLOT })
}
