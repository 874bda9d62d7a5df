//! Borrowed tensors and blobs: what a writer takes; owned tensors: what a reader gives.

use super::{Dtype, Rect, RoleAndParam, element_count, format_shape, infer_role};
use crate::{Error, Result};

/// A borrowed tensor, or one shard of it.
///
/// `data` holds the elements in row-major order, little-endian. Two views of the same memory, dtype and shape are *tied*:
/// stored once, restored under both names.
///
/// ```
/// use tensorcask::{Dtype, TensorView};
/// let data = [0u8; 24];
/// let view = TensorView::new("h.0.weight", Dtype::F32, &[2, 3], &data)?;
/// assert_eq!(view.role(), "model");
/// assert!(TensorView::new("h.0.weight", Dtype::F32, &[2, 4], &data).is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TensorView<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    rect: Rect,
    role: String,
    param: String,
    data: &'a [u8],
    changed_rows: Option<Vec<u64>>,
}

impl<'a> TensorView<'a> {
    /// A whole tensor. Role and param are guessed from the name; see [`infer_role`].
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[u64], data: &'a [u8]) -> Result<Self> {
        Self::shard(name, dtype, shape, Rect::whole(shape), data)
    }

    /// One shard of a tensor of global `shape`: the elements in `rect`.
    pub fn shard(name: impl Into<String>, dtype: Dtype, shape: &[u64], rect: Rect, data: &'a [u8]) -> Result<Self> {
        let name = name.into();
        let fail = |message: String| Err(Error::invalid(message).tensor(name.as_str()));
        if !rect.fits(shape) {
            return fail(format!(
                "shard at {} of {} does not fit shape {}",
                format_shape(&rect.offset),
                format_shape(&rect.shape),
                format_shape(shape)
            ));
        }
        // The global size must be representable too: readers allocate it.
        let global = element_count(shape).and_then(|n| dtype.byte_count(n));
        let bytes = rect.element_count().and_then(|n| dtype.byte_count(n));
        let (Some(_), Some(bytes)) = (global, bytes) else {
            return fail(format!("shape {} of {dtype} is beyond 2^64 bytes", format_shape(shape)));
        };
        if bytes != data.len() as u64 {
            return fail(format!("{} bytes given, but {dtype} {} takes {bytes}", data.len(), format_shape(&rect.shape)));
        }
        if dtype.is_packed() {
            let used = (rect.element_count().unwrap_or(0) % 8 * dtype.bits() % 8) as u32;
            if used != 0 && data.last().is_some_and(|last| last >> used != 0) {
                return fail("unused bits of the last byte are not zero".to_owned());
            }
        }
        let RoleAndParam { role, param } = infer_role(&name);
        Ok(Self { name, dtype, shape: shape.to_vec(), rect, role, param, data, changed_rows: None })
    }

    /// Says what the tensor is to training, instead of guessing from its name.
    pub fn with_role(mut self, role: impl Into<String>, param: impl Into<String>) -> Self {
        self.role = role.into();
        self.param = param.into();
        self
    }

    /// Says which rows may have changed since this tensor was last saved by the same writer, by their index in the first dimension of the
    /// tensor: all others are taken to be equal. A delta then needs no base in memory and reads none back. A row that changed and is
    /// left out fails the save where the writer can tell: in chunks that it keeps the base of, and in chunks in which no row was named. In
    /// others it makes the chunk unreadable in this snapshot (its checksum tells).
    ///
    /// ```
    /// use tensorcask::{Dtype, TensorView};
    /// let data = [0u8; 24];
    /// let view = TensorView::new("wte.weight", Dtype::F32, &[3, 2], &data)?.with_changed_rows(&[2, 0, 2])?;
    /// assert_eq!(view.changed_rows(), Some(&[0, 2][..]));
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn with_changed_rows(mut self, rows: &[u64]) -> Result<Self> {
        let (Some(&count), Some(&offset), Some(&own)) = (self.shape.first(), self.rect.offset.first(), self.rect.shape.first()) else {
            return Err(Error::invalid("changed rows of a tensor without dimensions").tensor(self.name));
        };
        if let Some(row) = rows.iter().find(|row| **row >= count) {
            return Err(Error::invalid(format!("changed row {row} of a tensor of {count} rows")).tensor(self.name));
        }
        let mut rows: Vec<u64> = rows.iter().filter_map(|row| row.checked_sub(offset)).filter(|row| *row < own).collect();
        rows.sort_unstable();
        rows.dedup();
        self.changed_rows = Some(rows);
        Ok(self)
    }

    /// Rows of this shard that may differ from the parent snapshot, ascending, counted from the shard's first.
    pub fn changed_rows(&self) -> Option<&[u64]> {
        self.changed_rows.as_deref()
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The global shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Where this shard lies in the tensor.
    pub fn rect(&self) -> &Rect {
        &self.rect
    }

    /// What the tensor is to training.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// The parameter it belongs to.
    pub fn param(&self) -> &str {
        &self.param
    }

    /// The elements.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }
}

/// Named opaque bytes of one rank: RNG state, data-loader position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob<'a> {
    /// The rank it belongs to.
    pub rank: u32,
    /// The name; unique within the rank.
    pub name: String,
    /// The bytes.
    pub data: std::borrow::Cow<'a, [u8]>,
}

impl<'a> Blob<'a> {
    /// A blob of rank 0.
    pub fn new(name: impl Into<String>, data: impl Into<std::borrow::Cow<'a, [u8]>>) -> Self {
        Self { rank: 0, name: name.into(), data: data.into() }
    }
}

/// A tensor, or a slice of one, that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The shape of `data`: of the slice, where one was asked for.
    pub shape: Vec<u64>,
    /// Row-major elements, little-endian.
    pub data: Vec<u8>,
}
