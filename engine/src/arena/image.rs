//! A state as stored in a slot: the bytes of all tensors, then a description in JSON with offsets and checksums.
//!
//! The image is raw, because saving may cost only one copy. It never leaves the host and is no stored format; snapshots
//! are stored in casks.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tensorcask::{Blob, Dtype, Error, Metadata, Rect, Result, TensorView};

use crate::rows::set::with_rows;

/// Description of a state in a slot.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Image {
    pub step: u64,
    pub time_ms: u64,
    pub tensors: Vec<ImageTensor>,
    pub blobs: Vec<ImageBlob>,
    pub user: Map<String, Value>,
    pub file: BTreeMap<String, String>,
    pub pieces: Vec<Piece>,
    /// CRC-32 of each extent of each piece, in order.
    pub crcs: Vec<u32>,
}

impl Image {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::invalid(format!("cannot describe the state in JSON: {e}")))
    }
}

/// A tensor or a shard of one. Tied tensors share a piece.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageTensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub offset: Vec<u64>,
    pub extent: Vec<u64>,
    pub role: String,
    pub param: String,
    pub piece: usize,
    /// Changed rows, if this save or later ones name them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<ImageRows>,
}

/// Rows of a shard that may have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageRows {
    /// Save of this rank after which they changed.
    pub since: u64,
    /// Piece with a bit for each row of the shard; `None` if only later saves name rows.
    pub piece: Option<usize>,
}

/// A blob.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageBlob {
    pub rank: u32,
    pub name: String,
    pub piece: usize,
}

/// A range of bytes of the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Piece {
    pub at: usize,
    pub bytes: usize,
}

impl Piece {
    /// Splits the piece into ranges of at most [`EXTENT_BYTES`].
    pub(crate) fn extents(self) -> impl Iterator<Item = Self> {
        (0..self.bytes).step_by(EXTENT_BYTES).map(move |done| Self { at: self.at + done, bytes: EXTENT_BYTES.min(self.bytes - done) })
    }
}

/// A state in a slot, borrowed from the arena.
#[derive(Debug, Clone)]
pub(crate) struct StoredState<'a> {
    image: Image,
    data: &'a [u8],
}

impl<'a> StoredState<'a> {
    /// Decodes a description. `data` are the bytes before it. Checks offsets, but not checksums.
    pub(crate) fn decode(json: &[u8], data: &'a [u8]) -> Result<Self> {
        let image: Image = serde_json::from_slice(json).map_err(|e| Error::corrupt(format!("invalid description of a slot: {e}")))?;
        let fits = |piece: &Piece| piece.at.checked_add(piece.bytes).is_some_and(|end| end <= data.len());
        let rows = image.tensors.iter().filter_map(|tensor| tensor.rows?.piece);
        let numbers = image.tensors.iter().map(|tensor| tensor.piece).chain(rows).chain(image.blobs.iter().map(|blob| blob.piece));
        if !image.pieces.iter().all(fits) || numbers.max().is_some_and(|piece| piece >= image.pieces.len()) {
            return Err(Error::corrupt("the description of a slot names bytes outside of the slot"));
        }
        Ok(Self { image, data })
    }

    pub(crate) fn step(&self) -> u64 {
        self.image.step
    }

    /// Total size of all tensors and blobs.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.image.pieces.iter().map(|piece| piece.bytes as u64).sum()
    }

    /// Compares all bytes with their checksums.
    pub(crate) fn verify(&self) -> Result<()> {
        let extents: Vec<Piece> = self.image.pieces.iter().flat_map(|piece| piece.extents()).collect();
        if extents.len() != self.image.crcs.len() {
            return Err(Error::corrupt("the description of a slot has the wrong number of checksums"));
        }
        extents.par_iter().zip(&self.image.crcs).try_for_each(|(extent, crc)| match crc32fast::hash(self.bytes(*extent)) {
            found if found == *crc => Ok(()),
            _ => Err(Error::corrupt("checksum mismatch in shared memory: the bytes changed after the save").offset(extent.at as u64)),
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
            let is_guessed = view.role() == tensor.role && view.param() == tensor.param;
            Ok(if is_guessed { view } else { view.with_role(tensor.role.as_str(), tensor.param.as_str()) })
        };
        self.image.tensors.iter().map(view).collect()
    }

    /// The tensors, with the changed rows that count from a save which `is_trusted` accepts.
    pub(crate) fn tensors_with_rows(&self, is_trusted: impl Fn(u64) -> bool) -> Result<Vec<TensorView<'a>>> {
        let name_rows = |(view, tensor): (TensorView<'a>, &ImageTensor)| match tensor.rows {
            None => Ok(view),
            Some(rows) => match rows.piece.filter(|_| is_trusted(rows.since)) {
                None => Ok(view.with_row_hashes()),
                Some(piece) => with_rows(view, self.piece(piece)),
            },
        };
        self.tensors()?.into_iter().zip(&self.image.tensors).map(name_rows).collect()
    }

    pub(crate) fn blobs(&self) -> Vec<Blob<'a>> {
        let blob = |blob: &ImageBlob| Blob { rank: blob.rank, name: blob.name.clone(), data: self.piece(blob.piece).into() };
        self.image.blobs.iter().map(blob).collect()
    }

    pub(crate) fn metadata(&self) -> Metadata {
        Metadata { user: self.image.user.clone(), file: self.image.file.clone() }
    }
}

/// Largest number of bytes that are copied and checked as one.
pub(crate) const EXTENT_BYTES: usize = 1 << 20;
