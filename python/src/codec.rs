//! `Coder` and `Encoded`: encode and decode one tensor without a store, on the calling thread.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorcask::codec::{
    Chunk, ChunkKind, Codec, CodecRef, Columns, EncodeCheck, EncodedChunk, Objective, Partner, Registry, encode_chunk,
};
use tensorcask::{ChunkGrid, Dtype, Error, Result};

use crate::buffer::{Source, Target, writable};
use crate::errors::raise;

/// Returns the ids of the codecs of this library.
#[pyfunction]
pub(crate) fn codecs() -> Vec<String> {
    Registry::default().iter().map(|codec| codec.id().to_owned()).collect()
}

/// Role, dtype, elements, and elements of the base.
type PartnerArgument<'py> = (String, String, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// Another tensor of the same parameter.
struct LentPartner {
    role: String,
    dtype: Dtype,
    data: Source,
    base: Option<Source>,
}

/// A tensor, with the base and partners that its codecs may use.
#[pyclass(module = "tensorcask._native", frozen)]
pub(crate) struct Coder {
    grid: ChunkGrid,
    role: String,
    data: Source,
    base: Option<Source>,
    partners: Vec<LentPartner>,
    /// Codecs to choose from; only one if the caller named a codec.
    registry: Registry,
    alone: Option<String>,
    objective: Objective,
}

/// Encoded chunks of a tensor.
#[pyclass(module = "tensorcask.codec", frozen)]
pub(crate) struct Encoded {
    chunks: Vec<EncodedChunk>,
    /// CRC-32 of each column of each chunk, if checks were requested.
    page_crcs: Option<Vec<Vec<u32>>>,
}

#[pymethods]
impl Coder {
    #[new]
    #[pyo3(signature = (dtype, shape, data, role, base, partners, codec, objective))]
    #[allow(clippy::too_many_arguments, reason = "the package above gives them names")]
    fn new(
        py: Python<'_>,
        dtype: &str,
        shape: Vec<u64>,
        data: &Bound<'_, PyAny>,
        role: String,
        base: Option<Bound<'_, PyAny>>,
        partners: Vec<PartnerArgument<'_>>,
        codec: Option<String>,
        objective: &str,
    ) -> PyResult<Self> {
        let named = |name: &str| Dtype::from_name(name).map_err(|e| raise(&e));
        let grid = ChunkGrid::new(named(dtype)?, &shape).map_err(|e| raise(&e))?;
        let lend = |object: &Bound<'_, PyAny>, dtype: Dtype, what: &str| {
            let source = Source::new(object)?;
            match dtype.byte_count(grid.element_count()) == Some(source.bytes().len() as u64) {
                true => Ok(source),
                false => {
                    Err(PyValueError::new_err(format!("{what}: {} bytes do not hold {dtype} of shape {shape:?}", source.bytes().len())))
                }
            }
        };
        let mut others = Vec::with_capacity(partners.len());
        for (role, dtype, data, base) in &partners {
            let dtype = named(dtype)?;
            let base = base.as_ref().map(|base| lend(base, dtype, "base of a partner")).transpose()?;
            others.push(LentPartner { role: role.clone(), dtype, data: lend(data, dtype, "partner")?, base });
        }
        let registry = Registry::default();
        let coder = Self {
            data: lend(data, grid.dtype(), "tensor")?,
            base: base.map(|base| lend(&base, grid.dtype(), "base")).transpose()?,
            role,
            partners: others,
            registry: codec.as_ref().map_or(Ok(registry.clone()), |id| registry.only(id)).map_err(|e| raise(&e))?,
            alone: codec,
            objective: Objective::from_name(objective).map_err(|e| raise(&e))?,
            grid,
        };
        py.detach(|| coder.check_storable()).map_err(|e| raise(&e))?;
        Ok(coder)
    }

    /// Encodes all chunks.
    fn encode(&self, py: Python<'_>, checks: bool) -> PyResult<Encoded> {
        py.detach(|| self.encode_all(checks)).map_err(|e| raise(&e))
    }

    /// Decodes into a buffer of the tensor's size. Compares the checksums if the tensor was encoded with checks.
    fn decode_into(&self, py: Python<'_>, encoded: &Encoded, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut targets = [Target::new(out)?];
        let mut slices = writable(&mut targets)?;
        let out = slices.pop().unwrap_or_default();
        py.detach(|| self.decode_all(encoded, out)).map_err(|e| raise(&e))
    }
}

#[pymethods]
impl Encoded {
    /// Returns the bytes of all columns, without padding and index.
    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.chunks.iter().flat_map(|chunk| &chunk.columns).map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Returns the number of chunks per codec, with `unchanged` as one more key.
    #[getter]
    fn chunks(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for chunk in &self.chunks {
            let name = chunk.codec.as_ref().map_or("unchanged", |codec| codec.id.as_str());
            *counts.entry(name.to_owned()).or_default() += 1;
        }
        counts
    }
}

impl LentPartner {
    fn chunk(&self, range: Range<usize>) -> Partner<'_> {
        let base = self.base.as_ref().map(|base| base.bytes().get(range.clone()).unwrap_or_default());
        Partner { role: &self.role, dtype: self.dtype, data: self.data.bytes().get(range).unwrap_or_default(), base, gradient: None }
    }
}

impl Coder {
    /// Checks that a codec named by the caller can take every chunk.
    fn check_storable(&self) -> Result<()> {
        let Some(id) = &self.alone else { return Ok(()) };
        for number in 0..self.grid.chunk_count() {
            let partners = self.partners(number);
            let chunk = self.chunk(number, &partners);
            if self.registry.iter().any(|codec| codec.estimate(&chunk).is_none()) {
                return Err(
                    Error::invalid(format!("codec `{id}` cannot store this tensor with these partners and this base")).chunk(number)
                );
            }
        }
        Ok(())
    }

    fn encode_all(&self, checks: bool) -> Result<Encoded> {
        let mut chunks = Vec::with_capacity(self.grid.chunk_count() as usize);
        for number in 0..self.grid.chunk_count() {
            let partners = self.partners(number);
            let chunk = self.chunk(number, &partners);
            let alone = self.alone.as_ref().and_then(|id| self.registry.get(id));
            let encoded = match alone.filter(|codec| !checks || !codec.is_lossless()) {
                Some(codec) => {
                    encode_alone(codec.as_ref(), &chunk).and_then(|made| if checks { self.rounded(&chunk, made) } else { Ok(made) })
                }
                None => encode_chunk(&self.registry, self.objective, &chunk, if checks { EncodeCheck::Decode } else { EncodeCheck::Skip }),
            };
            chunks.push(encoded.map_err(|e| e.chunk(number))?);
        }
        let page_crcs = checks.then(|| chunks.iter().map(page_crcs).collect());
        Ok(Encoded { chunks, page_crcs })
    }

    /// Returns the encoded chunk. If the codec rounds, sets the checksum of the decoded bytes.
    fn rounded(&self, chunk: &Chunk<'_>, made: EncodedChunk) -> Result<EncodedChunk> {
        let mut out = vec![0; chunk.data.len()];
        decode_chunk(&self.registry, chunk, &made, &mut out)?;
        Ok(EncodedChunk { crc: crc32fast::hash(&out), ..made })
    }

    fn decode_all(&self, encoded: &Encoded, out: &mut [u8]) -> Result<()> {
        if encoded.chunks.len() as u64 != self.grid.chunk_count() || out.len() != self.data.bytes().len() {
            return Err(Error::invalid("the encoded chunks or the buffer belong to another tensor"));
        }
        if let Some(crcs) = &encoded.page_crcs
            && encoded.chunks.iter().zip(crcs).any(|(chunk, crcs)| page_crcs(chunk) != *crcs)
        {
            return Err(Error::corrupt("a column changed since it was encoded"));
        }
        // The chosen codec is unknown here, and raw is always among them.
        let registry = Registry::default();
        for (number, stored) in (0..).zip(&encoded.chunks) {
            let partners = self.partners(number);
            let chunk = self.chunk(number, &partners);
            let Some(out) = out.get_mut(bytes_of(&self.grid, self.grid.dtype(), number)) else { continue };
            decode_chunk(&registry, &chunk, stored, out).map_err(|e| e.chunk(number))?;
            if encoded.page_crcs.is_some() && crc32fast::hash(out) != stored.crc {
                return Err(Error::corrupt("does not decode to the encoded bytes").chunk(number));
            }
        }
        Ok(())
    }

    fn partners(&self, number: u64) -> Vec<Partner<'_>> {
        self.partners.iter().map(|partner| partner.chunk(bytes_of(&self.grid, partner.dtype, number))).collect()
    }

    fn chunk<'a>(&'a self, number: u64, partners: &'a [Partner<'a>]) -> Chunk<'a> {
        let dtype = self.grid.dtype();
        let elements = self.grid.elements(number);
        let range = bytes_of(&self.grid, dtype, number);
        Chunk {
            role: &self.role,
            base: self.base.as_ref().map(|base| base.bytes().get(range.clone()).unwrap_or_default()),
            partners,
            row_elements: self.grid.row_elements(),
            ..Chunk::new(dtype, elements.end - elements.start, self.data.bytes().get(range).unwrap_or_default())
        }
    }
}

/// Returns the byte range of a chunk of the grid in a tensor of the same shape, whose type may differ.
fn bytes_of(grid: &ChunkGrid, dtype: Dtype, number: u64) -> Range<usize> {
    let elements = grid.elements(number);
    let at = |element: u64| dtype.byte_count(element).unwrap_or(u64::MAX) as usize;
    at(elements.start)..at(elements.end)
}

/// Encodes a chunk with one codec, without checksums or a second choice.
fn encode_alone(codec: &dyn Codec, chunk: &Chunk<'_>) -> Result<EncodedChunk> {
    let made = codec.encode(chunk)?;
    let kind = if made.uses_base { ChunkKind::Delta } else { ChunkKind::Absolute };
    let columns = made.into_bytes().into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
    Ok(EncodedChunk { kind, codec: Some(CodecRef { id: codec.id().to_owned(), version: codec.version() }), columns, crc: 0 })
}

fn decode_chunk(registry: &Registry, chunk: &Chunk<'_>, stored: &EncodedChunk, out: &mut [u8]) -> Result<()> {
    let base = || chunk.base.filter(|base| base.len() == out.len()).ok_or_else(|| Error::invalid("was encoded against a base"));
    let Some(codec) = &stored.codec else {
        out.copy_from_slice(base()?);
        return Ok(());
    };
    let base = if stored.kind == ChunkKind::Delta { Some(base()?) } else { None };
    let columns: Vec<(&str, Bytes)> = stored.columns.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    let &Chunk { dtype, element_count, partners, .. } = chunk;
    registry.resolve(codec)?.decode(&Columns { dtype, element_count, columns: &columns, base, partners }, out)
}

fn page_crcs(chunk: &EncodedChunk) -> Vec<u32> {
    chunk.columns.iter().map(|(_, bytes)| crc32fast::hash(bytes)).collect()
}
