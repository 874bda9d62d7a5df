//! A link: one snapshot of a chain, with the parts of it that have been read.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::commit::{SnapshotRecord, refuse_features};
use crate::container::CaskIndex;
use crate::error::ResultExt;
use crate::tensor::Rect;
use crate::version::Features;
use crate::wire::{CaskRef, Directory, InlineSnapshot, Manifest};
use crate::{Dtype, Error, Result};

/// One snapshot of a chain.
#[derive(Debug)]
pub(crate) struct Link {
    pub record: SnapshotRecord,
    pub manifest: Manifest,
    pub directory: Arc<Directory>,
    /// Indexes of the manifest's casks. Each is set once it has been read.
    pub indexes: Vec<OnceLock<Arc<CaskIndex>>>,
    /// Bytes of each small cask that was read whole with its index.
    pub small_casks: Vec<OnceLock<Bytes>>,
    /// The casks, if the log entry of the snapshot holds them.
    pub inline: Option<InlineSnapshot>,
}

impl Link {
    /// A link whose casks are objects.
    pub(crate) fn new(record: SnapshotRecord, manifest: Manifest, directory: Arc<Directory>) -> Result<Self> {
        if directory.tensor_bytes() != manifest.tensor_bytes {
            return Err(Error::corrupt(format!(
                "says {} bytes of tensors, its directory {}",
                manifest.tensor_bytes,
                directory.tensor_bytes()
            ))
            .object(record.manifest_path())
            .clause("manifest 2.4"));
        }
        let indexes = manifest.casks.iter().map(|_| OnceLock::new()).collect();
        let small_casks = manifest.casks.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { record, manifest, directory, indexes, small_casks, inline: None })
    }

    /// A link whose casks are in its log entry.
    pub(crate) fn new_inline(record: SnapshotRecord, inline: InlineSnapshot, directory: Arc<Directory>) -> Result<Self> {
        let link = Self::new(record, inline.manifest.clone(), directory)?;
        Ok(Self { inline: Some(inline), ..link })
    }

    /// Refuses a snapshot with features that this version may read, but must not write: a new snapshot could break what they
    /// promise. Looks at manifest, directory and the indexes that were read.
    pub(crate) fn refuse_unwritable(&self) -> Result<()> {
        refuse_features(self.manifest.may_ignore()).in_object(self.record.manifest_path())?;
        let indexes = self.indexes.iter().filter_map(OnceLock::get).map(|index| index.file().features);
        if indexes.chain([self.directory.features()]).any(|features| features.may_ignore & !Features::KNOWN.may_ignore != 0) {
            let message = format!("step {} uses features that this version cannot write; upgrade tensorcask", self.record.step);
            return Err(Error::unsupported(message).object(self.record.manifest_path()).clause("README 4"));
        }
        Ok(())
    }

    pub(crate) fn index(&self, cask: usize) -> Option<&Arc<CaskIndex>> {
        self.indexes.get(cask)?.get()
    }

    /// Looks for a shard of this name, type, global shape and rectangle. Returns `None` if the snapshot lacks the
    /// shard, and `Some(None)` if the shard did not change. Otherwise returns the cask that holds it.
    pub(crate) fn find(&self, name: &str, dtype: Dtype, shape: &[u64], rect: &Rect) -> Option<Option<(usize, &CaskRef)>> {
        let tensor = self.directory.find(name)?;
        if self.directory.dtype(tensor) != dtype || self.directory.shape(tensor) != shape {
            return None;
        }
        let shard = self.directory.find_shard(tensor, rect)?;
        Some(self.manifest.cask(self.directory.shard(shard).slot))
    }
}
