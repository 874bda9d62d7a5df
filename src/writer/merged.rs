//! The tensors of all receipts of a step, merged into one directory.
//!
//! Several ranks may have the same shard: a *replica*, such as the step count of an optimizer, or any tensor of a job
//! with replicated data parallelism. The directory then names the shard of the lowest rank. All replicas must have the
//! same decoded bytes, by their checksums: otherwise the step makes no snapshot. Spec: `spec/manifest.md`, clause 6.1.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::check_tiles;
use super::unchanged::ChunkCrcs;
use crate::tensor::{Rect, element_count};
use crate::wire::{CaskRef, DirectoryShard, DirectoryTensor, Receipt, ReceiptTensor, blob_slot};
use crate::{Error, Limits, Result};

/// The tensors of all receipts, merged.
pub(super) struct Merged {
    /// Rows of the directory.
    pub rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)>,
    /// Checksums of each shard, in the order of the directory.
    pub crcs: Vec<Vec<u32>>,
    /// Decoded size of the stored tensors, in bytes.
    pub tensor_bytes: u64,
    /// Slots of casks whose shards are all replicas of shards elsewhere.
    spare_slots: BTreeSet<u32>,
}

impl Merged {
    /// Checksums of each tensor, by shard.
    pub(super) fn tensors(&self) -> Vec<ChunkCrcs<'_>> {
        let mut rest = self.crcs.as_slice();
        let mut tensors = Vec::with_capacity(self.rows.len());
        for (tensor, shards) in &self.rows {
            let (crcs, others) = rest.split_at_checked(shards.len()).unwrap_or_default();
            rest = others;
            tensors.push(ChunkCrcs { tensor, crcs });
        }
        tensors
    }

    pub(super) fn new(receipts: &[Receipt], limits: &Limits) -> Result<Self> {
        let mut tensors: BTreeMap<&str, Vec<Part<'_>>> = BTreeMap::new();
        for receipt in receipts {
            for tensor in &receipt.tensors {
                tensors.entry(&tensor.name).or_default().push(Part { step: receipt.step, rank: receipt.rank, tensor });
            }
        }
        Limits::check(tensors.len() as u64, limits.max_tensors, "number of tensors")?;
        let numbers: BTreeMap<&str, usize> = tensors.keys().enumerate().map(|(at, name)| (*name, at)).collect();
        let mut merged = Self { rows: Vec::with_capacity(tensors.len()), crcs: vec![], tensor_bytes: 0, spare_slots: BTreeSet::new() };
        let mut used_slots = BTreeSet::new();
        for (name, parts) in &tensors {
            let Some(Part { rank, tensor: first, .. }) = parts.first() else { continue };
            let description = |t: &ReceiptTensor| (t.dtype.clone(), t.shape.clone(), t.role.clone(), t.param.clone(), t.alias_of.clone());
            if let Some(other) = parts.iter().find(|part| description(part.tensor) != description(first)) {
                let message = format!("ranks {rank} and {} disagree about its dtype, shape, role, param or tie", other.rank);
                return Err(Error::invalid(message).tensor(*name));
            }
            let alias_of = match &first.alias_of {
                None => None,
                Some(target) => {
                    let number = numbers.get(target.as_str());
                    Some(*number.ok_or_else(|| Error::invalid("it is tied to a tensor that no rank has").tensor(*name))?)
                }
            };
            let dtype = first.dtype()?;
            let shards = shards_of(parts).map_err(|e| e.tensor(*name))?;
            used_slots.extend(shards.iter().map(|shard| shard.slot));
            merged.spare_slots.extend(parts.iter().map(|part| part.tensor.slot));
            if alias_of.is_none() {
                let rects: Vec<Rect> = shards.iter().map(|shard| shard.rect.clone()).collect();
                check_tiles(name, &first.shape, &rects)?;
                let bytes = element_count(&first.shape).and_then(|count| dtype.byte_count(count));
                merged.tensor_bytes = merged.tensor_bytes.saturating_add(bytes.unwrap_or(u64::MAX));
            }
            let row = DirectoryTensor {
                name: (*name).to_owned(),
                dtype,
                shape: first.shape.clone(),
                role: first.role.clone(),
                param: first.param.clone(),
                alias_of,
            };
            let shard_rows = shards.iter().map(|shard| DirectoryShard { rect: shard.rect.clone(), slot: shard.slot }).collect();
            merged.rows.push((row, shard_rows));
            merged.crcs.extend(shards.into_iter().map(|shard| shard.crcs));
        }
        merged.spare_slots = merged.spare_slots.difference(&used_slots).copied().collect();
        Ok(merged)
    }

    /// The casks of a receipt that the snapshot needs. A cask with nothing but replicas is left to garbage collection.
    pub(super) fn used_casks<'r>(&self, receipt: &'r Receipt) -> impl Iterator<Item = &'r CaskRef> {
        let blobs = blob_slot(receipt.rank);
        receipt.casks.iter().filter(move |cask| cask.slot == blobs || !self.spare_slots.contains(&cask.slot))
    }
}

/// A tensor in the receipt of a rank.
struct Part<'r> {
    step: u64,
    rank: u32,
    tensor: &'r ReceiptTensor,
}

/// A shard of a tensor, and the rank that has it.
struct RankShard {
    rect: Rect,
    step: u64,
    rank: u32,
    slot: u32,
    crcs: Vec<u32>,
}

/// The shards of a tensor, by position, without replicas.
fn shards_of(parts: &[Part<'_>]) -> Result<Vec<RankShard>> {
    let mut shards: Vec<RankShard> = Vec::new();
    for Part { step, rank, tensor } in parts {
        for shard in &tensor.shards {
            let rect = Rect { offset: shard.offset.clone(), shape: shard.shape.clone() };
            shards.push(RankShard { rect, step: *step, rank: *rank, slot: tensor.slot, crcs: shard.crcs()? });
        }
    }
    shards.sort_by(|a, b| (&a.rect, a.rank).cmp(&(&b.rect, b.rank)));
    let mut kept: Vec<RankShard> = Vec::with_capacity(shards.len());
    for shard in shards {
        match kept.last() {
            Some(first) if first.rect == shard.rect && first.rank != shard.rank => {
                if first.crcs != shard.crcs {
                    let message = format!(
                        "ranks {} and {} saved different values of the same part at step {}; give tensors that differ between ranks \
                         different names",
                        first.rank, shard.rank, shard.step
                    );
                    return Err(Error::invalid(message));
                }
            }
            _ => kept.push(shard),
        }
    }
    Ok(kept)
}
