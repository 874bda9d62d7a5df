//! The result of a restore, and the memory of the caller that a restore can fill.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use tensorcask::wire::Id;
use tensorcask::{Blob, Dtype, Error, Metadata, Rect, Result};

/// A state that was restored. Every byte matches its checksum.
#[derive(Debug)]
pub struct Restored<'a> {
    /// Training step.
    pub step: u64,
    /// Place that served the restore.
    pub source: Source,
    /// Previous attempts: nearer or newer copies that could not be used.
    pub passed_over: Vec<PassedOver>,
    /// Tensors.
    pub tensors: Vec<RestoredTensor<'a>>,
    /// Blobs; from a snapshot, the blobs of all ranks.
    pub blobs: Vec<Blob<'a>>,
    /// Metadata of the save.
    pub metadata: Metadata,
    /// Duration of the restore.
    pub seconds: f64,
}

impl Restored<'_> {
    /// Size of the state in bytes: blobs and tensors, tied ones once, for [`Engine::prepare`](crate::Engine::prepare).
    pub fn state_bytes(&self) -> u64 {
        let own = self.tensors.iter().filter(|tensor| tensor.tied_to.is_none());
        let tensors = own.filter_map(|tensor| tensor.rect.element_count().and_then(|count| tensor.dtype.byte_count(count)));
        tensors.chain(self.blobs.iter().map(|blob| blob.data.len() as u64)).fold(0, u64::saturating_add)
    }
}

/// Place that serves a restore.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The raw state in the arena.
    Slot,
    /// The encoded snapshot in memory.
    Memory,
    /// Encoded snapshots in the memory of all hosts.
    Hosts,
    /// A tier: its number, from 0, and its URL.
    Tier(usize, String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slot => f.write_str("memory (raw)"),
            Self::Memory => f.write_str("memory (encoded)"),
            Self::Hosts => f.write_str("memory of the hosts"),
            Self::Tier(_, url) => f.write_str(url),
        }
    }
}

/// A copy that could not be used.
#[derive(Debug)]
pub struct PassedOver {
    /// Place of the copy.
    pub source: Source,
    /// Training step, if known.
    pub step: Option<u64>,
    /// Reason.
    pub error: Error,
}

/// A tensor that was restored.
#[derive(Debug, Clone, PartialEq)]
pub struct RestoredTensor<'a> {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Restored part: the whole tensor from a snapshot, the shard of this rank from a slot.
    pub rect: Rect,
    /// Role of the tensor in training.
    pub role: String,
    /// Parameter that the tensor belongs to.
    pub param: String,
    /// Index of the first tensor with the same memory, element type and shape, if this tensor is tied to an earlier one.
    pub tied_to: Option<usize>,
    /// Elements. Tied tensors share them.
    pub data: Elements<'a>,
}

/// Bytes of a restored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Elements<'a> {
    /// Borrowed from the arena.
    Borrowed(&'a [u8]),
    /// Read into new memory.
    Owned(Arc<Vec<u8>>),
    /// Written to the caller's memory by [`Engine::restore_into`](crate::Engine::restore_into).
    Placed,
}

impl Deref for Elements<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Placed => &[],
        }
    }
}

/// The caller's memory, for a restore to fill.
pub trait Destination: Send {
    /// Receives the tensors, blobs and metadata of a state before its tensors are read. An error ends the restore.
    /// Called again for another state if the first turns out to be damaged; the buffers filled so far are then invalid.
    fn prepare(&mut self, found: &Restored<'_>) -> Result<()>;

    /// Returns a buffer for each tensor of that state, in order and of exactly its size; `None` for tensors that are
    /// not wanted here.
    fn buffers(&mut self) -> Result<Vec<Option<&mut [u8]>>>;

    /// Whether the result shall have the data of a tensor without a buffer: borrowed from the arena, or in new memory. By default
    /// it does not.
    fn borrows(&self, tensor: usize) -> bool {
        let _ = tensor;
        false
    }
}

/// Part of a tensor to restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Global shape of the tensor.
    pub shape: Vec<u64>,
    /// Part to restore.
    pub rect: Rect,
}

/// A step that this rank can restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loadable {
    /// Training step.
    pub step: u64,
    /// Nearest place that has the step.
    pub source: Source,
    /// Id of the snapshot there; `None` for a raw state.
    pub snapshot: Option<Id>,
}
