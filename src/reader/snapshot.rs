//! A snapshot that was opened: its record and manifest, its tensors, and slices of them.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::execute::ReadItem;
use super::open_chain::OpenChain;
use crate::commit::{LogState, SnapshotRecord};
use crate::limits::{to_usize, zeroed};
use crate::wire::{DirectoryTensor, Id, Manifest};
use crate::{Result, Slice, Store, Tensor, boxed};

/// A committed state at one step, with the chain that rebuilds it.
///
/// Opening checks log entries, manifests and directories of the whole chain. It reads no tensor bytes.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) chain: OpenChain,
}

/// A slice of a tensor to read, and the buffer that receives it.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Slice of the tensor.
    pub slice: Slice,
    /// Buffer of exactly the slice's size.
    pub out: &'a mut [u8],
}

impl Snapshot {
    /// Opens the chain of snapshot `id`.
    #[boxed]
    pub(crate) async fn load(store: &Store, state: &LogState, id: Id) -> Result<Self> {
        Ok(Self { chain: OpenChain::load(store, state, id).await? })
    }

    /// Returns the base of the chain; `None` if the snapshot is a base. Shares what was read.
    pub(crate) fn base_of_chain(&self) -> Option<Self> {
        Some(Self { chain: self.chain.base()? })
    }

    /// Returns the step.
    pub fn step(&self) -> u64 {
        self.chain.newest().record.step
    }

    /// Returns the record of the snapshot in the log.
    pub fn record(&self) -> &SnapshotRecord {
        &self.chain.newest().record
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.chain.newest().manifest
    }

    /// Returns the user metadata.
    pub fn user(&self) -> &Map<String, Value> {
        &self.chain.newest().manifest.user
    }

    /// Returns the metadata of the state as files carry it (`__metadata__` of safetensors).
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.chain.newest().manifest.metadata
    }

    /// Returns all tensors, ordered by name, including aliases.
    pub fn tensors(&self) -> Vec<DirectoryTensor> {
        let directory = &self.chain.newest().directory;
        (0..directory.len()).map(|tensor| directory.tensor(tensor)).collect()
    }

    /// Returns the description of a tensor.
    pub fn tensor(&self, name: &str) -> Result<DirectoryTensor> {
        Ok(self.chain.newest().directory.tensor(self.chain.find(name)?))
    }

    /// Reads a slice of a tensor. Fetches only the chunks that the slice touches, from each link of the chain that
    /// holds some of them.
    pub async fn read(&self, name: &str, slice: &Slice) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        let rect = slice.of(&tensor.shape).map_err(|e| e.tensor(name))?;
        let bytes = tensor.dtype.byte_count(rect.element_count().unwrap_or(u64::MAX)).unwrap_or(u64::MAX);
        crate::Limits::check(bytes, self.chain.store.limits().max_read_bytes, "size of the slice").map_err(|e| e.tensor(name))?;
        self.chain.check_present(self.chain.find(name)?, &rect).await?;
        let mut data = zeroed(to_usize(bytes, "a tensor")?, "a tensor")?;
        self.read_into(name, slice, &mut data).await?;
        Ok(Tensor { name: name.to_owned(), dtype: tensor.dtype, shape: rect.shape, data })
    }

    /// Reads a slice of a tensor into a buffer of exactly its size.
    pub async fn read_into(&self, name: &str, slice: &Slice, out: &mut [u8]) -> Result<()> {
        let tensor = self.chain.find(name)?;
        let rect = slice.of(&self.chain.newest().directory.shape(tensor)).map_err(|e| e.tensor(name))?;
        self.chain.read_items(vec![ReadItem { tensor, rect, out }]).await
    }

    /// Reads several slices in few requests to the storage.
    pub async fn read_many_into(&self, requests: Vec<ReadRequest<'_>>) -> Result<()> {
        let mut items = Vec::with_capacity(requests.len());
        for ReadRequest { name, slice, out } in requests {
            let tensor = self.chain.find(name)?;
            let rect = slice.of(&self.chain.newest().directory.shape(tensor)).map_err(|e| e.tensor(name))?;
            items.push(ReadItem { tensor, rect, out });
        }
        self.chain.read_items(items).await
    }
}
