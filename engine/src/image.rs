//! A state as it lies in a slot: tensors one after the other, then a description in JSON that says where each is, with checksums.
//!
//! The image never leaves the host and is no stored format: what lasts is a cask. It is raw, so that saving costs one copy.

use std::collections::{BTreeMap, HashMap};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tensorcask::{Blob, Dtype, Error, Metadata, Rect, Result, RoleAndParam, TensorView, infer_role};

use crate::memory::LINE;

/// Bytes that are copied and checked as one, at most.
pub(crate) const EXTENT_BYTES: usize = 1 << 20;

/// Bytes that stay in the cache between the checksum and the copy.
const CACHED_BYTES: usize = 64 << 10;

/// What a slot holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Image {
    pub step: u64,
    pub time_ms: u64,
    tensors: Vec<ImageTensor>,
    blobs: Vec<ImageBlob>,
    user: Map<String, Value>,
    file: BTreeMap<String, String>,
    pieces: Vec<Piece>,
    /// CRC-32 of each extent of each piece, in order.
    crcs: Vec<u32>,
}

/// A tensor or a shard of one. Tied tensors share a piece.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    offset: Vec<u64>,
    extent: Vec<u64>,
    role: String,
    param: String,
    piece: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageBlob {
    rank: u32,
    name: String,
    piece: usize,
}

/// A run of bytes of the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Piece {
    at: usize,
    bytes: usize,
}

impl Piece {
    /// Where its extents lie, within the slot.
    fn extents(self) -> impl Iterator<Item = Self> {
        (0..self.bytes).step_by(EXTENT_BYTES).map(move |done| Self { at: self.at + done, bytes: EXTENT_BYTES.min(self.bytes - done) })
    }
}

/// A tensor, or a shard of one, whose bytes come later: [`Engine::begin_save`](crate::Engine::begin_save) says where they go.
#[derive(Debug, Clone, PartialEq)]
pub struct Deferred {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    rect: Rect,
    bytes: usize,
    same_as: Option<usize>,
}

impl Deferred {
    /// Of a tensor of this shape, the part that `rect` says. What it is to training follows from its name
    /// ([`infer_role`](tensorcask::infer_role)).
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[u64], rect: Rect) -> Result<Self> {
        let (name, shape) = (name.into(), shape.to_vec());
        let bytes = rect.element_count().and_then(|count| dtype.byte_count(count)).and_then(|bytes| usize::try_from(bytes).ok());
        match bytes.filter(|_| rect.fits(&shape)) {
            Some(bytes) => Ok(Self { name, dtype, shape, rect, bytes, same_as: None }),
            None => {
                let message = format!("{:?} from {:?} on is no part of shape {shape:?}", rect.shape, rect.offset);
                Err(Error::invalid(message).tensor(name))
            }
        }
    }

    /// It has the same bytes as another, by its place in the list of those that come later: tied tensors are copied once.
    #[must_use]
    pub fn tied_to(self, other: usize) -> Self {
        Self { same_as: Some(other), ..self }
    }
}

/// A save that is about to be copied: where each byte of the caller's memory goes.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    image: Image,
    /// What each piece is copied from; none for what comes later.
    sources: Vec<Option<&'a [u8]>>,
    /// Bytes of all pieces, gaps between them included.
    pub data_bytes: usize,
    /// Bytes that are copied.
    pub copied_bytes: u64,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(
        step: u64,
        tensors: &'a [TensorView<'a>],
        deferred: &[Deferred],
        blobs: &'a [Blob<'a>],
        metadata: &Metadata,
    ) -> Result<Self> {
        let mut plan = Self {
            image: Image {
                step,
                time_ms: crate::now_ms(),
                tensors: Vec::with_capacity(tensors.len() + deferred.len()),
                blobs: Vec::with_capacity(blobs.len()),
                user: metadata.user.clone(),
                file: metadata.file.clone(),
                pieces: Vec::new(),
                crcs: Vec::new(),
            },
            sources: Vec::new(),
            data_bytes: 0,
            copied_bytes: 0,
        };
        let mut known: HashMap<(*const u8, usize), usize> = HashMap::new();
        for view in tensors {
            let piece = plan.shared_piece(view.data(), &mut known)?;
            plan.image.tensors.push(ImageTensor {
                name: view.name().to_owned(),
                dtype: view.dtype().name().to_owned(),
                shape: view.shape().to_vec(),
                offset: view.rect().offset.clone(),
                extent: view.rect().shape.clone(),
                role: view.role().to_owned(),
                param: view.param().to_owned(),
                piece,
            });
        }
        let mut pieces = Vec::with_capacity(deferred.len());
        for Deferred { name, dtype, shape, rect, bytes, same_as } in deferred {
            let piece = match same_as {
                None => plan.piece(*bytes, None)?,
                Some(other) => {
                    let piece = pieces.get(*other).copied().filter(|piece| plan.bytes_of(*piece) == Some(*bytes));
                    piece.ok_or_else(|| Error::invalid("is tied to what comes after it, or has another size").tensor(name))?
                }
            };
            pieces.push(piece);
            let RoleAndParam { role, param, .. } = infer_role(name);
            let (offset, extent) = (rect.offset.clone(), rect.shape.clone());
            let (name, dtype, shape) = (name.clone(), dtype.name().to_owned(), shape.clone());
            plan.image.tensors.push(ImageTensor { name, dtype, shape, offset, extent, role, param, piece });
        }
        for blob in blobs {
            let piece = plan.shared_piece(&blob.data, &mut known)?;
            plan.image.blobs.push(ImageBlob { rank: blob.rank, name: blob.name.clone(), piece });
        }
        Ok(plan)
    }

    /// The piece that holds these bytes; those that tensors share are copied once.
    fn shared_piece(&mut self, source: &'a [u8], known: &mut HashMap<(*const u8, usize), usize>) -> Result<usize> {
        if let Some(piece) = known.get(&(source.as_ptr(), source.len())) {
            return Ok(*piece);
        }
        let piece = self.piece(source.len(), Some(source))?;
        known.insert((source.as_ptr(), source.len()), piece);
        Ok(piece)
    }

    fn piece(&mut self, bytes: usize, source: Option<&'a [u8]>) -> Result<usize> {
        let (number, at) = (self.sources.len(), self.data_bytes);
        let end = at.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(LINE));
        self.data_bytes = end.ok_or_else(|| Error::limit("a state of more bytes than this machine can address"))?;
        self.copied_bytes += bytes as u64;
        self.image.pieces.push(Piece { at, bytes });
        self.sources.push(source);
        Ok(number)
    }

    fn bytes_of(&self, piece: usize) -> Option<usize> {
        self.image.pieces.get(piece).map(|piece| piece.bytes)
    }

    /// Bytes that a slot should have for states like this one: some more, for metadata that grows.
    pub(crate) fn slot_bytes(&self) -> usize {
        let described = self.image.tensors.iter().map(|tensor| 200 + 2 * tensor.name.len() + 64 * tensor.shape.len()).sum::<usize>();
        let user = serde_json::to_vec(&(&self.image.user, &self.image.file)).map_or(0, |json| json.len());
        let crcs = 12 * (self.data_bytes / EXTENT_BYTES + self.image.pieces.len());
        self.data_bytes + described + 100 * self.image.blobs.len() + crcs + 2 * user + (64 << 10)
    }

    /// Copies everything that is there through `write` (place in the slot, bytes), in parallel, with checksums on the way; then describes it.
    pub(crate) fn copy(mut self, write: impl Fn(usize, &[u8]) -> Result<()> + Sync) -> Result<Copied> {
        let pieces = self.image.pieces.iter().zip(&self.sources);
        let extents: Vec<(Piece, Option<&[u8]>)> = pieces
            .flat_map(|(piece, source)| {
                piece.extents().map(move |extent| {
                    let at = extent.at - piece.at;
                    (extent, source.map(|source| source.get(at..at + extent.bytes).unwrap_or_default()))
                })
            })
            .collect();
        let copy = |(extent, source): &(Piece, Option<&[u8]>)| -> Result<u32> {
            // As long as any: what is described now takes no fewer bytes than what will be.
            let Some(source) = source else { return Ok(u32::MAX) };
            let mut crc = crc32fast::Hasher::new();
            for (nth, bytes) in source.chunks(CACHED_BYTES).enumerate() {
                crc.update(bytes);
                write(extent.at + nth * CACHED_BYTES, bytes)?;
            }
            Ok(crc.finalize())
        };
        self.image.crcs = extents.par_iter().map(copy).collect::<Result<_>>()?;
        let deferred = self.sources.iter().enumerate().filter(|(_, source)| source.is_none()).map(|(number, _)| number).collect();
        let description = self.image.describe()?;
        Ok(Copied { image: self.image, data_bytes: self.data_bytes, description, deferred })
    }
}

impl Image {
    fn describe(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::invalid(format!("the state cannot be described in JSON: {e}")))
    }
}

/// A save that has been copied, but for what comes later.
#[derive(Debug)]
pub(crate) struct Copied {
    image: Image,
    /// Bytes of all pieces, gaps between them included.
    pub data_bytes: usize,
    /// What is to lie behind them; if something comes later, at least as long as that will be.
    pub description: Vec<u8>,
    /// Pieces that come later.
    deferred: Vec<usize>,
}

impl Copied {
    /// Place and bytes of each tensor that comes later, those that are tied to others left out.
    pub(crate) fn deferred(&self) -> impl Iterator<Item = (usize, usize)> {
        self.deferred.iter().filter_map(|number| self.image.pieces.get(*number)).map(|piece| (piece.at, piece.bytes))
    }

    /// What came later is there, and is read through `read` (place in the slot, bytes): describes it all anew.
    pub(crate) fn complete<'s>(&mut self, read: impl Fn(usize, usize) -> Result<&'s [u8]> + Sync) -> Result<()> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let extents: Vec<Option<Piece>> = (0..)
            .zip(&self.image.pieces)
            .flat_map(|(number, piece)| {
                let comes_later = self.deferred.binary_search(&number).is_ok();
                piece.extents().map(move |extent| comes_later.then_some(extent))
            })
            .collect();
        let crc = |(extent, known): (&Option<Piece>, &u32)| match extent {
            Some(extent) => read(extent.at, extent.bytes).map(crc32fast::hash),
            None => Ok(*known),
        };
        self.image.crcs = extents.par_iter().zip(&self.image.crcs).map(crc).collect::<Result<_>>()?;
        self.description = self.image.describe()?;
        Ok(())
    }
}

/// A state in a slot, borrowed from the arena.
#[derive(Debug, Clone)]
pub(crate) struct Stored<'a> {
    image: Image,
    data: &'a [u8],
}

impl<'a> Stored<'a> {
    /// From a description and the bytes before it. Checks places, not checksums.
    pub(crate) fn decode(json: &[u8], data: &'a [u8]) -> Result<Self> {
        let image: Image = serde_json::from_slice(json).map_err(|e| Error::corrupt(format!("the description of a slot: {e}")))?;
        let fits = |piece: &Piece| piece.at.checked_add(piece.bytes).is_some_and(|end| end <= data.len());
        let numbers = image.tensors.iter().map(|tensor| tensor.piece).chain(image.blobs.iter().map(|blob| blob.piece));
        if !image.pieces.iter().all(fits) || numbers.max().is_some_and(|piece| piece >= image.pieces.len()) {
            return Err(Error::corrupt("the description of a slot names bytes outside of it"));
        }
        Ok(Self { image, data })
    }

    pub(crate) fn step(&self) -> u64 {
        self.image.step
    }

    /// Bytes of all its tensors and blobs.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.image.pieces.iter().map(|piece| piece.bytes as u64).sum()
    }

    /// Compares all bytes with their checksums.
    pub(crate) fn verify(&self) -> Result<()> {
        let extents: Vec<Piece> = self.image.pieces.iter().flat_map(|piece| piece.extents()).collect();
        if extents.len() != self.image.crcs.len() {
            return Err(Error::corrupt("the description of a slot has too few checksums"));
        }
        extents.par_iter().zip(&self.image.crcs).try_for_each(|(extent, crc)| match crc32fast::hash(self.bytes(*extent)) {
            found if found == *crc => Ok(()),
            _ => Err(Error::corrupt("bytes in shared memory do not have the checksum of what was saved").offset(extent.at as u64)),
        })
    }

    fn bytes(&self, piece: Piece) -> &'a [u8] {
        self.data.get(piece.at..piece.at.saturating_add(piece.bytes)).unwrap_or_default()
    }

    fn piece(&self, number: usize) -> &'a [u8] {
        self.image.pieces.get(number).map_or(&[][..], |piece| self.bytes(*piece))
    }

    pub(crate) fn tensors(&self) -> Result<Vec<TensorView<'a>>> {
        let view = |tensor: &ImageTensor| {
            let rect = Rect { offset: tensor.offset.clone(), shape: tensor.extent.clone() };
            let dtype = Dtype::from_name(&tensor.dtype)?;
            let view = TensorView::shard(tensor.name.as_str(), dtype, &tensor.shape, rect, self.piece(tensor.piece))?;
            Ok(view.with_role(tensor.role.as_str(), tensor.param.as_str()))
        };
        self.image.tensors.iter().map(view).collect()
    }

    pub(crate) fn blobs(&self) -> Vec<Blob<'a>> {
        let blob = |blob: &ImageBlob| Blob { rank: blob.rank, name: blob.name.clone(), data: self.piece(blob.piece).into() };
        self.image.blobs.iter().map(blob).collect()
    }

    pub(crate) fn metadata(&self) -> Metadata {
        Metadata { user: self.image.user.clone(), file: self.image.file.clone() }
    }
}
