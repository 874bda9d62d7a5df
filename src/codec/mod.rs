//! Codecs turn a chunk into columns and back. Spec: `spec/codecs/`.
//!
//! A codec never sees files: the container gives every column a page of its own, the chunk grid says how many elements
//! a chunk has, and the caller sizes the buffer that [`Codec::decode`] fills. A [`Registry`] is a value handed to writers
//! and readers, so that a program may bring codecs of its own without a process-wide table.

mod bitmask;
mod blockwise;
mod candidate;
mod choose;
mod cluster;
mod constant;
mod factored;
mod kmeans;
mod loguniform;
mod magnitudes;
mod maps;
mod ordered;
mod planes;
mod predict;
mod raw;
mod registry;
mod remainder;
mod rounded;
mod rows;
mod terms;

use std::borrow::Cow;
use std::fmt::Debug;

use bytes::Bytes;

pub use bitmask::Bitmask;
pub use blockwise::Blockwise8;
pub use cluster::{Cluster, CodeMap, Edges};
pub use constant::Constant;
pub use factored::Factored;
pub use kmeans::KMeans;
pub use loguniform::LogUniform;
pub use magnitudes::Magnitudes;
pub use ordered::Ordered;
pub use planes::Planes;
pub use predict::Predict;
pub use raw::Raw;
pub use registry::Registry;
pub use remainder::Remainder;
pub use rounded::Rounded;
pub use rows::Rows;

pub(crate) use candidate::Candidate;
pub use choose::{Objective, encode_chunk};
pub(crate) use choose::{encode_given, estimate_chunk};

use crate::spare;
use crate::wire::index::CodecRef as WireCodecRef;
pub use crate::wire::part::ChunkKind;
use crate::{Dtype, Error, Result};

/// Decodes a chunk, whatever floating-point environment the program has set for its threads.
pub(crate) fn decode(codec: &dyn Codec, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
    let _environment = crate::kernels::DefaultEnvironment::enter();
    codec.decode(columns, out)
}

/// Whole units that stand for a chunk in an estimate: all of a small one; of a large one short stretches at equal distances, because rows
/// differ from one another more than the elements of one (an embedding changes in some rows only). The same units for every width.
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

/// A codec's id and format version, as a cask names it.
pub type CodecRef = WireCodecRef;

/// A chunk to encode.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The element type.
    pub dtype: Dtype,
    /// Elements.
    pub element_count: u64,
    /// What the tensor is to training.
    pub role: &'a str,
    /// The elements, row-major, little-endian.
    pub data: &'a [u8],
    /// The same chunk of the parent snapshot, of equal length.
    pub base: Option<&'a [u8]>,
    /// The same chunk of other tensors of the parameter, as far as the caller has them.
    pub partners: &'a [Partner<'a>],
    /// Elements in a row, of which the chunk holds a whole number; 0 where that is not known.
    pub row_elements: u64,
    /// Numbers of the rows that may differ from the base, ascending, where the caller knows them: no base is needed then. All other rows
    /// are equal to those of the base.
    pub changed_rows: Option<&'a [u64]>,
}

/// The same chunk of another tensor of the same parameter: of the same shape, in a shard with the same rectangle.
#[derive(Debug, Clone, Copy)]
pub struct Partner<'a> {
    /// Its role.
    pub role: &'a str,
    /// Its element type, of 8 bits or more: it has as many elements as the chunk.
    pub dtype: Dtype,
    /// Its elements.
    pub data: &'a [u8],
    /// Those of the parent snapshot, where a delta needs them.
    pub base: Option<&'a [u8]>,
}

/// A partner that a codec needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Its role.
    pub role: &'static str,
    /// Whether its chunk of the parent snapshot is needed, too.
    pub base: bool,
}

/// A chunk to decode.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// The element type.
    pub dtype: Dtype,
    /// Elements.
    pub element_count: u64,
    /// Names and bytes of the columns, in stored order.
    pub columns: &'a [(&'a str, Bytes)],
    /// The same chunk of the parent snapshot: there if, and only if, the chunk was stored as a delta.
    pub base: Option<&'a [u8]>,
    /// What [`Codec::needs`] asks for.
    pub partners: &'a [Partner<'a>],
}

/// The partner of a role, with as many elements as the chunk.
fn partner_of<'a>(partners: &'a [Partner<'a>], role: &str, element_count: u64) -> Option<&'a Partner<'a>> {
    let fits = |partner: &&Partner<'_>| partner.role == role && partner.dtype.byte_count(element_count) == Some(partner.data.len() as u64);
    partners.iter().find(fits)
}

impl<'a> Chunk<'a> {
    /// A chunk of role `model` of which nothing else is known.
    pub fn new(dtype: Dtype, element_count: u64, data: &'a [u8]) -> Self {
        Self { dtype, element_count, role: "model", data, base: None, partners: &[], row_elements: 0, changed_rows: None }
    }

    /// The base, if it has the chunk's length.
    pub(crate) fn whole_base(&self) -> Option<&'a [u8]> {
        self.base.filter(|base| base.len() == self.data.len())
    }

    /// Bytes of a row, and rows: where the chunk holds whole rows of whole bytes.
    pub(crate) fn rows(&self) -> Option<(usize, usize)> {
        let count = self.element_count.checked_div(self.row_elements).filter(|count| *count > 0)?;
        let bytes = self.dtype.byte_count(self.row_elements)?;
        let whole = count.checked_mul(self.row_elements)? == self.element_count && bytes.checked_mul(count)? == self.data.len() as u64;
        whole.then_some((bytes as usize, count as usize))
    }

    /// The partner of a role.
    pub fn partner(&self, role: &str) -> Option<&Partner<'_>> {
        partner_of(self.partners, role, self.element_count)
    }
}

impl<'a> Columns<'a> {
    /// The columns of these names, and no others, in this order.
    pub fn exactly<const N: usize>(&self, names: [&str; N]) -> Result<[&'a [u8]; N]> {
        let mut found: [&[u8]; N] = [&[]; N];
        are_columns(self.columns.iter().map(|(name, _)| *name), &names)?;
        for (slot, (_, bytes)) in found.iter_mut().zip(self.columns) {
            *slot = bytes;
        }
        Ok(found)
    }

    /// The partner of a role, without which this chunk means nothing.
    pub fn partner(&self, role: &str) -> Result<&'a Partner<'a>> {
        let found = partner_of(self.partners, role, self.element_count);
        found.ok_or_else(|| {
            Error::corrupt(format!("needs the chunk of role `{role}` of the same parameter, which is not there")).clause("codecs 5.2")
        })
    }

    /// The base, without which this chunk means nothing.
    pub fn base(&self, out_bytes: usize) -> Result<&'a [u8]> {
        match self.base {
            Some(base) if base.len() == out_bytes => Ok(base),
            Some(base) => Err(Error::invalid(format!("a base of {} bytes for a chunk of {out_bytes}", base.len()))),
            None => Err(Error::invalid("needs the base chunk, which the caller did not give")),
        }
    }
}

/// Whether columns have these names, and no others, in this order.
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

/// What a codec made of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Whether decoding needs the base.
    pub uses_base: bool,
    /// Names and bytes of the columns.
    pub columns: Vec<(&'static str, Vec<u8>)>,
}

impl Encoded {
    /// Bytes of each column.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.columns.iter().map(|(_, bytes)| bytes.len() as u64).collect()
    }

    /// The columns, to share. Their buffers are used again when the last reader has let them go.
    pub fn into_bytes(self) -> Vec<(&'static str, Bytes)> {
        self.columns.into_iter().map(|(name, bytes)| (name, spare::into_bytes(bytes))).collect()
    }
}

/// Whether decoding needs the chunk of the parent snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseUse {
    /// Never: its chunks are absolute.
    Never,
    /// Always: its chunks are deltas.
    Always,
    /// As the codec chose for each chunk.
    PerChunk,
}

impl BaseUse {
    /// Whether a chunk stored this way can be this codec's.
    pub(crate) fn allows(self, kind: ChunkKind) -> bool {
        match kind {
            ChunkKind::Unchanged => false,
            ChunkKind::Absolute => self != Self::Always,
            ChunkKind::Delta => self != Self::Never,
        }
    }
}

/// What a codec takes of a core's time, relative to copying the chunk once. Declared, not timed, so that the choice of
/// codecs is the same on every machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Encoding, in copies of the chunk.
    pub encode: f32,
    /// Decoding, in copies of the chunk.
    pub decode: f32,
}

/// One way to store a chunk.
///
/// The contract, which [`testing::codec::run_all`](crate::testing::codec::run_all) checks:
/// `decode(encode(chunk)) == chunk` for a lossless codec; what a codec made, decoded, it encodes exactly again; any bytes
/// given to `decode` end in an error or in a full buffer, in time linear in columns and buffer.
pub trait Codec: Send + Sync + Debug {
    /// The id in the dictionary of a cask. `tc.` is reserved; others use a prefix of their own.
    fn id(&self) -> &str;

    /// The version of the codec's format.
    fn version(&self) -> u16 {
        1
    }

    /// Whether every bit comes back.
    fn is_lossless(&self) -> bool {
        true
    }

    /// Whether its chunks are deltas.
    fn base_use(&self) -> BaseUse {
        BaseUse::Never
    }

    /// The partners that its chunks of a tensor of some role cannot be decoded without. Roles must not need one another.
    fn needs(&self, role: &str) -> &'static [Need] {
        let _ = role;
        &[]
    }

    /// Whether its chunks can be decoded without partners, whatever the role.
    fn is_standalone(&self) -> bool {
        true
    }

    /// What it takes.
    fn cost(&self) -> Cost;

    /// The most bytes that the columns of a chunk can take, bases and values notwithstanding.
    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64;

    /// Bytes that the columns of this chunk would take, page padding not counted, as far as a quick look can tell.
    /// `None`: this codec cannot encode the chunk.
    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>>;

    /// The columns of a chunk for which [`Codec::estimate`] gave an answer.
    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded>;

    /// Whether a chunk of this type may have these columns: what can be judged of a delta without its base. Codecs that do not say
    /// leave it to [`Codec::decode`].
    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        let _ = (dtype, names);
        Ok(())
    }

    /// Whether a tensor of a role may have these columns, of a codec whose partners differ by role ([`Codec::needs`]).
    fn check_role(&self, role: &str, names: &[&str]) -> Result<()> {
        let _ = (role, names);
        Ok(())
    }

    /// Fills `out`, which has exactly the chunk's size.
    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()>;
}

/// A chunk as a cask stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChunk {
    /// How it is stored.
    pub kind: ChunkKind,
    /// The codec; none for an unchanged chunk.
    pub codec: Option<CodecRef>,
    /// Names and bytes of the columns.
    pub columns: Vec<(String, Bytes)>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
}
