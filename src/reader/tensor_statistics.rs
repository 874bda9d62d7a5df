//! Statistics of whole tensors, from those of their chunks.

use crate::{ChangeStatistics, ChunkStatistics, Dtype, ValueStatistics};

/// Statistics of a tensor of a snapshot: those of its chunks, added up.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorStatistics {
    /// Name of the tensor.
    pub tensor: String,
    /// Role of the tensor.
    pub role: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Number of elements.
    pub elements: u64,
    /// Counts, extremes and sums; `None` for types that are not measured.
    pub values: Option<ValueStatistics>,
    /// Change since the reference step; `None` unless the writer had the bases of all chunks.
    pub change: Option<ChangeStatistics>,
    /// Step that the change refers to. There exactly if `change` is.
    pub reference_step: Option<u64>,
}

impl TensorStatistics {
    /// Number of numbers, which the counts of `values` and `change` cover: a complex element has two.
    ///
    /// ```
    /// # use tensorcask::{Dtype, TensorStatistics};
    /// let complex = TensorStatistics {
    ///     tensor: "w".into(),
    ///     role: "model".into(),
    ///     dtype: Dtype::C64,
    ///     elements: 10,
    ///     values: None,
    ///     change: None,
    ///     reference_step: None,
    /// };
    /// assert_eq!(complex.numbers(), 20);
    /// ```
    pub fn numbers(&self) -> u64 {
        self.elements.saturating_mul(self.dtype.numbers_per_element())
    }

    /// Adds up the chunks of one tensor; `None` without chunks.
    pub fn of(chunks: &[ChunkStatistics]) -> Option<Self> {
        let first = chunks.first()?;
        let values = chunks.iter().map(|chunk| chunk.values).reduce(|a, b| Some(a?.and(b?)))?;
        let change = chunks.iter().map(|chunk| chunk.change).reduce(|a, b| Some(a?.and(b?)))?;
        Some(Self {
            tensor: first.tensor.clone(),
            role: first.role.clone(),
            dtype: first.dtype,
            elements: chunks.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.elements)),
            values,
            change,
            reference_step: change.and(first.reference_step),
        })
    }
}
