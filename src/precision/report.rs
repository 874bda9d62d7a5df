//! Rounding errors: the distance between saved and stored numbers.

use crate::wire::{ChunkErrors, ErrorsFile};

/// Rounding errors of a chunk, of a tensor, or of several tensors.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RoundingReport {
    /// Number of elements that were finite and not zero; only they have a relative error.
    pub elements: u64,
    /// Number of all elements.
    pub all_elements: u64,
    /// Greatest relative error.
    pub max_relative: f64,
    /// Sum of relative errors.
    pub relative: f64,
    /// Sum of squared errors of all elements.
    pub squares: f64,
    /// Number of elements whose sign changed.
    pub sign_flips: u64,
    /// For second moments: sum of squared errors of the update m / (sqrt(v) + 1e-8), and sum of squared updates.
    pub update: [f64; 2],
}

impl RoundingReport {
    /// Converts the stored record of a chunk. The record does not contain the number of all elements.
    pub(crate) fn of_chunk(record: &ChunkErrors, all_elements: u64) -> Self {
        let &ChunkErrors { elements, max_relative, relative, squares, sign_flips, update, .. } = record;
        Self { elements, all_elements, max_relative, relative, squares, sign_flips, update }
    }

    /// Returns the mean relative error.
    pub fn mean_relative(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.relative / self.elements as f64 }
    }

    /// Returns the mean squared error.
    pub fn mean_squared(&self) -> f64 {
        if self.all_elements == 0 { 0.0 } else { self.squares / self.all_elements as f64 }
    }

    /// Returns the root mean square error of Adam's update, relative to the root mean square update; `None` if unknown.
    pub fn update_error(&self) -> Option<f64> {
        let [error, size] = self.update;
        (size > 0.0).then(|| (error / size).sqrt())
    }

    /// Adds the errors of other elements.
    pub fn and(self, other: Self) -> Self {
        Self {
            elements: self.elements + other.elements,
            all_elements: self.all_elements + other.all_elements,
            max_relative: self.max_relative.max(other.max_relative),
            relative: self.relative + other.relative,
            squares: self.squares + other.squares,
            sign_flips: self.sign_flips + other.sign_flips,
            update: [self.update[0] + other.update[0], self.update[1] + other.update[1]],
        }
    }
}

impl TensorRounding {
    /// Name of the blob with the rounding errors of a snapshot. The writer adds the blob if it rounded a tensor; users
    /// must not save the blob again.
    pub const BLOB: &str = ErrorsFile::BLOB;
}

/// Rounding errors of a tensor in a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorRounding {
    /// Name of the tensor.
    pub name: String,
    /// Role of the tensor.
    pub role: String,
    /// Setting of the rounding, in the text form of [`Setting`](crate::precision::Setting).
    pub setting: String,
    /// Errors of all elements.
    pub total: RoundingReport,
    /// Errors of each chunk, with the shard's offset and the chunk's number in the shard.
    pub chunks: Vec<ChunkRounding>,
}

/// Rounding errors of a chunk of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkRounding {
    /// Offset of the chunk's shard in the tensor.
    pub offset: Vec<u64>,
    /// Number of the chunk in its shard.
    pub chunk: u64,
    /// Errors of its elements.
    pub report: RoundingReport,
}
