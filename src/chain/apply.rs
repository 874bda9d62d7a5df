//! Rebuilds chunks: each op of a recipe on the results of those before.

use bytes::Bytes;

use crate::codec::{ChunkKind, Columns, Partner, Registry};
use crate::limits::{to_usize, zeroed};
use crate::plan::read::ShardPlan;
use crate::plan::recipe::{Op, Recipe};
use crate::{Error, Result};

/// A wanted chunk: what makes it, and the CRC-32 that its bytes have to have.
pub(crate) struct Aim<'a> {
    pub op: usize,
    pub crc: u32,
    /// Where it goes; a buffer of its own otherwise.
    pub out: Option<&'a mut [u8]>,
}

/// The result of an op.
enum Value<'a> {
    Owned(Vec<u8>),
    Out(&'a mut [u8]),
}

impl Value<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Out(bytes) => bytes,
        }
    }
}

/// Decodes chunk `chunk` of the shards of a recipe, with the pages of each op; compares what is wanted with its checksums. Gives the
/// buffers of the aims that have no place of their own. An error comes with the op at which it arose.
pub(crate) fn decode_recipe(
    registry: &Registry,
    shards: &[ShardPlan],
    recipe: &Recipe,
    chunk: u64,
    pages: &[Vec<Bytes>],
    aims: Vec<Aim<'_>>,
) -> std::result::Result<Vec<Option<Vec<u8>>>, (usize, Error)> {
    let ops = &recipe.ops;
    let mut last_use: Vec<usize> = (0..ops.len()).collect();
    for (at, op) in ops.iter().enumerate() {
        let partners = op.partners.iter().flat_map(|partner| [Some(partner.now), partner.base]);
        for used in partners.chain([op.base]).flatten() {
            last_use[used] = at;
        }
    }
    let mut values: Vec<Option<Value<'_>>> = ops.iter().map(|_| None).collect();
    let mut wanted = Vec::with_capacity(aims.len());
    for Aim { op, crc, out } in aims {
        wanted.push((op, crc, out.is_none()));
        if let (Some(out), Some(value)) = (out, values.get_mut(op)) {
            *value = Some(Value::Out(out));
        }
        if let Some(last) = last_use.get_mut(op) {
            *last = ops.len();
        }
    }
    let mut spare: Vec<Vec<u8>> = Vec::new();
    for (at, (op, pages)) in ops.iter().zip(pages).enumerate() {
        let mut value = match values[at].take() {
            Some(value) => value,
            None => Value::Owned(buffer_for(shards, op, chunk, &mut spare).map_err(|e| (at, e))?),
        };
        let out: &mut [u8] = match &mut value {
            Value::Owned(bytes) => bytes,
            Value::Out(bytes) => bytes,
        };
        decode_op(registry, shards, op, chunk, pages, &values, out).map_err(|e| (at, e))?;
        values[at] = Some(value);
        let partners = op.partners.iter().flat_map(|partner| [Some(partner.now), partner.base]);
        for used in partners.chain([op.base]).flatten() {
            if last_use[used] == at
                && let Some(Value::Owned(bytes)) = values[used].take()
            {
                spare.push(bytes);
            }
        }
    }
    let mut results = Vec::with_capacity(wanted.len());
    for (op, crc, owned) in wanted {
        let Some(value) = values.get_mut(op) else { return Err((op, Error::invalid("no such op"))) };
        if value.as_ref().is_none_or(|value| crc32fast::hash(value.bytes()) != crc) {
            let message = "decoded bytes do not have the checksum that they had when they were saved";
            return Err((op, Error::corrupt(message).clause("chain 3.4")));
        }
        results.push(match value.take() {
            Some(Value::Owned(bytes)) if owned => Some(bytes),
            _ => None,
        });
    }
    Ok(results)
}

fn buffer_for(shards: &[ShardPlan], op: &Op, chunk: u64, spare: &mut Vec<Vec<u8>>) -> Result<Vec<u8>> {
    let plan = shards.get(op.shard).ok_or_else(|| Error::invalid("a shard that was not planned"))?;
    let bytes = plan.grid.bytes(chunk);
    let length = to_usize(bytes.end - bytes.start, "a chunk")?;
    match spare.iter().position(|bytes| bytes.len() == length) {
        Some(at) => Ok(spare.swap_remove(at)),
        None => zeroed(length, "a chunk"),
    }
}

fn decode_op(
    registry: &Registry,
    shards: &[ShardPlan],
    op: &Op,
    chunk: u64,
    pages: &[Bytes],
    values: &[Option<Value<'_>>],
    out: &mut [u8],
) -> Result<()> {
    let plan = shards.get(op.shard).ok_or_else(|| Error::invalid("a shard that was not planned"))?;
    let codec = op.step.entry.codec.as_ref().ok_or_else(|| Error::corrupt("a stored chunk without a codec"))?;
    let codec = registry.resolve(codec)?;
    if !codec.base_use().allows(op.step.entry.kind) || op.base.is_none() != (op.step.entry.kind == ChunkKind::Absolute) {
        return Err(Error::corrupt(format!("a chunk of codec `{}` that is {}", codec.id(), op.step.entry.kind.name())).clause("codecs 3"));
    }
    let value = |op: usize| -> Result<&[u8]> {
        values.get(op).and_then(Option::as_ref).map(Value::bytes).ok_or_else(|| Error::invalid("an op comes before what it needs"))
    };
    let mut partners = Vec::with_capacity(op.partners.len());
    for partner in &op.partners {
        let dtype = shards.get(partner.shard).ok_or_else(|| Error::invalid("a shard that was not planned"))?.dtype;
        partners.push(Partner { role: partner.role, dtype, data: value(partner.now)?, base: partner.base.map(value).transpose()? });
    }
    let columns: Vec<(&str, Bytes)> =
        op.step.entry.pages.iter().zip(pages).map(|(page, bytes)| (page.column.as_str(), bytes.clone())).collect();
    let elements = plan.grid.elements(chunk);
    let input = Columns {
        dtype: plan.dtype,
        element_count: elements.end - elements.start,
        columns: &columns,
        base: op.base.map(value).transpose()?,
        partners: &partners,
    };
    codec.decode(&input, out)
}
