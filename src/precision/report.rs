//! How far what is stored is from what was saved.

use crate::wire::{ChunkErrors, ErrorsFile};

/// Errors of the elements of a chunk, of a tensor, or of many.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RoundingReport {
    /// Elements that were finite and not zero: those that have a relative error.
    pub elements: u64,
    /// All elements.
    pub all_elements: u64,
    /// The greatest relative error.
    pub max_relative: f64,
    /// The sum of relative errors.
    pub relative: f64,
    /// The sum of squared errors of all elements.
    pub squares: f64,
    /// Elements that went from above zero to below, or back.
    pub sign_flips: u64,
    /// Of second moments: the squared error of the update m / (sqrt(v) + 1e-8), and the squared update, summed up.
    pub update: [f64; 2],
}

impl RoundingReport {
    /// Report of a chunk as its stored record has it. The record does not repeat the number of all elements.
    pub(crate) fn of_chunk(record: &ChunkErrors, all_elements: u64) -> Self {
        let &ChunkErrors { elements, max_relative, relative, squares, sign_flips, update, .. } = record;
        Self { elements, all_elements, max_relative, relative, squares, sign_flips, update }
    }

    /// The mean relative error.
    pub fn mean_relative(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.relative / self.elements as f64 }
    }

    /// The mean squared error.
    pub fn mean_squared(&self) -> f64 {
        if self.all_elements == 0 { 0.0 } else { self.squares / self.all_elements as f64 }
    }

    /// The root mean square of the error of Adam's update, relative to that of the update; none where it is not known.
    pub fn update_error(&self) -> Option<f64> {
        let [error, size] = self.update;
        (size > 0.0).then(|| (error / size).sqrt())
    }

    /// With those of other elements.
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
    /// The blob that holds them, in each snapshot in which something was rounded: the writer's own, not to be saved again.
    pub const BLOB: &str = ErrorsFile::BLOB;
}

/// What a snapshot tells of the errors of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorRounding {
    /// The tensor's name.
    pub name: String,
    /// Its role.
    pub role: String,
    /// How it was rounded, as [`Setting`](crate::Setting) says it in text.
    pub setting: String,
    /// Errors of all its elements.
    pub total: RoundingReport,
    /// Errors of each chunk: offset of the shard, number of the chunk in it.
    pub chunks: Vec<(Vec<u64>, u64, RoundingReport)>,
}
