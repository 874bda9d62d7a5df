//! Codecs turn a chunk into columns and back. Spec: `spec/codecs/`.
//!
//! A codec never sees files. The container stores every column as a page, and the chunk grid gives the number of
//! elements. The caller sizes the buffer that [`Codec::decode`] fills. A [`Registry`] is a value passed to writers and
//! readers, so a program can add codecs without a process-wide table.

mod adam;
mod bitmask;
mod blockwise;
mod candidate;
mod choose;
mod classes;
mod cluster;
mod constant;
mod descent;
mod factored;
mod gradient;
mod joint;
mod kmeans;
mod loguniform;
mod magnitudes;
mod maps;
mod objective;
mod ordered;
mod planes;
mod predict;
mod raw;
mod registry;
mod remainder;
mod replay;
mod residual;
mod rounded;
mod rows;
mod rules;
mod sparse;
mod terms;

use std::borrow::Cow;
use std::fmt::Debug;

use bytes::Bytes;
use tensorcask_kernels::spare;

pub use bitmask::Bitmask;
pub use blockwise::Blockwise8;
pub use cluster::{Cluster, CodeMap, Edges};
pub use constant::Constant;
pub use descent::Descent;
pub use factored::Factored;
pub use gradient::Gradient;
pub use joint::Joint;
pub(crate) use kmeans::sensitivities;
pub use kmeans::{KMeans, LevelError};
pub use loguniform::LogUniform;
pub use magnitudes::Magnitudes;
pub use ordered::Ordered;
pub use planes::Planes;
pub use predict::Predict;
pub use raw::Raw;
pub use registry::Registry;
pub(crate) use registry::UNKNOWN_CODEC;
pub use remainder::Remainder;
pub use replay::Replay;
pub use rounded::Rounded;
pub use rows::Rows;
pub use rules::CodecRules;
pub use sparse::Sparse;

pub(crate) use candidate::Candidate;
#[cfg(test)]
pub(crate) use choose::LevelEstimate;
pub(crate) use choose::{Chosen, ChosenBy, LEVELS, Preferred, RoundedForm, Trial, Wanted, best_form, encode_given, estimate_chunk};
pub use choose::{EncodeCheck, encode_chunk};
pub use objective::{Objective, ObjectiveSetting};
pub(crate) use rules::check_assigned;

use crate::wire::index::CodecRef as WireCodecRef;
pub use crate::wire::part::ChunkKind;
use crate::{Dtype, Error, Result};

/// Decodes a chunk in the default floating-point environment, whatever the program has set for its threads.
pub(crate) fn decode(codec: &dyn Codec, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
    let _environment = tensorcask_kernels::DefaultEnvironment::enter();
    codec.decode(columns, out)
}

/// Decodes a chunk and its gradients in the default floating-point environment.
pub(crate) fn decode_gradient(codec: &dyn Codec, columns: &Columns<'_>, out: &mut [u8], gradient: &mut [u8]) -> Result<GradientForm> {
    let _environment = tensorcask_kernels::DefaultEnvironment::enter();
    codec.decode_gradient(columns, out, gradient)
}

/// Returns units that represent a chunk in an estimate: all units of a small chunk, or short stretches of a large
/// chunk.
///
/// Stretches are at equal distances across the chunk, because rows differ more than the elements of one row. An
/// embedding, for example, changes in some rows only. Every unit width samples the same elements.
pub(crate) fn sample(data: &[u8], width: usize) -> Cow<'_, [u8]> {
    const STRETCHES: usize = 128;
    const LENGTH: usize = 64;
    let units = data.len() / width;
    if units <= 2 * STRETCHES * LENGTH {
        return Cow::Borrowed(data);
    }
    let step = (units - LENGTH) / (STRETCHES - 1);
    let mut sampled = Vec::with_capacity(STRETCHES * LENGTH * width);
    for start in (0..STRETCHES).map(|i| i * step * width) {
        sampled.extend_from_slice(data.get(start..start + LENGTH * width).unwrap_or_default());
    }
    Cow::Owned(sampled)
}

/// Codec id and format version, as named by a cask.
pub type CodecRef = WireCodecRef;

/// A chunk to encode.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements.
    pub element_count: u64,
    /// Role of the tensor in training.
    pub role: &'a str,
    /// Elements, row-major, little-endian.
    pub data: &'a [u8],
    /// Same chunk of the parent snapshot, of equal length.
    pub base: Option<&'a [u8]>,
    /// Same chunk of other tensors of the parameter, if the caller has them.
    pub partners: &'a [Partner<'a>],
    /// Number of elements in a row; 0 if unknown. The chunk holds whole rows.
    pub row_elements: u64,
    /// Numbers of the rows that may differ from the base, ascending; `None` if unknown. All other rows equal those of
    /// the base. With these numbers, no base is needed.
    pub changed_rows: Option<&'a [u64]>,
}

/// Same chunk of another tensor of the same parameter, with the same shape and shard rectangle.
#[derive(Debug, Clone, Copy)]
pub struct Partner<'a> {
    /// Role of the partner.
    pub role: &'a str,
    /// Element type, of at least 8 bits. The partner has as many elements as the chunk.
    pub dtype: Dtype,
    /// Elements of the partner.
    pub data: &'a [u8],
    /// Elements of the partner in the parent snapshot, if a delta needs them.
    pub base: Option<&'a [u8]>,
    /// Gradient of each element as f32, if a delta needs it: that of the step from the parent to this snapshot.
    pub gradient: Option<&'a [u8]>,
}

/// A partner that a codec needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Role of the partner.
    pub role: &'static str,
    /// Whether the codec also needs the partner's chunk of the parent snapshot.
    pub base: bool,
    /// Whether the codec also needs the gradients that the partner's chunk stores ([`Codec::decode_gradient`]).
    pub gradient: bool,
}

impl Need {
    /// Needs the partner's chunk of this snapshot.
    pub const fn now(role: &'static str) -> Self {
        Self { role, base: false, gradient: false }
    }

    /// Needs the partner's chunks of this snapshot and of the parent.
    pub const fn both(role: &'static str) -> Self {
        Self { role, base: true, gradient: false }
    }

    /// Adds what another codec needs of the same partner.
    pub(crate) fn merge(&mut self, other: Self) {
        self.base |= other.base;
        self.gradient |= other.gradient;
    }
}

/// A chunk to decode.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements.
    pub element_count: u64,
    /// Names and bytes of the columns, in stored order.
    pub columns: &'a [(&'a str, Bytes)],
    /// Same chunk of the parent snapshot; present exactly if the chunk was stored as a delta.
    pub base: Option<&'a [u8]>,
    /// Partners requested by [`Codec::needs`].
    pub partners: &'a [Partner<'a>],
}

/// Returns the partner of a role, if it has as many elements as the chunk.
fn partner_of<'a>(partners: &'a [Partner<'a>], role: &str, element_count: u64) -> Option<&'a Partner<'a>> {
    let fits = |partner: &&Partner<'_>| partner.role == role && partner.dtype.byte_count(element_count) == Some(partner.data.len() as u64);
    partners.iter().find(fits)
}

impl<'a> Chunk<'a> {
    /// Creates a chunk of role `model` without base, partners or rows.
    pub fn new(dtype: Dtype, element_count: u64, data: &'a [u8]) -> Self {
        Self { dtype, element_count, role: "model", data, base: None, partners: &[], row_elements: 0, changed_rows: None }
    }

    /// Returns the base, if it has the chunk's length.
    pub(crate) fn whole_base(&self) -> Option<&'a [u8]> {
        self.base.filter(|base| base.len() == self.data.len())
    }

    /// Returns the bytes of a row and the number of rows, if the chunk holds whole rows of whole bytes.
    pub(crate) fn rows(&self) -> Option<(usize, usize)> {
        let count = self.element_count.checked_div(self.row_elements).filter(|count| *count > 0)?;
        let bytes = self.dtype.byte_count(self.row_elements)?;
        let whole = count.checked_mul(self.row_elements)? == self.element_count && bytes.checked_mul(count)? == self.data.len() as u64;
        whole.then_some((bytes as usize, count as usize))
    }

    /// Returns the partner of a role.
    pub fn partner(&self, role: &str) -> Option<&Partner<'_>> {
        partner_of(self.partners, role, self.element_count)
    }
}

impl<'a> Columns<'a> {
    /// Returns the columns of these names. Other columns, or another order, are an error.
    pub fn exactly<const N: usize>(&self, names: [&str; N]) -> Result<[&'a [u8]; N]> {
        let mut found: [&[u8]; N] = [&[]; N];
        are_columns(self.columns.iter().map(|(name, _)| *name), &names)?;
        for (slot, (_, bytes)) in found.iter_mut().zip(self.columns) {
            *slot = bytes;
        }
        Ok(found)
    }

    /// Returns the partner of a role. A missing partner is an error.
    pub fn partner(&self, role: &str) -> Result<&'a Partner<'a>> {
        let found = partner_of(self.partners, role, self.element_count);
        found.ok_or_else(|| {
            Error::corrupt(format!("needs the chunk of role `{role}` of the same parameter, which is missing")).clause("codecs 5.2")
        })
    }

    /// Returns the base. A missing base is an error.
    pub fn base(&self, out_bytes: usize) -> Result<&'a [u8]> {
        match self.base {
            Some(base) if base.len() == out_bytes => Ok(base),
            Some(base) => Err(Error::invalid(format!("a base of {} bytes for a chunk of {out_bytes}", base.len()))),
            None => Err(Error::invalid("needs the base chunk, which is missing")),
        }
    }
}

/// Checks that columns have exactly these names, in this order.
fn are_columns<'a>(found: impl ExactSizeIterator<Item = &'a str>, wanted: &[&str]) -> Result<()> {
    if found.len() != wanted.len() {
        return Err(Error::corrupt(format!("{} columns, not {} ({})", found.len(), wanted.len(), wanted.join(", "))).clause("codecs 4.1"));
    }
    match found.zip(wanted).find(|(name, wanted)| name != *wanted) {
        Some((name, wanted)) => {
            Err(Error::corrupt(format!("column `{}` where `{wanted}` belongs", name.escape_debug())).clause("codecs 4.1"))
        }
        None => Ok(()),
    }
}

/// Result of encoding a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Whether decoding needs the base.
    pub uses_base: bool,
    /// Names and bytes of the columns.
    pub columns: Vec<(&'static str, Vec<u8>)>,
}

impl Encoded {
    /// Returns the size of each column in bytes.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.columns.iter().map(|(_, bytes)| bytes.len() as u64).collect()
    }

    /// Returns the columns as shared buffers. Each buffer is reused after its last reader has dropped it.
    pub fn into_bytes(self) -> Vec<(&'static str, Bytes)> {
        self.columns.into_iter().map(|(name, bytes)| (name, spare::into_bytes(bytes))).collect()
    }
}

/// Whether decoding needs the chunk of the parent snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseUse {
    /// Never: all chunks are absolute.
    Never,
    /// Always: all chunks are deltas.
    Always,
    /// The codec decides for each chunk.
    PerChunk,
}

impl BaseUse {
    /// Returns whether this codec can have produced a chunk of this kind.
    pub(crate) fn allows(self, kind: ChunkKind) -> bool {
        match kind {
            ChunkKind::Unchanged => false,
            ChunkKind::Absolute => self != Self::Always,
            ChunkKind::Delta => self != Self::Never,
        }
    }
}

/// Computing time of a codec, relative to copying the chunk once. The cost is declared, not measured, so choices do not
/// depend on the speed of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Encoding time, in copies of the chunk.
    pub encode: f32,
    /// Decoding time, in copies of the chunk.
    pub decode: f32,
}

/// One way to store a chunk.
///
/// Every codec keeps this contract, which [`testing::codec::run_all`](crate::testing::codec::run_all) checks:
/// - For a lossless codec, `decode(encode(chunk)) == chunk`.
/// - A codec re-encodes its own decoded output without further loss.
/// - For any bytes, `decode` returns an error or a full buffer, in time linear in columns and buffer.
pub trait Codec: Send + Sync + Debug {
    /// Id in the dictionary of a cask. The prefix `tc.` is reserved; other codecs use a prefix of their own.
    fn id(&self) -> &str;

    /// Version of the codec's format.
    fn version(&self) -> u16 {
        1
    }

    /// Whether decoding restores every bit.
    fn is_lossless(&self) -> bool {
        true
    }

    /// Whether chunks of this codec need the base.
    fn base_use(&self) -> BaseUse {
        BaseUse::Never
    }

    /// Whether a chunk of this element type, of a tensor of this role, can be encoded at all, given a suitable base and
    /// partners. If not, [`Codec::estimate`] returns `None`.
    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        let _ = (dtype, role);
        true
    }

    /// Partners without which chunks of a tensor of this role cannot be decoded. Two roles must not need each other.
    fn needs(&self, role: &str) -> &'static [Need] {
        let _ = role;
        &[]
    }

    /// Partners that help to encode chunks of this element type, of a tensor of this role. No decoder needs them, so they may
    /// need this role.
    fn hints(&self, dtype: Dtype, role: &str) -> &'static [Need] {
        let _ = (dtype, role);
        &[]
    }

    /// Whether chunks of every role can be decoded without partners.
    fn is_standalone(&self) -> bool {
        true
    }

    /// Computing time of the codec.
    fn cost(&self) -> Cost;

    /// Greatest number of bytes that the columns of a chunk can take, for any values and any base.
    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64;

    /// Estimates the bytes of each column from a quick look at the chunk, without page padding. Returns `None` if this
    /// codec cannot encode the chunk.
    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>>;

    /// Bytes that chunks of the partners are expected to take less if this codec encodes the chunk. A codec that stores
    /// what decodes several tensors is then chosen, although it stores the first of them in more bytes.
    fn saved_elsewhere(&self, chunk: &Chunk<'_>) -> u64 {
        let _ = chunk;
        0
    }

    /// Encodes a chunk. Returns an error if this codec cannot encode it; [`Codec::estimate`] then returns `None`. The
    /// writer also calls this without an estimate, for chunks that are similar to earlier ones.
    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded>;

    /// Checks that a chunk of this type may have these columns. Allows a delta to be checked without its base. By
    /// default, only [`Codec::decode`] checks.
    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        let _ = (dtype, names);
        Ok(())
    }

    /// Checks that a tensor of this role may have these columns, for codecs whose partners differ by role
    /// ([`Codec::needs`]).
    fn check_role(&self, role: &str, names: &[&str]) -> Result<()> {
        let _ = (role, names);
        Ok(())
    }

    /// Fills `out`, which must have exactly the chunk's size.
    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()>;

    /// Whether a chunk with these columns holds gradients, so that [`Codec::decode_gradient`] returns them.
    fn holds_gradients(&self, names: &[&str]) -> bool {
        let _ = names;
        false
    }

    /// Whether chunks of partners may need the gradients that this codec stores with a chunk.
    fn offers_gradients(&self, chunk: &Chunk<'_>) -> bool {
        let _ = chunk;
        false
    }

    /// Does as [`Codec::decode`], and fills `gradient` with the gradient of each element as f32, for codecs that need it
    /// of a partner ([`Need::gradient`]). Returns how the chunk stores them. By default, chunks hold no gradients.
    fn decode_gradient(&self, columns: &Columns<'_>, out: &mut [u8], gradient: &mut [u8]) -> Result<GradientForm> {
        let _ = (columns, out, gradient);
        Err(no_gradients(self))
    }
}

/// How a gradient is added to a first moment or a momentum: `decay * moment + weight * gradient`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MomentRule {
    /// Decay of the moment: beta1 of Adam, or the momentum.
    pub decay: f32,
    /// Weight of the gradient: 1 - beta1 for Adam, 1 - dampening for SGD.
    pub weight: f32,
}

/// How a chunk stores its gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientForm {
    /// How the gradients give the moments.
    pub rule: MomentRule,
    /// Greatest number of significant bits of a stored gradient, before the factor of the step; 8 or fewer if all of them are
    /// bf16 numbers, 11 or fewer if they are f16 numbers.
    pub longest_bits: u32,
    /// Sum of the significant bits of all stored gradients.
    pub total_bits: u64,
    /// Number of elements that are stored without a gradient. The gradient of each is estimated from both moments.
    pub estimated_elements: u64,
}

/// The error of a chunk whose gradients another chunk needs.
fn no_gradients<C: Codec + ?Sized>(codec: &C) -> Error {
    Error::corrupt(format!("a chunk of codec `{}` holds no gradients, which another chunk needs", codec.id())).clause("codecs 5.4")
}

/// A chunk as a cask stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChunk {
    /// Storage kind.
    pub kind: ChunkKind,
    /// Codec; `None` for an unchanged chunk.
    pub codec: Option<CodecRef>,
    /// Names and bytes of the columns.
    pub columns: Vec<(String, Bytes)>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
}

impl EncodedChunk {
    /// A chunk with the same content as in the parent snapshot. Takes no page.
    pub(crate) fn unchanged(crc: u32) -> Self {
        Self { kind: ChunkKind::Unchanged, codec: None, columns: vec![], crc }
    }
}
