//! Parameters that stay the same from save to save although they are being trained.
//!
//! A job that saves stale weights again and again writes checkpoints that look healthy. A writer therefore remembers
//! the checksums of the last save, tensor by tensor. The checksums exist in any case, so the comparison costs a few
//! bytes per tensor and no pass over the elements. A writer that saves only once has nothing to remember; it can read
//! the checksums of the two snapshots before from their indexes ([`recall`]).
//!
//! A state does not say which tensors are trained. Buffers look like weights, and never change. A weight or master
//! whose parameter has a moment in the same state is trained. In a state without moments, no single tensor is reported,
//! but all of them are if none changed.

use std::collections::{BTreeMap, BTreeSet};

use crate::chain::chain_of;
use crate::commit::LogState;
use crate::reader::{Snapshot, tensor_crcs};
use crate::tensor::{is_moment, is_parameter};
use crate::wire::DirectoryTensor;
use crate::{NamePatterns, Result, Store, boxed};

/// A trained parameter that did not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnchangedTensor {
    /// Name of the tensor.
    pub tensor: String,
    /// Step of the first known save with the same content.
    pub since_step: u64,
}

/// A tensor of a save, and the checksums of its chunks by shard.
pub(super) struct ChunkCrcs<'a> {
    pub tensor: &'a DirectoryTensor,
    pub crcs: &'a [Vec<u32>],
}

/// Memory of a writer of the tensors that it saved.
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
    /// Records a committed save. Returns the trained parameters that did not change in at least two saves, and warns of
    /// each once. Tensors that match `frozen` are not reported.
    fn record(&mut self, step: u64, tensors: &[ChunkCrcs<'_>], frozen: &NamePatterns) -> Vec<UnchangedTensor> {
        let unchanged = self.compare(step, tensors, frozen);
        self.warn(step, &unchanged);
        unchanged
    }

    fn compare(&mut self, step: u64, tensors: &[ChunkCrcs<'_>], frozen: &NamePatterns) -> Vec<UnchangedTensor> {
        let mut now: BTreeMap<String, Content> = BTreeMap::new();
        let moments = tensors.iter().map(|saved| saved.tensor).filter(|tensor| is_moment(&tensor.role));
        let has_moment: BTreeSet<&str> = moments.map(|tensor| &*tensor.param).collect();
        let mut reported = Vec::new();
        let mut candidates = Vec::new();
        let mut all_unchanged = true;
        for ChunkCrcs { tensor, crcs } in tensors {
            if !is_compared(tensor) || crcs.iter().all(Vec::is_empty) || frozen.matches(&tensor.name) {
                continue;
            }
            let mut hasher = crc32fast::Hasher::new();
            for (shard, chunks) in crcs.iter().enumerate() {
                hasher.update(format!("{shard}:{chunks:x?}").as_bytes());
            }
            let checksum = hasher.finalize();
            let before = self.last.get(&tensor.name).filter(|before| before.checksum == checksum && before.since_step <= step);
            let content = match before {
                Some(&Content { since_step, repeats, .. }) => {
                    // The same step, saved again, is no further step without a change.
                    let repeats = repeats.saturating_add(u64::from(self.last_step != Some(step)));
                    Content { checksum, since_step, repeats }
                }
                None => Content { checksum, since_step: step, repeats: 0 },
            };
            let unchanged =
                (content.repeats >= REPEATS).then(|| UnchangedTensor { tensor: tensor.name.clone(), since_step: content.since_step });
            all_unchanged &= unchanged.is_some();
            match has_moment.contains(&*tensor.param) {
                true => reported.extend(unchanged),
                false => candidates.extend(unchanged),
            }
            now.insert(tensor.name.clone(), content);
        }
        (self.last, self.last_step) = (now, Some(step));
        match all_unchanged && has_moment.is_empty() {
            true => candidates,
            false => reported,
        }
    }

    /// Finds the trained parameters of a committed snapshot that did not change. If nothing was saved before, compares
    /// with the snapshots of an earlier writer.
    #[boxed]
    pub(super) async fn find(
        &mut self,
        earlier: Option<(&Store, &LogState)>,
        step: u64,
        tensors: &[ChunkCrcs<'_>],
        frozen: &NamePatterns,
    ) -> Vec<UnchangedTensor> {
        if let (Some((store, state)), None) = (earlier, self.last_step) {
            match recall(store, state, step, frozen).await {
                Ok(unchanged) => *self = unchanged,
                Err(error) => tracing::debug!(step, %error, "the snapshots before cannot be compared"),
            }
        }
        self.record(step, tensors, frozen)
    }

    /// Warns of each tensor once.
    fn warn(&mut self, step: u64, unchanged: &[UnchangedTensor]) {
        let new: Vec<&UnchangedTensor> = unchanged.iter().filter(|found| self.named.insert(found.tensor.clone())).collect();
        let Some(first) = new.first() else { return };
        let more = new.len().saturating_sub(1);
        let tensor = &first.tensor;
        let since = first.since_step;
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

/// Whether a tensor is a parameter that training changes.
fn is_compared(tensor: &DirectoryTensor) -> bool {
    is_parameter(&tensor.role) && tensor.dtype.measured_format().is_some()
}

/// Number of links of a chain up to which [`recall`] reads its indexes.
const MAX_LINKS: usize = 16;

/// Remembers the two newest live snapshots before a step, from their indexes. Reads no tensor bytes. Remembers nothing
/// if there are not two, or if a chain is long: the comparison is not worth many requests.
#[boxed]
async fn recall(store: &Store, state: &LogState, step: u64, frozen: &NamePatterns) -> Result<UnchangedTensors> {
    let mut unchanged = UnchangedTensors::default();
    let mut before: Vec<_> = state.live().filter(|record| record.step < step).collect();
    before.sort_unstable_by_key(|record| record.step);
    let Some((_, newest)) = before.split_last_chunk::<{ REPEATS as usize }>() else { return Ok(unchanged) };
    let is_long = |id| chain_of(state, id, store.limits().max_chain_depth).map_or(true, |chain| chain.len() > MAX_LINKS);
    if newest.iter().any(|record| is_long(record.id)) {
        return Ok(unchanged);
    }
    for record in newest {
        let snapshot = Snapshot::load(store, state, record.id).await?;
        let directory = &snapshot.chain.newest().directory;
        let tensors: Vec<DirectoryTensor> = (0..directory.len()).map(|tensor| directory.tensor(tensor)).collect();
        let wanted = |tensor: usize| tensors.get(tensor).is_some_and(|tensor| is_compared(tensor) && !frozen.matches(&tensor.name));
        let crcs = tensor_crcs(&snapshot.chain, &wanted).await?;
        let saved: Vec<ChunkCrcs<'_>> = tensors.iter().zip(&crcs).map(|(tensor, crcs)| ChunkCrcs { tensor, crcs }).collect();
        unchanged.compare(record.step, &saved, frozen);
    }
    Ok(unchanged)
}
