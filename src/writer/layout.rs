//! The layout of a state: the caller's tensors and blobs in the order of casks and directory.
//!
//! A layout is built before anything is encoded. It checks names, shards and limits, finds tied tensors, and gives each
//! tensor its slot, which decides the cask.
//!
//! Invariants: tensors ascend by name, shards by position, blobs by rank and name. A tied tensor is stored once, under
//! the first name.

use std::collections::{BTreeSet, HashMap};

use tensorcask_kernels::remainder::rounds_to;

use crate::parallel::SAVE_WINDOW_BYTES;
use crate::tensor::{Rect, element_count, is_number, tiles};
use crate::wire::{Directory, DirectoryShard, DirectoryTensor, MAX_RANK, blob_slot, is_writers_blob, role_slot, tensor_slot};
use crate::{Blob, Dtype, Error, Limits, Result, RoleRules, TensorView};

/// The layout of a state.
pub(super) struct StateLayout<'a> {
    /// Ascending by name.
    pub tensors: Vec<LayoutTensor<'a>>,
    /// Ascending by rank and name.
    pub blobs: Vec<&'a Blob<'a>>,
    /// Decoded size of the stored tensors, in bytes.
    pub tensor_bytes: u64,
    /// Rank of the process that saves; 0 if it saves the whole state.
    pub rank: u32,
    /// Number of the stored tensor of each role and param; `None` if several share both.
    by_param: HashMap<(String, String), Option<usize>>,
}

/// A tensor of the layout.
pub(super) struct LayoutTensor<'a> {
    pub description: DirectoryTensor,
    pub slot: u32,
    /// Ascending by position; empty for an alias.
    pub shards: Vec<&'a TensorView<'a>>,
    /// Place of the tensor in the state as the caller gave it.
    pub position: usize,
    /// Whether the role is more than a guess: stated by the caller, or proven by the name or the values.
    is_role_certain: bool,
    /// Parameter that the name tells, if the tensor got that of a weight.
    number: Option<String>,
    is_param_stated: bool,
}

impl LayoutTensor<'_> {
    /// Role by which precision rules apply to the tensor; `None` for a guess, which may not round.
    pub(super) fn rounding_role(&self) -> Option<&str> {
        self.is_role_certain.then_some(self.description.role.as_str())
    }

    /// Parameter that the name or a rule tells.
    pub(super) fn own_param(&self) -> &str {
        self.number.as_deref().unwrap_or(&self.description.param)
    }

    /// Whether the tensor got the parameter of a weight that no name tells.
    pub(super) fn is_paired(&self) -> bool {
        self.number.is_some()
    }

    /// Text before the number, and the number, of a tensor whose name has a number for a parameter.
    pub(super) fn numbered_param(&self) -> Option<(&str, u64)> {
        if self.is_param_stated {
            return None;
        }
        let param = self.own_param();
        let start = param.rfind('.').map_or(0, |dot| dot + 1);
        let number = param.get(start..).filter(|segment| is_number(segment))?;
        Some((param.get(..start)?, number.parse().ok()?))
    }
}

impl<'a> StateLayout<'a> {
    /// The layout of a whole state.
    pub(super) fn new(views: &'a [TensorView<'a>], blobs: &'a [Blob<'a>], roles: &RoleRules, limits: &Limits) -> Result<Self> {
        Self::of_rank(views, blobs, roles, limits, None)
    }

    /// The layout of the shards and blobs of one rank, or of a whole state without a rank. Shards of one rank need not
    /// tile their tensors.
    pub(super) fn of_rank(
        views: &'a [TensorView<'a>],
        blobs: &'a [Blob<'a>],
        roles: &RoleRules,
        limits: &Limits,
        rank: Option<u32>,
    ) -> Result<Self> {
        let mut sorted: Vec<&TensorView<'_>> = views.iter().collect();
        sorted.sort_by(|a, b| (a.name(), a.rect()).cmp(&(b.name(), b.rect())));
        let slot_of_role = slot_of_role(views.iter().map(|view| view.data().len() as u64).fold(0, u64::saturating_add));
        let mut tensors: Vec<LayoutTensor<'a>> = Vec::new();
        let mut positions: HashMap<&str, usize> = HashMap::new();
        for (position, view) in views.iter().enumerate() {
            positions.entry(view.name()).or_insert(position);
        }
        // Number of the stored tensor for each memory range, dtype, shape and role. Later names become aliases.
        let mut stored: HashMap<(*const u8, usize, Dtype, Vec<u64>, String), usize> = HashMap::new();
        for group in sorted.chunk_by(|a, b| a.name() == b.name()) {
            let Some(&first) = group.first() else { continue };
            check_group(group, limits, rank)?;
            let stated = roles.of(first.name(), first.param());
            let is_role_certain = stated.is_some() || group.iter().all(|view| view.is_role_certain());
            let (role, param) = stated.unwrap_or_else(|| (first.role().to_owned(), first.param().to_owned()));
            let is_param_stated = param != first.param();
            let slot = slot_of_role(rank.unwrap_or(0), &role);
            // A rank without elements of a tensor gives an empty shard. Only an empty tensor keeps one.
            let empty_tensor = first.shape().contains(&0);
            let shards: Vec<&TensorView<'a>> = group.iter().copied().filter(|view| empty_tensor || !view.data().is_empty()).collect();
            let mut alias_of = None;
            let whole = first.rect().shape == first.shape();
            if let ([view], false, true) = (group, first.data().is_empty(), whole) {
                let key = (view.data().as_ptr(), view.data().len(), view.dtype(), view.shape().to_vec(), role.clone());
                match stored.get(&key) {
                    Some(&target) => alias_of = Some(target),
                    None => _ = stored.insert(key, tensors.len()),
                }
            }
            let description = DirectoryTensor {
                name: first.name().to_owned(),
                dtype: first.dtype(),
                shape: first.shape().to_vec(),
                role,
                param,
                alias_of,
            };
            let position = positions.get(first.name()).copied().unwrap_or(0);
            if let Some(stored) = alias_of.and_then(|target: usize| tensors.get_mut(target)) {
                stored.position = stored.position.min(position);
            }
            let shards = if alias_of.is_some() { vec![] } else { shards };
            tensors.push(LayoutTensor { description, slot, shards, position, is_role_certain, number: None, is_param_stated });
        }
        let mut blobs: Vec<&Blob<'_>> = blobs.iter().collect();
        blobs.sort_by(|a, b| (a.rank, &a.name).cmp(&(b.rank, &b.name)));
        if let Some(twice) = blobs.iter().zip(blobs.iter().skip(1)).find(|(a, b)| (a.rank, &a.name) == (b.rank, &b.name)).map(|(a, _)| a) {
            return Err(Error::invalid(format!("two blobs of rank {} have this name", twice.rank)).tensor(&twice.name));
        }
        for blob in &blobs {
            if is_writers_blob(&blob.name) {
                let message = "this name is reserved for a report that the writer adds; save the blob under another name";
                return Err(Error::invalid(message).tensor(&blob.name));
            }
            if rank.is_some_and(|rank| rank != blob.rank) {
                return Err(Error::invalid(format!("the blob belongs to rank {}, but another rank saves it", blob.rank)).tensor(&blob.name));
            }
            if blob.rank > MAX_RANK {
                return Err(Error::invalid(format!("rank {} is beyond {MAX_RANK}", blob.rank)).tensor(&blob.name));
            }
            Limits::check(blob.name.len() as u64, limits.max_name_bytes, "length of a blob's name")?;
            Limits::check(blob.data.len() as u64, limits.max_blob_bytes, "size of a blob").map_err(|e| e.tensor(&blob.name))?;
        }
        // Sizes of whole tensors, not sums of shards: each packed shard may end within a byte.
        let bytes_of = |t: &DirectoryTensor| t.dtype.byte_count(element_count(&t.shape)?);
        let stored = tensors.iter().map(|t| &t.description).filter(|t| t.alias_of.is_none());
        let tensor_bytes = stored.filter_map(bytes_of).fold(0u64, u64::saturating_add);
        let mut layout = Self { tensors, blobs, tensor_bytes, rank: rank.unwrap_or(0), by_param: HashMap::new() };
        layout.link_params();
        Ok(layout)
    }

    /// Gives numbered parameters the parameters of their weights. `weights`: the parameter of the weight, by the number.
    pub(super) fn give_params(&mut self, weights: &HashMap<String, String>) {
        if weights.is_empty() && self.tensors.iter().all(|tensor| tensor.number.is_none()) {
            return;
        }
        for tensor in &mut self.tensors {
            let own = tensor.own_param().to_owned();
            match weights.get(&own).filter(|_| tensor.numbered_param().is_some()) {
                Some(weight) => tensor.description.param.clone_from(weight),
                None => tensor.description.param.clone_from(&own),
            }
            tensor.number = (tensor.description.param != own).then_some(own);
        }
        self.link_params();
    }

    /// Finds the tensors of each parameter, and the roles that their values prove.
    fn link_params(&mut self) {
        self.by_param.clear();
        for (number, tensor) in self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.description.alias_of.is_none()) {
            let key = (tensor.description.role.clone(), tensor.description.param.clone());
            self.by_param.entry(key).and_modify(|other| *other = None).or_insert(Some(number));
        }
        self.prove_masters();
    }

    /// Makes the role of guessed masters certain that round to the model weight of their parameter.
    fn prove_masters(&mut self) {
        for number in 0..self.tensors.len() {
            let tensor = &self.tensors[number];
            if tensor.is_role_certain || tensor.description.role != "master" || tensor.shards.is_empty() {
                continue;
            }
            let is_proven = tensor.shards.iter().all(|master| {
                let model = self.partner(number, "model", master.rect()).map(|(model, shard)| self.tensors[model].shards[shard]);
                model.is_some_and(|model| is_master_of(master, model))
            });
            self.tensors[number].is_role_certain = is_proven;
        }
        for number in 0..self.tensors.len() {
            let description = &self.tensors[number].description;
            let Some(stored) = description.alias_of.and_then(|target| self.tensors.get(target)) else { continue };
            if stored.is_role_certain && stored.description.role == description.role {
                self.tensors[number].is_role_certain = true;
            }
        }
    }

    /// Whether a tensor is the only one of its role and parameter.
    pub(super) fn is_only(&self, number: usize) -> bool {
        let description = &self.tensors[number].description;
        self.by_param.get(&(description.role.clone(), description.param.clone())) == Some(&Some(number))
    }

    /// Whether a sample of one tensor rounds to another; `None` if their types or shards show no masters.
    pub(super) fn is_master(&self, master: usize, model: usize) -> Option<bool> {
        let shards = [master, model].map(|tensor| self.tensors[tensor].shards.as_slice());
        let [[master], [model]] = shards else { return None };
        let fits = master.dtype() == Dtype::F32 && model.dtype() != Dtype::F32 && master.rect() == model.rect();
        fits.then(|| is_master_of(master, model))
    }

    /// Numbers of the partner of a tensor (same parameter, another role) and of its shard with this rectangle. Readers
    /// find the same partner with [`Directory::partner`].
    pub(super) fn partner(&self, tensor: usize, role: &str, rect: &Rect) -> Option<(usize, usize)> {
        let ours = &self.tensors.get(tensor)?.description;
        let number = (*self.by_param.get(&(role.to_owned(), ours.param.clone()))?)?;
        let partner = self.tensors.get(number)?;
        let theirs = &partner.description;
        if number == tensor || theirs.shape != ours.shape || theirs.dtype.is_packed() || ours.dtype.is_packed() {
            return None;
        }
        Some((number, partner.shards.iter().position(|view| view.rect() == rect)?))
    }

    /// Bytes of the tensors and blobs of a slot.
    pub(super) fn slot_bytes(&self, slot: u32) -> u64 {
        let views = self.tensors.iter().filter(|tensor| tensor.slot == slot).flat_map(|tensor| &tensor.shards);
        let blobs = self.blobs.iter().filter(|blob| blob_slot(blob.rank) == slot);
        views.map(|view| view.data().len() as u64).chain(blobs.map(|blob| blob.data.len() as u64)).sum()
    }

    /// Slots that hold a tensor or a blob, ascending.
    pub(super) fn slots(&self) -> BTreeSet<u32> {
        let tensors = self.tensors.iter().filter(|t| t.description.alias_of.is_none()).map(|t| t.slot);
        tensors.chain(self.blobs.iter().map(|blob| blob_slot(blob.rank))).collect()
    }

    /// Stored form of the directory.
    pub(super) fn directory(&self) -> Result<Vec<u8>> {
        let rows: Vec<(DirectoryTensor, Vec<DirectoryShard>)> = self
            .tensors
            .iter()
            .map(|tensor| {
                let shards = tensor.shards.iter().map(|view| DirectoryShard { rect: view.rect().clone(), slot: tensor.slot });
                (tensor.description.clone(), shards.collect())
            })
            .collect();
        Directory::encode(&rows)
    }
}

/// Whether the values prove that one shard is the 32-bit master of another: a sample rounds to it.
fn is_master_of(master: &TensorView<'_>, model: &TensorView<'_>) -> bool {
    let is_f16 = model.dtype() == Dtype::F16;
    let are_floats = master.dtype() == Dtype::F32 && (is_f16 || model.dtype() == Dtype::Bf16);
    are_floats && rounds_to(master.data(), model.data(), is_f16)
}

/// The slot of a rank's tensors of a role, for a state of `state_bytes`. A small state is encoded in one window, in which
/// the order of the casks does not matter. It gets fewer casks, because each costs requests.
pub(crate) fn slot_of_role(state_bytes: u64) -> fn(u32, &str) -> u32 {
    if state_bytes > SAVE_WINDOW_BYTES { role_slot } else { tensor_slot }
}

/// Checks that views of one name are shards of one tensor.
fn check_group(group: &[&TensorView<'_>], limits: &Limits, rank: Option<u32>) -> Result<()> {
    let Some(first) = group.first() else { return Ok(()) };
    let fail = |message: String| Err(Error::invalid(message).tensor(first.name()));
    Limits::check(first.name().len() as u64, limits.max_name_bytes, "length of the name").map_err(|e| e.tensor(first.name()))?;
    Limits::check(first.shape().len() as u64, limits.max_dimensions, "number of dimensions").map_err(|e| e.tensor(first.name()))?;
    if first.name().starts_with("tc.") {
        return fail("names that start with `tc.` are reserved".into());
    }
    for view in group {
        if view.dtype() != first.dtype() || view.shape() != first.shape() || view.role() != first.role() || view.param() != first.param() {
            return fail("given twice, with another dtype, shape, role or param".into());
        }
    }
    let whole = Rect::whole(first.shape());
    if group.len() > 1 && group.iter().any(|view| *view.rect() == whole) {
        return fail("given twice: a name stands for one tensor".into());
    }
    let rects: Vec<_> =
        group.iter().filter(|view| first.shape().contains(&0) || !view.data().is_empty()).map(|view| view.rect().clone()).collect();
    match rank {
        None => check_tiles(first.name(), first.shape(), &rects),
        Some(_) => Ok(()),
    }
}

/// Checks that shards cover their tensor without overlap.
pub(super) fn check_tiles(name: &str, shape: &[u64], rects: &[Rect]) -> Result<()> {
    if tiles(shape, rects)? {
        return Ok(());
    }
    let count = rects.len();
    let shape = crate::tensor::format_shape(shape);
    Err(Error::invalid(format!("its {count} shards do not tile shape {shape} exactly: one is missing, or two overlap")).tensor(name))
}
