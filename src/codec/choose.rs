//! Picks the codec of a chunk by size and speed, with weights from the user, unless a rule assigns one. A chosen codec
//! never takes more bytes than raw, less what it saves in other tensors of the parameter; an assigned one may.

use bytes::Bytes;
use tensorcask_kernels::DefaultEnvironment;
use tensorcask_kernels::spare::Spare;

use super::objective::Measures;
use super::{Candidate, Chunk, ChunkKind, Codec, CodecRef, Columns, Encoded, EncodedChunk, Objective, Raw, Registry};
use crate::{Error, ErrorKind, Result};

/// Returns the bytes that a page of `bytes` adds to a cask: the padded page and its row in the index.
fn page_cost(bytes: u64) -> u64 {
    bytes.next_multiple_of(64).saturating_add(9)
}

/// Encodes a chunk with the lossless codec of the highest score. Ties go to the fewest bytes, then to the first id.
///
/// The result is never larger than raw. A chunk equal to its base takes no page. Writers call this function for each
/// chunk.
///
/// ```
/// use tensorcask::Dtype;
/// use tensorcask::codec::{Chunk, ChunkKind, EncodeCheck, Objective, Registry, encode_chunk};
/// let chunk = Chunk { base: Some(&[7; 8]), ..Chunk::new(Dtype::F32, 2, &[7; 8]) };
/// let encoded = encode_chunk(&Registry::default(), Objective::BALANCED, &chunk, EncodeCheck::Decode)?;
/// assert_eq!(encoded.kind, ChunkKind::Unchanged);
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn encode_chunk(registry: &Registry, objective: Objective, chunk: &Chunk<'_>, check: EncodeCheck) -> Result<EncodedChunk> {
    let wanted = Wanted { objective, assigned: None, verify: check == EncodeCheck::Decode, decoded: false, trial: &Trial::All };
    Ok(encode_given(registry, wanted, chunk, None)?.encoded)
}

/// Check of a chunk after it was encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncodeCheck {
    /// The result is decoded and compared with the chunk.
    Decode,
    /// The result is not checked.
    Skip,
}

/// A codec to try first, with the sizes of a similar chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Preferred {
    /// Id of the codec.
    pub codec: String,
    /// Whether the codec made a delta. The next chunk is stored the same way.
    pub kind: ChunkKind,
    pub decoded_bytes: u64,
    pub stored_bytes: u64,
}

impl Preferred {
    /// Whether the codec takes the base of the chunk and those of its partners.
    pub(crate) fn uses_bases(&self) -> bool {
        self.kind != ChunkKind::Absolute
    }

    /// The chunk as the codec takes it.
    fn input<'a>(&self, chunk: &Chunk<'a>) -> Chunk<'a> {
        if self.uses_bases() { *chunk } else { without_base(chunk) }
    }

    /// Whether a chunk is about as small as expected: at most 3 % larger, and a little for columns of fixed size.
    fn accepts(&self, decoded_bytes: u64, stored_bytes: u64) -> bool {
        const FIXED_BYTES: u128 = 256;
        let expected = u128::from(decoded_bytes) * u128::from(self.stored_bytes) / u128::from(self.decoded_bytes.max(1));
        u128::from(stored_bytes) <= expected + expected * 3 / 100 + FIXED_BYTES
    }
}

/// Codecs that are tried for a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trial {
    /// All codecs.
    All,
    /// All codecs, and all once more without the base. The gain of the base is then known.
    WithAndWithoutBase,
    /// One codec. All codecs, if its result is larger than expected.
    One(Preferred),
}

/// Way in which a codec was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChosenBy {
    /// The best of the estimates by all codecs; also an unchanged chunk.
    Estimate,
    /// The preferred codec. No other was tried.
    Preference,
    /// The codec that a rule assigns to the tensor.
    Rule,
    /// The best of the estimates by all codecs, because the result of the preferred codec was larger than expected.
    Fallback,
}

/// How a chunk is encoded, and which results are wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Weights by which codecs are chosen.
    pub objective: Objective,
    /// Id of the codec that a rule assigns to the chunk. The rule holds wherever this codec can encode the chunk.
    pub assigned: Option<&'a str>,
    /// Whether the chunk is decoded again and compared with its source.
    pub verify: bool,
    /// Whether the decoded bytes are returned.
    pub decoded: bool,
    /// Codecs to try.
    pub trial: &'a Trial,
}

/// A chunk, encoded with the codec that was chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub encoded: EncodedChunk,
    /// Decoded bytes, if they were wanted.
    pub decoded: Option<Spare>,
    pub by: ChosenBy,
    /// The best form without the base, if it is a different one and was wanted.
    pub absolute: Option<Preferred>,
    /// Expected bytes and work with each objective of [`LEVELS`], if the codecs were compared.
    pub levels: Option<[LevelEstimate; LEVELS.len()]>,
}

/// Objectives that [`ObjectiveSetting::Auto`](super::ObjectiveSetting::Auto) chooses from, by work.
pub(crate) const LEVELS: [Objective; 3] = [Objective::FASTEST, Objective::BALANCED, Objective::SMALLEST];

/// Expected size and work of a chunk with the codec that an objective prefers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LevelEstimate {
    /// Bytes in the cask, padding included.
    pub bytes: u64,
    /// Declared work of encoding and verifying, in units of one copy of a byte ([`Codec::cost`]).
    pub work: f32,
}

impl Chosen {
    fn unchanged(crc: u32, decoded: Option<Spare>) -> Self {
        Self { encoded: EncodedChunk::unchanged(crc), decoded, by: ChosenBy::Estimate, absolute: None, levels: None }
    }
}

/// Encodes a chunk like [`encode_chunk`], with one more candidate: the encoding by the codec that rounded the chunk.
pub(crate) fn encode_given(registry: &Registry, wanted: Wanted<'_>, chunk: &Chunk<'_>, given: Option<&Candidate>) -> Result<Chosen> {
    // Estimates and fits must not depend on the caller's floating-point environment.
    let _environment = DefaultEnvironment::enter();
    if wanted.decoded && !wanted.verify {
        // The copy is encoded, so both results are the same bytes even if the caller changes the tensor meanwhile.
        let copy = Spare::copy_of(chunk.data)?;
        let chosen = encode_given(registry, Wanted { decoded: false, ..wanted }, &Chunk { data: &copy, ..*chunk }, given)?;
        return Ok(Chosen { decoded: Some(copy), ..chosen });
    }
    if let Some(base) = chunk.base.filter(|base| *base == chunk.data) {
        let decoded = if wanted.decoded { Some(Spare::copy_of(base)?) } else { None };
        return Ok(Chosen::unchanged(crc32fast::hash(base), decoded));
    }
    if chunk.changed_rows.is_some_and(<[u64]>::is_empty) && chunk.base.is_none() {
        let decoded = if wanted.decoded { Some(Spare::copy_of(chunk.data)?) } else { None };
        let crc = crc32fast::hash(decoded.as_ref().map_or(chunk.data, |copy| &**copy));
        return Ok(Chosen::unchanged(crc, decoded));
    }
    let crc_of_source = if wanted.verify { None } else { Some(crc32fast::hash(chunk.data)) };
    let Best { codec, encoded, by, levels } = encode_best(registry, wanted, chunk, given)?;
    let kind = if encoded.uses_base { ChunkKind::Delta } else { ChunkKind::Absolute };
    let is_sample = *wanted.trial == Trial::WithAndWithoutBase
        && by != ChosenBy::Rule
        && wanted.objective.speed > 0
        && given.is_none()
        && chunk.base.is_some();
    let absolute = match is_sample && kind == ChunkKind::Delta {
        true => Some(absolute_form(registry, wanted, chunk)?),
        false => None,
    };
    let columns: Vec<(String, Bytes)> = encoded.into_bytes().into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
    let (crc, decoded) = match crc_of_source {
        Some(crc) => (crc, None),
        None => {
            let decoded = decode_again(codec, chunk, &columns, kind)?;
            (crc32fast::hash(&decoded), Some(decoded).filter(|_| wanted.decoded))
        }
    };
    let codec = Some(CodecRef { id: codec.id().to_owned(), version: codec.version() });
    Ok(Chosen { encoded: EncodedChunk { kind, codec, columns, crc }, decoded, by, absolute, levels })
}

/// Codec and size of a chunk without its base.
fn absolute_form(registry: &Registry, wanted: Wanted<'_>, chunk: &Chunk<'_>) -> Result<Preferred> {
    let Best { codec, encoded, .. } = encode_best(registry, Wanted { trial: &Trial::All, ..wanted }, &without_base(chunk), None)?;
    let stored_bytes = encoded.sizes().into_iter().fold(0, u64::saturating_add);
    Ok(Preferred { codec: codec.id().to_owned(), kind: ChunkKind::Absolute, decoded_bytes: chunk.data.len() as u64, stored_bytes })
}

/// A chunk as its codec encoded it.
struct Best<'r> {
    codec: &'r dyn Codec,
    encoded: Encoded,
    by: ChosenBy,
    levels: Option<[LevelEstimate; LEVELS.len()]>,
}

/// Encodes a chunk with the assigned codec; otherwise with the preferred codec, if the result is as small as expected;
/// otherwise with the lossless codec of the highest score, or with the given candidate.
fn encode_best<'r>(registry: &'r Registry, wanted: Wanted<'_>, chunk: &Chunk<'_>, given: Option<&'r Candidate>) -> Result<Best<'r>> {
    if let Some((codec, encoded)) = wanted.assigned.and_then(|id| encode_assigned(registry, id, chunk, given)).transpose()? {
        return Ok(Best { codec, encoded, by: ChosenBy::Rule, levels: None });
    }
    let raw_bytes = cost(&[chunk.data.len() as u64]);
    let mut tried: Option<(&dyn Codec, Encoded)> = None;
    if let (Trial::One(preferred), None) = (wanted.trial, given)
        && let Some(codec) = registry.get(&preferred.codec).filter(|codec| is_candidate(codec.as_ref(), chunk))
        && let Ok(encoded) = codec.encode(&preferred.input(chunk))
    {
        let sizes = encoded.sizes();
        let stored_bytes = sizes.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        if pays(codec.as_ref(), chunk, &sizes) && preferred.accepts(chunk.data.len() as u64, stored_bytes) {
            return Ok(Best { codec: codec.as_ref(), encoded, by: ChosenBy::Preference, levels: None });
        }
        tried = Some((codec.as_ref(), encoded)).filter(|_| preferred.uses_bases() || chunk.base.is_none());
    }
    let by = if matches!(wanted.trial, Trial::One(_)) { ChosenBy::Fallback } else { ChosenBy::Estimate };
    let candidates = estimates(registry, chunk, given);
    let level = |objective| {
        let (bytes, work) = best(objective, &candidates).map_or((raw_bytes, 0.0), |best| (best.measures.bytes, best.measures.work));
        LevelEstimate { bytes, work }
    };
    let levels = Some(LEVELS.map(level));
    let least_of = |codec: &dyn Codec, encoded: &Encoded| cost(&encoded.sizes()).saturating_sub(codec.saved_elsewhere(chunk));
    let mut chosen: Option<(&dyn Codec, Encoded)> = None;
    for codec in finalists(wanted.objective, &candidates) {
        let encoded = match (given.filter(|given| given.codec.id() == codec.id()), tried.take_if(|(tried, _)| tried.id() == codec.id())) {
            (Some(given), _) => given.encoded.clone(),
            (None, Some((_, encoded))) => encoded,
            (None, None) => codec.encode(chunk)?,
        };
        if chosen.as_ref().is_none_or(|(known, least)| least_of(codec, &encoded) < least_of(*known, least)) {
            chosen = Some((codec, encoded));
        }
    }
    match chosen {
        // An estimate may have been too low.
        Some((codec, encoded)) if pays(codec, chunk, &encoded.sizes()) => Ok(Best { codec, encoded, by, levels }),
        _ => Ok(Best { codec: &Raw, encoded: Raw.encode(chunk)?, by, levels }),
    }
}

/// Whether a chunk of these pages takes no more than raw, without what it saves in chunks of its partners.
fn pays(codec: &dyn Codec, chunk: &Chunk<'_>, sizes: &[u64]) -> bool {
    let raw_bytes = cost(&[chunk.data.len() as u64]);
    cost(sizes) <= raw_bytes || cost(sizes).saturating_sub(codec.saved_elsewhere(chunk)) <= raw_bytes
}

/// Returns the codec of the highest score. Without a weight for speed, returns all codecs that may take the fewest bytes, because
/// codecs often differ by less than an estimate is off; among them is the choice of the default objective.
fn finalists<'r>(objective: Objective, candidates: &[Estimate<'r>]) -> Vec<&'r dyn Codec> {
    let best = |objective| best(objective, candidates).map(|best| best.codec);
    if objective.speed > 0 {
        return best(objective).into_iter().collect();
    }
    let least = candidates.iter().map(|candidate| candidate.measures.bytes).min().unwrap_or(0);
    let near = candidates.iter().filter(|candidate| candidate.measures.bytes <= least.saturating_add(least / 16 + 128));
    let mut found: Vec<&dyn Codec> = near.map(|candidate| candidate.codec).collect();
    found.extend(best(Objective::BALANCED).filter(|codec| found.iter().all(|known| known.id() != codec.id())));
    found
}

/// Encodes a chunk with the assigned codec; `None` if this codec cannot encode it. A lossy codec encodes only the chunks
/// that it rounded itself.
fn encode_assigned<'r>(
    registry: &'r Registry,
    id: &str,
    chunk: &Chunk<'_>,
    given: Option<&'r Candidate>,
) -> Option<Result<(&'r dyn Codec, Encoded)>> {
    if let Some(given) = given.filter(|given| given.codec.id() == id) {
        return Some(Ok((given.codec.as_ref(), given.encoded.clone())));
    }
    let codec = registry.get(id).filter(|codec| codec.is_lossless() && codec.estimate(chunk).is_some())?;
    Some(codec.encode(chunk).map(|encoded| (codec.as_ref(), encoded)))
}

/// A codec and what it is expected to take.
#[derive(Clone, Copy)]
struct Estimate<'r> {
    codec: &'r dyn Codec,
    measures: Measures,
}

impl<'r> Estimate<'r> {
    fn new(codec: &'r dyn Codec, pages: &[u64]) -> Self {
        let work = codec.cost().encode + codec.cost().decode;
        Self { codec, measures: Measures { bytes: cost(pages), work, squares: 0.0 } }
    }
}

/// Bytes that pages add to a cask.
fn cost(pages: &[u64]) -> u64 {
    pages.iter().fold(0, |sum, &bytes| sum.saturating_add(page_cost(bytes)))
}

/// Whether a codec competes for a chunk.
fn is_candidate(codec: &dyn Codec, chunk: &Chunk<'_>) -> bool {
    let is_tiny = cost(&[chunk.data.len() as u64]) == page_cost(1) && chunk.base.is_none() && chunk.partners.is_empty();
    codec.is_lossless() && !(is_tiny && is_futile(codec.id()))
}

/// The lossless codecs and the given candidate, without those that take more than raw. The work of the given candidate has
/// rounded the chunk, so it comes on top of the work of all others.
fn estimates<'r>(registry: &'r Registry, chunk: &Chunk<'_>, given: Option<&'r Candidate>) -> Vec<Estimate<'r>> {
    let given = given.map(|given| Estimate::new(given.codec.as_ref(), &given.encoded.sizes()));
    let rounding_work = given.map_or(0.0, |given| given.measures.work);
    let codecs = registry.iter().filter(|codec| is_candidate(codec.as_ref(), chunk));
    let estimates = codecs.filter_map(|codec| {
        let Estimate { codec, measures } = Estimate::new(codec.as_ref(), &codec.estimate(chunk)?);
        let bytes = measures.bytes.saturating_sub(codec.saved_elsewhere(chunk)).max(1);
        Some(Estimate { codec, measures: Measures { bytes, work: measures.work + rounding_work, ..measures } })
    });
    let raw_bytes = cost(&[chunk.data.len() as u64]);
    estimates.chain(given).filter(|candidate| candidate.measures.bytes <= raw_bytes).collect()
}

/// The candidate of the highest score; `None` without a candidate.
fn best<'r>(objective: Objective, candidates: &[Estimate<'r>]) -> Option<Estimate<'r>> {
    position_of_best(objective, candidates.iter().map(|candidate| candidate.measures)).and_then(|at| candidates.get(at).copied())
}

/// Position of the highest score. Ties go to the fewest bytes, then to the first.
fn position_of_best(objective: Objective, all: impl Iterator<Item = Measures> + Clone) -> Option<usize> {
    let least = all.clone().reduce(Measures::least)?;
    let scored = all.map(|measures| (objective.score(measures, least), measures.bytes)).enumerate();
    let best = scored.reduce(|a, b| if b.1.0 > a.1.0 || (b.1.0 == a.1.0 && b.1.1 < a.1.1) { b } else { a });
    best.map(|(position, _)| position)
}

/// A chunk as one of several settings rounds it.
#[derive(Debug)]
pub(crate) struct RoundedForm<'a> {
    /// The rounded chunk, without base.
    pub chunk: Chunk<'a>,
    /// The encoding by the codec that rounded the chunk.
    pub given: Option<&'a Candidate>,
    /// Declared work of rounding without a codec, in copies of the chunk.
    pub work: f32,
    /// Sum of the squared errors of all elements.
    pub squares: f64,
}

/// Position of the form with the candidate of the highest score, among all codecs of all forms (BitSnap, equation 5), or
/// those with the assigned codec; 0 if no codec can encode any form.
pub(crate) fn best_form(registry: &Registry, objective: Objective, assigned: Option<&str>, forms: &[RoundedForm<'_>]) -> usize {
    let _environment = DefaultEnvironment::enter();
    let mut all: Vec<(usize, Estimate<'_>)> = Vec::new();
    for (position, form) in forms.iter().enumerate() {
        all.extend(estimates(registry, &form.chunk, form.given).into_iter().map(|Estimate { codec, measures }| {
            let measures = Measures { work: measures.work + form.work, squares: form.squares, ..measures };
            (position, Estimate { codec, measures })
        }));
    }
    let is_assigned = |(_, candidate): &(usize, Estimate<'_>)| assigned == Some(candidate.codec.id());
    if all.iter().any(is_assigned) {
        all.retain(is_assigned);
    }
    let best = position_of_best(objective, all.iter().map(|(_, candidate)| candidate.measures));
    best.and_then(|best| all.get(best)).map_or(0, |(position, _)| *position)
}

/// The chunk for codecs that may not use its base.
fn without_base<'a>(chunk: &Chunk<'a>) -> Chunk<'a> {
    Chunk { base: None, changed_rows: None, ..*chunk }
}

/// Whether a codec cannot beat raw on a chunk that fits one line of a page and has neither base nor partners.
fn is_futile(codec: &str) -> bool {
    codec.starts_with("tc.") && ![Raw::ID, "tc.constant"].contains(&codec)
}

/// Decodes the columns as a reader would, and compares the result with the source of the chunk. Returns the decoded
/// bytes.
///
/// The stored checksum covers these bytes. A checksum of the source, taken before, would let a tensor pass that changes
/// between checksum and encoding.
fn decode_again(codec: &dyn Codec, chunk: &Chunk<'_>, columns: &[(String, Bytes)], kind: ChunkKind) -> Result<Spare> {
    if !codec.base_use().allows(kind) {
        return Err(Error::invalid(format!(
            "codec `{}` made a chunk that is {}, which contradicts its `base_use`",
            codec.id(),
            kind.name()
        )));
    }
    let mut decoded = Spare::new(chunk.data.len(), "verification")?;
    let columns: Vec<(&str, Bytes)> = columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    let stand_in = if chunk.base.is_none() && kind == ChunkKind::Delta { Some(stand_in(chunk)?) } else { None };
    let base = stand_in.as_deref().or(chunk.base).filter(|_| kind == ChunkKind::Delta);
    let input = Columns { dtype: chunk.dtype, element_count: chunk.element_count, columns: &columns, base, partners: chunk.partners };
    codec.decode(&input, &mut decoded)?;
    if *decoded == *chunk.data { Ok(decoded) } else { Err(changed(&format!("what codec `{}` encoded", codec.id()))) }
}

/// Builds a substitute for a missing base: equal to the chunk in unchanged rows, different in all others.
fn stand_in(chunk: &Chunk<'_>) -> Result<Spare> {
    let mut base = Spare::new(chunk.data.len(), "verification")?;
    base.copy_from_slice(chunk.data);
    let row_bytes = chunk.rows().map_or(0, |(bytes, _)| bytes);
    for row in chunk.changed_rows.unwrap_or_default() {
        let start = row_bytes.saturating_mul(*row as usize);
        base.get_mut(start..start.saturating_add(row_bytes)).unwrap_or_default().iter_mut().for_each(|byte| *byte = !*byte);
    }
    Ok(base)
}

fn changed(what: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "{what} does not decode to the bytes that were given; nothing was committed. The tensor changed during the save, or memory or the codec is faulty"
        ),
    )
}

/// Estimates the stored bytes of a chunk: by the assigned codec if it can encode the chunk; otherwise by the best lossless
/// codec or the given candidate, and never more than raw.
pub(crate) fn estimate_chunk(registry: &Registry, chunk: &Chunk<'_>, given: Option<&Candidate>, assigned: Option<&str>) -> u64 {
    if chunk.base.is_some_and(|base| base == chunk.data) || chunk.changed_rows.is_some_and(<[u64]>::is_empty) {
        return 0;
    }
    let _environment = DefaultEnvironment::enter();
    let assigned = assigned.and_then(|id| match given.filter(|given| given.codec.id() == id) {
        Some(given) => Some(given.encoded.sizes()),
        None => registry.get(id).filter(|codec| codec.is_lossless()).and_then(|codec| codec.estimate(chunk)),
    });
    if let Some(sizes) = assigned {
        return cost(&sizes);
    }
    let raw = cost(&[chunk.data.len() as u64]).min(given.map_or(u64::MAX, |given| cost(&given.encoded.sizes())));
    let codecs = registry.iter().filter(|codec| codec.is_lossless());
    codecs.filter_map(|codec| Some(cost(&codec.estimate(chunk)?).saturating_sub(codec.saved_elsewhere(chunk)))).fold(raw, u64::min)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{EncodeCheck, encode_chunk};
    use crate::codec::{Chunk, Codec, Columns, Cost, Encoded, Objective, Registry};
    use crate::{Dtype, Result};

    /// A codec whose estimate is wrong.
    #[derive(Debug)]
    struct Mistaken {
        id: &'static str,
        estimated: u64,
        encoded: usize,
    }

    impl Codec for Mistaken {
        fn id(&self) -> &str {
            self.id
        }

        fn cost(&self) -> Cost {
            Cost { encode: 1.0, decode: 1.0 }
        }

        fn max_encoded_bytes(&self, _: Dtype, element_count: u64) -> u64 {
            element_count.saturating_mul(8)
        }

        fn estimate(&self, _: &Chunk<'_>) -> Option<Vec<u64>> {
            Some(vec![self.estimated])
        }

        fn encode(&self, _: &Chunk<'_>) -> Result<Encoded> {
            Ok(Encoded { uses_base: false, columns: vec![("values", vec![0; self.encoded])] })
        }

        fn decode(&self, _: &Columns<'_>, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_smallest_result_is_chosen_among_close_estimates() {
        let codecs = [("x.a", 1000, 3000), ("x.b", 1050, 1100), ("x.c", 2000, 10)];
        let registry = codecs.into_iter().fold(Registry::default().only("tc.raw").unwrap(), |registry, (id, estimated, encoded)| {
            registry.with(Arc::new(Mistaken { id, estimated, encoded })).unwrap()
        });
        let data = vec![1; 8000];
        for (objective, expected) in [(Objective::SMALLEST, "x.b"), (Objective::BALANCED, "x.a")] {
            let encoded = encode_chunk(&registry, objective, &Chunk::new(Dtype::F32, 2000, &data), EncodeCheck::Skip).unwrap();
            assert_eq!(encoded.codec.unwrap().id, expected);
        }
    }
}
