//! Reads one copy of a state: a slot of the arena, or a snapshot.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rayon::prelude::*;
use tensorcask::{Blob, Dtype, Error, Metadata, ReadRequest, Rect, Result, Slice, Snapshot, TensorView, is_writers_blob};

use super::request::{Buffers, RestoreRequest, byte_count};
use super::restored::{Elements, Restored, RestoredTensor, Source};
use crate::arena::Arena;
use crate::arena::image::EXTENT_BYTES;

/// Reads the raw state in a slot.
pub(crate) fn read_slot<'a>(arena: &'a Arena, slot: usize, request: &mut RestoreRequest<'_>) -> Result<Restored<'a>> {
    let stored = arena.read(slot)?;
    stored.verify()?;
    let mut known: HashMap<SharedElements, usize> = HashMap::new();
    let views = request.wanted.select_from_slot(stored.tensors()?)?;
    let tensors = views.into_iter().enumerate().map(|(number, view)| {
        let first = *known.entry(SharedElements::of(&view)).or_insert(number);
        RestoredTensor {
            name: view.name().to_owned(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            rect: view.rect().clone(),
            role: view.role().to_owned(),
            param: view.param().to_owned(),
            tied_to: (first != number && !view.data().is_empty()).then_some(first),
            data: Elements::Borrowed(view.data()),
        }
    });
    let tensors = tensors.collect();
    let blobs = stored.blobs();
    let metadata = stored.metadata();
    let mut found = Restored { tensors, blobs, metadata, ..empty(stored.step(), Source::Slot) };
    if let Some(Buffers { buffers, borrowed }) = request.buffers(&found)? {
        let pairs = buffers.into_iter().zip(&found.tensors).filter_map(|(buffer, tensor)| Some((buffer?, &*tensor.data)));
        let pieces = pairs.flat_map(|(buffer, data)| buffer.chunks_mut(EXTENT_BYTES).zip(data.chunks(EXTENT_BYTES)));
        pieces.collect::<Vec<_>>().into_par_iter().for_each(|(buffer, data)| buffer.copy_from_slice(data));
        let placed = found.tensors.iter_mut().zip(borrowed).filter(|(_, borrowed)| !borrowed);
        placed.for_each(|(tensor, _)| tensor.data = Elements::Placed);
    }
    Ok(found)
}

/// Key of tensors that are tied: the same memory, read in the same way. Other tensors may begin in that memory, too: flat views,
/// views of another element type, or another part of a larger tensor.
#[derive(PartialEq, Eq, Hash)]
struct SharedElements {
    address: *const u8,
    bytes: usize,
    dtype: Dtype,
    shape: Vec<u64>,
    rect: Rect,
}

impl SharedElements {
    fn of(view: &TensorView<'_>) -> Self {
        let data = view.data();
        let address = data.as_ptr();
        let bytes = data.len();
        let dtype = view.dtype();
        Self { address, bytes, dtype, shape: view.shape().to_vec(), rect: view.rect().clone() }
    }
}

/// Reads the wanted tensors of a snapshot, and all its blobs.
pub(crate) async fn read_snapshot<'a>(snapshot: &Snapshot, source: Source, request: &mut RestoreRequest<'_>) -> Result<Restored<'a>> {
    request.check_agreed(snapshot.record())?;
    let selected = request.wanted.select_from_snapshot(snapshot.tensors())?;
    let mut known: HashMap<(usize, Rect), usize> = HashMap::new();
    let tensors = selected.into_iter().enumerate().map(|(number, selected)| {
        let first = *known.entry((selected.stored, selected.rect.clone())).or_insert(number);
        RestoredTensor {
            rect: selected.rect,
            name: selected.tensor.name,
            dtype: selected.tensor.dtype,
            shape: selected.tensor.shape,
            role: selected.tensor.role,
            param: selected.tensor.param,
            tied_to: (first != number).then_some(first),
            data: Elements::Placed,
        }
    });
    let tensors = tensors.collect();
    let mut names = snapshot.blobs().await?;
    names.retain(|(_, name)| !is_writers_blob(name));
    let wanted: Vec<(u32, &str)> = names.iter().map(|(rank, name)| (*rank, name.as_str())).collect();
    let data = snapshot.read_blobs(&wanted).await?;
    let blobs = names.into_iter().zip(data).map(|((rank, name), data)| Blob { rank, name, data: data.into() }).collect();
    let mut user = snapshot.user().clone();
    user.retain(|key, _| !key.starts_with("tc."));
    let metadata = Metadata { user, file: snapshot.metadata().clone() };
    let mut found = Restored { tensors, blobs, metadata, ..empty(snapshot.step(), source) };
    let of_caller = request.buffers(&found)?;
    let Buffers { mut buffers, borrowed } = of_caller.unwrap_or_else(|| Buffers::all_borrowed(found.tensors.len()));
    // New memory for what the caller borrows, by tensor. Tied tensors share the memory of the first of them that is borrowed.
    let mut holders = HashMap::new();
    let mut memory = BTreeMap::new();
    for (number, tensor) in found.tensors.iter().enumerate().filter(|(number, _)| borrowed.get(*number) == Some(&true)) {
        if let Entry::Vacant(group) = holders.entry(tensor.tied_to.unwrap_or(number)) {
            group.insert(number);
            memory.insert(number, new_memory(tensor)?);
        }
    }
    for (number, bytes) in &mut memory {
        if let Some(buffer) = buffers.get_mut(*number) {
            *buffer = Some(bytes);
        }
    }
    read_into(snapshot, &found.tensors, buffers).await?;
    let memory: BTreeMap<usize, Arc<Vec<u8>>> = memory.into_iter().map(|(number, bytes)| (number, Arc::new(bytes))).collect();
    for (number, (tensor, borrowed)) in found.tensors.iter_mut().zip(borrowed).enumerate() {
        let holder = holders.get(&tensor.tied_to.unwrap_or(number)).filter(|_| borrowed);
        if let Some(bytes) = holder.and_then(|holder| memory.get(holder)) {
            tensor.data = Elements::Owned(bytes.clone());
        }
    }
    Ok(found)
}

/// Zeroed memory for a tensor.
fn new_memory(tensor: &RestoredTensor<'_>) -> Result<Vec<u8>> {
    let bytes = byte_count(tensor.dtype, &tensor.rect).ok_or_else(|| Error::limit("the tensor is too large").tensor(&tensor.name))?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).map_err(|e| Error::limit(format!("cannot allocate {bytes} bytes")).tensor(&tensor.name).source(e))?;
    buffer.resize(bytes, 0u8);
    Ok(buffer)
}

/// Reads tensors into their buffers. Reads tied tensors once and copies them.
async fn read_into(snapshot: &Snapshot, tensors: &[RestoredTensor<'_>], mut buffers: Vec<Option<&mut [u8]>>) -> Result<()> {
    // For each group of tied tensors, the first one that has a buffer.
    let mut filled: HashMap<usize, usize> = HashMap::new();
    let mut requests = Vec::new();
    let mut copies = Vec::new();
    for (number, (tensor, buffer)) in tensors.iter().zip(&mut buffers).enumerate() {
        let Some(buffer) = buffer.as_deref_mut() else { continue };
        match filled.entry(tensor.tied_to.unwrap_or(number)) {
            Entry::Occupied(known) => copies.push((*known.get(), number)),
            Entry::Vacant(entry) => {
                entry.insert(number);
                let rect = &tensor.rect;
                let ranges = rect.offset.iter().zip(&rect.shape).map(|(&start, &extent)| start..start.saturating_add(extent));
                let slice = Slice::ranges(ranges.collect::<Vec<_>>());
                requests.push(ReadRequest { name: tensor.name.as_str(), slice, out: buffer });
            }
        }
    }
    snapshot.read_many_into(requests).await?;
    for (from, to) in copies {
        let (before, after) = buffers.split_at_mut(to);
        if let (Some(Some(from)), Some(Some(to))) = (before.get(from), after.first_mut()) {
            to.copy_from_slice(from);
        }
    }
    Ok(())
}

fn empty<'a>(step: u64, source: Source) -> Restored<'a> {
    let metadata = Metadata::default();
    Restored { step, source, passed_over: Vec::new(), tensors: Vec::new(), blobs: Vec::new(), metadata, seconds: 0.0 }
}
