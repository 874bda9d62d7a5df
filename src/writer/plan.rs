//! The plan of a save: all shards to encode, the partners that codecs may use, and the windows.
//!
//! Invariant: the shards of the plan are listed cask by cask, each in cask order.

use std::collections::{BTreeSet, HashMap};

use super::choices::ChunkFamily;
use super::input::{ChunkRef, SaveInput};
use super::schedule::{PlannedShard, Window, schedule};
use crate::codec::Need;
use crate::precision::Setting;
use crate::tensor::ChunkGrid;
use crate::{Dtype, Result};

/// A shard to encode.
#[derive(Debug, Clone)]
pub(super) struct SaveShard {
    /// First chunk of the shard.
    pub first: ChunkRef,
    pub grid: ChunkGrid,
    /// Slot of the cask that takes the shard.
    pub slot: u32,
    pub partners: Vec<ShardPartner>,
    /// Chunks of other shards that are likely to compress like those of this one.
    pub family: ChunkFamily,
}

impl SaveShard {
    pub(super) fn chunk(&self, chunk: u64) -> ChunkRef {
        ChunkRef { chunk, ..self.first }
    }
}

/// The same rectangle of another tensor of the parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShardPartner {
    pub role: &'static str,
    /// Position of the partner in the plan.
    pub shard: usize,
    /// Whether codecs may also use the same chunk of the partner in the parent.
    pub base: bool,
    /// Whether the partner only helps to encode.
    pub is_hint: bool,
}

/// The plan of a save.
#[derive(Debug)]
pub(super) struct SavePlan {
    pub shards: Vec<SaveShard>,
    pub windows: Vec<Window>,
    /// Shards that are partners of a shard in another unit.
    pub partners_elsewhere: BTreeSet<usize>,
}

impl SavePlan {
    /// Decoded bytes of a window.
    pub(super) fn decoded_bytes(&self, window: &Window) -> u64 {
        let chunks = window.units.iter().flat_map(|unit| unit.shards.iter().map(|&shard| self.shards[shard].grid.bytes(unit.chunk)));
        chunks.map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add)
    }

    pub(super) fn new(input: &SaveInput<'_>) -> Result<Self> {
        let mut shards = shards(input)?;
        let positions: HashMap<(usize, usize), usize> =
            shards.iter().enumerate().map(|(position, shard)| ((shard.first.tensor, shard.first.shard), position)).collect();
        let registry = input.store.registry();
        let mut needs_of: HashMap<(Dtype, &str), [Vec<Need>; 2]> = HashMap::new();
        for shard in &mut shards {
            let description = &input.tensor(shard.first).description;
            let dtype = description.dtype;
            let role = description.role.as_str();
            let found = || [registry.partner_roles(role), registry.hint_roles(dtype, role)];
            let [needs, hints] = needs_of.entry((dtype, role)).or_insert_with(found);
            let partners = needs.iter().map(|need| (need, false)).chain(hints.iter().map(|hint| (hint, true)));
            shard.partners = partners.filter_map(|(&need, is_hint)| partner(input, &positions, shard.first, need, is_hint)).collect();
        }
        let partners = |shard: &SaveShard| shard.partners.iter().map(|partner| partner.shard).collect();
        let planned: Vec<PlannedShard> =
            shards.iter().map(|shard| PlannedShard { cask: shard.slot, grid: shard.grid, partners: partners(shard) }).collect();
        let windows = schedule(&planned);
        let units = windows.iter().flat_map(|window| &window.units);
        let partners_elsewhere = units.flat_map(|unit| {
            let partners = unit.shards.iter().flat_map(|&shard| &shards[shard].partners).map(|partner| partner.shard);
            partners.filter(|partner| !unit.shards.contains(partner))
        });
        let partners_elsewhere = partners_elsewhere.collect();
        Ok(Self { shards, windows, partners_elsewhere })
    }
}

/// All shards with chunks to encode, cask by cask. An empty shard that the parent has is unchanged, and left out.
fn shards(input: &SaveInput<'_>) -> Result<Vec<SaveShard>> {
    let mut shards = Vec::new();
    for (number, tensor) in input.layout.tensors.iter().enumerate() {
        for (shard, view) in tensor.shards.iter().enumerate() {
            let base = input.parent.and_then(|parent| parent.find(view));
            let first = ChunkRef { tensor: number, shard, chunk: 0, base };
            let grid = input.grid(first)?;
            if grid.chunk_count() > 0 || base.is_none() {
                let role = &tensor.description.role;
                let param = &tensor.description.param;
                let distance = input.parent.filter(|_| base.is_some()).map(|parent| input.step.abs_diff(parent.snapshot.step()));
                let family = ChunkFamily::new(role, param, distance);
                shards.push(SaveShard { first, grid, slot: tensor.slot, partners: Vec::new(), family });
            }
        }
    }
    shards.sort_by_key(|shard| shard.slot);
    Ok(shards)
}

/// The partner of a shard that some codec may use, if the state has it.
fn partner(
    input: &SaveInput<'_>,
    positions: &HashMap<(usize, usize), usize>,
    at: ChunkRef,
    need: Need,
    is_hint: bool,
) -> Option<ShardPartner> {
    let place = input.layout.partner(at.tensor, need.role, input.view(at).rect())?;
    let partner = ChunkRef { tensor: place.0, shard: place.1, chunk: 0, base: None };
    if need.base && input.precision(input.tensor(partner)).setting != Setting::Lossless {
        // A prediction from rounded moments saves too little to be worth its time.
        return None;
    }
    // Readers look for the base of a partner among the partners of the parent.
    let base = need.base
        && at.base.zip(input.parent).is_some_and(|(own, parent)| {
            let found = parent.find(input.view(partner));
            found.is_some() && parent.snapshot.chain.newest().directory.partner(own, need.role) == found
        });
    Some(ShardPartner { role: need.role, shard: *positions.get(&place)?, base, is_hint })
}
