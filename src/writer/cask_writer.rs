//! One cask on its way into a store: chunks are encoded in parallel, appended in cask order and uploaded as they come.
//!
//! [`encode_chunks`] encodes a window of chunks on all cores and touches no cask, so it may run ahead of the upload.
//! [`CaskWriter`] appends encoded chunks and blobs in cask order and streams the bytes to the store. The save pipeline
//! and compaction both write their casks through this module.
//!
//! Invariants: a cask gets a random name and is published by [`CaskWriter::finish`] alone; without it nothing exists in
//! the store. The stored bytes depend on the chunks, the options and the cask's id, and on nothing else.

use bytes::Bytes;
use rayon::prelude::*;

use crate::codec::{Candidate, Chunk, ChunkKind, EncodedChunk, Objective, Registry, encode_given};
use crate::container::CaskEncoder;
use crate::store::{Ahead, Upload};
use crate::tensor::Rect;
use crate::wire::{CaskRef, Id};
use crate::{Dtype, Error, Result, Store, boxed, parallel};

/// How the chunks of a cask are encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncodeOptions {
    /// Weights by which codecs are chosen.
    pub objective: Objective,
    /// Whether each chunk is decoded again before it is uploaded.
    pub verify_after_encode: bool,
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
    fn locate(&self, error: Error) -> Error {
        error.tensor(self.shard.tensor).chunk(self.chunk)
    }
}

/// A chunk as it will be stored, with everything that codecs may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChunkInput<'a> {
    pub place: ChunkPlace<'a>,
    pub chunk: Chunk<'a>,
    /// The chunk as the codec that rounded it encoded it.
    pub rounded: Option<&'a Candidate>,
}

impl ChunkInput<'_> {
    fn encode(&self, registry: &Registry, options: EncodeOptions) -> Result<EncodedChunk> {
        let encoded = encode_given(registry, options.objective, &self.chunk, self.rounded, options.verify_after_encode);
        let encoded = encoded.map_err(|e| self.place.locate(e))?;
        let has_base = self.chunk.base.is_some() || self.chunk.changed_rows.is_some();
        if !has_base && encoded.kind != ChunkKind::Absolute {
            return Err(self.place.locate(Error::invalid("a codec made a delta without a base")));
        }
        Ok(encoded)
    }

    /// The same chunk without base, changed rows and partners: nothing else is needed to decode what it becomes.
    fn alone(&self) -> Self {
        Self { chunk: Chunk { base: None, changed_rows: None, partners: &[], ..self.chunk }, rounded: None, ..*self }
    }
}

/// Encodes chunks on all cores, in order. Each chunk gets the codec that the objective prefers.
#[boxed]
pub(crate) async fn encode_chunks(registry: &Registry, options: EncodeOptions, chunks: &[ChunkInput<'_>]) -> Result<Vec<EncodedChunk>> {
    // Encoding a window is long work without an await. A caller that selects on something else, such as Ctrl-C, gets a
    // turn here.
    tokio::task::yield_now().await;
    parallel::run(|| chunks.par_iter().map(|input| input.encode(registry, options)).collect())
}

/// Forms of encoded chunks that decode without a base and without partners, for a base that is kept in memory. A chunk
/// that is encoded so already is not encoded again.
pub(crate) fn standalone_chunks(
    registry: &Registry,
    options: EncodeOptions,
    chunks: &[ChunkInput<'_>],
    encoded: &[EncodedChunk],
) -> Result<Vec<EncodedChunk>> {
    let options = EncodeOptions { verify_after_encode: false, ..options };
    let standalone = chunks.par_iter().zip(encoded).map(|(input, encoded)| {
        let needs_nothing = encoded.codec.as_ref().is_some_and(|codec| registry.needs(codec, input.chunk.role).is_empty());
        match encoded.kind == ChunkKind::Absolute && needs_nothing {
            true => Ok(encoded.clone()),
            false => input.alone().encode(registry, options),
        }
    });
    parallel::run(|| standalone.collect())
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
    /// Begins a cask of about `expected_bytes`. The bytes also go to the store of `ahead`, if there is one.
    pub(crate) fn new(store: &Store, slot: u32, options: EncodeOptions, expected_bytes: u64, ahead: Option<&Ahead>) -> Result<Self> {
        let encoder = CaskEncoder::new(Id::random()?, options.alignment_exponent)?.with_limits(store.limits().clone());
        let path = format!("casks/{}.cask", encoder.id());
        let upload = Upload::new(store, path, expected_bytes).sent_ahead(ahead, expected_bytes);
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

    /// Appends encoded chunks in cask order and uploads their bytes.
    #[boxed]
    pub(crate) async fn append(&mut self, places: &[ChunkPlace<'_>], encoded: Vec<EncodedChunk>) -> Result<()> {
        for (place, chunk) in places.iter().zip(encoded) {
            if place.chunk == 0 {
                self.begin_shard(place.shard)?;
            }
            self.encoder.chunk(chunk).map_err(|e| place.locate(e))?;
        }
        self.upload.push(self.encoder.take_output()).await
    }

    /// Appends a blob; blobs come after all tensors, by rank and name.
    #[boxed]
    pub(crate) async fn append_blob(&mut self, rank: u32, name: &str, bytes: Bytes) -> Result<()> {
        self.encoder.blob(rank, name, bytes)?;
        self.upload.push(self.encoder.take_output()).await
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
