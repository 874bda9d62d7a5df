//! Rebuilds chunks: applies each op of a recipe to the results of earlier ops.

use bytes::Bytes;
use tensorcask_kernels::spare::Spare;

use super::recipe::{Op, Recipe};
use super::walk::ShardPlan;
use crate::codec::{ChunkKind, Columns, GradientForm, Partner, Registry};
use crate::limits::{to_usize, zeroed};
use crate::{Error, Result};

/// A requested chunk: the op that produces it, and its expected CRC-32.
pub(crate) struct Aim<'a> {
    pub op: usize,
    pub crc: u32,
    /// Destination of the bytes. Without one, the chunk gets a buffer of its own.
    pub out: Option<&'a mut [u8]>,
    /// Whether the gradients that the chunk stores are requested, too.
    pub gradient: bool,
}

/// A requested chunk, decoded and compared with its checksum.
#[derive(Debug, Default)]
pub(crate) struct DecodedChunk {
    /// Decoded bytes; `None` if they went to a destination.
    pub bytes: Option<Vec<u8>>,
    /// Gradients, if they were requested.
    pub gradients: Option<Gradients>,
}

/// Gradients of a chunk.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// An f32 for each element.
    pub numbers: Spare,
    pub form: GradientForm,
}

/// Result of an op.
enum Value<'a> {
    Owned(Vec<u8>),
    Between(Spare),
    Out(&'a mut [u8]),
}

impl Value<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Between(bytes) => bytes,
            Self::Out(bytes) => bytes,
        }
    }
}

/// Decodes chunk `chunk` of the shards of a recipe, given the pages of each op. Compares the requested chunks with
/// their checksums. An error names the op that failed.
pub(crate) fn decode_recipe(
    registry: &Registry,
    shards: &[ShardPlan],
    recipe: &Recipe,
    chunk: u64,
    pages: &[Vec<Bytes>],
    aims: Vec<Aim<'_>>,
) -> std::result::Result<Vec<DecodedChunk>, (usize, Error)> {
    let ops = &recipe.ops;
    let mut last_use: Vec<usize> = (0..ops.len()).collect();
    let mut last_use_of_gradients = last_use.clone();
    for (at, op) in ops.iter().enumerate() {
        for used in op.inputs() {
            last_use[used] = at;
        }
        for partner in op.partners.iter().filter(|partner| partner.gradient) {
            last_use_of_gradients[partner.now] = at;
        }
    }
    let mut values: Vec<Option<Value<'_>>> = ops.iter().map(|_| None).collect();
    let mut gradients: Vec<Option<Gradients>> = ops.iter().map(|_| None).collect();
    let mut gives_gradient: Vec<bool> = ops.iter().map(|op| op.gives_gradient).collect();
    let mut wanted = Vec::with_capacity(aims.len());
    for Aim { op, crc, out, gradient } in aims {
        wanted.push((op, crc, out.is_none()));
        if gradient && let (Some(gives), Some(last)) = (gives_gradient.get_mut(op), last_use_of_gradients.get_mut(op)) {
            *gives = true;
            *last = ops.len();
        }
        if let Some(value) = values.get_mut(op) {
            let own = || length_of(shards, ops, op, chunk).and_then(|bytes| Ok(zeroed(bytes, "a chunk")?)).map_err(|e| (op, e));
            *value = Some(match out {
                Some(out) => Value::Out(out),
                None => Value::Owned(own()?),
            });
        }
        if let Some(last) = last_use.get_mut(op) {
            *last = ops.len();
        }
    }
    for (at, (op, pages)) in ops.iter().zip(pages).enumerate() {
        let mut value = match values[at].take() {
            Some(value) => value,
            None => {
                let between = length_of(shards, ops, at, chunk).and_then(|bytes| Ok(Spare::new(bytes, "a chunk")?));
                Value::Between(between.map_err(|e| (at, e))?)
            }
        };
        let out: &mut [u8] = match &mut value {
            Value::Owned(bytes) => bytes,
            Value::Between(bytes) => bytes,
            Value::Out(bytes) => bytes,
        };
        let mut numbers = match gives_gradient[at] {
            true => Some(gradients_of(shards, op, chunk).map_err(|e| (at, e))?),
            false => None,
        };
        let inputs = Decoded { values: &values, gradients: &gradients };
        let form = decode_op(registry, shards, op, chunk, pages, inputs, out, numbers.as_deref_mut()).map_err(|e| (at, e))?;
        values[at] = Some(value);
        gradients[at] = numbers.zip(form).map(|(numbers, form)| Gradients { numbers, form });
        for used in op.inputs() {
            if last_use[used] == at {
                values[used] = None;
            }
            // A chunk that is requested stays to the end; its gradients only if they are requested, too.
            if last_use_of_gradients[used] <= at {
                gradients[used] = None;
            }
        }
    }
    let mut results = Vec::with_capacity(wanted.len());
    for (op, crc, owned) in wanted {
        let Some(value) = values.get_mut(op) else { return Err((op, Error::invalid("no such op"))) };
        let made = value.as_ref().ok_or_else(|| Error::corrupt("a chunk was not decoded"));
        made.and_then(|made| check_decoded(made.bytes(), crc)).map_err(|e| (op, e))?;
        let bytes = match value.take() {
            Some(Value::Owned(bytes)) if owned => Some(bytes),
            _ => None,
        };
        results.push(DecodedChunk { bytes, gradients: gradients.get_mut(op).and_then(Option::take) });
    }
    Ok(results)
}

/// Compares the decoded bytes of a chunk with their CRC-32.
pub(crate) fn check_decoded(bytes: &[u8], crc: u32) -> Result<()> {
    if crc32fast::hash(bytes) == crc {
        return Ok(());
    }
    Err(Error::corrupt("decoded bytes do not have the checksum that they had when they were saved").clause("chain 3.4"))
}

/// Returns the number of bytes of the chunk that an op produces.
fn length_of(shards: &[ShardPlan], ops: &[Op], op: usize, chunk: u64) -> Result<usize> {
    let plan = ops.get(op).and_then(|op| shards.get(op.shard)).ok_or_else(|| Error::invalid("a shard that was not planned"))?;
    let bytes = plan.grid.bytes(chunk);
    to_usize(bytes.end - bytes.start, "a chunk")
}

/// Returns a buffer for the gradients of a chunk: an f32 for each element.
fn gradients_of(shards: &[ShardPlan], op: &Op, chunk: u64) -> Result<Spare> {
    let plan = shards.get(op.shard).ok_or_else(|| Error::invalid("a shard that was not planned"))?;
    let elements = plan.grid.elements(chunk);
    Ok(Spare::new(to_usize((elements.end - elements.start).saturating_mul(4), "gradients")?, "gradients")?)
}

/// Results of the ops so far.
#[derive(Clone, Copy)]
struct Decoded<'a> {
    values: &'a [Option<Value<'a>>],
    gradients: &'a [Option<Gradients>],
}

impl<'a> Decoded<'a> {
    fn value(&self, op: usize) -> Result<&'a [u8]> {
        self.values.get(op).and_then(Option::as_ref).map(Value::bytes).ok_or_else(too_early)
    }

    fn gradient(&self, op: usize) -> Result<&'a [u8]> {
        self.gradients.get(op).and_then(Option::as_ref).map(|gradients| &*gradients.numbers).ok_or_else(too_early)
    }
}

fn too_early() -> Error {
    Error::invalid("an op comes before an op that it depends on")
}

/// Decodes one op. Returns how the chunk stores its gradients, if there is a buffer for them.
#[allow(clippy::too_many_arguments, reason = "the parts of one op")]
fn decode_op(
    registry: &Registry,
    shards: &[ShardPlan],
    op: &Op,
    chunk: u64,
    pages: &[Bytes],
    inputs: Decoded<'_>,
    out: &mut [u8],
    gradient: Option<&mut [u8]>,
) -> Result<Option<GradientForm>> {
    let plan = shards.get(op.shard).ok_or_else(|| Error::invalid("a shard that was not planned"))?;
    let codec = op.step.entry.codec.as_ref().ok_or_else(|| Error::corrupt("a stored chunk without a codec"))?;
    let codec = registry.resolve(codec)?;
    if !codec.base_use().allows(op.step.entry.kind) || op.base.is_none() != (op.step.entry.kind == ChunkKind::Absolute) {
        return Err(Error::corrupt(format!("a chunk of codec `{}` that is {}", codec.id(), op.step.entry.kind.name())).clause("codecs 3"));
    }
    let mut partners = Vec::with_capacity(op.partners.len());
    for partner in &op.partners {
        let dtype = shards.get(partner.shard).ok_or_else(|| Error::invalid("a shard that was not planned"))?.dtype;
        let gradient = if partner.gradient { Some(inputs.gradient(partner.now)?) } else { None };
        let base = partner.base.map(|base| inputs.value(base)).transpose()?;
        partners.push(Partner { role: partner.role, dtype, data: inputs.value(partner.now)?, base, gradient });
    }
    let columns: Vec<(&str, Bytes)> =
        op.step.entry.pages.iter().zip(pages).map(|(page, bytes)| (page.column.as_str(), bytes.clone())).collect();
    let elements = plan.grid.elements(chunk);
    let input = Columns {
        dtype: plan.dtype,
        element_count: elements.end - elements.start,
        columns: &columns,
        base: op.base.map(|base| inputs.value(base)).transpose()?,
        partners: &partners,
    };
    match gradient {
        Some(gradient) => crate::codec::decode_gradient(codec.as_ref(), &input, out, gradient).map(Some),
        None => crate::codec::decode(codec.as_ref(), &input, out).map(|()| None),
    }
}
