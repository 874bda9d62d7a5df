//! Borrowed tensors and blobs, the input of a writer. Owned tensors, the output of a reader.

use super::{Dtype, Rect, RoleAndParam, element_count, format_shape, infer_role};
use crate::{Error, Result};

/// A borrowed tensor, or one shard of it.
///
/// `data` holds the elements in row-major order, little-endian. Two views of the same memory, dtype and shape are
/// *tied*: they are stored once and restored under both names.
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
    is_role_certain: bool,
    data: &'a [u8],
    changed_rows: Option<Vec<u64>>,
    has_row_hashes: bool,
    gradient: Option<(Dtype, &'a [u8])>,
}

impl<'a> TensorView<'a> {
    /// Creates a view of a whole tensor. Role and param are guessed from the name; see [`infer_role`].
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[u64], data: &'a [u8]) -> Result<Self> {
        Self::shard(name, dtype, shape, Rect::whole(shape), data)
    }

    /// Creates a view of one shard of a tensor of global `shape`: the elements in `rect`.
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
        // Readers allocate the whole tensor, so its size must fit u64 too.
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
        let RoleAndParam { role, param, is_certain: is_role_certain } = infer_role(&name);
        Ok(Self {
            name,
            dtype,
            shape: shape.to_vec(),
            rect,
            role,
            param,
            is_role_certain,
            data,
            changed_rows: None,
            has_row_hashes: false,
            gradient: None,
        })
    }

    /// Sets role and param, instead of guessing them from the name. A stated role counts as certain.
    pub fn with_role(mut self, role: impl Into<String>, param: impl Into<String>) -> Self {
        self.role = role.into();
        self.param = param.into();
        self.is_role_certain = true;
        self
    }

    /// Whether the caller stated the role, or the name proves it. Precision rules that name a role leave out other tensors.
    ///
    /// ```
    /// use tensorcask::{Dtype, TensorView};
    /// let view = TensorView::new("momentum.weight", Dtype::F32, &[1], &[0; 4])?;
    /// assert!(view.role() == "momentum" && !view.is_role_certain());
    /// assert!(view.with_role("momentum", "weight").is_role_certain());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn is_role_certain(&self) -> bool {
        self.is_role_certain
    }

    /// Sets the rows that may have changed since this writer last saved the tensor, by index in the tensor's first
    /// dimension. All other rows are equal. A delta then needs no base.
    ///
    /// Do not leave out a changed row: the save fails. The writer compares the other rows with the base that it keeps, or
    /// with a hash of each row. If it has neither, it reads the base back: for rows below 32 bytes, and if the save of the
    /// base neither named rows nor asked for hashes with [`with_row_hashes`](Self::with_row_hashes).
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

    /// Lets the writer keep a hash of each row if it keeps no base, so that later saves may name changed rows without
    /// knowing the rows of this save. A save that names rows asks for hashes, too.
    pub fn with_row_hashes(mut self) -> Self {
        self.has_row_hashes = true;
        self
    }

    /// Sets the gradient of each element: f32, bf16 or f16, row-major, little-endian. It is not stored. Precision settings that
    /// weigh errors by sensitivity use it ([`LevelError::Sensitive`](crate::codec::LevelError)).
    ///
    /// ```
    /// use tensorcask::{Dtype, TensorView};
    /// let (data, gradient) = ([0u8; 12], [0u8; 6]);
    /// let view = TensorView::new("fc.bias", Dtype::F32, &[3], &data)?;
    /// assert!(view.clone().with_gradient(Dtype::Bf16, &gradient).is_ok());
    /// assert!(view.with_gradient(Dtype::F32, &gradient).is_err());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn with_gradient(mut self, dtype: Dtype, gradient: &'a [u8]) -> Result<Self> {
        let bytes = self.rect.element_count().and_then(|count| dtype.byte_count(count));
        if !matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) || bytes != Some(gradient.len() as u64) {
            let shape = format_shape(&self.rect.shape);
            let message = format!("a gradient of {} bytes of {dtype} for {shape}; use f32, bf16 or f16 for each element", gradient.len());
            return Err(Error::invalid(message).tensor(self.name));
        }
        self.gradient = Some((dtype, gradient));
        Ok(self)
    }

    /// Type and bytes of the gradient, if the caller gave it.
    pub fn gradient(&self) -> Option<(Dtype, &'a [u8])> {
        self.gradient
    }

    /// Takes back the rows of [`with_changed_rows`](Self::with_changed_rows): all rows are compared. Row hashes stay asked for.
    ///
    /// ```
    /// use tensorcask::{Dtype, TensorView};
    /// let data = [0u8; 24];
    /// let view = TensorView::new("wte.weight", Dtype::F32, &[3, 2], &data)?.with_changed_rows(&[2])?.without_changed_rows();
    /// assert!(view.changed_rows().is_none() && view.has_row_hashes());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn without_changed_rows(mut self) -> Self {
        self.has_row_hashes |= self.changed_rows.take().is_some();
        self
    }

    /// Whether the writer keeps a hash of each row if it keeps no base.
    pub fn has_row_hashes(&self) -> bool {
        self.has_row_hashes || self.changed_rows.is_some()
    }

    /// Rows of this shard that may differ from the parent snapshot, ascending, counted from the shard's first row.
    pub fn changed_rows(&self) -> Option<&[u64]> {
        self.changed_rows.as_deref()
    }

    /// Name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Global shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Rectangle of this shard in the tensor.
    pub fn rect(&self) -> &Rect {
        &self.rect
    }

    /// Role of the tensor in training.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Parameter that the tensor belongs to.
    pub fn param(&self) -> &str {
        &self.param
    }

    /// Elements of the shard.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }
}

/// Named opaque bytes of one rank, such as RNG state or data-loader position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob<'a> {
    /// Rank that the blob belongs to.
    pub rank: u32,
    /// Name, unique within the rank.
    pub name: String,
    /// Content.
    pub data: std::borrow::Cow<'a, [u8]>,
}

impl<'a> Blob<'a> {
    /// Creates a blob of rank 0.
    pub fn new(name: impl Into<String>, data: impl Into<std::borrow::Cow<'a, [u8]>>) -> Self {
        Self { rank: 0, name: name.into(), data: data.into() }
    }
}

/// A tensor, or a slice of one, as read from a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of `data`: the shape of the slice, if a slice was requested.
    pub shape: Vec<u64>,
    /// Elements, row-major, little-endian.
    pub data: Vec<u8>,
}
