//! Cask slots: the numbers that distinguish the casks of a snapshot. Spec: `spec/manifest.md`, clause 5.
//!
//! Tensors of role `model` have a slot of their own, so a reader of weights opens one cask per rank. In a large state,
//! so have the roles that codecs encode together with other roles: all casks of a rank can then be written at once,
//! parameter by parameter.

use std::ops::RangeInclusive;

const MODEL_SLOT: u32 = 0;
const OTHER_SLOT: u32 = 1;

/// First slot of single roles.
const FIRST_ROLE_SLOT: u32 = 1 << 31;
/// Slots of single roles that each rank has.
const ROLE_SLOTS: u32 = 4;
/// Roles with a slot of their own in a large state.
const ROLES: [&str; 3] = ["exp_avg", "exp_avg_sq", "master"];

/// Highest rank whose slots fit in 32 bits.
pub(crate) const MAX_RANK: u32 = FIRST_ROLE_SLOT / ROLE_SLOTS - 1;

/// Slot of a rank's blobs.
pub(crate) fn blob_slot(rank: u32) -> u32 {
    rank.saturating_mul(2).saturating_add(OTHER_SLOT)
}

/// Slot of a rank's tensors of one role, for a state whose roles are not kept apart.
pub(crate) fn tensor_slot(rank: u32, role: &str) -> u32 {
    rank.saturating_mul(2).saturating_add(if role == "model" { MODEL_SLOT } else { OTHER_SLOT })
}

/// Slot of a rank's tensors of one role, for a large state.
pub(crate) fn role_slot(rank: u32, role: &str) -> u32 {
    match (0u32..).zip(ROLES).find(|(_, known)| *known == role) {
        Some((number, _)) => rank.saturating_mul(ROLE_SLOTS).saturating_add(FIRST_ROLE_SLOT).saturating_add(number),
        None => tensor_slot(rank, role),
    }
}

/// All slots that a rank may use.
pub(crate) fn slots_of_rank(rank: u32) -> [RangeInclusive<u32>; 2] {
    let first_role = rank.saturating_mul(ROLE_SLOTS).saturating_add(FIRST_ROLE_SLOT);
    [blob_slot(rank).saturating_sub(1)..=blob_slot(rank), first_role..=first_role.saturating_add(ROLE_SLOTS - 1)]
}

/// Rank whose casks use a slot.
pub(crate) fn rank_of_slot(slot: u32) -> u32 {
    match slot.checked_sub(FIRST_ROLE_SLOT) {
        Some(number) => number / ROLE_SLOTS,
        None => slot / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_RANK, ROLES, rank_of_slot, role_slot, slots_of_rank, tensor_slot};

    #[test]
    fn slots_are_those_of_the_spec() {
        #[derive(serde::Deserialize)]
        struct Vectors {
            slot: Vec<Slot>,
        }
        #[derive(serde::Deserialize)]
        struct Slot {
            rank: u32,
            role: String,
            apart: u32,
            together: u32,
        }
        let vectors: Vectors = toml::from_str(include_str!("../../spec/vectors/manifest.toml")).unwrap();
        for Slot { rank, role, apart, together } in vectors.slot {
            assert_eq!((role_slot(rank, &role), tensor_slot(rank, &role)), (apart, together), "rank {rank}, {role}");
        }
    }

    #[test]
    fn ranks_share_no_slot() {
        for rank in [0, 1, 2, 1000, MAX_RANK - 1] {
            let ours = slots_of_rank(rank);
            let next = slots_of_rank(rank + 1);
            for (own, other) in ours.iter().zip(&next) {
                assert!(own.end() < other.start(), "rank {rank}");
            }
            assert!(ROLES.iter().all(|role| ours[1].contains(&role_slot(rank, role))));
            assert!(ours.iter().all(|slots| slots.clone().all(|slot| rank_of_slot(slot) == rank)));
            assert!(["model", "other"].iter().all(|role| ours[0].contains(&tensor_slot(rank, role))));
        }
        assert!(slots_of_rank(MAX_RANK)[0].end() < slots_of_rank(0)[1].start());
    }
}
