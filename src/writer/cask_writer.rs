//! One cask on its way into a store: encoded chunks and blobs are appended in cask order and uploaded as they come. The
//! save pipeline and compaction both write their casks through this module.
//!
//! Invariants: a cask gets a random name. Only [`CaskWriter::finish`], or [`Upload::finish`] after [`CaskWriter::seal`],
//! publishes it; without that nothing exists in the store.

use bytes::Bytes;

use crate::codec::{EncodedChunk, Objective};
use crate::container::CaskEncoder;
use crate::store::{AheadUploads, PartBudget, Upload};
use crate::tensor::Rect;
use crate::wire::{CaskRef, Id};
use crate::{Dtype, Error, Result, Store, boxed};

/// How the chunks of a cask are encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncodeOptions {
    /// Weights by which codecs are chosen.
    pub objective: Objective,
    /// Whether each chunk is decoded again before it is uploaded.
    pub verify_after_encode: bool,
    /// Whether each chunk is measured.
    pub statistics: bool,
    /// Whether NaN and infinities of each chunk are counted.
    pub finite: bool,
    /// Page alignment: two to the power of this, 6 to 12.
    pub alignment_exponent: u8,
}

/// A shard, as the index of a cask describes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShardLabel<'a> {
    /// Name of the tensor.
    pub tensor: &'a str,
    pub dtype: Dtype,
    /// Global shape of the tensor.
    pub shape: &'a [u64],
    /// Rectangle of the tensor that the shard covers.
    pub rect: &'a Rect,
}

/// Place of a chunk in a cask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChunkPlace<'a> {
    pub shard: ShardLabel<'a>,
    /// Index of the chunk in the grid of the shard.
    pub chunk: u64,
}

impl ChunkPlace<'_> {
    /// The error, with tensor and chunk named.
    pub(super) fn locate(&self, error: Error) -> Error {
        error.tensor(self.shard.tensor).chunk(self.chunk)
    }
}

/// Destination of the casks of one snapshot.
#[derive(Debug)]
pub(crate) struct Destination<'a> {
    pub store: &'a Store,
    /// Second store that receives the same bytes.
    pub ahead: Option<&'a AheadUploads>,
    /// Parts in flight of all casks.
    pub budget: PartBudget,
}

/// One cask that is being written.
pub(crate) struct CaskWriter {
    slot: u32,
    encoder: CaskEncoder,
    upload: Upload,
    /// Name of the tensor whose shards are being appended.
    tensor: Option<String>,
}

impl CaskWriter {
    /// Begins a cask of about `expected_bytes`.
    pub(crate) fn new(to: &Destination<'_>, slot: u32, options: EncodeOptions, expected_bytes: u64) -> Result<Self> {
        let &Destination { store, ahead, ref budget } = to;
        let encoder = CaskEncoder::new(Id::random()?, options.alignment_exponent)?.with_limits(store.limits().clone());
        let path = format!("casks/{}.cask", encoder.id());
        let upload = Upload::new(store, path, expected_bytes).within(budget).sent_ahead(ahead, expected_bytes);
        Ok(Self { slot, encoder, upload, tensor: None })
    }

    /// Whether no shard and no blob has left a trace in the cask.
    pub(crate) fn is_empty(&self) -> bool {
        self.encoder.is_empty()
    }

    /// Begins a shard, and its tensor if that is a new one. [`append`](Self::append) does so itself; only a shard
    /// without chunks needs it.
    pub(crate) fn begin_shard(&mut self, shard: ShardLabel<'_>) -> Result<()> {
        if self.tensor.as_deref() != Some(shard.tensor) {
            self.encoder.tensor(shard.tensor, shard.dtype, shard.shape)?;
            self.tensor = Some(shard.tensor.to_owned());
        }
        self.encoder.shard(shard.rect)
    }

    /// Appends the next chunk in cask order.
    pub(crate) fn append(&mut self, place: &ChunkPlace<'_>, chunk: EncodedChunk) -> Result<()> {
        if place.chunk == 0 {
            self.begin_shard(place.shard)?;
        }
        self.encoder.chunk(chunk).map_err(|e| place.locate(e))
    }

    /// Uploads the bytes of all that was appended.
    #[boxed]
    pub(crate) async fn send(&mut self) -> Result<()> {
        self.upload.push(self.encoder.take_output()).await
    }

    /// Appends a blob; blobs come after all tensors, by rank and name.
    #[boxed]
    pub(crate) async fn append_blob(&mut self, rank: u32, name: &str, bytes: Bytes) -> Result<()> {
        self.encoder.blob(rank, name, bytes)?;
        self.send().await
    }

    /// Writes the index and publishes the cask.
    pub(crate) async fn finish(self) -> Result<CaskRef> {
        let (cask, upload) = self.seal().await?;
        upload.finish().await?;
        Ok(cask)
    }

    /// Writes the index. The caller publishes the cask with [`Upload::finish`].
    #[boxed]
    pub(crate) async fn seal(self) -> Result<(CaskRef, Upload)> {
        let Self { slot, encoder, mut upload, .. } = self;
        let (rest, receipt) = encoder.finish()?;
        upload.push(rest).await?;
        Ok((receipt.in_slot(slot), upload))
    }
}
