//! Summary of the index of a cask: chunks by kind and codec, and their bytes. Reads no page.

use std::collections::BTreeMap;

use serde::Serialize;
use tensorcask::Result;
use tensorcask::codec::ChunkKind;
use tensorcask::container::{BlobEntry, CaskIndex, TensorEntry};

use crate::text::human_bytes;

/// Number of chunks by storage kind.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct KindCounts {
    unchanged: u64,
    absolute: u64,
    delta: u64,
}

/// Chunks and bytes of one codec.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct CodecCounts {
    pub chunks: u64,
    pub decoded_bytes: u64,
    pub stored_bytes: u64,
    pub saved_bytes: u64,
}

impl CodecCounts {
    pub(crate) fn add(&mut self, chunks: u64, decoded_bytes: u64, stored_bytes: u64) {
        self.chunks = self.chunks.saturating_add(chunks);
        self.decoded_bytes = self.decoded_bytes.saturating_add(decoded_bytes);
        self.stored_bytes = self.stored_bytes.saturating_add(stored_bytes);
        self.saved_bytes = self.decoded_bytes.saturating_sub(self.stored_bytes);
    }
}

/// Tensor in a cask.
#[derive(Debug, Serialize)]
pub(crate) struct CaskTensor {
    pub name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    shards: usize,
    pub decoded_bytes: u64,
    pub stored_bytes: u64,
    chunks: KindCounts,
    /// Counts by codec id. Unchanged chunks are under `unchanged`.
    pub codecs: BTreeMap<String, CodecCounts>,
}

/// Blob in a cask.
#[derive(Debug, Serialize)]
pub(crate) struct CaskBlob {
    rank: u32,
    name: String,
    pub bytes: u64,
}

/// Tensors of a cask. All parts of the index must be loaded.
pub(crate) fn tensors(index: &CaskIndex) -> Result<Vec<CaskTensor>> {
    (0..index.tensor_count()).map(|tensor| describe(index, tensor)).collect()
}

/// Blobs of a cask.
pub(crate) fn blobs(index: &CaskIndex) -> Vec<CaskBlob> {
    let blob = |BlobEntry { rank, name, page }: BlobEntry<'_>| CaskBlob {
        rank,
        name: name.to_owned(),
        bytes: page.range.end.saturating_sub(page.range.start),
    };
    index.blobs().map(blob).collect()
}

fn describe(index: &CaskIndex, tensor: usize) -> Result<CaskTensor> {
    let TensorEntry { name, dtype, shape } = index.tensor(tensor);
    let shards = index.shards_of(tensor);
    let mut chunks = KindCounts::default();
    let mut codecs: BTreeMap<String, CodecCounts> = BTreeMap::new();
    for shard in shards.clone() {
        let grid = index.grid(shard)?;
        for chunk in 0..grid.chunk_count() {
            let entry = index.chunk(shard, chunk)?;
            match entry.kind {
                ChunkKind::Unchanged => chunks.unchanged += 1,
                ChunkKind::Absolute => chunks.absolute += 1,
                ChunkKind::Delta => chunks.delta += 1,
            }
            let decoded = grid.bytes(chunk);
            let stored = entry.pages.iter().map(|page| page.range.end.saturating_sub(page.range.start)).sum();
            let codec = entry.codec.map_or_else(|| "unchanged".to_owned(), |codec| codec.id);
            codecs.entry(codec).or_default().add(1, decoded.end.saturating_sub(decoded.start), stored);
        }
    }
    let sum = |of: fn(&CodecCounts) -> u64| codecs.values().map(of).fold(0, u64::saturating_add);
    Ok(CaskTensor {
        name: name.to_owned(),
        dtype: dtype.name(),
        shape,
        shards: shards.len(),
        decoded_bytes: sum(|codec| codec.decoded_bytes),
        stored_bytes: sum(|codec| codec.stored_bytes),
        chunks,
        codecs,
    })
}

/// Headings for the rows of [`CaskTensor::row`].
pub(crate) const HEADINGS: [&str; 7] = ["tensor", "dtype", "shape", ">shards", ">decoded", ">stored", "chunks by codec"];

impl CaskTensor {
    /// Cells of a table row.
    pub(crate) fn row(&self) -> Vec<String> {
        let codecs: Vec<String> = self.codecs.iter().map(|(codec, counts)| format!("{codec} {}", counts.chunks)).collect();
        vec![
            self.name.clone(),
            self.dtype.to_owned(),
            crate::text::human_shape(&self.shape),
            self.shards.to_string(),
            human_bytes(self.decoded_bytes),
            human_bytes(self.stored_bytes),
            codecs.join(", "),
        ]
    }
}

impl CaskBlob {
    /// One line of text.
    pub(crate) fn line(&self) -> String {
        format!("blob  rank {}  {}  {}", self.rank, self.name, human_bytes(self.bytes))
    }
}
