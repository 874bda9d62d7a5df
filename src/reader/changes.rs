//! Changes of tensors between two snapshots, element by element.

use crate::Dtype;
use crate::tensor::Run;

/// Change of a tensor between two snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorChange {
    /// No bit changed.
    None,
    /// These elements changed: their places in the flattened tensor, ascending. Their values are in the updated buffer.
    Elements(Vec<u64>),
    /// More elements changed than the caller wanted to have listed, or elements are smaller than a byte.
    Whole,
}

/// Collects the changed elements of a tensor while its chunks are updated.
#[derive(Debug)]
pub(super) struct ChangedElements {
    places: Vec<u64>,
    /// Number of places to list.
    most: usize,
    /// Bytes of an element; `None` if elements are packed.
    width: Option<usize>,
    is_beyond: bool,
}

impl ChangedElements {
    /// For a tensor of `elements` elements, of which a share of up to `limit` is listed.
    pub(super) fn new(dtype: Dtype, elements: u64, limit: f64) -> Self {
        let width = (dtype.bits().is_multiple_of(8)).then(|| (dtype.bits() / 8) as usize);
        Self { places: Vec::new(), most: (elements as f64 * limit.clamp(0.0, 1.0)) as usize, width, is_beyond: false }
    }

    /// Compares a run of new elements with those that they replace.
    pub(super) fn compare(&mut self, run: Run, new: &[u8], old: &[u8]) {
        let Some(width) = self.width else {
            self.is_beyond = true;
            return;
        };
        let bytes_of = |start: u64| start as usize * width..(start.saturating_add(run.count)) as usize * width;
        let (Some(new), Some(old)) = (new.get(bytes_of(run.source)), old.get(bytes_of(run.destination))) else { return };
        let block = BLOCK * width;
        for ((new, old), first) in new.chunks(block).zip(old.chunks(block)).zip((run.destination..).step_by(BLOCK)) {
            if self.is_beyond {
                return;
            }
            if new == old {
                continue;
            }
            let differing = new.chunks(width).zip(old.chunks(width)).zip(first..).filter(|((new, old), _)| new != old);
            self.places.extend(differing.map(|(_, place)| place));
            self.note_limit();
        }
    }

    fn note_limit(&mut self) {
        if self.places.len() > self.most {
            self.is_beyond = true;
            self.places = Vec::new();
        }
    }

    pub(super) fn into_change(mut self) -> TensorChange {
        if self.is_beyond {
            return TensorChange::Whole;
        }
        if self.places.is_empty() {
            return TensorChange::None;
        }
        // Chunks are updated in groups, and shards overlap in no order of places.
        self.places.sort_unstable();
        self.places.dedup();
        TensorChange::Elements(self.places)
    }
}

/// Elements that are compared at once.
const BLOCK: usize = 64;

#[cfg(test)]
mod tests {
    use super::{ChangedElements, TensorChange};
    use crate::Dtype;
    use crate::tensor::Run;

    #[test]
    fn places_are_those_of_the_whole_tensor() {
        let old: Vec<u8> = (0..=255).collect();
        let mut new = old.clone();
        for at in [0, 129, 255] {
            new[at] ^= 1;
        }
        let changes = |limit, dtype| {
            let mut changes = ChangedElements::new(dtype, 128, limit);
            // The second half first: 64 elements of 16 bits each.
            changes.compare(Run { source: 0, destination: 64, count: 64 }, &new[128..], &old);
            changes.compare(Run { source: 0, destination: 0, count: 64 }, &new[..128], &old);
            changes.into_change()
        };
        assert_eq!(changes(1.0, Dtype::Bf16), TensorChange::Elements(vec![0, 64, 127]));
        assert_eq!(changes(2.0 / 128.0, Dtype::Bf16), TensorChange::Whole);
        assert_eq!(changes(1.0, Dtype::Int4), TensorChange::Whole);
        let mut same = ChangedElements::new(Dtype::Bf16, 128, 0.0);
        same.compare(Run { source: 0, destination: 0, count: 128 }, &old, &old);
        assert_eq!(same.into_change(), TensorChange::None);
    }
}
