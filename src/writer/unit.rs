//! Encoding of a unit: the chunks of one parameter at the same place.
//!
//! Codecs may use other chunks of the unit as partners. [`encode_unit`] encodes a chunk after its partners and passes
//! their *decoded* bytes, as a reader will have them. So a tensor that changes during a save cannot pass.
//!
//! Invariant: units can be encoded in any order. What a unit decodes to does not depend on other units. Which codec wins,
//! and with which coefficients, may: a codec tries the coefficients first that it found for another chunk.

use bytes::Bytes;
use tensorcask_kernels::spare::Spare;

use super::NonFinite;
use super::cask_writer::{ChunkPlace, EncodeOptions};
use super::statistics::Measured;
use crate::codec::{self, Candidate, Chosen, Chunk, ChunkKind, Columns, EncodedChunk, Partner, Registry, Trial, Wanted, encode_given};
use crate::limits::to_usize;
use crate::{Error, Result};

/// A chunk of a unit, as it will be stored.
#[derive(Debug)]
pub(crate) struct UnitChunk<'a> {
    pub place: ChunkPlace<'a>,
    /// The chunk, without partners.
    pub chunk: Chunk<'a>,
    /// The chunk as the codec that rounded it encoded it.
    pub rounded: Option<&'a Candidate>,
    /// Id of the codec that a rule assigns to the tensor.
    pub assigned: Option<&'a str>,
    pub partners: Vec<PartnerLink>,
    /// Whether the chunk is encoded. Other chunks are only partners.
    pub is_encoded: bool,
    /// Codecs to try.
    pub trial: Trial,
}

/// A partner of a chunk: another chunk of the same unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartnerLink {
    /// Role by which codecs ask for the partner.
    pub role: &'static str,
    /// Position of the partner in the unit.
    pub position: usize,
    /// Whether codecs may use the partner's base.
    pub base: bool,
    /// Whether the partner only helps to encode, and may be encoded later.
    pub is_hint: bool,
}

/// An encoded chunk of a unit.
#[derive(Debug)]
pub(crate) struct UnitResult {
    pub chosen: Chosen,
    /// Form that decodes without a base and without partners, if it was wanted.
    pub standalone: Option<EncodedChunk>,
    /// Statistics of the elements, if the options ask for them.
    pub statistics: Option<Measured>,
    /// Elements that should be finite and are not, if the options ask for them.
    pub non_finite: Option<NonFinite>,
}

/// Encodes the chunks of a unit. Each gets the codec that the objective prefers; `None` for a chunk that is only a
/// partner. With `standalone`, each also gets a form that decodes alone.
pub(crate) fn encode_unit(
    registry: &Registry,
    options: EncodeOptions,
    standalone: Standalone,
    unit: &[UnitChunk<'_>],
) -> Result<Vec<Option<UnitResult>>> {
    let mut decoded: Vec<Option<Spare>> = unit.iter().map(|_| None).collect();
    let mut gradients: Vec<Option<Spare>> = unit.iter().map(|_| None).collect();
    let mut results: Vec<Option<UnitResult>> = unit.iter().map(|_| None).collect();
    for position in partners_first(unit) {
        let Some(member) = unit.get(position) else { continue };
        let is_partner = unit.iter().any(|other| other.partners.iter().any(|link| link.position == position && !link.is_hint));
        if !member.is_encoded {
            decoded[position] = Some(Spare::copy_of(member.chunk.data)?);
            continue;
        }
        let partner = |link: &PartnerLink| {
            // Chunks that need each other in a circle do without the partner that comes later.
            let partner = unit.get(link.position)?;
            // A hint decides how many bytes a chunk takes, never what it decodes to.
            let data = if link.is_hint { partner.chunk.data } else { decoded.get(link.position)?.as_deref()? };
            let base = partner.chunk.base.filter(|_| link.base);
            let gradient = gradients.get(link.position).and_then(Option::as_deref);
            Some(Partner { role: link.role, dtype: partner.chunk.dtype, data, base, gradient })
        };
        let partners: Vec<Partner<'_>> = member.partners.iter().filter_map(partner).collect();
        let chunk = Chunk { partners: &partners, ..member.chunk };
        let trial = &member.trial;
        // Statistics and the check read the bytes that are stored: the source may have changed since they were encoded.
        let is_wanted = is_partner || options.statistics || options.finite;
        let EncodeOptions { objective, verify_after_encode: verify, .. } = options;
        let wanted = Wanted { objective, assigned: member.assigned, verify, decoded: is_wanted, trial };
        let mut chosen = encode_given(registry, wanted, &chunk, member.rounded).map_err(|e| member.place.locate(e))?;
        let own = chosen.decoded.take();
        let has_base = chunk.base.is_some() || chunk.changed_rows.is_some();
        if !has_base && chosen.encoded.kind != ChunkKind::Absolute {
            return Err(member.place.locate(Error::invalid("a codec made a delta without a base")));
        }
        let standalone = match standalone {
            Standalone::Wanted => Some(encode_alone(registry, options, member, &chosen.encoded)?),
            Standalone::NotWanted => None,
        };
        // The decoded bytes are in cache now.
        let statistics = match &own {
            Some(data) if options.statistics => Some(Measured::of(&Chunk { data, ..chunk }, chosen.encoded.kind)),
            _ => None,
        };
        let non_finite = match options.finite {
            true => {
                let measured = statistics.as_ref().and_then(Measured::values);
                let data = own.as_deref().unwrap_or(chunk.data);
                NonFinite::find(member.place.shard.tensor, chunk.role, chunk.dtype, data, measured)
            }
            false => None,
        };
        if is_partner {
            gradients[position] = stored_gradients(registry, &chosen.encoded, &chunk).map_err(|e| member.place.locate(e))?;
        }
        results[position] = Some(UnitResult { chosen, standalone, statistics, non_finite });
        decoded[position] = own.filter(|_| is_partner);
    }
    Ok(results)
}

/// The gradients that an encoded chunk holds, as a reader decodes them; `None` if its codec stores none.
fn stored_gradients(registry: &Registry, encoded: &EncodedChunk, chunk: &Chunk<'_>) -> Result<Option<Spare>> {
    let codec = encoded.codec.as_ref().and_then(|codec| registry.get(&codec.id)).filter(|codec| codec.offers_gradients(chunk));
    let Some(codec) = codec else { return Ok(None) };
    let columns: Vec<(&str, Bytes)> = encoded.columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    let input = Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base: chunk.base, partners: &[] };
    let mut decoded = Spare::new(chunk.data.len(), "a chunk")?;
    let mut gradients = Spare::new(to_usize(chunk.element_count.saturating_mul(4), "gradients")?, "gradients")?;
    codec::decode_gradient(codec.as_ref(), &input, &mut decoded, &mut gradients)?;
    Ok(Some(gradients))
}

/// Whether each chunk also gets a form that decodes without anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standalone {
    Wanted,
    NotWanted,
}

/// Encodes a chunk without base, changed rows and partners. A chunk that is encoded so already is not encoded again.
fn encode_alone(registry: &Registry, options: EncodeOptions, member: &UnitChunk<'_>, encoded: &EncodedChunk) -> Result<EncodedChunk> {
    let needs_nothing = encoded.codec.as_ref().is_some_and(|codec| registry.needs(codec, member.chunk.role).is_empty());
    if encoded.kind == ChunkKind::Absolute && needs_nothing {
        return Ok(encoded.clone());
    }
    let chunk = Chunk { base: None, changed_rows: None, partners: &[], ..member.chunk };
    let wanted = Wanted { objective: options.objective, assigned: None, verify: false, decoded: false, trial: &Trial::All };
    Ok(encode_given(registry, wanted, &chunk, None).map_err(|e| member.place.locate(e))?.encoded)
}

/// Positions of the chunks of a unit, each after its partners. A circle is broken at the chunk that comes first.
fn partners_first(unit: &[UnitChunk<'_>]) -> Vec<usize> {
    let mut order: Vec<usize> = Vec::with_capacity(unit.len());
    let mut waiting: Vec<usize> = (0..unit.len()).collect();
    while !waiting.is_empty() {
        let is_ready = |&position: &usize| {
            let partners = unit.get(position).map_or(&[][..], |chunk| &chunk.partners);
            partners.iter().all(|link| link.is_hint || order.contains(&link.position))
        };
        let ready = waiting.iter().position(is_ready).unwrap_or(0);
        order.push(waiting.remove(ready));
    }
    order
}
