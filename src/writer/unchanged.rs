//! Parameters that stay the same from save to save although they are being trained.
//!
//! A job that saves stale weights again and again writes checkpoints that look healthy. A writer therefore remembers the
//! checksums of the last save, tensor by tensor. The checksums exist in any case, so the comparison costs a few bytes per
//! tensor and no pass over the elements.
//!
//! A state does not say which tensors are trained. Buffers look like weights, and never change. A weight or master whose
//! parameter has a moment in the same state is trained. In a state without moments, no single tensor is reported, but all
//! of them are if none changed.

use std::collections::{BTreeMap, BTreeSet};

use globset::{Glob, GlobSet, GlobSetBuilder};

use super::layout::StateLayout;
use crate::kernels::statistics::is_measured;
use crate::{Error, Result};

/// A trained parameter that did not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnchangedTensor {
    /// Name of the tensor.
    pub tensor: String,
    /// Step of the first save of this writer with the same content.
    pub since_step: u64,
}

/// What a writer remembers of the tensors that it saved.
#[derive(Debug, Default)]
pub(super) struct UnchangedTensors {
    last: BTreeMap<String, Content>,
    last_step: Option<u64>,
    /// Tensors that a warning has named.
    named: BTreeSet<String>,
}

/// Content of a tensor in the last saves.
#[derive(Debug, Clone, Copy)]
struct Content {
    /// CRC-32 over the checksums and lengths of its chunks.
    checksum: u32,
    since_step: u64,
    /// Number of saves with this content after the first.
    repeats: u64,
}

/// Number of saves without a change before a tensor is reported.
const REPEATS: u64 = 2;

impl UnchangedTensors {
    /// Takes over a committed save. Returns the trained parameters that did not change in at least two saves.
    ///
    /// `crcs` are the checksums of the chunks by tensor and shard. Tensors in `frozen` are not reported.
    pub(super) fn record(&mut self, step: u64, layout: &StateLayout<'_>, crcs: &[Vec<Vec<u32>>], frozen: &Frozen) -> Vec<UnchangedTensor> {
        let mut now: BTreeMap<String, Content> = BTreeMap::new();
        let has_moment: BTreeSet<&str> = layout
            .tensors
            .iter()
            .filter(|tensor| MOMENTS.contains(&tensor.description.role.as_str()))
            .map(|tensor| &*tensor.description.param)
            .collect();
        let (mut reported, mut candidates, mut all_unchanged) = (Vec::new(), Vec::new(), true);
        for (tensor, crcs) in layout.tensors.iter().zip(crcs) {
            let description = &tensor.description;
            let is_weight = WEIGHTS.contains(&description.role.as_str()) && is_measured(description.dtype);
            if !is_weight || crcs.iter().all(Vec::is_empty) || frozen.0.is_match(&description.name) {
                continue;
            }
            let mut hasher = crc32fast::Hasher::new();
            for (shard, chunks) in crcs.iter().enumerate() {
                hasher.update(format!("{shard}:{chunks:x?}").as_bytes());
            }
            let checksum = hasher.finalize();
            let before = self.last.get(&description.name).filter(|before| before.checksum == checksum && before.since_step <= step);
            let content = match before {
                Some(&Content { since_step, repeats, .. }) => {
                    // The same step, saved again, is no further step without a change.
                    let repeats = repeats.saturating_add(u64::from(self.last_step != Some(step)));
                    Content { checksum, since_step, repeats }
                }
                None => Content { checksum, since_step: step, repeats: 0 },
            };
            let unchanged =
                (content.repeats >= REPEATS).then(|| UnchangedTensor { tensor: description.name.clone(), since_step: content.since_step });
            all_unchanged &= unchanged.is_some();
            match has_moment.contains(&*description.param) {
                true => reported.extend(unchanged),
                false => candidates.extend(unchanged),
            }
            now.insert(description.name.clone(), content);
        }
        (self.last, self.last_step) = (now, Some(step));
        let unchanged = match all_unchanged && has_moment.is_empty() {
            true => candidates,
            false => reported,
        };
        self.warn(step, &unchanged);
        unchanged
    }

    /// Warns of each tensor once.
    fn warn(&mut self, step: u64, unchanged: &[UnchangedTensor]) {
        let new: Vec<&UnchangedTensor> = unchanged.iter().filter(|found| self.named.insert(found.tensor.clone())).collect();
        let Some(first) = new.first() else { return };
        let more = new.len().saturating_sub(1);
        let (tensor, since) = (&first.tensor, first.since_step);
        match more {
            0 => tracing::warn!(step, "tensor `{tensor}` has not changed since step {since}. If it is not trained, name it in `frozen`"),
            _ => tracing::warn!(
                step,
                "tensor `{tensor}` has not changed since step {since}, and {more} more tensors have not changed. Name those that are \
                 not trained in `frozen`"
            ),
        }
    }
}

/// Names of tensors that are not trained.
#[derive(Debug, Default)]
pub(super) struct Frozen(GlobSet);

impl Frozen {
    /// Parses globs, in which `*` stands for any characters.
    pub(super) fn parse(globs: &[String]) -> Result<Self> {
        let bad = |e: globset::Error| Error::invalid(format!("pattern of frozen tensors: {e}"));
        let mut set = GlobSetBuilder::new();
        for glob in globs {
            set.add(Glob::new(glob).map_err(bad)?);
        }
        Ok(Self(set.build().map_err(bad)?))
    }
}

/// Roles of parameters.
const WEIGHTS: [&str; 2] = ["model", "master"];
/// Roles of moments.
const MOMENTS: [&str; 4] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum"];
