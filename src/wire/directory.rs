//! The directory: the tensors of a layout, their roles, and the cask that holds each shard. Spec: `spec/manifest.md`,
//! clause 3.

use std::collections::HashMap;
use std::sync::OnceLock;

use bytes::Bytes;

use super::columns::{Column, ColumnsReader, ColumnsWriter, Heap};
use super::layout::{Layout, LayoutCounts};
use super::{Cursor, Digest, Put, ShardRow, TensorRow};
use crate::tensor::{Rect, tiles};
use crate::version::{Features, FormatVersion};
use crate::{Dtype, Error, Limits, Result};

const MAGIC: [u8; 8] = *b"\x89TCD\r\n\x1a\n";
const HEAD_BYTES: usize = 128;
const NO_ALIAS: u32 = u32::MAX;

/// A tensor of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryTensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Role in training, such as `model` or `exp_avg`.
    pub role: String,
    /// Parameter that the tensor belongs to.
    pub param: String,
    /// Row of the stored tensor that this tensor is tied to; `None` for a stored tensor.
    pub alias_of: Option<usize>,
}

/// A shard of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryShard {
    /// Rectangle of the shard in its tensor.
    pub rect: Rect,
    /// Slot of the cask that holds the shard.
    pub slot: u32,
}

/// A decoded directory.
#[derive(Debug, Clone)]
pub struct Directory {
    layout: Layout,
    roles: Vec<String>,
    tensor_roles: Column<u8>,
    params: Heap<u8>,
    aliases: Column<u32>,
    slots: Column<u32>,
    features: Features,
    /// Stored tensors by role and param; `None` if several tensors share both. Built on first use.
    by_param: OnceLock<HashMap<(String, String), Option<usize>>>,
}

impl Directory {
    /// Encodes tensors, ascending by name, each with its shards, ascending by position.
    pub fn encode(tensors: &[(DirectoryTensor, Vec<DirectoryShard>)]) -> Result<Vec<u8>> {
        let mut roles: Vec<&str> = tensors.iter().map(|(t, _)| t.role.as_str()).collect();
        roles.sort_unstable();
        roles.dedup();
        if roles.len() > 255 {
            return Err(Error::limit(format!("{} roles, more than 255", roles.len())).clause("manifest 3.3"));
        }
        let tensor_rows: Vec<TensorRow> =
            tensors.iter().map(|(t, _)| TensorRow { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone() }).collect();
        let shard_rows: Vec<ShardRow> = tensors
            .iter()
            .enumerate()
            .flat_map(|(i, (_, shards))| shards.iter().map(move |s| ShardRow { tensor: i as u32, rect: s.rect.clone() }))
            .collect();
        let counts = Layout::counts(&tensor_rows, &shard_rows);
        let bytes_of = |lengths: &mut dyn Iterator<Item = usize>| lengths.fold(0u64, |sum, n| sum.saturating_add(n as u64));
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.put(&MAGIC);
        head.put_u16(FormatVersion::CURRENT.major);
        head.put_u16(FormatVersion::CURRENT.minor);
        head.put_u32(0);
        head.put_u64(0); // must-understand features
        head.put_u64(0); // may-ignore features
        for count in [
            counts.tensors,
            counts.name_bytes,
            counts.dimensions,
            counts.shards,
            roles.len() as u64,
            bytes_of(&mut roles.iter().map(|r| r.len())),
            bytes_of(&mut tensors.iter().map(|(t, _)| t.param.len())),
        ] {
            head.put_u64(count);
        }
        head.resize(HEAD_BYTES, 0);
        let mut out = ColumnsWriter::default();
        out.column(head);
        Layout::encode(&tensor_rows, &shard_rows, &mut out)?;
        out.heap(roles.iter().map(|r| r.as_bytes()))?;
        out.column(tensors.iter().map(|(t, _)| roles.binary_search(&t.role.as_str()).unwrap_or_default() as u8));
        out.heap(tensors.iter().map(|(t, _)| t.param.as_bytes()))?;
        out.column(tensors.iter().map(|(t, _)| t.alias_of.map_or(NO_ALIAS, |alias| alias as u32)));
        out.column(tensors.iter().flat_map(|(_, shards)| shards.iter().map(|s| s.slot)));
        Ok(out.finish())
    }

    /// Compares the bytes of a directory with `digest`, which is its name in the store.
    pub(crate) fn check_digest(bytes: &[u8], digest: Digest) -> Result<()> {
        if Digest::of(bytes) == digest {
            return Ok(());
        }
        Err(Error::corrupt("digest mismatch: the bytes do not have the digest in the name").clause("manifest 3.1"))
    }

    /// Decodes a directory and compares its bytes with `digest`, which is its name in the store.
    pub fn decode(bytes: Bytes, digest: Digest, limits: &Limits) -> Result<Self> {
        Limits::check(bytes.len() as u64, limits.max_directory_bytes, "size of the directory")?;
        Self::check_digest(&bytes, digest)?;
        let mut reader = ColumnsReader::new(bytes, "directory");
        let head: Column<u8> = reader.column(HEAD_BYTES as u64)?;
        let mut head = Cursor::new(head.bytes(), "directory head");
        if head.array()? != MAGIC {
            return Err(Error::corrupt("not a directory: the magic bytes differ").clause("manifest 3.2"));
        }
        FormatVersion { major: head.u16()?, minor: head.u16()? }.check()?;
        head.zeros(4).map_err(|e| e.clause("manifest 3.2"))?;
        let features = Features { must_understand: head.u64()?, may_ignore: head.u64()? };
        features.check_readable()?;
        let counts = LayoutCounts { tensors: head.u64()?, name_bytes: head.u64()?, dimensions: head.u64()?, shards: head.u64()? };
        let role_count = head.u64()?;
        let role_bytes = head.u64()?;
        let param_bytes = head.u64()?;
        head.zeros(40).map_err(|e| e.clause("manifest 3.2"))?;
        head.finish()?;

        let layout = Layout::decode(counts, &mut reader, limits)?;
        if role_count > 255 {
            return Err(Error::corrupt(format!("{role_count} roles, more than 255")).clause("manifest 3.3"));
        }
        let role_names = reader.text(role_count, role_bytes, limits.max_name_bytes)?;
        let roles: Vec<String> = (0..role_names.len()).map(|i| role_names.text(i).unwrap_or_default().to_owned()).collect();
        if !roles.is_sorted_by(|a, b| a < b) {
            return Err(Error::corrupt("roles do not ascend strictly").clause("manifest 3.3"));
        }
        let tensor_roles: Column<u8> = reader.column(counts.tensors)?;
        let params = reader.text(counts.tensors, param_bytes, limits.max_name_bytes)?;
        let aliases = reader.column(counts.tensors)?;
        let slots = reader.column(counts.shards)?;
        reader.finish()?;
        let directory = Self { layout, roles, tensor_roles, params, aliases, slots, features, by_param: OnceLock::new() };
        directory.check()?;
        Ok(directory)
    }

    /// Features of the directory.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Number of tensors, aliases included.
    pub fn len(&self) -> usize {
        self.layout.tensor_count()
    }

    /// Returns whether the directory has no tensor.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tensor number `tensor`, in the order of names.
    pub fn tensor(&self, tensor: usize) -> DirectoryTensor {
        DirectoryTensor {
            name: self.layout.name(tensor).to_owned(),
            dtype: self.layout.dtype(tensor),
            shape: self.layout.shape(tensor),
            role: self.role(tensor).to_owned(),
            param: self.param(tensor).to_owned(),
            alias_of: self.alias_of(tensor),
        }
    }

    /// Name of a tensor.
    pub fn name(&self, tensor: usize) -> &str {
        self.layout.name(tensor)
    }

    /// Element type of a tensor.
    pub fn dtype(&self, tensor: usize) -> Dtype {
        self.layout.dtype(tensor)
    }

    /// Global shape of a tensor.
    pub fn shape(&self, tensor: usize) -> Vec<u64> {
        self.layout.shape(tensor)
    }

    /// Role of a tensor in training.
    pub fn role(&self, tensor: usize) -> &str {
        let role = self.tensor_roles.get(tensor).unwrap_or_default();
        self.roles.get(usize::from(role)).map_or("", String::as_str)
    }

    /// Parameter that a tensor belongs to.
    pub fn param(&self, tensor: usize) -> &str {
        self.params.text(tensor).unwrap_or_default()
    }

    /// Returns the tensor of `role` that belongs to the same parameter as `tensor`. The partner must be stored, of the
    /// same shape, not packed, and the only tensor of `role`.
    pub fn partner(&self, tensor: usize, role: &str) -> Option<usize> {
        let by_param = self.by_param.get_or_init(|| {
            let mut found: HashMap<(String, String), Option<usize>> = HashMap::new();
            for tensor in (0..self.len()).filter(|&tensor| self.alias_of(tensor).is_none()) {
                let key = (self.role(tensor).to_owned(), self.param(tensor).to_owned());
                found.entry(key).and_modify(|other| *other = None).or_insert(Some(tensor));
            }
            found
        });
        let partner = (*by_param.get(&(role.to_owned(), self.param(tensor).to_owned()))?)?;
        let fits = partner != tensor && self.shape(partner) == self.shape(tensor);
        (fits && !self.dtype(partner).is_packed() && !self.dtype(tensor).is_packed()).then_some(partner)
    }

    /// Stored tensor that an alias is tied to.
    pub fn alias_of(&self, tensor: usize) -> Option<usize> {
        self.aliases.get(tensor).filter(|&alias| alias != NO_ALIAS).map(|alias| alias as usize)
    }

    /// Returns the tensor with the given name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.layout.find(name)
    }

    /// Shards of a tensor, by number.
    pub fn shards_of(&self, tensor: usize) -> std::ops::Range<usize> {
        self.layout.shards_of(tensor)
    }

    /// Returns the shard of a tensor that covers exactly `rect`.
    pub fn find_shard(&self, tensor: usize, rect: &Rect) -> Option<usize> {
        self.layout.find_shard(tensor, rect)
    }

    /// Shard number `shard`.
    pub fn shard(&self, shard: usize) -> DirectoryShard {
        DirectoryShard { rect: self.layout.rect(shard), slot: self.slots.get(shard).unwrap_or_default() }
    }

    /// Bytes of the decoded tensors, without aliases.
    pub fn tensor_bytes(&self) -> u64 {
        (0..self.len())
            .filter(|&tensor| self.alias_of(tensor).is_none())
            .filter_map(|tensor| self.dtype(tensor).byte_count(crate::tensor::element_count(&self.shape(tensor))?))
            .fold(0, |sum, bytes| sum.saturating_add(bytes))
    }

    fn check(&self) -> Result<()> {
        for tensor in 0..self.len() {
            let fail = |message: &str, clause| Err(Error::corrupt(message).tensor(self.name(tensor)).clause(clause));
            if usize::from(self.tensor_roles.get(tensor).unwrap_or_default()) >= self.roles.len() {
                return fail("the tensor's role is not in the dictionary", "manifest 3.3");
            }
            let shards = self.shards_of(tensor);
            match self.alias_of(tensor) {
                Some(alias) => {
                    let same = alias < tensor && self.dtype(alias) == self.dtype(tensor) && self.shape(alias) == self.shape(tensor);
                    if !same || self.alias_of(alias).is_some() || !shards.is_empty() {
                        return fail(
                            "an alias must have no shards and name an earlier, stored tensor of its dtype and shape",
                            "manifest 3.5",
                        );
                    }
                }
                None => {
                    let rects: Vec<Rect> = shards.map(|shard| self.layout.rect(shard)).collect();
                    if !tiles(&self.shape(tensor), &rects)? {
                        return fail("the shards do not tile the tensor exactly", "manifest 3.4");
                    }
                }
            }
        }
        Ok(())
    }
}
