//! The plan of a save: the position of each byte in the slot, and the copy itself.
//!
//! Position in the flow: the trainer plans a state, copies it with checksums into a claimed slot, and publishes the
//! slot.

use std::collections::HashMap;

use rayon::prelude::*;
use tensorcask::{Blob, Dtype, Error, Metadata, Rect, Result, RoleAndParam, TensorView, infer_role};

use super::image::{EXTENT_BYTES, Image, ImageBlob, ImageRows, ImageTensor, Piece};
use crate::os::clock::now_ms;
use crate::os::shared_memory::CACHE_LINE_BYTES;
use crate::rows::journal::{RowClaim, ShardOfState};

/// A tensor, or a shard of one, that a device copies later into the buffer from
/// [`Engine::begin_save`](crate::Engine::begin_save).
#[derive(Debug, Clone, PartialEq)]
pub struct Deferred {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    rect: Rect,
    bytes: usize,
    same_as: Option<usize>,
    changed_rows: Option<Vec<u64>>,
    has_row_hashes: bool,
}

impl Deferred {
    /// Describes the part `rect` of a tensor of this shape. Its role and parameter follow from the name
    /// ([`infer_role`](tensorcask::infer_role)).
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[u64], rect: Rect) -> Result<Self> {
        let name = name.into();
        let shape = shape.to_vec();
        let bytes = rect.element_count().and_then(|count| dtype.byte_count(count)).and_then(|bytes| usize::try_from(bytes).ok());
        match bytes.filter(|_| rect.fits(&shape)) {
            Some(bytes) => Ok(Self { name, dtype, shape, rect, bytes, same_as: None, changed_rows: None, has_row_hashes: false }),
            None => {
                let message =
                    format!("the part with offset {:?} and shape {:?} does not fit into shape {shape:?}", rect.offset, rect.shape);
                Err(Error::invalid(message).tensor(name))
            }
        }
    }

    /// Declares that this tensor has the same bytes as an earlier one, given by its index in the list of deferred
    /// tensors. Tied tensors are copied once.
    #[must_use]
    pub fn tied_to(self, other: usize) -> Self {
        Self { same_as: Some(other), ..self }
    }

    /// Sets the rows that may have changed since the save before, like
    /// [`TensorView::with_changed_rows`]: indices in the first dimension of the whole tensor.
    ///
    /// ```
    /// use tensorcask::{Dtype, Rect};
    /// use tensorcask_engine::Deferred;
    /// let table = Deferred::new("wte.weight", Dtype::F32, &[3, 2], Rect::whole(&[3, 2]))?;
    /// assert!(table.clone().with_changed_rows(&[2, 0]).is_ok());
    /// assert!(table.with_changed_rows(&[3]).is_err());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn with_changed_rows(self, rows: &[u64]) -> Result<Self> {
        let (Some(count), Some(first), Some(own)) = (self.shape.first(), self.rect.offset.first(), self.rect.shape.first()) else {
            return Err(Error::invalid("changed rows of a tensor without dimensions").tensor(self.name));
        };
        if let Some(row) = rows.iter().find(|row| *row >= count) {
            return Err(Error::invalid(format!("changed row {row} of a tensor of {count} rows")).tensor(self.name));
        }
        let own_rows = rows.iter().filter_map(|row| row.checked_sub(*first)).filter(|row| row < own).collect();
        Ok(Self { changed_rows: Some(own_rows), ..self })
    }

    /// Announces that later saves name changed rows, like [`TensorView::with_row_hashes`].
    #[must_use]
    pub fn with_row_hashes(self) -> Self {
        Self { has_row_hashes: true, ..self }
    }

    /// Name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The shards of a state, in the order of its description.
pub(crate) fn shards_of<'a>(tensors: &'a [TensorView<'_>], deferred: &'a [Deferred]) -> impl Iterator<Item = ShardOfState<'a>> {
    let present = tensors.iter().map(|view| ShardOfState {
        name: view.name(),
        rect: view.rect(),
        bytes: view.data().len(),
        rows: view.changed_rows(),
        names_rows: view.has_row_hashes(),
    });
    let later = deferred.iter().map(|tensor| ShardOfState {
        name: &tensor.name,
        rect: &tensor.rect,
        bytes: tensor.bytes,
        rows: tensor.changed_rows.as_deref(),
        names_rows: tensor.has_row_hashes || tensor.changed_rows.is_some(),
    });
    present.chain(later)
}

/// A state that is about to be copied: its description, and the source of each piece.
#[derive(Debug)]
pub(crate) struct CopyPlan<'a> {
    image: Image,
    /// Source of each piece; `None` for a deferred tensor.
    sources: Vec<Option<&'a [u8]>>,
    /// Total size of the pieces, gaps included.
    pub data_bytes: usize,
    /// Bytes to copy now.
    pub copied_bytes: u64,
}

impl<'a> CopyPlan<'a> {
    pub(crate) fn new(
        step: u64,
        tensors: &'a [TensorView<'a>],
        deferred: &[Deferred],
        blobs: &'a [Blob<'a>],
        metadata: &Metadata,
    ) -> Result<Self> {
        let image = Image { step, time_ms: now_ms(), user: metadata.user.clone(), file: metadata.file.clone(), ..Image::default() };
        let mut plan = Self { image, sources: Vec::new(), data_bytes: 0, copied_bytes: 0 };
        let mut pieces: HashMap<(*const u8, usize), usize> = HashMap::new();
        for view in tensors {
            let piece = plan.shared_piece(view.data(), &mut pieces)?;
            plan.image.tensors.push(ImageTensor {
                name: view.name().to_owned(),
                dtype: view.dtype().name().to_owned(),
                shape: view.shape().to_vec(),
                offset: view.rect().offset.clone(),
                extent: view.rect().shape.clone(),
                role: view.role().to_owned(),
                param: view.param().to_owned(),
                piece,
                rows: None,
            });
        }
        plan.add_deferred(deferred)?;
        for blob in blobs {
            let piece = plan.shared_piece(&blob.data, &mut pieces)?;
            plan.image.blobs.push(ImageBlob { rank: blob.rank, name: blob.name.clone(), piece });
        }
        Ok(plan)
    }

    fn add_deferred(&mut self, deferred: &[Deferred]) -> Result<()> {
        let mut pieces = Vec::with_capacity(deferred.len());
        for Deferred { name, dtype, shape, rect, bytes, same_as, .. } in deferred {
            let piece = match same_as {
                None => self.add_piece(*bytes, None)?,
                Some(other) => {
                    let piece = pieces.get(*other).copied().filter(|piece| self.piece_bytes(*piece) == Some(*bytes));
                    piece.ok_or_else(|| Error::invalid("is tied to a later tensor, or to one of another size").tensor(name))?
                }
            };
            pieces.push(piece);
            let RoleAndParam { role, param, .. } = infer_role(name);
            let offset = rect.offset.clone();
            let extent = rect.shape.clone();
            let (name, dtype, shape) = (name.clone(), dtype.name().to_owned(), shape.clone());
            self.image.tensors.push(ImageTensor { name, dtype, shape, offset, extent, role, param, piece, rows: None });
        }
        Ok(())
    }

    /// Adds the changed rows of the shards, in the order of [`shards_of`].
    pub(crate) fn name_rows(mut self, claims: &'a [RowClaim]) -> Result<Self> {
        for (number, claim) in claims.iter().enumerate() {
            let rows = match claim {
                RowClaim::Silent => continue,
                RowClaim::Later => ImageRows { since: 0, piece: None },
                RowClaim::Since { save, rows } => {
                    ImageRows { since: *save, piece: Some(self.add_piece(rows.bytes().len(), Some(rows.bytes()))?) }
                }
            };
            if let Some(tensor) = self.image.tensors.get_mut(number) {
                tensor.rows = Some(rows);
            }
        }
        Ok(self)
    }

    /// Returns the piece for these bytes. Tensors that share memory share a piece, which is copied once.
    fn shared_piece(&mut self, source: &'a [u8], pieces: &mut HashMap<(*const u8, usize), usize>) -> Result<usize> {
        if let Some(piece) = pieces.get(&(source.as_ptr(), source.len())) {
            return Ok(*piece);
        }
        let piece = self.add_piece(source.len(), Some(source))?;
        pieces.insert((source.as_ptr(), source.len()), piece);
        Ok(piece)
    }

    fn add_piece(&mut self, bytes: usize, source: Option<&'a [u8]>) -> Result<usize> {
        let number = self.sources.len();
        let at = self.data_bytes;
        let end = at.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(CACHE_LINE_BYTES));
        self.data_bytes = end.ok_or_else(|| Error::limit("the state has more bytes than this machine can address"))?;
        self.copied_bytes += bytes as u64;
        self.image.pieces.push(Piece { at, bytes });
        self.sources.push(source);
        Ok(number)
    }

    fn piece_bytes(&self, piece: usize) -> Option<usize> {
        self.image.pieces.get(piece).map(|piece| piece.bytes)
    }

    /// Slot size for states like this one. Leaves room for metadata that grows, and for changed rows of tables.
    pub(crate) fn slot_bytes(&self) -> usize {
        let tables = self.image.tensors.iter().filter(|tensor| tensor.extent.len() > 1 || tensor.rows.is_some());
        let rows = tables.map(|table| {
            let rows = table.extent.first().and_then(|rows| usize::try_from(*rows).ok()).unwrap_or(0);
            rows.min(self.piece_bytes(table.piece).unwrap_or(0)) / 8 + 2 * CACHE_LINE_BYTES
        });
        let tensors = self.image.tensors.iter().map(|tensor| 200 + 2 * tensor.name.len() + 64 * tensor.shape.len()).sum::<usize>();
        let user = serde_json::to_vec(&(&self.image.user, &self.image.file)).map_or(0, |json| json.len());
        let crcs = 12 * (self.data_bytes / EXTENT_BYTES + self.image.pieces.len());
        self.data_bytes + tensors + rows.sum::<usize>() + 100 * self.image.blobs.len() + crcs + 2 * user + (64 << 10)
    }

    /// Copies all present tensors through `write` (offset in the slot, bytes) in parallel, computing checksums on the
    /// way. Then describes the state.
    pub(crate) fn copy(mut self, write: impl Fn(usize, &[u8]) -> Result<()> + Sync) -> Result<CopiedState> {
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
            // The longest possible number: the final description then never needs more bytes than this one.
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
        let description = self.image.encode()?;
        Ok(CopiedState { image: self.image, data_bytes: self.data_bytes, description, deferred })
    }
}

/// A state that is copied, except for its deferred tensors.
#[derive(Debug)]
pub(crate) struct CopiedState {
    image: Image,
    /// Total size of the pieces, gaps included.
    pub data_bytes: usize,
    /// Bytes that follow the pieces in the slot. With deferred tensors, at least as long as the final description.
    pub description: Vec<u8>,
    /// Numbers of the deferred pieces, ascending.
    deferred: Vec<usize>,
}

impl CopiedState {
    /// The deferred pieces. Tensors tied to others have none.
    pub(crate) fn deferred(&self) -> impl Iterator<Item = Piece> {
        self.deferred.iter().filter_map(|number| self.image.pieces.get(*number)).copied()
    }

    /// Computes the checksums of the deferred pieces, read through `read` (offset in the slot, size), and describes the
    /// state again.
    pub(crate) fn complete<'s>(&mut self, read: impl Fn(usize, usize) -> Result<&'s [u8]> + Sync) -> Result<()> {
        if self.deferred.is_empty() {
            return Ok(());
        }
        let extents: Vec<Option<Piece>> = (0..)
            .zip(&self.image.pieces)
            .flat_map(|(number, piece)| {
                let is_deferred = self.deferred.binary_search(&number).is_ok();
                piece.extents().map(move |extent| is_deferred.then_some(extent))
            })
            .collect();
        let crc = |(extent, known): (&Option<Piece>, &u32)| match extent {
            Some(extent) => read(extent.at, extent.bytes).map(crc32fast::hash),
            None => Ok(*known),
        };
        self.image.crcs = extents.par_iter().zip(&self.image.crcs).map(crc).collect::<Result<_>>()?;
        self.description = self.image.encode()?;
        Ok(())
    }
}

/// Bytes that stay in the cache between checksum and copy.
const CACHED_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use tensorcask::{Dtype, Metadata, Rect, TensorView};

    use super::{CopyPlan, Deferred, shards_of};
    use crate::rows::journal::{RowClaim, RowJournal};

    #[test]
    fn a_slot_has_room_for_rows_that_later_saves_name() {
        let count = 8_000_000;
        let data = vec![0; 8_000_000];
        let view = TensorView::new("table", Dtype::U8, &[count / 2, 2], &data).unwrap();
        let metadata = Metadata::default();
        let tensors = [view.clone()];
        let first = CopyPlan::new(1, &tensors, &[], &[], &metadata).unwrap().slot_bytes();
        let mut journal = RowJournal::default();
        for (step, named) in [(2, view.clone().with_row_hashes()), (3, view.with_changed_rows(&[1, count / 2 - 1]).unwrap())] {
            let tensors = [named];
            let claims = journal.claims(shards_of(&tensors, &[]), 0);
            let plan = CopyPlan::new(step, &tensors, &[], &[], &metadata).unwrap().name_rows(&claims).unwrap();
            assert_eq!(matches!(claims[..], [RowClaim::Since { save: 2, .. }]), step == 3, "{claims:?}");
            let copied = plan.copy(|_, _| Ok(())).unwrap();
            assert!(copied.data_bytes + copied.description.len() <= first, "step {step} does not fit into {first} bytes");
            journal.on_saved(step);
        }
    }

    #[test]
    fn deferred_tensors_name_the_rows_of_their_part() {
        let rect = Rect { offset: vec![10, 0], shape: vec![5, 4] };
        let part = Deferred::new("table", Dtype::U8, &[20, 4], rect).unwrap();
        let rows = |deferred: Deferred| shards_of(&[], &[deferred]).next().unwrap().rows.map(<[u64]>::to_vec);
        assert_eq!(rows(part.clone().with_changed_rows(&[14, 3, 10, 15]).unwrap()), Some(vec![4, 0]));
        assert_eq!(rows(part.clone().with_row_hashes()), None);
        assert!(shards_of(&[], &[part.clone().with_row_hashes()]).all(|shard| shard.names_rows));
        assert!(part.with_changed_rows(&[20]).is_err());
        assert!(Deferred::new("number", Dtype::U8, &[], Rect::whole(&[])).unwrap().with_changed_rows(&[0]).is_err());
    }
}
